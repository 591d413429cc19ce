"""docker-compose.yml: a master and a slave, from two commands to containers that die, freeze and lose their network."""

import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.containers.clusters import ROOT, SETTLE_S, Cluster, open_cluster, until
from tests.containers.daemon import Docker
from tests.interop.stored_files import compare_commitlogs
from tests.node.test_processes import send

pytestmark = pytest.mark.docker

FILE = "docker-compose.yml"
SERVICES = ("namesrv", "master", "slave")
OK, SLAVE_NOT_AVAILABLE, FLUSH_SLAVE_TIMEOUT = 0, 11, 12  # RocketMQ's ResponseCode
HA = str(Path(sys.executable).with_name("ha"))


class Sender:
    """Sends numbered messages to the master from outside."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.stored_count = 0

    async def __call__(self) -> int:
        """The response code of the next message, which is stored whatever the code; OSError if there was none."""
        address = self._cluster.published("master")
        answer = await trio.to_thread.run_sync(send, address, b"%d" % self.stored_count)
        self.stored_count += 1
        return answer.code

    async def heal(self) -> None:
        """Waits until the slave counts and a message is on both.

        A connection that was cut may count for a moment: what is sent then is not acknowledged, and answered so.
        """
        with trio.fail_after(SETTLE_S):
            while True:
                await until("the slave in sync", lambda: self._cluster.status("master")["ha"]["in_sync"] == 1)
                if await self() == OK:
                    return

    def read(self, broker: str) -> list[int]:
        """The numbers that a client outside reads by way of the name server; ConnectionError if it can't."""
        servers = self._cluster.published("namesrv")
        command = [HA, "consume", "flights", "--from", "first", "--broker", broker, "--servers", servers]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ConnectionError(done.stderr)
        return sorted(map(int, done.stdout.split()))


def test_the_documented_commands_start_these_files() -> None:
    """`Cluster.up` runs them, with an image that is built already."""
    [block] = [
        text
        for text in re.findall(r"(?ms)^```sh\n(.*?)^```$", (ROOT / "docs/deploying.md").read_text())
        if "docker compose" in text
    ]
    commands = [line.partition(" #")[0].strip() for line in block.splitlines()]
    assert commands == [
        "docker compose up --build --wait",
        "docker compose --file docker-compose.members.yml up --build --wait",
        "docker compose --file docker-compose.groups.yml up --build --wait",
    ]


async def test_two_commands_start_a_cluster_that_heals(docker: Docker) -> None:
    async with open_cluster(docker, FILE) as cluster:
        # As the file says: on the Docker host, with its defaults.
        await cluster.up(to_others=False)
        docker.run_inside([HA, "produce", "greetings", "--body", "hello"])
        status = json.loads(docker.run_inside(["curl", "--silent", "http://127.0.0.1:10913/status"]))
        assert (status["role"], status["ha"]["in_sync"]) == ("SYNC_MASTER", 1)
        curl = ["curl", "--silent", "--output", "/dev/null", "-w", "%{http_version}", "--http2-prior-knowledge"]
        assert docker.run_inside([*curl, "http://127.0.0.1:8081/"]) == "2"  # the gRPC port
        await cluster.compose("down")

        # Other containers on the same volumes, for clients elsewhere.
        await cluster.up(to_others=True)
        assert cluster.status("master")["commitlog"]["max_offset"] == status["commitlog"]["max_offset"]
        sender = Sender(cluster)
        await sender.heal()

        # A frozen slave.
        await cluster.on("pause", "slave")
        assert await sender() == FLUSH_SLAVE_TIMEOUT
        await cluster.on("unpause", "slave")
        await sender.heal()

        # A slave without a network, which may come back under another address.
        await cluster.disconnect("slave")
        assert await sender() == FLUSH_SLAVE_TIMEOUT
        await cluster.connect("slave")
        await sender.heal()

        # A slave that crashes: the restart policy starts it again.
        docker.kill_process(cluster.container("slave"))
        await until("no slave", lambda: cluster.status("master")["ha"]["in_sync"] == 0)
        await sender.heal()
        assert docker.inspect(cluster.container("slave"))["RestartCount"] == 1

        # A killed slave stays away until somebody starts it.
        await cluster.on("kill", "slave")
        assert cluster.state("slave")["ExitCode"] == 137
        assert await sender() == SLAVE_NOT_AVAILABLE
        await cluster.on("start", "slave")
        await sender.heal()

        # A killed master: its slave serves what there is, and says that it lacks its master.
        await cluster.on("kill", "master")
        with pytest.raises(OSError):  # noqa: PT011
            await sender()
        assert sender.read("slave") == list(range(sender.stored_count))
        await until("the slave not ready", lambda: not cluster.is_healthy("slave"))
        await cluster.on("start", "master")
        await sender.heal()
        await until("healthy", lambda: all(map(cluster.is_healthy, SERVICES)))
        assert sender.read("master") == list(range(sender.stored_count))

        await cluster.compose("stop")
        assert {service: cluster.state(service)["ExitCode"] for service in SERVICES} == dict.fromkeys(SERVICES, 0)
        logs = [cluster.volume(service) / service / "commitlog" for service in ("master", "slave")]
        assert compare_commitlogs(*logs).size > 0


@pytest.mark.long
async def test_each_fault_again_and_again(docker: Docker) -> None:
    async with open_cluster(docker, FILE) as cluster:
        await cluster.up(to_others=True)
        sender = Sender(cluster)
        faults: list[tuple[Callable[[str], Awaitable[None]], Callable[[str], Awaitable[None]]]] = [
            (partial(cluster.on, "pause"), partial(cluster.on, "unpause")),
            (partial(cluster.on, "kill"), partial(cluster.on, "start")),
            (cluster.disconnect, cluster.connect),
            (partial(cluster.on, "stop"), partial(cluster.on, "start")),
        ]
        await sender.heal()
        for _ in range(3):
            for service in ("slave", "master", "namesrv"):
                for begin, end in faults:
                    await begin(service)
                    if service == "slave":
                        assert await sender() in (SLAVE_NOT_AVAILABLE, FLUSH_SLAVE_TIMEOUT)
                    if service == "namesrv":
                        assert await sender() == OK
                    await end(service)
                    await sender.heal()
        # Clients outside find the master again once it has registered with the name server that was started last.
        await until("a route", lambda: sender.read("master") == list(range(sender.stored_count)))
        await cluster.compose("stop")
        assert {service: cluster.state(service)["ExitCode"] for service in SERVICES} == dict.fromkeys(SERVICES, 0)
        compare_commitlogs(*(cluster.volume(service) / service / "commitlog" for service in ("master", "slave")))
