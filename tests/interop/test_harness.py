"""Two real brokers replicate to each other: the harness starts, drives, kills and compares as it claims to."""

from tests.interop.java_client import open_java_client, read_acks
from tests.interop.processes import Children, eventually
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.stored_files import LogCursor, compare_commitlogs, records


async def test_real_master_and_real_slave_agree_after_a_kill(children: Children, release: Release) -> None:
    name_server = await start_name_server(children, release)
    master = RocketMqBroker(children, release, "master", name_server, "SYNC_MASTER")
    slave = RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1)
    await master.start()
    await slave.start()
    async with open_java_client(children, release, name_server) as client:
        await client.send_until("mixed", "SEND_OK", first=100_000)
        acks = children.folder / "acks"
        call = await client.start("produce", topic="mixed", count=20_000, batch=50, threads=4, acks=acks)
        await call.wait("progress", acked=5_000)
        await master.kill()
        await master.start()
        done = (await call.result())[-1]
        assert done["acked"] == 20_000, done
        source, copy = LogCursor(master.commitlog), LogCursor(slave.commitlog)
        await eventually("the slave has it all", lambda: source.advance() == copy.advance(), 30)
        common = compare_commitlogs(master.commitlog, slave.commitlog)
        stored = {record.physical_offset: record for record in records(slave.commitlog)}
        for ack in read_acks(acks):
            record = stored[ack.physical_offset]
            assert (record.sequence, record.body_crc, record.body_size) == (ack.sequence, ack.crc, ack.size)
        assert common.size > 20_000 * 100
        read = await client.consume("mixed", children.folder / "read")
        assert {message.sequence for message in read} >= set(range(20_000))
