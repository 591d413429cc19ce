"""POP state in memory: changes that are undone, and snapshots."""

from __future__ import annotations

import pytest

from ha.broker.pop import pop_log
from ha.broker.pop import state as pop_state
from ha.broker.pop.ordered import ordered_batch
from ha.broker.pop.state import Limits, PopState
from ha.protocol import pop_records
from ha.protocol.pop import ATTEMPT_ID_SIZE_MAX
from ha.protocol.pop_records import PopRecord, decode_pop_record, encode_pop_record

SIZE_MAX = 1 << 20


def state_of_single_pops(queue_count: int, message_count: int) -> PopState:
    """Each message was popped alone, and every other one is acknowledged, so that no two share a run."""
    state = PopState(Limits(per_queue=10**6, total=10**7, queue_count=100))
    for queue_id in range(queue_count):
        queue = state.open(("g", "TT", queue_id), 0)
        assert queue is not None
        for offset in range(0, 2 * message_count, 2):
            state.take(queue, (10**9 + offset,), 10**9 + offset + 1, 1_700_000_000_000 + offset, 1_800_000_000_000)
    while state.has_changes:
        state.take_changes(SIZE_MAX)
        state.settle(is_stored=True)
    return state


def content(state: PopState) -> object:
    return {
        key: (queue.next_offset, {offset: (batch.pop_time_ms, batch.due_ms) for offset, batch in queue.batches.items()})
        for key, queue in state.queues.items()
    }


def copied(record: PopRecord) -> PopRecord:
    """As it is read from the log."""
    return decode_pop_record(encode_pop_record(record))


def test_an_undone_record_restores_the_state_before_its_first_change() -> None:
    state = PopState(Limits(per_queue=100, total=100, queue_count=1))
    queue = state.open(("g", "TT", 0), 0)
    assert queue is not None
    state.take(queue, range(5), 5, pop_time_ms=1, due_ms=2)
    state.take_changes(SIZE_MAX)
    state.settle(is_stored=True)
    assert state.acknowledge(queue, [3, 4, 9], 1) == [9]
    assert state.acknowledge(queue, [3], 1) == [3]
    state.take(queue, range(4, 8), 8, pop_time_ms=3, due_ms=4)
    assert state.acknowledge(queue, [4, 5, 5], 3) == []
    assert (sorted(queue.batches), state.in_flight_count) == ([0, 1, 2, 6, 7], 5)
    state.take_changes(SIZE_MAX)
    state.settle(is_stored=False)
    assert (sorted(queue.batches), state.in_flight_count, queue.next_offset) == ([0, 1, 2, 3, 4], 5, 5)
    assert {batch.pop_time_ms for batch in queue.batches.values()} == {1}


def test_reset_of_many_messages_in_flight_is_written_to_readable_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """One record named more messages than can be read back, with maxPopInFlight above its default."""
    for module in (pop_records, pop_state):
        monkeypatch.setattr(module, "OFFSET_COUNT_MAX", 1000)
    state = PopState(Limits(per_queue=500, total=10**7, queue_count=100))
    for queue_id in range(3):
        queue = state.open(("g", "TT", queue_id), 0)
        assert queue is not None
        state.take(queue, range(500), 500, pop_time_ms=1, due_ms=2)
    while state.has_changes:
        copied(state.take_changes(SIZE_MAX))
        state.settle(is_stored=True)
    for queue in state.queues.values():
        state.reset(queue, 0)
    done_counts: list[int] = []
    while state.has_changes:
        record = copied(state.take_changes(SIZE_MAX))
        done_counts.append(sum(sum(queue.done[1::2]) for queue in record.queues))
        state.settle(is_stored=True)
    assert done_counts == [1000, 500]


def test_parts_of_a_snapshot_are_small_with_ordered_messages() -> None:
    state = PopState(Limits(per_queue=100, total=10_000, queue_count=10_000))
    for number in range(2000):
        queue = state.open((f"g{number}", "TT", 0), 0)
        assert queue is not None
        offsets = range(10**9, 10**9 + 32)
        attempt_id = "a" * ATTEMPT_ID_SIZE_MAX
        order = ordered_batch(None, offsets, pop_time_ms=1 << 40, invisible_ms=60_000, attempt_id=attempt_id)
        state.set_order(queue, order)
    sizes = [len(encode_pop_record(part)) for part in state.snapshot(pop_log.PART_BYTES_MAX)]
    assert sum(sizes) > 10 * pop_log.PART_BYTES_MAX
    assert max(sizes) < 1.5 * pop_log.PART_BYTES_MAX


def test_parts_of_a_snapshot_of_one_long_queue_are_small() -> None:
    state = state_of_single_pops(1, 20_000)
    parts = [encode_pop_record(part) for part in state.snapshot(64 * 1024)]
    assert len(parts) > 10
    assert max(map(len, parts)) < 1.5 * 64 * 1024
    loaded = PopState(state.limits)
    for part in parts:
        loaded.apply(decode_pop_record(part))
    assert content(loaded) == content(state)


def test_part_of_a_snapshot_names_no_more_messages_than_a_record_may() -> None:
    state = PopState(Limits(per_queue=10**6, total=10**7, queue_count=100))
    for queue_id in range(3):
        queue = state.open(("g", "TT", queue_id), 0)
        assert queue is not None
        state.take(queue, range(500_000), 500_000, 1, 2)
    while state.has_changes:
        state.take_changes(SIZE_MAX)
        state.settle(is_stored=True)
    loaded = PopState(state.limits)
    for part in state.snapshot(pop_log.PART_BYTES_MAX):
        loaded.apply(copied(part))
    assert content(loaded) == content(state)


