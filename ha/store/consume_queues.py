"""All consume queues of a store, by topic and queue id. Source: ConsumeQueueStore."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path

from ha.protocol.record import RecordHead
from ha.store.consume_queue import ConsumeQueue, QueueEntry
from ha.store.files import Disk
from ha.store.open_files import OpenFiles
from ha.store.queue_ends import QueueEnds

logger = logging.getLogger(__name__)

_OPEN_COUNT_MAX = 512
_CHAIN_BYTES = 64 << 20
"""Size in bytes of the part of the log whose entries `contiguous_end` reads at once."""


class ConsumeQueues:
    """All queues of a store. Searches read the queues' files: they block, and raise OSError."""

    def __init__(self, disk: Disk, directory: Path, file_entry_count: int) -> None:
        self._disk = disk
        self._open_count_max = _OPEN_COUNT_MAX
        self._files = OpenFiles(disk, _OPEN_COUNT_MAX)
        self._directory = directory
        self._file_entry_count = file_entry_count
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}

    def get(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Returns a queue; None if it never had a message."""
        return self._queues.get((topic, queue_id))

    def get_or_create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Returns a queue, created in memory if it is new; its first file is created for its first entry."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            directory = self._directory / topic / str(queue_id)
            queue = ConsumeQueue(self._disk, self._files, directory, topic, queue_id, self._file_entry_count)
            self._queues[topic, queue_id] = queue
        return queue

    def topics(self) -> dict[str, list[int]]:
        """Returns the queue ids of each topic; topics and ids are sorted."""
        found: dict[str, list[int]] = {}
        for topic, queue_id in sorted(self._queues):
            found.setdefault(topic, []).append(queue_id)
        return found

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        """Returns the queue offset after the last dispatched message of a queue; 0 if it has none."""
        queue = self._queues.get((topic, queue_id))
        return queue.max_offset if queue is not None else 0

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter(list(self._queues.values()))

    # ---- loading

    def load(self, is_clean: bool) -> bool:
        """Finds the queues on the disk. Returns False if one was damaged (it is empty now) and must be rebuilt. Raises
        OSError.

        The bytes after the entries are certain to be zeros only after `truncate`, which has to be called before records
        are dispatched.
        """
        whole = True
        for topic in self._disk.list_dir(self._directory):
            for name in self._queue_ids_of(topic):
                if name.isascii() and name.isdigit():
                    whole &= self.get_or_create(topic, int(name)).load(is_clean)
        return whole

    def _queue_ids_of(self, topic: str) -> list[str]:
        """Returns the names in a topic's directory; none if it is not a directory, such as an editor's backup file."""
        try:
            return self._disk.list_dir(self._directory / topic)
        except NotADirectoryError:
            logger.warning("queue.file_ignored path=%s", self._directory / topic)
            return []

    def ends(self) -> QueueEnds:
        """Returns the `max_offset` of each queue. To be called in a worker, as there may be very many queues."""
        found: QueueEnds = {}
        for queue in self:
            found.setdefault(queue.topic, {})[queue.queue_id] = queue.max_offset
        return found

    def lost_from(self, ends: QueueEnds) -> int | None:
        """Returns the physical offset from which records have to be dispatched again to restore the queues that end
        before their recorded ends (`ends`); None if no queue does."""
        found: list[int] = []
        for topic, known in ends.items():
            for queue_id, end in known.items():
                queue = self._queues.get((topic, queue_id))
                at = 0 if queue is None else queue.max_offset
                if at < end:
                    logger.error("queue.end_lost topic=%s queue_id=%d end=%d found=%d", topic, queue_id, end, at)
                    found.append(0 if queue is None else queue.max_physical_offset)
        return min(found, default=None)

    @property
    def rebuild_from(self) -> int | None:
        """Physical offset from which records have to be dispatched again to restore the entries that `load` found to be
        lost; None if there are none."""
        lost = (queue.max_physical_offset for queue in self._queues.values() if queue.has_lost_entries)
        return min(lost, default=None)

    # ---- searching

    @property
    def max_physical_offset(self) -> int:
        """Physical offset of the end of the last record that has an entry in any queue; 0 if there is none."""
        return max((queue.max_physical_offset for queue in self._queues.values()), default=0)

    def first_record_from(self, physical_offset: int) -> int | None:
        """Returns the physical offset of the first record at or beyond `physical_offset` that has an entry; None if
        none has."""
        return min((p for queue in self if (p := queue.first_record_from(physical_offset)) is not None), default=None)

    def last_record_before(self, physical_offset: int) -> int:
        """Returns the physical offset of the last record before `physical_offset` that has an entry; -1 if none has."""
        return max((queue.last_record_before(physical_offset) for queue in self), default=-1)

    def has_record_at(self, physical_offset: int) -> bool:
        """Returns whether some queue has an entry of a record that begins at exactly this physical offset."""
        return any(queue.has_record_at(physical_offset) for queue in self)

    def has_entry_of(self, head: RecordHead) -> bool:
        """Returns whether the entry at the record's place in its queue has the record's physical offset, size and tags
        code."""
        queue = self._queues.get((head.topic, head.queue_id))
        expected = QueueEntry(head.physical_offset, head.total_size, head.tags_code)
        return queue is not None and queue.read(head.queue_offset, 1) == [expected]

    def contiguous_end(self, begin: int, end: int, segment_size: int) -> int:
        """Returns the physical offset up to which records with entries follow one another without a gap, from `begin`
        on; `begin` if no such record starts there. Considers records that begin before `end`. Blocking. Raises OSError.

        The gap between a record and the start of the next segment is allowed (a filler), unless `segment_size` is 0.
        """
        at = begin
        while (first := self.first_record_from(at)) is not None and first < end:
            began = at
            stop = min(first + _CHAIN_BYTES, end)
            for physical_offset, size in sorted(chain.from_iterable(queue.records_in(first, stop) for queue in self)):
                next_start = -(-at // segment_size) * segment_size if segment_size else at
                if physical_offset not in (at, next_start) or size <= 0:
                    return at
                at = physical_offset + size
            if at == began:
                break
        return at

    # ---- removing entries

    def truncate(self, physical_offset: int) -> int:
        """Removes the entries of records at or beyond a physical offset from all queues; returns how many. Blocking.
        Raises OSError.

        On return, these entries, and what `load` found after the valid ones, are zeros on the disk, too.
        """
        removed = sum(queue.truncate(physical_offset) for queue in self)
        self._disk.sync_all([path for queue in self if (path := queue.files.take_zeroed()) is not None])
        return removed

    def destroy(self) -> None:
        """Deletes the files of all queues, because the log has lost all its records. Blocking. Raises OSError.

        The master that the node follows next may have lost records, too, and may continue these queues at lower queue
        offsets than their present ends.
        """
        for queue in self:
            queue.destroy()

    def correct_min(self, log_min_offset: int) -> int:
        """Adjusts every queue to the first physical offset of the commitlog (`ConsumeQueue.correct_min`); returns the
        number of files deleted. Blocking. Raises OSError."""
        return sum(queue.correct_min(log_min_offset) for queue in self)

    def clear(self, before: Mapping[str, int]) -> None:
        """Removes the entries of records before a physical offset; `before` maps each topic to its offset. The queues
        keep their ends. Blocking. Raises OSError."""
        for queue in self.not_empty(before):
            queue.clear(before[queue.topic])

    def not_empty(self, topics: Collection[str]) -> list[ConsumeQueue]:
        """Returns the queues of `topics` that have entries."""
        if not topics:
            return []
        return [queue for queue in self if queue.topic in topics and queue.min_offset < queue.max_offset]

    def forget(self) -> None:
        """Resets to the state without queues; the files, which were moved, are not touched."""
        self._queues.clear()
        self._files = OpenFiles(self._disk, self._open_count_max)

    # ---- syncing

    def sync_from(self, physical_offset: int) -> None:
        """Syncs the entries of records at or beyond a physical offset. Blocking. Raises OSError."""
        for queue in self:
            queue.sync_from(physical_offset)

    @property
    def unsynced_count(self) -> int:
        """Number of files that were written and not synced."""
        return len(self._files.unsynced)

    def take_unsynced(self, count_max: int) -> dict[Path, ConsumeQueue]:
        """Removes and returns up to `count_max` files that were written and not synced, and the queue of each.

        Those written first come first. The caller syncs them or passes them to `give_back`.
        """
        unsynced: dict[Path, ConsumeQueue] = self._files.unsynced
        taken = dict(islice(unsynced.items(), count_max))
        for path in taken:
            del unsynced[path]
        return taken

    def give_back(self, unsynced: dict[Path, ConsumeQueue]) -> None:
        """Puts back files that `take_unsynced` has returned and that were not synced."""
        self._files.unsynced.update(unsynced)

    def limit_open_files(self, count_max: int) -> None:
        """Sets the maximum number of files that all queues together keep open."""
        self._open_count_max = count_max
        self._files.limit(count_max)
