"""POP consumption on the wire: headers, info strings, receipt handles and bodies.

    request                                ext fields or body          response
    POP_MESSAGE (200050)                   PopMessageRequest           PopMessageResponse, records as in a pull
    ACK_MESSAGE (200051)                   AckMessageRequest           -
    BATCH_ACK_MESSAGE (200151)             BatchAckBody                -
    PEEK_MESSAGE (200052)                  PeekMessageRequest          PopMessageResponse, records
    CHANGE_MESSAGE_INVISIBLETIME (200053)  ChangeInvisibleTimeRequest  ChangeInvisibleTimeResponse
    NOTIFICATION (200054)                  NotificationRequest         NotificationResponse
    POLLING_INFO (200055)                  PollingInfoRequest          PollingInfoResponse
    QUERY_ASSIGNMENT (400)                 QueryAssignmentBody         AssignmentsBody
    SET_MESSAGE_REQUEST_MODE (401)         RequestModeBody             -
    GET_ALL_MESSAGE_REQUEST_MODE (402)     -                           RequestModeTable

A receipt handle has eight words separated by spaces; the client builds it from the response (RocketMQ: POP_CK):

    startOffset popTime invisibleTime reviveQid flag brokerName queueId offset

The gRPC proxy adds a ninth, the physical offset. `flag` is 0 for the topic itself, 1 for its retry topic of version 1,
2 for that of version 2. Times in ms, offsets are queue offsets. Sources: the header classes of the same names plus
"Header", ExtraInfoUtil, BatchAckMessageRequestBody, KeyBuilder.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import field

from ha.errors import RemoteProtocolError
from ha.protocol.headers import Header, Int32, Int64
from ha.protocol.topic_names import RETRY_PREFIX

ORDER_QUEUE = 999
"""reviveQid of a handle in order mode (RocketMQ: KeyBuilder.POP_ORDER_REVIVE_QUEUE)"""

HANDLE_WORD_COUNT = 8
BATCH_ACK_SIZE_MAX = 8192
"""Maximum bytes of the bit set of one batch ack. Its 65,536 bits suffice: a pop scans at most 8192 messages of a queue
(SCAN_COUNT_MAX in ha/broker/pop/taking.py)"""
BATCH_ACK_COUNT_MAX = 4096
"""Maximum number of acknowledged messages in one request"""
ATTEMPT_ID_SIZE_MAX = 255
"""Maximum characters of an attempt id; clients send UUIDs"""
INVISIBLE_MS_MAX = 1 << 62
"""Maximum invisible time in ms; due times then fit in an int64"""

NORMAL, RETRY_V1, RETRY_V2 = 0, 1, 2
"""Flags of a receipt handle: the message was read from the topic itself, or from its retry topic of version 1 or 2"""

POP_CK = "POP_CK"
FIRST_POP_TIME = "1ST_POP_TIME"
ORIGIN_GROUP = "ORIGIN_GROUP"
PRIORITY = "_SYS_MSG_PRIORITY_"
MESSAGE_TYPE = "message.type"
"""Name of the topic attribute with the type of a topic's messages"""
PRIORITY_TYPE = "PRIORITY"
"""Value of the topic attribute MESSAGE_TYPE for a topic whose messages are sent to, and popped from, the queue of their
priority"""


class PopMessageRequest(Header):
    """Request POP_MESSAGE (200050). `queue_id` -1: all queues. `init_mode`: where a group without a consumer offset
    starts; 0: at the first message of a queue, 1: at the last."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32
    invisible_time: Int64
    poll_time: Int64
    born_time: Int64
    init_mode: Int32
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str | None = None


class PopMessageResponse(Header):
    """Answer to POP_MESSAGE (200050) and PEEK_MESSAGE (200052). `PopInfo` builds the info strings."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32
    rest_num: Int64
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None

    def to_ext_fields(self) -> dict[str, str]:
        """Returns the fields as a remoting frame carries them. No loop, for speed: it runs for each answer to a pop."""
        fields = {
            "popTime": str(self.pop_time),
            "invisibleTime": str(self.invisible_time),
            "reviveQid": str(self.revive_qid),
            "restNum": str(self.rest_num),
        }
        if self.start_offset_info is not None:
            fields["startOffsetInfo"] = self.start_offset_info
        if self.msg_offset_info is not None:
            fields["msgOffsetInfo"] = self.msg_offset_info
        if self.order_count_info is not None:
            fields["orderCountInfo"] = self.order_count_info
        return fields


