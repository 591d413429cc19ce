"""Members of a group, with fake roles and an agreement in memory, under a virtual clock."""

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from ha.errors import ConfigError, DamagedBytes, DiskFull
from ha.failover.agreement import AgreementUnavailable, GroupRecord, MasterRecord, SwitchRequest
from ha.failover.member import open_member
from ha.failover.member_state import TRANSITIONS, MemberProgress, MemberState
from ha.failover.role import LogPosition, Term
from tests.failover.contract import MEMBER
from tests.failover.group import Group, MemoryFile, Node, open_group, open_three, three, until
from tests.sim.agreement import Snapshot

Clock = trio.testing.MockClock


def others(group: Group, master: Node) -> list[Node]:
    return [node for node in group.nodes.values() if node is not master]


async def test_a_new_group_elects_one_and_the_others_follow(autojump_clock: Clock) -> None:
    async with open_group(1, 2, 3) as group:
        await group.settle()
        assert group.masters == [(1, 1)]
        assert group.view.group == GroupRecord(epoch=1, master_id=1, sync_state_set=frozenset({1}), version=1)
        assert [node.state for node in group.nodes.values()] == [
            MemberState.MASTER,
            MemberState.FOLLOWING,
            MemberState.FOLLOWING,
        ]
        assert trio.current_time() < 1
        await until(lambda: all(member.stands_for == 0 for member in group.view.members.values()))


async def test_one_alone_is_master_of_itself(autojump_clock: Clock) -> None:
    async with open_group(7) as group:
        assert (await group.wait_master()).id == 7


async def test_a_new_group_is_created_by_the_longest_log(autojump_clock: Clock, nursery: trio.Nursery) -> None:
    group = Group(nursery)
    nursery.start_soon(group.timers.run)
    for id_ in (1, 2, 3):
        group.add(id_).role.position = LogPosition(0, 1000 if id_ == 2 else 0)
    assert (await group.wait_master()).id == 2


