"""Checks and creates directories given on the command line, whose files a script deletes at its end."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def is_free(directory: Path) -> bool:
    """Returns whether `directory` is empty or does not exist."""
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


def add_directory_option(parser: argparse.ArgumentParser) -> None:
    """Adds --directory."""
    parser.add_argument(
        "--directory", type=_free_directory, help="empty directory for all files (default: a temporary directory)"
    )


def create_directory(chosen: Path | None, name: str) -> Path:
    """Creates and returns the directory given with --directory, or else a temporary one with `name` in its name."""
    if chosen is None:
        return Path(tempfile.mkdtemp(prefix=f"halog-{name}-"))
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


def _free_directory(text: str) -> Path:
    directory = Path(text)
    if not is_free(directory):
        raise argparse.ArgumentTypeError(f"{directory} is not an empty directory")
    return directory
