"""The simulated agreement: the suite that real etcd passes, and what the simulation adds."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from ha.failover.agreement import Agreement, AgreementUnavailable, LeaseLost
from tests.failover.contract import CONTRACT, EMPTY, MEMBER, Check
from tests.sim.agreement import Link, SimAgreementService
from tests.sim.world import Timers


class SimPlace:
    def __init__(self, service: SimAgreementService) -> None:
        self.service = service

    @asynccontextmanager
    async def open_client(self, node: str) -> AsyncIterator[Agreement]:
        yield self.service.client(node)

    def cut(self, node: str) -> None:
        self.service.cut(node)

    def lose_answers(self, node: str) -> None:
        self.service.links[node].lost_answer_share = 1.0

    def heal(self, node: str) -> None:
        self.service.links[node].lost_answer_share = 0.0
        self.service.heal(node)

    async def compact(self) -> None:
        self.service.compact()

    def stop(self) -> None:
        self.service.stop()

    def start(self) -> None:
        self.service.start()


@asynccontextmanager
async def open_place(seed: int = 1) -> AsyncIterator[SimPlace]:
    timers = Timers()
    service = SimAgreementService(timers, random.Random(seed))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timers.run)
        yield SimPlace(service)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
async def test_contract(check: Check, seed: int, autojump_clock: trio.testing.MockClock) -> None:
    async with open_place(seed) as place:
        await check(place)


# what the simulation adds


async def test_a_request_may_be_executed_after_its_timeout(autojump_clock: trio.testing.MockClock) -> None:
    async with open_place() as place:
        service = place.service
        agreement = service.client("n1")
        service.links["n1"].delay_s = (5.0, 5.0)
        with pytest.raises(AgreementUnavailable) as caught:
            await agreement.create_group(EMPTY, timeout_s=1)
        assert caught.value.outcome_unknown
        assert service.view().group is None
        await trio.sleep(5)
        assert service.view().group == EMPTY


@pytest.mark.parametrize("late_s", [0.0, 0.7])
async def test_a_lease_that_is_not_renewed_ends(late_s: float, autojump_clock: trio.testing.MockClock) -> None:
    """Its holder is paused until long after."""
    async with open_place() as place:
        service = place.service
        service.lease_late_s = (late_s, late_s)
        service.links["n1"] = Link(delay_s=(0.0, 0.0))
        agreement = service.client("n1")
        lease = await agreement.grant_lease(2)
        granted_at = trio.current_time()
        await agreement.put_member(1, MEMBER, lease=lease)
        await trio.sleep_until(granted_at + 2 + late_s - 0.01)
        assert service.view().members == {1: MEMBER}
        await trio.sleep(0.02)
        assert service.view().members == {}
        with pytest.raises(LeaseLost):
            await agreement.renew(lease)


async def test_every_lease_ends(autojump_clock: trio.testing.MockClock) -> None:
    """Times are rounded to ticks, but never to before the lease's end."""
    async with open_place() as place:
        service = place.service
        service.lease_late_s = (0.0, 0.0)
        agreement = service.client("n1")
        for number in range(1, 501):
            await trio.sleep(0.00137)
            await agreement.put_member(number, MEMBER, lease=await agreement.grant_lease(2))
        assert service.view().members
        await trio.sleep(2.1)
        assert service.view().members == {}


async def test_without_a_quorum_no_lease_ends_and_all_are_renewed_after(autojump_clock: trio.testing.MockClock) -> None:
    async with open_place() as place:
        service = place.service
        service.lease_late_s = (0.0, 0.0)
        agreement = service.client("n1")
        lease = await agreement.grant_lease(2)
        await agreement.put_member(1, MEMBER, lease=lease)
        service.stop()
        await trio.sleep(600)
        assert service.view().members == {1: MEMBER}
        service.start()
        await trio.sleep(1.9)
        assert service.view().members == {1: MEMBER}
        await trio.sleep(0.2)
        assert service.view().members == {}
