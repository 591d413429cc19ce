"""One call of an HTTP/2 connection, and the events that the connection reports about it."""

from __future__ import annotations

from collections import deque

import msgspec


class Stream:
    """One call: its received bytes and its pending responses."""

    __slots__ = (
        "headers",
        "id",
        "is_call",
        "is_closed",
        "is_complete",
        "is_head_sent",
        "is_remote_closed",
        "is_streaming",
        "is_within_message",
        "owner",
        "path",
        "pending",
        "received",
        "send_window",
        "size_expected",
        "trailers",
        "unacknowledged",
    )

    def __init__(self, stream_id: int, path: bytes, headers: dict[bytes, bytes], send_window: int) -> None:
        self.id = stream_id
        self.path = path
        self.headers = headers
        """The request's headers; for a repeated name, the last value"""
        self.owner: object = None
        """Object that the user of the protocol attaches to the call; the protocol itself does not read it"""
        self.is_call = True
        """Whether it is a gRPC call, and not another HTTP request"""
        self.is_streaming = False
        """Whether the request is a stream of messages, each reported once it is complete. Otherwise its only message is
        reported at the end of the request."""
        self.is_remote_closed = False
        """Whether the peer has sent all of the request"""
        self.is_closed = False
        """Whether the call has ended, so that nothing more is sent"""
        self.received = bytearray()
        """Bytes received of the incomplete message"""
        self.is_complete = False
        """Whether the only message of a unary call was reported"""
        self.size_expected = -1
        """Bytes of the request that are still to come, according to its content-length; -1 if unknown"""
        self.unacknowledged = 0
        """Received bytes that no WINDOW_UPDATE has given back to the stream's window yet"""
        self.send_window = send_window
        """Bytes that may be sent before the peer extends the window; negative if the peer has reduced it"""
        self.pending: deque[bytes | memoryview] = deque()
        """Framed messages, or pieces of them, that wait for the peer's window"""
        self.is_within_message = False
        """Whether the last piece of the last message is not queued yet"""
        self.trailers: bytes | None = None
        """Header block that ends the response once `pending` is empty; None before `finish`"""
        self.is_head_sent = False
        """Whether the headers of the response were sent"""

    @property
    def has_pending(self) -> bool:
        """Whether messages wait for the peer's window."""
        return bool(self.pending)


class Received(msgspec.Struct, frozen=True):
    """A message of a call; its only one, unless the call is streaming."""

    stream: Stream
    message: bytes


class Ended(msgspec.Struct, frozen=True):
    """The peer will send no more messages of a streaming call."""

    stream: Stream


class Aborted(msgspec.Struct, frozen=True):
    """The peer has cancelled a call, or it has failed; its stream is closed."""

    stream: Stream


Event = Received | Ended | Aborted
