"""ReceiveMessage: a long poll that pops messages, POP_MESSAGE (200050), and streams them to the client.

Departures from RocketMQ's proxy: the client's settings are not needed, because the request and the group's
configuration contain everything; a client whose deadline is no later than the end of its poll, such as a Rust client,
gets an answer shortly before the deadline, not an error; and messages of push consumers stay invisible for the group's
consumeTimeoutMinute, not for one minute with renewals (in_flight.py). A message of a dead-letter topic is delivered
regardless of its number of attempts; otherwise a group could not consume its own dead letters. Sources:
ReceiveMessageActivity, PopMessageResultFilterImpl.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import trio

from ha.errors import RemoteProtocolError
from ha.grpc import Call
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import parse_header
from ha.protocol.pop import PopMessageRequest, PopMessageResponse
from ha.protocol.popped import Popped, read_popped
from ha.protocol.properties import TAGS
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import DLQ_PREFIX

from .acknowledging import Acknowledging
from .brokers import Brokers, BrokerUnreachable, reading_answer
from .conversion import delivery_attempt, set_message
from .in_flight import InFlight
from .messages import CLASSES, SQL, TAG, Code, milliseconds, set_milliseconds
from .names import group_name, topic_name
from .options import FrontOptions
from .refusal import CallRefused, code_of, reason_of
from .status import with_status

if TYPE_CHECKING:
    from .session import Session

logger = logging.getLogger(__name__)

BORN_NOW = 0
"""Value of bornTime that makes the broker use its own clock; the front's may differ."""
FROM_LAST = 1
"""Value of initMode for a pop: a group without committed offsets begins with new messages."""
ALL_QUEUES = -1
ANSWER_MARGIN_MS = 200
"""Time before a client's deadline at which it gets its answer, in ms."""
BROKER_MARGIN_S = 15.0
"""Time in seconds by which a pop's timeout exceeds its poll time. A broker answers when the record of the pop is
flushed and replicated; it may wait 5 s (syncFlushTimeout) and 3 s (slaveTimeout). Messages that come after the client
has given up are released; those that come after this timeout stay invisible for their whole invisible time."""
TAG_COUNT_MAX = 1024
"""Maximum number of tags in a filter."""
POLLS_STARTING_MAX = 1024
"""Maximum number of pops whose task has not started yet; further ones wait"""


class _Poll(msgspec.Struct, eq=False):
    """A pop, and its response or error once `done` is set; neither if the client is gone. `is_abandoned`: its call has
    ended, so its messages must be released."""

    session: Session
    broker_name: str
    command: RemotingCommand
    timeout_s: float
    group: str
    topic: str
    done: trio.Event
    response: RemotingCommand | None = None
    error: Exception | None = None
    is_abandoned: bool = False


