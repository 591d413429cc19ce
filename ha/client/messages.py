"""Value types of the SDK: messages, queues, results."""

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
    """A stored body that can't be decompressed, and the reason."""

    stored_body: bytes
    reason: str


StoredParts = RecordParts | tuple[tuple[Any, ...], bytes | None, bytes, str | None, Unreadable | None]
"""The parts of a record, as `split_records` returns them: its fields, the body and the property string. If the record's
body is compressed, two more follow:

- None and None: the body has been decompressed.
- The compression's name and None: the body is still compressed, because the compression's package is not installed.
- The compression's name and an `Unreadable`: the body can't be decompressed, and is None here."""


class MessageQueue(msgspec.Struct, frozen=True, order=True, gc=False):
    """One queue of a topic: `queue_id` (from 0) on the broker set named `broker_name`."""

    topic: str
    broker_name: str
    queue_id: int


class Message(msgspec.Struct, frozen=True):
    """A message to send.

    `tags` is one tag. `keys` are words by which brokers index the message: a string with blanks between them, or a
    tuple. `properties` are the application's. `flag` is an int32 that brokers store but do not use. With
    `wait_stored=False` the broker answers before the message is flushed and replicated.

    Delayed delivery is set by one of three fields: `delay_level` (1 … 18, 0 none; "1s 5s 10s 30s 1m …" unless the
    broker is configured otherwise), `delay_s` (from now), or `deliver_at_ms` (since 1970). The last two need halog or
    RocketMQ 5, and allow any time within `timerMaxDelaySec` (default: 40 days in halog, 3 days in RocketMQ).

    `priority`: in a topic with the attribute message.type=PRIORITY (halog, RocketMQ 5.4), SimpleConsumer and other POP
    consumers receive the message before those with a lower priority. The message is stored in the queue whose id is its
    priority: 0 is the lowest; numbers above the last queue's id count as that id. No effect in other topics."""

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
    priority: int | None = None


class SendStatus(Enum):
    """How safely a message is stored; RocketMQ's names (SendStatus). The master has the message in every case."""

    SEND_OK = "SEND_OK"
    """The message is flushed and replicated as the broker's configuration requires."""
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    """The message was not flushed to the master's disk in time."""
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    """The message was not confirmed by enough slaves in time; it will be replicated when possible."""
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    """No slave is connected and in sync, so none can confirm the message."""


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where and how safely a message was stored. For `send_batch`, ids are joined with ',' and `queue_offset` is that
    of the first message.

    `message_id` is the unique id that the client gave the message (property UNIQ_KEY), shown by RocketMQ's tools;
    `offset_message_id` encodes the broker's address and the physical offset of the message. `remark` explains a
    `status` other than SEND_OK. `recall_handle` is for `Producer.recall`, which takes back a message with `delay_s` or
    `deliver_at_ms` before it is delivered; None for other messages, and from brokers that don't support recalls."""

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    remark: str
    recall_handle: str | None = None


