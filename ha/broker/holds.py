"""Long polling: requests that found nothing yet, held until a message arrives or their time is up.

`Holds` enforces their limits and deadlines, for pulls in this module and for pops in pop/pop_holds.py. A hold ends when
it is woken, at its deadline, or when its connection closes (then without an answer). Deadlines are exact: they are in
one heap with a timer.

A held pull is woken by the arrival of a message in its queue, at its offset or later, with a selected tag hash. A pull
with a condition on properties is woken by every message at its offset or later, and held again if none is selected.
Arrivals come in batches from the store's dispatch. RocketMQ checks deadlines only every 5 s, so it answers a pull that
finds nothing up to 5 s late (PullRequestHoldService).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import Generic, TypeVar

import msgspec
import trio

from ha.broker.filters import Selection
from ha.poller import TIME_SLICE_S
from ha.protocol.headers import PullMessageRequest
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection
from ha.store.dispatch import Arrival

STALE_COUNT_MIN = 64
"""The heap of deadlines is rebuilt without outdated entries when it has more entries than twice the number of current
holds plus STALE_COUNT_MIN."""


class Hold(msgspec.Struct, eq=False, kw_only=True):
    """One held request. To save memory, `command` has no ext fields and no body.

    deadline: by Trio's clock.
    is_waiting: true from `Holds.add` until it is woken, expired or dropped.
    """

    connection: RemotingConnection
    command: RemotingCommand
    deadline: float
    is_waiting: bool = False


HoldT = TypeVar("HoldT", bound=Hold)


class Holds(ABC, Generic[HoldT]):
    """The held requests: at most `hold_count_max` in all, and `hold_count_per_connection_max` of each connection.

    `resume` is called with each hold that was woken or expired. It reads again, and then either answers the request or
    holds it again.
    """

    def __init__(
        self,
        resume: Callable[[HoldT], Awaitable[None]],
        *,
        hold_count_max: int,
        hold_count_per_connection_max: int = 4096,
    ) -> None:
        self._resume = resume
        self._hold_count_max = hold_count_max
        self._hold_count_per_connection_max = hold_count_per_connection_max
        self._by_connection: dict[RemotingConnection, dict[HoldT, None]] = {}
        self._deadlines: list[tuple[float, int, HoldT]] = []
        self._sequence = count()
        self._woken: list[HoldT] = []
        self._hold_count = 0
        self._wake = trio.Event()
        self._timer_at = 0.0

    def __len__(self) -> int:
        return self._hold_count

    @abstractmethod
    def _enter(self, hold: HoldT) -> None:
        """Adds a hold to those that arrivals can wake."""

    @abstractmethod
    def _leave(self, hold: HoldT) -> None:
        """Reverses `_enter`."""

    def _on_skipped(self, hold: HoldT) -> None:
        """Called instead of `resume` for a hold that was woken or expired, if its connection is closed by then."""

    def add(self, hold: HoldT) -> bool:
        """Holds a request; returns False if a limit is reached, or the connection is closed."""
        connection = hold.connection
        if connection.is_closed or self._hold_count >= self._hold_count_max:
            return False
        mine = self._by_connection.get(connection)
        if mine is None:
            mine = self._by_connection[connection] = {}
            connection.on_close(lambda: self.drop(connection))
        if len(mine) >= self._hold_count_per_connection_max:
            return False
        mine[hold] = None
        hold.is_waiting = True
        self._enter(hold)
        self._hold_count += 1
        self._schedule(hold)
        return True

    def resume_by(self, hold: HoldT, deadline: float) -> None:
        """Moves the deadline of a hold to `deadline` (Trio's clock), if that is earlier."""
        if deadline < hold.deadline:
            hold.deadline = deadline
            self._schedule(hold)

    def _schedule(self, hold: HoldT) -> None:
        heappush(self._deadlines, (hold.deadline, next(self._sequence), hold))
        if len(self._deadlines) > 2 * self._hold_count + STALE_COUNT_MIN:
            waiting = chain.from_iterable(self._by_connection.values())
            self._deadlines = [(each.deadline, next(self._sequence), each) for each in waiting]
            heapify(self._deadlines)
        if hold.deadline < self._timer_at:
            self._wake.set()

    def wake(self, holds: Iterable[HoldT]) -> None:
        """Ends these holds, which must be waiting; `serve` resumes them soon. Never blocks."""
        for hold in list(holds):
            self._end(hold)
            self._woken.append(hold)
        if self._woken:
            self._wake.set()

    def drop(self, connection: RemotingConnection) -> None:
        """Drops the holds of a closed connection, without an answer."""
        for hold in self._by_connection.get(connection, ()):
            hold.is_waiting = False
            self._leave(hold)
            self._hold_count -= 1
        self._by_connection.pop(connection, None)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Resumes requests that were woken or reached their deadline, until cancelled."""
        task_status.started()
        while True:
            self._wake = trio.Event()
            due, self._woken = self._woken, []
            due += self._take_expired()
            slice_ends = trio.current_time() + TIME_SLICE_S
            for hold in due:
                if hold.connection.is_closed:
                    self._on_skipped(hold)
                else:
                    await self._resume(hold)
                if trio.current_time() >= slice_ends:
                    await trio.lowlevel.checkpoint()
                    slice_ends = trio.current_time() + TIME_SLICE_S
            if due:
                await trio.lowlevel.checkpoint()
                continue
            self._timer_at = self._deadlines[0][0] if self._deadlines else float("inf")
            with trio.move_on_at(self._timer_at):
                await self._wake.wait()

    def _take_expired(self) -> list[HoldT]:
        now = trio.current_time()
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].is_waiting):
            hold = heappop(self._deadlines)[2]
            if hold.is_waiting:
                self._end(hold)
                expired.append(hold)
        return expired

    def _end(self, hold: HoldT) -> None:
        hold.is_waiting = False
        self._hold_count -= 1
        self._leave(hold)
        mine = self._by_connection.get(hold.connection)
        if mine is not None:
            mine.pop(hold, None)  # if it is empty now, it stays: `add` has registered the callback


class PullHold(Hold):
    """One held pull. To save memory, `request` has no subscription or expression type; `selection` replaces them."""

    request: PullMessageRequest
    topic: str
    queue_id: int
    queue_offset: int
    selection: Selection


class PullHolds(Holds[PullHold]):
    """The held pulls."""

    def __init__(self, resume: Callable[[PullHold], Awaitable[None]], **limits: int) -> None:
        super().__init__(resume, **limits)
        self._by_queue: dict[tuple[str, int], dict[PullHold, None]] = {}

    def on_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Wakes pulls waiting for these messages. Called by the store once per dispatched batch; never blocks."""
        by_queue = self._by_queue
        if not by_queue:
            return
        for arrival in arrivals:
            holds = by_queue.get((arrival.topic, arrival.queue_id))
            if holds:
                self.wake(
                    hold
                    for hold in list(holds)
                    if arrival.max_queue_offset > hold.queue_offset and wants(hold.selection, arrival.tags_codes)
                )

    def wake_all(self, topic: str | None = None) -> None:
        """Wakes the pulls of `topic`, or all if it is None, after a change other than an arrival."""
        for key, holds in list(self._by_queue.items()):
            if topic in (None, key[0]):
                self.wake(holds)

    def _enter(self, hold: PullHold) -> None:
        self._by_queue.setdefault((hold.topic, hold.queue_id), {})[hold] = None

    def _leave(self, hold: PullHold) -> None:
        key = (hold.topic, hold.queue_id)
        holds = self._by_queue[key]
        holds.pop(hold, None)
        if not holds:
            del self._by_queue[key]


def wants(selection: Selection, tags_codes: Iterable[int]) -> bool:
    """Returns whether one of these tag hashes is selected; True for a condition on properties."""
    wanted = selection.tags_codes
    return wanted is None or any(code in wanted for code in tags_codes)
