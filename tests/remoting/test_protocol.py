"""The state of a connection, without I/O: both drivers rely on it."""

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.protocol.remoting import encode_command
from ha.protocol.remoting_protocol import (
    OPAQUE_MAX,
    TRANSITIONS,
    CloseCause,
    ConnectionLimits,
    ConnectionState,
    RemotingProtocol,
    Totals,
)
from ha.protocol.request_parser import RequestParser
from tests.protocol.test_request_parser import ack_frame
from tests.remoting.wire import request

ENTER = {
    ConnectionState.OPEN: lambda protocol: protocol.open(),
    ConnectionState.CLOSING: lambda protocol: protocol.close("test"),
    ConnectionState.CLOSED: lambda protocol: protocol.finish(),
}


def opened(totals: Totals | None = None, **limits: float) -> RemotingProtocol[str]:
    protocol = RemotingProtocol[str](ConnectionLimits(**limits), 0.0, totals=totals)  # type: ignore[arg-type]
    protocol.open()
    return protocol


def test_requests_that_become_one_command_are_counted_one_by_one() -> None:
    totals = Totals()
    protocol = RemotingProtocol[str](ConnectionLimits(), 0.0, totals=totals, parser_type=RequestParser)
    protocol.open()
    acks = b"".join(map(ack_frame, range(5)))
    for data, command_count, request_count in (
        (acks, 1, 5),
        (response(9) + acks, 5, 10),
        (encode_command(request(6)), 1, 11),
    ):
        commands, _ = protocol.receive(data, 1.0)
        assert (len(commands), totals.requests) == (command_count, request_count)


def response(opaque: int) -> bytes:
    return encode_command(request(opaque, flag=1))


def in_state(state: ConnectionState) -> RemotingProtocol[str]:
    protocol = RemotingProtocol[str](ConnectionLimits(), 0.0)
    for each in ENTER:
        if protocol.state is state:
            break
        ENTER[each](protocol)
    return protocol


@pytest.mark.parametrize(("before", "after"), list(product(ConnectionState, ENTER)))
def test_transitions_are_those_of_the_table(before: ConnectionState, after: ConnectionState) -> None:
    protocol = in_state(before)
    assert protocol.state is before
    if after in TRANSITIONS[before]:
        ENTER[after](protocol)
        assert protocol.state is after
    elif after is ConnectionState.CLOSED:
        with pytest.raises(AssertionError):
            ENTER[after](protocol)
    else:
        closed = protocol.is_closed
        if closed:
            ENTER[after](protocol)
        assert protocol.state is before, "to open or close a closed connection does nothing"


@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_commands_are_the_same_however_their_bytes_are_cut(cuts: list[int]) -> None:
    protocol = opened()
    for opaque in (1, 2):
        protocol.expect(opaque, f"waiter {opaque}")
    data = encode_command(request(5)) + response(2) + response(7) + encode_command(request(6, flag=2)) + response(1)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    requests: list[int] = []
    responses: list[tuple[str, int]] = []
    for begin, end in pairwise(places):
        if begin < end:
            found, matched = protocol.receive(data[begin:end], 1.0)
            requests += [command.opaque for command in found]
            responses += [(waiter, command.opaque) for waiter, command in matched]
    assert (requests, responses) == ([5, 6], [("waiter 2", 2), ("waiter 1", 1)])
    assert protocol.has_requested


def test_responses_that_nobody_waits_for_are_counted_and_dropped() -> None:
    totals = Totals()
    protocol = opened(totals)
    for opaque in (1, 2):
        protocol.expect(opaque, "waiter")
    assert protocol.forget(2) == "waiter"
    assert protocol.forget(2) is None
    requests, responses = protocol.receive(response(1) + response(1) + response(2) + response(3), 1.0)
    assert (requests, len(responses)) == ([], 1)
    assert (totals.responses, totals.responses_unmatched, totals.requests) == (1, 3, 0)
    assert not protocol.has_requested


def test_opaques_in_use_are_left_out_and_begin_again_at_1() -> None:
    protocol = opened()
    protocol.expect(OPAQUE_MAX, "waiter")
    protocol.expect(2, "waiter")
    protocol._last_opaque = OPAQUE_MAX - 1
    assert [protocol.next_opaque() for _ in range(2)] == [1, 3]


