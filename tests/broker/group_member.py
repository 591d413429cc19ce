"""Members of a failover group without a network: a store, its tables and the group's log; logs are copied by hand.

All blocking calls run inline; use it under trio with an autojump clock.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from ha.broker.core import BrokerCore
from ha.broker.group_log import GroupLog
from ha.broker.group_state import TablesState
from ha.broker.options import BrokerOptions
from ha.broker.put import PutService
from ha.broker.standing import Standing
from ha.broker.tables import Tables
from ha.broker.topics import system_topics
from ha.broker.world import World
from ha.protocol.record import Message
from ha.store.message_store import MessageStore, open_message_store
from ha.store.options import StoreOptions
from tests.broker.node import WallClock
from tests.store.disks import MemoryDisk, run_inline
from tests.store.stores import reached


class Member:
    """A running member."""

    def __init__(self, store: MessageStore, tables: Tables, puts: PutService, group_log: GroupLog) -> None:
        self.store = store
        self.tables = tables
        self.puts = puts
        self.group_log = group_log
        self.standing = tables.standing

    @property
    def end(self) -> int:
        """End of its log in bytes."""
        return self.store.log.max_offset.value

    async def become_master(self, epoch: int) -> None:
        """Becomes master as `Broker.become_master` does."""
        await self.group_log.begin_epoch(epoch)
        self.standing.become_master(epoch)
        await self.group_log.write_epoch(epoch)

    async def put(self, topic: str, queue_id: int = 0, body: bytes = b"message") -> None:
        """Puts a client's message."""
        [result] = await self.puts.put([Message(topic, queue_id, body)])
        assert result.status.is_stored

    async def committed(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Commits and waits for the answer."""
        assert self.tables.offsets.commit(group, topic, queue_id, offset)
        assert await self.tables.offsets.logged() == ""

    async def settled(self) -> None:
        """Waits until everything is written, dispatched and applied."""
        while True:
            await trio.sleep(0.15)
            log = self.store.log
            queue = self.store.queues.get("rmq_sys_halog_tables", 0)
            if log.dispatched_offset.value == log.max_offset.value and (
                queue is None or self.group_log.position.queue_offset == queue.max_offset - 1
            ):
                return

    def state(self) -> TablesState:
        """The served tables without this broker's own topics."""
        state = self.tables.state()
        for config in system_topics(OPTIONS):
            state.topics.pop(config.topic_name, None)
        state.offsets = {key: by_queue for key, by_queue in state.offsets.items() if by_queue}
        return state


ROOT = Path("/store")
CONFIG = ROOT / "config"
OPTIONS = BrokerOptions(
    cluster_name="C", broker_name="b0", host="10.0.0.1", config_dir=CONFIG, keeps_tables_in_log=True
)


@asynccontextmanager
async def open_member(
    disk: MemoryDisk,
    member_id: int = 1,
    *,
    before_serving: Callable[[MessageStore], Awaitable[None]] | None = None,
    **store_changes: Any,
) -> AsyncIterator[Member]:
    """A member that follows until `become_master`. Saves nothing at the end, like a crash.

    `before_serving` is called when the tables are loaded and nothing of the group's log runs yet.
    """
    options = msgspec.structs.replace(OPTIONS, broker_id=member_id)
    clock = WallClock()
    async with open_message_store(
        store_options(**store_changes), disk=disk, run_blocking=run_inline, wall_clock_ms=clock
    ) as store:
        standing = Standing("b0", member_id, is_slave=True, is_elected=True)
        world = World(unique_id=lambda: "", wall_clock_ms=clock, disk=disk, run_blocking=run_inline)
        tables = Tables(store, options, world, standing)
        puts = PutService(store, None, options, standing)
        group_log = GroupLog(BrokerCore(options=options, store=store, tables=tables, puts=puts, world=world))
        tables.keep_in_log(group_log)
        await tables.load()
        if before_serving is not None:
            await before_serving(store)
        store.subscribe(group_log.on_arrivals)
        async with puts.serve(), trio.open_nursery() as nursery:
            await nursery.start(group_log.serve)
            yield Member(store, tables, puts, group_log)
            nursery.cancel_scope.cancel()


def store_options(**changes: Any) -> StoreOptions:
    """Options of a store in memory."""
    return StoreOptions(
        **{"root": ROOT, "segment_size": 1 << 20, "queue_entry_count": 2000, "index_enabled": False, **changes}
    )


async def copy_log(source: MessageStore, target: MessageStore, end: int, *, dispatch: bool = True) -> None:
    """Copies `source`'s log up to `end` (bytes) to `target`, as replication does; `dispatch`: waits for dispatch."""
    at = target.log.max_offset.value
    while at < end:
        segment_end = source.log.segment_at(at).end
        chunk = bytes(await source.log.read(at, min(end, segment_end) - at))
        await target.log.append_raw(at, chunk)
        at = target.log.max_offset.value
    if dispatch:
        await reached(target.log.dispatched_offset, end)


async def cut_copy(source: MessageStore, end: int, files: MemoryDisk | None) -> MemoryDisk:
    """A disk with `source`'s log up to `end`, and table files from another moment."""
    disk = MemoryDisk()
    options = store_options(segment_size=source.options.segment_size)
    async with open_message_store(options, disk=disk, run_blocking=run_inline, wall_clock_ms=WallClock()) as store:
        await copy_log(source, store, end)
    if files is not None:
        for path, inode in files.kill().inodes.items():
            if path.is_relative_to(CONFIG):
                disk.inodes[path] = inode
    return disk
