"""A name server, a master and slaves as real processes that can be killed, paused, stopped and started."""

import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tests.interop.processes import free_ports
from tests.node.processes import EXIT_TIMEOUT_S, Process
from tests.scenarios.brokers import REPOSITORY, Broker, Restartable, eventually

CONVERGE_S = 180.0
SEGMENT_SIZE = 1 << 20


class NameServer(Restartable):
    """`ha.namesrv` on one port through all its starts. Killed at the end of the block."""

    def __init__(self, directory: Path) -> None:
        self.port = free_ports()
        self.address = f"127.0.0.1:{self.port}"
        self._directory = directory

    def start(self) -> Self:
        self._end()
        self._process = Process(
            "ha.namesrv",
            "--set",
            f"listenPort={self.port}",
            directory=self._directory,
            environment={"PYTHONPATH": str(REPOSITORY)},
        )
        self._process.wait_ready()
        return self

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        self.process.wait_exit(EXIT_TIMEOUT_S)


class Victim(Broker):
    """A broker that can also be killed while it starts or stops. Has a long start timeout, because long runs share
    their machine."""

    ready_timeout_s = 300.0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.popen.poll() is None

    def start_and_kill(self, after_s: float) -> None:
        """Starts it, and kills it after `after_s`, ready or not."""
        self._end()
        self._process = self._launch()
        time.sleep(after_s)
        self.kill()

    def stop_and_kill(self, after_s: float) -> None:
        """Asks it to stop, and kills it after `after_s`, stopped or not."""
        self.process.signal(signal.SIGTERM)
        time.sleep(after_s)
        self.kill()


class Cluster:
    """One name server, one SYNC_MASTER, `slave_count` slaves, below `directory`. A context manager that kills them.

    `settings` apply to every broker. The master's HA port stays the same through its restarts; its other ports don't.
    """

    def __init__(
        self,
        directory: Path,
        *,
        slave_count: int,
        learns_master: bool = False,
        slave_module: str | None = None,
        **settings: Any,
    ) -> None:
        """`learns_master`: slaves find the master through the name server instead of haMasterAddress."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        self._slave_count = slave_count
        self._learns_master = learns_master
        self._slave_module = slave_module
        self.settings = {"mappedFileSizeCommitLog": SEGMENT_SIZE, "slaveTimeout": 1000, **settings}
        self.name_server = NameServer(directory)
        self.slaves: list[Victim] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.name_server).start()
            common = {"namesrvAddr": self.name_server.address, "registerNameServerPeriod": 10_000, **self.settings}
            self.master = stack.enter_context(Victim(self.directory / "master", "SYNC_MASTER", **common))
            self.master.start()
            for number in range(1, self._slave_count + 1):
                link = {} if self._learns_master else {"haMasterAddress": self.master.addresses["ha"]}
                name = f"slave-{number}"
                slave = Victim(
                    self.directory / name, "SLAVE", module=self._slave_module, **{**common, "brokerId": number, **link}
                )
                self.slaves.append(stack.enter_context(slave).start())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)

    @property
    def brokers(self) -> list[Victim]:
        return [self.master, *self.slaves]

    def address(self) -> str | None:
        """The current address of the master for producers."""
        return self.master.addresses.get("remoting")

    def wait_converged(self, timeout_s: float = CONVERGE_S) -> None:
        """Waits until every slave is in sync and has stored and dispatched the master's whole log."""

        def is_so() -> bool:
            try:
                statuses = [broker.status() for broker in self.brokers]
            except OSError:
                return False
            ha, ends = statuses[0]["ha"], [status["commitlog"] for status in statuses]
            in_sync = sum(bool(slave["is_in_sync"]) for slave in ha["slaves"])
            last = ends[0]["max_offset"]
            return in_sync == len(self.slaves) and all(
                end["max_offset"] == end["dispatched_offset"] == last for end in ends
            )

        eventually(f"{len(self.slaves)} slaves follow again", is_so, timeout_s)

    def wait_followed(self, slave_count: int, timeout_s: float = CONVERGE_S) -> None:
        """Waits until `count` slaves are in sync; under load they never have the whole log."""

        def is_so() -> bool:
            try:
                return int(self.master.status()["ha"]["in_sync"]) >= slave_count
            except OSError:
                return False

        eventually(f"{slave_count} slaves are in sync", is_so, timeout_s)


def pick(chance: random.Random, weights: dict[str, float]) -> str:
    [picked] = chance.choices(list(weights), list(weights.values()))
    return picked
