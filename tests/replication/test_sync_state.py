"""The rules of the sync-state set, each alone and together, with times and offsets controlled by the test."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.replication.caught_up import CaughtUp
from ha.replication.options import TICK_S
from ha.replication.sync_state import (
    ALONE,
    STALL_FORGOTTEN_S,
    UNKNOWN,
    SyncStateRules,
    SyncStateSet,
    acknowledged,
    confirmed,
    held_by,
    may_join,
    may_shrink,
    needed_count,
)

MASTER, B, C, D = 1, 2, 3, 4


def ids(*members: int) -> frozenset[int]:
    return frozenset(members)


def term(
    *members: int, start: int = 1000, confirm: int | None = None, rules: SyncStateRules | None = None
) -> SyncStateSet:
    """A term that started at time 0, of a master whose log ended at `start`."""
    confirm = start if confirm is None else confirm
    return SyncStateSet(
        MASTER, {MASTER, *members}, epoch=7, epoch_start=start, confirm_offset=confirm, now=0, rules=rules
    )


def connected(state: SyncStateSet, *slaves: int, at: int = 1000, now: float = 0) -> SyncStateSet:
    """Each of `slaves` connects and has the log up to `at`, its end."""
    for slave in slaves:
        state.connect(slave, now, can_join=True)
        state.report(slave, at, at, now)
    return state


# Each rule


@pytest.mark.parametrize(
    ("members", "ack_count", "expected"), [(3, None, 3), (3, ALONE, 3), (3, 2, 2), (3, 3, 3), (1, 2, 1), (5, 3, 3)]
)
def test_needed_count(members: int, ack_count: int | None, expected: int) -> None:
    assert needed_count(members, ack_count) == expected


@pytest.mark.parametrize(
    ("count", "members", "expected"),
    [(1, {1, 2, 3}, 30), (2, {1, 2, 3}, 20), (3, {1, 2, 3}, 10), (2, {1, 3}, 10), (2, {1, 9}, UNKNOWN)],
)
def test_held_by(count: int, members: set[int], expected: int) -> None:
    assert held_by(count, members, {1: 30, 2: 20, 3: 10}) == expected


def test_confirm_offset_is_the_minimum_over_all_sets() -> None:
    held = {MASTER: 90, B: 80, C: 70}
    assert confirmed(0, [{MASTER, B}], held) == 80
    assert confirmed(0, [{MASTER, B}, {MASTER, C}], held) == 70
    assert confirmed(75, [{MASTER, B}, {MASTER, C}], held) == 75
    assert confirmed(60, [{MASTER, B}, {MASTER, D}], held) == 60
    assert confirmed(0, [{MASTER, B, C}], held, 2) == 80


def test_acknowledged_by_policy() -> None:
    held, members = {MASTER: 90, B: 80, C: 70}, [{MASTER, B, C}]
    assert acknowledged(members, held, 90, SyncStateRules()) == 70
    assert acknowledged(members, held, 90, SyncStateRules(ack_count=2)) == 80
    assert acknowledged(members, held, 90, SyncStateRules(ack_count=3)) == 70
    assert acknowledged(members, held, 90, SyncStateRules(ack_count=ALONE)) == 90
    assert acknowledged([{MASTER}], held, 90, SyncStateRules()) == 90
    assert acknowledged([{MASTER}], held, 90, SyncStateRules(ack_count=2)) == UNKNOWN
    assert acknowledged([{MASTER, D}], held, 90, SyncStateRules()) == UNKNOWN


def test_two_acknowledgements_are_needed_in_the_old_set_and_in_the_new() -> None:
    held, rules = {MASTER: 90, B: 80, C: 70}, SyncStateRules(ack_count=2)
    assert acknowledged([{MASTER, B, C}, {MASTER, C}], held, 90, rules) == 70


def test_a_set_below_the_minimum_acknowledges_nothing() -> None:
    held, rules = {MASTER: 90, B: 80}, SyncStateRules(min_in_sync_replicas=2)
    assert acknowledged([{MASTER, B}], held, 90, rules) == 80
    assert acknowledged([{MASTER, B}, {MASTER}], held, 90, rules) == UNKNOWN


def test_who_may_join() -> None:
    assert may_join(1000, 1000, 900)
    assert not may_join(999, 1000, 900)
    assert not may_join(950, 900, 1000)


def test_with_ack_count_enough_members_must_stay() -> None:
    held = {MASTER: 90, B: 80, C: 70}
    assert may_shrink({MASTER, C}, held, 80, None)
    assert not may_shrink({MASTER, C}, held, 80, 2)
    assert may_shrink({MASTER, B}, held, 80, 2)
    assert may_shrink({MASTER}, held, 80, 2)


def test_a_slave_of_a_busy_master_counts_as_caught_up() -> None:
    caught_up = CaughtUp()
    caught_up.note_report(10, 100, 1.0)
    assert caught_up.at == -math.inf
    caught_up.note_report(90, 200, 2.0)
    assert caught_up.at == -math.inf
    caught_up.note_report(150, 300, 3.0)
    assert caught_up.at == 1.0
    caught_up.note_report(299, 400, 4.0)
    assert caught_up.at == 1.0
    caught_up.note_report(300, 500, 5.0)
    assert caught_up.at == 3.0
    caught_up.note_report(600, 600, 6.0)
    assert caught_up.at == 6.0


# The set


def test_a_master_alone_confirms_what_it_writes() -> None:
    state = term()
    assert state.acknowledged(2000) == 2000
    assert state.advance(2000)
    assert state.confirm_offset == 2000
    assert state.propose(2000, 100) is None


def test_puts_wait_for_members() -> None:
    state = connected(term(B, C), B, C)
    state.report(B, 1500, 2000, 1)
    assert state.acknowledged(2000) == 1000
    assert not state.advance(2000)
    state.report(C, 1400, 2000, 1)
    assert state.acknowledged(2000) == 1400
    assert state.advance(2000)
    assert state.confirm_offset == 1400


def test_an_unconnected_member_keeps_the_confirm_offset() -> None:
    """RocketMQ #6662: cut off together with one of two slaves, a master must confirm nothing more."""
    state = connected(term(B, C, confirm=900), B)
    state.report(B, 2000, 2000, 1)
    assert not state.advance(2000)
    assert state.confirm_offset == 900
    assert state.acknowledged(2000) == UNKNOWN
    # Nor after a connection is lost, as long as the set has not changed.
    connected(state, C, at=2000, now=2)
    assert state.advance(2000)
    state.disconnect(C)
    assert state.propose(2500, 3) == ids(MASTER, B)
    state.report(B, 2500, 2500, 3)
    assert not state.advance(2500)
    assert state.confirm_offset == 2000
    assert state.acknowledged(2500) == UNKNOWN


