"""Real brokers' stores under the jobs that only read: audited while both are written, counted and compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ha.spark.jobs.audit.job import AuditOptions, AuditResult, audit_with
from ha.spark.jobs.lag import LagOptions, lag_with
from ha.spark.jobs.stats.job import StatsOptions, stats_with
from tests.interop.clusters import wait_attached, wait_equal
from tests.interop.java_client import open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.spark.inline import inline_runner

COUNT = 8_000


def look(master: RocketMqBroker, slave: RocketMqBroker) -> AuditResult:
    paths = (str(master.store), str(slave.store))
    return audit_with(inline_runner(), AuditOptions(paths=paths, names=("master", "slave"), range_bytes=1 << 20))


@pytest.mark.usual_release("5.5.0")
async def test_a_real_pair_is_clean_while_it_works_and_afterwards(
    children: Children, release: Release, tmp_path: Path
) -> None:
    name_server = await start_name_server(children, release)
    small: dict[str, object] = {"mappedFileSizeCommitLog": 4 << 20}
    master = RocketMqBroker(children, release, "master", name_server, "SYNC_MASTER", extra=small)
    slave = RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1, extra=small)
    await master.start()
    await slave.start()
    audits: list[AuditResult] = []
    async with open_java_client(children, release, name_server) as client:
        await wait_attached(client, "mixed")

        async with trio.open_nursery() as nursery:
            done = trio.Event()

            async def watch() -> None:
                while not done.is_set():
                    audits.append(await trio.to_thread.run_sync(look, master, slave))

            nursery.start_soon(watch)
            await client.run("produce", topic="mixed", count=COUNT, batch=50, threads=2, acks=tmp_path / "acks")
            done.set()
        common = await wait_equal(master, slave)
        audits.append(await trio.to_thread.run_sync(look, master, slave))
    assert len(audits) >= 2
    for result in audits:
        assert result.findings == ()
        assert result.exit_code == 0
    ends = [result.copies[0].end for result in audits]
    assert ends == sorted(ends)
    assert ends[-1] == common.end
    assert audits[-1].compared_bytes == common.end
    figures = stats_with(inline_runner(), StatsOptions(path=str(slave.store)))
    assert figures.total.messages == audits[-1].copies[1].record_count
    assert next(topic.figures.messages for topic in figures.topics if topic.topic == "mixed") >= COUNT
    await master.stop()
    await slave.stop()
    assert lag_with(inline_runner(), LagOptions(path=str(slave.store))).newest_ms == figures.total.last_ms
