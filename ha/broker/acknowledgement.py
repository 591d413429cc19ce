"""Decides when stored puts are answered: after a flush, after replicas have acknowledged them, or after both.

    SYNC_FLUSH     waits for the flusher, at most syncFlushTimeout
    SYNC_MASTER    waits for the group transfer, at most slaveTimeout

Requests appended together share one wait, for the end of the last one. If that wait fails, each request is judged by
its own end offset, so that every status is true. (RocketMQ: one wait per request.) If flush and replicas both fail for
a request, its status is that of the replicas.

A SYNC_MASTER follows the replica rule of RocketMQ 4.9, unless the 5.x keys are set (`BrokerOptions.replica_policy`) or
the broker is in a failover group, where the sync-state set decides (`SyncStateRule`).

The broker's role and term (`Standing`) are checked again just before each answer. If this broker is no longer the
master of the term in which it stored a put, the answer is FLUSH_SLAVE_TIMEOUT, as the outcome is unknown: the next
master may have the message, or this broker may lose it when it truncates its log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from ha.broker.explained import Explained
from ha.broker.options import BrokerOptions, BrokerRole
from ha.broker.put_request import PutRequest
from ha.broker.standing import Standing
from ha.causes import Cause
from ha.protocol.codes import PutStatus
from ha.replication.group_transfer import ALL_IN_SYNC, ANY_SLAVE, SYNC_STATE_SET, AckRequest
from ha.replication.ha_service import HAService
from ha.store.message_store import MessageStore

NO_REPLICAS = 0
"""Value of ack_count: the master's own log is enough."""
STOPPING = "this broker stops"
STEPPED_DOWN = "stored here, but this broker is no longer the master of that term: whether it stays is not known"


class SyncStateRule(Protocol):
    """The rule by which a master's sync-state set acknowledges puts in one term: the part of `SyncStateSet`
    (replication/sync_state.py) that puts use."""

    confirm_offset: int
    """Physical offset up to which the next master is known to have the log."""

    @property
    def in_sync_replicas_nums(self) -> int:
        """Number of members, including this broker, of the smallest sync-state set that may be in force."""
        ...

    def acknowledged(self, end: int) -> int:
        """Returns the physical offset up to which puts may be acknowledged in a log that ends at `end`; -1 if none may
        be."""
        ...

    def explain(self, offset: int) -> str:
        """Names the members that a put ending at physical offset `offset` waits for; "" if there are none."""
        ...


