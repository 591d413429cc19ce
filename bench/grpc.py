"""Measures RocketMQ 5's Java client over gRPC, at halog's own port and at RocketMQ's proxy in local mode, in turns.

Each side is one process with broker and gRPC port, an ASYNC_MASTER with ASYNC_FLUSH and no slave, started for each run.
Bench5.java (`clients5` in the peers' directory) sends with 1, 16 and 64 in flight, then receives and acknowledges; its
first sends warm the servers up. Needs Java 17 and Maven.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import trio

from bench.clients import RunError, output_of
from bench.measure import alone, empty_folder, report, spread, watched
from bench.sides import peers_directory
from ha.client import Admin, ConnectionFailed
from ha.protocol.bodies import GroupConfig
from scripts.nodes import cluster, reserved_ports

VERSION = "5.5.0"
PREFIX, TOPIC, GROUP = "grpc", "grpc-bench", "grpc-bench-g"
RECEIVE = "receive and ack"
_DEFAULT_SIZES = "mappedFileSizeCommitLog=1073741824;mappedFileSizeConsumeQueue=6000000"
"""RocketMQ's default sizes of files; start-proxy.sh sets smaller ones"""
_PROXY_PORT, _NAME_SERVER_PORT = 30881, 30876
_SEND = re.compile(r"send flight=(\d+) (\d+)/s p50 ([\d.]+) ms p99 ([\d.]+) ms failed (\d+)")
_RECEIVE = re.compile(r"receive\+ack (\d+)/s \(received \d+, acknowledged \d+, empty \d+, failed (\d+)\)")
_RUN_S_MAX = 600.0
_READY_S_MAX = 120.0


class Server(NamedTuple):
    """One running side."""

    endpoint: str
    name_server: str
    pids: dict[str, int]


@contextmanager
def halog(directory: Path) -> Iterator[Server]:
    """Runs a master that serves gRPC itself, and a name server."""
    with empty_folder(directory) as folder, reserved_ports(1) as (port,):
        keys = {"brokerRole": "ASYNC_MASTER", "grpcListenPort": port}
        with cluster(folder, **keys) as nodes:
            nodes.name_server.start()
            nodes.master.start()
            yield Server(f"127.0.0.1:{port}", nodes.name_server_address, {"master": nodes.master.pid})


@contextmanager
def rocketmq(directory: Path, scripts: Path) -> Iterator[Server]:
    """Runs RocketMQ's broker and proxy in one process, and its name server."""
    stop = ["bash", scripts / "stop-proxy.sh", directory]
    output_of(stop)  # left behind by a killed run
    try:
        start = ["bash", scripts / "start-proxy.sh", directory, VERSION, "local"]
        output_of(start, {"CLEAN": "1", "BROKER_EXTRA": _DEFAULT_SIZES})
        pid = int((directory / "run-proxy" / "proxy.pid").read_text())
        yield Server(f"127.0.0.1:{_PROXY_PORT}", f"127.0.0.1:{_NAME_SERVER_PORT}", {"master": pid})
    finally:
        output_of(stop)


async def create_topic(admin: Admin, topic: str, queue_count: int) -> None:
    """Creates a topic as soon as the broker is registered. Raises trio.TooSlowError after _READY_S_MAX."""
    with trio.fail_after(_READY_S_MAX):
        while True:
            try:
                await admin.create_topic(topic, queue_count=queue_count)
                return
            except ConnectionFailed:
                await trio.sleep(0.2)


async def set_up(name_server: str) -> None:
    """Creates the topic, which no gRPC call does, and the group, without which RocketMQ's proxy accepts no consumer."""
    async with Admin(name_server) as admin:
        await create_topic(admin, TOPIC, 8)
        await admin.create_group(GroupConfig(group_name=GROUP))


def parse(text: str) -> list[dict[str, Any]]:
    """Returns the results in Bench5's output, without the warm-up. Raises RunError if a call failed."""
    _, *sends = _SEND.findall(text)
    received = _RECEIVE.search(text)
    if len(sends) != 3 or received is None:
        raise RunError(f"unexpected output: {text.strip()[-400:]}")
    failed = sum(int(each[4]) for each in sends) + int(received[2])
    if failed:
        raise RunError(f"{failed} calls have failed: {text.strip()[-400:]}")
    runs: list[dict[str, Any]] = [
        {"what": f"send, {flight} in flight", "rate": float(rate), "p50_ms": float(p50), "p99_ms": float(p99)}
        for flight, rate, p50, p99, _ in sends
    ]
    return [*runs, {"what": RECEIVE, "rate": float(received[1])}]


