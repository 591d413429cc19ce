"""The checkers accept halog's stores: running, stopped, and reopened after any crash."""

from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock

from ha.errors import HalogError
from ha.protocol.record import Message
from ha.store.message_store import open_message_store
from tests.checkers import derived, queue_offsets, soundness
from tests.checkers.history import body_id_of, make_body
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation
from tests.store.disks import MemoryDisk
from tests.store.stores import ROOT, SEGMENT, WallClock, dispatched, open_small, small_options

SLOTS = 50


def image_of(disk: MemoryDisk) -> StoreImage:
    files = {path.relative_to(ROOT).as_posix(): bytes(inode.content) for path, inode in disk.inodes.items()}
    return StoreImage(files, SEGMENT, name="halog")


def judge(disk: MemoryDisk, *, is_index_complete: bool) -> list[Violation]:
    image = image_of(disk)
    return [
        *soundness.check(image),
        *queue_offsets.check_log(image),
        *derived.check(image, is_complete=True, is_index_complete=is_index_complete, index_slot_count=SLOTS),
    ]


def message(number: int) -> Message:
    properties = b"UNIQ_KEY\x01U%d\x02KEYS\x01k%d common\x02TAGS\x01tag%d\x02" % (number, number, number % 3)
    return Message(topic="T", queue_id=number % 2, body=make_body(b"p-%d" % number, 250), properties=properties)


async def live(disk: MemoryDisk, clock: WallClock) -> None:
    for life in range(2):
        async with open_small(disk, clock, flush_mode="SYNC_FLUSH", derived_flush_interval_s=0.4) as store:
            for number in range(3):
                await store.log.put([message(100 * life + 10 * number + n) for n in range(7)])
                await store.flusher.flush()
                await dispatched(store)
                assert judge(disk, is_index_complete=False) == []
                await trio.sleep(1)
        assert judge(disk, is_index_complete=True) == []


def test_a_store_is_whole_while_it_runs_and_when_it_has_stopped() -> None:
    disk = MemoryDisk()
    trio.run(live, disk, WallClock(), clock=MockClock(autojump_threshold=0))
    image = image_of(disk)
    ids = [body_id_of(record.body) for record in image.records()]
    assert ids == [b"p-%d" % (100 * life + 10 * n + m) for life in range(2) for n in range(3) for m in range(7)]
    assert len(image.segments) > 2


@pytest.mark.parametrize("seed", range(5))
def test_a_store_is_whole_once_it_was_opened_after_a_power_loss(seed: int) -> None:
    whole = MemoryDisk()
    trio.run(live, whole, WallClock(), clock=MockClock(autojump_threshold=0))
    chance = Random(seed)
    for _ in range(8):
        disk, clock = MemoryDisk(), WallClock()
        disk.die_at = chance.randrange(20, len(whole.steps))
        try:
            trio.run(live, disk, clock, clock=MockClock(autojump_threshold=0))
        except* (HalogError, OSError):
            pass
        after = disk.power_loss(chance)

        async def reopen(disk: MemoryDisk = after, clock: WallClock = clock) -> None:
            async with open_small(disk, clock):
                pass

        trio.run(reopen, clock=MockClock(autojump_threshold=0))
        assert judge(after, is_index_complete=True) == []


def test_the_checkers_read_a_directory_of_a_real_file_system(tmp_path: Path) -> None:

    async def write() -> None:
        async with open_message_store(small_options(root=tmp_path)) as store:
            await store.log.put([message(n) for n in range(30)])

    trio.run(write)
    image = StoreImage.from_directory(tmp_path)
    assert len(image.records()) == 30
    assert soundness.check(image) == []
    assert derived.check(image, is_complete=True, index_slot_count=SLOTS) == []
