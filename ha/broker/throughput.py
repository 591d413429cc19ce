"""Message rates: counters that puts, pulls and pops add to, sampled every few seconds.

Rates are those that RocketMQ's tools show: over the last 10, 60 and 600 s, and per group and topic over the last
minute. Sources: StoreStatsService, BrokerStats, BrokerStatsManager.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import trio

SAMPLE_INTERVAL_S = 5.0
"""Interval between samples, in seconds: rates are at most this old. RocketMQ: 1 s"""
WINDOWS_S = (10, 60, 600)
SLICE_S = 10.0
SLICE_COUNT = 6
"""Number of slices per group rate: one minute in all."""


class GroupReads:
    """Counters of pulls and pops, in total and, for at most `key_count_max` pairs, per group and topic."""

    def __init__(self, *, key_count_max: int) -> None:
        self._key_count_max = key_count_max
        self.found_count = 0
        """Number of reads of a queue, by pulls and pops, that returned messages"""
        self.missed_count = 0
        """Number of pulls that returned no message"""
        self.message_count = 0
        """Number of messages returned by pulls and pops"""
        self._slices: deque[dict[tuple[str, str], int]] = deque([{}], maxlen=SLICE_COUNT + 1)
        self._slice_began = 0.0
        self._positions: dict[tuple[str, str], dict[int, int]] = {}

    def note(self, group: str, topic: str, queue_id: int, next_offset: int, message_count: int) -> None:
        """Counts a pull or pop that returned `message_count` messages of a queue, the last one before queue offset
        `next_offset`."""
        self.found_count += 1
        self.message_count += message_count
        key = group, topic
        current = self._slices[-1]
        positions = self._positions.get(key)
        if positions is None:
            if len(self._positions) >= self._key_count_max:
                return
            positions = self._positions[key] = {}
        positions[queue_id] = next_offset
        current[key] = current.get(key, 0) + message_count

    def position(self, group: str, topic: str, queue_id: int) -> int:
        """Returns the queue offset at which the group's last read of the queue that returned messages ended; -1 if
        there was none since the broker's start."""
        return self._positions.get((group, topic), {}).get(queue_id, -1)

    def per_s(self, group: str, topic: str) -> float:
        """Returns how many messages per second the group read of a topic, over the last six complete slices (one
        minute)."""
        return sum(each.get((group, topic), 0) for each in list(self._slices)[:-1]) / (SLICE_S * SLICE_COUNT)

    def rotate(self, now: float) -> None:
        """Starts a new slice if the last one is over. `now`: Trio's clock."""
        if now - self._slice_began >= SLICE_S:
            self._slice_began = now
            self._slices.append({})

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Drops the read positions of a deleted topic or group."""
        for key in [key for key in self._positions if key[0] == group or key[1] == topic]:
            del self._positions[key]


class _Sample(NamedTuple):
    at: float
    put: int
    found: int
    missed: int
    transferred: int


class DayTotals(NamedTuple):
    """Number of messages since the broker's start, as of 0:00 yesterday, 0:00 today, and now."""

    yesterday_morning: int
    today_morning: int
    now: int


class Throughput:
    """Rates from samples of the counters, taken by `serve`."""

    def __init__(self, put_count: Callable[[], int], reads: GroupReads, *, wall_clock_ms: Callable[[], int]) -> None:
        self._put_count = put_count
        self._reads = reads
        self._wall_clock_ms = wall_clock_ms
        self._samples: deque[_Sample] = deque(maxlen=round(WINDOWS_S[-1] / SAMPLE_INTERVAL_S) + 1)
        self._day = self._today()
        self._mornings = [(0, 0), (0, 0)]
        """Totals (messages stored, messages returned to consumers) as of 0:00 yesterday and as of 0:00 today"""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Takes a sample every SAMPLE_INTERVAL_S until cancelled."""
        task_status.started()
        while True:
            self.take_sample()
            await trio.sleep(SAMPLE_INTERVAL_S)

    def per_s(self) -> dict[str, str]:
        """Returns the rates per second by RocketMQ's names. Each is text with one rate for each of WINDOWS_S ("1.5 0.2
        0.1"); the rate of a window that is not complete yet is empty."""
        transferred = self._rates(4)
        return {
            "putTps": self._rates(1),
            "getFoundTps": self._rates(2),
            "getMissTps": self._rates(3),
            "getTotalTps": self._rates(2, 3),
            "getTransferedTps": transferred,  # as 4.9's tools spell it
            "getTransferredTps": transferred,
        }

    def puts_by_day(self) -> DayTotals:
        """Returns the totals of messages stored."""
        return DayTotals(self._mornings[0][0], self._mornings[1][0], self._put_count())

    def gets_by_day(self) -> DayTotals:
        """Returns the totals of messages that pulls and pops returned."""
        return DayTotals(self._mornings[0][1], self._mornings[1][1], self._reads.message_count)

    def _rates(self, *columns: int) -> str:
        return " ".join(self._rate(window_s, columns) for window_s in WINDOWS_S)

    def _rate(self, window_s: int, columns: tuple[int, ...]) -> str:
        back = round(window_s / SAMPLE_INTERVAL_S)
        if len(self._samples) <= back:
            return ""
        first, last = self._samples[-back - 1], self._samples[-1]
        return str(sum(last[column] - first[column] for column in columns) / (last.at - first.at))

    def take_sample(self) -> None:
        """Takes a sample of the counters."""
        reads, now = self._reads, trio.current_time()
        reads.rotate(now)
        self._samples.append(
            _Sample(now, self._put_count(), reads.found_count, reads.missed_count, reads.message_count)
        )
        today = self._today()
        if today != self._day:
            self._day = today
            self._mornings = [self._mornings[1], (self._put_count(), reads.message_count)]

    def _today(self) -> tuple[int, int]:
        now = time.localtime(self._wall_clock_ms() // 1000)
        return now.tm_year, now.tm_yday
