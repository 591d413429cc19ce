"""What a member of a failover group does besides when it follows a master: for one connection of it.

    greet ──▶ meet: is it a master still? ──▶ settle: cut off what it doesn't have ──▶ request, frames, reports as ever

Two logs are the same up to where the newest term that is in both histories ends first (`EpochHistory`). What the slave
has behind that was written by a master that nobody followed far enough: it was not acknowledged, or only by that master
alone, and is cut off. Never what was confirmed, though: the master that lacks it was elected against the rules, or has
lost bytes, and to follow it is for an operator to decide.

The history goes with the bytes: a term is in it, durably, before a byte of it is in the log, so before any is
acknowledged; at the begin of a connection all terms that begin up to the log's end. They are taken from the master's
handshake, not from its frames, as RocketMQ's slaves do: those may name another one (epoch_frames.py).
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


class Terms(Protocol):
    """Which term the group is in, as far as this node has heard: HAClient."""

    min_epoch: int

    def adopt_epoch(self, epoch: int) -> None:
        """There is a term `epoch`."""

    def note_caught_up(self) -> None:
        """The log here has all that the log of a master of that term, or a later one, had when it was connected to."""


class EpochFollower:
    """The slave's side of one connection. `epoch`: the master's last term, NO_EPOCH before its handshake."""

    def __init__(self, store: MemberStore, log: ReplicatedLog, greeting: SlaveHandshake, terms: Terms) -> None:
        self.greeting = greeting.encode()
        self.epoch = NO_EPOCH
        self._store = store
        self._log = log
        self._terms = terms
        self._has_caught_up = False
        self._ahead: deque[EpochEntry] = deque()
        self._next_start: float = math.inf
        """Where the first of those begins that are not in the history here"""
        self._told_confirm_offset = 0
        self._confirm_offset = self._known_confirm_offset()

    def meet(self, master: MasterHandshake) -> SessionEnd | None:
        """Look at who answers; None if it may be followed."""
        self.epoch = master.epochs[-1].epoch if master.epochs else NO_EPOCH
        own = self._store.epochs.last
        least = max(self._terms.min_epoch, NO_EPOCH if own is None else own.epoch)
        if self.epoch < least:
            detail = f"its last term is {self.epoch}, the group has had {least}"
            return SessionEnd(Condition.STALE_MASTER, detail)
        self._terms.adopt_epoch(self.epoch)
        return None

    async def settle(self, master: MasterHandshake) -> SessionEnd | None:
        """Make the log and its history here a part of the master's; None if they are."""
        epochs, log = self._store.epochs, self._log
        own_end = log.max_offset.value
        try:
            if log.min_offset < 0 or log.min_offset == own_end:
                # Without a byte there is nothing to compare. A term that began here may have left no byte anywhere, and
                # is then in no other history.
                await epochs.truncate_from(own_end)
            if epochs.last is not None:
                end = await self._cut(master, own_end)
                if end is not None:
                    return end
            elif own_end > master.max_offset:
                detail = f"the log here ends at {own_end}, the master's at {master.max_offset}"
                return SessionEnd(Condition.MASTER_BEHIND, f"{detail}, and there is no history of terms here to cut by")
            await self._line_up(master.epochs)
        except DiskFull as error:
            return SessionEnd(Condition.APPEND_FAILED, str(error))
        return None

    async def _cut(self, master: MasterHandshake, own_end: int) -> SessionEnd | None:
        """Cut the log here where the master's is another one."""
        point = self._store.epochs.consistent_point(own_end, master.epochs, master.max_offset)
        if point is None:
            theirs = ", ".join(f"{entry.epoch} from {entry.start_offset}" for entry in master.epochs[-3:])
            ours = ", ".join(f"{entry.epoch} from {entry.start_offset}" for entry in self._store.epochs.entries[-3:])
            return SessionEnd(Condition.NO_COMMON_EPOCH, f"terms here: {ours}; of the master: {theirs}")
        if point >= own_end:
            return None
        if point < self._confirm_offset:
            detail = (
                f"up to {self._confirm_offset} the log here is confirmed, and only up to {point} it is the master's: "
                "it was elected against the rules, or has lost bytes; to take its log over all the same, stop this "
                "node and empty its store"
            )
            return SessionEnd(Condition.CONFIRMED_DIVERGED, detail)
        logger.warning("ha.truncation_started from=%d to=%d master_epoch=%d", own_end, point, self.epoch)
        try:
            await self._store.truncate(point)
        except ValueError as error:
            detail = f"the logs are said to be the same up to {point}, which is not between two records here: {error}"
            return SessionEnd(Condition.NO_COMMON_EPOCH, detail)
        return None

    async def _line_up(self, entries: tuple[EpochEntry, ...]) -> None:
        """Have in the history here what the master's says up to the log's end, and the rest ready."""
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
        """Have in the history each term that begins before `end`, up to where the log is about to be written."""
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
        """A frame begins. RemoteProtocolError if it can't be of the master that answered."""
        if header.epoch > self.epoch:
            raise RemoteProtocolError(f"a frame of term {header.epoch} after a handshake up to {self.epoch}")
        self._told_confirm_offset = max(self._told_confirm_offset, header.confirm_offset)

    def note_held(self, offset: int, master_end: int) -> None:
        """The log here is a part of the master's, and what may be acknowledged of it ends at `offset`.

        `master_end`: where the master's log ended when it greeted.
        """
        if not self._has_caught_up and offset >= master_end:
            self._has_caught_up = True
            self._terms.note_caught_up()

    def confirm(self) -> None:
        """Show consumers what is confirmed of the log here, after bytes were appended or a frame has told."""
        offset = min(self._told_confirm_offset, self._log.max_offset.value)
        if offset > self._confirm_offset:
            self._confirm_offset = offset
            self._store.log.limit_dispatch(offset)

    def _known_confirm_offset(self) -> int:
        limit = self._store.log.dispatch_limit.value
        return 0 if limit == UNLIMITED else min(limit, self._log.max_offset.value)
