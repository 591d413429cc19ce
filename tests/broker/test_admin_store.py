"""Admin requests that clean the store: 306, 316, 329."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from ha.broker.options import BrokerRole
from tests.broker.node import open_node


async def test_expired_files_are_deleted_at_any_hour(tmp_path: Path) -> None:
    async with open_node(tmp_path, store_changes={"segment_size": 4096, "reserved_h": -1e6}) as node:
        for number in range(12):
            await node.send(b"%d" % number * 400)
        await node.dispatched()
        count = len(node.store.log.segments)
        assert count > 2
        assert (await node.ask(329)).code == 0
        assert node.store.log.min_offset > 0
        assert len(node.store.log.segments) < count
        queue = node.store.queues.get("TT", 0)
        assert queue is not None
        assert queue.min_offset > 0
        assert (await node.ask(306)).code == 0


async def test_queues_of_unknown_topics_are_cleared(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.send()
        await node.send(b="Gone")
        await node.dispatched()
        await node.broker.topics.delete("Gone")
        assert (await node.ask(316)).code == 0
        kept, gone = node.store.queues.get("TT", 0), node.store.queues.get("Gone", 0)
        assert kept is not None
        assert gone is not None
        assert (kept.min_offset, gone.min_offset) == (0, 1)
    async with open_node(tmp_path / "slave", role=BrokerRole.SLAVE) as node:
        assert (await node.ask(316)).code == 1


async def test_deletion_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    """An operator asks for it exactly then; the broker ended."""
    is_full = False

    async def run_blocking(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if is_full and getattr(call, "__name__", "") == "save_checkpoint":
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*arguments)

    changes = {"segment_size": 4096, "reserved_h": -1e6, "delete_when_hours": frozenset()}
    async with open_node(tmp_path, store_changes=changes, run_blocking=run_blocking) as node:
        for _ in range(12):
            await node.send(bytes(500))
        await node.dispatched()
        is_full = True
        answer = await node.ask(329)
        assert answer.code == 1
        assert "No space left" in str(answer.remark)
        is_full = False
        assert (await node.ask(329)).code == 0
        assert node.store.log.min_offset > 0
