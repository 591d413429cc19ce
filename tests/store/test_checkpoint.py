"""halog's additions to the checkpoint file."""

import pytest

from ha.protocol.store_files import CHECKPOINT_SIZE, Checkpoint
from ha.store.checkpoint import load_begin, load_checkpoint, load_flushed_to, save_checkpoint
from tests.store.disks import MemoryDisk
from tests.store.stores import ROOT

PATH = ROOT / "checkpoint"
CHECKPOINT = Checkpoint(physic_msg_timestamp_ms=1_700_000_000_000, logics_msg_timestamp_ms=1_600_000_000_000)


def test_checkpoint_round_trip() -> None:
    disk = MemoryDisk()
    disk.make_dirs(ROOT)
    for flushed_to, begin in ((1 << 40, 1 << 30), (0, -1)):  # made, and written over
        save_checkpoint(disk, PATH, CHECKPOINT, flushed_to, begin)
        assert load_checkpoint(disk, PATH) == CHECKPOINT
        assert load_flushed_to(disk, PATH) == flushed_to
        assert load_begin(disk, PATH) == begin
        assert disk.size(PATH) == CHECKPOINT_SIZE
    assert Checkpoint.unpack(disk.read_bytes(PATH)) == CHECKPOINT


@pytest.mark.parametrize("is_ours", [True, False])
def test_file_without_offsets(is_ours: bool) -> None:
    """A file of RocketMQ, and one of an older halog."""
    disk = MemoryDisk()
    disk.make_dirs(ROOT)
    assert load_flushed_to(disk, PATH) == 0
    save_checkpoint(disk, PATH, CHECKPOINT, 1 << 40, 1 << 30)
    raw = disk.read_bytes(PATH)
    disk.write_bytes(PATH, (raw[:56] if is_ours else CHECKPOINT.pack()[:48]).ljust(CHECKPOINT_SIZE, b"\0"))
    assert load_flushed_to(disk, PATH) == 0
    assert load_begin(disk, PATH) == -1
    assert load_checkpoint(disk, PATH) == CHECKPOINT


def test_offsets_are_ignored_if_the_fields_changed() -> None:
    disk = MemoryDisk()
    disk.make_dirs(ROOT)
    save_checkpoint(disk, PATH, CHECKPOINT, 1 << 40, 1 << 30)
    raw = disk.read_bytes(PATH)
    for bit in range(8 * 72):
        harmed = bytearray(raw)
        harmed[bit // 8] ^= 1 << bit % 8
        disk.write_bytes(PATH, bytes(harmed))
        assert load_flushed_to(disk, PATH) == 0
        assert load_begin(disk, PATH) == (-1 if bit < 8 * 56 else 1 << 30)
    disk.write_bytes(PATH, raw[:60])
    assert load_flushed_to(disk, PATH) == 0
    assert load_begin(disk, PATH) == -1
