"""Puts that wait for acknowledgements (RocketMQ: GroupTransferService), without polling or head-of-line blocking.

Requests arrive in batches, directly or over a memory channel. Requests with the same `ack_count` share a heap, in which
each waits until an acknowledgement satisfies it, its deadline passes, or too few slaves are left. RocketMQ handles
requests in order of arrival, so a request that waits delays all later ones.

| ack_count | satisfied when | no longer possible when | then |
| --- | --- | --- | --- |
| 1 (RocketMQ 4.9) | any slave has acknowledged next_offset | no slave is counted | SLAVE_NOT_AVAILABLE |
| n >= 2 (5.x inSyncReplicas, the master included) | n - 1 slaves have | fewer than n - 1 count | FLUSH_SLAVE_TIMEOUT |
| ALL_IN_SYNC (5.x allAckInSyncStateSet) | every slave in sync has | no slave is in sync | FLUSH_SLAVE_TIMEOUT |
| SYNC_STATE_SET (a failover group) | the sync-state set has, by its rules | the term is over | FLUSH_SLAVE_TIMEOUT |

In RocketMQ a request that can no longer be satisfied waits for its deadline, and is answered FLUSH_SLAVE_TIMEOUT after
slaveTimeout. halog answers at once, so that the producer does not wait in vain; the message is stored in either case,
and both statuses say so. The status is that of RocketMQ 4.9 if 4.9 has one for "no slave", otherwise that of 5.x.

If no slave is in sync when an ALL_IN_SYNC request arrives, the answer is PUT_OK, as in RocketMQ: minInSyncReplicas
decides before the put whether that is enough. The loss of a member of the sync-state set fails no put at once: the
member may return in time, or be dropped from the set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec
import trio

from ha.protocol.codes import PutStatus
from ha.store.deadlines import DeadlineTimer
from ha.store.offset_waiters import OffsetWaiters

logger = logging.getLogger(__name__)

ANY_SLAVE = 1
"""Value of ack_count: the acknowledgement of any one slave is enough."""

ALL_IN_SYNC = -1
"""Value of ack_count: every slave that is in sync must acknowledge."""

SYNC_STATE_SET = -2
"""Value of ack_count: as many members of the failover group's sync-state set as its rules require (sync_state.py)."""


class AckRequest(msgspec.Struct, frozen=True):
    """A put that waits until `deadline` (trio clock, seconds) for acknowledgements up to physical offset `next_offset`,
    where its record ends.

    `ack_count`: a constant of this module, or a number of replicas from 2 on, the master included. `on_done` is called
    exactly once with the result; it must not raise or block. A request may be part of a reference cycle, for example
    with the frame of a cancelled task: no `gc=False`.
    """

    next_offset: int
    ack_count: int
    deadline: float
    on_done: Callable[[PutStatus], None]


class Acknowledgements(Protocol):
    """The offsets that slaves have acknowledged; implemented by HAService. Offsets are physical, in bytes."""

    @property
    def push2_slave_max_offset(self) -> int:
        """The highest offset that any slave ever acknowledged."""

    def acknowledged(self) -> list[int]:
        """One offset for each slave that is counted now, highest first."""

    def acknowledged_in_sync(self) -> list[int]:
        """One offset for each slave that is in sync now, highest first."""

    def acknowledged_by_set(self) -> int | None:
        """The offset up to which the sync-state set has acknowledged the log, -1 if there is none; None unless this
        node leads a failover group."""


