"""The rules of the sync-state set on a master, for one term: which slaves must have a byte before it is acknowledged,
and before consumers can read it.

The agreement service keeps the set (broker ids, including the master's own). Every member of the set has every
acknowledged byte, so any of them may become the next master. If `ack_count` is less than the size of the set, enough
members have each byte that an election finds it. The master itself knows how much of the log each slave has, from
connections of this term only: a slave may have truncated what it acknowledged to an earlier master.

    agreed     the set that the agreement service is known to have
    proposed   the set that this master asked it to adopt, from before the request until the result is known: the
               service may have either
    joining    slaves that are about to be proposed: they count here already, and only here

All of these sets count, so that no byte is acknowledged that the next master, elected from any of them, may lack.
RocketMQ #5663: while a slave was being added, the old set was enough to acknowledge a byte that the new member, which
was then elected, didn't have. If a slave is lost, puts wait for it until the agreement service has dropped it from the
set.

Why `joining`: a slave may be proposed once it has everything confirmed or acknowledged. If the master is alone, that is
its whole log, which no slave ever has under load at the moment of its report. So puts wait for a slave once it is
close, and it is proposed when it has caught up. If it falls behind, it is removed from `joining`, for which no
agreement is needed.

A member is dropped, unless an election among the others might then miss acknowledged bytes (`may_shrink`), if

- it has not had the whole log for `not_catch_up_s_max`, or only for `gone_s_max` if its lease has ended (a frozen
  process or a machine that is cut off, whose connection stays open while every put waits for it);
- it is behind and has acknowledged nothing for `stalled_s_max` (only the network between it and the master is cut, or
  its disk hangs);
- it has not connected in this term within `connect_s_max`;
- it was connected and no longer is: at once, as in RocketMQ. A lost connection proves little, but every put waits for
  that slave until the set without it is agreed. It rejoins as soon as it is connected and has caught up.

No clock, tasks or streams. Times are in seconds of any monotonic clock, offsets physical, in bytes; `end` is the end of
the master's log. Source: AutoSwitchHAService, except for the differences named here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

from ha.causes import Cause
from ha.replication.caught_up import CaughtUp
from ha.replication.options import TICK_S

ALONE = 1
"""Value of `ack_count`: the master's own log is enough. Acknowledged bytes may be lost with the master."""

UNKNOWN = -1
"""Stands for an offset that is not known."""


STALL_FORGOTTEN_S = 60.0
"""Time in seconds since a slave's last stall after which the limit of its next one is `stalled_s_max` again."""


class SyncStateRules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the sync-state set, with RocketMQ's key where there is one. Times in seconds."""

    ack_count: int | None = None
    """inSyncReplicas: number of members that must acknowledge each byte, the master included; None
    (allAckInSyncStateSet): all. n are enough because an election takes the best of |set| - n + 1 candidates."""
    min_in_sync_replicas: int = 1
    """minInSyncReplicas: minimum size of the set, this node included; a smaller one acknowledges nothing."""
    not_catch_up_s_max: float = 15.0
    """haMaxTimeSlaveNotCatchup: time without the whole log after which a member is dropped."""
    gone_s_max: float = 1.0
    """Time without the whole log after which a member is dropped if its lease in the agreement service has ended."""
    stalled_s_max: float = 15.0
    """Time without the whole log after which a member is dropped if it acknowledged nothing meanwhile; doubled for each
    such drop of the member within STALL_FORGOTTEN_S, up to not_catch_up_s_max. Not less than the master's lease, so
    that a master that was frozen itself has lost its lease before it drops slaves for that."""
    connect_s_max: float = 3.0
    """Time after the start of the term within which a member must connect; otherwise it is dropped. RocketMQ first
    checks the set after the same time."""
    check_s: float = 5.0
    """checkSyncStateSetPeriod: maximum delay before a late member is noticed."""
    join_s_max: float = 1.0
    """A slave can join the set if it had the whole log at most this many seconds ago."""

    def __post_init__(self) -> None:
        assert self.ack_count is None or self.ack_count >= 1
        assert self.min_in_sync_replicas >= 1


# The rules, as functions


def needed_count(member_count: int, ack_count: int | None) -> int:
    """Returns how many members must have a byte before it is confirmed. Then every member that may be elected has it.

    All members must have it if `ack_count` is None or more than `member_count`, and with ALONE: consumers must not read
    unreplicated bytes, although those are acknowledged.
    """
    return member_count if ack_count is None or ack_count == ALONE else min(ack_count, member_count)


