"""Random faults on members with a model of a log: nothing acknowledged is lost, and all recover."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from tests.failover.group import until
from tests.failover.model import Mischief, ModelGroup, ModelRole


async def live(seed: int, ack_count: int | None, seconds: float = 60.0) -> None:
    chance = random.Random(seed)
    async with trio.open_nursery() as nursery:
        group = ModelGroup(nursery, ack_count)
        group.service.chance = chance
        nursery.start_soon(group.timers.run)
        for id_ in (1, 2, 3):
            group.add(id_)
        nursery.start_soon(group.work)
        await group.wait_master()
        mischief = Mischief(group, chance)
        await mischief.run(seconds)
        mischief.mend()
        count = len(group.acknowledged)
        await until(lambda: len(group.acknowledged) > count + 20)
        await group.settle()
        logs = [node.role.log for node in group.nodes.values() if isinstance(node.role, ModelRole)]
        await until(lambda: all(log[:count] == group.acknowledged[:count] for log in logs))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ack_count", [None, 2])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_acknowledged_is_lost(seed: int, ack_count: int | None) -> None:
    trio.run(live, seed, ack_count, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.long
@pytest.mark.parametrize("ack_count", [None, 2])
@pytest.mark.parametrize("seed", range(100, 400))
def test_nothing_acknowledged_is_lost_with_many_seeds(seed: int, ack_count: int | None) -> None:
    trio.run(live, seed, ack_count, clock=trio.testing.MockClock(autojump_threshold=0))
