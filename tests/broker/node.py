"""A whole broker in the test's own process: real store, real HA service, real remoting server, over memory streams.

Blocking calls run inline and clients connect without sockets, so that the autojump clock moves exactly when nothing
happens.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import trio

from ha.acl import AclGuard, AclPolicy
from ha.broker.broker import Broker, BrokerPorts, Replication, open_broker
from ha.broker.options import BrokerOptions, BrokerRole
from ha.broker.standing import Standing
from ha.broker.world import World
from ha.poller import Poller
from ha.protocol.codes import LanguageCode
from ha.protocol.record import MessageRecord, decode_records, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.sync_state import SyncStateSet
from ha.store.files import Disk, OsDisk
from ha.store.mapped_file import RunBlocking
from ha.store.message_store import MessageStore, open_message_store
from ha.store.options import StoreOptions
from tests.remoting.wire import MemoryListener
from tests.store.disks import run_inline
from tests.store.stores import dispatched

HOST, PORT = "10.0.0.1", 10911
CLIENT_VERSION = 479


class StalledSync:
    """Runs blocking calls inline; each sync of the disk takes `stall_s`."""

    def __init__(self) -> None:
        self.stall_s = 0.0

    async def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "sync":
            await trio.sleep(self.stall_s)
        return await run_inline(call, *arguments)


class WallClock:
    """A wall clock that follows trio's, so that store times are virtual too."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self.start_ms = start_ms

    def __call__(self) -> int:
        return self.start_ms + int(trio.current_time() * 1000) % 1_000_000_000


class Node:
    """A broker and a client of it. `ask` sends one request; `send` and `pull` have defaults."""

    def __init__(
        self, store: MessageStore, ha: HAService, broker: Broker, client: RemotingClient, listener: MemoryListener
    ) -> None:
        self.store = store
        self.ha = ha
        self.broker = broker
        self.client = client
        self.listener = listener
        self.serialize_type = 0
        self.received: list[RemotingCommand] = []
        self.address = "broker"

    async def connect(self, address: str = "") -> trio.abc.Stream:
        """Opens another connection."""
        await trio.lowlevel.checkpoint()
        return self.listener.connect()

    async def ask_alone(self, code: int, body: bytes = b"", **ext: Any) -> RemotingCommand:
        """As `ask`, with a connection of its own, so that it does not wait for other requests."""
        async with open_remoting_client(connect=self.connect) as client:
            other = Node(self.store, self.ha, self.broker, client, self.listener)
            return await other.ask(code, body, **ext)

    async def ask(self, code: int, body: bytes = b"", *, version: int = CLIENT_VERSION, **ext: Any) -> RemotingCommand:
        """Sends a request; ext values become strings, None is omitted."""
        command = RemotingCommand(
            code,
            language=LanguageCode.JAVA,
            version=version,
            ext_fields={name: text(value) for name, value in ext.items() if value is not None},
            body=body,
            serialize_type=self.serialize_type,
        )
        return await self.client.invoke(self.address, command, 60)

    async def send(self, body: bytes = b"hello", *, code: int = 310, **changes: Any) -> RemotingCommand:
        """Sends one message to queue 0 of TT."""
        return await self.ask(code, body, **{**SEND_V2, **changes})

    async def pull(self, offset: int = 0, *, code: int = 11, **changes: Any) -> RemotingCommand:
        """Pulls from queue 0 of TT, with the subscription in the request."""
        return await self.ask(code, **{**PULL, "queueOffset": offset, **changes})

    async def arrivals(self, count: int = 1, offset: int = 0, **changes: Any) -> list[tuple[float, MessageRecord]]:
        """The next `count` messages of queue 0 of TT, each with the time at which it came."""
        found: list[tuple[float, MessageRecord]] = []
        while len(found) < count:
            answer = await self.pull(offset + len(found), sysFlag=6, suspendTimeoutMillis=50_000, **changes)
            found += [(trio.current_time(), record) for record in self.records(answer)]
        return found

    async def dispatched(self) -> None:
        """Waits until every message is dispatched."""
        await dispatched(self.store)

    def records(self, answer: RemotingCommand) -> list[MessageRecord]:
        """The records in a pull's answer."""
        return decode_records(answer.body)


SEND_V2: dict[str, Any] = {
    "a": "pg",
    "b": "TT",
    "c": "TBW102",
    "d": 4,
    "e": 0,
    "f": 0,
    "g": 1_700_000_000_000,
    "h": 0,
    "i": "TAGS\x01TagA\x02",
    "j": 0,
    "k": False,
    "m": False,
}
"""Ext fields of vectors §1's 310."""

