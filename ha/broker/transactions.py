"""Transactions: half messages wait until their producer ends them (END_TRANSACTION, 37), and are checked if it doesn't.

    1  A half message is stored in RMQ_SYS_TRANS_HALF_TOPIC (detour.py), which no consumer reads.
    2  END_TRANSACTION commits it or rolls it back. A commit stores the message in its own topic, with the half
       message's physical offset as preparedTransactionOffset. In both cases an op message records that the half message
       is ended (op_writer.py).
    3  Every transactionCheckInterval, half messages that are open and old enough are stored again, and a producer of
       their group is asked with CHECK_TRANSACTION_STATE (39). It answers with END_TRANSACTION about the copy. After
       transactionCheckMax checks, a half message is given up: it is moved to TRANS_CHECK_MAX_TIME_TOPIC.

With access control, a producer needs PUB on the message's topic to send END_TRANSACTION and to be asked.

Progress is stored as the offsets of consumer group CID_RMQ_SYS_TRANS in both topics, as in RocketMQ, so that RocketMQ
and halog can continue from each other's store. It is committed once the copies and op messages of all half messages
before it are flushed and replicated. After a crash a message may be committed twice or checked once more, but none is
lost. Two commits of one half message store two messages, as in RocketMQ. Sources: EndTransactionProcessor,
TransactionalMessageServiceImpl, TransactionalMessageCheckService.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import count

import msgspec
import trio

from ha.acl import Right
from ha.broker.batch_reader import BATCH_COUNT_MAX, BatchReader, LossDetector, split
from ha.broker.core import BrokerCore
from ha.broker.detour import real_message
from ha.broker.half_messages import Verdict, given_up, judge, next_copy, question
from ha.broker.half_queue import OP_TAG, HalfWindow, OpReads, Progress, ProgressMarks, decode_op
from ha.broker.limited_log import LimitedLog
from ha.broker.op_writer import OpWriter
from ha.broker.put_request import PutRequest
from ha.broker.queue_read import ReadStatus
from ha.broker.queue_times import bounds
from ha.broker.transaction_ends import TransactionEnds
from ha.errors import DiskFailed, LocalProtocolError, RemoteProtocolError
from ha.protocol.properties import PRODUCER_GROUP, REAL_TOPIC, find_property
from ha.protocol.record import MessageRecord, decode_record, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import GIVEN_UP_TOPIC, HALF_TOPIC, OP_TOPIC
from ha.remoting import RemotingConnection
from ha.store.consume_queue import ConsumeQueue
from ha.store.dispatch import Arrival

logger = logging.getLogger(__name__)

PROGRESS_GROUP = "CID_RMQ_SYS_TRANS"
OUTBOX_BYTES_MAX = 4 * 1024 * 1024
"""Maximum unsent bytes on a producer's connection at which it is still asked about its transactions."""
OUTBOX_WAIT_S = 1.0
"""Maximum wait, after a batch of checks, until the producers can take more."""


class TransactionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and `open_count`, the present number of open half messages; 0 on a slave.

    unasked_count: checks for which a half message was stored again, but which were not sent, as the group had no
    connected producer that reads fast enough and may publish to the topic.
    dropped_count: half messages that were dropped because they could not be read or stored.
    """

    open_count: int
    committed_count: int
    rolled_back_count: int
    asked_count: int
    unasked_count: int
    given_up_count: int
    dropped_count: int


class _Move(PutRequest, kw_only=True, gc=False):
    """The put of the next copy of a half message."""

    record: MessageRecord
    verdict: Verdict


class TransactionService:
    """Checks half messages in `serve`, on a master. `ends` answers END_TRANSACTION (37); the store calls
    `on_arrivals`."""

    def __init__(self, core: BrokerCore) -> None:
        options = core.options
        self._store = core.store
        self._put = core.puts
        self._topics = core.tables.topics
        self._offsets = core.tables.offsets
        self._clients = core.tables.clients
        self._options = options
        self._standing = core.standing
        self._guard = core.guard
        self._wall_clock_ms = core.world.wall_clock_ms
        self._host = encode_host(options.host, options.port)
        self._ops = OpWriter(core)
        self._window = HalfWindow(0)
        self._op_reads = OpReads(0)
        self._marks = ProgressMarks()
        self._arrived = trio.Event()
        self._next_producer = count()
        self._reader = BatchReader(core.store)
        self._losses = LossDetector(self._reader)
        self._log = LimitedLog(logger, logging.WARNING)
        self.ends = TransactionEnds(core, self._note_ended)
        self._asked_count = 0
        self._unasked_count = 0
        self._given_up_count = 0
        self._dropped_count = 0

    def statistics(self) -> TransactionStatistics:
        """Returns a snapshot of the counters."""
        _, end = bounds(self._queue(HALF_TOPIC))
        return TransactionStatistics(
            open_count=0 if self._standing.is_slave else self._window.open_count(end),
            committed_count=self.ends.committed_count,
            rolled_back_count=self.ends.rolled_back_count,
            asked_count=self._asked_count,
            unasked_count=self._unasked_count,
            given_up_count=self._given_up_count,
            dropped_count=self._dropped_count,
        )

    def _queue(self, topic: str) -> ConsumeQueue | None:
        return self._store.queues.get(topic, 0)

    def _end(self, topic: str) -> int:
        """Returns the end of the topic's queue, which on a new master may not be dispatched yet."""
        return max(bounds(self._queue(topic))[1], self._store.log.next_queue_offset(topic, 0))

    def _note_ended(self, offset: int, waiting: tuple[RemotingConnection, RemotingCommand] | None = None) -> None:
        self._ops.add(self._window.end(offset) or [offset], waiting)

    # ---- progress

    def _load(self) -> None:
        """Starts at the committed progress, or at the beginning of the queues if there is none.

        Progress beyond the end of a queue counts as none: it comes from another log, for example that of a master whose
        slave got its offsets before its messages. This log may lack the later copy of any half message before it.
        """
        progress = {topic: self._offsets.get(PROGRESS_GROUP, topic, 0) or 0 for topic in (HALF_TOPIC, OP_TOPIC)}
        is_beyond = any(offset > self._end(topic) for topic, offset in progress.items())
        starts = []
        for topic, offset in progress.items():
            first, _ = bounds(self._queue(topic))
            start = first if is_beyond else max(offset, first)  # retention may have deleted what was not read yet
            if offset not in (0, start):
                logger.warning("transaction.offset_corrected topic=%s from=%d to=%d", topic, offset, start)
            starts.append(start)
        self._window, self._op_reads = HalfWindow(starts[0]), OpReads(starts[1])
        self._marks = ProgressMarks()

    def step_down(self) -> None:
        """Drops pending op messages, refuses the requests that wait for them, and forgets the progress. Called when
        this broker is no longer the master."""
        self._ops.forget(self._standing.refusal_code, self._standing.refusal)
        self._window, self._op_reads, self._marks = HalfWindow(0), OpReads(0), ProgressMarks()

    async def save(self) -> None:
        """Writes pending op messages, and commits the progress that is flushed and replicated. Called at shutdown; does
        nothing on a slave. Raises DiskFailed."""
        if not self._standing.is_slave:
            await self._ops.write_all()
            await self._settle()

    async def _settle(self) -> None:
        self._window.advance()
        log = self._store.log
        half_offset = self._window.start
        self._marks.note(Progress(log.max_offset.value, half_offset, self._op_reads.needed_from(half_offset)))
        if not self._marks:
            return
        if log.flushed_offset.value < log.max_offset.value and self._store.flusher.failure is None:
            try:
                await self._store.flusher.flush()
            except DiskFailed:
                return  # the store ends the process for it
        progress = self._marks.take(self._put.acknowledgements.replicated_offset)
        if progress is not None:
            self._offsets.commit(PROGRESS_GROUP, HALF_TOPIC, 0, progress.half_offset)
            self._offsets.commit(PROGRESS_GROUP, OP_TOPIC, 0, progress.op_offset)

    # ---- checks

    def on_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Wakes the checks. Called by the store once per dispatched batch; never blocks."""
        if not self._arrived.is_set() and any(arrival.topic == HALF_TOPIC for arrival in arrivals):
            self._arrived.set()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Writes op messages, and checks open half messages every `transaction_check_interval_s` while there are any,
        until cancelled. Raises DiskFailed."""
        self._load()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._ops.serve)
            task_status.started()
            interval_s = self._options.transaction_check_interval_s
            next_at = trio.current_time()
            while True:
                await self._wait_for_open(interval_s)
                next_at += interval_s * max(1.0, -((next_at - trio.current_time()) // interval_s))
                await trio.sleep_until(next_at)
                try:
                    await self._check_all()
                except OSError as error:
                    self._log.write("transaction.read_failed reason=%r", str(error))
                await self._settle()

    async def _wait_for_open(self, interval_s: float) -> None:
        """Waits until there are open half messages; at most `interval_s` if progress is still to be committed."""
        self._arrived = trio.Event()
        self._window.advance()
        queue = self._queue(HALF_TOPIC)
        if queue is None or self._window.start >= queue.max_offset:
            with trio.move_on_after(interval_s if self._marks else float("inf")):
                await self._arrived.wait()

    async def _check_all(self) -> None:
        """Checks the open half messages that are in the queue when it starts, up to the first that is too young."""
        queue = self._queue(HALF_TOPIC)
        if queue is None or not await self._read_ops(queue):
            return
        end = queue.max_offset
        window = self._window
        if window.start < queue.min_offset:
            window.advance_to(queue.min_offset)  # retention deleted open half messages
        offset = window.start
        while (offset := window.next_open(offset)) < end:
            count_max = min(BATCH_COUNT_MAX, window.next_ended(offset, end) - offset)
            read = await self._reader.read(queue, offset, count_max)
            if read.status is ReadStatus.MESSAGE_WAS_REMOVING:
                self._drop(offset, read.next_offset, "no longer in the log")
            elif read.status is not ReadStatus.FOUND:
                if not self._is_lost(HALF_TOPIC, offset):
                    return
                self._drop(offset, offset + 1, "its entry is wrong and its record is not found")
                continue
            elif not await self._check(split(read.body), offset, read.next_offset):
                return
            offset = read.next_offset
            await trio.lowlevel.checkpoint()

    async def _read_ops(self, half_queue: ConsumeQueue) -> bool:
        """Reads op messages and ends their half messages; returns False if one can't be read yet."""
        queue = self._queue(OP_TOPIC)
        if queue is None:
            return True
        reads = self._op_reads
        while reads.next_offset < queue.max_offset:
            offset = max(reads.next_offset, queue.min_offset)
            read = await self._reader.read(queue, offset)
            if read.status in (ReadStatus.FOUND, ReadStatus.MESSAGE_WAS_REMOVING):
                half_end = half_queue.max_offset  # after the read: half messages are dispatched before their op message
                ended = [half for raw in split(read.body) for half in self._ended_by(raw) if half < half_end]
                if not all(self._window.end(half) for half in ended):
                    return True  # beyond the window (`HalfWindow.end`): read this range again later
                reads.note(read.next_offset, max(ended, default=-1))
            elif self._is_lost(OP_TOPIC, offset):
                reads.note(offset + 1, -1)
            else:
                return False
            await trio.lowlevel.checkpoint()
        return True

    def _ended_by(self, raw: bytes) -> list[int]:
        try:
            record = decode_record(raw)
            if find_property(record.properties, b"TAGS") == OP_TAG:
                return decode_op(record.body)
            reason = "another tag"
        except (RemoteProtocolError, ValueError) as error:
            reason = str(error)
        self._log.write("transaction.op_invalid reason=%r", reason)
        return []

    async def _check(self, found: Iterable[bytes], offset: int, next_offset: int) -> bool:
        """Checks the records from `offset` to `next_offset`; returns False if this pass ends here."""
        now_ms = self._wall_clock_ms()
        moves: list[_Move] = []
        is_end = False
        for raw in found:
            try:
                record = decode_record(raw)
            except RemoteProtocolError:
                continue  # the gap is dropped below
            if record.queue_offset > offset:
                self._drop(offset, record.queue_offset, "damaged")
            offset = record.queue_offset
            if not self._window.is_ended(offset):
                move = self._move(record, now_ms)
                if move is None:
                    is_end = True
                    break
                moves.append(move)
            offset += 1
        else:
            self._drop(offset, next_offset, "damaged")
        return await self._store_moves(moves) and not is_end

    def _move(self, record: MessageRecord, now_ms: int) -> _Move | None:
        """Returns the put of the next copy of `record`; None if it is too young to be checked."""
        options = self._options
        properties = record.property_map()
        verdict = judge(
            properties,
            now_ms - record.born_timestamp_ms,
            timeout_ms=options.transaction_timeout_s * 1000,
            check_times_max=options.transaction_check_max,
            reserved_ms=self._store.options.reserved_h * 3_600_000,
        )
        if verdict is Verdict.WAIT:
            return None
        try:
            real_message(record)
            if verdict is not Verdict.GIVE_UP:
                message = next_copy(record, properties, is_asked=verdict is Verdict.ASK)
                return _Move(messages=(message,), waits=False, record=record, verdict=verdict)
        except (ValueError, LocalProtocolError):
            pass  # no producer could answer a check of it
        return self._giving_up(record)

    def _giving_up(self, record: MessageRecord) -> _Move:
        message = given_up(record, record.property_map())
        return _Move(messages=(message,), waits=False, record=record, verdict=Verdict.GIVE_UP)

    async def _store_moves(self, moves: list[_Move]) -> bool:
        """Stores half messages again and sends the checks; returns False if some could not be stored."""
        if any(move.verdict is Verdict.GIVE_UP for move in moves):
            created = await self._topics.ensure(GIVEN_UP_TOPIC, 1)
            if isinstance(created, str):
                self._log.write("transaction.put_failed reason=%r", created)
                return False
        if moves:
            await self._put.settle(moves)
        asked: dict[RemotingConnection, None] = {}
        hopeless = []
        is_done = True
        for move in moves:
            record = move.record
            if move.status.is_stored:
                self._moved(move, asked)
            elif not move.is_hopeless:
                self._log.write("transaction.put_failed reason=%r", move.remark)
                is_done = False
            elif move.verdict is Verdict.GIVE_UP:
                self._drop(record.queue_offset, record.queue_offset + 1, move.remark)
            else:
                hopeless.append(self._giving_up(record))
        with trio.move_on_after(OUTBOX_WAIT_S):
            for connection in asked:
                await connection.is_ready()
        return (not hopeless or await self._store_moves(hopeless)) and is_done

    def _moved(self, move: _Move, asked: dict[RemotingConnection, None]) -> None:
        record = move.record
        if move.verdict is Verdict.GIVE_UP:
            self._given_up_count += 1
            self._window.end(record.queue_offset)
            self._log.write("transaction.given_up queue_offset=%d", record.queue_offset)
            return
        result = move.results[0]
        ended = self._window.move(record.queue_offset, result.queue_offset)
        if ended:  # while it was stored again
            self._ops.add(ended)
            return
        if move.verdict is not Verdict.ASK:
            return
        properties = record.property_map()
        producer = self._producer(properties.get(PRODUCER_GROUP, ""), properties.get(REAL_TOPIC, ""))
        if producer is None:
            self._unasked_count += 1
            return
        command = question(
            record,
            move.messages[0],
            queue_offset=result.queue_offset,
            physical_offset=result.physical_offset,
            broker_name=self._options.broker_name,
            host=self._host,
        )
        producer.send_oneway(command)
        asked[producer] = None
        self._asked_count += 1

    def _producer(self, group: str, topic: str) -> RemotingConnection | None:
        """Returns the next of the group's producers, round robin, that reads fast enough and may publish `topic`; None
        if there is none."""
        guard = self._guard
        members = [
            connection
            for connection, member in self._clients.producer_group(group).items()
            if not connection.is_closed
            and connection.outbox_bytes <= OUTBOX_BYTES_MAX
            and (guard is None or guard.may(connection, member.access_key, topic, Right.PUB))
        ]
        if not members:
            self._log.write("transaction.no_producer group=%r", group)
            return None
        return members[next(self._next_producer) % len(members)]

    def _is_lost(self, topic: str, offset: int) -> bool:
        """Records a failed read; returns whether to skip the message."""
        if self._losses.is_lost((topic, offset)):
            return True
        self._log.write("transaction.read_failed reason=%r", f"{topic} {offset}")
        return False

    def _drop(self, offset: int, next_offset: int, reason: str) -> None:
        """Drops half messages from `offset` to `next_offset` that are not ended."""
        for each in range(offset, next_offset):
            if not self._window.is_ended(each):
                self._window.end(each)
                self._dropped_count += 1
                self._log.write("transaction.message_dropped reason=%r", reason)