def test_snapshot_that_is_not_completed_loses_nothing() -> None:
    """A crash after its first part: the state is read from the records before it, and this part."""
    state = state_of_single_pops(1, 5000)
    loaded = PopState(state.limits)
    for part in state.snapshot(64 * 1024):
        loaded.apply(copied(part))
    parts = state.snapshot(4096)
    loaded.apply(copied(next(parts)))
    assert content(loaded) == content(state)


def test_messages_taken_before_the_first_part_of_a_snapshot_are_not_lost() -> None:
    """It had the offset behind them. They were in a later part, and in the record of changes after this one."""
    state = state_of_single_pops(1, 5000)
    loaded = PopState(state.limits)
    for part in state.snapshot(SIZE_MAX):
        loaded.apply(copied(part))
    before = content(loaded)
    [queue] = state.queues.values()
    state.take(queue, (queue.next_offset,), queue.next_offset + 1, pop_time_ms=1, due_ms=2)
    loaded.apply(copied(next(state.snapshot(4096))))
    assert content(loaded) == before
    loaded.apply(copied(state.take_changes(SIZE_MAX)))
    assert content(loaded) == content(state)


def test_changes_between_the_parts_of_a_snapshot_count() -> None:
    state = state_of_single_pops(2, 1000)
    loaded = PopState(state.limits)
    for number, part in enumerate(state.snapshot(4096)):
        loaded.apply(copied(part))
        queue = state.get(("g", "TT", number % 2))
        assert queue is not None
        first, *_, last = sorted(queue.batches)
        for offset in (first, last):
            assert not state.acknowledge(queue, [offset], queue.batches[offset].pop_time_ms)
        state.take(queue, (5,), queue.next_offset, pop_time_ms=number, due_ms=number + 1)
        loaded.apply(copied(state.take_changes(SIZE_MAX)))
        state.settle(is_stored=True)
    assert content(loaded) == content(state)


def test_many_changes_become_several_records() -> None:
    """A reset of long queues: one record of it was larger than a message may be."""
    state = state_of_single_pops(4, 5000)
    loaded = PopState(state.limits)
    for part in state.snapshot(SIZE_MAX):
        loaded.apply(copied(part))
    for queue in state.queues.values():
        state.reset(queue, 0)
    count = 0
    while state.has_changes:
        body = encode_pop_record(state.take_changes(64 * 1024))
        loaded.apply(decode_pop_record(body))
        state.settle(is_stored=True)
        assert len(body) < 64 * 1024
        count += 1
    assert count > 4
    assert content(loaded) == content(state)
    assert state.in_flight_count == 0


def test_rest_of_a_long_reset_is_repeated_if_it_can_not_be_stored() -> None:
    state = state_of_single_pops(1, 5000)
    loaded = PopState(state.limits)
    for part in state.snapshot(SIZE_MAX):
        loaded.apply(copied(part))
    [queue] = state.queues.values()
    state.reset(queue, 0)
    outcomes = [True, False]
    while state.has_changes:
        record = copied(state.take_changes(64 * 1024))
        is_stored = outcomes.pop(0) if outcomes else True
        state.settle(is_stored=is_stored)
        if is_stored:
            loaded.apply(record)
    assert not outcomes
    assert (state.in_flight_count, queue.next_offset) == (0, 0)
    assert content(loaded) == content(state)


@pytest.mark.parametrize("is_crash", [True, False])
def test_messages_taken_after_the_first_record_of_a_long_queue_are_not_lost(is_crash: bool) -> None:
    """The record already had the offset behind them, and the next one is never stored."""
    state = PopState(Limits(per_queue=10**6, total=10**7, queue_count=100))
    queue = state.open(("g", "TT", 0), 0)
    assert queue is not None
    for offset in range(5000):
        state.take(queue, (offset,), offset + 1, pop_time_ms=offset, due_ms=offset + 1)
    loaded = PopState(state.limits)
    loaded.apply(copied(state.take_changes(64 * 1024)))
    state.settle(is_stored=True)
    assert state.has_changes
    if not is_crash:
        state.take_changes(64 * 1024)
        state.settle(is_stored=False)
        loaded = state
    [queue] = loaded.queues.values()
    assert 0 < queue.next_offset == len(queue.batches) < 5000


def test_changes_after_a_record_of_some_are_undone_with_it() -> None:
    state = state_of_single_pops(4, 5000)
    before = content(state)
    for queue in state.queues.values():
        for offset in sorted(queue.batches):
            assert not state.acknowledge(queue, [offset], queue.batches[offset].pop_time_ms)
    state.take_changes(64 * 1024)
    assert state.has_changes
    state.settle(is_stored=False)
    assert not state.has_changes
    assert content(state) == before


def test_messages_of_an_undone_change_are_due_although_their_schedule_was_cleaned() -> None:
    """Finished batches leave the schedule when it is long; those of a change that is undone are scheduled again."""
    state = PopState(Limits(per_queue=10**6, total=10**6, queue_count=10))
    queue = state.open(("g", "t", 0), 0)
    assert queue is not None
    for number in range(1100):
        state.take(queue, range(number * 4, number * 4 + 4), number * 4 + 4, 1000 + number, 5000 + number)
    state.take_changes(SIZE_MAX)
    state.settle(is_stored=True)
    for number in range(1100):
        assert not state.acknowledge(queue, range(number * 4, number * 4 + 4), 1000 + number)
    state.take_changes(SIZE_MAX)
    state.settle(is_stored=False)
    assert state.in_flight_count == sum(batch.left for batch in state.take_due(10**15, 10**9)) == 4400