def until_ready(command: list[object]) -> None:
    """Runs the client briefly until that succeeds: its start fails if a server that has just started is slow.

    Raises RunError if a run fails after _READY_S_MAX.
    """
    give_up = time.monotonic() + _READY_S_MAX
    while True:
        try:
            output_of([*command, 1], {"MAIN": "Bench5"}, timeout_s=_RUN_S_MAX)
            return
        except RunError:
            if time.monotonic() > give_up:
                raise


def one_run(
    server: AbstractContextManager[Server], clients: Path, directory: Path, seconds: int
) -> list[dict[str, Any]]:
    """Starts a side and runs the client on it."""
    with server as running:
        trio.run(set_up, running.name_server)
        command: list[object] = ["bash", clients / "java" / "run.sh", directory, running.endpoint, PREFIX]
        until_ready(command)
        command.append(seconds)
        with alone(), watched(running.pids) as cost:
            text = output_of(command, {"MAIN": "Bench5"}, timeout_s=_RUN_S_MAX)
    return [run | {"foreign_cores": cost.foreign_cores} for run in parse(text)]


def rows_of(runs: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yields the rows of the table; the ratio is of medians, halog / RocketMQ."""
    for what in dict.fromkeys(run["what"] for run in runs):
        by_side = {
            side: [run for run in runs if (run["what"], run["side"]) == (what, side)] for side in ("halog", "RocketMQ")
        }
        medians = {side: statistics.median(run["rate"] for run in found) for side, found in by_side.items() if found}
        for side, found in by_side.items():
            if not found:
                continue
            times = [spread([run[key] for run in found], 2) if key in found[0] else "" for key in ("p50_ms", "p99_ms")]
            others = f"{statistics.median(run['foreign_cores'] for run in found):.2f}"
            ratio = f"{medians['halog'] / medians['RocketMQ']:.2f}" if side == "halog" and len(medians) == 2 else ""
            yield [what, side, spread([run["rate"] for run in found]), *times, ratio, others]


Run = Callable[[AbstractContextManager[Server], Path], list[dict[str, Any]]]
"""Measures a side that is not started yet; gets the directory of installed programs."""


def parser_of(name: str, text: str) -> argparse.ArgumentParser:
    """Returns the parser of a command that compares the two sides."""
    parser = argparse.ArgumentParser(prog=f"bench/run {name}", description=text.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-halog", action="store_true", help="leave RocketMQ out")
    parser.add_argument(
        "--peers-directory", type=Path, default=peers_directory(), help="directory with peers/ and clients5/"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()) / "halog-bench",
        help="installed programs, which are kept, and stores (default: halog-bench in the temporary directory)",
    )
    return parser


def in_turns(options: argparse.Namespace, run: Run) -> list[dict[str, Any]]:
    """Installs RocketMQ, and measures the sides one after the other, in each round."""
    directory = options.directory.resolve()
    installed = directory / "rocketmq-proxy"
    installed.mkdir(parents=True, exist_ok=True)
    scripts = options.peers_directory.resolve() / "peers" / "rocketmq" / "proxy"
    sides: dict[str, Callable[[], AbstractContextManager[Server]]] = {"halog": lambda: halog(directory)}
    if not options.only_halog:
        output_of(["bash", scripts / "setup-proxy.sh", installed, VERSION], timeout_s=1800)
        sides["RocketMQ"] = lambda: rocketmq(installed, scripts)
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for side, start in sides.items():
            found = run(start(), installed)
            runs += [each | {"side": side, "round": number} for each in found]
            print(f"# round {number}, {side}: {[round(each['rate']) for each in found]}/s", file=sys.stderr)
    return runs


def main() -> None:
    parser = parser_of("grpc", __doc__ or "")
    parser.add_argument("--seconds", type=int, default=6, help="duration of each send; receiving takes twice as long")
    options = parser.parse_args()
    clients = options.peers_directory.resolve() / "clients5"
    runs = in_turns(options, lambda server, installed: one_run(server, clients, installed, options.seconds))
    question = (
        f"RocketMQ's Java client over gRPC, 1 KiB, beside RocketMQ {VERSION} in local mode, {options.rounds} rounds"
    )
    head = ["what", "side", "messages/s", "p50 ms", "p99 ms", "ratio", "others' cores"]
    report(question, runs, head, list(rows_of(runs)))


if __name__ == "__main__":
    main()
