"""Pass 1 of reindex, on an executor: one range of the log into its parts of the consume queues and a file of keys.

Only headers and properties are read, never a body. What becomes a queue entry or a key is what a broker's dispatch
makes of a record (`ha.protocol.record.scan_record` says the same one record at a time): queues get what is no
transaction or committed, the index everything but what was rolled back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ha.arrow.decode import decode_batch
from ha.arrow.read_options import ReadOptions
from ha.arrow.segments import Segment, Segments, walk_sizes
from ha.errors import CorruptLog, RecordsGone, StoreUnreadable
from ha.protocol.codes import SysFlag
from ha.protocol.entry_dtypes import ENTRY_DTYPE
from ha.protocol.properties import delivery_time_ms, find_property, java_hash
from ha.protocol.record import RECORD_SIZE_MIN
from ha.protocol.topic_names import SCHEDULE_TOPIC, is_queue_directory
from ha.spark.jobs.reindex.hash import as_signed, java_hashes, key_hashes
from ha.spark.jobs.reindex.index import KEY_DTYPE, Keys
from ha.spark.jobs.reindex.queues import (
    Entries,
    OrderedQueue,
    QueuePart,
    QueueSlices,
    QueueSummary,
    queue_directory,
    remove_queue,
    sync_files,
)

_COLUMNS = (
    "topic",
    "queueId",
    "queueOffset",
    "physicalOffset",
    "storeSize",
    "tags",
    "keys",
    "uniqKey",
    "sysFlag",
    "storeTimestamp",
    "propertiesString",
)
_TAG_INFIX = "#T#"
_WALK_BYTES = 16 << 20
_BATCH_ROWS = 1 << 14

Int64s = npt.NDArray[np.int64]


class ScanTask(msgspec.Struct, frozen=True):
    """What pass 1 is told: where the log is and where the files go, sizes as of the plan."""

    commitlog: str
    target: str
    work: str
    file_entries: int
    index_enabled: bool
    index_tags: bool
    delay_levels_ms: tuple[int, ...]


class LogRange(msgspec.Struct, frozen=True):
    """Range `number` of the log: the whole segments in [begin, end) (bytes).

    `is_last`: the log ends in its last segment, at the first record that is not sound, as recovery has it. Everywhere
    else that is damage.
    """

    number: int
    begin: int
    end: int
    is_last: bool


class RangeSummary(msgspec.Struct):
    """What was found in a range; also the mark, in the work directory, that it need not be read again."""

    number: int
    end: int
    """Physical offset behind the last record, or the range's own end"""
    end_reason: str
    """What is there instead of another record; empty where only zeros follow, or the range is full"""
    record_count: int
    key_count: int
    unusable_count: int
    """Records whose topic or queue id can't be a directory"""
    parts: list[QueuePart]


def summary_path(work: str | Path, number: int) -> Path:
    """Return the file that says that a range is done."""
    return Path(work) / f"range-{number:06d}.json"


def keys_path(work: str | Path, number: int) -> Path:
    """Return the file with a range's keys."""
    return Path(work) / f"range-{number:06d}.keys"


def scan_range(task: ScanTask, log_range: LogRange) -> RangeSummary:
    """Build a range's parts, unless an earlier attempt did. CorruptLog where the log is damaged, RecordsGone if its
    files vanished."""
    done = summary_path(task.work, log_range.number)
    if done.exists():
        return msgspec.json.decode(done.read_bytes(), type=RangeSummary)
    slices = QueueSlices(Path(task.target), task.file_entries)
    record_count = key_count = unusable_count = 0
    walk = RangeWalk(task, log_range)
    with keys_path(task.work, log_range.number).open("wb") as keys_file:
        for records in walk:
            record_count += len(records)
            for topic, queue_id, offsets, entries in records.by_queue():
                if is_queue_directory(topic, queue_id):
                    slices.add(topic, queue_id, offsets, entries)
                else:
                    unusable_count += len(entries)
            if task.index_enabled:
                keys = records.keys()
                key_count += len(keys)
                keys_file.write(keys.tobytes())
        keys_file.flush()
        os.fsync(keys_file.fileno())
    summary = RangeSummary(
        log_range.number, walk.end, walk.end_reason, record_count, key_count, unusable_count, slices.finish()
    )
    partial = done.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(summary))
    partial.rename(done)
    return summary


class InOrder(msgspec.Struct, frozen=True):
    """What rebuilding in order made of a queue."""

    topic: str
    queue_id: int
    entry_count: int
    dropped_count: int


