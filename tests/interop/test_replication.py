"""halog and real brokers as each other's master and slave, through SIGKILL of both: the logs stay equal."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.interop.broker import Broker
from tests.interop.clusters import check_acknowledged, wait_attached, wait_equal
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import JavaClient, open_java_client
from tests.interop.processes import Children, eventually
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.stored_files import bytes_at, queue_entries, records, segments

_SEGMENT_COUNT_MIN = 6


class Amount(NamedTuple):
    """Number of messages in three parts; a kill comes after `kill_after` messages of the first and second part."""

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
    """Produces the messages; the slave is killed during the first part, the master during the second."""
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


async def test_record_torn_by_a_kill_is_copied_as_the_master_keeps_it(children: Children, release: Release) -> None:
    """No CRC covers properties: a real master that was killed while writing them takes the record as complete, and
    continues behind it. So does its slave, and any node that opens that store."""
    name_server = await start_halog_name_server(children)
    master = RocketMqBroker(children, release, "master", name_server, "ASYNC_MASTER")
    slave = HalogBroker(children, "ha-slave", name_server, "SLAVE", broker_id=1)
    heir = HalogBroker(children, "ha-heir", name_server, "ASYNC_MASTER", store=master.store)
    await master.start()
    async with open_java_client(children, release, name_server) as client:
        count = await send_until_tearable(client, master)
        await master.kill()
        torn_end = tear_last_record(master.commitlog)
        await master.start()
        await slave.start()
        await client.wait_route("few")
        more = await client.send("few", 20, first=count)
        common = await wait_equal(master, slave)
        assert {event["status"] for event in more} == {"SEND_OK"}
        assert common.end > torn_end
        await check_queues(master, slave, count + 20)
        await slave.kill()
        await slave.start()
        await wait_equal(master, slave)
        await check_queues(master, slave, count + 20)
        await master.kill()
        await heir.start()
        await check_queues(heir, slave, count + 20)
        assert len(await client.consume("few", children.folder / "read")) == count + 20


async def send_until_tearable(client: JavaClient, master: RocketMqBroker) -> int:
    """Sends until a sector boundary lies within the properties of the last record; returns the number of messages."""
    for count in range(1, 200):
        await client.send("few", 1, first=count - 1)
        if tear_at(master.commitlog) is not None:
            return count
    raise AssertionError("no record's properties cross a sector")


def tear_at(commitlog: Path) -> tuple[int, int] | None:
    """Returns the sector boundary within the last record's properties, and the record's end; None if there is none."""
    last = list(records(commitlog))[-1]
    end = last.physical_offset + last.size
    size = sum(len(name) + len(value) + 2 for name, value in last.properties.items()) - 1
    sector = end // 512 * 512
    return (sector, end) if last.topic == "few" and end - size < sector < end else None


def tear_last_record(commitlog: Path) -> int:
    """Simulates a kill during the write: zeros from that sector on; returns the record's end."""
    place = tear_at(commitlog)
    assert place is not None
    sector, end = place
    with segments(commitlog)[0].open("r+b") as file:
        file.seek(sector)
        file.write(bytes(end - sector))
    return end


async def check_queues(one: Broker, other: Broker, count: int) -> None:
    """Waits until the queues of "few" have the same `count` places in both. Tags may differ: the real master dispatched
    the record before the test tears it."""

    def places(broker: Broker) -> dict[tuple[str, int], list[tuple[int, int]]]:
        return {
            key: [(physical_offset, size) for physical_offset, size, _ in entries]
            for key, entries in queue_entries(broker.store).items()
            if key[0] == "few"
        }

    def are_equal() -> bool:
        return places(one) == places(other) and sum(map(len, places(one).values())) == count

    try:
        await eventually("the queues have the same places", are_equal, 30.0)
    except AssertionError as error:
        error.add_note(f"{count} expected, {places(one)}, {places(other)}")
        raise
