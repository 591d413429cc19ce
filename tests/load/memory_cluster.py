"""Whole nodes on a virtual clock: `ha.node` as it is, on addresses, disks and a wall clock that exist in memory only.

For long times and for networks that are set up wrongly. Nothing is lost or delayed here: for faults see tests/sim.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from weakref import WeakSet

import trio
from trio.testing import memory_stream_pair

from ha.config import Config
from ha.errors import AddressInUse
from ha.node import Node, open_node
from ha.node.platform import Platform
from ha.protocol.codes import LanguageCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from tests.store.disks import MemoryDisk, run_inline

START_MS = 1_700_000_000_000
EPHEMERAL = range(32768, 61000)
BACKLOG = 1000

SMALL_FILES: dict[str, Any] = {
    "segment_size": 64 * 1024,
    "mapped_file_size_consume_queue_bytes": 20 * 1000,
    "index_slot_count": 100,
    "index_entry_count": 500,
}


class LastingDisk(MemoryDisk):
    """A disk that is never crashed, so it keeps no second copy and no history; file times are the wall clock's."""

    def __init__(self, wall_clock_ms: Callable[[], int]) -> None:
        super().__init__()
        self._wall_clock_ms = wall_clock_ms

    def step(self, operation: str, path: Path) -> None:
        if operation in ("create", "write_bytes"):
            self.now_ms = self._wall_clock_ms()
        if operation == "sync":
            self.inodes[path].modified_ms = self._wall_clock_ms()

    def read_bytes(self, path: Path) -> bytes:
        if path not in self.inodes:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return super().read_bytes(path)

    def power_loss(self, random: Random) -> MemoryDisk:
        raise AssertionError("this disk keeps no record of what was synced")


class MemoryPort:
    """One address of a `MemoryNetwork`, taken but not listened on until `listen`."""

    def __init__(self, network: MemoryNetwork, key: str, host: str, port: int) -> None:
        self.key = key
        self.host = host
        self.port = port or network.free_port(host)
        self.accepting: trio.MemorySendChannel[trio.abc.Stream] | None = None
        self._network = network
        if (host, self.port) in network.ports:
            raise AddressInUse(key, host, self.port, "Address already in use")
        network.ports[host, self.port] = self

    def listen(self) -> list[trio.abc.Listener[trio.abc.Stream]]:
        self.accepting, accepted = trio.open_memory_channel[trio.abc.Stream](BACKLOG)
        return [MemoryListener(self, accepted)]

    def __enter__(self) -> MemoryPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.accepting = None
        self._network.ports.pop((self.host, self.port), None)


class MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts what is connected to its port."""

    def __init__(self, port: MemoryPort, accepted: trio.MemoryReceiveChannel[trio.abc.Stream]) -> None:
        self._port = port
        self._accepted = accepted

    async def accept(self) -> trio.abc.Stream:
        return await self._accepted.receive()

    async def aclose(self) -> None:
        self._port.accepting = None
        self._accepted.close()
        await trio.lowlevel.checkpoint()


class MemoryNetwork:
    """Hosts are IP addresses as text. `blocked`: addresses whose packets a firewall drops."""

    def __init__(self) -> None:
        self.ports: dict[tuple[str, int], MemoryPort] = {}
        self.blocked: set[str] = set()
        self._streams: dict[str, WeakSet[trio.abc.Stream]] = {}
        self._numbers = count(0)

    def free_port(self, host: str) -> int:
        return next(port for port in EPHEMERAL if (host, port) not in self.ports)

    async def connect(self, here: str, address: str) -> trio.abc.Stream:
        """Open a stream from `here` to `host:port`. ConnectionRefusedError if nobody listens."""
        await trio.lowlevel.checkpoint()
        if address in self.blocked:
            await trio.sleep_forever()
        host, _, port = address.rpartition(":")
        listening = self.ports.get((host, int(port)))
        if listening is None or listening.accepting is None:
            raise ConnectionRefusedError(f"nobody listens on {address}")
        ours, theirs = memory_stream_pair()
        ours.peer_address = (host, int(port))  # type: ignore[attr-defined]
        theirs.peer_address = (here, EPHEMERAL[next(self._numbers) % len(EPHEMERAL)])  # type: ignore[attr-defined]
        listening.accepting.send_nowait(theirs)
        self._streams.setdefault(address, WeakSet()).add(theirs)
        return ours

    async def cut(self, address: str) -> int:
        """End every connection to `host:port`; returns how many there were, with some that were already over."""
        streams = self._streams.pop(address, ())
        for stream in list(streams):
            await trio.aclose_forcefully(stream)
        return len(streams)


class Host:
    """One machine: an address on the network, and a disk that outlives the nodes that run on it."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self.network = network
        self.address = address
        self.began = trio.current_time()
        self.disk = LastingDisk(self.wall_clock_ms)

    def wall_clock_ms(self) -> int:
        return START_MS + int((trio.current_time() - self.began) * 1000)

    async def connect(self, address: str) -> trio.abc.Stream:
        return await self.network.connect(self.address, address)

    def bind(self, key: str, host: str, port: int) -> MemoryPort:
        return MemoryPort(self.network, key, host, port)

    def platform(self) -> Platform:
        return Platform(
            disk=self.disk,
            run_blocking=run_inline,
            wall_clock_ms=self.wall_clock_ms,
            bind=self.bind,
            connect=self.connect,
            own_address=lambda wildcard: self.address,
            resolve=lambda host: host,
            process_id=1,
            process_hash=1,
        )

    def node(self, role: str, **changes: Any) -> AbstractAsyncContextManager[Node]:
        """Run a node here, with small files, on RocketMQ's ports; a slave looks for its master at 10.0.0.1."""
        given: dict[str, Any] = {
            "broker_role": role,
            "broker_name": "broker-a",
            "bind_address": self.address,
            "broker_ip1": self.address,
            "listen_port": 10911,
            "admin_bind_address": self.address,
            "store_path_root_dir": f"/{role.lower()}",
            **SMALL_FILES,
        }
        if role == "SLAVE":
            given["name_server_addresses"] = "10.0.0.1:9876"
        return open_node(Config(**{**given, **changes}), self.platform())


class Client:
    """Requests to one broker from a client on another host."""

    def __init__(self, client: RemotingClient, address: str) -> None:
        self._client = client
        self._address = address

    async def ask(self, code: int, body: bytes = b"", **ext: Any) -> RemotingCommand:
        command = RemotingCommand(
            code,
            language=LanguageCode.JAVA,
            version=479,
            ext_fields={name: str(value) for name, value in ext.items()},
            body=body,
        )
        return await self._client.invoke(self._address, command, 60)

    async def send(self, body: bytes, *, topic: str = "TT", queue_id: int = 0) -> RemotingCommand:
        return await self.ask(
            310, body, a="PG", b=topic, c="TBW102", d=4, e=queue_id, f=0, g=1_700_000_000_000, h=0, i="", j=0, k="false"
        )

    async def commit(self, offset: int, *, topic: str = "TT", queue_id: int = 0, group: str = "CG") -> RemotingCommand:
        return await self.ask(15, consumerGroup=group, topic=topic, queueId=queue_id, commitOffset=offset)

    async def committed(self, *, topic: str = "TT", queue_id: int = 0, group: str = "CG") -> int:
        """The committed queue offset; -1 if the broker knows none."""
        answer = await self.ask(14, consumerGroup=group, topic=topic, queueId=queue_id)
        return int(answer.ext_fields["offset"]) if answer.code == 0 else -1


@asynccontextmanager
async def open_client(network: MemoryNetwork, address: str, here: str = "10.0.9.9") -> AsyncIterator[Client]:
    """A client of the broker at `host:port`."""

    async def connect(wanted: str) -> trio.abc.Stream:
        return await network.connect(here, wanted)

    async with open_remoting_client(connect=connect) as client:
        yield Client(client, address)
