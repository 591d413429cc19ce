"""What messages that are put here become: records one behind the other, each with the next offset of its queue.

Says of each message what became of it, and why it was refused; knows no files, and never waits. What a record looks
like is `ha/protocol/record_encoding.py`'s. Sources: CommitLog (DefaultAppendMessageCallback), MessageExtEncoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ha.errors import LocalProtocolError
from ha.protocol.codes import PutStatus, SysFlag
from ha.protocol.properties import PROPERTIES_SIZE_MAX
from ha.protocol.record import FILLER_SIZE_MIN, TOPIC_SIZE_V1_MAX, Message
from ha.protocol.record_encoding import (
    PROPERTY_CRC_SIZE,
    TOPIC_ALWAYS_FITS,
    batch_pieces,
    is_batch_of_one_queue,
    record_pieces,
    record_run,
    record_size,
)
from ha.protocol.topic_names import DLQ_PREFIX, NAME_SIZE_MAX, RETRY_PREFIX
from ha.store.options import StoreOptions

RECORD_OVERHEAD_MAX = 64 * 1024
"""A record may exceed maxMessageSize, which is about the body alone, by so much (RocketMQ: MessageExtEncoder)."""

NO_ROOM = -1
"""`room` where no record fits, not even one of no bytes"""

_OK = PutStatus.PUT_OK
"""Looked up once: asking an enum for a member takes longer than most that is done with it."""
_TRANSACTION_MASK = SysFlag.TRANSACTION_MASK
_UNCOUNTED = (SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_ROLLBACK)


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """What became of one message. Offsets, size, time are −1 unless `status.is_stored`; `remark` says why it isn't."""

    status: PutStatus
    physical_offset: int = -1
    size: int = -1
    queue_offset: int = -1
    store_timestamp_ms: int = -1
    remark: str = ""

    @property
    def next_offset(self) -> int:
        """Physical offset behind the record: what must be flushed and acknowledged."""
        return self.physical_offset + self.size


class CheckedBatch(msgspec.Struct, frozen=True, gc=False):
    """Messages that may all be put.

    sizes: of their records, in bytes.
    is_alike: whether they are of one queue, and differ in flag, body and properties alone, as a client's do.
    """

    messages: Sequence[Message]
    sizes: list[int]
    is_alike: bool


