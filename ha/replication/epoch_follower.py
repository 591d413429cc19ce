"""Epochs (terms) on one connection of a member of a failover group to the master that it follows.

    handshake ──▶ meet: is it still a master? ──▶ settle: truncate to the common part ──▶ request, frames, reports

Two logs are equal up to the earlier end of the newest term that both histories contain (`EpochHistory`). The slave's
later bytes were written by a master whose bytes did not reach the sync-state set, and are truncated. Their messages
were not acknowledged, unless sends waited only for that master. Confirmed records are never truncated: a master that
lacks one was elected against the rules, or has lost bytes, and only an operator can decide to follow it. Only complete
records count as confirmed: if the set has acknowledged just the first bytes of a record, a new master removes them.

A term is durable in the history before a byte of the term is in the log, and so before any of its bytes is
acknowledged. When a connection starts, all terms that start up to the log's end are added. They come from the master's
handshake. RocketMQ's slaves take them from the frames instead, but a frame may carry the next epoch (epoch_frames.py).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import Protocol

from ha.errors import DiskFull, RemoteProtocolError
from ha.protocol.auto_switch_frame import NO_EPOCH, EpochFrameHeader, MasterHandshake, SlaveHandshake
from ha.protocol.epoch_file import EpochEntry
from ha.replication.log import MemberStore, ReplicatedLog
from ha.replication.session_plan import SessionEnd
from ha.replication.statistics import Condition
from ha.store.commitlog import UNLIMITED

logger = logging.getLogger(__name__)

TO_FOLLOW = "to follow it nevertheless, stop this node and empty its store"


class Terms(Protocol):
    """What this node knows of its group beyond one connection; implemented by HAClient."""

    min_epoch: int
    """Latest known term of the group. Masters of earlier terms are not followed."""

    def adopt_epoch(self, epoch: int) -> None:
        """Records that the group has reached `epoch`."""

    def note_caught_up(self) -> None:
        """Records that the log here has everything that the master's log had when this node connected to it."""


