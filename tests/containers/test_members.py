"""docker-compose.members.yml: three members with etcd, of which the master's container is killed, frozen, cut off."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.containers.clusters import Cluster, open_cluster, until
from tests.containers.daemon import Docker
from tests.failover.members import Load
from tests.interop.stored_files import compare_commitlogs

pytestmark = pytest.mark.docker

FILE = "docker-compose.members.yml"
MEMBERS = ("member-1", "member-2", "member-3")


def master_of(cluster: Cluster, *others: str) -> str | None:
    """The master by what the members say of themselves, other than `others`."""
    for service in MEMBERS:
        try:
            if service not in others and cluster.status(service)["member"]["state"] == "master":
                return service
        except OSError:
            continue
    return None


async def wait_master(cluster: Cluster, *others: str) -> str:
    """Waits for a master other than `others`."""
    found: list[str] = []

    def look() -> bool:
        found.extend(filter(None, [master_of(cluster, *others)]))
        return bool(found)

    await until("another master", look)
    return found[0]


async def wait_whole(cluster: Cluster) -> None:
    """Waits until the sync-state set has all members again."""
    await until("all in the set", lambda: cluster.status(MEMBERS[0])["member"]["sync_state_set"] == [1, 2, 3])


@asynccontextmanager
async def open_group(docker: Docker) -> AsyncIterator[tuple[Cluster, Load]]:
    """The group, and a producer outside that never stops. In the end: nothing acknowledged is lost, all logs are
    equal, and every container stops in order."""
    async with open_cluster(docker, FILE) as cluster:
        await cluster.up(to_others=True)
        async with trio.open_nursery() as nursery:
            load = Load(cluster.published("namesrv"))
            nursery.start_soon(load.run, 4)
            await wait_whole(cluster)
            await load.go_on()
            yield cluster, load
            await wait_whole(cluster)
            await load.go_on()
            await load.stop()
            assert not await load.lost()
            await until("equal ends", lambda: len({cluster.end(member) for member in MEMBERS}) == 1)
            nursery.cancel_scope.cancel()
        await cluster.compose("stop")
        assert {cluster.state(service)["ExitCode"] for service in (*MEMBERS, "namesrv")} == {0}
        for member in MEMBERS[1:]:
            compare_commitlogs(*(cluster.volume(each) / "store/commitlog" for each in (MEMBERS[0], member)))


async def test_the_masters_container_is_killed_and_nothing_acknowledged_is_lost(docker: Docker) -> None:
    async with open_group(docker) as (cluster, load):
        killed = await wait_master(cluster)
        await cluster.on("kill", killed)
        relieved = await wait_master(cluster, killed)
        await load.go_on()
        await cluster.on("start", killed)
        await wait_whole(cluster)

        # A master that Docker stops hands over first, and no send fails.
        await load.go_on()
        load.failed.clear()
        await cluster.on("stop", relieved)
        assert cluster.state(relieved)["ExitCode"] == 0
        await wait_master(cluster, relieved)
        await load.go_on()
        assert not load.failed
        await cluster.on("start", relieved)


@pytest.mark.long
@pytest.mark.parametrize("begin_end", [("pause", "unpause"), ("kill", "start"), ("disconnect", "connect")], ids=str)
async def test_masters_and_etcd_fail_again_and_again(docker: Docker, begin_end: tuple[str, str]) -> None:
    async with open_group(docker) as (cluster, load):

        async def fault(name: str, service: str) -> None:
            if name in ("disconnect", "connect"):
                await (cluster.disconnect if name == "disconnect" else cluster.connect)(service)
            else:
                await cluster.on(name, service)

        begin, end = begin_end
        for _ in range(5):
            master = await wait_master(cluster)
            await fault(begin, master)
            await wait_master(cluster, master)
            await load.go_on()
            await fault(end, master)
            await wait_whole(cluster)
            await load.go_on()
        await fault(begin, "etcd")
        await until("no master", lambda: master_of(cluster) is None)
        await fault(end, "etcd")
        await wait_master(cluster)
        await wait_whole(cluster)
