"""A bug that can't be planted is an error, and never looks noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ha.protocol.record_encoding import encode_filler
from ha.replication.ha_session import HASession
from ha.store import commitlog, recovery
from ha.store.commitlog import CommitLog
from ha.store.segmented_log import SegmentedLog
from tests.checkers.violation import Violation
from tests.sim.observer import CRASH
from tests.sim.planting import Bug, Planting, PlantingError, planted


async def no_sync(self: SegmentedLog, flushed: int, target: int) -> None:
    pass


def blocking_sync(self: SegmentedLog, flushed: int, target: int) -> None:
    pass


async def other_names(self: CommitLog, begin: int, end: int) -> None:
    pass


async def one_more(self: SegmentedLog, flushed: int, target: int, more: int) -> None:
    pass


class Renamed:
    """A class whose method was renamed."""

    def old_name(self) -> None:
        pass


RENAMED = Renamed.old_name
del Renamed.old_name


def test_a_method_a_property_and_an_imported_function_are_replaced_and_come_back() -> None:
    sync, offset, filler = CommitLog.sync, vars(HASession)["_reportable_offset"], encode_filler

    def plant(plant: Planting) -> None:
        plant.replace(CommitLog.sync)(no_sync)
        plant.replace(HASession._reportable_offset)(lambda self: 7)
        plant.replace_in(commitlog, encode_filler)(lambda remaining: b"")

    with planted(plant):
        assert CommitLog.sync is no_sync
        assert vars(HASession)["_reportable_offset"].fget(None) == 7
        assert vars(commitlog)["encode_filler"](1) == b""
    assert CommitLog.sync is sync
    assert vars(HASession)["_reportable_offset"] is offset
    assert vars(commitlog)["encode_filler"] is filler


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (lambda plant: plant.replace(CommitLog.sync)(blocking_sync), "one is async"),
        (lambda plant: plant.replace(CommitLog.sync)(other_names), "has the parameters"),
        (lambda plant: plant.replace(CommitLog.sync)(one_more), "has the parameters"),
        (lambda plant: plant.replace(RENAMED)(lambda self: None), "is not what is to be replaced"),
        (lambda plant: plant.replace_in(recovery, encode_filler)(lambda remaining: b""), "is not what is to be"),
        (lambda plant: None, "nothing was replaced"),
    ],
)
def test_mismatched_replacement_is_rejected_and_leaves_no_trace(plant: Callable[[Any], None], reason: str) -> None:
    sync = CommitLog.sync
    with pytest.raises(PlantingError, match=reason), planted(plant):
        pass
    assert CommitLog.sync is sync


def test_earlier_replacements_are_undone_after_a_rejection() -> None:
    sync = CommitLog.sync

    def plant(plant: Planting) -> None:
        plant.replace(CommitLog.sync)(no_sync)
        plant.replace(CommitLog.put)(no_sync)  # type: ignore[arg-type]

    with pytest.raises(PlantingError), planted(plant):
        pass
    assert CommitLog.sync is sync


def test_a_bug_counts_as_noticed_by_its_own_checker_in_a_run_without_a_crash() -> None:
    bug: Bug[Any] = Bug("b", "", "statuses", lambda plan: True, lambda plant: None)
    right, other, crash = Violation("statuses", ""), Violation("acks", ""), Violation(CRASH, "")
    assert bug.noticed([other, right]) is right
    assert bug.noticed([other]) is None
    assert bug.noticed([]) is None
    assert bug.noticed([right, crash]) is None
    crashes: Bug[Any] = Bug("b", "", CRASH, lambda plan: True, lambda plant: None)
    assert crashes.noticed([other, crash]) is crash
