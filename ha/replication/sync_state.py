"""The rules of the sync-state set on a master, for one term of it: who must have a byte before it counts.

The set (broker ids, the master's own included) is kept by the agreement service; every member of it has every
acknowledged byte, so any of them may be the next master. What a master knows by itself is how far each slave is, on
connections of this term alone: what a slave acknowledged to an earlier master it may have had to cut off since.

    agreed     what the agreement service is known to hold
    wished     what this master asked it to hold instead, from before it asks until the answer is known: either may hold
    joining    slaves about to be wished for: they count here already, nobody else knows of them

Which sets count: each of these, together, so that what they ask of a byte is never less than what the agreement service
asks of the next master. RocketMQ #5663: while a slave was being added, a byte that it didn't have was acknowledged,
as the old set was enough for that, and then it was elected. Nothing becomes acknowledged by a slave going away: as long
as the agreement service has not agreed to drop it, it is waited for.

Why `joining`: a slave may be wished for once it holds all that is confirmed. With a master that is alone that is all
there is, which under load no slave ever holds at the moment at which it says so. So it is waited for from when it is
close, and wished for when it has caught up; and let go if it does not, of which nobody needs to be told.

Who is dropped: whoever has not had all that there was for `not_catch_up_s_max`, or for `gone_s_max` if its lease with
the agreement service has ended, too (a process that is frozen, a machine that is cut off: its connection stays, and
every put waits for it); whoever lacks something and has acknowledged nothing more for `stalled_s_max` (only the way
between it and the master is cut, or its disk stands still); whoever has not connected in this term
within `connect_s_max`, and whoever was connected and no longer is, at once, as in RocketMQ: it is not that a connection
lost says much, but that every put waits for that slave until the set without it is agreed on. It is back in the set as
soon as it is connected and has caught up.

No clock, tasks or streams here. Times in seconds of any monotonic clock, offsets physical, in bytes; `end` is the end
of the master's log. Sources: AutoSwitchHAService, for what is not said here to differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

from ha.causes import Cause
from ha.replication.caught_up import CaughtUp
from ha.replication.options import TICK_S

ALONE = 1
"""ack_count: the master's own log is enough. What it acknowledges may be lost with it."""

UNKNOWN = -1
"""An offset of which nothing is known."""


STALL_FORGOTTEN_S = 60.0
"""So long after a slave was dropped for a stall the next one is as its first."""


