"""Power lost at any moment of a SYNC_FLUSH store's life, and while it recovers: nothing answered PUT_OK is missing.

The moments and states are drawn with a seed; `scripts/power-loss` draws as many as one likes. What such draws have
found is below as tests of its own.
"""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import trio

from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_record
from tests.store import power_loss
from tests.store.disks import MemoryDisk
from tests.store.power_loss import Losses, Recording, live_alone, live_replicated
from tests.store.recording import SECTOR, Recorder, RecordingDisk, Unlinked
from tests.store.stores import ROOT, SEGMENT, WallClock, check_derived, dispatched, message, open_small, records

BUDGET_S = 6.0
MOMENTS_MAX = 13
STATES_MIN = 20


@pytest.mark.parametrize("live", [live_alone, live_replicated])
def test_power_loss_at_random_moments(live: Callable[[int], Recording]) -> None:
    recording = live(1)
    assert recording.counts["PUT_OK"] > 100
    chance = Random(1)
    losses = Losses(recording, chance)
    began = time.monotonic()
    # As many as there is time for.
    for position in sorted(chance.sample(range(recording.moments), MOMENTS_MAX)):
        losses.check_moment(position)
        if losses.checked.states >= STATES_MIN and time.monotonic() - began > BUDGET_S:
            break
    print(recording.counts, losses.checked)
    assert losses.checked.states >= STATES_MIN
    assert losses.checked.doubtful > 0


# ---- what they found


@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_slave_truncates_an_incomplete_record(is_clean: bool) -> None:
    """The CRC covers the body alone: a record with half of its properties looked complete."""
    first = _record(0, 0)
    second = _record(1, len(first))
    log = first + second
    for cut in range(len(first), len(log)):
        disk = MemoryDisk()
        async with open_small(disk, is_slave=True) as store:
            await store.log.append_raw(0, log[:cut])
        if not is_clean:
            disk = disk.kill()
            disk.write_bytes(ROOT / "abort", b"")
        disk.locked.clear()
        async with open_small(disk, is_slave=True) as store:
            end = store.log.max_offset.value
            assert end == len(first), f"cut at {cut}, the log goes on at {end}"
            await store.log.append_raw(end, log[end:])
            await check_derived(store)
            assert [record.queue_offset for record in await records(store)] == [0, 1]


def _record(queue_offset: int, physical_offset: int, body_size: int = 40) -> bytes:
    properties = b"UNIQ_KEY\x01abc%d\x02KEYS\x01k\x02TAGS\x01t\x02" % queue_offset
    return encode_record(
        Message(topic="trains", queue_id=0, body=b"x" * body_size, properties=properties),
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        store_timestamp_ms=1_700_000_000_000,
        store_host=b"\x7f\x00\x00\x01\x00\x00\x2a\x9f",
    )


async def test_a_master_keeps_its_last_record_whatever_its_properties_end_with() -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        await store.log.put([Message(topic="T", queue_id=0, body=b"x", properties=b"a\x01b\x00")])
        end = store.log.max_offset.value
    disk.locked.clear()
    async with open_small(disk) as store:
        assert store.log.max_offset.value == end


async def test_a_crash_while_segments_behind_a_torn_record_are_deleted() -> None:
    """They are deleted from the last one on: the next start would refuse a gap."""
    disk = MemoryDisk()
    async with open_small(disk, flush_interval_s=1e6) as store:
        await store.log.put([message(n, size=900) for n in range(30)])
        await dispatched(store)
        disk = disk.kill()
    assert len(disk.list_dir(ROOT / "commitlog")) >= 5
    path = ROOT / "commitlog" / f"{SEGMENT:020d}"
    disk.inodes[path].content[:600] = bytes(600)
    recorder = Recorder()
    whole = {path: bytes(inode.content) for path, inode in disk.inodes.items()}
    begun = RecordingDisk(recorder, whole)
    async with open_small(begun, WallClock()):
        pass
    names = [operation.path for operation in recorder.operations if isinstance(operation, Unlinked)]
    deleted = [int(path.name) for path in names if path.parent.name == "commitlog"]
    assert deleted == sorted(deleted, reverse=True) != []


async def test_keys_of_a_record_that_two_index_files_share_survive_the_loss_of_the_second() -> None:
    disk = MemoryDisk()
    clock = WallClock()
    async with open_small(disk, clock, index_entry_count=11) as store:
        # Four keys a record, ten to a file: the third record's are in two files.
        await store.log.put([message(n, queue_id=0) for n in range(2)])
        await dispatched(store)
        await store.log.put([Message(topic="T", queue_id=0, body=b"2", properties=_keys(2, 5))])
        await dispatched(store)
        assert store.index is not None
        assert len(store.index.files) == 2
        second = store.index.files[1].path
    disk.locked.clear()
    disk.unlink(second)
    async with open_small(disk, clock, index_entry_count=11) as store:
        [offset] = [record.physical_offset for record in await records(store) if record.queue_offset == 2]
        assert store.index is not None
        for key in range(5):
            assert await store.query("T", f"q{key}", 9, 0, 1 << 62) == [offset]


