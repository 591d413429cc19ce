"""A failover group's tables in its log: changes become records of it, and records become the tables again.

RocketMQ keeps topics, groups and offsets beside the log and copies them every 10 s, so that a failover moves consumers
back, or ahead of a log that was cut (apache/rocketmq#4771). Here they are what the log says, up to what is confirmed:

    master    the tables note each change in the journal; its writer puts what is there as one record, as it would a
              message, and whoever waits is answered when that is acknowledged. What is served may be ahead of the log,
              what was answered is not
    everyone  reads the records as they are dispatched, into a replica of the tables; files are written from the
              replica, with the record that they stand behind. A slave's tables are the replica's
    start     files that stand behind a record of this log, or else the newest complete snapshot; then what came since

A snapshot is written at the begin of each epoch, when a segment begins and when much was written since the last one:
what is kept of the log always has one, and a start reads little. It is written in parts, between which changes have
their turn. Writing is one task, so that records are in the log in the order in which they were made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import trio

from ha.broker.batch_reader import UNREADABLE_S_MAX, BatchReader, split
from ha.broker.core import BrokerCore
from ha.broker.group_replay import LoadedTables, is_there, read_back, undispatched_records
from ha.broker.group_state import RECORD_OVERHEAD, SECTIONS, Replica, TablesState, snapshot_parts
from ha.broker.journal import ACKNOWLEDGED, NO_MASTER, Journal, Logged
from ha.broker.put_request import PutRequest
from ha.broker.queue_read import ReadStatus
from ha.errors import RemoteProtocolError
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol.bodies import LogPosition
from ha.protocol.codes import PutStatus
from ha.protocol.group_records import (
    SNAPSHOT_PROPERTIES,
    TablesRecord,
    decode_tables_record,
    encode_tables_record,
)
from ha.protocol.record import Message, decode_record, encode_host
from ha.protocol.topic_names import TABLES_TOPIC

if TYPE_CHECKING:
    from ha.store.consume_queue import ConsumeQueue
    from ha.store.dispatch import Arrival

logger = logging.getLogger(__name__)

LINGER_S = 0.1
"""Changes that nobody waits for are written so long after the first of them."""
GAP_S = 0.005
"""From one record to the next, however many wait."""
PAUSE_S = 0.5
"""After what could not be stored."""
UNREADABLE_S = 1.0
RECORD_BYTES_MAX = 128 * 1024
"""Body of a record, unless a single topic or group takes more."""
SNAPSHOT_AFTER_BYTES_MIN = 4 << 20
SNAPSHOT_AFTER_FACTOR = 4
"""A snapshot is due when changes since the last one took so many bytes, and so many times what it took."""


class GroupLogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start."""

    record_count: int
    snapshot_count: int
    written_bytes: int
    position: LogPosition
    is_whole: bool


class _RecordPut(PutRequest, kw_only=True, gc=False):
    """The put of one record; `size` is its body's."""

    record: TablesRecord
    size: int


