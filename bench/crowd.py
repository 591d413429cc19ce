"""Simulates many clients of one broker, each on a connection of its own (population.py).

    producers    connect, and send a message every `--period` seconds; with 0, they send only one
    consumers    one of each group: joins with a heartbeat, then commits an offset every `--period` seconds

The measured phase lasts `--seconds`. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from bench.load import FIRST_OPAQUE, templates
from bench.population import (
    Connection,
    Population,
    ask_all,
    frame,
    keep_asking,
    quantiles,
    raise_file_limit,
    watched_from_outside,
)

HEART_BEAT, COMMIT_OFFSET = 34, 15


def heartbeat(group: str, topic: str) -> bytes:
    """Encodes the heartbeat of a group's only consumer."""
    subscription = {"subString": "*", "subVersion": 1, "topic": topic, "expressionType": "TAG"}
    consumer = {
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "consumeType": "CONSUME_PASSIVELY",
        "groupName": group,
        "messageModel": "CLUSTERING",
        "subscriptionDataSet": [subscription],
    }
    content = {"clientID": f"client-of-{group}", "consumerDataSet": [consumer], "producerDataSet": []}
    return frame(HEART_BEAT, {}, json.dumps(content).encode())


def commit(group: str, topic: str, queue_id: int) -> bytes:
    """Encodes the commit of an offset."""
    fields = {"consumerGroup": group, "topic": topic, "queueId": str(queue_id), "commitOffset": str(time.time_ns())}
    return frame(COMMIT_OFFSET, fields)


def producers(population: Population, options: argparse.Namespace) -> list[Connection]:
    """Connects the producers; each has sent a message."""
    requests = [
        b"%b%d%b" % (before, FIRST_OPAQUE, after) for before, after in templates("bench", options.size, "bench")
    ]
    found = [population.connect(requests[number % len(requests)]) for number in range(options.count)]
    ask_all(population, found)
    return found


def consumers(population: Population, options: argparse.Namespace) -> list[Connection]:
    """Connects a consumer of each group; each has joined, and committed an offset of each queue but the last."""
    topics = [f"bench-{number}" for number in range(options.topics)]
    found: list[Connection] = []
    for number in range(options.count):
        group, topic = f"group-{number}", topics[number % len(topics)]
        found.append(population.connect(heartbeat(group, topic)))
    ask_all(population, found)
    for queue_id in range(options.queues):
        for number, connection in enumerate(found):
            connection.request = commit(f"group-{number}", topics[number % len(topics)], queue_id)
        if queue_id < options.queues - 1:
            ask_all(population, found)
    return found


def run(options: argparse.Namespace) -> dict[str, float]:
    """Runs both phases."""
    raise_file_limit(options.count)
    host, port = options.broker.rsplit(":", 1)
    with Population((host, int(port))) as population:
        began = time.perf_counter()
        connections = (producers if options.who == "producers" else consumers)(population, options)
        found: dict[str, float] = {"connections": len(connections), "connect_s": time.perf_counter() - began}

        def steady() -> None:
            if not options.period:
                time.sleep(options.seconds)
                return
            latencies_of = keep_asking(population, connections, options.period, options.seconds)
            latencies = [latency_s for each in latencies_of.values() for latency_s in each]
            found.update(
                messages=len(latencies), rate=len(latencies) / options.seconds, **quantiles("answer", latencies)
            )

        watched_from_outside(options.wait, steady)
        return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("who", choices=("producers", "consumers"))
    parser.add_argument("--broker", required=True, metavar="HOST:PORT")
    parser.add_argument("--count", type=int, required=True, help="number of connections")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two requests of a connection")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--size", type=int, default=1024, help="bytes per body")
    parser.add_argument("--topics", type=int, default=1_000, help="number of topics that the groups consume")
    parser.add_argument("--queues", type=int, default=8, help="number of queues that each group commits offsets of")
    parser.add_argument(
        "--wait", action="store_true", help="print STEADY and DONE around the measured phase and wait for a line each"
    )
    print(json.dumps(run(parser.parse_args(words))))


if __name__ == "__main__":
    main()
