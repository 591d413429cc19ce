"""Distinguishes the records of deleted topics, which are in no queue, from records that are not queued yet.

halog keeps the queues of a deleted topic with their ends, and states in `config/topics.json` up to which physical
offset its messages are deleted. RocketMQ deletes the directories of the queues, and removes the topic from that file.
If the topic is then created again, its queue offsets begin at 0 again, so only physical offsets tell its messages from
earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ha.arrow.confirmed import Confirmed
from ha.arrow.queues import QUEUE_FOLDERS, QueueId, Queues
from ha.arrow.replicas import stored_broker_name
from ha.errors import RemoteProtocolError
from ha.protocol.bodies import TopicConfigTable
from ha.protocol.java_json import read_as
from ha.protocol.store_files import BLANK_SIZE

_ENTRIES_AT_ONCE = 1 << 16


def deleted_topics(store: Path) -> Mapping[str, int]:
    """Returns the topics that halog has deleted, with the physical offset before which their messages are gone."""
    return topic_table(store).deleted_topics or {}


def is_deleted_by_rocketmq(store: Path, topic: str) -> bool:
    """Returns whether `topic` is neither in the queues of a RocketMQ store nor in its table of topics.

    False if the table can't be read or is empty. Always false for a halog store: its slaves get the table later than
    the messages, so a topic that the table lacks may exist.
    """
    if stored_broker_name(store) is not None or any((store / name / topic).exists() for name in QUEUE_FOLDERS):
        return False
    known = topic_table(store).topic_config_table
    return bool(known) and topic not in known


def created_at(queues: Queues, confirmed: Confirmed, key: QueueId) -> int:
    """Returns the physical offset before which all records of a queue belong to an earlier, deleted topic of the same
    name.

    It is the offset of the queue's first message or, if there is no such queue, of the first message in the topic's
    other queues. 0 if any of these queues is empty or its first message's record does not agree with the entry, or if
    the topic has no queue.
    """
    keys = [key] if key in queues else [QueueId(key.topic, queue_id) for queue_id in queues.of_topic(key.topic)]
    return min((_first_message(queues, confirmed, each) for each in keys), default=0)


def _first_message(queues: Queues, confirmed: Confirmed, key: QueueId) -> int:
    queue, end = queues[key], confirmed.queue_end(key)
    at, count = queue.first, 1  # nearly always the first entry is a message; otherwise many may be blank
    while at < end:
        start, entries = queue.read(at, min(end, at + count))
        messages = np.flatnonzero(entries["size"] != BLANK_SIZE)
        if len(messages) or not len(entries):
            found = confirmed.record_of(key, start + int(messages[0])) if len(messages) else None
            return 0 if found is None else found[0]
        at, count = start + len(entries), _ENTRIES_AT_ONCE
    return 0


def topic_table(store: Path) -> TopicConfigTable:
    """Returns a store's table of topics; an empty one if it can't be read."""
    try:
        return read_as(TopicConfigTable, (store / "config" / "topics.json").read_bytes())
    except (OSError, RemoteProtocolError):
        return TopicConfigTable()
