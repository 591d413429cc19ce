"""The gRPC server: accepts connections, limits their number, closes idle and unresponsive ones, and passes their calls
to a service."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

import trio

from ha.poller import Poller
from ha.remoting import PortTls
from ha.remoting.open_connections import ConnectionCounts, OpenConnections
from ha.transport import peer_of

from .connection import EndCause, GrpcConnection, GrpcOptions, GrpcStatistics, RequestBytes, Service

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
"""Interval of the checks in `_watch`, in seconds: a timeout may take effect this much later."""
_EXPECTED = frozenset(
    {EndCause.END_OF_STREAM, EndCause.IDLE, EndCause.CANCELLED, EndCause.CONNECTION_LOST, EndCause.NOT_SERVING}
)
"""Causes that are logged at debug level; the others are warnings."""


class GrpcServer:
    """Serves the connections of any number of listeners with one service."""

    def __init__(
        self,
        service: Service,
        options: GrpcOptions | None = None,
        *,
        tls: PortTls | None = None,
        poller: Poller | None = None,
        is_serving: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_serving`: whether connections are accepted and kept. While it returns False, new ones are closed at once
        and open ones within WATCH_INTERVAL_S, so that clients connect to another address."""
        self._service = service
        self._options = options = GrpcOptions() if options is None else options
        self._tls = tls
        self._poller = poller
        self._is_serving = is_serving
        self._accept_scope = trio.CancelScope()
        self._opened = self._refused = self._calls = 0
        self._ended: Counter[str] = Counter()
        self._open: OpenConnections[GrpcConnection] = OpenConnections(
            logger,
            ConnectionCounts(
                total_max=options.connections_max,
                per_host_max=options.connections_per_host_max,
                evictable_after_s=options.open_timeout_s,
                total_name="connections_max",
                per_host_name="connections_per_host_max",
            ),
            refused="grpc.connection_refused peer_host=%s limit=%s times=%d",
            ended="grpc.connection_closed peer=%s:%d cause=%r detail=%r times=%d",
        )
        self.connections = self._open.all
        """The open connections. For reading only."""
        bytes_max = max(options.request_total_bytes_max, 2 * options.message_size_max)
        self._total_bytes = RequestBytes(bytes_max, self.connections)

    def statistics(self) -> GrpcStatistics:
        """Returns a snapshot of the server's counters."""
        return GrpcStatistics(
            connections=len(self.connections),
            calls_in_flight=sum(len(each.protocol.streams) for each in self.connections),
            opened=self._opened,
            refused=self._refused,
            calls=self._calls + sum(each.call_count for each in self.connections),
            ended=dict(self._ended),
        )

    async def serve(
        self,
        listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> NoReturn:
        """Accepts and serves until cancelled; then closes the listeners and every connection."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._accept, list(listeners), nursery)
            task_status.started()
            await trio.sleep_forever()
        raise AssertionError("a server ends by cancellation only")

    def stop(self) -> None:
        """Stops accepting connections, and sends GOAWAY on the open ones: further calls are refused, and calls in
        progress may finish."""
        self._accept_scope.cancel()
        for connection in self.connections:
            connection.protocol.go_away()
            connection.flush_soon()

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serves one connection until it ends, and closes the stream; closes it at once if `is_serving` returns false,
        or a limit is reached."""
        host = peer_of(stream)[0]
        if not self._is_serving() or not self._open.make_room(host):
            self._refused += 1
            await trio.aclose_forcefully(stream)
            return
        connection = GrpcConnection(
            stream,
            self._service,
            self._options,
            tls=self._tls,
            poller=self._poller,
            total_bytes=self._total_bytes,
        )
        self._opened += 1
        try:
            with self._open.added(connection):
                await connection.run()
        finally:
            self._calls += connection.call_count
            cause = connection.cause or EndCause.CANCELLED
            self._ended[str(cause)] += 1
            self._open.log_end(connection, str(cause), connection.cause_detail, is_expected=cause in _EXPECTED)

    async def _accept(self, listeners: list[trio.abc.Listener[trio.abc.Stream]], nursery: trio.Nursery) -> None:
        with self._accept_scope:
            await trio.serve_listeners(self.handle, listeners, handler_nursery=nursery)

    async def _watch(self) -> None:
        """Closes connections that exceed `idle_timeout_s`, `send_timeout_s` or `ping_timeout_s`, and all connections
        while `is_serving` returns False."""
        while True:
            await trio.sleep(WATCH_INTERVAL_S)
            now, options = trio.current_time(), self._options
            for connection in list(self.connections):
                if not self._is_serving():
                    connection.close(EndCause.NOT_SERVING)
                elif connection.protocol.streams:
                    connection.busy_at = now
                elif now - connection.busy_at > options.idle_timeout_s:
                    connection.protocol.go_away()
                    connection.flush_soon()
                    connection.close(EndCause.IDLE)
                if not connection.is_sending:
                    connection.sent_at = now
                    self._check_peer(connection, now)
                protocol = connection.protocol
                if not protocol.pending_bytes or protocol.allowed_bytes > connection.allowed_bytes:
                    connection.allowed_at, connection.allowed_bytes = now, protocol.allowed_bytes
                if now - min(connection.sent_at, connection.allowed_at) > options.send_timeout_s:
                    connection.close(EndCause.PEER_DOES_NOT_READ)

    def _check_peer(self, connection: GrpcConnection, now: float) -> None:
        """Sends a PING to a peer that has been silent for `ping_after_s` during a call; closes the connection if
        nothing arrives within `ping_timeout_s` after it."""
        if not connection.protocol.streams:
            return
        if connection.pinged_at is not None:
            if now - connection.pinged_at > self._options.ping_timeout_s:
                connection.close(EndCause.PING_NOT_ANSWERED)
        elif now - connection.received_at > self._options.ping_after_s:
            connection.pinged_at = now
            connection.protocol.ping()
            connection.flush_soon()
