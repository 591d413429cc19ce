"""Puts messages into the log and answers each put once its flush and its replicas allow it.

All queued puts become one append, one flush request and one replica request, regardless of their number:

    queued                 `submit`                                           in order
    refused                standing, writability, minInSyncReplicas           nothing is stored
    appended               CommitLog.append, in order, all at once            a failure is that message's own status
    waits, in parallel     Flusher (SYNC_FLUSH), GroupTransfer (SYNC_MASTER)  deadlines syncFlushTimeout, slaveTimeout
    answered               as soon as both are known; the replica's failure wins over the flush's

Requests whose message says WAIT=false wait for nothing. All of this is synchronous, completed by callbacks out of the
flusher and the group transfer, but for the task of `serve`: it waits for a segment, or for
the end of a truncation, when an append needs that. Meanwhile requests stay in the queue, in order.

Rules (ha-protocol §4.1): RocketMQ 4.9's for a SYNC_MASTER unless the 5.x keys are set
(`BrokerOptions.replica_policy`); in a group with failover the sync-state set's (`SyncStateRule`). Departure: RocketMQ
gives each request its own replica wait; here those appended together share one, for the last byte. When that wait ends
early, each request is still judged by its own offset, so every status is true.

With failover the standing is checked again at the moment of each answer. A put that a former master has stored is
answered FLUSH_SLAVE_TIMEOUT: the next master may have it, or have it truncated here. SERVICE_NOT_AVAILABLE means that
nothing was stored; every client sends such a message again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import trio

from ha.broker.explained import Explained
from ha.broker.options import BrokerOptions, BrokerRole
from ha.broker.put_request import PutRequest, PutResult, message_waits
from ha.broker.standing import Standing, fixed_standing
from ha.causes import Cause
from ha.protocol.codes import PutStatus
from ha.replication.group_transfer import ALL_IN_SYNC, ANY_SLAVE, SYNC_STATE_SET, AckRequest

if TYPE_CHECKING:
    from ha.protocol.record import Message
    from ha.replication.ha_service import HAService
    from ha.store.message_store import MessageStore
    from ha.store.record_maker import AppendResult


_OK = PutStatus.PUT_OK
"""Looked up once: asking an enum for a member takes longer than most that is done with it."""

NO_REPLICAS = 0
"""ack_count: the master's own log is enough."""

STOPPING = "this broker stops"
STEPPED_DOWN = "stored here, but this broker is no longer the master of that term: whether it stays is not known"


class _QueueState(enum.Enum):
    """What becomes of puts that are queued. OPEN and BLOCKED alternate within `serve`; outside of it all is CLOSED."""

    CLOSED = "appended at once, or refused if they would have to wait"
    OPEN = "appended by the next drain"
    BLOCKED = "kept until the log has what the first of them needs"


class SyncStateRule(Protocol):
    """The sync-state set of one term of a master, as far as puts ask for it (`replication.sync_state`)."""

    confirm_offset: int
    """Physical offset up to which the next master is known to have the log."""

    @property
    def in_sync_replicas_nums(self) -> int:
        """Members for sure, this broker included."""
        ...

    def acknowledged(self, end: int) -> int:
        """Up to where puts may be acknowledged, of a log that ends at `end`; -1 if none may be."""
        ...

    def explain(self, offset: int) -> str:
        """Which members a put that ends at `offset` waits for, in words; "" if for none."""
        ...


