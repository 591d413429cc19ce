"""The server's side of one HTTP/2 connection that carries gRPC calls. Sans-IO.

`receive` takes bytes and returns the events of the calls; `respond`, `send_message` and `finish` queue responses, which
`data_to_send` returns as far as the peer's windows allow. Only what gRPC needs is implemented: no server push, no
priorities, no compressed messages (compressed request headers are decoded, see hpack.py), and only the few response
headers that a gRPC server sends. The package h2 is not used: it implements all of HTTP/2, and takes several times as
long for the same calls.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ha.errors import RemoteProtocolError

from .frames import (
    ACK,
    CONTINUATION,
    CONTINUATIONS_MAX,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    FRAME_SIZE_MAX,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    HTTP_HEAD,
    HTTP_TEXT,
    MESSAGE_PREFIX,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RESPONSE_HEAD,
    RST_STREAM,
    SETTING,
    SETTINGS,
    TRAILERS_OK,
    UINT32,
    USUAL_RESPONSE,
    WINDOW_SIZE_DEFAULT,
    WINDOW_SIZE_MAX,
    WINDOW_UPDATE,
    ErrorCode,
    Http2Error,
    Status,
    frame,
    framed,
    request_headers,
    status_trailers,
)
from .hpack import Header, HeaderDecoder
from .stream import Aborted, Ended, Event, Received, Stream


class Http2Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one connection. Sizes in bytes."""

    message_size_max: int = 5 << 20
    """Maximum size in bytes of a received message; a larger one fails its call with RESOURCE_EXHAUSTED."""
    streamed_message_size_max: int = 262_144
    """Maximum size in bytes of a received message of a streaming call, several of which may wait; a larger one fails
    its call with RESOURCE_EXHAUSTED."""
    partial_bytes_max: int = 32 << 20
    """Maximum size of all incomplete messages of a connection; the call that exceeds it fails with RESOURCE_EXHAUSTED.
    One message alone may always have `message_size_max` bytes."""
    header_list_size_max: int = 16_384
    """Maximum size in bytes of the headers of a call, counting 32 more for each header; a call with more fails with
    RESOURCE_EXHAUSTED."""
    header_block_size_max: int = 65_536
    """Maximum size in bytes of the encoded headers of a call; a connection that exceeds it is closed."""
    streams_max: int = 1_024
    """Maximum number of concurrent calls; further ones are refused (REFUSED_STREAM)."""
    resets_max: int = 512
    """Maximum number of calls that the peer has cancelled, or that were reset because of its mistakes, minus calls
    answered since then; a connection that exceeds it is closed."""
    window_changes_max: int = 1_024
    """Maximum number of times that the peer may change the initial window, because each change visits every stream; a
    connection that exceeds it is closed."""
    pending_bytes_max: int = 64 << 20
    """Maximum size of responses that wait for the peer's window, but at least twice `message_size_max`; a connection
    that exceeds it is closed. Bytes that the window has allowed are limited by `GrpcOptions.outbox_high_bytes`."""
    window_size: int = 1 << 20
    """Flow-control window of each stream; the connection's window is four times as large."""


