"""The measured systems: halog and Apache RocketMQ, which have the same interface for cases; peers with their own
benchmarks; the loopback interface. Peers are installed, started and stopped by scripts in a given directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bench.clients import (
    GET_BROKER_CONFIG,
    UPDATE_BROKER_CONFIG,
    RunError,
    ask,
    log_end,
    output_of,
    read_catch_up,
    read_harness,
    run_load,
    runtime_info,
)
from bench.measure import MIB, Cost, alone, empty_folder, memory_mib, read_through, watched
from scripts.nodes import cluster, wait_until_attached

_START_S_MAX = 600.0
_INSTALL_S_MAX = 1800.0
_STREAM_S = 5.0
#: Both sides return as many messages per pull as the client requests.
_LARGE_PULLS = {"maxTransferCountOnMessageInMemory": 1024, "maxTransferBytesOnMessageInMemory": 4 * MIB}


def peers_directory() -> Path:
    """Returns the directory with the peers' scripts: $HALOG_BENCH_PEERS, or shared/bench next to the repository."""
    return Path(os.environ.get("HALOG_BENCH_PEERS") or Path(__file__).resolve().parents[2] / "shared" / "bench")


class Run(NamedTuple):
    """One result of a case: a point, a name and figures."""

    point: Any
    side: str
    found: dict[str, Any]


@dataclass(frozen=True)
class Terms:
    """The conditions that all runs of a file share."""

    seconds: float = 8.0
    warm_s: float = 10.0
    """Warm-up time of servers and their just-in-time compilers before the first point."""
    size: int = 1024
    log_mib: int = 4096
    java_client: str = "4.9.7"
    ballast: bool = True
    """Whether free memory is filled with pages of a sparse file before each block, so that a virtual machine has that
    memory from its host already."""


class Side(ABC):
    """A measured system."""

    name: str
    version = ""

    @abstractmethod
    def missing(self) -> str | None:
        """Installs the system if necessary; returns why it can't be measured, or None."""

    def drop_log(self) -> None:  # noqa: B027
        """Deletes what is kept between rounds."""


@dataclass
class Servers:
    """Running servers. `pids` by role; code that starts another server adds it."""

    side: str
    name_server: str
    broker: str
    pids: dict[str, int]
    ready_s: float
    """Seconds from the master's start until it served."""
    neighbours: dict[str, int] = field(default_factory=dict)
    """Process ids of load that belongs to the measurement, but to no server and no client."""

    def until_ready(self, attempt: Callable[[], object], within_s: float = 90.0) -> None:
        """Repeats a call until it succeeds, that is, until the route is known and the slave is in sync. Raises the
        call's RunError if it still fails after `within_s`."""
        give_up = time.monotonic() + within_s
        while True:
            try:
                attempt()
                return
            except RunError:
                if time.monotonic() > give_up:
                    raise
            time.sleep(0.2)

    def measured(self, point: Any, load: Callable[[], dict[str, Any]], side: str | None = None) -> Run:
        """Runs one client and measures its cost; no other timed run is active."""
        with alone(), watched(ChainMap(self.pids, self.neighbours)) as cost:
            found = load()
        cost.server_cpu_s = {role: cost.server_cpu_s[role] for role in self.pids}
        memory = {role: memory_mib(pid) for role, pid in self.pids.items()}
        messages = found.get("messages")
        if messages:
            found["cpu_us"] = sum(cost.server_cpu_s.values()) / messages * 1e6
            found["master_us"] = cost.server_cpu_s["master"] / messages * 1e6
            found["client_us"] = cost.client_cpu_s / messages * 1e6
        found |= {"cpu_s": cost.server_cpu_s, "client_cpu_s": cost.client_cpu_s, "foreign_cores": cost.foreign_cores}
        found |= {"memory_mib": memory, "master_mib": memory["master"]["anonymous"]}
        return Run(point, side or self.side, found)


