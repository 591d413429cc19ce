"""Saves the positions of held queues: periodically, when a queue is revoked or its offset is reset, and at the end.

The saves to one place (a broker set or a file) are made one after the other, because an older position must not
overwrite a newer one. Saves to different places are independent, so that a silent broker delays only its own. A save is
not cancelled with its consumer: an abandoned request could be executed after the next one, and move the position back.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

import anyio
from anyio.abc import TaskGroup

from ha.client.held_queue import HeldQueue
from ha.client.messages import MessageQueue
from ha.client.positions import Positions

_log = logging.getLogger(__name__)


class _Place:
    """The queues whose positions are to be saved in one place, and the task that saves them, if one is running."""

    def __init__(self) -> None:
        self.wanted: dict[MessageQueue, HeldQueue] = {}
        self.in_hand: dict[MessageQueue, HeldQueue] = {}
        """Queues whose positions the task is saving; they stay here if the task is cancelled."""
        self.tried = anyio.Event()
        """Set when the queues in `wanted` have been saved or have failed, or the task has ended."""
        self.scope: anyio.CancelScope | None = None
        """Cancel scope of the task; None while no task is running."""


class Saving:
    """Saves the positions of one consumer."""

    def __init__(self, group: str, positions: Positions, *, interval_s: float, silence_s: float) -> None:
        """`interval_s`: interval of the periodic saves. `silence_s`: `finish` gives up on a place that has saved no
        position for this long."""
        self._group = group
        self._positions = positions
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._places: dict[str, _Place] = defaultdict(_Place)
        self._is_finishing = False
        self._tasks: TaskGroup

    def start(self, tasks: TaskGroup, held: Mapping[MessageQueue, HeldQueue]) -> None:
        """Starts the periodic saves of the `held` queues in `tasks`. Call this before the other methods."""
        self._tasks = tasks
        tasks.start_soon(self._save_periodically, held)

    def want(self, queues: Iterable[HeldQueue]) -> None:
        """Starts saving the positions of `queues`, without waiting."""
        for held in queues:
            place = self._place_of(held)
            place.wanted[held.queue] = held
            if place.scope is None:
                place.scope = anyio.CancelScope(shield=True)
                self._tasks.start_soon(self._save_at, place, place.scope)

    async def save(self, held: HeldQueue) -> None:
        """Saves the position of one queue; returns when this has succeeded or failed."""
        self.want([held])
        await self._place_of(held).tried.wait()

    async def finish(self, queues: Iterable[HeldQueue]) -> None:
        """Saves the positions of `queues`, and waits until pending saves of other queues have ended. Logs the positions
        that could not be saved."""
        self._is_finishing = True
        unsaved = {held.queue: held for held in queues}
        self._mark_lost(unsaved.values())
        self.want(unsaved.values())
        for place in self._places.values():
            self._limit_silence(place)
        for place in self._places.values():
            while place.scope is not None:
                await place.tried.wait()
            unsaved |= place.in_hand | place.wanted
        lost = sorted((queue, held.position) for queue, held in unsaved.items() if held.has_unsaved_position)
        if lost:
            _log.warning("client.positions_not_saved group=%s queues=%s", self._group, lost)

    def _mark_lost(self, queues: Iterable[HeldQueue]) -> None:
        """Marks those positions of `queues` as unsaved that may have been lost since they were saved."""
        for held in queues:
            if held.saved_loss_count != self._positions.loss_count:
                held.saved_offset = None

    def _place_of(self, held: HeldQueue) -> _Place:
        return self._places[self._positions.place_of(held.queue)]

    def _limit_silence(self, place: _Place) -> None:
        if place.scope is not None:
            place.scope.deadline = anyio.current_time() + self._silence_s

    async def _save_periodically(self, held: Mapping[MessageQueue, HeldQueue]) -> None:
        while True:
            await anyio.sleep(self._interval_s)
            self.want(held.values())

    async def _save_at(self, place: _Place, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                while place.wanted:
                    tried, place.tried = place.tried, anyio.Event()
                    place.in_hand, place.wanted = place.wanted, {}
                    try:
                        await self._save_in_hand(place)
                        place.in_hand = {}
                    finally:
                        tried.set()
        finally:
            place.scope = None
            place.tried.set()
            place.tried = anyio.Event()

    async def _save_in_hand(self, place: _Place) -> None:
        self._mark_lost(place.in_hand.values())
        loss_count = self._positions.loss_count
        wanted = [held for held in place.in_hand.values() if held.has_unsaved_position]
        offsets = {held.queue: held.position for held in wanted if held.position is not None}
        restart_counts = {held.queue: held.restart_count for held in wanted}

        def on_saved(queue: MessageQueue) -> None:
            held = place.in_hand[queue]
            # A queue that was restarted meanwhile must save its position again, even if the offset is the same.
            if held.restart_count == restart_counts[queue]:
                held.mark_saved(offsets[queue], loss_count)
            if self._is_finishing:
                self._limit_silence(place)

        await self._positions.save(offsets, on_saved)
