"""Bugs to plant: they measure how soon the simulator and the checkers notice a typical mistake.

    with BUGS["skipped_fsync"]():
        outcome = run_plan(plan)

Each replaces a part of halog's code by a plausible mistake, names the checker that must notice it, and says in which
scenarios it can have an effect. `python -m tests.sim --bug NAME --seeds 200` must fail; `python -m tests.sim.planted`
runs them all and prints a table.
"""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import msgspec
import trio

from ha.broker.acknowledgement import Acknowledgements, _Wait
from ha.broker.pop.state import Batch, PopState
from ha.broker.put_request import PutRequest
from ha.broker.timer_index import TimerIndex
from ha.causes import Cause
from ha.poller import Poller
from ha.protocol.codes import PutStatus
from ha.protocol.record import Message
from ha.protocol.record_digest import KEY_SIZE, QueueRun
from ha.protocol.record_encoding import encode_filler
from ha.replication.connection import HAConnection
from ha.replication.epoch_follower import EpochFollower
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.ha_session import HASession
from ha.replication.log import ReplicatedLog
from ha.replication.options import HAOptions
from ha.replication.overlap import Overlap
from ha.replication.progress import CloseReason
from ha.replication.session_plan import SessionEnd, SessionPlan
from ha.replication.statistics import Condition
from ha.store import commitlog, recovery
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import ConsumeQueue
from ha.store.consume_queues import ConsumeQueues
from ha.store.dispatch import Arrival, Dispatcher
from ha.store.files import Disk
from ha.store.flusher import Flusher, OnDone
from ha.store.index_file import IndexFile
from ha.store.log_scan import LogEnd, LogScan
from ha.store.mapped_file import RunBlocking, Segment
from ha.store.record_maker import AppendResult
from ha.store.recovery import LogRecovery
from ha.store.segment_files import truncate_segments
from ha.store.segmented_log import SegmentedLog
from tests.sim.planting import Bug, Plant, Planting, entered
from tests.sim.scenario import MASTER, Options, Plan

CRASHES = frozenset({"kill", "power", "kill_in_write", "power_in_write", "sync_error", "write_error"})
POWER = frozenset({"power", "power_in_write"})


BUGS: dict[str, Bug[Plan]] = {}
"""By name, in the order in which a message passes the code"""


def _bug(found_by: str, needs: Callable[[Plan], bool] = lambda plan: True) -> Callable[[Plant], Plant]:
    return entered(BUGS, found_by, needs=needs)


def _has_fault(plan: Plan, kinds: frozenset[str], *, on: str = "") -> bool:
    return any(fault.kind in kinds and (not on or fault.node == on) for fault in plan.faults)


def _is_sync(options: Options) -> bool:
    return options.role == "SYNC_MASTER"


def _flushes(plan: Plan) -> bool:
    return plan.options.master_flush == "SYNC_FLUSH"


# ---- the master's log


@_bug("durability")
def lost_filler(plant: Planting) -> None:
    """The filler at a segment's end is not written, so a reader of the log stops there."""
    plant.replace_in(commitlog, encode_filler)(lambda remaining: bytes(8))


@_bug("statuses", needs=lambda plan: plan.options.burst_max > 1)
def wrong_queue_offset_answered(plant: Planting) -> None:
    """All messages of one call are reported with the first one's queue offset."""
    real = CommitLog.append

    def append(self: CommitLog, messages: Sequence[Message], began: float | None = None) -> list[AppendResult]:
        results = real(self, messages, began)
        if len(results) > 1 and all(result.status is PutStatus.PUT_OK for result in results):
            first = results[0].queue_offset
            results = [msgspec.structs.replace(result, queue_offset=first) for result in results]
        return results

    plant.replace(CommitLog.append)(append)


@_bug("queue_offsets", needs=lambda plan: _has_fault(plan, CRASHES | {"stop"}, on=MASTER))
def queue_offset_reused_after_restart(plant: Planting) -> None:
    """After a restart a queue's counter starts at its last offset instead of behind it."""
    real = ConsumeQueues.next_queue_offset

    def next_queue_offset(self: ConsumeQueues, topic: str, queue_id: int) -> int:
        return max(0, real(self, topic, queue_id) - 1)

    plant.replace(ConsumeQueues.next_queue_offset)(next_queue_offset)


