"""The epoch history: its content, its durability when a call returns, crashes and damage."""

import errno
from pathlib import Path
from random import Random

import pytest

from ha.errors import CorruptLog, DiskFailed, DiskFull, HalogError
from ha.protocol.epoch_file import EpochEntry, decode_epoch_file
from ha.store.epochs import BACKUP_SUFFIX, EPOCH_FILE, EpochHistory
from tests.store.disks import MemoryDisk, run_inline
from tests.store.recording import PowerLoss, Recorder, RecordingDisk
from tests.store.stores import ROOT

PATH = ROOT / EPOCH_FILE
BACKUP = ROOT / (EPOCH_FILE + BACKUP_SUFFIX)


async def history(disk: MemoryDisk | RecordingDisk, *pairs: tuple[int, int]) -> EpochHistory:
    found = EpochHistory(disk, PATH, run_blocking=run_inline)
    await found.load()
    for epoch, start in pairs:
        await found.append(epoch, start)
    return found


def pairs_of(found: EpochHistory) -> list[tuple[int, int]]:
    return [(entry.epoch, entry.start_offset) for entry in found.entries]


async def test_a_log_that_never_failed_over_has_no_history_and_no_file() -> None:
    disk = MemoryDisk()
    found = await history(disk)
    await found.truncate_from(0)
    await found.drop_before(1000)
    assert (pairs_of(found), found.last, disk.inodes) == ([], None, {})


async def test_an_appended_term_is_in_the_file_and_its_copy() -> None:
    disk = MemoryDisk()
    found = await history(disk, (7, 7000), (8, 8000))
    # The example of the format's description.
    assert disk.read_bytes(PATH) == disk.read_bytes(BACKUP) == b"2\n773307083\n7-7000\n8-8000\n"
    again = await history(disk)
    assert pairs_of(again) == pairs_of(found) == [(7, 7000), (8, 8000)]
    assert again.last == EpochEntry(8, 8000)


@pytest.mark.parametrize("pair", [(8, 9000), (7, 9000), (9, 8000), (9, 7999)])
async def test_only_a_later_term_at_a_later_place_can_follow(pair: tuple[int, int]) -> None:
    disk = MemoryDisk()
    found = await history(disk, (7, 7000), (8, 8000))
    with pytest.raises(ValueError, match="can't follow"):
        await found.append(*pair)
    assert pairs_of(await history(disk)) == [(7, 7000), (8, 8000)]


@pytest.mark.parametrize(
    ("offset", "left"),
    [(0, []), (7000, []), (7001, [(7, 7000)]), (8000, [(7, 7000)]), (8001, [(7, 7000), (8, 8000)])],
)
async def test_truncation_drops_terms_that_begin_at_or_behind_it(offset: int, left: list[tuple[int, int]]) -> None:
    disk = MemoryDisk()
    found = await history(disk, (7, 7000), (8, 8000))
    await found.truncate_from(offset)
    assert pairs_of(found) == pairs_of(await history(disk)) == left


async def test_a_term_that_begins_at_the_very_end_of_the_log_stays_at_a_start() -> None:
    found = await history(MemoryDisk(), (7, 7000), (8, 8000))
    await found.drop_beyond(8000)
    assert pairs_of(found) == [(7, 7000), (8, 8000)]
    await found.drop_beyond(7999)
    assert pairs_of(found) == [(7, 7000)]


@pytest.mark.parametrize(
    ("min_offset", "left"),
    [(0, [1, 4, 9]), (200, [1, 4, 9]), (201, [4, 9]), (500, [4, 9]), (501, [9]), (1 << 40, [9])],
)
async def test_terms_deleted_by_retention_are_dropped(min_offset: int, left: list[int]) -> None:
    disk = MemoryDisk()
    found = await history(disk, (1, 100), (4, 200), (9, 500))
    await found.drop_before(min_offset)
    assert [entry.epoch for entry in found.entries] == left
    assert pairs_of(await history(disk)) == pairs_of(found)


@pytest.mark.parametrize(
    ("own", "own_end", "theirs", "their_end", "expected"),
    [
        ([(1, 0)], 500, [(1, 0)], 700, 500),  # behind
        ([(1, 0)], 700, [(1, 0)], 500, 500),  # ahead of a master that was elected without the rest
        ([(1, 0), (2, 300)], 900, [(1, 0), (2, 300)], 800, 800),
        ([(1, 0)], 900, [(1, 0), (2, 300)], 800, 300),  # the term ended earlier at the master
        ([(1, 0), (3, 400)], 900, [(1, 0), (2, 300)], 800, 300),  # an own term that nobody followed
        ([(1, 0), (2, 300)], 900, [(1, 0), (2, 350)], 900, 300),  # the same number from another place is another term
        ([(1, 0), (2, 300), (3, 500)], 600, [(2, 300), (4, 700)], 900, 500),
        ([(1, 0), (2, 300)], 300, [(1, 0), (2, 300), (3, 300 + 50)], 400, 300),  # an own term without a byte yet
        ([(1, 0)], 500, [(2, 0)], 500, None),
        ([(1, 0)], 500, [], 500, None),
        ([], 500, [(1, 0)], 500, None),
    ],
)
async def test_logs_are_the_same_up_to_the_end_of_the_newest_term_that_both_have(
    own: list[tuple[int, int]],
    own_end: int,
    theirs: list[tuple[int, int]],
    their_end: int,
    expected: int | None,
) -> None:
    """ha-protocol.md, section 5."""
    found = await history(MemoryDisk(), *own)
    assert found.consistent_point(own_end, [EpochEntry(*pair) for pair in theirs], their_end) == expected


