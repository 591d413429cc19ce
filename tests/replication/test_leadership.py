"""A master of a failover group: handshakes, acknowledgements, the sync-state set, and the end of a term."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.protocol.auto_switch_frame import MasterHandshake, SlaveHandshake
from ha.protocol.codes import PutStatus
from ha.protocol.epoch_file import EpochEntry
from ha.protocol.ha_frame import encode_report
from ha.replication.group_transfer import SYNC_STATE_SET, AckRequest
from ha.replication.ha_service import HAService
from ha.replication.leadership import Leadership
from ha.replication.options import HAOptions
from ha.replication.progress import CloseReason, SlaveState
from ha.replication.range_question import RANGE_QUESTION
from ha.replication.sync_state import SyncStateRules
from tests.replication.members import MASTER, OTHER, SLAVE, Member, MemberSide, lead, leading
from tests.replication.slave_side import SlaveSide


def leadership_of(service: HAService) -> Leadership:
    assert service.leadership is not None
    return service.leadership


@asynccontextmanager
async def served(service: HAService) -> AsyncIterator[trio.Nursery]:
    """The service runs; slaves are started in the nursery."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.group_transfer.run)
        nursery.start_soon(leadership_of(service).keep_set)
        await wait_all_tasks_blocked()
        yield nursery
        nursery.cancel_scope.cancel()


async def joined(
    service: HAService, nursery: trio.Nursery, offset: int, broker_id: int = SLAVE, run_id: int = 0
) -> MemberSide:
    """A member that has sent its handshake and reported `offset`."""
    slave = MemberSide(service, broker_id, run_id)
    slave.start(nursery)
    await slave.greet()
    await slave.report(offset)
    await wait_all_tasks_blocked()
    return slave


class Put:
    """A put that waits for the set."""

    def __init__(self, service: HAService, end: int, *, timeout_s: float = 3.0) -> None:
        self.status: PutStatus | None = None
        deadline = trio.current_time() + timeout_s
        service.group_transfer.submit_nowait([AckRequest(end, SYNC_STATE_SET, deadline, self._done)])

    def _done(self, status: PutStatus) -> None:
        assert self.status is None
        self.status = status


# Handshake and frames


async def test_a_handshake_is_answered_with_the_history() -> None:
    member = await Member(bytes(2456)).begin((1, 0), (3, 1535))
    async with served(leading(member)) as nursery:
        slave = MemberSide(leading(member))
        slave.start(nursery)
        await slave.greet()
        await wait_all_tasks_blocked()
        assert slave.answers == [MasterHandshake(2456, (EpochEntry(1, 0), EpochEntry(3, 1535)))]
        assert slave.frames == []


async def test_a_frame_ends_with_its_epoch() -> None:
    member = await Member(bytes(range(200)) * 10).begin((1, 300), (3, 1535), (4, 1600))
    async with served(service := leading(member)) as nursery:
        slave = await joined(service, nursery, 0)
        assert slave.heads == [
            (0, 300, 1, 300, 2000),
            (300, 1235, 1, 300, 2000),
            (1535, 65, 3, 1535, 2000),
            (1600, 400, 4, 1600, 2000),
        ]
        assert b"".join(body for _, _, body in slave.frames) == member.log.content


async def test_new_bytes_and_heartbeats_are_of_the_term() -> None:
    member = await Member(bytes(1000)).begin((1, 0), (2, 1000))
    async with served(service := leading(member, SLAVE)) as nursery:
        slave = await joined(service, nursery, 1000)
        member.log.put(b"x" * 10)
        await wait_all_tasks_blocked()
        await slave.report(1010)
        await trio.sleep(6)
        assert slave.heads == [(1000, 10, 2, 1000, 1000), (1010, 0, 2, 1000, 1010)]
        assert slave.frames[1][0] == 5.001


async def test_heartbeats_of_an_empty_log_have_no_offset() -> None:
    member = await Member().begin((1, 0))
    async with served(service := leading(member)) as nursery:
        slave = await joined(service, nursery, 0)
        await trio.sleep(5.5)
        member.log.put(b"x" * 10)
        await trio.sleep(6)
        assert [head[:2] for head in slave.heads] == [(-1, 0), (0, 10), (10, 0)]


