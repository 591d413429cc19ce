"""Writes files so that they are complete or absent after a crash, also of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file at `path` atomically, or create it, and sync it. Raises OSError."""
    draft = path.with_name(f"{path.name}.tmp")
    _write(draft, content)
    draft.replace(path)
    sync_folder(path.parent)


def create_file(path: Path, content: bytes) -> None:
    """Create the file at `path` atomically, and sync it. Raises FileExistsError if it exists, and then changes nothing.

    A kill may leave a draft behind, whose name ends in `.tmp`.
    """
    draft = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    _write(draft, content)
    try:
        os.link(draft, path)
    finally:
        draft.unlink()
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Sync the content of an existing file."""
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of `folder`; do nothing if it no longer exists."""
    try:
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags)
    try:
        os.fsync(number)
    finally:
        os.close(number)