async def test_a_killed_master_is_replaced_within_its_lease_and_a_second(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        killed_at = trio.current_time()
        master.kill()
        heir = await group.wait_master(other_than=master.id)
        assert trio.current_time() - killed_at < 3.0
        assert heir.role.term is not None
        assert heir.role.term.epoch == 2
        assert group.view.group is not None
        assert group.view.group.sync_state_set == {2, 3}  # the dead one has left
        await group.settle()


async def test_only_the_set_is_elected_and_a_master_that_returns_follows(autojump_clock: Clock) -> None:
    async with open_group(1, 2, 3) as group:
        await group.settle()
        await group.in_set(1, 3)
        group.nodes[1].kill()
        assert (await group.wait_master(other_than=1)).id == 3
        back = group.restart(1)
        await group.settle()
        assert back.role.following == 3
        assert group.masters == [(1, 1), (2, 3)]


async def test_nobody_is_elected_while_the_whole_set_is_gone(autojump_clock: Clock) -> None:
    async with open_group(1, 2, 3) as group:
        await group.settle()
        group.nodes[1].kill()
        await trio.sleep(60)
        assert group.masters == [(1, 1)]
        assert "not in the sync-state set [1]" in group.nodes[2].member.progress.reason
        group.restart(1)
        assert (await group.wait_master()).id == 1
        assert group.masters == [(1, 1), (2, 1)]


async def test_an_unclean_election_if_configured(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async with open_group(1) as group:
        await group.settle()
        group.add(2, elects_unclean=True)
        group.allows_unclean = True
        await group.settle()
        group.nodes[1].kill()
        assert (await group.wait_master(other_than=1)).id == 2
        [said] = [record for record in caplog.records if "member.elected_unclean" in record.getMessage()]
        assert said.levelname == "ERROR"
        assert "acknowledged messages may be lost" in said.getMessage()


async def test_a_learner_is_never_elected(autojump_clock: Clock) -> None:
    """Not even in a new group, where everybody else is."""
    async with open_group() as group:
        learner = group.add(1, is_learner=True, elects_unclean=True)
        learner.role.position = LogPosition(0, 1000)
        await trio.sleep(60)
        assert group.view.group is None
        assert "asyncLearner" in learner.member.progress.reason
        group.add(2)
        assert (await group.wait_master()).id == 2
        await group.settle()
        assert learner.role.following == 2
        group.nodes[2].kill()
        await trio.sleep(60)
        group.restart(2)
        await group.settle()
        assert group.masters == [(1, 2), (2, 2)]


async def test_a_preferred_member_is_elected_but_does_not_take_over_when_it_returns(
    autojump_clock: Clock,
) -> None:
    async with open_group() as group:
        for id_, priority in ((1, 9), (2, 1), (3, 5)):
            group.add(id_, priority=priority)
        preferred = await three(group)
        assert preferred.id == 2
        preferred.kill()
        heir = await group.wait_master(other_than=2)
        assert heir.id == 3
        back = group.add(2, priority=1)
        back.role.position = preferred.role.position
        await group.settle()
        await group.in_set(1, 2, 3)
        await trio.sleep(60)
        assert group.masters == [(1, 2), (2, 3)]
        heir.role.caught_up(2)
        await group.nodes[1].way.request_switch(SwitchRequest(to=None))
        assert (await group.wait_master(other_than=3)) is back


async def test_a_master_without_the_service_stops_before_its_lease_ends(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        cut_at = trio.current_time()
        master.way.cut(True)
        await until(lambda: not master.may_acknowledge)
        assert 1.0 < trio.current_time() - cut_at <= 1.81
        assert group.view.master is not None  # the service has not noticed yet
        await trio.testing.wait_all_tasks_blocked()
        assert master.state is MemberState.FOLLOWING
        heir = await group.wait_master(other_than=master.id)
        master.way.cut(False)
        await group.settle()
        assert master.role.following == heir.id


async def test_the_services_lease_outlives_the_members_deadline(autojump_clock: Clock) -> None:
    """The service counts from when it executed the request: a quarter of a second after it was sent."""
    async with open_group(1) as group:
        group.service.lease_late_s = (0.0, 0.0)
        node = group.nodes[1]
        node.way.delay(each_way_s=0.25)
        deadlines = set()
        for _ in range(500):
            await trio.sleep(0.01)
            held = node.member.keeper.held.value
            if held is not None:
                assert held.deadline.at < group.service._leases[held.lease.id].ends_at
                deadlines.add(held.deadline.at)
        assert len(deadlines) >= 3  # of the grant and of renewals


async def test_the_service_is_away_for_two_minutes(autojump_clock: Clock) -> None:
    """The master continues for its lease, slaves stay with it, there is no election, and all recover."""
    async with open_three() as (group, master):
        for node in group.nodes.values():
            node.way.cut(True)
        await trio.sleep(1.0)
        assert master.may_acknowledge
        await trio.sleep(119)
        assert group.masters == [(1, master.id)]
        assert not any(node.may_acknowledge for node in group.nodes.values())
        assert [node.role.following for node in others(group, master)] == [master.id, master.id]
        assert "deadline has passed" in " ".join(master.role.story) or master.state is MemberState.FOLLOWING
        for node in group.nodes.values():
            node.way.cut(False)
        healed_at = trio.current_time()
        await group.settle()
        assert trio.current_time() - healed_at < 5


async def test_a_short_outage_of_the_service_is_not_noticed(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        for node in group.nodes.values():
            node.way.cut(True)
        await trio.sleep(0.9)
        for node in group.nodes.values():
            node.way.cut(False)
        await trio.sleep(10)
        assert group.masters == [(1, master.id)]
        assert master.may_acknowledge


async def test_an_election_whose_answer_is_lost_counts(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        for node in others(group, master):
            node.way.loses.add("taking mastership")
            node.way.hold_watch(False)
        master.kill()
        heir = await group.wait_master(other_than=master.id)
        assert group.masters == [(1, master.id), (2, heir.id)]


async def test_a_master_knows_the_live_members(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        assert master.role.living.keys() == {1, 2, 3}
        group.nodes[3].kill()
        await until(lambda: master.role.living.keys() == {1, 2})
        group.restart(3)
        await until(lambda: master.role.living.keys() == {1, 2, 3})


async def test_a_set_change_without_answer_is_confirmed_by_the_view(autojump_clock: Clock) -> None:
    async with open_group(1, 2, 3) as group:
        await group.settle()
        master = await group.wait_master()
        master.way.loses.add("changing the group")
        await group.in_set(1, 2)
        assert group.view.group is not None
        assert group.view.group.sync_state_set == {1, 2}
        assert master.may_acknowledge


async def test_the_set_is_not_changed_by_a_master_that_is_cut_off(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        master.way.cut(True)
        master.role.want(1)
        await trio.sleep(1.5)
        assert master.role.confirmed == {1, 2, 3}
        heir = await group.wait_master(other_than=master.id)
        master.way.cut(False)
        await group.settle()
        assert group.view.group is not None
        assert group.view.group.master_id == heir.id
        assert group.view.group.sync_state_set == {1, 2, 3} - {master.id}


async def test_two_candidates_at_once(autojump_clock: Clock) -> None:
    """Both try at the same time: the transaction accepts one."""
    async with open_three() as (group, master):
        for node in others(group, master):
            node.way.hold_watch(True)
        master.kill()
        await trio.sleep(3)
        for node in others(group, master):
            node.way.hold_watch(False)
        await group.settle()
        assert [epoch for epoch, _ in group.masters] == [1, 2]


async def test_a_stale_watch_causes_no_election(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        late = others(group, master)[1]
        late.way.delay(watch_s=1.5)
        master.kill()
        heir = await group.wait_master(other_than=master.id)
        await trio.sleep(30)
        assert group.masters == [(1, master.id), (2, heir.id)]
        assert heir.may_acknowledge
        assert late.role.following == heir.id


async def test_a_lease_shorter_than_the_delays_elects_nobody(autojump_clock: Clock) -> None:
    async with open_group() as group:
        node = group.add(1, call_timeout_s=10.0)
        node.way.delay(each_way_s=1.0)  # two seconds there and back, and two of lease
        await trio.sleep(60)
        assert not group.masters
        assert node.member.keeper.last_error
        node.way.delay(each_way_s=0.01)
        assert (await group.wait_master()) is node


async def test_an_election_that_the_service_refuses_is_repeated_with_pauses(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As etcd does at once, and for as long as its disk quota is used up."""
    tries = 0

    async def refuse(*_: object, **__: object) -> int:
        nonlocal tries
        tries += 1
        await trio.lowlevel.checkpoint()
        raise AgreementUnavailable("taking mastership", "database space exceeded", outcome_unknown=False)

    async with open_group() as group:
        node = group.add(1)
        monkeypatch.setattr(node.way, "take_mastership", refuse)
        await trio.sleep(10)
        assert "database space exceeded" in node.member.progress.reason
        assert 10 < tries < 60
        monkeypatch.undo()
        assert (await group.wait_master()) is node


async def test_a_candidate_learns_from_a_refusal_that_the_service_was_rolled_back(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes before the watch shows it. The candidate repeated its transaction without end."""
    snapshots: list[Snapshot] = []
    tries = 0

    async with open_group() as group:
        node = group.add(1)
        take = node.way.take_mastership

        async def take_while_the_service_changes(*args: Any, **options: Any) -> int:
            nonlocal tries
            tries += 1
            assert tries < 3, "the same transaction again"
            if tries == 1:
                snapshots.append(group.service.snapshot())
                group.put_record(GroupRecord(epoch=0, master_id=None, sync_state_set=frozenset(), version=1))
            elif tries == 2:
                node.way.hold_watch(True)
                group.restore(snapshots[0], keeps_leases=True)
            return await take(*args, **options)

        monkeypatch.setattr(node.way, "take_mastership", take_while_the_service_changes)
        await trio.sleep(10)
        assert tries == 2
        assert "the service was restored from an older state" in node.member.progress.reason


async def test_a_lost_lease_ends_the_term_at_once(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        group.service.revoke(group.view.master_lease_id)
        await group.wait_master(other_than=None)
        await trio.sleep(1)
        assert len(group.masters) == 2
        assert master.role.story.count("master of 1") == 1


async def getting_ready(group: Group) -> tuple[Node, Node]:
    """The member whose term has started, but which takes half a minute to become master, and the remaining one."""
    master = await three(group)
    heir, other = others(group, master)
    heir.role.become_master_s = 30.0
    other.way.delay(watch_s=0.3)
    master.kill()
    await until(lambda: group.master not in (None, master))
    assert group.master is heir
    return heir, other


async def test_a_term_that_ends_before_its_master_serves(autojump_clock: Clock) -> None:
    async with open_group(1, 2, 3) as group:
        heir, other = await getting_ready(group)
        heir.way.cut(True)
        assert (await group.wait_master(other_than=heir.id)) is other
        assert heir.role.term is None
        assert heir.state is MemberState.FOLLOWING


async def test_a_master_that_stops_before_it_serves_hands_nothing_over(autojump_clock: Clock) -> None:
    async with open_group(1, 2, 3) as group:
        heir, other = await getting_ready(group)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heir.member.leave)
            heir.way.cut(True)
        assert not heir.role.is_holding
        assert (await group.wait_master(other_than=heir.id)) is other


@pytest.mark.parametrize(
    "trouble",
    [
        DiskFull(Path("epochFileCheckpoint"), 0, OSError(errno.ENOSPC, "No space left on device")),
        DamagedBytes(0, 4096, "the disk can't read it"),
        None,
    ],
    ids=["no_room_for_the_term", "log_is_damaged", "no_room_for_the_record"],
)
async def test_a_member_whose_disk_is_in_trouble_leaves_the_office_to_another(
    trouble: Exception | None, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trouble`: of its store; None: it waits for room for the group's record."""

    async def write(content: bytes) -> None:
        await trio.sleep_forever()

    async def become_master(term: Term) -> None:
        assert trouble is not None
        raise trouble

    async with open_three() as (group, master):
        heir, other = others(group, master)
        if trouble is None:
            monkeypatch.setattr(heir.file, "write", write)
        else:
            monkeypatch.setattr(heir.role, "become_master", become_master)
        master.kill()
        assert (await group.wait_master(other_than=master.id)) is other
        await group.settle()
        assert [id_ for _, id_ in group.masters] == [master.id, heir.id, other.id]
        assert not heir.is_dead


async def test_a_member_without_another_becomes_master_once_its_disk_has_room(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def become_master(term: Term) -> None:
        raise DiskFull(Path("epochFileCheckpoint"), 0, OSError(errno.ENOSPC, "No space left on device"))

    async with open_group() as group:
        node = group.add(1)
        with monkeypatch.context() as full:
            full.setattr(node.role, "become_master", become_master)
            await trio.sleep(17)
            assert not node.may_acknowledge
            assert "No space left" in node.member.progress.reason
            assert len(group.masters) == 4
        assert (await group.wait_master()) is node
        assert len(group.masters) == 5


async def test_a_member_that_ends_before_it_serves_hands_nothing_over(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of the group is being written when the member is cancelled; its node did not become master."""
    written = trio.Event()

    async def write(content: bytes) -> None:
        with trio.CancelScope(shield=True):
            await written.wait()

    async with open_group(1, 2, 3) as group, trio.open_nursery() as nursery:
        heir, other = await getting_ready(group)
        monkeypatch.setattr(heir.file, "write", write)
        heir.role.want(1, 2, 3)
        await until(lambda: group.view.group is not None and group.view.group.sync_state_set == {1, 2, 3})
        nursery.start_soon(heir.member.leave)
        await trio.testing.wait_all_tasks_blocked()
        heir.kill()
        await trio.testing.wait_all_tasks_blocked()
        assert not heir.role.is_holding
        written.set()
        assert (await group.wait_master(other_than=heir.id)) is other


async def test_a_member_waits_for_its_earlier_lease(autojump_clock: Clock) -> None:
    async with open_group(1) as group:
        master = await group.wait_master()
        master.kill()
        back = group.restart(1)
        await trio.sleep(0.5)
        assert not back.may_acknowledge
        assert "earlier run" in back.member.progress.reason
        assert (await group.wait_master()) is back
        assert group.masters == [(1, 1), (2, 1)]


async def test_a_foreign_log_is_excluded(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async with open_group(1) as group:
        await group.settle()
        stranger = Node(group, 2, MemoryFile())
        stranger.role.position = LogPosition(5, 5000)
        group.nodes[2] = stranger
        group._nursery.start_soon(stranger.run)
        await trio.sleep(5)
        assert stranger.role.following is None
        assert "epoch 5" in stranger.member.progress.reason
        assert any(record.levelname == "ERROR" for record in caplog.records)
        group.nodes[1].kill()
        await trio.sleep(30)
        assert group.masters == [(1, 1)]


# Power


async def test_a_master_that_lost_power_is_not_elected_again_before_one_that_has_everything(
    autojump_clock: Clock,
) -> None:
    async with open_three() as (group, master):
        for node in group.nodes.values():
            node.role.position = master.role.position
        master.kill()
        again = group.restart(master.id, lost_bytes=50)
        new = await group.wait_master(other_than=master.id)
        await group.settle()
        assert not again.state_on_disk.is_complete
        assert again.id not in new.role.confirmed
        again.role.has_caught_up.set()
        await until(lambda: group.view.members[again.id].is_complete)


async def test_a_master_that_was_only_killed_is_complete(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        master.kill()
        again = group.restart(master.id)
        again.role.catches_up = False
        await group.wait_master()
        await group.settle()
        assert again.state_on_disk.is_complete


async def test_nobody_is_elected_until_all_are_back_if_all_lost_power(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_three() as (group, master):
        for node in group.nodes.values():
            node.role.position = master.role.position
        for node in list(group.nodes.values()):
            node.kill()
        lost = {id_: 10 * id_ for id_ in group.nodes}
        first, second, third = sorted(group.nodes, key=lambda id_: -lost[id_])
        for id_ in (first, second):
            group.restart(id_, lost_bytes=lost[id_])
        await trio.sleep(30)
        assert group.master is None
        assert f"waiting for [{third}]" in group.nodes[first].member.progress.reason
        group.restart(third, lost_bytes=lost[third])
        await group.wait_master()
        assert group.master is group.nodes[third]
        assert any("member.elected_in_doubt" in record.message for record in caplog.records)
        assert group.nodes[third].state_on_disk.is_complete


async def test_an_election_in_doubt_waits_for_members_that_restart(autojump_clock: Clock) -> None:
    """One of them may have the longest log, and be in no view until its earlier lease has ended."""
    async with open_three() as (group, master):
        for node in others(group, master):
            node.role.position = master.role.position
            node.kill()
            group.restart(node.id, lost_bytes=10)
        await until(lambda: all(node.role.following == master.id for node in others(group, master)))
        master.kill()
        await until(lambda: group.view.master is None)
        vacant_at = trio.current_time()
        group.restart(master.id, lost_bytes=20)
        await group.wait_master()
        assert group.master is not group.nodes[master.id]
        assert trio.current_time() - vacant_at > 1.9 * master.options.lease_ttl_s


async def test_a_caught_up_member_is_complete_until_the_next_power_loss(autojump_clock: Clock) -> None:
    async with open_three() as (group, _):
        slave = next(node for node in group.nodes.values() if node is not group.master)
        slave.kill()
        slave = group.restart(slave.id, lost_bytes=50)
        await group.settle()
        slave.kill()
        slave = group.restart(slave.id)
        slave.role.catches_up = False
        await group.settle()
        assert not slave.state_on_disk.is_complete  # it had not caught up
        slave.role.has_caught_up.set()
        await until(lambda: slave.state_on_disk.is_complete)
        slave.kill()
        slave = group.restart(slave.id)
        await group.settle()
        assert slave.state_on_disk.is_complete
        slave.kill()
        slave = group.restart(slave.id, lost_bytes=0)
        await group.settle()
        assert not slave.state_on_disk.is_complete


# A service that was restored from an older state


async def stale_group(group: Group) -> tuple[Node, Snapshot]:
    """A master that is alone in the set, and a backup from when all three were in it. The others are down."""
    master = await three(group)
    snapshot = group.service.snapshot()
    for node in group.nodes.values():
        if node is not master:
            node.kill()
    master.role.want(master.id)
    await until(lambda: master.role.confirmed == {master.id})
    return master, snapshot


async def test_members_that_were_dropped_are_not_elected_by_an_older_record(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_group(1, 2, 3) as group:
        master, snapshot = await stale_group(group)
        stale = [group.restart(node.id) for node in list(group.nodes.values()) if node is not master]
        group.restore(snapshot)
        await trio.sleep(30)
        assert group.master is None
        assert not master.may_acknowledge
        for node in [master, *stale]:
            reason = node.member.progress.reason
            assert "the group's record is of epoch 1, version" in reason
            assert "member 1" in reason or "this member" in reason
            assert "memberstate" in reason
        assert any(record.levelname == "ERROR" for record in caplog.records)
        # As an operator does: the newest record that any member knows.
        newest = master.state_on_disk.group
        assert newest is not None
        assert newest.sync_state_set == {master.id}
        group.put_record(newest)
        await group.wait_master()
        assert group.master is master


async def test_a_master_stops_when_the_service_is_rolled_back(autojump_clock: Clock) -> None:
    async with open_group(1, 2, 3) as group:
        master, snapshot = await stale_group(group)
        group.service.restore(snapshot, keeps_leases=True)
        await until(lambda: not master.may_acknowledge)
        await trio.sleep(10)
        assert "version" in master.member.progress.reason
        assert group.view.members[master.id].known_age == master.state_on_disk.known_age


async def test_an_outdated_record_causes_no_endless_writes(autojump_clock: Clock) -> None:
    """An operator may restore the newest record hours later; until then the service must not fill with revisions."""
    async with open_three() as (group, master):
        for node in group.nodes.values():
            node.way.delay(watch_s=0.005)  # a write is answered before the watch shows it
        snapshot = group.service.snapshot()
        await group.in_set(master.id)
        group.restore(snapshot)
        await trio.sleep(5)
        assert group.master is None
        revision = group.view.revision
        await trio.sleep(60)
        assert group.view.revision == revision
        assert group.view.members[master.id].known_age == master.state_on_disk.known_age


async def test_a_master_that_changes_the_set_learns_that_the_service_has_lost_the_group(autojump_clock: Clock) -> None:
    """The service is restored to a state from before the group's first record; its answer comes before the watch."""
    async with open_group() as group:
        empty = group.service.snapshot()
        for id_ in (1, 2, 3):
            group.add(id_)
        master = await three(group)
        master.way.hold_watch(True)
        group.restore(empty)
        master.role.want(master.id)
        await until(lambda: not master.may_acknowledge)
        assert trio.current_time() < 5
        master.way.hold_watch(False)
        await until(lambda: "the group has no record" in master.member.progress.reason)
        assert group.master is None


async def test_a_master_whose_record_was_deleted_ends_its_term(autojump_clock: Clock) -> None:
    """Without a record the set can't change any more, so a lost member would stop all sends for good."""
    async with open_three() as (group, master):
        group.service.change({}, ("group",))
        await until(lambda: group.master is None)
        await until(lambda: "the group has no record" in master.member.progress.reason)
        assert not master.may_acknowledge


async def test_a_master_that_stops_hands_nothing_over_when_the_service_has_lost_the_group(
    autojump_clock: Clock,
) -> None:
    async with open_group() as group, trio.open_nursery() as nursery:
        empty = group.service.snapshot()
        for id_ in (1, 2, 3):
            group.add(id_)
        master = await three(group)
        nursery.start_soon(master.member.leave)
        await until(lambda: master.role.is_holding)
        group.restore(empty)
        await until(lambda: not master.may_acknowledge)
        for node in others(group, master):
            master.role.caught_up(node.id)
        await until(lambda: master.member.keeper.held.value is None)
        assert len(group.masters) == 1


async def test_an_answer_from_before_a_rollback_does_not_hide_what_follows(autojump_clock: Clock) -> None:
    """It comes late, or from a server of etcd that is restored after the others."""
    async with open_three() as (group, master):
        stale = msgspec.structs.replace(group.view, revision=group.view.revision + 100)
        for node in others(group, master):
            node.member.known.update(stale)
        master.kill()
        await group.wait_master(other_than=master.id)
        await group.settle()
        assert [epoch for epoch, _ in group.masters] == [1, 2]


async def test_a_new_member_waits_for_the_others_records(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        for node in list(group.nodes.values()):
            node.kill()
        await until(lambda: not group.view.members)
        started_at = trio.current_time()
        for id_ in (1, 2, 3):
            group.restart(id_)
        await group.wait_master()
        assert group.master is group.nodes[master.id]
        assert trio.current_time() - started_at >= 2 * group.nodes[1].options.lease_ttl_s


async def test_a_master_that_was_cut_off_before_a_restore_waits_for_what_others_know(autojump_clock: Clock) -> None:
    """Its lease lives again, and does not show that another member was master meanwhile and has restarted since."""
    async with open_group(1, 2) as group:
        await group.settle()
        await group.in_set(1, 2)
        former = await group.wait_master()
        snapshot = group.service.snapshot()
        former.way.cut(True, held_share=0)
        master = await group.wait_master(other_than=former.id)
        master.kill()
        group.restart(master.id)
        group.restore(snapshot, keeps_leases=True)
        former.way.cut(False)
        await trio.sleep(30)
        assert group.master is None
        assert "knows one of epoch 2" in former.member.progress.reason


async def test_the_key_of_a_master_that_is_gone_does_not_show_what_is_known_of_the_group(autojump_clock: Clock) -> None:
    """The service is restored with the leases of then, and the master's next process knows a newer record."""
    async with open_group(1, 2) as group:
        await group.settle()
        await group.in_set(1, 2)
        master = await group.wait_master()
        [slave] = others(group, master)
        slave.kill()
        await until(lambda: slave.id not in group.view.members)
        snapshot = group.service.snapshot()
        await group.in_set(master.id)
        master.kill()
        group.restore(snapshot, keeps_leases=True)
        group.restart(master.id).way.delay(each_way_s=0.05)
        slave = group.restart(slave.id)
        await until(lambda: slave.role.following == master.id)
        await trio.sleep(30)
        assert group.master is None
        assert "knows one of epoch 1" in slave.member.progress.reason


async def test_a_master_says_why_it_cannot_change_the_set(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd refuses all writes when its database is full, but still renews leases."""

    async def refuse(group: GroupRecord, **_: object) -> int:
        await trio.lowlevel.checkpoint()
        raise AgreementUnavailable("changing the group", "database space exceeded", outcome_unknown=False)

    async with open_three() as (_, master):
        monkeypatch.setattr(master.way, "change_group", refuse)
        master.role.want(master.id)
        await until(lambda: "database space exceeded" in master.member.progress.reason)
        await trio.sleep(10)
        assert master.may_acknowledge
        monkeypatch.undo()
        await until(lambda: master.role.confirmed == {master.id})
        assert not master.member.progress.reason


async def test_a_member_follows_the_master_once_nobody_claims_to_know_a_newer_record(autojump_clock: Clock) -> None:
    """An operator stops a member that comes back with a newer record than the one that the group went on with."""
    async with open_three() as (group, master):
        stray = msgspec.structs.replace(MEMBER, known_epoch=7)
        lease = group.service.grant(60)
        group.service.change({"members/9": (stray, lease.id)})
        [slave, _] = others(group, master)
        slave.kill()
        slave = group.restart(slave.id)
        await until(lambda: "knows one of epoch 7" in slave.member.progress.reason)
        group.service.revoke(lease.id)
        await until(lambda: slave.role.following == master.id)
        assert not slave.member.progress.reason


# Switches


async def test_a_switch_hands_over_to_the_requested_member(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        master.role.caught_up(3)
        asked_at = trio.current_time()
        await group.nodes[2].way.request_switch(SwitchRequest(to=3, reason="test"))
        heir = await group.wait_master(other_than=master.id)
        assert heir.id == 3
        assert trio.current_time() - asked_at < 0.1
        await group.settle()
        assert master.role.following == 3
        assert group.view.group is not None
        assert group.view.group.sync_state_set == {1, 2, 3}
        assert group.view.switch is None


async def test_a_switch_holds_puts_until_the_next_master_has_everything(
    autojump_clock: Clock,
) -> None:
    async with open_three() as (group, master):
        await master.way.request_switch(SwitchRequest(to=2))
        await trio.sleep(1)
        assert master.role.is_holding
        assert master.may_acknowledge  # what it has accepted
        master.role.caught_up(2)
        assert (await group.wait_master(other_than=master.id)).id == 2


async def test_a_switch_to_one_that_does_not_catch_up_changes_nothing(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_three() as (group, master):
        await master.way.request_switch(SwitchRequest(to=2))
        await trio.sleep(5)
        assert not master.role.is_holding
        assert master.may_acknowledge
        assert group.masters == [(1, master.id)]
        assert group.view.switch is not None
        assert group.view.switch.refusal == "member 2 did not have the whole log within 2 s"
        assert "did not have the whole log" in caplog.text


@pytest.mark.parametrize("to", [1, 2, 4, 9])
async def test_a_switch_to_an_unfit_member_is_refused(autojump_clock: Clock, to: int) -> None:
    async with open_group(1, 2, 3, 4) as group:
        await group.settle()
        await group.in_set(1, 3)
        await group.nodes[1].way.request_switch(SwitchRequest(to=to))
        await trio.sleep(1)
        assert group.view.switch is not None
        assert group.view.switch.refusal
        assert group.masters == [(1, 1)]
        assert not group.nodes[1].role.is_holding


async def test_a_switch_away_from_a_master_whose_disk_is_full(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not write the new set to its disk."""

    async def write(content: bytes) -> None:
        await trio.sleep_forever()

    async with open_three() as (group, master):
        monkeypatch.setattr(master.file, "write", write)
        master.role.want(1, 2)
        await until(lambda: group.view.group is not None and group.view.group.sync_state_set == {1, 2})
        master.role.caught_up(2)
        await group.nodes[3].way.request_switch(SwitchRequest(to=2))
        assert (await group.wait_master(other_than=master.id)).id == 2
        assert master.role.confirmed == {1, 2, 3}


async def test_a_switch_to_one_that_dies_in_the_middle_falls_back(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        master.role.caught_up(2)
        group.nodes[2].kill()  # its record lives on for its lease
        asked_at = trio.current_time()
        await master.way.request_switch(SwitchRequest(to=2))
        await trio.sleep(0.01)
        heir = await group.wait_master(other_than=2)
        assert trio.current_time() - asked_at < 2.5
        assert heir.id in (1, 3)
        await group.settle()


async def test_a_switch_to_one_whose_lease_is_nearly_over_waits_for_its_renewal(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        master.role.caught_up(2)
        target = group.nodes[2]
        held = target.member.keeper.held.value
        assert held is not None
        target.way.loses.add("renewing the lease")
        await until(lambda: not held.is_fit)
        await group.nodes[3].way.request_switch(SwitchRequest(to=2))
        assert (await group.wait_master(other_than=master.id)) is target
        assert group.masters == [(1, 1), (2, 2)]


async def test_a_handover_without_answer_ends_the_term(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        master.role.caught_up(2)
        master.way.loses.add("handing over")
        await group.nodes[3].way.request_switch(SwitchRequest(to=2))
        heir = await group.wait_master(other_than=master.id)
        assert heir.id == 2
        await group.settle()


async def test_a_failed_handover_ends_the_term_and_causes_an_election(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        await master.way.request_switch(SwitchRequest(to=2))
        await trio.sleep(0.5)
        master.way.cut(True, held_share=0.0)
        master.role.caught_up(2)
        await trio.sleep(0.5)
        assert not master.may_acknowledge
        master.way.cut(False)
        await until(lambda: len(group.masters) == 2 and master.role.is_holding)  # the request is still there
        master.role.caught_up(2)
        await until(lambda: group.nodes[2].may_acknowledge)
        await group.settle()


async def test_a_leaving_master_hands_over_and_leaves_the_set(autojump_clock: Clock) -> None:
    async with open_group(2, 3) as group, trio.open_nursery() as nursery:
        leaving = Node(group, 1, MemoryFile())
        left_at = [0.0]

        async def live() -> None:
            await leaving.begin()
            async with open_member(leaving.way, leaving.role, leaving.options, leaving.state_on_disk) as member:
                leaving.member = member
                await stop.wait()
                left_at[0] = trio.current_time()

        stop = trio.Event()
        await group.settle()
        group.nodes[1] = leaving
        nursery.start_soon(live)
        await group.settle()
        await group.in_set(1, 2, 3)
        first = await group.wait_master()
        first.role.caught_up(1)
        await first.way.request_switch(SwitchRequest(to=1))
        assert (await group.wait_master(other_than=first.id)) is leaving
        await group.settle()
        stop.set()
        await until(lambda: leaving.role.is_holding)
        assert leaving.may_acknowledge  # waiting puts, until the next master has the whole log
        for id_ in (2, 3):
            leaving.role.caught_up(id_)
        heir = await group.wait_master(other_than=1)
        assert trio.current_time() - left_at[0] < 0.1
        assert heir.id in (2, 3)
        del group.nodes[1]
        await group.settle()
        assert group.view.group is not None
        assert group.view.group.sync_state_set == {2, 3}
        assert 1 not in group.view.members


# The states


def test_every_state_is_reached_and_left() -> None:
    assert TRANSITIONS.keys() == set(MemberState)
    assert set().union(*TRANSITIONS.values()) == set(MemberState)


async def test_an_invalid_transition_is_a_bug(autojump_clock: Clock) -> None:
    progress = MemberProgress()
    with pytest.raises(AssertionError):
        progress.become_master(2)
    progress.become_candidate(1)
    progress.become_master(2)
    assert progress.changed.value == (MemberState.MASTER, None)
    progress.become_serving(1)
    assert progress.changed.value == (MemberState.MASTER, 1)
    with pytest.raises(AssertionError):
        progress.become_following(2, 3)
    progress.become_fenced("test")
    assert progress.master_id is None
    progress.become_following(2, 3)
    assert progress.changed.value == (MemberState.FOLLOWING, 2)


async def test_a_late_key_of_an_earlier_attempt_makes_it_master(autojump_clock: Clock) -> None:
    """`take_mastership` may be executed after its timeout: the lease in the view shows whose key it is."""
    async with open_three() as (group, master):
        heir, other = others(group, master)
        for node in (heir, other):
            node.way.hold_watch(True)
        master.kill()
        await trio.sleep(3)
        held = heir.member.keeper.held.value
        assert held is not None
        assert group.view.group is not None
        await heir.way.take_mastership(
            GroupRecord(epoch=2, master_id=heir.id, sync_state_set=frozenset({2, 3})),
            MasterRecord(broker_id=heir.id, epoch=2, ha_address="a:1", broker_address="a:2"),
            lease=held.lease,
            group_revision=group.view.group_revision,
        )
        for node in (heir, other):
            node.way.hold_watch(False)
        assert (await group.wait_master(other_than=master.id)) is heir
        assert group.masters == [(1, 1), (2, heir.id)]


# two processes with one broker id


def duplicate_of(group: Group, id_: int, **options: object) -> Node:
    """Start another process with the broker id of a running node; `group.nodes` keeps the first."""
    first = group.nodes[id_]
    second = group.add(id_, ha_address="10.9.9.9:10912", broker_address="10.9.9.9:10911", **options)
    group.nodes[id_], group.others = first, [second]
    return second


@pytest.mark.parametrize("is_master", [True, False])
async def test_a_second_process_with_one_broker_id_refuses_to_start(is_master: bool, autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        first = master if is_master else others(group, master)[0]
        stories = {node.id: list(node.role.story) for node in group.nodes.values()}
        began = trio.current_time()
        second = duplicate_of(group, first.id)
        await second.ended.wait()
        assert isinstance(second.refusal, ConfigError)
        assert second.refusal.key == "brokerId"
        assert f"10.0.0.{first.id}:10911" in str(second.refusal)
        assert 4.0 <= trio.current_time() - began < 4.5  # two lease times
        assert second.role.story == ["slave of None"]
        # The first and the others have noticed nothing.
        assert {node.id: node.role.story for node in group.nodes.values()} == stories
        assert group.view.members[first.id].ha_address == f"10.0.0.{first.id}:10912"
        assert group.masters == [(1, master.id)]


async def test_a_restarted_member_waits_only_for_its_earlier_lease(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        killed = others(group, master)[0]
        killed.kill()
        killed_at = trio.current_time()
        back = duplicate_of(group, killed.id)  # under a new address
        await until(lambda: back.role.following == master.id)
        assert trio.current_time() - killed_at < 2.6  # its lease, and half a second that the service is late
        assert group.view.members[killed.id].ha_address == "10.9.9.9:10912"


async def test_a_restarted_member_waits_for_a_lease_that_is_longer_than_its_own(autojump_clock: Clock) -> None:
    """leaseTtl was lowered meanwhile. The member took its earlier lease for another process, and ended."""
    async with open_three() as (group, master):
        first = others(group, master)[0]
        first.kill()
        killed = duplicate_of(group, first.id, lease_ttl_s=20.0)
        await until(lambda: killed.role.following == master.id)
        killed.kill()
        back = duplicate_of(group, first.id)
        await until(lambda: back.role.following == master.id or back.ended.is_set())
        assert back.refusal is None


async def test_a_stopped_member_does_not_wait_when_it_starts(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        stopped = others(group, master)[0]
        await stopped.member.leave()
        stopped.kill()
        began = trio.current_time()
        back = duplicate_of(group, stopped.id)
        await until(lambda: back.role.following == master.id)
        assert trio.current_time() - began < 0.2


async def test_a_member_that_stops_while_it_gets_a_lease_leaves_no_key(autojump_clock: Clock) -> None:
    async with open_group() as group:
        node = group.add(1)
        node.way.delay(each_way_s=0.2)
        await trio.sleep(0.3)  # the service has granted the lease, and the answer is on the way
        assert node.member.keeper.held.value is None
        await node.member.leave()
        await trio.sleep(1)
        assert not group.view.members
        assert node.member.keeper.held.value is None


@pytest.mark.parametrize("is_master", [True, False])
async def test_a_member_whose_id_was_taken_meanwhile_stops_serving_and_ends(
    is_master: bool, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lease ends while it can't reach the service, and another process gets the key."""
    async with open_three() as (group, master):
        first = master if is_master else others(group, master)[0]
        first.way.cut(True)
        second = duplicate_of(group, first.id)
        await until(lambda: group.view.members.get(first.id, MEMBER).ha_address == "10.9.9.9:10912")
        first.way.cut(False)
        await until(lambda: first.role.following is None and not first.may_acknowledge)
        await until(lambda: first.member.progress.reason.count("10.9.9.9") > 0)
        assert any("member.id_lost" in record.getMessage() for record in caplog.records if record.levelname == "ERROR")
        assert "10.9.9.9:10911" in first.member.progress.reason
        await first.ended.wait()
        assert isinstance(first.refusal, ConfigError)
        assert "10.9.9.9:10911" in str(first.refusal)
        assert not second.ended.is_set()


@pytest.mark.parametrize("is_master", [True, False])
async def test_a_member_whose_key_is_replaced_while_its_lease_lives_stops_serving(
    is_master: bool, autojump_clock: Clock
) -> None:
    """As by a release that overwrites it. The mastership ends with the key."""
    async with open_three() as (group, master):
        first = master if is_master else others(group, master)[0]
        await trio.sleep(2)  # until all have written what they know of the group: then no key is written again
        usurper = group.service.client("usurper")
        lease = await usurper.grant_lease(60)
        epoch, version = first.state_on_disk.known_age
        theirs = msgspec.structs.replace(MEMBER, known_epoch=epoch, known_version=version)
        group.service.change({f"members/{first.id}": (theirs, lease.id)})
        await until(lambda: first.role.following is None and not first.may_acknowledge)
        await first.ended.wait()
        assert isinstance(first.refusal, ConfigError)
        heir = await group.wait_master(other_than=first.id)
        assert (heir is master) != is_master


async def test_a_lost_key_is_written_again(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        slave = others(group, master)[0]
        group.service.change({}, (f"members/{slave.id}",))
        await until(lambda: slave.id in group.view.members)
        await trio.sleep(10)
        assert (slave.state, slave.role.following) == (MemberState.FOLLOWING, master.id)
        assert group.masters == [(1, master.id)]


async def test_a_growing_log_is_not_written_to_the_service(autojump_clock: Clock) -> None:
    """etcd keeps each revision until it compacts them, which it doesn't by default, and refuses all writes at 2 GiB."""
    async with open_three() as (group, master):
        await trio.sleep(2)  # until all have written what they know of the group
        revision = group.view.revision
        for _ in range(60):
            await trio.sleep(1)
            for node in group.nodes.values():
                node.role.position = LogPosition(node.role.position.epoch, node.role.position.max_offset + 100)
        assert group.view.revision == revision
        master.kill()
        await group.wait_master(other_than=master.id)


async def test_no_id_is_refused_while_the_service_is_away(autojump_clock: Clock) -> None:
    """No lease ends then, so elapsed time doesn't show who is alive."""
    async with open_three() as (group, master):
        killed = others(group, master)[0]
        killed.kill()
        back = duplicate_of(group, killed.id)
        await trio.sleep(0.5)
        group.service.stop()
        await trio.sleep(60)
        group.service.start()
        await until(lambda: back.role.following is not None)
        assert back.refusal is None