def _keys(number: int, count: int) -> bytes:
    words = " ".join(f"q{key}" for key in range(count))
    return b"UNIQ_KEY\x01U%d\x02KEYS\x01%b\x02" % (number, words.encode())


async def test_index_files_stay_in_order_when_the_clock_is_set_back() -> None:
    disk = MemoryDisk()
    for now_ms in (1_700_000_000_000, 1_600_000_000_000):
        async with open_small(disk, WallClock(now_ms), index_entry_count=11) as store:
            await store.log.put([message(n) for n in range(10)])
            await dispatched(store)
        disk.locked.clear()
    async with open_small(disk, WallClock(), index_entry_count=11) as store:
        await check_derived(store)
        for number in range(10):
            assert len(await store.query("T", f"k{number}", 9, 0, 1 << 62)) == 2


async def test_a_torn_queue_entry_is_written_again() -> None:
    """Its first half, with the physical offset, may have reached the disk without its tags code."""
    disk = MemoryDisk()
    async with open_small(disk, queue_entry_count=100) as store:
        await store.log.put([message(n) for n in range(30)])
        await dispatched(store)
    disk.locked.clear()
    disk.write_bytes(ROOT / "abort", b"")
    disk.unlink(ROOT / "checkpoint")
    path = ROOT / "consumequeue" / "T" / "0" / f"{0:020d}"
    before = bytes(disk.inodes[path].content)
    disk.inodes[path].content[512:] = bytes(len(before) - 512)
    async with open_small(disk, queue_entry_count=100):
        pass
    assert bytes(disk.inodes[path].content) == before


async def test_bytes_unsynced_at_a_kill_are_synced_at_the_start() -> None:
    """A log over several segments is in the page cache; once only its end was synced."""
    disk = MemoryDisk()
    async with open_small(disk, flush_interval_s=1e6) as store:
        await store.log.put([message(n, size=900) for n in range(20)])
        assert len(store.log.segments) > 2
        killed = disk.kill()
    for path, inode in killed.inodes.items():
        if path.parent.name == "commitlog":
            inode.durable = bytes(len(inode.content))
    async with open_small(killed, flush_mode="SYNC_FLUSH", flush_interval_s=1e6) as store:
        flushed = store.log.flushed_offset.value
        log = b"".join(bytes(killed.inodes[path].durable) for path in _segments(killed))
        assert log[:flushed] == b"".join(bytes(killed.inodes[path].content) for path in _segments(killed))[:flushed]
        assert flushed == store.log.max_offset.value > 2 * SEGMENT


def _segments(disk: MemoryDisk) -> list[Path]:
    return sorted(path for path in disk.inodes if path.parent.name == "commitlog")


async def test_keys_put_during_an_index_write_survive_a_restart() -> None:
    """Slots that changed during the write of a worker once counted as written, and their keys were lost."""
    disk, clock = MemoryDisk(), WallClock()
    async with open_small(disk, clock, index_slot_count=5000, derived_flush_interval_s=1e6) as store:
        assert store.index is not None
        await store.log.put([message(0)])
        await dispatched(store)
        taken = store.index.take_unwritten()
        await store.log.put([message(1)])  # as while a worker writes
        await check_derived(store)
        store.index.write(taken)
        await check_derived(store)
    disk.locked.clear()
    async with open_small(disk, clock, index_slot_count=5000) as store:
        await check_derived(store)


def test_power_loss_with_a_wall_clock_that_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later records looked older than flushed ones: a torn tail was taken for damage of flushed data."""
    steady = power_loss.wall_clock_ms

    def set_back(outages: int = 0) -> int:
        steps = int(trio.current_time() // 2) if outages == 0 else 0
        return steady(outages) - 5000 * steps

    monkeypatch.setattr(power_loss, "wall_clock_ms", set_back)
    recording = live_alone(1)
    chance = Random(1)
    losses = Losses(recording, chance)
    for position in sorted(chance.sample(range(recording.moments), 4)):
        losses.check_moment(position)


async def test_a_sector_written_before_the_rest_of_its_record_is_torn() -> None:
    """A slave writes a record in parts: between an old sector and the next new one there are zeros."""
    first = _record(0, 0, body_size=235)
    log = first + _record(1, len(first))
    assert len(first) + 88 + 40 + 9 < SECTOR - 2 < len(log) - 2  # a sector ends inside the properties of the second
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True, flush_interval_s=1e6) as store:
        await store.log.append_raw(0, log)
        disk = disk.kill()
    disk.inodes[ROOT / "commitlog" / f"{0:020d}"].content[SECTOR - 2 : SECTOR] = bytes(2)
    async with open_small(disk, is_slave=True) as store:
        assert store.log.max_offset.value == len(first)
