"""WatchedOffset: one wake-up per raise, none lost."""

import trio
from trio.testing import wait_all_tasks_blocked

from ha.store.watched_offset import WatchedOffset


async def test_waiters_wake_when_their_offset_is_passed() -> None:
    offset = WatchedOffset(10)
    seen: list[int] = []

    async def wait(beyond: int) -> None:
        seen.append(await offset.wait_beyond(beyond))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, 10)
        nursery.start_soon(wait, 20)
        await wait_all_tasks_blocked()
        assert offset.raise_to(20)
        await wait_all_tasks_blocked()
        assert seen == [20]
        assert offset.raise_to(21)
    assert seen == [20, 21]


async def test_raising_to_a_lower_offset_changes_nothing() -> None:
    offset = WatchedOffset(10)
    assert not offset.raise_to(10)
    assert not offset.raise_to(9)
    assert offset.value == 10
    offset.reset(5)
    assert offset.value == 5


async def test_waiting_for_a_passed_offset_returns_at_once() -> None:
    assert await WatchedOffset(10).wait_beyond(9) == 10


async def test_a_reset_ends_every_wait_even_at_a_lower_offset() -> None:
    offset = WatchedOffset(10)
    seen: list[int] = []

    async def wait() -> None:
        seen.append(await offset.wait_beyond(10))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        offset.reset(5)
    assert seen == [5]
