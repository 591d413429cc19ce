"""When a slave reconnects, with a given clock and random numbers."""

import pytest

from ha.replication.reconnect import LOST, Reconnect
from ha.replication.statistics import Condition


def waits(reconnect: Reconnect, count: int) -> list[float]:
    """Return the waits while nobody answers."""
    return [reconnect.wait_s(Condition.CONNECT_FAILED, 0.0, has_followed=False) for _ in range(count)]


def test_failures_double_the_wait_up_to_the_interval() -> None:
    assert waits(Reconnect(5.0, lambda: 0.0), 9) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    assert waits(Reconnect(0.1, lambda: 0.0), 3) == pytest.approx([0.1, 0.1, 0.1]), "a member of a failover group"
    assert waits(Reconnect(5.0, lambda: 0.0), 10_000)[-1] == 5.0


def test_jitter_shortens_a_wait_by_up_to_half() -> None:
    assert waits(Reconnect(5.0, lambda: 0.5), 3) == pytest.approx([0.075, 0.15, 0.3])
    assert waits(Reconnect(5.0, lambda: 1.0), 8)[-1] == pytest.approx(2.5)
    wrong_secret = Reconnect(5.0, lambda: 0.5).wait_s(Condition.NOT_AUTHENTICATED, 7.0, has_followed=False)
    assert wrong_secret == pytest.approx(3.75), "the slaves of one master don't beat together"


@pytest.mark.parametrize("condition", sorted(LOST, key=str))
def test_reconnects_at_once_but_only_once_per_interval(condition: Condition) -> None:
    reconnect = Reconnect(5.0, lambda: 0.0)
    lost = [reconnect.wait_s(condition, now, has_followed=True) for now in (7.0, 7.0, 11.9, 12.0, 12.0)]
    assert lost == pytest.approx([0.0, 0.1, 0.2, 0.0, 0.1])


@pytest.mark.parametrize("condition", sorted(set(Condition) - LOST - {Condition.NOT_AUTHENTICATED}, key=str))
def test_other_ends_wait_for_the_interval(condition: Condition) -> None:
    assert Reconnect(5.0, lambda: 0.9).wait_s(condition, 7.0, has_followed=True) == 5.0


def test_obstacles_double_the_wait_of_a_member() -> None:
    reconnect = Reconnect(0.1, lambda: 0.9)
    obstacles = [reconnect.wait_s(Condition.DIVERGED, 7.0, has_followed=False) for _ in range(10_000)]
    assert obstacles[:8] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert obstacles[-1] == 5.0
    reconnect.wait_s(Condition.CONNECTION_LOST, 100.0, has_followed=True)
    assert reconnect.wait_s(Condition.DIVERGED, 100.0, has_followed=False) == 0.1


def test_reset_forgets_failures() -> None:
    reconnect = Reconnect(0.1, lambda: 0.0)
    for condition in (Condition.CONNECT_FAILED, Condition.DIVERGED):
        waited = [reconnect.wait_s(condition, 0.0, has_followed=False) for _ in range(6)]
        reconnect.reset()
        assert reconnect.wait_s(condition, 0.0, has_followed=False) == waited[0] == 0.1
