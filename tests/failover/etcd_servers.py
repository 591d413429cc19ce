"""Real etcd servers as processes on loopback: one, or a cluster of them, each with its folder below the test's.

Facts the settings rest on: the Debian package `etcd-server` has the program `etcd` (3.4 in bookworm, the same API in
later ones). It logs to its standard error unless told otherwise. A server's name, ports and folder stay the same
through its starts, so a killed one comes back as it was. The shortest lease is one and a half election timeouts,
rounded up to whole seconds.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.interop.processes import Child, Children, free_ports, open_children

PROGRAM = "etcd"
ELECTION_TIMEOUT_MS = 500
LEASE_MIN_S = 1
_START_TIMEOUT_S = 30.0


def _state(task: Path) -> str:
    """Return the state of a thread, of which `task` is the folder in /proc."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def require_etcd() -> None:
    """Without the program: a failure where CI=true, a skip elsewhere."""
    if shutil.which(PROGRAM) is None:
        reason = "real etcd servers need etcd on the PATH (Debian: etcd-server)"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@dataclass
class EtcdServer:
    """One server's folder and ports across restarts; `child` is the present process."""

    children: Children
    name: str
    folder: Path
    options: Sequence[str] = ()
    scheme: str = "http"
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_ports)
    child: Child | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def peer(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}"

    def start_soon(self, cluster: Sequence[EtcdServer]) -> None:
        """Start the process. `cluster`: all that belong together, in the same order at each start."""
        members = ",".join(f"{server.name}={server.peer}" for server in cluster)
        self.child = self.children.start_soon(
            self.name,
            [
                PROGRAM,
                f"--name={self.name}",
                f"--data-dir={self.folder}",
                f"--listen-client-urls={self.endpoint}",
                f"--advertise-client-urls={self.endpoint}",
                f"--listen-peer-urls={self.peer}",
                f"--initial-advertise-peer-urls={self.peer}",
                f"--initial-cluster={members}",
                "--initial-cluster-token=halog-tests",
                "--heartbeat-interval=50",
                f"--election-timeout={ELECTION_TIMEOUT_MS}",
                "--logger=zap",
                "--log-outputs=stdout",
                *self.options,
            ],
            environment={name: "" for name in os.environ if name.startswith("ETCD_")},
        )

    async def wait_ready(self) -> None:
        """Return when it has found a leader and serves clients."""
        assert self.child is not None
        await self.child.wait_line(r"serving client traffic (in)?securely", _START_TIMEOUT_S)

    async def kill(self) -> None:
        """SIGKILL."""
        assert self.child is not None
        await self.child.kill()

    def pause(self) -> None:
        """Like SIGSTOP: connections stay, the kernel accepts new ones, nothing answers."""
        assert self.child is not None
        self.child.send_signal(signal.SIGSTOP)
        while not all(_state(task) == "T" for task in Path(f"/proc/{self.child.pid}/task").iterdir()):
            time.sleep(0.001)  # a thread on another processor goes on for a moment

    def resume(self) -> None:
        """SIGCONT."""
        assert self.child is not None
        self.child.send_signal(signal.SIGCONT)


@dataclass
class EtcdCluster:
    """Servers that belong together."""

    servers: list[EtcdServer]

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(server.endpoint for server in self.servers)

    async def start(self, *servers: EtcdServer) -> None:
        """Start all, or those named; return when they serve."""
        for server in servers or self.servers:
            server.start_soon(self.servers)
        for server in servers or self.servers:
            await server.wait_ready()

    async def back_up(self, folder: Path) -> None:
        """Copy all data, of servers that are stopped for that."""
        for server in self.servers:
            await server.kill()
            shutil.copytree(server.folder, folder / server.name)
        await self.start()

    async def restore(self, folder: Path) -> None:
        """Restore such a copy."""
        for server in self.servers:
            await server.kill()
            shutil.rmtree(server.folder)
            shutil.copytree(folder / server.name, server.folder)
        await self.start()

    def pause(self) -> None:
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        for server in self.servers:
            server.resume()

    async def leader(self) -> EtcdServer:
        """Return the leader that it reports; that may have changed since."""
        while True:
            for server in self.servers:
                if server.child is not None and server.child.exit_code is None:
                    try:
                        status = await self.ask("/v3/maintenance/status", {}, server=server)
                    except OSError:
                        continue
                    if "leader" in status and status["leader"] == status["header"]["member_id"]:
                        return server
            await trio.sleep(0.05)

    async def ask(
        self, path: str, request: dict[str, Any], *, server: EtcdServer | None = None, token: str = ""
    ) -> dict[str, Any]:
        """POST to one server, past the adapter under test. OSError for any answer but 200."""
        headers = {"Content-Type": "application/json", **({"Authorization": token} if token else {})}
        url = (server or self.servers[0]).endpoint + path
        asked = urllib.request.Request(url, json.dumps(request).encode(), headers)

        def get() -> dict[str, Any]:
            with urllib.request.urlopen(asked, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found

        return await trio.to_thread.run_sync(get, abandon_on_cancel=True)

    async def compact(self) -> None:
        """Compact the history."""
        key = base64.b64encode(b"compaction").decode()
        put = await self.ask("/v3/kv/put", {"key": key, "value": ""})
        await self.ask("/v3/kv/compaction", {"revision": put["header"]["revision"]})

    async def clear(self) -> None:
        """Delete all keys and leases."""
        everything = base64.b64encode(b"\0").decode()
        await self.ask("/v3/kv/deleterange", {"key": everything, "range_end": everything})
        for lease in (await self.ask("/v3/lease/leases", {})).get("leases", ()):
            await self.ask("/v3/lease/revoke", {"ID": lease["ID"]})

    async def turn_authentication_on(self, user: str, password: str) -> str:
        """Enable authentication with `user` as the only user, with all rights; return a token."""
        await self.ask("/v3/auth/user/add", {"name": user, "password": password})
        await self.ask("/v3/auth/role/add", {"name": "root"})
        await self.ask("/v3/auth/user/grant", {"user": user, "role": "root"})
        await self.ask("/v3/auth/enable", {})
        answer = await self.ask("/v3/auth/authenticate", {"name": user, "password": password})
        return str(answer["token"])


@asynccontextmanager
async def open_cluster(
    folder: Path, count: int = 1, options: Sequence[str] = (), scheme: str = "http", host: str = "127.0.0.1"
) -> AsyncIterator[EtcdCluster]:
    """Servers that serve clients at `host`; killed when the block ends."""
    async with open_children(folder) as children:
        names = [f"etcd{number}" for number in range(count)]
        servers = [EtcdServer(children, name, folder / name, options, scheme, host) for name in names]
        cluster = EtcdCluster(servers)
        await cluster.start()
        yield cluster
