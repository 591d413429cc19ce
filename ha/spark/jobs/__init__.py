"""The jobs behind `ha spark …`. Each is a function of a SparkSession and an options struct that returns a result
struct; none of them prints."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called on the driver with (stage, done, total), both counts in the same unit; `total` may grow."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Does nothing: the progress callback of callers that show no progress."""
