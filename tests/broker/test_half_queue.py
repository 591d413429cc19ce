"""State of half messages: ended ones, copies, safe progress; all of it bounded."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.broker.core import BrokerCore
from ha.broker.half_messages import Verdict, judge
from ha.broker.half_queue import (
    MARK_COUNT_MAX,
    MOVED_COUNT_MAX,
    READ_COUNT_MAX,
    WINDOW_COUNT_MAX,
    HalfWindow,
    OpReads,
    Progress,
    ProgressMarks,
    decode_op,
    encode_op,
)
from ha.broker.op_writer import PENDING_COUNT_MAX, OpWriter


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_op_bodies(offsets: list[int]) -> None:
    assert decode_op(encode_op(offsets)) == offsets


@given(st.binary(max_size=40))
def test_any_op_body(body: bytes) -> None:
    try:
        assert all(offset >= 0 for offset in decode_op(body))
    except ValueError:
        pass


@given(st.lists(st.one_of(st.integers(0, 30), st.tuples(st.integers(0, 30)), st.none()), max_size=60))
def test_window_behaves_like_a_set(steps: list[Any]) -> None:
    """A number ends a half message, a tuple moves one to the end of the queue, None advances."""
    window = HalfWindow(0)
    ended: set[int] = set()
    later: dict[int, int] = {}
    size = 31

    def end(offset: int | None) -> None:
        while offset is not None:
            ended.add(offset)
            offset = later.pop(offset, None)

    for step in steps:
        if step is None:
            window.advance()
        elif isinstance(step, int):
            window.end(step)
            end(step)
        elif step[0] not in later:
            window.move(step[0], size)
            if step[0] in ended:
                end(size)
            else:
                ended.add(step[0])
                later[step[0]] = size
            size += 1
        is_open = [offset for offset in range(size) if offset not in ended]
        assert [offset for offset in range(size) if not window.is_ended(offset)] == is_open
        assert window.next_open(0) == min([*is_open, size]) or not is_open
        assert window.open_count(size) == len(is_open)
        assert set(range(window.start)) <= ended
        start = window.next_open(window.start)
        assert window.next_ended(start, size) == min([o for o in ended if o >= start], default=size)


def test_window_is_bounded() -> None:
    window = HalfWindow(10)
    assert window.end(10 + WINDOW_COUNT_MAX) == []
    assert window.end(10 + WINDOW_COUNT_MAX - 1) == [10 + WINDOW_COUNT_MAX - 1]
    assert window.end(10) == [10]
    window.advance()
    assert window.end(10 + WINDOW_COUNT_MAX) == [10 + WINDOW_COUNT_MAX]


def test_copy_beyond_the_window_is_ended_once_the_window_has_advanced() -> None:
    window = HalfWindow(0)
    window.move(1, WINDOW_COUNT_MAX)
    assert window.end(1) == []
    assert window.end(1) == [], "nothing was forgotten"
    window.end(0)
    window.advance()
    assert window.end(1) == [1, WINDOW_COUNT_MAX]
    assert window.is_ended(WINDOW_COUNT_MAX)


def test_moves_are_bounded() -> None:
    window = HalfWindow(0)
    for offset in range(MOVED_COUNT_MAX + 1):
        window.move(offset, MOVED_COUNT_MAX + 1 + offset)
    assert window.end(0) == [0]
    assert window.end(1) == [1, MOVED_COUNT_MAX + 2]


def test_reads_are_bounded() -> None:
    reads = OpReads(0)
    for number in range(2 * READ_COUNT_MAX):
        reads.note(number + 1, number)
        assert len(reads._reads) <= READ_COUNT_MAX + 1
    for half_start in range(0, 2 * READ_COUNT_MAX, 100):
        assert 0 <= half_start - reads.needed_from(half_start) <= 4
    assert reads.needed_from(2 * READ_COUNT_MAX) == 2 * READ_COUNT_MAX


def test_progress_marks() -> None:
    marks = ProgressMarks()
    for number in range(2 * MARK_COUNT_MAX):
        marks.note(Progress(number * 100, number, 0))
        marks.note(Progress(number * 100 + 50, number, 0))  # nothing new
        assert len(marks._marks) <= MARK_COUNT_MAX
    assert marks.take(-1) is None
    assert marks.take(0) == Progress(0, 0, 0)
    last = 2 * MARK_COUNT_MAX - 1
    assert marks.take(last * 100 - 1) == Progress(last * 100 - 100, last - 1, 0)
    assert marks
    assert marks.take(10**9) == Progress(last * 100, last, 0)
    assert not marks


def test_waiting_ends_are_bounded() -> None:
    writer = OpWriter(cast(BrokerCore, SimpleNamespace()))
    writer.add(range(PENDING_COUNT_MAX + 1))
    assert list(writer._pending) == list(range(1, PENDING_COUNT_MAX + 1))


@pytest.mark.parametrize(
    ("properties", "age_ms", "verdict"),
    [
        ({}, 0, Verdict.WAIT),
        ({}, 5_999, Verdict.WAIT),
        ({}, 6_000, Verdict.ASK),
        ({}, -1, Verdict.ASK),
        ({}, 72 * 3_600_000 + 1, Verdict.GIVE_UP),
        ({"TRANSACTION_CHECK_TIMES": "14"}, 6_000, Verdict.ASK),
        ({"TRANSACTION_CHECK_TIMES": "15"}, 0, Verdict.GIVE_UP),
        ({"TRANSACTION_CHECK_TIMES": "x"}, 6_000, Verdict.ASK),
        ({"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"}, 59_999, Verdict.KEEP),
        ({"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"}, 60_000, Verdict.ASK),
        ({"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"}, -1, Verdict.ASK),
        ({"CHECK_IMMUNITY_TIME_IN_SECONDS": "0"}, 0, Verdict.ASK),
        ({"CHECK_IMMUNITY_TIME_IN_SECONDS": "x"}, 5_999, Verdict.KEEP),
        ({"CHECK_IMMUNITY_TIME_IN_SECONDS": "-1"}, 6_000, Verdict.ASK),
    ],
)
def test_verdicts(properties: dict[str, str], age_ms: int, verdict: Verdict) -> None:
    assert judge(properties, age_ms, timeout_ms=6_000, check_times_max=15, reserved_ms=72 * 3_600_000) is verdict