def rebuild_in_order(task: ScanTask, ranges: Sequence[LogRange], queues: Sequence[QueueSummary]) -> list[InOrder]:
    """Build queues that are not dense from their records in order, in one walk over all ranges."""
    root = Path(task.target)
    ordered = {(q.topic, q.queue_id): OrderedQueue(root, task.file_entries, q.topic, q.queue_id) for q in queues}
    for topic, queue_id in ordered:
        remove_queue(queue_directory(root, topic, queue_id))
    for log_range in ranges:
        for records in RangeWalk(task, log_range):
            for topic, queue_id, offsets, entries in records.by_queue():
                queue = ordered.get((topic, queue_id))
                if queue is not None:
                    queue.add(offsets, entries)
    for (topic, queue_id), queue in ordered.items():
        if queue.begin is not None:
            sync_files(queue_directory(root, topic, queue_id))
    return [
        InOrder(topic, queue_id, 0 if queue.begin is None else queue.end - queue.begin, queue.dropped)
        for (topic, queue_id), queue in ordered.items()
    ]


class RangeWalk:
    """The records of a range by their sizes alone, a batch at a time; behind the last, where and why it ended."""

    def __init__(self, task: ScanTask, log_range: LogRange) -> None:
        self._task = task
        self._range = log_range
        self.end = log_range.end
        self.end_reason = ""

    def __iter__(self) -> Iterator[Records]:
        log_range = self._range
        segments = Segments(Path(self._task.commitlog))
        at = log_range.begin
        while at < log_range.end:
            segment = segments.find(at)
            buffer = None if segment is None else segments.buffer(segment)
            if segment is None or buffer is None or segment.start != at:
                raise RecordsGone(self._task.commitlog, at, log_range.end, "the file is gone or was replaced")
            yield from self._segment(segment, buffer, may_end=log_range.is_last and segment.end == log_range.end)
            at = segment.end
            segments.close()  # what stays mapped counts as this process's memory

    def _segment(self, segment: Segment, buffer: pa.Buffer, *, may_end: bool) -> Iterator[Records]:
        # The last segment is read as recovery reads it: body CRCs included, and the first bad record is the end.
        columns = (*_COLUMNS, "crcOk") if may_end else _COLUMNS
        options = ReadOptions(columns=columns, decompress=False, on_damage="report" if may_end else "fail")
        position = 0
        while position < segment.size:
            walk = walk_sizes(buffer, position, min(position + _WALK_BYTES, segment.size))
            for first in range(0, len(walk.positions), _BATCH_ROWS):
                positions = walk.positions[first : first + _BATCH_ROWS]
                batch = decode_batch(
                    buffer, positions, base_offset=segment.start, broker_name="", options=options, file=segment.path
                )
                if may_end and not pc.all(batch.column("crcOk")).as_py():
                    sound = int(np.argmin(batch.column("crcOk").to_numpy(zero_copy_only=False)))
                    self._stop(segment, int(positions[sound]), "a record is cut or its body CRC is wrong")
                    yield Records(self._task, batch.slice(0, sound), segment.path)
                    return
                yield Records(self._task, batch, segment.path)
            position = walk.stopped_at
            if walk.reason == "filler":
                return
            if walk.reason:
                if not may_end:
                    raise CorruptLog(segment.path, position, walk.reason)
                rest = memoryview(buffer)[position : position + RECORD_SIZE_MIN]
                self._stop(segment, position, walk.reason if any(rest) else "")
                return

    def _stop(self, segment: Segment, position: int, reason: str) -> None:
        self.end = segment.start + position
        self.end_reason = reason


