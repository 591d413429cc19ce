"""Findings of `ha doctor`: location, problem and solution."""

from __future__ import annotations

from enum import Enum

import msgspec


class Weight(Enum):
    """Severity of a finding."""

    ERROR = "error"
    """Something does not work, or will not work when it is needed"""
    WARNING = "warning"
    """Something works, but needs attention"""
    NOTE = "note"
    """Something could not be checked, or the finding is only for information"""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding: where the problem is, what it is, and its solution (`cure`)."""

    check: str
    """Stable name, for scripts"""
    weight: Weight
    where: str
    what: str
    cure: str

    @property
    def is_error(self) -> bool:
        """Whether something does not work."""
        return self.weight is Weight.ERROR
