"""Walks the log by record sizes, which finds every record, queued or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ha.arrow.confirmed import Confirmed
from ha.arrow.heads import HEAD, Heads, Int64s
from ha.arrow.queues import QueueFiles, QueueId
from ha.arrow.segments import Segments, walk_sizes
from ha.errors import CorruptLog
from ha.protocol.store_files import BLANK_SIZE

_WALK_BYTES = 16 << 20


class Damage(NamedTuple):
    """Bytes of the log that are not records: those from `physical_offset` to `resumed_at`, where the walk resumed."""

    physical_offset: int
    resumed_at: int
    reason: str


class Walker:
    """Walks one log, in the state that `segments`, `queues` and `confirmed` describe."""

    def __init__(self, segments: Segments, queues: Mapping[QueueId, QueueFiles], confirmed: Confirmed) -> None:
        self._segments = segments
        self._queues = queues
        self._confirmed = confirmed

    def walk(self, begin: int, end: int, *, damages: list[Damage] | None = None) -> Iterator[Int64s]:
        """Yields the physical offsets of all records that begin in [begin, end), queued or not, found by their sizes.

        The walk skips missing segments, such as those that retention deletes meanwhile, and ends at a torn tail after
        the confirmed end. Damage before the confirmed end raises CorruptLog; if `damages` is given, it is added to that
        list instead, and the walk continues at the next queued record or segment. Raises StoreUnreadable if a resync
        replaces the log meanwhile.
        """
        at = self._anchor(begin)
        confirmed = self._confirmed.end_offset
        while at < end:
            mapped = self._segments.current_at(at)
            if mapped is None:
                at = next((segment.start for segment in self._segments.all() if segment.start > at), end)
                continue
            segment, buffer = mapped
            stop = min(end, segment.end, at + _WALK_BYTES) - segment.start
            found = walk_sizes(buffer, at - segment.start, stop)
            offsets = found.positions + segment.start
            torn_at = _first_unsound(buffer, found.positions, segment.start, confirmed)
            if torn_at is not None:
                end, offsets = torn_at, offsets[offsets < torn_at]
            if begin > at:
                offsets = offsets[offsets >= begin]
            if len(offsets):
                yield offsets
            at = segment.start + found.stopped_at
            if found.reason == "filler" or (not found.reason and at >= segment.end):
                at = segment.end
            elif found.reason:
                if at >= confirmed:
                    return
                if damages is None:
                    raise CorruptLog(segment.path, found.stopped_at, f"{found.reason} (physical offset {at})")
                resumed = min(self._next_queued(at + 1, confirmed), segment.end)
                damages.append(Damage(at, resumed, found.reason))
                at = resumed

    def _anchor(self, begin: int) -> int:
        """Returns a physical offset from which records can be followed to `begin`: that of the last record at or before
        `begin` that a queue has in the same segment, or the segment's start. If no segment contains `begin`, returns
        `begin`, or the log's first offset if that is higher."""
        segment = self._segments.find(begin)
        if segment is None:
            return max(begin, self._segments.min_offset)
        best = segment.start
        if begin == best:
            return best
        for key, queue in self._queues.items():
            position = queue.search(begin + 1, self._confirmed.queue_end(key))
            if position > queue.first:
                _, entries = queue.read(position - 1, position)
                if len(entries) and entries["size"][0] != BLANK_SIZE:
                    physical = int(entries["physical_offset"][0])
                    if best < physical <= begin and self._is_record(physical):
                        best = physical
        return best

    def _is_record(self, physical_offset: int) -> bool:
        raw = self._segments.read(physical_offset, HEAD.itemsize)
        if raw is None or len(raw) < HEAD.itemsize:
            return False
        head = np.frombuffer(raw, HEAD)[0]
        return int(head["physical_offset"]) == physical_offset

    def _next_queued(self, physical_offset: int, default: int) -> int:
        found = default
        for key, queue in self._queues.items():
            end = self._confirmed.queue_end(key)
            position = queue.search(physical_offset, end)
            if position < end:
                found = min(found, queue.physical_offset(position))
        return max(found, physical_offset)


def _first_unsound(buffer: memoryview, positions: Int64s, base_offset: int, confirmed: int) -> int | None:
    """Returns the physical offset of the first of `positions` at or after the confirmed end that holds no record; None
    if all hold one."""
    unconfirmed = positions[positions + base_offset >= confirmed]
    if not len(unconfirmed):
        return None
    heads = Heads(np.frombuffer(buffer, np.uint8), unconfirmed, base_offset)
    return None if heads.sound.all() else base_offset + int(unconfirmed[np.argmin(heads.sound)])
