"""One broker's front, put together: tables loaded, requests served, tables saved at the end.

The caller brings the store, the replication and the listeners; nothing here opens a socket. Nothing is served before
the tables are loaded, and what is committed until the last request is in the files after the block.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from ha.broker.acl import AclGuard, AclPolicy
from ha.broker.admin import Admin
from ha.broker.clients import ClientRegistry
from ha.broker.config_file import ConfigFile
from ha.broker.delay import DelayService
from ha.broker.delay_offsets import DelayOffsetTable
from ha.broker.groups import SubscriptionGroups
from ha.broker.heartbeat import HeartbeatProcessor
from ha.broker.metadata import MetadataProcessor
from ha.broker.offsets import ConsumerOffsetTable, OffsetProcessor
from ha.broker.options import BrokerOptions
from ha.broker.processor import Processor
from ha.broker.pull import PullProcessor
from ha.broker.put import PutService
from ha.broker.queue_locks import QueueLocks
from ha.broker.replies import ReplyProcessor
from ha.broker.send import SEND_CODES, SendProcessor
from ha.broker.send_back import SendBackProcessor
from ha.broker.slave_sync import SlaveSync
from ha.broker.topics import Topics
from ha.broker.transactions import TransactionService
from ha.protocol.codes import RequestCode
from ha.remoting import PortTls, RemotingServerOptions, RequestHandler, serve_remoting
from ha.store.files import Disk, OsDisk
from ha.store.mapped_file import RunBlocking, run_in_thread

if TYPE_CHECKING:
    from ha.remoting import RemotingClient, RemotingServer
    from ha.replication.ha_client import HAClient
    from ha.replication.ha_service import HAService
    from ha.store.message_store import MessageStore

SAVE_TIMEOUT_S = 5.0
"""Longest time that writing the tables may take when the broker stops."""


class Broker:
    """The parts of a broker's front, for the node, registration and tests."""

    def __init__(
        self,
        options: BrokerOptions,
        store: MessageStore,
        ha_service: HAService | None,
        *,
        ha_client: HAClient | None = None,
        unique_id: Callable[[], str],
        wall_clock_ms: Callable[[], int],
        disk: Disk,
        run_blocking: RunBlocking,
        acl_policy: AclPolicy | None = None,
    ) -> None:
        self.options = options
        self.store = store
        self._files: list[ConfigFile] = []

        def file(name: str) -> ConfigFile:
            made = ConfigFile(options.config_dir / name, disk=disk, run_blocking=run_blocking)
            self._files.append(made)
            return made

        self.topics = Topics(file("topics.json"), options, wall_clock_ms=wall_clock_ms, queues=store.queues)
        self.groups = SubscriptionGroups(file("subscriptionGroup.json"), options, wall_clock_ms=wall_clock_ms)
        self.offsets = ConsumerOffsetTable(file("consumerOffset.json"), options, taken_file=file("takenOffsets.json"))
        self.delay_offsets = DelayOffsetTable(file("delayOffset.json"), wall_clock_ms=wall_clock_ms)
        self.clients = ClientRegistry(options)
        self.queue_locks = QueueLocks(options)
        self.put_service = PutService(store, ha_service, options)
        self.delay = DelayService(
            store, self.put_service, self.delay_offsets, ha_service, options, wall_clock_ms=wall_clock_ms
        )
        self.transactions = TransactionService(
            store,
            self.put_service,
            self.topics,
            self.offsets,
            self.clients,
            ha_service,
            options,
            is_guarded=acl_policy is not None,
            wall_clock_ms=wall_clock_ms,
        )
        self.puller = PullProcessor(store, self.topics, self.groups, self.clients, self.offsets, options)
        self.slave_sync: SlaveSync | None = None
        self.servers: list[RemotingServer] = []
        level_count = len(store.options.delay_levels_ms)
        self.sender = SendProcessor(
            self.put_service,
            self.topics,
            self.groups,
            options,
            unique_id=unique_id,
            delay_level_count=level_count,
        )
        self.replies = ReplyProcessor(self.put_service, self.topics, self.clients, options, wall_clock_ms=wall_clock_ms)
        offsets = OffsetProcessor(store, self.topics, self.groups, self.offsets, options)
        heartbeats = HeartbeatProcessor(self.clients, self.topics, self.groups, options)
        metadata = MetadataProcessor(
            self.topics, self.groups, self.offsets, ha_service, ha_client, wall_clock_ms=wall_clock_ms
        )
        handlers: dict[int, RequestHandler] = {
            RequestCode.PULL_MESSAGE: self.puller.handle,
            RequestCode.LITE_PULL_MESSAGE: self.puller.handle,
            RequestCode.QUERY_CONSUMER_OFFSET: offsets.query,
            RequestCode.UPDATE_CONSUMER_OFFSET: offsets.update,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: offsets.search,
            RequestCode.GET_MAX_OFFSET: offsets.max_offset,
            RequestCode.GET_MIN_OFFSET: offsets.min_offset,
            RequestCode.GET_EARLIEST_MSG_STORETIME: offsets.earliest_store_time,
            RequestCode.END_TRANSACTION: self.transactions.end,
            RequestCode.SEND_REPLY_MESSAGE: self.replies.handle,
            RequestCode.SEND_REPLY_MESSAGE_V2: self.replies.handle,
            RequestCode.HEART_BEAT: heartbeats.heartbeat,
            RequestCode.UNREGISTER_CLIENT: heartbeats.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: heartbeats.consumer_list,
            RequestCode.CHECK_CLIENT_CONFIG: self.puller.filters.check_client,
            RequestCode.LOCK_BATCH_MQ: self.queue_locks.handle_lock,
            RequestCode.UNLOCK_BATCH_MQ: self.queue_locks.handle_unlock,
            RequestCode.GET_ALL_TOPIC_CONFIG: metadata.topics,
            RequestCode.GET_ALL_CONSUMER_OFFSET: metadata.consumer_offsets,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: metadata.groups,
            RequestCode.GET_ALL_DELAY_OFFSET: self.delay.all_offsets,
            RequestCode.CONSUMER_SEND_MSG_BACK: SendBackProcessor(
                store,
                self.put_service,
                self.topics,
                self.groups,
                self.clients,
                options,
                is_guarded=acl_policy is not None,
            ).handle,
            RequestCode.GET_BROKER_HA_STATUS: metadata.ha_status,
        }
        self.admin = Admin(
            store,
            self.topics,
            self.groups,
            self.offsets,
            self.clients,
            self.put_service,
            self.puller,
            options,
            disk=disk,
            run_blocking=run_blocking,
            wall_clock_ms=wall_clock_ms,
            sends_in_flight=lambda: self.sender.in_flight_count,
        )
        self.admin.info.more.append(self.delay.figures)
        handlers |= self.admin.handlers
        self.acl_guard: AclGuard | None = None
        if acl_policy is not None:
            self.acl_guard = AclGuard(acl_policy, served=handlers.keys() | SEND_CODES)
        self.processor = Processor(self.sender, handlers, self.acl_guard)

    async def load(self) -> None:
        """Read the tables. Raises CorruptLog, naming the file, if one can't be read."""
        await self.topics.load()
        await self.groups.load()
        await self.offsets.load()
        await self.delay_offsets.load(self.store.log.max_offset.value)

    def stop_reading(self) -> None:
        """Take no further request; those in hand are still answered, until the broker closes."""
        for server in self.servers:
            server.stop_reading()

    async def save(self) -> None:
        """Write the offsets if some changed, and tables that a full disk has kept from being written, if it has room.

        The other tables are written when they change.
        """
        await self.offsets.save()
        for file in self._files:
            await file.catch_up()

    async def keep_saved(self) -> None:
        """Do so every `flush_consumer_offset_interval_s`, until cancelled."""
        while True:
            await trio.sleep(self.options.flush_consumer_offset_interval_s)
            await self.save()


