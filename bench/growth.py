"""How halog behaves as it grows: more queues, more client connections, more slaves, a longer log, more broker groups.

Each point uses a new cluster. After the load the master is stopped and started, then killed and started, to show that
existing data does not slow down a start. The long log needs little disk space: its bodies are large, consist of zeros,
and are holes in the files (scripts/sparse_store.py). A first start, which does not count, builds queues and checksums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import anyio

from bench.cases import COSTS, LATENCIES, MEMORY, RATE, TOPIC, Case, Metric, Panel, Tools
from bench.clients import log_end, run_load
from bench.measure import alone, empty_folder, watched
from bench.scale import SCALE, run_scale
from bench.sides import Brokers, Run, Servers
from ha.client import Admin
from ha.protocol.store_files import Checkpoint
from scripts.nodes import cluster, wait_in_sync, wait_until_attached
from scripts.sparse_store import BEGIN_MS, SparseStore, write_sparse_store

SEGMENT_BYTES = 1 << 30
LONG_BODY_BYTES = 4_000_000
GROUP_SEGMENT_BYTES = 256 << 20  # each node allocates its first segment at once
LONE_RATE, BUSY_RATE = 1_600, 8_000  # messages a second over all groups
_START_S_MAX = 1800.0
_IN_FLIGHT = 64
_GROUP_COUNTS = (1, 2, 4, 8)

GROWN = (
    RATE,
    *LATENCIES,
    *COSTS,
    Metric("master_us", "master's CPU s a million", 1),
    MEMORY,
    Metric("seconds", "s to READY, stopped", 2),
    Metric("killed_s", "s to READY, killed", 2),
)
MADE = Metric("made_s", "s for the first message of each", 2)
GROUPS = (
    RATE,
    *LATENCIES,
    *COSTS,
    Metric("idle_ms_per_s", "their CPU ms a second without load", 1),
    Metric("node_mib", "MiB per broker, own"),
    Metric("servers_mib", "all servers' MiB, own"),
)
GROUP_PANELS = (
    Panel("CPU s a million messages", ("cpu_us",)),
    Panel("latency, ms", ("p50_ms", "p99_ms")),
    Panel("own memory of all servers, MiB", ("servers_mib",)),
)
PANELS = (
    Panel("messages a second", ("rate",)),
    Panel("latency, ms", ("p50_ms", "p99_ms")),
    Panel("CPU s a million messages", ("master_us", "cpu_us")),
    Panel("s from start to READY", ("seconds", "killed_s")),
    Panel("master's own memory, MiB", ("master_mib",)),
)


def _point(
    tools: Tools,
    side: Brokers,
    point: int,
    *load: object,
    slave_count: int = 1,
    queue_count: int | None = None,
    log_gib: int = 0,
) -> Run:
    """Measures a cluster of this size under load, then both starts of its master."""
    terms = tools.terms
    with empty_folder(side.directory) as folder, cluster(folder) as nodes:
        if log_gib:
            write_long_log(nodes.master_store, log_gib)
            nodes.master.start(_START_S_MAX)
            nodes.master.stop()
        nodes.name_server.start()
        ready_s = nodes.master.start(_START_S_MAX)
        slaves = [nodes.slave, *(nodes.add_slave() for _ in range(slave_count - 1))]
        for slave in slaves:
            slave.start()
        wait_until_attached(nodes, 300.0, slave_count)
        if queue_count is not None:
            create_topic(nodes.name_server_address, TOPIC, queue_count)
        broker = nodes.master.ready["remoting"]
        pids = {node.name: node.pid for node in (nodes.name_server, nodes.master, *slaves)}
        servers = Servers(side.name, nodes.name_server_address, broker, pids, ready_s)
        words = ["--topic", TOPIC, "--size", terms.size, "--in-flight", _IN_FLIGHT, *load]
        if queue_count is not None:
            words += ["--queues", queue_count]
            # The first message of a queue creates its files, once in its life, and is therefore reported separately.
            began = time.monotonic()
            run_load(broker, *words, "--bytes", queue_count * terms.size)
            made_s = time.monotonic() - began
        words += ["--seconds", terms.seconds, "--warm", min(2.0, terms.warm_s)]
        run = servers.measured(point, lambda: run_load(broker, *words))
        if queue_count is not None:
            run.found["made_s"] = made_s
        nodes.master.stop()
        run.found["seconds"] = nodes.master.start(_START_S_MAX)
        nodes.master.kill()
        run.found["killed_s"] = nodes.master.start(_START_S_MAX)
        return run


def create_topic(name_server: str, topic: str, queue_count: int) -> None:
    """Creates the topic with this number of queues."""

    async def create() -> None:
        async with Admin(name_server) as admin:
            await admin.create_topic(topic, queue_count=queue_count)

    anyio.run(create, backend="trio")


def write_long_log(root: Path, segment_count: int, *, segment_bytes: int = SEGMENT_BYTES) -> int:
    """Writes a commitlog of this many segments as a sparse file and returns its end."""
    wanted = SparseStore(root, segment_count, segment_bytes, body_bytes=(LONG_BODY_BYTES,), topics=("long",))
    written = write_sparse_store(wanted)
    # As after a clean stop: otherwise the first start would read every byte through its map and fill the holes.
    end_ms = BEGIN_MS + written.record_count
    (root / "checkpoint").write_bytes(Checkpoint(end_ms, end_ms, end_ms).pack())
    return written.end


def _queues(tools: Tools, side: Brokers) -> Iterator[Run]:
    for count in (1, 10, 100, 1_000, 10_000):
        yield _point(tools, side, count, queue_count=count)


def _connections(tools: Tools, side: Brokers) -> Iterator[Run]:
    for count in (1, 4, 16, 64, 256, 1_000):
        yield _point(tools, side, count, "--in-flight", 1_000, "--connections", count)


def _slaves(tools: Tools, side: Brokers) -> Iterator[Run]:
    for count in (1, 2, 4, 8):
        yield _point(tools, side, count, slave_count=count)


def _log(tools: Tools, side: Brokers) -> Iterator[Run]:
    for gib in (1, 10, 100, 200):
        yield _point(tools, side, gib, log_gib=gib)


def _lone_groups(tools: Tools, side: Brokers) -> Iterator[Run]:
    for count in _GROUP_COUNTS:
        yield measure_groups(tools, side, count, LONE_RATE, "--in-flight", count, "--evenly")


def _busy_groups(tools: Tools, side: Brokers) -> Iterator[Run]:
    for count in _GROUP_COUNTS:
        yield measure_groups(tools, side, count, BUSY_RATE, "--in-flight", _IN_FLIGHT)


def measure_groups(tools: Tools, side: Brokers, count: int, rate: int, *load: object) -> Run:
    """Measures a cluster of `count` groups under load, and after it. The figure `log_bytes` is what the load adds to
    the log of each master."""
    terms = tools.terms
    keys = {"mappedFileSizeCommitLog": GROUP_SEGMENT_BYTES}
    with empty_folder(side.directory) as folder, cluster(folder, **keys) as nodes:
        groups = [(nodes.master, nodes.slave), *(nodes.add_group() for _ in range(count - 1))]
        nodes.name_server.start()
        ready_s = {node.name: node.start(_START_S_MAX) for node in chain.from_iterable(groups)}
        for master, _ in groups:
            wait_in_sync(master)
        pids = {node.name: node.pid for node in (nodes.name_server, *chain.from_iterable(groups))}
        first, *others = [master.ready["remoting"] for master, _ in groups]
        servers = Servers(side.name, nodes.name_server_address, first, pids, ready_s[nodes.master.name])
        words: list[object] = [word for broker in others for word in ("--broker", broker)]
        words += ["--topic", TOPIC, "--size", terms.size]
        # The warm-up has no rate limit, so it is not part of the figures.
        run_load(first, *words, "--in-flight", _IN_FLIGHT, "--seconds", 0.1, "--warm", terms.warm_s)
        words += ["--rate", rate, *load, "--seconds", terms.seconds, "--warm", 0]
        begins = [log_end(broker) for broker in (first, *others)]
        run = servers.measured(count, lambda: run_load(first, *words))
        with alone(), watched(pids) as idle:
            time.sleep(terms.seconds)
        run.found["log_bytes"] = [log_end(each) - begin for each, begin in zip((first, *others), begins, strict=True)]
        own = {role: figures["anonymous"] for role, figures in run.found["memory_mib"].items()}
        run.found["idle_ms_per_s"] = sum(idle.server_cpu_s.values()) / idle.seconds * 1e3
        run.found["servers_mib"] = sum(own.values())
        run.found["node_mib"] = (sum(own.values()) - own[nodes.name_server.name]) / (2 * count)
        return run


def _case(name: str, what: str, axis: str, block: Callable[[Tools, Brokers], Iterator[Run]], *metrics: Metric) -> Case:
    return Case(name, f"Growth: {what}", axis, (*GROWN, *metrics), block, only_halog=True, panels=PANELS)


GROWTH = (
    _case("queues", f"queues of one topic, {_IN_FLIGHT} in flight, sent to in turn", "queues", _queues, MADE),
    _case("clients", "client connections, 1,000 in flight over all", "connections", _connections),
    _case("slaves", f"slaves, {_IN_FLIGHT} in flight", "slaves", _slaves),
    Case(
        "scale",
        "Growth: one broker with many connections, queues and consumer groups, which are added in turn",
        "with",
        tuple(Metric(*each) for each in SCALE),
        lambda tools, side: run_scale(side, tools.terms),
        only_halog=True,
        panels=(),
    ),
    _case("log", f"log, {_IN_FLIGHT} in flight", "GiB of log before", _log),
    *(
        Case(
            name,
            f"Growth: broker groups of a master and a slave, {rate:,} messages a second over all, {what}",
            "groups",
            GROUPS,
            block,
            only_halog=True,
            panels=GROUP_PANELS,
        )
        for name, rate, what, block in (
            ("groups", LONE_RATE, "at most one in flight per group", _lone_groups),
            ("groups-busy", BUSY_RATE, f"{_IN_FLIGHT} in flight over all", _busy_groups),
        )
    ),
)
