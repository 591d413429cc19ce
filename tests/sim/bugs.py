"""Bugs to plant: what the simulator and the checkers are worth is how soon they notice that one of these is there.

    with BUGS["skipped_fsync"]():
        outcome = run_plan(plan)

Each puts something wrong in the place of halog's own code, as a plausible mistake of its author would, says which
checkers may notice, and in which scenarios it can show at all. `python -m tests.sim --bug NAME --seeds 200` must fail;
`python -m tests.sim.planted` runs them all and prints a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import trio

from ha.broker.put import PutService, _Wait
from ha.protocol.codes import PutStatus
from ha.protocol.record_digest import QueueRun
from ha.replication.connection import HAConnection
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.ha_session import HASession
from ha.replication.overlap import Overlap
from ha.replication.progress import CloseReason
from ha.store import commitlog, recovery, segment_files
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import ConsumeQueue, ConsumeQueues
from ha.store.dispatch import Dispatcher
from ha.store.flusher import Flusher
from ha.store.key_index import KeyIndex
from ha.store.log_scan import LogScan
from ha.store.recovery import LogRecovery
from tests.sim.scenario import MASTER, GroupPlan, Options, Plan

Put = Callable[[object, str, Any], None]
"""(owner, name of its attribute, replacement)"""
Plant = Callable[[Put], None]
CRASHES = frozenset({"kill", "power", "kill_in_write", "power_in_write", "sync_error", "write_error"})
POWER = frozenset({"power", "power_in_write"})


PlanT = TypeVar("PlanT", Plan, GroupPlan)


@dataclass(frozen=True)
class Bug(Generic[PlanT]):
    """One bug; calling it returns the context in which it is planted.

    `found_by`: the checkers of which one must notice. `can_show`: whether a scenario has what the bug needs to matter.
    """

    name: str
    says: str
    found_by: frozenset[str]
    can_show: Callable[[PlanT], bool]
    plant: Plant

    def __call__(self) -> AbstractContextManager[None]:
        return _planted(self.plant)


BUGS: dict[str, Bug[Plan]] = {}
"""By name, in the order of a message's way"""


@contextmanager
def _planted(plant: Plant) -> Iterator[None]:
    with ExitStack() as stack:

        def put(owner: object, name: str, replacement: Any) -> None:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, replacement)

        plant(put)
        yield


def entered(bugs: dict[str, Bug[PlanT]], *found_by: str, needs: Callable[[PlanT], bool]) -> Callable[[Plant], Plant]:
    """Enter a function that plants a bug into `bugs`."""

    def enter(plant: Plant) -> Plant:
        says = " ".join((plant.__doc__ or "").split())
        bugs[plant.__name__] = Bug(plant.__name__, says, frozenset(found_by), needs, plant)
        return plant

    return enter


def _bug(*found_by: str, needs: Callable[[Plan], bool] = lambda plan: True) -> Callable[[Plant], Plant]:
    return entered(BUGS, *found_by, needs=needs)


def _has_fault(plan: Plan, kinds: frozenset[str], *, on: str = "") -> bool:
    return any(fault.kind in kinds and (not on or fault.node == on) for fault in plan.faults)


def _is_sync(options: Options) -> bool:
    return options.role == "SYNC_MASTER"


def _flushes(plan: Plan) -> bool:
    return plan.options.master_flush == "SYNC_FLUSH"


# ---- the master's log


@_bug("soundness", "durability", "prefix", "crash", "convergence", "derived")
def lost_filler(put: Put) -> None:
    """The filler at a segment's end is not written: whoever reads the log later stops there."""
    put(commitlog, "encode_filler", lambda size: bytes(8))


@_bug(
    "statuses",
    "queue_offsets",
    "durability",
    "convergence",
    "consumers",
    "derived",
    needs=lambda plan: plan.options.burst_max > 1,
)
def wrong_queue_offset_answered(put: Put) -> None:
    """Of several messages in one call all are told the first one's queue offset."""
    real = CommitLog.put

    async def put_all(self: CommitLog, messages: Any) -> Any:
        results = await real(self, messages)
        if len(results) > 1 and all(result.status is PutStatus.PUT_OK for result in results):
            first = results[0].queue_offset
            results = [msgspec.structs.replace(result, queue_offset=first) for result in results]
        return results

    put(CommitLog, "put", put_all)


@_bug(
    "queue_offsets",
    "statuses",
    "derived",
    "convergence",
    "durability",
    needs=lambda plan: _has_fault(plan, CRASHES | {"stop"}, on=MASTER),
)
def queue_offset_reused_after_restart(put: Put) -> None:
    """After a restart a queue's counter begins at its last offset, not behind it."""
    real = ConsumeQueues.next_queue_offset

    def next_queue_offset(self: ConsumeQueues, topic: str, queue_id: int) -> int:
        return max(0, real(self, topic, queue_id) - 1)

    put(ConsumeQueues, "next_queue_offset", next_queue_offset)


