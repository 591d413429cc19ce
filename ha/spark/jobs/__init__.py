"""The jobs behind `ha spark …`. Each is a function that takes a SparkSession and an options struct, returns a result
struct, and prints nothing."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called on the driver with (stage, done, total), both counts in the same unit; `total` may grow."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Does nothing: the progress callback of callers that show no progress."""
