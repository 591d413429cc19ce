"""The server's side of HTTP/2, against h2 as a client."""

from __future__ import annotations

import hpack
import pytest
from h2.events import ConnectionTerminated
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.grpc.frames import PREFACE, SETTING, SETTINGS, ErrorCode, Http2Error, Status, frame, status_trailers
from ha.grpc.http2 import Http2Limits, Http2Protocol
from ha.grpc.stream import Aborted, Received
from tests.grpc.http2_client import HEADERS, Pair, framed

SMALL = Http2Limits(
    message_size_max=1000,
    partial_bytes_max=1500,
    header_list_size_max=500,
    header_block_size_max=2000,
    streams_max=3,
    resets_max=5,
    window_changes_max=5,
)


def respond(pair: Pair, message: bytes) -> None:
    """Answers the last call."""
    received = pair.received[-1]
    assert isinstance(received, Received)
    pair.protocol.respond(received.stream, message)
    pair.move()


@pytest.mark.parametrize("piece_size", [1, 7, 1 << 20])
@pytest.mark.parametrize("size", [0, 5, 20_000, 3_000_000])
def test_unary_call(piece_size: int, size: int) -> None:
    pair = Pair(piece_size=max(piece_size, size // 1000))
    for number in range(2):
        stream_id = pair.call(b"m" * size)
        assert pair.messages() == [b"m" * size] * (number + 1)
        respond(pair, b"r" * size)
        data, headers, is_ended = pair.answer(stream_id)
        assert data == framed(b"r" * size)
        assert headers == {":status": "200", "content-type": "application/grpc", "grpc-status": "0"}
        assert is_ended
    assert not pair.protocol.streams
    assert pair.protocol.partial_bytes == pair.protocol.pending_bytes == 0


def test_streaming_call() -> None:
    pair = Pair()
    stream_id = pair.call(b"one", path="/s/Streaming", end=False)
    pair.send(stream_id, framed(b"two") + framed(b"three")[:6])
    assert pair.messages() == [b"one", b"two"]
    pair.send(stream_id, framed(b"three")[6:])
    assert pair.messages() == [b"one", b"two", b"three"]
    stream = pair.received[-1].stream
    for message in (b"a", b"b"):
        pair.protocol.send_message(stream, message)
    pair.move()
    assert pair.answer(stream_id)[0] == framed(b"a") + framed(b"b")
    pair.client.end_stream(stream_id)
    pair.move()
    assert pair.ended() == 1
    pair.protocol.finish(stream, Status.INVALID_ARGUMENT, "50% größe")
    pair.move()
    _, headers, is_ended = pair.answer(stream_id)
    assert (headers["grpc-status"], headers["grpc-message"], is_ended) == ("3", "50%25 gr%C3%B6%C3%9Fe", True)


def test_end_after_the_message() -> None:
    """Some clients end the stream with an empty frame, or with trailers."""
    pair = Pair()
    first = pair.call(b"hello", end=False)
    assert pair.messages() == []
    pair.client.send_data(first, b"", end_stream=True)
    second = pair.call(b"again", end=False)
    pair.client.send_headers(second, [("x", "y")], end_stream=True)
    pair.move()
    assert pair.messages() == [b"hello", b"again"]


def test_window_of_the_peer() -> None:
    """No more than the windows allow is sent, and the rest when they grow; other calls are answered meanwhile."""
    pair = Pair()
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
    pair.move()
    large = pair.call(b"large")
    stream = pair.received[-1].stream
    pair.protocol.respond(stream, b"r" * 250)
    sent = pair.protocol.data_to_send()
    assert sent.count(b"r" * 90) == 1
    assert sent.count(b"r") <= 100
    assert pair.protocol.pending_bytes == 155
    pair.events += pair.client.receive_data(sent)
    small = pair.call(b"small")
    respond(pair, b"s")
    assert pair.answer(small)[2]
    assert not pair.answer(large)[2]
    pair.client.increment_flow_control_window(200, large)
    pair.move()
    assert pair.answer(large)[0] == framed(b"r" * 250)
    assert pair.answer(large)[2]


def test_nothing_is_sent_within_a_message() -> None:
    """Except an error status."""
    pair = Pair()
    stream_id = pair.call(b"hello")
    stream = pair.received[-1].stream
    data = framed(b"r" * 100_000)
    pair.protocol.send_piece(stream, data[:65_536], is_first=True, is_last=False)
    pair.move()
    with pytest.raises(AssertionError):
        pair.protocol.send_message(stream, b"s" * 10)
    with pytest.raises(AssertionError):
        pair.protocol.finish(stream)
    pair.protocol.send_piece(stream, data[65_536:], is_first=False, is_last=True)
    pair.protocol.send_message(stream, b"s" * 10)
    pair.protocol.send_piece(stream, data[:65_536], is_first=True, is_last=False)
    pair.protocol.finish(stream, Status.INTERNAL)
    pair.protocol.send_message(stream, b"s" * 10)  # does nothing
    pair.move()
    answered, headers, is_ended = pair.answer(stream_id)
    assert answered == data + framed(b"s" * 10) + data[:65_536]
    assert (headers["grpc-status"], is_ended) == ("13", True)


def test_cancelled_call() -> None:
    pair = Pair()
    stream_id = pair.call(b"hello")
    stream = pair.received[-1].stream
    pair.client.reset_stream(stream_id, 8)
    pair.move()
    assert isinstance(pair.received[-1], Aborted)
    assert stream.is_closed
    pair.protocol.respond(stream, b"too late")
    assert pair.protocol.data_to_send() == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (framed(b"x" * 1001), Status.RESOURCE_EXHAUSTED),
        (b"\x01" + framed(b"x")[1:], Status.UNIMPLEMENTED),
        (framed(b"x") + framed(b"y"), Status.UNIMPLEMENTED),
        (framed(b"hello")[:-1], Status.INTERNAL),
        (b"\0\0", Status.INTERNAL),
    ],
    ids=["too long", "compressed", "two messages", "truncated", "no message"],
)
def test_malformed_messages_fail_their_call_only(data: bytes, status: Status) -> None:
    pair = Pair(SMALL)
    stream_id = pair.call(None, end=False)
    pair.send(stream_id, data, end=True)
    assert pair.answer(stream_id)[1]["grpc-status"] == str(int(status))
    assert pair.messages() == []
    pair.call(b"hello")
    assert pair.messages() == [b"hello"]
    assert pair.protocol.partial_bytes == 0