class Records:
    """A batch of records as dispatch sees them."""

    def __init__(self, task: ScanTask, batch: pa.RecordBatch, file: Path) -> None:
        self._task = task
        self._batch = batch
        topics = pc.dictionary_encode(batch.column("topic"))
        self._topics: list[str] = topics.dictionary.to_pylist()
        self._topic_codes = topics.indices.to_numpy().astype(np.int64)
        self._physical = batch.column("physicalOffset").to_numpy()
        self._store_ms = batch.column("storeTimestamp").cast(pa.int64()).to_numpy() // 1000
        sys_flag = batch.column("sysFlag").to_numpy()
        self._transaction = sys_flag & SysFlag.TRANSACTION_MASK
        if (sys_flag & SysFlag.INNER_BATCH).any():
            at = int(self._physical[np.flatnonzero(sys_flag & SysFlag.INNER_BATCH)[0]])
            raise StoreUnreadable(
                file, f"the record at physical offset {at} is for a batch consume queue, which reindex can't build"
            )
        self._tag_hashes, self._tag_powers = java_hashes(batch.column("tags"))

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def by_queue(self) -> list[tuple[str, int, Int64s, Entries]]:
        """(topic, queue id, queue offsets, entries) of every queue with records that consumers may see."""
        batch = self._batch
        is_visible = (self._transaction == SysFlag.TRANSACTION_NOT) | (self._transaction == SysFlag.TRANSACTION_COMMIT)
        entries = np.empty(batch.num_rows, ENTRY_DTYPE)
        entries["physical_offset"] = self._physical
        entries["size"] = batch.column("storeSize").to_numpy()
        entries["tags_code"] = self._tags_codes()
        queue_ids = batch.column("queueId").to_numpy().astype(np.int64)
        queues = self._topic_codes << 32 | queue_ids & 0xFFFFFFFF
        order = np.argsort(queues, kind="stable")
        order = order[is_visible[order]]
        if not len(order):
            return []
        queues = queues[order]
        starts = [0, *(np.flatnonzero(queues[1:] != queues[:-1]) + 1).tolist()]
        offsets = batch.column("queueOffset").to_numpy()[order]
        entries = entries[order]
        return [
            (
                self._topics[int(queues[begin]) >> 32],
                int(queue_ids[order[begin]]),
                offsets[begin:end],
                entries[begin:end],
            )
            for begin, end in zip(starts, [*starts[1:], len(order)], strict=True)
        ]

    def _tags_codes(self) -> Int64s:
        codes = as_signed(self._tag_hashes).astype(np.int64)
        if SCHEDULE_TOPIC in self._topics:
            levels_ms = self._task.delay_levels_ms
            properties = self._batch.column("propertiesString")
            for row in np.flatnonzero(self._topic_codes == self._topics.index(SCHEDULE_TOPIC)).tolist():
                delay = find_property((properties[row].as_py() or "").encode(), b"DELAY")
                try:
                    level = int(delay) if delay else 0
                except ValueError:
                    level = 0
                if level > 0:
                    codes[row] = delivery_time_ms(level, int(self._store_ms[row]), levels_ms)
        return codes

    def keys(self) -> Keys:
        """The index's keys in order: per record its UNIQ_KEY, the words of KEYS, and its tag where tags are indexed."""
        batch = self._batch
        is_indexed = self._transaction != SysFlag.TRANSACTION_ROLLBACK
        has_unique = is_indexed & _is_some(batch.column("uniqKey"))
        has_tag = is_indexed & _is_some(batch.column("tags")) & self._task.index_tags
        word_lists = batch.column("keys")
        word_counts = pc.fill_null(pc.list_value_length(word_lists), 0).to_numpy().astype(np.int64)
        words = word_lists.flatten()
        owners = np.repeat(np.arange(batch.num_rows), word_counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(word_counts) - word_counts, word_counts)

        counts = has_unique + np.where(is_indexed, word_counts, 0) + has_tag
        ends = np.cumsum(counts)
        starts = ends - counts
        keys = np.empty(int(ends[-1]) if len(ends) else 0, KEY_DTYPE)
        keys["physical_offset"] = np.repeat(self._physical, counts)
        keys["store_ms"] = np.repeat(self._store_ms, counts)

        prefixes = self._prefixes("#")
        hashes, powers = java_hashes(batch.column("uniqKey"))
        keys["key_hash"][starts[has_unique]] = key_hashes(prefixes * powers + hashes)[has_unique]
        hashes, powers = java_hashes(words)
        taken = is_indexed[owners]
        places = (starts + has_unique)[owners] + within
        keys["key_hash"][places[taken]] = key_hashes(prefixes[owners] * powers + hashes)[taken]
        if has_tag.any():
            tag_keys = key_hashes(self._prefixes(_TAG_INFIX) * self._tag_powers + self._tag_hashes)
            keys["key_hash"][ends[has_tag] - 1] = tag_keys[has_tag]
        return keys

    def _prefixes(self, infix: str) -> npt.NDArray[np.uint32]:
        """Per record, the hash of what stands before its keys."""
        hashes: npt.NDArray[np.uint32] = np.array(
            [java_hash(topic + infix) & 0xFFFFFFFF for topic in self._topics], np.uint32
        )
        mine: npt.NDArray[np.uint32] = hashes[self._topic_codes]
        return mine


def _is_some(strings: pa.StringArray) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.fill_null(pc.greater(pc.binary_length(strings), 0), False).to_numpy(
        zero_copy_only=False
    )
    return found
