"""One TCP connection to a broker or name server: requests out, answers back, matched by opaque.

Any number of tasks may have requests in flight. A request is put into the outbox; one writer sends everything that is
there with one call; one reader completes every answer of a chunk in one go. So a burst of n requests costs two
wake-ups here, not 2n. A request that comes while no other is in flight does not wait for the writer's turn: its own
task gives it to the socket, if there is nothing between them. Knows frames and opaques, not what a request means.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import socket
import ssl
from collections.abc import Callable

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from ha.client.options import ClientOptions, split_address
from ha.client.parking import Parking, parking_here
from ha.client.tls import Connect, connector
from ha.errors import ConnectionFailed, RemoteProtocolError, RequestTimedOut
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from ha.tls.files import reason_of

_log = logging.getLogger(__name__)

_CHUNK_SIZE = 256 * 1024
_SHORT_CHUNK_SIZE = 64 * 1024
"""What is asked for after what was shorter than this: the C library maps a longer buffer anew each time."""
_TURNS_TO_READ = 3
"""Of the event loop, until a task that waits for a socket has what is there; asyncio takes the most."""


RequestHandler = Callable[["Connection", RemotingCommand], None]
"""Is given each request of the server, by the task that reads: it must not block. `Connection.respond` answers."""


class Connection:
    """A connection to `address`. Requests may be made from the start; they fail together if it can't be made or is
    lost.

    `run` does the work, in the task of whoever owns this connection, and returns when it has ended.
    """

    def __init__(
        self,
        address: str,
        options: ClientOptions,
        connect: Connect | None = None,
        on_request: RequestHandler | None = None,
    ) -> None:
        """`connect` opens the stream, by default as `options` say. `on_request` is given what the server asks;
        without it that is refused."""
        self.address = address
        self._options = options
        self._on_request = on_request or refuse
        self._connect = connector(options.tls, options.connect) if connect is None else connect
        self._opaques = itertools.count(1)
        self._pending: dict[int, Parking] = {}  # the task that awaits the answer, or the error in its place
        self._new_parking = parking_here()
        self._deadlines: list[tuple[float, int, float]] = []
        self._outbox: list[bytes] = []
        self._outbox_size = 0
        self._outbox_filled = anyio.Event()
        self._outbox_drained = anyio.Event()
        self._socket: socket.socket | None = None
        self._deadline_came = anyio.Event()
        self._next_look = math.inf
        self._heard_at = -math.inf
        self._prompt_count = 0
        self._prompt_since = math.inf
        self._hang_up_reason = ""
        self._failure: ConnectionFailed | None = None
        self._credentials = options.credentials

    @property
    def is_closed(self) -> bool:
        """No request can be made any more; a new connection is needed."""
        return self._failure is not None

    def silent_s(self) -> float:
        """For how long nothing has come from the server though it was asked for what is answered promptly; else 0."""
        if not self._prompt_count or self._failure is not None:
            return 0.0
        return anyio.current_time() - max(self._heard_at, self._prompt_since)

    def hang_up(self, reason: str) -> None:
        """Ends the connection, for `reason`."""
        self._hang_up_reason = reason
        self._deadline_came.set()

    async def invoke(self, command: RemotingCommand, timeout_s: float, *, is_prompt: bool = True) -> RemotingCommand:
        """Sends `command` (its opaque and signature are set here) and returns the answer, whatever its code.

        `is_prompt`: it is not one that the server may keep for a while, such as a long poll. Raises RequestTimedOut
        after `timeout_s` and ConnectionFailed when the connection is lost; in both cases the request may have been
        carried out. Cancelled, it forgets the request: a late answer is dropped."""
        deadline = anyio.current_time() + timeout_s
        if self._outbox_size > self._options.outbox_size_max:
            await self._wait_for_room(timeout_s)
        if self._failure is not None:
            raise ConnectionFailed(self.address, self._failure.reason)
        if self._credentials is not None:
            self._credentials.sign(command)
        opaque = command.opaque = next(self._opaques) & 0x7FFFFFFF
        frame = encode_command(command)
        pending = self._pending[opaque] = self._new_parking()
        self._watch_deadline(deadline, opaque, timeout_s)
        if is_prompt and not self._prompt_count:
            self._put_at_once(frame)
        else:
            self._put(frame)
        if is_prompt:
            if not self._prompt_count:
                self._prompt_since = deadline - timeout_s
            self._prompt_count += 1
        try:
            answer: RemotingCommand | Exception = await pending.wait()
        finally:
            self._pending.pop(opaque, None)
            self._prompt_count -= is_prompt
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def send_oneway(self, command: RemotingCommand, timeout_s: float) -> None:
        """Puts `command`, which is never answered, into the outbox. Waits only while that is full.

        Returning says nothing about arrival. Raises ConnectionFailed if this connection has ended, RequestTimedOut if
        the outbox stays full for `timeout_s`."""
        if self._outbox_size > self._options.outbox_size_max:
            await self._wait_for_room(timeout_s)
        if self._failure is not None:
            raise ConnectionFailed(self.address, self._failure.reason)
        if self._credentials is not None:
            self._credentials.sign(command)
        command.opaque = next(self._opaques) & 0x7FFFFFFF
        self._put(encode_command(command))

    def respond(self, answer: RemotingCommand) -> None:
        """Puts the answer to a request of the server into the outbox; nothing if this connection has ended."""
        if self._failure is None:
            self._put(encode_command(answer))

    async def run(self) -> None:
        """Connects, then moves frames until the peer closes, misbehaves, or this is cancelled. Fails what is pending
        then."""
        reason = "closed by this client"
        try:
            reason = await self._connect_and_serve()
        finally:
            self._fail(ConnectionFailed(self.address, reason))

    async def _connect_and_serve(self) -> str:
        host, port = split_address(self.address)
        try:
            with anyio.fail_after(self._options.connect_timeout_s):
                stream = await self._connect(host, port)
        except TimeoutError:
            return f"can't connect within {self._options.connect_timeout_s:g} s"
        except OSError as error:
            return f"can't connect: {_root(error)}"
        ended: list[str] = []
        self._socket = _socket_of(stream)
        async with stream:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._run_part, self._read, stream, ended, tasks.cancel_scope)
                    tasks.start_soon(self._run_part, self._write, stream, ended, tasks.cancel_scope)
                    tasks.start_soon(self._run_part, self._expire, stream, ended, tasks.cancel_scope)
            finally:
                self._socket = None
                # Closing may want to say goodbye (TLS does); a cancelled client still gets to close its socket.
                with anyio.move_on_after(1, shield=True):
                    await stream.aclose()
        _log.info("connection_ended address=%s reason=%r", self.address, ended[0])
        return ended[0]

    async def _run_part(
        self, part: Callable[[ByteStream], object], stream: ByteStream, ended: list[str], scope: anyio.CancelScope
    ) -> None:
        try:
            await part(stream)  # type: ignore[misc]
        except anyio.EndOfStream:
            ended.append("closed by the server")
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            ended.append(f"lost: {_root(error)}")
        except RemoteProtocolError as error:
            ended.append(f"the server broke the protocol: {error}")
        scope.cancel()

    async def _read(self, stream: ByteStream) -> None:
        parser = RemotingParser(frame_size_max=self._options.frame_size_max)
        pending = self._pending
        chunk = b""
        while True:
            chunk = await self._receive(stream, _CHUNK_SIZE if len(chunk) >= _SHORT_CHUNK_SIZE else _SHORT_CHUNK_SIZE)
            self._heard_at = anyio.current_time()
            for command in parser.feed(chunk):
                if command.is_response:
                    waiting = pending.pop(command.opaque, None)
                    if waiting is not None:
                        waiting.give((command,))
                else:
                    self._on_request(self, command)

    async def _receive(self, stream: ByteStream, size_max: int) -> bytes:
        if self._socket is None:
            return await stream.receive(size_max)
        while True:
            # The stream would ask the socket first, which has nothing: what was there is read.
            await anyio.wait_readable(self._socket)
            try:
                chunk = self._socket.recv(size_max)
            except BlockingIOError:
                continue
            if not chunk:
                raise anyio.EndOfStream
            return chunk

    async def _write(self, stream: ByteStream) -> None:
        while True:
            if not self._outbox:
                self._outbox_filled = anyio.Event()
                await self._outbox_filled.wait()
            frames, self._outbox = self._outbox, []
            await stream.send(b"".join(frames) if len(frames) > 1 else frames[0])
            self._outbox_size -= sum(map(len, frames))
            if not self._outbox_drained.is_set():
                self._outbox_drained.set()

    async def _expire(self, stream: ByteStream) -> None:
        """Ends requests that got no answer in time: one task for all of them. OSError if the server seems to be gone,
        or is to be hung up on.

        It does if it has everything, and said nothing at all since such a request, for as long as requests may take.
        RocketMQ 5's clients hang up on any request that timed out (clientCloseSocketIfTimeout)."""
        deadlines = self._deadlines
        while True:
            if self._hang_up_reason:
                raise OSError(self._hang_up_reason)
            now = anyio.current_time()
            if deadlines and deadlines[0][0] <= now:
                # The event loop may have been blocked: what came meanwhile is to be read first.
                for _ in range(_TURNS_TO_READ):
                    await anyio.lowlevel.checkpoint()
            while deadlines and deadlines[0][0] <= now:
                _, opaque, timeout_s = heapq.heappop(deadlines)
                pending = self._pending.pop(opaque, None)
                if pending is not None:
                    pending.give((RequestTimedOut(self.address, timeout_s),))
                    silent_s = min(timeout_s, now - self._heard_at)
                    if silent_s >= self._options.request_timeout_s and not self._outbox_size:
                        raise OSError(f"silent for {silent_s:.1f} s")
            self._next_look = deadlines[0][0] if deadlines else math.inf
            self._deadline_came = anyio.Event()
            with anyio.move_on_after(self._next_look - now):
                await self._deadline_came.wait()

    def _watch_deadline(self, deadline: float, opaque: int, timeout_s: float) -> None:
        deadlines = self._deadlines
        # Answered requests leave from the front, so that the heap stays about as long as what is in flight.
        while deadlines and deadlines[0][1] not in self._pending:
            heapq.heappop(deadlines)
        heapq.heappush(deadlines, (deadline, opaque, timeout_s))
        if deadline < self._next_look:
            self._next_look = deadline
            self._deadline_came.set()

    def _put(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._outbox_size += len(frame)
        if len(self._outbox) == 1:
            self._outbox_filled.set()

    def _put_at_once(self, frame: bytes) -> None:
        """As `_put`, but what the socket takes leaves on the spot. For what nothing is expected to join."""
        if self._socket is not None and not self._outbox_size:
            try:
                frame = frame[self._socket.send(frame) :]
            except OSError:
                pass  # it is full, or the writer will meet what is wrong
        if frame:
            self._put(frame)

    async def _wait_for_room(self, timeout_s: float) -> None:
        try:
            with anyio.fail_after(timeout_s):
                while self._outbox_size > self._options.outbox_size_max and self._failure is None:
                    if self._outbox_drained.is_set():
                        self._outbox_drained = anyio.Event()
                    await self._outbox_drained.wait()
        except TimeoutError:
            raise RequestTimedOut(self.address, timeout_s) from None

    def _fail(self, failure: ConnectionFailed) -> None:
        self._failure = failure
        pending, self._pending = self._pending, {}
        for waiting in pending.values():
            waiting.give((ConnectionFailed(self.address, failure.reason),))
        self._outbox.clear()
        self._outbox_size = 0
        self._outbox_drained.set()


def refuse(connection: Connection, command: RemotingCommand) -> None:
    """Answers a request of the server that nobody here knows, if it wants an answer."""
    if not command.is_oneway:
        remark = f" request type {command.code} not supported"
        connection.respond(command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark))


def _socket_of(stream: ByteStream) -> socket.socket | None:
    """Where the bytes of `stream` may go without its help while it writes nothing; None if only it can write them.

    TLS encrypts them, and asyncio's transports keep their sockets to themselves."""
    if not isinstance(stream, SocketStream):
        return None
    raw: object = stream.extra(SocketAttribute.raw_socket, None)
    return raw if isinstance(raw, socket.socket) else None


def _root(error: BaseException) -> str:
    """What went wrong, without the wrapping that anyio puts around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):
        return _root(error.exceptions[0])
    if isinstance(error, ssl.SSLError):
        return f"TLS: {reason_of(error)}"  # its errno is not the system's
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)  # the event loops word it in ways of their own
    return str(error) or type(error).__name__
