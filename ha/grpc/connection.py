"""One gRPC connection on Trio, and its calls. The connection drives an `Http2Protocol` over a stream that it owns.

A unary call is passed to the service once its message is complete, a streaming call with its first message. Calls that
`Service.take` serves need no task: they are served in the turns of the poller (ha/poller.py), like requests of remoting
connections. Each other call is served by a separate task in the connection's nursery. When the connection ends, these
tasks are cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from time import perf_counter
from typing import Protocol

import msgspec
import trio

from ha.errors import HandshakeFailed, RemoteProtocolError
from ha.poller import TIME_SLICE_S, Poller
from ha.remoting import PortTls
from ha.remoting.tls import secured
from ha.transport import SEND_PIECE_BYTES, EagerWriter, peer_of, transport_for

from .frames import Status, framed
from .http2 import Http2Limits, Http2Protocol
from .stream import Aborted, Ended, Event, Received, Stream

MESSAGES_WAITING_MAX = 16
"""Maximum number of messages of one streaming call that its service has not taken yet; with more, the call fails with
RESOURCE_EXHAUSTED."""

PENDING_PIECE_BYTES = 65_536
"""Bytes of a message that `Call.respond_all` queues before it waits for the peer's window. Keeps 1,024 streams within
`pending_bytes_max`."""

SERVED_PIECE_BYTES = 16_384
"""Maximum number of received bytes that are parsed at a time."""
TASKS_PER_SLICE_MAX = 64
"""Maximum number of tasks that one time slice starts. These tasks all run in the same pass of the event loop, and delay
the others."""

WITHOUT_TLS = "without TLS (tls.server.mode, tls.server.certPath)"

_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class Call:
    """A received call. Messages are sent whole, in the order of the method calls. Once the call has ended, sending does
    nothing."""

    __slots__ = (
        "_stream",
        "connection",
        "message",
        "messages_in",
        "messages_out",
        "method",
        "received_at",
        "scope",
        "unanswered_bytes",
    )

    def __init__(self, connection: GrpcConnection, stream: Stream, message: bytes) -> None:
        self.connection = connection
        self._stream = stream
        self.method = stream.path.rpartition(b"/")[2].decode("ascii", "replace")
        """The method's name without its service, such as "SendMessage"."""
        self.message = message
        """The message; empty for a streaming call, whose messages come through `messages_out`"""
        self.unanswered_bytes = len(message)
        """Size of `message` until the call is answered, then 0"""
        self.received_at = trio.current_time()
        """Time at which its only or first message was complete (Trio's clock)"""
        self.scope: trio.CancelScope | None = None
        """Scope of the task that serves the call, cancelled when the call ends early; None if it has none"""
        self.messages_in: trio.MemorySendChannel[bytes] | None = None
        self.messages_out: trio.MemoryReceiveChannel[bytes] | None = None
        """Messages of a streaming call; ends when the peer has sent its last one. None for a unary call"""

    def metadata(self, name: bytes) -> str:
        """Returns the value of the header `name`, which must be in lower case; "" if the call does not have it. Bytes
        that are not UTF-8 become U+FFFD."""
        return self._stream.headers.get(name, b"").decode("utf-8", "replace")

    @property
    def timeout_s(self) -> float:
        """The peer's timeout (grpc-timeout) in seconds; infinity if the header is missing or malformed."""
        text = self._stream.headers.get(b"grpc-timeout", b"")
        number, unit = text[:-1], text[-1:]
        return int(number) * _UNIT_S[unit] if number.isdigit() and len(number) <= 8 and unit in _UNIT_S else math.inf

    @property
    def is_closed(self) -> bool:
        """Whether the call has ended, so that responses are dropped."""
        return self._stream.is_closed

    def respond(self, message: bytes) -> None:
        """Queues the call's only message, however long it is, and the status OK. Closes the connection if more than
        `pending_bytes_max` then wait for the peer's window."""
        self.connection.protocol.respond(self._stream, message)
        self.connection.note_answered(self)
        self.connection.flush_soon()

    async def respond_all(self, messages: Iterable[bytes]) -> None:
        """Sends several messages and the status OK, with one system call if the peer's window allows. Waits while the
        window is used up, or more than `outbox_high_bytes` wait for the kernel. Meanwhile, and after a cancellation,
        which may leave part of a message sent, nothing else may be sent than an error status."""
        stream, protocol = self._stream, self.connection.protocol
        ends_at = perf_counter() + TIME_SLICE_S
        for message in messages:
            data = memoryview(framed(message))
            for begin in range(0, len(data), PENDING_PIECE_BYTES):
                end = begin + PENDING_PIECE_BYTES
                protocol.send_piece(stream, data[begin:end], is_first=not begin, is_last=end >= len(data))
                await self._wait_allowed()
            if perf_counter() >= ends_at:  # making one of `messages` may take long
                await trio.lowlevel.checkpoint()
                ends_at = perf_counter() + TIME_SLICE_S
        self.finish()

    async def send(self, message: bytes) -> None:
        """Queues one message of several, and then waits as `respond_all` does; not always a checkpoint. If cancelled,
        the message is sent nevertheless."""
        self.connection.protocol.send_message(self._stream, message)
        await self._wait_allowed()
        self.connection.flush_soon()

    async def _wait_allowed(self) -> None:
        connection, stream = self.connection, self._stream
        while (stream.has_pending or connection.is_congested) and not stream.is_closed:
            connection.flush_soon()
            if stream.has_pending or connection.is_congested:
                await connection.wait_sent()
        if stream.is_closed:  # by the peer, perhaps after this task was rescheduled
            await trio.lowlevel.checkpoint_if_cancelled()

    def send_nowait(self, message: bytes) -> None:
        """Like `send`, but does not wait. For small, infrequent messages."""
        self.connection.protocol.send_message(self._stream, message)
        self.connection.flush_soon()

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """Ends the call with `status` once its messages are sent. `message` is the reason, for the client."""
        self.connection.protocol.finish(self._stream, status, message)
        self.connection.flush_soon()


