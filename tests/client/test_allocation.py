"""Allocation of queues equals that of RocketMQ 5.5.0's AllocateMessageQueueAveragely, for up to 17 queues and 9
members.

`allocation-5.5.0.txt` is its output: queue count, member count, then each member with its queues, sorted by name. Queue
i is b(i mod 3):(i div 3).
"""

from pathlib import Path

import pytest

from ha.client.allocation import allocate_averagely
from ha.client.messages import MessageQueue

LINES = Path(__file__).with_name("allocation-5.5.0.txt").read_text().splitlines()


def test_allocation_equals_the_java_clients() -> None:
    for line in LINES:
        queue_count, _, *members = line.split(" ")
        queues = [MessageQueue("T", f"b{i % 3}", i // 3) for i in range(int(queue_count))]
        expected = dict(member.split("=") for member in members)
        for client_id, taken in expected.items():
            allocated = allocate_averagely(reversed(queues), reversed(expected), client_id)
            assert ",".join(f"{queue.broker_name}:{queue.queue_id}" for queue in allocated) == taken, line


@pytest.mark.parametrize("count", [0, 1, 5])
def test_non_member_gets_no_queue(count: int) -> None:
    queues = [MessageQueue("T", "b", i) for i in range(count)]
    assert allocate_averagely(queues, ["a", "b"], "c") == []
    assert allocate_averagely(queues, [], "c") == []


def test_names_are_sorted_in_java_order() -> None:
    """By UTF-16 units, characters outside the basic plane sort before U+E000 and its successors."""
    queues = [MessageQueue("T", "b", 0), MessageQueue("T", "b", 1)]
    assert allocate_averagely(queues, ["\ue000", "\U0001f600"], "\U0001f600") == queues[:1]
