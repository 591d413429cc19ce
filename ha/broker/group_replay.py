"""Finds the state from which the tables are rebuilt at startup or after a truncation of the log: files, or a snapshot.

A file states the last record that it contains. The file is valid if the log has this record, with the same epoch and
physical offset: then everything before it is the same, too. If the log ends before that record, or continued
differently after a truncation, the file may be ahead of the log, and reading starts at the newest complete snapshot. A
file without a position was written outside the group, by a halog without failover or by RocketMQ; it is newer than the
log's records of its table.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import msgspec
import trio

from ha.broker.group_state import SECTIONS, Replica, TablesState
from ha.errors import DamagedBytes, OffsetGone, RemoteProtocolError
from ha.protocol.bodies import LogPosition
from ha.protocol.group_records import SNAPSHOT_TAGS_CODE, TablesRecord, decode_tables_record
from ha.protocol.record import RecordHead, decode_record, scan_record
from ha.protocol.store_files import BLANK_SIZE
from ha.protocol.topic_names import HALF_TOPIC, OP_TOPIC, TABLES_TOPIC
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import ConsumeQueue, QueueEntry
from ha.store.message_store import MessageStore

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
"""Bytes of the log per read, more for a longer record."""
ENTRY_COUNT = 4096
"""Maximum number of queue entries per read."""


class LoadedTables(msgspec.Struct, kw_only=True):
    """The tables as loaded from their files.

    positions: position of the last record that each table contains; tables whose file is missing or states no position
    are omitted.
    foreign: tables whose files were written outside the group: they state no position, and are not a `.bak`.
    """

    state: TablesState
    positions: dict[str, LogPosition]
    foreign: set[str]


async def read_back(store: MessageStore, loaded: LoadedTables) -> Replica:
    """Returns the tables with the position after which the log's records have to be applied to them.

    If all files are valid and not older than the newest complete snapshot, the tables are those of the files; otherwise
    they are empty, and the position is before this snapshot. If the log has no snapshot, they are those of the files,
    in which offsets beyond the ends of queues are lowered if a file is ahead of the log. Raises OSError.
    """
    queue = store.queues.get(TABLES_TOPIC, 0)
    positions = list(loaded.positions.values())
    are_sound = True
    for position in positions:
        if not await stands_behind(store, position):
            logger.warning('group_log.file_ahead position=%r reason="the log does not have this record"', position)
            are_sound = False
    snapshot = await _newest_snapshot(store, queue) if queue is not None else None
    if snapshot is not None:
        first, last = snapshot
        if are_sound and len(positions) == len(SECTIONS):
            oldest = min(positions, key=lambda position: position.queue_offset)
            if oldest.queue_offset >= last:
                return Replica(loaded.state, oldest, is_whole=all(position.is_whole for position in positions))
        replica = Replica(TablesState(), LogPosition(queue_offset=first - 1))
        replica.changed.update(SECTIONS)
        return replica
    if not are_sound:
        logger.error('group_log.snapshot_missing hint="the tables come from files that are ahead of the log"')
        _cut_offsets(store, loaded.state)
    if are_sound and len(positions) == len(SECTIONS):
        return Replica(loaded.state, min(positions, key=lambda position: position.queue_offset))
    replica = Replica(loaded.state)
    replica.changed.update(SECTIONS)
    return replica


async def stands_behind(store: MessageStore, position: LogPosition) -> bool:
    """Returns whether the log contains the record at `position`. Also True if `position` is before the first record.
    Raises OSError."""
    if position.queue_offset < 0:
        return True
    queue = store.queues.get(TABLES_TOPIC, 0)
    if queue is None or not queue.min_offset <= position.queue_offset < queue.max_offset:
        return False
    for entry in queue.read_readable(position.queue_offset, 1):
        if entry.physical_offset == position.physical_offset:
            record = await _record(store, entry)
            return record is not None and record.epoch == position.epoch
    return False


def is_there(queue: ConsumeQueue, position: LogPosition) -> bool:
    """Returns whether the queue still has the record at `position`. Also True if retention has deleted the record, or
    `position` states no physical offset."""
    if position.queue_offset < queue.min_offset or position.physical_offset < 0:
        return True
    entries = queue.read_readable(position.queue_offset, 1)
    return bool(entries) and entries[0].physical_offset == position.physical_offset


async def undispatched_records(log: CommitLog, begin: int) -> AsyncIterator[tuple[int, TablesRecord]]:
    """Yields the tables' records between physical offset `begin` and the end of the log, each with its physical offset.

    `begin` must be the start of a record. Nothing may be appended meanwhile. Skips a record of the tables that can't be
    decoded, with a log line. Raises DamagedBytes, and OSError if the disk can't read.
    """
    position, end, size = begin, log.max_offset.value, _CHUNK_BYTES
    while position < end:
        segment_end = log.segment_at(position).end
        raw = await log.read_all(position, min(size, segment_end - position, end - position))
        at = 0
        while at < len(raw):
            found = scan_record(raw, at, len(raw))
            if isinstance(found, RecordHead):
                if found.topic == TABLES_TOPIC:
                    try:
                        yield position + at, decode_tables_record(decode_record(raw, at).body)
                    except RemoteProtocolError as error:
                        logger.error("group_log.record_unknown physical_offset=%d reason=%r", position + at, str(error))
                at += found.total_size
            elif found is None:
                break
            else:  # a filler, the only thing that is not a record in a log that the store accepts
                at = segment_end - position
        if not at:
            if position + len(raw) >= min(segment_end, end):
                return
            size *= 4
            continue
        position, size = position + at, _CHUNK_BYTES
        await trio.lowlevel.checkpoint()


def _cut_offsets(store: MessageStore, state: TablesState) -> None:
    for key, by_queue in state.offsets.items():
        for queue_id, offset in cut_offsets(store, key.partition("@")[0], by_queue):
            logger.warning("group_log.offset_truncated key=%s queue=%d to=%d", key, queue_id, offset)
            by_queue[queue_id] = offset


def cut_offsets(store: MessageStore, topic: str, by_queue: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yields (queue id, end as queue offset) for each queue of a topic that ends before its offset in `by_queue`.

    Yields none for the queues of transactions: `TransactionService` must see that its progress is beyond their ends.
    """
    if topic in (HALF_TOPIC, OP_TOPIC):
        return
    for queue_id, offset in list(by_queue.items()):
        end = store.log.next_queue_offset(topic, queue_id)
        if offset > end:
            yield queue_id, end


