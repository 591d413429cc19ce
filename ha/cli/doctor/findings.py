"""What `ha doctor` finds: each with what is wrong, where, and what to do about it."""

from __future__ import annotations

from enum import Enum

import msgspec


class Weight(Enum):
    """How much it matters."""

    ERROR = "error"
    """Something does not work, or will not when it is needed"""
    WARNING = "warning"
    """It works, and somebody should know"""
    NOTE = "note"
    """What could not be looked at"""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing found."""

    check: str
    """A name that stays: for scripts"""
    weight: Weight
    where: str
    what: str
    cure: str
