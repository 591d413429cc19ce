"""Commit offset, held messages and limits of a process queue."""

import random

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.client.messages import MessageQueue, ReceivedMessage
from ha.client.process_queue import Budget, ProcessQueue
from tests.client.backends import on_both_backends

QUEUE = MessageQueue("T", "a", 0)


def message(offset: int, size: int = 1) -> ReceivedMessage:
    return ReceivedMessage(
        queue=QUEUE,
        queue_offset=offset,
        physical_offset=0,
        message_id=str(offset),
        offset_message_id="",
        body=b"x" * size,
        tags=None,
        keys=(),
        properties={},
        flag=0,
        born_timestamp_ms=0,
        store_timestamp_ms=0,
        born_host=("", 0),
        store_host=("", 0),
        reconsume_times=0,
    )


def make(
    first: int = 0, *, count_max: int = 1000, bytes_max: int = 1 << 30, span_max: int = 2000, total: int = 10_000
) -> tuple[ProcessQueue, Budget]:
    budget = Budget(total, 1 << 30)
    return ProcessQueue(first, budget, count_max=count_max, bytes_max=bytes_max, span_max=span_max), budget


def test_commit_offset_is_the_lowest_unfinished_one() -> None:
    queue, budget = make(7)
    assert queue.commit_offset == 7
    queue.put([message(offset) for offset in (7, 9, 12)], 15)
    taken = [queue.take() for _ in range(3)]
    assert queue.take() is None
    first, second, third = [each for each in taken if each is not None]
    assert queue.commit_offset == 7
    queue.finish(third)
    queue.finish(first)
    assert queue.commit_offset == 9
    queue.finish(second)
    assert (queue.commit_offset, queue.count, budget.statistics().message_count) == (15, 0, 0)


def test_filtered_messages_count_as_finished() -> None:
    queue, _ = make(3)
    queue.put([], 40)
    assert queue.commit_offset == 40


@given(st.data())
def test_commit_offset_never_passes_an_unfinished_message(data: st.DataObject) -> None:
    """Compares with a model that keeps sets."""
    queue, budget = make()
    unfinished: set[int] = set()
    taken: list[ReceivedMessage] = []
    next_offset = 0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["put", "take", "finish", "back"])):
            case "put":
                offsets = data.draw(st.sets(st.integers(next_offset, next_offset + 9), max_size=5))
                next_offset += 10
                queue.put([message(offset) for offset in sorted(offsets)], next_offset)
                unfinished |= offsets
            case "take":
                each = queue.take()
                if each is not None:
                    taken.append(each)
            case "finish" if taken:
                each = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
                queue.finish(each)
                unfinished.remove(each.queue_offset)
            case "back" if taken:
                queue.put_back(taken.pop())
        assert queue.commit_offset == min(unfinished, default=next_offset)
        assert queue.count == budget.statistics().message_count == len(unfinished)
    queue.drop()
    assert budget.statistics().message_count == budget.statistics().byte_count == 0


def test_dropped_queue_releases_its_budget() -> None:
    queue, budget = make()
    queue.put([message(offset, 100) for offset in range(5)], 5)
    one = queue.take()
    assert one is not None
    queue.drop()
    queue.drop()
    assert budget.statistics().byte_count == 0
    queue.finish(one)
    queue.put_back(one)
    assert (queue.commit_offset, queue.take()) == (0, None)
    assert budget.statistics().message_count == 0


@on_both_backends()
@pytest.mark.parametrize("bound", ["count", "bytes", "span", "total"])
async def test_each_limit_stops_fetching_until_there_is_room(bound: str) -> None:
    queue, _ = {
        "count": make(count_max=3),
        "bytes": make(bytes_max=3 * 1024),
        "span": make(span_max=2),
        "total": make(total=3),
    }[bound]
    queue.put([message(offset) for offset in range(3)], 3)
    taken = [each for each in (queue.take() for _ in range(3)) if each is not None]
    random.Random(1).shuffle(taken)
    with anyio.move_on_after(0.05) as scope:
        await queue.wait_room()
    assert scope.cancelled_caught
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(queue.wait_room)
            await anyio.lowlevel.checkpoint()
            for each in taken:
                queue.finish(each)


@on_both_backends()
async def test_dropping_the_queue_ends_the_wait_for_room() -> None:
    queue, _ = make(count_max=1)
    queue.put([message(0)], 1)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(queue.wait_room)
            await anyio.lowlevel.checkpoint()
            queue.drop()