def test_acks_before_a_reconnect_do_not_count() -> None:
    state = connected(term(B), B, at=2000)
    state.connect(B, 1, can_join=True)
    assert state.acknowledged(2000) == UNKNOWN
    state.report(B, 1500, 2000, 1)
    assert state.acknowledged(2000) == 1500


def test_while_a_slave_is_added_both_sets_must_have_each_byte() -> None:
    """RocketMQ #5663: the agreement service has the larger set, its answer is lost, and the master goes on with the
    smaller one: what it acknowledges then the slave doesn't have, which may be elected."""
    state = connected(term(), B)
    assert state.propose(1000, 1) == ids(MASTER, B)
    assert state.acknowledged(2000) == 1000
    assert not state.advance(2000)
    state.report(B, 2000, 2000, 2)
    assert state.acknowledged(2000) == 2000
    # Until the answer is known.
    state.disconnect(B)
    assert state.acknowledged(2000) == UNKNOWN
    assert not state.advance(3000)
    state.confirm_set({MASTER, B})
    assert state.acknowledged(2000) == UNKNOWN
    assert state.propose(3000, 3) == ids(MASTER)
    assert state.acknowledged(3000) == UNKNOWN
    state.confirm_set({MASTER})
    assert state.acknowledged(3000) == 3000


def test_a_slave_that_is_always_slightly_behind_joins() -> None:
    state = term()
    state.connect(B, 0, can_join=True)
    end = held = 1000
    for step in range(1, 5):
        end += 100
        state.advance(end)
        state.report(B, held, end, step / 100)
        held = end
        if state.joining:
            break
    assert state.joining == ids(B)
    # From now on puts wait for it.
    assert state.propose(end + 100, 0.05) is None
    assert not state.advance(end + 100)
    assert state.acknowledged(end + 100) < end
    state.report(B, end, end + 200, 0.06)
    assert state.propose(end + 200, 0.06) == ids(MASTER, B)
    state.confirm_set({MASTER, B})
    assert state.joining == frozenset()
    state.advance(end + 200)
    assert state.confirm_offset == end