def test_call_that_fails_after_its_answer_is_finished() -> None:
    """Its unsent messages are dropped, so it ends with the error at once, not with the status of the answer."""
    pair = Pair()
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
    pair.move()
    stream_id = pair.call(b"one", path="/s/Streaming", end=False)
    stream = pair.received[-1].stream
    pair.protocol.send_message(stream, b"r" * 250)
    pair.protocol.finish(stream)
    pair.events += pair.client.receive_data(pair.protocol.data_to_send())
    assert pair.protocol.pending_bytes
    pair.send(stream_id, b"\x01\x00\x00\x00\x00")
    _, headers, is_ended = pair.answer(stream_id)
    assert (headers.get("grpc-status"), is_ended) == (str(int(Status.UNIMPLEMENTED)), True)
    assert isinstance(pair.received[-1], Aborted)
    assert not pair.protocol.streams
    assert pair.protocol.pending_bytes == 0


def test_incomplete_messages_are_limited() -> None:
    pair = Pair(SMALL)
    first, second = pair.call(None, end=False), pair.call(None, end=False)
    pair.send(first, framed(b"x" * 1000)[:900])
    pair.send(second, framed(b"x" * 1000)[:900])
    assert pair.answer(second)[1]["grpc-status"] == "8"
    assert pair.protocol.partial_bytes == 900
    pair.send(first, framed(b"x" * 1000)[900:], end=True)
    assert pair.messages() == [b"x" * 1000]


def test_messages_of_streaming_calls_are_limited() -> None:
    """Several of them wait for their task, and the front keeps a client's settings."""
    pair = Pair(Http2Limits(message_size_max=1 << 20, streamed_message_size_max=100_000))
    stream_id = pair.call(b"m" * 100_000, path="/s/Streaming", end=False)
    assert pair.messages() == [b"m" * 100_000]
    pair.send(stream_id, framed(b"m" * 100_001)[:9])
    assert pair.answer(stream_id)[1]["grpc-status"] == "8"


def test_message_of_the_maximum_size() -> None:
    """It is received although it is longer than what incomplete messages may have together; a second one is not."""
    pair = Pair(Http2Limits(message_size_max=100_000, partial_bytes_max=1000))
    first, second = pair.call(None, end=False), pair.call(None, end=False)
    pair.send(first, framed(b"x" * 100_000)[:-1])
    pair.send(second, framed(b"x" * 100_000)[:9])
    assert pair.answer(second)[1]["grpc-status"] == "8"
    pair.send(first, b"x", end=True)
    assert pair.messages() == [b"x" * 100_000]


def test_calls_at_a_time_are_limited() -> None:
    pair = Pair(SMALL)
    pair.client.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 10
    pair.client.remote_settings.acknowledge()
    for _ in range(5):
        pair.call(b"hello")
    assert pair.messages() == [b"hello"] * 3
    assert list(pair.resets().values()) == [ErrorCode.REFUSED_STREAM] * 2
    respond(pair, b"")
    pair.call(b"next")
    assert pair.messages() == [b"hello"] * 3 + [b"next"]


def test_cancelling_without_end_is_limited() -> None:
    """Rapid reset: opening and cancelling calls costs the peer nothing, but this side a task each."""
    pair = Pair(SMALL)

    def cancel() -> None:
        pair.client.reset_stream(pair.call(b"hello"), 8)
        pair.move()

    for _ in range(4):
        cancel()
        pair.call(b"answered")
        respond(pair, b"")  # counts for a cancelled one
    for _ in range(5):
        cancel()
    with pytest.raises(Http2Error, match="cancelled"):
        cancel()
    pair.events += pair.client.receive_data(pair.protocol.data_to_send())
    assert [e.error_code for e in pair.events if isinstance(e, ConnectionTerminated)] == [ErrorCode.ENHANCE_YOUR_CALM]


