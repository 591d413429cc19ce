"""The election rules."""

from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.config import Config
from ha.failover.agreement import GroupRecord, GroupView, MemberRecord, SwitchRequest
from ha.failover.election import (
    Candidacy,
    Refusal,
    appointed_candidacy,
    candidates_needed,
    choose_target,
    evaluate,
    why_not_create,
)
from ha.failover.options import MemberOptions
from ha.failover.role import LogPosition
from ha.member import ENTRY
from ha.node.options import member_options, sync_state_rules
from ha.replication.sync_state import ALONE

EPOCH = 7


def options(id_: int = 1, **changes: object) -> MemberOptions:
    made = MemberOptions(broker_id=id_, ha_address=f"h{id_}:1", broker_address=f"h{id_}:2")
    return msgspec.structs.replace(made, **changes)


def member(epoch: int = EPOCH, max_offset: int = 1000, **more: object) -> MemberRecord:
    """By default it stands in the next election."""
    made = MemberRecord(
        epoch=epoch, max_offset=max_offset, ha_address="h:1", broker_address="h:2", stands_for=EPOCH + 1
    )
    return msgspec.structs.replace(made, **more)


def view(
    members: dict[int, MemberRecord],
    sync_state_set: tuple[int, ...] = (1, 2, 3),
    master_id: int | None = 9,
    epoch: int = EPOCH,
    ack_count: int | None = None,
) -> GroupView:
    group = GroupRecord(epoch=epoch, master_id=master_id, sync_state_set=frozenset(sync_state_set), ack_count=ack_count)
    return GroupView(revision=40, group=group, group_revision=30, members=members)


def candidacy(seen: GroupView, id_: int, **changes: object) -> Candidacy:
    verdict = evaluate(seen, id_, options(id_, **changes))
    assert isinstance(verdict, Candidacy), verdict
    return verdict


def refusal(seen: GroupView, id_: int, **changes: object) -> Refusal:
    verdict = evaluate(seen, id_, options(id_, **changes))
    assert isinstance(verdict, Refusal), verdict
    return verdict


def test_the_best_candidate_goes_first_and_others_after_a_delay() -> None:
    seen = view({1: member(max_offset=900), 2: member(max_offset=1000), 3: member(epoch=6, max_offset=5000)})
    assert [candidacy(seen, id_).delay_s for id_ in (2, 1, 3)] == pytest.approx([0, 0.2, 0.4])


def test_ties_go_to_the_appointed_then_priority_then_id() -> None:
    seen = view({1: member(priority=5), 2: member(priority=1), 3: member(priority=9)}, master_id=3)
    assert [candidacy(seen, id_).delay_s for id_ in (3, 2, 1)] == pytest.approx([0, 0.2, 0.4])


def test_draining_members_come_last() -> None:
    seen = view({1: member(max_offset=2000, drains=True), 2: member(), 3: member(max_offset=10)})
    assert [candidacy(seen, id_).delay_s for id_ in (2, 3, 1)] == pytest.approx([0, 0.2, 0.4])


def test_the_set_keeps_live_members_and_adds_none() -> None:
    seen = view({1: member(), 3: member(stands_for=0), 4: member()})
    verdict = candidacy(seen, 1)
    assert verdict.group == GroupRecord(epoch=8, master_id=1, sync_state_set=frozenset({1, 3}), version=1)
    assert not verdict.is_unclean


def test_a_live_member_that_does_not_stand_yet_delays_others() -> None:
    assert candidacy(view({1: member(), 3: member(stands_for=0)}), 1).delay_s == pytest.approx(0.2)
    assert candidacy(view({1: member(), 4: member(stands_for=0)}), 1).delay_s == 0  # not of the set


def test_the_appointed_member_is_waited_for_longer() -> None:
    seen = view({1: member(), 2: member(stands_for=0)}, master_id=2)
    assert candidacy(seen, 1).delay_s == pytest.approx(1.0)


def test_only_the_set_is_elected() -> None:
    seen = view({4: member(max_offset=10_000)})
    assert "not in the sync-state set" in refusal(seen, 4).reason
    assert not refusal(seen, 4).needs_operator


def test_an_offset_that_may_still_grow_is_no_candidacy() -> None:
    assert "does not stand" in refusal(view({1: member(stands_for=EPOCH)}), 1).reason
    assert "does not stand" in refusal(view({}), 1).reason


def test_a_log_with_an_unknown_term_needs_an_operator() -> None:
    verdict = refusal(view({1: member(epoch=EPOCH + 1)}), 1)
    assert verdict.needs_operator
    assert "epoch 8" in verdict.reason


