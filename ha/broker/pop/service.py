"""POP consumption of one broker: its requests, its long polls, and the services that only a master runs."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from ha.broker.core import BrokerCore
from ha.broker.pop.acks import AckRequests
from ha.broker.pop.assignments import Assignments
from ha.broker.pop.pop_log import PopLog
from ha.broker.pop.pop_requests import PopRequests
from ha.broker.pop.revival import Revival
from ha.broker.processor import Family, Take
from ha.broker.role_services import Service
from ha.protocol.codes import RequestCode


class PopStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of the broker's POP consumption.

    in_flight_count: messages in flight, without those of order mode; 0 on a slave.
    next_due_ms: earliest time in the schedule, in ms since the epoch (`PopState.next_due_ms`); None if no message is
    scheduled, and on a slave.
    waiting_count: requests that wait for messages.
    revived_count: messages delivered again since the start.
    lost_count: messages dropped when they were due, because they were gone, unreadable or could not be copied, since
    the start.
    """

    in_flight_count: int
    next_due_ms: int | None
    waiting_count: int
    revived_count: int
    lost_count: int


class GroupInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """The messages in flight of one group, those of order mode included.

    oldest_pop_ms: pop time of the oldest, in ms since the epoch; None if no message is in flight.
    revived_count: messages that were delivered again since the start.
    """

    in_flight_count: int
    oldest_pop_ms: int | None
    revived_count: int


class PopService:
    """Creates and connects the parts of POP consumption."""

    def __init__(self, core: BrokerCore) -> None:
        self._pop_log = PopLog(core)
        self._revival = Revival(core, self._pop_log)
        self.requests = PopRequests(core, self._pop_log)
        self.holds = self.requests.holds
        acks = AckRequests(core, self._pop_log, self.holds)
        self.assignments = Assignments(core)
        self.families: Sequence[Family] = (self.requests, acks, self.assignments)
        self.takes: Sequence[tuple[AbstractSet[int], Take]] = (
            (acks.handlers().keys(), acks.take),
            ({RequestCode.POP_MESSAGE}, self.requests.take),
        )
        self.master_services: Sequence[Service] = (self._pop_log.serve, self._revival.serve)
        self.release = self._pop_log.release
        self._offsets = core.tables.offsets
        self._offsets.on_removed = self._on_removed
        self._offsets.on_reset = self._on_reset

    def statistics(self) -> PopStatistics:
        """Returns a snapshot."""
        state = self._pop_log.state
        return PopStatistics(
            in_flight_count=0 if state is None else state.in_flight_count,
            next_due_ms=None if state is None else state.next_due_ms,
            waiting_count=len(self.holds),
            revived_count=self._revival.revived_counts.total(),
            lost_count=self._revival.lost_count,
        )

    def in_flight_count(self, group: str, topic: str, queue_id: int) -> int:
        """Returns the number of messages that a group has in flight from a queue, without those of order mode; 0 on a
        slave."""
        state = self._pop_log.state
        queue = None if state is None else state.get((group, topic, queue_id))
        return 0 if queue is None else len(queue.batches)

    def group(self, name: str) -> GroupInFlight | None:
        """Returns a group's messages in flight; None if the group has never popped, if this broker is not the master,
        or while it reads its log."""
        state = self._pop_log.state
        queues = [] if state is None else [queue for key, queue in state.queues.items() if key[0] == name]
        if not queues:
            return None
        popped_ms = [batch.pop_time_ms for queue in queues for batch in queue.batches.values()]
        for queue in queues:
            if queue.order is not None:
                popped_ms += [queue.order.pop_time_ms] * queue.order.left_count
        return GroupInFlight(
            in_flight_count=len(popped_ms),
            oldest_pop_ms=min(popped_ms, default=None),
            revived_count=self._revival.revived_counts.get(name, 0),
        )

    def _on_reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Applies a reset of a consumer offset to the queue at once, not at its next pop, so that the new offset is in
        the log before a restart, and a pop that waits gets the messages."""
        state = self._pop_log.state
        queue = None if state is None else state.get((group, topic, queue_id))
        if state is not None and queue is not None:
            if queue.is_busy and queue.next_offset == offset:
                self._offsets.take_reset(group, topic, queue_id)  # by the pop that is reading from there
                queue.committed = offset
            state.reset(queue, offset)
            self.holds.wake_for(queue.key)

    def _on_removed(self, topic: str | None, group: str | None) -> None:
        """Forgets the queues of a deleted topic or group."""
        if group is not None:
            self._revival.revived_counts.pop(group, None)
        state = self._pop_log.state
        if state is None:
            return
        for key in list(state.queues):
            if group == key[0] or topic == key[1]:
                state.remove(key)
