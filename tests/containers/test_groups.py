"""docker-compose.groups.yml: two groups, of which one loses its master's container while a client sends."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.containers.clusters import Cluster, open_cluster, until
from tests.containers.daemon import Docker

pytestmark = pytest.mark.docker

FILE = "docker-compose.groups.yml"
MASTERS = ("master-a", "master-b")
HA = str(Path(sys.executable).with_name("ha"))


def ha(cluster: Cluster, *words: str) -> str:
    """The output of a command outside the containers, with their name server. ConnectionError if it fails."""
    command = [HA, *words, "--servers", cluster.published("namesrv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise ConnectionError(done.stderr)
    return done.stdout


def counts(cluster: Cluster) -> dict[str, int]:
    """Messages of topic orders by broker name."""
    found: dict[str, int] = {}
    queues: list[Any] = json.loads(ha(cluster, "topic", "describe", "orders", "--json"))["queues"]
    for queue in queues:
        found[queue["broker"]] = found.get(queue["broker"], 0) + queue["max_offset"]
    return found


async def test_a_topic_is_on_both_groups_and_one_goes_on_without_the_other(docker: Docker) -> None:
    async with open_cluster(docker, FILE) as cluster:
        await cluster.up(to_others=True)
        await until("slaves in sync", lambda: [cluster.status(each)["ha"]["in_sync"] for each in MASTERS] == [1, 1])
        ha(cluster, "topic", "create", "orders", "--queues", "4")
        ha(cluster, "produce", "orders", "--body", "hello", "--count", "80")
        assert counts(cluster) == {"broker-a": 40, "broker-b": 40}
        await cluster.on("kill", "master-b")
        ha(cluster, "produce", "orders", "--body", "hello", "--count", "20")
        await cluster.on("start", "master-b")
        await until("messages of both", lambda: counts(cluster) == {"broker-a": 60, "broker-b": 40})
