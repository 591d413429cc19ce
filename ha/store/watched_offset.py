"""A physical offset that only grows and that tasks can wait on.

Not trio_util.AsyncValue, which evaluates one predicate per waiter at each set: an offset is raised once per chunk of
messages and mostly nobody waits for a particular value, so raising one with no waiter is an integer comparison.
"""

from __future__ import annotations

from collections.abc import Callable

import trio


class WatchedOffset:
    """An offset in bytes with waiters. Raised by its one owner, read and awaited by anyone.

    Raising wakes every waiting task once; a woken task looks at the value and waits again if it is still too small.
    Who has something better to do than wait is called instead.
    """

    __slots__ = ("_callbacks", "_lot", "_reset_count", "value")

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._reset_count = 0
        self._callbacks: tuple[Callable[[], None], ...] = ()
        self._lot = trio.lowlevel.ParkingLot()

    def raise_to(self, value: int) -> bool:
        """Set the offset to `value` if that is larger, waking all waiters; tell whether it was."""
        if value <= self.value:
            return False
        self.value = value
        if self._lot:
            self._lot.unpark_all()
        for callback in self._callbacks:
            callback()
        return True

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each raise and reset, until `unsubscribe`. It must not raise."""
        self._callbacks += (callback,)

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        """Call it no more."""
        self._callbacks = tuple(each for each in self._callbacks if each != callback)

    def reset(self, value: int) -> None:
        """Set the offset to any `value`, lower ones too (truncation, recovery), and end every wait."""
        self.value = value
        self._reset_count += 1
        self._lot.unpark_all()
        for callback in self._callbacks:
            callback()

    async def wait_beyond(self, offset: int) -> int:
        """Wait until the offset is greater than `offset`, or is reset, and return it. A checkpoint in every case.

        After a reset the offset may be smaller: what the caller waited for may then never come.
        """
        if self.value > offset:
            await trio.lowlevel.checkpoint()
            return self.value
        reset_count = self._reset_count
        while self.value <= offset and self._reset_count == reset_count:
            await self._lot.park()
        return self.value
