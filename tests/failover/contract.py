"""The contract of every `Agreement`: one suite, run on the simulated service and on real etcd.

Times are those of trio's clock: virtual in the one, real seconds in the other. Leases are short.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import msgspec
import pytest
import trio

from ha.failover.agreement import (
    Agreement,
    AgreementUnavailable,
    BrokerIdTaken,
    GroupRecord,
    GroupView,
    LeaseLost,
    MasterRecord,
    MemberRecord,
    Outdated,
    Seen,
    SwitchRequest,
    Watch,
)

T = TypeVar("T")
replace = msgspec.structs.replace

LEASE_S = 2.0
LEASE_END_TIMEOUT_S = 10.0
TIMEOUT_S = 0.4
"""Timeout of calls that should fail."""

EMPTY = GroupRecord(epoch=0, master_id=None, sync_state_set=frozenset({1, 2, 3}))
MEMBER = MemberRecord(epoch=1, max_offset=100, ha_address="h1:10912", broker_address="h1:10911", priority=2)


class Place(Protocol):
    """One service, and nodes that each reach it over their own link."""

    def open_client(self, node: str) -> AbstractAsyncContextManager[Agreement]:
        """Return the agreement of `node`."""

    def cut(self, node: str) -> None:
        """Hold everything that is sent between the node and the service."""

    def lose_answers(self, node: str) -> None:
        """Deliver requests, but no answers."""

    def heal(self, node: str) -> None:
        """Deliver everything, including what was held."""

    async def compact(self) -> None:
        """Compact the service's history."""

    def stop(self) -> None:
        """Stop the service from answering."""

    def start(self) -> None:
        """Reverse that."""


Check = Callable[[Place], Awaitable[None]]
CONTRACT: list[Check] = []


def contract(check: Check) -> Check:
    CONTRACT.append(check)
    return check


def master(broker_id: int, epoch: int) -> MasterRecord:
    return MasterRecord(
        broker_id=broker_id, epoch=epoch, ha_address=f"h{broker_id}:10912", broker_address=f"h{broker_id}:10911"
    )


async def elect(agreement: Agreement, broker_id: int, *, lease_s: float = 60.0) -> int:
    """Create the group if there is none, and make `broker_id` its master; return the revision."""
    view = await agreement.view()
    if view.group is None:
        await agreement.create_group(EMPTY)
        view = await agreement.view()
    assert view.group is not None
    lease = await agreement.grant_lease(lease_s)
    group = replace(view.group, epoch=view.group.epoch + 1, master_id=broker_id)
    return await agreement.take_mastership(
        group, master(broker_id, group.epoch), lease=lease, group_revision=view.group_revision
    )


async def until(watch: Watch, is_so: Callable[[GroupView], bool], timeout_s: float = 10.0) -> list[Seen]:
    """Return all views up to the first that satisfies the condition."""
    seen = []
    with trio.fail_after(timeout_s):
        async for each in watch:
            seen.append(each)
            if is_so(each.view):
                return seen
    raise AssertionError("a watch has ended")


async def retry_until_available(call: Callable[[], Awaitable[T]], timeout_s: float = 20.0) -> T:
    """Repeat the call until the service is available."""
    with trio.fail_after(timeout_s):
        while True:
            try:
                return await call()
            except AgreementUnavailable:
                await trio.sleep(0.05)


@contract
async def a_new_group_has_nothing(place: Place) -> None:
    async with place.open_client("n1") as agreement:
        view = await agreement.view()
        assert view == GroupView(revision=view.revision)


