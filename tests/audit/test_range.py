"""Segments that retention deletes while their range is examined."""

from pathlib import Path
from shutil import copytree

import pytest

from ha.audit import range as audit_range
from ha.audit.range import CopyPlace, RangeFacts, RangeTask, examine_range
from ha.protocol.record import Message
from ha.protocol.store_files import segment_name
from tests.arrow.stores import StoreWriter

SEGMENT = 4096


def test_a_segment_that_is_deleted_during_the_second_examination_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreWriter(tmp_path / "1", segment_size=SEGMENT)
    while store.offset < SEGMENT:
        store.put(Message("t", 0, b"body"))
    paths = [store.root, *(copytree(store.root, tmp_path / name) for name in "23")]
    examine, waiting = audit_range._examine, paths[:2]

    def examine_after_a_deletion(task: RangeTask) -> RangeFacts:
        if waiting:
            (waiting.pop(0) / "commitlog" / segment_name(0)).unlink()
        return examine(task)

    monkeypatch.setattr(audit_range, "_examine", examine_after_a_deletion)
    copies = tuple(CopyPlace(path.name, str(path), "b", 0, SEGMENT) for path in paths)
    facts = examine_range(RangeTask(0, SEGMENT, copies, (0, 0, 0), 10, "id"))
    assert [(copy.copy, copy.is_gone) for copy in facts.copies] == [("1", True), ("2", True), ("3", False)]
    assert facts.copies[2].record_count == len(store.offsets) - 1  # the last one is in the second segment
    assert facts.findings.by_kind() == {}
