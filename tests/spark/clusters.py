"""A master and a slave for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.nodes import Cluster, cluster, wait_until_attached


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