class RecordMaker:
    """Makes the records of one log, and counts the offsets of its queues."""

    def __init__(self, options: StoreOptions, initial_queue_offset: Callable[[str, int], int]) -> None:
        self.room_max = options.segment_size - FILLER_SIZE_MIN
        """Bytes of a segment that records may take"""
        self._initial_queue_offset = initial_queue_offset
        self._store_host = options.store_host
        self._append_property_crc = options.append_property_crc
        self._body_size_max = options.message_size_max
        self._record_size_max = options.message_size_max + RECORD_OVERHEAD_MAX
        self._properties_size_max = PROPERTIES_SIZE_MAX - (PROPERTY_CRC_SIZE + 1 if options.append_property_crc else 0)
        self._next_offsets: dict[tuple[str, int], int] = {}

    # ---- offsets of queues

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        """Return the queue offset (entries) that the next message of a queue gets."""
        return self._next_offsets.get((topic, queue_id)) or self._initial_queue_offset(topic, queue_id)

    def count_on(self, next_offsets: dict[tuple[str, int], int]) -> None:
        """Go on with these; those of other queues are asked for."""
        self._next_offsets = next_offsets

    def forget(self) -> None:
        """Ask for all of them again."""
        self._next_offsets.clear()

    # ---- messages, each for itself

    def run(
        self, messages: Sequence[Message], first: int, physical_offset: int, room: int, now_ms: int
    ) -> tuple[bytes, list[AppendResult]]:
        """Return the records of `messages[first:]`, stored at `now_ms`, the first one at `physical_offset`, and what
        became of each message: it is in the records, or refused. Ends before one whose record doesn't fit `room` bytes.
        """
        store_host, append_crc = self._store_host, self._append_property_crc
        body_size_max, properties_size_max = self._body_size_max, self._properties_size_max
        pieces: list[bytes | memoryview] = []
        results: list[AppendResult] = []
        end = physical_offset + room
        while first + len(results) < len(messages):
            number = first + len(results)
            if not append_crc:
                records, made = record_run(
                    messages,
                    number,
                    self._next_offsets,
                    physical_offset,
                    end - physical_offset,
                    now_ms,
                    store_host,
                    body_size_max=body_size_max,
                    properties_size_max=properties_size_max,
                    result=AppendResult,
                )
                if made:
                    pieces.append(records)
                    results += made
                    physical_offset += len(records)
                    continue
            message = messages[number]
            topic, body = message.topic, message.body
            if (
                len(body) > body_size_max
                or len(message.properties) > properties_size_max
                or len(topic) > TOPIC_ALWAYS_FITS
            ):
                refusal = self._refusal(message)
                if refusal is not None:
                    results.append(refusal)
                    continue
            is_counted = message.sys_flag & _TRANSACTION_MASK not in _UNCOUNTED
            queue_offset = self.next_queue_offset(topic, message.queue_id) if is_counted else 0
            try:
                record = record_pieces(message, queue_offset, physical_offset, now_ms, store_host, append_crc)
            except LocalProtocolError as error:
                results.append(AppendResult(PutStatus.MESSAGE_ILLEGAL, remark=str(error)))
                continue
            size = len(record[0]) + len(body) + len(record[2])
            if size > end - physical_offset:
                refusal = self._refusal(message)
                if refusal is None:
                    break
                results.append(refusal)
                continue
            pieces += record
            if is_counted:
                self._next_offsets[(topic, message.queue_id)] = queue_offset + 1
            results.append(AppendResult(_OK, physical_offset, size, queue_offset, now_ms))
            physical_offset += size
        return b"".join(pieces), results

    # ---- batches: all or none

    def checked_batch(self, messages: Sequence[Message]) -> CheckedBatch | AppendResult:
        """Return what `batch` takes, or why none of `messages` may be put."""
        is_alike = not self._append_property_crc and is_batch_of_one_queue(messages)
        if is_alike:
            first = messages[0]
            without_parts = self._size_of(first) - len(first.body) - len(first.properties)
            sizes = [without_parts + len(message.body) + len(message.properties) for message in messages]
            is_alike = first.sys_flag & _TRANSACTION_MASK not in _UNCOUNTED
        else:
            sizes = [self._size_of(message) for message in messages]
        size_max = min(self._record_size_max, self.room_max)
        for message, size in zip(messages, sizes, strict=True):
            if (
                size > size_max
                or len(message.body) > self._body_size_max
                or len(message.properties) > self._properties_size_max
                or len(message.topic) > TOPIC_ALWAYS_FITS
            ):
                refusal = self._refusal(message)
                if refusal is not None:
                    return refusal
        total = sum(sizes)
        if total > size_max:
            remark = f"batch of {total} bytes exceeds what one segment or request may hold"
            return AppendResult(PutStatus.MESSAGE_ILLEGAL, remark=remark)
        return CheckedBatch(messages, sizes, is_alike)

    def batch(self, batch: CheckedBatch, physical_offset: int, now_ms: int) -> tuple[bytes, list[AppendResult]]:
        """As `run`, of a batch that is alike, and for which there is room: half of what its messages would cost."""
        first = batch.messages[0]
        queue_offset = self.next_queue_offset(first.topic, first.queue_id)
        pieces = batch_pieces(
            batch.messages,
            batch.sizes,
            queue_offset=queue_offset,
            physical_offset=physical_offset,
            store_timestamp_ms=now_ms,
            store_host=self._store_host,
        )
        results: list[AppendResult] = []
        for size in batch.sizes:
            results.append(AppendResult(_OK, physical_offset, size, queue_offset, now_ms))
            physical_offset += size
            queue_offset += 1
        self._next_offsets[(first.topic, first.queue_id)] = queue_offset
        return b"".join(pieces), results

    # ---- what is refused

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


__all__ = ["NO_ROOM", "RECORD_OVERHEAD_MAX", "AppendResult", "CheckedBatch", "RecordMaker"]
