"""Finds which store directories belong to one broker: the broker name that a store records, and whether two stores
have copies of the same log."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec

from ha.arrow.segments import Segments, is_set_aside
from ha.protocol.store_files import BROKER_FILE, BrokerFile

_COMPARED_BYTES = 256
"""Number of bytes compared: more than the fixed fields of a record, among them its physical offset, store time and
store host."""


def stored_broker_name(path: Path) -> str | None:
    """Returns the broker name that halog recorded in a store; None if there is none, or its file is unreadable."""
    try:
        return msgspec.json.decode((path / "config" / BROKER_FILE).read_bytes(), type=BrokerFile).broker_name or None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def is_same_log(one: Path, other: Path) -> bool | None:
    """Returns whether two stores have copies of the same log: the same bytes at the first physical offset that both
    logs hold. None if the logs have no offset in common. Raises StoreUnreadable or OSError if a log can't be read."""
    if not all((path / "commitlog").is_dir() or is_set_aside(path / "commitlog") for path in (one, other)):
        return None
    with closing(Segments(one / "commitlog")) as first, closing(Segments(other / "commitlog")) as second:
        if not len(first) or not len(second):
            return None
        begin = max(first.min_offset, second.min_offset)
        read = [(segments.read(begin, _COMPARED_BYTES) or b"").rstrip(b"\0") for segments in (first, second)]
    shorter, longer = sorted(read, key=len)
    return longer.startswith(shorter) if shorter else None  # a log may end within the compared bytes
