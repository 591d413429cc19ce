"""The data that the dashboard shows about topics, queues, messages and groups, and the interfaces to the node.

The node implements `DashboardSource` and `DashboardActions`. Results are limited by the arguments, and no call blocks
the event loop for long. Calls that read files raise SourceBusyError if that is not possible at present. Queue offsets
count messages, physical offsets bytes; times are in ms since 1970. `Missing` explains why there is no result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class SourceBusyError(Exception):
    """The node can't read files at present, for example because too many are open. The text says why."""


class Missing(msgspec.Struct, frozen=True):
    """No result. `reason` is a sentence for the user."""

    reason: str


class Counts(msgspec.Struct, frozen=True):
    """Counters since the start of the node."""

    stored_count: int
    """Number of messages stored by puts"""
    read_count: int
    """Number of messages returned to consumers"""


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """Another broker of the cluster. Addresses are host:port, "" if unknown.

    `host`: where clients reach it. `url`: URL of its admin port, "" if it is unknown or a viewer of this node's pages
    could not open it. `ha_address`: where slaves reach it. `ha_client_address`: its end of the connection to its own
    master.
    """

    broker_name: str
    broker_id: int
    host: str
    url: str
    ha_address: str
    ha_client_address: str

    @property
    def name(self) -> str:
        """Broker name and ID."""
        return f"{self.broker_name}:{self.broker_id}"


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic in a list. `kind`: messages, retries, dead letters or system.

    `message_count`: messages in its queues. `per_s`: messages stored per second in the last minute, None if unknown.
    `last_ms`: store time of the newest message, None if there is none or it can't be read.
    """

    name: str
    kind: str
    read_queue_count: int
    write_queue_count: int
    is_readable: bool
    is_writable: bool
    message_count: int
    per_s: float | None
    last_ms: int | None


class Topics(msgspec.Struct, frozen=True):
    """A page of the topics found."""

    topics: Sequence[Topic]
    found_count: int


class Queue(msgspec.Struct, frozen=True):
    """A queue with its range of queue offsets [`min_offset`, `max_offset`)."""

    queue_id: int
    min_offset: int
    max_offset: int
    offset_at: int | None = None
    """Queue offset of the first message stored at or after the requested time, `max_offset` if there is none; None if
    no time was requested"""


class TopicDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, a page of its queues, and its consumer groups."""

    topic: Topic
    attributes: Mapping[str, str]
    queues: Sequence[Queue]
    queue_count: int
    groups: Sequence[str]


class MessageLine(msgspec.Struct, frozen=True, kw_only=True):
    """A message in a list. `message_size`: size of its record in bytes. `body_begin`: start of the decompressed
    body."""

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
    body_begin: bytes
    is_body_cut: bool