@_bug("statuses", needs=lambda plan: _is_sync(plan.options) and plan.options.min_in_sync_replicas > 1)
def refused_but_stored(plant: Planting) -> None:
    """A put is rejected for lack of replicas after it was appended."""
    real = Acknowledgements.refuse

    def refuse(
        self: Acknowledgements, requests: Sequence[PutRequest], status: PutStatus, cause: Cause, remark: str
    ) -> None:
        if status is PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH:
            for request in requests:
                trio.lowlevel.spawn_system_task(self._log.put, list(request.messages))
        real(self, requests, status, cause, remark)

    plant.replace(Acknowledgements.refuse)(refuse)


# ---- flushing


@_bug("statuses", needs=_flushes)
def skipped_fsync(plant: Planting) -> None:
    """The flusher raises the flushed offset without a sync."""

    async def sync(self: SegmentedLog, flushed: int, target: int) -> None:
        await trio.lowlevel.checkpoint()

    plant.replace(CommitLog.sync)(sync)


@_bug("statuses", needs=lambda plan: _has_fault(plan, frozenset({"sync_error"})))
def failed_sync_tried_again(plant: Planting) -> None:
    """A failed sync is retried; the kernel has marked the pages clean and reports success ("fsyncgate")."""
    real = CommitLog.sync

    async def sync(self: SegmentedLog, flushed: int, target: int) -> None:
        try:
            await real(self, flushed, target)
        except OSError:
            await real(self, flushed, target)

    plant.replace(CommitLog.sync)(sync)


