"""What a checker found."""

from typing import NamedTuple


class Violation(NamedTuple):
    """One broken promise. `text` is for the person on call: node, place, actual and expected value."""

    checker: str
    text: str

    def __str__(self) -> str:
        return f"[{self.checker}] {self.text}"