class PutService:
    """Puts messages into the master's log and decides what each waits for."""

    def __init__(
        self,
        store: MessageStore,
        ha_service: HAService | None,
        options: BrokerOptions,
        standing: Standing | None = None,
        sync_state: Callable[[], SyncStateRule | None] | None = None,
    ) -> None:
        """`sync_state` gives the rule of the present term, with failover; None while there is none."""
        self._standing = fixed_standing(options) if standing is None else standing
        self._store = store
        self._log = store.log
        self._ha = ha_service
        self._options = options
        self._policy = options.replica_policy
        self._sync_state = sync_state
        self._ack_count = self._make_ack_count()
        self._waits_for_replicas = options.role is BrokerRole.SYNC_MASTER and self._ack_count != NO_REPLICAS
        self._least_in_sync = 1 if options.replica_policy is None else options.replica_policy.min_in_sync_replicas
        self._waits: set[_Wait] = set()
        self._queue: list[PutRequest] = []
        self._state = _QueueState.CLOSED
        self._is_draining = False
        self._blocked_since = math.inf
        self._wanted = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope(shield=True)
        self.stored_count = 0
        """Messages stored since the start"""
        self.explained = Explained()
        """What was not answered PUT_OK"""
        self._answered = trio.lowlevel.ParkingLot()
        if options.role is BrokerRole.SYNC_MASTER and ha_service is None:
            raise ValueError("a SYNC_MASTER needs a HAService")

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Run the task that drains a blocked queue while the block runs, also in shielded scopes at its end.

        Puts still queued when the block ends are answered SERVICE_NOT_AVAILABLE. DiskFailed.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run)
            self._state = _QueueState.OPEN
            try:
                yield
            finally:
                self._state = _QueueState.CLOSED
                self._scope.cancel()
                requests, self._queue = self._queue, []
                self._refuse(requests, PutStatus.SERVICE_NOT_AVAILABLE, Cause.STOPPING, STOPPING)
                self._answered.unpark_all()

    async def _run(self) -> None:
        with self._scope:
            while True:
                if self._state is _QueueState.BLOCKED:
                    await self._unblock()
                elif self._queue:
                    self.drain()
                else:
                    await self._wanted.park()

    async def put(self, messages: Sequence[Message]) -> list[PutResult]:
        """Put `messages` and wait until each is answered. For library users; a cancelled put may still be stored."""
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

    async def settle(self, requests: Sequence[PutRequest]) -> None:
        """Put `requests` and wait until each is answered; cancelled, they may still be stored."""
        if not requests:
            return
        all_done = trio.Event()
        unanswered = len(requests)

        def on_done(done: Sequence[PutRequest]) -> None:
            nonlocal unanswered
            unanswered -= len(done)
            if not unanswered:
                all_done.set()

        for request in requests:
            request.on_done = on_done
        self.submit(requests)
        await all_done.wait()

    def submit(self, requests: Sequence[PutRequest]) -> None:
        """Put `requests` behind all that are queued. Each one's `on_done` is called once, maybe before this returns."""
        self._queue += requests
        self.drain()

    def enqueue(self, requests: Sequence[PutRequest]) -> None:
        """Queue `requests` without appending them: the caller calls `drain` or `drain_soon`."""
        self._queue += requests

    @property
    def is_blocked(self) -> bool:
        """Whether the queue waits for a segment, or for the end of a truncation."""
        return self._state is _QueueState.BLOCKED

    async def wait_unblocked(self) -> None:
        """Wait until `is_blocked` is false, for a caller that holds messages."""
        while self.is_blocked:
            await self._answered.park()

    def drain_soon(self) -> None:
        """Wake the task of `serve`, which drains the queue in its next step, with what others queue until then."""
        self._wanted.unpark_all()

    def drain(self) -> None:
        """Check, append and answer queued puts until one has to wait. DiskFailed."""
        if self._is_draining or self.is_blocked:
            return
        self._is_draining = True  # an `on_done` may submit more
        try:
            while self._queue and not self.is_blocked:
                requests, self._queue = self._queue, []
                self._drain(requests)
        finally:
            self._is_draining = False
        if self._answered:
            self._answered.unpark_all()

    def _drain(self, requests: Sequence[PutRequest]) -> None:
        admitted = self._admit(requests)
        if not admitted:
            return
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
            self._refuse(admitted[count:], PutStatus.SERVICE_NOT_AVAILABLE, Cause.STOPPING, STOPPING)

    async def _unblock(self) -> None:
        """Wait for what the first request of the queue needs, or answer it that this can't be had."""
        log = self._log
        if log.appends_are_held:
            await log.wait_appends_allowed()
        else:
            failure = await log.add_segment()
            if failure is not None and self._queue:
                request = self._queue.pop(0)
                request.results = (failure,) * len(request.messages)
                _note(request, failure)
                self._answer([request])
        if self.is_blocked:  # else it was closed meanwhile
            self._state = _QueueState.OPEN
        self._answered.unpark_all()  # the queue may be empty now, so that nothing is drained

    def _answer_appended(self, requests: Sequence[PutRequest]) -> None:
        """Answer what waits for nothing, or was not stored, of requests just appended, and let the others wait."""
        standing = self._standing
        if requests and not standing.has_lease:
            self._mark_unconfirmed(requests)
            self._answer(requests)
            return
        if not (self._options.flush_sync or self._waits_for_replicas):
            self._answer(requests)
            return
        done: list[PutRequest] = []
        waiting: list[PutRequest] = []
        for request in requests:
            if request.status is _OK and request.waits:
                request.messages = ()  # in the log; seconds of bodies at full rate would be hundreds of megabytes
                waiting.append(request)
            else:
                done.append(request)
        if done:
            self._answer(done)
        if waiting:
            self._begin_wait(waiting)

    def _answer(self, requests: Sequence[PutRequest]) -> None:
        for on_done, done in groupby(requests, attrgetter("on_done")):
            if on_done is not None:
                on_done(list(done))

    @property
    def replicated_offset(self) -> int:
        """Up to where (bytes) this broker's disk has the log, and every slave that is there."""
        flushed = self._log.flushed_offset.value
        if self._sync_state is not None:
            rule = self._sync_state()
            return 0 if rule is None else min(flushed, rule.confirm_offset)
        if self._standing.is_slave or self._ha is None or not self._ha.connection_count:
            return flushed
        acknowledged = self._ha.acknowledged()
        return min(flushed, acknowledged[-1]) if acknowledged else 0

    async def wait_all_answered(self) -> None:
        """Wait until no put waits for a flush or a slave; each does so for at most its own deadline."""
        while self._waits:
            await self._answered.park()

    async def wait_appended(self) -> None:
        """Wait until no put is on its way into the log: each is for at most the store's `segment_wait_s` a segment."""
        while self._queue:
            await self._answered.park()

    def step_down(self) -> None:
        """Answer whatever waits, FLUSH_SLAVE_TIMEOUT: the standing, already another one, acknowledges it no more."""
        for wait in list(self._waits):
            wait.give_up()

    def _make_ack_count(self) -> int:
        """What replicas a put waits for, which never changes while the broker runs."""
        policy = self._policy
        if self._sync_state is not None:
            return SYNC_STATE_SET
        if policy is None:
            return ANY_SLAVE
        if policy.all_in_sync:
            return ALL_IN_SYNC
        return policy.in_sync_replicas if policy.in_sync_replicas > 1 else NO_REPLICAS

    def _admit(self, requests: Sequence[PutRequest]) -> Sequence[PutRequest]:
        """Answer what must not be appended and return the rest."""
        standing = self._standing
        refusal = standing.why_not_stored()
        if refusal:
            self._refuse(requests, PutStatus.SERVICE_NOT_AVAILABLE, Cause.NOT_MASTER, refusal)
            return ()
        is_writable, reason = self._store.is_writable
        if not is_writable:
            remark = f"the store is not writable: {reason}"
            self._refuse(requests, PutStatus.SERVICE_NOT_AVAILABLE, Cause.NOT_WRITABLE, remark)
            return ()
        least = self._least_in_sync
        if least <= 1 or self._ha is None or self._options.role is not BrokerRole.SYNC_MASTER:
            return requests
        max_offset = self._log.max_offset.value
        explain = self._ha.explain
        if self._sync_state is None:
            in_sync_count = self._ha.in_sync_replicas_nums(max_offset)
        else:
            rule = self._sync_state()
            in_sync_count = 0 if rule is None else rule.in_sync_replicas_nums
            explain = explain if rule is None else rule.explain
        if in_sync_count >= least:
            return requests
        remark = (
            f"{PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH.remark}: {in_sync_count} in sync, "
            f"minInSyncReplicas={least}; {explain(max_offset)}"
        )
        cause = self._ha.cause(max_offset) or Cause.TOO_FEW_SLAVES
        waiting = [request for request in requests if request.waits]
        self._refuse(waiting, PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH, cause, remark)
        return [r for r in requests if not r.waits]

    def _append(self, requests: Sequence[PutRequest]) -> int:
        """Append requests in order until one has to wait; return how many did not. Each then says what became of it."""
        log, began = self._log, None if self._blocked_since == math.inf else self._blocked_since
        count = 0
        for is_batch, run in groupby(requests, attrgetter("is_batch")):
            if is_batch:
                for request in run:
                    results = log.append_batch(request.messages, began)
                    if not results:
                        return count
                    request.results = results
                    self.stored_count += _note(request, results[-1]) * len(results)
                    count += 1
                continue
            singles = list(run)
            results = log.append([request.messages[0] for request in singles], began)
            for request, result in zip(singles, results, strict=False):
                request.results = (result,)
                self.stored_count += _note(request, result)
            count += len(results)
            if len(results) < len(singles):
                break
        return count

    def _begin_wait(self, requests: list[PutRequest]) -> None:
        """Let requests that are in the log wait for the flush, the replicas, or both."""
        if not self._waits_for_replicas:
            self._request_flush(_Wait(self, requests, part_count=1))
            return
        ha = self._ha
        assert ha is not None
        if self._ack_count == ANY_SLAVE and not ha.is_slave_ok(requests[-1].next_offset):
            unavailable = [request for request in requests if not ha.is_slave_ok(request.next_offset)]
            requests = [request for request in requests if ha.is_slave_ok(request.next_offset)]
            self._answer_unavailable(unavailable)
            if not requests:
                return
        wait = _Wait(self, requests, part_count=2 if self._options.flush_sync else 1)
        if self._options.flush_sync:
            self._request_flush(wait)
        ack = AckRequest(
            next_offset=requests[-1].next_offset,
            ack_count=self._ack_count,
            deadline=wait.began + self._options.slave_timeout_s,
            on_done=wait.on_replicas,
        )
        try:
            ha.group_transfer.submit_nowait([ack])
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            ack.on_done(PutStatus.FLUSH_SLAVE_TIMEOUT)

    def _acknowledged_to(self) -> int:
        """Offset up to which enough slaves have the log; -1 if there aren't enough of them."""
        ha, ack_count = self._ha, self._ack_count
        assert ha is not None
        if self._sync_state is not None:
            rule = self._sync_state()
            return -1 if rule is None else rule.acknowledged(self._log.max_offset.value)
        if ack_count == ANY_SLAVE:
            return ha.push2_slave_max_offset
        offsets = ha.acknowledged_in_sync() if ack_count == ALL_IN_SYNC else ha.acknowledged()
        needed = len(offsets) if ack_count == ALL_IN_SYNC else ack_count - 1
        return offsets[needed - 1] if 0 < needed <= len(offsets) else -1

    def _answer_unavailable(self, requests: list[PutRequest]) -> None:
        assert self._ha is not None
        offset = requests[-1].next_offset
        remark, cause = self._ha.explain(offset), self._ha.cause(offset) or Cause.NO_SLAVE_CONNECTED
        if self._options.flush_sync:
            wait = _Wait(self, requests, part_count=1)
            wait.replica_status = PutStatus.SLAVE_NOT_AVAILABLE
            wait.replica_remark, wait.replica_cause = remark, cause
            wait.acknowledged_to = -1
            self._request_flush(wait)
            return
        self._refuse(requests, PutStatus.SLAVE_NOT_AVAILABLE, cause, remark)

    def _refuse(self, requests: Sequence[PutRequest], status: PutStatus, cause: Cause, remark: str) -> None:
        """Answer `requests` with a status other than PUT_OK."""
        for request in requests:
            request.status = status
            request.remark = remark
        if requests:
            self.explained.note(status, cause, remark, len(requests))
            self._answer(requests)

    def _mark_unconfirmed(self, requests: Sequence[PutRequest]) -> None:
        """Set the status of puts stored by a broker that is no longer the master of their term."""
        stored = [request for request in requests if request.status.is_stored]
        for request in stored:
            request.status = PutStatus.FLUSH_SLAVE_TIMEOUT
            request.remark = STEPPED_DOWN
        if stored:
            self.explained.note(PutStatus.FLUSH_SLAVE_TIMEOUT, Cause.STEPPED_DOWN, STEPPED_DOWN, len(stored))

    def _why_not_acknowledged(self, offset: int, acknowledged_to: int, waited_s: float) -> tuple[Cause, str]:
        """Why the wait of a put that ends at `offset` for replicas ended without them."""
        ha = self._ha
        assert ha is not None
        if not ha.group_transfer.is_running:
            return Cause.STOPPING, STOPPING
        why, cause = ha.explain(offset), ha.cause(offset)
        text = f"the slaves have acknowledged up to physical offset {acknowledged_to} of {offset}"
        is_elected = self._sync_state is not None
        there, needed = len(ha.acknowledged()), self._ack_count - 1
        if not is_elected and there < needed:
            return cause or Cause.TOO_FEW_SLAVES, why or f"{there} slaves are there, inSyncReplicas asks for {needed}"
        if is_elected or not ha.is_slave_ok(offset):
            return cause or Cause.TOO_FEW_SLAVES, why or text
        if waited_s < self._options.slave_timeout_s:
            waiting = ha.group_transfer.waiting_count
            return Cause.TOO_MANY_WAIT, f"{waiting} puts wait for slaves, more than that are not let in"
        return Cause.ACK_LATE, f"{text}; {why}" if why else text

    def _request_flush(self, wait: _Wait) -> None:
        deadline = trio.current_time() + self._options.sync_flush_timeout_s
        self._store.flusher.request(wait.requests[-1].next_offset, deadline, wait.on_flush)


