"""The tables of a failover group as records of its log: changes are written to it, and the tables are read from it.

RocketMQ keeps topics, groups and offsets in files and copies them every 10 s. A failover therefore moves consumers
back, or past the end of a truncated log (apache/rocketmq#4771). Here the confirmed part of the log defines the tables:

    master      tables add each change to the journal; a writer task puts the accumulated changes as one record, like
                a message. A request is answered once its record is acknowledged; reads may see the change earlier
    all members apply the records, as they are dispatched, to a replica of the tables. Files are written from the
                replica, with the position of its last record. A slave serves the replica
    at start    the files are loaded if the log contains the record that they state, otherwise the newest complete
                snapshot; then the records that follow are applied

A snapshot is written at the start of each epoch, at the start of each segment, and when the changes since the last one
exceed both SNAPSHOT_AFTER_BYTES_MIN and SNAPSHOT_AFTER_FACTOR times its size. So the retained log always has one, and a
start reads little. It is written in parts, with changes in between. One task writes, so that records are in the log in
the order in which they were made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import dropwhile

import msgspec
import trio

from ha.broker.batch_reader import BatchReader, LossDetector, split
from ha.broker.core import BrokerCore
from ha.broker.group_replay import LoadedTables, is_there, read_back, undispatched_records
from ha.broker.group_state import RECORD_OVERHEAD, SECTION_FIELDS, SECTIONS, Replica, TablesState, snapshot_parts
from ha.broker.journal import ACKNOWLEDGED, NO_MASTER, Journal, Logged
from ha.broker.limited_log import LimitedLog
from ha.broker.put_request import PutRequest
from ha.broker.queue_read import ReadStatus
from ha.errors import RemoteProtocolError
from ha.protocol.bodies import LogPosition
from ha.protocol.codes import PutStatus
from ha.protocol.group_records import (
    SNAPSHOT_PROPERTIES,
    TablesRecord,
    decode_tables_record,
    encode_tables_record,
)
from ha.protocol.record import RECORD_PLACE, decode_record
from ha.protocol.topic_names import TABLES_TOPIC
from ha.store.consume_queue import ConsumeQueue
from ha.store.dispatch import Arrival
from ha.store.files import is_passing

logger = logging.getLogger(__name__)

LINGER_S = 0.1
"""Maximum time in seconds that the first change waits for further ones before it is written, unless a request waits for
its outcome."""
GAP_S = 0.005
"""Pause after each write, in seconds; changes made meanwhile share the next record."""
PAUSE_S = 0.5
"""Time in seconds before the next attempt after a record could not be stored."""
UNREADABLE_S = 1.0
"""Time in seconds before the next attempt to read a record that can't be read, unless the damage of the log changes
earlier."""
RECORD_BYTES_MAX = 128 * 1024
"""Maximum bytes of a record's body, unless a single entry is larger. Lower if maxMessageSize or segments are small."""
SNAPSHOT_AFTER_BYTES_MIN = 4 << 20
SNAPSHOT_AFTER_FACTOR = 4
"""Minimum bytes of the changes since the last snapshot, and minimum multiple of its size, at which the next one is
due."""

UNCONFIRMED = Logged(PutStatus.FLUSH_SLAVE_TIMEOUT, "stored, without waiting for the other members")
"""Outcome of changes whose record was stored without waiting for its acknowledgement; a later request that relies on
them waits for it."""


class GroupLogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of the records that this broker wrote since its start, and the state of its replica.

    position: position of the last record of the log that the replica contains.
    is_whole: whether the tables come from the log alone.
    """

    record_count: int
    snapshot_count: int
    written_bytes: int
    position: LogPosition
    is_whole: bool


class _RecordPut(PutRequest, kw_only=True, gc=False):
    """The put of one record. `size`: bytes of its body."""

    record: TablesRecord
    size: int


class GroupLog:
    """Keeps the tables of a failover group in its log.

    Call `load` before use, and run `serve` while the broker runs; `Broker` calls the methods under "roles" when its
    role changes.
    """

    def __init__(self, core: BrokerCore) -> None:
        store, options = core.store, core.options
        self._store = store
        self._log = store.log
        self._tables = core.tables
        self._core = core
        self._record_bytes_max = min(RECORD_BYTES_MAX, options.message_size_max // 2, store.log.segment_size // 8)
        self._reader = BatchReader(store)
        self._replica = Replica(TablesState())
        self._promised = LogPosition()
        """Position of the last record that the tables contained while this broker was master, and that is or may be
        acknowledged"""
        self.is_copy = False
        """Whether the tables were copied from a master since the start"""
        self._reading = trio.Lock()
        self._arrived = trio.Event()
        self._parts: Iterator[TablesRecord] | None = None
        self._is_snapshot_wanted = False
        self._begun = trio.Event()
        """Set while this broker writes records of its epoch"""
        self._delays_before: dict[int, int] | None = None
        """The progress of delayed messages when the epoch began; None unless this broker is or was just the master"""
        self._snapshot_began = self._part_bytes = self._snapshot_bytes = 0
        self._snapshot_segment = -1
        """Start (physical offset) of the last segment if the newest snapshot is in it. With any other value, a new
        snapshot is due"""
        self._bytes_since = 0
        self._record_count = 0
        self._snapshot_count = 0
        self._written_bytes = 0
        self._losses = LossDetector(self._reader)
        self._limited_log = LimitedLog(logger)
        self.journal = Journal(core.standing.still_acknowledges)
        self.journal.config_size_max = min(options.message_size_max, store.log.segment_size // 2) - 2 * RECORD_OVERHEAD
        core.standing.subscribe(self._on_standing)

    def statistics(self) -> GroupLogStatistics:
        """Returns the current counters and the state of the replica."""
        return GroupLogStatistics(
            record_count=self._record_count,
            snapshot_count=self._snapshot_count,
            written_bytes=self._written_bytes,
            position=self._replica.reported_position,
            is_whole=self._replica.is_whole,
        )

    @property
    def position(self) -> LogPosition:
        """Position of the last record of the log that the replica contains."""
        return self._replica.reported_position

    @property
    def is_whole(self) -> bool:
        """Whether the tables come from the log alone."""
        return self._replica.is_whole

    @property
    def is_behind(self) -> bool:
        """Whether the replica lacks a record that the tables had when this broker was master.

        The record may be acknowledged; it is missing because the next master has not confirmed it yet.
        """
        applied, promised = self._replica.position, self._promised
        is_ahead = applied.physical_offset < promised.physical_offset < self._log.max_offset.value
        return is_ahead and applied.epoch <= promised.epoch

    @property
    def _queue(self) -> ConsumeQueue | None:
        return self._store.queues.get(TABLES_TOPIC, 0)

    # ---- start

    async def load(self) -> None:
        """Applies the records of the log to the tables, which have been read from their files.

        Raises OSError if the disk can't read, and DiskFailed if it can't write.
        """
        loaded = self._tables.as_loaded()
        self._replica = await read_back(self._store, loaded)
        await self._read_on()
        for section in loaded.foreign:
            # The store was used outside its group after these records: the file's state applies until a snapshot.
            for field in SECTION_FIELDS[section]:
                setattr(self._replica.state, field, getattr(loaded.state, field))
            self._replica.mark_incomplete()
        self._tables.adopt(self._replica.state)
        if loaded.foreign:
            self._replica.changed.update(SECTIONS)
            await self.save()  # with a position: at the next start, later records of the log take precedence

    async def save(self) -> None:
        """Writes the files of tables that changed since they were last written. Raises DiskFailed."""
        for section in SECTIONS:
            if section not in self._replica.changed:
                continue
            self._replica.changed.remove(section)  # before the write: the table may change again meanwhile
            try:
                await self._tables.save_section(section, lambda: self._replica)
            except trio.Cancelled:
                self._replica.changed.add(section)
                raise

    # ---- roles

    async def begin_epoch(self, epoch: int) -> None:
        """Opens the journal for records of `epoch`, before any put of that epoch is admitted.

        Nothing may be appended meanwhile. Waits for records that can't be read yet. Undispatched records are applied,
        too: they may have been acknowledged, and dispatch waits for the other members. If the standing changes
        meanwhile, the journal stays closed. Raises OSError, and DamagedBytes if an undispatched record can't be read.
        """
        standing = self._tables.standing
        revision = standing.revision
        async with self._reading:
            begin = self._log.dispatched_offset.value
            while (ahead := await self._try_to_read(begin)) is None and standing.revision == revision:
                with trio.move_on_after(UNREADABLE_S):
                    await self._store.damage.wait_changed()
            if ahead is None or standing.revision != revision:
                return  # the broker does not become master after all
            if self._replica.is_whole:
                self._tables.adopt(self._replica.state)
            for physical_offset, record in ahead:
                self._tables.follow(record)
                self._promised = LogPosition(epoch=epoch, physical_offset=physical_offset)
            self._delays_before = dict(self._tables.delay_offsets.table)
            self.journal.open(epoch)
            self._tables.begin_epoch()
        logger.info("group_log.epoch_began epoch=%d position=%r ahead=%d", epoch, self._replica.position, len(ahead))

    async def write_epoch(self, epoch: int) -> None:
        """Starts writing a snapshot and changes. Called once puts are admitted. Does nothing if the journal is not open
        for `epoch`."""
        if self.journal.is_open and self.journal.epoch == epoch:
            self._begun.set()
            self._want_snapshot()
        await trio.lowlevel.checkpoint()

    def _on_standing(self) -> None:
        if self._tables.standing.is_slave:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Stops writing; requests that wait for an acknowledgement fail with NO_MASTER.

        Removes changes from the tables as `_drop_unconfirmed` does. Does nothing if the journal is closed.
        """
        if self.journal.is_open:
            self.journal.close()
            self._parts = None
            self._is_snapshot_wanted = False
            self._begun = trio.Event()
            self._drop_unconfirmed()

    async def step_down(self) -> None:
        """Removes changes from the tables as `_drop_unconfirmed` does, after services of the former role have ended."""
        self._drop_unconfirmed()
        self._delays_before = None
        await trio.lowlevel.checkpoint()

    def _drop_unconfirmed(self) -> None:
        """Replaces the tables with the replica if it is whole, so that they lose changes that are not confirmed.

        Otherwise they only lose this epoch's progress of delayed messages: the copies that it counts may be truncated,
        and would never be delivered. Records of it that are confirmed later are applied as any others.
        """
        if self._replica.is_whole:
            self._tables.adopt(self._replica.state)
        elif self._delays_before is not None:
            self._tables.delay_offsets.adopt(self._delays_before, self._log.max_offset.value)

    # ---- reading

    def on_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Wakes the reader, and requests a snapshot if the last segment has none. Called by the store for each
        dispatched batch."""
        if self._begun.is_set() and self._log.segments[-1].start != self._snapshot_segment:
            self._want_snapshot()
        if not self._arrived.is_set() and any(arrival.topic == TABLES_TOPIC for arrival in arrivals):
            self._arrived.set()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follows the log, and writes during an epoch, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            nursery.start_soon(self._write_forever)
            task_status.started()

    async def _follow(self) -> None:
        self._arrived.set()  # records dispatched since the tables were loaded
        while True:
            await self._arrived.wait()
            self._arrived = trio.Event()
            try:
                is_done = await self._read_on()
            except OSError as error:
                self._limited_log.write("group_log.read_failed reason=%r", str(error))
                is_done = False
            if not is_done:
                with trio.move_on_after(UNREADABLE_S):
                    await self._store.damage.wait_changed()
                self._arrived.set()

    async def _read_on(self) -> bool:
        """Applies new records to the replica and clears deleted topics; returns False if a record can't be read yet."""
        async with self._reading:
            is_done = await self._read_queue()
        await self._tables.clear_deleted_topics()
        return is_done

    async def _try_to_read(self, begin: int) -> list[tuple[int, TablesRecord]] | None:
        """Applies new records to the replica, and returns the undispatched ones from physical offset `begin` on; None
        if a record can't be read yet, or too many files are open."""
        try:
            if await self._read_queue():
                return [found async for found in undispatched_records(self._log, begin)]
        except OSError as error:
            if not is_passing(error):
                raise
            self._limited_log.write("group_log.read_failed reason=%r", str(error))
        return None

    async def _read_queue(self) -> bool:
        while (queue := self._queue) is not None:
            if not is_there(queue, self._replica.position):
                await self._reload()
            expected = self._replica.position.queue_offset + 1
            offset = max(expected, queue.min_offset)
            if offset >= queue.max_offset:
                break
            if offset > expected > 0:
                self._replica.mark_incomplete()  # retention deleted records before they were read
            read = await self._reader.read(queue, offset)
            if read.status is ReadStatus.FOUND:
                self._apply(read.body, offset)
            elif read.status is not ReadStatus.MESSAGE_WAS_REMOVING:
                if not self._losses.is_lost(offset):
                    self._limited_log.write("group_log.read_failed reason=%r", f"record {offset} of the tables")
                    return False
                self._replica.mark_incomplete()
                self._replica.position = LogPosition(queue_offset=offset)
                continue
            if self._replica.position.queue_offset + 1 < read.next_offset:
                self._limited_log.write("group_log.records_lost up_to=%d", read.next_offset)
                self._replica.mark_incomplete()
                self._replica.position = LogPosition(queue_offset=read.next_offset - 1)
            await trio.lowlevel.checkpoint()
        return True

    async def _reload(self) -> None:
        """Rebuilds the replica when the log no longer has its last record, because it was truncated or replaced."""
        logger.warning("group_log.reloaded position=%r", self._replica.position)
        left = LoadedTables(state=self._replica.state, positions={}, foreign=set())
        self._replica = await read_back(self._store, left)
        self._replica.changed.update(SECTIONS)
        if not self.journal.is_open:
            self._tables.adopt(self._replica.state)

    def _apply(self, body: bytes, offset: int) -> None:
        replica, journal = self._replica, self.journal
        for raw in split(body):
            _, _, queue_offset, physical_offset = RECORD_PLACE.unpack_from(raw)
            position = LogPosition(queue_offset=queue_offset, physical_offset=physical_offset)
            if queue_offset != offset:
                self._limited_log.write("group_log.records_lost up_to=%d", queue_offset)
                replica.mark_incomplete()
            offset = queue_offset + 1
            try:
                changes = decode_tables_record(decode_record(raw).body)
            except RemoteProtocolError as error:
                self._limited_log.write("group_log.record_unknown reason=%r", str(error))
                replica.mark_incomplete()
                replica.position = position
                continue
            position = msgspec.structs.replace(position, epoch=changes.epoch)
            is_another = replica.take(changes, position)
            if is_another:
                logger.warning("group_log.snapshot_differed position=%r", position)
            if journal.is_open:
                continue  # written by this master or applied by `begin_epoch`: the tables have it
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
            is_part_stored = await self._write_part()
            # Also after a failure, as requests wait for an outcome.
            are_changes_stored = await self._write_changes(waits=journal.has_waiters)
            if not (is_part_stored and are_changes_stored):
                await trio.sleep(PAUSE_S)
            await trio.sleep(GAP_S)

    async def _write_part(self) -> bool:
        """Writes the next part of a snapshot, if one is due. Returns False if it can't be stored.

        The snapshot then starts again from its first part.
        """
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
            self._limited_log.write("group_log.snapshot_failed reason=%r", put.remark)
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
        # A snapshot that crosses the end of a segment is repeated, unless it takes half a segment or more.
        is_small = self._snapshot_bytes < self._log.segment_size // 2
        self._snapshot_segment = self._snapshot_began if is_small else last.start
        if self._snapshot_segment >= last.start:
            self._snapshot_segment = last.start

    async def _write_changes(self, *, waits: bool) -> bool:
        """Writes the changes in the journal; returns False if some can't be stored.

        `waits`: whether to wait until they are acknowledged.
        """
        journal = self.journal
        epoch = journal.epoch
        puts = [self._put_of(record, waits=waits) for record in journal.take(self._record_bytes_max)]
        if not puts:
            if waits:  # for earlier records, which are acknowledged
                journal.settle(epoch, journal.acknowledged)
            return True
        try:
            await self._put_all(puts)
        except trio.Cancelled:
            journal.settle(epoch, NO_MASTER, _from_first_unstored(puts))
            raise
        unstored = [put for put in puts if not put.status.is_stored]
        worst = next((put for put in (*unstored, *puts) if put.status is not PutStatus.PUT_OK), None)
        if unstored and len(unstored) < len(puts):
            self._is_snapshot_wanted = True  # all requests fail: a snapshot undoes their changes that are in the log
        if worst is not None:
            self._limited_log.write("group_log.put_not_ok reason=%r", f"{worst.status.name} {worst.remark}")
        elif waits:
            self._promised = LogPosition(epoch=epoch, physical_offset=puts[-1].results[-1].physical_offset)
        self._bytes_since += sum(put.size for put in puts if put.status.is_stored)
        if self._bytes_since > max(SNAPSHOT_AFTER_BYTES_MIN, SNAPSHOT_AFTER_FACTOR * self._snapshot_bytes):
            self._want_snapshot()
        outcome = ACKNOWLEDGED if waits else UNCONFIRMED
        outcome = outcome if worst is None else Logged(worst.status, worst.remark)
        journal.settle(epoch, outcome, _from_first_unstored(puts))
        return not unstored

    async def _put_all(self, puts: list[_RecordPut]) -> None:
        """Puts records and waits for all answers."""
        await self._core.puts.settle(puts)
        for put in puts:
            if put.status.is_stored:
                self._record_count += 1
                self._written_bytes += put.size

    def _put_of(self, record: TablesRecord, *, waits: bool) -> _RecordPut:
        body = encode_tables_record(record)
        properties = SNAPSHOT_PROPERTIES if record.snapshot is not None else b""
        message = self._core.own_message(TABLES_TOPIC, body, properties)
        return _RecordPut(messages=(message,), waits=waits, record=record, size=len(body))

    def copied(self) -> None:
        """Replaces the replica with the tables, which a slave has just copied from its master.

        As the tables do not come from this log, the replica counts as incomplete until the next snapshot.
        """
        self.is_copy = True
        self._replica.state = self._tables.state()
        self._replica.mark_incomplete()
        self._replica.changed.update(SECTIONS)

    async def close(self) -> None:
        """Writes the journal at shutdown, without waiting for acknowledgement, and closes it."""
        if self._begun.is_set():
            self._begun = trio.Event()
            await self._write_changes(waits=False)
        self.journal.close()


def _from_first_unstored(puts: Iterable[_RecordPut]) -> list[TablesRecord]:
    """Returns the records to be written again: the first one that was not stored and all that follow, as it may remove
    offsets that a later one sets."""
    return [put.record for put in dropwhile(lambda put: put.status.is_stored, puts)]
