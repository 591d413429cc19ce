"""Reads and writes the commit topic, in which a sink records its batches.

Records are messages of the topic `commitTopic`. The body is JSON; the sink's name is the tag and the first part of the
key. The sink never deletes records. There are three kinds:

    begin    written by a task before it sends the first row of a topic to brokers for which no record has floors. The
             floors are the current ends of the topic's queues there; no message of the attempt can be before them.
    commit   written by the driver when all tasks are done: the batch's messages as ranges of queue offsets, and the
             queues' ends as the floors of the next batch. A batch is committed when such a record is in the log. One
             without ranges excludes all messages of the batch, if no other one came before it.
    fence    empty. Brokers put records into queues in the order of their commitlog: once a fence can be pulled, so can
             everything stored before it on that broker.

All records of a sink go to one queue, chosen by the sink's name, except fences for a given broker. The other queues are
searched only if that queue has no commit of the sink.
"""

from __future__ import annotations

import logging
from typing import Literal
from zlib import crc32

import anyio
import msgspec

from ha.client import Message, MessageQueue, Producer, PullConsumer, SendResult, SendStatus
from ha.errors import BrokerError, ConnectionFailed, RemoteProtocolError, RequestTimedOut, RouteNotFound, SinkFailed
from ha.protocol.codes import ResponseCode
from ha.protocol.record import decode_records
from ha.spark.source.network_pull import PullSettings, pull_slots, with_retries

_log = logging.getLogger(__name__)

PASSING = frozenset(
    {
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
    }
)
"""Response codes of errors after which a send is repeated: it was not stored, and the cause may be temporary"""
PAUSE_S = 0.2
_WINDOW_ENTRIES = 3200
"""Number of queue entries that are searched at once, from the end of a queue backwards"""
_DISPATCH_S = 1.0
_CLOCKS_APART_MS = 600_000
"""Assumed maximum difference between the clocks of driver and brokers"""

Floors = dict[str, dict[str, dict[int, int]]]
"""topic -> broker name -> queue id -> queue offset"""
Ranges = dict[str, dict[str, dict[int, list[tuple[int, int]]]]]
"""topic -> broker name -> queue id -> sorted [begin, end) of queue offsets"""


class ControlRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of the commit topic. `row_count`: number of messages in `ranges`. `batch` is -1 in a fence,
    `partition` in a commit and a fence."""

    kind: Literal["begin", "commit", "fence"]
    sink: str = ""
    batch: int = -1
    partition: int = -1
    floors: Floors = {}
    ranges: Ranges = {}
    row_count: int = 0


class History(msgspec.Struct, frozen=True):
    """The records of a sink in the commit topic: its last commit (None if there is none) and the begin records
    of later batches."""

    commit: ControlRecord | None
    begins: tuple[ControlRecord, ...]

    @property
    def committed_batch(self) -> int:
        """Id of the last committed batch; -1 if there is none."""
        return self.commit.batch if self.commit is not None else -1

    def floors(self, topic: str, batch: int, partition: int) -> dict[str, dict[int, int]]:
        """Returns broker name -> queue id -> queue offset in `topic` before which no message of the part can be.

        The result lacks brokers for which there is no record: no attempt at the part can have sent to them.
        """
        floors = dict(self.commit.floors.get(topic, {})) if self.commit is not None else {}
        for begin in self.begins:  # the oldest is first
            if begin.batch == batch and begin.partition == partition:
                floors = begin.floors.get(topic, {}) | floors
        return floors

    def begin_count(self, batch: int, partition: int) -> int:
        """Returns the number of begin records of the part; an attempt that sends to several topics writes several."""
        return sum(begin.batch == batch and begin.partition == partition for begin in self.begins)


def decode_control(body: bytes) -> ControlRecord | None:
    """Decodes the body of a message of the commit topic; None if it is not a valid record."""
    try:
        return msgspec.json.decode(body, type=ControlRecord)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


class CommitTopic:
    """Reads and writes the commit topic. `timeout_s`: maximum time for storing one record, and for retrying one
    read."""

    def __init__(self, producer: Producer, consumer: PullConsumer, topic: str, timeout_s: float) -> None:
        self._producer = producer
        self._consumer = consumer
        self._topic = topic
        self._timeout_s = timeout_s
        self._settings = PullSettings(retry_s=timeout_s, fail_on_data_loss=False)

    async def history(self, sink: str, since_ms: int | None = None) -> History:
        """Returns the records of `sink`; none if the topic does not exist.

        `since_ms`: a time (ms since 1970) before which the sink has no records; None if unknown. Raises SinkFailed if a
        record can't be decoded, or if the name servers know no broker; ClientError; RecordsGone as `pull_slots` does.
        """
        queues = await existing_queues(self._consumer, self._topic)
        if not queues:
            return History(None, ())
        home = _home(sink, queues)
        history = await self._history_in([home], sink, since_ms)
        if history.commit is None:
            others = [queue for queue in queues if queue != home]
            older = await self._history_in(others, sink, since_ms)
            history = History(older.commit, older.begins + history.begins)
        return history

    async def append(
        self,
        record: ControlRecord,
        accepted: frozenset[SendStatus] | None = None,
        *,
        queue: MessageQueue | None = None,
    ) -> SendResult:
        """Stores `record`, in its sink's queue unless another is given; possibly more than once, which is harmless.

        `accepted`: repeats until the broker answers with one of these statuses (None: any). Raises SinkFailed if that
        takes longer than the timeout, if the broker refuses the record, or if the topic has no writable queue.
        """
        body = msgspec.json.encode(record)
        message = Message(
            self._topic,
            body,
            tags=record.sink or record.kind,
            keys=f"{record.sink}/{record.batch}" if record.sink else (),
        )
        give_up = anyio.current_time() + self._timeout_s
        pause_s = PAUSE_S
        while True:
            try:
                queues = [queue] if queue is not None else await self._producer.queues(self._topic)
                if not queues:
                    raise SinkFailed(f"commitTopic: no broker has a queue of {self._topic} that can be written to")
                result = await self._producer.send(message, queue=_home(record.sink, queues))
                if accepted is None or result.status in accepted:
                    return result
                reason = _weak_reason(result, accepted)
            except (ConnectionFailed, RequestTimedOut) as error:
                reason = str(error)
            except BrokerError as error:
                if error.code not in PASSING:
                    raise SinkFailed(
                        f"commitTopic: a {record.kind} record can't be stored in {self._topic}: {error}"
                        + _creation_hint(error, self._topic)
                    ) from None
                reason = str(error)
            if anyio.current_time() > give_up:
                raise SinkFailed(
                    f"a {record.kind} record could not be stored in {self._topic} within {self._timeout_s:g} s "
                    f"(sendTimeout): {reason}"
                )
            _log.info("sink.record_repeated kind=%s sink=%s reason=%r", record.kind, record.sink, reason)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    async def fence(self, broker_name: str, accepted: frozenset[SendStatus] | None = None) -> None:
        """Waits until everything that `broker_name` stored before this call can be pulled.

        With `accepted`, also until a record stored there after the call has one of these statuses: brokers flush and
        replicate in order, so everything before it is then as safe. Errors as in `append` and `wait_pullable`.

        If the commit topic has no queue there, raises SinkFailed with `accepted`, and otherwise only waits a second.
        """
        queues = await with_retries(lambda: self._producer.queues(self._topic), self._timeout_s)
        queues = [queue for queue in queues if queue.broker_name == broker_name]
        if queues:
            await self.wait_pullable(await self.append(ControlRecord("fence"), accepted, queue=queues[0]))
        elif accepted is None:
            await anyio.sleep(_DISPATCH_S)  # no fence can be stored there; brokers dispatch within milliseconds
        else:
            raise SinkFailed(
                f"commitTopic: {self._topic} has no queue on broker {broker_name}, so it is unknown how safe "
                "the rows stored there are; create the topic there"
            )

    async def wait_pullable(self, result: SendResult) -> None:
        """Waits until the stored record, and so everything before it on that broker, can be pulled.

        Raises SinkFailed or ClientError after the timeout.
        """
        give_up = anyio.current_time() + self._timeout_s
        while True:
            try:
                if await self._consumer.max_offset(result.queue) > result.queue_offset:
                    return
            except (ConnectionFailed, RequestTimedOut, BrokerError):
                if anyio.current_time() > give_up:
                    raise
            if anyio.current_time() > give_up:
                raise SinkFailed(f"{result.queue.broker_name} stored a record that can't be pulled: is it dispatching?")
            await anyio.sleep(0.01)

    async def _history_in(self, queues: list[MessageQueue], sink: str, since_ms: int | None) -> History:
        commit: ControlRecord | None = None
        begins: list[ControlRecord] = []
        for queue in queues:
            records = await self._look_back(queue, sink, since_ms)
            begins += [record for record in records if record.kind == "begin"]
            for record in records:
                if record.kind == "commit" and (commit is None or record.batch > commit.batch):
                    commit = record
        last = commit.batch if commit is not None else -1
        return History(commit, tuple(begin for begin in begins if begin.batch > last))

    async def _look_back(self, queue: MessageQueue, sink: str, since_ms: int | None) -> list[ControlRecord]:
        """Returns the sink's records of one queue, oldest first, back to a commit if there is one."""
        retry_s = self._timeout_s
        end = await with_retries(lambda: self._consumer.max_offset(queue), retry_s)
        if since_ms is not None:
            time_ms = since_ms - _CLOCKS_APART_MS
            low = await with_retries(lambda: self._consumer.offset_for_time(queue, time_ms), retry_s)
        else:
            low = await with_retries(lambda: self._consumer.min_offset(queue), retry_s)
        found: list[ControlRecord] = []
        while end > low:
            begin = max(low, end - _WINDOW_ENTRIES)
            records = await self._read(queue, begin, end, sink)
            found = records + found
            if any(record.kind == "commit" for record in records):
                break
            end = begin
        return found

    async def _read(self, queue: MessageQueue, begin: int, end: int, sink: str) -> list[ControlRecord]:
        settings = msgspec.structs.replace(self._settings, tags=(sink,))
        records = []
        at = begin
        while at < end:
            for slot in await pull_slots(self._consumer, queue, at, end, settings):
                at = slot.end
                for body in slot.bodies:
                    try:
                        messages = decode_records(body)
                    except RemoteProtocolError as error:
                        raise SinkFailed(f"{self._topic} queue {queue.queue_id} can't be read: {error}") from None
                    for message in messages:
                        record = decode_control(message.body)
                        if record is not None and record.sink == sink and slot.begin <= message.queue_offset < slot.end:
                            records.append(record)
        return records


