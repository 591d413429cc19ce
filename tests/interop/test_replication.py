"""halog and real brokers as each other's master and slave, through SIGKILL of both: the logs stay the same bytes."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.interop.clusters import Broker, check_acknowledged, wait_attached, wait_equal
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import JavaClient, open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.stored_files import bytes_at

_SEGMENT_COUNT_MIN = 6


class Amount(NamedTuple):
    """How many messages go in three parts; a kill comes when so many of the first and of the second are there."""

    parts: tuple[int, int, int]
    kill_after: int
    segment_bytes: int

    @property
    def settings(self) -> dict[str, object]:
        return {"mappedFileSizeCommitLog": self.segment_bytes}


amounts = pytest.mark.parametrize(
    "amount",
    [
        pytest.param(Amount((20_000, 20_000, 10_000), 8_000, 8 << 20), id="50000"),
        pytest.param(Amount((80_000, 80_000, 40_000), 30_000, 32 << 20), id="200000", marks=pytest.mark.long),
    ],
)


@amounts
async def test_real_master_and_halog_slave(children: Children, release: Release, amount: Amount) -> None:
    name_server = await start_name_server(children, release)
    master = RocketMqBroker(children, release, "master", name_server, "SYNC_MASTER", extra=amount.settings)
    slave = HalogBroker(children, "ha-slave", name_server, "SLAVE", broker_id=1, extra=amount.settings)
    async with open_java_client(children, release, name_server) as client:
        await replicate_through_kills(client, master, slave, children.folder, amount)


@pytest.mark.processes
@amounts
async def test_halog_master_and_real_slave(children: Children, release: Release, amount: Amount) -> None:
    name_server = await start_halog_name_server(children)
    master = HalogBroker(children, "ha-master", name_server, "SYNC_MASTER", extra=amount.settings)
    slave = RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1, extra=amount.settings)
    async with open_java_client(children, release, name_server) as client:
        await replicate_through_kills(client, master, slave, children.folder, amount)


async def replicate_through_kills(
    client: JavaClient, master: Broker, slave: Broker, folder: Path, amount: Amount
) -> None:
    """Produce the messages; the slave is killed amid the first part, the master amid the second."""
    await master.start()
    await slave.start()
    await wait_attached(client, "mixed")
    sequences: set[int] = set()
    for part, (count, victim) in enumerate(zip(amount.parts, (slave, master, None), strict=True)):
        acks = folder / f"acks-{part}"
        first = len(sequences)
        call = await client.start(
            "produce", topic="mixed", first=first, count=count, batch=100, threads=4, acks=acks, timeoutMs=8000
        )
        if victim is not None:
            await call.wait("progress", acked=amount.kill_after)
            await victim.kill()
            await victim.start()
        done = (await call.result())[-1]
        assert done["acked"] == count, done
        await wait_attached(client, "mixed")
        sequences |= set(range(first, first + count))
    common = await wait_equal(master, slave)
    assert common.start == 0
    assert common.size > (_SEGMENT_COUNT_MIN - 1) * amount.segment_bytes, bytes_at(master.commitlog, common.end).hex()
    acknowledged: set[int] = set()
    for part in range(3):
        acknowledged |= check_acknowledged(folder / f"acks-{part}", slave)
    assert acknowledged == set(range(sum(amount.parts)))


@pytest.mark.usual_release("4.9.7")
async def test_halog_slave_told_its_master_needs_no_name_server(children: Children, release: Release) -> None:
    """haMasterAddress is enough; it is for a real slave of 4.9.7 too, while one of 5.5.0 waits for a name server."""
    name_server = await start_halog_name_server(children)
    master = RocketMqBroker(children, release, "master", name_server, "SYNC_MASTER")
    told = {"haMasterAddress": master.ha_address}
    slave = HalogBroker(children, "ha-slave", "127.0.0.1:1", "SLAVE", broker_id=1, extra=told)
    await master.start()
    await slave.start()
    async with open_java_client(children, release, name_server) as client:
        await wait_attached(client, "few")
        sent = await client.send("few", 20)
        assert {event["status"] for event in sent} == {"SEND_OK"}
    await wait_equal(master, slave)
