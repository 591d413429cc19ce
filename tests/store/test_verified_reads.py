"""What proves that bytes for a damaged range are the right ones."""

from __future__ import annotations

import pytest

from ha.protocol.record import Message
from tests.store.disks import MemoryDisk
from tests.store.stores import message, open_small


@pytest.mark.parametrize("size_max", [4 << 20, 12 << 20])
async def test_a_damaged_record_of_any_size_is_proven_as_a_whole(size_max: int) -> None:
    """Without checksums nothing less than all of it proves it; records can be as large as the frame they came in."""
    async with open_small(MemoryDisk(), segment_size=16 << 20, message_size_max=size_max) as store:
        largest = Message(topic="T", queue_id=0, body=b"x" * size_max)
        results = await store.log.put([message(0), largest, message(2)])
        begin, end = results[1].physical_offset, results[1].next_offset
        raw = await store.log.read_all(begin, end - begin)
        damage = store.damage.add(begin, end, file="f", reason="r", found_by="scrub", by_checksum=False)
        assert await store.verified.proves(damage, begin, raw) == len(raw)
        assert await store.verified.proves(damage, begin, raw[:-1]) == 0
        assert await store.verified.is_sound(damage)