async def _drain(server: RemotingServer, put_service: PutService, drain_s: float) -> None:
    """Take no further request; let puts under way come to their answer, and answers leave, for at most `drain_s`."""
    deadline = trio.current_time() + drain_s
    await server.drain(0)
    with trio.move_on_at(deadline):
        await put_service.wait_all_answered()
    await server.drain(max(0.0, deadline - trio.current_time()))


@asynccontextmanager
async def open_broker(
    options: BrokerOptions,
    store: MessageStore,
    ha_service: HAService | None,
    *,
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
    unique_id: Callable[[], str],
    fast_listeners: Sequence[trio.abc.Listener[trio.abc.Stream]] = (),
    ha_client: HAClient | None = None,
    server_options: RemotingServerOptions | None = None,
    client: RemotingClient | None = None,
    master_address: Callable[[], str | None] | None = None,
    wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    disk: Disk | None = None,
    run_blocking: RunBlocking = run_in_thread,
    drain_s: float = 1.0,
    acl_policy: AclPolicy | None = None,
    tls: PortTls | None = None,
) -> AsyncIterator[Broker]:
    """Serve a broker's requests while the block runs.

    `listeners` are the main port's, `fast_listeners` those of listenPort - 2, `tls` is for both. `unique_id` makes
    unique keys for messages without one. A slave with a `client` and a `master_address` copies the master's tables.
    With an `acl_policy` each request has to be allowed by it, or by what `Broker.acl_guard` is given later. Raises
    CorruptLog if a table's file is damaged; at the end puts under way and their answers get `drain_s`, and the tables
    are saved.
    """
    broker = Broker(
        options,
        store,
        ha_service,
        ha_client=ha_client,
        unique_id=unique_id,
        wall_clock_ms=wall_clock_ms,
        disk=disk if disk is not None else OsDisk(),
        run_blocking=run_blocking,
        acl_policy=acl_policy,
    )
    await broker.load()
    store.subscribe(broker.puller.on_arrivals)
    store.subscribe(broker.delay.on_arrivals)
    store.subscribe(broker.transactions.on_arrivals)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(broker.puller.serve)
            await nursery.start(broker.clients.expire_forever)
            await nursery.start(broker.replies.serve)
            await nursery.start(broker.admin.serve)
            nursery.start_soon(broker.keep_saved)
            if not options.is_slave:
                await nursery.start(broker.delay.serve)
                await nursery.start(broker.transactions.serve)
            if options.is_slave and client is not None and master_address is not None:
                broker.slave_sync = SlaveSync(
                    client,
                    master_address,
                    broker.topics,
                    broker.groups,
                    broker.offsets,
                    broker.delay_offsets,
                    options,
                )
                await nursery.start(broker.slave_sync.serve)
            servers = broker.servers = [
                await nursery.start(serve_remoting, broker.processor.handle, listeners, server_options, tls)
            ]
            if fast_listeners:
                servers.append(
                    await nursery.start(
                        serve_remoting, broker.processor.handle_fast, fast_listeners, server_options, tls
                    )
                )
            try:
                yield broker
            finally:
                with trio.move_on_after(drain_s, shield=True):
                    async with trio.open_nursery() as drains:
                        for server in servers:
                            drains.start_soon(_drain, server, broker.put_service, drain_s)
                nursery.cancel_scope.cancel()
    finally:
        with trio.move_on_after(SAVE_TIMEOUT_S, shield=True):
            await broker.transactions.save()
            await broker.save()
            await broker.delay.save()