class Service(Protocol):
    """Serves the calls that a gRPC server receives."""

    def is_streaming(self, path: bytes) -> bool:
        """Returns whether the method with this path (`/package.Service/Method`) takes a stream of messages."""
        ...

    def take(self, call: Call) -> bool:
        """Serves a unary call if no task has to wait for the response: answers now, or later in a callback. Returns
        whether it serves the call; if not, the call is passed to `serve`. Not called for streaming calls. Must not
        raise."""
        ...

    async def serve(self, call: Call) -> None:
        """Serves a call that `take` did not serve. Cancelled when the call or its connection ends early. Must not
        raise."""
        ...


GOAWAY_TIMEOUT_S = 1.0
"""Timeout in seconds for sending GOAWAY with the reason to a peer that has violated the protocol."""


class GrpcOptions(Http2Limits, frozen=True, kw_only=True):
    """Limits of connections. Times in seconds, sizes in bytes."""

    connections_max: int = 4096
    """Maximum number of connections. Beyond it, a new connection takes the place of the oldest one that has made no
    call and has been open for `open_timeout_s`; if there is none, the new connection is closed at once."""
    connections_per_host_max: int = 2048
    """Maximum number of connections from one IP address. Beyond it, a new connection is handled as described for
    `connections_max`, but can only take the place of one from the same address."""
    chunk_size_max: int = 262_144
    """Maximum bytes of one read."""
    unanswered_bytes_max: int = 32 << 20
    """Bytes of the messages of unary calls that are not answered yet, above which nothing is read from the
    connection."""
    request_total_bytes_max: int = 512 << 20
    """Maximum bytes of incomplete messages and of unanswered unary calls on all connections together, but at least
    twice `message_size_max`. Beyond it, the connection with the most of these bytes is closed."""
    outbox_high_bytes: int = 1 << 20
    """Bytes queued for the kernel above which nothing is read from the connection, and streaming responses wait."""
    idle_timeout_s: float = 120.0
    """Time without a call after which a connection is closed, as by RocketMQ's proxy."""
    ping_after_s: float = 60.0
    """A peer with a call in progress is sent a PING after this time without a byte from it. Otherwise the connection of
    a machine that has lost power would stay open, because its Telemetry stream would never end."""
    ping_timeout_s: float = 20.0
    """Time after a PING within which the peer must send something; otherwise the connection is closed (gRPC's
    default)."""
    open_timeout_s: float = 10.0
    """Age from which a connection that has never made a call may be closed, to make room for another one."""
    send_timeout_s: float = 60.0
    """Time after which a connection with waiting responses is closed, if in that time the peer's window has allowed no
    byte or the kernel has not accepted a whole piece (`SEND_PIECE_BYTES`)."""


