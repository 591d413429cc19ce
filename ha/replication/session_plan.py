"""What a slave's client and one session of it tell each other: the plan before, the end after."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from ha.replication.statistics import Condition


class SessionEnd(msgspec.Struct, frozen=True):
    """Why a session ended, and what follows from it."""

    condition: Condition
    detail: str
    first_offset: int | None = None
    """With OUT_OF_RANGE: where the master's log begins."""
    has_refused_first_byte: bool = False
    """The master has no byte at offset 1: request 0 next."""
    has_only_asked: bool = False
    """Nothing was found out that keeps this slave from connecting again as usual."""
    has_refused_overlap: bool = False
    """The master sends no byte before our end, the begin of a segment: request the end itself next, unless it says that
    its log begins before that."""


class SessionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the client has decided before connecting."""

    asks_range: bool
    asks_only: bool = False
    """End after the question: an empty slave can't go on with a connection on which it asked, as its request of 0 means
    another offset there. It asks why the last one was closed: a master may demand haSharedSecret."""
    tries_first_byte: bool
    compares_overlap: bool
    """False: the master sent nothing before our end, so compare only if it says that its log begins before that."""
    master_min_offset: Callable[[], Awaitable[int | None]]
    watches_min_offset: bool
