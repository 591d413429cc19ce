"""Repairs damaged ranges of the log: fetches them from a peer, verifies the bytes, and rewrites them.

    DamageRegistry.open ──▶ read again ──sound──▶ healed          (a transient read error)
                               │
                               └▶ for each peer: fetch ──▶ proven? ──▶ write, sync, compare ──▶ read again ──▶ healed
                                                              └─ only its start ──▶ write …; the range gets shorter

Proven means: the fetched bytes have the checksums that the blocks had when they were written here; or, if none are
known, they are valid records that start and end exactly where the damage does. Only proven bytes are written. With
checksums, a peer that is damaged, has another history or is malicious can therefore do no harm. Without checksums,
forged records, or records of another history that happen to fit, would be written: only trusted brokers may be peers.
Only registered ranges are written, which never include bytes that are being appended.

If a peer has only the start of a range, the part that can be proven without the end is written: whole blocks with
checksums, or valid records whose position, size, queue offset and tags are in the consume queues here. The next peer is
asked for the rest. A range that is too long for memory is written piece by piece, before its end has been fetched.

If a block doesn't match its checksum, but the peer sends the same bytes as are on the disk here, the checksum was
wrong, because another program wrote the log: the checksum is corrected.

Consumers skip a range after ATTEMPTS failed attempts. Not sooner, whatever the peers answer: after a restart, slaves
that have the range may not be known yet. The healer retries in any case, first after RETRY_S, then after twice as long
each time, up to RETRY_S_MAX.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from ha.errors import OffsetGone
from ha.replication.heal_fetch import Connect, HealFetchError, fetch_range
from ha.replication.options import HAOptions
from ha.store.damage import DamagedRange, DamageRegistry
from ha.store.log_repair import PIECE_BYTES

logger = logging.getLogger(__name__)

RETRY_S = 1.0
ATTEMPTS = 6
"""Number of failed attempts after which consumers skip a range: 31 s after the first one if peers answer at once, later
otherwise. By then a peer that restarts is back, and a running one has registered again at a restarted name server."""
RETRY_S_MAX = 300.0


class HealedLog(Protocol):
    """The part of `ha.store.log_repair.LogRepair` that the healer uses."""

    damage: DamageRegistry

    async def is_sound(self, damage: DamagedRange) -> bool:
        """Reads a damaged range again; returns whether it is sound now."""

    async def proves(self, damage: DamagedRange, begin: int, raw: bytes) -> int:
        """Returns how many bytes of `raw`, to be written at physical offset `begin`, are proven to be the original
        ones."""

    async def proves_alone(self, damage: DamagedRange, begin: int, raw: bytes) -> int:
        """Like `proves`, but for the start of a damaged range whose end is not available."""

    async def rewrite(self, begin: int, raw: bytes) -> None:
        """Writes proven bytes over damaged ones, syncs them, and reads them back. Raises OSError if that fails,
        OffsetGone if the range is no longer registered as damaged."""

    async def agrees(self, damage: DamagedRange, raw: bytes) -> bool:
        """Returns whether `raw` equals the bytes on the disk here; if so, corrects their checksum, which was wrong.
        Always False unless the range is one block with a checksum. Raises OSError if the checksums can't be read or
        written."""

    def after_heal(self, damage: DamagedRange) -> None:
        """Call this after bytes of a range were healed: its blocks without a checksum are checked again, and get
        one."""


class Healer:
    """Heals one log. `peers` returns the HA addresses to try, best first; it raises nothing."""

    def __init__(
        self,
        log: HealedLog,
        peers: Callable[[], Awaitable[list[str]]],
        *,
        connect: Connect,
        options: HAOptions,
        segment_size: int,
    ) -> None:
        self._log = log
        self._peers = peers
        self._connect = connect
        self._options = options
        self._segment_size = segment_size
        self._retry_at: dict[DamagedRange, tuple[float, float]] = {}

    async def run(self) -> None:
        """Heals registered damage until cancelled."""
        damage = self._log.damage
        while True:
            now = trio.current_time()
            self._retry_at = {each: due for each, due in self._retry_at.items() if each in damage.open}
            due = [each for each in damage.open if self._retry_at.get(each, (0.0, 0.0))[0] <= now]
            if due:
                await self._heal_all(due)
                await trio.lowlevel.checkpoint()
                continue
            with trio.move_on_at(min((at for at, _ in self._retry_at.values()), default=float("inf"))):
                await damage.wait_changed()

    async def _heal_all(self, ranges: list[DamagedRange]) -> None:
        peers = await self._peers()
        for damage in ranges:
            began = damage.begin
            try:
                trouble = await self._heal(damage, peers)
            except OffsetGone:
                trouble = "the log was truncated, or its start deleted, meanwhile"
            except OSError as error:
                trouble = f"the disk here can't be read: {error}"
            if not trouble or damage not in self._log.damage.open:
                self._retry_at.pop(damage, None)
                continue
            if damage.begin != began:
                self._retry_at.pop(damage, None)  # the range is shorter now
            wait_s = min(2 * self._retry_at.get(damage, (0.0, RETRY_S / 2))[1], RETRY_S_MAX)
            self._retry_at[damage] = (trio.current_time() + wait_s, wait_s)
            is_hopeless = wait_s >= RETRY_S * 2 ** (ATTEMPTS - 1)
            self._log.damage.failed(damage, trouble, is_hopeless=is_hopeless)

    async def _heal(self, damage: DamagedRange, peers: list[str]) -> str:
        """Heals one range; returns why that failed, or ""."""
        log = self._log
        if await log.is_sound(damage):
            return self._done(damage, "the disk, read again")
        if not peers:
            return "no peer is known: on a master set healFrom to a slave's HA port"
        troubles = []
        for peer in peers:
            try:
                trouble = await self._heal_from(peer, damage)
            except HealFetchError as error:
                trouble = str(error)
            except OSError as error:
                trouble = f"the disk here can't be read or written: {error}"
            if not trouble:
                return self._done(damage, peer)
            troubles.append(trouble)
        return "; ".join(troubles)

    def _done(self, damage: DamagedRange, source: str) -> str:
        self._log.after_heal(damage)
        self._log.damage.healed(damage, source)
        return ""

    async def _heal_from(self, peer: str, damage: DamagedRange) -> str:
        log = self._log
        position = settled = damage.begin
        while position < damage.end:
            end = min(damage.end, position + PIECE_BYTES)
            fetched = await fetch_range(
                peer, position, end, connect=self._connect, options=self._options, segment_size=self._segment_size
            )
            raw, is_all = fetched.raw, not fetched.trouble
            alone = await log.proves_alone(damage, position, raw)
            proven = await log.proves(damage, position, raw) if is_all else 0
            if end == damage.end and proven < len(raw):
                proven = 0  # it does not end where the damage does
            if not proven and not alone:
                if position == damage.begin and await log.agrees(damage, raw):
                    return ""
                return fetched.trouble or f"what {peer} sends for {position} is not what was written here"
            await log.rewrite(position, raw[: max(proven, alone)])
            if settled == position:
                settled += alone
            position += max(proven, alone)
            if damage.begin < settled == position < damage.end:
                log.damage.shrink(damage, settled, peer)
                log.after_heal(damage)
        return "" if await log.is_sound(damage) else f"it is still damaged after what {peer} sent was written"
