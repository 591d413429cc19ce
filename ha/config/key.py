"""How a key is declared: its name as RocketMQ spells it, its default, and the types that keys of several files have."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

INT_MAX = 2**31 - 1
"""Java's largest int."""

Interval = Annotated[int, Meta(ge=100, le=INT_MAX)]
"""Milliseconds, and not so few that somebody must have meant seconds."""


def key(name: str, default: Any) -> Any:
    """Return the field of a configuration struct that holds the key `name`."""
    return msgspec.field(name=name, default=default)
