"""Data that a power loss can take back must never be visible."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import trio
from trio.testing import memory_stream_pair

from ha.broker.options import BrokerRole
from ha.protocol.remoting import RemotingCommand
from ha.replication.ha_client import HAClient
from ha.replication.options import HAOptions
from tests.broker.node import Node, StalledSync, open_node
from tests.replication.members import SLAVE, Member, leading
from tests.store.disks import MemoryDisk

FOLDER = Path("/b0")
ALWAYS: dict[str, Any] = {"beginTimestamp": 0, "endTimestamp": (1 << 63) - 1, "maxNum": 64}


async def seen(node: Node, offset: int) -> list[str]:
    """Returns the ways in which clients see a message at the start of a queue, or the log from `offset` on."""
    found = []
    if (await node.pull(1)).code == 0:
        found.append("pull")
    if int((await node.ask(30, topic="TT", queueId=0)).ext_fields["offset"]) != 1:
        found.append("max offset")
    if (await node.ask(33, offset=offset)).code == 0:
        found.append("by offset")
    if (await node.ask(12, topic="TT", key="k2", **ALWAYS)).code == 0:
        found.append("by key")
    return found


async def test_8239_unflushed_messages_are_hidden_with_sync_flush() -> None:
    """apache/rocketmq#8239: with SYNC_FLUSH consumers received messages that were not on the disk yet, and committed
    offsets behind them. A crash removed the messages; the next ones got their queue offsets, and were skipped.

    In halog queues and index follow the flushed end. After a power loss the reused queue offset was never visible, and
    a group that had read everything receives the message that has it now.
    """
    sync, disk = StalledSync(), MemoryDisk()
    with trio.CancelScope() as life:
        async with open_node(
            FOLDER, disk=disk, run_blocking=sync, role=BrokerRole.ASYNC_MASTER, flush_sync=True
        ) as node:
            assert (await node.send(b"first", i="KEYS\x01k1\x02")).code == 0
            await node.dispatched()
            await node.broker.groups.find_or_create("g")
            end = node.store.log.max_offset.value
            sync.stall_s = 3600.0
            answers: list[RemotingCommand] = []

            async def send() -> None:
                answers.append(await node.send(b"taken back", i="KEYS\x01k2\x02"))

            async def wait() -> None:
                answers.append(await node.pull(1, sysFlag=2 | 4, suspendTimeoutMillis=15_000))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                nursery.start_soon(wait)
                await trio.sleep(4)
                assert node.store.log.max_offset.value > end
                assert node.store.log.flushed_offset.value == end
                assert answers == []
                assert await seen(node, end) == []
                after = [disk.power_loss(Random(seed)) for seed in range(10)]
                nursery.cancel_scope.cancel()
            life.cancel()
    for lost in after:
        async with open_node(FOLDER, disk=lost, role=BrokerRole.ASYNC_MASTER, flush_sync=True) as node:
            log_end = node.store.log.max_offset.value
            answer = await node.send(b"next", i="KEYS\x01k3\x02")
            await node.dispatched()
            # Either everything survived, and stays, or its queue offset is that of the next message.
            assert int(answer.ext_fields["queueOffset"]) == (1 if log_end == end else 2)
            bodies = [record.body for record in node.records(await node.pull(1))]
            assert bodies == ([b"next"] if log_end == end else [b"taken back", b"next"])


async def test_8239_unflushed_messages_are_not_confirmed_in_a_group() -> None:
    """The same for a failover group with SYNC_FLUSH: consumers of any member see only what each member of the set,
    including the master, has on its disk, so that it survives a power loss of all of them."""
    master, slave = await Member(bytes(1000)).begin((1, 0)), await Member(bytes(1000)).begin((1, 0))
    options = HAOptions(start_from="first", ack_flushed=True, reconnect_interval_s=0.1)
    service = leading(master, SLAVE, options=options)
    async with trio.open_nursery() as nursery:

        async def connect(address: str) -> trio.abc.Stream:
            ours, theirs = memory_stream_pair()
            nursery.start_soon(service.handle, theirs, "10.0.0.2:40000")
            return ours

        client = HAClient(slave.log, options, connect, member=slave, broker_id=SLAVE)
        client.set_master("10.0.0.1:10912")
        nursery.start_soon(client.run)
        await trio.sleep(10)
        assert (master.log.dispatch_limit.value, slave.log.dispatch_limit.value) == (1000, 1000)
        for number, late in enumerate((slave, master)):
            before, after = 1000 + 50 * number, 1050 + 50 * number
            late.log.flushes = False
            master.log.put(b"x" * 50)
            await trio.sleep(60)
            assert slave.log.max_offset.value == master.log.max_offset.value == after
            assert late.log.flushed_offset.value == before
            assert (master.log.dispatch_limit.value, slave.log.dispatch_limit.value) == (before, before)
            late.log.flush()
            late.log.flushes = True
            await trio.sleep(10)
            assert (master.log.dispatch_limit.value, slave.log.dispatch_limit.value) == (after, after)
        nursery.cancel_scope.cancel()
