"""Requests 60 GET_TIMER_CHECK_POINT and 61 GET_TIMER_METRICS: what RocketMQ's slaves copy from their master.

    60  the progress of delivery up to which the delivered messages are replicated, in whole seconds (TimerCheckPoint)
    61  JSON: the number of pending messages of each topic

For GET_TIMER_METRICS, RocketMQ keeps counters that each message updates. Here up to `READ_COUNT_MAX` pending messages,
evenly spread over the queue, are read for each answer. If more are pending, the counts are estimates. An answer is
reused for `REMEMBERED_S`. Sources: AdminBrokerProcessor.getTimerCheckPoint and getTimerMetrics, TimerCheckpoint,
TimerMetrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import trio

from ha.broker.core import BrokerCore
from ha.broker.refused import refused_if_unreadable
from ha.broker.timers import SEEN, TIME, TimerService
from ha.protocol import java_json
from ha.protocol.bodies import DataVersion, DelayOffsets, TimerCheckPoint
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection, RequestHandler

PRECISION_MS = 1000
"""Reported times are rounded down to a multiple of this number of ms (RocketMQ: timerPrecisionMs)."""
READ_COUNT_MAX = 4096
REMEMBERED_S = 10.0
"""Time in seconds for which an answer to GET_TIMER_METRICS is reused. RocketMQ's slaves ask every 10 s."""


class _Timing(msgspec.Struct, rename="camel", frozen=True):
    """Pending messages of one topic. `time_stamp`: when they were counted, in ms since the epoch."""

    count: int
    time_stamp: int


class _TimerMetrics(msgspec.Struct, rename="camel", frozen=True):
    """The answer to GET_TIMER_METRICS (61)."""

    data_version: DataVersion
    timing_count: dict[str, _Timing]


class TimerRequests:
    """Answers requests 60 GET_TIMER_CHECK_POINT and 61 GET_TIMER_METRICS."""

    def __init__(
        self, core: BrokerCore, timers: TimerService, *, replicated_progress: Callable[[], DelayOffsets | None]
    ) -> None:
        self._timers = timers
        self._replicated_progress = replicated_progress
        self._wall_clock_ms = core.world.wall_clock_ms
        self._metrics = b""
        self._counted_at = -math.inf
        self._counting = trio.Lock()

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.GET_TIMER_CHECK_POINT: self.check_point,
            RequestCode.GET_TIMER_METRICS: self.metrics,
        }

    async def check_point(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_TIMER_CHECK_POINT (60): answers with the delivery progress; SYSTEM_ERROR if none is replicated yet."""
        progress = self._replicated_progress()
        if progress is None:
            return command.reply(ResponseCode.SYSTEM_ERROR, "The checkpoint is null: no progress is replicated yet")
        table, version = progress.offset_table, progress.data_version or DataVersion()
        read_ms = (table.get(TIME, -1) + 1) // PRECISION_MS * PRECISION_MS
        check_point = TimerCheckPoint(read_ms, table.get(SEEN, 0), version)
        return command.reply(ResponseCode.SUCCESS, body=check_point.encode())

    async def metrics(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_TIMER_METRICS (61): answers with the number of pending messages by topic. Raises RefusedError if the disk
        can't read."""
        async with self._counting:
            if trio.current_time() >= self._counted_at + REMEMBERED_S:
                with refused_if_unreadable():
                    counts = await self._timers.count_topics(READ_COUNT_MAX)
                now_ms = self._wall_clock_ms()
                timings = {topic: _Timing(count, now_ms) for topic, count in sorted(counts.items())}
                self._metrics = java_json.dumps(_TimerMetrics(DataVersion(timestamp=now_ms), timings))
                self._counted_at = trio.current_time()
            return command.reply(ResponseCode.SUCCESS, body=self._metrics)
