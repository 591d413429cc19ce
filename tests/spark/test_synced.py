"""Files that several writers replace or create at once, also on several hosts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ha.spark.jobs.synced import create_file, replace_file


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, write: Callable[[], None]) -> None:
    """Makes another writer call `write` just before the first call of `owner.name`."""
    real = getattr(owner, name)

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        write()
        return real(*arguments)

    monkeypatch.setattr(owner, name, interrupted)


def test_two_writers_with_the_same_process_id_do_not_share_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers. Their drafts had the same name, so that one failed, or wrote the content of the other."""
    file = tmp_path / "v7.metadata.json"
    interrupt(monkeypatch, os, "link", lambda: create_file(file, b"theirs"))
    with pytest.raises(FileExistsError):
        create_file(file, b"ours")
    assert file.read_bytes() == b"theirs"
    interrupt(monkeypatch, Path, "replace", lambda: replace_file(file, b"theirs again"))
    replace_file(file, b"ours at last")
    assert file.read_bytes() == b"ours at last"
    assert list(tmp_path.iterdir()) == [file]


def test_no_draft_is_left_if_a_file_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    for write in (create_file, replace_file):
        with pytest.raises(OSError, match="no space"):
            write(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []
