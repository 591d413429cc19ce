"""A physical offset that tasks can wait on.

Used instead of trio_util.AsyncValue, which evaluates one predicate per waiter at each set. An offset is raised once per
chunk of messages, so raising must be cheap: it evaluates no predicates, but wakes all waiters, which check the value
themselves. Without waiters and subscribers it costs little more than an integer comparison.
"""

from __future__ import annotations

from collections.abc import Callable

import trio


class WatchedOffset:
    """An offset in bytes. Raised by its one owner, read and awaited by any task.

    Raising wakes every waiting task once; a woken task checks the value and waits again if it is still too small.
    Callers that can't wait subscribe.
    """

    __slots__ = ("_callbacks", "_lot", "_reset_count", "value")

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._reset_count = 0
        self._callbacks: tuple[Callable[[], None], ...] = ()
        self._lot = trio.lowlevel.ParkingLot()

    def raise_to(self, value: int) -> bool:
        """If `value` is larger than the offset, sets the offset to `value` and wakes all waiters. Returns whether it
        was larger."""
        if value <= self.value:
            return False
        self.value = value
        if self._lot:
            self._lot.unpark_all()
        for callback in self._callbacks:
            callback()
        return True

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Calls `callback` after each raise and reset, until `unsubscribe`. It must not raise."""
        self._callbacks += (callback,)

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        """Stops calling `callback`."""
        self._callbacks = tuple(each for each in self._callbacks if each != callback)

    def reset(self, value: int) -> None:
        """Sets the offset to any `value`, even a lower one (truncation, recovery), and ends every wait."""
        self.value = value
        self._reset_count += 1
        self._lot.unpark_all()
        for callback in self._callbacks:
            callback()

    async def wait_beyond(self, offset: int) -> int:
        """Waits until the offset is greater than `offset`, or is reset, and returns it. Always a checkpoint.

        After a reset the offset may be smaller, and may never reach what the caller waited for.
        """
        if self.value > offset:
            await trio.lowlevel.checkpoint()
            return self.value
        reset_count = self._reset_count
        while self.value <= offset and self._reset_count == reset_count:
            await self._lot.park()
        return self.value
