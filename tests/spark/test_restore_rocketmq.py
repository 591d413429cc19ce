"""Restoring into real RocketMQ brokers, and archiving their stores while they run."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.client import Producer
from ha.errors import ConnectionFailed, RouteNotFound
from ha.protocol.properties import decode_properties
from ha.spark.jobs.archive import ArchiveOptions, archive
from ha.spark.jobs.restore import RestoreOptions, restore
from ha.spark.jobs.restore import job as job
from tests.interop.conftest import children, java, release, workplace  # noqa: F401
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.test_sdk import retry_on
from tests.spark.stores import make_store, message
from tests.spark.test_archive import visible
from tests.spark.test_restore import ADDED, BROKERS_OWN, SPARK

pytestmark = [pytest.mark.interop, pytest.mark.processes]
COUNT = 1200


async def test_real_brokers_store_has_restored_messages_once_and_in_order(
    children: Children,  # noqa: F811
    release: Release,  # noqa: F811
    tmp_path: Path,
) -> None:
    name_server = await start_name_server(children, release)
    master = RocketMqBroker(children, release, "master", name_server, "ASYNC_MASTER")
    await master.start()
    async with Producer(name_server, group="first") as producer:
        # A broker is up before its topics are at the name server.
        await retry_on((RouteNotFound, ConnectionFailed), lambda: producer.queues("back"))

    def work() -> list[dict[str, Any]]:
        source = make_store(tmp_path / "broker-s", [message(number) for number in range(COUNT)])
        options = RestoreOptions(
            path=str(source), topic="flights", target="back", servers=name_server, state=str(tmp_path / "state.json")
        )
        result = restore(SPARK, options)
        assert (result.sent, result.already) == (COUNT, 0)
        again = restore(SPARK, options)
        assert (again.sent, again.already) == (0, COUNT)
        target = tmp_path / "archive"
        archived = archive(SPARK, ArchiveOptions(path=str(master.store), archive=str(target), topics=("back",)))
        assert archived.rows == COUNT
        return visible(target)

    rows = await trio.to_thread.run_sync(work)
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["queueId"]].append(row)
    for queue in range(4):
        for place, row in enumerate(sorted(found[queue], key=lambda row: int(row["queueOffset"]))):
            theirs = message(place * 4 + queue)
            properties = decode_properties(row["propertiesString"].encode())
            assert properties["HALOG_ORIGIN"] == f"flights/broker-s/{queue}/{place}"
            assert (row["body"], row["flag"], row["queueOffset"]) == (theirs.body, theirs.flag, place)
            own = {k: v for k, v in properties.items() if k not in ADDED | BROKERS_OWN | {"WAIT"}}
            assert own == decode_properties(theirs.properties)
    await master.stop()