@contract
async def a_group_is_created_once(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        revision = await one.create_group(EMPTY)
        with pytest.raises(Outdated) as caught:
            await other.create_group(replace(EMPTY, sync_state_set=frozenset({2}), ack_count=1))
        assert (caught.value.view.group, caught.value.view.group_revision) == (EMPTY, revision)
        assert await other.view() == caught.value.view


@contract
async def mastership_is_taken_while_there_is_no_master(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        created = await one.create_group(EMPTY)
        lease = await one.grant_lease(60)
        group = GroupRecord(epoch=1, master_id=1, sync_state_set=frozenset({1, 3}), ack_count=2)
        taken = await one.take_mastership(group, master(1, 1), lease=lease, group_revision=created)
        assert taken > created
        view = await other.view()
        assert view == GroupView(
            revision=taken,
            group=group,
            group_revision=taken,
            master=master(1, 1),
            master_revision=taken,
            master_lease_id=lease.id,
        )
        its_lease = await other.grant_lease(60)
        for revision in (created, taken):
            with pytest.raises(Outdated) as caught:
                await other.take_mastership(EMPTY, master(2, 2), lease=its_lease, group_revision=revision)
            assert caught.value.view == view
        await one.resign(master_revision=taken)
        with pytest.raises(Outdated):
            await other.take_mastership(EMPTY, master(2, 2), lease=its_lease, group_revision=created)
        again = await other.take_mastership(EMPTY, master(2, 2), lease=its_lease, group_revision=taken)
        assert (await one.view()).master_revision == again > taken


@contract
async def of_many_candidates_one_is_elected_each_time(place: Place) -> None:
    """Each winner resigns; the watch reports every term once, in order, with its master."""
    rounds = 6
    won: list[tuple[int, int]] = []

    async def stand(broker_id: int) -> None:
        async with place.open_client(f"n{broker_id}") as agreement:
            lease = await agreement.grant_lease(60)
            while True:
                view = await agreement.view()
                assert view.group is not None
                epoch = view.group.epoch + 1
                if epoch > rounds:
                    return
                group = replace(view.group, epoch=epoch, master_id=broker_id)
                try:
                    taken = await agreement.take_mastership(
                        group, master(broker_id, epoch), lease=lease, group_revision=view.group_revision
                    )
                except Outdated:
                    continue
                won.append((epoch, broker_id))
                await agreement.resign(master_revision=taken)

    async with place.open_client("n0") as watcher, watcher.watch() as watch:
        await watcher.create_group(EMPTY)
        async with trio.open_nursery() as nursery:
            for broker_id in (1, 2, 3):
                nursery.start_soon(stand, broker_id)
        seen = await until(watch, lambda v: v.group is not None and v.group.epoch == rounds and v.master is None)
    assert [epoch for epoch, _ in sorted(won)] == list(range(1, rounds + 1))
    told = [each.view.master for each in seen if each.view.master is not None]
    assert [(record.epoch, record.broker_id) for record in told] == sorted(won)


@contract
async def the_record_is_changed_by_its_master_alone(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        taken = await elect(one, 1)
        smaller = replace(EMPTY, epoch=1, master_id=1, sync_state_set=frozenset({1}))
        changed = await one.change_group(smaller, group_revision=taken, master_revision=taken)
        view = await other.view()
        assert (view.group, view.group_revision, view.master_revision) == (smaller, changed, taken)
        for group_revision, master_revision in ((taken, taken), (changed, changed), (changed, 0), (0, taken)):
            with pytest.raises(Outdated) as caught:
                await one.change_group(EMPTY, group_revision=group_revision, master_revision=master_revision)
            assert caught.value.view == view
        await one.resign(master_revision=taken)
        with pytest.raises(Outdated):
            await one.change_group(EMPTY, group_revision=changed, master_revision=taken)
        assert (await one.view()).group == smaller


@contract
async def mastership_is_handed_over_in_one_change(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other, other.watch() as watch:
        taken = await elect(one, 1)
        asked = await other.request_switch(SwitchRequest(to=2, reason="maintenance"))
        wanted = replace(EMPTY, epoch=1, master_id=2)
        with pytest.raises(Outdated):
            await one.hand_over(wanted, group_revision=taken - 1, master_revision=taken)
        handed = await one.hand_over(wanted, group_revision=taken, master_revision=taken)
        assert await other.view() == GroupView(revision=handed, group=wanted, group_revision=handed)
        seen = await until(watch, lambda view: view.revision == handed)
        assert seen[-1].view == await other.view()
        assert seen[-2].view.switch == SwitchRequest(to=2, reason="maintenance")
        assert (seen[-2].view.switch_revision, seen[-2].view.master_revision) == (asked, taken)
        with pytest.raises(Outdated):
            await one.hand_over(EMPTY, group_revision=handed, master_revision=taken)
        assert await elect(other, 2) > handed


@contract
async def who_resigns_gives_up_its_own_key_alone(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        first = await elect(one, 1)
        await one.resign(master_revision=first)
        second = await elect(other, 2)
        await one.resign(master_revision=first)
        view = await one.view()
        assert (view.master, view.master_revision) == (master(2, 2), second)


@contract
async def what_hangs_on_a_lease_goes_with_it_and_not_before(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other, other.watch() as watch:
        created = await one.create_group(EMPTY)
        began = trio.current_time()
        lease = await one.grant_lease(LEASE_S)
        assert lease.ttl_s >= LEASE_S
        await one.put_member(1, MEMBER, lease=lease)
        taken = await one.take_mastership(EMPTY, master(1, 1), lease=lease, group_revision=created)
        seen = await until(watch, lambda view: view.revision > taken, LEASE_END_TIMEOUT_S)
        assert trio.current_time() - began >= lease.ttl_s
        gone = seen[-1].view
        assert (gone.master, gone.master_revision, gone.master_lease_id, gone.members) == (None, 0, 0, {})
        assert (gone.group, gone.group_revision) == (EMPTY, taken)
        with pytest.raises(LeaseLost) as caught:
            await one.renew(lease)
        assert caught.value.lease == lease
        with pytest.raises(LeaseLost):
            await one.put_member(1, MEMBER, lease=lease)
        with pytest.raises(LeaseLost):
            await one.take_mastership(EMPTY, master(1, 1), lease=lease, group_revision=taken)
        assert await one.view() == gone


@contract
async def a_renewed_lease_begins_anew(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other, other.watch() as watch:
        lease = await one.grant_lease(LEASE_S)
        put = await one.put_member(1, MEMBER, lease=lease)
        renewed_at = trio.current_time()
        for _ in range(6):
            await trio.sleep(lease.ttl_s / 4)
            renewed_at = trio.current_time()
            assert await one.renew(lease) == lease.ttl_s
        assert (await other.view()).members == {1: MEMBER}
        await until(watch, lambda view: view.revision > put, LEASE_END_TIMEOUT_S)
        assert trio.current_time() - renewed_at >= lease.ttl_s


@contract
async def a_revoked_lease_ends_at_once(place: Place) -> None:
    async with place.open_client("n1") as one:
        lease, other_lease = await one.grant_lease(60), await one.grant_lease(60)
        await one.put_member(1, MEMBER, lease=lease)
        await one.put_member(2, MEMBER, lease=other_lease)
        await one.revoke(lease)
        await one.revoke(lease)
        assert (await one.view()).members == {2: MEMBER}
        with pytest.raises(LeaseLost):
            await one.renew(lease)


@contract
async def a_member_says_anew_what_it_is(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        lease = await one.grant_lease(60)
        first = await one.put_member(1, MEMBER, lease=lease)
        fresh = replace(MEMBER, max_offset=200, drains=True)
        assert await one.put_member(1, fresh, lease=lease) > first
        await other.put_member(12, MEMBER, lease=await other.grant_lease(60))
        assert (await other.view()).members == {1: fresh, 12: MEMBER}


@contract
async def a_member_key_is_never_taken_over_from_a_lease_that_lives(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        first, second = await one.grant_lease(60), await other.grant_lease(60)
        put = await one.put_member(1, MEMBER, lease=first)
        moved = replace(MEMBER, ha_address="h9:10912", broker_address="h9:10911")
        with pytest.raises(BrokerIdTaken) as caught:
            await other.put_member(1, moved, lease=second)
        assert (caught.value.broker_id, caught.value.holder, caught.value.lease_id) == (1, MEMBER, first.id)
        assert "h1:10911" in str(caught.value)
        view = await other.view()
        assert (view.revision, view.members, view.member_lease_ids) == (put, {1: MEMBER}, {1: first.id})
        # A restarted process has another lease, perhaps under another address: it waits for the old one's end.
        await one.revoke(first)
        taken = await other.put_member(1, moved, lease=second)
        assert await one.view() == GroupView(revision=taken, members={1: moved}, member_lease_ids={1: second.id})
        with pytest.raises((BrokerIdTaken, LeaseLost)):
            await one.put_member(1, MEMBER, lease=first)
        with pytest.raises(BrokerIdTaken):
            await one.put_member(1, MEMBER, lease=await one.grant_lease(60))


@contract
async def of_many_processes_with_one_id_one_has_the_key(place: Place) -> None:
    won: list[int] = []

    async def start(number: int) -> None:
        async with place.open_client(f"n{number}") as agreement:
            lease = await agreement.grant_lease(60)
            try:
                await agreement.put_member(1, replace(MEMBER, max_offset=number), lease=lease)
            except BrokerIdTaken:
                return
            won.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(1, 6):
            nursery.start_soon(start, number)
    async with place.open_client("n0") as watcher:
        assert [(await watcher.view()).members[1].max_offset] == won


@contract
async def a_put_that_comes_late_does_not_take_the_key_over(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        late = await one.grant_lease(60)
        place.cut("n1")
        with pytest.raises(AgreementUnavailable):
            await one.put_member(1, MEMBER, lease=late, timeout_s=TIMEOUT_S)
        moved = replace(MEMBER, max_offset=900)
        await other.put_member(1, moved, lease=await other.grant_lease(60))
        place.heal("n1")
        await retry_until_available(one.view)
        for _ in range(10):
            assert (await other.view()).members == {1: moved}
            await trio.sleep(0.05)


@contract
async def a_switch_is_asked_for_and_refused(place: Place) -> None:
    async with place.open_client("n1") as one:
        first = await one.request_switch(SwitchRequest(to=None))
        second = await one.request_switch(SwitchRequest(to=3, reason="a new disk"))
        refused = SwitchRequest(to=3, reason="a new disk", refusal="no such member", refused_revision=second)
        await one.refuse_switch(refused, switch_revision=first)
        view = await one.view()
        assert (view.switch, view.switch_revision) == (SwitchRequest(to=3, reason="a new disk"), second)
        await one.refuse_switch(refused, switch_revision=second)
        await one.refuse_switch(replace(refused, refusal="something else"), switch_revision=second)
        view = await one.view()
        assert (view.switch, view.switch_revision) == (refused, view.revision)


@contract
async def a_watch_tells_every_change_in_order(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        await one.create_group(EMPTY)
        async with one.watch() as watch, other.watch() as other_watch:
            first = await watch.__anext__()
            assert first == Seen(await one.view(), is_restart=True)
            assert await other_watch.__anext__() == first
            views = []
            for number in range(20):
                await one.request_switch(SwitchRequest(to=number))
                views.append(await one.view())
            for each in (watch, other_watch):
                seen = await until(each, lambda view: view.switch == SwitchRequest(to=19))
                assert seen == [Seen(view, is_restart=False) for view in views]


@contract
async def a_cancelled_wait_for_a_watch_loses_nothing(place: Place) -> None:
    async with place.open_client("n1") as one, one.watch() as watch:
        seen: list[Seen] = []

        async def request() -> None:
            for number in range(20):
                await one.request_switch(SwitchRequest(to=number))
                await trio.sleep(0.002)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(request)
            while not seen or seen[-1].view.switch != SwitchRequest(to=19):
                with trio.move_on_after(0.003):
                    seen.append(await watch.__anext__())
        told = [each.view.switch.to for each in seen if each.view.switch is not None]
        assert told == list(range(told[0] or 0, 20))
        assert [each.is_restart for each in seen] == [True] + [False] * (len(seen) - 1)


@contract
async def a_cancelled_call_leaves_everything_usable(place: Place) -> None:
    async with place.open_client("n1") as one:
        for count in range(8):
            with trio.move_on_after(0.0003 * count):
                await one.request_switch(SwitchRequest(to=count))
        await one.request_switch(SwitchRequest(to=99))
        assert (await one.view()).switch == SwitchRequest(to=99)


@contract
async def who_is_cut_off_is_told_in_time_and_goes_on_when_healed(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other, one.watch() as watch:
        taken = await elect(one, 1)
        await until(watch, lambda view: view.revision == taken)
        place.cut("n1")
        with pytest.raises(AgreementUnavailable) as caught:
            await one.view(timeout_s=TIMEOUT_S)
        assert not caught.value.outcome_unknown
        with pytest.raises(AgreementUnavailable) as caught:
            await one.change_group(EMPTY, group_revision=taken, master_revision=taken, timeout_s=TIMEOUT_S)
        assert caught.value.outcome_unknown
        asked = await other.request_switch(SwitchRequest(to=2))
        place.heal("n1")
        seen = await until(watch, lambda view: view.switch is not None)
        assert (seen[-1].view.switch_revision, seen[-1].is_restart) == (asked, False)
        assert (await retry_until_available(one.view)).switch == SwitchRequest(to=2)


@contract
async def what_arrives_too_late_has_no_effect(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        lease = await one.grant_lease(60)
        place.cut("n1")
        with pytest.raises(AgreementUnavailable):
            await one.create_group(replace(EMPTY, ack_count=1), timeout_s=TIMEOUT_S)
        with pytest.raises(AgreementUnavailable):
            await one.put_member(1, replace(MEMBER, max_offset=900), lease=lease, timeout_s=TIMEOUT_S)
        await other.create_group(EMPTY)
        place.heal("n1")
        await retry_until_available(lambda: one.put_member(1, MEMBER, lease=lease))
        for _ in range(10):
            view = await other.view()
            assert (view.group, view.members) == (EMPTY, {1: MEMBER})
            await trio.sleep(0.05)


@contract
async def who_hears_no_answer_can_find_out(place: Place) -> None:
    """A change whose answer is lost was executed once, and the view shows whose it is."""
    async with place.open_client("n1") as one, place.open_client("n2") as other:
        created = await one.create_group(EMPTY)
        lease = await one.grant_lease(60)
        place.lose_answers("n1")
        with pytest.raises(AgreementUnavailable) as caught:
            await one.take_mastership(EMPTY, master(1, 1), lease=lease, group_revision=created, timeout_s=TIMEOUT_S)
        assert caught.value.outcome_unknown
        place.heal("n1")
        view = await retry_until_available(one.view)
        assert (view.master, view.master_lease_id) == (master(1, 1), lease.id)
        with pytest.raises(Outdated):
            await one.take_mastership(EMPTY, master(1, 1), lease=lease, group_revision=created)
        assert await other.view() == view


@contract
async def a_watch_that_missed_what_is_forgotten_begins_anew(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other, one.watch() as watch:
        created = await other.create_group(EMPTY)
        await until(watch, lambda view: view.group is not None)
        place.cut("n1")
        for number in range(3):
            await other.request_switch(SwitchRequest(to=number))
        await place.compact()
        # Long enough for the stream and the requests in flight to be given up.
        await trio.sleep(6)
        place.heal("n1")
        seen = await until(watch, lambda view: view.switch == SwitchRequest(to=2))
        view = await other.view()
        assert seen == [Seen(replace(view, revision=seen[0].view.revision), is_restart=True)]
        assert seen[-1].view.group_revision == created
        refused = SwitchRequest(to=2, refusal="no such member", refused_revision=view.switch_revision)
        await other.refuse_switch(refused, switch_revision=view.switch_revision)
        assert not (await until(watch, lambda view: view.switch == refused))[-1].is_restart


@contract
async def a_service_that_was_away_is_there_again(place: Place) -> None:
    async with place.open_client("n1") as one, place.open_client("n2") as other, other.watch() as watch:
        taken = await elect(one, 1)
        await until(watch, lambda view: view.revision == taken)
        place.stop()
        for call in (one.view, lambda *, timeout_s: one.grant_lease(5, timeout_s=timeout_s)):
            with pytest.raises(AgreementUnavailable):
                await call(timeout_s=TIMEOUT_S)
        place.start()
        view = await retry_until_available(one.view)
        assert (view.master, view.master_revision) == (master(1, 1), taken)
        group = replace(EMPTY, epoch=1, master_id=1, sync_state_set=frozenset({1}))
        await retry_until_available(lambda: one.change_group(group, group_revision=taken, master_revision=taken))
        assert (await until(watch, lambda view: view.group == group))[-1].view.master == master(1, 1)
