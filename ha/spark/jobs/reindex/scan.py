"""Pass 1 of reindex: writes the queue entries and keys of one range of the log, on an executor.

`build_in_order` afterwards builds the queues that are not dense. `ha.protocol.record_digest`, which the store's
dispatcher uses as well, derives entries and keys from the records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ha.arrow.heads import HEAD, gather
from ha.arrow.queues import ENTRY_DTYPE
from ha.arrow.segments import Segment, Segments
from ha.errors import CorruptLog, RecordsGone, RemoteProtocolError, StoreUnreadable
from ha.protocol.codes import SysFlag
from ha.protocol.record import RECORD_SIZE_MIN, Filler, sound_records, verify_record
from ha.protocol.record_digest import KEY_SIZE, RecordDigest, digest_records
from ha.protocol.store_files import ENTRY_SIZE
from ha.protocol.topic_names import is_queue_directory
from ha.spark.jobs.reindex.queues import (
    OrderedQueue,
    QueuePart,
    QueueSlices,
    queue_directory,
    remove_queue,
    sync_files,
)
from ha.store.files import boot_id

_CHUNK_BYTES = 16 << 20
_CHUNK_RECORDS = 1 << 14
_PHYSICAL_OFFSET_AT = 28


class ScanTask(msgspec.Struct, frozen=True):
    """Settings that all tasks share: directories of the log, the target and the work files, and how to make entries and
    keys. `file_entries`: number of entries of a queue file."""

    commitlog: str
    target: str
    work: str
    file_entries: int
    index_enabled: bool
    index_tags: bool
    delay_levels_ms: tuple[int, ...]


class LogRange(msgspec.Struct, frozen=True):
    """Range `number` of the log: the whole segments in [begin, end) (bytes).

    `is_last`: whether the range has the log's last segment. There the log ends at the first invalid record, as in
    recovery; anywhere else an invalid record is damage.
    """

    number: int
    begin: int
    end: int
    is_last: bool


class RangeSummary(msgspec.Struct):
    """The result of a range; written to the work directory, it marks the range as done."""

    number: int
    end: int
    """Physical offset at which the records of the range end: before the range's end only if the log ends in this
    range"""
    end_reason: str
    """Why the bytes at `end` are not a record; "" if zeros follow, or if the range ends there"""
    record_count: int
    key_count: int
    unusable_count: int
    """Number of records whose topic or queue id can't be a directory"""
    parts: list[QueuePart]
    boot_id: str | None = None
    """Boot id of the executor's machine, None if unknown. Entries are synced only at the end of the job, so a reboot
    may lose them."""


def summary_path(work: str | Path, number: int) -> Path:
    """Returns the path of a range's summary."""
    return Path(work) / f"range-{number:06d}.json"


def keys_path(work: str | Path, number: int) -> Path:
    """Returns the path of the file with a range's keys."""
    return Path(work) / f"range-{number:06d}.keys"


def scan_range(task: ScanTask, log_range: LogRange) -> RangeSummary:
    """Writes a range's entries and keys, and returns the summary. If an earlier attempt on this machine has finished
    the range since the last boot, only returns its summary.

    Raises CorruptLog if the log is damaged, StoreUnreadable for records of batch queues, RecordsGone if a file of the
    log vanished or was replaced, and OSError.
    """
    done = summary_path(task.work, log_range.number)
    boot = boot_id()
    if done.exists():
        earlier = msgspec.json.decode(done.read_bytes(), type=RangeSummary)
        if boot is not None and earlier.boot_id == boot:
            return earlier
    slices = QueueSlices(Path(task.target), task.file_entries)
    record_count = key_count = unusable_count = 0
    walk = RangeWalk(task, log_range)
    with keys_path(task.work, log_range.number).open("wb") as keys_file:
        for digest in walk:
            record_count += digest.count
            for run in digest.queues:
                if is_queue_directory(run.topic, run.queue_id):
                    slices.add(run)
                else:
                    unusable_count += len(run.entries) // ENTRY_SIZE
            key_count += len(digest.keys) // KEY_SIZE
            keys_file.write(digest.keys)
        keys_file.flush()
        os.fsync(keys_file.fileno())
    summary = RangeSummary(
        log_range.number, walk.end, walk.end_reason, record_count, key_count, unusable_count, slices.finish(), boot
    )
    partial = done.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(summary))
    partial.rename(done)
    return summary


class OrderedResult(msgspec.Struct, frozen=True):
    """Result of building one queue from its records in order."""

    topic: str
    queue_id: int
    entry_count: int
    dropped_count: int


