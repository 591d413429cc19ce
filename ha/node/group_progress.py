"""Computes committed offsets and lag of consumer groups, from the broker's tables and the consume queues.

Calls yield to other tasks every few queues.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from ha.admin.dashboard.source import GroupQueue, Queue
from ha.broker.clients import ConsumerGroup
from ha.broker.tables import Tables
from ha.store.message_store import MessageStore

from .messages import queue_range

QUEUES_PER_SLICE = 64
KEYS_PER_SLICE = 4096


class GroupProgress:
    """Computes the progress of all consumer groups of a broker."""

    def __init__(self, store: MessageStore, tables: Tables) -> None:
        self._store = store
        self._tables = tables

    async def topics_by_group(self) -> dict[str, list[str]]:
        """Returns, for each known group, the topics in which it has committed offsets; without any, an empty list."""
        found: dict[str, list[str]] = {name: [] for name in self._tables.groups.table}
        for number, key in enumerate(list(self._tables.offsets.table)):
            if number % KEYS_PER_SLICE == 0:
                await trio.lowlevel.checkpoint()
            topic, _, group = key.rpartition("@")
            found.setdefault(group, []).append(topic)
        return found

    async def lag(self, group: str, topics: Iterable[str]) -> int:
        """Returns the number of messages in `topics` that a group has not committed."""
        behind_count = 0
        for topic in topics:
            for queue_id in range(self.readable_queues(topic)):
                await yield_sometimes(queue_id)
                behind_count += self.queue(group, topic, queue_id).behind_count
        return behind_count

    def queue(self, group: str, topic: str, queue_id: int) -> GroupQueue:
        """Returns a group's progress in a queue."""
        queue = self._store.queues.get(topic, queue_id)
        shown = Queue(queue_id, 0, 0) if queue is None else queue_range(queue)
        committed = self._tables.offsets.get(group, topic, queue_id)
        pulled = self._tables.reads.position(group, topic, queue_id)
        begins_at = shown.min_offset if committed is None else max(committed, shown.min_offset)
        behind_count = max(0, shown.max_offset - begins_at)
        return GroupQueue(shown, committed, None if pulled < 0 else pulled, behind_count)

    def readable_queues(self, topic: str) -> int:
        """Returns the number of queues that consumers of a topic read; 0 if the topic does not exist."""
        config = self._tables.topics.get_readable(topic)
        return 0 if config is None else config.read_queue_nums


def topics_of(online: ConsumerGroup | None, committed_topics: Iterable[str]) -> list[str]:
    """Returns the topics of a group, sorted: those to which its connected members subscribe; if there are none, those
    with committed offsets."""
    return sorted(online.subscriptions if online is not None and online.subscriptions else committed_topics)


async def yield_sometimes(queue_id: int) -> None:
    """Lets other tasks run every QUEUES_PER_SLICE queues."""
    if queue_id % QUEUES_PER_SLICE == 0:
        await trio.lowlevel.checkpoint()
