"""Brokers for a module's tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.nodes import Cluster, cluster, wait_until_attached
from tests.node.processes import Process
from tests.scenarios.brokers import Broker


@contextmanager
def running_cluster(folder: Path, **keys: object) -> Iterator[Cluster]:
    """Start the nodes, wait until the slave is attached, and stop them at the end."""
    with cluster(folder, **keys) as nodes:
        for node in nodes.all:
            node.start()
        wait_until_attached(nodes)
        yield nodes
        for node in reversed(nodes.all):
            node.stop()


@contextmanager
def running_broker(folder: Path) -> Iterator[str]:
    """A name server and one master; the name server's address."""
    with Process("ha.namesrv", "--set", "listenPort=0", directory=folder) as names:
        address = names.wait_ready()["remoting"]
        with Broker(folder / "m", "ASYNC_MASTER", namesrvAddr=address, brokerName="broker-t").start():
            yield address


@contextmanager
def running_groups(folder: Path) -> Iterator[tuple[str, Broker]]:
    """A name server and the masters of broker-a and broker-b; the name server's address, and the latter."""
    with Process("ha.namesrv", "--set", "listenPort=0", directory=folder) as names:
        address = names.wait_ready()["remoting"]
        with (
            Broker(folder / "a", "ASYNC_MASTER", namesrvAddr=address, brokerName="broker-a").start(),
            Broker(folder / "b", "ASYNC_MASTER", namesrvAddr=address, brokerName="broker-b").start() as second,
        ):
            yield address, second
