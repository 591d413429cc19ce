"""Outcomes of switch requests in a group with fake roles, under a virtual clock."""

from typing import Any

import pytest
import trio
import trio.testing

from ha.failover.agreement import SwitchRequest
from ha.failover.switchover import SwitchOutcome
from tests.failover.group import Node, open_group, open_three, three, until

Clock = trio.testing.MockClock


async def ask(node: Node, to: int | None, wait_s: float = 10.0) -> SwitchOutcome:
    return await node.member.switches.request(to, "test", wait_s=wait_s)


@pytest.mark.parametrize("asked", [1, 2, 3])
async def test_any_member_serves_a_switch_request(autojump_clock: Clock, asked: int) -> None:
    async with open_three() as (group, master):
        master.role.caught_up(2)
        outcome = await ask(group.nodes[asked], 2)
        assert (outcome.is_done, outcome.master_id, outcome.epoch, outcome.why_not) == (True, 2, 2, "")
        assert outcome.seconds < 0.1
        assert (await group.wait_master(other_than=1)).id == 2


async def test_a_switch_without_target_chooses_another_member(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        for id_ in (2, 3):
            master.role.caught_up(id_)
        outcome = await ask(group.nodes[3], None)
        assert outcome.is_done
        assert outcome.master_id in (2, 3)


async def test_a_switch_to_the_present_master_is_done(autojump_clock: Clock) -> None:
    async with open_three() as (group, _):
        outcome = await ask(group.nodes[3], 1)
        assert (outcome.is_done, outcome.master_id, outcome.epoch) == (True, 1, 1)
        assert group.view.switch is None


@pytest.mark.parametrize(
    ("to", "why_not"),
    [
        (9, "member 9 is not live"),
        (4, "member 4 is not in the sync-state set [1, 2, 3]"),
        (2, "member 2 did not have the whole log within 2 s"),
    ],
)
async def test_the_outcome_says_why_not(autojump_clock: Clock, to: int, why_not: str) -> None:
    async with open_group(1, 2, 3, 4) as group:
        await three(group)
        outcome = await ask(group.nodes[3], to)
        assert (outcome.is_done, outcome.is_known, outcome.why_not) == (False, True, why_not)
        assert (outcome.master_id, group.masters) == (1, [(1, 1)])
        # The refusal stays, and is not a request.
        master = group.nodes[1]
        master.role.caught_up(2)
        await trio.sleep(10)
        assert group.masters == [(1, 1)]
        assert (await ask(group.nodes[3], 2)).is_done


async def test_without_a_master_nothing_is_requested(autojump_clock: Clock) -> None:
    async with open_group(1, 2, 3) as group:
        await group.settle()  # 1 alone is in the set
        group.nodes[1].kill()
        await until(lambda: group.master is None)
        outcome = await ask(group.nodes[2], 3)
        assert (outcome.is_done, outcome.is_known, outcome.master_id) == (False, True, None)
        assert "there is no master now" in outcome.why_not
        assert group.view.switch is None


async def test_an_unreachable_service_is_reported(autojump_clock: Clock) -> None:
    async with open_three() as (group, _):
        group.nodes[3].way.cut(True)
        outcome = await ask(group.nodes[3], 2, wait_s=5.0)
        assert not outcome.is_done
        assert outcome.is_known
        assert "reading the group" in outcome.why_not
        assert outcome.seconds <= 5.0
        assert group.view.switch is None


async def test_an_unanswered_request_ends_with_the_term(autojump_clock: Clock) -> None:
    """The master dies before it reads the request: the next master does not hand over."""
    async with open_three() as (group, master):
        master.way.hold_watch(True)
        outcome = await ask(group.nodes[3], 2, wait_s=1.0)
        assert (outcome.is_done, outcome.is_known) == (False, False)
        assert "may still be done" in outcome.why_not
        master.kill()
        heir = await group.wait_master(other_than=1)
        assert heir.id == 2
        await group.nodes[3].way.request_switch(SwitchRequest(to=3, epoch=1))
        heir.role.caught_up(3)
        await trio.sleep(30)
        assert group.masters == [(1, 1), (2, 2)]
        assert group.view.switch is not None
        assert group.view.switch.refusal == "it was requested in epoch 1, this is 2: request it again"


async def test_the_later_of_two_requests_counts(autojump_clock: Clock) -> None:
    async with open_group(1, 2, 3) as group, trio.open_nursery() as nursery:
        master = await three(group)
        master.way.hold_watch(True)
        outcomes: list[SwitchOutcome] = []

        async def first() -> None:
            outcomes.append(await ask(group.nodes[2], 2))

        async def second() -> None:
            outcomes.append(await ask(group.nodes[3], 3))

        nursery.start_soon(first)
        await until(lambda: group.view.switch is not None)
        master.role.caught_up(3)
        nursery.start_soon(second)
        await until(lambda: len(outcomes) == 1)
        master.way.hold_watch(False)
        await until(lambda: len(outcomes) == 2)
        assert outcomes[0].why_not == "another switch has been requested since"
        assert (outcomes[1].is_done, outcomes[1].master_id) == (True, 3)


async def test_another_master_than_requested_is_reported(autojump_clock: Clock) -> None:
    async with open_three() as (group, master):
        master.role.caught_up(2)
        group.nodes[2].kill()  # its record lives on for its lease
        outcome = await ask(group.nodes[3], 2)
        assert not outcome.is_done
        assert outcome.why_not == f"member {outcome.master_id} became master instead"
        assert outcome.master_id in (1, 3)


async def test_a_refused_switch_is_not_done_after_all_when_the_set_changes_at_the_same_time(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the set waits while the switch is tried, and is written together with the refusal. Its answer arrives
    after the watch has shown both."""
    async with open_three() as (group, master):
        change_group = master.way.change_group

        async def change_group_slowly(*args: Any, **options: Any) -> int:
            revision = await change_group(*args, **options)
            await trio.sleep(0.05)
            return revision

        monkeypatch.setattr(master.way, "change_group", change_group_slowly)
        await group.nodes[3].way.request_switch(SwitchRequest(to=2))
        await until(lambda: master.role.is_holding)
        master.role.want(1, 2)
        await until(lambda: master.role.confirmed == {1, 2})
        assert group.view.switch is not None
        assert group.view.switch.refusal
        master.role.caught_up(2)
        await trio.sleep(10)
        assert group.masters == [(1, 1)]


async def test_a_change_of_the_set_is_not_taken_for_another_request(autojump_clock: Clock) -> None:
    """The master knows of its own change before its watch shows the request."""
    async with open_three() as (group, master), trio.open_nursery() as nursery:
        master.way.delay(each_way_s=0.01, watch_s=0.1)
        master.role.caught_up(2)
        outcomes: list[SwitchOutcome] = []

        async def switch() -> None:
            outcomes.append(await ask(master, 2))

        nursery.start_soon(switch)
        await until(lambda: group.view.switch is not None)
        master.role.want(1, 2)
        await until(lambda: bool(outcomes))
        assert (outcomes[0].is_done, outcomes[0].master_id, outcomes[0].why_not) == (True, 2, "")
