"""The messages in the response to POP_MESSAGE (200050) with their receipt handles, and requests with such a handle.

A message's handle is built from the info strings of the response, unless the broker has put one into the message, as
it does for messages of retry topics. The handle gets a ninth word, the physical offset, by which the message can be
moved to the dead letters. Sources: PopMessageProcessor of RocketMQ's proxy and client, ExtraInfoUtil.
"""

from __future__ import annotations

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.headers import parse_header
from ha.protocol.pop import (
    HANDLE_WORD_COUNT,
    NORMAL,
    POP_CK,
    RETRY_V1,
    RETRY_V2,
    AckMessageRequest,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    Handle,
    PopMessageResponse,
    parse_handle,
    retry_topic,
)
from ha.protocol.record import MessageRecord, decode_records
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX


class ReceiptHandle(msgspec.Struct, frozen=True):
    """A receipt handle with its ninth word, the physical offset of the message (-1 if there is no such number)."""

    handle: Handle
    physical_offset: int

    @property
    def expires_ms(self) -> int:
        """Time at which the message becomes visible again, in ms since the epoch."""
        return self.handle.pop_time_ms + self.handle.invisible_ms

    def encode(self) -> str:
        """Returns the handle as clients receive it: one string of nine words."""
        return f"{self.handle.encode()} {self.physical_offset}"

    def real_topic(self, group: str, topic: str) -> str:
        """Returns the topic that the message was read from: `topic`, which the pop asked for, or its retry topic."""
        flag = self.handle.flag
        return topic if flag == NORMAL else retry_topic(group, topic, is_v2=flag == 2)

    def ack_request(self, group: str, topic: str) -> AckMessageRequest:
        """Returns the header of the ACK_MESSAGE (200051) that acknowledges the message."""
        handle = self.handle
        return AckMessageRequest(
            consumer_group=group,
            topic=self.real_topic(group, topic),
            queue_id=handle.queue_id,
            extra_info=handle.encode(),
            offset=handle.offset,
        )

    def change_request(
        self, group: str, topic: str, invisible_ms: int, *, suspends: bool = False
    ) -> ChangeInvisibleTimeRequest:
        """Returns the header of the CHANGE_MESSAGE_INVISIBLETIME (200053) that makes the message visible
        again `invisible_ms` from now.

        `suspends`: the next delivery does not count as a retry."""
        handle = self.handle
        return ChangeInvisibleTimeRequest(
            consumer_group=group,
            topic=self.real_topic(group, topic),
            queue_id=handle.queue_id,
            extra_info=handle.encode(),
            offset=handle.offset,
            invisible_time=invisible_ms,
            suspend=suspends,
        )

    def changed(self, response: RemotingCommand) -> ReceiptHandle:
        """Returns the handle that replaces this one, from the response to `change_request`. Raises RemoteProtocolError
        if the response is malformed."""
        header = parse_header(ChangeInvisibleTimeResponse, response.ext_fields)
        new = msgspec.structs.replace(
            self.handle,
            start_offset=self.handle.offset,
            pop_time_ms=header.pop_time,
            invisible_ms=header.invisible_time,
            revive_queue=header.revive_qid,
        )
        return ReceiptHandle(new, self.physical_offset)


def parse_receipt(text: str) -> ReceiptHandle:
    """Parses a receipt handle that a client sent. Raises RemoteProtocolError if it is malformed."""
    handle = parse_handle(text)
    words = text.split(" ")
    ninth = words[HANDLE_WORD_COUNT] if len(words) > HANDLE_WORD_COUNT else ""
    return ReceiptHandle(handle, int(ninth) if ninth.isdecimal() and len(ninth) < 20 else -1)


class Popped(msgspec.Struct):
    """One message of a pop."""

    record: MessageRecord
    properties: dict[str, str]
    receipt: ReceiptHandle
    attempts_before: int
    """Number of earlier deliveries"""


def read_popped(response: RemotingCommand, broker_name: str) -> list[Popped]:
    """Returns the messages in the response to a pop. Raises RemoteProtocolError if it is malformed."""
    header = parse_header(PopMessageResponse, response.ext_fields)
    starts = _starts(header.start_offset_info)
    counts = _counts(header.order_count_info)
    found = []
    for record in decode_records(response.body):
        properties = record.property_map()
        handle = _broker_handle(record, properties)
        if handle is None:
            flag = _flag(record.topic)
            if (flag, record.queue_id) not in starts:
                flag = NORMAL
            handle = Handle(
                start_offset=starts.get((flag, record.queue_id), record.queue_offset),
                pop_time_ms=header.pop_time,
                invisible_ms=header.invisible_time,
                revive_queue=header.revive_qid,
                flag=flag,
                broker_name=broker_name,
                queue_id=record.queue_id,
                offset=record.queue_offset,
            )
        before = counts.get(f"qo{record.queue_id}%{record.queue_offset}", counts.get(str(record.queue_id), 0))
        receipt = ReceiptHandle(handle, record.physical_offset)
        found.append(Popped(record, properties, receipt, max(before, record.reconsume_times)))
    return found


def _broker_handle(record: MessageRecord, properties: dict[str, str]) -> Handle | None:
    """Returns the handle that the broker put into a message of a retry topic.

    None for other messages, even if they have the property: their producer may have copied it from a message that it
    had received.
    """
    text = properties.get(POP_CK)
    if text is None:
        return None
    try:
        handle = parse_handle(text)
    except RemoteProtocolError:
        return None
    is_of_record = (handle.queue_id, handle.offset) == (record.queue_id, record.queue_offset)
    return handle if is_of_record and handle.flag != NORMAL else None


def _flag(topic: str) -> int:
    """Returns NORMAL, RETRY_V1 or RETRY_V2, according to the topic's name. RocketMQ 4's retry topics, `%RETRY%group`,
    are taken for V1."""
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL
    return RETRY_V2 if "+" in topic else RETRY_V1


def _starts(info: str | None) -> dict[tuple[int, int], int]:
    """Returns the start offset by flag and queue, from `flag queue offset;…`."""
    found = {}
    for entry in (info or "").split(";"):
        words = entry.split(" ")
        if len(words) == 3:
            try:
                flag, queue_id, offset = map(int, words)
            except ValueError:
                raise RemoteProtocolError(f"startOffsetInfo {entry[:80]!r}") from None
            found[flag, queue_id] = offset
    return found


def _counts(info: str | None) -> dict[str, int]:
    """Returns how often messages were popped before, from orderCountInfo: the count of one message by
    `qo<queue id>%<offset>`, the lowest count in a queue by its id. {} outside order mode.
    """
    found = {}
    for entry in (info or "").split(";"):
        words = entry.split(" ")
        if len(words) == 3 and words[2].isdecimal() and len(words[2]) < 10:
            found[words[1]] = int(words[2])
    return found
