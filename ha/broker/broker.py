"""One broker's front, put together: tables loaded, requests served, tables saved at the end.

The caller brings the store, the replication and the listeners; nothing here opens a socket. Nothing is served before
the tables are loaded, and what is committed until the last request is in the files after the block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from ha.broker.acl import AclGuard, AclPolicy
from ha.broker.admin import Admin
from ha.broker.delay import DelayService
from ha.broker.heartbeat import HeartbeatProcessor
from ha.broker.metadata import MetadataProcessor
from ha.broker.offsets import OffsetProcessor
from ha.broker.options import BrokerOptions
from ha.broker.processor import Processor, handlers_of
from ha.broker.pull import PullProcessor
from ha.broker.put import PutService
from ha.broker.queue_locks import QueueLocks
from ha.broker.replies import ReplyProcessor
from ha.broker.send import SEND_CODES, SendProcessor
from ha.broker.send_back import SendBackProcessor
from ha.broker.slave_sync import SlaveSync
from ha.broker.tables import Tables
from ha.broker.transactions import TransactionService
from ha.broker.world import World
from ha.protocol.send_parser import SendParser
from ha.remoting import PortTls, RemotingClient, RemotingServer, RemotingServerOptions, serve_remoting

if TYPE_CHECKING:
    from ha.replication.ha_client import HAClient
    from ha.replication.ha_service import HAService
    from ha.store.message_store import MessageStore

SAVE_TIMEOUT_S = 5.0
"""Longest time that writing the tables may take when the broker stops."""


class BrokerPorts(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests come in: the main port, and the fast one (listenPort - 2), which serves all but pulls."""

    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]]
    fast_listeners: Sequence[trio.abc.Listener[trio.abc.Stream]] = ()
    options: RemotingServerOptions | None = None
    tls: PortTls | None = None


class Replication(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's part in replication: a master's slaves, or a slave's link to its master."""

    ha_service: HAService | None = None
    ha_client: HAClient | None = None
    """Shown to tools"""
    client: RemotingClient | None = None
    """With `master_address` (None while that is unknown): a slave copies its master's tables over it"""
    master_address: Callable[[], str | None] | None = None


class Broker:
    """The parts of a broker's front, for the node, registration and tests."""

    def __init__(
        self,
        options: BrokerOptions,
        store: MessageStore,
        replication: Replication,
        world: World,
        acl_policy: AclPolicy | None,
    ) -> None:
        self.options = options
        self.store = store
        clock, is_guarded, ha_service = world.wall_clock_ms, acl_policy is not None, replication.ha_service
        tables = self.tables = Tables(store, options, world)
        self.topics, self.groups, self.offsets = tables.topics, tables.groups, tables.offsets
        self.delay_offsets, self.clients = tables.delay_offsets, tables.clients
        puts = self.put_service = PutService(store, ha_service, options)
        self.sender = SendProcessor(
            puts,
            tables,
            options,
            unique_id=world.unique_id,
            delay_level_count=len(store.options.delay_levels_ms),
        )
        self.puller = PullProcessor(store, tables, options)
        self.delay = DelayService(store, puts, tables.delay_offsets, options, wall_clock_ms=clock)
        self.transactions = TransactionService(store, puts, tables, options, is_guarded=is_guarded, wall_clock_ms=clock)
        self.replies = ReplyProcessor(puts, tables, options, wall_clock_ms=clock)
        self.queue_locks = QueueLocks(options)
        self.admin = Admin(
            store, tables, puts, self.puller.holds, options, world, sends_in_flight=lambda: self.sender.in_flight_count
        )
        self.admin.info.more.append(self.delay.figures)
        self.slave_sync: SlaveSync | None = None
        if options.is_slave and replication.client is not None and replication.master_address is not None:
            self.slave_sync = SlaveSync(replication.client, replication.master_address, tables, options)
        handlers = handlers_of(
            (
                self.puller,
                OffsetProcessor(store, tables, options),
                SendBackProcessor(store, puts, tables, options, is_guarded=is_guarded),
                self.transactions,
                self.delay,
                self.replies,
                HeartbeatProcessor(tables, options),
                self.queue_locks,
                MetadataProcessor(tables, ha_service, replication.ha_client, wall_clock_ms=clock),
                self.admin,
            )
        )
        self.acl_guard: AclGuard | None = None
        if acl_policy is not None:
            self.acl_guard = AclGuard(acl_policy, served=handlers.keys() | SEND_CODES)
        self.processor = Processor(self.sender, handlers, self.acl_guard)
        self.servers: list[RemotingServer] = []

    async def start(self, nursery: trio.Nursery, ports: BrokerPorts) -> None:
        """Start the services in `nursery`, then serve the ports."""
        for arrivals in (self.puller.on_arrivals, self.delay.on_arrivals, self.transactions.on_arrivals):
            self.store.subscribe(arrivals)
        services = [self.puller.serve, self.clients.expire_forever, self.replies.serve, self.admin.serve]
        if not self.options.is_slave:
            services += self.delay.serve, self.transactions.serve
        if self.slave_sync is not None:
            services.append(self.slave_sync.serve)
        for service in services:
            await nursery.start(service)
        nursery.start_soon(self.keep_saved)
        for handle, listeners in (
            (self.processor.handle, ports.listeners),
            (self.processor.handle_fast, ports.fast_listeners),
        ):
            if listeners:
                server = await nursery.start(serve_remoting, handle, listeners, ports.options, ports.tls, SendParser)
                self.servers.append(server)

    def stop_reading(self) -> None:
        """Take no further request; those in hand are still answered, until the broker closes."""
        for server in self.servers:
            server.stop_reading()

    async def drain(self, drain_s: float) -> None:
        """Take no further request; puts under way come to their answer, and answers leave, for at most `drain_s`."""
        deadline = trio.current_time() + drain_s

        async def drain_one(server: RemotingServer) -> None:
            await server.drain(0)
            with trio.move_on_at(deadline):
                await self.put_service.wait_all_answered()
            await server.drain(max(0.0, deadline - trio.current_time()))

        async with trio.open_nursery() as nursery:
            for server in self.servers:
                nursery.start_soon(drain_one, server)

    async def keep_saved(self) -> None:
        """Save the tables every `flush_consumer_offset_interval_s`, until cancelled."""
        while True:
            await trio.sleep(self.options.flush_consumer_offset_interval_s)
            await self.tables.save()

    async def save(self) -> None:
        """Save all that is to be known again, once nothing is served any more."""
        await self.transactions.save()
        await self.tables.save()
        await self.delay.save()


@asynccontextmanager
async def open_broker(
    options: BrokerOptions,
    store: MessageStore,
    replication: Replication,
    ports: BrokerPorts,
    world: World,
    *,
    acl_policy: AclPolicy | None = None,
    drain_s: float = 1.0,
) -> AsyncIterator[Broker]:
    """Serve a broker's requests while the block runs.

    With an `acl_policy` each request has to be allowed by it, or by what `Broker.acl_guard` is given later. Raises
    CorruptLog if a table's file is damaged; at the end puts under way and their answers get `drain_s`, and the tables
    are saved.
    """
    broker = Broker(options, store, replication, world, acl_policy)
    await broker.tables.load()
    try:
        async with trio.open_nursery() as nursery:
            await broker.start(nursery, ports)
            try:
                yield broker
            finally:
                with trio.move_on_after(drain_s, shield=True):
                    await broker.drain(drain_s)
                nursery.cancel_scope.cancel()
    finally:
        with trio.move_on_after(SAVE_TIMEOUT_S, shield=True):
            await broker.save()