def test_a_log_with_an_unknown_term_is_no_better_candidate() -> None:
    seen = view({1: member(epoch=EPOCH + 1, max_offset=9000), 2: member()})
    assert candidacy(seen, 2).delay_s == 0


def test_a_replaced_disk_needs_an_operator() -> None:
    new = member(epoch=0, max_offset=0, is_new=True, is_complete=False)
    assert refusal(view({1: new, 2: member(), 3: member()}), 1).needs_operator
    assert refusal(view({1: new}, sync_state_set=(1,)), 1).needs_operator  # also where it is the only one


def test_a_member_without_a_term_in_its_log_is_elected_only_if_all_of_the_set_stand() -> None:
    """A master may be killed, or lose its first records, before any byte is in the others' logs."""
    empty = member(epoch=0, max_offset=0)
    alone = view({1: empty, 2: empty})
    assert "waiting for [3]" in refusal(alone, 1).reason
    assert not refusal(alone, 1).needs_operator
    all_stand = view({1: empty, 2: empty, 3: member(epoch=0, max_offset=0, is_complete=False)})
    assert candidacy(all_stand, 1).doubt  # all three logs may have been deleted
    assert candidacy(view({1: empty}, sync_state_set=(1,)), 1).group.epoch == EPOCH + 1
    with_log = view({1: empty, 2: member()})
    assert isinstance(evaluate(with_log, 1, options(1)), Refusal)
    assert candidacy(with_log, 2).group.sync_state_set == {2}  # the log of 1 may have been deleted


def test_with_ack_count_two_of_three_must_stand_and_the_longer_log_wins() -> None:
    alone = view({1: member(), 2: member(stands_for=0)}, ack_count=2)
    assert "1 of the sync-state set [1, 2, 3] stand, 2 have to" in refusal(alone, 1).reason
    both = view({1: member(max_offset=900), 2: member()}, ack_count=2)
    assert "member 2 has more of the log" in refusal(both, 1).reason
    assert candidacy(both, 2, ack_count=2).group.sync_state_set == {2}  # 1 lacks what 2 and 3 may have acknowledged
    equal = view({1: member(), 2: member()}, ack_count=2)
    assert candidacy(equal, 1, ack_count=2).group == GroupRecord(
        epoch=8, master_id=1, sync_state_set=frozenset({1, 2}), ack_count=2, version=1
    )


def test_with_ack_count_a_longer_log_wins_even_if_it_drains() -> None:
    seen = view({1: member(max_offset=900), 2: member(drains=True)}, ack_count=2)
    assert isinstance(evaluate(seen, 1, options(1)), Refusal)
    assert candidacy(seen, 2).delay_s == 0


def test_the_appointed_member_needs_no_election() -> None:
    own = member(max_offset=900, stands_for=0)
    seen = view({1: own, 2: member(), 4: member()}, master_id=1)
    taken = appointed_candidacy(seen, 1, own, options(1))
    assert taken is not None
    assert taken.group == GroupRecord(epoch=8, master_id=1, sync_state_set=frozenset({1, 2}), version=1)
    assert appointed_candidacy(seen, 2, member(), options(2)) is None
    assert appointed_candidacy(view({1: own}, master_id=1, ack_count=2), 1, own, options(1)) is None
    assert appointed_candidacy(view({1: own}, (2, 3), master_id=1), 1, own, options(1)) is None
    assert appointed_candidacy(seen, 1, member(epoch=EPOCH + 1), options(1)) is None
    assert appointed_candidacy(seen, 1, member(epoch=0, max_offset=0), options(1)) is None
    assert appointed_candidacy(GroupView(revision=1), 1, own, options(1)) is None


def test_member_options_from_the_configuration() -> None:
    group = Config(
        etcd_endpoints="http://e:2379",
        broker_name="a",
        name_server_addresses="n:1",
        broker_role="SYNC_MASTER",
        broker_id=2,
    )
    usual = member_options(group, "h:1", "h:2")
    assert (usual.broker_id, usual.priority, usual.elects_unclean, usual.ack_count) == (2, 2**31 - 1, False, None)
    assert not usual.is_learner
    assert member_options(msgspec.structs.replace(group, async_learner=True), "h:1", "h:2").is_learner
    chosen = msgspec.structs.replace(
        group, election_priority=3, elect_unclean_master=True, lease_ttl_ms=5000, switch_timeout_ms=700
    )
    told = member_options(chosen, "h:1", "h:2")
    assert (told.priority, told.elects_unclean, told.lease_ttl_s, told.switch_timeout_s) == (3, True, 5.0, 0.7)