@_bug("statuses", needs=lambda plan: _is_sync(plan.options) and plan.options.min_in_sync_replicas > 1)
def refused_but_stored(put: Put) -> None:
    """A put is refused for want of replicas after it was appended, not before."""
    real = PutService._admit

    def admit(self: PutService, requests: Any, on_done: Any) -> Any:
        def note(refused: Any) -> None:
            for request in refused:
                if request.status is PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH:
                    trio.lowlevel.spawn_system_task(self._log.put, list(request.messages))
            on_done(refused)

        return real(self, requests, note)

    put(PutService, "_admit", admit)


# ---- flushing


@_bug("statuses", "durability", "acks", "derived", needs=_flushes)
def skipped_fsync(put: Put) -> None:
    """The flusher raises the flushed offset without a sync."""

    async def sync(self: CommitLog, flushed: int, target: int) -> None:
        await trio.lowlevel.checkpoint()

    put(CommitLog, "sync", sync)


@_bug("statuses", "durability", "acks", needs=lambda plan: _has_fault(plan, frozenset({"sync_error"})))
def failed_sync_tried_again(put: Put) -> None:
    """A sync that failed is tried again; the kernel has marked the pages clean and reports success ("fsyncgate")."""
    real = CommitLog.sync

    async def sync(self: CommitLog, flushed: int, target: int) -> None:
        try:
            await real(self, flushed, target)
        except OSError:
            await real(self, flushed, target)

    put(CommitLog, "sync", sync)


