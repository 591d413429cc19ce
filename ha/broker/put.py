"""Puts messages into the log, and answers each put once it is flushed and replicated as configured.

All queued puts, however many, become one append, one flush request and one replica request. The steps of a put:

    queued                 `submit`, `enqueue`                     in order
    refused                standing, store, minInSyncReplicas      nothing is stored
    appended               CommitLog.append, in order, together    a failure is that message's own status
    waits, in parallel     `Acknowledgements`                      flush, replicas
    answered               `PutRequest.on_done`

Requests whose message has WAIT=false wait for nothing. All steps are synchronous; the flusher and the group transfer
end waits through callbacks. The only task is that of `serve`: if an append needs a new segment, or has to wait for the
end of a truncation, this task waits for it. Meanwhile requests stay queued, in order.

A broker puts everything into its log this way: messages from clients as well as its own delayed and half messages, op
messages, and records of the tables and of POP. Services that need the outcome use `settle`.

SERVICE_NOT_AVAILABLE means that nothing was stored; every client sends such a message again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

import trio

from ha.broker.acknowledgement import STOPPING, Acknowledgements, SyncStateRule
from ha.broker.options import BrokerOptions
from ha.broker.put_request import PutRequest, PutResult, message_waits
from ha.broker.standing import Standing, fixed_standing
from ha.causes import Cause
from ha.protocol.codes import PutStatus
from ha.protocol.record import Message
from ha.replication.ha_service import HAService
from ha.store.message_store import MessageStore
from ha.store.record_maker import AppendResult

PutRequestT = TypeVar("PutRequestT", bound=PutRequest)

_OK = PutStatus.PUT_OK
"""`PutStatus.PUT_OK`, looked up once because accessing a member of an enum is slow"""


class _QueueState(enum.Enum):
    """How queued puts are treated. OPEN and BLOCKED alternate within `serve`; outside it the queue is CLOSED."""

    CLOSED = "appended at once, or refused if they would have to wait"
    OPEN = "appended by the next drain"
    BLOCKED = "kept until the log has what the first of them needs"


class PutService:
    """Puts messages into the master's log."""

    def __init__(
        self,
        store: MessageStore,
        ha_service: HAService | None,
        options: BrokerOptions,
        standing: Standing | None = None,
        sync_state: Callable[[], SyncStateRule | None] | None = None,
    ) -> None:
        """`sync_state` returns the rule of a failover group's current term, or None while there is none. Pass None
        without failover."""
        self._standing = fixed_standing(options) if standing is None else standing
        self._store = store
        self._log = store.log
        self.acknowledgements = Acknowledgements(store, ha_service, options, self._standing, sync_state, _answer)
        self._queue: list[PutRequest] = []
        self._state = _QueueState.CLOSED
        self._is_draining = False
        self._blocked_since = math.inf
        self._wanted = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope(shield=True)
        self._drained = trio.lowlevel.ParkingLot()
        self.stored_count = 0
        """Number of messages stored since the start"""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Runs the task that drains a blocked queue, for the duration of the `async with` block. The task is shielded
        from cancellation, so that puts during the cleanup of the block's body are served, too.

        Puts still queued at the end of the block are answered SERVICE_NOT_AVAILABLE. Raises DiskFailed, in an exception
        group.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run)
            self._state = _QueueState.OPEN
            try:
                yield
            finally:
                self._scope.cancel()
                self._close()

    async def _run(self) -> None:
        try:
            with self._scope:
                while True:
                    if self._state is _QueueState.BLOCKED:
                        await self._unblock()
                    elif self._queue:
                        self.drain()
                    else:
                        await self._wanted.park()
        finally:
            self._close()  # also if the disk failed: a change of role waits for the queue, shielded from cancellation

    def _close(self) -> None:
        self._state = _QueueState.CLOSED
        requests, self._queue = self._queue, []
        self._refuse(requests, Cause.STOPPING, STOPPING)
        self._drained.unpark_all()

    async def put(self, messages: Sequence[Message]) -> list[PutResult]:
        """Puts `messages`, waits for all answers and returns them in order. For library users. If cancelled, the
        messages may still be stored. Raises DiskFailed."""
        puts = [PutRequest(messages=(message,), waits=message_waits(message.properties)) for message in messages]
        await self.settle(puts)
        return [
            PutResult(
                status=put.status,
                remark=put.remark,
                physical_offset=put.results[0].physical_offset if put.status.is_stored else -1,
                queue_offset=put.results[0].queue_offset if put.status.is_stored else -1,
            )
            for put in puts
        ]

    async def settle(
        self, requests: Sequence[PutRequestT], on_done: Callable[[Sequence[PutRequestT]], None] = lambda done: None
    ) -> None:
        """Puts `requests` and waits for all answers. If cancelled, they may still be stored. Raises DiskFailed.

        `on_done` is called synchronously whenever some of the requests are answered, with these requests.
        """
        if not requests:
            return
        all_done = trio.Event()
        unanswered = len(requests)

        def count(done: Sequence[PutRequestT]) -> None:
            nonlocal unanswered
            unanswered -= len(done)
            on_done(done)
            if not unanswered:
                all_done.set()

        for request in requests:
            request.on_done = count
        self.submit(requests)
        await all_done.wait()

    def submit(self, requests: Sequence[PutRequest]) -> None:
        """Queues `requests` and calls `drain`. The `on_done` of each request is called once, possibly before `submit`
        returns. Raises DiskFailed."""
        self._queue += requests
        self.drain()

    def enqueue(self, requests: Sequence[PutRequest]) -> None:
        """Queues `requests` without appending them: the caller calls `drain` or `drain_soon`."""
        self._queue += requests

    @property
    def is_blocked(self) -> bool:
        """Whether the queue waits for a segment, or for the end of a truncation."""
        return self._state is _QueueState.BLOCKED

    async def wait_unblocked(self) -> None:
        """Waits until `is_blocked` is false. Callers wait here with messages that they have not queued yet."""
        while self.is_blocked:
            await self._drained.park()

    async def wait_appended(self) -> None:
        """Waits until no put is queued. A put is queued for at most the store's `segment_wait_s` per new segment, and
        while a truncation holds appends.

        Always a checkpoint: puts that were taken off the queue when the disk failed are never done, and their callers
        have to notice that they are cancelled.
        """
        await trio.lowlevel.checkpoint()
        while self._queue:
            await self._drained.park()

    def drain_soon(self) -> None:
        """Wakes the task of `serve`, which drains the queue in its next step, including puts queued until then."""
        self._wanted.unpark_all()

    def drain(self) -> None:
        """Checks and appends queued puts until one has to wait for the log; answers those that wait for nothing else.
        Raises DiskFailed."""
        if self._is_draining or self.is_blocked:
            return
        self._is_draining = True  # an `on_done` may submit more
        try:
            while self._queue and not self.is_blocked:
                requests, self._queue = self._queue, []
                self._drain(requests)
        finally:
            self._is_draining = False
            if self._drained:
                self._drained.unpark_all()

    def _drain(self, requests: Sequence[PutRequest]) -> None:
        admitted = self._admit(requests)
        count = self._append(admitted)
        self._answer_appended(admitted[:count])
        if count == len(admitted):
            self._blocked_since = math.inf
        elif self._state is _QueueState.OPEN:
            self._queue[:0] = admitted[count:]
            self._state = _QueueState.BLOCKED
            self._blocked_since = min(self._blocked_since, trio.current_time())
            self._wanted.unpark_all()
        else:
            self._refuse(admitted[count:], Cause.STOPPING, STOPPING)

    async def _unblock(self) -> None:
        """Waits until the first queued request can be appended: until a truncation has ended, or a segment is added. If
        no segment can be added, answers this request with the failure."""
        log = self._log
        if log.appends_are_held:
            await log.wait_appends_allowed()
        else:
            failure = await log.add_segment()
            if failure is not None and self._queue:
                self._blocked_since = math.inf
                request = self._queue.pop(0)
                request.results = (failure,) * len(request.messages)
                _set_outcome(request, failure)
                _answer([request])
        if self.is_blocked:  # else it was closed meanwhile
            self._state = _QueueState.OPEN
        self._drained.unpark_all()  # the queue may be empty now, so that nothing is drained

    def _admit(self, requests: Sequence[PutRequest]) -> Sequence[PutRequest]:
        """Answers requests that must not be appended and returns the others."""
        refusal = self._standing.why_not_stored()
        if refusal:
            self._refuse(requests, Cause.NOT_MASTER, refusal)
            return ()
        is_writable, reason = self._store.is_writable
        if not is_writable:
            can_append, _ = self._store.can_append
            refused = [each for each in requests if not (can_append and each.frees_space)]
            self._refuse(refused, Cause.NOT_WRITABLE, f"the store is not writable: {reason}")
            requests = [each for each in requests if can_append and each.frees_space]
        acknowledgements = self.acknowledgements
        return acknowledgements.admit(requests) if acknowledgements.min_in_sync > 1 else requests

    def _refuse(self, requests: Sequence[PutRequest], cause: Cause, remark: str) -> None:
        self.acknowledgements.refuse(requests, PutStatus.SERVICE_NOT_AVAILABLE, cause, remark)

    def _append(self, requests: Sequence[PutRequest]) -> int:
        """Appends requests in order until one has to wait for the log, and sets their outcome. Returns how many were
        appended or failed."""
        log, began = self._log, None if self._blocked_since == math.inf else self._blocked_since
        count = 0
        for is_batch, run in groupby(requests, attrgetter("is_batch")):
            if is_batch:
                for request in run:
                    results = log.append_batch(request.messages, began)
                    if not results:
                        return count
                    request.results = results
                    self.stored_count += _set_outcome(request, results[-1]) * len(results)
                    count += 1
                continue
            singles = list(run)
            results = log.append([request.messages[0] for request in singles], began)
            for request, result in zip(singles, results, strict=False):
                request.results = (result,)
                self.stored_count += _set_outcome(request, result)
            count += len(results)
            if len(results) < len(singles):
                break
        return count

    def _answer_appended(self, requests: Sequence[PutRequest]) -> None:
        """Answers requests just appended that wait for nothing or were not stored, and starts the others' wait."""
        if not requests:
            return
        acknowledgements = self.acknowledgements
        if not self._standing.has_lease:
            acknowledgements.mark_unconfirmed(requests)
        elif acknowledgements.are_needed:
            waiting: list[PutRequest] = []
            done: list[PutRequest] = []
            for request in requests:
                if request.status is _OK and request.waits:
                    request.messages = ()  # the log has them; otherwise all bodies in flight would stay in memory
                    waiting.append(request)
                else:
                    done.append(request)
            _answer(done)
            if waiting:
                acknowledgements.begin(waiting)
            return
        _answer(requests)


def _answer(requests: Sequence[PutRequest]) -> None:
    for on_done, done in groupby(requests, attrgetter("on_done")):
        if on_done is not None:
            on_done(list(done))


def _set_outcome(request: PutRequest, last: AppendResult) -> bool:
    """Sets the outcome of `request`, which is that of its last message; returns whether it is stored."""
    status = request.status = last.status
    if status is _OK:
        request.next_offset = last.physical_offset + last.size
        return True
    request.remark = f"{status.remark} {last.remark}".strip() if status.remark else last.remark
    return False
