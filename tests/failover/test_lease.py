"""The deadline of a master's lease, with pauses and lost answers."""

import math

import pytest

from ha.failover.lease import LeaseDeadline, MasterLease


class HandClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def deadline(clock: HandClock) -> LeaseDeadline:
    """2 s were granted at 100."""
    deadline = LeaseDeadline(clock)
    deadline.renewed(sent_at=100.0, granted_s=2.0)
    return deadline


@pytest.fixture
def lease(deadline: LeaseDeadline) -> MasterLease:
    return MasterLease(deadline)


def test_deadline_counts_from_the_request_minus_drift(clock: HandClock, deadline: LeaseDeadline) -> None:
    clock.now = 100.5  # the answer took half a second
    assert deadline.remaining_s == pytest.approx(1.3)


def test_is_not_held_before_the_first_answer(clock: HandClock) -> None:
    assert not MasterLease(LeaseDeadline(clock)).is_held


def test_an_answer_slower_than_the_lease_does_not_count(clock: HandClock, deadline: LeaseDeadline) -> None:
    clock.now = 103.0
    assert deadline.remaining_s < 0
    assert not MasterLease(deadline).is_held


def test_an_older_answer_does_not_shorten(deadline: LeaseDeadline) -> None:
    deadline.renewed(sent_at=99.0, granted_s=2.0)
    assert deadline.remaining_s == pytest.approx(1.8)


def test_the_deadline_is_noticed_at_the_first_check_after_a_pause(clock: HandClock, lease: MasterLease) -> None:
    assert lease.is_held
    clock.now = 101.8  # stopped in between: no timer has run
    assert not lease.is_held
    assert lease.remaining_s == 0
    assert lease.until == -math.inf


def test_a_renewal_after_the_end_was_seen_does_not_bring_it_back(
    clock: HandClock, deadline: LeaseDeadline, lease: MasterLease
) -> None:
    clock.now = 102.0
    assert not lease.is_held
    deadline.renewed(sent_at=101.9, granted_s=2.0)
    assert deadline.remaining_s > 0
    assert not lease.is_held
    assert lease.remaining_s == 0


def test_end_is_final_with_time_left(lease: MasterLease) -> None:
    lease.end()
    assert not lease.is_held


def test_a_lost_lease_ignores_later_answers(deadline: LeaseDeadline, lease: MasterLease) -> None:
    deadline.end()
    deadline.renewed(sent_at=100.0, granted_s=2.0)
    assert not lease.is_held


def test_on_change_is_called_with_each_deadline(clock: HandClock, deadline: LeaseDeadline, lease: MasterLease) -> None:
    passed_on: list[float] = []
    lease.on_change(passed_on.append)
    deadline.renewed(sent_at=100.5, granted_s=2.0)
    assert passed_on[-1] == pytest.approx(102.3)
    clock.now = 103.0  # past, and not checked since
    deadline.renewed(sent_at=102.9, granted_s=2.0)
    assert passed_on[-1] == -math.inf
    assert not lease.is_held
