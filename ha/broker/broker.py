"""One broker's front, put together: tables loaded, requests served, tables saved at the end.

The caller brings the store, the replication and the listeners; nothing here opens a socket. Nothing is served before
the tables are loaded, and what is committed until the last request is in the files after the block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from ha.acl import BROKER_RULES, AclGuard
from ha.broker.acknowledgement import SyncStateRule
from ha.broker.admin import Admin
from ha.broker.core import BrokerCore
from ha.broker.delay import DelayService
from ha.broker.group_log import GroupLog
from ha.broker.heartbeat import HeartbeatProcessor
from ha.broker.metadata import MetadataProcessor
from ha.broker.offset_requests import OffsetProcessor
from ha.broker.options import BrokerOptions
from ha.broker.processor import ASKED_OF_DISPATCH, Processor, after, handlers_of
from ha.broker.pull import PullProcessor
from ha.broker.put import PutService
from ha.broker.queue_locks import QueueLocks
from ha.broker.replies import ReplyProcessor
from ha.broker.role_services import RoleServices, Service
from ha.broker.send import SEND_CODES, SendProcessor
from ha.broker.send_back import SendBackProcessor
from ha.broker.slave_sync import SlaveSync
from ha.broker.standing import FOREVER, Standing, fixed_standing
from ha.broker.tables import Tables
from ha.broker.transactions import TransactionService
from ha.broker.world import World
from ha.protocol.send_parser import SendParser
from ha.remoting import PortTls, RemotingClient, RemotingServer, RemotingServerOptions, serve_remoting

if TYPE_CHECKING:
    from ha.remoting import RequestHandler
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
    sync_state: Callable[[], SyncStateRule | None] | None = None
    """With failover: who must have a put, in the present term"""


class Broker:
    """The parts of a broker's front, for the node, registration and tests."""

    def __init__(
        self,
        options: BrokerOptions,
        store: MessageStore,
        replication: Replication,
        world: World,
        guard: AclGuard | None,
        standing: Standing | None = None,
    ) -> None:
        self.options = options
        self.store = store
        self.standing = fixed_standing(options) if standing is None else standing
        self.acl_guard = guard
        tables = self.tables = Tables(store, options, world, self.standing)
        self.topics, self.groups, self.offsets = tables.topics, tables.groups, tables.offsets
        self.delay_offsets, self.clients = tables.delay_offsets, tables.clients
        self.put_service = PutService(store, replication.ha_service, options, self.standing, replication.sync_state)
        core = BrokerCore(options=options, store=store, tables=tables, puts=self.put_service, world=world, guard=guard)
        self._poller = world.poller
        self.sender = SendProcessor(core)
        self.puller = PullProcessor(core)
        self.delay = DelayService(core)
        self.transactions = TransactionService(core)
        self.replies = ReplyProcessor(core)
        self.queue_locks = QueueLocks(core)
        self.admin = Admin(
            core,
            self.puller.holds,
            sends_in_flight=lambda: self.sender.in_flight_count,
            delay_figures=self.delay.figures,
        )
        self.slave_sync: SlaveSync | None = None
        if replication.client is not None and replication.master_address is not None:
            self.slave_sync = SlaveSync(replication.client, replication.master_address, tables, options)
        self.group_log: GroupLog | None = None
        """In a failover group: topics, groups and offsets in its log"""
        if options.keeps_tables_in_log:
            self.group_log = GroupLog(core)
            tables.keep_in_log(self.group_log)
        self.processor = Processor(self.sender, self._handlers(core, replication), guard)
        self.servers: list[RemotingServer] = []
        self._role_services = RoleServices()
        self._changing = trio.Lock()
        self._change_count = 0
        self._has_term = False
        """Whether there is something of a term to be forgotten at its end"""

    def _handlers(self, core: BrokerCore, replication: Replication) -> dict[int, RequestHandler]:
        """Every handler by request code. A new family of requests is added here and in `ha.acl.BROKER_RULES`."""
        handlers = handlers_of(
            (
                self.puller,
                OffsetProcessor(core),
                SendBackProcessor(core),
                self.transactions,
                self.delay,
                self.replies,
                HeartbeatProcessor(core),
                self.queue_locks,
                MetadataProcessor(core, replication.ha_service, replication.ha_client),
                self.admin,
            )
        )
        for code in ASKED_OF_DISPATCH:
            handlers[code] = after(core.store.dispatcher.wait_files_made, handlers[code])
        assert handlers.keys() | SEND_CODES <= BROKER_RULES.keys(), "each code that is answered needs a rule"
        return handlers

    async def start(self, nursery: trio.Nursery, ports: BrokerPorts) -> None:
        """Start the services in `nursery`, then serve the ports."""
        for arrivals in (self.puller.on_arrivals, self.delay.on_arrivals, self.transactions.on_arrivals):
            self.store.subscribe(arrivals)
        services: list[Service] = [self.puller.serve, self.clients.expire_forever, self.replies.serve, self.admin.serve]
        group_log = self.group_log
        if group_log is not None:
            self.store.subscribe(group_log.on_arrivals)
            services.append(group_log.serve)
        for service in (*services, self._role_services.serve):
            await nursery.start(service)
        if group_log is not None and not self.standing.is_slave:
            await group_log.begin_epoch(self.standing.epoch)
            await group_log.write_epoch(self.standing.epoch)
        await self._role_services.begin(self._services_of_role())
        nursery.start_soon(self.keep_saved)
        for handle, listeners in (
            (self.processor.handle, ports.listeners),
            (self.processor.handle_fast, ports.fast_listeners),
        ):
            if listeners:
                serve = partial(serve_remoting, take=self.processor.take, poller=self._poller)
                server = await nursery.start(serve, handle, listeners, ports.options, ports.tls, SendParser)
                self.servers.append(server)

    def _services_of_role(self) -> Sequence[Service]:
        if not self.standing.is_slave:
            return self.delay.serve, self.transactions.serve
        return () if self.slave_sync is None else (self.slave_sync.serve,)

    async def become_master(self, epoch: int, acknowledges_until: float = FOREVER) -> bool:
        """Be the master of a term, until `become_slave`; False if that was called before it came to it.

        The log must be the new master's already: nobody else appends to it, and all of it is dispatched. Connections
        stay as they are. `acknowledges_until` as in `Standing`. Cancelled, the broker may be either, and has to stop.
        """
        self._change_count += 1
        change = self._change_count
        async with self._changing:
            if change == self._change_count:
                await self._role_services.end()
                if self.group_log is not None:
                    await self.group_log.begin_epoch(epoch)
            if change != self._change_count:
                return False
            self.standing.become_master(epoch, acknowledges_until)
            self._has_term = True
            if self.group_log is not None:
                await self.group_log.write_epoch(epoch)
            if change == self._change_count:
                await self._role_services.begin(self._services_of_role())
            self.puller.holds.wake_all()  # what they are told, and where to go on reading, depends on the role
        return change == self._change_count

    async def become_slave(self, epoch: int, reason: str = "") -> None:
        """Be a slave from this moment on; `reason`: why it stores nothing, for remarks.

        Before anything else can happen nothing is admitted and nothing acknowledged any more, and what waits is
        answered. On return nothing of this broker is on its way into the log, which may be cut then. Connections stay
        as they are. Cancelled, it must not be cut.
        """
        self._change_count += 1
        change = self._change_count
        self.standing.become_slave(epoch, reason)
        self.put_service.acknowledgements.give_up()
        self.queue_locks.clear()
        async with self._changing:
            await self._role_services.end()
            if self._has_term:
                self._has_term = False
                self.transactions.step_down()
            await self.put_service.wait_appended()
            if self.group_log is not None:
                await self.group_log.step_down()
            if change == self._change_count:
                await self._role_services.begin(self._services_of_role())
            self.puller.holds.wake_all()

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
                await self.sender.wait_all_answered()
                await self.put_service.acknowledgements.wait_all_answered()
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
        if self.group_log is not None:
            await self.group_log.close()
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
    acl_guard: AclGuard | None = None,
    standing: Standing | None = None,
    drain_s: float = 1.0,
) -> AsyncIterator[Broker]:
    """Serve a broker's requests while the block runs.

    `standing`: of a broker whose role may change; by default the role is the configured one, for good.
    With an `acl_guard` each request has to be allowed by it. Raises
    CorruptLog if a table's file is damaged; at the end puts under way and their answers get `drain_s`, and the tables
    are saved.
    """
    broker = Broker(options, store, replication, world, acl_guard, standing)
    await broker.tables.load()
    async with broker.put_service.serve():
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
