"""Writes files atomically: after a crash, even of the machine, a file is complete, or as it was before."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replaces the file at `path` atomically, or creates it, and syncs it. Raises OSError.

    A kill may leave a draft behind, whose name ends in `.tmp`.
    """
    with _draft(path, content) as draft:
        draft.replace(path)
    sync_folder(path.parent)


def create_file(path: Path, content: bytes) -> None:
    """Creates the file at `path` atomically, and syncs it. Raises FileExistsError if it exists, and then changes
    nothing.

    A kill may leave a draft behind, whose name ends in `.tmp`.
    """
    with _draft(path, content) as draft:
        os.link(draft, path)
    sync_folder(path.parent)


def sync_path(path: Path) -> None:
    """Syncs the content of an existing file, or the entries of a directory. Raises OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_folder(folder: Path) -> None:
    """Syncs the directory entries of `folder`; does nothing if it no longer exists."""
    with suppress(FileNotFoundError):
        sync_path(folder)


@contextmanager
def _draft(path: Path, content: bytes) -> Iterator[Path]:
    """Writes and syncs a file beside `path`, and deletes it at the end. No other writer, on any host, uses its name."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)
