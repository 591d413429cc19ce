"""One broker process: store, replication, front, admin, opened in this order and closed in reverse.

    async with open_master(Config(broker_role="SYNC_MASTER")) as master:
        result = await master.put(Message(topic="greetings", queue_id=0, body=b"hello"))

Each room is an async context manager or a task of the node's nursery; whatever one of them raises closes the others and
comes out of the block. Ports are bound first (a taken one is told before a long recovery) and listened on when
what is behind them serves.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from datetime import datetime
from functools import partial

import msgspec
import trio

from ha.acl import AclGuard, guard_options
from ha.admin import AdminKey, AdminView, RecentEvents, open_admin
from ha.broker.broker import Broker, BrokerPorts, Replication, open_broker
from ha.broker.put_request import PutResult
from ha.broker.registration import MasterAddresses, NameServerRegistration
from ha.broker.standing import Standing
from ha.broker.topics import topic_fault
from ha.broker.world import World
from ha.config import Config, SecretStr, is_loopback
from ha.errors import ConfigError
from ha.failover.member import Member
from ha.namesrv import NameServer, NameServerOptions
from ha.poller import Poller, open_poller
from ha.protocol.codes import PutStatus
from ha.protocol.message_id import UniqueIdGenerator
from ha.protocol.properties import find_property
from ha.protocol.record import Message, encode_host
from ha.remoting import RemotingClient, open_remoting_client
from ha.replication.group_transfer import ALL_IN_SYNC, AckRequest
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.handshake import HandshakeOptions
from ha.replication.healer import Healer
from ha.replication.statistics import Condition, HAClientState
from ha.replication.sync_state import SyncStateSet
from ha.store.message_store import MessageStore, open_message_store

from . import options as make
from .access import read_access
from .addresses import NodePorts, advertise, reachable, take_ports
from .dashboard import NodeDashboard
from .healing import heal_peers
from .loop_delay import LoopDelay
from .master_address import ask_min_offset, master_broker_address
from .member import NOT_JOINED, open_membership, switch_master, wait_role, why_not_ready, why_not_registered
from .metrics import samples
from .platform import Listeners, Platform, Port
from .ports import join
from .status import describe
from .tls import NodeTls, load_tls

logger = logging.getLogger(__name__)

OWN_CONNECTIONS_MAX = 4

TOLD_S_MAX = 3.0
"""How long a member that plays its first role waits for name servers that don't answer."""

MASTER_SAYS = "from the name server, where the master registers its brokerIP2 and haListenPort"

GRACE_S_MAX = 1.0
GRACE_SHARE = 0.1
"""How long a stopping master waits for its slaves: at most so long, and so much of shutdownTimeout."""


