"""The state of one remoting connection, without I/O: frames received, frames to be sent, and waiters for responses.

A driver owns the stream and the tasks. It passes each chunk to `receive`, sends the batches that `data_to_send`
returns, and passes the number of bytes that the kernel accepted to `data_sent`. It also passes the time: `now` is in
seconds of one monotonic clock. There are two drivers: ha/remoting/connection.py on Trio, for servers and for the
connections that they open, and ha/client/connection.py on anyio, for the SDK.

    OPENING    frames are queued; the stream isn't there yet
    OPEN       frames move both ways
    CLOSING    `close` was called: frames are dropped in both directions, and the driver stops its tasks
    CLOSED     the stream is closed and there are no waiters
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import Generic, TypeVar

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.remoting import FLAG_RESPONSE, RemotingCommand, RemotingParser

OPAQUE_MAX = 0x7FFFFFFF

Waiter = TypeVar("Waiter")
"""Type of the object through which a driver passes a response to the task that waits for it."""


class ConnectionState(Enum):
    """States of a connection; the module's docstring describes them."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


TRANSITIONS: dict[ConnectionState, frozenset[ConnectionState]] = {
    ConnectionState.OPENING: frozenset({ConnectionState.OPEN, ConnectionState.CLOSING}),
    ConnectionState.OPEN: frozenset({ConnectionState.CLOSING}),
    ConnectionState.CLOSING: frozenset({ConnectionState.CLOSED}),
    ConnectionState.CLOSED: frozenset(),
}