@pytest.mark.parametrize(("from_last", "start"), [(False, 0), (True, 8192)])
async def test_where_an_empty_slave_starts(from_last: bool, start: int) -> None:
    member = await Member(bytes(9000)).begin((1, 0))
    async with served(service := leading(member)) as nursery:
        slave = MemberSide(service)
        slave.start(nursery)
        await slave.greet(from_last=from_last)
        await slave.report(0)
        await wait_all_tasks_blocked()
        assert slave.heads[0][0] == start


async def test_a_handshake_in_pieces_is_understood() -> None:
    member = await Member(bytes(100)).begin((1, 0))
    async with served(service := leading(member)) as nursery:
        slave = MemberSide(service)
        slave.start(nursery)
        for byte in SlaveHandshake(SLAVE).encode():
            await slave.stream.send_all(bytes([byte]))
            await trio.sleep(0.1)
        assert len(slave.answers) == 1
        await slave.greet()  # RocketMQ repeats it if the answer takes long
        await wait_all_tasks_blocked()
        assert len(slave.answers) == 1
        assert slave.close_reason is None


async def test_a_second_handshake_closes_the_connection() -> None:
    member = await Member(bytes(100)).begin((1, 0))
    async with served(service := leading(member)) as nursery:
        slave = await joined(service, nursery, 100)
        await slave.greet(learner=True)
        await wait_all_tasks_blocked()
        assert slave.close_reason is CloseReason.MALFORMED_REPORT


# Slaves that are no members


async def test_other_slaves_are_served_and_never_join_the_set() -> None:
    member = await Member(bytes(5000)).begin((1, 0), (2, 100))
    async with served(service := leading(member)) as nursery:
        plain = SlaveSide(service)
        plain.start(nursery)
        await plain.report(4800)
        await wait_all_tasks_blocked()
        await plain.report(5000)
        await wait_all_tasks_blocked()
        assert plain.heads == [(0.0, 4800, 200)]
        assert service.acknowledged() == [5000]
        assert leadership_of(service).proposed_set.value is None
        asking = SlaveSide(service, "127.0.0.1:40001")
        asking.start(nursery)
        await asking.stream.send_all(RANGE_QUESTION)
        await wait_all_tasks_blocked()
        assert asking.heads == [(0.0, 0, 0), (0.0, 5000, 0)]


async def test_an_ambiguous_first_report_is_resolved_by_time() -> None:
    """Eight bytes 00000001 00000000: a slave with four segments of one GiB."""
    member = await Member(bytes(100), first_offset=1 << 32).begin((1, 0))
    async with served(service := leading(member)) as nursery:
        slave = SlaveSide(service)
        slave.start(nursery)
        await slave.report(1 << 32)
        await trio.sleep(0.4)
        assert slave.heads == []
        await trio.sleep(0.2)
        assert slave.heads == [(0.5, 1 << 32, 100)]
        await slave.stream.send_all(encode_report((1 << 32) + 100))
        await wait_all_tasks_blocked()
        assert service.acknowledged() == [(1 << 32) + 100]


async def test_members_are_refused_while_not_leading() -> None:
    member = await Member(bytes(100)).begin((1, 0))
    service = HAService(member.log, member=member)
    async with served(service) as nursery:
        slave = await joined(service, nursery, 100)
        assert slave.close_reason is CloseReason.NOT_MASTER
        assert slave.received == b""


# What counts


async def test_a_put_waits_for_each_member_on_a_connection_of_this_term() -> None:
    member = await Member(bytes(1000)).begin((1, 0), (2, 1000))
    async with served(service := leading(member, SLAVE, OTHER)) as nursery:
        slave = await joined(service, nursery, 1000)
        member.log.put(b"x" * 10)
        put = Put(service, 1010)
        await wait_all_tasks_blocked()
        await slave.report(1010)
        await wait_all_tasks_blocked()
        assert put.status is None
        assert service.acknowledged_by_set() == -1
        other = await joined(service, nursery, 1000, OTHER)
        await wait_all_tasks_blocked()
        assert put.status is None
        assert member.log.dispatch_limit.value == 1000
        await other.report(1010)
        await wait_all_tasks_blocked()
        assert put.status is PutStatus.PUT_OK
        assert member.log.dispatch_limit.value == 1010