def test_ack_count_from_the_configuration() -> None:
    group = Config(
        etcd_endpoints="http://e:2379",
        broker_name="a",
        name_server_addresses="n:1",
        broker_role=cast("Any", ENTRY.defaults["brokerRole"]),
        broker_id=2,
    )
    usual = sync_state_rules(group)
    assert (usual.ack_count, usual.min_in_sync_replicas, usual.not_catch_up_s_max) == (None, 1, 15.0)
    for changes, ack_count in (
        ({"in_sync_replicas": 2}, 2),
        ({"in_sync_replicas": 2, "all_ack_in_sync_state_set": True}, None),
        ({"broker_role": "ASYNC_MASTER", "in_sync_replicas": 2}, ALONE),
    ):
        chosen = msgspec.structs.replace(group, **changes)
        assert member_options(chosen, "h:1", "h:2").ack_count == sync_state_rules(chosen).ack_count == ack_count
    strict = sync_state_rules(msgspec.structs.replace(group, min_in_sync_replicas=2, slave_not_catch_up_ms_max=3000))
    assert (strict.min_in_sync_replicas, strict.not_catch_up_s_max) == (2, 3.0)


def test_an_unclean_election_waits_and_reuses_no_epoch() -> None:
    seen = view({4: member(), 5: member(epoch=12, max_offset=5)})
    verdict = candidacy(seen, 5, elects_unclean=True)
    assert verdict.is_unclean
    assert verdict.delay_s == pytest.approx(10.0)
    assert verdict.group == GroupRecord(epoch=13, master_id=5, sync_state_set=frozenset({5}), version=1)
    assert candidacy(seen, 4, elects_unclean=True).delay_s == pytest.approx(10.2)


def test_no_unclean_election_while_a_clean_one_is_possible() -> None:
    seen = view({1: member(), 4: member(max_offset=9000)})
    assert not candidacy(seen, 1, elects_unclean=True).is_unclean
    # A member outside of the set may try, but much later than that one.
    assert candidacy(seen, 4, elects_unclean=True).delay_s >= 10


def test_a_new_group_elects_the_longest_log() -> None:
    def fresh(offset: int, stands_for: int = 1) -> MemberRecord:
        return member(epoch=0, max_offset=offset, stands_for=stands_for)

    seen = view({1: fresh(0), 2: fresh(500)}, epoch=0, sync_state_set=(), master_id=None)
    assert candidacy(seen, 2).delay_s == 0
    assert candidacy(seen, 2).group == GroupRecord(epoch=1, master_id=2, sync_state_set=frozenset({2}), version=1)
    assert candidacy(seen, 1).delay_s == pytest.approx(0.2)
    late = view({1: fresh(0), 2: fresh(0, stands_for=0)}, epoch=0, sync_state_set=(), master_id=None)
    assert candidacy(late, 1).delay_s == pytest.approx(0.2)


def test_no_record_is_created_if_logs_have_terms() -> None:
    nothing = GroupView(revision=1)
    assert why_not_create(nothing, LogPosition(0, 500), options()) is None
    verdict = why_not_create(nothing, LogPosition(3, 500), options())
    assert verdict is not None
    assert verdict.needs_operator
    assert why_not_create(nothing, LogPosition(3, 500), options(elects_unclean=True)) is None
    other = GroupView(revision=1, members={2: member(epoch=3)})
    assert why_not_create(other, LogPosition(0, 0), options()) is not None


@pytest.mark.parametrize(("count", "needed"), [(None, 1), (1, 1), (2, 4), (3, 3), (5, 1), (9, 1)])
def test_candidates_needed(count: int | None, needed: int) -> None:
    record = GroupRecord(epoch=1, master_id=1, sync_state_set=frozenset(range(1, 6)), ack_count=count)
    assert candidates_needed(record) == needed


