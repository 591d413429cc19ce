"""One remoting connection, whichever side opened it: a reader, a writer, and the requests that wait for an answer.

Owns the stream. Knows frames and opaques, no request code. The reader hands every complete request of a chunk to the
handler in one call; what is sent goes through the outbox, which is emptied with one send: by the reader itself right
after the handler returns, by `send_now`, else by the writer task, woken once however many frames were put in meanwhile.
`take` serves the requests that need no wait, and the handler the rest. With a poller (ha/poller.py) its turns read and
`take` for all connections, and send at their end what was put into outboxes.

Bytes that wait: at most a chunk and one incomplete frame on the way in; on the way out the reader pauses above
`outbox_high_bytes` and the connection ends above `outbox_bytes_max`. Time that passes: `overdue` says whether one of
the timeouts of ConnectionOptions has run out; whoever owns the connection asks it (see watch.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
import trio

from ha.errors import HandshakeFailed, LocalProtocolError, RemoteProtocolError
from ha.poller import Poller
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import FLAG_ONEWAY, FLAG_RESPONSE, RemotingCommand, RemotingParser, encode_command
from ha.transport import peer_of, transport_for

from .counters import Counters
from .options import ConnectionOptions
from .tls import TLS_HANDSHAKE, PortTls

if TYPE_CHECKING:
    from .handlers import Handler, Take

logger = logging.getLogger(__name__)

OPAQUE_MAX = 0x7FFFFFFF


class _Invocation:
    """A request of ours under way: `answer` is set, or stays None because the connection ended."""

    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: RemotingCommand | None = None


class RemotingConnection:
    """A connection that runs inside `run`. Every method that is not async may be called from any trio task."""

    __slots__ = (
        "__weakref__",
        "_buffered_bytes",
        "_cause",
        "_close_callbacks",
        "_closed",
        "_corked",
        "_counters",
        "_detail",
        "_drained",
        "_invocations",
        "_is_flush_due",
        "_last_activity",
        "_opaque",
        "_options",
        "_outbox",
        "_outbox_bytes",
        "_parser",
        "_partial_bytes",
        "_partial_since",
        "_partial_write",
        "_poller",
        "_reader",
        "_requests",
        "_scope",
        "_stream",
        "_take",
        "_tls",
        "_transport",
        "_writer_waits",
        "_writing_since",
        "has_asked",
        "in_flight",
        "is_encrypted",
        "is_own",
        "opened_at",
        "peer",
        "received_at",
    )

    def __init__(
        self,
        stream: trio.abc.Stream,
        options: ConnectionOptions,
        counters: Counters | None = None,
        *,
        tls: PortTls | None = None,
        parser_type: type[RemotingParser] = RemotingParser,
        take: Take | None = None,
        poller: Poller | None = None,
        is_own: bool = False,
    ) -> None:
        """`tls`: what to do if the peer begins with a TLS handshake, or doesn't; None: the former is an error.

        `take` is called before the handler; with a poller in its turns. `is_own`: the peer is this process.
        """
        self.peer: tuple[str, int] = peer_of(stream)
        """The other side's host and port."""
        self.is_own = is_own
        """Whether the peer is this process."""
        self.is_encrypted = False
        """Whether the connection uses TLS."""
        self._stream = stream
        self._tls = tls
        self._take = take
        self._poller = poller
        self._transport = transport_for(stream, options.chunk_size_max, poller)
        self._options = options
        self._counters = Counters() if counters is None else counters
        self._parser = parser_type(frame_size_max=options.frame_size_max, header_size_max=options.header_size_max)
        self._scope = trio.CancelScope()
        self._closed = False
        self._cause = ""
        self._detail = ""
        self._close_callbacks: list[Callable[[], None]] = []
        self._invocations: dict[int, _Invocation] = {}
        self._opaque = 0
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._partial_write: memoryview | None = None
        self._requests: list[RemotingCommand] | None = None
        """Requests of the last chunk that are left for the reader; None if it was not parsed"""
        self._buffered_bytes = 0
        """Bytes of the last chunk with requests, and of the frame that it completed"""
        self._is_flush_due = False
        self._corked = False
        self._reader: trio.lowlevel.Task | None = None
        self._writer_waits = trio.lowlevel.ParkingLot()
        self._drained = trio.lowlevel.ParkingLot()
        self.opened_at = self._last_activity = self.received_at = trio.current_time()
        """`received_at`: when the last bytes came (trio's clock, s)."""
        self.has_asked = False
        """Whether at least one request has come."""
        self.in_flight = 0
        """Requests that were taken and will be answered later; kept by a handler that bounds them."""
        self._partial_bytes = 0
        self._partial_since = math.inf
        self._writing_since = math.inf

    def __repr__(self) -> str:
        return f"<RemotingConnection {self.peer[0]}:{self.peer[1]}{' closed' if self._closed else ''}>"

    # What handlers and callers use

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended or is about to; nothing more is sent then."""
        return self._closed

    @property
    def outbox_bytes(self) -> int:
        """Bytes given to `send_soon` that the system has not taken yet."""
        return self._outbox_bytes

    @property
    def partial_bytes(self) -> int:
        """Upper bound of the bytes held of a frame that is not complete; off by less than one chunk."""
        return self._partial_bytes

    def send_soon(self, frame: bytes) -> None:
        """Queue one encoded frame. Frames queued while the handler runs leave in one send when it returns.

        On a closed connection this does nothing, since the peer's going away is no fault of the caller.
        """
        if self._queue(frame) and self._writer_waits and not self._is_corked_here:
            if self._poller is not None and self._poller.is_in_turn:
                self._flush_at_turn_end(self._poller)
            else:
                self._writer_waits.unpark()

    def send_now(self, frame: bytes) -> None:
        """As `send_soon`, but what waits is given to the system at once, as far as it takes it, without a task switch.

        For a frame that no other is likely to follow in this turn: two that could have left together cost more so.
        In a turn of the poller it leaves at its end.
        """
        if self._queue(frame) and self._writer_waits and not self._is_corked_here:
            if self._poller is not None and self._poller.is_in_turn:
                self._flush_at_turn_end(self._poller)
            else:
                self._flush_now()

    def _flush_at_turn_end(self, poller: Poller) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            poller.at_turn_end(self._flush_now)

    def _flush_now(self) -> None:
        """Send as much of the outbox as the system takes."""
        self._is_flush_due = False
        if not self._outbox:
            return  # the reader or the writer has sent it, or it was dropped
        try:
            self._send_outbox()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close("connection lost", str(error))

    @property
    def _is_corked_here(self) -> bool:
        """Whether the handler is the caller: the reader will send what is queued when it returns."""
        return self._corked and trio.lowlevel.current_task() is self._reader

    def _queue(self, frame: bytes) -> bool:
        """Put a frame into the outbox; tell whether it is there, and not dropped with a connection that has ended."""
        if self._closed:
            return False
        size = len(frame)
        counters = self._counters
        self._outbox.append(frame)
        self._outbox_bytes += size
        counters.outbox_bytes += size
        if self._outbox_bytes > self._options.outbox_bytes_max:
            self._drop_outbox(f"{self._outbox_bytes} bytes wait")
        elif counters.outbox_bytes > self._options.outbox_total_bytes_max:
            fullest = max(counters.connections, key=attrgetter("outbox_bytes"), default=self)
            fullest._drop_outbox(f"{fullest._outbox_bytes} of the {counters.outbox_bytes} bytes that wait in all")
        return not self._closed

    def reply(self, request: RemotingCommand, response: RemotingCommand) -> None:
        """Answer a request; a oneway request is never answered, so then this does nothing."""
        if request.flag & FLAG_ONEWAY:
            return
        try:
            frame = encode_command(response)
        except LocalProtocolError as error:
            # A response that exceeds the frame size, such as a list of very many topics, fails only this request.
            logger.error("remoting.reply_impossible peer=%s:%d code=%d reason=%r", *self.peer, request.code, str(error))
            frame = encode_command(request.reply(ResponseCode.SYSTEM_ERROR, f"the answer can't be sent: {error}"))
        self.send_soon(frame)

    def reply_error(self, request: RemotingCommand, error: RemoteProtocolError) -> None:
        """Answer a request that can't be understood: SYSTEM_ERROR with the reason, as in RocketMQ."""
        self.reply(request, request.reply(ResponseCode.SYSTEM_ERROR, str(error)))

    def flush(self) -> None:
        """Send now what the running handler has queued, for a handler about to wait for something slow."""
        if self._outbox and self._writer_waits:
            self._writer_waits.unpark()

    async def drained(self) -> None:
        """Wait until little enough waits to be sent (half of `outbox_high_bytes`) or the connection has ended."""
        while self._outbox_bytes > self._options.outbox_high_bytes // 2 and not self._closed:
            await self._drained.park()

    async def is_ready(self) -> bool:
        """Wait while too much waits to be sent; tell whether the connection still runs.

        For a handler between two requests of a chunk whose answers may be long. A checkpoint only if it waits.
        """
        if self._outbox_bytes > self._options.outbox_high_bytes:
            self.flush()
            await self.drained()
        return not self._closed

    async def flushed(self) -> None:
        """Wait until nothing waits to be sent or the connection has ended."""
        self.flush()
        while self._outbox_bytes and not self._closed:
            await self._drained.park()

    def send_oneway(self, command: RemotingCommand) -> None:
        """Send a request that is not to be answered; its opaque is set here."""
        opaque = self._next_opaque()
        self.send_soon(encode_command(msgspec.structs.replace(command, opaque=opaque, flag=FLAG_ONEWAY)))

    async def invoke(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        """Send a request to the peer and wait for its answer; the command's opaque is set here, in a copy.

        Raises trio.TooSlowError after `timeout_s`, and trio.BrokenResourceError if the connection ends first. A peer
        that sent nothing at all meanwhile is taken for dead: the connection ends. Cancelled, it forgets the answer.
        """
        if self._closed:
            raise trio.BrokenResourceError(self._broken_text())
        opaque = self._next_opaque()
        invocation = self._invocations[opaque] = _Invocation()
        asked_at = trio.current_time()
        try:
            with trio.fail_after(timeout_s):
                self.send_soon(encode_command(msgspec.structs.replace(command, opaque=opaque)))
                self.flush()
                await invocation.done.wait()
        except trio.TooSlowError:
            if self.received_at <= asked_at:
                self.close("no answer", f"code {command.code} waited {timeout_s:g} s, nothing received")
            raise
        finally:
            del self._invocations[opaque]
        if invocation.answer is None:
            raise trio.BrokenResourceError(self._broken_text())
        return invocation.answer

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the connection has ended; at once if it has. It must not raise."""
        if self._closed and self._reader is None:
            callback()
        else:
            self._close_callbacks.append(callback)

    def close(self, cause: str, detail: str = "") -> None:
        """End the connection: both its tasks, at their next wait. The first cause given is logged and counted."""
        if not self._cause:
            self._cause = cause
            self._detail = detail
        self._closed = True
        self._scope.cancel()

    # What the owner uses

    @property
    def cause(self) -> str:
        """Why it ended, in a few words that are the same each time; "" while it runs."""
        return self._cause

    @property
    def cause_detail(self) -> str:
        """What exactly happened, if there is more to say than `cause`."""
        return self._detail

    @property
    def deadline(self) -> float:
        """When `overdue` would say something if nothing changes until then (trio clock)."""
        options = self._options
        return min(
            self._last_activity + options.idle_timeout_s,
            self._partial_since + options.frame_timeout_s,
            self._writing_since + options.send_timeout_s,
        )

    def overdue(self, now: float) -> str:
        """Which timeout has run out at `now`; "" if none."""
        options = self._options
        if now >= self._writing_since + options.send_timeout_s:
            return "peer does not read"
        if now >= self._partial_since + options.frame_timeout_s:
            return "incomplete frame"
        if now >= self._last_activity + options.idle_timeout_s:
            return "idle"
        return ""

    async def run(self, handler: Handler) -> None:
        """Serve the connection until it ends, then close the stream, answer what waits, and call the callbacks.

        Returns when the peer has gone or broken a rule. What the handler raises besides RemoteProtocolError,
        TooSlowError and Trio's broken and closed errors propagates, after the same cleaning up.
        """
        self._reader = trio.lowlevel.current_task()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_forever)
                    try:
                        await self._read_until_end(handler)
                    except* HandshakeFailed as group:
                        self.close("TLS handshake failed", first_leaf(group).reason)  # type: ignore[attr-defined]
                    except* RemoteProtocolError as group:
                        self.close("protocol error", str(first_leaf(group)))
                    except* trio.TooSlowError:
                        self.close("handler too slow")
                    except* (trio.BrokenResourceError, trio.ClosedResourceError) as group:
                        self.close("connection lost", str(first_leaf(group)))
        finally:
            self._closed = True
            self._cause = self._cause or "cancelled"
            self._reader = None
            self._drop_outbox("")
            self._counters.partial_bytes -= self._partial_bytes
            self._partial_bytes = 0
            for invocation in self._invocations.values():
                invocation.done.set()
            self._drained.unpark_all()
            callbacks, self._close_callbacks = self._close_callbacks, []
            for callback in callbacks:
                callback()
            self._counters.closed_by_cause[self._cause] = self._counters.closed_by_cause.get(self._cause, 0) + 1
            await trio.aclose_forcefully(self._stream)

    # Reading

    async def _read_until_end(self, handler: Handler) -> None:
        options, counters = self._options, self._counters
        chunk = await self._transport.receive()
        if chunk and chunk[0] == TLS_HANDSHAKE:
            await self._begin_tls(chunk)
            chunk = await self._transport.receive()
        elif chunk and self._tls is not None and self._tls.is_required:
            raise RemoteProtocolError("no TLS, which this port requires")
        receive = self._transport.receive
        if chunk and self._serve_now(chunk):
            chunk = await receive(self._serve_now)
        while chunk:
            if not counters.is_reading:
                await trio.sleep_forever()
            requests, self._requests = self._requests, None
            if requests is None:
                requests = self._take_all(self._feed(chunk))
            if requests:
                await self._handle(handler, requests)
                if self._outbox:
                    self._send_outbox()
                if self._outbox_bytes > options.outbox_high_bytes:
                    await self.drained()
            if not self._parser.is_between_frames:
                self._count_partial(len(chunk))
            if counters.handled_bytes > options.handled_bytes_max:
                await self._wait_for_handlers()
            chunk = await receive(self._serve_now)
        self.close("end of stream")

    def _feed(self, chunk: bytes) -> list[RemotingCommand]:
        """Take note of a chunk; give answers in it to those that wait for them, and return the requests."""
        self._counters.bytes_received += len(chunk)
        self.received_at = self._last_activity = trio.current_time()
        commands = self._parser.feed(chunk)
        if commands:
            self._buffered_bytes = len(chunk) + self._partial_bytes
            self._counters.partial_bytes -= self._partial_bytes
            self._partial_bytes = 0
            # The time in which the handler does not read is not the peer's: it begins to count afterwards.
            self._partial_since = math.inf
        for command in commands:
            if command.flag & FLAG_RESPONSE:
                commands = self._take_answers(commands)
                break
        if commands:
            self._counters.requests += len(commands)
            self.has_asked = True
        return commands

    def _take_all(self, requests: list[RemotingCommand]) -> list[RemotingCommand]:
        """Serve the requests that need no wait; return the rest."""
        return self._take(self, requests) if requests and self._take is not None else requests

    def _serve_now(self, chunk: bytes) -> bool:
        """Serve a chunk without waiting. False if something has to wait: the reader then handles the rest."""
        counters, options = self._counters, self._options
        if (
            not counters.is_reading
            or self._outbox_bytes > options.outbox_high_bytes
            or counters.handled_bytes > options.handled_bytes_max
        ):
            return False
        requests = self._take_all(self._feed(chunk))
        if requests:
            self._requests = requests
            return False
        if not self._parser.is_between_frames:
            self._count_partial(len(chunk))
        return True

    async def _handle(self, handler: Handler, requests: list[RemotingCommand]) -> None:
        counters, buffered_bytes = self._counters, self._buffered_bytes
        self._corked = True
        counters.handled_bytes += buffered_bytes
        try:
            await handler(self, requests)
        finally:
            self._corked = False
            counters.handled_bytes -= buffered_bytes
            if counters.readers:
                counters.readers.unpark_all()

    async def _wait_for_handlers(self) -> None:
        """Wait until the handlers have less in hand. Once per chunk, so a connection brings at most one beyond."""
        while self._counters.handled_bytes > self._options.handled_bytes_max and not self._closed:
            await self._counters.readers.park()
        # The time in which nothing is read is not the peer's.
        self._last_activity = trio.current_time()
        if self._partial_since != math.inf:
            self._partial_since = self._last_activity

    async def _begin_tls(self, hello: bytes) -> None:
        """Make an encrypted connection of this one, whose first bytes are `hello`. HandshakeFailed."""
        if self._tls is None:
            raise RemoteProtocolError("TLS handshake on a port that speaks plain remoting")
        self._stream = await self._tls.secure(self._stream, hello)
        self.is_encrypted = True
        self._transport = transport_for(self._stream, self._options.chunk_size_max)

    def _count_partial(self, size: int) -> None:
        """Note that `size` bytes came of which some belong to a frame that is not complete."""
        counters = self._counters
        counters.partial_bytes += size
        self._partial_bytes += size
        if self._partial_since == math.inf:
            self._partial_since = trio.current_time()
        if counters.partial_bytes > self._options.partial_bytes_max:
            raise RemoteProtocolError(f"incomplete frames of all connections hold {counters.partial_bytes} bytes")

    def _take_answers(self, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """Give the answers among the commands to those that wait for them; return the requests."""
        requests = []
        for command in commands:
            if not command.flag & FLAG_RESPONSE:
                requests.append(command)
                continue
            invocation = self._invocations.get(command.opaque)
            if invocation is None or invocation.answer is not None:
                # Late, or never asked for: a peer may time its answers badly, that is no reason to hang up.
                self._counters.responses_unmatched += 1
            else:
                self._counters.responses += 1
                invocation.answer = command
                invocation.done.set()
        return requests

    def _next_opaque(self) -> int:
        while True:
            self._opaque = self._opaque + 1 if self._opaque < OPAQUE_MAX else 1
            if self._opaque not in self._invocations:
                return self._opaque

    def _broken_text(self) -> str:
        return f"connection to {self.peer[0]}:{self.peer[1]} ended: {self._cause or 'closed'} {self._detail}".rstrip()

    # Writing

    def _take_batch(self) -> bytes:
        outbox = self._outbox
        if len(outbox) == 1:
            batch = outbox[0]
            outbox.clear()
        elif self._outbox_bytes <= self._options.batch_size_max:
            batch = b"".join(outbox)
            outbox.clear()
        else:
            size, count = len(outbox[0]), 1
            while count < len(outbox) and size + len(outbox[count]) <= self._options.batch_size_max:
                size += len(outbox[count])
                count += 1
            batch = b"".join(outbox[:count]) if count > 1 else outbox[0]
            del outbox[:count]
        return batch

    def _send_outbox(self) -> None:
        """Send without a task switch if nothing is being sent; what the system does not take is left to the writer."""
        if not self._writer_waits:
            return
        batch = self._take_batch()
        taken = self._transport.send_nowait(batch)
        if taken:
            self._sent(taken)
        if taken < len(batch):
            self._partial_write = memoryview(batch)[taken:]
        if self._outbox_bytes:
            self._writer_waits.unpark()

    def _drop_outbox(self, detail: str) -> None:
        """Drop the outbox of a connection that has ended."""
        self.close("outbox full", detail)
        self._counters.outbox_bytes -= self._outbox_bytes
        self._outbox_bytes = 0
        self._outbox.clear()
        self._partial_write = None

    async def _write_forever(self) -> None:
        try:
            while True:
                if self._partial_write is None and not self._outbox:
                    await self._writer_waits.park()
                    continue
                batch = self._partial_write if self._partial_write is not None else self._take_batch()
                self._partial_write = None
                self._writing_since = trio.current_time()
                await self._transport.send_all(batch)
                self._writing_since = math.inf
                self._sent(len(batch))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close("connection lost", str(error))

    def _sent(self, size: int) -> None:
        counters = self._counters
        counters.bytes_sent += size
        counters.sends += 1
        if self._outbox_bytes:  # else it was dropped while this was sent
            self._outbox_bytes -= size
            counters.outbox_bytes -= size
        self._last_activity = trio.current_time()
        if self._drained:
            self._drained.unpark_all()


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in a group that is not itself a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
