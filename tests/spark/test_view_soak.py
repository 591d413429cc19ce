"""One minute of `scripts/archive-soak`: archive and log as one view, while all processes are killed."""

from pathlib import Path

import pytest

from tests.spark.view_soak import run_soak


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.spark
def test_each_message_is_in_stream_and_tables_once_through_kills(tmp_path: Path) -> None:
    outcome = run_soak(tmp_path / "soak", minutes=1, seed=1, on_event=print)
    assert outcome.rows >= outcome.acknowledged > 1000
    assert set(outcome.kills) == {"writer", "archiver", "reader"}
    assert outcome.deleted_segments
    assert outcome.tables
