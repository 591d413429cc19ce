"""Keeps the POP state in the log: all pops and acknowledgements since the last record become one record.

    change      `PopState` changes at once; all changes in one turn of the poller (ha/poller.py) or, outside a turn, in
                one pass of the event loop become one record of rmq_sys_halog_pop, or several if they are many. RocketMQ
                writes two per pop and two per acknowledgement
    answer      a request is answered when the record of its change is acknowledged, as a message would be (`call`)
    failure     if a record can't be stored, its changes and all later ones are undone
    snapshot    when much was written since the last one, and before retention deletes records that are needed
    start       a master reads the records since the last snapshot; a slave keeps no state

One record is appended at a time, so that records are in the log in the order of their changes; any number may wait for
acknowledgement. A record is appended at the end of a turn if the log can take it without waiting, otherwise by the
task of `serve`. The group's consumer offset follows once the record is stored, so that it is never ahead of the log.

A broker that becomes master waits until its log is dispatched, so that it reads all acknowledged changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TypeAlias

import trio

from ha.broker.batch_reader import BatchReader, LossDetector, split
from ha.broker.core import BrokerCore
from ha.broker.journal import ACKNOWLEDGED, NO_MASTER, Logged
from ha.broker.limited_log import LimitedLog
from ha.broker.pop.copies import finish_copied
from ha.broker.pop.state import Limits, PopQueue, PopState
from ha.broker.put_request import PutRequest
from ha.broker.queue_read import ReadStatus
from ha.broker.refused import REJECT_REMARK, RefusedError, check_stores
from ha.errors import DamagedBytes, OffsetGone, RemoteProtocolError
from ha.protocol.codes import PutStatus
from ha.protocol.pop_records import (
    OFFSET_COUNT_MAX,
    SNAPSHOT_END_CODE,
    SNAPSHOT_END_PROPERTIES,
    PopRecord,
    decode_pop_record,
    encode_pop_record,
)
from ha.protocol.record import decode_record
from ha.protocol.topic_names import POP_TOPIC
from ha.store.consume_queue import ConsumeQueue
from ha.store.files import is_passing

logger = logging.getLogger(__name__)

PART_BYTES_MAX = 128 * 1024
"""Approximate maximum size of the body of a snapshot part."""
CHANGES_BYTES_MAX = 1024 * 1024
"""Approximate maximum size of the body of a record of changes."""
SNAPSHOT_AFTER_BYTES_MIN = 4 << 20
SNAPSHOT_AFTER_FACTOR = 4
"""Minimum bytes of the changes since the last snapshot, and minimum multiple of its size, at which the next one is
due."""
WAITING_COUNT_MAX = 65_536
"""Maximum number of requests that wait for records; further ones are refused (`Standing.refusal_code`)."""
READY_TIMEOUT_S = 2.0
"""Maximum time in seconds that a request waits for a new master to read its log."""
RELEASE_TIMEOUT_S = 10.0
"""Maximum time in seconds that retention waits for a snapshot."""
PAUSE_S = 0.1
"""Time in seconds before the next attempt after a record could not be stored, or the log could not be read."""
_ENTRY_COUNT = 4096
"""Maximum number of queue entries per read in the search for a snapshot."""

Waiter: TypeAlias = Callable[[Logged], None]


class _RecordPut(PutRequest, kw_only=True, gc=False):
    """The put of one record. `waiters`: callbacks for requests whose changes are in it or in an earlier record, each
    with the number of requests that it answers. `size`: size of its body in bytes."""

    number: int
    waiters: list[tuple[Waiter, int]]
    size: int
    is_done: bool = False


class PopLog:
    """Keeps the POP state in the log. Run `serve` while the broker is a master; retention calls `release`."""

    def __init__(self, core: BrokerCore) -> None:
        options = core.options
        self._core = core
        self._store = core.store
        self._standing = core.standing
        self._poller = core.world.poller
        self._offsets = core.tables.offsets
        self._reader = BatchReader(core.store)
        self._losses = LossDetector(self._reader)
        self._log = LimitedLog(logger)
        self._limits = Limits(
            per_queue=min(options.pop_in_flight_per_queue_max, OFFSET_COUNT_MAX // 2),
            total=options.pop_in_flight_max,
            queue_count=options.offset_key_count_max,
        )
        self._record_bytes_max = min(CHANGES_BYTES_MAX, options.message_size_max // 2, core.store.log.segment_size // 8)
        self._numbers = count()
        self.state: PopState | None = None
        """Current state; None unless this broker is the master and has read its log"""
        self.on_scheduled: Callable[[int], None] = lambda due_ms: None
        """Called with each due time (ms) of messages in flight. Set it before `serve`"""
        self.on_room: Callable[[PopQueue], None] = lambda queue: None
        """Called with each queue as `PopState.mark_full` describes, and with those whose changes were undone. Set it
        before `serve`"""
        self._ready = trio.Event()
        self.failure_count = 0
        """Incremented whenever changes are undone, or lost at the end of a term"""
        self._reset()

    def _reset(self) -> None:
        self.state = None
        self.failure_count += 1
        self._failure = NO_MASTER
        """Outcome of the changes that were undone last, for the requests that made them"""
        self._ready = trio.Event()
        self._some = trio.Event()
        self._is_idle = False
        """Whether `serve` waits for changes, and no record is being appended"""
        self._is_write_due = False
        """Whether the changes are written at the end of the poller's current turn"""
        self._appending: _RecordPut | None = None
        """A record that could not be appended at the end of a turn of the poller, and that `serve` appends"""
        self._waiters: list[tuple[Waiter, int]] = []
        """Callbacks for requests whose changes are not in a record yet, each with the number of requests that it
        answers"""
        self._unanswered: dict[int, _RecordPut] = {}
        self._waiting_count = 0
        self._newest: _RecordPut | None = None
        """The last record of this term"""
        self._is_settled = False
        """Whether `_newest`, and with it all earlier records, was acknowledged"""
        self._is_snapshot_wanted = False
        self._snapshot_done = trio.Event()
        self._snapshot_begin = -1
        """Physical offset of the first part of the newest complete snapshot; -1 if unknown"""
        self._snapshot_bytes = self._bytes_since = 0

    # ---- requests

    def ready_state(self) -> PopState | None:
        """Returns the state; None while a new master reads its log.

        Raises RefusedError if the broker may not store messages, for example because it is not the master, or if
        WAITING_COUNT_MAX requests wait for the log.
        """
        check_stores(self._standing)
        if self._waiting_count >= WAITING_COUNT_MAX:
            raise RefusedError(
                self._standing.refusal_code, f"{REJECT_REMARK} ({WAITING_COUNT_MAX} POP requests wait for the log)"
            )
        return self.state

    async def wait_ready(self) -> PopState:
        """Returns the state. Raises RefusedError as `ready_state` does, and if a new master does not finish reading its
        log within READY_TIMEOUT_S."""
        if self.ready_state() is None:
            with trio.move_on_after(READY_TIMEOUT_S):
                await self._ready.wait()
        state = self.ready_state()
        if state is None:
            raise RefusedError(self._standing.refusal_code, f"{REJECT_REMARK} (the broker still reads its POP log)")
        return state

    async def wait_loaded(self) -> None:
        """Waits until the broker is master and has read its log."""
        await self._ready.wait()

    def call(self, waiter: Waiter, request_count: int = 1, *, since: int | None = None) -> None:
        """Calls `waiter` with the outcome of all earlier changes, once it is known, possibly before returning.

        `request_count`: how many requests `waiter` answers. `since`: `failure_count` at the time of the caller's own
        changes; if changes were undone after that, `waiter` gets the failure. Needed only if the caller has awaited
        something since its changes.
        """
        state = self.state
        if since not in (None, self.failure_count):
            waiter(self._failure)
        elif state is None:
            waiter(NO_MASTER)
        elif self._is_settled and not (state.has_changes or self._waiters):
            waiter(ACKNOWLEDGED if self._standing.has_lease else NO_MASTER)
        else:
            self._waiting_count += request_count
            newest = self._newest
            if newest is None or newest.is_done or state.has_changes or self._waiters:
                self._waiters.append((waiter, request_count))
                self._want_write()
            else:
                newest.waiters.append((waiter, request_count))

    # ---- the service

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reads the log, then writes changes until cancelled."""
        task_status.started()
        try:
            state = await self._loaded()
            for queue in state.queues.values():
                self._adopt_offset(queue)
            self.state = state
            self._ready.set()
            while True:
                self._is_idle = True
                await self._some.wait()
                self._is_idle = False
                self._some = trio.Event()
                is_stored = await self._write_changes(state)
                if not is_stored or (self._is_snapshot_wanted and not await self._write_snapshot(state)):
                    await trio.sleep(PAUSE_S)
                    self._some.set()
        finally:
            waiters = [*(waiter for put in self._unanswered.values() for waiter in put.waiters), *self._waiters]
            self._reset()
            for waiter, _ in waiters:
                waiter(NO_MASTER)

    # ---- writing

    def _want_write(self) -> None:
        """Schedules the writing of changes: at the end of the poller's turn if there is one, otherwise by `serve`."""
        if self._is_write_due:
            return
        if self._poller is None or not self._poller.is_in_turn:
            self._some.set()
            return
        self._is_write_due = True
        self._poller.at_turn_end(self._write_in_turn, is_early=True)

    def _write_in_turn(self) -> None:
        """Writes the changes, or leaves them to `serve` if they have to wait."""
        self._is_write_due = False
        state = self.state
        if state is None or not self._is_idle or self._is_snapshot_wanted:
            self._some.set()
            return
        put = self._submit_changes(state)
        if put is None:
            return
        if put.next_offset >= 0:
            self._settle(state, put)
        else:
            self._appending, self._is_idle = put, False
            self._some.set()

    async def _write_changes(self, state: PopState) -> bool:
        """Writes the changes since the last record, if there are any; returns False if they can't be stored."""
        put, self._appending = self._appending, None
        if put is not None and not await self._settled(state, put):
            return False
        put = self._submit_changes(state)
        return put is None or await self._settled(state, put)

    def _submit_changes(self, state: PopState) -> _RecordPut | None:
        """Submits a record of the changes since the last record; returns None if there is nothing to write."""
        if not (state.has_changes or self._waiters):
            return None
        record = state.take_changes(self._record_bytes_max)
        if state.has_changes:
            self._some.set()
            return self._submit(record)  # the last record of these changes has the waiters
        waiters, self._waiters = self._waiters, []
        return self._submit(record, waiters)

    async def _settled(self, state: PopState, put: _RecordPut) -> bool:
        await self._appended(put)
        return self._settle(state, put)

    def _settle(self, state: PopState, put: _RecordPut) -> bool:
        """Commits the consumer offsets of the queues in a stored record. If the record was not stored, undoes its
        changes and all later ones, after which others may pop the messages. Returns whether it was stored."""
        is_stored = put.next_offset >= 0
        for queue in state.settle(is_stored=is_stored):
            if is_stored:
                self._commit_offset(queue)
            else:
                self.on_room(queue)
        if not is_stored:
            self.failure_count += 1
            self._failure = self._outcome(put)
            waiters, self._waiters = self._waiters, []
            self._call(waiters, self._failure)
        self._bytes_since += put.size
        if self._bytes_since > max(SNAPSHOT_AFTER_BYTES_MIN, SNAPSHOT_AFTER_FACTOR * self._snapshot_bytes):
            self._want_snapshot()
        return is_stored

    async def _write_snapshot(self, state: PopState) -> bool:
        """Writes the whole state; returns False if a part can't be stored."""
        first, begin, size = -1, -1, 0
        for part in state.snapshot(min(PART_BYTES_MAX, self._record_bytes_max)):
            put = self._submit(part)
            await self._appended(put)
            if put.next_offset < 0:
                return False
            if first < 0:
                first, begin = put.results[0].queue_offset, put.results[0].physical_offset
            size += put.size
            if not await self._write_changes(state):
                return False
        end = self._submit(PopRecord(first=first), (), SNAPSHOT_END_PROPERTIES)
        await self._appended(end)
        if end.next_offset < 0:
            return False
        self._snapshot_begin, self._snapshot_bytes, self._bytes_since = begin, size, 0
        self._is_snapshot_wanted = False
        self._snapshot_done.set()
        return True

    def _want_snapshot(self) -> None:
        if not self._is_snapshot_wanted:
            self._is_snapshot_wanted = True
            self._snapshot_done = trio.Event()
            self._some.set()

    def _submit(
        self, record: PopRecord, waiters: Sequence[tuple[Waiter, int]] = (), properties: bytes = b""
    ) -> _RecordPut:
        """Queues a record for the log, and appends it if the log can take it without waiting. `_on_done` calls its
        waiters."""
        body = encode_pop_record(record)
        message = self._core.own_message(POP_TOPIC, body, properties)
        put = _RecordPut(
            messages=(message,),
            number=next(self._numbers),
            waiters=[*waiters],
            size=len(body),
            on_done=self._on_done,
            frees_space=True,
        )
        self._unanswered[put.number] = self._newest = put
        self._is_settled = False
        self._core.puts.submit([put])
        return put

    async def _appended(self, put: _RecordPut) -> None:
        """Waits until a record is appended or refused."""
        while put.next_offset < 0 and not put.is_done:
            await self._core.puts.wait_appended()

    def _on_done(self, puts: Sequence[_RecordPut]) -> None:
        if self._poller is None:
            self._answer(puts)
        else:
            self._poller.as_turn(partial(self._answer, puts))

    def _answer(self, puts: Sequence[_RecordPut]) -> None:
        for put in puts:
            put.is_done = True
            if self._unanswered.pop(put.number, None) is None:
                continue  # of an earlier term, its waiters have been called
            outcome = self._outcome(put)
            if put is self._newest:
                self._is_settled = outcome is ACKNOWLEDGED
            if outcome is not ACKNOWLEDGED:
                self._log.write("pop.put_not_ok reason=%r", outcome.fault)
            self._call(put.waiters, outcome)

    def _call(self, waiters: Sequence[tuple[Waiter, int]], outcome: Logged) -> None:
        for waiter, request_count in waiters:
            self._waiting_count -= request_count
            waiter(outcome)

    def _outcome(self, put: _RecordPut) -> Logged:
        status = put.status
        if status is PutStatus.SLAVE_NOT_AVAILABLE and not self._standing.can_be_replaced:
            return ACKNOWLEDGED  # a broker without its slave answers its clients, as RocketMQ does
        return ACKNOWLEDGED if status is PutStatus.PUT_OK else Logged(status, put.remark)

    def _commit_offset(self, queue: PopQueue) -> None:
        """Commits the next offset that the queue has in the last record as its consumer offset. Does nothing if the
        consumer offset was reset or committed by others: then the next pop continues there (`PopQueue.committed`)."""
        undo = queue.undo
        if undo is not None and undo.reset_to is not None:
            return  # the next offset before a reset is obsolete
        next_offset = queue.next_offset if undo is None else undo.next_offset
        group, topic, queue_id = queue.key
        current = self._offsets.get(group, topic, queue_id)
        if current == queue.committed != next_offset:
            self._offsets.commit(group, topic, queue_id, next_offset)
            queue.committed = self._offsets.get(group, topic, queue_id)
        elif current == next_offset:
            queue.committed = current

    def _adopt_offset(self, queue: PopQueue) -> None:
        group, topic, queue_id = queue.key
        queue.committed = self._offsets.get(group, topic, queue_id)
        if queue.committed is None or queue.committed < queue.next_offset:
            self._commit_offset(queue)

    # ---- reading

    @property
    def _queue(self) -> ConsumeQueue | None:
        return self._store.queues.get(POP_TOPIC, 0)

    async def _loaded(self) -> PopState:
        """Returns the result of `_load`, which is called again after each temporary disk error."""
        while True:
            try:
                return await self._load()
            except OSError as error:
                if not is_passing(error):
                    raise
                self._log.write("pop.read_failed reason=%r", str(error))
                await trio.sleep(PAUSE_S)

    async def _load(self) -> PopState:
        """Returns the state that the log describes. Raises OSError."""
        self._bytes_since = 0
        began = trio.current_time()
        log = self._store.log
        end = log.max_offset.value
        while log.dispatched_offset.value < end:
            await log.dispatched_offset.wait_beyond(log.dispatched_offset.value)
        state = PopState(self._limits, self._want_write, self.on_scheduled, self.on_room)
        queue = self._queue
        record_count = 0
        if queue is not None:
            snapshot = await self._find_snapshot(queue)
            offset = queue.min_offset if snapshot is None else snapshot
            while offset < queue.max_offset:
                records = await self._read(queue, offset)
                for raw in records:
                    offset += 1
                    record_count += 1
                    self._apply(state, raw)
                if not records:
                    offset += 1
            await finish_copied(self._store, state, queue)
        for popped in state.queues.values():
            self._correct_next_offset(state, popped, end)
        logger.info(
            "pop.loaded records=%d queues=%d in_flight=%d duration_s=%.3f",
            record_count,
            len(state.queues),
            state.in_flight_count,
            trio.current_time() - began,
        )
        return state

    def _correct_next_offset(self, state: PopState, popped: PopQueue, log_end: int) -> None:
        """Moves the next offset back to where the queue ended at `log_end`, a physical offset, if it is beyond that.

        The log has then lost its end, or was replaced by one with fewer messages of the queue, and the next messages
        get queue offsets of popped ones. Correcting that at the first pop would skip what was stored until then.
        """
        _, topic, queue_id = popped.key
        queue = self._store.queues.get(topic, queue_id)
        end = queue.end_before(log_end) if queue is not None else 0
        if popped.next_offset > end:
            logger.warning("pop.offset_corrected key=%r from=%d to=%d", popped.key, popped.next_offset, end)
            state.reset(popped, end)

    async def _read(self, queue: ConsumeQueue, offset: int) -> list[bytes]:
        """Returns records from queue offset `offset` on; none if the first one is lost."""
        while True:
            try:
                read = await self._reader.read(queue, offset)
                if read.status is ReadStatus.FOUND and read.next_offset != offset + read.message_count:
                    # Some in between are lost: read the others one at a time.
                    read = await self._reader.read(queue, offset, 1)
            except OSError as error:
                self._log.write("pop.read_failed offset=%d reason=%r", offset, str(error))
            else:
                if read.status is ReadStatus.FOUND:
                    return list(split(read.body))
                if read.status is ReadStatus.MESSAGE_WAS_REMOVING or self._losses.is_lost(offset):
                    logger.error('pop.record_lost offset=%d hint="messages may be delivered again"', offset)
                    return []
            with trio.move_on_after(1.0):
                await self._store.damage.wait_changed()

    def _apply(self, state: PopState, raw: bytes) -> None:
        try:
            record = decode_record(raw)
            state.apply(decode_pop_record(record.body))
        except RemoteProtocolError as error:
            self._log.write("pop.record_unknown reason=%r", str(error))
        else:
            self._bytes_since += len(record.body)

    async def _find_snapshot(self, queue: ConsumeQueue) -> int | None:
        """Returns the queue offset of the first part of the newest complete snapshot, and sets `_snapshot_begin`; None
        if there is no such snapshot."""
        self._snapshot_begin = -1
        end = queue.max_offset
        while end > queue.min_offset:
            begin = max(queue.min_offset, end - _ENTRY_COUNT)
            entries = queue.read_readable(begin, end - begin)
            for entry in reversed(entries):
                if entry.tags_code != SNAPSHOT_END_CODE:
                    continue
                try:
                    raw = await self._store.log.read_all(entry.physical_offset, entry.size)
                    first = decode_pop_record(decode_record(raw).body).first
                except OSError as error:
                    if is_passing(error):
                        raise
                    continue
                except (DamagedBytes, OffsetGone, RemoteProtocolError):
                    continue
                if first is not None and first >= queue.min_offset:
                    self._snapshot_begin = queue.read_readable(first, 1)[0].physical_offset
                    return first
            end = begin
            await trio.lowlevel.checkpoint()
        return None

    # ---- retention

    async def release(self, end: int) -> bool:
        """Writes a snapshot if records before physical offset `end` (bytes) are needed, so that retention can delete
        them.

        Returns False if retention must keep them, because no snapshot can be written now, or because this is a slave,
        and its master has not written one. The caller flushes the snapshot.
        """
        queue = self._queue
        first = None if queue is None else queue.first_record_from(0)
        if queue is None or first is None or first >= end:
            return True
        if self.state is None:
            await self._find_snapshot(queue)  # a slave's log may lose its end, and with it a snapshot found before
        elif self._snapshot_begin < end:
            self._want_snapshot()
            with trio.move_on_after(RELEASE_TIMEOUT_S):
                await self._snapshot_done.wait()
        if self._snapshot_begin < end:
            self._log.write("pop.segment_kept end=%d reason=%r", end, "it has POP records without a later snapshot")
            return False
        return True