def test_a_slave_joins_with_what_was_acknowledged_before_it_is_flushed_here() -> None:
    """Puts that the set has acknowledged still wait for the master's disk, and are answered after the slave joined."""
    state = term()
    assert state.acknowledged(1100) == 1100
    state.connect(B, 0, can_join=True)
    state.report(B, 999, 1000, 0.1)
    state.report(B, 1099, 1100, 0.2)
    assert not state.advance(1000)
    assert state.propose(1100, 0.2) is None
    state.report(B, 1100, 1100, 0.3)
    assert state.propose(1100, 0.3) == ids(MASTER, B)


def test_with_ack_count_members_with_what_was_acknowledged_before_it_is_flushed_here_stay() -> None:
    state = connected(term(B, C, rules=SyncStateRules(ack_count=2)), B, C)
    state.report(B, 1100, 1100, 1)
    assert state.acknowledged(1100) == 1100
    assert not state.advance(1000)
    state.disconnect(B)
    assert state.propose(1100, 2) is None
    state.report(C, 1100, 1100, 3)
    assert state.propose(1100, 3) == ids(MASTER, C)


def test_a_joining_slave_that_falls_behind_is_removed() -> None:
    state = connected(term(), B)
    state.advance(2000)
    state.joining = frozenset()
    state.report(B, 1999, 2000, 0.5)
    assert state.joining == ids(B)
    state.confirm_offset = 2000
    assert state.acknowledged(3000) == 1999
    assert state.propose(3000, 2.0) is None
    assert state.joining == frozenset()
    assert state.acknowledged(3000) == 3000


def test_a_joining_slave_that_falls_behind_is_removed_while_another_is_added() -> None:
    state = connected(term(), B)
    assert state.propose(1000, 0) == ids(MASTER, B)
    state.confirm_offset = 2000
    connected(state, C)
    state.report(C, 1999, 2000, 0.5)
    state.report(B, 3000, 3000, 2.0)
    assert state.acknowledged(3000) == 1999
    assert state.propose(3000, 2.0) == ids(MASTER, B)
    assert state.joining == ids(B)
    assert state.acknowledged(3000) == 3000


def test_a_joining_slave_that_disconnects_is_removed() -> None:
    state = connected(term(), B)
    assert state.joining == ids(B)
    state.disconnect(B)
    assert state.acknowledged(2000) == 2000
    assert state.propose(2000, 1) is None


def test_a_slave_far_behind_is_not_waited_for() -> None:
    state = term()
    state.connect(B, 0, can_join=True)
    state.report(B, 500, 100_000, 0)
    assert state.joining == frozenset()
    assert state.acknowledged(100_000) == 100_000


def test_a_learner_never_joins() -> None:
    state = term()
    state.connect(B, 0, can_join=False)
    state.report(B, 1000, 1000, 0)
    assert state.joining == frozenset()
    assert state.propose(1000, 1) is None


def test_a_slave_without_the_start_of_the_term_does_not_join() -> None:
    state = term(start=1000, confirm=900)
    state.connect(B, 0, can_join=True)
    state.report(B, 950, 950, 0)
    assert state.joining == frozenset()


@pytest.mark.parametrize(("after_s", "expected"), [(15.0, None), (15.1, ids(MASTER, C))])
def test_a_member_that_does_not_catch_up_is_dropped(after_s: float, expected: frozenset[int] | None) -> None:
    state = connected(term(B, C), B, C)
    state.report(C, 1000, 1000, 5)
    state.grow(B, 5)
    state.grow(C, 5)
    state.report(C, 2000, 2000, 5)
    assert state.propose(2000, 5 + after_s) == expected


STALLS = SyncStateRules(stalled_s_max=2.0)


def stalled(state: SyncStateSet, since: float, end: int) -> SyncStateSet:
    """B has the whole log when that grows to `end`, and acknowledges nothing of the growth."""
    state.report(B, end - 100, end - 100, since)
    state.grow(B, since)
    return state


@pytest.mark.parametrize(("after_s", "expected"), [(2.0, None), (2.1, ids(MASTER, C))])
def test_a_stalled_member_is_dropped_sooner_than_a_late_one(after_s: float, expected: frozenset[int] | None) -> None:
    state = stalled(connected(term(B, C, rules=STALLS), B, C), since=5, end=2000)
    state.report(C, 2000, 2000, 5)
    assert state.next_check_at(2000, 6.8) == pytest.approx(7 + TICK_S)
    assert state.propose(2000, 5 + after_s) == expected