class SyncStateRules(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set. RocketMQ's key in each comment."""

    ack_count: int | None = None
    """Members that acknowledge each byte, the master included; None: all (allAckInSyncStateSet, else inSyncReplicas).
    n of them are enough where an election takes the best of |set| - n + 1 candidates."""
    min_in_sync_replicas: int = 1
    """minInSyncReplicas: nothing is acknowledged by a smaller set."""
    not_catch_up_s_max: float = 15.0
    """haMaxTimeSlaveNotCatchup."""
    gone_s_max: float = 1.0
    """The same of a member whose lease has ended."""
    stalled_s_max: float = 15.0
    """The same of a member that acknowledges nothing at all meanwhile. Not less than the lease of the master, which is
    over when a process that stood still itself finds that a slave has done nothing for so long."""
    connect_s_max: float = 3.0
    """A member that has not connected so long after the term began is dropped: RocketMQ's first look at the set."""
    check_s: float = 5.0
    """checkSyncStateSetPeriod: so late at most is it noticed that a member has not caught up for too long."""
    join_s_max: float = 1.0
    """A slave that had all there was so long ago, or later, is close enough to be waited for."""

    def __post_init__(self) -> None:
        assert self.ack_count is None or self.ack_count >= 1
        assert self.min_in_sync_replicas >= 1


# What each rule says, alone


def needed_count(member_count: int, ack_count: int | None) -> int:
    """How many of a set have each byte that counts as confirmed: who is elected from it has that byte.

    With ALONE all: what is acknowledged without waiting is not shown to consumers before it is safe. A set smaller than
    ack_count can only be asked for all it has.
    """
    return member_count if ack_count is None or ack_count == ALONE else min(ack_count, member_count)


def held_by(count: int, members: Collection[int], held: Mapping[int, int]) -> int:
    """Up to where `count` of `members` have the log; UNKNOWN unless so many are known. `held`: broker id -> offset."""
    offsets = sorted((held[member] for member in members if member in held), reverse=True)
    return offsets[count - 1] if len(offsets) >= count else UNKNOWN


def confirmed(
    previous: int, sets: Iterable[Collection[int]], held: Mapping[int, int], ack_count: int | None = None
) -> int:
    """The confirm offset: whoever is elected from one of `sets` has the log up to here. It never falls.

    A member of which nothing is known keeps it where it is. RocketMQ #6662: it was the least that those had which were
    connected, so a master cut off together with one of two slaves confirmed what the other, elected, didn't have.
    """
    return max(previous, min(held_by(needed_count(len(members), ack_count), members, held) for members in sets))


def acknowledged(sets: Iterable[Collection[int]], held: Mapping[int, int], end: int, rules: SyncStateRules) -> int:
    """Up to where puts are acknowledged; UNKNOWN if nothing can be. Unlike the confirm offset it may fall."""
    if rules.ack_count == ALONE:
        return end
    lowest = end
    for members in sets:
        count = len(members) if rules.ack_count is None else rules.ack_count
        if len(members) < rules.min_in_sync_replicas:
            return UNKNOWN
        lowest = min(lowest, held_by(count, members, held))
    return lowest


def may_join(held_offset: int, confirm_offset: int, epoch_start: int) -> bool:
    """Whether a slave holds all that was ever confirmed, of this term and of those before it."""
    return held_offset >= confirm_offset and held_offset >= epoch_start


def may_shrink(members: Collection[int], held: Mapping[int, int], confirm_offset: int, ack_count: int | None) -> bool:
    """Whether an election from `members`, part of a set that is agreed on, would find all that was confirmed.

    Where all of a set have each byte, any part of it does; where n do, enough of those must stay.
    """
    if ack_count is None or ack_count == ALONE:
        return True
    return held_by(needed_count(len(members), ack_count), members, held) >= confirm_offset


class _Slave:
    """A slave that is connected in this term. `held` is UNKNOWN until it has reported."""

    __slots__ = ("advanced_at", "can_join", "caught_up", "connected_at", "furthest", "held")

    def __init__(self, now: float, *, can_join: bool) -> None:
        self.held = UNKNOWN
        self.can_join = can_join
        self.connected_at = now
        self.furthest = UNKNOWN
        """What it has acknowledged in the term, over whichever connection."""
        self.advanced_at = now
        """When it last acknowledged more than that."""
        self.caught_up = CaughtUp()


class _Stalls:
    """How often a slave was dropped for standing still, and when last."""

    __slots__ = ("count", "last_at")

    def __init__(self) -> None:
        self.count = 0
        self.last_at = -math.inf


class SyncStateSet:
    """The set in one term of one master. Owned by its HAService, which tells it what happens."""

    def __init__(
        self,
        own_id: int,
        agreed: Collection[int],
        *,
        epoch: int,
        epoch_start: int,
        confirm_offset: int,
        now: float,
        rules: SyncStateRules | None = None,
    ) -> None:
        """`agreed`: the set with which this master was elected. `confirm_offset`: its own as a slave."""
        assert own_id in agreed, (own_id, agreed)
        self.own_id = own_id
        self.epoch = epoch
        self.epoch_start = epoch_start
        self.rules = rules or SyncStateRules()
        self.agreed = frozenset(agreed)
        self.wished: frozenset[int] | None = None
        self.joining: frozenset[int] = frozenset()
        self.confirm_offset = min(confirm_offset, epoch_start)
        self._began = now
        self._slaves: dict[int, _Slave] = {}
        self._stalls: dict[int, _Stalls] = {}
        self._left: set[int] = set()
        """Those that were connected and no longer are"""
        self._living: frozenset[int] | None = None
        """Those that have a lease; None while that is not known"""
        self._sets: tuple[frozenset[int], ...] = (self.agreed,)

    # What happens

    def connect(self, broker_id: int, now: float, *, can_join: bool) -> None:
        """`broker_id` has a new connection, instead of any other; it counts once it has reported on it."""
        assert broker_id != self.own_id
        previous = self._slaves.get(broker_id)
        self.disconnect(broker_id)
        slave = self._slaves[broker_id] = _Slave(now, can_join=can_join)
        if previous is not None:  # a slave that connects again and again has not caught up by that
            slave.connected_at, slave.caught_up = previous.connected_at, previous.caught_up
            slave.advanced_at, slave.furthest = previous.advanced_at, previous.furthest
        self._left.discard(broker_id)

    def disconnect(self, broker_id: int) -> None:
        """Its connection is over."""
        if self._slaves.pop(broker_id, None) is not None:
            self._left.add(broker_id)
            self.joining -= {broker_id}
            self._note_sets()

    def report(self, broker_id: int, offset: int, end: int, now: float) -> None:
        """It has the log up to `offset`."""
        slave = self._slaves[broker_id]
        slave.held = max(slave.held, offset)
        if offset > slave.furthest:
            slave.furthest, slave.advanced_at = offset, now
        slave.caught_up.note_report(offset, end, now)
        if broker_id not in self.agreed and broker_id not in self.joining and self._is_close(slave, now):
            self.joining |= {broker_id}
            self._note_sets()

    def grow(self, broker_id: int, now: float) -> None:
        """The log grows at this moment, and up to it the slave had all of it."""
        self._slaves[broker_id].caught_up.at = now

    def set_live_members(self, members: Collection[int]) -> None:
        """The leases of `members` live, and no others."""
        self._living = frozenset(members)

    def advance(self, end: int) -> bool:
        """Work out the confirm offset again; tell whether it rose. `end`: what counts of the log here."""
        previous = self.confirm_offset
        self.confirm_offset = confirmed(previous, self._sets, self._held(end), self.rules.ack_count)
        return self.confirm_offset > previous

    def confirm_set(self, members: Collection[int]) -> None:
        """The agreement service holds `members`, and nothing else that was wished for can come about any more."""
        assert self.own_id in members, (self.own_id, members)
        self.agreed = frozenset(members)
        self.wished = None
        self.joining -= self.agreed
        self._note_sets()

    def wish(self, end: int, now: float) -> frozenset[int] | None:
        """Return the set that the agreement service should hold instead of the agreed one; None: that one.

        A wish counts from now on, and stays as it is until `confirm_set`.
        """
        if self.wished is not None:
            return self.wished
        self._let_go(now)
        held = self._held(end)
        stay = self.agreed - {member for member in self.agreed if self.is_lost(member, end, now)}
        if not may_shrink(stay, held, self.confirm_offset, self.rules.ack_count):
            stay = self.agreed
        come = {slave for slave in self.joining if may_join(held[slave], self.confirm_offset, self.epoch_start)}
        if stay | come == self.agreed:
            return None
        self._count_stalls(self.agreed - stay, end, now)
        self.wished = stay | come
        self._note_sets()
        return self.wished

    # What follows from it

    @property
    def in_sync_replicas_nums(self) -> int:
        """Size of the smallest set that may be the one in force (RocketMQ takes the largest)."""
        return min(len(members) for members in self._sets)

    def acknowledged(self, end: int) -> int:
        """Up to where puts are acknowledged; UNKNOWN if none can be."""
        return acknowledged(self._sets, self._held(end), end, self.rules)

    def is_lost(self, broker_id: int, end: int, now: float) -> bool:
        """Whether a member is to be dropped."""
        if broker_id == self.own_id:
            return False
        slave = self._slaves.get(broker_id)
        if slave is not None:
            return now > self._lost_at(broker_id, slave, end, now)
        return broker_id in self._left or now - self._began > self.rules.connect_s_max

    def next_look_at(self, end: int, now: float) -> float:
        """When `wish` may say something else by nothing but the passing of time."""
        rules = self.rules
        due = [now + min(rules.check_s, rules.stalled_s_max / 4)]
        for member in self.agreed - {self.own_id}:
            if member not in self._slaves:
                due.append(self._began + rules.connect_s_max)
            else:
                due.append(self._lost_at(member, self._slaves[member], end, now))
        due += [self._slaves[slave].caught_up.at + rules.join_s_max for slave in self.joining]
        return min(at + TICK_S for at in due if at + TICK_S > now)

    def caught_up_at(self, broker_id: int, end: int, now: float) -> float:
        """When a connected slave last had all there was, or when it came if it never had."""
        slave = self._slaves[broker_id]
        return now if slave.held >= end else max(slave.caught_up.at, slave.connected_at)

    def explain(self, offset: int) -> str:
        """Return which members a put that ends at `offset` waits for, in words; "" if none."""
        return "; ".join(text for _, text in self.reasons(offset))

    def reasons(self, offset: int) -> list[tuple[Cause, str]]:
        """Return the same member by member, each with what it is counted by."""
        reasons = []
        for broker_id in sorted(frozenset().union(*self._sets) - {self.own_id}):
            slave = self._slaves.get(broker_id)
            if slave is None or slave.held == UNKNOWN:
                reasons.append((Cause.MEMBER_AWAY, f"broker {broker_id} is in the sync-state set and not connected"))
            elif slave.held < offset:
                text = f"broker {broker_id} of the sync-state set has acknowledged {slave.held}"
                reasons.append((Cause.MEMBER_LATE, text))
        return reasons

    def _lost_at(self, broker_id: int, slave: _Slave, end: int, now: float) -> float:
        """Until when a connected member is waited for, as things are now."""
        caught_up_at = self.caught_up_at(broker_id, end, now)
        late_at = caught_up_at + self._patience_s(broker_id)
        if slave.held == UNKNOWN:
            return late_at  # it may be cutting off what it has too much
        return min(late_at, max(caught_up_at, slave.advanced_at) + self._stall_patience_s(broker_id, now))

    def _stall_patience_s(self, broker_id: int, now: float) -> float:
        stalls = self._stalls.get(broker_id)
        if stalls is None or now > stalls.last_at + STALL_FORGOTTEN_S:
            return self.rules.stalled_s_max
        return min(math.ldexp(self.rules.stalled_s_max, min(stalls.count, 32)), self.rules.not_catch_up_s_max)

    def _count_stalls(self, dropped: Collection[int], end: int, now: float) -> None:
        """Remember who is dropped for standing still, and would not have been for being late."""
        for broker_id in dropped:
            if broker_id not in self._slaves:
                continue
            if now - self.caught_up_at(broker_id, end, now) <= self._patience_s(broker_id):
                stalls = self._stalls.setdefault(broker_id, _Stalls())
                stalls.count = 1 if now > stalls.last_at + STALL_FORGOTTEN_S else stalls.count + 1
                stalls.last_at = now

    def _patience_s(self, broker_id: int) -> float:
        is_gone = self._living is not None and broker_id not in self._living
        return min(self.rules.gone_s_max, self.rules.not_catch_up_s_max) if is_gone else self.rules.not_catch_up_s_max

    def _is_close(self, slave: _Slave, now: float) -> bool:
        is_close = now - slave.caught_up.at <= self.rules.join_s_max
        return slave.can_join and is_close and slave.held >= self.epoch_start

    def _let_go(self, now: float) -> None:
        """Wait no longer for those that were to join and have fallen behind."""
        late = {
            slave
            for slave in self.joining
            if not self._is_close(self._slaves[slave], now)
            and not may_join(self._slaves[slave].held, self.confirm_offset, self.epoch_start)
        }
        if late:
            self.joining -= late
            self._note_sets()

    def _held(self, end: int) -> dict[int, int]:
        held = {broker_id: slave.held for broker_id, slave in self._slaves.items() if slave.held != UNKNOWN}
        held[self.own_id] = end
        return held

    def _note_sets(self) -> None:
        sets = [self.agreed]
        if self.wished is not None:
            sets.append(self.wished)
        if self.joining:
            sets.append(self.agreed | self.joining)
        self._sets = tuple(sets)
