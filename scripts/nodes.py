"""Starts, queries and stops halog processes on free ports, for the demo and the benchmarks.

Does not import the package: the demo and the benchmarks use the processes that a user starts.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_PORTS = range(20_000, 25_000, 4)  # a broker opens listenPort - 2, too


class NodeError(Exception):
    """A process failed to start, respond or stop; the message names it and shows the end of its log."""


class Node:
    """A halog process. Its stderr goes to `<directory>/<name>.log`; its READY line is parsed into `ready`."""

    def __init__(self, name: str, arguments: list[str], directory: Path, admin_token: str = "") -> None:
        self.name = name
        self.admin_token = admin_token
        self.arguments = arguments
        self.log_file = directory / f"{name}.log"
        self.ready: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The process ID."""
        assert self._process is not None
        return self._process.pid

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Starts the process and returns the seconds until its READY line."""
        started = time.monotonic()
        with self.log_file.open("a") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, *self.arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only the parent, which then stops all processes in order
            )
        assert process.stdout is not None
        with _alarm(timeout_s, f"{self.name} was not READY within {timeout_s:g} s\n{self.log_tail()}"):
            line = process.stdout.readline()
        if not line.startswith("READY"):
            raise NodeError(f"{self.name} did not start (exit code {process.wait()})\n{self.log_tail()}")
        self.ready = dict(part.split("=", 1) for part in line.split()[1:] if "=" in part)
        return time.monotonic() - started

    def stop(self) -> float:
        """Sends SIGTERM and returns the seconds until the process exits. NodeError unless it exits with 0."""
        assert self._process is not None
        started = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NodeError(
                f"{self.name} did not stop within {STOP_TIMEOUT_S:g} s of SIGTERM\n{self.log_tail()}"
            ) from None
        if code != 0:
            raise NodeError(f"{self.name} stopped with exit code {code} instead of 0\n{self.log_tail()}")
        return time.monotonic() - started

    def kill(self) -> None:
        """Sends SIGKILL if the process still runs."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def log_tail(self) -> str:
        """Returns the last lines of the log."""
        lines = self.log_file.read_text(errors="replace").splitlines()[-12:] if self.log_file.exists() else []
        return "\n".join(f"    {self.name}: {line}" for line in lines)

    def status(self) -> dict[str, Any]:
        """Returns the status page of the admin port."""
        return self.page("/status")

    def page(self, path: str, method: str = "GET") -> dict[str, Any]:
        """Returns a page of the admin port. NodeError if it does not respond."""
        url = f"http://{self.ready['admin']}{path}"
        headers = {"Authorization": f"Bearer {self.admin_token}"} if self.admin_token else {}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, headers=headers, method=method), timeout=10
            ) as page:
                answer: dict[str, Any] = json.load(page)
                return answer
        except (OSError, ValueError, HTTPException) as error:  # HTTPException: killed while responding
            raise NodeError(f"{self.name} does not respond to {url}: {error}\n{self.log_tail()}") from None


class Cluster:
    """A name server, a SYNC_MASTER and a SLAVE below `directory`; created by `cluster`; the caller starts them."""

    def __init__(self, directory: Path, stack: ExitStack, **keys: object) -> None:
        self.directory = directory
        self._stack = stack
        self._slave_count = 1
        names, *ports = stack.enter_context(reserved_ports(7))
        self.name_server_address = f"127.0.0.1:{names}"
        self._common = common = {
            "brokerClusterName": "DemoCluster",
            "brokerName": "broker-a",
            "brokerIP1": "127.0.0.1",
            "brokerIP2": "127.0.0.1",
            "namesrvAddr": self.name_server_address,
            **keys,
        }
        self.master_store = directory / "master"
        self.slave_store = directory / "slave"
        self.name_server = self.node("namesrv", ["-m", "ha.namesrv", "--set", f"listenPort={names}"])
        self.master = self._broker("master", "SYNC_MASTER", 0, ports[:3], self.master_store, common)
        self.slave = self._broker("slave", "SLAVE", 1, ports[3:], self.slave_store, common)

    @property
    def all(self) -> list[Node]:
        """All nodes, in start order."""
        return [self.name_server, self.master, self.slave]

    def add_slave(self) -> Node:
        """Adds a slave without starting it; its store is the directory with its name."""
        self._slave_count += 1
        name = f"slave-{self._slave_count}"
        ports = self._stack.enter_context(reserved_ports(3))
        return self._broker(
            name, "SLAVE", self._slave_count, ports, self.directory / name, self._common, module="ha.slave"
        )

    def node(self, name: str, arguments: list[str]) -> Node:
        """Adds a process that is stopped with the others."""
        node = Node(name, arguments, self.directory, str(self._common.get("adminToken", "")))
        self._stack.callback(node.kill)
        return node

    def _broker(
        self,
        name: str,
        role: str,
        broker_id: int,
        ports: list[int],
        store: Path,
        common: dict[str, object],
        module: str | None = None,
    ) -> Node:
        keys: dict[str, object] = {
            "brokerRole": role,
            "brokerId": broker_id,
            "listenPort": ports[0],
            "haListenPort": ports[1],
            "adminListenPort": ports[2],
            "storePathRootDir": store,
            **common,
        }
        conf = self.directory / f"{name}.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in keys.items()))
        return self.node(name, ["-m", module or f"ha.{name}", "--config", str(conf)])


@contextmanager
def cluster(directory: Path, **keys: object) -> Iterator[Cluster]:
    """Yields a Cluster in an existing empty directory, and kills its processes at the end.

    `keys` are added to both brokers' broker.conf.
    """
    with ExitStack() as stack:
        yield Cluster(directory, stack, **keys)


def log_range(node: Node) -> tuple[int, int]:
    """Returns the minimum and maximum physical offset of a broker's commitlog, in bytes."""
    status = node.status()["commitlog"]
    return status["min_offset"], status["max_offset"]


def wait_until_attached(nodes: Cluster, timeout_s: float = 30.0, slave_count: int = 1) -> None:
    """Waits until `slave_count` slaves are in sync with the master."""
    give_up = time.monotonic() + timeout_s
    while nodes.master.status()["ha"]["in_sync"] < slave_count:
        if time.monotonic() > give_up:
            raise NodeError(f"the slave did not attach within {timeout_s:g} s\n{nodes.slave.log_tail()}")
        time.sleep(0.05)  # HTTP offers no notification


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Yields free ports on 127.0.0.1 that no concurrent call of this function returns during the block.

    A node opens its ports seconds after they are chosen, and again at each start. To reserve them until then, this
    function keeps the UDP ports with the same numbers bound.

    The ports are outside the range that the system uses for outgoing connections.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(found) == count:
                break
            with suppress(OSError), ExitStack() as claim, socket.socket() as probe:
                held = claim.enter_context(socket.socket(type=socket.SOCK_DGRAM))
                held.bind(("127.0.0.1", port))
                probe.bind(("127.0.0.1", port))
                stack.enter_context(claim.pop_all())
                found.append(port)
        if len(found) < count:
            raise NodeError(f"fewer than {count} free ports between {_PORTS[0]} and {_PORTS[-1]}")
        yield found


@contextmanager
def _alarm(timeout_s: float, message: str) -> Iterator[None]:
    """Raises NodeError(message) if the block takes too long, even in a system call. Main thread only."""

    def expired(_signal: int, _frame: object) -> None:
        raise NodeError(message)

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
