"""What the SDK takes and gives: messages, queues, results. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import msgspec

from ha.errors import BodyUnreadable
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import RETRY_TOPIC, decode_properties, find_property
from ha.protocol.record import RecordParts, decode_host
from ha.protocol.topic_names import RETRY_PREFIX


class Unreadable(msgspec.Struct, frozen=True):
    """A body that can't be inflated, as stored, and why."""

    stored_body: bytes
    reason: str


StoredParts = RecordParts | tuple[tuple[Any, ...], bytes | None, bytes, str | None, Unreadable | None]
"""A record's parts, with its body inflated, the compression that the SDK can't undo, if there is any, and in place of a
body that can't be inflated what is known of it."""


class MessageQueue(msgspec.Struct, frozen=True, order=True, gc=False):
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


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message was stored. Of a batch, ids are joined with ',' and `queue_offset` is the first message's.

    `message_id` is the client's unique id (property UNIQ_KEY), what RocketMQ tools show; `offset_message_id` names the
    place in the broker's commitlog. `remark` is the broker's explanation when `status` isn't SEND_OK."""

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    remark: str


class ReceivedMessage:
    """A message as a broker stores it. Times are ms since 1970; hosts are (address, port).

    `queue_offset` counts messages in `queue`, `physical_offset` bytes in the commitlog. `properties` holds all of
    them, also those shown as `tags` and `keys`. `body` is inflated if the producer deflated it; `compression` names
    what the SDK could not undo.

    A compressed body that is damaged, or inflates to more than ClientOptions.message_size_max, can't be read:
    `body_error` says why, `body` raises BodyUnreadable, and `stored_body` has the bytes as stored.

    It can't be changed. Two are equal if all of this is; there is no hash, as `properties` has none."""

    __slots__ = ("_parts", "_properties", "queue")
    __match_args__ = (
        "queue",
        "queue_offset",
        "physical_offset",
        "message_id",
        "offset_message_id",
        "body",
        "tags",
        "keys",
        "properties",
        "flag",
        "born_timestamp_ms",
        "store_timestamp_ms",
        "born_host",
        "store_host",
        "reconsume_times",
        "compression",
        "body_error",
    )

    queue: MessageQueue
    _parts: tuple[Any, ...]
    # StoredParts: few programs look at more than body and offset of the many messages that pulls bring, so what else
    # they may want is read from there when it is asked for. Of a message that a program made the property string is
    # None, and what can be asked for follows.
    _properties: dict[str, str]

    def __init__(
        self,
        queue: MessageQueue,
        queue_offset: int,
        physical_offset: int,
        message_id: str,
        offset_message_id: str,
        body: bytes,
        tags: str | None,
        keys: tuple[str, ...],
        properties: dict[str, str],
        flag: int,
        born_timestamp_ms: int,
        store_timestamp_ms: int,
        born_host: tuple[str, int],
        store_host: tuple[str, int],
        reconsume_times: int,
        compression: str | None = None,
        body_error: str | None = None,
    ) -> None:
        times = (born_timestamp_ms, b"", store_timestamp_ms, b"", reconsume_times, 0, len(body))
        fields = (0, 0, 0, queue.queue_id, flag, queue_offset, physical_offset, 0, *times)
        given = (message_id, offset_message_id, tags, keys, born_host, store_host)
        _set_queue(self, queue)
        readable, unreadable = (body, None) if body_error is None else (None, Unreadable(body, body_error))
        _set_parts(self, (fields, readable, None, compression, unreadable, *given))
        _set_properties(self, properties)

    @property
    def queue_offset(self) -> int:
        """Which message of `queue` it is."""
        number: int = self._parts[0][5]
        return number

    @property
    def physical_offset(self) -> int:
        """Where in the commitlog its record begins, in bytes."""
        number: int = self._parts[0][6]
        return number

    @property
    def message_id(self) -> str:
        """The producer's id of it, or `offset_message_id` if it gave none."""
        parts = self._parts
        if parts[2] is None:
            given: str = parts[5]
            return given
        return find_property(parts[2], b"UNIQ_KEY") or self.offset_message_id

    @property
    def offset_message_id(self) -> str:
        """Its place in a broker's commitlog."""
        parts = self._parts
        if parts[2] is None:
            given: str = parts[6]
            return given
        return encode_message_id(parts[0][11], parts[0][6])

    @property
    def body(self) -> bytes:
        """What the producer sent. BodyUnreadable if `body_error` is set."""
        content: bytes | None = self._parts[1]
        if content is None:
            raise BodyUnreadable(self.message_id, self._parts[4].reason)
        return content

    @property
    def body_error(self) -> str | None:
        """Why the body can't be read; None if it can."""
        parts = self._parts
        reason: str | None = parts[4].reason if parts[1] is None else None
        return reason

    @property
    def stored_body(self) -> bytes:
        """As `body`; the bytes as the broker stores them if that can't be read."""
        parts = self._parts
        content: bytes = parts[4].stored_body if parts[1] is None else parts[1]
        return content

    @property
    def tags(self) -> str | None:
        """Its tag."""
        parts = self._parts
        if parts[2] is None:
            given: str | None = parts[7]
            return given
        return find_property(parts[2], b"TAGS")

    @property
    def keys(self) -> tuple[str, ...]:
        """The words that it can be found by."""
        parts = self._parts
        if parts[2] is None:
            given: tuple[str, ...] = parts[8]
            return given
        keys = find_property(parts[2], b"KEYS")
        return tuple(keys.split()) if keys else ()

    @property
    def properties(self) -> dict[str, str]:
        """All properties, always the same dict."""
        try:
            return self._properties
        except AttributeError:
            known = decode_properties(self._parts[2])
            _set_properties(self, known)
            return known

    @property
    def flag(self) -> int:
        """The producer's int32."""
        number: int = self._parts[0][4]
        return number

    @property
    def born_timestamp_ms(self) -> int:
        """When it was sent."""
        number: int = self._parts[0][8]
        return number

    @property
    def store_timestamp_ms(self) -> int:
        """When it was stored."""
        number: int = self._parts[0][10]
        return number

    @property
    def born_host(self) -> tuple[str, int]:
        """Who sent it."""
        parts = self._parts
        if parts[2] is None:
            given: tuple[str, int] = parts[9]
            return given
        return decode_host(parts[0][9])

    @property
    def store_host(self) -> tuple[str, int]:
        """Which broker stored it."""
        parts = self._parts
        if parts[2] is None:
            given: tuple[str, int] = parts[10]
            return given
        return decode_host(parts[0][11])

    @property
    def reconsume_times(self) -> int:
        """How often it was given back to be delivered again."""
        number: int = self._parts[0][12]
        return number

    @property
    def compression(self) -> str | None:
        """What `body` is still compressed by."""
        parts = self._parts
        kind: str | None = parts[3] if len(parts) > 3 else None
        return kind

    @property
    def topic(self) -> str:
        """The topic it was sent to, also if it comes from the queue of its group's retries."""
        topic = self.queue.topic
        return self.properties.get(RETRY_TOPIC, topic) if topic.startswith(RETRY_PREFIX) else topic

    def _all(self) -> tuple[Any, ...]:
        return tuple(getattr(self, "stored_body" if name == "body" else name) for name in self.__match_args__)

    def __eq__(self, other: object) -> bool:
        return self._all() == other._all() if isinstance(other, ReceivedMessage) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        pairs = zip(self.__match_args__, self._all(), strict=True)
        return f"ReceivedMessage({', '.join(f'{name}={value!r}' for name, value in pairs)})"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"immutable type: {type(self).__name__!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"immutable type: {type(self).__name__!r}")

    def __reduce__(self) -> tuple[type[ReceivedMessage], tuple[Any, ...]]:
        return ReceivedMessage, self._all()

    def __replace__(self, **changes: Any) -> ReceivedMessage:
        """The same message but for some of its values, as `copy.replace` of Python 3.13 asks for it."""
        return ReceivedMessage(**dict(zip(self.__match_args__, self._all(), strict=True)) | changes)


# Past `__setattr__`, and cheaper than that.
_new_message = object.__new__
_set_queue, _set_parts, _set_properties = (
    vars(ReceivedMessage)[name].__set__ for name in ("queue", "_parts", "_properties")
)


def messages_of(queue: MessageQueue, records: Iterable[StoredParts]) -> list[ReceivedMessage]:
    """The messages in `records`, which came from `queue`: nothing but body and compression is looked at here."""
    messages = []
    for parts in records:
        message = _new_message(ReceivedMessage)
        _set_queue(message, queue)
        _set_parts(message, parts)
        messages.append(message)
    return messages


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


class Stretch(msgspec.Struct, frozen=True):
    """Messages of one queue, one after the other: those wanted of the queue offsets [begin_offset, next_offset).

    The queue ended at `max_offset` when the broker answered. `begin_offset` is behind the former stretch's
    `next_offset` if messages between are gone, before it if the broker lost its queue's end, or the group's offset was
    reset."""

    queue: MessageQueue
    messages: list[ReceivedMessage]
    begin_offset: int
    next_offset: int
    max_offset: int


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
