"""Starts, queries and stops halog processes on free ports, for the demo and the benchmarks.

The processes are those that users start.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ha.cli.cluster.processes import NodeError, NodeProcess, reserved_ports

__all__ = [
    "Cluster",
    "Node",
    "NodeError",
    "cluster",
    "log_range",
    "reserved_ports",
    "wait_in_sync",
    "wait_until_attached",
]

READY_TIMEOUT_S = 60.0


class Node(NodeProcess):
    """A halog process. Its stderr goes to `<directory>/<name>.log`."""

    def __init__(self, name: str, arguments: list[str], directory: Path, admin_token: str = "") -> None:
        super().__init__(name, [sys.executable, *arguments], directory / f"{name}.log")
        self.admin_token = admin_token

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Starts the process and returns the seconds until its READY line. Raises NodeError if there is none."""
        started = time.monotonic()
        self.spawn()
        self.wait_ready(timeout_s)
        return time.monotonic() - started

    def stop(self) -> float:
        """Sends SIGTERM and returns the seconds until the process exits. Raises NodeError unless it exits with 0."""
        started = time.monotonic()
        self.send_signal(signal.SIGTERM)
        self.wait_exit()
        return time.monotonic() - started

    def status(self) -> dict[str, Any]:
        """Returns the status page of the admin port. Raises NodeError if it does not respond."""
        return self.page("/status")

    def page(self, path: str, method: str = "GET") -> dict[str, Any]:
        """Returns a page of the admin port. Raises NodeError if it does not respond."""
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
        self._slave_count = self._group_count = 1
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

    def add_group(self) -> tuple[Node, Node]:
        """Adds a SYNC_MASTER and a SLAVE with a broker name of their own, without starting them."""
        self._group_count += 1
        number = self._group_count
        ports = self._stack.enter_context(reserved_ports(6))
        common = self._common | {"brokerName": f"broker-{number}"}
        found = []
        for role, name, broker_id in (("SYNC_MASTER", "master", 0), ("SLAVE", "slave", 1)):
            store = self.directory / f"{name}-of-{number}"
            found.append(
                self._broker(store.name, role, broker_id, ports[3 * broker_id :], store, common, module=f"ha.{name}")
            )
        master, slave = found
        return master, slave

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
    """Waits until `slave_count` slaves are in sync with the master. Raises NodeError after `timeout_s`."""
    wait_in_sync(nodes.master, timeout_s, slave_count)


def wait_in_sync(master: Node, timeout_s: float = 30.0, slave_count: int = 1) -> None:
    """Waits until `slave_count` slaves are in sync with a master. Raises NodeError after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while master.status()["ha"]["in_sync"] < slave_count:
        if time.monotonic() > give_up:
            raise NodeError(f"no slave attached to {master.name} within {timeout_s:g} s\n{master.log_tail()}")
        time.sleep(0.05)  # HTTP offers no notification
