"""A halog broker over the benchmark's store, for reads through the option `servers`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from bench.grpc import create_topic
from bench.spark.messages import QUEUE_COUNT, TOPIC
from ha.client import Admin
from scripts.nodes import cluster

_START_S_MAX = 300.0
_RESERVED_H = 24 * 365 * 100


@dataclass(frozen=True)
class RunningBroker:
    """Address of its name server, and its process."""

    name_server: str
    pid: int


@contextmanager
def broker_over(store: Path, folder: Path) -> Iterator[RunningBroker]:
    """A name server and a master that serves `store`; its files are in `folder`. It deletes and checks no segment."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    keys = {
        "brokerRole": "ASYNC_MASTER",
        "brokerName": store.name,  # that of a store without a broker
        "storePathRootDir": store,
        "fileReservedTime": _RESERVED_H,
        "cleanFileForciblyEnable": "false",
        "messageIndexEnable": "false",
        "scrubBytesPerSecond": 0,
    }
    with cluster(folder, **keys) as nodes:
        nodes.name_server.start()
        nodes.master.start(_START_S_MAX)
        trio.run(_create_topic, nodes.name_server_address)
        yield RunningBroker(nodes.name_server_address, nodes.master.pid)
        nodes.master.stop()


async def _create_topic(name_server: str) -> None:
    """Creates the topic, of which the store has only the queues."""
    async with Admin(name_server) as admin:
        await create_topic(admin, TOPIC, QUEUE_COUNT)
