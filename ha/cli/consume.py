"""`ha consume`: prints the messages of a topic, oldest first within each queue."""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import Annotated, Any

import anyio
import msgspec
from cyclopts import Parameter

from ha.cli.exits import EXIT_DONE, EXIT_REFUSED, UsageError
from ha.cli.flags import LOCAL_CLIENT, ClientFlags
from ha.cli.showing import safe, safe_json, warnings_shown
from ha.cli.unreachable import explain_unreachable
from ha.client import (
    Client,
    ClientOptions,
    MessageQueue,
    PullConsumer,
    PushConsumer,
    PushOptions,
    ReadFrom,
    ReceivedMessage,
    StartFrom,
)
from ha.client.queue_requests import UNAVAILABLE_CODES
from ha.client.reading import pull_on
from ha.client.subscription import wanted_tags
from ha.errors import BrokerError, ClientError, ConnectionFailed, RemoteProtocolError, RequestTimedOut, RetryLater
from ha.protocol.compression import BODY_SIZE_MAX

LONG_POLL_S = 15.0
RECONNECT_PAUSE_S = 1.0
EMPTY_PULL_MIN_S = 0.1
"""If a pull returns nothing new in less than this time, in seconds, the next one is delayed by RECONNECT_PAUSE_S."""
PULL_COUNT = 256
GROUP = "halog-cli"
_STARTS = {"first": StartFrom.FIRST, "last": StartFrom.LAST}


def consume(
    topic: str,
    /,
    *,
    from_: Annotated[
        str, Parameter(name="--from", help="Start: first, last, committed (by an earlier --commit), or a queue offset.")
    ] = "first",
    follow: Annotated[bool, Parameter(negative=(), help="Wait for new messages until Ctrl-C.")] = False,
    limit: Annotated[int | None, Parameter(help="Stop after this many messages.")] = None,
    tags: Annotated[str, Parameter(help="Only messages with these tags, separated by '||'.")] = "*",
    queue: Annotated[int | None, Parameter(help="Only queues with this queue ID.")] = None,
    broker: Annotated[
        str, Parameter(help="Broker to read from: suggested, master, slave, or a brokerId.")
    ] = "suggested",
    group: Annotated[
        str | None,
        Parameter(help="Join this consumer group and consume its unconsumed messages."),
    ] = None,
    commit: Annotated[bool, Parameter(negative=(), help="Commit the offsets at the end, also after Ctrl-C.")] = False,
    json: Annotated[bool, Parameter(negative=(), help="Print each message as one line of JSON.")] = False,
    max_message_size: Annotated[
        int, Parameter(help="Maximum size of a decompressed body in bytes (the brokers' maxMessageSize).")
    ] = BODY_SIZE_MAX,
    client: ClientFlags = LOCAL_CLIENT,
) -> int:
    """Print the messages of TOPIC: each body and a newline, or all fields with --json (bodies that are not UTF-8 as
    base64).

    A compressed body that is damaged or too long is reported on stderr; with --group, its message becomes a dead
    letter. With --json, the message is printed with "body_error" instead of a body, and with --group it is consumed.

    Without --follow, the command stops at the ends that the queues had at the start; with --group, at --limit or
    Ctrl-C. With --group, printed messages are consumed, and --from applies only to a new group. Exit codes: 0 success;
    1 a broker rejected a request, or a body could not be shown; 2 usage, or no such topic; 69 no name server or broker
    reachable; 130 interrupted.
    """
    if from_ not in ("first", "last", "committed") and not _is_number(from_):
        raise UsageError(f"--from {from_!r}: accepted are first, last, committed, or a queue offset")
    if broker not in ("suggested", "master", "slave") and not _is_number(broker):
        raise UsageError(f"--broker {broker!r}: accepted are suggested, master, slave, or a brokerId")
    if limit is not None and limit < 1:
        raise UsageError("--limit must be at least 1")
    if max_message_size < 1:
        raise UsageError("--max-message-size must be at least 1")
    if group == "":
        raise UsageError("--group must not be empty")
    try:
        wanted_tags(tags)
    except ValueError as error:
        raise UsageError(f"--tags: {error}") from None
    options = msgspec.structs.replace(client.options(), message_size_max=max_message_size)
    if group is not None:
        if from_ not in _STARTS or commit or queue is not None or broker != "suggested":
            raise UsageError(
                "--group can't be combined with --commit, --queue, --broker, or --from other than first and last"
            )
        member = _Member(topic, group, _STARTS[from_], tags, limit, json)
        anyio.run(member.run, client.addresses(), options, backend="trio")
        return EXIT_DONE
    read_from = int(broker) if _is_number(broker) else ReadFrom(broker)
    work = _Work(topic, from_, follow, limit, tags, queue, commit, json)
    with warnings_shown("ha.client.reading"):
        anyio.run(work.run, client.addresses(), GROUP, read_from, options, backend="trio")
    return EXIT_REFUSED if work.unreadable_count else EXIT_DONE


