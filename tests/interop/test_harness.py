"""The test harness starts and drives real brokers, and its comparisons find differences."""

import shutil
from pathlib import Path

import pytest

from tests.interop.clusters import check_acknowledged, wait_attached, wait_equal
from tests.interop.java_client import open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.stored_files import compare_commitlogs, log_range, records, segments
from tests.unpacking import unpack

_STORE = Path(__file__).parents[1] / "fixtures" / "store-4.9.7.tar.gz"


@pytest.mark.usual_release("5.5.0")
async def test_real_master_and_real_slave_agree(children: Children, release: Release) -> None:
    """The assumptions of the other tests hold between two real brokers."""
    name_server = await start_name_server(children, release)
    master = RocketMqBroker(children, release, "master", name_server, "SYNC_MASTER")
    slave = RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1)
    await master.start()
    await slave.start()
    async with open_java_client(children, release, name_server) as client:
        await wait_attached(client, "probes")
        acks = children.folder / "acks"
        done = (await client.run("produce", topic="mixed", count=5_000, batch=50, threads=4, acks=acks))[-1]
        assert done["acked"] == 5_000, done
        common = await wait_equal(master, slave)
        assert common.size > 5_000 * 100
        assert check_acknowledged(acks, slave) == set(range(5_000))
        read = await client.consume("mixed", children.folder / "read")
        assert {message.sequence for message in read} == set(range(5_000))


def test_comparison_sees_one_wrong_byte(tmp_path: Path) -> None:
    unpack(_STORE, tmp_path)
    (original,) = tmp_path.rglob("commitlog")
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    assert compare_commitlogs(original, copy) == log_range(original)
    last = list(records(original))[-1]
    # within the properties, which no checksum covers
    with segments(copy)[-1].open("r+b") as file:
        file.seek(last.physical_offset - int(segments(copy)[-1].name) + last.size - 2)
        file.write(b"\x7f")
    with pytest.raises(AssertionError, match=f"differ from offset {last.physical_offset + last.size - 2} on"):
        compare_commitlogs(original, copy)


def test_incomplete_record_does_not_count(tmp_path: Path) -> None:
    unpack(_STORE, tmp_path)
    (commitlog,) = tmp_path.rglob("commitlog")
    last = list(records(commitlog))[-1]
    assert log_range(commitlog).end == last.physical_offset + last.size
    with segments(commitlog)[-1].open("r+b") as file:
        file.seek(last.physical_offset - int(segments(commitlog)[-1].name) + last.size - 5)
        file.write(bytes(5))
    assert log_range(commitlog).end == last.physical_offset