def test_choose_target() -> None:
    seen = view({1: member(), 2: member(priority=3), 3: member(priority=2), 4: member()})
    assert choose_target(seen, 1, SwitchRequest(to=None)) == 3
    assert choose_target(seen, 1, SwitchRequest(to=2)) == 2
    assert choose_target(seen, 1, SwitchRequest(to=4)) == "member 4 is not in the sync-state set [1, 2, 3]"
    assert choose_target(seen, 1, SwitchRequest(to=5)) == "member 5 is not live"
    assert choose_target(seen, 1, SwitchRequest(to=1)) == "member 1 is the master"
    assert choose_target(seen, 1, SwitchRequest(to=2, epoch=EPOCH)) == 2
    assert "request it again" in str(choose_target(seen, 1, SwitchRequest(to=2, epoch=EPOCH - 1)))
    drained = view({1: member(), 2: member(drains=True)})
    assert choose_target(drained, 1, SwitchRequest(to=2)) == "member 2 drains"
    assert choose_target(drained, 1, SwitchRequest(to=None)) == "no other member of the sync-state set is live"


logs = st.tuples(st.integers(1, EPOCH), st.integers(0, 3))


@given(st.dictionaries(st.integers(1, 5), logs, min_size=1), st.integers(2, 5))
def test_with_ack_count_every_electable_member_has_all_acknowledged_bytes(
    found: dict[int, tuple[int, int]], ack_count: int
) -> None:
    """Anything that `ack_count` of the five have is in the log of each that may win: no log of the others is longer."""
    seen = view(
        {id_: member(epoch=epoch, max_offset=offset) for id_, (epoch, offset) in found.items()},
        sync_state_set=(1, 2, 3, 4, 5),
        ack_count=ack_count,
    )
    for id_ in found:
        verdict = evaluate(seen, id_, options(id_, ack_count=ack_count))
        if isinstance(verdict, Candidacy):
            assert len(found) + ack_count > 5  # each set of `ack_count` has one of those that stand
            assert found[id_] == max(found.values())
            assert verdict.group.sync_state_set == {other for other in found if found[other] == found[id_]}
        else:
            assert len(found) + ack_count <= 5 or found[id_] < max(found.values())


@given(st.dictionaries(st.integers(1, 6), logs, min_size=1))
def test_no_two_candidates_have_the_same_delay(found: dict[int, tuple[int, int]]) -> None:
    seen = view({id_: member(epoch=epoch, max_offset=offset) for id_, (epoch, offset) in found.items()})
    delays = [verdict.delay_s for id_ in found if isinstance(verdict := evaluate(seen, id_, options(id_)), Candidacy)]
    assert len(set(delays)) == len(delays)
    assert (0 in delays) == (not found.keys().isdisjoint({1, 2, 3}))


# After a stop that may have lost the end of a log


def test_an_incomplete_appointed_member_needs_an_election() -> None:
    own = member(max_offset=900, stands_for=0, is_complete=False)
    seen = view({1: own, 2: member(stands_for=0)}, master_id=1)
    assert appointed_candidacy(seen, 1, own, options(1)) is None
    assert appointed_candidacy(seen, 1, msgspec.structs.replace(own, is_complete=True), options(1)) is not None


def test_an_incomplete_member_is_not_elected_before_a_complete_one() -> None:
    seen = view({1: member(max_offset=900, is_complete=False), 2: member()}, (1, 2), master_id=1)
    assert "member 2 has more of the log" in refusal(seen, 1).reason
    assert "may lack acknowledged messages" in refusal(seen, 1).reason
    verdict = candidacy(seen, 2)
    assert (verdict.delay_s, verdict.doubt) == (0, "")
    assert verdict.group.sync_state_set == {2}


def test_an_incomplete_member_with_a_complete_ones_log_is_equal() -> None:
    seen = view({1: member(max_offset=1100, is_complete=False), 2: member(), 3: member(max_offset=900)}, master_id=1)
    assert candidacy(seen, 1).group.sync_state_set == {1, 2, 3}
    assert [candidacy(seen, id_).delay_s for id_ in (1, 2, 3)] == pytest.approx([0, 0.2, 0.4])
    equal = view({1: member(is_complete=False), 2: member()}, (1, 2))
    assert candidacy(equal, 2).group.sync_state_set == {1, 2}


def test_an_incomplete_member_that_does_not_stand_leaves_the_set() -> None:
    seen = view({1: member(), 2: member(is_complete=False, stands_for=0)}, (1, 2))
    assert candidacy(seen, 1).group.sync_state_set == {1}