class Acknowledgements:
    """Decides what each stored put waits for. Runs no task: the flusher and the group transfer call back."""

    def __init__(
        self,
        store: MessageStore,
        ha_service: HAService | None,
        options: BrokerOptions,
        standing: Standing,
        sync_state: Callable[[], SyncStateRule | None] | None,
        answer: Callable[[Sequence[PutRequest]], None],
    ) -> None:
        """`answer` is called with requests whose status is final.

        `sync_state`: in a failover group, returns the rule of the current term, or None while this broker is not the
        master. Raises ValueError if a SYNC_MASTER has no `ha_service`.
        """
        if options.role is BrokerRole.SYNC_MASTER and ha_service is None:
            raise ValueError("a SYNC_MASTER needs a HAService")
        self._store = store
        self._log = store.log
        self._ha = ha_service
        self._options = options
        self._standing = standing
        self._sync_state = sync_state
        self._answer = answer
        self._ack_count = self._make_ack_count()
        self._needs_replicas = options.role is BrokerRole.SYNC_MASTER and self._ack_count != NO_REPLICAS
        self.are_needed = options.flush_sync or self._needs_replicas
        """Whether puts wait for a flush or for replicas, except those with WAIT=false"""
        policy = options.replica_policy if options.role is BrokerRole.SYNC_MASTER else None
        self.min_in_sync = 1 if policy is None else policy.min_in_sync_replicas
        """Minimum number of members in sync, including this broker, with which a put that waits is stored"""
        self._waits: dict[_Wait, None] = {}
        """Waits that have not ended, oldest first: `give_up` answers them in this order"""
        self._finished = trio.lowlevel.ParkingLot()
        self.explained = Explained()
        """Counts the puts that are not answered PUT_OK, by status and cause"""

    @property
    def replicated_offset(self) -> int:
        """Physical offset up to which the log is flushed here and acknowledged by every slave that is counted.

        In a failover group: flushed here and confirmed by the sync-state set; 0 while this broker is not the master.
        """
        flushed = self._log.flushed_offset.value
        if self._sync_state is not None:
            rule = self._sync_state()
            return 0 if rule is None else min(flushed, rule.confirm_offset)
        acknowledged = [] if self._standing.is_slave or self._ha is None else self._ha.acknowledged()
        return min(flushed, acknowledged[-1]) if acknowledged else flushed

    async def wait_all_answered(self) -> None:
        """Waits until no put waits for a flush or a slave. This ends, as every such put has a deadline."""
        while self._waits:
            await self._finished.park()

    def give_up(self) -> None:
        """Answers every waiting put with FLUSH_SLAVE_TIMEOUT, as this broker is no longer the master."""
        for wait in list(self._waits):
            wait.give_up()

    def admit(self, requests: Sequence[PutRequest]) -> Sequence[PutRequest]:
        """Returns the requests that may be stored: all, if at least `min_in_sync` members are in sync.

        Otherwise answers those with `waits` IN_SYNC_REPLICAS_NOT_ENOUGH, and returns the others. Must not be called
        without an `ha_service`.
        """
        ha, least = self._ha, self.min_in_sync
        assert ha is not None
        max_offset = self._log.max_offset.value
        explain = ha.explain
        if self._sync_state is None:
            in_sync_count = ha.in_sync_replicas_nums(max_offset)
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
        waiting = [request for request in requests if request.waits]
        cause = ha.cause(max_offset) or Cause.TOO_FEW_SLAVES
        self.refuse(waiting, PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH, cause, remark)
        return [request for request in requests if not request.waits]

    def refuse(self, requests: Sequence[PutRequest], status: PutStatus, cause: Cause, remark: str) -> None:
        """Answers `requests` with a status other than PUT_OK, and counts them in `explained`."""
        for request in requests:
            request.status = status
            request.remark = remark
        if requests:
            self.explained.note(status, cause, remark, len(requests))
            self._answer(requests)

    def mark_unconfirmed(self, requests: Sequence[PutRequest]) -> None:
        """Sets the status of all stored `requests` to FLUSH_SLAVE_TIMEOUT, as this broker is no longer the master, and
        counts them in `explained`. Does not answer them."""
        stored = [request for request in requests if request.status.is_stored]
        for request in stored:
            request.status = PutStatus.FLUSH_SLAVE_TIMEOUT
            request.remark = STEPPED_DOWN
        if stored:
            self.explained.note(PutStatus.FLUSH_SLAVE_TIMEOUT, Cause.STEPPED_DOWN, STEPPED_DOWN, len(stored))

    def begin(self, requests: list[PutRequest]) -> None:
        """Starts the wait of `requests`, and answers them when it ends, possibly before this returns. `requests` must
        not be empty, and its messages must be stored, in the order of the log.

        With the replica rule of RocketMQ 4.9, a request for which no slave is in sync does not wait for slaves; its
        status is SLAVE_NOT_AVAILABLE.
        """
        if not self._needs_replicas:
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

    def _make_ack_count(self) -> int:
        """Returns the `AckRequest.ack_count` of all puts. It is constant while the broker runs."""
        policy = self._options.replica_policy
        if self._sync_state is not None:
            return SYNC_STATE_SET
        if policy is None:
            return ANY_SLAVE
        if policy.all_in_sync:
            return ALL_IN_SYNC
        return policy.in_sync_replicas if policy.in_sync_replicas > 1 else NO_REPLICAS

    def _acknowledged_to(self) -> int:
        """Returns the physical offset up to which enough slaves have acknowledged; -1 if there are too few, or the term
        is over."""
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
        self.refuse(requests, PutStatus.SLAVE_NOT_AVAILABLE, cause, remark)

    def _why_not_acknowledged(self, offset: int, acknowledged_to: int, waited_s: float) -> tuple[Cause, str]:
        """Returns why replicas did not acknowledge a put that ends at physical offset `offset`: cause and remark."""
        ha = self._ha
        assert ha is not None
        if not ha.group_transfer.is_running:
            return Cause.STOPPING, STOPPING
        why, cause = ha.explain(offset), ha.cause(offset)
        text = f"the slaves have acknowledged up to physical offset {acknowledged_to} of {offset}"
        by_set = self._sync_state is not None
        there, needed = len(ha.acknowledged()), self._ack_count - 1
        if not by_set and there < needed:
            return cause or Cause.TOO_FEW_SLAVES, why or f"{there} slaves are there, inSyncReplicas asks for {needed}"
        if by_set or not ha.is_slave_ok(offset):
            return cause or Cause.TOO_FEW_SLAVES, why or text
        if waited_s < self._options.slave_timeout_s:
            waiting = ha.group_transfer.waiting_count
            return Cause.TOO_MANY_WAIT, f"{waiting} puts wait for slaves, more than that are not let in"
        return Cause.ACK_LATE, f"{text}; {why}" if why else text

    def _why_not_flushed(self, waited_s: float) -> tuple[Cause, str]:
        failure = self._store.flusher.failure
        if failure is not None:
            return Cause.DISK_FAILED, str(failure)
        timeout_s = self._options.sync_flush_timeout_s
        if waited_s >= timeout_s:
            return Cause.DISK_SLOW, f"within {timeout_s:g} s"
        return Cause.STOPPING, STOPPING

    def _request_flush(self, wait: _Wait) -> None:
        deadline = trio.current_time() + self._options.sync_flush_timeout_s
        self._store.flusher.request(wait.requests[-1].next_offset, deadline, wait.on_flush)

    def _end(self, wait: _Wait) -> None:
        self._waits.pop(wait, None)
        if self._finished:
            self._finished.unpark_all()
        self._answer(wait.requests)