def test_frames_are_sent_in_order_in_batches() -> None:
    totals = Totals()
    protocol = opened(totals, batch_size_max=10)
    frames = [b"aaaa", b"bbbb", b"cccc", b"d" * 20, b"ee", b"ff"]
    assert all(protocol.queue(frame) for frame in frames)
    batches = [protocol.data_to_send() for _ in range(5)]
    assert batches == [b"aaaabbbb", b"cccc", b"d" * 20, b"eeff", b""]
    assert protocol.outbox_bytes == totals.outbox_bytes == 36
    for batch in batches:
        protocol.data_sent(len(batch), 1.0)
    assert protocol.outbox_bytes == totals.outbox_bytes == 0
    assert totals.bytes_sent == 36


def test_what_the_outbox_may_hold_is_limited_by_itself_and_with_others() -> None:
    totals = Totals()
    one, other = (opened(totals, outbox_bytes_max=10, outbox_total_bytes_max=12) for _ in range(2))
    assert one.queue(b"x" * 8)
    assert not other.queue(b"x" * 8), "the limit of all is exceeded"
    assert (other.is_closed, other.outbox_bytes, totals.outbox_bytes) == (False, 8, 16)
    assert not one.queue(b"x" * 3), "its own limit is exceeded"
    assert (one.cause, one.cause_detail) == (CloseCause.OUTBOX_FULL, "11 bytes wait")
    assert (one.outbox_bytes, totals.outbox_bytes) == (0, 8)


def test_a_closed_connection_drops_frames_both_ways_and_keeps_its_first_cause() -> None:
    totals = Totals()
    protocol = opened(totals)
    protocol.expect(1, "waiter")
    protocol.queue(b"sent in part")
    protocol.queue(b"never sent")
    batch = protocol.data_to_send()
    protocol.receive(response(1)[:2], 1.0)
    protocol.count_partial(2, 1.0)
    protocol.close(CloseCause.IDLE, "detail")
    protocol.close(CloseCause.CANCELLED)
    assert (protocol.cause, protocol.cause_detail) == ("idle", "detail")
    assert not protocol.queue(b"late")
    assert protocol.data_to_send() == b""
    protocol.data_sent(len(batch), 1.0)  # its driver had passed it to the system
    assert protocol.receive(response(1)[2:], 2.0) == ([], ())
    protocol.count_partial(3, 2.0)
    assert (totals.outbox_bytes, totals.partial_bytes, protocol.outbox_bytes) == (0, 0, 0)
    assert protocol.finish() == ["waiter"]


def test_incomplete_frames_share_a_limit() -> None:
    totals = Totals()
    one, other = (opened(totals, partial_bytes_max=10) for _ in range(2))
    frame = encode_command(request(1))
    for protocol in (one, other):
        protocol.receive(frame[:6], 1.0)
        assert protocol.is_mid_frame
    one.count_partial(6, 1.0)
    with pytest.raises(RemoteProtocolError, match="hold 12 bytes"):
        other.count_partial(6, 1.0)
    one.receive(frame[6:], 1.0)
    assert (one.is_mid_frame, one.partial_bytes, totals.partial_bytes) == (False, 0, 6)
    assert one.buffered_bytes == len(frame)


@pytest.mark.parametrize(
    ("begin", "cause", "at"),
    [
        (lambda protocol: None, CloseCause.IDLE, 120),
        (lambda protocol: protocol.receive(b"\0", 10), CloseCause.IDLE, 130),
        (lambda protocol: protocol.data_sent(0, 20), CloseCause.IDLE, 140),
        (lambda protocol: protocol.count_partial(1, 10), CloseCause.INCOMPLETE_FRAME, 40),
        (lambda protocol: [protocol.count_partial(1, now) for now in (10, 20)], CloseCause.INCOMPLETE_FRAME, 40),
        (lambda protocol: (protocol.count_partial(1, 10), protocol.restart_timeouts(15)), "incomplete frame", 45),
        (lambda protocol: (protocol.stop_timeouts(), protocol.restart_timeouts(500)), CloseCause.IDLE, 620),
        (lambda protocol: protocol.start_send_timeout(5), CloseCause.PEER_DOES_NOT_READ, 35),
        (lambda protocol: (protocol.stop_timeouts(), protocol.start_send_timeout(500)), "peer does not read", 530),
        (lambda protocol: (protocol.start_send_timeout(5), protocol.data_sent(0, 6)), CloseCause.IDLE, 126),
        (lambda protocol: protocol.restart_timeouts(15), CloseCause.IDLE, 135),
    ],
)
def test_timeouts(begin, cause: str, at: float) -> None:  # type: ignore[no-untyped-def]
    protocol = opened()
    begin(protocol)
    assert protocol.deadline == at
    assert protocol.overdue(math.nextafter(at, 0)) is None
    assert protocol.overdue(at) == cause
