"""Which queues of a topic each member of a consumer group takes.

There is no coordinator: every member computes this for itself, so all of them, in whatever language, must agree on it.
Source: AllocateMessageQueueAveragely, the default of every RocketMQ client.
"""

from __future__ import annotations

from collections.abc import Iterable

from ha.client.messages import MessageQueue


def allocate_averagely(queues: Iterable[MessageQueue], client_ids: Iterable[str], own_id: str) -> list[MessageQueue]:
    """The queues that fall to `own_id`: neighbours, and as many as everybody else has, give or take one.

    The first members get one more where it doesn't divide. None if `own_id` is not a member."""
    members = sorted(client_ids, key=_java_order)
    if own_id not in members:
        return []
    ordered = sorted(
        queues, key=lambda queue: (_java_order(queue.topic), _java_order(queue.broker_name), queue.queue_id)
    )
    index = members.index(own_id)
    whole, remainder = divmod(len(ordered), len(members))
    size = max(1, whole + (index < remainder))
    start = index * size + (0 if index < remainder else remainder)
    return ordered[start : start + size]


def _java_order(text: str) -> bytes:
    """Java compares UTF-16 units, which differs from Python's order beyond the basic plane."""
    return text.encode("utf-16-be", "surrogatepass")
