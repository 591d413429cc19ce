"""One TCP connection to a broker or name server, on anyio: drives a `RemotingProtocol`.

Any number of tasks may have requests in flight. The writer sends all queued requests with one call, and the reader
completes all responses of a chunk at once, so a burst of n requests costs two wake-ups here, not 2n. A request that is
made while none but long polls are in flight doesn't wait for the writer: its own task writes it to the socket, if the
socket can be written to directly (`_socket_of`). Knows frames, but not the meaning of requests.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from ha.client.options import ClientOptions
from ha.client.parking import Parking, clock_here, parking_here
from ha.client.tls import Connect, connector
from ha.errors import ConnectionFailed, RemoteProtocolError, RequestTimedOut
from ha.protocol.addresses import split_address
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import HEADER_SIZE_MAX, RemotingCommand, encode_command
from ha.protocol.remoting_protocol import CloseCause, ConnectionLimits, ConnectionState, RemotingProtocol
from ha.tls.files import reason_of

_log = logging.getLogger(__name__)

_CHUNK_SIZE = 256 * 1024
_SHORT_CHUNK_SIZE = 64 * 1024
"""Size in bytes of the read buffer, unless the last chunk filled it: then the next buffer has _CHUNK_SIZE bytes. For a
buffer of _CHUNK_SIZE, the C library would map new memory at each read.
"""
_TURNS_TO_READ = 3
"""Number of iterations of the event loop until a task that waits for a socket has read from it; asyncio needs the
most."""
_DEADLINES_KEPT = 64
"""The deadlines of answered requests are removed when the number of stored deadlines reaches this number plus twice the
number left after the last removal."""


RequestHandler = Callable[["Connection", RemotingCommand], None]
"""Handles a request that the server sent; responds with `Connection.respond`. Called in the task that reads from the
connection, so it must not block."""


class Connection:
    """A connection to `address`. Requests may be made before it is established; all of them fail if it can't be
    established, or is lost.

    `run` does the work, in a task of the connection's owner, and returns when the connection has ended.
    """

    def __init__(
        self,
        address: str,
        options: ClientOptions,
        connect: Connect | None = None,
        on_request: RequestHandler | None = None,
    ) -> None:
        """`connect` opens the stream, by default as `options` say. `on_request` is called with the server's requests,
        which are rejected by default. Raises ValueError if the TLS files of `options` or the environment can't be
        used."""
        self.address = address
        self._options = options
        self._on_request = on_request or refuse
        self._connect = connector(options.tls, options.connect) if connect is None else connect
        self._credentials = options.credentials
        limits = ConnectionLimits(
            frame_size_max=options.frame_size_max,
            header_size_max=HEADER_SIZE_MAX,
            batch_size_max=options.outbox_size_max,
            outbox_bytes_max=sys.maxsize,
            outbox_total_bytes_max=sys.maxsize,
        )
        self._send_timeout_s = limits.send_timeout_s
        self._clock = clock_here()
        self._protocol = RemotingProtocol[Parking](limits, self._clock())
        self._new_parking = parking_here()
        self._scope = anyio.CancelScope()
        self._socket: socket.socket | None = None
        self._was_open = False
        self._settled = anyio.Event()
        """Set when the connection is established, or has ended."""
        self._outbox_filled = anyio.Event()
        self._outbox_drained = anyio.Event()
        self._deadlines: list[tuple[float, int, float]] = []
        self._deadlines_max = _DEADLINES_KEPT
        self._deadline_came = anyio.Event()
        self._next_look = math.inf
        self._prompt_count = 0
        self._prompt_since = math.inf

    @property
    def is_closed(self) -> bool:
        """Whether requests are refused, so that a new connection is needed."""
        return self._protocol.is_closed

    def silent_s(self) -> float:
        """Returns for how many seconds the server has sent nothing while a prompt request (see `invoke`) is pending; 0
        if no such request is pending, or the connection is closed."""
        if not self._prompt_count or self.is_closed:
            return 0.0
        return self._clock() - max(self._protocol.received_at, self._prompt_since)

    def hang_up(self, reason: str) -> None:
        """Closes the connection: pending requests fail, with `reason`."""
        self._protocol.close(f"lost: {reason}")
        self._scope.cancel()

    async def invoke(self, command: RemotingCommand, timeout_s: float, *, is_prompt: bool = True) -> RemotingCommand:
        """Sends `command` (its opaque and signature are set here) and returns the response, whatever its code.

        `is_prompt`: whether the server responds without delay; False for a long poll. Raises RequestTimedOut after
        `timeout_s` (the request may have been executed), ConnectionFailed if the connection fails (the request may have
        been executed if `was_sent`), and LocalProtocolError if `command` can't be encoded. If the call is cancelled,
        the request may still be executed, and a late response is dropped."""
        protocol = self._protocol
        deadline = self._clock() + timeout_s
        await self._admit(timeout_s)
        if self._credentials is not None:
            self._credentials.sign(command)
        opaque = command.opaque = protocol.next_opaque()
        frame = encode_command(command)
        pending = self._new_parking()
        protocol.expect(opaque, pending)
        self._watch_deadline(deadline, opaque, timeout_s)
        if is_prompt and not self._prompt_count:
            self._prompt_since = deadline - timeout_s
            frame = self._send_now(frame)
        if frame:
            self._queue(frame)
        self._prompt_count += is_prompt
        try:
            response: RemotingCommand | Exception = await pending.wait()
        finally:
            protocol.forget(opaque)
            self._prompt_count -= is_prompt
        if isinstance(response, Exception):
            raise response
        return response

    async def send_oneway(self, command: RemotingCommand, timeout_s: float) -> None:
        """Queues `command`, which is never answered. Waits only while the connection is being established, and while
        the outbox is full (`outbox_size_max`).

        The command may be lost after the call has returned. Raises ConnectionFailed if the connection can't be
        established or has ended, RequestTimedOut if both waits together exceed `timeout_s`, and LocalProtocolError if
        `command` can't be encoded; then it is not sent."""
        await self._admit(timeout_s, is_opening=self._protocol.state is ConnectionState.OPENING)
        if self._credentials is not None:
            self._credentials.sign(command)
        command.opaque = self._protocol.next_opaque()
        self._queue(encode_command(command))

    def respond(self, response: RemotingCommand) -> None:
        """Queues the response to a request of the server; does nothing if this connection has ended. Raises
        LocalProtocolError if `response` can't be encoded."""
        self._queue(encode_command(response))

    async def run(self) -> None:
        """Connects, then sends and receives frames until the connection is closed or lost, the server violates the
        protocol, or this is cancelled. Then pending requests fail."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._run_part, self._expire)  # requests may be made before the stream is open
                    await self._connect_and_serve()
                    tasks.cancel_scope.cancel()
        finally:
            self._protocol.close("closed by this client")
            for waiting in self._protocol.finish():
                waiting.give((ConnectionFailed(self.address, self._protocol.cause, was_sent=self._was_open),))
            self._settled.set()
            self._outbox_drained.set()

    async def _connect_and_serve(self) -> None:
        try:
            host, port = split_address(self.address)
            with anyio.fail_after(self._options.connect_timeout_s):
                stream = await self._connect(host, port)
        except TimeoutError:
            return self._protocol.close(f"can't connect within {self._options.connect_timeout_s:g} s")
        except (OSError, ValueError) as error:  # ValueError: a name server returned an invalid address
            return self._protocol.close(f"can't connect: {_root(error)}")
        self._socket = _socket_of(stream)
        self._was_open = True
        self._protocol.open()
        self._settled.set()
        async with stream:
            try:
                async with anyio.create_task_group() as tasks:
                    for part in (self._read, self._write):
                        tasks.start_soon(self._run_part, partial(part, stream))
            finally:
                self._socket = None
                if self.is_closed:
                    _log.info("client.connection_lost address=%s reason=%r", self.address, self._protocol.cause)
                # Closing may need to send (TLS does); a cancelled client still gets to close its socket.
                with anyio.move_on_after(1, shield=True):
                    await stream.aclose()

    async def _run_part(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except anyio.EndOfStream:
            self._protocol.close("closed by the server")
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            self._protocol.close(f"lost: {_root(error)}")
        except RemoteProtocolError as error:
            self._protocol.close(f"the server broke the protocol: {error}")
        self._scope.cancel()

    async def _read(self, stream: ByteStream) -> None:
        protocol, chunk = self._protocol, b""
        while True:
            chunk = await self._receive(stream, _CHUNK_SIZE if len(chunk) >= _SHORT_CHUNK_SIZE else _SHORT_CHUNK_SIZE)
            requests, responses = protocol.receive(chunk, self._clock())
            for waiting, response in responses:
                waiting.give((response,))
            for request in requests:
                self._on_request(self, request)

    async def _receive(self, stream: ByteStream, size_max: int) -> bytes:
        if self._socket is None:
            return await stream.receive(size_max)
        while True:
            # `stream.receive` would try to read first, which would fail: all data that had arrived was read before.
            await anyio.wait_readable(self._socket)
            try:
                chunk = self._socket.recv(size_max)
            except BlockingIOError:
                continue
            if not chunk:
                raise anyio.EndOfStream
            return chunk

    async def _write(self, stream: ByteStream) -> None:
        protocol = self._protocol
        while True:
            if batch := protocol.data_to_send():
                protocol.start_send_timeout(self._clock())
                await stream.send(batch)
                protocol.data_sent(len(batch), self._clock())
                if not self._outbox_drained.is_set():
                    self._outbox_drained.set()
            else:
                self._outbox_filled = anyio.Event()
                await self._outbox_filled.wait()

    async def _expire(self) -> None:
        """Ends requests that got no response in time. Raises OSError if the server seems to be gone.

        That is the case if a request with a timeout of at least request_timeout_s times out, nothing was received for
        request_timeout_s, and nothing waits to be sent. It is also the case if the system has not accepted a whole
        batch for `_send_timeout_s`, and nothing was received in that time. RocketMQ 5's clients close the connection
        after any timeout (clientCloseSocketIfTimeout)."""
        deadlines, protocol = self._deadlines, self._protocol
        while True:
            now = self._clock()
            if (deadlines and deadlines[0][0] <= now) or protocol.overdue(now):
                # The event loop may have been blocked: responses that arrived meanwhile are read first.
                for _ in range(_TURNS_TO_READ):
                    await anyio.lowlevel.checkpoint()
            is_stuck = protocol.overdue(now) is CloseCause.PEER_DOES_NOT_READ
            if is_stuck and now - protocol.received_at >= self._send_timeout_s:
                raise OSError("the server does not read")
            while deadlines and deadlines[0][0] <= now:
                _, opaque, timeout_s = heapq.heappop(deadlines)
                pending = protocol.forget(opaque)
                if pending is not None:
                    pending.give((RequestTimedOut(self.address, timeout_s),))
                    silent_s = min(timeout_s, now - protocol.received_at)
                    if silent_s >= self._options.request_timeout_s and not protocol.outbox_bytes:
                        raise OSError(f"silent for {silent_s:.1f} s")
            self._next_look = deadlines[0][0] if deadlines else math.inf
            self._deadline_came = anyio.Event()
            with anyio.move_on_after(min(self._next_look - now, self._send_timeout_s)):
                await self._deadline_came.wait()

    def _watch_deadline(self, deadline: float, opaque: int, timeout_s: float) -> None:
        deadlines = self._deadlines
        # Answered requests are removed from the front of the heap, so it is about as long as the number of requests in
        # flight. Those behind a pending one, such as a long poll, are removed once there are many.
        while deadlines and not self._protocol.is_pending(deadlines[0][1]):
            heapq.heappop(deadlines)
        if len(deadlines) >= self._deadlines_max:
            deadlines[:] = [each for each in deadlines if self._protocol.is_pending(each[1])]
            heapq.heapify(deadlines)
            self._deadlines_max = 2 * len(deadlines) + _DEADLINES_KEPT
        heapq.heappush(deadlines, (deadline, opaque, timeout_s))
        if deadline < self._next_look:
            self._next_look = deadline
            self._deadline_came.set()

    def _queue(self, frame: bytes) -> None:
        if not self._protocol.outbox_bytes:
            self._outbox_filled.set()
        self._protocol.queue(frame)

    def _send_now(self, frame: bytes) -> bytes:
        """Writes a frame to the socket without waiting, unless other frames are queued; returns the part that was not
        written."""
        if self._socket is not None and not self._protocol.outbox_bytes:
            try:
                return frame[self._socket.send(frame) :]
            except OSError:
                pass  # the socket's buffer is full, or the writer will get the same error
        return frame

    async def _admit(self, timeout_s: float, *, is_opening: bool = False) -> None:
        """Waits while the outbox is full, and if `is_opening`, until the connection is established. Raises
        RequestTimedOut after `timeout_s`, and ConnectionFailed if this connection has ended."""
        protocol = self._protocol
        if is_opening or protocol.outbox_bytes > self._options.outbox_size_max:
            try:
                with anyio.fail_after(timeout_s):
                    if is_opening:
                        await self._settled.wait()
                    while protocol.outbox_bytes > self._options.outbox_size_max:
                        if self._outbox_drained.is_set():
                            self._outbox_drained = anyio.Event()
                        await self._outbox_drained.wait()
            except TimeoutError:
                raise RequestTimedOut(self.address, timeout_s) from None
        if protocol.is_closed:
            raise ConnectionFailed(self.address, protocol.cause)


def refuse(connection: Connection, command: RemotingCommand) -> None:
    """Answers a request of the server with REQUEST_CODE_NOT_SUPPORTED; drops a oneway request."""
    if not command.is_oneway:
        remark = f" request type {command.code} not supported"
        connection.respond(command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark))


def _socket_of(stream: ByteStream) -> socket.socket | None:
    """Returns the socket of `stream`, which may be used directly while no method of `stream` runs. None with TLS, which
    has to encrypt the bytes, and under asyncio, whose transports don't give access to their sockets."""
    if not isinstance(stream, SocketStream):
        return None
    raw: object = stream.extra(SocketAttribute.raw_socket, None)
    return raw if isinstance(raw, socket.socket) else None


def _root(error: BaseException) -> str:
    """Describes the innermost cause of `error`, without anyio's wrappers."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):
        return _root(error.exceptions[0])
    if isinstance(error, ssl.SSLError):
        return f"TLS: {reason_of(error)}"  # its errno is not the system's
    if isinstance(error, socket.gaierror):
        return "host not found"  # its errno is the resolver's
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)  # the error's own text differs between event loops
    return str(error) or type(error).__name__
