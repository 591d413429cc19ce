"""Simulates the brokers and clients of a large cluster at one name server, without brokers and clients.

Each broker and each client has a connection of its own (population.py).

    start     all brokers register, 64 at a time
    connect   the clients connect
    steady    for `--seconds`, each broker registers and each client asks for the route of one topic every `--period`
    lost      all brokers' connections close; ends when a client is told that its topic has no route

A broker registers as one of 4.9 does: all topics, as plain JSON, whether they have changed or not. `--large` brokers
have the same LARGE_TOPICS; the others form groups of GROUP_BROKERS, each group with SMALL_TOPICS of its own. Every
broker also has the topic of its own name. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import NamedTuple
from zlib import crc32

from bench.population import (
    ANSWER_S_MAX,
    Connection,
    Population,
    ask_all,
    frame,
    keep_asking,
    quantiles,
    raise_file_limit,
    watched_from_outside,
)

LARGE_TOPICS = 10_000
SMALL_TOPICS = 100
GROUP_BROKERS = 2
REGISTER_BROKER, GET_ROUTE, TOPIC_NOT_EXIST = 103, 105, 17


class Broker(NamedTuple):
    """A simulated broker: its name, and its topics."""

    name: str
    topics: list[str]

    def registration(self) -> bytes:
        """Returns its request to the name server."""
        config = {"order": False, "perm": 6, "readQueueNums": 8, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}
        table = {topic: {**config, "topicName": topic, "writeQueueNums": 8} for topic in self.topics}
        wrapper = {"dataVersion": {"counter": 1, "timestamp": 1_700_000_000_000}, "topicConfigTable": table}
        content = {"filterServerList": [], "topicConfigSerializeWrapper": wrapper}
        body = json.dumps(content, separators=(",", ":")).encode()
        fields = {
            "brokerAddr": f"{self.name}:10911",
            "brokerId": "0",
            "brokerName": self.name,
            "bodyCrc32": str(crc32(body) & 0x7FFFFFFF),
            "clusterName": "bench",
            "compressed": "false",
            "haServerAddr": f"{self.name}:10912",
        }
        return frame(REGISTER_BROKER, fields, body)


def brokers(count: int, large_count: int) -> list[Broker]:
    """Returns the brokers of the cluster."""
    large = [f"large-topic-{number}" for number in range(LARGE_TOPICS)]
    found = []
    for number in range(count):
        group = number // GROUP_BROKERS
        topics = large if number < large_count else [f"topic-{group}-{each}" for each in range(SMALL_TOPICS)]
        name = f"broker-{number}"
        found.append(Broker(name, [*topics, name]))
    return found


def lose(population: Population, lost: list[Connection], client: Connection) -> tuple[float, float]:
    """Closes connections of brokers; returns the seconds until a client's topic has no route, and the longest latency
    of its requests.
    """
    began, longest_s = time.perf_counter(), 0.0
    for each in lost:
        population.close(each)
    while time.perf_counter() - began < ANSWER_S_MAX:
        population.ask(client)
        for connection, code, latency_s in population.answered(1.0):
            longest_s = max(longest_s, latency_s)
            if connection is client and code == TOPIC_NOT_EXIST:
                return time.perf_counter() - began, longest_s
    raise SystemExit("the name server still has the routes of brokers that are gone")


def run(options: argparse.Namespace) -> dict[str, float]:
    """Runs all phases."""
    raise_file_limit(options.brokers + options.clients)
    host, port = options.name_server.rsplit(":", 1)
    with Population((host, int(port))) as population:
        random.seed(1)
        cluster = brokers(options.brokers, options.large)
        registered = [population.connect(each.registration()) for each in cluster]
        began = time.perf_counter()
        latencies = ask_all(population, registered)
        found: dict[str, float] = {"start_s": time.perf_counter() - began, **quantiles("start", latencies)}
        began = time.perf_counter()
        clients = []
        for _ in range(options.clients):
            fields = {"topic": random.choice(random.choice(cluster).topics)}
            clients.append(population.connect(frame(GET_ROUTE, fields)))
        # Each asks once: it is connected when the name server has accepted it.
        latencies = ask_all(population, clients)
        found["connect_s"] = time.perf_counter() - began

        def steady() -> None:
            latencies_of = keep_asking(population, [*registered, *clients], options.period, options.seconds)
            for name, group in (("register", registered), ("route", clients)):
                found.update(quantiles(name, [latency_s for each in group for latency_s in latencies_of[each]]))

        watched_from_outside(options.wait, steady)
        found["lost_s"], longest_s = lose(population, registered, clients[0])
        found["lost_max_ms"] = longest_s * 1e3
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--name-server", required=True, metavar="HOST:PORT")
    parser.add_argument("--brokers", type=int, default=1_000)
    parser.add_argument("--large", type=int, default=2, help=f"how many of the brokers have {LARGE_TOPICS:,} topics")
    parser.add_argument("--clients", type=int, default=20_000)
    parser.add_argument("--period", type=float, default=30.0, help="seconds between two requests of a connection")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the steady phase")
    parser.add_argument(
        "--wait", action="store_true", help="print STEADY and DONE around the steady phase and wait for a line each"
    )
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
