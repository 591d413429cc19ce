"""Runs a name server: a remoting server for the route table, and the removal of silent brokers."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

import msgspec
import trio

from ha.acl import AclGuard
from ha.protocol.remoting import RemotingCommand
from ha.remoting import (
    BoundPort,
    CloseCause,
    PortTls,
    RemotingConnection,
    RemotingServer,
    RemotingStatistics,
    each_request,
)

from .options import NameServerOptions
from .processor import NameServerProcessor, RunBlocking
from .routes import RouteTable
from .settings import Settings

logger = logging.getLogger(__name__)


class NameServerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Registered brokers and topics, and the counters of the remoting server."""

    brokers: int
    topics: int
    remoting: RemotingStatistics


class NameServer:
    """A name server. `serve` runs it. Its state is kept in memory only; a RocketMQ name server also stores the
    key-value settings in a file."""

    def __init__(
        self,
        options: NameServerOptions | None = None,
        *,
        tls: PortTls | None = None,
        guard: AclGuard | None = None,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        """`guard` decides which requests are admitted; without one, all are. `tls`: as for `RemotingServer`.
        `run_blocking` runs long computations in a worker thread."""
        self.options = NameServerOptions() if options is None else options
        self.routes = RouteTable(
            brokers_max=self.options.brokers_max,
            topics_max=self.options.topics_max,
            queue_entries_max=self.options.queue_entries_max,
        )
        self._processor = NameServerProcessor(
            self.routes,
            Settings(entries_max=self.options.config_entries_max),
            self.options,
            self._expect_expiry,
            run_blocking,
        )
        self._next_deadline = math.inf
        self._deadline_changed = trio.Event()
        self._answer = each_request(self._processor)
        self._guard = guard
        self.server = RemotingServer(self._handle, self.options.remoting, tls=tls)
        self.address = ("memory", 0)
        """Host and port of the listener; ("memory", 0) until the server listens on a socket."""

    @property
    def codes(self) -> Collection[int]:
        """Supported request codes."""
        return self._processor.codes

    async def _handle(self, connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        if self._guard is not None:
            requests = self._guard.admit(connection, requests)
        await self._answer(connection, requests)

    def statistics(self) -> NameServerStatistics:
        """Returns a snapshot of the counters."""
        return NameServerStatistics(
            brokers=self.routes.broker_count,
            topics=self.routes.topic_count,
            remoting=self.server.statistics(),
        )

    async def serve(
        self,
        listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
        *,
        task_status: trio.TaskStatus[NameServer] = trio.TASK_STATUS_IGNORED,
    ) -> NoReturn:
        """Serves on `listeners` until cancelled, and closes them."""
        for listener in listeners:
            if isinstance(listener, trio.SocketListener):
                host, port, *_ = listener.socket.getsockname()
                self.address = (host, port)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drop_silent_brokers)
            await nursery.start(self.server.serve, listeners)
            task_status.started(self)
        raise AssertionError("serve returned without cancellation")

    async def _drop_silent_brokers(self) -> NoReturn:
        """Drops each broker at its deadline, and closes its connection, so that it registers again.

        RocketMQ scans every 5 s (4.9: 10 s) and drops brokers up to that much later.
        """
        while True:
            for broker in self.routes.expire(trio.current_time()):
                logger.warning(
                    "namesrv.broker_dropped broker=%s address=%s cause='no heartbeat for %g s'",
                    broker.broker_name,
                    broker.address,
                    broker.timeout_s,
                )
                if isinstance(broker.channel, RemotingConnection):
                    broker.channel.close(CloseCause.BROKER_SILENT)
            self._next_deadline = self.routes.next_deadline
            self._deadline_changed = trio.Event()
            with trio.move_on_at(self._next_deadline):
                await self._deadline_changed.wait()

    def _expect_expiry(self, deadline: float) -> None:
        """Wakes `_drop_silent_brokers` if `deadline` is earlier than the one it waits for."""
        if deadline < self._next_deadline:
            self._deadline_changed.set()


@asynccontextmanager
async def open_name_server(
    options: NameServerOptions | None = None, *, tls: PortTls | None = None, guard: AclGuard | None = None
) -> AsyncIterator[NameServer]:
    """Runs a name server on `options.host`:`options.port` during the block.

    A worker thread looks up the host name; cancellation waits for the lookup. Raises AddressInUse for the key
    listenPort if it can't listen there.
    """
    name_server = NameServer(options, tls=tls, guard=guard)
    options = name_server.options
    with await trio.to_thread.run_sync(BoundPort, "listenPort", options.host, options.port) as port:
        listeners = port.listen()
    async with trio.open_nursery() as nursery:
        await nursery.start(name_server.serve, listeners)
        yield name_server
        nursery.cancel_scope.cancel()
