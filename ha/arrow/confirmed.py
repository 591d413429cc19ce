"""Finds the confirmed end of each queue and of the log, which may be before the end of their files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ha.arrow.heads import HEAD, Heads
from ha.arrow.places import LIGHT_QUEUE_PREFIX
from ha.arrow.queues import ENTRY_DTYPE, QueueFiles, QueueId
from ha.arrow.segments import Segments, walk_sizes
from ha.protocol.store_files import BLANK_SIZE


class Confirmed:
    """The confirmed ends at the time of construction. `queue_ends` count entries, `end_offset` is physical (bytes).

    A node adds a record to a queue only when it is complete and confirmed, so the end of the last queued record is the
    end of the log. RocketMQ does not clear entries that it truncates after a crash: a queue's last entries count only
    if they lie before the confirmed end or agree with their record.
    """

    def __init__(self, segments: Segments, queues: Mapping[QueueId, QueueFiles]) -> None:
        self._segments = segments
        self._queues = queues
        self.queue_ends = {key: queue.find_end() for key, queue in queues.items()}
        self.end_offset = segments.min_offset
        doubtful = []
        for key, end in self.queue_ends.items():
            record_end = self._sound_end(key, end)
            if record_end is None:
                doubtful.append(key)
            else:
                self.end_offset = max(self.end_offset, record_end)
        for key in doubtful:
            self.queue_ends[key] = self._agreeing_end(key, self.queue_ends[key])
        if not queues:
            self.end_offset = self._end_by_walk()

    def _sound_end(self, key: QueueId, end: int) -> int | None:
        """Return the end of the record of the queue's last message; None if there is none that agrees."""
        queue = self._queues[key]
        start, entries = queue.read(max(queue.first, end - 1), end)
        if not len(entries) or entries["size"][-1] == BLANK_SIZE:
            return None
        physical, size = int(entries["physical_offset"][-1]), int(entries["size"][-1])
        raw = self._segments.read(physical, max(size, HEAD.itemsize))
        if raw is None or len(raw) < size:
            return None
        heads = Heads(np.frombuffer(raw, np.uint8), np.zeros(1, np.int64), physical)
        is_sound = bool(heads.sound[0]) and int(heads.total_size[0]) == size
        if is_sound and queue.dtype is ENTRY_DTYPE and not key.topic.startswith(LIGHT_QUEUE_PREFIX):
            own = (int(heads.field("queue_id")[0]), int(heads.field("queue_offset")[0]))
            is_sound = own == (key.queue_id, start + len(entries) - 1)
        return physical + size if is_sound else None

    def _agreeing_end(self, key: QueueId, end: int) -> int:
        """Step back over entries that neither lie before the confirmed end nor agree with a record."""
        queue = self._queues[key]
        if not len(self._segments):
            return queue.first  # a resync has set the log aside and comes to the queues: no entry agrees with anything
        while end > queue.first:
            _, entries = queue.read(max(queue.first, end - 1), end)
            if not len(entries):
                return end
            size = int(entries["size"][-1])
            if size == BLANK_SIZE and entries["physical_offset"][-1] == 0:
                return end  # only such entries precede it: the queue began here, or its topic was deleted
            if size != BLANK_SIZE and int(entries["physical_offset"][-1]) + size <= self.end_offset:
                return end
            record_end = self._sound_end(key, end)
            if record_end is not None:
                self.end_offset = max(self.end_offset, record_end)
                return end
            end -= 1
        return end

    def _end_by_walk(self) -> int:
        """Return the end of the log's last sound record, for a log without queues."""
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
