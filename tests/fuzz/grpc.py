"""What a gRPC client sends: HTTP/2 frames, header blocks, and the messages of calls."""

from __future__ import annotations

import hpack

from ha.errors import RemoteProtocolError
from ha.grpc.frames import PREFACE, frame
from ha.grpc.hpack import HeaderDecoder
from ha.grpc.http2 import Http2Limits, Http2Protocol
from ha.grpc.stream import Aborted, Received
from tests.fuzz.harness import Harness

LIMITS = Http2Limits(
    message_size_max=4096, partial_bytes_max=8192, streams_max=8, resets_max=16, header_list_size_max=2048
)
CALL = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/s/Unary"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]


def frames(data: bytes) -> None:
    """Any bytes after the preface: only RemoteProtocolError; whole and in pieces the same; counters end at zero."""
    whole, error = _received(data, len(data) or 1)
    pieces, same_error = _received(data, 7)
    assert error == same_error
    # With an error, what the same bytes had brought before is not returned.
    assert whole == (pieces if error is None else [])
    answered, _ = _received(data, 7, answers=True)
    rest = iter(answered)
    assert all(each in rest for each in pieces)  # calls that were answered only make room for more


def _received(data: bytes, piece_size: int, *, answers: bool = False) -> tuple[list[tuple[int, bytes]], str | None]:
    """Returns stream and content of the messages in `data`, and the error that ended the connection.

    `answers`: calls are answered at once, not never: how the bytes are cut then decides which calls are open together.
    """
    protocol = Http2Protocol(LIMITS, lambda path: path.endswith(b"Streaming"))
    received = []
    error = None
    try:
        protocol.receive(PREFACE)
        for start in range(0, len(data), piece_size):
            for event in protocol.receive(data[start : start + piece_size]):
                if isinstance(event, Received):
                    received.append((event.stream.id, event.message))
                    if answers and not event.stream.is_streaming:
                        protocol.respond(event.stream, event.message)
                elif answers and not isinstance(event, Aborted):
                    protocol.finish(event.stream)
    except RemoteProtocolError as raised:
        error = str(raised)
    assert protocol.partial_bytes == sum(len(stream.received) for stream in protocol.streams.values())
    assert protocol.pending_bytes == sum(sum(map(len, s.pending)) for s in protocol.streams.values())
    assert len(protocol.streams) <= LIMITS.streams_max
    return received, error


def headers(data: bytes) -> None:
    """Any blocks, each after its length: what the package hpack decodes is decoded to the same headers."""
    ours, theirs = HeaderDecoder(1 << 20), hpack.Decoder(max_header_list_size=1 << 20)
    position = 0
    while position < len(data):
        size = data[position]
        block = data[position + 1 : position + 1 + size]
        position += 1 + size
        try:
            expected = theirs.decode(block, raw=True)
        except (hpack.HPACKError, UnicodeDecodeError):
            expected = None
        try:
            found = ours.decode(block)
        except RemoteProtocolError:
            return
        if expected is None:
            return  # stricter about table sizes
        assert found == [(bytes(name), bytes(value)) for name, value in expected]


def frame_seeds() -> list[bytes]:
    """Calls, settings and the frames that control them."""
    start = frame(4, 0, 0)
    block = hpack.Encoder().encode(CALL)
    streaming = hpack.Encoder().encode([(n, b"/s/Streaming" if n == b":path" else v) for n, v in CALL])
    message = b"\0\0\0\0\x05hello"
    unary = frame(1, 4, 1, block) + frame(0, 1, 1, message)
    return [
        start + unary,
        start + unary + frame(1, 4, 3, block) + frame(3, 0, 3, b"\0\0\0\x08"),
        start
        + frame(1, 0, 1, block[:5])
        + frame(9, 4, 1, block[5:])
        + frame(0, 0, 1, message[:4])
        + frame(0, 1, 1, message[4:]),
        start + frame(1, 4, 1, streaming) + frame(0, 0, 1, message + message) + frame(0, 1, 1),
        frame(4, 0, 0, b"\0\x04\0\0\0\x10") + unary + frame(8, 0, 1, b"\0\0\0\x64") + frame(8, 0, 0, b"\0\0\0\x64"),
        start + frame(6, 0, 0, b"12345678") + frame(2, 0, 1, b"\0\0\0\0\x10") + frame(7, 0, 0, b"\0" * 8),
    ]


def header_seeds() -> list[bytes]:
    """Blocks of one connection, with and without Huffman codes."""
    found = []
    for is_huffman in (False, True):
        encoder, data = hpack.Encoder(), b""
        for value in (b"a", b"b" * 20, b"a"):
            block = encoder.encode([*CALL, (b"x-mq-client-id", value)], is_huffman)
            data += bytes([len(block)]) + block
        found.append(data)
    return found


HARNESSES = {
    "grpc_frames": Harness(run=frames, seeds=frame_seeds, memory_max=16 << 20),
    "grpc_headers": Harness(run=headers, seeds=header_seeds),
}
