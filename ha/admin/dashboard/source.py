"""What the dashboard shows of topics, queues, messages and groups, and whom it asks for it.

The node gives it an object that answers these questions (`DashboardSource`). Each answer is bounded by what was asked
for, and none holds the event loop for long. Queue offsets are entries, physical offsets bytes, times ms since the
epoch. What isn't there is a `Missing`, which says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class Missing(msgspec.Struct, frozen=True):
    """There is no such thing to show: why, as a sentence for people."""

    reason: str


class Counts(msgspec.Struct, frozen=True):
    """Counters that only grow while the node runs."""

    stored_count: int
    """Messages put here"""
    read_count: int
    """Messages that consumers got here"""


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic's line. `message_count`: what its queues hold now."""

    name: str
    kind: str
    read_queue_count: int
    write_queue_count: int
    is_readable: bool
    is_writable: bool
    message_count: int


class Topics(msgspec.Struct, frozen=True):
    """Some topics of all that were looked for."""

    topics: Sequence[Topic]
    found_count: int


class Queue(msgspec.Struct, frozen=True):
    """One queue: it holds the messages from `min_offset` to before `max_offset`."""

    queue_id: int
    min_offset: int
    max_offset: int
    offset_at: int | None = None
    """The first message of the time asked for, or later"""


class TopicDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, some of its queues, and who consumes it."""

    topic: Topic
    attributes: Mapping[str, str]
    queues: Sequence[Queue]
    queue_count: int
    groups: Sequence[str]


class MessageLine(msgspec.Struct, frozen=True, kw_only=True):
    """A message in a list. `message_size`: its whole record."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    message_size: int
    body_size: int
    store_timestamp_ms: int
    unique_id: str
    tags: str
    keys: str


class QueuePart(msgspec.Struct, frozen=True, kw_only=True):
    """Some messages of a queue. `reason`: in words, why there is none."""

    queue: Queue
    messages: Sequence[MessageLine]
    next_offset: int
    reason: str = ""


class FoundMessages(msgspec.Struct, frozen=True):
    """What a search for a key came to; `is_cut`: there may be older ones."""

    messages: Sequence[MessageLine]
    is_cut: bool


class MessageDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One message. `body`: as the producer gave it, or its begin; `body_note`: what was done or couldn't be."""

    line: MessageLine
    message_id: str
    born_timestamp_ms: int
    born_host: str
    store_host: str
    flag: int
    system_flags: Sequence[str]
    reconsume_times: int
    prepared_transaction_offset: int
    body_crc: int
    is_body_sound: bool
    properties: Mapping[str, str]
    body: bytes
    is_body_cut: bool
    body_note: str
    queue: Queue | None
    """The queue that it is in, if that is known here"""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer group's line. `behind_count`: messages of all its queues that it has not committed yet."""

    name: str
    member_count: int
    topic_count: int
    behind_count: int
    read_per_s: float


class Groups(msgspec.Struct, frozen=True):
    """Some groups of all that were looked for."""

    groups: Sequence[Group]
    found_count: int


class GroupQueue(msgspec.Struct, frozen=True):
    """How far a group is in one queue; `committed_offset` and `pulled_offset` None: not yet."""

    queue: Queue
    committed_offset: int | None
    pulled_offset: int | None
    behind_count: int


class GroupTopic(msgspec.Struct, frozen=True, kw_only=True):
    """How far a group is in one topic, and what it wants of it ("" while nobody is there who says)."""

    topic: str
    subscription: str
    behind_count: int
    read_per_s: float
    queues: Sequence[GroupQueue]
    queue_count: int


class GroupMember(msgspec.Struct, frozen=True):
    """A client of a group."""

    client_id: str
    address: str
    language: str
    seen_age_s: float


class GroupDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A group, its members, and how far it is."""

    name: str
    settings: Mapping[str, str]
    members: Sequence[GroupMember]
    member_count: int
    topics: Sequence[GroupTopic]
    topic_count: int


class DashboardSource(Protocol):
    """What a node answers."""

    @property
    def is_content_open(self) -> bool:
        """Whether whoever reaches the node could read messages anyway, without showing who he is."""

    def status(self) -> Mapping[str, object]:
        """What /status shows."""

    def counts(self) -> Counts:
        """The counters now."""

    async def topics(self, search: str, *, with_system: bool, begin: int, count: int) -> Topics:
        """The topics whose name contains `search` in any case, by name: `count` from number `begin` on."""

    async def topic(self, name: str, *, begin: int, count: int, at_ms: int | None = None) -> TopicDetail | Missing:
        """A topic and `count` of its queues; with `at_ms` also where each was then."""

    async def queue(self, topic: str, queue_id: int, queue_offset: int, count: int) -> QueuePart | Missing:
        """At most `count` messages of a queue; those from its begin on if it begins later."""

    async def offset_at(self, topic: str, queue_id: int, at_ms: int) -> int | Missing:
        """The queue offset of the first message stored at a time or later."""

    async def with_key(self, topic: str, key: str, count: int) -> FoundMessages:
        """The newest messages of a topic with a key, or a unique id, newest first."""

    async def message(self, physical_offset: int, body_size_max: int) -> MessageDetail | Missing:
        """The message at a physical offset."""

    async def message_by_id(self, message_id: str) -> int | Missing:
        """The physical offset of the message with an id of those that brokers give."""

    async def groups(self, search: str, *, begin: int, count: int) -> Groups:
        """The consumer groups whose name contains `search`, by name: `count` from number `begin` on."""

    async def group(self, name: str, *, topic_count_max: int, queue_count_max: int) -> GroupDetail | Missing:
        """A consumer group: its first topics, and of each the first queues."""
