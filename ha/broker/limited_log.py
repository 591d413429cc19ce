"""Rate-limited log lines of background services."""

from __future__ import annotations

import logging

import trio

from ha.log_rate_limiter import LogRateLimiter


class LimitedLog:
    """Writes to `logger` at `level`, at most one line per event and minute, and limited in total (`LogRateLimiter`).

    Each line ends with `times=`, the number of occurrences that it stands for.
    """

    def __init__(self, logger: logging.Logger, level: int = logging.ERROR) -> None:
        self._logger = logger
        self._level = level
        self._limiter = LogRateLimiter()

    def write(self, template: str, *arguments: object, key: object = None) -> None:
        """Logs one occurrence. `key` distinguishes events with the same template."""
        times = self._limiter.admit((template, key), trio.current_time())
        if times:
            self._logger.log(self._level, template + " times=%d", *arguments, times)