def held_by(count: int, members: Collection[int], held: Mapping[int, int]) -> int:
    """Returns the highest offset that `count` of `members` have; UNKNOWN if fewer offsets are known. `held`: broker id
    -> offset."""
    offsets = sorted((held[member] for member in members if member in held), reverse=True)
    return offsets[count - 1] if len(offsets) >= count else UNKNOWN


def confirmed(
    previous: int, sets: Iterable[Collection[int]], held: Mapping[int, int], ack_count: int | None = None
) -> int:
    """Returns the confirm offset: every member of `sets` that may be elected has the log up to here. It never falls.

    A member whose offset is unknown counts as one that has nothing. In RocketMQ (issue #6662) the confirm offset was
    the minimum of the connected members, so a master that was cut off with one of two slaves confirmed bytes that the
    other slave, once elected, didn't have.
    """
    return max(previous, min(held_by(needed_count(len(members), ack_count), members, held) for members in sets))


def acknowledged(sets: Iterable[Collection[int]], held: Mapping[int, int], end: int, rules: SyncStateRules) -> int:
    """Returns the offset up to which puts are acknowledged; UNKNOWN if none are. Unlike the confirm offset it may
    fall."""
    if rules.ack_count == ALONE:
        return end
    lowest = end
    for members in sets:
        count = len(members) if rules.ack_count is None else rules.ack_count
        if len(members) < rules.min_in_sync_replicas:
            return UNKNOWN
        lowest = min(lowest, held_by(count, members, held))
    return lowest


def may_join(held_offset: int, promised_offset: int, epoch_start: int) -> bool:
    """Returns whether a slave has everything that was ever confirmed or acknowledged, in this term and before."""
    return held_offset >= promised_offset and held_offset >= epoch_start


def may_shrink(members: Collection[int], held: Mapping[int, int], promised_offset: int, ack_count: int | None) -> bool:
    """Returns whether an election among `members`, a part of the agreed set, would find everything up to
    `promised_offset`.

    This is always so if every member acknowledges each byte. If only `ack_count` members do, enough of them must be
    among `members`.
    """
    if ack_count is None or ack_count == ALONE:
        return True
    return held_by(needed_count(len(members), ack_count), members, held) >= promised_offset


class _Slave:
    """A slave that is connected in this term. `held` is UNKNOWN before its first report."""

    __slots__ = ("advanced_at", "can_join", "caught_up", "connected_at", "furthest", "held")

    def __init__(self, now: float, *, can_join: bool) -> None:
        self.held = UNKNOWN
        self.can_join = can_join
        self.connected_at = now
        self.furthest = UNKNOWN
        """The highest offset that it acknowledged in this term, on any connection."""
        self.advanced_at = now
        """Time at which `furthest` last rose."""
        self.caught_up = CaughtUp()


class _Stalls:
    """`count`: number of times that a slave was dropped for a stall, each at most STALL_FORGOTTEN_S after the previous
    one. `last_at`: time of the last one."""

    __slots__ = ("count", "last_at")

    def __init__(self) -> None:
        self.count = 0
        self.last_at = -math.inf


