"""Measures POP over remoting, at halog and at RocketMQ, in turns: pops of 32 messages, and their acknowledgements.

Each side is one ASYNC_MASTER with ASYNC_FLUSH and no slave, started for each run, with a full topic of 8 queues. The
consumer is `bench.pop_load` with 8 connections: it acknowledges each message by a request of its own, then, as another
group, all messages of a pop by one request. Needs Java 17 and Maven.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import trio

from bench.clients import RunError, output_of, run_load
from bench.grpc import VERSION, Server, create_topic, in_turns, parser_of
from bench.measure import alone, report, spread, watched
from ha.client import Admin
from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import MASTER_ID

TOPIC, SIZE, QUEUES, BATCH = "pop-bench", 1024, 8, 32
KINDS = {"ack for each message": [], "ack for each pop": ["--batches"]}
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
    parser = parser_of("pop", __doc__ or "")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--messages", type=int, default=2_100_000, help="in the topic; a run must not empty it")
    options = parser.parse_args()
    words: list[object] = ["--seconds", options.seconds]
    runs = in_turns(options, lambda server, _: one_run(server, options.messages, words))
    question = f"POP over remoting, 1 KiB, 8 connections, beside RocketMQ {VERSION}, {options.rounds} rounds"
    head = ["what", "side", "messages/s", "server's cores", "client's cores", "ratio", "others' cores"]
    report(question, runs, head, list(rows_of(runs)))


if __name__ == "__main__":
    main()
