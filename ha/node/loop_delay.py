"""How late the event loop is, all the time: five times a second a task looks how much later than due it runs.

What holds it, and for how long exactly, /loop tells while somebody asks (ha/admin/loop_watch.py).
"""

from __future__ import annotations

from typing import NoReturn

import trio

from ha.histogram import Histogram

BEAT_S = 0.2


class LoopDelay:
    """`serve` looks; `times` has what it saw since it began."""

    def __init__(self) -> None:
        self.times = Histogram()

    async def serve(self) -> NoReturn:
        """Look until cancelled."""
        while True:
            due = trio.current_time() + BEAT_S
            await trio.sleep_until(due)
            self.times.observe(max(0.0, trio.current_time() - due))
