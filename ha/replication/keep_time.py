"""The timer of one HA connection, on either side: wakes the sender for heartbeats, and detects a silent peer."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from ha.replication.options import TICK_S, HAOptions


async def keep_time(
    options: HAOptions, last_read_at: Callable[[], float], heartbeat_due: Callable[[], float], wake: Callable[[], None]
) -> None:
    """Calls `wake` when a heartbeat is due; returns when nothing was read for longer than the housekeeping interval.
    `last_read_at` and `heartbeat_due` return times of Trio's clock.

    A single timer, which gets both times when it fires. Separate timers would have to be reset with each frame.
    """
    silence_s = options.housekeeping_interval_s + TICK_S
    woken_until = -math.inf
    while True:
        await trio.sleep_until(min(last_read_at() + silence_s, max(heartbeat_due(), woken_until)))
        now = trio.current_time()
        if now >= last_read_at() + silence_s:
            return
        if now >= heartbeat_due():
            # Only once per interval: a sender that is busy needs no wake-up, as what it sends counts as a heartbeat.
            woken_until = now + options.heartbeat_interval_s + TICK_S
            wake()
