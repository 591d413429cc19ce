"""Offsets that a slave copies while its log is behind its master's: none may depend on records that it lacks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio_util import AsyncValue

from ha.node import Node
from ha.protocol.properties import encode_properties
from ha.replication.statistics import Condition
from tests.broker.pop_client import POP
from tests.load.memory_cluster import Client, Host, MemoryNetwork, open_client

MASTER, SLAVE = "10.0.0.1", "10.0.0.2"
ENOUGH_TO_FOLLOW = 100_000
"""Bytes after which a slave follows its master: more than haOverlapMax, which it compares first."""


class SlowNetwork(MemoryNetwork):
    """The slave receives at most `ha_allowed` further bytes from its master's HA port, each chunk `ha_delay_s` late."""

    def __init__(self) -> None:
        super().__init__()
        self.ha_allowed: AsyncValue[float] = AsyncValue(float("inf"))
        self.ha_delay_s = 0.0

    async def connect(self, here: str, address: str) -> trio.abc.Stream:
        stream = await super().connect(here, address)
        if address == f"{MASTER}:10912":
            receive_some = stream.receive_some

            async def receive_late(size_max: int | None = None) -> bytes | bytearray:
                got = await receive_some(min(size_max or 16384, 16384))
                await trio.sleep(self.ha_delay_s)
                await self.ha_allowed.wait_value(lambda allowed: allowed >= len(got))
                self.ha_allowed.value -= len(got)
                return got

            stream.receive_some = receive_late  # type: ignore[method-assign, assignment]
        return stream


async def wait_copied(master: Node, slave: Node) -> None:
    with trio.fail_after(60):
        await slave.store.log.max_offset.wait_beyond(master.store.log.max_offset.value - 1)


async def send_many(client: Client) -> None:
    """Sends 600 kB, more than a slave gets of them."""
    for _ in range(150):
        assert (await client.send(bytes(4000), topic="Other")).code == 0


class Pair:
    """A master and its slave, which has the master's first messages."""

    def __init__(self) -> None:
        self.network = SlowNetwork()
        self.machine, self.other = Host(self.network, MASTER), Host(self.network, SLAVE)

    @asynccontextmanager
    async def master(self) -> AsyncIterator[tuple[Node, Client]]:
        async with self.machine.node("ASYNC_MASTER") as node, open_client(self.network, f"{MASTER}:10911") as client:
            yield node, client

    @asynccontextmanager
    async def promoted(self) -> AsyncIterator[tuple[Node, Client]]:
        node = self.other.node("ASYNC_MASTER", store_path_root_dir="/slave")
        async with node as promoted, open_client(self.network, f"{SLAVE}:10911") as client:
            yield promoted, client

    async def copy(self, master: Node) -> None:
        """Runs the slave until it has everything."""
        async with self.other.node("SLAVE") as slave:
            await wait_copied(master, slave)
            await trio.sleep(15)

    async def follow_partly(self, master: Node) -> None:
        """Runs the slave for two copies of the tables, while it gets only a part of the log that it lacks."""
        self.network.ha_allowed.value = ENOUGH_TO_FOLLOW
        async with self.other.node("SLAVE") as slave:
            await trio.sleep(15)
            assert slave.ha_client is not None
            assert slave.ha_client.statistics().condition is Condition.CONNECTED
            assert slave.store.log.max_offset.value < master.store.log.max_offset.value


async def pop(client: Client) -> int:
    """The number of messages in the answer to a pop of topic TT."""
    answer = await client.ask(200050, **POP)
    if answer.code:
        return 0
    return sum(len(queue.split(",")) for queue in answer.ext_fields["msgOffsetInfo"].split(";"))


