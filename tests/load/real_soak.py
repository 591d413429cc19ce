"""A SYNC_MASTER with many slaves and clients, real processes all: what it holds over time, and that nothing is lost."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import trio

from tests.interop.stored_files import compare_commitlogs, heads_at, log_range
from tests.load.fleet import Fleet
from tests.load.footprint import cpu_s, footprint
from tests.scenarios.brokers import Broker, eventually, slave_of

FILES: dict[str, Any] = {
    "mappedFileSizeCommitLog": 4 << 20,
    "mappedFileSizeConsumeQueue": 20 * 10_000,
    "maxHashSlotNum": 10_000,
    "maxIndexNum": 40_000,
    "haSendHeartbeatInterval": 5000,
}


class Row(msgspec.Struct, frozen=True):
    """One moment. Bytes of the master's own pages, and the largest of its slaves'."""

    minute: float
    own_bytes: int
    descriptor_count: int
    socket_count: int
    task_count: int
    clients_open: int
    slaves_in_sync: int
    sent: int
    acked: int
    slave_own_bytes_max: int
    slave_descriptors_max: int
    slave_tasks_max: int


class Outcome(msgspec.Struct, frozen=True):
    """`lost`: acknowledged messages that a node's files don't have where they should be, counted on each node.

    `master_cpu_share`: seconds of its CPU per second of the load.
    """

    rows: list[Row]
    statuses: dict[int, int]
    acked: int
    lost: int
    checked_bytes: int
    lost_connections: list[str]
    master_cpu_share: float


def soak(
    directory: Path,
    *,
    minutes: float,
    slaves: int,
    idle: int,
    active: int,
    sends_per_s: float,
    row_s: float,
    on_row: Callable[[Row], None] = lambda _: None,
) -> Outcome:
    """Start everything below `directory`, load it for `minutes`, stop it in order and compare the files."""
    with ExitStack() as stack:
        master = stack.enter_context(Broker(directory / "m", "SYNC_MASTER", **FILES)).start()
        followers = []
        for number in range(1, slaves + 1):
            # One after the other: a start takes a second of CPU.
            follower = slave_of(master, directory / f"s{number}", brokerId=number, **FILES)
            followers.append(stack.enter_context(follower).start())
        eventually("all slaves follow", lambda: in_sync(master) == slaves, 60)
        fleet = Fleet(master.addresses["remoting"], idle=idle, active=active, sends_per_s=sends_per_s)
        began_cpu, began = cpu_s(master.pid), time.monotonic()
        rows: list[Row] = trio.run(_load, fleet, master, followers, minutes * 60, row_s, on_row)
        share = (cpu_s(master.pid) - began_cpu) / (time.monotonic() - began)
        end = master.end
        eventually("every slave has all", lambda: all(each.end == end for each in followers), 120)
        for node in (*followers, master):
            node.stop()
        lost = sum(lost_on(node, fleet) for node in (master, *followers))
        whole = log_range(master.commitlog)
        for follower in followers:
            assert compare_commitlogs(follower.commitlog, master.commitlog) == whole
        return Outcome(
            rows=rows,
            statuses=dict(fleet.statuses),
            acked=len(fleet.acked_offsets),
            lost=lost,
            checked_bytes=whole.size * (1 + slaves),
            lost_connections=fleet.lost_connections,
            master_cpu_share=share,
        )


async def _load(
    fleet: Fleet,
    master: Broker,
    followers: list[Broker],
    duration_s: float,
    row_s: float,
    on_row: Callable[[Row], None],
) -> list[Row]:
    rows: list[Row] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.run)
        await fleet.wait_open()
        began = trio.current_time()
        for number in range(int(duration_s // row_s) + 1):
            await trio.sleep_until(began + number * row_s)
            row = await trio.to_thread.run_sync(_row, (trio.current_time() - began) / 60, fleet, master, followers)
            rows.append(row)
            on_row(row)
        fleet.stop()
        with trio.move_on_after(5):  # idle connections sleep between their heartbeats
            await trio.sleep_forever()
        nursery.cancel_scope.cancel()
    return rows


def _row(minute: float, fleet: Fleet, master: Broker, followers: list[Broker]) -> Row:
    status = master.status()
    own = footprint(master.pid, master.root)
    theirs = [footprint(each.pid, each.root) for each in followers]
    return Row(
        minute=minute,
        own_bytes=own.own_bytes,
        descriptor_count=own.descriptor_count,
        socket_count=own.socket_count,
        task_count=status["task_count"],
        clients_open=fleet.open_count,
        slaves_in_sync=status["ha"]["in_sync"],
        sent=fleet.sent_count,
        acked=len(fleet.acked_offsets),
        slave_own_bytes_max=max((each.own_bytes for each in theirs), default=0),
        slave_descriptors_max=max((each.descriptor_count for each in theirs), default=0),
        slave_tasks_max=max((each.status()["task_count"] for each in followers), default=0),
    )


def in_sync(master: Broker) -> int:
    """How many slaves are in sync."""
    count: int = master.status()["ha"]["in_sync"]
    return count


def lost_on(node: Broker, fleet: Fleet) -> int:
    """How many acknowledged messages are not where they were said to be."""
    heads = heads_at(node.commitlog, fleet.acked_offsets)
    return sum(head.sequence != sequence for head, sequence in zip(heads, fleet.acked_sequences, strict=True))