# ---- crashes and damage


async def test_a_change_is_atomic_at_a_power_loss() -> None:
    recorder = Recorder()
    disk = RecordingDisk(recorder)
    found = await history(disk)
    states: list[list[tuple[int, int]]] = [[]]
    done: list[int] = [0]
    for change in (found.append(1, 0), found.append(4, 200), found.truncate_from(200), found.append(5, 150)):
        await change
        states.append(pairs_of(found))
        done.append(len(recorder.operations))
    chance = Random(1)
    for position in range(len(recorder.operations) + 1):
        loss = PowerLoss(recorder, disk)
        loss.advance(position)
        sure = max(number for number, at in enumerate(done) if at <= position)
        for keep in (0.0, 0.5, 0.5, 1.0):
            after = RecordingDisk(Recorder(), loss.draw(chance, keep))
            again = await history(after)
            assert pairs_of(again) in states[sure : sure + 2]
            assert after.read_bytes(PATH) == after.read_bytes(BACKUP) if again.entries else True
            last = again.last
            await again.append(9, last.start_offset + 100 if last else 0)


@pytest.mark.parametrize("lost", [PATH, BACKUP])
@pytest.mark.parametrize("how", ["gone", "empty", "flipped", "unreadable"])
async def test_one_of_the_two_files_is_enough_and_the_other_is_rewritten(
    lost: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> bytes:
        if path == lost:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return MemoryDisk.read_bytes(disk, path)

    disk = MemoryDisk()
    await history(disk, (7, 7000), (8, 8000))
    inode = disk.inodes[lost]
    if how == "gone":
        disk.unlink(lost)
    elif how == "unreadable":
        monkeypatch.setattr(disk, "read_bytes", fail)
    else:
        inode.content[:] = b"" if how == "empty" else inode.content.replace(b"8-8000", b"8-8001")
    assert pairs_of(await history(disk)) == [(7, 7000), (8, 8000)]
    monkeypatch.undo()
    assert disk.read_bytes(PATH) == disk.read_bytes(BACKUP)


async def test_the_file_wins_over_a_different_copy() -> None:
    disk = MemoryDisk()
    await history(disk, (7, 7000))
    older = disk.read_bytes(PATH)
    await history(disk, (8, 8000))
    disk.write_bytes(BACKUP, older)  # as a crash between the two leaves it, and as RocketMQ does
    assert pairs_of(await history(disk)) == [(7, 7000), (8, 8000)]
    assert len(decode_epoch_file(disk.read_bytes(BACKUP))) == 2


async def test_without_a_readable_history_the_node_does_not_start() -> None:
    disk = MemoryDisk()
    await history(disk, (7, 7000))
    disk.write_bytes(PATH, b"")
    disk.write_bytes(BACKUP, b"1\n5\n7-7000\n")
    with pytest.raises(CorruptLog, match="restore both from a backup") as caught:
        await history(disk)
    assert caught.value.file == PATH


@pytest.mark.parametrize("refused", ["write_bytes", "rename"])
@pytest.mark.parametrize(
    ("code", "raised", "text"),
    [
        (errno.ENOSPC, DiskFull, "no space left"),
        (errno.EMFILE, DiskFull, "too many files are open"),
        (errno.ENFILE, DiskFull, "too many files are open"),
        (errno.EIO, DiskFailed, "failed"),
    ],
)
async def test_a_refused_write_leaves_the_history_unchanged(
    code: int, raised: type[HalogError], text: str, refused: str
) -> None:
    disk = MemoryDisk()
    found = await history(disk, (7, 7000))
    seen = iter((None, code))  # the first of the two files can still be written
    disk.refuse = lambda operation, path: next(seen, code) if operation == refused else None
    with pytest.raises(raised) as caught:
        await found.append(8, 8000)
    assert text in str(caught.value)
    assert errno.errorcode[code] in str(caught.value)
    assert "0 bytes" not in str(caught.value)  # the size is not known
    disk.refuse = lambda operation, path: None
    assert pairs_of(found) == pairs_of(await history(disk)) == [(7, 7000)]
    await found.append(8, 8000)
    assert pairs_of(await history(disk)) == [(7, 7000), (8, 8000)]