def _is_number(text: str) -> bool:
    """Returns whether `text` is a whole number of at most 18 digits, as offsets and broker IDs are."""
    return text.isdecimal() and len(text) < 19


class _Work:
    """Reads the queues concurrently and prints their messages."""

    def __init__(
        self,
        topic: str,
        start: str,
        follow: bool,
        limit: int | None,
        tags: str,
        queue_id: int | None,
        commit: bool,
        json: bool,
    ) -> None:
        self.unreadable_count = 0
        self._topic = topic
        self._start = start
        self._follow = follow
        self._left = limit
        self._tags = tags
        self._queue_id = queue_id
        self._commit = commit
        self._json = json
        self._reached: dict[MessageQueue, int] = {}
        self._is_interrupted = False
        self._failing: set[str] = set()
        """Names of brokers that can't be reached, or don't serve pulls at present"""

    async def run(self, servers: list[str], group: str, read_from: ReadFrom | int, options: ClientOptions) -> None:
        async with PullConsumer(servers, group=group, read_from=read_from, options=options) as consumer:
            queues = [q for q in await consumer.queues(self._topic) if self._queue_id in (None, q.queue_id)]
            if not queues:
                which = "" if self._queue_id is None else f" {self._queue_id}"
                raise UsageError(f"topic {self._topic} has no readable queue{which}")
            async with anyio.create_task_group() as everything:
                if self._commit:
                    await everything.start(self._cancel_on_ctrl_c, everything.cancel_scope)
                async with anyio.create_task_group() as tasks:
                    for queue in queues:
                        tasks.start_soon(self._read, consumer, queue, everything.cancel_scope)
                everything.cancel_scope.cancel()
            sys.stdout.buffer.flush()
            if self._commit:
                await self._commit_reached(consumer)
            if self._is_interrupted:
                raise KeyboardInterrupt

    async def _commit_reached(self, consumer: PullConsumer) -> None:
        """Commits the offset reached in each queue. Once a broker can't be reached or does not respond, its other
        queues are skipped. Raises the first error at the end."""
        failure: ClientError | RemoteProtocolError | None = None
        unreachable: set[str] = set()
        for queue, offset in self._reached.items():
            if queue.broker_name in unreachable:
                continue
            try:
                await consumer.commit(queue, offset)
            except (ClientError, RemoteProtocolError) as error:
                failure = failure or error
                if isinstance(error, ConnectionFailed | RequestTimedOut):
                    unreachable.add(queue.broker_name)
        if failure is not None:
            raise failure

    async def _cancel_on_ctrl_c(
        self, everything: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Cancels `everything` on Ctrl-C: a KeyboardInterrupt could leave the client unable to commit."""
        with anyio.open_signal_receiver(signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                self._is_interrupted = True
                everything.cancel()

    async def _read(self, consumer: PullConsumer, queue: MessageQueue, everything: anyio.CancelScope) -> None:
        end = await consumer.max_offset(queue)
        offset = await self._first_offset(consumer, queue, end)
        wait_s = LONG_POLL_S if self._follow else 0.0
        pull = partial(consumer.pull, max_messages=PULL_COUNT, tags=self._tags, wait_s=wait_s)
        while self._follow or offset < end:
            asked_at = anyio.current_time()
            try:
                result = await pull_on(pull, queue, offset)
            except (ConnectionFailed, RequestTimedOut, BrokerError) as error:
                is_rejected = isinstance(error, BrokerError) and error.code not in UNAVAILABLE_CODES
                if not self._follow or is_rejected:
                    raise
                self._show_outage(queue, error)
                await anyio.sleep(RECONNECT_PAUSE_S)
                continue
            self._failing.discard(queue.broker_name)
            for message in result.messages:
                if self._left == 0:
                    return  # the messages of another queue reached the limit
                if not self._follow and message.queue_offset >= end:
                    break
                self._print(message)
                self._reached[queue] = message.queue_offset + 1
                if self._left is not None:
                    self._left -= 1
                    if self._left == 0:
                        everything.cancel()
                        return
            if self._follow:
                sys.stdout.buffer.flush()
            if result.next_offset == offset and not result.messages:
                if not self._follow:
                    reason = f"the queue now ends at queue offset {offset}, before its end at the start, {end}"
                    raise ConnectionFailed(f"{queue.broker_name} queue {queue.queue_id}", reason)
                if anyio.current_time() - asked_at < EMPTY_PULL_MIN_S:
                    # The broker does not support long polling, or a slave is behind: avoid a tight loop.
                    await anyio.sleep(RECONNECT_PAUSE_S)
            offset = result.next_offset if self._follow else min(result.next_offset, end)
            self._reached[queue] = offset

    def _show_outage(self, queue: MessageQueue, error: ClientError) -> None:
        if queue.broker_name not in self._failing:
            self._failing.add(queue.broker_name)
            print(f"ha: {safe(explain_unreachable(error))}; trying again", file=sys.stderr)

    async def _first_offset(self, consumer: PullConsumer, queue: MessageQueue, end: int) -> int:
        if self._start == "last":
            self._reached[queue] = end  # so that --commit skips the backlog even if no message is read
            return end
        if self._start == "committed":
            committed = await consumer.committed_offset(queue)
            if committed is not None:
                return committed
        if self._start.isdecimal():
            return int(self._start)
        return await consumer.min_offset(queue)

    def _print(self, message: ReceivedMessage) -> None:
        if message.body_error is not None and not self._json:
            self.unreadable_count += 1
            _print_body_error(message)
            return
        sys.stdout.buffer.write(_line(message, self._json))


class _Member:
    """Prints the messages assigned to a group member, one at a time."""

    def __init__(self, topic: str, group: str, start: StartFrom, tags: str, limit: int | None, json: bool) -> None:
        self._topic = topic
        self._group = group
        self._start = start
        self._tags = tags
        self._left = limit
        self._json = json
        self._output_error: OSError | None = None

    async def run(self, servers: list[str], options: ClientOptions) -> None:
        self._done = anyio.Event()
        push = PushOptions(concurrency=1, close_grace_s=0.0)
        async with Client(servers, options=options) as client:
            await client.routes.find(self._topic)  # fails at once if the topic does not exist; a consumer would wait
            async with PushConsumer(
                client,
                self._print,
                group=self._group,
                subscriptions={self._topic: self._tags},
                start_from=self._start,
                push=push,
            ):
                with warnings_shown():
                    await self._done.wait()
        if self._output_error is not None:
            raise self._output_error

    async def _print(self, message: ReceivedMessage) -> None:
        if self._done.is_set():
            await anyio.sleep_forever()  # leave the message to another member
        if message.body_error is not None and not self._json:
            _print_body_error(message)
            raise RetryLater(-1)  # the message becomes a dead letter
        try:
            sys.stdout.buffer.write(_line(message, self._json))
            sys.stdout.buffer.flush()
        except OSError as error:  # raised here, it would count as a failure to process the message
            self._output_error = error
            self._done.set()
            await anyio.sleep_forever()
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._done.set()


def _print_body_error(message: ReceivedMessage) -> None:
    queue = message.queue
    where = f"{queue.topic} queue {queue.queue_id} of {queue.broker_name}, queue offset {message.queue_offset}"
    print(f"ha: {safe(f'{where}: {message.body_error}')}", file=sys.stderr)


def _line(message: ReceivedMessage, json: bool) -> bytes:
    return (safe_json(as_json(message)) if json else message.body) + b"\n"


def as_json(message: ReceivedMessage) -> dict[str, Any]:
    """Returns a message's fields for `--json`, with one of `body` (UTF-8), `body_base64` and `body_error`."""
    shown: dict[str, Any] = {
        "topic": message.topic,
        "broker": message.queue.broker_name,
        "queue": message.queue.queue_id,
        "queue_offset": message.queue_offset,
        "physical_offset": message.physical_offset,
        "message_id": message.message_id,
        "offset_message_id": message.offset_message_id,
        "tags": message.tags,
        "keys": message.keys,
        "born_timestamp_ms": message.born_timestamp_ms,
        "store_timestamp_ms": message.store_timestamp_ms,
        "properties": message.properties,
    }
    if message.body_error is not None:
        return shown | {"body_error": message.body_error}
    try:
        shown["body"] = message.body.decode()
    except UnicodeDecodeError:
        shown["body_base64"] = message.body
    return shown
