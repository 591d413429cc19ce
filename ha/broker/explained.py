"""Counts puts that are not answered PUT_OK, by status and cause, and logs them for operators.

Producers get the remark of each answer. The log has at most one line per minute for each status and cause, with the
number of puts since the previous line and the remark of the last one.
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
    """Counts the puts of one broker that were not answered PUT_OK since its start, by status and cause."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[PutStatus, Cause]] = Counter()
        self._log_limiter = LogRateLimiter()

    def note(self, status: PutStatus, cause: Cause, remark: str, count: int) -> None:
        """Records that `count` puts were answered `status`, with `remark`."""
        self.counts[status, cause] += count
        puts = self._log_limiter.admit((status, cause), trio.current_time(), count)
        if puts:
            logger.warning("put.not_ok status=%s cause=%s puts=%d remark=%r", status.name, cause.value, puts, remark)