async def existing_queues(consumer: PullConsumer, topic: str) -> list[MessageQueue]:
    """Returns the queues of `topic`, none if it does not exist. Raises ClientError, or SinkFailed if name servers know
    no broker."""
    try:
        return await consumer.queues(topic)
    except RouteNotFound:
        if not await consumer.broker_names():
            raise SinkFailed(
                f"servers: no broker is registered with the name servers, so it is unknown what {topic} has"
            ) from None
    try:  # the topic does not exist, or its broker has only now registered again
        return await consumer.queues(topic)
    except RouteNotFound:
        return []


def _home(sink: str, queues: list[MessageQueue]) -> MessageQueue:
    return queues[crc32(sink.encode()) % len(queues)]


def _weak_reason(result: SendResult, accepted: frozenset[SendStatus]) -> str:
    names = ", ".join(sorted(status.value for status in accepted))
    why = f" ({result.remark})" if result.remark else ""
    return f"the broker answers {result.status.value}{why}, and acceptStatus takes only {names}"


def _creation_hint(error: BrokerError, topic: str) -> str:
    if isinstance(error, RouteNotFound) or error.code == ResponseCode.TOPIC_NOT_EXIST:
        return f"; the brokers don't create topics automatically: create {topic}, or choose another with commitTopic"
    return ""
