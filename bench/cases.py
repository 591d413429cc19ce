"""The cases: each one is measured on every side, on servers that are started for it in each round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.clients import JavaClient, log_end, run_load, run_sdk, watch_catch_up
from bench.measure import empty_folder, memory_mib
from bench.name_server import NAMES, ask_name_server
from bench.neighbours import busy_loops, read_trace, saturated_disk, traced_writes
from bench.sides import Brokers, Loopback, Peer, Run, Servers, Side, Terms

TOPIC = "bench"
#: Warm-up requests of each new Java client.
CLIENT_WARM_UP = 200


@dataclass(frozen=True)
class Metric:
    """A figure of a run, and how it is shown."""

    key: str
    heading: str
    digits: int = 0


@dataclass(frozen=True)
class Panel:
    """One plot of a case: figures of the same unit over its axis."""

    heading: str
    keys: tuple[str, ...]


RATE = Metric("rate", "messages/s")
LATENCIES = (Metric("p50_ms", "p50 ms", 2), Metric("p99_ms", "p99 ms", 2))
#: Processor time in microseconds per message, that is, in seconds per million messages.
COSTS = (Metric("cpu_us", "servers' CPU s a million", 1), Metric("client_us", "client's CPU s a million", 1))
MEMORY = Metric("master_mib", "master's MiB, own")
SENDS = (RATE, *LATENCIES, *COSTS, MEMORY)
PANELS = (Panel("messages a second", ("rate",)), Panel("latency, ms", ("p50_ms", "p99_ms")))
BESIDE = (
    RATE,
    *LATENCIES,
    Metric("p999_ms", "p99.9 ms", 2),
    Metric("max_ms", "longest ms", 1),
    Metric("gap_ms", "longest gap ms", 1),
    *COSTS,
)
WRITES = (
    RATE,
    Metric("log_writes", "writes of the log"),
    Metric("log_slow", "20 ms or more"),
    Metric("log_max_ms", "longest ms", 1),
    Metric("file_writes", "calls for all files"),
    Metric("file_slow", "20 ms or more"),
    Metric("file_max_ms", "longest ms", 1),
)
Neighbour = Callable[[Path], AbstractContextManager[dict[str, int]]]
"""Runs other load during a block, with its files in the given folder; yields its process ids by name"""


@dataclass(frozen=True)
class Tools:
    """What a block needs besides its servers."""

    terms: Terms
    java: JavaClient | None = None


@dataclass(frozen=True)
class Case:
    """A measurement. `block` runs it against brokers that speak RocketMQ's protocol. `peers`: name of another peer ->
    variables that select the same part of that peer's own benchmark. `panels` are plotted over points that are numbers.
    """

    name: str
    question: str
    axis: str
    metrics: tuple[Metric, ...]
    block: Callable[[Tools, Brokers], Iterator[Run]]
    peers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    needs_java: bool = False
    only_halog: bool = False
    panels: tuple[Panel, ...] = PANELS

    def runs(self, tools: Tools, side: Side) -> Iterator[Run]:
        """Runs one block: all points of one side."""
        if isinstance(side, Brokers):
            yield from self.block(tools, side)
        elif isinstance(side, Peer):
            ask = side.catch_up if self.name == "catchup" else side.sends
            yield from ask(self.peers[side.name])
        elif isinstance(side, Loopback):
            yield from side.catch_up({})

    def asks(self, side: Side) -> bool:
        """Whether the case applies to a side."""
        if isinstance(side, Brokers):
            return side.name == "halog" or not self.only_halog
        return side.name in self.peers


def _java_sends(tools: Tools, side: Brokers) -> Iterator[Run]:
    """Threads that share one producer; each waits for its response."""
    a_second = {1: 2_500, 16: 7_000, 64: 11_000, 256: 13_000}
    with side.replicated() as servers:
        _warm_java(tools, servers, "produce-sync", 8_000, 64)
        for in_flight, rate in a_second.items():
            count = round(rate * tools.terms.seconds)
            yield servers.measured(in_flight, _java(tools, servers, "produce-sync", count, in_flight))


def _java_batches(tools: Tools, side: Brokers) -> Iterator[Run]:
    a_second = {1: 26_000, 4: 37_500, 16: 53_000}
    with side.replicated() as servers:
        _warm_java(tools, servers, "produce-batch", 30_000, 32, 4)
        for in_flight, rate in a_second.items():
            count = round(rate * tools.terms.seconds / 32) * 32
            yield servers.measured(in_flight, _java(tools, servers, "produce-batch", count, 32, in_flight))


def _java(tools: Tools, servers: Servers, mode: str, count: int, *words: int) -> Callable[[], dict[str, Any]]:
    java = tools.java
    assert java is not None

    def run() -> dict[str, Any]:
        found = java.run(servers.name_server, TOPIC, mode, count, tools.terms.size, *words, warm_up=CLIENT_WARM_UP)
        # The servers' processor time includes the warm-up requests.
        found["messages"] += CLIENT_WARM_UP * (words[0] if mode == "produce-batch" else 1)
        return found

    return run


def _warm_java(tools: Tools, servers: Servers, mode: str, a_second: int, *words: int) -> None:
    """Waits until the route is known and the slave is in sync, which takes RocketMQ seconds, then until the servers are
    warm.
    """
    java = tools.java
    assert java is not None
    servers.until_ready(lambda: java.run(servers.name_server, TOPIC, "produce-sync", 1, 16, 1))
    java.run(servers.name_server, TOPIC, mode, round(a_second * tools.terms.warm_s), tools.terms.size, *words)


def _load(connections: int | None, *in_flight: int) -> Callable[[Tools, Brokers], Iterator[Run]]:
    """Sends of the cheap load generator; with `connections` None, one connection per message in flight."""

    def block(tools: Tools, side: Brokers) -> Iterator[Run]:
        terms = tools.terms
        with side.replicated() as servers:
            words = ["--topic", TOPIC, "--size", terms.size]
            servers.until_ready(lambda: run_load(servers.broker, *words, "--seconds", 0.1, "--warm", 0.1))
            run_load(servers.broker, *words, "--in-flight", 64, "--seconds", 0.1, "--warm", terms.warm_s)
            words += ["--seconds", terms.seconds, "--warm", min(2.0, terms.warm_s)]
            for count in in_flight:
                point = [*words, "--in-flight", count, "--connections", connections or count]
                yield servers.measured(count, lambda point=point: run_load(servers.broker, *point))

    return block


def _beside(neighbour: Neighbour, flush: str) -> Callable[[Tools, Brokers], Iterator[Run]]:
    """Sends of the cheap load generator over one connection, while something else uses the machine."""

    def block(tools: Tools, side: Brokers) -> Iterator[Run]:
        with _warm_servers(tools, side, flush) as servers, neighbour(side.directory) as servers.neighbours:
            for count in (1, 16, 64):
                words = _words(tools, count)
                yield servers.measured(count, partial(run_load, servers.broker, *words))

    return block


def _writes(tools: Tools, side: Brokers) -> Iterator[Run]:
    """How long the event loops' system calls for files take while the disk is saturated."""
    for flush in ("ASYNC_FLUSH", "SYNC_FLUSH"):
        with _warm_servers(tools, side, flush) as servers, ExitStack() as stack:
            servers.neighbours = stack.enter_context(saturated_disk(side.directory))
            folder = stack.enter_context(empty_folder(side.directory))
            traces = {role: folder / role for role in ("master", "slave")}
            with ExitStack() as tracing:
                for role, trace in traces.items():
                    tracing.enter_context(traced_writes(servers.pids[role], trace))
                run = servers.measured(16, lambda: run_load(servers.broker, *_words(tools, 16)))
            for role, trace in traces.items():
                yield Run(f"{flush}, {role}", side.name, run.found | read_trace(trace.read_text()))


