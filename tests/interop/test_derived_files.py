"""Consume queues and key index that a halog slave builds from the log alone equal those of the live real master."""

from pathlib import Path

import pytest

from tests.interop.broker import INDEX_SLOT_COUNT
from tests.interop.clusters import wait_attached, wait_equal
from tests.interop.halog import HalogBroker
from tests.interop.java_client import open_java_client
from tests.interop.processes import Children, eventually
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.stored_files import IndexFile, index_files, queue_entries

pytestmark = pytest.mark.processes


Derived = tuple[dict[tuple[str, int], list[tuple[int, int, int]]], list[IndexFile]]


def derived(store: Path) -> Derived:
    return queue_entries(store), index_files(store, INDEX_SLOT_COUNT)


async def wait_dispatched(store: Path, commitlog_end: int) -> Derived:
    """A store's queues and index once they reach its last record."""

    def complete() -> Derived | None:
        queues, index = derived(store)
        ends = [offset + size for entries in queues.values() for offset, size, _ in entries[-1:]]
        is_complete = ends and max(ends) == commitlog_end and index
        return (queues, index) if is_complete and index[-1].end_physical_offset >= max_start(queues) else None

    def max_start(queues: dict[tuple[str, int], list[tuple[int, int, int]]]) -> int:
        return max(entries[-1][0] for entries in queues.values())

    return await eventually(f"{store} has dispatched all up to {commitlog_end}", complete, 30)


@pytest.mark.usual_release("4.9.7")
async def test_queues_and_index_equal_the_masters(children: Children, release: Release) -> None:
    name_server = await start_name_server(children, release)
    # Few entries per file, so that several files are full and the last one is not.
    few: dict[str, object] = {"mappedFileSizeConsumeQueue": 20 * 1000, "maxIndexNum": 3000}
    ours_only: dict[str, object] = {"indexTags": "false" if release.is_4 else "true"}
    master = RocketMqBroker(children, release, "master", name_server, "SYNC_MASTER", extra=few)
    slave = HalogBroker(children, "ha-slave", name_server, "SLAVE", broker_id=1, extra=few | ours_only)
    await master.start()
    await slave.start()
    async with open_java_client(children, release, name_server) as client:
        await wait_attached(client, "probes")
        for topic, count, batch in (("goods", 7_000, 100), ("goods-2", 500, 1)):
            acks = children.folder / f"acks-{topic}"
            done = (await client.run("produce", topic=topic, count=count, batch=batch, threads=4, acks=acks))[-1]
            assert done["acked"] == count, done
        end = (await wait_equal(master, slave)).end
        our_queues, our_index = await wait_dispatched(slave.store, end)
        their_queues, their_index = await wait_dispatched(master.store, end)
    assert our_queues.keys() == their_queues.keys() >= {("goods", queue) for queue in range(4)}
    for queue, entries in their_queues.items():
        assert our_queues[queue] == entries, queue
    assert len(our_index) == len(their_index) > 2
    for number, (our_file, their_file) in enumerate(zip(our_index, their_index, strict=True)):
        assert our_file == their_file, f"index file {number}"
