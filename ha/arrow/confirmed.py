"""Finds the confirmed ends of queues and of the log, which may be before the end of their files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ha.arrow.heads import Heads
from ha.arrow.places import LIGHT_QUEUE_PREFIX
from ha.arrow.queues import ENTRY_DTYPE, QueueFiles, QueueId
from ha.arrow.segments import Segments, walk_sizes
from ha.protocol.record import RecordHead, scan_record
from ha.protocol.store_files import BLANK_SIZE


class Confirmed:
    """The confirmed ends of queues (in entries) and of the log, each found when it is first asked for.

    A node adds a record to a queue only when the record is complete and confirmed, so the end of the last queued record
    is the log's confirmed end. RocketMQ does not clear entries that it truncates after a crash. So a queue's last
    entries count only if they lie before the confirmed end or agree with their record.
    """

    def __init__(self, segments: Segments, queues: Mapping[QueueId, QueueFiles], *, examines_all: bool = False) -> None:
        """`examines_all`: the first call of `queue_end` examines all queues, so that the log's end is known as well."""
        self._segments = segments
        self._queues = queues
        self._examines_all = examines_all
        self._ends: dict[QueueId, int] = {}
        self.last_messages: dict[QueueId, int] = {}
        """Physical offset of the last message of each queue examined so far, if the record agrees with its entry"""
        self.known_end_offset = segments.min_offset
        """Lower bound of the log's confirmed end (physical offset), from the queues examined so far"""
        self.is_complete = False
        """Whether all queues have been examined"""

    @property
    def examined_count(self) -> int:
        """Number of queues examined so far."""
        return len(self._ends)

    @property
    def end_offset(self) -> int:
        """Physical offset of the log's confirmed end. Examines all queues."""
        self._examine_all()
        return self.known_end_offset

    def queue_end(self, key: QueueId) -> int:
        """Returns the position after a queue's last confirmed entry. Raises KeyError if there is no such queue."""
        if key not in self._ends and (self._examines_all or self._examine(key) is not None):
            self._examine_all()
        return self._ends[key]

    def _examine(self, key: QueueId) -> int | None:
        """Finds a queue's end. Stores it in `_ends` and returns None if it is confirmed; otherwise returns the end of
        the queue's entries, which is to be compared with the log's end."""
        queue = self._queues[key]
        end = queue.find_end()
        record = self._last_record(key, end)
        if record is not None:
            self.last_messages[key], record_end = record
            self.known_end_offset = max(self.known_end_offset, record_end)
        elif not len(self._segments) or not self._is_before_end(queue, end):
            return end
        self._ends[key] = end
        return None

    def _examine_all(self) -> None:
        if self.is_complete:
            return
        doubtful = {
            key: end for key in self._queues if key not in self._ends and (end := self._examine(key)) is not None
        }
        for key, end in doubtful.items():
            self._ends[key] = self._agreeing_end(key, end)
        if not self._queues:
            self.known_end_offset = self._end_by_walk()
        self.is_complete = True

    def _last_record(self, key: QueueId, end: int) -> tuple[int, int] | None:
        return self.record_of(key, max(self._queues[key].first, end - 1))

    def record_of(self, key: QueueId, position: int) -> tuple[int, int] | None:
        """Returns the physical offsets [begin, end) of the record of a queue's entry; None if the entry is missing or
        blank, or if the record there does not agree with it."""
        queue = self._queues[key]
        start, entries = queue.read(position, position + 1)
        if not len(entries) or entries["size"][0] == BLANK_SIZE:
            return None
        physical, size = int(entries["physical_offset"][0]), int(entries["size"][0])
        raw = self._segments.read(physical, size)
        head = scan_record(raw, 0, len(raw)) if raw is not None else None
        if not isinstance(head, RecordHead) or head.physical_offset != physical or head.total_size != size:
            return None
        is_own = queue.dtype is not ENTRY_DTYPE or key.topic.startswith(LIGHT_QUEUE_PREFIX)
        is_own = is_own or (head.topic, head.queue_id, head.queue_offset) == (*key, start)
        return (physical, physical + size) if is_own else None

    def _is_before_end(self, queue: QueueFiles, end: int) -> bool:
        """Returns whether a queue's last entry lies before the confirmed end, so that it need not be compared with a
        record."""
        _, entries = queue.read(max(queue.first, end - 1), end)
        if not len(entries):
            return True
        size, physical = int(entries["size"][-1]), int(entries["physical_offset"][-1])
        if size == BLANK_SIZE:
            return physical == 0  # all entries are blank: the queue began here, or its topic was deleted
        return physical + size <= self.known_end_offset

    def _agreeing_end(self, key: QueueId, end: int) -> int:
        """Returns the end of the queue's confirmed entries.

        Steps back from `end`, the end of all its entries, until the last one lies before the log's confirmed end or
        agrees with its record; in the latter case, raises `known_end_offset` to the end of that record if it is lower.
        """
        queue = self._queues[key]
        if not len(self._segments):
            return queue.first  # a resync has just set the log aside, so no entry has a record
        while end > queue.first and not self._is_before_end(queue, end):
            record = self._last_record(key, end)
            if record is not None:
                self.known_end_offset = max(self.known_end_offset, record[1])
                break
            end -= 1
        return end

    def _end_by_walk(self) -> int:
        """Returns the log's confirmed end (physical offset) if there are no queues: the end of the sound records at the
        beginning of the last segment that begins with one."""
        for segment in reversed(self._segments.all()):
            buffer = self._segments.buffer(segment)
            if buffer is None:
                continue
            found = walk_sizes(buffer, 0, segment.size)
            if not len(found.positions):
                continue
            heads = Heads(np.frombuffer(buffer, np.uint8), found.positions, segment.start)
            count = len(heads) if heads.sound.all() else int(np.argmin(heads.sound))
            if count:
                return segment.start + int(heads.record_end[count - 1])
        return self._segments.min_offset