async def test_puts_wait_for_a_slave_before_it_joins() -> None:
    """RocketMQ #5663, over connections."""
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member)) as nursery:
        leadership = leadership_of(service)
        slave = await joined(service, nursery, 0)
        assert leadership.proposed_set.value is None
        await slave.report(1000)
        await wait_all_tasks_blocked()
        assert leadership.proposed_set.value == frozenset({MASTER, SLAVE})
        member.log.put(b"x" * 10)
        put = Put(service, 1010)
        await wait_all_tasks_blocked()
        assert put.status is None
        await slave.stream.aclose()
        await wait_all_tasks_blocked()
        assert put.status is None
        leadership.confirm_set({MASTER, SLAVE})
        assert leadership.proposed_set.value == frozenset({MASTER})
        await wait_all_tasks_blocked()
        assert put.status is None
        leadership.confirm_set({MASTER})
        assert leadership.proposed_set.value is None
        assert put.status is PutStatus.PUT_OK


async def test_puts_wait_only_briefly_for_a_joining_slave_that_stalls() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member)) as nursery:
        await trio.sleep(4)  # the set was looked at shortly before, and will be again in seconds
        slave = await joined(service, nursery, 0)
        member.log.put(b"x" * 10)
        await slave.report(1000)
        await wait_all_tasks_blocked()
        member.log.put(b"x" * 10)
        put = Put(service, 1020)
        await trio.sleep(0.9)
        assert put.status is None
        await trio.sleep(0.2)
        assert put.status is PutStatus.PUT_OK
        assert leadership_of(service).proposed_set.value is None


async def test_a_lost_member_fails_no_put_before_its_deadline() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE)) as nursery:
        slave = await joined(service, nursery, 1000)
        member.log.put(b"x" * 10)
        put = Put(service, 1010)
        await slave.stream.aclose()
        await trio.sleep(2.9)
        assert leadership_of(service).proposed_set.value == frozenset({MASTER})
        assert put.status is None
        assert service.explain(1010) == "broker 2 is in the sync-state set and not connected"
        await trio.sleep(0.2)
        assert put.status is PutStatus.FLUSH_SLAVE_TIMEOUT
        assert member.log.dispatch_limit.value == 1000


async def test_a_member_that_never_connects_is_dropped_in_time() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    service = leading(member, SLAVE)
    async with served(service):
        began = trio.current_time()
        await leadership_of(service).proposed_set.wait_value(lambda proposed: proposed is not None)
        assert leadership_of(service).proposed_set.value == frozenset({MASTER})
        assert round(trio.current_time() - began, 6) == 3.001


async def test_a_stalled_member_is_dropped_in_time() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    service = leading(member, SLAVE, options=HAOptions(housekeeping_interval_s=1000))
    async with served(service) as nursery:
        await joined(service, nursery, 1000)
        await trio.sleep(100)
        assert leadership_of(service).proposed_set.value is None
        began = trio.current_time()
        member.log.put(b"x" * 10)
        await leadership_of(service).proposed_set.wait_value(lambda proposed: proposed is not None)
        assert 15 < trio.current_time() - began <= 15.01


async def test_sends_continue_soon_after_a_member_stalls() -> None:
    """Its connection is open and its lease alive: the network between it and its master is cut."""
    member = await Member(bytes(1000)).begin((1, 0))
    rules = SyncStateRules(stalled_s_max=2.0)
    service = leading(member, SLAVE, options=HAOptions(housekeeping_interval_s=1000), rules=rules)
    leadership = leadership_of(service)
    async with served(service) as nursery:
        await joined(service, nursery, 1000)
        leadership.set_live_members({MASTER: 11, SLAVE: 0})
        await trio.sleep(100.3)
        began = trio.current_time()
        member.log.put(b"x" * 10)
        put = Put(service, 1010)
        await leadership.proposed_set.wait_value(lambda proposed: proposed is not None)
        assert trio.current_time() - began == pytest.approx(2.001, abs=0.5)
        assert put.status is None
        leadership.confirm_set({MASTER})
        assert put.status is PutStatus.PUT_OK


async def test_a_learner_is_served_and_never_proposed() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member)) as nursery:
        for broker_id, flags in ((SLAVE, {"learner": True}), (OTHER, {"from_last": True})):
            slave = MemberSide(service, broker_id)
            slave.start(nursery)
            await slave.greet(**flags)
            await slave.report(1000)
        await trio.sleep(10)
        assert leadership_of(service).proposed_set.value is None
        assert service.acknowledged() == [1000, 1000]


