"""A real broker's store with queues and index rebuilt from the commitlog alone: the files are equal, and both kinds of
broker serve from them.
"""

import shutil

import pytest

from ha.spark.jobs import no_progress
from ha.spark.jobs.reindex.job import ReindexOptions, build_files
from tests.interop.broker import INDEX_SLOT_COUNT
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker
from tests.interop.stored_files import index_files, queue_entries
from tests.interop.test_store_exchange import check_served
from tests.spark.derived_stores import run_inline

pytestmark = pytest.mark.processes

_MESSAGE_COUNT = 8_000
# Small enough for several full files, of which the last is not full; the log has two segments.
_INDEX_ENTRY_COUNT = 3000
_SMALL: dict[str, object] = {
    "mappedFileSizeCommitLog": 8 << 20,
    "mappedFileSizeConsumeQueue": 20 * 1000,
    "maxIndexNum": _INDEX_ENTRY_COUNT,
}


@pytest.mark.usual_release("4.9.7")
async def test_a_rebuilt_store_serves(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    real = RocketMqBroker(children, release, "real", name_server, "ASYNC_MASTER", extra=_SMALL)
    store, built = real.store, children.folder / "built"
    ours_only: dict[str, object] = {"indexTags": "false" if release.is_4 else "true"}
    halog = HalogBroker(children, "halog", name_server, "ASYNC_MASTER", store=store, extra=_SMALL | ours_only)
    async with open_java_client(children, release, name_server) as client:
        await real.start()
        acks = children.folder / "acks"
        done = (await client.run("produce", topic="goods", count=_MESSAGE_COUNT, batch=100, threads=4, acks=acks))[-1]
        assert done["acked"] == _MESSAGE_COUNT, done
        await real.stop()
        options = ReindexOptions(
            path=store,
            target=built,
            index_slot_count=INDEX_SLOT_COUNT,
            index_entry_count=_INDEX_ENTRY_COUNT,
            index_tags=not release.is_4,
            range_bytes=1,
        )
        result = build_files(run_inline, 2, options, no_progress)
        assert result.range_count == 2
        assert result.entry_count >= _MESSAGE_COUNT
        assert queue_entries(built) == queue_entries(store)
        ours, theirs = index_files(built, INDEX_SLOT_COUNT), index_files(store, INDEX_SLOT_COUNT)
        assert len(ours) > 2
        assert ours == theirs
        for folder in ("consumequeue", "index"):
            shutil.rmtree(store / folder)
            (built / folder).rename(store / folder)
        for taker in (halog, real):
            await taker.start()
            await client.wait_route("goods")
            await check_served(client, children.folder, acks)
            await taker.stop()
    assert queue_entries(store)["goods", 0]
    names = sorted(path.name for path in (store / "index").iterdir())
    assert len(names) == len(ours), "a broker found fault with an index file and built it again"
