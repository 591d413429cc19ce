"""A slave that has lost all records of its log: where its queues begin afterwards."""

import pytest
from trio.testing import MockClock

from ha.protocol.record import FILLER_MAGIC
from ha.protocol.record_encoding import encode_record
from ha.store.message_store import MessageStore
from tests.store.damaged_stores import segment
from tests.store.disks import MemoryDisk
from tests.store.stores import ROOT, SEGMENT, dispatched, message, open_small


def lose(disk: MemoryDisk, physical_offset: int) -> None:
    """Makes zeros of the rest of a segment."""
    path, position = segment(disk, physical_offset)
    content = disk.inodes[path].content
    content[position:] = bytes(len(content) - position)


async def receive(store: MessageStore, queue_offset: int, topic: str = "T") -> None:
    """Appends a record as a slave gets it from its master."""
    end = store.log.max_offset.value
    raw = encode_record(
        message(0, topic=topic),
        queue_offset=queue_offset,
        physical_offset=end,
        store_timestamp_ms=1_700_000_000_000,
        store_host=b"\x7f\0\0\1\0\0\0\1",
    )
    await store.log.append_raw(end, raw)
    await dispatched(store)


@pytest.mark.parametrize("how", ["power loss", "power loss, also of the queue", "truncation"])
@pytest.mark.parametrize("queue_offset", [16, 20])
async def test_the_queues_of_a_slave_that_lost_its_whole_log_begin_anew(
    how: str, queue_offset: int, autojump_clock: MockClock
) -> None:
    """Its master has lost even more: there, the queue continues at an offset before the one that it began with here."""
    disk, begin = MemoryDisk(), 5 * SEGMENT
    async with open_small(disk, is_slave=True) as store:
        await store.log.append_raw(begin, b"")
        await receive(store, queue_offset)
        if how == "truncation":
            await store.truncate(begin)
        lost = disk.kill()
    if how != "truncation":
        lose(lost, begin)
    if how == "power loss, also of the queue":
        [path] = [path for path in lost.inodes if path.parent == ROOT / "consumequeue" / "T" / "0"]
        content = lost.inodes[path].content
        content[:] = bytes(len(content))
    async with open_small(lost, is_slave=True) as store:
        assert (store.log.min_offset, store.log.max_offset.value) == (begin, begin)
        await receive(store, 3)
        queue = store.queues.get("T", 0)
        assert queue is not None
        assert [entry.physical_offset for entry in queue.read(3, 1)] == [begin]
        assert queue.max_offset == 4


async def test_a_slave_without_records_keeps_no_end_of_a_queue_whose_records_are_deleted(
    autojump_clock: MockClock,
) -> None:
    disk, begin = MemoryDisk(), 5 * SEGMENT
    async with open_small(disk, is_slave=True) as store:
        await store.log.append_raw(begin, b"")
        await receive(store, 20)
        room = begin + SEGMENT - store.log.max_offset.value
        filler = room.to_bytes(4, "big") + (FILLER_MAGIC & 0xFFFFFFFF).to_bytes(4, "big")
        await store.log.append_raw(begin + SEGMENT - room, filler.ljust(room, b"\0"))
        await receive(store, 0, "other")
        disk = disk.kill()
    lose(disk, begin + SEGMENT)
    del disk.inodes[segment(disk, begin)[0]]
    async with open_small(disk, is_slave=True) as store:
        assert store.log.min_offset == store.log.max_offset.value == begin + SEGMENT
        await receive(store, 3)
        queue = store.queues.get("T", 0)
        assert queue is not None
        assert (len(queue.read(3, 1)), queue.max_offset) == (1, 4)