class ReceivedMessage:
    """A message as a broker stores it. Times are ms since 1970; hosts are (address, port).

    `queue_offset` counts messages in `queue`, `physical_offset` bytes in the commitlog. `properties` includes those
    also available as `tags` and `keys`. `body` is decompressed, unless that needs a package that is not installed:
    then `compression` names the compression.

    A compressed body that is damaged, or that would be longer than ClientOptions.message_size_max when decompressed,
    can't be read: `body_error` has the reason, `body` raises BodyUnreadable, and `stored_body` is the stored bytes.

    Immutable, and compared by value; not hashable, because `properties` is a dict."""

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
    # StoredParts: most programs use only body and offset, so the other values are decoded on access. In a message that
    # a program constructs, the property string is None, and the decoded values follow at the end.
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
        """Position of the message in `queue`, counted in messages."""
        number: int = self._parts[0][5]
        return number

    @property
    def physical_offset(self) -> int:
        """Position of the message's record in the commitlog, in bytes."""
        number: int = self._parts[0][6]
        return number

    @property
    def message_id(self) -> str:
        """Unique id that the producer gave the message, or `offset_message_id` if there is none."""
        parts = self._parts
        if parts[2] is None:
            given: str = parts[5]
            return given
        return find_property(parts[2], b"UNIQ_KEY") or self.offset_message_id

    @property
    def offset_message_id(self) -> str:
        """Id that encodes the broker's address and the physical offset of the message."""
        parts = self._parts
        if parts[2] is None:
            given: str = parts[6]
            return given
        return encode_message_id(parts[0][11], parts[0][6])

    @property
    def body(self) -> bytes:
        """The body, decompressed unless `compression` is set. Raises BodyUnreadable if `body_error` is set."""
        content: bytes | None = self._parts[1]
        if content is None:
            raise BodyUnreadable(self.message_id, self._parts[4].reason)
        return content

    @property
    def body_error(self) -> str | None:
        """Reason why the body can't be decompressed; None if it can be read."""
        parts = self._parts
        reason: str | None = parts[4].reason if parts[1] is None else None
        return reason

    @property
    def stored_body(self) -> bytes:
        """The body, or the stored bytes if `body_error` is set."""
        parts = self._parts
        content: bytes = parts[4].stored_body if parts[1] is None else parts[1]
        return content

    @property
    def tags(self) -> str | None:
        """Tag of the message; None if it has none."""
        parts = self._parts
        if parts[2] is None:
            given: str | None = parts[7]
            return given
        return find_property(parts[2], b"TAGS")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the message: the words by which brokers index it."""
        parts = self._parts
        if parts[2] is None:
            given: tuple[str, ...] = parts[8]
            return given
        keys = find_property(parts[2], b"KEYS")
        return tuple(keys.split()) if keys else ()

    @property
    def properties(self) -> dict[str, str]:
        """All properties. Each access returns the same dict; don't change it."""
        try:
            return self._properties
        except AttributeError:
            known = decode_properties(self._parts[2])
            _set_properties(self, known)
            return known

    @property
    def flag(self) -> int:
        """An int32 that the producer set; brokers don't use it."""
        number: int = self._parts[0][4]
        return number

    @property
    def born_timestamp_ms(self) -> int:
        """Time at which the message was sent, in ms since 1970 (producer's clock)."""
        number: int = self._parts[0][8]
        return number

    @property
    def store_timestamp_ms(self) -> int:
        """Time at which the message was stored, in ms since 1970 (broker's clock)."""
        number: int = self._parts[0][10]
        return number

    @property
    def born_host(self) -> tuple[str, int]:
        """Address and port of the producer."""
        parts = self._parts
        if parts[2] is None:
            given: tuple[str, int] = parts[9]
            return given
        return decode_host(parts[0][9])

    @property
    def store_host(self) -> tuple[str, int]:
        """Address and port of the broker that stored the message."""
        parts = self._parts
        if parts[2] is None:
            given: tuple[str, int] = parts[10]
            return given
        return decode_host(parts[0][11])

    @property
    def reconsume_times(self) -> int:
        """Number of times that the message was redelivered; 0 at its first delivery."""
        number: int = self._parts[0][12]
        return number

    @property
    def compression(self) -> str | None:
        """Name of the compression if the body is still compressed, because the compression's package is not installed
        or the body can't be decompressed (`body_error`); otherwise None."""
        parts = self._parts
        kind: str | None = parts[3] if len(parts) > 3 else None
        return kind

    @property
    def topic(self) -> str:
        """Topic that the message was sent to, even if it was received from the consumer group's retry topic."""
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
        """Returns a copy with some values changed, as used by `copy.replace` of Python 3.13."""
        return ReceivedMessage(**dict(zip(self.__match_args__, self._all(), strict=True)) | changes)


# The slots' own setters: they bypass the immutable `__setattr__` and are cheaper.
_new_message = object.__new__
_set_queue, _set_parts, _set_properties = (
    vars(ReceivedMessage)[name].__set__ for name in ("queue", "_parts", "_properties")
)


def messages_of(queue: MessageQueue, records: Iterable[StoredParts]) -> list[ReceivedMessage]:
    """Returns the messages in `records`, which came from `queue`. Values other than the body are decoded on access."""
    messages = []
    for parts in records:
        message = _new_message(ReceivedMessage)
        _set_queue(message, queue)
        _set_parts(message, parts)
        messages.append(message)
    return messages


class PullStatus(Enum):
    """Result of a pull; RocketMQ's names (PullStatus)."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    """The queue ends at the requested offset, or the broker can't read the message there at present."""
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    """No message matched the subscription; continue at `next_offset`. Also the result if a slave has not replicated the
    requested offset yet."""
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"
    """The requested offset is outside the queue, or an operator has reset the group's offset. Continue at
    `next_offset`: the nearest offset inside, or the one that the operator set."""


class PullResult(msgspec.Struct, frozen=True):
    """Result of one pull. Offsets are queue offsets; the queue held [min_offset, max_offset) when the broker answered.
    The next pull continues at `next_offset`."""

    status: PullStatus
    messages: list[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int
    broker_id: int
    """Broker id of the broker that answered: 0 is the master, others are slaves."""


class Stretch(msgspec.Struct, frozen=True):
    """Consecutive messages of one queue: those at the queue offsets [begin_offset, next_offset) that match the tags.

    The queue ended at `max_offset` when the broker answered. `begin_offset` is higher than the `next_offset` of the
    queue's previous stretch if the messages between were deleted or do not match, and lower if the broker has lost the
    end of the queue."""

    queue: MessageQueue
    messages: list[ReceivedMessage]
    begin_offset: int
    next_offset: int
    max_offset: int


class RawPull(msgspec.Struct, frozen=True):
    """Undecoded result of one pull: `body` holds complete records as stored, one after the other. Offsets as in
    PullResult."""

    status: PullStatus
    body: bytes
    next_offset: int
    min_offset: int
    max_offset: int
    broker_id: int
    remark: str = ""
    """RocketMQ's name of the result (GetMessageStatus), which is more specific than `status`; "" if the broker sent
    none."""


class ReadFrom(Enum):
    """Which broker of a set a consumer reads from."""

    SUGGESTED = "suggested"
    """For pulls, the slave that the last response for the queue suggested, if any. Otherwise the master or, without
    one, the slave with the lowest id. As in RocketMQ's consumers."""
    MASTER = "master"
    SLAVE = "slave"
    """The slave with the lowest id. ConnectionFailed is raised while none is registered."""