async def _newest_snapshot(store: MessageStore, queue: ConsumeQueue) -> tuple[int, int] | None:
    """Returns the queue offsets of the first and the last part of the newest complete snapshot; None if there is
    none."""
    last = epoch = missing = -1
    end = queue.max_offset
    while end > queue.min_offset:
        begin = max(queue.min_offset, end - ENTRY_COUNT)
        entries = queue.read_readable(begin, end - begin)
        for number in range(len(entries) - 1, -1, -1):
            if entries[number].tags_code != SNAPSHOT_TAGS_CODE:
                continue
            record = await _record(store, entries[number])
            if record is None or record.snapshot is None:
                missing = -1
                continue
            part = record.snapshot
            if missing < 0 or part.part != missing or record.epoch != epoch or part.is_last:
                if not part.is_last:  # part of an incomplete snapshot
                    missing = -1
                    continue
                last, epoch, missing = begin + number, record.epoch, part.part
            if part.part == 0:
                return begin + number, last
            missing -= 1
        end = begin
    return None


async def _record(store: MessageStore, entry: QueueEntry) -> TablesRecord | None:
    """Returns the record that a queue entry points to; None if it can't be read."""
    if entry.size <= 0 or entry.size == BLANK_SIZE:
        return None
    try:
        raw = await store.log.read_all(entry.physical_offset, entry.size)
        record = decode_record(raw)
        return decode_tables_record(record.body) if record.topic == TABLES_TOPIC else None
    except (DamagedBytes, OffsetGone, RemoteProtocolError):
        return None
