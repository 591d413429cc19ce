"""One remoting connection on Trio, opened by either side: drives a `RemotingProtocol` over a stream that it owns.

Each connection has two tasks. The reader receives chunks of bytes, and passes all requests of a chunk to the handler in
one call. The writer sends the frames that can't be sent without waiting. Request codes are interpreted by the handler.

`take` serves the requests that can be served without waiting, and the handler serves the others. With a poller
(ha/poller.py), chunks are received and passed to `take` in the poller's turns, and frames that are queued during a turn
are sent when it ends.

Frames that a handler queues are sent together by the reader when the handler returns, or by the writer if the handler
has called `flush` and waits. Other frames are sent by `send_now`, or by the writer, which is woken once for any number
of queued frames.

At most one chunk and one incomplete frame are buffered for reading. The reader pauses above `outbox_high_bytes`, and
the connection is closed above `outbox_bytes_max`. Timeouts are checked by the connection's owner (watch.py).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from operator import attrgetter

import msgspec
import trio

from ha.errors import HandshakeFailed, LocalProtocolError, ProtocolError, RemoteProtocolError
from ha.poller import Poller
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import (
    FLAG_ONEWAY,
    SERIALIZE_JSON,
    CommandTemplate,
    RemotingCommand,
    RemotingParser,
    encode_command,
)
from ha.protocol.remoting_protocol import CloseCause, ConnectionState, RemotingProtocol
from ha.transport import EagerWriter, peer_of, transport_for

from .options import ConnectionOptions
from .shared import SharedState
from .tls import PortTls, secured

logger = logging.getLogger(__name__)

WITHOUT_TLS = "that speaks plain remoting"

_SUCCESS = CommandTemplate(
    RemotingCommand(RequestCode.SEND_MESSAGE, 2_000_000_001).reply(ResponseCode.SUCCESS), [(b"2000000001", b"%d")]
)
"""Encodes successful responses without fields, remark or body, given their opaques."""

Take = Callable[["RemotingConnection", list[RemotingCommand]], list[RemotingCommand]]
"""Called once per chunk with every complete request in it, in order. Serves the requests that can be served without
waiting, and returns the others; the reader passes them to the `Handler`."""

Handler = Callable[["RemotingConnection", list[RemotingCommand]], Awaitable[None]]
"""Handles the requests of one chunk, in their order. It answers each of them with `connection.reply`, before or after
it returns. The next chunk is read when it returns. If it raises RemoteProtocolError, the connection ends; to reject
only one request, call `connection.reply_error`, or wrap a function that handles a single request with `each_request`.
"""


class _Invocation:
    """A request that this side has sent. When `done` is set, `response` is the peer's response, or None if the
    connection has ended."""

    __slots__ = ("done", "response")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.response: RemotingCommand | None = None


class RemotingConnection:
    """A remoting connection, which is served while `run` runs. Methods that are not async may be called from any Trio
    task."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        options: ConnectionOptions,
        shared: SharedState | None = None,
        *,
        tls: PortTls | None = None,
        parser_type: type[RemotingParser] = RemotingParser,
        take: Take | None = None,
        poller: Poller | None = None,
        is_own: bool = False,
    ) -> None:
        """`tls`: how TLS handshakes are done, and whether peers without TLS are also served; None: TLS is rejected.

        `take` is called before the handler, in the turns of `poller` if there is one.
        """
        self.peer: tuple[str, int] = peer_of(stream)
        """The other side's host and port."""
        self.is_own = is_own
        """Whether the peer is this process."""
        self.is_encrypted = False
        """Whether the connection uses TLS."""
        self.opened_at = trio.current_time()
        """Time at which the connection was opened (Trio's clock)."""
        self.in_flight = 0
        """Number of requests that a handler has accepted but not answered yet; maintained by handlers that limit it."""
        self._stream = stream
        self._tls = tls
        self._take = take
        self._poller = poller
        self._options = options
        self._shared = SharedState() if shared is None else shared
        self.protocol = RemotingProtocol[_Invocation](
            options, self.opened_at, totals=self._shared, parser_type=parser_type
        )
        """The state of the connection. For reading only."""
        self._transport = transport_for(stream, options.chunk_size_max, poller)
        self._writer = EagerWriter(self._transport)
        self._scope = trio.CancelScope()
        self._reader: trio.lowlevel.Task | None = None
        self._untaken: list[RemotingCommand] | None = None
        """Requests of the last chunk that the reader must pass to the handler; None if the chunk was not parsed."""
        self._is_corked = False
        """Whether the handler is running. The reader sends the frames that the handler queues when it returns."""
        self._is_flush_due = False
        self._drained = trio.lowlevel.ParkingLot()
        self._close_callbacks: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<RemotingConnection {self.peer[0]}:{self.peer[1]} {self.protocol.state.value}>"

    # For handlers and callers

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended or is ending; frames are dropped then."""
        return self.protocol.is_closed

    @property
    def is_unused(self) -> bool:
        """Whether the connection is open and the peer has sent no request yet."""
        return not self.protocol.has_requested and not self.is_closed

    def evict(self) -> None:
        """Closes the connection to make room for another one."""
        self.close(CloseCause.EVICTED)

    @property
    def outbox_bytes(self) -> int:
        """Number of queued bytes that the kernel has not accepted yet."""
        return self.protocol.outbox_bytes

    @property
    def partial_bytes(self) -> int:
        """Number of received bytes that belong to an incomplete frame; may be too high by less than one chunk."""
        return self.protocol.partial_bytes

    @property
    def received_at(self) -> float:
        """Time at which the last bytes were received (Trio's clock)."""
        return self.protocol.received_at

    def send_soon(self, frame: bytes) -> None:
        """Queues encoded frames. Those that the handler queues are sent together when it returns.

        Does nothing on a closed connection, because a connection can close at any time. If the frames make the outbox
        exceed `outbox_bytes_max`, the connection is closed. If they make all outboxes together exceed
        `outbox_total_bytes_max`, the connection with the most bytes is closed.
        """
        if (self.protocol.queue(frame) or self._enforce_outbox_limits()) and self._may_send_here:
            if self._poller is not None and self._poller.is_in_turn:
                self._flush_at_turn_end(self._poller)
            else:
                self._writer.wake()

    def send_now(self, frame: bytes) -> None:
        """Queues frames as `send_soon` does, and sends all queued frames at once, without a task switch, as far as the
        kernel accepts them.

        Use it for a frame that is likely to be the only one: sending two together is cheaper. If a turn of the poller
        is in progress, frames are sent when it ends; if the handler calls this method, when the handler returns; if the
        writer is sending, after that.
        """
        if (self.protocol.queue(frame) or self._enforce_outbox_limits()) and self._may_send_here:
            if self._poller is not None and self._poller.is_in_turn:
                self._flush_at_turn_end(self._poller)
            else:
                self._flush_now()

    def reply(self, request: RemotingCommand, response: RemotingCommand) -> None:
        """Answers a request, and all requests that were merged into it (`opaques`). Does nothing for a oneway request.
        If `response` exceeds the frame size, answers with SYSTEM_ERROR."""
        if request.flag & FLAG_ONEWAY:
            return
        self._reply(request, response)
        for opaque in request.opaques[1:]:
            self._reply(request, msgspec.structs.replace(response, opaque=opaque))

    def _reply(self, request: RemotingCommand, response: RemotingCommand) -> None:
        try:
            frame = encode_command(response)
        except LocalProtocolError as error:
            # A response that exceeds the frame size, such as a list of very many topics, fails only this request.
            logger.error("remoting.reply_failed peer=%s:%d code=%d reason=%r", *self.peer, request.code, str(error))
            frame = encode_command(request.reply(ResponseCode.SYSTEM_ERROR, f"the answer can't be sent: {error}"))
        self.send_soon(frame)

    def reply_success(self, request: RemotingCommand) -> None:
        """Answers a request as `reply` does, with SUCCESS and without fields, remark or body."""
        if request.serialize_type != SERIALIZE_JSON:
            self.reply(request, request.reply(ResponseCode.SUCCESS))
        elif not request.flag & FLAG_ONEWAY:
            self.send_soon(_SUCCESS.encode_each(request.opaques))

    def reply_error(self, request: RemotingCommand, error: ProtocolError) -> None:
        """Answers a malformed request: SYSTEM_ERROR with the reason, as in RocketMQ."""
        self.reply(request, request.reply(ResponseCode.SYSTEM_ERROR, str(error)))

    def flush(self) -> None:
        """Wakes the writer to send the frames that the running handler has queued. A handler calls it before a wait."""
        if self.protocol.outbox_bytes:
            self._writer.wake()

    async def flushed(self, bytes_left_max: int = 0) -> None:
        """Waits until at most `bytes_left_max` bytes are left to send, or the connection has ended."""
        self.flush()
        while self.protocol.outbox_bytes > bytes_left_max and not self.protocol.is_closed:
            await self._drained.park()

    async def is_ready(self) -> bool:
        """Returns whether the connection is open. If more than `outbox_high_bytes` bytes are queued, first waits until
        at most half as many are.

        For a handler between two requests whose responses may be long. A checkpoint only if it waits.
        """
        if self.protocol.outbox_bytes > self._options.outbox_high_bytes:
            await self.flushed(self._options.outbox_high_bytes // 2)
        return not self.protocol.is_closed

    def send_oneway(self, command: RemotingCommand) -> None:
        """Sends a copy of `command`, with a new opaque, as a oneway request; drops one that exceeds the frame size."""
        opaque = self.protocol.next_opaque()
        try:
            frame = encode_command(msgspec.structs.replace(command, opaque=opaque, flag=FLAG_ONEWAY))
        except LocalProtocolError as error:
            logger.error("remoting.request_failed peer=%s:%d code=%d reason=%r", *self.peer, command.code, str(error))
        else:
            self.send_soon(frame)

    async def invoke(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        """Sends a copy of `command`, with a new opaque, and returns the response.

        Raises LocalProtocolError if the request exceeds the frame size, trio.TooSlowError after `timeout_s`, and
        trio.BrokenResourceError if the connection has ended or ends first. The timeout also closes the connection if
        the peer has sent nothing at all in the meantime. After a timeout or cancellation, a late response is dropped.
        """
        protocol = self.protocol
        if protocol.is_closed:
            raise self._broken()
        opaque = protocol.next_opaque()
        frame = encode_command(msgspec.structs.replace(command, opaque=opaque))
        invocation = _Invocation()
        protocol.expect(opaque, invocation)
        sent_at = trio.current_time()
        try:
            with trio.fail_after(timeout_s):
                self.send_soon(frame)
                self.flush()
                await invocation.done.wait()
        except trio.TooSlowError:
            if protocol.received_at <= sent_at:
                self.close(CloseCause.NO_RESPONSE, f"code {command.code} waited {timeout_s:g} s, nothing received")
            raise
        finally:
            protocol.forget(opaque)
        if invocation.response is None:
            raise self._broken()
        return invocation.response

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the connection has ended, or immediately if it already has. `callback` must not
        raise."""
        if self.protocol.state is ConnectionState.CLOSED:
            callback()
        else:
            self._close_callbacks.append(callback)

    def close(self, cause: CloseCause, detail: str = "") -> None:
        """Ends the connection by cancelling its tasks. Only the cause of the first call is logged and counted."""
        self.protocol.close(cause, detail)
        self._scope.cancel()

    async def run(self, handler: Handler) -> None:
        """Serves the connection until it ends; then ends pending invocations, calls the `on_close` callbacks, and
        closes the stream.

        Returns when the peer has disconnected or violated the protocol, or after `close`. If the handler raises
        RemoteProtocolError, TooSlowError or one of Trio's broken and closed errors, only the connection ends; any other
        exception propagates after the same clean-up.
        """
        self._reader = trio.lowlevel.current_task()
        try:
            with self._scope:
                self.protocol.open()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_forever)
                    try:
                        await self._read_until_end(handler)
                    except* HandshakeFailed as group:
                        self.close(CloseCause.TLS_HANDSHAKE_FAILED, _first_leaf(group).reason)  # type: ignore[attr-defined]
                    except* RemoteProtocolError as group:
                        self.close(CloseCause.PROTOCOL_ERROR, str(_first_leaf(group)))
                    except* trio.TooSlowError:
                        self.close(CloseCause.HANDLER_TOO_SLOW)
                    except* (trio.BrokenResourceError, trio.ClosedResourceError) as group:
                        self.close(CloseCause.CONNECTION_LOST, str(_first_leaf(group)))
        finally:
            self.close(CloseCause.CANCELLED)
            for invocation in self.protocol.finish():
                invocation.done.set()
            self._drained.unpark_all()
            for callback in self._close_callbacks:
                callback()
            self._close_callbacks.clear()
            closed, cause = self._shared.closed, self.protocol.cause
            closed[cause] = closed.get(cause, 0) + 1
            await trio.aclose_forcefully(self._stream)

    # Reading

    async def _read_until_end(self, handler: Handler) -> None:
        shared, protocol = self._shared, self.protocol
        chunk = await self._receive_first()
        if chunk and self._serve_now(chunk):
            chunk = await self._transport.receive(self._serve_now)
        receive = self._transport.receive
        while chunk:
            requests, self._untaken = self._untaken, None
            if requests is None:
                if not shared.is_reading:
                    await trio.sleep_forever()
                if protocol.outbox_bytes > self._options.outbox_high_bytes:
                    protocol.stop_timeouts()
                    await self.is_ready()
                    protocol.restart_timeouts(trio.current_time())
                requests = self._receive_and_take(chunk)
            if requests:
                await self._handle(handler, requests)
                self._send_batch()
                await self.is_ready()
            if protocol.is_mid_frame:
                self._count_partial(len(chunk))
            if shared.handled_bytes > self._options.handled_bytes_max:
                await self._wait_for_handlers()
            chunk = await receive(self._serve_now)
        self.close(CloseCause.END_OF_STREAM)

    async def _receive_first(self) -> bytes:
        """Returns the first chunk, after the TLS handshake if the peer begins one. Raises the errors of `secured`."""
        chunk = await self._transport.receive()
        stream = await secured(self._stream, chunk, self._tls, without_tls=WITHOUT_TLS)
        if stream is not None:
            self._stream, self.is_encrypted = stream, True
            self._transport = self._writer.transport = transport_for(stream, self._options.chunk_size_max)
            chunk = await self._transport.receive()
        return chunk

    def _receive_and_take(self, chunk: bytes) -> list[RemotingCommand]:
        """Delivers the responses in a chunk, serves the requests that `take` can serve without waiting, and returns the
        others."""
        requests, responses = self.protocol.receive(chunk, trio.current_time())
        for invocation, response in responses:
            invocation.response = response
            invocation.done.set()
        return self._take(self, requests) if requests and self._take is not None else requests

    def _serve_now(self, chunk: bytes) -> bool:
        """Serves a chunk without waiting, and returns whether it served all of it. If not, the reader serves the
        rest."""
        shared, options, protocol = self._shared, self._options, self.protocol
        if (
            not shared.is_reading
            or protocol.outbox_bytes > options.outbox_high_bytes
            or shared.handled_bytes > options.handled_bytes_max
        ):
            return False
        requests = self._receive_and_take(chunk)
        if requests:
            self._untaken = requests
            return False
        if protocol.is_mid_frame:
            self._count_partial(len(chunk))
        return True

    def _count_partial(self, size: int) -> None:
        """Counts a chunk that ended within a frame. If the incomplete frames of all connections exceed their limit, the
        connection with the longest is closed. Raises RemoteProtocolError if that is this connection.
        """
        try:
            self.protocol.count_partial(size, trio.current_time())
        except RemoteProtocolError as error:
            longest = max(self._shared.connections, key=attrgetter("partial_bytes"), default=self)
            if longest.partial_bytes <= self.partial_bytes:
                raise
            longest.close(CloseCause.PROTOCOL_ERROR, str(error))

    async def _handle(self, handler: Handler, requests: list[RemotingCommand]) -> None:
        shared, size = self._shared, self.protocol.buffered_bytes
        self._is_corked = True
        shared.handled_bytes += size
        try:
            await handler(self, requests)
        finally:
            self._is_corked = False
            shared.handled_bytes -= size
            if shared.paused_readers:
                shared.paused_readers.unpark_all()

    async def _wait_for_handlers(self) -> None:
        """Waits until handlers hold at most `handled_bytes_max` bytes of requests. This is checked once per chunk, so
        each connection can exceed the limit by at most one chunk."""
        self.protocol.stop_timeouts()
        while self._shared.handled_bytes > self._options.handled_bytes_max and not self.protocol.is_closed:
            await self._shared.paused_readers.park()
        self.protocol.restart_timeouts(trio.current_time())

    # Writing

    @property
    def _may_send_here(self) -> bool:
        """Whether the calling task may send: the writer is idle, and the caller is not the handler, whose frames the
        reader sends."""
        return self._writer.is_idle and not (self._is_corked and trio.lowlevel.current_task() is self._reader)

    def _enforce_outbox_limits(self) -> bool:
        """Called if `protocol.queue` returned False. Returns whether this connection is still open.

        If `queue` has not closed it, the outboxes of all connections together exceed their limit; then the connection
        with the most bytes in its outbox is closed.
        """
        protocol, shared = self.protocol, self._shared
        if not protocol.is_closed:
            fullest = max(shared.connections, key=attrgetter("outbox_bytes"), default=self)
            detail = f"{fullest.outbox_bytes} of the {shared.outbox_bytes} bytes that wait in all"
            fullest.close(CloseCause.OUTBOX_FULL, detail)
        if protocol.is_closed:
            self._scope.cancel()
        return not protocol.is_closed

    def _flush_at_turn_end(self, poller: Poller) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            poller.at_turn_end(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_due = False
        try:
            self._send_batch()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close(CloseCause.CONNECTION_LOST, str(error))

    def _send_batch(self) -> None:
        """Sends a batch without a task switch, unless the writer is sending; leaves the rest to the writer."""
        protocol, writer = self.protocol, self._writer
        if writer.is_parked and (batch := protocol.data_to_send()):
            if size := writer.try_send(batch):
                self._note_sent(size)
            if protocol.outbox_bytes:
                writer.wake()

    async def _write_forever(self) -> None:
        try:
            while True:
                batch = self.protocol.data_to_send() or await self._writer.wait_for_work()
                if batch:
                    self.protocol.start_send_timeout(trio.current_time())
                    await self._transport.send_all(batch)
                    self._note_sent(len(batch))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close(CloseCause.CONNECTION_LOST, str(error))

    def _note_sent(self, size: int) -> None:
        self.protocol.data_sent(size, trio.current_time())
        if self._drained:
            self._drained.unpark_all()

    def _broken(self) -> trio.BrokenResourceError:
        cause = f"{self.protocol.cause} {self.protocol.cause_detail}".rstrip()
        return trio.BrokenResourceError(f"connection to {self.peer[0]}:{self.peer[1]} ended: {cause}")


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first exception in a group that is not itself a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