class _Wait:
    """Requests appended together that wait for the same flush, the same replicas, or both."""

    __slots__ = (
        "_part_count",
        "_service",
        "acknowledged_to",
        "began",
        "flush_status",
        "flush_wait_s",
        "flushed_to",
        "replica_cause",
        "replica_remark",
        "replica_status",
        "replica_wait_s",
        "requests",
        "term",
    )

    def __init__(self, service: PutService, requests: list[PutRequest], *, part_count: int) -> None:
        self._service = service
        service._waits.add(self)
        self.term = service._standing.epoch
        self._part_count = part_count
        self.requests = requests
        self.flush_status = self.replica_status = PutStatus.PUT_OK
        self.replica_remark = ""
        self.replica_cause = Cause.ACK_LATE
        self.flush_wait_s = self.replica_wait_s = 0.0
        self.began = trio.current_time()
        # Where flush and replicas were when their wait ended; the last request's end while neither has failed.
        self.flushed_to = self.acknowledged_to = requests[-1].next_offset

    def on_flush(self, status: PutStatus) -> None:
        """The flusher's answer for the last request."""
        if status is not PutStatus.PUT_OK:
            self.flush_status = status
            self.flushed_to = self._service._log.flushed_offset.value
            self.flush_wait_s = trio.current_time() - self.began
        self._part_done()

    def on_replicas(self, status: PutStatus) -> None:
        """The group transfer's answer for the last request."""
        if status is not PutStatus.PUT_OK:
            service = self._service
            self.replica_status = status
            self.acknowledged_to = service._acknowledged_to()
            self.replica_wait_s = trio.current_time() - self.began
            self.replica_cause, self.replica_remark = service._why_not_acknowledged(
                self.requests[-1].next_offset, self.acknowledged_to, self.replica_wait_s
            )
        self._part_done()

    def give_up(self) -> None:
        """Answer at once, as the broker is no longer the master; later answers of flusher and replicas are ignored."""
        self._part_count = 0
        self._service._mark_unconfirmed(self.requests)
        self._answer()

    def _part_done(self) -> None:
        self._part_count -= 1
        if self._part_count:
            return  # the other part is still to come, or they were given up
        service = self._service
        standing = service._standing
        end = self.requests[-1].next_offset
        if not standing.still_acknowledges(self.term):
            service._mark_unconfirmed(self.requests)
        elif end > self.acknowledged_to or end > self.flushed_to:
            self._judge_each()
        elif service._options.flush_sync:
            # Never acknowledge a message that a power loss could still take.
            assert end <= service._log.flushed_offset.value, (end, service._log.flushed_offset.value)
        self._answer()

    def _answer(self) -> None:
        service = self._service
        service._waits.discard(self)
        if service._answered:
            service._answered.unpark_all()
        service._answer(self.requests)

    def _judge_each(self) -> None:
        """Set the status of each request after a wait that ended before the last one had all it needs."""
        service = self._service
        flushed_offset = service._log.flushed_offset.value
        late_remark = self.replica_remark
        if self.replica_status is PutStatus.FLUSH_SLAVE_TIMEOUT:
            late_remark = (
                f"stored, but not acknowledged by the slaves it needs after {self.replica_wait_s:.3f} s: {late_remark}"
            )
        flush_cause, why = self._why_not_flushed()
        flush_remark = f"stored, but flushed only to physical offset {self.flushed_to}: {why}"
        late_count = unflushed_count = 0
        for request in self.requests:
            next_offset = request.next_offset
            if next_offset > self.acknowledged_to:
                request.status = self.replica_status
                request.remark = late_remark
                late_count += 1
            elif next_offset > self.flushed_to:
                request.status = self.flush_status
                request.remark = flush_remark
                unflushed_count += 1
            elif service._options.flush_sync:
                assert next_offset <= flushed_offset, (next_offset, flushed_offset)
        if late_count:
            service.explained.note(self.replica_status, self.replica_cause, late_remark, late_count)
        if unflushed_count:
            service.explained.note(self.flush_status, flush_cause, flush_remark, unflushed_count)

    def _why_not_flushed(self) -> tuple[Cause, str]:
        failure = self._service._store.flusher.failure
        if failure is not None:
            return Cause.DISK_FAILED, str(failure)
        timeout_s = self._service._options.sync_flush_timeout_s
        if self.flush_wait_s >= timeout_s:
            return Cause.DISK_SLOW, f"within {timeout_s:g} s"
        return Cause.STOPPING, STOPPING


def _note(request: PutRequest, last: AppendResult) -> bool:
    """Say in `request` what became of its last message, and with it of all; return whether it is stored."""
    status = request.status = last.status
    if status is _OK:
        request.next_offset = last.physical_offset + last.size
        return True
    request.remark = _with_cause(status, last.remark)
    return False


def _with_cause(status: PutStatus, cause: str) -> str:
    return f"{status.remark} {cause}".strip() if status.remark else cause
