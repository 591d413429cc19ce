"""Assigns the queues of a topic to the members of a consumer group.

There is no coordinator: every member computes the assignment itself, so all clients, in any language, must agree.
Source: AllocateMessageQueueAveragely, the default of every RocketMQ client.
"""

from __future__ import annotations

from collections.abc import Iterable

from ha.client.messages import MessageQueue


def allocate_averagely(queues: Iterable[MessageQueue], client_ids: Iterable[str], own_id: str) -> list[MessageQueue]:
    """Returns the queues of member `own_id`: a contiguous range of the sorted queues.

    Each member gets the same number of queues; if they don't divide evenly, the first members by client id get one
    more. Empty if `own_id` is not in `client_ids`, or if there are more members than queues and this member is among
    the last."""
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
    """Sort key with Java's order: by UTF-16 code units, which differs from Python's outside the BMP."""
    return text.encode("utf-16-be", "surrogatepass")
