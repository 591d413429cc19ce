"""Bugs to plant in failover groups, like those of `tests.sim.bugs`; they once made RocketMQ's groups lose messages."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ha.broker.offset_requests import OffsetProcessor, _offset
from ha.broker.offsets import ConsumerOffsetTable
from ha.broker.pop.state import PopState
from ha.broker.timers import TimerService
from ha.failover import election, member
from ha.failover.agreement import GroupView, MemberRecord, RecordAge
from ha.failover.durable_state import DurableState
from ha.failover.election import Refusal, outdated_record
from ha.failover.lease import LeaseDeadline
from ha.failover.lease_keeper import LeaseKeeper
from ha.protocol.headers import GetMaxOffsetRequest, parse_header
from ha.protocol.pop_records import PopRecord
from ha.replication import sync_state
from ha.replication.sync_state import SyncStateSet
from ha.store import truncation
from ha.store.segment_files import truncate_segments
from tests.sim.agreement import SimAgreementService
from tests.sim.bugs import cut_without_zeros
from tests.sim.planting import Bug, Plant, Planting, entered
from tests.sim.scenario import GroupPlan

GROUP_BUGS: dict[str, Bug[GroupPlan]] = {}
"""By name"""


def _bug(found_by: str, needs: Callable[[GroupPlan], bool]) -> Callable[[Plant], Plant]:
    return entered(GROUP_BUGS, found_by, needs=needs)


def _has_fault(plan: GroupPlan, *kinds: str) -> bool:
    return any(fault.kind in kinds for fault in plan.faults)


def _ends_terms(plan: GroupPlan) -> bool:
    return _has_fault(plan, "kill", "cut_off", "apart", "service_cut", "isolate", "pause", "switch")


def _waits_for_members(plan: GroupPlan) -> bool:
    return plan.options.policy != "alone"


def _takes_its_time(plan: GroupPlan) -> bool:
    """Whether messages are acknowledged between the service's accepting a set and the master's learning of it."""
    return plan.options.service_delay_s > 0.1 and plan.options.pause_s < 1


@_bug("in_sync", needs=lambda plan: _waits_for_members(plan) and _takes_its_time(plan) and bool(plan.faults))
def expand_window(plant: Planting) -> None:
    """While a slave is being added to the set only the old set must acknowledge (apache/rocketmq#5663), so that slave,
    which may be elected, can lack acknowledged messages."""

    def note_sets(self: SyncStateSet) -> None:
        self._sets = (self.agreed,)

    plant.replace(SyncStateSet._update_sets)(note_sets)


@_bug("confirmed", needs=lambda plan: _has_fault(plan, "apart", "partition", "cut_off"))
def confirmed_by_who_is_there(plant: Planting) -> None:
    """The confirm offset is the minimum over the connected members of the set (apache/rocketmq#6662): a master cut off
    together with one of two slaves shows consumers messages that the other slave, elected, does not have."""

    def confirmed(
        previous: int, sets: Iterable[Collection[int]], held: Mapping[int, int], ack_count: int | None = None
    ) -> int:
        least: int = min(min(held[member] for member in members if member in held) for members in sets)
        return max(previous, least)

    plant.replace_in(sync_state, sync_state.confirmed)(confirmed)


@_bug("consumer_offsets", needs=lambda plan: _ends_terms(plan) and _waits_for_members(plan))
def offsets_beside_the_log(plant: Planting) -> None:
    """Committed offsets are kept outside the log, acknowledged at once and not truncated with it, and a group may start
    at an unconfirmed end of a queue: offsets can be beyond a truncated log (apache/rocketmq#4771)."""

    async def update(self: OffsetProcessor, connection: Any, command: Any) -> Any:
        journal, self._offsets.journal = self._offsets.journal, None
        try:
            return await real(self, connection, command)
        finally:
            self._offsets.journal = journal

    async def max_offset(self: OffsetProcessor, connection: Any, command: Any) -> Any:
        request = parse_header(GetMaxOffsetRequest, command.ext_fields)
        return _offset(command, self._store.log.next_queue_offset(request.topic, request.queue_id))

    real = OffsetProcessor.update
    plant.replace(OffsetProcessor.update)(update)
    plant.replace(OffsetProcessor.max_offset)(max_offset)
    plant.replace(ConsumerOffsetTable.adopt)(lambda self, table: None)
    plant.replace(ConsumerOffsetTable.begin_epoch)(lambda self, beyond: None)


@_bug("soundness", needs=lambda plan: _has_fault(plan, "apart", "cut_off", "pause"))
def stale_tail_after_cut(plant: Planting) -> None:
    """Bytes behind the end of a truncated log stay in its file (apache/rocketmq#10666): recovery may continue into
    them, and take unacknowledged messages as valid."""
    plant.replace_in(truncation, truncate_segments)(cut_without_zeros)


def _loses_power(plan: GroupPlan) -> bool:
    return plan.options.flush == "ASYNC_FLUSH" and _has_fault(plan, "power", "power_in_write")


@_bug("kept", needs=lambda plan: _waits_for_members(plan) and _loses_power(plan))
def power_loss_is_not_noticed(plant: Planting) -> None:
    """A member of the set is assumed to have every acknowledged message even after a power loss: the last master
    becomes master again without comparing logs."""

    def is_complete(self: DurableState) -> bool:
        return True

    plant.replace(DurableState.is_complete)(is_complete)


@_bug("terms", needs=lambda plan: _has_fault(plan, "service_restored"))
def older_record_is_believed(plant: Planting) -> None:
    """The service's record is always taken as the newest, even after a backup was restored."""

    def outdated(view: GroupView, own_known: RecordAge = (0, 0)) -> Refusal | None:
        return None

    plant.replace_in(election, outdated_record)(outdated)
    plant.replace_in(member, outdated_record)(outdated)


@_bug(
    "terms",
    needs=lambda plan: (
        not _waits_for_members(plan) and _has_fault(plan, "service_cut", "apart")
    ),  # otherwise no member answers
)
def lease_read_from_cache(plant: Planting) -> None:
    """A master assumes that it still holds its lease until it learns otherwise."""

    def at(self: LeaseDeadline) -> float:
        is_held = self._deadline > -math.inf and not self._has_ended
        return math.inf if is_held else -math.inf

    plant.replace(LeaseDeadline.at)(at)


@_bug("in_sync", needs=lambda plan: _waits_for_members(plan) and _has_fault(plan, "duplicate_id"))
def member_key_taken_over(plant: Planting) -> None:
    """A member writes its key although another process has it: two processes with one broker id both become followers,
    and the master mistakes one for the other."""

    def put_member(self: SimAgreementService, broker_id: int, number: int, member: MemberRecord, lease_id: int) -> int:
        return self.change({f"members/{broker_id}": (member, lease_id)})

    def saw(self: LeaseKeeper, view: GroupView) -> None:
        pass

    plant.replace(SimAgreementService.put_member)(put_member)
    plant.replace(LeaseKeeper.check_view)(saw)


@_bug("timers", needs=lambda plan: plan.options.timer_pause_s > 0 and _ends_terms(plan))
def timer_lost_in_failover(plant: Planting) -> None:
    """A new master delivers only what becomes due in its term: what became due while there was no master is lost."""
    real = TimerService._is_pending

    def is_pending(self: TimerService, queue_offset: int, code: int) -> bool:
        return real(self, queue_offset, code) and code >> 1 > self._wall_clock_ms()

    plant.replace(TimerService._is_pending)(is_pending)


def _has_pops(plan: GroupPlan) -> bool:
    return plan.options.pop_pause_s > 0 and _ends_terms(plan)


@_bug("pop", needs=_has_pops)
def pop_ack_not_in_the_log(plant: Planting) -> None:
    """An acknowledgement is answered, but the record of POP state does not have it: it is lost in a failover."""
    _omit(plant, "done")


@_bug("pop", needs=_has_pops)
def pop_checkpoint_not_in_the_log(plant: Planting) -> None:
    """The record of POP state has the group's new offset, but not what is in flight: a failover forgets it."""
    _omit(plant, "taken")


def _omit(plant: Planting, field: str) -> None:
    """Leaves a field of each queue out of the records of POP state."""
    real = PopState.take_changes

    def take_changes(self: PopState, size_max: int) -> PopRecord:
        record = real(self, size_max)
        for queue in record.queues:
            setattr(queue, field, [])
        return record

    plant.replace(PopState.take_changes)(take_changes)
