"""The name server of a large cluster, whose brokers and clients name_load.py simulates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

from bench.clients import RunError
from bench.measure import alone, cpu_s, memory_mib, watched
from bench.population import raise_file_limit
from bench.sides import Brokers, Run, Terms

BROKERS, CLIENTS = 1_000, 20_000
PERIOD_S = 30.0
SPARE_CONNECTIONS = 1_000
NAMES = (
    ("start_s", "s until all brokers are registered", 2),
    ("start_cpu_s", "CPU s until then", 2),
    ("register_p99_ms", "registrations, p99 ms", 1),
    ("register_max_ms", "longest ms", 1),
    ("route_p50_ms", "routes, p50 ms", 2),
    ("route_p99_ms", "p99 ms", 1),
    ("route_max_ms", "longest ms", 1),
    ("cores", "cores", 3),
    ("own_mib", "MiB, own"),
    ("lost_s", "s until lost brokers have no routes", 2),
    ("lost_max_ms", "longest route meanwhile, ms", 1),
)
"""Key, heading and digits of each figure"""


def ask_name_server(side: Brokers, terms: Terms) -> Run:
    """Measures the name server of one side, for at least two periods of its brokers and clients."""
    seconds = max(terms.seconds, 2 * PERIOD_S)
    raise_file_limit(BROKERS + CLIENTS + SPARE_CONNECTIONS)
    words = ["--brokers", BROKERS, "--clients", CLIENTS, "--period", PERIOD_S, "--seconds", seconds]
    with alone(), side.name_server(BROKERS + CLIENTS + SPARE_CONNECTIONS) as (address, pid):
        before_s = cpu_s([pid])
        with Watched(["bench.name_load", "--name-server", address, *words]) as load:
            start_cpu_s = cpu_s([pid]) - before_s
            with watched({"namesrv": pid, "load": load.pid}) as cost:
                load.run_steady()
            memory = memory_mib(pid)
            found = load.result()
    found |= {"start_cpu_s": start_cpu_s, "cores": cost.server_cpu_s["namesrv"] / cost.seconds}
    found |= {"foreign_cores": cost.foreign_cores, "memory_mib": memory, "own_mib": memory["anonymous"]}
    return Run(f"{BROKERS:,} brokers, {CLIENTS:,} clients", side.name, found)


class Watched:
    """A load program with `--wait`, whose steady phase is measured from outside. Methods raise RunError if it fails."""

    def __init__(self, words: Sequence[object]) -> None:
        command = [sys.executable, "-m", *map(str, words), "--wait"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def __enter__(self) -> Watched:
        """Waits until its steady phase can begin."""
        try:
            self._expect("STEADY")
        except BaseException:
            self.__exit__()
            raise
        return self

    def run_steady(self) -> None:
        """Runs the steady phase."""
        self._continue()
        self._expect("DONE")

    def result(self) -> dict[str, Any]:
        """Runs the rest, and returns what it has measured."""
        self._continue()
        found: dict[str, Any] = json.loads(self._expect("{"))
        self._process.wait()
        return found

    def _continue(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(os.linesep)
        stdin.flush()

    def _expect(self, begin: str) -> str:
        line = _open(self._process.stdout).readline()
        if not line.startswith(begin):
            self._process.wait()
            raise RunError(_open(self._process.stderr).read().strip()[-400:] or f"{begin} expected, not {line!r}")
        return line

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