class _Wait:
    """Requests appended together that wait for the same flush, the same replicas, or both."""

    __slots__ = (
        "_owner",
        "_part_count",
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

    def __init__(self, owner: Acknowledgements, requests: list[PutRequest], *, part_count: int) -> None:
        self._owner = owner
        owner._waits[self] = None
        self.term = owner._standing.epoch
        self._part_count = part_count
        self.requests = requests
        self.flush_status = self.replica_status = PutStatus.PUT_OK
        self.replica_remark = ""
        self.replica_cause = Cause.ACK_LATE
        self.flush_wait_s = self.replica_wait_s = 0.0
        self.began = trio.current_time()
        # Physical offsets that flush and replicas had reached when they failed; otherwise the last request's end.
        self.flushed_to = self.acknowledged_to = requests[-1].next_offset

    def on_flush(self, status: PutStatus) -> None:
        """Takes the flusher's result for the last request."""
        if status is not PutStatus.PUT_OK:
            self.flush_status = status
            self.flushed_to = self._owner._log.flushed_offset.value
            self.flush_wait_s = trio.current_time() - self.began
        self._part_done()

    def on_replicas(self, status: PutStatus) -> None:
        """Takes the group transfer's result for the last request."""
        if status is not PutStatus.PUT_OK:
            owner = self._owner
            self.replica_status = status
            self.acknowledged_to = owner._acknowledged_to()
            self.replica_wait_s = trio.current_time() - self.began
            self.replica_cause, self.replica_remark = owner._why_not_acknowledged(
                self.requests[-1].next_offset, self.acknowledged_to, self.replica_wait_s
            )
        self._part_done()

    def give_up(self) -> None:
        """Answers at once, as this broker is no longer the master. Later results are ignored."""
        self._part_count = 0
        self._owner.mark_unconfirmed(self.requests)
        self._owner._end(self)

    def _part_done(self) -> None:
        self._part_count -= 1
        if self._part_count:
            return  # one part is still missing, or the wait was given up
        owner = self._owner
        end = self.requests[-1].next_offset
        if not owner._standing.still_acknowledges(self.term):
            owner.mark_unconfirmed(self.requests)
        elif end > self.acknowledged_to or end > self.flushed_to:
            self._judge_each()
        elif owner._options.flush_sync:
            # Never acknowledge a message that a power loss could still remove.
            assert end <= owner._log.flushed_offset.value, (end, owner._log.flushed_offset.value)
        owner._end(self)

    def _judge_each(self) -> None:
        """Sets the status of each request by its own end offset, after flush or replicas failed for the last one."""
        owner = self._owner
        flushed_offset = owner._log.flushed_offset.value
        late_remark = self.replica_remark
        if self.replica_status is PutStatus.FLUSH_SLAVE_TIMEOUT:
            late_remark = (
                f"stored, but not acknowledged by the slaves it needs after {self.replica_wait_s:.3f} s: {late_remark}"
            )
        flush_cause, why = owner._why_not_flushed(self.flush_wait_s)
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
            elif owner._options.flush_sync:
                assert next_offset <= flushed_offset, (next_offset, flushed_offset)
        if late_count:
            owner.explained.note(self.replica_status, self.replica_cause, late_remark, late_count)
        if unflushed_count:
            owner.explained.note(self.flush_status, flush_cause, flush_remark, unflushed_count)
