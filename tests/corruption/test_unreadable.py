"""Sectors of files that the disk can't read: all is served, the log is healed, and what is derived is made again."""

import pytest
import trio

from tests.corruption.pair import QUEUES, Pair, bodies, consumer_of, contents
from tests.store.bad_sectors import SECTOR_BYTES, bad_sectors
from tests.store.stores import reached

ENTRY_COUNT = 200
"""Entries of one file."""


@pytest.mark.parametrize("role", ["master", "slave"])
@pytest.mark.parametrize("found_by", ["start", "pull", "filter", "scrub"])
@pytest.mark.parametrize("start", [0, 2 * ENTRY_COUNT], ids=["first_file", "last_file"])
async def test_a_consume_queue(
    role: str, found_by: str, start: int, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """The first pull there ended the node, and each restart did."""
    folder = pair.store(role) / "consumequeue/T/0"
    whole = contents(folder, "")
    victim = folder / f"{start * 20:020d}"
    with bad_sectors() as bad, trio.fail_after(60):
        if found_by == "start":
            bad.add(victim, 2 * SECTOR_BYTES)
        async with pair.running(scrub_bytes_per_s=1 << 30 if found_by == "scrub" else 0):
            node = pair.node(role)
            if found_by != "start":
                bad.add(victim, 2 * SECTOR_BYTES)
            if found_by == "scrub":
                await node.store.scrub.wait_round()
            async with consumer_of(node, subscription="t0" if found_by == "filter" else "*") as consumer:
                await consumer.pull_all([QUEUES[1], QUEUES[0]])
                assert consumer.got[QUEUES[1]] == ([] if found_by == "filter" else bodies()[QUEUES[1]])
                assert consumer.got[QUEUES[0]] == bodies()[QUEUES[0]]
            assert bad.failed_count > 0
            assert node.store.damage.found_count == 0
    assert contents(folder, "") == whole
    assert f"queue.file_replaced topic=T queue_id=0 start={start} reason='[Errno 5] Input/output error'" in caplog.text


@pytest.mark.parametrize("found_by", ["start", "pull", "scrub"])
async def test_checksums(found_by: str, pair: Pair) -> None:
    """Pulls from the segment failed, the scrub did not repair it, and the node did not start again."""
    folder = pair.store("master") / "checksums"
    whole = contents(folder, "")
    victim = (min if found_by == "pull" else max)(folder.iterdir())
    with bad_sectors() as bad, trio.fail_after(60):
        if found_by == "start":
            bad.add(victim, SECTOR_BYTES)
        async with pair.running(without="slave", heal_from="", scrub_bytes_per_s=0):
            store = pair.master.store
            if found_by != "start":
                bad.add(victim, SECTOR_BYTES)
            if found_by == "pull":
                store.log.verified.checksums.forget()
            else:
                await store.scrub.wait_round()
            async with consumer_of(pair.master) as consumer:
                await consumer.pull_all()
                assert consumer.got == bodies()
            await store.scrub.wait_round()
            assert bad.failed_count > 0
            assert store.damage.found_count == 0
            assert store.damage_statistics().checksum_rebuilt_count > 0
    assert contents(folder, "") == whole


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
async def test_the_log_at_start(is_killed: bool, pair: Pair) -> None:
    """No start succeeded any more, although the sector had been flushed, and the slave had its bytes."""
    root = pair.store("master")
    whole = contents(root / "commitlog", "")
    if is_killed:
        (root / "abort").write_bytes(b"")
    with bad_sectors() as bad, trio.fail_after(60):
        for path in (root / "commitlog").iterdir():
            bad.add(path, SECTOR_BYTES)
        async with pair.running():
            store = pair.master.store
            await store.scrub.wait_round()
            while store.damage.open:
                await store.damage.wait_changed()
            assert store.damage.found_count > 0
            async with consumer_of(pair.master) as consumer:
                await consumer.pull_all()
                assert consumer.got == bodies()
        assert bad.failed_count > 0
    assert contents(root / "commitlog", "") == whole


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("checkpoint", "checkpoint.damage_found"),
        ("queueends", "queue.ends_damaged"),
        ("index", "index.file_deleted"),
        ("index slots", "index.file_deleted"),
    ],
)
async def test_at_start(name: str, text: str, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """The node did not start any more, although it can do without each of these files."""
    root = pair.store("master")
    if name.startswith("index"):
        victim, sector = max((root / "index").iterdir()), int(name == "index slots")
    else:
        victim, sector = root / name, 0
    with bad_sectors() as bad, trio.fail_after(60):
        bad.add(victim, sector * SECTOR_BYTES)
        async with pair.running(without="slave", heal_from="", scrub_bytes_per_s=0):
            assert bad.failed_count > 0
            async with consumer_of(pair.master) as consumer:
                await consumer.pull_all()
                assert consumer.got == bodies()
            await reached(pair.master.store.log.dispatched_offset, pair.master.store.log.max_offset.value)
            assert pair.master.store.damage.found_count == 0
    assert text in caplog.text
