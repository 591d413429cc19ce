"""Real broker processes for scenarios: started, watched through /status, stopped, killed, started again.

Ports are the system's choice. Through a broker's restarts its HA port alone stays the same, for slaves to find.
"""

import json
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.interop.stored_files import LogRange, compare_commitlogs, log_range
from tests.node.processes import EXIT_TIMEOUT_S, FREE_PORTS, READY_TIMEOUT_S, Process

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[2]
WAIT_S = 30.0
EXIT_TAKEN = 69

SEGMENT_SIZE = 256 * 1024
SMALL_FILES = {
    "mappedFileSizeCommitLog": SEGMENT_SIZE,
    "mappedFileSizeConsumeQueue": 20 * 2000,
    "brokerName": "broker-a",
    "haSendHeartbeatInterval": 1000,
}


class Restartable:
    """A process that is started any number of times. A context manager that kills it."""

    _process: Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.__exit__(None, None, None)

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process


class Broker(Restartable):
    """One broker's folder, settings and addresses, across restarts. A context manager: killed at the end.

    `root` is where its store is: `root/commitlog`, by default in its folder.
    """

    ready_timeout_s = READY_TIMEOUT_S

    def __init__(
        self, directory: Path, role: str, *, module: str | None = None, root: Path | None = None, **settings: object
    ) -> None:
        self.directory = directory
        self.directory.mkdir(exist_ok=True)
        self.is_slave = role == "SLAVE"
        self.module = module or ("ha.slave" if self.is_slave else "ha.master")
        self.root = root or directory / "store"
        self.settings: dict[str, object] = {
            **SMALL_FILES, "brokerRole": role, "storePathRootDir": self.root, **settings
        }  # fmt: skip
        self.addresses: dict[str, str] = {}
        self.prefix: Sequence[str] = ()
        """Of its command line; see `Process`"""
        self.environment: dict[str, str] = {}

    def start(self, **settings: object) -> Self:
        """Start it, or start it again, and wait for its READY line; `settings` are permanent changes."""
        self.settings.update(settings)
        give_up = time.monotonic() + WAIT_S
        while True:
            self._end()
            self._process = self._launch()
            try:
                ready = self.process.wait_ready(self.ready_timeout_s)
                break
            except AssertionError:
                # An outgoing connection may have taken the port meanwhile.
                is_taken = bool(self.addresses) and self.process.wait_exit() == EXIT_TAKEN
                if not is_taken or time.monotonic() > give_up:
                    self._end()
                    raise
        self.addresses = {name: ready[name] for name in ("remoting", "ha", "admin")}
        return self

    def _launch(self) -> Process:
        settings = dict(self.settings)
        if self.addresses:
            settings.setdefault("haListenPort", self.addresses["ha"].rpartition(":")[2])
        return Process(
            self.module,
            *FREE_PORTS,
            *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
            directory=self.directory,
            environment={"PYTHONPATH": str(REPOSITORY), **self.environment},
            prefix=self.prefix,
        )

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    @property
    def commitlog(self) -> Path:
        return self.root / "commitlog"

    def log(self) -> str:
        """Return its log output of all runs."""
        return (self.directory / f"{self.module}.log").read_text()

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.addresses['admin']}/status", timeout=10) as response:
            found: dict[str, Any] = json.loads(response.read())
            return found

    @property
    def end(self) -> int:
        """Return the end of its log."""
        end: int = self.status()["commitlog"]["max_offset"]
        return end

    def stop(self) -> None:
        """SIGTERM; assert a clean exit."""
        assert self.process.stop() == 0, self.log()

    def kill(self) -> None:
        """SIGKILL, and wait for its effect."""
        self.process.signal(signal.SIGKILL)
        self.process.wait_exit(EXIT_TIMEOUT_S)

    def pause(self) -> None:
        self.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.signal(signal.SIGCONT)


def slave_of(master: Broker, directory: Path, *, module: str | None = None, **settings: Any) -> Broker:
    """A slave of a running master, whose name server it uses too; not started yet."""
    name_server = master.status()["addresses"]["embedded_name_server"] or master.settings["namesrvAddr"]
    link: dict[str, Any] = {"haMasterAddress": master.addresses["ha"], "namesrvAddr": name_server}
    return Broker(directory, "SLAVE", module=module, **{**link, **settings})


def eventually(what: str, probe: Callable[[], T], timeout_s: float = WAIT_S) -> T:
    """The first true value of `probe`. For other processes, which can't wake us. Fails with `what`."""
    give_up = time.monotonic() + timeout_s
    while not (value := probe()):
        assert time.monotonic() < give_up, f"not within {timeout_s} s: {what}"
        time.sleep(0.03)
    return value


def wait_in_sync(master: Broker, count: int = 1) -> None:
    """Wait until `count` slaves are in sync and have all that the master has."""

    def is_so() -> bool:
        status = master.status()
        slaves = [slave for slave in status["ha"]["slaves"] if slave["is_in_sync"] and slave["lag_bytes"] == 0]
        return len(slaves) == count == int(status["ha"]["in_sync"])

    eventually(f"{count} slaves in sync", is_so)


def wait_caught_up(slave: Broker, master: Broker) -> None:
    """Wait until the slave's log ends where the master's does, and both have dispatched all of it."""

    def ends(broker: Broker) -> tuple[int, int]:
        commitlog = broker.status()["commitlog"]
        return commitlog["max_offset"], commitlog["dispatched_offset"]

    eventually("the slave has caught up", lambda: ends(slave) == (master.end,) * 2 == ends(master))


def assert_copy(slave: Broker, master: Broker) -> LogRange:
    """Compare every byte of the slave's log with the master's, while nothing is written; return the slave's range."""
    common = compare_commitlogs(master.commitlog, slave.commitlog)
    assert common == log_range(slave.commitlog)
    return common
