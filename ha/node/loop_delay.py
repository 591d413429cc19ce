"""Measures the delay of the event loop with a task that is due five times a second.

ha/admin/loop_watch.py finds the causes of delays on request.
"""

from __future__ import annotations

from typing import NoReturn

import trio

from ha.histogram import Histogram

BEAT_S = 0.2


class LoopDelay:
    """Measures the delays of the event loop while `serve` runs. `times`: a histogram of the delays, in seconds."""

    def __init__(self) -> None:
        self.times = Histogram()

    async def serve(self) -> NoReturn:
        """Measures until cancelled."""
        while True:
            due = trio.current_time() + BEAT_S
            await trio.sleep_until(due)
            self.times.observe(max(0.0, trio.current_time() - due))
