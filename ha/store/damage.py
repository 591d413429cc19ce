"""The damaged ranges of one log: where bytes on the disk are not what was written, since when, and whether they were
healed.

Each component that finds damage (recovery, a read for a consumer or a slave, dispatch, the scrub) adds it here; reads
refuse listed bytes; the healer removes a range when the right bytes are back. Nothing is stored: a start finds the
remaining damage again by checksums and records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import trio

logger = logging.getLogger(__name__)

HEALED_COUNT_MAX = 32
"""Maximum number of healed ranges that are kept, and of unhealed ones in the statistics."""
OPEN_COUNT_MAX = 10_000
"""Maximum number of unhealed ranges in the registry: a disk with more should be replaced. Reads verify in any case."""

FoundBy = Literal["recovery", "pull", "replication", "dispatch", "scrub", "read", "heal"]


class DamagedRange(msgspec.Struct, eq=False):
    """A range [`begin`, `end`) of physical offsets, within one segment, whose bytes are not what was written.

    `by_checksum`: the range consists of blocks with a known checksum, or of the covered part of one; otherwise it
    extends from the start of the first bad record to the next good one. `is_hopeless`: no peer had the bytes in time,
    so consumers skip them. Times in ms since the epoch; `healed_ms` is 0 while the range isn't healed.
    """

    begin: int
    end: int
    file: str
    reason: str
    found_by: str
    found_ms: int
    by_checksum: bool
    is_hopeless: bool = False
    healed_ms: int = 0
    healed_from: str = ""
    """The peer that sent the right bytes, or "the disk, read again"; empty while the range isn't healed"""
    heal_trouble: str = ""
    """Why the last attempt to heal the range failed"""


def _ordered(ranges: Iterable[DamagedRange]) -> list[DamagedRange]:
    """Returns the ranges in the order that lookups rely on: lowest begin first."""
    return sorted(ranges, key=lambda each: each.begin)


class DamageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How many damaged ranges were found and healed since the start; count and total size in bytes of those that are
    not healed now; and how many of these consumers skip (`hopeless_count`)."""

    found_count: int
    healed_count: int
    open_count: int
    open_bytes: int
    hopeless_count: int
    open: list[DamagedRange]
    """The ranges that are not healed, lowest first; only the first HEALED_COUNT_MAX"""
    healed: list[DamagedRange]
    """The ranges that were healed last, at most HEALED_COUNT_MAX, newest first"""


class DamageRegistry:
    """All damaged ranges of one log. Synchronous, except for the waits."""

    def __init__(self, wall_clock_ms: Callable[[], int]) -> None:
        self._wall_clock_ms = wall_clock_ms
        self._open: list[DamagedRange] = []
        self._healed: list[DamagedRange] = []
        self._changed = trio.lowlevel.ParkingLot()
        self._callbacks: list[Callable[[], None]] = []
        self.found_count = 0
        self.healed_count = 0
        self.on_healed: Callable[[DamagedRange], None] = lambda damage: None
        """Called with a range after it was healed, to check the data derived from its records. The store sets it"""

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def open(self) -> Sequence[DamagedRange]:
        """The ranges that aren't healed, lowest first."""
        return self._open

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Calls `callback` after each change of the listed ranges. It must not raise."""
        self._callbacks.append(callback)

    def add(
        self, begin: int, end: int, *, file: str, reason: str, found_by: FoundBy, by_checksum: bool
    ) -> DamagedRange:
        """Lists a range and logs it, unless a listed one contains it; returns the listed one.

        If OPEN_COUNT_MAX ranges are listed, the new one is only counted, logged and returned.
        """
        assert begin < end
        for known in self._open:
            if known.begin <= begin and end <= known.end:
                return known
        damage = DamagedRange(begin, end, file, reason, found_by, self._wall_clock_ms(), by_checksum)
        if len(self._open) < OPEN_COUNT_MAX:
            self._open = _ordered([*self._open, damage])
        self.found_count += 1
        logger.error(
            "commitlog.damage_found file=%s begin=%d end=%d found_by=%s reason=%r", file, begin, end, found_by, reason
        )
        self._notify()
        return damage

    def first_in(self, begin: int, end: int) -> DamagedRange | None:
        """Returns the lowest listed range that overlaps [begin, end); None if there is none."""
        for damage in self._open:
            if damage.begin >= end:
                break
            if damage.end > begin:
                return damage
        return None

    def contains(self, begin: int, end: int) -> bool:
        """Returns whether a listed range contains [begin, end)."""
        return any(each.begin <= begin and end <= each.end for each in self._open)

    def healed(self, damage: DamagedRange, source: str) -> None:
        """Removes a range from the list, because its bytes, obtained from `source`, are right again. Does nothing if
        the range is no longer listed."""
        if damage not in self._open:
            return
        self._open = [each for each in self._open if each is not damage]
        damage.healed_ms = self._wall_clock_ms()
        damage.healed_from = source
        self._healed = [damage, *self._healed][:HEALED_COUNT_MAX]
        self.healed_count += 1
        self._log_healed(damage, damage.end, source)
        self._notify()
        self.on_healed(damage)

    def shrink(self, damage: DamagedRange, begin: int, source: str) -> None:
        """Shrinks a range to begin at `begin`, because the bytes before that offset, obtained from `source`, are right
        again. Does nothing if the range is no longer listed."""
        assert damage.begin < begin < damage.end
        if damage not in self._open:
            return
        self._log_healed(damage, begin, source)
        damage.begin = begin
        self._open = _ordered(self._open)
        self._notify()

    def _log_healed(self, damage: DamagedRange, end: int, source: str) -> None:
        logger.warning("commitlog.healed file=%s begin=%d end=%d from=%r", damage.file, damage.begin, end, source)

    def failed(self, damage: DamagedRange, trouble: str, *, is_hopeless: bool) -> None:
        """Records why a range could not be healed, and whether consumers skip it from now on (`is_hopeless`)."""
        if trouble != damage.heal_trouble or is_hopeless != damage.is_hopeless:
            logger.error(
                "commitlog.heal_failed file=%s begin=%d end=%d hopeless=%s reason=%r",
                damage.file,
                damage.begin,
                damage.end,
                is_hopeless,
                trouble,
            )
        damage.heal_trouble = trouble
        if damage.is_hopeless != is_hopeless:
            damage.is_hopeless = is_hopeless
            self._notify()

    def forget(self, begin: int, end: int) -> None:
        """Drops the ranges that begin in [begin, end): retention deleted them, or the log was set aside."""
        kept = [each for each in self._open if each.begin < begin or each.begin >= end]
        if len(kept) != len(self._open):
            self._open = kept
            self._notify()

    def truncate(self, end: int, record_before: Callable[[int], int]) -> None:
        """Drops the ranges after `end`, where the log was truncated, and shortens those that extend beyond it.

        A shortened range of blocks becomes one of records, because the checksum of its last block is gone. It then
        begins with the record that contains its first byte: `record_before` returns the start of that record.
        """
        self.forget(end, 1 << 63)
        for damage in self._open:
            if damage.end > end:
                damage.begin = record_before(damage.begin) if damage.by_checksum else damage.begin
                damage.end, damage.by_checksum = end, False
                self._open = _ordered(self._open)
                self._notify()

    async def wait_changed(self) -> None:
        """Waits for the next change of the listed ranges."""
        await self._changed.park()

    async def wait_healed(self, begin: int, end: int) -> None:
        """Waits until no listed range overlaps [begin, end). Always a Trio checkpoint.

        If OPEN_COUNT_MAX ranges are listed, waits for at least 1 s, because other damaged ranges are not listed then.
        """
        await trio.lowlevel.checkpoint()
        if len(self._open) >= OPEN_COUNT_MAX:
            await trio.sleep(1)  # the bytes may be damaged without being listed
        while self.first_in(begin, end) is not None:
            await self._changed.park()

    def statistics(self) -> DamageStatistics:
        """Returns the counters, and the open and healed ranges."""
        return DamageStatistics(
            found_count=self.found_count,
            healed_count=self.healed_count,
            open_count=len(self._open),
            open_bytes=sum(each.end - each.begin for each in self._open),
            hopeless_count=sum(each.is_hopeless for each in self._open),
            open=list(self._open[:HEALED_COUNT_MAX]),
            healed=list(self._healed),
        )

    def _notify(self) -> None:
        self._changed.unpark_all()
        for callback in self._callbacks:
            callback()
