"""Clearing a topic: its messages are never read again, and its queue offsets continue."""

import errno
import logging

import pytest

from ha.errors import DiskFull
from ha.store.consume_queue import ConsumeQueue
from ha.store.message_store import MessageStore
from tests.store.disks import MemoryDisk
from tests.store.stores import WallClock, dispatched, message, open_small


async def put(store: MessageStore, count: int, topic: str = "T") -> list[int]:
    results = [(await store.log.put([message(number, topic=topic)]))[0] for number in range(count)]
    await dispatched(store)
    return [result.queue_offset for result in results]


def state(store: MessageStore, topic: str = "T") -> tuple[int, int, list[int]]:
    """Returns first and last offset of queue 0, and which of its first hundred offsets are readable."""
    queue = store.queues.get(topic, 0)
    assert queue is not None
    return queue.min_offset, queue.max_offset, [offset for offset in range(100) if queue.read(offset, 1)]


@pytest.mark.parametrize("count", [3, 8, 20])
@pytest.mark.parametrize("is_clean", [True, False], ids=["stop", "kill"])
async def test_cleared_messages_do_not_come_back(count: int, is_clean: bool, caplog: pytest.LogCaptureFixture) -> None:
    disk, clock = MemoryDisk(), WallClock()
    async with open_small(disk, clock) as store:
        await put(store, 2, "other")
        await put(store, count)
        await store.clear_topics({"T": store.log.max_offset.value})
        assert state(store) == (count, count, [])
        assert state(store, "other") == (0, 2, [0, 1])
        assert len(disk.list_dir(store.options.root / "consumequeue" / "T" / "0")) == 1
        killed = disk.kill()
    async with open_small(disk if is_clean else killed, clock) as store:
        assert state(store) == (count, count, [])
        assert await put(store, 2) == [count, count + 1]
        assert state(store) == (count, count + 2, [count, count + 1])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_topic_that_is_forgotten_while_queues_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker keeps a limited number of deleted topics, and can change them while a worker clears queues."""
    clear = ConsumeQueue.clear

    def forget_and_clear(queue: ConsumeQueue, before: int) -> None:
        known.clear()
        clear(queue, before)

    monkeypatch.setattr(ConsumeQueue, "clear", forget_and_clear)
    async with open_small() as store:
        await put(store, 3)
        await put(store, 2, "other")
        known = {"T": store.log.max_offset.value, "other": store.log.max_offset.value}
        await store.clear_topics(known)
        assert state(store) == (3, 3, [])
        assert state(store, "other") == (2, 2, [])


async def test_clearing_a_topic_without_queues() -> None:
    async with open_small() as store:
        await store.clear_topics({"T": store.log.max_offset.value})
        assert await put(store, 1) == [0]
        await store.clear_topics({"T": store.log.max_offset.value})
        assert await put(store, 1) == [1]
        assert state(store) == (1, 2, [1])


@pytest.mark.parametrize("count", [3, 8, 20])
@pytest.mark.parametrize("is_clean", [True, False], ids=["stop", "kill"])
async def test_later_messages_of_the_topic_stay(count: int, is_clean: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of a topic that was created again, on a slave that learns of both at once."""
    disk, clock = MemoryDisk(), WallClock()
    async with open_small(disk, clock) as store:
        await put(store, count)
        before = store.log.max_offset.value
        await put(store, 11)
        kept = list(range(count, count + 11))
        for _ in range(2):
            await store.clear_topics({"T": before, "other": before})
            assert state(store) == (count, count + 11, kept)
        killed = disk.kill()
    async with open_small(disk if is_clean else killed, clock) as store:
        assert state(store) == (count, count + 11, kept)
        assert await put(store, 1) == [count + 11]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("operation", ["unlink", "pwrite", "sync"])
@pytest.mark.parametrize("count", [16, 20])
async def test_messages_that_a_full_disk_does_not_clear_are_cleared_later(operation: str, count: int) -> None:
    """The next call took the queue for cleared, and retention, or the next start, brought the messages back."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        await put(store, count)
        before = {"T": store.log.max_offset.value}
        disk.refuse = lambda refused, path: errno.ENOSPC if refused == operation and "T" in path.parts else None
        with pytest.raises(DiskFull):
            await store.clear_topics(before)
        first, end, readable = state(store)
        assert readable == list(range(first, end))
        disk.refuse = lambda refused, path: None
        await store.clear_topics(before)
        assert state(store) == (count, count, [])
        store.queues.correct_min(0)
        assert state(store) == (count, count, [])
        assert len(disk.list_dir(store.options.root / "consumequeue" / "T" / "0")) == 1
