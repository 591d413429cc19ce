"""POP state in memory: changes that are undone, and snapshots."""

from __future__ import annotations

from ha.broker.pop import pop_log
from ha.broker.pop.ordered import ordered_batch
from ha.broker.pop.state import Limits, PopState
from ha.protocol.pop import ATTEMPT_ID_SIZE_MAX
from ha.protocol.pop_records import encode_pop_record


def test_an_undone_record_restores_the_state_before_its_first_change() -> None:
    state = PopState(Limits(per_queue=100, total=100, queue_count=1))
    queue = state.open(("g", "TT", 0), 0)
    assert queue is not None
    state.take(queue, range(5), 5, pop_time_ms=1, due_ms=2)
    state.take_changes()
    state.settle(is_stored=True)
    assert state.acknowledge(queue, [3, 4, 9], 1) == [9]
    assert state.acknowledge(queue, [3], 1) == [3]
    state.take(queue, range(4, 8), 8, pop_time_ms=3, due_ms=4)
    assert state.acknowledge(queue, [4, 5, 5], 3) == []
    assert (sorted(queue.batches), state.in_flight_count) == ([0, 1, 2, 6, 7], 5)
    state.take_changes()
    state.settle(is_stored=False)
    assert (sorted(queue.batches), state.in_flight_count, queue.next_offset) == ([0, 1, 2, 3, 4], 5, 5)
    assert {batch.pop_time_ms for batch in queue.batches.values()} == {1}


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


def test_messages_of_an_undone_change_are_due_although_their_schedule_was_cleaned() -> None:
    """Finished batches leave the schedule when it is long; those of a change that is undone are scheduled again."""
    state = PopState(Limits(per_queue=10**6, total=10**6, queue_count=10))
    queue = state.open(("g", "t", 0), 0)
    assert queue is not None
    for number in range(1100):
        state.take(queue, range(number * 4, number * 4 + 4), number * 4 + 4, 1000 + number, 5000 + number)
    state.take_changes()
    state.settle(is_stored=True)
    for number in range(1100):
        assert not state.acknowledge(queue, range(number * 4, number * 4 + 4), 1000 + number)
    state.take_changes()
    state.settle(is_stored=False)
    assert state.in_flight_count == sum(batch.left for batch in state.take_due(10**15, 10**9)) == 4400