@_bug("statuses", "durability", needs=_flushes)
def synced_one_segment_short(put: Put) -> None:
    """At the begin of a new segment only that one is synced, not the end of the one before."""
    real = CommitLog.sync

    async def sync(self: CommitLog, flushed: int, target: int) -> None:
        await real(self, max(flushed, (target - 1) // self.segment_size * self.segment_size), target)

    put(CommitLog, "sync", sync)


@_bug(
    "statuses",
    "durability",
    "acks",
    needs=lambda plan: _flushes(plan) and _has_fault(plan, frozenset({"disk_slow", "pause", "sync_error"}), on=MASTER),
)
def put_ok_on_flush_timeout(put: Put) -> None:
    """A flush that does not come in time counts as one that has come."""
    real = Flusher.request

    def request(self: Flusher, physical_offset: int, deadline: float, on_done: Any) -> None:
        real(self, physical_offset, deadline, lambda status: on_done(PutStatus.PUT_OK))

    put(Flusher, "request", request)
    put(_Wait, "_part_done", _part_done_unasserted)


def _part_done_unasserted(self: Any) -> None:
    """`_Wait._part_done` without the assertion that would stop the process."""
    self._part_count -= 1
    if self._part_count:
        return
    for request in self.requests:
        if request.next_offset > self.acknowledged_to:
            request.status = self.replica_status
        elif request.next_offset > self.flushed_to:
            request.status = self.flush_status
    self._service._wait_count -= 1
    self._service._answered.unpark_all()
    self._on_done(self.requests)


# ---- waiting for slaves


@_bug("statuses", "durability", needs=lambda plan: _is_sync(plan.options) and bool(plan.faults))
def put_ok_on_slave_timeout(put: Put) -> None:
    """An acknowledgement that does not come in time counts as one that has come."""
    real = _Wait.on_replicas

    def on_replicas(self: Any, status: PutStatus) -> None:
        real(self, PutStatus.PUT_OK if status is PutStatus.FLUSH_SLAVE_TIMEOUT else status)

    put(_Wait, "on_replicas", on_replicas)


@_bug(
    "statuses",
    "durability",
    needs=lambda plan: _is_sync(plan.options) and not plan.options.all_in_sync and not plan.options.in_sync_replicas,
)
def put_ok_without_slave(put: Put) -> None:
    """With no slave there a SYNC_MASTER answers as an ASYNC_MASTER would."""

    def answer(self: PutService, requests: Any, on_done: Any) -> None:
        on_done(requests)

    put(PutService, "_answer_unavailable", answer)


@_bug("statuses", "durability", needs=lambda plan: _is_sync(plan.options) and plan.options.in_sync_replicas > 2)
def one_replica_too_few(put: Put) -> None:
    """inSyncReplicas counts the slaves but the master too: one acknowledgement less is waited for."""
    real = PutService._make_ack_count

    def make_ack_count(self: PutService) -> int:
        count = real(self)
        return count - 1 if count > 2 else count

    put(PutService, "_make_ack_count", make_ack_count)


@_bug(
    "statuses",
    "durability",
    needs=lambda plan: _is_sync(plan.options) and plan.options.in_sync_replicas > 2 and bool(plan.faults),
)
def double_counted_slave(put: Put) -> None:
    """Acknowledgements are kept by slave but counted by connection, those that are over included."""
    real = HAService.acknowledged

    def acknowledged(self: HAService) -> list[int]:
        seen: dict[str, set[str]] = vars(self).setdefault("seen", {})
        latest: dict[str, int] = {}
        for progress in (connection.progress for connection in self._connections):
            if progress.is_counted:
                seen.setdefault(progress.identity, set()).add(progress.peer)
                latest[progress.identity] = max(progress.ack_offset, latest.get(progress.identity, -1))
        assert set(real(self)) == set(latest.values())
        return sorted((ack for identity, ack in latest.items() for _ in seen[identity]), reverse=True)

    put(HAService, "acknowledged", acknowledged)


@_bug(
    "statuses",
    "durability",
    needs=lambda plan: (
        _is_sync(plan.options) and plan.options.after_power_loss == "plain" and _has_fault(plan, POWER, on=MASTER)
    ),
)
def ack_beyond_end_accepted(put: Put) -> None:
    """A slave that reports more than the master's log holds is believed, and kept (as RocketMQ 5.x does)."""
    real_take, real_write = HAConnection._take_report, HAConnection._write

    def take_report(self: HAConnection, offset: int) -> CloseReason | None:
        end = self._log.max_offset
        if offset <= end.value:
            return real_take(self, offset)
        own, end.value = end.value, offset
        try:
            return real_take(self, offset)
        finally:
            end.value = own

    async def write(self: HAConnection) -> CloseReason:
        await self._requested.wait()
        while (position := self.progress.transfer_offset) > self._log.max_offset.value:
            await trio.sleep(0.1)
            if self._log.max_offset.value >= position:
                break
        return await real_write(self)

    put(HAConnection, "_take_report", take_report)
    put(HAConnection, "_write", write)


# ---- the slave


@_bug("acks", "statuses", "durability")
def ack_before_write(put: Put) -> None:
    """A slave's end is raised, and so reported, before the bytes are in its log."""
    real = CommitLog.append_raw

    async def append_raw(self: CommitLog, physical_offset: int, chunk: Any) -> None:
        end = self.max_offset
        segments = self.segments
        fits = bool(segments) and physical_offset + len(chunk) <= segments[-1].end
        if chunk and fits and physical_offset == end.value:
            kept = bytes(chunk)
            end.raise_to(physical_offset + len(kept))
            await trio.sleep(0.001)
            at = physical_offset - segments[-1].start
            view = segments[-1].view
            assert view is not None
            view[at : at + len(kept)] = kept
        else:
            await real(self, physical_offset, chunk)

    put(CommitLog, "append_raw", append_raw)


@_bug("acks")
def segment_acknowledged_whole(put: Put) -> None:
    """A slave acknowledges the segment that it writes to as a whole: what it was never sent as well."""
    real = HASession._reportable_offset
    assert isinstance(real, property)

    def reportable_offset(self: HASession) -> int:
        assert real.fget is not None
        offset: int = real.fget(self)
        size = self._log.segment_size
        return offset if self._log.min_offset < 0 else (offset // size + 1) * size

    put(HASession, "_reportable_offset", property(reportable_offset))


@_bug("acks", "statuses", "durability", needs=lambda plan: plan.options.slave_flush == "SYNC_FLUSH")
def ack_before_flush(put: Put) -> None:
    """A slave with SYNC_FLUSH acknowledges what it has written, flushed or not."""
    real = HASession.__init__

    def init(self: HASession, stream: Any, log: Any, options: Any, *rest: Any, **named: Any) -> None:
        real(self, stream, log, msgspec.structs.replace(options, ack_flushed=False), *rest, **named)

    put(HASession, "__init__", init)


@_bug("acks", "prefix", "soundness", "convergence", "durability", "crash", needs=lambda plan: bool(plan.faults))
def overlap_appended_again(put: Put) -> None:
    """The last byte that a slave compares at the begin of a connection is appended again: what follows is one off."""
    real = Overlap.feed

    def feed(self: Overlap, chunk: memoryview) -> memoryview | None:
        behind = real(self, chunk)
        return behind if not behind else chunk[len(chunk) - len(behind) - 1 : -1]

    put(Overlap, "feed", feed)


@_bug("acks", "prefix", "soundness", "convergence", "crash")
def append_over_a_gap(put: Put) -> None:
    """A slave takes a chunk for the next one although a piece before it never arrived."""
    real = HASession._append

    async def append(self: HASession, offset: int, chunk: memoryview) -> Any:
        if len(chunk) > 16 and len(chunk) % 16 == 7:
            end = self._log.max_offset
            kept, end.value = end.value, end.value  # the piece is dropped, the place counted
            result = await real(self, offset, memoryview(bytes(8) + bytes(chunk[8:])))
            assert end.value >= kept
            return result
        return await real(self, offset, chunk)

    put(HASession, "_append", append)


@_bug(
    "prefix",
    "acks",
    "durability",
    "soundness",
    "statuses",
    "convergence",
    needs=lambda plan: plan.options.after_power_loss == "plain" and _has_fault(plan, POWER, on=MASTER),
)
def overlap_check_skipped(put: Put) -> None:
    """A slave appends behind its own end without comparing: also what follows another history."""

    async def begin_overlap(self: HASession, first: int, own: int) -> int:
        await trio.lowlevel.checkpoint()
        return own

    put(HASession, "_begin_overlap", begin_overlap)


# ---- recovery


@_bug(
    "durability",
    "queue_offsets",
    "prefix",
    "convergence",
    "crash",
    "derived",
    "statuses",
    needs=lambda plan: _has_fault(plan, CRASHES),
)
def truncated_too_far(put: Put) -> None:
    """After a crash recovery cuts off the last good record too, whatever says that it was flushed."""
    real = LogScan.find_end
    real_damage_end = LogRecovery.damage_end

    async def find_end(self: Any, *arguments: Any) -> Any:
        end = await real(self, *arguments)
        if self._is_clean or end.last_record < 0:
            return end
        return msgspec.structs.replace(end, position=end.last_record)

    def damage_end(self: Any, first: int, end: Any, last_ms: int) -> Any:
        return None if end.position == end.last_record else real_damage_end(self, first, end, last_ms)

    put(LogScan, "find_end", find_end)
    put(LogRecovery, "damage_end", damage_end)


@_bug("soundness", "durability", "prefix", needs=lambda plan: _has_fault(plan, POWER))
def torn_tail_left(put: Put) -> None:
    """Recovery finds the end of the log but leaves the torn bytes behind it."""
    real = segment_files.cut_segments

    def cut(disk: Any, segments: Any, end: int, reason: str) -> int:
        for segment in segments:
            segment.file = Unzeroed(segment.file)
        try:
            return real(disk, segments, end, reason)
        finally:
            for segment in segments:
                segment.file = segment.file.file

    put(recovery, "cut_segments", cut)


class Unzeroed:
    """A file that does not do what `zero` says."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def zero(self, position: int, size: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@_bug(
    "derived",
    "convergence",
    "queue_offsets",
    "consumers",
    "crash",
    "statuses",
    needs=lambda plan: _has_fault(plan, POWER),
)
def queue_not_truncated(put: Put) -> None:
    """Entries of records that recovery cut off stay in their queues."""
    put(ConsumeQueue, "truncate", lambda self, physical_offset: 0)


# ---- what is derived


@_bug(
    "statuses",
    "derived",
    "durability",
    "queue_offsets",
    needs=lambda plan: _flushes(plan) and plan.options.consumer_count > 0,
)
def unflushed_dispatched(put: Put) -> None:
    """With SYNC_FLUSH consumers get messages that are not on the disk yet."""
    real = Dispatcher.run

    async def run(self: Dispatcher) -> None:
        self._options = msgspec.structs.replace(self._options, flush_mode="ASYNC_FLUSH")
        await real(self)

    put(Dispatcher, "run", run)


@_bug(
    "derived",
    "convergence",
    "queue_offsets",
    "durability",
    "consumers",
    "statuses",
    needs=lambda plan: _has_fault(plan, CRASHES),
)
def queue_entry_doubled_after_restart(put: Put) -> None:
    """Dispatch appends what it reads again after a crash, without asking whether the queue has it already."""
    real = Dispatcher._build_queue

    def build_queue(self: Dispatcher, run: QueueRun) -> Any:
        queue = self._queues.get_or_create(run.topic, run.queue_id)
        queue.max_physical_offset = 0
        return real(self, msgspec.structs.replace(run, queue_offset=queue.max_offset, queue_offsets=None))

    put(Dispatcher, "_build_queue", build_queue)
    put(ConsumeQueue, "truncate", lambda self, physical_offset: 0)


@_bug("derived")
def index_entry_lost(put: Put) -> None:
    """The last key of a call is not indexed when the file is full: it belongs in the next."""
    real = KeyIndex._add_file

    def add_file(self: KeyIndex) -> None:
        if self._files:
            del self._pending[:1]
        real(self)

    put(KeyIndex, "_add_file", add_file)


# ---- tasks


@_bug("tasks")
def task_leaked(put: Put) -> None:
    """A task is started where nobody ends it."""
    real = HAClient._follow

    async def follow(self: HAClient, address: str) -> Any:
        trio.lowlevel.spawn_system_task(self.state.wait_value, lambda _: False, context=copy_context())
        return await real(self, address)

    put(HAClient, "_follow", follow)
