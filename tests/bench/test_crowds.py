"""The simulated clusters and clients, against a real name server and a real broker."""

import argparse
import json
from collections.abc import Iterator

import pytest

from bench import crowd, name_load
from bench.clients import run_load
from bench.name_server import Watched
from bench.population import Population
from scripts.nodes import Cluster, cluster


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    keys = {"brokerRole": "ASYNC_MASTER", "maxConnections": 100}
    with cluster(tmp_path_factory.mktemp("nodes"), **keys) as running:
        running.name_server.start()
        running.master.start()
        words = ["--topics", 2, "--queues", 3, "--size", 16, "--bytes", 16 * 6]
        assert run_load(running.master.ready["remoting"], *words)["messages"] >= 6
        yield running


def test_topics_of_a_cluster() -> None:
    names = [set(broker.topics) for broker in name_load.brokers(6, 2)]
    assert [len(topics) for topics in names] == [10_001, 10_001, 101, 101, 101, 101]
    assert len(names[0] & names[1]) == 10_000
    assert len(names[2] & names[3]) == 100
    assert not names[3] & names[4]


def test_a_cluster_registers_asks_and_is_lost(nodes: Cluster) -> None:
    words = ["--name-server", nodes.name_server_address, "--brokers", "4", "--large", "0", "--clients", "8"]
    with Watched(["bench.name_load", *words, "--period", "0.2", "--seconds", "0.5"]) as load:
        load.run_steady()
        found = load.result()
    times = {"start_s", "connect_s", "lost_s", "lost_max_ms"}
    assert found.keys() == times | {
        f"{what}_{point}_ms" for what in ("start", "register", "route") for point in ("p50", "p99", "max")
    }
    assert 0 < found["route_p50_ms"] <= found["route_p99_ms"] <= found["route_max_ms"]


@pytest.mark.parametrize(("who", "period"), [("producers", "0.1"), ("producers", "0"), ("consumers", "0.1")])
def test_a_crowd_at_a_broker(nodes: Cluster, who: str, period: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [who, "--broker", nodes.master.ready["remoting"], "--count", "10", "--period", period, "--seconds", "0.5"]
    crowd.main([*words, "--topics", "2", "--queues", "3"])
    found = json.loads(capsys.readouterr().out)
    assert found["connections"] == 10
    assert found.get("messages", 40) >= 40


def test_offsets_of_every_queue_but_the_last_are_committed_first(nodes: Cluster) -> None:
    """The measured phase commits the last one."""
    options = argparse.Namespace(count=2, topics=2, queues=3)
    host, port = nodes.master.ready["remoting"].rsplit(":", 1)
    with Population((host, int(port))) as population:
        found = crowd.consumers(population, options)
        assert [b'"queueId":"2"' in connection.request for connection in found] == [True, True]
