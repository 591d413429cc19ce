"""What a feeder does with the responses to its pulls, on a virtual clock."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint

from ha.client import MessageQueue, PullStatus, PushOptions, RawPull, StartFrom
from ha.client.feeding import Feeder
from ha.client.held_queue import HeldQueue
from ha.client.positions import Positions
from ha.client.queue_requests import QueueRequests
from ha.client.saving import Saving
from ha.client.subscription import subscription_data

QUEUE = MessageQueue("T", "a", 0)
PAUSE_S = 1.0
"""Pause after a response that moves the consumer to the offset it has asked for."""


def feeder(answer: RawPull, positions: object = None) -> Feeder:
    """A feeder that gets this answer to every pull, and uses `positions`."""

    async def pull(*_: Any, **__: Any) -> RawPull:
        await checkpoint()
        return answer

    return Feeder(
        cast(QueueRequests, SimpleNamespace(pull=pull)),
        cast(Positions, positions),
        {"T": subscription_data("T", "*", 0)},
        PushOptions(),
        StartFrom.FIRST,
        needs_lock=False,
        body_size_max=1000,
        answer_size_max=1000,
        wall_clock_ms=lambda: 0,
        on_filled=lambda held, count: None,
    )


@pytest.mark.parametrize(("min_offset", "max_offset"), [(9, 20), (0, 5), (0, 20)], ids=["deleted", "lost", "reset"])
async def test_a_queue_is_revoked_as_a_pause_ends(autojump_clock: object, min_offset: int, max_offset: int) -> None:
    """The cancellation comes too late for the task: it goes on although the queue is dropped."""
    held = HeldQueue(QUEUE)
    held.restart(7)
    contradictory = RawPull(PullStatus.OFFSET_ILLEGAL, b"", 7, min_offset, max_offset, 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feeder(contradictory).feed, held)
        await anyio.sleep(PAUSE_S / 2)
        dropped = held.process_queue
        held.drop()
        await anyio.sleep(PAUSE_S)
        held.revoke()
    assert held.process_queue is dropped
    assert held.position == 7


async def test_a_loaded_position_is_saved_again_only_if_it_may_be_lost(autojump_clock: object) -> None:
    saved: list[int] = []

    async def load(queue: MessageQueue) -> int:
        return 7

    async def save(offsets: Mapping[MessageQueue, int], on_saved: Callable[[MessageQueue], None]) -> None:
        for queue, offset in offsets.items():
            saved.append(offset)
            on_saved(queue)

    positions = SimpleNamespace(load=load, save=save, place_of=lambda queue: "a", loss_count=3)
    held, saving = HeldQueue(QUEUE), Saving("g", cast(Positions, positions), interval_s=5.0, silence_s=3.0)
    nothing_new = RawPull(PullStatus.NO_NEW_MSG, b"", 7, 0, 7, 0)
    async with anyio.create_task_group() as tasks:
        saving.start(tasks, {})
        tasks.start_soon(feeder(nothing_new, positions).feed, held)
        await anyio.sleep(1)
        await saving.save(held)
        assert not saved
        positions.loss_count += 1
        await saving.save(held)
        assert saved == [7]
        tasks.cancel_scope.cancel()
