"""The damaged ranges of one log: where bytes on the disk are not what was written, since when, and what became of it.

Whoever finds damage (recovery, a read for a consumer or a slave, dispatch, the scrub) adds it here; reads refuse what
is listed; the healer takes it off once the right bytes are back. Nothing is kept on the disk: a start finds again what
is still damaged, as the checksums and the records tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import trio

logger = logging.getLogger(__name__)

HEALED_COUNT_MAX = 32
"""So many healed ranges are remembered for the status page."""
OPEN_COUNT_MAX = 10_000
"""So many unhealed ranges are listed; a disk with more is better replaced. Reads verify in any case."""

FoundBy = Literal["recovery", "pull", "replication", "dispatch", "scrub", "read", "heal"]


class Damage(msgspec.Struct, eq=False):
    """Bytes [`begin`, `end`) of the log (physical offsets, within one segment) are not what was written.

    `by_checksum`: whole blocks (or what is covered of them) whose checksum is known; otherwise from the begin of the
    first bad record to the next good one. `is_hopeless`: every peer known was asked in vain since, or there is none.
    Times in ms since the epoch; `healed_ms` 0 while it isn't.
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
    heal_trouble: str = ""
    """Why the last attempt to heal it failed"""


class DamageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and what is open now. Sizes in bytes."""

    found_count: int
    healed_count: int
    open_count: int
    open_bytes: int
    hopeless_count: int
    open: list[Damage]
    """At most HEALED_COUNT_MAX of them, lowest first"""
    healed: list[Damage]
    """The last ones, newest first"""


class DamageRegistry:
    """All of one log's. Synchronous but for the waits."""

    def __init__(self, wall_clock_ms: Callable[[], int]) -> None:
        self._wall_clock_ms = wall_clock_ms
        self._open: list[Damage] = []
        self._healed: list[Damage] = []
        self._changed = trio.lowlevel.ParkingLot()
        self._callbacks: list[Callable[[], None]] = []
        self.found_count = 0
        self.healed_count = 0
        self.on_healed: Callable[[], None] = lambda: None
        """Called when a range was healed: what is derived of it can be compared now. The store sets it"""

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def open(self) -> Sequence[Damage]:
        """What isn't healed, lowest first."""
        return self._open

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after each change."""
        self._callbacks.append(callback)

    def add(self, begin: int, end: int, *, file: str, reason: str, found_by: FoundBy, by_checksum: bool) -> Damage:
        """List a range, unless one that contains it is listed; returns the one listed. Logged once per range."""
        assert begin < end
        for known in self._open:
            if known.begin <= begin and end <= known.end:
                return known
        damage = Damage(begin, end, file, reason, found_by, self._wall_clock_ms(), by_checksum)
        if len(self._open) < OPEN_COUNT_MAX:
            self._open = sorted([*self._open, damage], key=lambda each: each.begin)
        self.found_count += 1
        logger.error("log_damaged file=%s begin=%d end=%d found_by=%s reason=%s", file, begin, end, found_by, reason)
        self._notify()
        return damage

    def first_in(self, begin: int, end: int) -> Damage | None:
        """Return the lowest listed range that overlaps [begin, end), None if there is none."""
        for damage in self._open:
            if damage.begin >= end:
                break
            if damage.end > begin:
                return damage
        return None

    def healed(self, damage: Damage, source: str) -> None:
        """Take a range off the list: its bytes are right again, from `source`."""
        if damage not in self._open:
            return
        self._open = [each for each in self._open if each is not damage]
        damage.healed_ms = self._wall_clock_ms()
        damage.healed_from = source
        self._healed = [damage, *self._healed][:HEALED_COUNT_MAX]
        self.healed_count += 1
        logger.warning("log_healed file=%s begin=%d end=%d from=%s", damage.file, damage.begin, damage.end, source)
        self._notify()
        self.on_healed()

    def shrink(self, damage: Damage, begin: int, source: str) -> None:
        """Note that a range's bytes before `begin` are right again, from `source`."""
        assert damage.begin < begin < damage.end
        if damage not in self._open:
            return
        logger.warning("log_healed_partly file=%s begin=%d end=%d from=%s", damage.file, damage.begin, begin, source)
        damage.begin = begin
        self._notify()

    def failed(self, damage: Damage, trouble: str, *, is_hopeless: bool) -> None:
        """Note why a range could not be healed, and whether anybody is left to ask."""
        if trouble != damage.heal_trouble or is_hopeless != damage.is_hopeless:
            logger.error(
                "log_not_healed file=%s begin=%d end=%d hopeless=%s reason=%s",
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
        """Drop what begins in [begin, end): retention deleted it, or the log was set aside."""
        kept = [each for each in self._open if each.begin < begin or each.begin >= end]
        if len(kept) != len(self._open):
            self._open = kept
            self._notify()

    def cut(self, end: int, record_before: Callable[[int], int]) -> None:
        """Note that the log was cut at `end`: what lies behind it is gone.

        A range that goes on behind it is from now on one of records, as its last block's checksum is gone: it begins
        with the record that `record_before` returns for its begin.
        """
        self.forget(end, 1 << 63)
        for damage in self._open:
            if damage.end > end:
                damage.begin = record_before(damage.begin) if damage.by_checksum else damage.begin
                damage.end, damage.by_checksum = end, False
                self._notify()

    async def wait_changed(self) -> None:
        """Wait for the next change."""
        await self._changed.park()

    async def wait_healed(self, begin: int, end: int) -> None:
        """Wait until nothing in [begin, end) is listed. A checkpoint in every case."""
        await trio.lowlevel.checkpoint()
        if len(self._open) >= OPEN_COUNT_MAX:
            await trio.sleep(1)  # it may be damaged without being listed
        while self.first_in(begin, end) is not None:
            await self._changed.park()

    def statistics(self) -> DamageStatistics:
        """Return this moment's figures."""
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