def test_next_check_comes_soon_enough() -> None:
    """Only the check that was due before the log grew notices a slave that acknowledges nothing."""
    state = connected(term(B, rules=STALLS), B, now=5)
    assert state.next_check_at(1000, 5) <= 5.6


def test_a_slow_member_is_not_stalled() -> None:
    state = stalled(connected(term(B, rules=STALLS), B), since=0, end=100_000)
    for second in range(1, 15):
        state.report(B, 99_900 + second, 100_000 + 1000 * second, second)
        assert state.propose(100_000 + 1000 * second, second + 0.9) is None
    assert state.propose(120_000, 15.1) == ids(MASTER), "late for 15 s it is dropped as ever"


def test_a_repeated_ack_is_no_progress() -> None:
    state = stalled(connected(term(B, rules=STALLS), B), since=5, end=2000)
    for now in (5.5, 6, 6.5, 7):
        state.report(B, 1900, 2000, now)
    assert state.propose(2000, 7.1) == ids(MASTER)


def test_a_new_connection_is_no_progress() -> None:
    state = stalled(connected(term(B, rules=STALLS), B), since=5, end=2000)
    state.connect(B, 6.9, can_join=True)
    state.report(B, 1900, 2000, 7)
    assert state.propose(2000, 7.1) is not None


def test_a_member_without_a_report_may_be_truncating() -> None:
    state = term(B, rules=STALLS)
    state.connect(B, 0, can_join=True)
    assert state.propose(1000, 15) is None
    assert state.propose(1000, 15.1) == ids(MASTER)


def test_repeated_stalls_are_waited_for_longer_each_time() -> None:
    """A disk that hangs for 3 s repeatedly: the slave is dropped for the first time, but not each time."""
    state = connected(term(B, rules=STALLS), B)
    now, end = 5.0, 2000
    waited: list[float] = []

    def drop() -> None:
        nonlocal now, end
        stalled(state, now, end)
        patience = next(each for each in (2.0, 4.0, 8.0, 15.0) if state.propose(end, now + each + 0.1) is not None)
        waited.append(patience)
        now += patience + 0.2
        state.confirm_set({MASTER})
        connected(state, B, at=end, now=now)
        assert state.propose(end, now) == ids(MASTER, B)
        state.confirm_set({MASTER, B})
        end += 1000

    for _ in range(5):
        drop()
    now += STALL_FORGOTTEN_S
    drop()
    assert waited == [2.0, 4.0, 8.0, 15.0, 15.0, 2.0]


def test_a_member_without_a_lease_is_dropped_after_a_second() -> None:
    state = connected(term(B, C), B, C)
    state.report(C, 2000, 2000, 5)
    state.grow(B, 5)
    state.set_live_members({MASTER, B, C})
    assert state.propose(2000, 6.1) is None
    state.set_live_members({MASTER, C})
    assert state.next_check_at(2000, 5.5) == pytest.approx(6 + TICK_S)
    assert state.propose(2000, 6) is None
    assert state.propose(2000, 6.1) == ids(MASTER, C)


def test_a_caught_up_member_without_a_lease_stays() -> None:
    state = connected(term(B), B)
    state.set_live_members({MASTER})
    assert state.propose(1000, 1e6) is None


def test_a_caught_up_member_stays_without_writes() -> None:
    state = connected(term(B), B)
    assert state.propose(1000, 1e6) is None


@pytest.mark.parametrize(("now", "expected"), [(3.0, None), (3.1, ids(MASTER, B))])
def test_a_member_that_never_connects_is_dropped(now: float, expected: frozenset[int] | None) -> None:
    state = connected(term(B, C), B)
    assert state.propose(1000, now) == expected


def test_a_disconnected_member_counts_until_its_removal_is_agreed() -> None:
    state = connected(term(B), B)
    state.disconnect(B)
    assert state.propose(1000, 0) == ids(MASTER)
    assert state.acknowledged(2000) == UNKNOWN
    assert state.in_sync_replicas_nums == 1
    connected(state, B, at=2000, now=1)
    assert state.propose(2000, 1) == ids(MASTER)  # it does not change until it is answered
    state.confirm_set({MASTER})
    assert state.acknowledged(2500) == 2500
    state.report(B, 2500, 2500, 2)
    assert state.propose(2500, 2) == ids(MASTER, B)