SEND_V1: dict[str, Any] = {
    "producerGroup": "pg",
    "topic": "TT",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": 4,
    "queueId": 0,
    "sysFlag": 0,
    "bornTimestamp": 1_700_000_000_000,
    "flag": 0,
}
"""Required ext fields of 10."""

PULL: dict[str, Any] = {
    "consumerGroup": "g",
    "topic": "TT",
    "queueId": 0,
    "queueOffset": 0,
    "maxMsgNums": 32,
    "sysFlag": 4,
    "commitOffset": 0,
    "suspendTimeoutMillis": 15_000,
    "subVersion": 0,
    "subscription": "*",
}


def text(value: object) -> str:
    """Formats an ext field as Java does."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _broker_options(folder: Path, changes: dict[str, Any]) -> BrokerOptions:
    return BrokerOptions(
        **{
            "role": BrokerRole.ASYNC_MASTER,
            "cluster_name": "C",
            "broker_name": "b0",
            "broker_id": int(changes.get("role") is BrokerRole.SLAVE),
            "host": HOST,
            "port": PORT,
            "config_dir": folder / "config",
            **changes,
        }
    )


def _store_options(folder: Path, options: BrokerOptions, changes: dict[str, Any]) -> StoreOptions:
    made = StoreOptions(
        root=folder,
        segment_size=1 << 20,
        queue_entry_count=1000,
        index_slot_count=100,
        index_entry_count=1000,
        is_slave=options.role is BrokerRole.SLAVE,
        store_host=encode_host(HOST, PORT),
        flush_mode="SYNC_FLUSH" if options.flush_sync else "ASYNC_FLUSH",
    )
    return msgspec.structs.replace(made, **changes)


@asynccontextmanager
async def open_node(
    folder: Path,
    *,
    ha_options: HAOptions | None = None,
    store_changes: dict[str, Any] | None = None,
    disk: Disk | None = None,
    run_blocking: RunBlocking = run_inline,
    acl_policy: AclPolicy | None = None,
    wall_clock_ms: Callable[[], int] | None = None,
    standing: Standing | None = None,
    by_set: bool = False,
    poller: Poller | None = None,
    **changes: Any,
) -> AsyncIterator[Node]:
    """A broker named b0 of cluster C with 1 MiB segments; `changes` are BrokerOptions.

    With a `standing` it is a member of a group with failover, whose role the test changes: that of the broker, while
    the store, which no slave's bytes come to, is a master's all the time. `by_set`: its puts wait for the sync-state
    set.
    """
    options = _broker_options(folder, changes)
    store_options = _store_options(folder, options, store_changes or {})
    is_slave = options.role is BrokerRole.SLAVE
    wall_clock_ms = wall_clock_ms or WallClock()
    numbers = count(1)
    listener, fast_listener = MemoryListener(), MemoryListener()

    async def connect(address: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return (fast_listener if address == "fast" else listener).connect()

    received: list[RemotingCommand] = []

    async def on_request(connection: object, commands: list[RemotingCommand]) -> None:
        received.extend(commands)

    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            open_message_store(store_options, disk=disk, run_blocking=run_blocking, wall_clock_ms=wall_clock_ms)
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        ha = HAService(store.log, ha_options or HAOptions(), member=None if standing is None else store)

        def sync_state() -> SyncStateSet | None:
            return None if ha.leadership is None else ha.leadership.sync_state

        if not is_slave:
            await nursery.start(ha.serve, [MemoryListener()])
        broker = await stack.enter_async_context(
            open_broker(
                options,
                store,
                Replication(ha_service=None if is_slave else ha, sync_state=sync_state if by_set else None),
                BrokerPorts(listeners=[listener], fast_listeners=[fast_listener]),
                World(
                    unique_id=lambda: f"UNIQUE{next(numbers):026d}",
                    wall_clock_ms=wall_clock_ms,
                    disk=OsDisk() if disk is None else disk,
                    run_blocking=run_inline,
                    poller=poller,
                ),
                acl_guard=None if acl_policy is None else AclGuard(acl_policy),
                standing=standing,
            )
        )
        client = await stack.enter_async_context(open_remoting_client(connect=connect, handler=on_request))
        node = Node(store, ha, broker, client, listener)
        node.received = received
        yield node
