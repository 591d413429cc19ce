"""What a checker found."""

from __future__ import annotations

from typing import NamedTuple


class Violation(NamedTuple):
    """One promise broken. `text` is for the person on call: which node, where, what is there, what should be."""

    checker: str
    text: str

    def __str__(self) -> str:
        return f"[{self.checker}] {self.text}"
