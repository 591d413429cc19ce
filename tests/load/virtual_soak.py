"""Hours of a whole cluster on a virtual clock, and what it holds in memory as they pass.

A SYNC_MASTER with two slaves and its name server; producers and consumers that stay; clients that come, register and
vanish, some without a word; strangers on two ports; links that are cut, a slave that stops and comes back; retention
that deletes what is an hour old. Everything repeats at least every half hour, so each half hour ends at the same
moment: what grows from one to the next is a leak. Heartbeats, registration, flushes, expiry and checkpoints run as
always.
"""

import gc
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import trio
from trio.testing import MockClock

from ha.node import Node
from ha.node.status import count_tasks
from ha.protocol import java_json
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand, encode_command
from tests.load.memory_cluster import Client, Host, MemoryNetwork, open_client

HOUR_S = 3600.0
MASTER = "10.0.0.1"
REMOTING, HA = f"{MASTER}:10911", f"{MASTER}:10912"
SLAVES = ("10.0.0.2", "10.0.0.3")
QUEUE_COUNT = 4

EVERY_HOUR: dict[str, Any] = {
    "reserved_h": 1,
    "delete_when_hours": ";".join(f"{hour:02}" for hour in range(24)),
    "retain_bytes_max": 1 << 20,
}

HEARTBEAT, PULL = 34, 11
KIND_COUNT = 40
"""A sample stays in the memory that the next one measures, so it is small."""

GARBAGE = b"\xff\xfe" * 40


class Sample(msgspec.Struct, frozen=True):
    """State after some hours. `kinds`: most frequent types; `tables`: entries of tables, and files."""

    hour: float
    task_count: int
    object_count: int
    block_count: int
    """Allocated blocks of memory, including objects that the collector does not track"""
    tables: dict[str, int]
    kinds: dict[str, int]


class Traffic(msgspec.Struct):
    """What was done meanwhile."""

    acked_count: int = 0
    refused_count: int = 0
    consumed_count: int = 0
    client_count: int = 0
    stranger_count: int = 0
    cut_count: int = 0
    slave_restart_count: int = 0
    pulls: int = 0


class Report(msgspec.Struct, frozen=True):
    """Samples in order, and what happened."""

    samples: list[Sample]
    traffic: Traffic
    deleted_offset: int
    """How far retention came: the master's first physical offset, in bytes"""


def run(hours: float, *, sample_h: float = 1.0, on_sample: Callable[[Sample], None] = lambda _: None) -> Report:
    """Let `hours` pass, with a sample every `sample_h`. In a process whose logging keeps nothing (pytest's does)."""
    hours_sampled = [sample_h * number for number in range(1, round(hours / sample_h) + 1)]
    report: Report = trio.run(_soak, hours_sampled, on_sample, clock=MockClock(autojump_threshold=0))
    return report


async def _soak(hours: list[float], on_sample: Callable[[Sample], None]) -> Report:
    network = MemoryNetwork()
    hosts = [Host(network, address) for address in (MASTER, *SLAVES)]
    traffic = Traffic()
    samples: list[Sample] = []
    began = trio.current_time()
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(hosts[0].node("SYNC_MASTER", **EVERY_HOUR))
        steady = await stack.enter_async_context(hosts[1].node("SLAVE", broker_id=1, **EVERY_HOUR))
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        for task in (_produce, _consume, _come_and_go, _strange, _cut):
            nursery.start_soon(task, network, traffic)
        nursery.start_soon(_come_back, hosts[2], traffic)
        for hour in hours:
            await trio.sleep_until(began + hour * HOUR_S + 17.3)
            samples.append(_sample(hour, {"master": master, "slave": steady}, hosts))
            on_sample(samples[-1])
        deleted = master.store.log.min_offset
    return Report(samples, traffic, deleted)


def _sample(hour: float, nodes: dict[str, Node], hosts: list[Host]) -> Sample:
    gc.collect()
    objects = gc.get_objects()
    tables = {f"{name}.{table}": size for name, node in nodes.items() for table, size in _tables(node).items()}
    tables |= {f"files of {host.address}": len(host.disk.inodes) for host in hosts}
    return Sample(
        hour=hour,
        task_count=count_tasks(),
        object_count=len(objects),
        block_count=sys.getallocatedblocks(),
        tables=tables,
        kinds=dict(Counter(type(thing).__qualname__ for thing in objects).most_common(KIND_COUNT)),
    )


def _tables(node: Node) -> dict[str, int]:
    ha, broker, store = node.ha_service, node.broker, node.store
    return {
        "ha connections": ha.connection_count,
        "ha identities": len(ha._last_close_reasons),
        "ha left": len(ha._left_at),
        "ha copiers": len(ha._copied_at),
        "ha waiting": ha.group_transfer.waiting_count,
        "clients": sum(broker.clients.statistics().values()),
        "topics": len(broker.topics),
        "groups": len(broker.groups),
        "offsets": sum(map(len, broker.offsets.snapshot().offset_table.values())),
        "taken here": len(broker.offsets.local_commits()),
        "queues": sum(1 for _ in store.queues),
        "segments": len(store.log.segments),
        "index files": len(store.index.files) if store.index is not None else 0,
        "flush waiting": store.flusher.waiting_count,
        "events": len(node.events.newest_first()),
    }


async def _every(period_s: float, phase_s: float, act: Callable[[], Awaitable[object]]) -> None:
    at = trio.current_time() + phase_s
    while True:
        await trio.sleep_until(at)
        await act()
        at += period_s


