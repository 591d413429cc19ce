"""Parses times given on the command line."""

from __future__ import annotations

from datetime import datetime


def time_ms(text: str) -> int:
    """Parses ISO 8601 (local time if without UTC offset) or ms since 1970, and returns ms since 1970. ValueError."""
    if text.isdecimal() and text.isascii() and len(text) >= 9:
        return int(text)
    return int(datetime.fromisoformat(text).astimezone().timestamp() * 1000)
