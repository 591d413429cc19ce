"""Measures POP over remoting, at halog and at RocketMQ, in turns: pops of 32 messages, and their acknowledgements.

Each side is one ASYNC_MASTER with ASYNC_FLUSH and no slave, started for each run, with a full topic of 8 queues. The
consumer is `bench.pop_load` with 8 connections: it acknowledges each message by a request of its own, then, as another
group, those of each queue together. Needs Java 17 and Maven.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import trio

from bench.clients import RunError, output_of, run_load
from bench.grpc import VERSION, Server, create_topic, halog, rocketmq
from bench.measure import alone, report, spread, watched
from bench.sides import peers_directory
from ha.client import Admin
from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import MASTER_ID

TOPIC, SIZE, QUEUES, BATCH = "pop-bench", 1024, 8, 32
KINDS = {"ack for each message": [], "ack for each queue of a pop": ["--batches"]}
_RUN_S_MAX = 300.0


async def set_up(name_server: str) -> tuple[str, str]:
    """Creates topic and groups; returns the broker's name and address."""
    async with Admin(name_server) as admin:
        await create_topic(admin, TOPIC, QUEUES)
        for number in range(len(KINDS)):
            await admin.create_group(GroupConfig(group_name=f"pop-bench-{number}"))
        [(name, addresses)] = (await admin.route(TOPIC)).addresses.items()
        return name, addresses[MASTER_ID]


def one_run(server: AbstractContextManager[Server], messages: int, words: list[object]) -> list[dict[str, Any]]:
    """Starts a side, fills its topic and runs the consumer on it."""
    runs = []
    with server as running:
        name, address = trio.run(set_up, running.name_server)
        run_load(address, "--topic", TOPIC, "--queues", QUEUES, "--batch", BATCH, "--bytes", messages * SIZE)
        for number, (what, more) in enumerate(KINDS.items()):
            place = ["--broker", address, "--broker-name", name, "--topic", TOPIC, "--group", f"pop-bench-{number}"]
            with alone(), watched(running.pids) as cost:
                text = output_of([sys.executable, "-m", "bench.pop_load", *place, *more, *words], timeout_s=_RUN_S_MAX)
            found = json.loads(text)
            if found["empty"]:
                raise RunError(f"{messages} messages were too few: the topic was empty before the end")
            cpu = sum(cost.server_cpu_s.values()) / cost.seconds
            runs.append(found | {"what": what, "server_cores": cpu, "foreign_cores": cost.foreign_cores})
    return runs


def rows_of(runs: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yields the rows of the table; the ratio is of medians, halog / RocketMQ."""
    for what in KINDS:
        medians: dict[str, float] = {}
        for side in ("RocketMQ", "halog"):
            found = [run for run in runs if (run["what"], run["side"]) == (what, side)]
            if not found:
                continue
            medians[side] = statistics.median(run["rate"] for run in found)
            figures = [
                spread([run[key] for run in found], digits) for key, digits in (("rate", 0), ("server_cores", 2))
            ]
            others = f"{statistics.median(run['foreign_cores'] for run in found):.2f}"
            ratio = f"{medians['halog'] / medians['RocketMQ']:.2f}" if len(medians) == 2 else ""
            yield [what, side, *figures, spread([run["client_cores"] for run in found], 2), ratio, others]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/run pop", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--messages", type=int, default=1_500_000, help="in the topic; a run must not empty it")
    parser.add_argument("--only-halog", action="store_true", help="leave RocketMQ out")
    parser.add_argument("--peers-directory", type=Path, default=peers_directory(), help="directory with peers/")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()) / "halog-bench",
        help="installed programs, which are kept, and stores (default: halog-bench in the temporary directory)",
    )
    options = parser.parse_args()
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
            found = one_run(start(), options.messages, ["--seconds", options.seconds])
            runs += [run | {"side": side, "round": number} for run in found]
            print(f"# round {number}, {side}: {[round(run['rate']) for run in found]}/s", file=sys.stderr)
    question = f"POP over remoting, 1 KiB, 8 connections, beside RocketMQ {VERSION}, {options.rounds} rounds"
    head = ["what", "side", "messages/s", "server's cores", "client's cores", "ratio", "others' cores"]
    report(question, runs, head, list(rows_of(runs)))


if __name__ == "__main__":
    main()