class Brokers(Side):
    """Brokers that speak RocketMQ's protocol: a name server, a master and a slave with default settings, on
    loopback.
    """

    def __init__(self, terms: Terms, directory: Path) -> None:
        self.terms = terms
        self.directory = directory

    @abstractmethod
    def replicated(self, flush: str = "ASYNC_FLUSH") -> Any:
        """Context manager: Servers with a SYNC_MASTER, its empty store and a slave, ready for sends. `flush`: the
        flushDiskType of both.
        """

    @abstractmethod
    def name_server(self, connection_count: int) -> Any:
        """Context manager: the address and process id of a name server for so many connections, without brokers."""

    @abstractmethod
    def filled(self) -> Any:
        """Context manager: Servers with a name server and a master whose log has terms.log_mib, created if
        necessary.
        """

    @abstractmethod
    def fresh_slave(self, servers: Servers) -> Any:
        """Context manager: the address of a slave of a filled master that starts, or has just started, to copy."""

    @abstractmethod
    def restart(self, servers: Servers, *, kill: bool) -> float:
        """Stops or kills a filled master; returns the seconds until it serves again."""

    def _fill(self, broker: str, store: Path) -> None:
        """Sends batches, which are faster, until the log has the required size, in the same way on every side. Then
        reads the store's files into the page cache.
        """
        # RocketMQ listens before it knows the end of its log.
        _wait(lambda: log_end(broker) >= 0, f"{self.name}: its master told nothing of its log")
        missing = self.terms.log_mib * MIB - log_end(broker)
        if missing > 0:
            say(f"{self.name}: writing a log of {self.terms.log_mib:,} MiB")
            # Few in flight: RocketMQ rejects sends that have waited for 200 ms.
            words = ["--size", self.terms.size, "--bytes", missing, "--batch", 32, "--in-flight", 4]
            output_of([sys.executable, "-m", "bench.load", "--broker", broker, *words], timeout_s=3600)
            built = f"{self.name} did not build its queues"
            _wait(lambda: runtime_info(broker)["dispatchBehindBytes"] == "0", built, 600)
        read_through(
            *(path for name in ("commitlog", "consumequeue") for path in (store / name).rglob("*") if path.is_file())
        )


class Halog(Brokers):
    """halog, from this repository."""

    name = "halog"

    def missing(self) -> str | None:
        return None

    @contextmanager
    def replicated(self, flush: str = "ASYNC_FLUSH") -> Iterator[Servers]:
        with empty_folder(self.directory) as folder, cluster(folder, flushDiskType=flush) as nodes:
            ready_s = {node.name: node.start() for node in nodes.all}
            wait_until_attached(nodes)
            pids = {node.name: node.pid for node in nodes.all}
            yield Servers(self.name, nodes.name_server_address, nodes.master.ready["remoting"], pids, ready_s["master"])
            for node in reversed(nodes.all):
                node.stop()

    @contextmanager
    def name_server(self, connection_count: int) -> Iterator[tuple[str, int]]:
        with empty_folder(self.directory) as folder, cluster(folder) as nodes:
            address = nodes.name_server_address
            keys = {"listenPort": address.rpartition(":")[2], "maxConnections": connection_count}
            words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
            node = nodes.node("namesrv", ["-m", "ha.namesrv", *words])
            node.start()
            yield address, node.pid
            node.stop()

    @contextmanager
    def filled(self) -> Iterator[Servers]:
        self._log_folder.mkdir(exist_ok=True)
        with cluster(self._log_folder, haStartFrom="first", **_LARGE_PULLS) as nodes:
            self._nodes = nodes
            nodes.name_server.start()
            ready_s = nodes.master.start(_START_S_MAX)
            broker = nodes.master.ready["remoting"]
            self._fill(broker, nodes.master_store)
            pids = {node.name: node.pid for node in (nodes.name_server, nodes.master)}
            yield Servers(self.name, nodes.name_server_address, broker, pids, ready_s)
            nodes.master.stop()
            nodes.name_server.stop()

    @contextmanager
    def fresh_slave(self, servers: Servers) -> Iterator[str]:
        slave = self._nodes.slave
        slave.start()
        servers.pids["slave"] = slave.pid
        try:
            yield slave.ready["remoting"]
        finally:
            del servers.pids["slave"]
            slave.kill()
            shutil.rmtree(self._nodes.slave_store)

    def restart(self, servers: Servers, *, kill: bool) -> float:
        master = self._nodes.master
        if not kill:
            master.stop()
        master.kill()
        ready_s = master.start(_START_S_MAX)
        servers.pids["master"] = master.pid
        return ready_s

    def drop_log(self) -> None:
        shutil.rmtree(self._log_folder, ignore_errors=True)

    @property
    def _log_folder(self) -> Path:
        return self.directory / "halog-log"


