"""A master and a slave in this process, on real ports and files, small and cheap; and a checking consumer.

A pair's store is filled once, stopped in order, and copied for each test.
"""

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

import ha
from ha.node import Node
from ha.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from ha.protocol.headers import PullMessageRequest, PullMessageResponse, parse_header
from ha.protocol.record import decode_records
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from ha.replication.progress import SlaveState
from tests.interop.processes import free_ports
from tests.store.stores import reached

SEGMENT = 256 << 10
SLOT_COUNT = 500
MESSAGE_COUNT = 1500
QUEUES = [("T", 0), ("T", 1), ("U", 0)]
TIMEOUT_S = 60.0
PULL_CODES = {
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
}


def config(root: Path, **keys: Any) -> ha.Config:
    return ha.Config(
        **{
            "listen_port": 0,
            "broker_name": "a",
            "store_path_root_dir": str(root),
            "segment_size": SEGMENT,
            "mapped_file_size_consume_queue_bytes": 20 * 200,
            "index_slot_count": SLOT_COUNT,
            "index_entry_count": 1000,
            "scrub_bytes_per_s": 1 << 30,
            "ha_heartbeat_interval_ms": 500,
            **keys,
        }
    )


class Pair:
    """Two stores, a name server's and two HA ports. `master` and `slave` while `running`."""

    master: Node
    slave: Node

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ha_ports = {"master": free_ports(), "slave": free_ports()}

    def store(self, role: str) -> Path:
        return self.root / role

    def node(self, role: str) -> Node:
        return self.master if role == "master" else self.slave

    @asynccontextmanager
    async def running(self, *, without: str = "", **keys: Any) -> AsyncIterator[None]:
        """Runs both nodes, or the master alone. A master heals from its slave, a slave from its master."""
        ports = self.ha_ports
        common = {"heal_from": f"127.0.0.1:{ports['slave']}", **keys}
        async with ha.open_master(
            config(self.store("master"), ha_listen_port=ports["master"], **common)
        ) as self.master:
            if without == "slave":
                yield
                return
            async with self.slave_of(self.master, self.store("slave"), ports["slave"]) as self.slave:
                yield

    @asynccontextmanager
    async def slave_of(self, master: Node, root: Path, ha_port: int, **keys: Any) -> AsyncIterator[Node]:
        assert self.master.name_server_address is not None
        given = config(
            root,
            broker_role="SLAVE",
            ha_listen_port=ha_port,
            name_server_addresses=self.master.name_server_address,
            ha_master_address=master.ha_address,
            **keys,
        )
        async with ha.open_slave(given) as slave:
            yield slave


async def fill(root: Path) -> None:
    """Puts messages to a pair, waits until the slave has them all, and stops both."""
    pair = Pair(root)
    async with pair.running():
        with trio.fail_after(TIMEOUT_S):
            await pair.master.ha_service.wait_state(SlaveState.TRANSFER)
            for number in range(0, MESSAGE_COUNT, 30):
                batch = [message(n) for n in range(number, number + 30)]
                await pair.master.put_many(batch)
            await followed(pair.master, pair.slave)


def message(number: int) -> ha.LogMessage:
    topic, queue_id = QUEUES[number % 3]
    body = f"{number}-".encode() * (30 + number % 80)
    properties = b"TAGS\x01t%d\x02KEYS\x01k%d\x02" % (number % 3, number)
    return ha.LogMessage(topic=topic, queue_id=queue_id, body=body, properties=properties)


async def followed(master: Node, slave: Node) -> None:
    """Waits until a slave has received and dispatched everything."""
    end = master.store.log.max_offset.value
    for offset in (slave.store.log.max_offset, slave.store.log.dispatched_offset, master.store.log.dispatched_offset):
        await reached(offset, end)


async def healed(node: Node) -> None:
    """Waits until all damage is healed."""
    with trio.fail_after(TIMEOUT_S):
        while node.store.damage.open:
            await node.store.damage.wait_changed()


def copied(filled: Path, root: Path) -> Pair:
    """A new pair with a filled store."""
    shutil.copytree(filled, root, dirs_exist_ok=True)
    return Pair(root)


def contents(store: Path, folder: str) -> dict[str, bytes]:
    """Returns the files below a folder by relative name."""
    root = store / folder
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def bodies() -> dict[tuple[str, int], list[bytes]]:
    """Returns the entries of each queue."""
    expected: dict[tuple[str, int], list[bytes]] = {queue: [] for queue in QUEUES}
    for number in range(MESSAGE_COUNT):
        expected[QUEUES[number % 3]].append(bytes(message(number).body))
    return expected


class Consumer:
    """Pulls queues to their end, and keeps the messages and the number of empty responses."""

    def __init__(self, client: RemotingClient, node: Node, *, subscription: str = "*") -> None:
        self._client = client
        self._node = node
        self._subscription = subscription
        self.got: dict[tuple[str, int], list[bytes]] = {}
        self.raw: list[bytes] = []
        self.answers: list[int] = []

    async def pull_all(self, queues: list[tuple[str, int]] | None = None) -> None:
        for queue in queues or QUEUES:
            await self._pull_queue(*queue)

    async def _pull_queue(self, topic: str, queue_id: int) -> None:
        taken = self.got.setdefault((topic, queue_id), [])
        offset = 0
        while True:
            header = PullMessageRequest(
                consumer_group="g",
                topic=topic,
                queue_id=queue_id,
                queue_offset=offset,
                max_msg_nums=32,
                sys_flag=PullSysFlag.SUBSCRIPTION | PullSysFlag.SUSPEND,
                commit_offset=0,
                suspend_timeout_millis=1000,
                sub_version=0,
                subscription=self._subscription,
            )
            request = RemotingCommand(RequestCode.PULL_MESSAGE, ext_fields=header.to_ext_fields())
            answer = await self._client.invoke(self._node.remoting_address, request, 20)
            if answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                await trio.sleep(0.05)  # the slave is just copying its master's tables
                continue
            assert answer.code in PULL_CODES, answer
            self.answers.append(int(answer.code))
            place = parse_header(PullMessageResponse, answer.ext_fields)
            if answer.code == ResponseCode.SUCCESS:
                self.raw.append(bytes(answer.body))
                taken += [bytes(record.body) for record in decode_records(answer.body)]
            offset = place.next_begin_offset
            if offset >= place.max_offset:
                return


@asynccontextmanager
async def consumer_of(node: Node, **given: Any) -> AsyncIterator[Consumer]:
    async with open_remoting_client() as client:
        yield Consumer(client, node, **given)


def split(raw: bytes) -> Iterator[bytes]:
    """Returns the records in a pull response."""
    at = 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "big")
        yield raw[at : at + size]
        at += size
