"""What can happen to a file's bytes on a disk, done to it behind its owner's back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

Harm = Callable[[Path, int], None]
"""Does harm to a file at, or from, a position in bytes."""


def flip(path: Path, position: int) -> None:
    """Turn one bit."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def zero(path: Path, position: int) -> None:
    """Zero a range, as a lost write does."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes(min(3000, path.stat().st_size - position)))


def cut(path: Path, position: int) -> None:
    """Truncate."""
    os.truncate(path, position)


HARMS: dict[str, Harm] = {"flip": flip, "zero": zero, "cut": cut}
