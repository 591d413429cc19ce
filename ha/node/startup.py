"""Opens and closes the parts of one broker process: store, replication, broker, admin port, in this order.

Each part is an async context manager or a task of the node's nursery. An exception in one of them closes the others and
propagates. Ports are bound first, so that a port in use is reported before a long recovery; a port listens once the
service behind it is ready.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from functools import partial
from importlib import import_module

import trio

from ha.acl import AclGuard, guard_options
from ha.admin import AdminKey, AdminView, RecentEvents, open_admin
from ha.broker.broker import Broker, BrokerPorts, Replication, open_broker
from ha.broker.registration import NameServerRegistration
from ha.broker.standing import Standing
from ha.broker.topic_routes import TopicRoutes
from ha.broker.world import World
from ha.config import Config, SecretStr
from ha.errors import ConfigError
from ha.poller import open_poller
from ha.protocol.access_bodies import UserConfig
from ha.remoting import RemotingClient, open_remoting_client
from ha.replication.sync_state import SyncStateSet
from ha.store.message_store import open_message_store

from . import options as make
from .access import NodeAccess, read_access
from .actions import NodeActions
from .addresses import NodePorts, advertise, take_ports
from .config_warnings import warn_about
from .dashboard import NodeDashboard
from .healing import heal
from .history import History
from .member import open_membership, switch_master
from .metrics import samples
from .name_server import OwnNameServer
from .neighbours import Neighbours, own_addresses
from .node import Node
from .platform import Platform, Port
from .replicating import finish_waiting_puts, follow_master, master_address, start_replication, sync_tables
from .status import describe
from .tls import load_tls

GRPC_MODULE = "ha.node.grpc"


@asynccontextmanager
async def open_node(config: Config, platform: Platform | None = None) -> AsyncIterator[Node]:
    """Runs a broker node during the block. `platform` is its environment, by default the operating system.

    Raises AddressInUse, StoreLocked, CorruptLog, DiskFailed, DiskFull, ConfigError (for example for an address that
    can't be resolved), and OSError if the store's directories can't be created or locked. Errors during the block, and
    some before it, are raised in exception groups; `except*` catches both forms. Leaving or cancelling the block stops
    the node in order: it accepts no new requests, answers or fails those in flight, flushes the log and writes the
    checkpoint.
    """
    platform = Platform() if platform is None else platform
    with RecentEvents().kept() as events, ExitStack() as bound:
        ports = await take_ports(config, platform, bound)
        advertised = await advertise(config, platform, ports)
        tls = await load_tls(config, platform)
        access = await read_access(config, platform)
        guard = None
        if access.acl_files is not None or config.authentication_enabled:
            policy = None if access.acl_files is None else await access.acl_files.load()
            options = guard_options(
                config,
                unauthenticated=config.authentication_whitelist,
                unauthorized=config.authorization_whitelist,
            )
            guard = AclGuard(policy, options)
        warn_about(config)
        node = Node(config, events, platform, tls, ports, advertised, guard)
        own_name_server = OwnNameServer(node)
        async with (
            open_message_store(
                make.store_options(config, advertised, platform.open_files_max),
                disk=platform.disk,
                run_blocking=platform.run_blocking,
                wall_clock_ms=platform.wall_clock_ms,
            ) as node.store,
            open_poller() as node.poller,
            open_remoting_client(
                connect=own_name_server.connect,
                sign=None if access.credentials is None else access.credentials.sign,
            ) as client,
            trio.open_nursery() as nursery,
        ):
            node.store.dispatcher.after_turn = node.poller.after_turn
            nursery.start_soon(tls.keep_fresh)
            nursery.start_soon(node.loop_delay.serve)
            if ports.grpc is not None:
                nursery.start_soon(platform.run_blocking, partial(import_module, GRPC_MODULE))
            if ports.name_server is not None:
                await own_name_server.start(ports.name_server, nursery)
            await start_replication(node, client, ports.ha, nursery, access.handshake)
            async with _serving(node, client, ports, access, nursery):
                yield node
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _serving(
    node: Node, client: RemotingClient, ports: NodePorts, access: NodeAccess, nursery: trio.Nursery
) -> AsyncIterator[None]:
    """Serves requests during the block, for a node whose store and replication are running."""
    config = node.config
    name_servers = config.name_servers if node.name_server_address is None else [node.name_server_address]
    nursery.start_soon(heal, node, client, name_servers, access.handshake)
    async with _open_broker(node, client, ports, access.initial_users) as node.broker:
        if node.acl_guard is not None and access.acl_files is not None:
            interval_s = node.platform.file_check_interval_s
            nursery.start_soon(access.acl_files.keep_loaded, node.acl_guard, interval_s)
        node.broker.admin.info.describe = partial(make.reported_config, config)
        node.broker.admin.info.own_addresses = partial(own_addresses, node)
        node.registration = _registration(node, client, name_servers)
        neighbours = Neighbours(node, client)
        history = History(node.store, node.broker.tables, wall_clock_ms=node.platform.wall_clock_ms)
        nursery.start_soon(neighbours.serve)
        nursery.start_soon(history.serve)
        if node.ha_client is not None and not config.is_member:
            nursery.start_soon(follow_master, node, node.ha_client)
            nursery.start_soon(sync_tables, node, node.ha_client)
        async with _open_grpc(node, ports.grpc):
            async with (
                _registered(node.registration),
                _open_admin(node, ports.admin, access.admin_token, NodeDashboard(node, history, neighbours.known)),
                _open_otlp(node),
                open_membership(node, access.etcd_password) if config.is_member else nullcontext(),
            ):
                if node.broker.slave_sync is not None:
                    # The name servers have been asked by now. If they reported no master, the master is down.
                    node.broker.slave_sync.sync_soon()
                yield
            node.broker.stop_reading()
            if node.grpc_server is not None:
                node.grpc_server.stop()
            await finish_waiting_puts(node)


def _open_broker(
    node: Node, client: RemotingClient, ports: NodePorts, initial_users: tuple[UserConfig, ...]
) -> AbstractAsyncContextManager[Broker]:
    config, platform = node.config, node.platform
    standing = None
    if config.is_member:
        standing = Standing(config.broker_name, config.broker_id, is_slave=True, is_elected=True)
    return open_broker(
        make.broker_options(config, node.advertised, initial_users),
        node.store,
        Replication(
            ha_service=None if config.is_slave else node.ha_service,
            ha_client=node.ha_client,
            client=client,
            master_address=partial(master_address, node),
            sync_state=partial(_sync_state, node) if config.is_member else None,
        ),
        BrokerPorts(
            listeners=ports.remoting.listen(),
            fast_listeners=ports.fast.listen() if ports.fast is not None else (),
            options=make.remoting_options(config, platform.open_files_max),
            tls=node.tls.remoting_port,
        ),
        World(
            unique_id=node.unique_ids.next,
            wall_clock_ms=platform.wall_clock_ms,
            disk=platform.disk,
            run_blocking=platform.run_blocking,
            poller=node.poller,
        ),
        acl_guard=node.acl_guard,
        standing=standing,
    )


def _sync_state(node: Node) -> SyncStateSet | None:
    """Returns the sync-state set of a member's current term; None while the member is not master."""
    leadership = node.ha_service.leadership
    return None if leadership is None else leadership.sync_state


def _registration(node: Node, client: RemotingClient, name_servers: list[str]) -> NameServerRegistration:
    registration = NameServerRegistration(
        make.identity(node.config, node.advertised),
        name_servers,
        client,
        node.broker.topics.snapshot,
        node.broker.standing,
        make.registration_options(node.config),
        why_not=node.not_registered,
        run_blocking=node.platform.run_blocking,
    )
    node.broker.topics.subscribe(registration.topics_changed)
    node.broker.topics.wait_told = registration.wait_told
    node.broker.pop.assignments.find_queues = TopicRoutes(client, name_servers).read_queues
    return registration


@asynccontextmanager
async def _registered(registration: NameServerRegistration) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(registration.serve)
        yield
        nursery.cancel_scope.cancel()


def _open_admin(
    node: Node, port: Port, token: SecretStr | None, dashboard: NodeDashboard
) -> AbstractAsyncContextManager[None]:
    view = AdminView(
        status=partial(describe, node),
        not_ready=node.not_ready,
        metrics=partial(samples, node),
        switch=partial(switch_master, node) if node.config.is_member else None,
        dashboard=dashboard,
        actions=NodeActions(node),
    )
    key = AdminKey(None if token is None else token.reveal())
    return open_admin(view, port.listen(), node.tls.secure_admin, key, node.platform.run_blocking)


@asynccontextmanager
async def _open_grpc(node: Node, port: Port | None) -> AsyncIterator[None]:
    """Serves gRPC clients during the block if the node has a port for them. Imports protobuf only in that case."""
    if port is None:
        yield
        return
    await node.platform.run_blocking(partial(import_module, GRPC_MODULE))
    from .grpc import open_grpc

    async with open_grpc(node, port) as node.grpc_server:
        yield


def _open_otlp(node: Node) -> AbstractAsyncContextManager[None]:
    """Sends metrics and traces to a collector during the block, if one is configured. Raises ConfigError if the extra
    `halog[otel]` is not installed."""
    if not node.config.otel_endpoint:
        return nullcontext()
    try:
        from .otlp import open_otlp
    except ImportError as error:
        reason = f"OpenTelemetry is not installed ({error.name})"
        raise ConfigError("otelEndpoint", reason, "pip install 'halog[otel]', or no value") from None
    return open_otlp(node, partial(samples, node))
