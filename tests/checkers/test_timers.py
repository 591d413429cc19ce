"""The checker of timer messages, on records made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkers.records import Rec
from tests.checkers.timers import TIMER_TOPIC, TimerSent, check

DUE_MS = 10_000


def waiting(key: bytes = b"k") -> Rec:
    return record(TIMER_TOPIC, key, 5_000, b"REAL_TOPIC\x01T\x02")


def delivered(store_ms: int = DUE_MS, key: bytes = b"k", decided_ms: int = DUE_MS) -> Rec:
    return record("T", key, store_ms, f"TIMER_DEQUEUE_MS\x01{decided_ms}\x02".encode())


def record(topic: str, key: bytes, store_ms: int, properties: bytes) -> Rec:
    return Rec(0, 100, topic, 0, 0, key, 0, 0, store_ms, properties, b"")


class Image:
    """A log of these records."""

    def __init__(self, *records: Rec, misread_to: int) -> None:
        self._records = records
        self.misread_to = misread_to

    def records(self) -> tuple[Rec, ...]:
        return self._records


def found(
    *records: Rec,
    is_acknowledged: bool = True,
    now_ms: int = 20_000,
    may_lose: bool = False,
    may_repeat: bool = False,
    clock_is_steady: bool = True,
    misread_to: int = 0,
) -> list[str]:
    image: Any = Image(*records, misread_to=misread_to)
    violations = check(
        [TimerSent(b"k", DUE_MS, is_acknowledged)],
        image,
        "T",
        now_ms=now_ms,
        may_lose=may_lose,
        may_repeat=may_repeat,
        clock_is_steady=clock_is_steady,
    )
    return [text for _, text in violations]


def test_a_delivery_in_time_is_right() -> None:
    assert found(waiting(), delivered()) == []


def test_an_early_delivery_is_found() -> None:
    [text] = found(waiting(), delivered(DUE_MS - 1))
    assert "1 ms before its time" in text


def test_an_early_delivery_is_no_fault_of_the_master_if_a_bit_flipped_that_nobody_can_notice() -> None:
    assert found(waiting(), delivered(DUE_MS - 1), misread_to=1) == []
    assert found(delivered(DUE_MS - 1), misread_to=1) == []


def test_a_clock_may_be_set_back_after_the_decision_to_deliver() -> None:
    early = delivered(DUE_MS - 1)
    assert found(waiting(), early, clock_is_steady=False) == []
    assert found(waiting(), delivered(DUE_MS - 2, decided_ms=DUE_MS - 1), clock_is_steady=False)
    assert found(waiting(), early)


def test_a_message_that_is_not_delivered_is_found() -> None:
    [text] = found(waiting(), may_lose=True)
    assert "overdue" in text
    assert found(waiting(), now_ms=DUE_MS - 1) == []
    assert found(waiting(), is_acknowledged=False) == []
    assert found(waiting(), misread_to=1 << 40) == []


@pytest.mark.parametrize("may_lose", [True, False])
def test_a_message_that_left_no_trace_is_found_unless_a_fault_may_have_lost_it(*, may_lose: bool) -> None:
    assert bool(found(may_lose=may_lose)) is not may_lose
    assert found(is_acknowledged=False) == []


@pytest.mark.parametrize("may_repeat", [True, False])
def test_a_second_delivery_is_found_unless_a_master_crashed(*, may_repeat: bool) -> None:
    assert bool(found(waiting(), delivered(), delivered(), may_repeat=may_repeat)) is not may_repeat


def test_a_message_that_nobody_sent_is_found() -> None:
    [text] = found(waiting(), delivered(), delivered(key=b"other"))
    assert "nobody sent" in text
