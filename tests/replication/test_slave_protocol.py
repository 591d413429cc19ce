"""SlaveProtocol without I/O: what a frame means in each state."""

import pytest

from ha.errors import RemoteProtocolError
from ha.replication.first_byte import REQUEST_OFFSET, FirstByte
from ha.replication.options import HAOptions
from ha.replication.overlap import Overlap
from ha.replication.session_plan import Retry, SessionEnd, SessionPlan
from ha.replication.slave_protocol import TRANSITIONS, Request, SessionState, SlaveProtocol
from ha.replication.statistics import Condition
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog

STOPPED = SessionEnd(Condition.STOPPED, "")


async def no_offset() -> int | None:
    return None


class Side:
    """A protocol, with the conditions that it reported."""

    def __init__(self, size: int, *, asks_range: bool = False, **options: str) -> None:
        self.log = MemoryLog(bytes(size)) if size else MemoryLog()
        plan = SessionPlan(
            asks_range=asks_range,
            answer_timeout_s=1.0,
            tries_first_byte=False,
            compares_overlap=True,
            master_min_offset=no_offset,
            watches_min_offset=False,
        )
        self.conditions: list[Condition] = []
        given = HAOptions(**options)  # type: ignore[arg-type]
        self.protocol = SlaveProtocol(
            self.log, given, plan, lambda condition, detail: self.conditions.append(condition)
        )
        self.protocol.become(SessionState.ASKING if asks_range else SessionState.PREPARING)

    @property
    def state(self) -> SessionState:
        state: SessionState = self.protocol.state.value
        return state

    def request(self, offset: int, check: Overlap | FirstByte | None = None) -> SlaveProtocol:
        self.protocol.become_requested(Request(offset, check))
        return self.protocol


def test_every_state_can_be_reached_and_closed() -> None:
    assert TRANSITIONS.keys() == set(SessionState)
    assert set().union(*TRANSITIONS.values()) == set(SessionState) - {SessionState.CONNECTED}
    assert all(SessionState.CLOSED in after for state, after in TRANSITIONS.items() if state is not SessionState.CLOSED)


def test_an_invalid_transition_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Side(100).protocol.become(SessionState.GREETING)


def test_the_first_frame_at_the_end_of_the_log_is_followed() -> None:
    side = Side(100)
    protocol = side.request(100)
    assert side.state is SessionState.REQUESTED
    assert protocol.take_header(100, 3) is None
    assert (side.state, side.conditions) == (SessionState.FOLLOWING, [Condition.CONNECTED])
    assert protocol.take_body(100, memoryview(b"abc")) == (100, memoryview(b"abc"))


def test_each_heartbeat_reports_that_the_slave_is_connected() -> None:
    side = Side(100)
    protocol = side.request(100)
    assert [protocol.take_header(100, 0) for _ in range(2)] == [None, None]
    assert side.conditions == [Condition.CONNECTED] * 2


@pytest.mark.parametrize("asks_range", [False, True])
def test_only_the_answer_to_the_range_question_comes_before_the_request(asks_range: bool) -> None:
    side = Side(100, asks_range=asks_range)
    protocol = side.protocol
    if asks_range:
        assert [protocol.take_header(offset, 0) for offset in (50, 200)] == [None, None]
        assert (protocol.master_range, side.state) == ((50, 200), SessionState.PREPARING)
    with pytest.raises(RemoteProtocolError, match="before any request"):
        protocol.take_header(100, 0)


def test_an_answer_with_the_end_before_the_start_is_malformed() -> None:
    protocol = Side(100, asks_range=True).protocol
    protocol.take_header(50, 0)
    with pytest.raises(RemoteProtocolError, match="claims to hold"):
        protocol.take_header(49, 0)


def test_one_early_heartbeat_may_have_been_due_and_two_mean_that_nothing_comes() -> None:
    side = Side(SEGMENT_SIZE)
    protocol = side.request(SEGMENT_SIZE - 10, Overlap(SEGMENT_SIZE - 10, bytes(10)))
    assert protocol.take_header(SEGMENT_SIZE - 10, 0) is None
    end = protocol.take_header(SEGMENT_SIZE - 10, 0)
    assert end is not None
    assert (end.condition, end.retry) == (Condition.OUT_OF_RANGE, Retry.WITHOUT_OVERLAP)


def test_compared_bytes_are_not_appended() -> None:
    side = Side(100)
    protocol = side.request(90, Overlap(90, bytes(10)))
    assert protocol.take_header(90, 12) is None
    assert protocol.take_body(90, memoryview(bytes(6))) is None
    assert (side.state, protocol.expected_offset, side.conditions) == (SessionState.COMPARING, 96, [])
    assert protocol.take_body(96, memoryview(bytes(4) + b"ab")) == (100, memoryview(b"ab"))
    assert (side.state, protocol.expected_offset) == (SessionState.FOLLOWING, 100)


def test_byte_0_is_restored_before_anything_is_followed() -> None:
    side = Side(0)
    protocol = side.request(REQUEST_OFFSET, FirstByte())
    assert protocol.take_header(REQUEST_OFFSET, 9) is None
    assert protocol.take_body(REQUEST_OFFSET, memoryview(b"\0\0\x5b")) is None
    assert (side.state, side.protocol.has_followed) == (SessionState.RESTORING, False)
    record = b"\0\0\x5b\xda\xa3\x20\xa7"
    assert protocol.take_body(REQUEST_OFFSET, memoryview(record[3:])) == (0, memoryview(b"\0" + record))
    assert side.state is SessionState.FOLLOWING


@pytest.mark.parametrize("check", [None, Overlap(90, bytes(10))])
def test_a_closed_session_takes_nothing_more(check: Overlap | None) -> None:
    side = Side(100)
    protocol = side.request(100 if check is None else 90, check)
    protocol.close(STOPPED)
    protocol.close(SessionEnd(Condition.MASTER_CLOSED, ""))
    offset = protocol.expected_offset
    assert side.state is SessionState.CLOSED
    assert protocol.take_header(offset, 10) == STOPPED
    assert protocol.take_body(offset, memoryview(bytes(10))) == STOPPED
    assert not protocol.has_followed