def test_calls_that_the_peer_has_this_side_reset_are_limited() -> None:
    """By mistakes in later frames of a call."""
    pair = Pair(SMALL)
    for _ in range(5):
        pair.protocol.receive(frame(8, 0, pair.call(b"hello"), bytes(4)))
    pair.move()
    assert list(pair.resets().values()) == [ErrorCode.PROTOCOL_ERROR] * 5
    with pytest.raises(Http2Error, match="cancelled"):
        pair.protocol.receive(frame(8, 0, pair.call(b"hello"), bytes(4)))


def test_changes_of_the_initial_window_are_limited() -> None:
    """Each visits every stream. Of one frame only the last value counts, and one that changes nothing is free."""
    pair = Pair(SMALL)
    pair.call(b"hello")
    stream = pair.received[-1].stream
    for window in (100, 200, 300, 400, 500):
        values = [SETTING.pack(SettingCodes.INITIAL_WINDOW_SIZE, value) for value in (2**31 - 1, 0, window)]
        for _ in range(3):
            pair.protocol.receive(frame(SETTINGS, 0, 0, b"".join(values)))
        assert stream.send_window == window
    with pytest.raises(Http2Error, match="changes of the initial window"):
        pair.protocol.receive(frame(SETTINGS, 0, 0, SETTING.pack(SettingCodes.INITIAL_WINDOW_SIZE, 600)))


def test_message_in_windows_of_one_byte() -> None:
    pair = Pair()
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    pair.move()
    call = pair.call(b"hello")
    respond(pair, bytes(range(200)))
    while not pair.answer(call)[2]:
        pair.client.increment_flow_control_window(1, call)
        pair.move()
    assert pair.answer(call)[0] == framed(bytes(range(200)))
    assert pair.answer(call)[2]


def test_headers_are_limited() -> None:
    pair = Pair(SMALL)
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, [*HEADERS, ("x", "y" * 400)])
    pair.move()
    assert pair.answer(stream_id)[1]["grpc-status"] == "8"
    pair.call(b"hello")
    assert pair.messages() == [b"hello"]


@pytest.mark.parametrize("size", [0, 1000])
def test_header_blocks_are_limited(size: int) -> None:
    protocol = Http2Protocol(SMALL, lambda path: False)
    protocol.receive(PREFACE + frame(4, 0, 0) + frame(1, 0, 1, b""))
    with pytest.raises(Http2Error, match="too long"):
        protocol.receive(frame(9, 0, 1, b"\x00" * size) * 100)


def test_requests_of_a_browser() -> None:
    pair = Pair()
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, [(":method", "GET"), *HEADERS[1:4]], end_stream=True)
    pair.move()
    data, headers, is_ended = pair.answer(stream_id)
    assert (headers[":status"], is_ended) == ("415", True)
    assert b"gRPC" in data


def test_shutdown() -> None:
    """Calls under way finish; new ones are refused, so that the client opens them elsewhere."""
    pair = Pair()
    pair.call(b"hello")
    pair.protocol.go_away()
    pair.move()
    [event] = [event for event in pair.events if isinstance(event, ConnectionTerminated)]
    assert (event.error_code, event.last_stream_id) == (ErrorCode.NO_ERROR, 1)
    pair.protocol.respond(pair.received[-1].stream, b"answer")
    assert framed(b"answer") in pair.protocol.data_to_send()  # h2 takes no more
    pair.protocol.receive(frame(1, 4, 3, hpack.Encoder().encode(HEADERS)))
    assert pair.protocol.data_to_send() == frame(3, 0, 3, b"\0\0\0\x07")


def test_long_status_messages_are_cut_between_characters() -> None:
    for length in range(100, 130):
        trailers = status_trailers(Status.INTERNAL, "x" * length + "ß" * 10)
        text = trailers[trailers.index(b"grpc-message") + 13 :]
        assert len(text) < 127
        assert text.decode().count("%") * 3 == len(text.decode().lstrip("x"))


@given(
    st.lists(
        st.binary(max_size=100)
        | st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=60)),
        max_size=12,
    )
)
def test_any_bytes(parts: list[bytes | tuple[int, int, int, bytes]]) -> None:
    """Only RemoteProtocolError, and the same events whole and byte by byte."""
    data = PREFACE + frame(4, 0, 0)
    for part in parts:
        data += part if isinstance(part, bytes) else frame(*part)
    found = []
    for piece_size in (len(data), 1):
        protocol = Http2Protocol(SMALL, lambda path: False)
        events: list[object] = []
        try:
            for start in range(0, len(data), piece_size):
                for event in protocol.receive(data[start : start + piece_size]):
                    events.append((type(event), event.stream.id, getattr(event, "message", None)))
        except RemoteProtocolError as error:
            events.append(str(error))
        found.append((events if piece_size == 1 else events[-1:], protocol.data_to_send()))
    assert found[0][1] == found[1][1]