@_bug("statuses", needs=_flushes)
def synced_one_segment_short(plant: Planting) -> None:
    """At the start of a new segment only that one is synced, not the end of the previous one."""
    real = CommitLog.sync

    async def sync(self: SegmentedLog, flushed: int, target: int) -> None:
        await real(self, max(flushed, (target - 1) // self.segment_size * self.segment_size), target)

    plant.replace(CommitLog.sync)(sync)


@_bug(
    "statuses",
    needs=lambda plan: _flushes(plan) and _has_fault(plan, frozenset({"disk_slow", "pause", "sync_error"}), on=MASTER),
)
def put_ok_on_flush_timeout(plant: Planting) -> None:
    """A flush timeout counts as a successful flush."""
    real = Flusher.request

    def request(self: Flusher, physical_offset: int, deadline: float, on_done: OnDone) -> None:
        def done(status: PutStatus) -> None:
            if status is PutStatus.FLUSH_DISK_TIMEOUT and trio.current_time() >= deadline:
                self._log.flushed_offset.raise_to(physical_offset)
            on_done(PutStatus.PUT_OK if self._log.flushed_offset.value >= physical_offset else status)

        real(self, physical_offset, deadline, done)

    plant.replace(Flusher.request)(request)


# ---- waiting for slaves


@_bug("statuses", needs=lambda plan: _is_sync(plan.options) and bool(plan.faults))
def put_ok_on_slave_timeout(plant: Planting) -> None:
    """An acknowledgement timeout counts as an acknowledgement."""
    real = _Wait.on_replicas

    def on_replicas(self: _Wait, status: PutStatus) -> None:
        real(self, PutStatus.PUT_OK if status is PutStatus.FLUSH_SLAVE_TIMEOUT else status)

    plant.replace(_Wait.on_replicas)(on_replicas)


@_bug(
    "statuses",
    needs=lambda plan: _is_sync(plan.options) and not plan.options.all_in_sync and not plan.options.in_sync_replicas,
)
def put_ok_without_slave(plant: Planting) -> None:
    """A SYNC_MASTER without slaves answers like an ASYNC_MASTER."""

    def answer(self: Acknowledgements, requests: list[PutRequest]) -> None:
        self._answer(requests)

    plant.replace(Acknowledgements._answer_unavailable)(answer)


@_bug("statuses", needs=lambda plan: _is_sync(plan.options) and plan.options.in_sync_replicas > 2)
def one_replica_too_few(plant: Planting) -> None:
    """inSyncReplicas counts the slaves and also the master, so one acknowledgement less is required."""
    real = Acknowledgements._make_ack_count

    def make_ack_count(self: Acknowledgements) -> int:
        count = real(self)
        return count - 1 if count > 2 else count

    plant.replace(Acknowledgements._make_ack_count)(make_ack_count)


@_bug("statuses", needs=lambda plan: _is_sync(plan.options) and plan.options.in_sync_replicas > 2 and bool(plan.faults))
def double_counted_slave(plant: Planting) -> None:
    """Acknowledgements are kept by slave but counted by connection, including closed ones."""
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

    plant.replace(HAService.acknowledged)(acknowledged)


@_bug(
    "statuses",
    needs=lambda plan: (
        _is_sync(plan.options) and plan.options.after_power_loss == "plain" and _has_fault(plan, POWER, on=MASTER)
    ),
)
def ack_beyond_end_accepted(plant: Planting) -> None:
    """A slave that reports more than the master's log holds is believed, and kept (as in RocketMQ 5.x)."""
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

    plant.replace(HAConnection._take_report)(take_report)
    plant.replace(HAConnection._write)(write)


# ---- the slave


@_bug("acks")
def ack_before_write(plant: Planting) -> None:
    """A slave's end is raised, and so reported, before the bytes are in its log."""
    real = CommitLog.append_raw

    async def append_raw(self: CommitLog, physical_offset: int, chunk: memoryview | bytes) -> None:
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

    plant.replace(CommitLog.append_raw)(append_raw)


@_bug("acks")
def segment_acknowledged_whole(plant: Planting) -> None:
    """A slave acknowledges the whole segment that it writes to, including bytes it was never sent."""
    real = HASession._reportable_offset
    assert isinstance(real, property)
    getter = real.fget

    def reportable_offset(self: HASession) -> int:
        offset: int = getter(self)
        size = self._log.segment_size
        return offset if self._log.min_offset < 0 else (offset // size + 1) * size

    plant.replace(HASession._reportable_offset)(reportable_offset)


@_bug("acks", needs=lambda plan: plan.options.slave_flush == "SYNC_FLUSH")
def ack_before_flush(plant: Planting) -> None:
    """A slave with SYNC_FLUSH acknowledges written bytes, flushed or not."""
    real = HASession.__init__

    def init(
        self: HASession,
        stream: trio.abc.Stream,
        log: ReplicatedLog,
        options: HAOptions,
        plan: SessionPlan,
        *,
        on_condition: Callable[[Condition, str], None],
        follower: EpochFollower | None = None,
        poller: Poller | None = None,
    ) -> None:
        options = msgspec.structs.replace(options, ack_flushed=False)
        real(self, stream, log, options, plan, on_condition=on_condition, follower=follower, poller=poller)

    plant.replace(HASession.__init__)(init)


@_bug("prefix", needs=lambda plan: bool(plan.faults))
def overlap_appended_again(plant: Planting) -> None:
    """The last byte compared at the start of a connection is appended again, so all following bytes are off by one."""
    real = Overlap.feed

    def feed(self: Overlap, chunk: memoryview) -> memoryview | None:
        behind = real(self, chunk)
        return behind if not behind else chunk[len(chunk) - len(behind) - 1 : -1]

    plant.replace(Overlap.feed)(feed)


@_bug("acks")
def append_over_a_gap(plant: Planting) -> None:
    """A slave accepts a chunk as the next one although an earlier piece never arrived."""
    real = HASession._append

    async def append(self: HASession, offset: int, chunk: memoryview) -> SessionEnd | None:
        if len(chunk) > 16 and len(chunk) % 16 == 7:
            end = self._log.max_offset
            kept, end.value = end.value, end.value  # the piece is dropped, but counted
            result = await real(self, offset, memoryview(bytes(8) + bytes(chunk[8:])))
            assert end.value >= kept
            return result
        return await real(self, offset, chunk)

    plant.replace(HASession._append)(append)


@_bug("convergence", needs=lambda plan: plan.options.after_power_loss == "plain" and _has_fault(plan, POWER, on=MASTER))
def overlap_check_skipped(plant: Planting) -> None:
    """A slave appends behind its own end without comparing, even bytes of a different history."""

    async def begin_overlap(self: HASession, first: int, own: int) -> None:
        await trio.lowlevel.checkpoint()

    plant.replace(HASession._begin_overlap)(begin_overlap)


# ---- recovery


@_bug("durability", needs=lambda plan: _has_fault(plan, CRASHES))
def truncated_too_far(plant: Planting) -> None:
    """After a crash recovery also cuts off the last valid record, flushed or not."""
    real = LogScan.find_end
    real_damage_end = LogRecovery.damage_end

    async def find_end(self: LogScan, first: int, run_blocking: RunBlocking) -> LogEnd:
        end = await real(self, first, run_blocking)
        if self._is_clean or end.last_record < 0:
            return end
        return msgspec.structs.replace(end, position=end.last_record)

    def damage_end(self: LogRecovery, first: int, end: LogEnd, last_ms: int) -> int | None:
        return None if end.position == end.last_record else real_damage_end(self, first, end, last_ms)

    plant.replace(LogScan.find_end)(find_end)
    plant.replace(LogRecovery.damage_end)(damage_end)


@_bug("soundness", needs=lambda plan: _has_fault(plan, POWER))
def torn_tail_left(plant: Planting) -> None:
    """Recovery finds the end of the log but leaves the torn bytes behind it."""
    plant.replace_in(recovery, truncate_segments)(cut_without_zeros)


def cut_without_zeros(disk: Disk, segments: list[Segment], end: int, reason: str) -> int:
    """`truncate_segments` without clearing the bytes behind the end."""
    cut = list(segments)
    files = [segment.file for segment in cut]
    for segment in cut:
        segment.file = Unzeroed(segment.file)
    try:
        return truncate_segments(disk, segments, end, reason)
    finally:
        for segment, file in zip(cut, files, strict=True):
            segment.file = file


class Unzeroed:
    """A file whose `zero` does nothing."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def zero(self, position: int, size: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@_bug("derived", needs=lambda plan: _has_fault(plan, POWER))
def queue_not_truncated(plant: Planting) -> None:
    """Entries of records that recovery cut off stay in their queues."""
    plant.replace(ConsumeQueue.truncate)(_truncate_nothing)


def _truncate_nothing(self: ConsumeQueue, physical_offset: int) -> int:
    return 0


# ---- what is derived


@_bug("statuses", needs=lambda plan: _flushes(plan) and plan.options.consumer_count > 0)
def unflushed_dispatched(plant: Planting) -> None:
    """With SYNC_FLUSH consumers get messages that are not on the disk yet."""
    real = Dispatcher.run

    async def run(self: Dispatcher) -> None:
        self._options = msgspec.structs.replace(self._options, flush_mode="ASYNC_FLUSH")
        await real(self)

    plant.replace(Dispatcher.run)(run)


@_bug("derived", needs=lambda plan: _has_fault(plan, CRASHES))
def queue_entry_doubled_after_restart(plant: Planting) -> None:
    """After a crash dispatch appends entries that the queue already has."""
    real = Dispatcher._build_queue

    def build_queue(self: Dispatcher, run: QueueRun) -> Arrival | None:
        queue = self._queues.get_or_create(run.topic, run.queue_id)
        queue.max_physical_offset = 0
        return real(self, msgspec.structs.replace(run, queue_offset=queue.max_offset, queue_offsets=None))

    plant.replace(Dispatcher._build_queue)(build_queue)
    plant.replace(ConsumeQueue.truncate)(_truncate_nothing)


@_bug("derived")
def index_entry_lost(plant: Planting) -> None:
    """The first key of a call that does not fit into an index file is counted as written there."""
    real = IndexFile.put

    def put(self: IndexFile, keys: bytes, new_bytes_max: int) -> int:
        taken = real(self, keys, new_bytes_max)
        return taken + 1 if taken * KEY_SIZE < len(keys) else taken

    plant.replace(IndexFile.put)(put)


@_bug("timers", needs=lambda plan: plan.options.timer_pause_s > 0)
def timer_fired_before_its_time(plant: Planting) -> None:
    """Due times are rounded down to seconds (as in RocketMQ), so timer messages are delivered up to a second early."""
    real = TimerIndex.pop_due

    def pop_due(self: TimerIndex, now_ms: int, count_max: int) -> list[tuple[int, int]]:
        return real(self, now_ms // 1000 * 1000 + 999, count_max)

    plant.replace(TimerIndex.pop_due)(pop_due)


@_bug("pop", needs=lambda plan: plan.options.pop_pause_s > 0)
def popped_message_visible_too_early(plant: Planting) -> None:
    """Invisible times are rounded down to seconds."""
    real = PopState.take_due

    def take_due(self: PopState, now_ms: int, count_max: int) -> list[Batch]:
        return real(self, now_ms // 1000 * 1000 + 999, count_max)

    plant.replace(PopState.take_due)(take_due)


@_bug("pop", needs=lambda plan: plan.options.pop_pause_s > 0)
def redelivery_forgotten(plant: Planting) -> None:
    """Of the pops whose messages are due, the last one is left out."""
    real = PopState.take_due

    def take_due(self: PopState, now_ms: int, count_max: int) -> list[Batch]:
        return real(self, now_ms, count_max)[:-1]

    plant.replace(PopState.take_due)(take_due)


# ---- tasks


@_bug("tasks")
def task_leaked(plant: Planting) -> None:
    """A task is started that no scope ends."""
    real = HAClient._follow

    async def follow(self: HAClient, address: str) -> SessionEnd:
        trio.lowlevel.spawn_system_task(self.state.wait_value, lambda _: False, context=copy_context())
        return await real(self, address)

    plant.replace(HAClient._follow)(follow)