class Http2Protocol:
    """The server's side of one connection: its settings, windows and calls."""

    def __init__(self, limits: Http2Limits, is_streaming: Callable[[bytes], bool]) -> None:
        """`is_streaming`: whether the method with this path takes a stream of messages."""
        self._limits = limits
        self._partial_bytes_max = max(limits.partial_bytes_max, MESSAGE_PREFIX.size + limits.message_size_max)
        self._is_streaming = is_streaming
        self.streams: dict[int, Stream] = {}
        """Calls that are not finished, by stream id. For reading only."""
        self.has_goaway = False
        """Whether this side has sent GOAWAY, so that further calls are refused."""
        self.partial_bytes = 0
        """Bytes received of incomplete messages."""
        self.pending_bytes = 0
        """Bytes of messages that wait for the peer's window."""
        self.allowed_bytes = 0
        """Bytes of messages that the peer's window has allowed so far."""
        self.outbox_bytes = 0
        """Bytes that `data_to_send` would return."""
        self._decoder = HeaderDecoder(limits.header_list_size_max)
        self._buffer = b""
        self._is_open = False
        self._has_settings = False
        self._last_id = 0
        self._block: tuple[int, int, list[bytes]] | None = None
        """Stream id, flags and parts of the incomplete header block; None if there is none"""
        self._unacknowledged = 0
        """Received bytes that no WINDOW_UPDATE has given back to the connection's window yet"""
        self._send_window = WINDOW_SIZE_DEFAULT
        self._send_window_initial = WINDOW_SIZE_DEFAULT
        self._window_changes = 0
        self._frame_size_max = FRAME_SIZE_MAX
        self._resets = 0
        """Number of calls that were cancelled or reset, minus calls answered since then (see `resets_max`)"""
        self._outbox: list[bytes] = []
        self._events: list[Event] = []
        connection_window = 4 * limits.window_size
        settings = ((3, limits.streams_max), (4, limits.window_size), (6, limits.header_list_size_max))
        self._queue(
            frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*setting) for setting in settings))
            + frame(WINDOW_UPDATE, 0, 0, UINT32.pack(connection_window - WINDOW_SIZE_DEFAULT))
        )

    # Receiving

    def receive(self, data: bytes) -> list[Event]:
        """Takes bytes; returns the events that they complete. Raises RemoteProtocolError, usually Http2Error, if the
        peer has violated the protocol: send what is queued, which includes GOAWAY, then close."""
        if self._buffer:
            data = self._buffer + data
        position, end = 0, len(data)
        events: list[Event] = []
        self._events = events
        try:
            if not self._is_open:
                if data[:24] != PREFACE[:end]:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
                if end < 24:
                    self._buffer = data
                    return events
                self._is_open, position = True, 24
            while end - position >= 9:
                high, low, kind, flags, stream_id = FRAME_HEAD.unpack_from(data, position)
                size = high << 16 | low
                if size > FRAME_SIZE_MAX:
                    raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"frame of {size} bytes")
                if end - position < 9 + size:
                    break
                position += 9
                self._receive_frame(kind, flags, stream_id & 0x7FFFFFFF, data[position : position + size])
                position += size
        except RemoteProtocolError as error:
            code = error.code if isinstance(error, Http2Error) else ErrorCode.COMPRESSION_ERROR
            self.go_away(code, str(error))
            raise
        self._buffer = data[position:]
        return events

    def _receive_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._has_settings:
            if kind != SETTINGS or flags & ACK:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._has_settings = True
        if self._block is not None and (kind != CONTINUATION or stream_id != self._block[0]):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a header block is not continued")
        if kind == DATA:
            self._receive_data(flags, stream_id, payload)
        elif kind == HEADERS:
            self._receive_headers(flags, stream_id, payload)
        elif kind == WINDOW_UPDATE:
            self._receive_window_update(stream_id, payload)
        elif kind == RST_STREAM:
            self._receive_reset(stream_id, payload)
        elif kind == SETTINGS:
            self._receive_settings(flags, stream_id, payload)
        elif kind == PING:
            if stream_id or len(payload) != 8:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR if stream_id else ErrorCode.FRAME_SIZE_ERROR, "PING")
            if not flags & ACK:
                self._queue(frame(PING, ACK, 0, payload))
        elif kind == CONTINUATION:
            self._receive_continuation(flags, payload)
        elif kind == PRIORITY:
            self._receive_priority(stream_id, payload)
        elif kind == PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE of a client")
        elif kind == GOAWAY and stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")

    def _receive_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self.streams.get(stream_id)
        size = len(payload)
        self._unacknowledged += size
        if self._unacknowledged > 2 * self._limits.window_size:
            self._queue(frame(WINDOW_UPDATE, 0, 0, UINT32.pack(self._unacknowledged)))
            self._unacknowledged = 0
        if flags & PADDED:
            if not payload or payload[0] >= size:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
            payload = payload[1 : size - payload[0]]
        if stream is None or stream.is_remote_closed:
            self._check_not_idle(stream_id)
            self._reset_soon(stream, stream_id, ErrorCode.STREAM_CLOSED)
            return
        stream.unacknowledged += size
        if stream.unacknowledged > self._limits.window_size:
            self._reset_soon(stream, stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if stream.size_expected >= 0:
            stream.size_expected -= len(payload)
            if stream.size_expected < 0 or (flags & END_STREAM and stream.size_expected):
                self._reset_soon(stream, stream_id, ErrorCode.PROTOCOL_ERROR)
                return
        if flags & END_STREAM:
            stream.is_remote_closed = True
        elif stream.unacknowledged > self._limits.window_size // 2:
            self._queue(frame(WINDOW_UPDATE, 0, stream_id, UINT32.pack(stream.unacknowledged)))
            stream.unacknowledged = 0
        if stream.is_call:
            self._receive_pieces(stream, payload)
        if stream.is_remote_closed and not stream.is_closed:
            self._end(stream)

    def _receive_pieces(self, stream: Stream, payload: bytes) -> None:
        """Adds the payload of a DATA frame to a call's messages, and appends an event for each complete one."""
        received = stream.received
        if not received and len(payload) >= 5:  # usually a frame is one whole message
            flag, size = MESSAGE_PREFIX.unpack_from(payload)
            if (
                not flag
                and len(payload) == 5 + size
                and stream.is_remote_closed
                and size <= self._limits.message_size_max
            ):
                self._events.append(Received(stream, payload[5:]))
                stream.is_complete = True
                return
        received += payload
        self.partial_bytes += len(payload)
        limits = self._limits
        size_max = limits.streamed_message_size_max if stream.is_streaming else limits.message_size_max
        while len(received) >= 5:
            flag, size = MESSAGE_PREFIX.unpack_from(received)
            if flag:
                self.fail(stream, Status.UNIMPLEMENTED, "compressed messages are not supported")
                return
            if size > size_max:
                reason = f"message of {size} bytes; the maximum is {size_max}"
                self.fail(stream, Status.RESOURCE_EXHAUSTED, reason)
                return
            if len(received) < 5 + size:
                break
            if not stream.is_streaming:
                if len(received) > 5 + size:
                    self.fail(stream, Status.UNIMPLEMENTED, "more than one message in a unary call")
                    return
                if not stream.is_remote_closed:
                    break  # the frame that ends the stream follows
            self._take_message(stream, size)
        if self.partial_bytes > self._partial_bytes_max:
            self.fail(stream, Status.RESOURCE_EXHAUSTED, "too many bytes of incomplete messages on this connection")

    def _take_message(self, stream: Stream, size: int) -> None:
        received = stream.received
        message = bytes(received[5 : 5 + size])
        del received[: 5 + size]
        self.partial_bytes -= 5 + size
        self._events.append(Received(stream, message))
        stream.is_complete = not stream.is_streaming

    def _end(self, stream: Stream) -> None:
        """Handles the end of the request on a stream."""
        received = stream.received
        if not stream.is_call:
            self._answer_http(stream)
        elif stream.is_streaming and not received:
            self._events.append(Ended(stream))
        elif (
            not stream.is_streaming
            and len(received) >= 5
            and len(received) == 5 + MESSAGE_PREFIX.unpack_from(received)[1]
        ):
            self._take_message(stream, len(received) - 5)
        elif not stream.is_complete:
            self.fail(stream, Status.INTERNAL, "the request ends within a message, or has none")

    def _receive_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & PADDED:
            if not payload or payload[0] >= len(payload):
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
            payload = payload[1 : len(payload) - payload[0]]
        depends_on_itself = False
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without its priority")
            depends_on_itself = UINT32.unpack_from(payload)[0] & 0x7FFFFFFF == stream_id
            payload = payload[5:]
        if not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        if depends_on_itself:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")
        if flags & END_HEADERS:
            self._receive_block(flags, stream_id, payload)
        else:
            self._block = (stream_id, flags, [payload])

    def _receive_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        stream_id, first_flags, parts = self._block
        parts.append(payload)
        if len(parts) > CONTINUATIONS_MAX or sum(map(len, parts)) > self._limits.header_block_size_max:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "a header block that is too long")
        if flags & END_HEADERS:
            self._block = None
            self._receive_block(first_flags, stream_id, b"".join(parts))

    def _receive_block(self, flags: int, stream_id: int, block: bytes) -> None:
        headers = self._decoder.decode(block)
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._receive_trailers(stream, flags, headers)
            return
        if stream_id <= self._last_id:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which is closed")
        self._last_id = stream_id
        found = None if headers is None else request_headers(headers)
        if headers is not None and found is None:
            self._queue(frame(RST_STREAM, 0, stream_id, UINT32.pack(ErrorCode.PROTOCOL_ERROR)))
            return
        if self.has_goaway or len(self.streams) >= self._limits.streams_max:
            self._queue(frame(RST_STREAM, 0, stream_id, UINT32.pack(ErrorCode.REFUSED_STREAM)))
            return
        stream = Stream(stream_id, b"" if found is None else found[b":path"], found or {}, self._send_window_initial)
        self.streams[stream_id] = stream
        stream.is_remote_closed = bool(flags & END_STREAM)
        if found is None:
            self.fail(stream, Status.RESOURCE_EXHAUSTED, "the headers are too large")
        else:
            content_type = found.get(b"content-type", b"")
            stream.is_call = found[b":method"] == b"POST" and content_type.startswith(b"application/grpc")
            stream.is_streaming = self._is_streaming(stream.path)
            length = found.get(b"content-length")
            if length is not None and length.isdigit():
                stream.size_expected = int(length[:12])
            if stream.is_remote_closed:
                self._end(stream)

    def _receive_trailers(self, stream: Stream, flags: int, headers: list[Header] | None) -> None:
        if stream.is_remote_closed:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream.id}, whose request has ended")
        if not flags & END_STREAM or headers is None or any(name[:1] == b":" for name, _ in headers):
            self._reset_soon(stream, stream.id, ErrorCode.PROTOCOL_ERROR)
            return
        stream.is_remote_closed = True
        self._end(stream)

    def _receive_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE")
        size = UINT32.unpack(payload)[0] & 0x7FFFFFFF
        if not stream_id:
            self._send_window += size
            if not size or self._send_window > WINDOW_SIZE_MAX:
                code = ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR
                raise Http2Error(code, f"the connection's window grows by {size}")
            if self.pending_bytes:
                for stream in [stream for stream in self.streams.values() if stream.pending]:
                    if self._send_window <= 0:
                        break
                    self._flush(stream)
            return
        found = self.streams.get(stream_id)
        if found is None:
            self._check_not_idle(stream_id)
            return
        found.send_window += size
        if not size or found.send_window > WINDOW_SIZE_MAX:
            code = ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR
            self._reset_soon(found, stream_id, code)
        else:
            self._flush(found)

    def _receive_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM")
        self._check_not_idle(stream_id)
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        self._abort(stream)

    def _receive_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS")
        if flags & ACK:
            return
        self._queue(frame(SETTINGS, ACK, 0))  # before the data that a larger window allows
        window = self._send_window_initial
        for key, value in SETTING.iter_unpack(payload):
            if key == 2 and value > 1:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH")
            if key == 4:
                if value > WINDOW_SIZE_MAX:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE")
                window = value
            elif key == 5:
                if not FRAME_SIZE_MAX <= value < 1 << 24:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE")
                self._frame_size_max = min(value, 65_536)
        if window != self._send_window_initial:  # once for the frame: only the last value matters
            self._change_initial_window(window)

    def _change_initial_window(self, value: int) -> None:
        self._window_changes += 1
        if self._window_changes > self._limits.window_changes_max:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"{self._window_changes} changes of the initial window")
        difference = value - self._send_window_initial
        self._send_window_initial = value
        for stream in list(self.streams.values()):
            stream.send_window += difference
            if stream.send_window > WINDOW_SIZE_MAX:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE")
            self._flush(stream)

    def _receive_priority(self, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(payload) != 5:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY")
        if UINT32.unpack_from(payload)[0] & 0x7FFFFFFF == stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")

    def _check_not_idle(self, stream_id: int) -> None:
        if stream_id > self._last_id or not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} was never opened")

    # Sending

    def respond(self, stream: Stream, message: bytes) -> None:
        """Answers a call with its only message and the status OK. Does nothing if the call has ended."""
        size = 5 + len(message)
        if size > FRAME_SIZE_MAX or size > stream.send_window or size > self._send_window or stream.is_closed:
            self.send_message(stream, message)
            self.finish(stream)
            return
        stream_id, head = stream.id, RESPONSE_HEAD
        stream.send_window -= size
        self._send_window -= size
        self.allowed_bytes += size
        stream.is_head_sent = True
        packed = USUAL_RESPONSE.pack(
            0, len(head), HEADERS, END_HEADERS, stream_id, head, 0, size, DATA, 0, stream_id, 0, size - 5
        )
        self._queue(packed + message)
        stream.trailers = TRAILERS_OK
        self._flush(stream)

    def send_message(self, stream: Stream, message: bytes) -> None:
        """Queues a message of a call. Does nothing if the call has ended, or `finish` was called."""
        self.send_piece(stream, framed(message), is_first=True, is_last=True)

    def send_piece(self, stream: Stream, piece: bytes | memoryview, *, is_first: bool, is_last: bool) -> None:
        """Queues the next piece of a framed message of a call. Between its first and its last piece, nothing else may
        be sent than an error status. Does nothing if the call has ended, or `finish` was called."""
        if stream.is_closed or stream.trailers is not None:
            return
        assert is_first is not stream.is_within_message
        stream.is_within_message = not is_last
        if not stream.is_head_sent:
            stream.is_head_sent = True
            self._queue(frame(HEADERS, END_HEADERS, stream.id, RESPONSE_HEAD))
        stream.pending.append(piece)
        self.pending_bytes += len(piece)
        self._flush(stream)

    def finish(self, stream: Stream, status: Status = Status.OK, message: str = "") -> None:
        """Ends a call with `status` once its messages are sent; with an error status also within one (`send_piece`).
        Does nothing if the call has ended, or `finish` was called before."""
        if stream.is_closed or stream.trailers is not None:
            return
        assert status is not Status.OK or not stream.is_within_message
        trailers = TRAILERS_OK if status is Status.OK and not message else status_trailers(status, message)
        stream.trailers = trailers if stream.is_head_sent else RESPONSE_HEAD + trailers
        self._flush(stream)

    def fail(self, stream: Stream, status: Status, message: str) -> None:
        """Ends a call at once with an error status: drops its unsent messages, and appends `Aborted`. May be called
        only within `receive`."""
        self._drop_pending(stream)
        stream.trailers = None  # drops those of an earlier `finish`, which still waited for the messages
        self.finish(stream, status, message)
        self._events.append(Aborted(stream))

    def _answer_http(self, stream: Stream) -> None:
        """Answers a request that is not a gRPC call, for example one from a browser, with HTTP status 415."""
        stream.is_head_sent = True
        self._queue(frame(HEADERS, END_HEADERS, stream.id, HTTP_HEAD))
        stream.pending.append(HTTP_TEXT)
        self.pending_bytes += len(HTTP_TEXT)
        stream.trailers = TRAILERS_OK
        self._flush(stream)

    def ping(self) -> None:
        """Queues a PING, which the peer must acknowledge."""
        self._queue(frame(PING, 0, 0, bytes(8)))

    def go_away(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Queues GOAWAY with `code` and the first 128 bytes of `reason`; calls in progress may finish. Does nothing if
        this was called before."""
        if not self.has_goaway:
            self.has_goaway = True
            payload = UINT32.pack(self._last_id) + UINT32.pack(code) + reason.encode()[:128]
            self._queue(frame(GOAWAY, 0, 0, payload))

    def data_to_send(self) -> bytes:
        """Returns all queued bytes, which count as sent from then on; b"" if there are none."""
        outbox = self._outbox
        if not outbox:
            return b""
        data = outbox[0] if len(outbox) == 1 else b"".join(outbox)
        outbox.clear()
        self.outbox_bytes = 0
        return data

    def _queue(self, data: bytes) -> None:
        self._outbox.append(data)
        self.outbox_bytes += len(data)

    def _flush(self, stream: Stream) -> None:
        """Moves a stream's pending messages to the outbox, as far as the peer's windows allow, and after the last one
        its trailers."""
        pending = stream.pending
        while pending:
            piece = pending[0]
            size = min(len(piece), self._frame_size_max, stream.send_window, self._send_window)
            if size <= 0:
                return
            self._queue(frame(DATA, 0, stream.id, piece[:size]))
            stream.send_window -= size
            self._send_window -= size
            self.pending_bytes -= size
            self.allowed_bytes += size
            if size == len(piece):
                pending.popleft()
            else:
                pending[0] = memoryview(piece)[size:]  # a view, so that small windows do not copy the rest each time
        if stream.trailers is not None and not stream.is_closed:
            self._queue(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, stream.trailers))
            if not stream.is_remote_closed:  # the peer need not send the rest of its request
                self._queue(frame(RST_STREAM, 0, stream.id, UINT32.pack(ErrorCode.NO_ERROR)))
            if self._resets:
                self._resets -= 1
            self._close(stream)

    def _reset_soon(self, stream: Stream | None, stream_id: int, code: ErrorCode) -> None:
        """Resets a stream because of a mistake of the peer. `stream` is None if it is closed already."""
        self._queue(frame(RST_STREAM, 0, stream_id, UINT32.pack(code)))
        if stream is not None:
            self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        self._resets += 1
        if self._resets > self._limits.resets_max:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"{self._resets} calls cancelled")
        self._drop_pending(stream)
        self._close(stream)
        self._events.append(Aborted(stream))

    def _drop_pending(self, stream: Stream) -> None:
        self.pending_bytes -= sum(map(len, stream.pending))
        stream.pending.clear()

    def _close(self, stream: Stream) -> None:
        stream.is_closed = True
        self.partial_bytes -= len(stream.received)
        stream.received = bytearray()
        self.streams.pop(stream.id, None)
