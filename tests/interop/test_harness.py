"""Two real brokers replicate to each other: the harness starts, drives, kills and compares as it claims to."""

from tests.interop.clusters import check_acknowledged, wait_attached, wait_equal
from tests.interop.java_client import open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server


async def test_real_master_and_real_slave_agree_after_a_kill(children: Children, release: Release) -> None:
    name_server = await start_name_server(children, release)
    master = RocketMqBroker(children, release, "master", name_server, "SYNC_MASTER")
    slave = RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1)
    await master.start()
    await slave.start()
    async with open_java_client(children, release, name_server) as client:
        await wait_attached(client, "mixed")
        acks = children.folder / "acks"
        call = await client.start("produce", topic="mixed", count=20_000, batch=50, threads=4, acks=acks)
        await call.wait("progress", acked=5_000)
        await master.kill()
        await master.start()
        done = (await call.result())[-1]
        assert done["acked"] == 20_000, done
        common = await wait_equal(master, slave)
        assert common.size > 20_000 * 100
        assert check_acknowledged(acks, slave) == set(range(20_000))
        read = await client.consume("mixed", children.folder / "read")
        assert {message.sequence for message in read} >= set(range(20_000))
