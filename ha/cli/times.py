"""Parses times given on the command line, and formats times of brokers."""

from __future__ import annotations

import time
from datetime import datetime


def time_ms(text: str) -> int:
    """Parses ISO 8601 (local time unless it has a UTC offset) or ms since 1970 (9 to 18 digits); returns ms since 1970.

    Raises ValueError if `text` is neither, and ValueError or OverflowError if the time is out of range.
    """
    if text.isdecimal() and text.isascii() and 9 <= len(text) < 19:
        return int(text)
    return int(datetime.fromisoformat(text).astimezone().timestamp() * 1000)


def local_time(time_ms: int) -> str:
    """Formats ms since 1970 in local time; as a number if it is out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ms / 1000))
    except (OverflowError, OSError):
        return f"{time_ms} ms"
