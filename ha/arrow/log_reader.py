"""Reads a store directory without its broker: queues, records, times, keys. Writes nothing.

Queues and log are read up to their confirmed ends (ha/arrow/confirmed.py).

The reader chooses runs of records; `ha.arrow.batches` decodes them into record batches. Only decoding needs pyarrow,
which is imported on first use.

A node that starts after a crash removes entries that a power failure may have torn, and writes them again. A read that
was planned before, such as a Spark task, waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ha.arrow.confirmed import Confirmed
from ha.arrow.deleted import created_at
from ha.arrow.heads import Heads, Int64s
from ha.arrow.key_index import KeyHits, find_keys
from ha.arrow.places import LIGHT_QUEUE_PREFIX, Places, RecordRun, is_scheduled, merged_places, queue_places, split_rows
from ha.arrow.queues import BATCH_ENTRY_DTYPE, ENTRY_DTYPE, Entries, QueueFiles, QueueId, Queues
from ha.arrow.read_options import ReadCounts, ReadOptions, RowFilter
from ha.arrow.replicas import stored_broker_name
from ha.arrow.segments import Segment, Segments, is_set_aside
from ha.arrow.settled import settled_end
from ha.arrow.walking import Damage, Walker
from ha.errors import RecordsGone, StoreUnreadable
from ha.protocol.properties import tags_code
from ha.protocol.store_files import BLANK_SIZE

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_ENTRIES = 65_536
_RANGE_BYTES = 64 << 20
"""Size in bytes of the pieces in which a range is read and sorted in memory."""
_TAG_CODE_MIN = -(1 << 31)
"""Lowest tags code that is a hash; lower ones are addresses in a consume-queue extension file."""
_REWRITE_TIMEOUT_S = 60.0
"""Maximum time to wait for entries that a recovering node writes again, in seconds. The files are polled for them."""
_POLL_INTERVAL_S = 0.05
_DELETED_MS = -1 << 63
"""Stands for the store time of a record that retention deleted; lower than any other"""
_QUEUES_CHEAP = 256
_QUEUES_SHARE = 4
"""If more than _QUEUES_CHEAP queues, and at least 1/_QUEUES_SHARE of all queues, were examined before a refresh, all
queues are examined after it. The reader then knows the log's end, by which later refreshes recognize an unchanged
log."""
_UNCHANGED_MAX_S = 15.0
"""Maximum time in seconds for which queues are not read again while the log has no new record. A deleted topic, and
entries that a node writes again after a crash, show only in the queues."""


class QueueRange(NamedTuple):
    """Queue offsets [begin, end) that can be read now."""

    begin: int
    end: int


class LogReader:
    """A store directory opened for reading; a context manager that closes it. Cheap to open.

    Its state is that of the last `refresh`, or of its construction: call `refresh` before planning a read. Can't be
    pickled: to read in another process, pass it the path and the broker name, and open a reader there.
    """

    def __init__(self, path: str | Path, *, broker_name: str | None = None) -> None:
        """`broker_name` (default: the one that the store states, else the directory's name) fills the column
        brokerName. Raises StoreUnreadable if `path` is not a store, or if its log can't be listed."""
        self.path = Path(path)
        if broker_name is None:
            broker_name = stored_broker_name(self.path) or self.path.resolve().name
        self.broker_name = broker_name
        commitlog = self.path / "commitlog"
        if not commitlog.is_dir() and not is_set_aside(commitlog):
            if not self.path.exists():
                reason = "the directory does not exist"
            else:
                reason = "it has no folder 'commitlog'; give the directory that storePathRootDir names"
            raise StoreUnreadable(self.path, reason)
        self.counts = ReadCounts()
        self.damages: list[Damage] = []
        self._segments = Segments(commitlog)
        self._queues = Queues(self.path)
        self._confirmed: Confirmed | None = None
        self._settled: int | None = None
        self._was_in_use = self._may_change()
        self._refreshed_s = monotonic()
        self._end_before: int | None = None
        """Confirmed end of the log (physical offset) in the state before the last refresh; None if it was not found, or
        if the segments have changed since"""
        self._examines_all = False

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the files; batches already returned stay valid."""
        self._segments.close()

    # ---- contents

    def refresh(self) -> bool:
        """Reads the directories again: new and deleted segments, new queues, a replaced log. Raises StoreUnreadable if
        the log can't be listed.

        Returns False, and keeps the state, if nothing has changed: the segments are the same, and so is the log's
        confirmed end, after which there is no record. This avoids reading thousands of queues. After _UNCHANGED_MAX_S
        they are read again in any case.
        """
        has_changed = self._segments.refresh()
        confirmed = self._confirmed
        end = confirmed.end_offset if confirmed is not None and confirmed.is_complete else None
        is_last = end is not None and not self._segments.has_record(end)
        is_recent = monotonic() - self._refreshed_s < _UNCHANGED_MAX_S
        if not has_changed and is_recent and is_last and end == self._end_before == self.end_offset():
            return False
        asked = 0 if confirmed is None else confirmed.examined_count
        self._examines_all = asked > _QUEUES_CHEAP and asked * _QUEUES_SHARE >= len(self._queues)
        self._was_in_use = self._may_change()
        self._queues.refresh()
        self._confirmed = None
        self._settled = None
        self._refreshed_s = monotonic()
        self._end_before = None if has_changed else end
        return True

    @property
    def min_offset(self) -> int:
        """First physical offset of the log; 0 if it has no segment."""
        return self._segments.min_offset

    def end_offset(self) -> int:
        """Returns the physical offset up to which the log can be read by ranges: every record before it is in its
        queue, as this reader has examined it.

        If a broker runs or has crashed, the first call after a `refresh` lists and examines all queues a second time,
        unless the log's end is still the one known before the `refresh`. This can raise the ends of queues and
        `queued_end`, but not the returned offset.
        """
        if self._settled is None:
            end = self._confirm().end_offset
            if self._was_in_use or self._may_change():
                if end != self._end_before:  # it was not known before the first queue was examined
                    self._queues.refresh()
                    self._confirmed = None
                end = settled_end(self.path, self._segments, self._queues, self._confirm(), end)
            self._settled = end
        return self._settled

    def queued_end(self) -> int:
        """Returns the physical offset after the last queued record; earlier records may still be missing from their
        queues."""
        return self._confirm().end_offset

    def size_min(self) -> int:
        """Returns a lower bound of the log's size in bytes, without examining more queues."""
        segments = self._segments.all()
        return max(self._confirm().known_end_offset, segments[-1].start if segments else 0) - self.min_offset

    def topics(self) -> list[str]:
        """Returns every topic with a queue, sorted."""
        return sorted(topic for topic in self._queues.topic_names() if self._queues.of_topic(topic))

    def queues(self, topics: Iterable[str] | None = None) -> list[QueueId]:
        """Returns every queue of `topics` (None: of all) that has a directory, sorted."""
        if topics is None:
            return sorted(self._queues)
        return sorted(QueueId(topic, queue_id) for topic in topics for queue_id in self._queues.of_topic(topic))

    def batch_queues(self, topics: Iterable[str] | None = None) -> list[QueueId]:
        """Returns the batch queues of `topics` (None: of all), sorted. `read_range` does not yield their messages."""
        return [key for key in self.queues(topics) if self._queues[key].dtype is BATCH_ENTRY_DTYPE]

    def check_has_queues(self) -> None:
        """Raises StoreUnreadable if the log has records but no queue: a read by ranges would return nothing."""
        if self.min_offset < self.end_offset() and not self.queues():
            reason = "its log has records, but 'consumequeue' has no queue; `ha spark reindex` builds the queues"
            raise StoreUnreadable(self.path, reason)

    def queue_range(self, topic: str, queue_id: int) -> QueueRange:
        """Returns the readable part of a queue, from the first message still in the log; (0, 0) if there is no such
        queue."""
        key = QueueId(topic, queue_id)
        queue = self._queues.get(key)
        if queue is None:
            return QueueRange(0, 0)
        end = self._confirm().queue_end(key)
        begin = self._first_message(queue, end)
        if queue.dtype is BATCH_ENTRY_DTYPE:
            return QueueRange(queue.batch_offset(begin), queue.batch_offset(end))
        return QueueRange(begin, end)

    def created_at(self, topic: str, queue_id: int) -> int:
        """Returns the physical offset before which all records of a queue belong to an earlier, deleted topic of the
        same name; 0 if that offset is unknown."""
        return created_at(self._queues, self._confirm(), QueueId(topic, queue_id))

    def _first_message(self, queue: QueueFiles, end: int) -> int:
        """Returns the position of the first entry of a message still in the log; `end` if there is none. An unwritten
        entry counts as one, because a recovering node writes the last entries again."""
        begin, count = queue.first, 1  # nearly always the first entry is a message; otherwise many may be blank
        while begin < end:
            start, entries = queue.read(begin, min(end, begin + count))
            if not len(entries) and queue.lacks_end(begin):
                return begin
            sizes = entries["size"]
            found = (sizes == 0) | ((sizes != BLANK_SIZE) & (entries["physical_offset"] >= self.min_offset))
            if found.any():
                return start + int(np.argmax(found))
            after = max(start, begin) + max(len(entries), 1)
            begin = max(after, queue.search(self.min_offset, end)) if count == 1 else after
            count = _BLOCK_ENTRIES
        return end

    def entries(self, topic: str, queue_id: int, begin: int, end: int) -> Entries:
        """Returns the entries of the queue offsets [begin, end) (ENTRY_DTYPE), zeros for those that no file holds. For
        a batch queue, `begin` and `end` are positions of entries (BATCH_ENTRY_DTYPE)."""
        queue = self._queues.get(QueueId(topic, queue_id))
        found = np.zeros(end - begin, ENTRY_DTYPE if queue is None else queue.dtype)
        at = begin
        while queue is not None and at < end:
            start, entries = queue.read(at, end)
            if not len(entries):
                break
            found[start - begin : start - begin + len(entries)] = entries
            at = start + len(entries)
        return found

    def queue_bytes(self, topic: str, queue_id: int, begin: int, end: int) -> int:
        """Returns the total size in bytes of the records of queue offsets [begin, end); for a batch queue, of all
        batches with a message in that range."""
        queue = self._queues.get(QueueId(topic, queue_id))
        if queue is not None and queue.dtype is BATCH_ENTRY_DTYPE:
            entries, _ = self._batches_within(QueueId(topic, queue_id), queue, begin, end)
            return int(entries["size"].astype(np.int64).sum())
        total = 0
        for low in range(begin, end, _BLOCK_ENTRIES):
            sizes = self.entries(topic, queue_id, low, min(end, low + _BLOCK_ENTRIES))["size"].astype(np.int64)
            total += int(sizes[sizes != BLANK_SIZE].sum())
        return total

    def offset_for_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int | None:
        """Returns the queue offset of the first message (in a batch queue, of the first batch) that was stored at or
        after `timestamp_ms` (ms since the epoch); None if there is none, or no such queue."""
        key = QueueId(topic, queue_id)
        queue = self._queues.get(key)
        if queue is None:
            return None
        position = self._position_for_time(key, queue, timestamp_ms)
        if position >= self._confirm().queue_end(key):
            return None
        return queue.batch_offset(position) if queue.dtype is BATCH_ENTRY_DTYPE else position

    def physical_offset(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Returns the physical offset of a message; -1 if retention deleted its queue entry, or if the queue does not
        exist or is a batch queue; UNWRITTEN if the entry is not written, for example because a recovering node has yet
        to write it again."""
        key = QueueId(topic, queue_id)
        queue = self._queues.get(key)
        if queue is None or queue.dtype is BATCH_ENTRY_DTYPE:
            return -1
        confirmed = self._confirm()
        is_last = queue_offset == confirmed.queue_end(key) - 1
        found = confirmed.last_messages.get(key) if is_last else None
        return queue.physical_offset(queue_offset) if found is None else found

    def physical_offset_for_time(self, timestamp_ms: int) -> int:
        """Returns the lowest physical offset of a queued record that was stored at or after `timestamp_ms` (ms since
        the epoch); the log's confirmed end if there is none."""
        confirmed = self._confirm()
        found = confirmed.end_offset
        for key, queue in self._queues.items():
            position = self._position_for_time(key, queue, timestamp_ms)
            if position < confirmed.queue_end(key):
                found = min(found, queue.physical_offset(position))
        return found

    def key_hits(self, topics: Iterable[str], keys: Iterable[str]) -> KeyHits | None:
        """Looks up `keys` of `topics` in the index; None if there is no usable index. Hits are by hash: compare the
        records' own keys (`find_keys`)."""
        return find_keys(self.path / "index", topics, keys)

    def split(self, begin: int, end: int, bytes_each: int) -> list[tuple[int, int]]:
        """Cuts [begin, end) into ranges of `bytes_each` bytes, of which the last may be shorter; a record belongs to
        the range of its first byte."""
        return [(low, min(low + bytes_each, end)) for low in range(begin, end, bytes_each)]

    # ---- reading

    def read_queue(
        self, topic: str, queue_id: int, begin: int, end: int, options: ReadOptions
    ) -> Iterator[pa.RecordBatch]:
        """Yields the messages of queue offsets [begin, end) in order. Skips blank entries, and waits up to
        _REWRITE_TIMEOUT_S for entries that a recovering node has yet to write again.

        Raises RecordsGone if records are missing and `options.fail_on_data_loss` is set. Raises CorruptLog if a record
        is damaged and `options.on_damage` is "fail". Raises StoreUnreadable if a resync replaces the log meanwhile.
        Raises OptionError if `options.decompress` needs a package that is not installed.
        """
        return self._batches(self.queue_runs(topic, queue_id, begin, end, options), options)

    def _batches(self, runs: Iterator[RecordRun], options: ReadOptions) -> Iterator[pa.RecordBatch]:
        from ha.arrow.batches import batches_of

        return batches_of(runs, self.broker_name, options, self.counts)

    def queue_runs(self, topic: str, queue_id: int, begin: int, end: int, options: ReadOptions) -> Iterator[RecordRun]:
        """Yields the records that `read_queue` decodes."""
        where = options.where
        key = QueueId(topic, queue_id)
        is_light = topic.startswith(LIGHT_QUEUE_PREFIX)
        if where.topics is not None and topic not in where.topics and not is_light:
            return
        if where.queue_ids is not None and queue_id not in where.queue_ids:
            return
        begin = begin if where.queue_offset_begin is None else max(begin, where.queue_offset_begin)
        end = end if where.queue_offset_end is None else min(end, where.queue_offset_end)
        queue = self._queues.get(key)
        if begin >= end:
            return
        if queue is None:
            self._gone(key, begin, end, "the queue does not exist", options)
            return
        if queue.dtype is BATCH_ENTRY_DTYPE:
            yield from self._batch_queue_runs(key, queue, begin, end, options)
            return
        hits = None if is_light else self._hits({key.topic}, options)  # the index has the records' own topics
        position = begin
        while position < end:
            stop = min(end, position + _BLOCK_ENTRIES)
            start, entries, _ = self._written_entries(queue, position, stop)
            if start > position:
                self._gone(key, position, min(start, stop), "their queue entries were deleted", options)
            if start + len(entries) < stop:
                self._gone(key, max(start + len(entries), position), end, "the queue ends before them", options)
                end = stop
            position = stop
            places = queue_places(key, start, entries)
            yield from self._place_runs(places, entries["tags_code"], hits, options)

    def _batches_within(self, key: QueueId, queue: QueueFiles, begin: int, end: int) -> tuple[Entries, Int64s]:
        """Returns a batch queue's entries that hold any of the queue offsets [begin, end), and their first offsets."""
        _, entries = queue.read(queue.first, self._confirm().queue_end(key))
        bases = entries["base_offset"].astype(np.int64)
        chosen = (bases < end) & (bases + entries["batch_size"] > begin)
        return entries[chosen], bases[chosen]

    def _batch_queue_runs(
        self, key: QueueId, queue: QueueFiles, begin: int, end: int, options: ReadOptions
    ) -> Iterator[RecordRun]:
        entries, bases = self._batches_within(key, queue, begin, end)
        if not len(entries) or bases[0] > begin:
            self._gone(key, begin, int(bases[0]) if len(bases) else end, "their queue entries were deleted", options)
        last = int(bases[-1]) + int(entries["batch_size"][-1]) if len(entries) else end
        self._gone(key, last, end, "the queue ends before them", options)
        where = options.where.restrict(RowFilter(queue_offset_begin=begin, queue_offset_end=end))
        narrowed = msgspec.structs.replace(options, where=where)
        places = Places(
            key.topic,
            np.zeros(len(entries), np.int64),
            np.full(len(entries), key.queue_id, np.int64),
            bases,
            entries["physical_offset"].astype(np.int64),
            entries["size"].astype(np.int64),
            is_batch=True,
        )
        yield from self._place_runs(places, None, None, narrowed)

    def read_range(self, begin: int, end: int, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Yields every queued record with begin <= physical offset < end once, in physical order, of all topics.

        Errors as in `read_queue`. Messages of batch queues are not included: read those by queue.
        """
        return self._batches(self.range_runs(begin, end, options), options)

    def range_runs(self, begin: int, end: int, options: ReadOptions) -> Iterator[RecordRun]:
        """Yields the records that `read_range` decodes."""
        where = options.where
        begin = begin if where.physical_begin is None else max(begin, where.physical_begin)
        end = end if where.physical_end is None else min(end, where.physical_end)
        if begin < end:
            self._wait_settled(end)
            self._gone(None, max(begin, self.end_offset()), end, "the queues end before them", options)
        chosen = [
            key
            for key in self.queues(where.topics)
            if (where.queue_ids is None or key.queue_id in where.queue_ids) and self._queues[key].dtype is ENTRY_DTYPE
        ]
        ends = {key: self._confirm().queue_end(key) for key in chosen}
        # A record in an ordinary and a light queue is read through the ordinary one (`merged_places`).
        chosen.sort(key=lambda key: (key.topic.startswith(LIGHT_QUEUE_PREFIX), key))
        hits = self._hits({key.topic for key in chosen}, options)
        if begin < self.min_offset < end or (end <= self.min_offset and begin < end):
            self._gone(None, begin, min(self.min_offset, end), "the segments were deleted", options)
            begin = self.min_offset
        cursors = {key: self._queues[key].search(begin, ends[key]) for key in chosen}
        for low in range(begin, end, _RANGE_BYTES):
            high = min(end, low + _RANGE_BYTES)
            pieces: list[Entries] = []
            starts: list[int] = []
            owners: list[int] = []
            for number, key in enumerate(chosen):
                start, entries, stop = self._written_entries(self._queues[key], cursors[key], ends[key], high)
                self._gone(key, cursors[key], min(start, stop), "their queue entries were deleted", options)
                self._gone(key, start + len(entries), stop, "the queue ends before them", options)
                cursors[key] = stop
                if len(entries):
                    pieces.append(entries)
                    starts.append(start)
                    owners.append(number)
            if pieces:
                places, codes = merged_places(chosen, pieces, starts, owners)
                yield from self._place_runs(places, codes, hits, options)

    def _place_runs(
        self, places: Places, codes: Int64s | None, hits: KeyHits | None, options: ReadOptions
    ) -> Iterator[RecordRun]:
        """Yields the records at `places`, segment by segment, in pieces within the options' bounds."""
        chosen = places.sizes != BLANK_SIZE
        where = options.where
        if where.tags is not None and codes is not None:
            wanted = [tags_code(tag) for tag in where.tags]
            chosen &= np.isin(codes, wanted) | (codes < _TAG_CODE_MIN) | is_scheduled(places)
        if hits is not None:
            chosen &= hits.may_be_at(places.physical_offsets)
        if not chosen.all():
            places = places.keep(chosen)
        row = 0
        count = len(places)
        while row < count:
            physical = int(places.physical_offsets[row])
            mapped = self._segments.current_at(physical)
            if mapped is None:
                known_from = self._segments.min_offset
                last = row + int(np.searchsorted(places.physical_offsets[row:], max(known_from, physical + 1)))
                self._rows_gone(places, row, last, options)
                row = last
                continue
            segment, buffer = mapped
            last = row + int(np.searchsorted(places.physical_offsets[row:], segment.end))
            for low, high in split_rows(places.sizes[row:last], options.batch_rows, options.batch_bytes):
                some = places.keep(np.arange(row + low, row + high))
                yield RecordRun(segment, buffer, some.physical_offsets - segment.start, some, options)
            row = last

    def walk(self, begin: int, end: int, *, on_damage: str = "fail") -> Iterator[Int64s]:
        """Yields the physical offsets of all records that begin in [begin, end), queued or not, as `Walker.walk` does.
        Damage is added to `damages` if `on_damage` is "skip"; otherwise the walk raises CorruptLog."""
        walker = Walker(self._segments, self._queues, self._confirm())
        return walker.walk(begin, end, damages=self.damages if on_damage == "skip" else None)

    def walk_range(self, begin: int, end: int, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Like `read_range`, but steps from record to record by their sizes. So it also yields records that are in no
        consume queue, such as those of prepared or rolled-back transactions, or of deleted topics. Skips missing
        segments. Unless `options.on_damage` is "fail", also skips bytes that are not records, and adds them to
        `damages`."""
        return self._batches(self.walk_runs(begin, end, options), options)

    def walk_runs(self, begin: int, end: int, options: ReadOptions) -> Iterator[RecordRun]:
        """Yields the records that `walk_range` decodes."""
        for offsets in self.walk(begin, end, on_damage="fail" if options.on_damage == "fail" else "skip"):
            mapped = self._segments.mapped_at(int(offsets[0]))
            if mapped is None:
                continue
            segment, buffer = mapped
            sizes = np.diff(offsets, append=offsets[-1])
            for low, high in split_rows(sizes, options.batch_rows, options.batch_bytes):
                yield RecordRun(segment, buffer, offsets[low:high] - segment.start, None, options)

    def bytes_at(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yields the log's raw bytes [begin, end), one view per segment; stops where a segment is missing."""
        at = begin
        while at < end:
            mapped = self._segments.mapped_at(at)
            if mapped is None:
                return
            segment, buffer = mapped
            stop = min(end, segment.end)
            yield buffer[at - segment.start : stop - segment.start]
            at = stop

    def segments(self) -> list[Segment]:
        """Returns the commitlog's files, ascending."""
        return self._segments.all()

    # ---- internal

    def _may_change(self) -> bool:
        """Returns whether a broker runs or has crashed. If not, it stopped cleanly, with all records in their
        queues."""
        return (self.path / "abort").exists()

    def _written_entries(
        self, queue: QueueFiles, begin: int, end: int, physical_end: int | None = None
    ) -> tuple[int, Entries, int]:
        """Returns (position of the first entry, entries, stop) of the entries [begin, stop). `stop` is `end`, or the
        position of the first entry that points to `physical_end` or beyond, if there is one before `end`.

        Waits for entries that a node removed to write them again. If the result still misses some, it begins late
        (their files were deleted) or ends early.
        """
        deadline = monotonic() + _REWRITE_TIMEOUT_S
        while True:
            may_change = self._may_change()
            stop = end if physical_end is None else queue.search(physical_end, end)
            # Includes the entry at which a search ends, which may be a removed one.
            start, entries = queue.read(begin, min(stop + 1, end))
            unwritten = np.flatnonzero(entries["size"] == 0)
            if len(unwritten):
                entries = entries[: unwritten[0]]
            is_whole = stop >= begin and len(entries) == min(stop + 1, end) - begin
            if is_whole and stop < end and physical_end is not None:
                is_whole = int(entries["physical_offset"][-1]) >= physical_end
            if not is_whole:
                queue.refresh()
                was_deleted = queue.first > begin or not queue.has_files
                if not was_deleted and may_change and monotonic() < deadline:
                    sleep(_POLL_INTERVAL_S)
                    queue.refresh()
                    continue
            return start, entries[: max(0, stop - start)], max(stop, begin)

    def _wait_settled(self, end: int) -> None:
        """Waits until the log can be read by ranges up to `end` (physical) again, as it could at planning. Returns
        after _REWRITE_TIMEOUT_S in any case, and at once if no broker runs or crashed."""
        deadline = monotonic() + _REWRITE_TIMEOUT_S
        while self.end_offset() < end:
            may_change = self._may_change() and monotonic() < deadline
            if may_change:
                sleep(_POLL_INTERVAL_S)
            self.refresh()
            if not may_change:
                return

    def _confirm(self) -> Confirmed:
        if self._confirmed is None:
            self._confirmed = Confirmed(self._segments, self._queues, examines_all=self._examines_all)
        return self._confirmed

    def _position_for_time(self, key: QueueId, queue: QueueFiles, timestamp_ms: int) -> int:
        end = self._confirm().queue_end(key)
        low, high = self._first_message(queue, end), end
        while low < high:
            middle = at = (low + high) // 2
            stored_ms = self._stored_ms(queue, at, high)
            while stored_ms is None and at + 1 < high:  # the next record that has a time decides
                at += 1
                stored_ms = self._stored_ms(queue, at, high)
            if stored_ms is None or stored_ms >= timestamp_ms:
                high = middle
            else:
                low = at + 1
        return low

    def _stored_ms(self, queue: QueueFiles, position: int, end: int) -> int | None:
        """Returns the store time of the record at `position`; None for a blank entry or a damaged record, _DELETED_MS
        if retention deleted the record."""
        _, entries, _ = self._written_entries(queue, position, min(position + 1, end))
        if not len(entries):
            return _DELETED_MS
        physical = int(entries["physical_offset"][0])
        if entries["size"][0] == BLANK_SIZE:
            return None
        raw = self._segments.read(physical, int(entries["size"][0]))
        if raw is None:
            return _DELETED_MS if physical < self.min_offset else None
        heads = Heads(np.frombuffer(raw, np.uint8), np.zeros(1, np.int64), physical, check_parts=False)
        return int(heads.field("store_ms")[0]) if heads.sound[0] else None

    def _hits(self, topics: set[str], options: ReadOptions) -> KeyHits | None:
        return None if options.where.keys is None else self.key_hits(topics, options.where.keys)

    def _rows_gone(self, places: Places, first: int, last: int, options: ReadOptions) -> None:
        if places.is_one_queue:
            key = QueueId(places.topics[0], int(places.queue_ids[first]))
            begin, end = int(places.queue_offsets[first]), int(places.queue_offsets[last - 1]) + 1
            self._gone(key, begin, end, "their commitlog segment was deleted", options)
        else:
            begin, end = int(places.physical_offsets[first]), int(places.physical_offsets[last - 1]) + 1
            self._gone(None, begin, end, "their commitlog segment was deleted", options)

    def _gone(self, key: QueueId | None, first: int, end: int, reason: str, options: ReadOptions) -> None:
        if end <= first:
            return
        if options.fail_on_data_loss:
            what = (
                f"the commitlog of {self.path}" if key is None else f"{key.topic} queue {key.queue_id} of {self.path}"
            )
            raise RecordsGone(what, first, end, reason)
        self.counts.gone += end - first