class PeekMessageRequest(Header):
    """Request PEEK_MESSAGE (200052)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32


class AckMessageRequest(Header):
    """Request ACK_MESSAGE (200051). `topic`: the topic that the message was read from, which may be a retry topic.
    `extra_info`: the receipt handle."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64


class ChangeInvisibleTimeRequest(AckMessageRequest):
    """Request CHANGE_MESSAGE_INVISIBLETIME (200053). `suspend`: the next delivery does not count as a retry."""

    invisible_time: Int64
    suspend: bool = False


class ChangeInvisibleTimeResponse(Header):
    """Answer to CHANGE_MESSAGE_INVISIBLETIME (200053): the parts of the new receipt handle."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32


class NotificationRequest(Header):
    """Request NOTIFICATION (200054): waits until there is something to pop, without taking it."""

    consumer_group: str
    topic: str
    queue_id: Int32
    poll_time: Int64
    born_time: Int64
    order: bool = False
    attempt_id: str | None = None
    exp_type: str | None = None
    exp: str | None = None


class NotificationResponse(Header):
    """Answer to NOTIFICATION (200054). `has_msg`: there is a message to pop. `polling_full`: too many requests are
    waiting, so this one did not wait."""

    has_msg: bool
    polling_full: bool = False


class PollingInfoRequest(Header):
    """Request POLLING_INFO (200055)."""

    consumer_group: str
    topic: str
    queue_id: Int32


class PollingInfoResponse(Header):
    """Answer to POLLING_INFO (200055): the number of requests that wait for messages."""

    polling_num: Int32


# ---- receipt handles


class Handle(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The first eight words of a receipt handle."""

    start_offset: int
    pop_time_ms: int
    invisible_ms: int
    revive_queue: int
    flag: int
    broker_name: str
    queue_id: int
    offset: int

    @property
    def is_order(self) -> bool:
        """Whether the message was popped in order mode."""
        return self.revive_queue == ORDER_QUEUE

    def encode(self) -> str:
        """Returns the handle as one string."""
        return (
            f"{self.start_offset} {self.pop_time_ms} {self.invisible_ms} {self.revive_queue} {self.flag} "
            f"{self.broker_name} {self.queue_id} {self.offset}"
        )


_HANDLE = re.compile(5 * r"(-?\d{1,19}) " + r"([^ ]*) (-?\d{1,19}) (-?\d{1,19})(?: .*)?", re.ASCII | re.DOTALL)


def parse_handle(text: str) -> Handle:
    """Returns the handle in `text`; words after the eighth are ignored. Raises RemoteProtocolError if it is not a
    handle."""
    match = _HANDLE.fullmatch(text)
    if match is None:
        count = len(text.split(" ", HANDLE_WORD_COUNT))
        if count < HANDLE_WORD_COUNT:
            raise RemoteProtocolError(f"receipt handle of {count} words; {HANDLE_WORD_COUNT} are needed")
        raise RemoteProtocolError(f"receipt handle {text[:200]!r} has a word that is no number")
    start, pop_time, invisible, revive_queue, flag, broker_name, queue_id, offset = match.groups()
    return Handle(
        start_offset=int(start),
        pop_time_ms=int(pop_time),
        invisible_ms=int(invisible),
        revive_queue=int(revive_queue),
        flag=int(flag),
        broker_name=broker_name,
        queue_id=int(queue_id),
        offset=int(offset),
    )


# ---- info strings of a response


class PopInfo:
    """Builds the info strings of a response: what was popped from which queue."""

    def __init__(self) -> None:
        self._starts: list[str] = []
        self._messages: list[str] = []
        self._counts: list[str] = []

    def add(self, flag: int, queue_id: int, start_offset: int, offsets: Iterable[int]) -> None:
        """Adds the messages popped from one queue, from queue offset `start_offset` on."""
        self._starts.append(f"{flag} {queue_id} {start_offset}")
        self._messages.append(f"{flag} {queue_id} {','.join(map(str, offsets))}")

    def add_counts(self, flag: int, queue_id: int, counts: Iterable[tuple[int, int]], count_min: int) -> None:
        """Adds how often messages of one queue, popped in order mode, were popped before.

        `counts`: (queue offset, times) of each message popped before. `count_min`: the lowest count of all messages
        popped from the queue now, including those not in `counts`.
        """
        self._counts += [f"{flag} qo{queue_id}%{offset} {times}" for offset, times in counts]
        self._counts.append(f"{flag} {queue_id} {count_min}")

    @property
    def start_offset_info(self) -> str:
        """The header field startOffsetInfo."""
        return ";".join(self._starts)

    @property
    def msg_offset_info(self) -> str:
        """The header field msgOffsetInfo."""
        return ";".join(self._messages)

    @property
    def order_count_info(self) -> str | None:
        """The header field orderCountInfo; None outside order mode."""
        return ";".join(self._counts) if self._counts else None


