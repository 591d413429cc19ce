"""Records appended in a turn of the event loop are dispatched at its end, and by the task only if that has to wait."""

import errno
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.store.dispatch import Arrival
from ha.store.message_store import MessageStore
from tests.store.disks import MemoryDisk
from tests.store.stores import check_derived, dispatched, message, open_small


class Turn:
    """Replaces the poller's turns: `end` calls what was left until then."""

    def __init__(self) -> None:
        self.is_on = False
        self._left: deque[Callable[[], None]] = deque()

    def after_turn(self, callback: Callable[[], None]) -> bool:
        if self.is_on:
            self._left.append(callback)
        return self.is_on

    def end(self) -> int:
        """Returns how many callbacks there were."""
        count = len(self._left)
        while self._left:
            self._left.popleft()()
        self.is_on = False
        return count


@asynccontextmanager
async def open_with_turns(disk: MemoryDisk, **changes: Any) -> AsyncIterator[tuple[MessageStore, Turn]]:
    """A store that has dispatched a first message, in a turn of the event loop."""
    turn = Turn()
    async with open_small(disk, **changes) as store:
        store.dispatcher.after_turn = turn.after_turn
        await store.log.put([message(0)])
        await dispatched(store)
        await wait_all_tasks_blocked()
        turn.is_on = True
        yield store, turn
        await dispatched(store)
        await check_derived(store)


async def test_messages_of_a_turn_are_dispatched_together_at_its_end(autojump_clock: object) -> None:
    arrivals: list[Arrival] = []
    async with open_with_turns(MemoryDisk()) as (store, turn):
        store.subscribe(arrivals.extend)
        log = store.log
        begin = log.dispatched_offset.value
        assert log.append([message(1)])
        assert log.append([message(2), message(3)])
        assert log.dispatched_offset.value == begin
        assert turn.end() == 1
        assert log.dispatched_offset.value == log.max_offset.value
        [arrival] = arrivals
        assert (arrival.topic, arrival.max_queue_offset, len(arrival.tags_codes)) == ("T", 4, 3)
        assert log.append([message(4)])
        assert log.dispatched_offset.value < log.max_offset.value  # outside a turn: by the task


async def test_what_only_slaves_may_see_is_not_dispatched(autojump_clock: object) -> None:
    async with open_with_turns(MemoryDisk()) as (store, turn):
        log = store.log
        begin = log.max_offset.value
        log.limit_dispatch(begin)
        assert log.append([message(1)])
        turn.end()
        assert log.dispatched_offset.value == begin
        turn.is_on = True
        log.limit_dispatch(log.max_offset.value)
        turn.end()
        assert log.dispatched_offset.value == log.max_offset.value


async def test_a_new_queue_is_left_to_the_task(autojump_clock: object) -> None:
    async with open_with_turns(MemoryDisk()) as (store, turn):
        assert store.log.append([message(1, topic="Other")])
        turn.end()
        assert store.log.dispatched_offset.value < store.log.max_offset.value


async def test_a_full_disk_is_left_to_the_task(autojump_clock: object) -> None:
    disk = MemoryDisk()

    def refuse(operation: str, path: Path) -> int | None:
        return errno.ENOSPC if operation == "pwrite" and "consumequeue" in path.parts else None

    async with open_with_turns(disk) as (store, turn):
        disk.refuse = refuse
        assert store.log.append([message(1)])
        turn.end()
        await trio.sleep(0.1)
        assert store.dispatcher.paused_reason.startswith("disk full")
        turn.is_on = True
        assert store.log.append([message(2)])
        assert turn.end() == 0  # the task waits for room
        disk.refuse = lambda operation, path: None


@pytest.mark.parametrize("count", [1, 40])
async def test_the_task_sees_what_a_turn_has_left(autojump_clock: object, count: int) -> None:
    """Turns that end while the task is about to run."""
    async with open_with_turns(MemoryDisk(), segment_size=1 << 16) as (store, turn):
        for number in range(count):
            assert store.log.append([message(number, topic=f"Other{number % 3}")])
            assert store.log.append([message(number)])
            turn.end()
            turn.is_on = True
        await dispatched(store)
        assert store.queues.get_or_create("T", 0).max_offset == count + 1


@pytest.mark.parametrize("is_in_turn", [True, False])
async def test_subscribers_hear_of_messages_whose_dispatch_a_full_disk_interrupted(
    is_in_turn: bool, autojump_clock: object
) -> None:
    """Those of the queues before the one that had no room were not reported: pulls and delayed messages waited on."""
    disk = MemoryDisk()

    def refuse(operation: str, path: Path) -> int | None:
        return errno.ENOSPC if operation == "pwrite" and path.parent.name == "1" else None

    async with open_with_turns(disk) as (store, turn):
        turn.is_on = False
        await store.log.put([message(1, queue_id=1)])
        await dispatched(store)
        await wait_all_tasks_blocked()
        arrivals: list[Arrival] = []
        store.subscribe(arrivals.extend)
        turn.is_on = is_in_turn
        disk.refuse = refuse
        assert len(store.log.append([message(2), message(3, queue_id=1)])) == 2
        turn.end()
        await trio.sleep(2.5)
        assert arrivals == []
        disk.refuse = lambda operation, path: None
        await dispatched(store)
        assert [(arrival.queue_id, arrival.max_queue_offset) for arrival in arrivals] == [(0, 2), (1, 2)]


async def test_messages_that_were_truncated_before_they_were_reported_are_not(autojump_clock: object) -> None:
    disk = MemoryDisk()
    async with open_with_turns(disk) as (store, turn):
        turn.is_on = False
        await store.log.put([message(1, queue_id=1)])
        await dispatched(store)
        arrivals: list[Arrival] = []
        store.subscribe(arrivals.extend)
        disk.refuse = lambda operation, path: errno.ENOSPC if path.parent.name == "1" else None
        [cut, _] = await store.log.put([message(2), message(3, queue_id=1)])
        await trio.sleep(2.5)
        disk.refuse = lambda operation, path: None
        await store.truncate(cut.physical_offset)
        await store.log.put([message(4, queue_id=1)])
        await dispatched(store)
        assert [(arrival.queue_id, arrival.max_queue_offset) for arrival in arrivals] == [(1, 2)]
