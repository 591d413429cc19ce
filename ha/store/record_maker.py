"""Makes contiguous records from messages, each with the next queue offset of its queue, and refuses illegal messages.

No files, no waits. `ha/protocol/record_encoding.py` defines the format of a record. Sources: CommitLog
(DefaultAppendMessageCallback), MessageExtEncoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ha.protocol.codes import PutStatus, SysFlag
from ha.protocol.properties import PROPERTIES_SIZE_MAX
from ha.protocol.record import FILLER_SIZE_MIN, TOPIC_SIZE_V1_MAX, Message
from ha.protocol.record_encoding import PROPERTY_CRC_SIZE, encode_record, record_run, record_size
from ha.protocol.topic_names import DLQ_PREFIX, NAME_SIZE_MAX, RETRY_PREFIX
from ha.store.options import StoreOptions

RECORD_OVERHEAD_MAX = 64 * 1024
"""Maximum number of bytes by which a record may exceed maxMessageSize, which limits the body alone (RocketMQ:
MessageExtEncoder)."""

NO_ROOM = -1
"""Value of `room` if there is no segment: not even a record of 0 bytes would fit."""

TOPIC_ALWAYS_FITS = 31
"""Length in characters up to which any topic fits in TOPIC_SIZE_V1_MAX bytes: a character takes at most 4 in UTF-8"""

_UNCOUNTED = (SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_ROLLBACK)


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """The result for one message. Offsets, size and time are -1 unless `status.is_stored`. `remark`: why the message is
    not stored."""

    status: PutStatus
    physical_offset: int = -1
    size: int = -1
    queue_offset: int = -1
    store_timestamp_ms: int = -1
    remark: str = ""

    @property
    def next_offset(self) -> int:
        """Physical offset after the record: up to there the log must be flushed and acknowledged."""
        return self.physical_offset + self.size


class RecordMaker:
    """Makes the records of one log, and assigns queue offsets."""

    def __init__(self, options: StoreOptions, initial_queue_offset: Callable[[str, int], int]) -> None:
        """`initial_queue_offset` returns the end of a queue: the queue offset of the first message that this object
        adds to it."""
        self.room_max = options.segment_size - FILLER_SIZE_MIN
        """Maximum number of bytes that records may take in a segment"""
        self._initial_queue_offset = initial_queue_offset
        self._store_host = options.store_host
        self._append_property_crc = options.append_property_crc
        self._body_size_max = options.message_size_max
        self._record_size_max = options.message_size_max + RECORD_OVERHEAD_MAX
        self._properties_size_max = PROPERTIES_SIZE_MAX - (PROPERTY_CRC_SIZE + 1 if options.append_property_crc else 0)
        self._next_offsets: dict[tuple[str, int], int] = {}

    # ---- offsets of queues

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        """Returns the queue offset (entries) that the next message of a queue gets."""
        return self._next_offsets.get((topic, queue_id)) or self._initial_queue_offset(topic, queue_id)

    def set_next_offsets(self, next_offsets: dict[tuple[str, int], int]) -> None:
        """Sets the next queue offsets of some queues, by topic and queue id; `initial_queue_offset` returns those of
        other queues."""
        self._next_offsets = next_offsets

    def forget(self) -> None:
        """Drops all next queue offsets, so that `initial_queue_offset` is called for each queue again."""
        self._next_offsets.clear()

    # ---- making records

    def run(
        self, messages: Sequence[Message], first: int, physical_offset: int, room: int, now_ms: int
    ) -> tuple[bytes, list[AppendResult]]:
        """Returns the records of `messages[first:]`, contiguous from `physical_offset` on, with store time `now_ms`,
        and the result of each message, which says where it is stored or why it is refused. Ends before the first
        message whose record doesn't fit into the rest of `room` bytes.

        Raises OverflowError if a number doesn't fit its field; no queue offset is assigned then.
        """
        advanced: dict[tuple[str, int], int] = {}  # next offsets after these records
        records: list[bytes] = []
        results: list[AppendResult] = []
        end = physical_offset + room
        while first + len(results) < len(messages):
            written, made = record_run(
                messages,
                first + len(results),
                self._next_offsets,
                advanced,
                physical_offset,
                end - physical_offset,
                now_ms,
                self._store_host,
                body_size_max=self._body_size_max,
                properties_size_max=self._properties_size_max,
                append_property_crc=self._append_property_crc,
                result=AppendResult,
            )
            if not made:
                message = messages[first + len(results)]
                refusal = self._refusal(message)
                if refusal is not None:
                    results.append(refusal)
                    continue
                if self._size_of(message) > end - physical_offset:
                    break
                written, result = self._unusual(message, physical_offset, now_ms, advanced)
                made = [result]
            records.append(written)
            results += made
            physical_offset += len(written)
        self._next_offsets.update(advanced)
        return b"".join(records), results

    def _unusual(
        self, message: Message, physical_offset: int, now_ms: int, advanced: dict[tuple[str, int], int]
    ) -> tuple[bytes, AppendResult]:
        """Returns the record and the result of a message that `record_run` doesn't handle: one whose queue has no known
        next offset yet, or one with a long topic (V2)."""
        is_counted = message.sys_flag & SysFlag.TRANSACTION_MASK not in _UNCOUNTED
        key = (message.topic, message.queue_id)
        queue_offset = (advanced.get(key) or self.next_queue_offset(*key)) if is_counted else 0
        record = encode_record(
            message,
            queue_offset=queue_offset,
            physical_offset=physical_offset,
            store_timestamp_ms=now_ms,
            store_host=self._store_host,
            append_property_crc=self._append_property_crc,
        )
        if is_counted:
            advanced[key] = queue_offset + 1
        return record, AppendResult(PutStatus.PUT_OK, physical_offset, len(record), queue_offset, now_ms)

    def batch_size(self, messages: Sequence[Message]) -> int | AppendResult:
        """Returns the size in bytes of the records of `messages`, or why none of them may be stored."""
        size_max = min(self._record_size_max, self.room_max)
        body_size_max, properties_size_max = self._body_size_max, self._properties_size_max
        total = fixed_size = 0
        alike: Message | None = None  # of the same fixed size
        for message in messages:
            body_size, properties_size = len(message.body), len(message.properties)
            must_check = body_size > body_size_max or properties_size > properties_size_max
            if (
                alike is None
                or message.topic is not alike.topic
                or len(message.born_host) != len(alike.born_host)
                or self._append_property_crc
            ):
                alike = message
                fixed_size = self._size_of(message) - body_size - properties_size
                must_check |= len(message.topic) > TOPIC_ALWAYS_FITS
            size = fixed_size + body_size + properties_size
            if must_check or size > size_max:
                refusal = self._refusal(message)
                if refusal is not None:
                    return refusal
            total += size
        if total > size_max:
            remark = f"batch of {total} bytes exceeds what one segment or request may hold"
            return AppendResult(PutStatus.MESSAGE_ILLEGAL, remark=remark)
        return total

    # ---- refused messages

    def _size_of(self, message: Message) -> int:
        return record_size(
            message, store_host_size=len(self._store_host), append_property_crc=self._append_property_crc
        )

    def _refusal(self, message: Message) -> AppendResult | None:
        if len(message.properties) > self._properties_size_max:
            remark = f"properties of {len(message.properties)} bytes, at most {self._properties_size_max} are allowed"
            return AppendResult(PutStatus.PROPERTIES_SIZE_EXCEEDED, remark=remark)
        body_size, size = len(message.body), self._size_of(message)
        if body_size > self._body_size_max or size > self._record_size_max:
            remark = f"body of {body_size} bytes, at most {self._body_size_max} are allowed"
        elif size > self.room_max:
            remark = f"record of {size} bytes does not fit a segment of {self.room_max + FILLER_SIZE_MIN}"
        else:
            topic_size = len(message.topic.encode())
            is_long = message.topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
            if topic_size <= (NAME_SIZE_MAX if is_long else TOPIC_SIZE_V1_MAX):
                return None
            remark = f"topic of {topic_size} bytes is too long"
        return AppendResult(PutStatus.MESSAGE_ILLEGAL, remark=remark)
