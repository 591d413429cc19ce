"""Damages files behind the back of the process that uses them."""

import os
from collections.abc import Callable
from pathlib import Path

Harm = Callable[[Path, int], None]
"""Damages a file at, or from, a position in bytes."""


def flip(path: Path, position: int) -> None:
    """Flips one bit."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def zero(path: Path, position: int) -> None:
    """Zeroes a range, like a lost write."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes(min(3000, path.stat().st_size - position)))


def cut(path: Path, position: int) -> None:
    """Truncates the file."""
    os.truncate(path, position)


HARMS: dict[str, Harm] = {"flip": flip, "zero": zero, "cut": cut}