class CloseCause(StrEnum):
    """Why a connection ended, as logged and counted; labels of a metric."""

    END_OF_STREAM = "end of stream"
    CONNECTION_LOST = "connection lost"
    CANCELLED = "cancelled"
    IDLE = "idle"
    INCOMPLETE_FRAME = "incomplete frame"
    PEER_DOES_NOT_READ = "peer does not read"
    NO_RESPONSE = "no answer"
    OUTBOX_FULL = "outbox full"
    EVICTED = "evicted"
    BROKER_SILENT = "broker silent"
    PROTOCOL_ERROR = "protocol error"
    HANDLER_TOO_SLOW = "handler too slow"
    TLS_HANDSHAKE_FAILED = "TLS handshake failed"
    FAILED_AUTHENTICATIONS = "failed authentications"


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one connection, and of all connections of its server or client together. Sizes in bytes, times in
    seconds."""

    frame_size_max: int = 16_777_216
    """Maximum size of a received frame, including its length field (RocketMQ:
    com.rocketmq.remoting.frameMaxLength)."""

    header_size_max: int = 262_144
    """Maximum size of the header of a received frame. A message's properties take at most 196,602 bytes: 32,767
    characters, each written as six characters of JSON."""

    batch_size_max: int = 262_144
    """Maximum size in bytes of a batch of queued frames that are sent together; a longer frame is sent by itself."""

    outbox_bytes_max: int = 67_108_864
    """Maximum bytes waiting to be sent on one connection; a connection with more is closed at once."""

    outbox_total_bytes_max: int = 536_870_912
    """Maximum bytes waiting to be sent on all connections of a server or client; beyond it, the connection with the
    largest outbox is closed."""

    partial_bytes_max: int = 268_435_456
    """Maximum bytes of incomplete frames on all connections of a server or client; beyond it, the connection with the
    longest incomplete frame is closed."""

    idle_timeout_s: float = 120.0
    """Time without a byte in either direction after which a connection is closed (RocketMQ:
    serverChannelMaxIdleTimeSeconds)."""

    frame_timeout_s: float = 30.0
    """Maximum time from the first byte of a received frame to its last; otherwise the connection is closed."""

    send_timeout_s: float = 30.0
    """Time within which the kernel must accept one batch (`batch_size_max`, or one longer frame); otherwise the
    connection is closed."""


class Totals(msgspec.Struct):
    """Traffic counters and buffered bytes of all connections of one server or client. Sizes in bytes."""

    requests: int = 0
    responses: int = 0
    responses_unmatched: int = 0
    partial_bytes: int = 0
    outbox_bytes: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    sends: int = 0
    """Number of batches, and of parts of batches, that the kernel has accepted."""


class RemotingProtocol(Generic[Waiter]):
    """Protocol state of one connection. Not thread-safe."""

    def __init__(
        self,
        limits: ConnectionLimits,
        now: float,
        *,
        totals: Totals | None = None,
        parser_type: type[RemotingParser] = RemotingParser,
    ) -> None:
        self._limits = limits
        self._totals = Totals() if totals is None else totals
        self._parser = parser_type(frame_size_max=limits.frame_size_max, header_size_max=limits.header_size_max)
        self.state = ConnectionState.OPENING
        self.is_closed = False
        """Whether the state is CLOSING or CLOSED; stored because every send reads it."""
        self.cause = ""
        """Why the connection ended: a `CloseCause`, or the client driver's own text; "" while it is open."""
        self.cause_detail = ""
        """Details of `cause`, for people; "" if there are none."""
        self._pending: dict[int, Waiter] = {}
        self._last_opaque = 0
        self._outbox: list[bytes] = []
        self.outbox_bytes = 0
        """Number of bytes that were queued and not accepted by the kernel yet."""
        self._sending_since = math.inf
        self.received_at = now
        """Time at which the last chunk was received, on the driver's clock."""
        self._active_at = now
        self.has_requested = False
        """Whether the peer has sent a request."""
        self.buffered_bytes = 0
        """Size in bytes of the last chunk that completed a frame, plus `partial_bytes` before this chunk."""
        self.is_mid_frame = False
        """Whether the last chunk ended within a frame; if so, call `count_partial` once the chunk has been handled."""
        self.partial_bytes = 0
        """Number of buffered bytes of an incomplete frame, as counted by `count_partial`; may be too high by less than
        one chunk."""
        self._partial_since = math.inf
        self._is_paused = False
        """Whether the timeouts for receiving are stopped."""

    # State

    def open(self) -> None:
        """Records that the stream is open. Does nothing if the connection was closed meanwhile."""
        if not self.is_closed:
            self._become(ConnectionState.OPEN)

    def close(self, cause: str, detail: str = "") -> None:
        """Drops the outbox, and frames queued or received from now on. The first call's cause is kept."""
        if self.is_closed:
            return
        self._become(ConnectionState.CLOSING)
        self.is_closed = True
        self.cause, self.cause_detail = cause, detail
        self._totals.outbox_bytes -= self.outbox_bytes
        self.outbox_bytes = 0
        self._outbox.clear()
        self._totals.partial_bytes -= self.partial_bytes
        self.partial_bytes = 0

    def finish(self) -> list[Waiter]:
        """Records that the stream is closed, after `close`. Returns the waiters of requests that will not be
        answered."""
        self._become(ConnectionState.CLOSED)
        pending, self._pending = self._pending, {}
        return list(pending.values())

    def _become(self, state: ConnectionState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
        self.state = state

    # Received

    def receive(
        self, chunk: bytes, now: float
    ) -> tuple[list[RemotingCommand], Sequence[tuple[Waiter, RemotingCommand]]]:
        """Returns the requests that `chunk` completes, and the responses, each with its waiter. Both are empty on a
        closed connection.

        Raises RemoteProtocolError if the peer breaks the protocol; the driver must then close the connection.
        """
        if self.is_closed:
            return [], ()
        totals = self._totals
        totals.bytes_received += len(chunk)
        self.received_at = self._active_at = now
        parser = self._parser
        frame_count = parser.frame_count
        requests = parser.feed(chunk)
        self.is_mid_frame = not parser.is_between_frames
        responses: Sequence[tuple[Waiter, RemotingCommand]] = ()
        if requests:
            self.buffered_bytes = len(chunk) + self.partial_bytes
            totals.partial_bytes -= self.partial_bytes
            self.partial_bytes = 0
            self._partial_since = math.inf
            request_count = parser.frame_count - frame_count
            for command in requests:
                if command.flag & FLAG_RESPONSE:
                    command_count = len(requests)
                    requests, responses = self._match(requests)
                    request_count -= command_count - len(requests)
                    break
            if requests:
                totals.requests += request_count
                self.has_requested = True
        return requests, responses

    def _match(
        self, commands: list[RemotingCommand]
    ) -> tuple[list[RemotingCommand], list[tuple[Waiter, RemotingCommand]]]:
        """Splits `commands` into requests and responses. Late and unknown responses are counted and dropped."""
        requests: list[RemotingCommand] = []
        responses: list[tuple[Waiter, RemotingCommand]] = []
        for command in commands:
            if not command.flag & FLAG_RESPONSE:
                requests.append(command)
            elif (waiter := self._pending.pop(command.opaque, None)) is not None:
                responses.append((waiter, command))
            else:
                self._totals.responses_unmatched += 1
        self._totals.responses += len(responses)
        return requests, responses

    def count_partial(self, size: int, now: float) -> None:
        """Counts a chunk of `size` bytes that ended within a frame, and starts the frame's timeout unless it runs
        already.

        Called by the Trio driver before it reads again; the SDK's driver does not use this limit and timeout. Raises
        RemoteProtocolError if the incomplete frames of all connections exceed `partial_bytes_max`.
        """
        if self.is_closed:
            return
        totals = self._totals
        totals.partial_bytes += size
        self.partial_bytes += size
        self._partial_since = min(self._partial_since, now)
        if totals.partial_bytes > self._limits.partial_bytes_max:
            raise RemoteProtocolError(f"incomplete frames of all connections hold {totals.partial_bytes} bytes")

    # Waiting for responses

    def next_opaque(self) -> int:
        """Returns the opaque for the next request: the previous one plus 1, or 1 after OPAQUE_MAX; skips those in
        use."""
        opaque = self._last_opaque
        while True:
            opaque = opaque + 1 if opaque < OPAQUE_MAX else 1
            if opaque not in self._pending:
                self._last_opaque = opaque
                return opaque

    def expect(self, opaque: int, waiter: Waiter) -> None:
        """Registers the waiter for the response to request `opaque`."""
        self._pending[opaque] = waiter

    def forget(self, opaque: int) -> Waiter | None:
        """Removes and returns the waiter for the response to request `opaque`; None if there is none. A response that
        still arrives is dropped."""
        return self._pending.pop(opaque, None)

    def is_pending(self, opaque: int) -> bool:
        """Returns whether the response to request `opaque` is still awaited."""
        return opaque in self._pending

    # Sent

    def queue(self, frame: bytes) -> bool:
        """Adds a frame to the outbox; drops it if the connection is closed.

        Returns False if the driver has to act: the connection was closed, is closed now because its outbox exceeds its
        limit, or all outboxes together exceed theirs.
        """
        if self.is_closed:
            return False
        totals, limits, size = self._totals, self._limits, len(frame)
        self._outbox.append(frame)
        self.outbox_bytes += size
        totals.outbox_bytes += size
        if self.outbox_bytes > limits.outbox_bytes_max:
            self.close(CloseCause.OUTBOX_FULL, f"{self.outbox_bytes} bytes wait")
            return False
        return totals.outbox_bytes <= limits.outbox_total_bytes_max

    def data_to_send(self) -> bytes:
        """Removes and returns the next batch of the outbox; b"" if there is none. The driver must send all of it before
        the next one."""
        outbox, size_max = self._outbox, self._limits.batch_size_max
        if not outbox:
            return b""
        if len(outbox) == 1:
            batch = outbox[0]
            outbox.clear()
        elif self.outbox_bytes <= size_max:
            batch = b"".join(outbox)
            outbox.clear()
        else:
            size, count = len(outbox[0]), 1
            while count < len(outbox) and size + len(outbox[count]) <= size_max:
                size += len(outbox[count])
                count += 1
            batch = b"".join(outbox[:count]) if count > 1 else outbox[0]
            del outbox[:count]
        return batch

    def start_send_timeout(self, now: float) -> None:
        """Starts the timeout for the kernel to accept a batch, or the rest of one. `data_sent` ends it."""
        self._sending_since = now

    def data_sent(self, size: int, now: float) -> None:
        """Records that the kernel has accepted `size` bytes, and ends the timeout of `start_send_timeout`."""
        totals = self._totals
        totals.bytes_sent += size
        totals.sends += 1
        if not self.is_closed:  # else they were subtracted when the outbox was dropped
            self.outbox_bytes -= size
            totals.outbox_bytes -= size
        self._active_at = now
        self._sending_since = math.inf

    # Timeouts

    @property
    def deadline(self) -> float:
        """The time from which `overdue` returns a cause if nothing is received or sent until then; math.inf if no
        timeout is running."""
        limits = self._limits
        sent_by = self._sending_since + limits.send_timeout_s
        if self._is_paused:
            return sent_by
        return min(sent_by, self._active_at + limits.idle_timeout_s, self._partial_since + limits.frame_timeout_s)

    def overdue(self, now: float) -> CloseCause | None:
        """Returns the close cause for a timeout that has expired at `now`; None if none has."""
        limits = self._limits
        if now >= self._sending_since + limits.send_timeout_s:
            return CloseCause.PEER_DOES_NOT_READ
        if self._is_paused:
            return None
        if now >= self._partial_since + limits.frame_timeout_s:
            return CloseCause.INCOMPLETE_FRAME
        if now >= self._active_at + limits.idle_timeout_s:
            return CloseCause.IDLE
        return None

    def stop_timeouts(self) -> None:
        """Stops the timeouts for receiving until `restart_timeouts`, while the driver does not read."""
        self._is_paused = True

    def restart_timeouts(self, now: float) -> None:
        """Starts the timeouts for receiving again, after the driver has paused reading."""
        self._is_paused = False
        self._active_at = now
        if self._partial_since != math.inf:
            self._partial_since = now