async def test_a_members_second_connection_replaces_the_first() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE)) as nursery:
        first = await joined(service, nursery, 1000)
        second = await joined(service, nursery, 900)
        assert first.close_reason is CloseReason.REPLACED
        assert service.acknowledged_by_set() == 900
        await second.report(1000)
        await wait_all_tasks_blocked()
        assert service.acknowledged_by_set() == 1000
        assert leadership_of(service).proposed_set.value is None
        assert [slave.broker_id for slave in service.statistics().slaves] == [SLAVE]


async def test_a_peer_with_the_masters_id_is_refused() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member)) as nursery:
        slave = await joined(service, nursery, 1000, MASTER)
        assert slave.close_reason is CloseReason.NO_MEMBER


@pytest.mark.parametrize("offset", [1001, 500])
async def test_an_impossible_report_closes_the_connection_and_does_not_count(offset: int) -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE)) as nursery:
        slave = await joined(service, nursery, 900)
        await slave.report(offset)
        await wait_all_tasks_blocked()
        assert slave.close_reason in (CloseReason.REPORT_BEYOND_END, CloseReason.OFFSET_MISMATCH)
        assert service.acknowledged_by_set() == -1


async def test_wait_held_returns_when_the_member_has_everything() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE, OTHER)) as nursery:
        held = trio.Event()

        async def wait() -> None:
            await leadership_of(service).wait_held(SLAVE, 1000)
            held.set()

        nursery.start_soon(wait)
        await joined(service, nursery, 1000, OTHER)
        slave = await joined(service, nursery, 900)
        assert not held.is_set()
        await slave.report(1000)
        await wait_all_tasks_blocked()
        assert held.is_set()


# The end of a term


async def test_step_down_ends_everything_of_the_term() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE)) as nursery:
        slave = await joined(service, nursery, 1000)
        plain = SlaveSide(service)
        plain.start(nursery)
        await plain.report(1000)
        await wait_all_tasks_blocked()
        member.log.put(b"x" * 10)
        put = Put(service, 1010)
        await wait_all_tasks_blocked()
        # Its acknowledgement is in flight.
        await slave.report(1010)
        leadership_of(service).step_down()
        assert put.status is PutStatus.FLUSH_SLAVE_TIMEOUT
        assert service.acknowledged_by_set() is None
        await wait_all_tasks_blocked()
        assert slave.close_reason is CloseReason.TERM_ENDED
        assert plain.close_reason is None
        assert member.log.dispatch_limit.value == 1000
        late = Put(service, 1010)
        assert late.status is PutStatus.FLUSH_SLAVE_TIMEOUT


async def test_retention_keeps_nothing_for_members_once_another_is_master() -> None:
    """They follow that one; a former master kept all later files, up to haRetainMaxBytes."""
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE, OTHER)) as nursery:
        away = await joined(service, nursery, 300)
        await away.stream.aclose()
        await joined(service, nursery, 700, OTHER)
        plain = SlaveSide(service)
        plain.start(nursery)
        await plain.report(900)
        await wait_all_tasks_blocked()
        assert service.lowest_needed_offset() == 300
        leadership_of(service).step_down()
        await wait_all_tasks_blocked()
        assert service.connection_count == 1
        assert service.lowest_needed_offset() == 900
        await plain.stream.send_stream.aclose()
        await wait_all_tasks_blocked()
        assert service.lowest_needed_offset() == 900
        await member.epochs.append(2, 1000)
        lead(service, member, SLAVE, OTHER)
        assert service.lowest_needed_offset() == 900


async def test_acks_of_one_term_do_not_count_in_the_next() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE)) as nursery:
        slave = await joined(service, nursery, 1000)
        member.log.put(b"x" * 10)
        await member.epochs.append(2, 1010)
        await slave.report(1010)  # it is in flight
        state = lead(service, member, SLAVE)
        await wait_all_tasks_blocked()
        assert slave.close_reason is CloseReason.TERM_ENDED
        assert service.acknowledged_by_set() == -1
        assert state.confirm_offset == 1000
        again = await joined(service, nursery, 1010)
        assert service.acknowledged_by_set() == 1010
        assert again.answers[0].epochs == (EpochEntry(1, 0), EpochEntry(2, 1010))
        assert member.log.dispatch_limit.value == 1010