class RocketMQ(Brokers):
    """Apache RocketMQ of one release, with its default segment size."""

    # A busy broker rejects sends that have waited for 200 ms; no comparison would be possible.
    _EXTRA = "mappedFileSizeCommitLog=1073741824;mappedFileSizeConsumeQueue=6000000;waitTimeMillsInSendQueue=10000"
    # A large cluster does not fit into the 256 MiB of the peers' scripts. RocketMQ's own script sets 4 GiB.
    _NAMES_JVM_OPTS = "-Xms2g -Xmx2g -XX:+UseG1GC"
    _PORTS: ClassVar = {"NS": 30876, "MASTER": 30911, "MASTER_HA": 30912, "SLAVE": 30921, "SLAVE_HA": 30922}
    _PORT_OF: ClassVar = {"namesrv": "NS", "master": "MASTER", "slave": "SLAVE"}

    def __init__(self, terms: Terms, directory: Path, scripts: Path, version: str) -> None:
        super().__init__(terms, directory)
        self.name = f"rocketmq-{version}"
        self.version = version
        self._scripts = scripts
        self._ports = {role: int(os.environ.get(f"RMQ_{role}_PORT", port)) for role, port in self._PORTS.items()}

    def missing(self) -> str | None:
        return install(self._scripts, self.directory / "rocketmq", self.version).why_not

    @contextmanager
    def replicated(self, flush: str = "ASYNC_FLUSH") -> Iterator[Servers]:
        extra = f"{self._EXTRA};flushDiskType={flush}"
        with self._folder("sync") as folder:
            roles = ("namesrv", "master", "slave")
            ready_s = {role: self._start(folder, "sync", role, MASTER_EXTRA=extra, SLAVE_EXTRA=extra) for role in roles}
            check_waits_for_slave(self.version, ask(self._broker, GET_BROKER_CONFIG).decode(), flush)
            yield self._servers(folder, ready_s["master"], "namesrv", "master", "slave")
        shutil.rmtree(folder)

    @contextmanager
    def name_server(self, connection_count: int) -> Iterator[tuple[str, int]]:
        with self._folder("names") as folder:
            self._start(folder, "sync", "namesrv", RMQ_NS_JVM_OPTS=self._NAMES_JVM_OPTS)
            servers = self._servers(folder, 0.0, "namesrv")
            yield servers.name_server, servers.pids["namesrv"]
        shutil.rmtree(folder)

    @contextmanager
    def filled(self) -> Iterator[Servers]:
        with self._folder("log") as folder:
            self._start(folder, "async", "namesrv")
            ready_s = self._start(folder, "async", "master")
            seed = folder / "run" / "store-slave.seed"
            if not seed.exists():
                # An empty slave would copy only the last file.
                self._start(folder, "async", "slave")
                run_load(self._broker, "--bytes", 1024)
                _wait(lambda: log_end(self._slave) >= log_end(self._broker), f"{self.name}: its slave got nothing")
                self._script(folder, "stop.sh", "slave")
                (folder / "run" / "store-slave").rename(seed)
            large_pulls = "\n".join(f"{key}={value}" for key, value in _LARGE_PULLS.items())
            ask(self._broker, UPDATE_BROKER_CONFIG, large_pulls.encode())
            self._fill(self._broker, folder / "run" / "store-master")
            yield self._servers(folder, ready_s, "namesrv", "master")

    @contextmanager
    def fresh_slave(self, servers: Servers) -> Iterator[str]:
        folder = self.directory / f"{self.name}-log"
        store = folder / "run" / "store-slave"
        shutil.rmtree(store, ignore_errors=True)
        output_of(["cp", "-r", "--sparse=always", store.with_name("store-slave.seed"), store])
        with self._starting(folder, "async", "slave"):
            pid_file = folder / "run" / "slave.pid"
            _wait(lambda: pid_file.exists() and pid_file.read_text().strip() != "", f"{self.name}: no slave")
            servers.pids["slave"] = int(pid_file.read_text())
            yield self._slave
            del servers.pids["slave"]
        self._script(folder, "stop.sh", "slave")
        shutil.rmtree(store)

    def restart(self, servers: Servers, *, kill: bool) -> float:
        folder = self.directory / f"{self.name}-log"
        self._script(folder, "stop.sh", "master", SIG="KILL" if kill else "TERM")
        ready_s = self._start(folder, "async", "master")
        servers.pids |= self._servers(folder, ready_s, "master").pids
        return ready_s

    def drop_log(self) -> None:
        shutil.rmtree(self.directory / f"{self.name}-log", ignore_errors=True)

    @property
    def _broker(self) -> str:
        return f"127.0.0.1:{self._ports['MASTER']}"

    @property
    def _slave(self) -> str:
        return f"127.0.0.1:{self._ports['SLAVE']}"

    @contextmanager
    def _folder(self, use: str) -> Iterator[Path]:
        """Yields a directory for stores next to the installed software, and stops everything that was started in it at
        the end.
        """
        folder = self.directory / f"{self.name}-{use}"
        folder.mkdir(exist_ok=True)
        for name in ("lib", "classes"):
            if not (folder / name).exists():
                (folder / name).symlink_to(self.directory / "rocketmq" / name, target_is_directory=True)
        self._script(folder, "stop.sh")  # left behind by a killed run
        try:
            yield folder
        finally:
            self._script(folder, "stop.sh")

    def _script(self, folder: Path, script: str, *words: str, **environment: str) -> str:
        environment |= {f"RMQ_{role}_PORT": str(port) for role, port in self._ports.items()}
        return output_of(["bash", self._scripts / script, folder, *words], environment)

    @contextmanager
    def _starting(self, folder: Path, mode: str, role: str, **extra: str) -> Iterator[None]:
        """Runs start.sh of one process, which keeps running in the block. `extra`: environment variables."""
        environment = {f"RMQ_{each}_PORT": str(port) for each, port in self._ports.items()}
        environment |= {"MASTER_EXTRA": self._EXTRA, "SLAVE_EXTRA": self._EXTRA, **extra}
        command = ["bash", str(self._scripts / "start.sh"), str(folder), self.version, mode, role]
        with (
            (folder / "start.log").open("w") as log,
            subprocess.Popen(
                command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            ) as script,
        ):
            yield
        if script.returncode:
            raise RunError(f"{self.name}: {(folder / 'start.log').read_text().strip()[-400:]}")

    def _start(self, folder: Path, mode: str, role: str, **extra: str) -> float:
        """Returns the seconds until one process listens, that is, until its store is recovered."""
        started = time.monotonic()
        port = self._ports[self._PORT_OF[role]]
        with self._starting(folder, mode, role, **extra):
            _wait(lambda: _listens(port), f"{self.name}: its {role} did not come up", _START_S_MAX)
            return time.monotonic() - started

    def _servers(self, folder: Path, ready_s: float, *roles: str) -> Servers:
        pids = {role: int((folder / "run" / f"{role}.pid").read_text()) for role in roles}
        return Servers(self.name, f"127.0.0.1:{self._ports['NS']}", self._broker, pids, ready_s)


