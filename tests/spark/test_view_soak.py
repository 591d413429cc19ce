"""One minute of `scripts/archive-soak`: archive and log as one view, while all processes are killed."""

import argparse
from pathlib import Path

import pytest

from scripts.seeded import add_options
from tests.spark.view_soak import run_soak


def test_a_directory_with_other_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is deleted in the end."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    for free in (tmp_path, tmp_path / "absent"):
        assert parser.parse_args(["--directory", str(free)]).directory == free
    file = tmp_path / "other.txt"
    file.touch()
    for taken in (tmp_path, file):
        with pytest.raises(SystemExit):
            parser.parse_args(["--directory", str(taken)])
        assert f"{taken} is not an empty directory" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.spark
def test_each_message_is_in_stream_and_tables_once_through_kills(tmp_path: Path) -> None:
    outcome = run_soak(tmp_path / "soak", minutes=1, seed=1, on_event=print)
    assert outcome.rows >= outcome.acknowledged > 1000
    assert set(outcome.kills) == {"writer", "archiver", "reader"}
    assert outcome.deleted_segments
    assert outcome.tables