async def test_late_calls_for_an_earlier_term_change_nothing() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    service = leading(member)
    leadership_of(service).step_down()
    leadership_of(service).confirm_set({MASTER, SLAVE})
    assert leadership_of(service).sync_state is None
    assert service.statistics().sync_state is None


async def test_the_set_is_what_in_sync_means_while_this_node_leads() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    service = leading(member, SLAVE, rules=SyncStateRules(min_in_sync_replicas=2))
    async with served(service) as nursery:
        slave = await joined(service, nursery, 1000)
        assert service.in_sync_replicas_nums(1000) == 2
        seen = service.statistics().sync_state
        assert seen is not None
        assert (seen.epoch, seen.members, seen.wished, seen.confirm_offset) == (1, (MASTER, SLAVE), None, 1000)
        assert service.statistics().slaves[0].state is SlaveState.TRANSFER
        await slave.stream.aclose()
        await wait_all_tasks_blocked()
        assert service.in_sync_replicas_nums(1000) == 1
        leadership_of(service).confirm_set({MASTER})
        member.log.put(b"x" * 10)
        assert service.acknowledged_by_set() == -1


# Two processes with one broker id


async def test_acks_of_a_process_that_lost_its_id_do_not_count() -> None:
    """It was cut off from the agreement service, not from the master; another process has its id now."""
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE)) as nursery:
        leadership = leadership_of(service)
        leadership.set_live_members({MASTER: 11, SLAVE: 21})
        first = await joined(service, nursery, 1000, run_id=21)
        leadership.set_live_members(
            {MASTER: 11}
        )  # its lease has ended: it counts as long as no other process has the id
        member.log.put(b"x" * 10)
        put = Put(service, 1010)
        await first.report(1010)
        await wait_all_tasks_blocked()
        assert put.status is PutStatus.PUT_OK
        member.log.put(b"x" * 10)
        put = Put(service, 1020)
        leadership.set_live_members({MASTER: 11, SLAVE: 22})
        await wait_all_tasks_blocked()
        assert first.close_reason is CloseReason.OTHER_RUN
        assert leadership.acknowledged_offset != 1020
        again = MemberSide(service, SLAVE, 21)
        again.start(nursery)
        await again.greet()
        await wait_all_tasks_blocked()
        assert (again.close_reason, again.answers) == (CloseReason.OTHER_RUN, [])
        assert put.status is None
        second = await joined(service, nursery, 1020, run_id=22)
        assert second.close_reason is None
        assert leadership.acknowledged_offset == 1020


async def test_a_report_in_flight_when_the_id_is_lost_does_not_count() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE)) as nursery:
        leadership = leadership_of(service)
        leadership.set_live_members({SLAVE: 21})
        slave = await joined(service, nursery, 900, run_id=21)
        await slave.report(1000)
        leadership.set_live_members({SLAVE: 22})
        await wait_all_tasks_blocked()
        assert leadership.acknowledged_offset != 1000


async def test_an_unknown_process_is_admitted_and_stays() -> None:
    """It may have just started: the master's view of the agreement service lags."""
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE)) as nursery:
        leadership = leadership_of(service)
        leadership.set_live_members({SLAVE: 21})
        slave = await joined(service, nursery, 1000, run_id=22)
        leadership.set_live_members({SLAVE: 22})
        await wait_all_tasks_blocked()
        assert slave.close_reason is None
        assert leadership.acknowledged_offset == 1000


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_slave_without_a_run_id_is_admitted_unless_one_is_known(is_known: bool) -> None:
    """RocketMQ's slaves and earlier releases send none, and their keys have none."""
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member)) as nursery:
        leadership = leadership_of(service)
        leadership.set_live_members({SLAVE: 21})
        if not is_known:
            leadership.set_live_members({SLAVE: 0})
        slave = await joined(service, nursery, 1000)
        assert slave.close_reason is (CloseReason.OTHER_RUN if is_known else None)


async def test_the_same_process_may_connect_again() -> None:
    member = await Member(bytes(1000)).begin((1, 0))
    async with served(service := leading(member, SLAVE)) as nursery:
        leadership_of(service).set_live_members({SLAVE: 21})
        old = await joined(service, nursery, 1000, run_id=21)
        new = await joined(service, nursery, 1000, run_id=21)
        assert (old.close_reason, new.close_reason) == (CloseReason.REPLACED, None)
