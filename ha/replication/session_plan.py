"""Plan and result of one connection of a slave: HAClient makes the plan, HASession returns the result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum

import msgspec

from ha.replication.statistics import Condition


class Retry(Enum):
    """The way in which the next connection, which is made at once, differs from the last one."""

    FROM_LAST_SEGMENT = "from_last_segment"
    """The master has no byte at offset 1: request 0, which means its last segment."""
    WITHOUT_QUESTION = "without_question"
    """The session was for the range question only (`asks_only`), and showed nothing that prevents this slave from
    following: don't ask again."""
    WITHOUT_OVERLAP = "without_overlap"
    """The comparison would begin in an earlier segment than the one in which this slave's log ends, but the master
    sends nothing from there. Request the log's end without a comparison, unless the master states that its log begins
    before that end."""
    WITHOUT_TORN_RECORD = "without_torn_record"
    """The end of the log here contained a torn record, and was truncated before it."""


class SessionEnd(msgspec.Struct, frozen=True):
    """The condition in which a session with the master ended, and how the next connection is made."""

    condition: Condition
    detail: str
    first_offset: int | None = None
    """Physical offset at which the master's log begins, if it is known"""
    torn_at: int | None = None
    """Physical offset of a torn record in the log here (`Overlap.torn_at`), before which the log is truncated"""
    retry: Retry | None = None
    """None: wait before the next connection, and make it in the same way."""


class SessionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the beginning of one connection of a slave, before it follows the master."""

    is_member: bool = False
    """Whether this slave is a member of a failover group: it has truncated its log to a prefix of the master's before
    the ends are compared, so the master's log does not end before the log here."""
    asks_range: bool
    answer_timeout_s: float
    """Timeout for the answer to the range question"""
    asks_only: bool = False
    """End the session after the range question. An empty slave that is to start at the last segment asks only because
    the answer may show why the last connection was closed: the master may demand haSharedSecret. It can't follow on a
    connection on which it asked, because its request of 0 means the first offset there."""
    tries_first_byte: bool
    compares_overlap: bool
    """Whether to compare the log's end. False after WITHOUT_OVERLAP: then the end is compared only if the master states
    that its log begins before it."""
    master_min_offset: Callable[[], Awaitable[int | None]]
    """Asks the master for the first physical offset of its log over another connection, such as remoting; returns None
    if it is not known now"""
    watches_min_offset: bool
    """Whether to call `master_min_offset` after each heartbeat, to detect that the position here is deleted there"""
