"""halog processes for the demo and the benchmarks: a name server, a master, a slave on free ports, started, asked,
stopped.

Nothing of the package is imported here: what is shown and measured are the processes that a user starts.
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
    """A process did not start, answer or stop as it should; the message says which and shows the end of its log."""


class Node:
    """One halog process. Its stderr goes to `<directory>/<name>.log`; its READY line is parsed into `ready`."""

    def __init__(self, name: str, arguments: list[str], directory: Path, admin_token: str = "") -> None:
        self.name = name
        self.admin_token = admin_token
        self.arguments = arguments
        self.log_file = directory / f"{name}.log"
        self.ready: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None
        return self._process.pid

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Starts it; returns the seconds until its READY line."""
        started = time.monotonic()
        with self.log_file.open("a") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, *self.arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C reaches whoever started it alone, who then stops all in order
            )
        assert process.stdout is not None
        with _alarm(timeout_s, f"{self.name} was not READY within {timeout_s:g} s\n{self.log_tail()}"):
            line = process.stdout.readline()
        if not line.startswith("READY"):
            raise NodeError(f"{self.name} did not start (exit code {process.wait()})\n{self.log_tail()}")
        self.ready = dict(part.split("=", 1) for part in line.split()[1:] if "=" in part)
        return time.monotonic() - started

    def stop(self) -> float:
        """Sends SIGTERM; returns the seconds until it is gone. NodeError unless it exits with 0."""
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
        """SIGKILL, if it still runs."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log_file.read_text(errors="replace").splitlines()[-12:] if self.log_file.exists() else []
        return "\n".join(f"    {self.name}: {line}" for line in lines)

    def status(self) -> dict[str, Any]:
        """What its admin port says about it."""
        return self.page("/status")

    def page(self, path: str, method: str = "GET") -> dict[str, Any]:
        """A page of its admin port. NodeError if it does not answer."""
        url = f"http://{self.ready['admin']}{path}"
        headers = {"Authorization": f"Bearer {self.admin_token}"} if self.admin_token else {}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, headers=headers, method=method), timeout=10
            ) as page:
                answer: dict[str, Any] = json.load(page)
                return answer
        except (OSError, ValueError, HTTPException) as error:  # the last: killed amid its answer
            raise NodeError(f"{self.name} does not answer {url}: {error}\n{self.log_tail()}") from None


class Cluster:
    """A name server, a SYNC_MASTER and a SLAVE below `directory`; made by `cluster`, started by whoever wants them."""

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
        """In the order of starting."""
        return [self.name_server, self.master, self.slave]

    def add_slave(self) -> Node:
        """Another slave, not started; its store is the folder of its name."""
        self._slave_count += 1
        name = f"slave-{self._slave_count}"
        ports = self._stack.enter_context(reserved_ports(3))
        return self._broker(
            name, "SLAVE", self._slave_count, ports, self.directory / name, self._common, module="ha.slave"
        )

    def node(self, name: str, arguments: list[str]) -> Node:
        """Another process, ended with the others."""
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
    """A Cluster in an existing empty folder; `keys` are further lines of both brokers' broker.conf. Ends what still
    runs."""
    with ExitStack() as stack:
        yield Cluster(directory, stack, **keys)


def log_range(node: Node) -> tuple[int, int]:
    """Where a broker's commitlog begins and ends, in bytes, as the broker tells."""
    status = node.status()["commitlog"]
    return status["min_offset"], status["max_offset"]


def wait_until_attached(nodes: Cluster, timeout_s: float = 30.0, slave_count: int = 1) -> None:
    """Waits until so many slaves count at the master: from the first on a send can be SEND_OK."""
    give_up = time.monotonic() + timeout_s
    while nodes.master.status()["ha"]["in_sync"] < slave_count:
        if time.monotonic() > give_up:
            raise NodeError(f"the slave did not attach within {timeout_s:g} s\n{nodes.slave.log_tail()}")
        time.sleep(0.05)  # there is nobody to wake a stranger who asks over HTTP


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Yields ports on 127.0.0.1 that nothing uses, and that no other such block gets while this one lasts.

    A node opens its ports seconds after they were chosen, and again at each start: until then they are free, and
    another run beside this one could choose them as well. So their UDP ports, which nobody needs, are held meanwhile.

    From where the system takes none for outgoing connections: one of those could have it before the process that it is
    meant for.
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
            raise NodeError(f"there are no {count} free ports from {_PORTS[0]} to {_PORTS[-1]}")
        yield found


@contextmanager
def _alarm(timeout_s: float, message: str) -> Iterator[None]:
    """NodeError(message) if the block, which may hang in a system call, takes longer. Main thread only."""

    def expired(_signal: int, _frame: object) -> None:
        raise NodeError(message)

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
