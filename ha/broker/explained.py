"""Puts that are not answered PUT_OK, told of where an operator looks: counted by status and cause, and logged.

Each answer's remark says why to its producer; this says it to whoever runs the broker. A line for each status and cause
comes once a minute at most, with how many puts it stands for and the remark of the last of them.
"""

from __future__ import annotations

import logging
from collections import Counter

import trio

from ha.causes import Cause
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol.codes import PutStatus

logger = logging.getLogger(__name__)


class Explained:
    """One broker's, since its start."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[PutStatus, Cause]] = Counter()
        self._log_limiter = LogRateLimiter()

    def note(self, status: PutStatus, cause: Cause, remark: str, count: int) -> None:
        """`count` puts were answered `status`, with `remark`."""
        self.counts[status, cause] += count
        puts = self._log_limiter.admit((status, cause), trio.current_time(), count)
        if puts:
            logger.warning("put_not_ok status=%s cause=%s puts=%d remark=%r", status.name, cause.value, puts, remark)
