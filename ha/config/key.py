"""Declares configuration keys, and the types that several files use."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

INT_MAX = 2**31 - 1
"""Java's largest int."""

Interval = Annotated[int, Meta(ge=100, le=INT_MAX)]
"""Milliseconds; the minimum catches values that were meant as seconds."""


def key(name: str, default: Any) -> Any:
    """Returns the struct field of the key `name`."""
    return msgspec.field(name=name, default=default)