@contextmanager
def _warm_servers(tools: Tools, side: Brokers, flush: str) -> Iterator[Servers]:
    """Yields servers that the cheap load generator has warmed up."""
    with side.replicated(flush) as servers:
        words = ["--topic", TOPIC, "--size", tools.terms.size, "--seconds", 0.1]
        servers.until_ready(lambda: run_load(servers.broker, *words, "--warm", 0.1))
        run_load(servers.broker, *words, "--in-flight", 64, "--warm", tools.terms.warm_s)
        yield servers


def _words(tools: Tools, in_flight: int) -> list[object]:
    """Arguments of a measured run of the cheap load generator over one connection."""
    terms = tools.terms
    words: list[object] = ["--topic", TOPIC, "--size", terms.size, "--in-flight", in_flight]
    return [*words, "--seconds", terms.seconds, "--warm", min(2.0, terms.warm_s)]


def _names(tools: Tools, side: Brokers) -> Iterator[Run]:
    yield ask_name_server(side, tools.terms)


def _sdk_sends(tools: Tools, side: Brokers) -> Iterator[Run]:
    terms = tools.terms
    with side.replicated() as servers:
        words = ["--topic", TOPIC, "--size", terms.size, "--seconds", terms.seconds, "--warm", min(2.0, terms.warm_s)]
        for count in (1, 16, 64, 256):
            point = [*words, "--in-flight", count]
            yield servers.measured(count, lambda point=point: run_sdk(servers.name_server, "produce", *point))
        point = [*words, "--in-flight", 256, "--together", 128]
        yield servers.measured(256, lambda: run_sdk(servers.name_server, "produce", *point), side="halog, send_many")


