"""When a slave tries again. The clock and the chance are given."""

from __future__ import annotations

import pytest

from ha.replication.reconnect import LOST, Reconnect
from ha.replication.statistics import Condition


def waits(reconnect: Reconnect, count: int) -> list[float]:
    """How long it waits while nobody answers."""
    return [reconnect.wait_s(Condition.CONNECT_FAILED, 0.0, has_followed=False) for _ in range(count)]


def test_what_fails_is_tried_after_twice_as_long_up_to_the_interval() -> None:
    assert waits(Reconnect(5.0, lambda: 0.0), 9) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    assert waits(Reconnect(0.1, lambda: 0.0), 3) == pytest.approx([0.1, 0.1, 0.1]), "a member of a failover group"
    assert waits(Reconnect(5.0, lambda: 0.0), 10_000)[-1] == 5.0


def test_a_wait_is_shortened_by_chance_by_up_to_half() -> None:
    assert waits(Reconnect(5.0, lambda: 0.5), 3) == pytest.approx([0.075, 0.15, 0.3])
    assert waits(Reconnect(5.0, lambda: 1.0), 8)[-1] == pytest.approx(2.5)


@pytest.mark.parametrize("condition", sorted(LOST, key=str))
def test_what_worked_is_made_again_at_once_but_not_twice_within_the_interval(condition: Condition) -> None:
    reconnect = Reconnect(5.0, lambda: 0.0)
    lost = [reconnect.wait_s(condition, now, has_followed=True) for now in (7.0, 7.0, 11.9, 12.0, 12.0)]
    assert lost == pytest.approx([0.0, 0.1, 0.2, 0.0, 0.1])


@pytest.mark.parametrize("condition", sorted(set(Condition) - LOST, key=str))
def test_what_is_no_loss_waits_for_the_interval(condition: Condition) -> None:
    assert Reconnect(5.0, lambda: 0.9).wait_s(condition, 7.0, has_followed=True) == 5.0


def test_another_master_is_tried_as_the_first_one_was() -> None:
    reconnect = Reconnect(5.0, lambda: 0.0)
    waits(reconnect, 6)
    reconnect.begin_again()
    assert waits(reconnect, 1) == pytest.approx([0.1])