class Receiving:
    """Receives messages for all clients of a front, while `serve` runs.

    A broker continues a pop whose call has ended, and the messages that it then returns must be released. So a pop that
    has to wait runs in a task of `serve`, not in the task of its call.
    """

    def __init__(
        self,
        brokers: Brokers,
        options: FrontOptions,
        wall_clock_ms: Callable[[], int],
        acknowledging: Acknowledging,
        in_flight: InFlight,
    ) -> None:
        self._brokers = brokers
        self._options = options
        self._wall_clock_ms = wall_clock_ms
        self._acknowledging = acknowledging
        self._in_flight = in_flight
        self._polls_in, self._polls_out = trio.open_memory_channel[_Poll](POLLS_STARTING_MAX)

    async def serve(self) -> NoReturn:
        """Sends the pop requests of the calls to the brokers, until cancelled."""
        async with trio.open_nursery() as nursery:
            async for poll in self._polls_out:
                nursery.start_soon(self._run, poll)
        raise AssertionError("ends by cancellation only")

    async def _run(self, poll: _Poll) -> None:
        if poll.is_abandoned:
            return
        response = None
        try:
            response = await self._brokers.invoke(poll.session, poll.broker_name, poll.command, poll.timeout_s)
        except Exception as error:  # the call's task raises it, as if it had awaited the broker itself
            poll.error = error
        self._finish(poll, response)

    def _finish(self, poll: _Poll, response: RemotingCommand | None) -> None:
        """Passes a response to its call, or releases the messages of an abandoned pop."""
        poll.response = response
        poll.done.set()
        if poll.is_abandoned:
            self._release(poll)

    def _release(self, poll: _Poll) -> None:
        """Releases the messages of an abandoned pop, so that they become visible soon."""
        if poll.response is None or poll.response.code != ResponseCode.SUCCESS:
            return
        try:
            popped = read_popped(poll.response, poll.broker_name)
        except RemoteProtocolError as error:
            logger.warning("proxy.pop_malformed broker=%r reason=%r", poll.broker_name, str(error))
        else:
            self._in_flight.abandon(poll.session, poll.group, poll.topic, (each.receipt for each in popped))

    async def _pop(self, poll: _Poll) -> RemotingCommand:
        """Sends a pop and returns the response. If cancelled, the pop's messages are released. Raises
        BrokerUnreachable."""
        if not self._brokers.invoke_nowait(poll.session, poll.broker_name, poll.command, partial(self._finish, poll)):
            await self._polls_in.send(poll)
        try:
            await poll.done.wait()
        except trio.Cancelled:
            poll.is_abandoned = True
            if poll.done.is_set():
                self._release(poll)
            raise
        if poll.error is not None:
            raise poll.error
        if poll.response is None:
            raise BrokerUnreachable("the client is gone")
        return poll.response

    async def receive(self, session: Session, call: Call, request: Any) -> None:
        """Serves a ReceiveMessage. If cancelled, releases the messages to deliver, because they may not have reached
        the client. Raises CallRefused, BrokerUnreachable."""
        group_text, topic = group_name(request.group), topic_name(request.message_queue.topic)
        poll_ms = self._poll_ms(session, call, request)
        group = await self._brokers.group(group_text)
        if group is None:
            raise CallRefused(Code.CONSUMER_GROUP_NOT_FOUND, f"no consumer group {group_text}")
        if request.auto_renew:
            invisible_ms = max(1, group.consume_timeout_minute) * 60_000
        else:
            invisible_ms = self._invisible_ms(request)
        expression, kind, tags = _filter(request.filter_expression)
        broker_name = request.message_queue.broker.name
        header = PopMessageRequest(
            consumer_group=group_text,
            topic=topic,
            queue_id=ALL_QUEUES,
            max_msg_nums=max(1, min(request.batch_size or 1, self._options.receive_count_max)),
            invisible_time=invisible_ms,
            poll_time=poll_ms,
            born_time=BORN_NOW,
            init_mode=FROM_LAST,
            exp_type=kind,
            exp=expression,
            order=group.consume_message_orderly,
            attempt_id=request.attempt_id if request.HasField("attempt_id") else None,
        )
        command = RemotingCommand(RequestCode.POP_MESSAGE, ext_fields=header.to_ext_fields())
        timeout_s = poll_ms / 1000 + BROKER_MARGIN_S
        response = await self._pop(_Poll(session, broker_name, command, timeout_s, group_text, topic, trio.Event()))
        if response.code != ResponseCode.SUCCESS:
            await self._answer_without(call, response)
            return
        with reading_answer():
            received = read_popped(response, broker_name)
            pop_time_ms = parse_header(PopMessageResponse, response.ext_fields).pop_time
        self._acknowledging.set_broker_clock(broker_name, pop_time_ms)
        kept, unwanted, dead = [], [], []
        for popped in received:
            if tags and popped.properties.get(TAGS) not in tags:
                unwanted.append(popped)
            elif popped.attempts_before > group.retry_max_times and not topic.startswith(DLQ_PREFIX):
                dead.append(popped)
            else:
                kept.append(popped)
        try:
            for popped in unwanted:
                await _settle(popped, self._acknowledging.acknowledge(session, group_text, topic, popped.receipt))
            for popped in dead:
                await _settle(popped, self._acknowledging.bury(session, group_text, topic, popped.receipt))
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            self._in_flight.abandon(session, group_text, topic, (popped.receipt for popped in kept))
            raise
        if not kept:
            await self.finish(call, Code.MESSAGE_NOT_FOUND, "no match message")
            return
        if request.auto_renew:
            self._add(session, group_text, topic, kept)
        try:
            await call.respond_all(self._messages(request.message_queue.topic, kept))
        except trio.Cancelled:  # counts as a delivery: the client may be unable to receive one of them
            if not request.auto_renew:
                self._add(session, group_text, topic, kept)
            self._in_flight.release(session, (popped.receipt for popped in kept))
            raise

    def _add(self, session: Session, group: str, topic: str, kept: list[Popped]) -> None:
        for popped in kept:
            self._in_flight.add(session, group, topic, popped.receipt)

    def _messages(self, topic: Any, kept: list[Popped]) -> Iterator[bytes]:
        """Yields the encoded messages of a response: status OK, the messages, and the delivery time."""
        yield _status(Code.OK, "OK")
        for popped in kept:
            response = CLASSES["ReceiveMessageResponse"]()
            message = response.message
            set_message(message, popped.record, popped.properties, topic, self._options.unpacked_size_max)
            system = message.system_properties
            system.receipt_handle = popped.receipt.encode()
            system.delivery_attempt = delivery_attempt(popped.attempts_before)
            set_milliseconds(system.invisible_duration, popped.receipt.handle.invisible_ms)
            yield response.SerializeToString()
        yield self._end()

    async def _answer_without(self, call: Call, response: RemotingCommand) -> None:
        """Answers a call whose pop returned no messages. Raises CallRefused if the broker refused the pop."""
        if response.code in (ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND):
            await self.finish(call, Code.MESSAGE_NOT_FOUND, "no new message")
        elif response.code == ResponseCode.POLLING_FULL:
            await self.finish(call, Code.TOO_MANY_REQUESTS, "polling full")
        else:
            raise CallRefused(code_of(response), reason_of(response))

    async def finish(self, call: Call, code: Code, message: str) -> None:
        """Answers a call with a status and no messages."""
        await call.respond_all((_status(code, message), self._end()))

    def _end(self) -> bytes:
        """Returns the encoded last message of a response, with the delivery time."""
        response = CLASSES["ReceiveMessageResponse"]()
        set_milliseconds(response.delivery_timestamp, self._wall_clock_ms())
        data: bytes = response.SerializeToString()
        return data

    def _poll_ms(self, session: Session, call: Call, request: Any) -> int:
        """Returns how long the broker may wait for messages, in ms.

        This is the request's long polling timeout or, if it has none, the time to the client's deadline minus half the
        request timeout in the client's settings. It is limited to `polling_ms_min` and `polling_ms_max`, and then so
        that the wait ends ANSWER_MARGIN_MS before the deadline; 0 if that time has passed.
        """
        options = self._options
        left_ms = int(min(call.timeout_s, 3600) * 1000) - ANSWER_MARGIN_MS
        if request.HasField("long_polling_timeout"):
            poll_ms = milliseconds(request.long_polling_timeout)
        else:
            patience_ms = milliseconds(session.settings.request_timeout) if session.settings is not None else 0
            poll_ms = left_ms - patience_ms // 2
        poll_ms = max(options.polling_ms_min, min(poll_ms, options.polling_ms_max))
        return max(0, min(poll_ms, left_ms))

    def _invisible_ms(self, request: Any) -> int:
        options, invisible_ms = self._options, milliseconds(request.invisible_duration)
        if invisible_ms < options.invisible_ms_min:
            reason = f"the invisibleTime is too small. min is {options.invisible_ms_min}"
            raise CallRefused(Code.ILLEGAL_INVISIBLE_TIME, reason)
        if invisible_ms > options.invisible_ms_max:
            reason = f"the invisibleTime is too large. max is {options.invisible_ms_max}"
            raise CallRefused(Code.ILLEGAL_INVISIBLE_TIME, reason)
        return invisible_ms


