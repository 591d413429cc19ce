"""Formats numbers with units, and times in UTC, for all pages. None is shown as a dash."""

from __future__ import annotations

from datetime import UTC, datetime

NONE = "–"

_TIME_MS_MAX = 253_402_300_799_999
"""Latest time that is shown as a date, in ms: the end of the year 9999. Records can contain any number."""


def count(number: int | None) -> str:
    """Formats a number: 1234567 → 1,234,567."""
    return NONE if number is None else f"{number:,}"


def size(byte_count: int | None) -> str:
    """Formats a size: 1536 → 1.5 KiB."""
    if byte_count is None:
        return NONE
    if abs(byte_count) < 1024:
        return f"{byte_count} B"
    amount, step = byte_count / 1024, 0
    while abs(amount) >= 1000 and step < 4:
        amount, step = amount / 1024, step + 1
    return f"{amount:.{1 if abs(amount) < 100 else 0}f} {'KMGTP'[step]}iB"


def rate(per_s: float | None) -> str:
    """Formats a rate: 12.345 → 12.3; 100 and above without a fraction."""
    if per_s is None:
        return NONE
    return f"{per_s:,.1f}" if 0 < abs(per_s) < 100 else f"{per_s:,.0f}"


def duration(seconds: float | None) -> str:
    """Formats a duration: 0.26 → 0.3 s, 75 → 1 min 15 s, 90,000 → 1 d 1 h."""
    if seconds is None:
        return NONE
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    for unit, name, smaller, smaller_name in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit:,} {name} {rest} {smaller_name}" if rest else f"{whole // unit:,} {name}"
    return f"{whole} s"


def percent(ratio: float) -> str:
    """Formats a ratio: 0.123 → 12 %."""
    return f"{ratio:.0%}".replace("%", " %")


def time_ms(ms: int) -> str:
    """Formats ms since 1970 as 2025-03-09 07:05:01.250 UTC; an invalid time as a number."""
    if not 0 < ms <= _TIME_MS_MAX:
        return f"{ms} ms"
    at = datetime.fromtimestamp(ms // 1000, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}.{ms % 1000:03d} UTC"


def time_s(seconds: float) -> str:
    """Formats seconds since 1970 as 03-09 07:05:01 (UTC), without the year, for recent events."""
    return f"{datetime.fromtimestamp(seconds, UTC):%m-%d %H:%M:%S}"


def iso_ms(ms: int) -> str:
    """Formats ms since 1970 in ISO 8601, for the attribute of <time>; "" for an invalid time."""
    if not 0 < ms <= _TIME_MS_MAX:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def parse_time_ms(text: str) -> int | None:
    """Returns ms since 1970 for a time in ISO 8601 (UTC if it has no offset) or in ms (9 digits or more); None for
    other text."""
    text = text.strip()
    if text.isascii() and text.isdecimal() and len(text) > 8:
        return min(int(text[:18]), _TIME_MS_MAX)
    try:
        at = datetime.fromisoformat(text.removesuffix("UTC").strip())
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None


def capitalised(text: str) -> str:
    """Capitalizes the first letter of a sentence."""
    return text[:1].upper() + text[1:]


FILTERS = {
    "capitalised": capitalised,
    "count": count,
    "size": size,
    "rate": rate,
    "duration": duration,
    "percent": percent,
    "time_ms": time_ms,
    "time_s": time_s,
    "iso_ms": iso_ms,
}
