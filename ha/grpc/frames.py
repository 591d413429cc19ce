"""The wire format of HTTP/2 frames (RFC 9113), and of gRPC's messages and headers (gRPC over HTTP/2). No state.

Sizes in bytes:

    frame     length 3 | type 1 | flags 1 | stream id 4 | payload
    message   compressed 1 | length 4 | bytes         in the payloads of DATA frames, in pieces of any size
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

from ha.errors import RemoteProtocolError

from .hpack import Header

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_SIZE_MAX = 16_384
"""Maximum payload of a received frame, and of a sent one unless the peer allows more; the default of RFC 9113."""
WINDOW_SIZE_DEFAULT = 65_535
WINDOW_SIZE_MAX = 2**31 - 1
CONTINUATIONS_MAX = 64
"""Maximum number of frames of one header block. Limited separately from its size, because frames may be empty."""

FRAME_HEAD = Struct(">BHBBL")
UINT32 = Struct(">L")
MESSAGE_PREFIX = Struct(">BL")
SETTING = Struct(">HL")
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20


class ErrorCode(IntEnum):
    """Some of HTTP/2's error codes, as used in RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Status(IntEnum):
    """Some of gRPC's status codes."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Http2Error(RemoteProtocolError):
    """The peer has broken a rule of HTTP/2; the connection ends with `code`."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"HTTP/2 {code.name}: {reason}")
        self.code = code


def _literal(name: bytes, value: bytes) -> bytes:
    """Encodes a header without indexing it. `name` and `value` must each be shorter than 127 bytes."""
    return b"\x00%c%b%c%b" % (len(name), name, len(value), value)


RESPONSE_HEAD = b"\x88" + _literal(b"content-type", b"application/grpc")
HTTP_HEAD = b"\x08\x03415" + _literal(b"content-type", b"text/plain")
HTTP_TEXT = b"This port serves gRPC calls (application/grpc).\n"
TRAILERS_OK = _literal(b"grpc-status", b"0")
USUAL_RESPONSE = Struct(f">BHBBL{len(RESPONSE_HEAD)}sBHBBLBL")
"""Start of a response with one short message: HEADERS frame, head of the DATA frame, message prefix."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes | memoryview = b"") -> bytes:
    """Encodes a frame."""
    size = len(payload)
    return FRAME_HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def framed(message: bytes) -> bytes:
    """Encodes a message of a call, for the payloads of DATA frames."""
    return MESSAGE_PREFIX.pack(0, len(message)) + message


def status_trailers(status: Status, message: str) -> bytes:
    """Encodes the trailers of a call. `message` is percent-encoded, and cut to 120 bytes, which fit in one literal."""
    begin = message[:121]
    text = "".join(c if " " <= c <= "~" and c != "%" else "".join(f"%{b:02X}" for b in c.encode()) for c in begin)
    if len(text) > 120:
        text = text[:120].rsplit("%", 1)[0] if "%" in text[118:120] else text[:120]
    encoded = _literal(b"grpc-status", b"%d" % status)
    return encoded + _literal(b"grpc-message", text.encode()) if text else encoded


_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_FORBIDDEN = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))


def request_headers(headers: list[Header]) -> dict[bytes, bytes] | None:
    """Returns the headers of a request by name, or None if it is malformed (RFC 9113, section 8)."""
    found = dict(headers)
    method, path = found.get(b":method"), found.get(b":path")
    if not method or not path or not found.get(b":scheme"):
        return None
    pseudo_count, is_regular = 0, False
    for name, value in headers:
        if name[:1] == b":":
            pseudo_count += 1
            if is_regular or name not in _PSEUDO:
                return None
        else:
            is_regular = True
            if name in _FORBIDDEN or name.lower() != name or (name == b"te" and value != b"trailers"):
                return None
    return found if pseudo_count == len(_PSEUDO & found.keys()) else None
