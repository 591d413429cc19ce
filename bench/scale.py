"""One broker with very many connections, queues and consumer groups (crowd.py).

Connections, queues and groups are added in turn, so that each point shows what one more of them costs: the master's own
memory, its processor time, and the longest delays of its event loop while they are added and afterwards. At the end the
master is stopped and started, then killed and started.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anyio

from bench.clients import run_load
from bench.measure import alone, empty_folder, memory_mib, watched
from bench.name_server import Watched
from bench.population import raise_file_limit
from bench.sides import Brokers, Run, Terms
from ha.client import Admin
from scripts.nodes import Cluster, cluster, wait_until_attached

CONNECTIONS, TOPICS, QUEUES, GROUPS = 10_000, 1_000, 100, 5_000
SPARE_FILES = 10_000
COMMIT_PERIOD_S = 5.0
_TOKEN = "watches-the-event-loop"
_START_S_MAX = 600.0
_WATCH_S = 3600
SCALE = (
    ("own_mib", "master's MiB, own", 1),
    ("unit_kib", "KiB for each one added", 1),
    ("cores", "cores", 3),
    ("rate", "requests/s"),
    ("answer_p99_ms", "p99 ms", 1),
    ("added_s", "s to add them", 1),
    ("adding_ms", "longest delay meanwhile, ms", 1),
    ("delay_ms", "longest delay, ms", 1),
    ("long_count", "over 20 ms"),
    ("stop_s", "s to stop", 2),
    ("seconds", "s to READY", 2),
)
"""Key, heading and digits of each figure"""


def run_scale(side: Brokers, terms: Terms) -> Iterator[Run]:
    """Measures a master and its slave; every point lasts 20 s at least."""
    raise_file_limit(CONNECTIONS + GROUPS + SPARE_FILES)
    keys = {"maxConnections": CONNECTIONS + GROUPS + 1_000, "adminToken": _TOKEN}
    with empty_folder(side.directory) as folder, cluster(folder, **keys) as nodes:
        for node in nodes.all:
            node.start()
        wait_until_attached(nodes)
        broker = nodes.master.ready["remoting"]
        points = _Points(nodes, side.name, max(terms.seconds, 20.0))
        yield points.measured("nothing", 0)
        for name, period_s in (("10,000 idle connections", 0.0), ("10,000 connections, 1 send/s each", 1.0)):
            words = ["producers", "--broker", broker, "--count", CONNECTIONS, "--size", terms.size]
            yield points.crowd(name, CONNECTIONS, [*words, "--period", period_s])
        began = points.adding()
        anyio.run(_create_topics, nodes.name_server_address, backend="trio")
        queues = ["--topics", TOPICS, "--queues", QUEUES, "--size", 16, "--bytes", 16 * TOPICS * QUEUES]
        run_load(broker, "--topic", "bench", *queues)
        yield points.measured("100,000 queues", TOPICS * QUEUES, time.monotonic() - began)
        words = ["consumers", "--broker", broker, "--count", GROUPS, "--topics", TOPICS, "--period", COMMIT_PERIOD_S]
        yield points.crowd("5,000 groups, a commit every 5 s each", GROUPS, words)
        yield from _restarts(nodes, side.name)


def _restarts(nodes: Cluster, side: str) -> Iterator[Run]:
    master = nodes.master
    stop_s = master.stop()
    yield Run("all, stopped and started", side, {"stop_s": stop_s, "seconds": master.start(_START_S_MAX)})
    master.kill()
    yield Run("all, killed and started", side, {"seconds": master.start(_START_S_MAX)})


class _Points:
    """Measures one point after the other."""

    def __init__(self, nodes: Cluster, side: str, seconds: float) -> None:
        self._master = nodes.master
        self._pids = {node.name: node.pid for node in nodes.all}
        self._side = side
        self._seconds = seconds
        self._own_mib = 0.0

    def adding(self) -> float:
        """Starts a watch of the master's event loop, before something is added; returns the monotonic time in
        seconds."""
        self._master.page(f"/loop?seconds={_WATCH_S}", "POST")
        return time.monotonic()

    def measured(self, point: str, count: int, added_s: float | None = None, load: Watched | None = None) -> Run:
        """Measures the state after `count` more of something; `adding` was called before they were added."""
        found: dict[str, Any] = {}
        if added_s is not None:
            found |= {"added_s": added_s, "adding_ms": self._master.page("/loop")["delay_max_s"] * 1e3}
        self._master.page(f"/loop?seconds={_WATCH_S}", "POST")
        pids = self._pids if load is None else self._pids | {"load": load.pid}
        with alone(), watched(pids) as cost:
            if load is None:
                time.sleep(self._seconds)
            else:
                load.run_steady()
        loop = self._master.page("/loop")
        own_mib = memory_mib(self._pids["master"])["anonymous"]
        if count:
            found["unit_kib"] = (own_mib - self._own_mib) * 1024 / count
        self._own_mib = own_mib
        found |= {"own_mib": own_mib, "cores": cost.server_cpu_s["master"] / cost.seconds}
        found |= {"delay_ms": loop["delay_max_s"] * 1e3, "long_count": loop["long_delay_count"]}
        found |= {"foreign_cores": cost.foreign_cores, "delays": loop["delays"][:5], "holds": loop["holds"][:5]}
        return Run(point, self._side, found)

    def crowd(self, point: str, count: int, words: list[object]) -> Run:
        """Measures the state with a crowd of clients."""
        began = self.adding()
        with Watched(["bench.crowd", *words, "--seconds", self._seconds]) as load:
            run = self.measured(point, count, time.monotonic() - began, load)
            run.found.update(load.result())
        return run


async def _create_topics(name_server: str) -> None:
    async with Admin(name_server) as admin, anyio.create_task_group() as group:
        limiter = anyio.CapacityLimiter(16)

        async def create(topic: str) -> None:
            async with limiter:
                await admin.create_topic(topic, queue_count=QUEUES)

        for number in range(TOPICS):
            group.start_soon(create, f"bench-{number}")
