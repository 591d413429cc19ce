"""A slave that an operator promotes by changing its configuration."""

from collections import defaultdict
from typing import Any

import pytest
import trio

from ha.node import Node
from ha.protocol.record import MessageRecord, decode_records
from tests.load.memory_cluster import Client, Host, MemoryNetwork, open_client

MASTER, SLAVE = "10.0.0.1", "10.0.0.2"
QUEUES = range(4)


async def queue_offsets(client: Client) -> dict[int, list[int]]:
    """Queue id -> the queue offsets that a consumer receives, from first to last."""
    found: dict[int, list[int]] = defaultdict(list)
    for queue_id in QUEUES:
        while True:
            records = await pull(client, queue_id, len(found[queue_id]))
            if not records:
                break
            found[queue_id] += [record.queue_offset for record in records]
    return found


async def pull(client: Client, queue_id: int, offset: int) -> list[MessageRecord]:
    fields: dict[str, Any] = {"consumerGroup": "CG", "topic": "TT", "queueId": queue_id, "queueOffset": offset}
    fields |= {"maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subVersion": 0}
    answer = await client.ask(11, **fields, subscription="*")
    return decode_records(answer.body) if answer.code == 0 else []


async def wait_copied(master: Node, slave: Node) -> None:
    with trio.fail_after(60):
        await slave.store.log.max_offset.wait_beyond(master.store.log.max_offset.value - 1)


@pytest.mark.parametrize("dispatched", [True, False])
async def test_8539_promoted_slave_continues_with_the_next_queue_offset(dispatched: bool) -> None:
    """apache/rocketmq#8539: after the master had stopped, an operator promoted its slave. It gave messages queue
    offsets that did not continue the queues, and consumers could not read across the gap.

    In halog a master continues at each queue's end in its log, whatever another node or a table says, including queues
    whose last messages the slave had not dispatched.
    """
    network = MemoryNetwork()
    machine, other = Host(network, MASTER), Host(network, SLAVE)
    counts = [37, 5, 1, 20]
    async with (
        machine.node("ASYNC_MASTER") as master,
        open_client(network, f"{MASTER}:10911") as client,
        other.node("SLAVE") as slave,
    ):
        for queue_id in QUEUES:
            for number in range(counts[queue_id]):
                assert (await client.send(b"%d" % number, queue_id=queue_id)).code == 0
                if number == counts[queue_id] // 2 and not dispatched:
                    await wait_copied(master, slave)
                    await trio.sleep(10)  # the tables are copied, too
                    slave.store.log.limit_dispatch(slave.store.log.max_offset.value)
        await wait_copied(master, slave)
        await trio.sleep(20)
        ends = {queue.queue_id: queue.max_offset for queue in slave.store.queues if queue.topic == "TT"}
        assert (ends == dict(enumerate(counts))) is dispatched
    role: dict[str, Any] = {"broker_id": 0, "store_path_root_dir": "/slave"}
    async with other.node("ASYNC_MASTER", **role) as node, open_client(network, f"{SLAVE}:10911") as client:
        await node.broker.groups.find_or_create("CG")
        for queue_id in QUEUES:
            answer = await client.send(b"by the new master", queue_id=queue_id)
            assert (answer.code, int(answer.ext_fields["queueOffset"])) == (0, counts[queue_id])
            assert (await client.commit(counts[queue_id], queue_id=queue_id)).code == 0
        await trio.sleep(1)
        assert await queue_offsets(client) == {id_: list(range(counts[id_] + 1)) for id_ in QUEUES}
        [record] = await pull(client, 1, await client.committed(queue_id=1))
        assert record.body == b"by the new master"