class SyncStateSet:
    """The sync-state set in one term of one master. Owned by Leadership, which reports all events to it."""

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
        """`agreed`: the set with which this master was elected. `confirm_offset`: the confirm offset that it knew
        before its election."""
        assert own_id in agreed, (own_id, agreed)
        self.own_id = own_id
        self.epoch = epoch
        self.epoch_start = epoch_start
        self.rules = rules or SyncStateRules()
        self.agreed = frozenset(agreed)
        self.proposed: frozenset[int] | None = None
        self.joining: frozenset[int] = frozenset()
        self.confirm_offset = min(confirm_offset, epoch_start)
        self._acknowledged_offset = UNKNOWN
        """The highest offset that `acknowledged` returned"""
        self._started_at = now
        self._slaves: dict[int, _Slave] = {}
        self._stalls: dict[int, _Stalls] = {}
        self._disconnected: set[int] = set()
        """Members that were connected and no longer are"""
        self._live: frozenset[int] | None = None
        """Members that have a lease; None while that is not known"""
        self._sets: tuple[frozenset[int], ...] = (self.agreed,)

    # Events

    def connect(self, broker_id: int, now: float, *, can_join: bool) -> None:
        """Records a new connection of `broker_id`, which replaces any other; it counts after its first report."""
        assert broker_id != self.own_id
        previous = self._slaves.get(broker_id)
        self.disconnect(broker_id)
        slave = self._slaves[broker_id] = _Slave(now, can_join=can_join)
        if previous is not None:  # reconnecting does not count as catching up
            slave.connected_at, slave.caught_up = previous.connected_at, previous.caught_up
            slave.advanced_at, slave.furthest = previous.advanced_at, previous.furthest
        self._disconnected.discard(broker_id)

    def disconnect(self, broker_id: int) -> None:
        """Records that the connection of `broker_id` has ended."""
        if self._slaves.pop(broker_id, None) is not None:
            if any(broker_id in members for members in self._sets):
                self._disconnected.add(broker_id)
            self.joining -= {broker_id}
            self._update_sets()

    def report(self, broker_id: int, offset: int, end: int, now: float) -> None:
        """Records a report: `broker_id` has the log up to `offset`; the log ends at `end`. Adds the slave to `joining`
        if it is close to the end and may be in the set."""
        slave = self._slaves[broker_id]
        slave.held = max(slave.held, offset)
        if offset > slave.furthest:
            slave.furthest, slave.advanced_at = offset, now
        slave.caught_up.note_report(offset, end, now)
        if broker_id not in self.agreed and broker_id not in self.joining and self._is_close(slave, now):
            self.joining |= {broker_id}
            self._update_sets()

    def grow(self, broker_id: int, now: float) -> None:
        """Records that the log grows now, and that the slave had all of it until now."""
        self._slaves[broker_id].caught_up.at = now

    def set_live_members(self, members: Collection[int]) -> None:
        """Sets the members that have a lease."""
        self._live = frozenset(members)

    def advance(self, end: int) -> bool:
        """Updates the confirm offset; returns whether it rose. `end`: physical offset up to which this master's own log
        counts."""
        previous = self.confirm_offset
        self.confirm_offset = confirmed(previous, self._sets, self._held(end), self.rules.ack_count)
        return self.confirm_offset > previous

    def confirm_set(self, members: Collection[int]) -> None:
        """Records that the agreement service has `members` as the set; earlier proposals can no longer take effect."""
        assert self.own_id in members, (self.own_id, members)
        self.agreed = frozenset(members)
        self.proposed = None
        self.joining -= self.agreed
        self._update_sets()

    def propose(self, end: int, now: float) -> frozenset[int] | None:
        """Returns the set that should replace the agreed one in the agreement service; None: no change.

        A proposal counts from now on, and does not change until `confirm_set`.
        """
        self._drop_late_joiners(now)
        if self.proposed is not None:
            return self.proposed
        held = self._held(end)
        stay = self.agreed - {member for member in self.agreed if self.is_lost(member, end, now)}
        if not may_shrink(stay, held, self._promised_offset, self.rules.ack_count):
            stay = self.agreed
        come = {slave for slave in self.joining if may_join(held[slave], self._promised_offset, self.epoch_start)}
        if stay | come == self.agreed:
            return None
        self._count_stalls(self.agreed - stay, end, now)
        self.proposed = stay | come
        self._update_sets()
        return self.proposed

    # Results

    @property
    def in_sync_replicas_nums(self) -> int:
        """Size of the smallest set that may be in force (RocketMQ: the largest)."""
        return min(len(members) for members in self._sets)

    def acknowledged(self, end: int) -> int:
        """Returns the offset up to which puts are acknowledged; UNKNOWN if none are.

        From now on, each new set must have everything up to this offset (except with ALONE), even if the puts are not
        answered yet because they still wait for the disk here.
        """
        offset = acknowledged(self._sets, self._held(end), end, self.rules)
        if self.rules.ack_count != ALONE:
            self._acknowledged_offset = max(self._acknowledged_offset, offset)
        return offset

    def is_lost(self, broker_id: int, end: int, now: float) -> bool:
        """Returns whether a member should be dropped."""
        if broker_id == self.own_id:
            return False
        slave = self._slaves.get(broker_id)
        if slave is not None:
            return now > self._lost_at(broker_id, slave, end, now)
        return broker_id in self._disconnected or now - self._started_at > self.rules.connect_s_max

    def next_check_at(self, end: int, now: float) -> float:
        """Returns the earliest time at which `propose` may return something else although no event occurs."""
        rules = self.rules
        due = [now + min(rules.check_s, rules.stalled_s_max / 4)]
        for member in self.agreed - {self.own_id}:
            if member not in self._slaves:
                due.append(self._started_at + rules.connect_s_max)
            else:
                due.append(self._lost_at(member, self._slaves[member], end, now))
        due += [self._slaves[slave].caught_up.at + rules.join_s_max for slave in self.joining]
        return min(at + TICK_S for at in due if at + TICK_S > now)

    def caught_up_at(self, broker_id: int, end: int, now: float) -> float:
        """Returns the time at which a connected slave last had the whole log or, if that is later, connected."""
        slave = self._slaves[broker_id]
        return now if slave.held >= end else max(slave.caught_up.at, slave.connected_at)

    def explain(self, offset: int) -> str:
        """Returns which members have not acknowledged a put that ends at `offset`, as a text for people; "" if all
        have."""
        return "; ".join(text for _, text in self.reasons(offset))

    def reasons(self, offset: int) -> list[tuple[Cause, str]]:
        """Returns for each member that has not acknowledged a put that ends at `offset` the cause, for metrics, and a
        text for people."""
        reasons = []
        for broker_id in sorted(frozenset().union(*self._sets) - {self.own_id}):
            slave = self._slaves.get(broker_id)
            if slave is None or slave.held == UNKNOWN:
                reasons.append((Cause.MEMBER_AWAY, f"broker {broker_id} is in the sync-state set and not connected"))
            elif slave.held < offset:
                text = f"broker {broker_id} of the sync-state set has acknowledged {slave.held}"
                reasons.append((Cause.MEMBER_LATE, text))
        return reasons

    @property
    def _promised_offset(self) -> int:
        """Highest offset that was ever confirmed or acknowledged. A new set must ensure that an election finds
        everything up to it.
        """
        return max(self.confirm_offset, self._acknowledged_offset)

    def _lost_at(self, broker_id: int, slave: _Slave, end: int, now: float) -> float:
        """Returns the time at which a connected member will be dropped if nothing changes."""
        caught_up_at = self.caught_up_at(broker_id, end, now)
        late_at = caught_up_at + self._late_s_max(broker_id)
        if slave.held == UNKNOWN:
            return late_at  # it may be truncating its log
        return min(late_at, max(caught_up_at, slave.advanced_at) + self._stalled_s_max(broker_id, now))

    def _stalled_s_max(self, broker_id: int, now: float) -> float:
        stalls = self._stalls.get(broker_id)
        if stalls is None or now > stalls.last_at + STALL_FORGOTTEN_S:
            return self.rules.stalled_s_max
        return min(math.ldexp(self.rules.stalled_s_max, min(stalls.count, 32)), self.rules.not_catch_up_s_max)

    def _count_stalls(self, dropped: Collection[int], end: int, now: float) -> None:
        """Counts the stalls of members that are dropped for a stall and would not be dropped for being late."""
        for broker_id in dropped:
            if broker_id not in self._slaves:
                continue
            if now - self.caught_up_at(broker_id, end, now) <= self._late_s_max(broker_id):
                stalls = self._stalls.setdefault(broker_id, _Stalls())
                stalls.count = 1 if now > stalls.last_at + STALL_FORGOTTEN_S else stalls.count + 1
                stalls.last_at = now

    def _late_s_max(self, broker_id: int) -> float:
        is_gone = self._live is not None and broker_id not in self._live
        return min(self.rules.gone_s_max, self.rules.not_catch_up_s_max) if is_gone else self.rules.not_catch_up_s_max

    def _is_close(self, slave: _Slave, now: float) -> bool:
        is_close = now - slave.caught_up.at <= self.rules.join_s_max
        return slave.can_join and is_close and slave.held >= self.epoch_start

    def _drop_late_joiners(self, now: float) -> None:
        """Removes slaves from `joining` that have fallen behind."""
        late = {
            slave
            for slave in self.joining
            if not self._is_close(self._slaves[slave], now)
            and not may_join(self._slaves[slave].held, self._promised_offset, self.epoch_start)
        }
        if late:
            self.joining -= late
            self._update_sets()

    def _held(self, end: int) -> dict[int, int]:
        held = {broker_id: slave.held for broker_id, slave in self._slaves.items() if slave.held != UNKNOWN}
        held[self.own_id] = end
        return held

    def _update_sets(self) -> None:
        sets = [self.agreed]
        if self.proposed is not None:
            sets.append(self.proposed)
        if self.joining:
            sets.append(self.agreed | self.joining)
        self._sets = tuple(sets)