def check_waits_for_slave(version: str, config: str, flush: str = "ASYNC_FLUSH") -> None:
    """Raises RunError unless a broker's own configuration says that it waits for a slave, and for the disk as `flush`
    says, before it answers a send.
    """
    found = dict(line.split("=", 1) for line in config.splitlines() if "=" in line)
    wanted = {"brokerRole": "SYNC_MASTER", "flushDiskType": flush}
    if not version.startswith("4."):
        wanted["inSyncReplicas"] = "2"  # with the default of 1 a SYNC_MASTER waits for no slave
    for key, value in wanted.items():
        if found.get(key) != value:
            raise RunError(f"RocketMQ {version} does not wait for its slave: {key} is {found.get(key)}, not {value}")


@dataclass(frozen=True)
class Installed:
    """Result of a peer's setup.sh: the last lines of its output, or why the peer can't be used."""

    words: str = ""
    why_not: str | None = None


@cache
def install(scripts: Path, directory: Path, *words: str) -> Installed:
    """Runs a peer's setup.sh, once in this process."""
    if not (scripts / "setup.sh").exists():
        return Installed(why_not=f"there is no {scripts.name}/setup.sh in the peers' directory")
    directory.mkdir(parents=True, exist_ok=True)
    say(f"setting up {scripts.name} {' '.join(words)}")
    try:
        text = output_of(["bash", scripts / "setup.sh", directory, *words], timeout_s=_INSTALL_S_MAX)
    except (RunError, subprocess.TimeoutExpired) as error:
        return Installed(why_not=str(error))
    return Installed("; ".join(re.sub(r"\x1b\[\d*m", "", line).strip() for line in text.splitlines()[-3:]))