def _catch_up(tools: Tools, side: Brokers) -> Iterator[Run]:
    with side.filled() as servers:
        end = log_end(servers.broker)
        with side.fresh_slave(servers) as slave:
            yield servers.measured("fresh slave", lambda: watch_catch_up(slave, end))


def _consumption(tools: Tools, side: Brokers) -> Iterator[Run]:
    java, count = tools.java, min(1_000_000, tools.terms.log_mib * 1024 * 1024 // tools.terms.size)
    assert java is not None
    modes = {"pull 32": ("consume", 32), "pull 1,024": ("consume", 1024), "push": ("consume-push", 32)}
    with side.filled() as servers:
        servers.until_ready(lambda: java.run(servers.name_server, TOPIC, "consume", 1))
        java.run(servers.name_server, TOPIC, "consume", count, 1024)
        for name, (mode, most) in modes.items():
            words = (mode, count, most)
            yield servers.measured(name, lambda words=words: java.run(servers.name_server, TOPIC, *words))
        if side.name == "halog":
            asked = ("--topic", TOPIC, "--count", count, "--pull", 1024)
            yield servers.measured(
                "pull 1,024", lambda: run_sdk(servers.name_server, "consume", *asked), side="halog, its SDK"
            )


def _starting(tools: Tools, side: Brokers) -> Iterator[Run]:
    with side.replicated() as servers:
        memory = memory_mib(servers.pids["master"])["anonymous"]
        yield Run("empty store", side.name, {"seconds": servers.ready_s, "master_mib": memory})
    with side.filled() as servers:
        for point, kill in (("after a clean stop", False), ("after kill -9", True)):
            yield servers.measured(point, lambda kill=kill: {"seconds": side.restart(servers, kill=kill)})


CASES = (
    Case("sends", "Replicated single sends, Java client", "in flight", SENDS, _java_sends, needs_java=True),
    Case("batches", "Batches of 32, Java client", "in flight", SENDS, _java_batches, needs_java=True),
    Case(
        "load",
        "Replicated single sends, cheap load generator, one connection",
        "in flight",
        SENDS,
        _load(1, 1, 16, 64, 256, 1024),
    ),
    Case(
        "load-64",
        "Replicated single sends, cheap load generator, 64 connections (at most as many as in flight)",
        "in flight",
        SENDS,
        _load(64, 16, 64, 256, 1024),
    ),
    Case(
        "connections",
        "Replicated single sends, cheap load generator, one in flight on each connection",
        "connections",
        SENDS,
        _load(None, 1, 16, 64, 256),
        {"redis": {"PARTS": "go"}, "postgres": {"MODES": "remote_write"}},
        only_halog=True,
    ),
    Case(
        "sdk",
        "Replicated single sends, halog's SDK and the peers' clients",
        "in flight",
        SENDS,
        _sdk_sends,
        {"kafka": {"PARTS": "py"}, "nats": {"PARTS": "go,async"}},
        only_halog=True,
    ),
    Case(
        "catchup",
        "Catch-up of a fresh slave",
        "what",
        (
            Metric("mb_per_s", "MB/s, bytes"),
            Metric("queues_mb_per_s", "MB/s, queues built"),
        ),
        _catch_up,
        {"kafka": {"PARTS": "catchup"}, "nats": {"PARTS": "catchup"}, "redis": {"PARTS": "resync"}, "iperf3": {}},
    ),
    Case(
        "consumption",
        "Consumption from the first message on, Java client",
        "how",
        (RATE, *COSTS, MEMORY),
        _consumption,
        needs_java=True,
    ),
    Case("starting", "Start until it serves", "store", (Metric("seconds", "s", 2), MEMORY), _starting),
    *(
        Case(
            f"{name}{'-flush' if flush == 'SYNC_FLUSH' else ''}",
            f"Sends of the cheap load generator, one connection, {flush}, beside {what}",
            "in flight",
            BESIDE,
            _beside(neighbour, flush),
            panels=(Panel("messages a second", ("rate",)), Panel("latency, ms", ("p99_ms", "p999_ms", "gap_ms"))),
        )
        for name, what, neighbour in (
            ("busy", "six busy loops", busy_loops),
            ("disk", "a process that writes and syncs large files on the same disk", saturated_disk),
        )
        for flush in ("ASYNC_FLUSH", "SYNC_FLUSH")
    ),
    Case(
        "writes",
        "System calls for files in event loops beside a saturated disk, 16 in flight, traced with strace",
        "event loop",
        WRITES,
        _writes,
        only_halog=True,
        panels=(),
    ),
    Case(
        "names",
        "A name server of a large cluster",
        "cluster",
        tuple(Metric(*each) for each in NAMES),
        _names,
        panels=(),
    ),
)