class GroupLog:
    """`load` before use, `serve` while the broker runs; `begin_epoch` and `end_epoch` when its role changes."""

    def __init__(self, core: BrokerCore) -> None:
        store, options = core.store, core.options
        self._store = store
        self._log = store.log
        self._tables = core.tables
        self._put = core.puts
        self._wall_clock_ms = core.world.wall_clock_ms
        self._host = encode_host(options.host, options.port)
        self._record_bytes_max = min(RECORD_BYTES_MAX, options.message_size_max // 2, store.log.segment_size // 8)
        self._reader = BatchReader(store)
        self._replica = Replica(TablesState())
        self.is_copy = False
        """Whether the tables were once taken over from a master, since the start"""
        self._reading = trio.Lock()
        self._arrived = trio.Event()
        self._parts: Iterator[TablesRecord] | None = None
        self._is_snapshot_wanted = False
        self._begun = trio.Event()
        """Set while this broker admits what is put in its epoch"""
        self._snapshot_began = self._part_bytes = self._snapshot_bytes = 0
        self._snapshot_segment = -1
        """Begin of the last segment when a snapshot was written there"""
        self._bytes_since = 0
        self._record_count = 0
        self._snapshot_count = 0
        self._written_bytes = 0
        self._unreadable = -1, 0.0
        self._log_limiter = LogRateLimiter()
        self.journal = Journal(core.standing.still_acknowledges)
        self.journal.config_size_max = min(options.message_size_max, store.log.segment_size // 2) - 2 * RECORD_OVERHEAD
        core.standing.subscribe(self._on_standing)

    def statistics(self) -> GroupLogStatistics:
        """Return a snapshot."""
        return GroupLogStatistics(
            record_count=self._record_count,
            snapshot_count=self._snapshot_count,
            written_bytes=self._written_bytes,
            position=self._replica.stand,
            is_whole=self._replica.is_whole,
        )

    @property
    def position(self) -> LogPosition:
        """The record that the tables stand behind, at least."""
        return self._replica.stand

    @property
    def is_whole(self) -> bool:
        """Whether the tables come of the log alone."""
        return self._replica.is_whole

    @property
    def _queue(self) -> ConsumeQueue | None:
        return self._store.queues.get(TABLES_TOPIC, 0)

    # ---- start

    async def load(self) -> None:
        """Bring the tables, which have been read from their files, to the end of what the log knows of them."""
        loaded = self._tables.as_loaded()
        self._replica = await read_back(self._store, loaded)
        await self._read_on()
        for section in loaded.foreign:
            # Somebody used this store without its group since: that counts until the next snapshot.
            setattr(self._replica.state, section, getattr(loaded.state, section))
            self._replica.miss()
        self._tables.adopt(self._replica.state)
        if loaded.foreign:
            self._replica.changed.update(SECTIONS)
            await self.save()  # when it comes up again, its own records are what is newer

    async def save(self) -> None:
        """Write the files of tables that are other ones than when they were written."""
        changed, self._replica.changed = self._replica.changed, set()
        for section in SECTIONS:
            if section in changed:
                await self._tables.save_section(section, lambda: self._replica)

    # ---- roles

    async def begin_epoch(self, epoch: int) -> None:
        """Note what changes from now on, for records of `epoch`. Before anything is admitted in it.

        Nobody appends meanwhile. What is in the log behind what is dispatched counts, too: whoever was told that it is
        there must find it, and dispatch waits for the other members.
        """
        standing = self._tables.standing
        revision = standing.revision
        async with self._reading:
            begin = self._log.dispatched_offset.value
            while not await self._read_queue() and standing.revision == revision:
                with trio.move_on_after(UNREADABLE_S):
                    await self._store.damage.wait_changed()
            ahead = [record async for record in undispatched_records(self._log, begin)]
            if standing.revision != revision:
                return  # it is not to be the master after all
            if self._replica.is_whole:
                self._tables.adopt(self._replica.state)
            for record in ahead:
                self._tables.follow(record)
            self.journal.open(epoch)
            self._tables.begin_epoch()
        logger.info("group_log.epoch epoch=%d position=%s ahead=%d", epoch, self._replica.position, len(ahead))

    async def write_epoch(self, epoch: int) -> None:
        """Write what is noted, as the broker admits messages now; first a snapshot."""
        if self.journal.is_open and self.journal.epoch == epoch:
            self._begun.set()
            self._want_snapshot()
        await trio.lowlevel.checkpoint()

    def _on_standing(self) -> None:
        if self._tables.standing.is_slave:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Write no more. What is not acknowledged is no longer in the tables; who waits for it is told."""
        if self.journal.is_open:
            self.journal.close()
            self._parts = None
            self._is_snapshot_wanted = False
            self._begun = trio.Event()
            if self._replica.is_whole:
                self._tables.adopt(self._replica.state)

    async def step_down(self) -> None:
        """Whatever ended with the role, nothing of it is in the tables now but what the log says."""
        if self._replica.is_whole:
            self._tables.adopt(self._replica.state)
        await trio.lowlevel.checkpoint()

    # ---- reading

    def on_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Messages came to queues. Called by the store once per dispatched batch; never blocks."""
        if self._begun.is_set() and self._log.segments[-1].start != self._snapshot_segment:
            self._want_snapshot()
        if not self._arrived.is_set() and any(arrival.topic == TABLES_TOPIC for arrival in arrivals):
            self._arrived.set()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the log, and write while an epoch lasts, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            nursery.start_soon(self._write_forever)
            task_status.started()

    async def _follow(self) -> None:
        self._arrived.set()  # what came since the tables were loaded
        while True:
            await self._arrived.wait()
            self._arrived = trio.Event()
            try:
                is_done = await self._read_on()
            except OSError as error:
                self._say("group_log.unreadable reason=%s", error)
                is_done = False
            if not is_done:
                with trio.move_on_after(UNREADABLE_S):
                    await self._store.damage.wait_changed()
                self._arrived.set()

    async def _read_on(self) -> bool:
        """Apply what is in the queue and not in the replica; False if a record can't be read yet."""
        async with self._reading:
            return await self._read_queue()

    async def _read_queue(self) -> bool:
        while (queue := self._queue) is not None:
            if not is_there(queue, self._replica.position):
                await self._begin_anew()
            expected = self._replica.position.queue_offset + 1
            offset = max(expected, queue.min_offset)
            if offset >= queue.max_offset:
                break
            if offset > expected > 0:
                self._replica.miss()  # retention was faster
            read = await self._reader.read(queue, offset)
            if read.status is ReadStatus.FOUND:
                self._apply(read.body, offset)
            elif read.status is not ReadStatus.MESSAGE_WAS_REMOVING:
                if not self._is_lost(offset):
                    return False
                self._replica.miss()
                self._replica.position = LogPosition(queue_offset=offset)
                continue
            if self._replica.position.queue_offset + 1 < read.next_offset:
                self._say("group_log.records_lost up_to=%s", read.next_offset)
                self._replica.miss()
                self._replica.position = LogPosition(queue_offset=read.next_offset - 1)
            await trio.lowlevel.checkpoint()
        return True

    def _is_lost(self, offset: int) -> bool:
        """Whether a record that can't be read now never will be."""
        now = trio.current_time()
        if self._unreadable[0] != offset or not all(damage.is_hopeless for damage in self._store.damage.open):
            self._unreadable = offset, now
            self._say("group_log.unreadable reason=%s", f"record {offset} of the tables")
        return now - self._unreadable[1] >= UNREADABLE_S_MAX

    async def _begin_anew(self) -> None:
        """The log was cut, or set aside: what the tables stand behind is gone. They are made of what is left."""
        logger.warning("group_log.begins_anew position=%s", self._replica.position)
        left = LoadedTables(state=self._replica.state, positions={}, foreign=set())
        self._replica = await read_back(self._store, left)
        self._replica.changed.update(SECTIONS)
        if not self.journal.is_open:
            self._tables.adopt(self._replica.state)

    def _apply(self, body: bytes, offset: int) -> None:
        replica, journal = self._replica, self.journal
        for raw in split(body):
            record = decode_record(raw)
            position = LogPosition(queue_offset=record.queue_offset, physical_offset=record.physical_offset)
            if record.queue_offset != offset:
                self._say("group_log.records_lost up_to=%s", record.queue_offset)
                replica.miss()
            offset = record.queue_offset + 1
            try:
                changes = decode_tables_record(record.body)
            except RemoteProtocolError as error:
                self._say("group_log.unknown_record reason=%s", error)
                replica.miss()
                replica.position = position
                continue
            position = msgspec.structs.replace(position, epoch=changes.epoch)
            is_another = replica.take(changes, position)
            if is_another:
                logger.warning("group_log.other_snapshot position=%s", position)
            if journal.is_open:
                continue  # written here, or read before: the tables are as far, or further
            if is_another:
                self._tables.adopt(replica.state)
            else:
                self._tables.follow(changes)

    # ---- writing

    def _want_snapshot(self) -> None:
        if self._parts is None and not self._is_snapshot_wanted:
            self._is_snapshot_wanted = True
            self.journal.some.set()
            self.journal.urgent.set()

    async def _write_forever(self) -> None:
        journal = self.journal
        while True:
            await self._begun.wait()
            if self._parts is None and not self._is_snapshot_wanted:
                await journal.some.wait()
                with trio.move_on_after(LINGER_S):
                    await journal.urgent.wait()
            if not self._begun.is_set():
                continue
            if not (await self._write_part() and await self._write_changes(waits=journal.has_waiters)):
                await trio.sleep(PAUSE_S)
            await trio.sleep(GAP_S)

    async def _write_part(self) -> bool:
        """Write the next part of a snapshot, if one is due; False if it could not be stored: it begins anew then."""
        if self._parts is None:
            if not self._is_snapshot_wanted:
                return True
            self._is_snapshot_wanted = False
            self._parts = snapshot_parts(self._tables.view(), self.journal.epoch, self._record_bytes_max)
            self._snapshot_began = self._log.max_offset.value
            self._part_bytes = 0
        record = next(self._parts)
        put = self._put_of(record, waits=False)
        await self._put_all([put])
        if not self._begun.is_set() or record.epoch != self.journal.epoch:
            return True
        if not put.status.is_stored:
            self._say("group_log.snapshot_not_stored reason=%s", put.remark)
            self._parts = None
            self._is_snapshot_wanted = True
            return False
        self._part_bytes += put.size
        if record.snapshot is not None and record.snapshot.is_last:
            self._snapshot_done()
        return True

    def _snapshot_done(self) -> None:
        self._parts = None
        self._snapshot_count += 1
        self._snapshot_bytes, self._bytes_since = self._part_bytes, 0
        last = self._log.segments[-1]
        # One that goes over a segment's end is written once more, unless a segment is too small for any.
        is_small = self._snapshot_bytes < self._log.segment_size // 2
        self._snapshot_segment = self._snapshot_began if is_small else last.start
        if self._snapshot_segment >= last.start:
            self._snapshot_segment = last.start

    async def _write_changes(self, *, waits: bool) -> bool:
        """Write what is in the journal; False if it could not be stored. `waits`: until it is acknowledged."""
        journal = self.journal
        epoch = journal.epoch
        puts = [self._put_of(record, waits=waits) for record in journal.take(self._record_bytes_max)]
        try:
            await self._put_all(puts)
        except trio.Cancelled:
            journal.settle(epoch, NO_MASTER, [put.record for put in puts if not put.status.is_stored])
            raise
        unstored = [put.record for put in puts if not put.status.is_stored]
        worst = next((put for put in puts if put.status is not PutStatus.PUT_OK), None)
        if worst is not None:
            self._say("group_log.not_acknowledged reason=%s", f"{worst.status.name} {worst.remark}")
        self._bytes_since += sum(put.size for put in puts if put.status.is_stored)
        if self._bytes_since > max(SNAPSHOT_AFTER_BYTES_MIN, SNAPSHOT_AFTER_FACTOR * self._snapshot_bytes):
            self._want_snapshot()
        journal.settle(epoch, ACKNOWLEDGED if worst is None else Logged(worst.status, worst.remark), unstored)
        return not unstored

    async def _put_all(self, puts: list[_RecordPut]) -> None:
        """Put records, and wait until each is answered."""
        await self._put.settle(puts)
        for put in puts:
            if put.status.is_stored:
                self._record_count += 1
                self._written_bytes += put.size

    def _put_of(self, record: TablesRecord, *, waits: bool) -> _RecordPut:
        body = encode_tables_record(record)
        message = Message(
            TABLES_TOPIC,
            0,
            body,
            SNAPSHOT_PROPERTIES if record.snapshot is not None else b"",
            born_timestamp_ms=self._wall_clock_ms(),
            born_host=self._host,
        )
        return _RecordPut(messages=(message,), waits=waits, record=record, size=len(body))

    def copied(self) -> None:
        """A slave has taken over tables that its master keeps elsewhere, or before the first snapshot came."""
        self.is_copy = True
        self._replica.state = self._tables.state()
        self._replica.miss()
        self._replica.changed.update(SECTIONS)

    async def close(self) -> None:
        """Write what is noted, for a broker that ends; nothing is waited for."""
        if self._begun.is_set():
            self._begun = trio.Event()
            await self._write_changes(waits=False)
        self.journal.close()

    def _say(self, text: str, reason: object) -> None:
        times = self._log_limiter.admit(text, trio.current_time())
        if times:
            logger.error(text + " times=%d", reason, times)