class GroupTransfer:
    """Completes `AckRequest`s. `run` is its task; call `advance` after each change of the acknowledgements."""

    def __init__(self, slaves: Acknowledgements, *, waiting_count_max: int, batch_count_max: int) -> None:
        """At most `waiting_count_max` requests wait here; further ones are answered FLUSH_SLAVE_TIMEOUT at once.
        `batch_count_max`: capacity of the channel, in batches."""
        self._slaves = slaves
        self._waiting_count_max = waiting_count_max
        self._classes: dict[int, OffsetWaiters[AckRequest]] = {}
        self._timer = DeadlineTimer(self._expire)
        self._is_refusing = False
        self._is_running = False
        self.submit_channel: trio.MemorySendChannel[list[AckRequest]]
        self.submit_channel, self._submitted = trio.open_memory_channel[list[AckRequest]](batch_count_max)

    async def run(self) -> None:
        """Takes batches and ends requests at their deadlines until cancelled. Requests that are then still waiting, or
        still in the channel, are answered FLUSH_SLAVE_TIMEOUT."""
        submitted = self._submitted
        self._is_running = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._timer.run)
                while True:
                    requests = list(await submitted.receive())
                    with suppress(trio.WouldBlock):  # awaiting each batch would cost an iteration of the event loop
                        while True:
                            requests += submitted.receive_nowait()
                    self._take(requests)
        finally:
            self._is_running = False
            self._abandon()
            submitted.close()

    def submit_nowait(self, requests: list[AckRequest]) -> None:
        """Processes a batch directly; queues it in the channel if `run` is not active or batches are queued already.

        Some requests may be completed before this returns. Raises trio.WouldBlock if the channel is full,
        trio.BrokenResourceError if `run` has ended.
        """
        if self._is_running and not self._submitted.statistics().current_buffer_used:
            self._take(requests)
        else:
            self.submit_channel.send_nowait(requests)

    def advance(self) -> None:
        """Completes the requests that are now satisfied, and those that no longer can be."""
        for ack_count, waiters in self._classes.items():
            if waiters:
                self._advance_class(ack_count, waiters)

    @property
    def is_running(self) -> bool:
        """Whether `run` is active."""
        return self._is_running

    @property
    def waiting_count(self) -> int:
        """Number of requests that wait."""
        return sum(len(waiters) for waiters in self._classes.values())

    @property
    def lowest_waiting_offset(self) -> float:
        """The lowest next_offset that a request waits for; infinity if none waits, 0 if batches are still in the
        channel."""
        if self._submitted.statistics().current_buffer_used:
            return 0
        return min((waiters.lowest_offset for waiters in self._classes.values()), default=math.inf)

    def _take(self, batch: list[AckRequest]) -> None:
        if waiters := self._classes.get(ALL_IN_SYNC):  # if no slave is in sync now, those that waited for one fail
            self._advance_class(ALL_IN_SYNC, waiters)
        room = self._waiting_count_max - self.waiting_count
        accepted, refused = (batch, []) if len(batch) <= room else (batch[:room], batch[room:])
        for request in accepted:
            waiters = self._classes.get(request.ack_count)
            if waiters is None:
                assert request.ack_count in (ALL_IN_SYNC, SYNC_STATE_SET) or request.ack_count >= 1, request.ack_count
                waiters = self._classes[request.ack_count] = OffsetWaiters()
            waiters.add(request.next_offset, request.deadline, request)
            self._timer.note(request.deadline)
        for ack_count in {request.ack_count for request in accepted}:
            waiters = self._classes[ack_count]
            if ack_count == ALL_IN_SYNC and not self._slaves.acknowledged_in_sync():
                self._finish(waiters.drain(), PutStatus.PUT_OK)
            else:
                self._advance_class(ack_count, waiters)
        self._finish(refused, PutStatus.FLUSH_SLAVE_TIMEOUT)
        # "Drained" only once half of the room is free: one acknowledgement frees little, which is filled again at once.
        if bool(refused) != self._is_refusing and (refused or self.waiting_count <= self._waiting_count_max // 2):
            self._is_refusing = bool(refused)
            event = "ha.ack_queue_filled" if refused else "ha.ack_queue_drained"
            logger.warning("%s waiting=%d", event, self.waiting_count)

    def _advance_class(self, ack_count: int, waiters: OffsetWaiters[AckRequest]) -> None:
        slaves = self._slaves
        if ack_count == SYNC_STATE_SET:
            acknowledged = slaves.acknowledged_by_set()
            if acknowledged is None:
                self._finish(waiters.drain(), PutStatus.FLUSH_SLAVE_TIMEOUT)
            else:
                self._finish(waiters.reach(acknowledged), PutStatus.PUT_OK)
            return
        if ack_count == ANY_SLAVE:
            self._finish(waiters.reach(slaves.push2_slave_max_offset), PutStatus.PUT_OK)
            if waiters and not slaves.acknowledged():
                self._finish(waiters.drain(), PutStatus.SLAVE_NOT_AVAILABLE)
            return
        offsets = slaves.acknowledged_in_sync() if ack_count == ALL_IN_SYNC else slaves.acknowledged()
        needed = max(len(offsets), 1) if ack_count == ALL_IN_SYNC else ack_count - 1
        if len(offsets) >= needed:
            self._finish(waiters.reach(offsets[needed - 1]), PutStatus.PUT_OK)
        else:
            self._finish(waiters.drain(), PutStatus.FLUSH_SLAVE_TIMEOUT)

    def _expire(self, now: float) -> float:
        for waiters in self._classes.values():
            if waiters.next_deadline <= now:
                self._finish(waiters.expire(now), PutStatus.FLUSH_SLAVE_TIMEOUT)
        return min((waiters.next_deadline for waiters in self._classes.values()), default=math.inf)

    def _abandon(self) -> None:
        for waiters in self._classes.values():
            self._finish(waiters.drain(), PutStatus.FLUSH_SLAVE_TIMEOUT)
        while True:
            try:
                self._finish(self._submitted.receive_nowait(), PutStatus.FLUSH_SLAVE_TIMEOUT)
            except (trio.WouldBlock, trio.EndOfChannel):
                return

    def _finish(self, requests: list[AckRequest], status: PutStatus) -> None:
        for request in requests:
            request.on_done(status)
