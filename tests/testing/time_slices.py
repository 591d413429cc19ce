"""Whether work is divided into time slices, between which other tasks run."""

import time

import trio

from ha.poller import TIME_SLICE_S

CALL_COUNT = 50


class BusyWork:
    """CALL_COUNT calls that take half a time slice each."""

    def __init__(self) -> None:
        self._called_count = 0
        self._pass_count = 0

    def call(self) -> None:
        """Does one part of the work."""
        self._called_count += 1
        ends = time.perf_counter() + TIME_SLICE_S / 2
        while time.perf_counter() < ends:
            pass

    async def run_beside(self) -> None:
        """Counts its passes through the event loop, from the first call to the last one."""
        while self._called_count < CALL_COUNT:
            self._pass_count += bool(self._called_count)
            await trio.lowlevel.checkpoint()

    def check(self) -> None:
        """Checks that other tasks ran at least once for every two or three calls."""
        assert self._called_count == CALL_COUNT
        assert self._pass_count >= CALL_COUNT // 3 - 1
