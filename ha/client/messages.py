"""What the SDK takes and gives: messages, queues, results. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from ha.protocol.properties import RETRY_TOPIC
from ha.protocol.topic_names import RETRY_PREFIX


class MessageQueue(msgspec.Struct, frozen=True, order=True):
    """One queue of a topic: `queue_id` (from 0) on the broker set named `broker_name`."""

    topic: str
    broker_name: str
    queue_id: int


class Message(msgspec.Struct, frozen=True):
    """A message to be sent.

    `tags` is one tag; `keys` are words to find it by (each is indexed); `properties` are the application's own; `flag`
    is an int32 that the broker keeps and never reads. `wait_stored=False` lets the broker answer before it is flushed
    and replicated.

    Delivered later: by `delay_level` (1 … 18, 0 none; "1s 5s 10s 30s 1m …" unless the broker is told otherwise), or
    with RocketMQ 5 at any time within 3 days, `delay_s` from now or at `deliver_at_ms` since 1970. One of the three."""

    topic: str
    body: bytes
    tags: str | None = None
    keys: str | tuple[str, ...] = ()
    properties: Mapping[str, str] = {}
    flag: int = 0
    wait_stored: bool = True
    delay_level: int = 0
    delay_s: float | None = None
    deliver_at_ms: int | None = None


class SendStatus(Enum):
    """How far a stored message has come. All four mean that the master has it; RocketMQ's names (SendStatus)."""

    SEND_OK = "SEND_OK"
    """As safe as the broker is configured to make it."""
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    """Not yet known to be on the master's disk."""
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    """No slave confirmed it in time; it will be replicated when one can."""
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    """There is no slave that could confirm it."""


class SendResult(msgspec.Struct, frozen=True):
    """Where a message was stored. Of a batch, ids are joined with ',' and `queue_offset` is the first message's.

    `message_id` is the client's unique id (property UNIQ_KEY), what RocketMQ tools show; `offset_message_id` names the
    place in the broker's commitlog. `remark` is the broker's explanation when `status` isn't SEND_OK."""

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    remark: str


class ReceivedMessage(msgspec.Struct, frozen=True):
    """A message as a broker stores it. Times are ms since 1970; hosts are (address, port).

    `queue_offset` counts messages in `queue`, `physical_offset` bytes in the commitlog. `properties` holds all of
    them, also those shown as `tags` and `keys`. `body` is inflated if the producer deflated it; `compression` names
    what the SDK could not undo."""

    queue: MessageQueue
    queue_offset: int
    physical_offset: int
    message_id: str
    offset_message_id: str
    body: bytes
    tags: str | None
    keys: tuple[str, ...]
    properties: dict[str, str]
    flag: int
    born_timestamp_ms: int
    store_timestamp_ms: int
    born_host: tuple[str, int]
    store_host: tuple[str, int]
    reconsume_times: int
    compression: str | None = None

    @property
    def topic(self) -> str:
        """The topic it was sent to, also if it comes from the queue of its group's retries."""
        topic = self.queue.topic
        return self.properties.get(RETRY_TOPIC, topic) if topic.startswith(RETRY_PREFIX) else topic


class PullStatus(Enum):
    """What a pull found; RocketMQ's names (PullStatus)."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    """The queue ends at the offset asked for."""
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    """Messages were there, none with the tags asked for; go on at `next_offset`. A slave also says so while it lacks
    the offset."""
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"
    """The offset lies outside the queue; `next_offset` is the nearest one inside."""


class PullResult(msgspec.Struct, frozen=True):
    """What one pull brought. Offsets are queue offsets; the queue held [min_offset, max_offset) when the broker
    answered."""

    status: PullStatus
    messages: list[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int
    broker_id: int
    """Which broker of the set answered: 0 master, others slaves."""


class RawPull(msgspec.Struct, frozen=True):
    """What one pull brought, undecoded: `body` holds whole records one after the other, as stored. Offsets as in
    PullResult."""

    status: PullStatus
    body: bytes
    next_offset: int
    min_offset: int
    max_offset: int
    broker_id: int


class ReadFrom(Enum):
    """Which broker of a set a consumer asks."""

    SUGGESTED = "suggested"
    """The master until it suggests a slave, as RocketMQ's consumers do."""
    MASTER = "master"
    SLAVE = "slave"
    """The slave with the lowest id; an error while none is registered."""
