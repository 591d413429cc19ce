"""A broker's front end: loads the tables, serves requests, saves the tables at the end.

The caller provides the store, the replication and the listeners; nothing here opens a socket. Requests are served once
the tables are loaded. When the block of `open_broker` has ended, everything that requests committed is in the files,
unless the disk is full or saving took longer than SAVE_TIMEOUT_S.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import trio

from ha.acl import BROKER_RULES, AclGuard, UserAccounts
from ha.broker.acknowledgement import SyncStateRule
from ha.broker.admin import Admin
from ha.broker.core import BrokerCore
from ha.broker.delay import DelayService
from ha.broker.group_log import GroupLog
from ha.broker.heartbeat import HeartbeatProcessor
from ha.broker.metadata import MetadataProcessor
from ha.broker.offset_requests import OffsetProcessor
from ha.broker.options import BrokerOptions
from ha.broker.pop.service import PopService
from ha.broker.processor import NEEDS_DISPATCH, Processor, after, handlers_of
from ha.broker.pull import PullProcessor
from ha.broker.put import PutService
from ha.broker.queue_locks import QueueLocks
from ha.broker.recalls import RecallProcessor
from ha.broker.replies import ReplyProcessor
from ha.broker.role_services import RoleServices, Service
from ha.broker.send import SEND_CODES, SendProcessor
from ha.broker.send_back import SendBackProcessor
from ha.broker.slave_sync import SlaveSync
from ha.broker.standing import FOREVER, Standing, fixed_standing
from ha.broker.tables import Tables
from ha.broker.timer_requests import TimerRequests
from ha.broker.timers import TimerService
from ha.broker.transactions import TransactionService
from ha.broker.world import World
from ha.errors import DiskFailed
from ha.protocol.request_parser import RequestParser
from ha.remoting import PortTls, RemotingClient, RemotingServer, RemotingServerOptions, RequestHandler
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.store.message_store import MessageStore

logger = logging.getLogger(__name__)

CONFIRM_TIMEOUT_S = 2.0
"""Maximum time that retention waits until what timers and POP have written again is confirmed; it tries again later."""
SAVE_TIMEOUT_S = 5.0
"""Maximum time for writing the tables at shutdown, in seconds."""


class BrokerPorts(msgspec.Struct, frozen=True, kw_only=True):
    """The main port, and the fast port (listenPort - 2), which refuses pulls and POP (`processor.FAST_REFUSED`)."""

    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]]
    fast_listeners: Sequence[trio.abc.Listener[trio.abc.Stream]] = ()
    options: RemotingServerOptions | None = None
    tls: PortTls | None = None


class Replication(msgspec.Struct, frozen=True, kw_only=True):
    """The replication objects that a broker uses: a master's HA service, a slave's clients of its master, or both in a
    failover group."""

    ha_service: HAService | None = None
    ha_client: HAClient | None = None
    """The client of a slave, for statistics and to know whether the slave follows its master"""
    client: RemotingClient | None = None
    """Client with which a slave copies its master's tables from `master_address`, which returns None while the address
    is unknown"""
    master_address: Callable[[], str | None] | None = None
    sync_state: Callable[[], SyncStateRule | None] | None = None
    """Returns the rule for acknowledging puts in the current term, or None while this broker is not the master. The
    field is None outside a failover group"""


class Broker:
    """The parts of a broker's front end, for the node, registration and tests."""

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
        if guard is not None and options.authentication_enabled:
            users = tables.users
            guard.users = UserAccounts(
                users.get, users.__len__, options.cluster_name, authorizes=options.authorization_enabled
            )
        self.put_service = PutService(store, replication.ha_service, options, self.standing, replication.sync_state)
        core = BrokerCore(options=options, store=store, tables=tables, puts=self.put_service, world=world, guard=guard)
        self._poller = world.poller
        self.queue_locks = QueueLocks(core)
        self.sender = SendProcessor(core, self.queue_locks)
        self.puller = PullProcessor(core)
        self.delay = DelayService(core)
        self.timers = TimerService(core)
        self.pop = PopService(core)
        self.transactions = TransactionService(core)
        self.replies = ReplyProcessor(core, self.queue_locks)
        self.admin = Admin(
            core,
            self.puller.holds,
            sends_in_flight=lambda: self.sender.in_flight_count,
            pops_in_flight=self.pop.in_flight_count,
            delay_figures=lambda: {**self.delay.figures(), **self.timers.figures()},
        )
        self.slave_sync: SlaveSync | None = None
        if replication.client is not None and replication.master_address is not None:
            ha_client = None if options.keeps_tables_in_log else replication.ha_client
            self.slave_sync = SlaveSync(replication.client, replication.master_address, tables, options, ha_client)
        self.group_log: GroupLog | None = None
        """Keeps the tables in the log; None outside a failover group"""
        if options.keeps_tables_in_log:
            self.group_log = GroupLog(core)
            tables.keep_in_log(self.group_log)
        self.processor = Processor(self.sender, self._handlers(core, replication), guard, self.pop.takes)
        self.servers: list[RemotingServer] = []
        self._role_services = RoleServices()
        self._changing = trio.Lock()
        self._change_count = 0
        self._has_term = False
        """Whether services hold state of a term that has to be dropped at its end"""

    def _handlers(self, core: BrokerCore, replication: Replication) -> dict[int, RequestHandler]:
        """Returns the handlers by request code, except those of sends.

        A new family of requests is added here and in `ha.acl.BROKER_RULES`.
        """
        handlers = handlers_of(
            (
                self.puller,
                OffsetProcessor(core),
                SendBackProcessor(core),
                self.transactions.ends,
                self.delay,
                self.replies,
                HeartbeatProcessor(core),
                self.queue_locks,
                RecallProcessor(core, self.timers),
                TimerRequests(core, self.timers, replicated_progress=self.delay.replicated_offsets),
                MetadataProcessor(core, replication.ha_service, replication.ha_client),
                self.admin,
                *self.pop.families,
            )
        )
        for code in NEEDS_DISPATCH:
            handlers[code] = after(core.store.dispatcher.wait_files_made, handlers[code])
        assert handlers.keys() | SEND_CODES <= BROKER_RULES.keys(), "each code that is answered needs a rule"
        return handlers

    async def start(self, nursery: trio.Nursery, ports: BrokerPorts) -> None:
        """Starts the services in `nursery`, then serves the ports; returns when all have started."""
        for part in (self.puller, self.delay, self.timers, self.transactions, self.pop.holds):
            self.store.subscribe(part.on_arrivals)
        self.store.set_release(self._release)
        services: list[Service] = [
            self.puller.serve,
            self.pop.holds.serve,
            self.clients.expire_forever,
            self.replies.serve,
            self.admin.serve,
        ]
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
        processor = self.processor
        for take, handle, listeners in (
            (processor.take, processor.handle, ports.listeners),
            (processor.take_fast, processor.handle_fast, ports.fast_listeners),
        ):
            if listeners:
                server = RemotingServer(
                    handle,
                    ports.options,
                    tls=ports.tls,
                    parser_type=RequestParser,
                    take=take,
                    poller=self._poller,
                )
                await nursery.start(server.serve, listeners)
                self.servers.append(server)

    def _services_of_role(self) -> Sequence[Service]:
        if not self.standing.is_slave:
            create_users = partial(self.tables.users.create_missing, self.options.initial_users)
            services = create_users, self.delay.serve, self.timers.serve, self.transactions.serve
            return *services, *self.pop.master_services
        return () if self.slave_sync is None else (self.slave_sync.serve,)

    async def become_master(self, epoch: int, acknowledges_until: float = FOREVER) -> bool:
        """Becomes the master of a term; returns False if the role was changed again meanwhile.

        `MessageStore.become_master` must have been called before, so that nothing else appends to the log. Connections
        stay open. `acknowledges_until`: end of the lease (Trio's clock), as in `Standing`. If this is cancelled, the
        role is undefined, and the broker has to stop.
        """
        self._change_count += 1
        change = self._change_count
        async with self._changing:
            if change == self._change_count:
                await self._role_services.end()
            if change == self._change_count and self.group_log is not None:
                await self.group_log.begin_epoch(epoch)
            if change != self._change_count:
                return False
            self.standing.become_master(epoch, acknowledges_until)
            self._has_term = True
            if self.group_log is not None:
                await self.group_log.write_epoch(epoch)
            if change == self._change_count:
                await self._role_services.begin(self._services_of_role())
            self.puller.holds.wake_all()  # their answers depend on the role
            self.pop.holds.wake_all()
        return change == self._change_count

    async def become_slave(self, epoch: int, reason: str = "") -> None:
        """Becomes a slave.

        `reason`: text for the remarks of refused puts; if empty, they say that this broker is a slave.

        Before its first checkpoint, this method stops admitting and acknowledging puts, and answers those that wait. On
        return no put is queued, so the log may be truncated. Cancellation does not interrupt this method. Connections
        stay open.
        """
        self._change_count += 1
        change = self._change_count
        self.standing.become_slave(epoch, reason)
        self.put_service.acknowledgements.give_up()
        self.queue_locks.clear()
        with trio.CancelScope(shield=True):
            await self._end_term(change)

    async def _end_term(self, change: int) -> None:
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
            self.pop.holds.wake_all()

    async def _release(self, end: int) -> bool:
        """Returns whether retention may delete the log before physical offset `end` (bytes).

        On a master, timers and POP first write again what they still need from before `end`. That, and the delivered
        copies of timer messages, must be on the disk, and in a failover group confirmed: a power loss or a truncation
        must not keep the deletion and lose them.
        """
        if not (await self.timers.release(end) and await self.pop.release(end)):
            return False
        log = self.store.log
        written_to = log.max_offset.value
        try:
            await self.store.flusher.flush()
        except DiskFailed:
            return False  # the store ends the process
        confirmed = log.dispatch_limit
        with trio.move_on_after(CONFIRM_TIMEOUT_S):
            while confirmed.value < written_to:
                await confirmed.wait_beyond(confirmed.value)
        return confirmed.value >= written_to

    def stop_reading(self) -> None:
        """Stops reading requests. Those already read are still answered."""
        for server in self.servers:
            server.stop_reading()

    async def drain(self, drain_s: float) -> None:
        """Stops reading requests, and waits at most `drain_s` for puts in progress and unsent answers."""
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
        """Saves the tables, and on a master clears deleted topics, every `flush_consumer_offset_interval_s`."""
        while True:
            await trio.sleep(self.options.flush_consumer_offset_interval_s)
            await self.tables.save()
            if not self.standing.is_slave:
                await self.tables.clear_deleted_topics()

    async def save(self) -> None:
        """Writes pending records of transactions and of the group's log, then the tables, at shutdown."""
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
    """Serves a broker's requests while the block runs.

    `standing`: for a broker whose role may change; by default the role is fixed by the configuration. `acl_guard`:
    refuses requests that are not allowed. `drain_s`: maximum time at the end for puts in progress and unsent answers,
    before the tables are saved. Raises CorruptLog if a table can be read neither from its file nor from its `.bak`, and
    DiskFailed.
    """
    broker = Broker(options, store, replication, world, acl_guard, standing)
    await broker.tables.load()
    if not broker.standing.is_slave:
        await broker.tables.clear_deleted_topics()
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
            with trio.move_on_after(SAVE_TIMEOUT_S, shield=True) as saving:
                await broker.save()
            if saving.cancelled_caught:
                hint = "the disk is slow; delayed messages that were delivered lately may be delivered again"
                logger.warning("broker.save_timed_out timeout_s=%g hint=%r", SAVE_TIMEOUT_S, hint)
