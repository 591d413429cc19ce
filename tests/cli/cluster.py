"""A master and a slave as processes, on ports that the system chooses."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.node.processes import FREE_PORTS, Process


def status_of(admin: str) -> dict[str, Any]:
    """The /status page of a node."""
    with urllib.request.urlopen(f"http://{admin}/status", timeout=10) as answer:
        page: dict[str, Any] = json.load(answer)
    return page


def wait_until(is_so: Callable[[], bool]) -> None:
    """Polls a condition of other processes, for which there is no event."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, "not within 60 s"
        time.sleep(0.05)


def settings(*pairs: str) -> list[str]:
    """`--set` for each key=value."""
    return [word for pair in pairs for word in ("--set", pair)]


class Cluster:
    """Where the nodes are."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self.directory = directory
        self.name_server = ""
        self.ha = ""
        self.admins: list[str] = []
        self.remotings: list[str] = []
        self.processes: list[Process] = []

    def start(
        self, module: str, *arguments: str, folder: str = ".", environment: dict[str, str] | None = None
    ) -> dict[str, str]:
        """Start a node, and wait until it is ready; its READY line's fields."""
        directory = self.directory / folder
        directory.mkdir(exist_ok=True)
        started = Process(module, *FREE_PORTS, *arguments, directory=directory, environment=environment)
        process = self._stack.enter_context(started)
        ready = process.wait_ready()
        self.processes.append(process)
        self.admins.append(ready["admin"])
        self.remotings.append(ready["remoting"])
        return ready

    def master(self, *pairs: str, folder: str = ".", environment: dict[str, str] | None = None) -> None:
        """Start a master that is the name server, too, unless there is one."""
        given = [f"namesrvAddr={self.name_server}"] if self.name_server else []
        ready = self.start("ha.master", *settings(*given, *pairs), folder=folder, environment=environment)
        self.ha = ready["ha"]
        self.name_server = self.name_server or status_of(ready["admin"])["addresses"]["embedded_name_server"]

    def slave(self, *pairs: str, folder: str = ".") -> None:
        """Start a slave of the master."""
        found = settings(f"haMasterAddress={self.ha}", f"namesrvAddr={self.name_server}", *pairs)
        self.start("ha.slave", *found, folder=folder)

    @property
    def flags(self) -> list[str]:
        """What `ha` is told of it."""
        return ["--servers", self.name_server, *(word for admin in self.admins for word in ("--admin", admin))]


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """A cluster without nodes; those that are started end with the block."""
    with ExitStack() as stack:
        yield Cluster(stack, directory)
