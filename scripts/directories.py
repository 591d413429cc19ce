"""Checks directories given on the command line, all of whose files a script deletes."""

from __future__ import annotations

import argparse
from pathlib import Path


def is_free(directory: Path) -> bool:
    """Returns whether `directory` is empty or does not exist."""
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


def free_directory(text: str) -> Path:
    """The type of an option of argparse: a path of which `is_free` holds. ArgumentTypeError."""
    directory = Path(text)
    if not is_free(directory):
        raise argparse.ArgumentTypeError(f"{directory} is not an empty directory")
    return directory
