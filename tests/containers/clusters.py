"""A compose file of this repository, started by Docker as a user starts it and reached from outside."""

import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
import yaml

from tests.containers.daemon import Docker, DockerError

ROOT = Path(__file__).parents[2]
SETTLE_S = 90.0


class Cluster:
    """The containers of one compose file. Made by `open_cluster`."""

    def __init__(self, docker: Docker, file: str) -> None:
        self.docker = docker
        self.services: dict[str, dict[str, Any]]
        content = yaml.safe_load((ROOT / file).read_text())
        self.project: str = content["name"]
        self.services = content["services"]
        self._file = str(ROOT / file)
        self._environment: dict[str, str] = {}

    async def compose(self, *arguments: str) -> str:
        """Runs `docker compose` with this file."""
        return await self.docker.ask("compose", "--file", self._file, *arguments, environment=self._environment)

    async def up(self, *, to_others: bool) -> None:
        """Starts all containers and waits until each is healthy. `to_others`: serve clients outside the Docker host."""
        self._environment = {"HALOG_HOST": self.docker.address, "HALOG_PUBLISH": "0.0.0.0"} if to_others else {}
        await self.compose("up", "--no-build", "--pull", "never", "--wait", "--wait-timeout", "240")

    def container(self, service: str) -> str:
        """The name of a service's container."""
        return f"{self.project}-{service}-1"

    async def on(self, command: str, service: str, *options: str) -> None:
        """`docker COMMAND OPTIONS CONTAINER`, such as kill, pause, stop."""
        await self.docker.ask(*command.split(), *options, self.container(service))

    async def disconnect(self, service: str) -> None:
        """Takes a container off the cluster's network, its published ports included."""
        await self.docker.ask("network", "disconnect", f"{self.project}_default", self.container(service))

    async def connect(self, service: str) -> None:
        """Puts it back, possibly under another address."""
        network = f"{self.project}_default"
        await self.docker.ask("network", "connect", "--alias", service, network, self.container(service))

    def state(self, service: str) -> dict[str, Any]:
        """What Docker says of a container: `Status`, `ExitCode`, `Health` …"""
        state: dict[str, Any] = self.docker.inspect(self.container(service))["State"]
        return state

    def is_healthy(self, service: str) -> bool:
        """Whether the health check's result is `healthy`."""
        return str(self.state(service)["Health"]["Status"]) == "healthy"

    def volume(self, service: str) -> Path:
        """A service's volume on this machine's disk; read it while the container is stopped."""
        return self.docker.data / "volumes" / f"{self.project}_{service}" / "_data"

    def published(self, service: str, inside: int | None = None) -> str:
        """`host:port`, seen from outside the Docker host, of a service's first port or of the one numbered `inside`."""
        for text in self.services[service]["ports"]:
            _, outside, port = text.rsplit(":", 2)
            if inside in (None, int(port)):
                return f"{self.docker.address}:{outside}"
        raise AssertionError(f"{service} publishes no port {inside}")

    def status(self, service: str) -> dict[str, Any]:
        """A broker's status page; OSError if it does not answer."""
        with urllib.request.urlopen(f"http://{self.published(service, 10913)}/status", timeout=5) as page:
            found: dict[str, Any] = json.load(page)
            return found

    def end(self, service: str) -> int:
        """Where a broker's log ends."""
        end: int = self.status(service)["commitlog"]["max_offset"]
        return end


async def until(what: str, is_so: Callable[[], bool], timeout_s: float = SETTLE_S) -> None:
    """Waits for what can only be asked, not waited for; a service that does not answer is asked again."""
    give_up = time.monotonic() + timeout_s

    def ask() -> bool:
        try:
            return is_so()
        except (OSError, KeyError):
            return False

    while not await trio.to_thread.run_sync(ask):
        assert time.monotonic() < give_up, f"not within {timeout_s:g} s: {what}"
        await trio.sleep(0.2)


@asynccontextmanager
async def open_cluster(docker: Docker, file: str) -> AsyncIterator[Cluster]:
    """A cluster that is not started. Its containers, networks and volumes are removed in the end, after the ends of
    their logs are printed for the report of a test that failed."""
    cluster = Cluster(docker, file)
    try:
        yield cluster
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 120):
            try:
                print(await cluster.compose("logs", "--no-color", "--tail", "30"))
            except DockerError as error:
                print(error)
            await cluster.compose("down", "--volumes", "--timeout", "1")
