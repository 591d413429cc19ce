"""What the simulation knows of an acknowledged message: the nodes that have it and have not lost it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_record
from tests.checkers.history import Answered, Sent
from tests.sim.scenario import Options
from tests.sim.watch import Watch
from tests.sim.world import World

RECORD = encode_record(
    Message(topic="T", queue_id=0, body=b"id\nbody"),
    queue_offset=0,
    physical_offset=0,
    store_timestamp_ms=1,
    store_host=b"\x0a\x00\x00\x01\x00\x00\x2a\x9f",
)


@dataclass
class Node:
    """A node of which only the log exists. `synced_end` in bytes."""

    name: str
    log: bytes = RECORD
    synced_end: int = 0
    root: Path = Path("/store")
    disk: Any = field(init=False)

    def __post_init__(self) -> None:
        self.disk = self

    def synced_log_end(self, path: Path) -> int:
        return self.synced_end


class Nodes:
    """A master and two slaves."""

    def __init__(self) -> None:
        self.master = Node("m")
        self.slaves = [Node("s1"), Node("s2")]

    def read(self, name: str, offset: int, size: int, *, durable: bool = False) -> bytes:
        [node] = [each for each in (self.master, *self.slaves) if each.name == name]
        return node.log[offset : offset + size]


def acknowledged(nodes: Nodes, lost: Node | None = None, synced_end: int = 0) -> set[str]:
    """Returns who has a message whose answer comes after `lost` has lost its power."""
    watch = Watch(World(1), Options(role="ASYNC_MASTER", slave_count=2))
    cluster: Any = nodes
    watch.follow(cluster)
    watch.on_sent(Sent(0.0, "p", 1, "T", 0, b"id"))
    if lost is not None:
        lost.synced_end = synced_end
        machine: Any = lost
        watch.on_crash(machine, "power")
    watch.on_answer(Answered(0.1, "p", 1, "PUT_OK", 0, 0, "m"))
    return set().union(*(holding.holders for holding in watch.holdings))


async def test_every_node_with_the_whole_record_has_the_message() -> None:
    nodes = Nodes()
    nodes.slaves[1].log = RECORD[:-1]
    assert acknowledged(nodes) == {"m", "s1"}


async def test_a_node_that_lost_power_has_only_what_was_synced() -> None:
    """Its pages are still there, but not for the next process."""
    nodes = Nodes()
    assert acknowledged(nodes, nodes.master) == {"s1", "s2"}
    assert acknowledged(nodes, nodes.slaves[0]) == {"m", "s2"}
    assert acknowledged(nodes, nodes.master, len(RECORD)) == {"m", "s1", "s2"}


async def test_a_message_that_the_master_has_lost_is_held_by_its_slaves() -> None:
    nodes = Nodes()
    nodes.master.log = b""
    assert acknowledged(nodes) == {"s1", "s2"}