def test_ids_that_are_in_no_set_leave_nothing_behind() -> None:
    """A peer may claim any number of them."""
    state = term()
    for broker_id in range(10, 1000):
        state.connect(broker_id, 0, can_join=True)
        state.disconnect(broker_id)
    assert not state._disconnected


def test_reconnecting_is_not_catching_up() -> None:
    state = connected(term(B), B)
    for now in range(1, 20):
        state.connect(B, now, can_join=True)
        state.report(B, 1000, 2000, now)
    assert state.propose(2000, 20) == ids(MASTER)


def test_with_ack_count_needed_members_are_not_dropped() -> None:
    state = connected(term(B, C, rules=SyncStateRules(ack_count=2)), B, C)
    state.report(B, 2000, 2000, 1)
    assert state.acknowledged(2000) == 2000
    assert state.advance(2000)
    state.disconnect(B)
    assert state.propose(2000, 2) is None
    state.report(C, 2000, 2000, 3)
    assert state.propose(2000, 3) == ids(MASTER, C)


def test_explain_names_the_members_that_puts_wait_for() -> None:
    state = connected(term(B, C), B)
    assert state.explain(1500) == (
        "broker 2 of the sync-state set has acknowledged 1000; broker 3 is in the sync-state set and not connected"
    )
    assert connected(term(B), B).explain(1000) == ""


# All together: nobody who may be elected lacks what was acknowledged

EVENTS = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 50)),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.just("connect"), st.sampled_from((B, C, D))),
    st.tuples(st.just("disconnect"), st.sampled_from((B, C, D))),
    st.tuples(st.just("report"), st.sampled_from((B, C, D)), st.integers(0, 120)),
    st.tuples(st.just("catch up"), st.sampled_from((B, C, D))),
    st.tuples(st.just("catch up with the flush"), st.sampled_from((B, C, D))),
    st.tuples(st.just("wait"), st.sampled_from((0.1, 2.0, 20.0))),
    st.tuples(st.just("wish"), st.none()),
    st.tuples(st.just("service has it"), st.none()),
    st.tuples(st.just("answer"), st.none()),
)


@given(st.lists(EVENTS, max_size=60), st.sampled_from((None, 2, 3)))
def test_every_electable_member_has_all_acknowledged_bytes(
    events: list[tuple[str, int]], ack_count: int | None
) -> None:
    """The agreement service adopts a proposal some time before the master learns of it, or never gets it.

    A put is acknowledged once the set and the master's disk have it.
    """
    state = term(rules=SyncStateRules(ack_count=ack_count))
    service, end, flushed, now = state.agreed, 1000, 1000, 0.0
    disks = {B: 0, C: 0, D: 0}
    by_set = confirm = 1000
    for kind, *details in events:
        details = list(details)
        if kind == "grow":
            end += int(details[0])
        elif kind == "flush":
            flushed = end
        elif kind == "wait":
            now += details[0]
        elif kind == "connect":
            state.connect(details[0], now, can_join=True)
            state.report(details[0], disks[details[0]], end, now)
        elif kind == "disconnect":
            state.disconnect(details[0])
        elif kind in ("report", "catch up", "catch up with the flush") and details[0] in state._slaves:
            slave = details[0]
            reached = {"catch up": end, "catch up with the flush": max(flushed, disks[slave])}
            disks[slave] = reached.get(kind) or min(end, disks[slave] + 20 * details[1])
            state.report(slave, disks[slave], end, now)
        elif kind == "wish":
            state.propose(end, now)
        elif kind == "service has it":
            service = state.proposed or service
        elif kind == "answer":
            state.confirm_set(service)
        state.advance(flushed)
        by_set, confirm = max(by_set, state.acknowledged(end)), max(confirm, state.confirm_offset)
        acked = min(by_set, flushed)
        held = {**disks, MASTER: flushed}
        if ack_count is None:
            assert all(held[member] >= max(acked, confirm) for member in service)
        else:
            # The best of any |set| - n + 1 members.
            candidate_count = max(1, len(service) - ack_count + 1)
            worst = sorted(held[member] for member in service)[:candidate_count]
            assert worst[-1] >= max(acked, confirm)
