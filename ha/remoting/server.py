"""The remoting server: accepts connections, enforces their limits and timeouts, and passes requests to a handler.

Request codes are interpreted by the handler (ha/broker, ha/namesrv).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

import trio

from ha.poller import Poller
from ha.protocol.remoting import RemotingParser
from ha.protocol.remoting_protocol import CloseCause
from ha.transport import peer_of

from .connection import Handler, RemotingConnection, Take
from .open_connections import ConnectionCounts, OpenConnections
from .options import RemotingServerOptions
from .shared import RemotingStatistics, SharedState
from .tls import PortTls
from .watch import watch_connections

logger = logging.getLogger(__name__)

_EXPECTED_CAUSES = frozenset(
    {
        CloseCause.END_OF_STREAM,
        CloseCause.IDLE,
        CloseCause.CANCELLED,
        CloseCause.CONNECTION_LOST,
        CloseCause.FAILED_AUTHENTICATIONS,  # logged by ha/acl already
    }
)
"""Causes of closed connections that are logged at debug level; all others are warnings."""


class RemotingServer:
    """A server with one handler and any number of listeners. `serve` runs it; `handle` serves a single stream that was
    accepted elsewhere."""

    def __init__(
        self,
        handler: Handler,
        options: RemotingServerOptions | None = None,
        *,
        tls: PortTls | None = None,
        parser_type: type[RemotingParser] = RemotingParser,
        take: Take | None = None,
        poller: Poller | None = None,
    ) -> None:
        """`take` is called before `handler`, in the turns of `poller` if there is one; the poller must outlive the
        server. `parser_type` parses the requests for both.

        `tls`: how TLS handshakes are done, and whether clients without TLS are also served; None: TLS is rejected.
        """
        self._handler = handler
        self._take = take
        self._poller = poller
        self._tls = tls
        self._parser_type = parser_type
        self._options = options = RemotingServerOptions() if options is None else options
        self._accept_scope = trio.CancelScope()
        self._open: OpenConnections[RemotingConnection] = OpenConnections(
            logger,
            ConnectionCounts(
                total_max=options.connections_max,
                per_host_max=options.connections_per_host_max,
                evictable_after_s=options.evictable_after_s,
                total_name="maxConnections",
                per_host_name="maxConnectionsPerHost",
            ),
            refused="remoting.connection_refused peer_host=%s limit=%s times=%d",
            ended="remoting.connection_closed peer=%s:%d cause=%r detail=%r times=%d",
        )
        self.connections = self._open.all
        """The open connections, in the order in which they were opened. For reading only."""
        self._shared = SharedState(connections=self.connections)

    def statistics(self) -> RemotingStatistics:
        """Returns a snapshot."""
        return self._shared.statistics()

    async def serve(
        self,
        listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
        *,
        task_status: trio.TaskStatus[RemotingServer] = trio.TASK_STATUS_IGNORED,
    ) -> NoReturn:
        """Accepts and serves until cancelled; then closes the listeners and every connection.

        An error that a peer causes ends only its connection. Any other exception of a handler stops the server and
        propagates.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_connections, self.connections, self._options)
            nursery.start_soon(self._accept, list(listeners), nursery)
            task_status.started(self)
            await trio.sleep_forever()
        raise AssertionError("a server ends by cancellation only")

    async def handle(self, stream: trio.abc.Stream, *, is_own: bool = False) -> None:
        """Serves one connection until it ends, and closes the stream. `is_own`: the peer is this process, whose
        connections are never refused and do not use TLS."""
        host = peer_of(stream)[0]
        if not is_own and not self._open.make_room(host):
            self._shared.refused += 1
            await trio.aclose_forcefully(stream)
            return
        connection = RemotingConnection(
            stream,
            self._options,
            self._shared,
            tls=None if is_own else self._tls,
            parser_type=self._parser_type,
            take=self._take,
            poller=self._poller,
            is_own=is_own,
        )
        self._shared.opened += 1
        try:
            with self._open.added(connection):
                await connection.run(self._handler)
        finally:
            cause = connection.protocol.cause
            detail, is_expected = connection.protocol.cause_detail, cause in _EXPECTED_CAUSES
            self._open.log_end(connection, str(cause), detail, is_expected=is_expected)

    def stop_reading(self) -> None:
        """Stops accepting connections and reading requests; requests read before are still answered."""
        self._accept_scope.cancel()
        self._shared.is_reading = False

    async def drain(self, grace_s: float) -> None:
        """Calls `stop_reading`, then waits until queued responses are sent, for at most `grace_s` seconds."""
        self.stop_reading()
        with trio.move_on_after(grace_s):
            for connection in list(self.connections):
                await connection.flushed()

    async def _accept(self, listeners: list[trio.abc.Listener[trio.abc.Stream]], nursery: trio.Nursery) -> None:
        with self._accept_scope:
            await trio.serve_listeners(self.handle, listeners, handler_nursery=nursery)