class EndCause(StrEnum):
    """Why a connection ended, as logged and counted."""

    END_OF_STREAM = "end of stream"
    CONNECTION_LOST = "connection lost"
    CANCELLED = "cancelled"
    IDLE = "idle"
    PING_NOT_ANSWERED = "PING not answered"
    PROTOCOL_ERROR = "protocol error"
    PEER_DOES_NOT_READ = "peer does not read"
    OUTBOX_FULL = "outbox full"
    EVICTED = "evicted"
    TLS_HANDSHAKE_FAILED = "TLS handshake failed"
    NOT_SERVING = "not serving"
    REQUEST_BYTES = "bytes of requests"


class RequestBytes:
    """Counts the bytes of incomplete and unanswered requests on all connections, and enforces
    `request_total_bytes_max`."""

    def __init__(self, bytes_max: int, connections: Iterable[GrpcConnection]) -> None:
        self._bytes_max = bytes_max
        self._connections = connections
        self._byte_count = 0

    def add(self, byte_count: int) -> None:
        """Adds the change in one connection's bytes, which may be negative. If the total then exceeds the limit, closes
        the connection that has the most."""
        self._byte_count += byte_count
        if self._byte_count > self._bytes_max:
            fullest = max(self._connections, key=lambda each: each.request_bytes, default=None)
            if fullest is not None:
                fullest.close(EndCause.REQUEST_BYTES, f"{self._byte_count} bytes on all connections")


class GrpcConnection:
    """One connection, served by `run`. Methods that are not async may be called from any Trio task."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        service: Service,
        options: GrpcOptions,
        *,
        tls: PortTls | None = None,
        poller: Poller | None = None,
        total_bytes: RequestBytes | None = None,
    ) -> None:
        self._total_bytes = total_bytes
        """Counts the requests of this connection, too; None after its end"""
        self.request_bytes = 0
        """Bytes of incomplete and unanswered requests, as counted by `_total_bytes`"""
        self._unanswered_bytes = 0
        """Bytes of unary calls that are not answered yet"""
        self.peer = peer_of(stream)
        """The client's host and port."""
        self.is_encrypted = False
        self.opened_at = self.busy_at = trio.current_time()
        """Times (Trio's clock) at which it was opened, and at which it last had a call"""
        self.sent_at = self.allowed_at = self.received_at = self.opened_at
        """Times (Trio's clock). `sent_at`: the last time at which the kernel accepted bytes, was first offered them, or
        had none to accept. `allowed_at`: the last time at which the peer's window allowed bytes, or none waited for it.
        `received_at`: the last time at which bytes were received"""
        self.allowed_bytes = 0
        """`Http2Protocol.allowed_bytes` at `allowed_at`"""
        self.pinged_at: float | None = None
        """Time at which a PING was sent (Trio's clock); None if the peer has sent anything since, or no PING was
        sent"""
        self.call_count = 0
        """Number of calls received"""
        self.cause: EndCause | None = None
        """Why the connection has ended or is about to end; None before that"""
        self.cause_detail = ""
        self.protocol = Http2Protocol(options, service.is_streaming)
        self.sessions: dict[str, object] = {}
        """State that the service keeps for each client, by client id"""
        self._stream = stream
        self._service = service
        self._options = options
        self._tls = tls
        self._poller = poller
        self._transport = transport_for(stream, options.chunk_size_max, poller)
        self._writer = EagerWriter(self._transport)
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._has_writer = False
        self._is_flush_due = False
        self._unserved: Iterator[Event | None] | None = None
        """Events of the last chunk that are not served yet; None if there are none"""
        self._started_count = 0
        """Number of tasks that the current time slice has started"""
        self._error: RemoteProtocolError | None = None
        self._pending_bytes_max = max(options.pending_bytes_max, 2 * options.message_size_max)
        self._sent = trio.lowlevel.ParkingLot()
        self._close_callbacks: set[Callable[[GrpcConnection], None]] = set()

    def on_close(self, callback: Callable[[GrpcConnection], None]) -> None:
        """Calls `callback` with this connection when the connection has ended; only once, even if the same callback is
        added again. The callback must not raise."""
        self._close_callbacks.add(callback)

    def close(self, cause: EndCause, detail: str = "") -> None:
        """Cancels the connection and its gRPC calls. If it is closed more than once, the first cause is kept."""
        if self.cause is None:
            self.cause, self.cause_detail = cause, detail
        self._scope.cancel()

    @property
    def is_unused(self) -> bool:
        """Whether the connection is open and has had no call."""
        return not self.call_count and self.cause is None

    def evict(self) -> None:
        """Closes the connection to make room for another one."""
        self.close(EndCause.EVICTED)

    async def run(self) -> None:
        """Serves the connection until it ends, and closes the stream. Errors of the peer or the network are not raised,
        but set `cause`."""
        try:
            with self._scope:
                try:
                    await self._serve_until_end()
                except* HandshakeFailed as group:
                    self.close(EndCause.TLS_HANDSHAKE_FAILED, str(group.exceptions[0]))
                except* RemoteProtocolError as group:
                    self.close(EndCause.PROTOCOL_ERROR, str(group.exceptions[0]))
                except* (trio.BrokenResourceError, trio.ClosedResourceError) as group:
                    self.close(EndCause.CONNECTION_LOST, str(group.exceptions[0]))
        finally:
            self.close(EndCause.CANCELLED)
            if self._total_bytes is not None:
                self._total_bytes.add(-self.request_bytes)
                self._total_bytes = None
            for stream in list(self.protocol.streams.values()):
                stream.is_closed = True
            for callback in self._close_callbacks:
                callback(self)
            self._close_callbacks.clear()
            await trio.aclose_forcefully(self._stream)

    async def _serve_until_end(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                chunk = await self._receive_first()
                self._has_writer = True
                nursery.start_soon(self._write_forever)  # not before: the first bytes may be those of a TLS handshake
                await self._read_until_end(chunk)
            except RemoteProtocolError:
                with trio.move_on_after(GOAWAY_TIMEOUT_S):
                    await self._flushed()  # the peer learns the reason
                raise
            nursery.cancel_scope.cancel()

    # Reading

    async def _receive_first(self) -> bytes:
        """Returns the first chunk, after the TLS handshake if the peer begins one; b"" if the stream has ended. Raises
        HandshakeFailed if the handshake fails. Raises RemoteProtocolError if the port requires TLS and the peer does
        not use it, or if the peer uses TLS and the port does not offer it."""
        chunk = await self._transport.receive()
        stream = await secured(self._stream, chunk, self._tls, without_tls=WITHOUT_TLS)
        if stream is not None:
            self._stream, self.is_encrypted = stream, True
            self._transport = self._writer.transport = transport_for(stream, self._options.chunk_size_max)
            chunk = await self._transport.receive()
        return chunk

    async def _read_until_end(self, chunk: bytes) -> None:
        self._serve_now(chunk)
        while chunk:
            await self._wait_may_read()
            while self._unserved is not None:
                await trio.lowlevel.checkpoint()
                self._serve_slice()
                await self._wait_may_read()
            chunk = await self._transport.receive(self._serve_now)
        self.close(EndCause.END_OF_STREAM)

    async def _wait_may_read(self) -> None:
        """Waits until enough responses are sent, and enough calls answered, to read on."""
        await self._flushed(self._options.outbox_high_bytes)
        while self._has_many_unanswered:
            await self._sent.park()
            await self._flushed(self._options.outbox_high_bytes)

    @property
    def _has_many_unanswered(self) -> bool:
        return self._unanswered_bytes > self._options.unanswered_bytes_max

    def _serve_now(self, chunk: bytes) -> bool:
        """Serves a chunk for at most one time slice, because it may contain thousands of calls. Returns False if the
        reader must serve the rest, or wait until responses are sent or calls answered. Raises RemoteProtocolError if
        the peer has violated the protocol."""
        self.received_at, self.pinged_at = trio.current_time(), None
        self._unserved = self._steps(chunk)
        self._serve_slice()
        return self._unserved is None and not self.is_congested and not self._has_many_unanswered

    def _serve_slice(self) -> None:
        """Serves the rest of the chunk for at most one time slice. Raises RemoteProtocolError."""
        if self._poller is None:
            self._serve_steps()
        else:
            self._poller.as_turn(self._serve_steps)
        if self._error is not None:
            raise self._error

    def _serve_steps(self) -> None:
        """As `_serve_slice`, but stores the error in `_error`, because an exception would interrupt the poller's
        turn."""
        assert self._unserved is not None
        ends_at, self._started_count = perf_counter() + TIME_SLICE_S, 0
        try:
            for event in self._unserved:
                if event is not None:
                    self._handle(event)
                if perf_counter() >= ends_at or self._started_count >= TASKS_PER_SLICE_MAX:
                    break
            else:
                self._unserved = None
        except RemoteProtocolError as error:
            self._error = error
        self._count_requests()
        if self._sent:
            self._sent.unpark_all()  # the peer may have opened its window
        self.flush_soon()

    def _count_requests(self) -> None:
        byte_count = self.protocol.partial_bytes + self._unanswered_bytes
        if self._total_bytes is not None and byte_count != self.request_bytes:
            more, self.request_bytes = byte_count - self.request_bytes, byte_count
            self._total_bytes.add(more)

    def note_answered(self, call: Call) -> None:
        """Stops counting the message of a call as unanswered."""
        had_many = self._has_many_unanswered
        self._unanswered_bytes -= call.unanswered_bytes
        call.unanswered_bytes = 0
        self._count_requests()
        if had_many and not self._has_many_unanswered:
            self._sent.unpark_all()

    def _steps(self, chunk: bytes) -> Iterator[Event | None]:
        """Yields the events of a chunk, and None after each piece, because frames without events take time, too.

        Before it yields a piece's events, it cancels the tasks of the calls that the piece aborts. Otherwise such a
        task could run first, and would assume that its response was sent.
        """
        for begin in range(0, len(chunk), SERVED_PIECE_BYTES):
            events = self.protocol.receive(chunk[begin : begin + SERVED_PIECE_BYTES])
            for event in events:
                if isinstance(event, Aborted):
                    call = event.stream.owner
                    if isinstance(call, Call) and call.scope is not None:
                        call.scope.cancel()
            yield from events
            yield None

    def _handle(self, event: Event) -> None:
        stream = event.stream
        if isinstance(event, Received):
            if stream.is_streaming:
                self._pass_on(stream, event.message)
            elif not stream.is_closed:
                self._start(Call(self, stream, event.message))
        elif isinstance(event, Ended):
            call = stream.owner
            if isinstance(call, Call) and call.messages_in is not None:
                call.messages_in.close()
            else:
                self.protocol.finish(stream)  # a stream without messages

    def _start(self, call: Call) -> None:
        self.call_count += 1
        self.busy_at = call.received_at
        self._unanswered_bytes += call.unanswered_bytes
        if call._stream.is_streaming or not self._service.take(call):
            assert self._nursery is not None
            call._stream.owner = call
            call.scope = trio.CancelScope()
            self._started_count += 1
            self._nursery.start_soon(self._serve, call)

    async def _serve(self, call: Call) -> None:
        assert call.scope is not None
        try:
            with call.scope:
                await self._service.serve(call)
        finally:
            self.note_answered(call)

    def _pass_on(self, stream: Stream, message: bytes) -> None:
        """Passes a message of a streaming call to the call's task, which is started at the first message."""
        call = stream.owner
        if stream.is_closed:
            return
        if not isinstance(call, Call):
            call = Call(self, stream, b"")
            call.messages_in, call.messages_out = trio.open_memory_channel[bytes](MESSAGES_WAITING_MAX)
            self._start(call)
        assert call.messages_in is not None
        try:
            call.messages_in.send_nowait(message)
        except (trio.WouldBlock, trio.BrokenResourceError):
            self.protocol.finish(stream, Status.RESOURCE_EXHAUSTED, "messages come faster than they are handled")
            if call.scope is not None:
                call.scope.cancel()

    # Writing

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait for the kernel to accept them."""
        return bool(self.protocol.outbox_bytes) or (self._has_writer and not self._writer.is_idle)

    @property
    def is_congested(self) -> bool:
        """Whether more than `outbox_high_bytes` are queued for the kernel, so that nothing is read."""
        return self.protocol.outbox_bytes > self._options.outbox_high_bytes

    async def wait_sent(self) -> None:
        """Waits until the writer has sent a batch, or frames of the peer were handled, such as WINDOW_UPDATE."""
        await self._sent.park()

    def flush_soon(self) -> None:
        """Sends what is queued, as far as the kernel accepts it: at the end of the poller's turn, or at once outside
        one. Closes the connection if more than `pending_bytes_max` wait for the peer's window."""
        protocol = self.protocol
        if protocol.pending_bytes > self._pending_bytes_max:
            self.close(EndCause.OUTBOX_FULL, f"{protocol.pending_bytes} bytes wait for the peer's window")
        if not protocol.outbox_bytes or not self._writer.is_idle:
            return
        if self._poller is None:
            self._flush_now()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._poller.at_turn_end(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_due = False
        writer = self._writer
        if not writer.is_idle or self.cause is not None:
            return
        if not writer.transport.can_send_nowait:
            writer.wake()
        elif data := self.protocol.data_to_send():
            try:
                writer.try_send(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self.close(EndCause.CONNECTION_LOST, str(error))
            self.sent_at = trio.current_time()

    async def _flushed(self, bytes_left_max: int = 0) -> None:
        """Waits until at most `bytes_left_max` are queued and the writer is idle."""
        while self.protocol.outbox_bytes > bytes_left_max or not self._writer.is_idle:
            if self._writer.is_idle:
                self._flush_now()
            if self.protocol.outbox_bytes > bytes_left_max or not self._writer.is_idle:
                await self._sent.park()

    async def _write_forever(self) -> None:
        while True:
            data = memoryview(self.protocol.data_to_send() or await self._writer.wait_for_work())
            for begin in range(0, len(data), SEND_PIECE_BYTES):
                await self._transport.send_all(data[begin : begin + SEND_PIECE_BYTES])
                self.sent_at = trio.current_time()
            self._sent.unpark_all()


class GrpcStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A server's current connections and calls in flight; all other fields are counts since the start. `ended`:
    connections by `EndCause`."""

    connections: int
    calls_in_flight: int
    opened: int
    refused: int
    calls: int
    ended: dict[str, int]