async def test_popped_messages_come_again_after_the_promotion_of_a_slave_that_lacks_the_pop() -> None:
    """The slave had the group's next offset, but not the record of the pop: they were never delivered again."""
    pair = Pair()
    async with pair.master() as (master, client):
        for number in range(10):
            assert (await client.send(b"%d" % number)).code == 0
        await pair.copy(master)
        await send_many(client)
        assert await pop(client) == 10
        await pair.follow_partly(master)
    async with pair.promoted() as (_, client):
        await trio.sleep(30)
        assert await pop(client) == 10


async def test_half_messages_are_checked_after_the_promotion_of_a_slave_that_lacks_their_copies() -> None:
    """The master had stored a half message again, and the slave had this progress, but not the copy: the half message
    was neither committed nor checked again."""
    pair = Pair()
    async with pair.master() as (master, client):
        half = encode_properties({"TRAN_MSG": "true", "PGROUP": "PG"}).decode()
        sent = await client.ask(
            310, b"half", a="PG", b="TT", c="TBW102", d=4, e=0, f=4, g=pair.machine.wall_clock_ms(), h=0, i=half, j=0
        )
        assert sent.code == 0
        await pair.copy(master)
        await send_many(client)
        await trio.sleep(120)
        assert master.broker.transactions.statistics().unasked_count
        await pair.follow_partly(master)
    async with pair.promoted() as (promoted, _):
        await trio.sleep(100)
        found = promoted.broker.transactions.statistics()
        assert found.open_count == 1
        assert found.unasked_count >= 2


async def test_offsets_arrive_although_the_slave_is_always_behind() -> None:
    """Each message is committed at once. The slave gets it more than a sync's wait later, so at no time its log has
    what its master's had when it asked for the offsets."""
    pair = Pair()
    ages: list[int] = []
    async with pair.master() as (master, client), pair.other.node("SLAVE") as slave:
        pair.network.ha_delay_s = 5
        await master.broker.groups.find_or_create("CG")
        for number in range(1, 301):
            assert (await client.send(bytes(500))).code == 0
            assert (await client.commit(number)).code == 0
            await trio.sleep(0.5)
            assert slave.store.log.max_offset.value < master.store.log.max_offset.value
            queue = slave.store.queues.get("TT", 0)
            copied = slave.broker.offsets.get("CG", "TT", 0) or 0
            assert copied <= (0 if queue is None else queue.max_offset)
            ages.append(number - copied)
        assert max(ages) <= 60  # 30 s: the delay, an interval of 10 s, and one until the offsets are applied
        pair.network.ha_delay_s = 0
        await trio.sleep(15)
        assert slave.broker.offsets.get("CG", "TT", 0) == 300


async def test_commits_at_a_slave_that_is_behind_reach_the_master_unless_it_has_higher_ones() -> None:
    pair = Pair()
    async with pair.master() as (master, client):
        for number in range(20):
            assert (await client.send(b"%d" % number, queue_id=number % 2)).code == 0
        await master.broker.groups.find_or_create("CG")
        assert (await client.commit(1)).code == (await client.commit(1, queue_id=1)).code == 0
        await pair.copy(master)
    commits: dict[str, Any] = {"ha_master_address": f"{MASTER}:10912"}
    async with pair.other.node("SLAVE", **commits) as slave, open_client(pair.network, f"{SLAVE}:10911") as client:
        assert (await client.commit(5)).code == (await client.commit(6, queue_id=1)).code == 0
        pair.network.ha_allowed.value = 0
        async with pair.master() as (master, client):
            assert (await client.commit(9)).code == 0
            await send_many(client)
            pair.network.ha_allowed.value = ENOUGH_TO_FOLLOW
            await trio.sleep(15)
            assert slave.store.log.max_offset.value < master.store.log.max_offset.value
            assert master.broker.offsets.of("CG", "TT") == {0: 9, 1: 6}
            assert slave.broker.offsets.of("CG", "TT") == {0: 5, 1: 6}
            pair.network.ha_allowed.value = float("inf")
            await trio.sleep(30)
            assert slave.broker.offsets.of("CG", "TT") == {0: 9, 1: 6}
            assert slave.broker.offsets.local_commits() == []