def test_without_a_complete_member_all_of_the_set_have_to_stand() -> None:
    seen = view({1: member(max_offset=900, is_complete=False), 2: member(is_complete=False)}, (1, 2, 3), master_id=1)
    for id_ in (1, 2):
        reason = refusal(seen, id_).reason
        assert "0 of the sync-state set [1, 2, 3] stand and are known to have every message" in reason
        assert "waiting for [3]" in reason
        assert "enableElectUncleanMaster" in reason
    unclean = candidacy(seen, 2, elects_unclean=True)
    assert unclean.is_unclean
    all_ = view({**seen.members, 3: member(max_offset=950, is_complete=False)}, master_id=1)
    assert "member 2 has more of the log" in refusal(all_, 1).reason
    assert "member 2 has more of the log" in refusal(all_, 3).reason
    verdict = candidacy(all_, 2)
    assert verdict.group.sync_state_set == {2}
    assert not verdict.is_unclean
    assert "may have lost the end of their logs" in verdict.doubt


def test_without_a_complete_member_a_longer_log_outside_the_set_wins() -> None:
    """A member that was about to join holds all that the set's longest log does, and may have shown it to consumers."""
    seen = view({1: member(max_offset=900, is_complete=False), 4: member(max_offset=1000)}, (1,), master_id=1)
    assert "member 4 has more of the log" in refusal(seen, 1).reason
    assert candidacy(seen, 4).group.sync_state_set == {4}


def test_with_ack_count_only_complete_members_count() -> None:
    two = view({1: member(max_offset=900), 2: member(is_complete=False, max_offset=950)}, ack_count=2)
    assert "1 of the sync-state set [1, 2, 3] stand and are known" in refusal(two, 1).reason
    assert "waiting for [3]" in refusal(two, 2).reason
    three = view({**two.members, 3: member(max_offset=940)}, ack_count=2)
    assert candidacy(three, 2).group.sync_state_set == {2}
    assert not candidacy(three, 2).doubt
    lost = {id_: msgspec.structs.replace(each, is_complete=id_ == 1) for id_, each in three.members.items()}
    verdict = candidacy(view(lost, ack_count=2), 2)
    assert verdict.doubt
    assert "member 2 has more" in refusal(view(lost, ack_count=2), 1).reason


def test_records_of_older_releases_count_as_complete() -> None:
    old = b'{"epoch":7,"maxOffset":5,"haAddress":"h:1","brokerAddress":"h:2"}'
    assert msgspec.json.decode(old, type=MemberRecord).is_complete


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=3, max_size=3),
    st.sets(st.integers(1, 3), min_size=1),
    st.integers(2, 3),
)
def test_nothing_acknowledged_is_lost_while_a_complete_member_has_it(
    found: list[tuple[int, int, bool]], standing: set[int], ack_count: int
) -> None:
    """Each of three acknowledged up to an offset, and some have lost some of it since; some of them stand."""
    reported = sorted((before for before, _, _ in found), reverse=True)
    acknowledged = reported[ack_count - 1]
    logs = {id_: before if is_complete else min(before, now) for id_, (before, now, is_complete) in enumerate(found, 1)}
    seen = view(
        {id_: member(max_offset=logs[id_], is_complete=found[id_ - 1][2]) for id_ in standing},
        ack_count=ack_count if ack_count < 3 else None,
    )
    elected = [id_ for id_ in standing if isinstance(evaluate(seen, id_, options(id_)), Candidacy)]
    for id_ in elected:
        verdict = candidacy(seen, id_)
        kept = verdict.group.sync_state_set
        if verdict.doubt:
            assert standing == {1, 2, 3}
            assert logs[id_] == max(logs.values())
            assert {logs[other] for other in kept} == {logs[id_]}
        else:
            assert logs[id_] >= acknowledged
            assert all(logs[other] >= acknowledged for other in kept)
    assert elected or standing != {1, 2, 3}  # nothing more can be learnt then


# A record that is not the newest


def test_nobody_is_elected_by_an_outdated_record() -> None:
    stale = view({1: member(), 2: member(), 4: member(known_epoch=EPOCH, known_version=3)}, (1, 2), master_id=1)
    for id_ in (1, 2):
        verdict = refusal(stale, id_)
        assert verdict.needs_operator
        assert "version 0, and member 4 knows one of epoch 7, version 3" in verdict.reason
    assert appointed_candidacy(stale, 1, member(), options(1)) is None
    newest = view({1: member(known_epoch=EPOCH), 2: member(known_epoch=EPOCH - 1, known_version=9)})
    assert candidacy(newest, 1).group.version == 1
    unclean = candidacy(stale, 4, elects_unclean=True)
    assert unclean.is_unclean


def test_an_unclean_election_uses_no_epoch_that_a_member_knows() -> None:
    seen = view({4: member(known_epoch=12, known_version=3)})
    assert candidacy(seen, 4, elects_unclean=True).group.epoch == 13
