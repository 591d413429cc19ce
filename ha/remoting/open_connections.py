"""The open connections of a server: limits their number, evicts unused ones for new ones, and logs why they ended."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import msgspec
import trio

from ha.log_rate_limiter import LogRateLimiter


class ServedConnection(Protocol):
    """The part of a server's connection that `OpenConnections` uses."""

    peer: tuple[str, int]
    opened_at: float

    @property
    def is_unused(self) -> bool:
        """Whether the connection is open and the peer has sent no request yet."""

    def evict(self) -> None:
        """Closes the connection to make room for another one."""


ConnectionT = TypeVar("ConnectionT", bound=ServedConnection)


class ConnectionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the number of connections, in total and from one IP address, and the names of both limits in log lines.

    `evictable_after_s`: age in seconds from which an unused connection is closed if another one needs its place.
    """

    total_max: int
    per_host_max: int
    evictable_after_s: float
    total_name: str
    per_host_name: str


class OpenConnections(Generic[ConnectionT]):
    """Admits connections, and logs refused and ended ones to the server's logger.

    `refused` and `ended` are format strings of log lines, the first with the fields (host, limit, times), the second
    with (host, port, cause, detail, times). `times` is the number of such events since the last such line.
    """

    def __init__(self, logger: logging.Logger, counts: ConnectionCounts, *, refused: str, ended: str) -> None:
        self.all: dict[ConnectionT, None] = {}
        """Open connections, in the order in which they were opened. For reading only."""
        self._logger = logger
        self._refused_line = refused
        self._ended_line = ended
        self._counts = counts
        self._count_by_host: Counter[str] = Counter()
        self._log_limiter = LogRateLimiter()

    def make_room(self, host: str) -> bool:
        """Returns whether one more connection of `host` can be served, after evicting one if necessary. Logs a refusal,
        rate-limited."""
        counts = self._counts
        is_host_full = self._count_by_host[host] >= counts.per_host_max
        if not is_host_full and len(self.all) < counts.total_max:
            return True
        latest = trio.current_time() - counts.evictable_after_s
        for each in self.all:
            if each.opened_at > latest:
                break
            if each.is_unused and (not is_host_full or each.peer[0] == host):
                each.evict()
                return True
        limit = counts.per_host_name if is_host_full else counts.total_name
        if times := self._log_limiter.admit((host if is_host_full else "", limit), trio.current_time()):
            self._logger.warning(self._refused_line, host, limit, times)
        return False

    @contextmanager
    def added(self, connection: ConnectionT) -> Iterator[None]:
        """Includes a connection in `all` and in the count of its host during the block."""
        host = connection.peer[0]
        self.all[connection] = None
        self._count_by_host[host] += 1
        try:
            yield
        finally:
            self.all.pop(connection, None)
            self._count_by_host[host] -= 1
            if not self._count_by_host[host]:
                del self._count_by_host[host]

    def log_end(self, connection: ConnectionT, cause: str, detail: str, *, is_expected: bool) -> None:
        """Logs why a connection has ended: as a rate-limited warning, or at debug level if it is expected or
        suppressed."""
        level, times = logging.DEBUG, 1
        if not is_expected:
            times = self._log_limiter.admit((connection.peer[0], cause), trio.current_time())
            level = logging.WARNING if times else logging.DEBUG
        self._logger.log(level, self._ended_line, *connection.peer, cause, detail, times)
