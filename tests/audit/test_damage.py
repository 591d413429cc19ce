"""Where damage is, how findings are counted, and which ranges must be examined again."""

import os
from pathlib import Path

import numpy as np
import pytest

from ha.audit.findings import Finding, Findings
from ha.audit.fold import CopyFold
from ha.audit.planning import plan_ranges, range_tasks, unjoined_tasks
from ha.audit.range import CopyFacts, CopyPlace, RangeFacts
from ha.audit.walk import Damaged, RawLog, damage_at
from ha.cli.log.examination import Examination
from ha.cli.log.stores import Span
from ha.protocol.store_files import segment_name

PLACE = CopyPlace("one", "/one", "b", 0, 40)


def test_damage_holds_its_first_byte_and_not_the_byte_after_it() -> None:
    damaged = [Damaged(10, 20, ""), Damaged(30, 31, "")]
    offsets = np.array([0, 9, 10, 19, 20, 29, 30, 31, 99], np.int64)
    assert damage_at(damaged, offsets).tolist() == [-1, -1, 0, 0, -1, -1, 1, -1, -1]
    assert damage_at([], offsets).tolist() == [-1] * 9


def test_kinds_are_counted_over_all_copies() -> None:
    findings = Findings(examples_max=1)
    for copy, count in (("a", 2), ("b", 3)):
        findings.add(Finding(kind="crc", copy=copy), count)
    findings.add(Finding(kind="padding", copy="a"))
    assert findings.by_kind() == {"crc": 5, "padding": 1}
    assert findings.damage_count == 5


def test_segment_that_is_deleted_while_the_log_is_listed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "commitlog"
    folder.mkdir()
    for start in (0, 16):
        (folder / segment_name(start)).write_bytes(bytes(16))
    listdir = os.listdir

    def names(directory: Path) -> list[str]:
        listed = listdir(directory)
        (folder / segment_name(0)).unlink()
        return listed

    monkeypatch.setattr(os, "listdir", names)
    assert RawLog(tmp_path).min_offset == 16


def facts(begin: int, end: int, first: int | None, next_start: int | None, *, is_gone: bool = False) -> RangeFacts:
    copy = CopyFacts("one", b"", first, next_start, 1, 1, [], {}, {}, 0, 0, 0, is_gone)
    return RangeFacts(begin, end, [copy], Findings(1))


def unjoined(found: list[RangeFacts]) -> list[tuple[int, tuple[int | None, ...]]]:
    ranges = plan_ranges([PLACE], 10)
    tasks = range_tasks(ranges, [PLACE], 1, "id")
    folds = [CopyFold(PLACE, Findings(1))]
    return [(number, task.starts) for number, task in unjoined_tasks(tasks, ranges, found, folds)]


def test_ranges_that_join_are_not_examined_again() -> None:
    """The second range's last record covers the third one."""
    found = [facts(0, 10, 0, 12), facts(10, 20, 12, 35), facts(20, 30, None, None), facts(30, 40, 35, 40)]
    assert unjoined(found) == []


def test_range_is_examined_again_from_its_actual_first_record() -> None:
    found = [facts(0, 10, 0, 12), facts(10, 20, 15, 25), facts(20, 30, 25, 31), facts(30, 40, 31, 40)]
    assert unjoined(found) == [(1, (12,))]


def test_range_after_a_deleted_one_starts_at_its_own_first_record() -> None:
    gone = facts(10, 20, None, None, is_gone=True)
    assert unjoined([facts(0, 10, 0, 12), gone, facts(20, 30, 24, 33), facts(30, 40, 33, 40)]) == []


def test_interrupted_examination_names_the_options_to_resume() -> None:
    examination = Examination([], [], Span(0, 100), examples_max=1)
    examination.reached = 60
    assert examination.resume_options(None) == "--from 60"
    assert examination.resume_options(100) == "--from 60 --to 100"
    examination.reached = 100
    assert examination.resume_options(100) == ""