async def _produce(network: MemoryNetwork, traffic: Traffic) -> None:
    """A message every five seconds, a chunk of twenty at once every minute."""
    async with open_client(network, REMOTING, "10.0.1.1") as client:
        number = 0

        async def send() -> None:
            nonlocal number
            number += 1
            answer = await client.send(b"%010d" % number * 100, queue_id=number % QUEUE_COUNT)
            if answer.code == ResponseCode.SUCCESS:
                traffic.acked_count += 1
            else:
                traffic.refused_count += 1

        async def send_many() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(send)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_every, 5.0, 2.0, send)
            nursery.start_soon(_every, 60.0, 3.0, send_many)


async def _consume(network: MemoryNetwork, traffic: Traffic) -> None:
    """One consumer with long polls on each queue, heartbeats and commits."""
    async with open_client(network, REMOTING, "10.0.1.2") as client, trio.open_nursery() as nursery:
        offsets = [0] * QUEUE_COUNT

        async def pull(queue_id: int) -> None:
            while True:
                answer = await client.ask(
                    PULL,
                    consumerGroup="CG",
                    topic="TT",
                    queueId=queue_id,
                    queueOffset=offsets[queue_id],
                    maxMsgNums=32,
                    sysFlag=2 | 4,
                    commitOffset=0,
                    suspendTimeoutMillis=15_000,
                    subscription="*",
                    subVersion=0,
                )
                traffic.pulls += 1
                if answer.code == ResponseCode.TOPIC_NOT_EXIST:
                    await trio.sleep(5)
                elif "nextBeginOffset" in answer.ext_fields:
                    following = int(answer.ext_fields["nextBeginOffset"])
                    traffic.consumed_count += max(0, following - offsets[queue_id]) if answer.code == 0 else 0
                    offsets[queue_id] = following

        async def heartbeat() -> None:
            await client.ask(HEARTBEAT, java_json.dumps(_heartbeat("consumer", "CG", 1)))

        async def commit() -> None:
            for queue_id, offset in enumerate(offsets):
                await client.commit(offset, queue_id=queue_id)

        nursery.start_soon(_every, 30.0, 1.0, heartbeat)
        nursery.start_soon(_every, 5.0, 5.0, commit)
        for queue_id in range(QUEUE_COUNT):
            nursery.start_soon(pull, queue_id)


def _heartbeat(client_id: str, group: str, version: int) -> dict[str, Any]:
    return {
        "clientID": client_id,
        "consumerDataSet": [
            {
                "groupName": group,
                "messageModel": "CLUSTERING",
                "subscriptionDataSet": [{"topic": "TT", "subString": "*", "subVersion": version}],
            }
        ],
        "producerDataSet": [{"groupName": f"P{group}"}],
    }


async def _come_and_go(network: MemoryNetwork, traffic: Traffic) -> None:
    """Every 30 s a client registers; of three one says goodbye, one hangs up, one falls silent until it is expired."""
    async with trio.open_nursery() as nursery:
        number = 0

        async def live() -> None:
            nonlocal number
            number += 1
            traffic.client_count += 1
            nursery.start_soon(_live_once, network, number)

        await _every(30.0, 10.0, live)


async def _live_once(network: MemoryNetwork, number: int) -> None:
    group = f"G{number % 20}"
    async with open_client(network, REMOTING, f"10.0.2.{number % 200}") as client:
        body = java_json.dumps(_heartbeat(f"client{number}", group, number))
        await client.ask(HEARTBEAT, body)
        await _pull_once(client, group)
        if number % 3 == 0:
            await client.ask(35, clientID=f"client{number}", consumerGroup=group, producerGroup=f"P{group}")
        elif number % 3 == 1:
            await trio.sleep(300)  # silent meanwhile: the broker closes first


async def _pull_once(client: Client, group: str) -> None:
    """A long poll that is abandoned with its connection."""
    with trio.move_on_after(2):
        await client.ask(
            PULL,
            consumerGroup=group,
            topic="TT",
            queueId=0,
            queueOffset=1 << 40,
            maxMsgNums=1,
            sysFlag=2 | 4,
            commitOffset=0,
            suspendTimeoutMillis=15_000,
            subscription="*",
            subVersion=0,
        )


async def _strange(network: MemoryNetwork, traffic: Traffic) -> None:
    """Every minute somebody sends what no port takes, and half a request that never ends."""

    async def intrude() -> None:
        traffic.stranger_count += 1
        half = encode_command(RemotingCommand(310, opaque=1))[:-3]
        for address, said in ((REMOTING, GARBAGE), (HA, GARBAGE), (HA, b""), (REMOTING, half)):
            stream = await network.connect(f"10.0.3.{traffic.stranger_count % 30}", address)
            await stream.send_all(said)
            if said == half:
                with trio.move_on_after(45):
                    while await stream.receive_some():
                        pass
            await trio.aclose_forcefully(stream)

    await _every(60.0, 20.0, intrude)


async def _cut(network: MemoryNetwork, traffic: Traffic) -> None:
    """Every ten minutes all HA links break."""

    async def cut() -> None:
        traffic.cut_count += 1
        await network.cut(HA)

    await _every(600.0, 100.0, cut)


async def _come_back(host: Host, traffic: Traffic) -> None:
    """A slave that runs for twenty minutes, is away for ten, and comes back."""
    while True:
        async with host.node("SLAVE", broker_id=2, **EVERY_HOUR):
            await trio.sleep(1190)
        traffic.slave_restart_count += 1
        await trio.sleep_until((trio.current_time() // 600 + 1) * 600)
