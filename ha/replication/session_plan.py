"""What a slave's client decides before a connection, and what the connection's session returns when it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum

import msgspec

from ha.replication.statistics import Condition


class Retry(Enum):
    """How the next connection, made at once, differs."""

    FROM_LAST_SEGMENT = "from_last_segment"
    """The master has no byte at offset 1: send a request of 0."""
    WITHOUT_QUESTION = "without_question"
    """The session only asked, and found nothing that keeps this slave from following."""
    WITHOUT_OVERLAP = "without_overlap"
    """The master sends no byte of the segment before that of the log's end: request the end itself, unless the master
    says that its log begins before that."""


class SessionEnd(msgspec.Struct, frozen=True):
    """Why a session ended, and what follows from it."""

    condition: Condition
    detail: str
    first_offset: int | None = None
    """Where the master's log begins; set with OUT_OF_RANGE."""
    retry: Retry | None = None
    """None: wait before the next connection, and make it in the same way."""


class SessionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one connection does before it follows the master."""

    asks_range: bool
    asks_only: bool = False
    """End after the question: an empty slave that asked can't follow on the same connection, as its request of 0 has
    another meaning there. It asks why the last connection was closed: a master may demand haSharedSecret."""
    tries_first_byte: bool
    compares_overlap: bool
    """False: the master sent nothing before the log's end, so compare only if it says that its log begins before."""
    master_min_offset: Callable[[], Awaitable[int | None]]
    watches_min_offset: bool
