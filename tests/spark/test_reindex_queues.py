"""Parts of queues that ranges of the log write, and how they join."""

from pathlib import Path

import pytest

from ha.protocol.record_digest import QueueRun
from ha.protocol.store_files import ENTRY
from ha.spark.jobs.reindex.queues import QueuePart, QueueSlices, join_parts
from ha.store.consume_queue import QUEUE_OFFSET_MAX


def run(*queue_offsets: int) -> QueueRun:
    """Records of 100 bytes, a thousand bytes apart."""
    first = queue_offsets[0]
    is_dense = list(queue_offsets) == list(range(first, first + len(queue_offsets)))
    entries = b"".join(ENTRY.pack(1000 * (offset % 1000), 100, 7) for offset in queue_offsets)
    return QueueRun("t", 3, first, entries, [7] * len(queue_offsets), None if is_dense else list(queue_offsets))


def test_runs_that_follow_each_other_are_one_dense_part(tmp_path: Path) -> None:
    slices = QueueSlices(tmp_path, file_entries=4)
    slices.add(run(5, 6))
    slices.add(run(7, 8))
    assert slices.finish() == [QueuePart("t", 3, 5, 9, 4)]
    raw = b"".join(path.read_bytes() for path in sorted((tmp_path / "consumequeue" / "t" / "3").iterdir()))
    entries = list(ENTRY.iter_unpack(raw))
    assert entries[1:5] == [(1000 * offset, 100, 7) for offset in (5, 6, 7, 8)]
    assert len(entries) == 8  # files of 4, from queue offset 4 on


@pytest.mark.parametrize(
    "runs",
    [(run(5, 6), run(8, 9)), (run(5, 6), run(6, 7)), (run(5, 7),), (run(QUEUE_OFFSET_MAX),), (run(-1, 0),)],
    ids=["gap", "repetition", "gap in a run", "too high", "negative"],
)
def test_other_queue_offsets_are_not_dense_and_write_nothing(tmp_path: Path, runs: tuple[QueueRun, ...]) -> None:
    slices = QueueSlices(tmp_path, file_entries=4)
    for each in runs:
        slices.add(each)
    (part,) = slices.finish()
    assert not part.is_dense
    assert part.count == sum(len(each.tags_codes) for each in runs)
    assert not (tmp_path / "consumequeue").exists()


def test_ranges_whose_parts_do_not_join_are_not_dense() -> None:
    first, gap, later = QueuePart("t", 3, 0, 5, 5), QueuePart("t", 3, 6, 9, 3), QueuePart("t", 3, 5, 9, 4)
    assert join_parts([[first], [later]]) == [QueuePart("t", 3, 0, 9, 9, is_dense=True)]
    assert join_parts([[first], [gap]]) == [QueuePart("t", 3, 0, 9, 8, is_dense=False)]