def _filter(given: Any) -> tuple[str, str, frozenset[str]]:
    """Returns the filter expression, its type, and the tags that it lists (empty for SQL92 and for "*"). Raises
    CallRefused if the type is unknown, or if the expression has no tags or more than TAG_COUNT_MAX."""
    expression = given.expression.strip()
    if given.type == SQL:
        return expression, "SQL92", frozenset()
    if given.type not in (0, TAG):
        raise CallRefused(Code.ILLEGAL_FILTER_EXPRESSION, f"filter type {given.type}")
    if expression in ("", "*"):
        return "*", "TAG", frozenset()
    tags = frozenset(tag for part in expression.split("||") if (tag := part.strip()))
    if not tags or len(tags) > TAG_COUNT_MAX:
        raise CallRefused(Code.ILLEGAL_FILTER_EXPRESSION, f"{len(tags)} tags in {expression[:80]!r}")
    return expression, "TAG", tags


def _status(code: Code, message: str) -> bytes:
    data: bytes = with_status("ReceiveMessageResponse", code, message).SerializeToString()
    return data


async def _settle(popped: Popped, request: Awaitable[object]) -> None:
    """Awaits `request`, which acknowledges a message or makes it a dead letter. Only logs a failure.

    If the request fails, the message is delivered again after its invisible time. The other messages of the pop are
    delivered in any case.
    """
    try:
        await request
    except (CallRefused, BrokerUnreachable) as error:
        logger.info("proxy.settling_failed topic=%r reason=%r", popped.record.topic, str(error))