class QueuePart(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a queue's messages. `reason`: why there are none."""

    queue: Queue
    messages: Sequence[MessageLine]
    next_offset: int
    reason: str = ""


class FoundMessages(msgspec.Struct, frozen=True):
    """Result of a search for a key. `is_cut`: whether there may be more messages (older ones, or those that
    `note` describes)."""

    messages: Sequence[MessageLine]
    is_cut: bool
    note: str = ""


class MessageDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A message. `body` is decompressed and possibly cut; `body_note` explains how it is shown."""

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
    """Its queue, if it exists here"""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer group in a list. `behind_count`: uncommitted messages in all its queues."""

    name: str
    member_count: int
    topic_count: int
    behind_count: int
    read_per_s: float


class Groups(msgspec.Struct, frozen=True):
    """A page of the groups found."""

    groups: Sequence[Group]
    found_count: int


class GroupQueue(msgspec.Struct, frozen=True):
    """A group's progress in a queue. Offsets are None before the first commit or pull."""

    queue: Queue
    committed_offset: int | None
    pulled_offset: int | None
    behind_count: int


class GroupTopic(msgspec.Struct, frozen=True, kw_only=True):
    """A group's progress in a topic, and its subscription ("" without connected members)."""

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


class LagPoint(msgspec.Struct, frozen=True):
    """The lag of a group, in messages, at one time. `time_s`: Trio's clock, for order and distance; `at_ms`: wall
    clock."""

    time_s: float
    at_ms: int
    behind_count: int


class GroupDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A group, its members, and its progress. `lag`: over the last hour, oldest first; empty if it is not sampled."""

    name: str
    settings: Mapping[str, str]
    members: Sequence[GroupMember]
    member_count: int
    topics: Sequence[GroupTopic]
    topic_count: int
    lag: Sequence[LagPoint]


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to send. `queue_id` None: the broker chooses. `keys`: separated by spaces."""

    topic: str
    body: bytes
    keys: str = ""
    tags: str = ""
    queue_id: int | None = None


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of an action. `text` is a sentence for the user."""

    is_done: bool
    text: str


class OffsetMove(msgspec.Struct, frozen=True):
    """A group's committed offset in a queue before (None: nothing committed) and after a reset, and the queue's end."""

    queue_id: int
    before: int | None
    after: int
    end: int


class DeadLetters(msgspec.Struct, frozen=True):
    """The queue offsets [`begin`, `end`) of a group's dead letters."""

    begin: int
    end: int


class DashboardSource(Protocol):
    """Provides the dashboard's data."""

    @property
    def is_content_open(self) -> bool:
        """Whether the remoting port lets anonymous clients read messages."""

    def status(self) -> Mapping[str, object]:
        """Returns the data of /status."""

    def counts(self) -> Counts:
        """Returns the counters."""

    def neighbours(self) -> Sequence[Neighbour]:
        """Returns the other brokers of the cluster, as far as known, by name and ID."""

    async def topics(self, search: str, *, with_system: bool, begin: int, count: int) -> Topics:
        """Returns up to `count` topics whose name contains `search` (ignoring case), sorted, from index `begin`."""

    async def topic(self, name: str, *, begin: int, count: int, at_ms: int | None = None) -> TopicDetail | Missing:
        """Returns a topic and up to `count` queues from ID `begin`; with `at_ms`, also their offsets at that time."""

    async def queue(self, topic: str, queue_id: int, queue_offset: int, count: int) -> QueuePart | Missing:
        """Returns up to `count` messages of a queue, from `queue_offset` or, if that is higher, its minimum offset."""

    async def offset_at(self, topic: str, queue_id: int, at_ms: int) -> int | Missing:
        """Returns the queue offset of the first message stored at or after a time; the queue's end if there is none."""

    async def with_key(self, topic: str, key: str, count: int) -> FoundMessages:
        """Returns up to `count` of the newest messages of a topic with a key or unique ID, newest first."""

    async def topic_names(self, count: int) -> Sequence[str]:
        """Returns the names of the first `count` topics that are not the system's, sorted."""

    async def with_key_anywhere(self, key: str, count: int) -> FoundMessages:
        """Returns up to `count` messages with a key or unique ID, newest first, from all topics but the system's.

        Searches the topics in the order of their names. If it ends early, with enough messages or for lack of time,
        `note` says so.
        """

    async def message(self, physical_offset: int, body_size_max: int) -> MessageDetail | Missing:
        """Returns the message at a physical offset, with up to `body_size_max` bytes of its body."""

    async def message_by_id(self, message_id: str) -> int | Missing:
        """Returns the physical offset of a message by the ID that its broker assigned."""

    async def groups(self, search: str, *, begin: int, count: int) -> Groups:
        """Returns up to `count` groups whose name contains `search` (ignoring case), sorted, from index `begin`."""

    async def group(self, name: str, *, topic_count_max: int, queue_count_max: int) -> GroupDetail | Missing:
        """Returns a consumer group with up to `topic_count_max` topics, and for each the first `queue_count_max`
        queues."""


class DashboardActions(Protocol):
    """The actions of an operator, on this node alone. Each change is a request to its broker."""

    async def send(self, message: NewMessage) -> Outcome:
        """Stores a message in a topic that exists."""

    async def change_topic(self, name: str, queue_count: int, *, is_readable: bool, is_writable: bool) -> Outcome:
        """Creates a topic, or changes its queues and permission and leaves the rest as it is."""

    async def planned_reset(self, group: str, topic: str, to_ms: int | None) -> Sequence[OffsetMove] | Missing:
        """Returns the planned move in each queue: to the first message stored at `to_ms` or later, or with None to the
        end of the queue."""

    async def reset(self, group: str, topic: str, to_ms: int | None, offsets: Mapping[int, int]) -> Outcome:
        """Moves a group to the offsets by queue that `planned_reset` returned for `to_ms`.

        With useServerSideResetOffset=false, the group's members reset themselves to `to_ms`, because the broker can't
        send them offsets.
        """

    def dead_letters(self, group: str) -> DeadLetters | Missing:
        """Returns the queue offsets of a group's dead letters."""

    async def send_back(self, group: str, begin: int, count: int) -> Outcome:
        """Sends `count` dead letters from queue offset `begin` to their group again. They also remain dead letters."""