class EpochFollower:
    """Makes the log here a prefix of the master's when a slave connects, then adds the master's terms to the history
    here as the log grows. `epoch`: the master's last term, NO_EPOCH before its handshake."""

    def __init__(self, store: MemberStore, log: ReplicatedLog, greeting: SlaveHandshake, terms: Terms) -> None:
        self.greeting = greeting.encode()
        self.epoch = NO_EPOCH
        self._store = store
        self._log = log
        self._terms = terms
        self._has_caught_up = False
        self._ahead: deque[EpochEntry] = deque()
        """The master's terms that are not in the history here yet"""
        self._next_start: float = math.inf
        """Physical offset at which the first of `_ahead` starts"""
        self._master_confirm_offset = 0
        self._confirm_offset = self._known_confirm_offset()

    def meet(self, master: MasterHandshake) -> SessionEnd | None:
        """Checks the master's handshake; returns None if the master may be followed, otherwise why not. In the first
        case, passes the master's last term to `Terms.adopt_epoch`."""
        self.epoch = master.epochs[-1].epoch if master.epochs else NO_EPOCH
        own = self._store.epochs.last
        least = max(self._terms.min_epoch, NO_EPOCH if own is None else own.epoch)
        if self.epoch < least:
            detail = f"its last term is {self.epoch}, the group has had {least}"
            return SessionEnd(Condition.STALE_MASTER, detail)
        self._terms.adopt_epoch(self.epoch)
        return None

    async def settle(self, master: MasterHandshake) -> SessionEnd | None:
        """Truncates the log and the history here to a prefix of the master's, and then adds the master's terms up to
        the log's end. Returns None if that succeeded, otherwise why not. Raises DiskFailed if the node must stop.
        """
        epochs, log = self._store.epochs, self._log
        own_end = log.max_offset.value
        try:
            if log.min_offset < 0 or log.min_offset == own_end:
                # An empty log has nothing to compare. A term that started here may have no byte in any log, and is then
                # in no other history.
                await epochs.truncate_from(own_end)
            if epochs.last is not None:
                end = await self._truncate(master, own_end)
                if end is not None:
                    return end
            elif own_end > master.max_offset:
                detail = f"the log here ends at {own_end}, the master's at {master.max_offset}"
                return SessionEnd(
                    Condition.MASTER_BEHIND, f"{detail}, and there is no history of terms here to compare"
                )
            await self._adopt_history(master.epochs)
        except (DiskFull, OSError) as error:
            return SessionEnd(Condition.APPEND_FAILED, str(error))
        return None

    async def _truncate(self, master: MasterHandshake, own_end: int) -> SessionEnd | None:
        """Truncates the log here where it differs from the master's; returns None if that succeeded or was not needed,
        otherwise why not."""
        point = self._store.epochs.consistent_point(own_end, master.epochs, master.max_offset)
        if point is None:
            theirs = ", ".join(f"{entry.epoch} from {entry.start_offset}" for entry in master.epochs[-3:])
            ours = ", ".join(f"{entry.epoch} from {entry.start_offset}" for entry in self._store.epochs.entries[-3:])
            return SessionEnd(Condition.NO_COMMON_EPOCH, f"terms here: {ours}; of the master: {theirs}; {TO_FOLLOW}")
        if point >= own_end:
            return None
        if await self._is_confirmed_at(point):
            detail = (
                f"the log here is confirmed up to {self._confirm_offset}, but equals the master's only up to {point}: "
                f"the master was elected against the rules, or has lost bytes; {TO_FOLLOW}"
            )
            return SessionEnd(Condition.CONFIRMED_DIVERGED, detail)
        logger.warning("ha.truncation_started from=%d to=%d master_epoch=%d", own_end, point, self.epoch)
        if self._confirm_offset > point:
            self._limit(point)
        try:
            await self._store.truncate(point)
        except ValueError as error:
            detail = f"by their histories the logs are equal up to {point}, where no record starts here: {error}"
            return SessionEnd(Condition.NO_COMMON_EPOCH, detail)
        return None

    async def _is_confirmed_at(self, point: int) -> bool:
        """Returns whether the record at `point` is confirmed; also true if bytes after `point` are confirmed, but no
        intact record starts there."""
        if point >= self._confirm_offset:
            return False
        end = await self._store.record_end(point)
        return end is None or end <= self._confirm_offset

    async def _adopt_history(self, entries: tuple[EpochEntry, ...]) -> None:
        """Adds the master's terms up to the log's end to the history here, and keeps the rest for `adopt`."""
        epochs, own_end = self._store.epochs, self._log.max_offset.value
        if any(entry.start_offset >= own_end and entry not in entries for entry in epochs.entries):
            await epochs.truncate_from(own_end)
        last = epochs.last
        for entry, following in zip(entries, (*entries[1:], None), strict=True):
            left_no_byte = following is not None and following.start_offset == entry.start_offset
            if not left_no_byte and (last is None or entry > last):
                self._ahead.append(entry)
        self._next_start = self._ahead[0].start_offset if self._ahead else math.inf
        await self.adopt(own_end + 1)

    async def adopt(self, end: int) -> None:
        """Adds each term that starts before `end` to the history; call before the log is written up to there. Raises
        DiskFull or DiskFailed if the history can't be written."""
        epochs = self._store.epochs
        while end > self._next_start:
            entry = self._ahead[0]
            last = epochs.last
            if last is not None and last.start_offset >= entry.start_offset:
                await epochs.truncate_from(entry.start_offset)
            await epochs.append(entry.epoch, entry.start_offset)
            self._ahead.popleft()
            self._next_start = self._ahead[0].start_offset if self._ahead else math.inf

    def note_frame(self, header: EpochFrameHeader) -> None:
        """Checks a frame's header and records its confirm offset. Raises RemoteProtocolError if its epoch is later than
        the last one in the master's handshake."""
        if header.epoch > self.epoch:
            raise RemoteProtocolError(f"a frame of term {header.epoch} after a handshake up to {self.epoch}")
        self._master_confirm_offset = max(self._master_confirm_offset, header.confirm_offset)

    def note_held(self, offset: int, master_end: int) -> None:
        """Calls `Terms.note_caught_up` the first time that the log here reaches `master_end`, the end of the master's
        log at the handshake.

        `offset`: end of the log here, which is a prefix of the master's; with SYNC_FLUSH, the end of its flushed part.
        """
        if not self._has_caught_up and offset >= master_end:
            self._has_caught_up = True
            self._terms.note_caught_up()

    def confirm(self) -> None:
        """Makes all confirmed records readable for consumers. Call it after bytes were appended, or a frame was
        received."""
        offset = min(self._master_confirm_offset, self._log.max_offset.value)
        if offset > self._confirm_offset:
            self._limit(offset)

    def _limit(self, confirm_offset: int) -> None:
        self._confirm_offset = confirm_offset
        self._store.log.limit_dispatch(confirm_offset)

    def _known_confirm_offset(self) -> int:
        limit = self._store.log.dispatch_limit.value
        return 0 if limit == UNLIMITED else min(limit, self._log.max_offset.value)