class Node:
    """A broker that runs. Its parts are there for tests and tools; users need `put` and the addresses."""

    config: Config
    poller: Poller
    store: MessageStore
    ha_service: HAService
    ha_client: HAClient | None
    broker: Broker
    registration: NameServerRegistration

    def __init__(
        self,
        config: Config,
        events: RecentEvents,
        platform: Platform,
        tls: NodeTls,
        ports: NodePorts,
        advertised: make.Advertised,
        acl_guard: AclGuard | None,
    ) -> None:
        self.acl_guard = acl_guard
        self.config = config
        self.platform = platform
        self.tls = tls
        self.events = events
        self.opened_at = trio.current_time()
        self.loop_delay = LoopDelay()
        self.ha_client = None
        self.member: Member | None = None
        """Of a node in a failover group, from when its front is open"""
        self.told_master: MasterAddresses | None = None
        self._slaves_scope = trio.CancelScope()
        self._slaves_ended = trio.Event()
        self.run_id = 1 + int.from_bytes(platform.random_bytes(7), "big")
        """Tells this process from others with the same broker id"""
        self.unique_ids = _unique_ids(advertised.store_address, platform)
        self.advertised = advertised
        self.remoting_address = join(advertised.client_host, advertised.client_port)
        self.ha_address = join(advertised.ha_host, advertised.ha_port)
        self.admin_address = join(reachable(ports.admin.host), ports.admin.port)
        own = ports.name_server
        self.name_server_address = None if own is None else join(reachable(own.host), own.port)

    async def put(self, message: Message) -> PutResult:
        """Store a message and wait for whatever the configuration promises. See `put_many`."""
        [result] = await self.put_many([message])
        return result

    async def put_many(self, messages: list[Message]) -> list[PutResult]:
        """Store messages in their order with one append. On a slave each result is SERVICE_NOT_AVAILABLE.

        What a client's send does on the way is done here too: the topic is made if autoCreateTopicEnable allows it,
        born time and UNIQ_KEY are added if missing. Queue ids are the caller's. A cancelled put may still be stored.
        """
        if self.broker.standing.is_slave:
            return await self.broker.put_service.put(messages)
        faults = {message.topic: await self._topic_fault(message) for message in messages}
        stored = iter(await self.broker.put_service.put([self._complete(m) for m in messages if not faults[m.topic]]))
        return [
            PutResult(status=PutStatus.MESSAGE_ILLEGAL, remark=faults[message.topic])
            if faults[message.topic]
            else next(stored)
            for message in messages
        ]

    async def _topic_fault(self, message: Message) -> str:
        """Make the topic if need be; return why a message can't go there, or ""."""
        topics, topic = self.broker.topics, message.topic
        if topics.get(topic) is not None:
            return ""
        fault = topic_fault(topic)
        if fault:
            return fault
        if not self.config.auto_create_topic_enable:
            return f"topic {topic} does not exist (autoCreateTopicEnable)"
        made = await topics.ensure(topic, max(self.config.default_topic_queue_nums, message.queue_id + 1))
        return made if isinstance(made, str) else ""

    def _complete(self, message: Message) -> Message:
        properties = message.properties
        if find_property(properties, b"UNIQ_KEY") is None:
            end = b"" if not properties or properties.endswith(b"\x02") else b"\x02"
            properties = b"%b%bUNIQ_KEY\x01%b\x02" % (properties, end, self.unique_ids.next().encode())
        born_ms = message.born_timestamp_ms or self.platform.wall_clock_ms()
        return msgspec.structs.replace(message, properties=properties, born_timestamp_ms=born_ms)

    def not_ready(self) -> str:
        """Return why this node doesn't serve its role now, or ""."""
        if self.config.is_member and (self.member is None or (reason := why_not_ready(self, self.member))):
            return reason if self.member is not None else NOT_JOINED
        if self.ha_client is not None and self.broker.standing.is_slave:
            link = self.ha_client.statistics()
            if link.state is not HAClientState.TRANSFER:
                return f"not connected to its master ({link.condition.value}: {link.detail})"
            if link.condition is Condition.OUT_OF_RANGE:  # connected, and waiting for what will never come
                return f"out of its master's range ({link.detail}); haOutOfRange=resync would start anew"
            return ""
        is_writable, reason = self.store.is_writable
        return "" if is_writable else reason

    async def serve_slaves(
        self, listeners: Listeners, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the HA service until `stop_serving_slaves`."""
        try:
            with self._slaves_scope:
                await self.ha_service.serve(listeners, task_status=task_status)
        finally:
            self._slaves_ended.set()

    async def stop_serving_slaves(self) -> None:
        """End the HA service: what still waits for a slave is answered FLUSH_SLAVE_TIMEOUT."""
        self._slaves_scope.cancel()
        await self._slaves_ended.wait()

    @property
    def role(self) -> str:
        """What it is now: brokerRole, of a member SLAVE as long as it is not the master."""
        return "SLAVE" if self.config.is_member and self.broker.standing.is_slave else self.config.broker_role

    @property
    def ready_line(self) -> str:
        """What an entry point prints when the node serves."""
        return (
            f"READY role={self.role} remoting={self.remoting_address} ha={self.ha_address}"
            f" admin={self.admin_address} store={self.config.store_path_root_dir}"
        )


@asynccontextmanager
async def open_node(config: Config, platform: Platform | None = None) -> AsyncIterator[Node]:
    """A broker node, serving while the block runs. `platform` is the world it lives in, by default the real one.

    Raises AddressInUse, StoreLocked, CorruptLog, DiskFailed, ConfigError (an address that can't be resolved), in
    exception groups. Leaving or cancelling the block stops it in order: nobody new is accepted, what is in flight is
    answered or fails, the log is flushed, the checkpoint written.
    """
    platform = Platform() if platform is None else platform
    with RecentEvents().kept() as events, ExitStack() as bound:
        ports = take_ports(config, platform, bound)
        advertised = await advertise(config, platform, ports)
        tls = await load_tls(config, platform)
        access = await read_access(config, platform)
        acl_guard = None
        if access.acl_files is not None:
            acl_guard = AclGuard(await access.acl_files.load(), guard_options(config))
        _warn_of_plain_text(config)
        _warn_of_waiting_for_nobody(config)
        node = Node(config, events, platform, tls, ports, advertised, acl_guard)
        own_send, own_receive = trio.open_memory_channel[trio.abc.Stream](OWN_CONNECTIONS_MAX)
        name_servers = config.name_servers if node.name_server_address is None else [node.name_server_address]
        async with (
            open_message_store(
                make.store_options(config, advertised, platform.open_files_max),
                disk=platform.disk,
                run_blocking=platform.run_blocking,
                wall_clock_ms=platform.wall_clock_ms,
            ) as node.store,
            open_poller() as node.poller,
            open_remoting_client(
                connect=partial(_connect, node, own_send),
                sign=None if access.credentials is None else access.credentials.sign,
            ) as client,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(tls.keep_fresh)
            nursery.start_soon(node.loop_delay.serve)
            if ports.name_server is not None:
                await _start_name_server(node, ports.name_server, own_receive, nursery)
            await _start_replication(node, client, ports.ha, nursery, access.handshake)
            nursery.start_soon(_heal, node, client, name_servers, access.handshake)
            async with _open_front(node, client, ports) as node.broker:
                if acl_guard is not None and access.acl_files is not None:
                    interval_s = config.acl_reload_interval_ms / 1000
                    nursery.start_soon(access.acl_files.keep_loaded, acl_guard, interval_s)
                node.broker.admin.info.describe = partial(make.told_to_tools, config)
                node.registration = _registration(node, client, name_servers)
                if node.ha_client is not None and not config.is_member:
                    nursery.start_soon(_follow_master, node, node.ha_client)
                    nursery.start_soon(_sync_tables_when_connected, node, node.ha_client)
                async with (
                    _registered(node.registration),
                    _open_admin(node, ports.admin, access.admin_token),
                    _open_otlp(node),
                    open_membership(node, access.etcd_password) if config.is_member else nullcontext(),
                ):
                    if node.broker.slave_sync is not None:
                        # The name servers have been asked by now: a master whose address is missing still is away.
                        node.broker.slave_sync.sync_soon()
                    yield node
                node.broker.stop_reading()
                await _finish_what_waits(node)
            nursery.cancel_scope.cancel()


def _open_front(node: Node, client: RemotingClient, ports: NodePorts) -> AbstractAsyncContextManager[Broker]:
    """Return the broker of a node whose store and replication run."""
    config, platform = node.config, node.platform
    return open_broker(
        make.broker_options(config, node.advertised),
        node.store,
        Replication(
            ha_service=None if config.is_slave else node.ha_service,
            ha_client=node.ha_client,
            client=client,
            master_address=partial(_master_address, node),
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
        standing=_standing_of_member(config) if config.is_member else None,
    )


def _standing_of_member(config: Config) -> Standing:
    return Standing(config.broker_name, config.broker_id, is_slave=True, is_elected=True)


def _sync_state(node: Node) -> SyncStateSet | None:
    """Who must have a put, in the present term of a member."""
    leadership = node.ha_service.leadership
    return None if leadership is None else leadership.sync_state


def _registration(node: Node, client: RemotingClient, name_servers: list[str]) -> NameServerRegistration:
    """Return the node's standing with its name servers, which hears of each change of a topic."""
    made = NameServerRegistration(
        make.identity(node.config, node.advertised),
        name_servers,
        client,
        node.broker.topics.snapshot,
        node.broker.standing,
        make.registration_options(node.config),
        why_not=partial(why_not_registered, node) if node.config.is_member else lambda: "",
    )
    node.broker.topics.subscribe(made.topics_changed)
    node.broker.topics.wait_told = made.wait_told
    return made


def _open_admin(node: Node, port: Port, token: SecretStr | None) -> AbstractAsyncContextManager[None]:
    switch = partial(switch_master, node) if node.config.is_member else None
    view = AdminView(
        status=partial(describe, node),
        not_ready=node.not_ready,
        metrics=partial(samples, node),
        switch=switch,
        dashboard=NodeDashboard(node),
    )
    key = AdminKey(None if token is None else token.reveal())
    return open_admin(view, port.listen(), node.tls.secure_admin, key, node.platform.run_blocking)


def _open_otlp(node: Node) -> AbstractAsyncContextManager[None]:
    """Send metrics and traces to a collector, if there is one."""
    if not node.config.otel_endpoint:
        return nullcontext()
    try:
        from .otlp import open_otlp
    except ImportError as error:
        reason = f"is set, and OpenTelemetry is not installed ({error.name})"
        raise ConfigError("otelEndpoint", reason, "pip install 'halog[otel]', or nothing here") from None
    return open_otlp(node)


async def _start_name_server(
    node: Node, port: Port, own: trio.MemoryReceiveChannel[trio.abc.Stream], nursery: trio.Nursery
) -> None:
    """Start the name server inside the node; `own` brings the node's own connections to it."""
    options = NameServerOptions(remoting=make.remoting_options(node.config, node.platform.open_files_max))
    name_server = NameServer(options, tls=node.tls.remoting_port, guard=node.acl_guard)
    await nursery.start(name_server.serve, port.listen())
    nursery.start_soon(_serve_itself, name_server, own)


async def _connect(node: Node, own: trio.MemorySendChannel[trio.abc.Stream], address: str) -> trio.abc.Stream:
    """Open a stream to a name server or a master's remoting port; OSError.

    To the name server in this very node, if its port speaks TLS or has access control, without the network: whom should
    a node that trusts nobody ask for a certificate, and which one should it show itself?
    """
    is_open = node.tls.remoting_port is None and node.acl_guard is None
    if address != node.name_server_address or is_open:
        return await node.tls.connect(address)
    ours, theirs = trio.socket.socketpair()
    try:
        own.send_nowait(trio.SocketStream(theirs))
    except (trio.WouldBlock, trio.BrokenResourceError):
        ours.close()
        theirs.close()
        raise ConnectionRefusedError("the node's own name server is too busy") from None
    return trio.SocketStream(ours)


async def _serve_itself(name_server: NameServer, own: trio.MemoryReceiveChannel[trio.abc.Stream]) -> None:
    """Serve the node's own connections to its name server."""
    async with own, trio.open_nursery() as nursery:
        async for stream in own:
            nursery.start_soon(partial(name_server.server.handle, stream, is_own=True))


async def _start_replication(
    node: Node, client: RemotingClient, port: Port, nursery: trio.Nursery, handshake: HandshakeOptions | None
) -> None:
    """Start the HA port, which a slave has too (for slaves of its own, as RocketMQ), and a slave's link."""
    options = msgspec.structs.replace(make.ha_options(node.config, node.platform.open_files_max), handshake=handshake)
    config = node.config
    member = node.store if config.is_member else None
    node.ha_service = HAService(
        node.store.log,
        options,
        advertised_address=node.ha_address,
        secure=node.tls.secure_slave,
        member=member,
        poller=node.poller,
    )
    node.store.set_retain_from(node.ha_service.lowest_needed_offset)
    await nursery.start(node.serve_slaves, port.listen())
    if not (config.is_slave or config.is_member):
        return

    async def master_min_offset() -> int | None:
        return await ask_min_offset(client, _master_address(node))

    node.ha_client = HAClient(
        node.store.log,
        options,
        node.tls.connect_to_master,
        master_min_offset=master_min_offset,
        own_port=port.port,
        member=member,
        broker_id=config.broker_id,
        run_id=node.run_id,
        is_learner=config.async_learner,
        jitter=node.platform.jitter,
    )
    node.ha_client.set_master(config.ha_master_address or None, origin="haMasterAddress")
    await nursery.start(node.ha_client.run)


async def _heal(
    node: Node, client: RemotingClient, name_servers: list[str], handshake: HandshakeOptions | None
) -> None:
    """Have peers' bytes put in the place of damaged ones, until cancelled."""
    healer = Healer(
        node.store.verified,
        partial(heal_peers, node, client, name_servers),
        connect=node.tls.connect_to_master,
        options=msgspec.structs.replace(make.ha_options(node.config), handshake=handshake),
        segment_size=node.config.mapped_file_size_commit_log_bytes,
    )
    await healer.run()


async def _finish_what_waits(node: Node) -> None:
    """Let the slaves catch up with all that is stored, for a moment; then answer what still waits for one.

    The front is still there, so that the answers go out, but takes nothing new: what came now would be stored without
    a slave, or without an answer. It closes next.
    """
    caught_up = trio.Event()
    grace_s = min(GRACE_S_MAX, node.config.shutdown_timeout_ms / 1000 * GRACE_SHARE)
    with trio.move_on_after(grace_s) as grace:
        await node.broker.sender.wait_all_answered()  # those that are not in the log yet get there meanwhile
        end = AckRequest(
            next_offset=node.store.log.max_offset.value,
            ack_count=ALL_IN_SYNC,
            deadline=grace.deadline,
            on_done=lambda _: caught_up.set(),
        )
        await node.ha_service.group_transfer.submit_channel.send([end])
        await caught_up.wait()
    await node.stop_serving_slaves()


def _master_address(node: Node) -> str | None:
    return master_broker_address(node.told_master, node.config.ha_master_address or None)


async def _follow_master(node: Node, ha_client: HAClient) -> None:
    """Hand on what name servers tell: to replication unless haMasterAddress is set, and to the copying of tables."""
    while True:
        told = await node.registration.master.wait_value(lambda now: now != node.told_master)
        node.told_master = told
        if told is not None and not node.config.ha_master_address:
            ha_client.set_master(told.ha_address, origin=MASTER_SAYS)
        if node.broker.slave_sync is not None:
            node.broker.slave_sync.sync_soon()


async def _sync_tables_when_connected(node: Node, ha_client: HAClient) -> None:
    """A master that is back has old consumer offsets: let it know what was committed here, before it is asked."""
    while True:
        await ha_client.state.wait_transition(HAClientState.TRANSFER)
        if node.broker.slave_sync is not None:
            node.broker.slave_sync.sync_soon()


@asynccontextmanager
async def _registered(registration: NameServerRegistration) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(registration.serve)
        yield
        nursery.cancel_scope.cancel()


def _warn_of_plain_text(config: Config) -> None:
    for what, key, host, mode in (
        ("remoting", "tls.server.mode", config.bind_address, config.tls_server_mode),
        ("ha", "haTls", config.bind_address, config.ha_tls),
        ("admin", "adminTls", config.admin_bind_address, config.admin_tls),
    ):
        if mode != "enforcing" and not is_loopback(host):
            text = "plain_text port=%s address=%s %s=%s: whoever is on the way can read and change what is said"
            logger.warning(text, what, host, key, mode)
    if (config.tls_enable or config.ha_tls == "enforcing") and not config.tls_client_auth_server:
        logger.warning("tls_servers_unchecked tls.client.authServer=false: any server is taken for the right one")


def _warn_of_waiting_for_nobody(config: Config) -> None:
    """With RocketMQ 5.x's defaults a SYNC_MASTER says SEND_OK without any slave, which its name does not tell."""
    policy = make.replica_policy(config)
    if config.broker_role != "SYNC_MASTER" or policy is None:
        return
    if policy.min_in_sync_replicas > 1 or (policy.in_sync_replicas > 1 and not policy.all_in_sync):
        return
    waits_for = "only slaves that are in sync" if policy.all_in_sync else "no slave"
    logger.warning(
        "sync_master_alone inSyncReplicas=%d minInSyncReplicas=%d allAckInSyncStateSet=%s: SYNC_MASTER waits for %s, "
        "so SEND_OK can mean this node alone; set inSyncReplicas=2%s, or none of these keys to wait for one slave",
        policy.in_sync_replicas,
        policy.min_in_sync_replicas,
        str(policy.all_in_sync).lower(),
        waits_for,
        " and minInSyncReplicas=2" if policy.all_in_sync else "",
    )


def _unique_ids(address: str, platform: Platform) -> UniqueIdGenerator:
    return UniqueIdGenerator(
        address=encode_host(address, 0)[:-4],
        process_id=platform.process_id,
        process_hash=platform.process_hash,
        wall_clock_ms=platform.wall_clock_ms,
        month_ms=_month_ms,
    )


def _month_ms(now_ms: int) -> tuple[int, int]:
    """When the local month of `now_ms` began, and when the next one does."""
    now = datetime.fromtimestamp(now_ms / 1000)
    month = now.year * 12 + now.month - 1
    start, end = (datetime(each // 12, each % 12 + 1, 1).timestamp() for each in (month, month + 1))
    return int(start * 1000), int(end * 1000)


@asynccontextmanager
async def open_master(config: Config | None = None) -> AsyncIterator[Node]:
    """A master as `config` says, by default an ASYNC_MASTER on the default ports. See `open_node`."""
    config = Config() if config is None else config
    if config.is_slave:
        raise ConfigError("brokerRole", "SLAVE is no master", "ASYNC_MASTER, SYNC_MASTER")
    if config.is_member:
        raise ConfigError("etcdEndpoints", "elections decide who is master", "nothing here, or `python -m ha.member`")
    async with open_node(config) as node:
        yield node


@asynccontextmanager
async def open_slave(config: Config | None = None) -> AsyncIterator[Node]:
    """A slave as `config` says, by default of the master on the default ports. See `open_node`."""
    config = Config(broker_role="SLAVE") if config is None else config
    if not config.is_slave:
        raise ConfigError("brokerRole", f"{config.broker_role} is no slave", "SLAVE")
    async with open_node(config) as node:
        yield node


@asynccontextmanager
async def open_member_node(config: Config) -> AsyncIterator[Node]:
    """A member of a failover group; yielded when it plays its first role. See `open_node`."""
    if not config.is_member:
        raise ConfigError("etcdEndpoints", "is unset, and a member needs it", "the URLs of etcd's servers")
    async with open_node(config) as node:
        assert node.member is not None
        await wait_role(node.member)
        with trio.move_on_after(TOLD_S_MAX):
            await node.registration.wait_told()
        yield node


@asynccontextmanager
async def serve_member(config: Config) -> AsyncIterator[str]:
    """For the entry point: `open_member_node`, yielding the READY line."""
    async with open_member_node(config) as node:
        yield node.ready_line


@asynccontextmanager
async def serve_master(config: Config) -> AsyncIterator[str]:
    """For the entry point: `open_master`, yielding the READY line."""
    async with open_master(config) as node:
        yield node.ready_line


@asynccontextmanager
async def serve_slave(config: Config) -> AsyncIterator[str]:
    """For the entry point: `open_slave`, yielding the READY line."""
    async with open_slave(config) as node:
        yield node.ready_line
