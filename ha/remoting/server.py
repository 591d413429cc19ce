"""The remoting server: accepts connections, bounds their number and their time, and hands their requests to a handler.

Knows no request code: what a request means is the handler's affair (ha/broker, ha/namesrv).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import NoReturn

import msgspec
import trio

from ha.errors import AddressInUse
from ha.log_rate_limiter import LogRateLimiter
from ha.poller import Poller
from ha.protocol.remoting import RemotingParser
from ha.transport import peer_of

from .connection import RemotingConnection
from .counters import Counters
from .handlers import Handler, Take
from .options import RemotingServerOptions
from .tls import PortTls
from .watch import watch_connections

logger = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the system completes before they are accepted."""


ANYBODY = "anybody"
"""Who is refused when there is no room at all."""

QUIET_CAUSES = frozenset({"end of stream", "idle", "cancelled", "connection lost", "failed authentications"})
"""Why connections end in everyday life, and what a handler has told of already (ha/acl): logged at debug level.
Peers that break a rule are told of at warning level."""


class RemotingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a server or client has done so far. Sizes in bytes; `closed` counts connections by why they ended."""

    connections: int
    opened: int
    refused: int
    requests: int
    responses: int
    responses_unmatched: int
    bytes_received: int
    bytes_sent: int
    sends: int
    outbox_bytes: int
    partial_bytes: int
    closed: dict[str, int]


def statistics_of(counters: Counters, *, opened: int, refused: int) -> RemotingStatistics:
    """Put together what the counters of all connections know."""
    return RemotingStatistics(
        connections=len(counters.connections),
        opened=opened,
        refused=refused,
        requests=counters.requests,
        responses=counters.responses,
        responses_unmatched=counters.responses_unmatched,
        bytes_received=counters.bytes_received,
        bytes_sent=counters.bytes_sent,
        sends=counters.sends,
        outbox_bytes=counters.outbox_bytes,
        partial_bytes=counters.partial_bytes,
        closed=dict(counters.closed_by_cause),
    )


class RemotingServer:
    """One handler behind any number of listeners. `serve` runs it; `handle` serves one stream accepted elsewhere."""

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
        """`parser_type` makes of frames what `handler` is called with, unless `take` takes it: with a `poller`,
        which has to outlive the server, without waking any task."""
        self._handler = handler
        self._take = take
        self._poller = poller
        self._tls = tls
        self._parser_type = parser_type
        self._log_limiter = LogRateLimiter()
        self._options = RemotingServerOptions() if options is None else options
        self._opened = 0
        self._refused = 0
        self._refusing: set[str] = set()
        self._accept_scope = trio.CancelScope()
        self.connections: set[RemotingConnection] = set()
        """The connections that run now. For reading only."""
        self._counters = Counters(connections=self.connections)
        self._by_host: Counter[str] = Counter()

    def statistics(self) -> RemotingStatistics:
        """What the server has done so far."""
        return statistics_of(self._counters, opened=self._opened, refused=self._refused)

    async def serve(
        self,
        listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
        *,
        task_status: trio.TaskStatus[RemotingServer] = trio.TASK_STATUS_IGNORED,
    ) -> NoReturn:
        """Accept and serve until cancelled; closes the listeners and every connection then.

        A peer's misbehaviour ends its connection. Whatever else a handler raises ends the server and propagates.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_connections, self.connections, self._options)
            nursery.start_soon(self._accept, list(listeners), nursery)
            task_status.started(self)
            await trio.sleep_forever()
        raise AssertionError("a server ends by cancellation only")

    async def handle(self, stream: trio.abc.Stream, *, is_own: bool = False) -> None:
        """Serve one connection until it ends; the stream is closed then. `is_own`: the peer is this process."""
        host = peer_of(stream)[0]
        if not self._has_room(host):
            self._refused += 1
            await trio.aclose_forcefully(stream)
            return
        tls = None if is_own else self._tls
        connection = RemotingConnection(
            stream,
            self._options,
            self._counters,
            tls=tls,
            parser_type=self._parser_type,
            take=self._take,
            poller=self._poller,
            is_own=is_own,
        )
        self._opened += 1
        self.connections.add(connection)
        self._by_host[host] += 1
        try:
            await connection.run(self._handler)
        finally:
            self.connections.discard(connection)
            self._note_room(host)
            self._tell_of(connection)

    def _tell_of(self, connection: RemotingConnection) -> None:
        """Log an end. What one host makes happen again and again is a warning once a minute, with how often it was."""
        level, times, cause = logging.DEBUG, 1, connection.cause
        if cause not in QUIET_CAUSES:
            times = self._log_limiter.admit((connection.peer[0], cause), trio.current_time())
            level = logging.WARNING if times else logging.DEBUG
        detail = connection.cause_detail
        logger.log(
            level, "remoting.closed peer=%s:%d cause=%r detail=%r times=%d", *connection.peer, cause, detail, times
        )

    def _has_room(self, host: str) -> bool:
        """Make room for one more connection of `host` if need be: the oldest that has asked nothing must go."""
        options = self._options
        is_crowded = self._by_host[host] >= options.connections_per_host_max
        if not is_crowded and len(self.connections) < options.connections_max:
            return True
        latest = trio.current_time() - options.silent_s_max
        silent = [
            connection
            for connection in self.connections
            if not connection.has_asked
            and connection.opened_at <= latest
            and not connection.is_closed
            and (not is_crowded or connection.peer[0] == host)
        ]
        if not silent:
            whom = host if is_crowded else ANYBODY
            if whom not in self._refusing:
                self._refusing.add(whom)
                count = self._by_host[host] if is_crowded else len(self.connections)
                logger.warning("remoting.full connections=%d from=%s; more are refused", count, whom)
            return False
        min(silent, key=attrgetter("opened_at")).close("made way")
        return True

    def _note_room(self, host: str) -> None:
        """A connection of `host` has ended."""
        self._by_host[host] -= 1
        if not self._by_host[host]:
            del self._by_host[host]
        if not self._refusing:
            return
        if self._by_host[host] <= self._options.connections_per_host_max * 9 // 10:
            self._refusing.discard(host)
        if ANYBODY in self._refusing and len(self.connections) <= self._options.connections_max * 9 // 10:
            self._refusing.discard(ANYBODY)
            logger.info("remoting.no_longer_full connections=%d", len(self.connections))

    def stop_reading(self) -> None:
        """Accept nobody more and take no further request; those in hand are still answered."""
        self._accept_scope.cancel()
        self._counters.is_reading = False

    async def drain(self, grace_s: float) -> None:
        """`stop_reading`, and let what waits to be sent go out, for at most `grace_s`."""
        self.stop_reading()
        with trio.move_on_after(grace_s):
            for connection in list(self.connections):
                await connection.flushed()

    async def _accept(self, listeners: list[trio.abc.Listener[trio.abc.Stream]], nursery: trio.Nursery) -> None:
        with self._accept_scope:
            await trio.serve_listeners(self.handle, listeners, handler_nursery=nursery)


async def serve_remoting(
    handler: Handler,
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
    options: RemotingServerOptions | None = None,
    tls: PortTls | None = None,
    parser_type: type[RemotingParser] = RemotingParser,
    take: Take | None = None,
    poller: Poller | None = None,
    *,
    task_status: trio.TaskStatus[RemotingServer] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Serve requests on `listeners` until cancelled; `nursery.start` returns the RemotingServer once it accepts."""
    server = RemotingServer(handler, options, tls=tls, parser_type=parser_type, take=take, poller=poller)
    await server.serve(listeners, task_status=task_status)


async def open_listeners(host: str, port: int, *, key: str) -> list[trio.SocketListener]:
    """Listen on `host:port` (0: the system chooses). AddressInUse, naming configuration key `key`, if that fails."""
    try:
        return await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise AddressInUse(key, host, port, getattr(error, "strerror", None) or str(error)) from error
