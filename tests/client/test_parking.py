"""Tasks that are woken together, each with its own value, on both event loops."""

from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from ha.client.parking import parking_here
from tests.client.backends import on_both_backends


@on_both_backends()
async def test_each_task_gets_its_value_and_a_cancelled_one_gets_none() -> None:
    got: dict[int, Any] = {}
    parking = parking_here()()
    scopes: list[anyio.CancelScope] = []

    async def wait() -> None:
        with anyio.CancelScope() as scope:
            place = len(scopes)
            scopes.append(scope)
            got[place] = await parking.wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(wait)
        while len(scopes) < 4:
            await checkpoint()
        scopes[1].cancel()
        scopes[3].cancel()
        for _ in range(5):
            await checkpoint()
        assert not got
        parking.give(["a", "b", "c", "d"])
        assert not got  # they run later, not in this scheduler pass
    assert [scope.cancelled_caught for scope in scopes] == [False, True, False, True]
    assert got == {0: "a", 2: "c"}


@on_both_backends()
async def test_cancelled_task_does_not_wait() -> None:
    parking = parking_here()()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await parking.wait()
    assert scope.cancelled_caught
    parking.give([1])