def build_in_order(task: ScanTask, ranges: Sequence[LogRange], queues: Sequence[QueuePart]) -> list[OrderedResult]:
    """Builds queues that are not dense from their records in order, in one walk over all ranges.

    Errors as in `scan_range`.
    """
    root = Path(task.target)
    ordered = {(q.topic, q.queue_id): OrderedQueue(root, task.file_entries, q.topic, q.queue_id) for q in queues}
    for topic, queue_id in ordered:
        remove_queue(queue_directory(root, topic, queue_id))
    for log_range in ranges:
        for digest in RangeWalk(task, log_range):
            for run in digest.queues:
                queue = ordered.get((run.topic, run.queue_id))
                if queue is not None:
                    queue.add(run)
    for (topic, queue_id), queue in ordered.items():
        if queue.entry_count:
            sync_files(queue_directory(root, topic, queue_id))
    return [
        OrderedResult(topic, queue_id, queue.entry_count, queue.dropped) for (topic, queue_id), queue in ordered.items()
    ]


class RangeWalk:
    """Iterates over the digests of a range's records, in order.

    After the last one, `end` and `end_reason` have the values for `RangeSummary`.
    """

    def __init__(self, task: ScanTask, log_range: LogRange) -> None:
        self._task = task
        self._range = log_range
        self.end = log_range.end
        self.end_reason = ""

    def __iter__(self) -> Iterator[RecordDigest]:
        log_range = self._range
        segments = Segments(Path(self._task.commitlog))
        at = log_range.begin
        while at < log_range.end:
            mapped = segments.mapped_at(at)
            if mapped is None or mapped[0].start != at:
                raise RecordsGone(self._task.commitlog, at, log_range.end, "the file is gone or was replaced")
            segment, buffer = mapped
            with memoryview(buffer) as view:
                yield from self._digests(segment, view, may_end=log_range.is_last and segment.end == log_range.end)
            at = segment.end
            segments.close()  # mapped files count as memory of this process

    def _digests(self, segment: Segment, view: memoryview, *, may_end: bool) -> Iterator[RecordDigest]:
        task = self._task
        stop = segment.size
        if may_end:
            stop, reason = _sound_end(segment, view)
            if stop < segment.size:
                self.end = segment.start + stop
                self.end_reason = reason if any(view[stop : stop + RECORD_SIZE_MIN]) else ""
        position = 0
        while position < stop:
            digest = digest_records(
                view[position:stop],
                segment.start + position,
                segment.end,
                count_max=_CHUNK_RECORDS,
                bytes_max=_CHUNK_BYTES,
                delay_levels_ms=task.delay_levels_ms,
                with_keys=task.index_enabled,
                with_tags=task.index_tags,
            )
            if not digest.size:
                reason = "the file ends" if digest.damage is None else digest.damage.reason
                raise CorruptLog(segment.path, position, reason)
            _refuse_batches(segment, view, digest)
            yield digest
            position += digest.size


def _sound_end(segment: Segment, view: memoryview) -> tuple[int, str]:
    """Returns the position (bytes) in the log's last segment at which its valid records end, checked as in recovery,
    and the reason why the next bytes are not a record."""
    at = 0
    while at < segment.size:
        raw = bytes(view[at : at + _CHUNK_BYTES])
        size, _ = sound_records(raw, segment.start + at, len(raw))
        if not size:  # the end, or a record of a kind that only `verify_record` knows
            try:
                found = verify_record(view, at, segment.size)
            except RemoteProtocolError as error:
                return at, str(error)
            if isinstance(found, Filler):
                return segment.size, ""
            own = int.from_bytes(view[at + _PHYSICAL_OFFSET_AT : at + _PHYSICAL_OFFSET_AT + 8], "big", signed=True)
            if own != segment.start + at:
                return at, f"the record's own field names physical offset {own}"
            size = found
        at += size
    return at, ""


def _refuse_batches(segment: Segment, view: memoryview, digest: RecordDigest) -> None:
    entries = np.frombuffer(b"".join(run.entries for run in digest.queues), ENTRY_DTYPE)
    positions = entries["physical_offset"].astype(np.int64) - segment.start
    sys_flags = gather(np.frombuffer(view, np.uint8), positions, HEAD)["sys_flag"]
    found = np.flatnonzero(sys_flags & SysFlag.INNER_BATCH)
    if len(found):
        at = int(entries["physical_offset"][found].min())
        raise StoreUnreadable(
            segment.path, f"the record at physical offset {at} is for a batch consume queue, which reindex can't build"
        )