class Peer(Side):
    """A peer with its own benchmark: start.sh, bench.sh and stop.sh in a directory, results as its harness writes
    them.
    """

    def __init__(self, name: str, terms: Terms, directory: Path, scripts: Path) -> None:
        self.name = name
        self._terms = terms
        self._directory = directory / name
        self._scripts = scripts

    def missing(self) -> str | None:
        installed = install(self._scripts, self._directory)
        self.version = installed.words
        return installed.why_not

    def sends(self, environment: Mapping[str, str]) -> Iterator[Run]:
        """Runs its benchmark, and yields the points that `environment` selects. Raises RunError if it fails."""
        results = self._directory / f"{self.name}.jsonl"
        results.unlink(missing_ok=True)
        text = self._bench(environment)
        if not results.exists():
            raise RunError(f"{self.name} has no results: {text.strip()[-400:]}")
        for name, in_flight, found in read_harness(results.read_text().splitlines()):
            yield Run(in_flight, f"{self.name}: {name}", found)

    def catch_up(self, environment: Mapping[str, str]) -> Iterator[Run]:
        """Measures new replicas that copy a log. Raises RunError if its benchmark fails."""
        for found in read_catch_up(self._bench(environment)):
            yield Run("fresh slave", f"{self.name}, {found['added']} new", found)

    def _bench(self, environment: Mapping[str, str]) -> str:
        once = {
            "BENCH_REPEATS": "1",
            "BENCH_TRIES": "1",
            "BENCH_FOREIGN": "1000",  # other load is recorded here instead of repeating the run there
            "BENCH_SECS": f"{self._terms.seconds:g}",
            "BENCH_WARM": f"{min(2.0, self._terms.warm_s):g}",
            "CATCHUP_MIB": str(self._terms.log_mib),
        }
        self._script("stop.sh")
        try:
            self._script("start.sh")
            return self._script("bench.sh", once | dict(environment))
        finally:
            self._script("stop.sh")

    def _script(self, script: str, environment: Mapping[str, str] | None = None) -> str:
        return output_of(["bash", self._scripts / script, self._directory], environment, timeout_s=3600)


class Loopback(Side):
    """One stream over the loopback interface, of iperf3 or, if that is not installed, of two Python processes: the
    upper limit of the interface.
    """

    name = "iperf3"

    def missing(self) -> str | None:
        return None

    def catch_up(self, environment: Mapping[str, str]) -> Iterator[Run]:
        """Measures the stream for a few seconds."""
        with alone():
            if shutil.which("iperf3"):
                yield self._iperf3()
            else:
                with watched({}) as cost:
                    rate = stream_bytes_per_s(_STREAM_S)
                yield self._found("two processes of Python", rate, cost)

    def _iperf3(self) -> Run:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = ["iperf3", "--server", "--one-off", "--bind", "127.0.0.1", "--port", port]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                time.sleep(0.5)  # a connection test would be its only client
                with watched({"server": server.pid}) as cost:
                    text = output_of(
                        ["iperf3", "--client", "127.0.0.1", "--port", port, "--time", f"{_STREAM_S:g}", "--json"]
                    )
            finally:
                server.terminate()
        return self._found(self.name, json.loads(text)["end"]["sum_received"]["bits_per_second"] / 8, cost)

    @staticmethod
    def _found(side: str, bytes_per_s: float, cost: Cost) -> Run:
        return Run("fresh slave", side, {"mb_per_s": bytes_per_s / 1e6, "foreign_cores": cost.foreign_cores})


_SENDER = """\
import socket, sys, time
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as stream:
    end, block = time.monotonic() + float(sys.argv[2]), bytes(1 << 17)
    while time.monotonic() < end:
        stream.sendall(block)
"""


def stream_bytes_per_s(seconds: float) -> float:
    """Returns the bytes per second that one process receives from another that sends continuously."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", _SENDER, str(server.getsockname()[1]), str(seconds)]
        with subprocess.Popen(command), server.accept()[0] as stream:
            block, size, began = bytearray(1 << 20), 0, time.monotonic()
            while count := stream.recv_into(block):
                size += count
            return size / (time.monotonic() - began)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(is_so: Callable[[], bool], complaint: str, within_s: float = 120.0) -> None:
    """Polls `is_so` every 10 ms until it returns true; OSError counts as false. Raises RunError after `within_s`."""
    give_up = time.monotonic() + within_s
    while True:
        try:
            if is_so():
                return
        except OSError:  # not responding yet
            pass
        if time.monotonic() > give_up:
            raise RunError(f"{complaint} within {within_s:g} s")
        time.sleep(0.01)


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(f"# {text}", file=sys.stderr, flush=True)
