"""A real master ignores the range request of a halog slave, and haStartFrom=first gets the whole log."""

from pathlib import Path

import pytest
import trio

from ha.protocol.ha_frame import encode_report
from ha.replication.ha_client import HAClient
from ha.replication.options import HAOptions
from ha.replication.range_question import RANGE_QUESTION
from ha.replication.statistics import Condition
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions
from tests.interop.java_client import open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.stored_files import compare_commitlogs, log_range
from tests.store.stores import reached

SEGMENT_SIZE = 1 << 20


@pytest.mark.usual_release("5.5.0")
async def test_an_empty_slave_gets_the_whole_log_of_a_real_master(
    children: Children, release: Release, tmp_path: Path
) -> None:
    name_server = await start_name_server(children, release)
    small: dict[str, object] = {"mappedFileSizeCommitLog": SEGMENT_SIZE}
    master = RocketMqBroker(children, release, "master", name_server, "ASYNC_MASTER", extra=small)
    await master.start()
    async with open_java_client(children, release, name_server) as client:
        await client.run("produce", topic="mixed", count=6_000, batch=50, threads=2, acks=tmp_path / "acks")
        await check_that_the_question_is_ignored(master)
        held = log_range(master.commitlog)
        assert held.end > 3 * SEGMENT_SIZE
        root = tmp_path / "slave"
        async with open_message_store(StoreOptions(root=root, segment_size=SEGMENT_SIZE, is_slave=True)) as store:
            slave = HAClient(store.log, HAOptions(start_from="first", out_of_range="resync"))
            slave.set_master(master.ha_address)
            async with trio.open_nursery() as nursery:
                await nursery.start(slave.run)
                await reached(store.log.max_offset, held.end)
                await client.run("produce", topic="mixed", first=6_000, count=1_000, batch=50, acks=tmp_path / "more")
                await reached(store.log.max_offset, log_range(master.commitlog).end)
                assert slave.statistics().condition is Condition.CONNECTED
                assert slave.statistics().connection_count == 1, slave.statistics()
                nursery.cancel_scope.cancel()
            assert store.log.min_offset == 0
        common = compare_commitlogs(master.commitlog, root / "commitlog")
        assert (common.start, common.end) == (0, log_range(master.commitlog).end)


async def check_that_the_question_is_ignored(master: RocketMqBroker) -> None:
    """Silence for as long as a slave waits, then normal operation on the same connection."""
    host, port = master.ha_address.split(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(RANGE_QUESTION)
        with trio.move_on_after(2) as silence:
            await stream.receive_some()
        assert silence.cancelled_caught
        await stream.send_all(encode_report(100))
        with trio.fail_after(10):
            assert (await stream.receive_some(8))[:8] == encode_report(100)