# ---- retry topics


def retry_topic(group: str, topic: str, *, is_v2: bool) -> str:
    """Returns the retry topic of a group for a topic."""
    return f"{RETRY_PREFIX}{group}{'+' if is_v2 else '_'}{topic}"


def popped_topic(group: str, topic: str) -> tuple[str, int]:
    """Returns the topic that a group asked for when it popped from `topic`, and the flag of `topic`."""
    for separator, flag in (("_", RETRY_V1), ("+", RETRY_V2)):
        prefix = f"{RETRY_PREFIX}{group}{separator}"
        if topic.startswith(prefix) and len(topic) > len(prefix):
            return topic[len(prefix) :], flag
    return topic, NORMAL


# ---- bodies


_Count = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_NOT_ZERO = re.compile(rb"[^\0]")


class BatchAck(msgspec.Struct, kw_only=True):
    """Acknowledgements of one pop: bit i of `bits` stands for queue offset `start_offset` + i."""

    group: str = field(name="c")
    topic: str = field(name="t")
    """The topic that the pop asked for, even if `flag` says that the messages were read from a retry topic"""
    flag: str = field(default="0", name="r")
    start_offset: _Count = field(name="so")
    queue_id: _Count = field(name="q")
    revive_queue: _Count = field(name="rq")
    pop_time_ms: _Count = field(name="pt")
    invisible_ms: _Count = field(default=0, name="it")
    bits: str = field(default="", name="b")
    """Base64 of the bytes of a bit set, the lowest bits first"""

    def real_topic(self) -> str:
        """Returns the topic that the messages were read from."""
        if self.flag not in ("1", "2"):
            return self.topic
        return retry_topic(self.group, self.topic, is_v2=self.flag == "2")

    def offsets(self) -> Iterator[int]:
        """Yields the acknowledged queue offsets. Raises RemoteProtocolError if `bits` is not Base64 or too long."""
        try:
            raw = binascii.a2b_base64(self.bits.encode(), strict_mode=True) if self.bits else b""
        except (ValueError, UnicodeEncodeError):
            raise RemoteProtocolError("batch ack: the bits are not Base64") from None
        if len(raw) > BATCH_ACK_SIZE_MAX:
            raise RemoteProtocolError(f"batch ack of {len(raw)} bytes of bits; at most {BATCH_ACK_SIZE_MAX}")
        for found in _NOT_ZERO.finditer(raw):
            index = found.start()
            for bit in range(8):
                if raw[index] >> bit & 1:
                    yield self.start_offset + 8 * index + bit


class BatchAckBody(msgspec.Struct, rename="camel", kw_only=True):
    """Body of BATCH_ACK_MESSAGE (200151)."""

    broker_name: str = ""
    acks: list[BatchAck] = []


class RequestModeBody(msgspec.Struct, rename="camel", kw_only=True):
    """Body of SET_MESSAGE_REQUEST_MODE (401), and an entry of `RequestModeTable`. `mode`: PULL or POP."""

    topic: str = ""
    consumer_group: str = ""
    mode: str = "PULL"
    pop_share_queue_num: Int32 = 0


class RequestModeTable(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to GET_ALL_MESSAGE_REQUEST_MODE (402), and messageRequestMode.json: topic -> group -> mode."""

    message_request_mode_map: dict[str, dict[str, RequestModeBody]] = {}


class QueryAssignmentBody(msgspec.Struct, rename="camel", kw_only=True):
    """Body of QUERY_ASSIGNMENT (400)."""

    topic: str = ""
    consumer_group: str = ""
    client_id: str = ""
    strategy_name: str = "AVG"
    message_model: str = "CLUSTERING"


class AssignedQueue(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """A MessageQueue in an assignment; `queue_id` -1: all queues of the broker."""

    topic: str
    broker_name: str
    queue_id: int


class Assignment(msgspec.Struct, rename="camel", kw_only=True):
    """One queue that is assigned to the client that asked. `mode`: PULL or POP."""

    message_queue: AssignedQueue
    mode: str
    attachments: dict[str, str] | None = None


class AssignmentsBody(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to QUERY_ASSIGNMENT (400)."""

    message_queue_assignments: list[Assignment] | None = []
    """Queues assigned to the client; None: it keeps its present ones"""
