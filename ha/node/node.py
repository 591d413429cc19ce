"""A running broker node: its parts, and the methods for programs that embed it. startup.py opens and closes the
parts."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from ha.acl import AclGuard
from ha.admin import RecentEvents
from ha.broker.admin_topics import QUEUE_COUNT_MAX
from ha.broker.broker import Broker
from ha.broker.put_request import PutResult
from ha.broker.registration import MasterAddresses, NameServerRegistration
from ha.broker.topics import topic_fault
from ha.config import Config
from ha.failover.member import Member
from ha.failover.member_state import MemberState
from ha.grpc import GrpcServer
from ha.poller import Poller
from ha.protocol.codes import PutStatus
from ha.protocol.headers import Int32, Int64
from ha.protocol.message_id import UniqueIdGenerator
from ha.protocol.properties import find_property
from ha.protocol.record import Message, encode_host
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.statistics import Condition, HAClientState
from ha.store.message_store import MessageStore

from .addresses import NodePorts, reachable
from .loop_delay import LoopDelay
from .options import Advertised
from .platform import Listeners, Platform
from .ports import join
from .reading import Reading, ReadResult, read_queue, wait_messages
from .tls import NodeTls

NOT_JOINED = "it has not joined its group yet"
_HOST_SIZES = len(encode_host("127.0.0.1", 0)), len(encode_host("::1", 0))


class Node:
    """A running broker node. Programs that embed it need `put`, `put_many`, `read`, `messages` and the addresses; the
    parts are public for the rest of ha/node, tests and tools."""

    config: Config
    poller: Poller
    store: MessageStore
    ha_service: HAService
    ha_client: HAClient | None
    broker: Broker
    registration: NameServerRegistration
    grpc_server: GrpcServer | None = None
    """The server of the gRPC port; None if the node has no such port, or while it opens"""

    def __init__(
        self,
        config: Config,
        events: RecentEvents,
        platform: Platform,
        tls: NodeTls,
        ports: NodePorts,
        advertised: Advertised,
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
        """Membership in a failover group; None before the node has joined, and outside a group"""
        self.master_addresses: MasterAddresses | None = None
        """Addresses of the master, as reported by name servers or by the failover group's record; None if unknown, and
        on a master"""
        self._slaves_scope = trio.CancelScope()
        self._slaves_ended = trio.Event()
        self.run_id = 1 + int.from_bytes(platform.random_bytes(7), "big")
        """Distinguishes this process from others with the same broker ID."""
        self.unique_ids = _unique_ids(advertised.store_address, platform)
        self.advertised = advertised
        self.remoting_address = join(advertised.client_host, advertised.client_port)
        self.ha_address = join(advertised.ha_host, advertised.ha_port)
        self.admin_address = join(reachable(ports.admin.host), ports.admin.port)
        self.grpc_address = None if ports.grpc is None else join(advertised.client_host, ports.grpc.port)
        own = ports.name_server
        self.name_server_address = None if own is None else join(reachable(own.host), own.port)

    async def put(self, message: Message) -> PutResult:
        """Stores a message, waits until it is flushed and replicated as the configuration requires, and returns the
        result. See `put_many`."""
        [result] = await self.put_many([message])
        return result

    async def put_many(self, messages: list[Message]) -> list[PutResult]:
        """Stores messages in order, and returns their results in the same order. On a slave, the status of each is
        SERVICE_NOT_AVAILABLE.

        As for a client's send, a missing topic is created if autoCreateTopicEnable allows it, and a missing born
        timestamp or UNIQ_KEY is added. The caller chooses the queue IDs. A message whose topic is missing and can't be
        created, or whose values don't fit into a record, gets the status MESSAGE_ILLEGAL, without an effect on the
        others. If the call is cancelled, the messages may still be stored. Raises DiskFailed.
        """
        if self.broker.standing.is_slave:
            return await self.broker.put_service.put(messages)
        faults = [_message_fault(message) for message in messages]
        queue_ids: dict[str, int] = {}
        for message, fault in zip(messages, faults, strict=True):
            if not fault:
                queue_ids[message.topic] = max(message.queue_id, queue_ids.get(message.topic, 0))
        topic_faults = {topic: await self._topic_fault(topic, queue_id) for topic, queue_id in queue_ids.items()}
        faults = [fault or topic_faults[message.topic] for message, fault in zip(messages, faults, strict=True)]
        sound = [self._complete(message) for message, fault in zip(messages, faults, strict=True) if not fault]
        stored = iter(await self.broker.put_service.put(sound))
        return [
            PutResult(status=PutStatus.MESSAGE_ILLEGAL, remark=fault) if fault else next(stored) for fault in faults
        ]

    async def read(self, topic: str, queue_id: int, queue_offset: int, *, count_max: int = 32) -> ReadResult:
        """Reads up to `count_max` messages (at most 256, or 1 MiB) of a queue from `queue_offset` on.

        Begins at the queue's first message if `queue_offset` is before it. At the end of the queue, the result has no
        messages. Raises OSError if the disk can't read."""
        return await read_queue(self.store, topic, queue_id, queue_offset, count_max)

    def messages(self, topic: str, queue_id: int, queue_offset: int = 0) -> Reading:
        """Returns an endless async iterator over the messages of a queue from `queue_offset` on.

        It waits for messages that are not stored yet, and skips those that were deleted or are damaged beyond repair.
        """
        return Reading(partial(wait_messages, self.store, topic, queue_id), queue_offset)

    async def _topic_fault(self, topic: str, queue_id: int) -> str:
        """Creates the topic, with this queue, if it does not exist. Returns why it can't be created, or ""."""
        topics = self.broker.topics
        if topics.get(topic) is not None:
            return ""
        fault = topic_fault(topic)
        if fault:
            return fault
        if not self.config.auto_create_topic:
            return f"topic {topic} does not exist (autoCreateTopicEnable)"
        created = await topics.ensure(topic, max(self.config.default_topic_queue_nums, queue_id + 1))
        return created if isinstance(created, str) else ""

    def _complete(self, message: Message) -> Message:
        properties = message.properties
        if find_property(properties, b"UNIQ_KEY") is None:
            separator = b"" if not properties or properties.endswith(b"\x02") else b"\x02"
            properties = b"%b%bUNIQ_KEY\x01%b\x02" % (properties, separator, self.unique_ids.next().encode())
        born_ms = message.born_timestamp_ms or self.platform.wall_clock_ms()
        return msgspec.structs.replace(message, properties=properties, born_timestamp_ms=born_ms)

    def not_ready(self) -> str:
        """Returns why this node doesn't serve its role now, or ""."""
        if self.config.is_member and (reason := self._member_not_ready()):
            return reason
        if self.ha_client is not None and self.broker.standing.is_slave:
            link = self.ha_client.statistics()
            if link.state is not HAClientState.TRANSFER:
                return f"not connected to its master ({link.condition.value}: {link.detail})"
            if link.condition is Condition.OUT_OF_RANGE:  # connected, but the master can't send what this slave needs
                way_out = "emptying its store" if self.config.is_member else "haOutOfRange=resync"
                return f"out of its master's range ({link.detail}); {way_out} would copy the log again"
            return ""
        is_writable, reason = self.store.is_writable
        return "" if is_writable else reason

    def _member_not_ready(self) -> str:
        if self.member is None:
            return NOT_JOINED
        progress = self.member.progress
        if progress.state is MemberState.MASTER:
            return "becoming master" if progress.master_id is None else self.broker.standing.why_not_stored()
        if progress.master_id is None:
            return f"{progress.state.value} without a master: {progress.reason or 'an election is in progress'}"
        return ""

    def not_registered(self) -> str:
        """Returns why name servers must not send clients to this node now, or ""."""
        if self.config.is_member and (self.member is None or not self.member.keeper.broker_id.value.is_owned):
            return "another member may have the same broker ID"
        return ""

    async def serve_slaves(
        self, listeners: Listeners, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Runs the HA service until `stop_serving_slaves`."""
        try:
            with self._slaves_scope:
                await self.ha_service.serve(listeners, task_status=task_status)
        finally:
            self._slaves_ended.set()

    async def stop_serving_slaves(self) -> None:
        """Stops the HA service. Puts that still wait for a slave are answered FLUSH_SLAVE_TIMEOUT."""
        self._slaves_scope.cancel()
        await self._slaves_ended.wait()

    @property
    def role(self) -> str:
        """The current role: brokerRole, or SLAVE for a member that is not the master."""
        return "SLAVE" if self.config.is_member and self.broker.standing.is_slave else self.config.broker_role

    @property
    def ready_line(self) -> str:
        """The line that an entry point prints when the node serves."""
        return (
            f"READY role={self.role} remoting={self.remoting_address} ha={self.ha_address}"
            f" admin={self.admin_address} store={self.config.store_path_root_dir}"
        )


class _Storable(msgspec.Struct):
    """The types and ranges that a record requires of the fields of a `Message`. Used to check the messages of programs
    that embed the node."""

    topic: str
    queue_id: Annotated[int, Meta(ge=0, lt=QUEUE_COUNT_MAX)]
    body: bytes
    properties: bytes
    flag: Int32
    sys_flag: Int32
    born_timestamp_ms: Int64
    born_host: bytes
    reconsume_times: Int32
    prepared_transaction_offset: Int64


def _message_fault(message: Message) -> str:
    """Returns why a message can't be stored as a record, or ""."""
    try:
        msgspec.convert(message, _Storable, from_attributes=True, builtin_types=(bytes, bytearray, memoryview))
    except msgspec.ValidationError as error:
        return f"the message can't be stored: {error}"
    if b"\0" in bytes(message.properties):
        return "the message can't be stored: its properties contain the character NUL"
    return "" if len(message.born_host) in _HOST_SIZES else "the message can't be stored: born_host is no host"


def _unique_ids(address: str, platform: Platform) -> UniqueIdGenerator:
    return UniqueIdGenerator(
        address=encode_host(address, 0)[:-4],
        process_id=platform.process_id,
        process_hash=platform.process_hash,
        wall_clock_ms=platform.wall_clock_ms,
        month_ms=_month_ms,
    )


def _month_ms(now_ms: int) -> tuple[int, int]:
    """Returns the start of the month of `now_ms` and of the next month, both in local time, as Unix time in ms."""
    now = datetime.fromtimestamp(now_ms / 1000)
    month = now.year * 12 + now.month - 1
    start, end = (datetime(each // 12, each % 12 + 1, 1).timestamp() for each in (month, month + 1))
    return int(start * 1000), int(end * 1000)
