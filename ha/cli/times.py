"""Moments as people and programs write them."""

from __future__ import annotations

from datetime import datetime


def time_ms(text: str) -> int:
    """Return a time in ms since 1970: ISO 8601 (without an offset: local time), or a number of ms. ValueError."""
    if text.isdecimal() and text.isascii() and len(text) >= 9:
        return int(text)
    return int(datetime.fromisoformat(text).astimezone().timestamp() * 1000)
