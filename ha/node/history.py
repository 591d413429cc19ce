"""Keeps time series in memory for the dashboard: the lag of consumer groups over an hour, and message rates of topics.

Samples are taken every SAMPLE_S seconds. Groups and topics beyond the limits in docs/limits.md have no series.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

import trio

from ha.admin.dashboard.source import LagPoint
from ha.broker.tables import Tables
from ha.store.message_store import MessageStore

from .group_progress import GroupProgress, topics_of, yield_sometimes

SAMPLE_S = 15.0
SAMPLE_COUNT_MAX = 240
"""Maximum number of samples of a group's lag that are kept: one hour."""
RATE_SAMPLE_COUNT = 5
"""Number of samples of a topic's message count that are kept: its rate is computed over one minute, from the first to
the last."""
GROUP_COUNT_MAX = 256
TOPIC_COUNT_MAX = 1024
QUEUE_COUNT_MAX = 16_384
"""Maximum number of queues that one sample reads for groups, and again for topics."""


class _Series:
    """The newest samples of a number, with their times by Trio's clock and by the wall clock (in ms)."""

    def __init__(self) -> None:
        self._times_s = array("d")
        self._times_ms = array("q")
        self._values = array("q")

    def add(self, time_s: float, at_ms: int, value: int) -> None:
        self._times_s.append(time_s)
        self._times_ms.append(at_ms)
        self._values.append(value)
        del self._times_s[:-SAMPLE_COUNT_MAX], self._times_ms[:-SAMPLE_COUNT_MAX], self._values[:-SAMPLE_COUNT_MAX]

    def points(self) -> Sequence[LagPoint]:
        return [LagPoint(*row) for row in zip(self._times_s, self._times_ms, self._values, strict=True)]


class History:
    """Samples a broker's groups and topics while `serve` runs."""

    def __init__(self, store: MessageStore, tables: Tables, *, wall_clock_ms: Callable[[], int]) -> None:
        self._store = store
        self._tables = tables
        self._wall_clock_ms = wall_clock_ms
        self._progress = GroupProgress(store, tables)
        self._lags: dict[str, _Series] = {}
        self._counts: dict[str, deque[tuple[float, int]]] = {}

    def lag(self, group: str) -> Sequence[LagPoint]:
        """Returns the lag of a group over the last hour, oldest first; empty if the group is not sampled."""
        series = self._lags.get(group)
        return () if series is None else series.points()

    def per_s(self, topic: str) -> float | None:
        """Returns the number of messages per second that a topic received in the last minute; None if unknown."""
        points = self._counts.get(topic)
        if points is None or len(points) < 2:
            return None
        (first_at, first), (last_at, last) = points[0], points[-1]
        return max(0, last - first) / (last_at - first_at)

    async def serve(self) -> None:
        """Samples until cancelled."""
        while True:
            await self.take_sample()
            await trio.sleep(SAMPLE_S)

    async def take_sample(self) -> None:
        """Takes a sample of all groups and topics up to the limits, and drops those that no longer exist."""
        await self._sample_groups()
        await self._sample_topics()

    async def _sample_groups(self) -> None:
        committed = await self._progress.topics_by_group()
        self._lags = {group: series for group, series in self._lags.items() if group in committed}
        queue_count, sampled = 0, []
        for number, (group, committed_topics) in enumerate(committed.items()):
            await yield_sometimes(number)
            if group not in self._lags and len(self._lags) >= GROUP_COUNT_MAX:
                continue
            topics = topics_of(self._tables.clients.consumer_group(group), committed_topics)
            count = sum(map(self._progress.readable_queues, topics))
            if queue_count + count > QUEUE_COUNT_MAX:
                continue
            queue_count += count
            lag = await self._progress.lag(group, topics)
            self._lags.setdefault(group, _Series()).add(trio.current_time(), self._wall_clock_ms(), lag)
            sampled.append(group)
        self._lags = {group: self._lags[group] for group in sampled}

    async def _sample_topics(self) -> None:
        table = self._tables.topics.table
        self._counts = {topic: points for topic, points in self._counts.items() if topic in table}
        queue_count, sampled = 0, []
        for topic, config in list(table.items()):
            if topic not in self._counts and len(self._counts) >= TOPIC_COUNT_MAX:
                continue
            if queue_count + config.write_queue_nums > QUEUE_COUNT_MAX:
                continue
            queue_count += config.write_queue_nums
            end = 0
            for queue_id in range(config.write_queue_nums):
                await yield_sometimes(queue_id)
                queue = self._store.queues.get(topic, queue_id)
                end += 0 if queue is None else queue.max_offset
            points = self._counts.setdefault(topic, deque(maxlen=RATE_SAMPLE_COUNT))
            points.append((trio.current_time(), end))
            sampled.append(topic)
        self._counts = {topic: self._counts[topic] for topic in sampled}
