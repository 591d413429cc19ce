"""SendMessage and RecallMessage. The messages of a call become requests (SEND_MESSAGE_V2, 310, or SEND_BATCH_MESSAGE,
320), and the responses become the result entries of the call's response.

The checks and their codes are those of RocketMQ's proxy (SendMessageActivity). Departures: the response to a batch has
an entry with its own id for each message, while RocketMQ returns one entry with an id that no message has; and gzip
bodies are stored unpacked.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.grpc import Call
from ha.protocol.batch import encode_batch
from ha.protocol.codes import RequestCode, ResponseCode, SysFlag
from ha.protocol.headers import RecallMessageRequest, RecallMessageResponse, SendMessageRequestV2, parse_header
from ha.protocol.pop import PRIORITY
from ha.protocol.properties import (
    CHECK_IMMUNITY_TIME_S,
    KEYS,
    PRODUCER_GROUP,
    TAGS,
    TIMER_DELIVER_MS,
    TRANSACTION_PREPARED,
    UNIQ_KEY,
    java_hash,
)
from ha.protocol.recall_handle import decode_recall_handle
from ha.protocol.remoting import RemotingCommand
from ha.protocol.request_parser import SendCommand
from ha.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX

from .brokers import BrokerQueues, Brokers, Route, reading_answer
from .messages import CLASSES, GZIP, Code, MessageType, make, milliseconds
from .names import topic_name
from .options import FrontOptions
from .properties import (
    BORN_HOST,
    BORN_TIMESTAMP,
    LITE_TOPIC,
    RESERVED,
    SHARDING_KEY,
    TRACE_CONTEXT,
)
from .refusal import CallRefused, check, code_of, reason_of
from .routes import existing_route
from .status import ok_status, set_status_by_entries, with_status
from .transactions import transaction_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from .session import Producers, Session

MESSAGE_COUNT_MAX = 1_024
"""Maximum number of messages of one call, because all are prepared without a checkpoint"""
MESSAGE_GROUP_LENGTH_MAX = 64
"""Upper limit (exclusive) of the length of a message group in UTF-8 bytes."""
BORN_MS_MIN, BORN_MS_MAX = -62_135_596_800_000, 253_402_300_799_999
"""Range of the born timestamp in ms: the years 1 to 9999, as defined for a Timestamp. The fields of a Timestamp can
hold values that don't fit into a record."""
_STORED = {
    int(ResponseCode.SUCCESS): Code.OK,
    int(ResponseCode.FLUSH_DISK_TIMEOUT): Code.MASTER_PERSISTENCE_TIMEOUT,
    int(ResponseCode.FLUSH_SLAVE_TIMEOUT): Code.SLAVE_PERSISTENCE_TIMEOUT,
    int(ResponseCode.SLAVE_NOT_AVAILABLE): Code.HA_NOT_AVAILABLE,
}
_MULTIPLIER, _MASK64 = 2862933555777941757, (1 << 64) - 1


class Sending:
    """Sends messages for all clients of a front."""

    def __init__(
        self, brokers: Brokers, options: FrontOptions, wall_clock_ms: Callable[[], int], producers: Producers
    ) -> None:
        self._brokers = brokers
        self._options = options
        self._wall_clock_ms = wall_clock_ms
        self._producers = producers
        self._turn = 0
        """Number of messages without a message group, and of batches, so far; these go to the brokers round robin"""

    def take(self, session: Session, call: Call) -> bool:
        """Serves a call with one message, if it can do so without waiting; returns whether it did. It sends the message
        and answers when the broker responds, or answers at once that the message is refused."""
        try:
            request = CLASSES["SendMessageRequest"].FromString(call.message)
        except DecodeError:  # reported by the slower path
            return False
        messages = request.messages
        if len(messages) != 1:
            return False
        message, turn = messages[0], self._turn
        try:
            route = self._brokers.known_route(topic_name(message.topic))
            if route is None:
                return False
            broker, command, kind = self._prepare(session, message, route)
        except CallRefused as refused:
            refusal = with_status("SendMessageResponse", refused.code, refused.message)
            call.respond(refusal.SerializeToString())
            return True
        message_id = message.system_properties.message_id

        def answer(response: RemotingCommand | None) -> None:
            if response is None:
                result = _response([_failed(Code.INTERNAL_SERVER_ERROR, "the broker is stopping")])
            else:
                result = _response([_entry(response, message_id, kind, broker.broker_name)])
            call.respond(result.SerializeToString())

        if self._brokers.invoke_nowait(session, broker.broker_name, command, answer):
            return True
        self._turn = turn  # `send` will choose the broker again
        return False

    async def send(self, session: Session, request: Any) -> Any:
        """Sends the messages of a call, and returns its response. Raises CallRefused, after which no message is stored,
        and BrokerUnreachable, after which some may be stored."""
        messages = request.messages
        if not messages:
            raise CallRefused(Code.MESSAGE_CORRUPTED, "no message to send")
        if len(messages) > MESSAGE_COUNT_MAX:
            raise CallRefused(Code.BAD_REQUEST, f"{len(messages)} messages; at most {MESSAGE_COUNT_MAX} are accepted")
        topic = topic_name(messages[0].topic)
        if any(topic_name(message.topic) != topic for message in messages):
            raise CallRefused(Code.MESSAGE_CORRUPTED, "topic in message is not same")
        route = await existing_route(self._brokers, topic)
        turn = self._turn
        prepared = [self._prepare(session, message, route) for message in messages]
        if len(messages) > 1 and all(kind is MessageType.NORMAL for _, _, kind in prepared):
            self._turn = turn + 1  # all go to the broker of the first message
            return await self._send_batch(session, messages, prepared)
        entries = []
        for message, (broker, command, kind) in zip(messages, prepared, strict=True):
            response = await self._brokers.invoke(session, broker.broker_name, command)
            entries.append(_entry(response, message.system_properties.message_id, kind, broker.broker_name))
        return _response(entries)

    async def _send_batch(
        self, session: Session, messages: Any, prepared: list[tuple[BrokerQueues, SendCommand, MessageType]]
    ) -> Any:
        broker, first, kind = prepared[0]
        parts = [(0, bytes(command.body), command.request.properties.encode()) for _, command, _ in prepared]
        first.code = RequestCode.SEND_BATCH_MESSAGE
        first.request.batch = True
        first.request.properties = ""
        try:
            first.body = encode_batch(parts)
        except LocalProtocolError as error:
            raise CallRefused(Code.MESSAGE_PROPERTIES_TOO_LARGE, str(error)) from None
        response = await self._brokers.invoke(session, broker.broker_name, first)
        entries = [
            _entry(response, each.system_properties.message_id, kind, broker.broker_name, index)
            for index, each in enumerate(messages)
        ]
        return _response(entries)

    # ---- one message

    def _prepare(self, session: Session, message: Any, route: Route) -> tuple[BrokerQueues, SendCommand, MessageType]:
        """Checks a message; returns the broker to send it to, the request, and the message's type. For a half message,
        also registers the client for transaction checks. Raises CallRefused."""
        options, system, body = self._options, message.system_properties, message.body
        kind = _type_of(system)
        topic = route.topic
        if options.is_message_type_checked and kind not in route.message_types:
            self._check_type(topic, kind, route)
        if system.body_encoding == GZIP:
            body = _unzipped(body, options.message_size_max)
        if not body:
            raise CallRefused(Code.MESSAGE_BODY_EMPTY, "message body cannot be empty")
        if len(body) > options.message_size_max:
            reason = f"message body of {len(body)} bytes; at most {options.message_size_max}"
            raise CallRefused(Code.MESSAGE_BODY_TOO_LARGE, reason)
        properties = self._properties(message, kind, topic)
        sys_flag = SysFlag.TRANSACTION_PREPARED if kind is MessageType.TRANSACTION else 0
        broker, queue_id = self._choose(route, system.message_group)
        born_ms = milliseconds(system.born_timestamp) or self._wall_clock_ms()
        if not BORN_MS_MIN <= born_ms <= BORN_MS_MAX:
            raise CallRefused(Code.BAD_REQUEST, f"the born timestamp {born_ms} ms is not in the years 1 to 9999")
        request = SendMessageRequestV2(
            producer_group=topic,
            topic=topic,
            default_topic="",
            default_topic_queue_nums=4,
            queue_id=queue_id,
            sys_flag=sys_flag,
            born_timestamp=born_ms,
            flag=0,
            properties=properties,
        )
        command = SendCommand(RequestCode.SEND_MESSAGE_V2, body=body, request=request)
        if kind is MessageType.TRANSACTION:
            self._producers.add(session, (topic,))
        return broker, command, kind

    def _check_type(self, topic: str, kind: MessageType, route: Route) -> None:
        if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            return
        expected = "|".join(each.name for each in route.message_types)
        raise CallRefused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"TopicMessageType validate failed, the expected type is {expected}, but actual type is {kind.name}",
        )

    def _properties(self, message: Any, kind: MessageType, topic: str) -> str:
        """Returns the property string of a message. An empty tag, key or message group counts as absent, as in
        RocketMQ, because the Go and C# clients pass on what the application has set. Raises CallRefused if the message
        id, a property, or a field that is stored as a property is invalid or exceeds a limit."""
        system, options = message.system_properties, self._options
        message_id = system.message_id
        if not message_id.strip():
            raise CallRefused(Code.ILLEGAL_MESSAGE_ID, "message id cannot be blank")
        own = message.user_properties
        pairs = [f"{UNIQ_KEY}\x01{message_id}", f"{PRODUCER_GROUP}\x01{topic}"]
        size = 0
        if own:
            if len(own) > options.property_count_max:
                reason = f"{len(own)} properties; at most {options.property_count_max}"
                raise CallRefused(Code.MESSAGE_PROPERTIES_TOO_LARGE, reason)
            for name, value in own.items():
                size += len(name) + len(value)
                if name in RESERVED or not name or _has_control(name) or _has_control(value):
                    reason = f"property {name[:80]!r} is reserved or has control characters"
                    raise CallRefused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, reason)
                pairs.append(f"{name}\x01{value}")
        if tag := system.tag:
            size += len(tag)
            if not tag.strip() or "|" in tag or _has_control(tag):
                reason = f"tag {tag[:80]!r} is blank or has | or control characters"
                raise CallRefused(Code.ILLEGAL_MESSAGE_TAG, reason)
            pairs.append(f"{TAGS}\x01{tag}")
        if keys := [key for key in system.keys if key]:
            size += sum(map(len, keys))
            if any(not key.strip() or _has_control(key) for key in keys):
                raise CallRefused(Code.ILLEGAL_MESSAGE_KEY, "a key is blank or has control characters")
            pairs.append(f"{KEYS}\x01{' '.join(keys)}")
        if size > options.properties_size_max:
            reason = f"properties, tag and keys of {size} characters; at most {options.properties_size_max}"
            raise CallRefused(Code.MESSAGE_PROPERTIES_TOO_LARGE, reason)
        self._add_system(pairs, system, kind)
        text = "\x02".join(pairs)
        if text.count("\x01") != len(pairs) or text.count("\x02") != len(pairs) - 1:
            raise CallRefused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, "a system property has control characters")
        return text + "\x02"

    def _add_system(self, pairs: list[str], system: Any, kind: MessageType) -> None:
        if system.born_host:
            pairs.append(f"{BORN_HOST}\x01{system.born_host}")
        if system.HasField("born_timestamp"):
            pairs.append(f"{BORN_TIMESTAMP}\x01{milliseconds(system.born_timestamp)}")
        if system.trace_context:
            pairs.append(f"{TRACE_CONTEXT}\x01{system.trace_context}")
        if kind is MessageType.NORMAL:
            return
        if kind is MessageType.TRANSACTION:
            pairs.append(f"{TRANSACTION_PREPARED}\x01true")
            if system.HasField("orphaned_transaction_recovery_duration"):
                pairs.append(f"{CHECK_IMMUNITY_TIME_S}\x01{system.orphaned_transaction_recovery_duration.seconds}")
        if system.HasField("delivery_timestamp"):
            deliver_ms = milliseconds(system.delivery_timestamp)
            if deliver_ms - self._wall_clock_ms() > self._options.delay_ms_max:
                reason = f"the delivery time is further away than {self._options.delay_ms_max // 1000} s"
                raise CallRefused(Code.ILLEGAL_DELIVERY_TIME, reason)
            pairs.append(f"{TIMER_DELIVER_MS}\x01{deliver_ms}")
        if group := system.message_group:
            if not group.strip() or len(group.encode()) >= MESSAGE_GROUP_LENGTH_MAX:
                reason = f"message group {group[:80]!r} is blank or has {MESSAGE_GROUP_LENGTH_MAX} bytes or more"
                raise CallRefused(Code.ILLEGAL_MESSAGE_GROUP, reason)
            pairs.append(f"{SHARDING_KEY}\x01{group}")
        if system.HasField("priority"):
            pairs.append(f"{PRIORITY}\x01{system.priority}")
        if system.HasField("lite_topic"):
            pairs.append(f"{LITE_TOPIC}\x01{system.lite_topic}")

    def _choose(self, route: Route, message_group: str) -> tuple[BrokerQueues, int]:
        """Returns the broker and the queue id for a message. With a message group, its hash determines both. Without
        one, returns the next broker, round robin, and -1, so that the broker chooses the queue. Raises CallRefused if
        no queue is writable."""
        brokers = [each for each in route.brokers if each.writable]
        if not brokers:
            raise CallRefused(Code.FORBIDDEN, "no writable queue")
        if not message_group:
            self._turn += 1
            return brokers[self._turn % len(brokers)], -1
        index = consistent_hash(java_hash(message_group), sum(each.writable for each in brokers))
        for broker in brokers:
            if index < broker.writable:
                return broker, index
            index -= broker.writable
        raise AssertionError("the index is below the number of queues")

    # ---- recall

    async def recall(self, session: Session, request: Any) -> Any:
        """RecallMessage: recalls a message that is not due yet, with RECALL_MESSAGE (370). Raises CallRefused,
        BrokerUnreachable."""
        topic = topic_name(request.topic)
        route = await existing_route(self._brokers, topic)
        if self._options.is_message_type_checked and MessageType.DELAY not in route.message_types:
            self._check_type(topic, MessageType.DELAY, route)
        try:
            broker_name = decode_recall_handle(request.recall_handle).broker_name
        except RemoteProtocolError as error:
            raise CallRefused(Code.INTERNAL_SERVER_ERROR, str(error)) from None
        if broker_name not in [each.broker_name for each in route.brokers]:
            reason = f"recall handle of broker {broker_name[:80]!r}, without the topic"
            raise CallRefused(Code.INTERNAL_SERVER_ERROR, reason)
        header = RecallMessageRequest(
            producer_group=topic, topic=topic, recall_handle=request.recall_handle, broker_name=broker_name
        )
        command = RemotingCommand(RequestCode.RECALL_MESSAGE, ext_fields=header.to_ext_fields())
        response = check(await self._brokers.invoke(session, broker_name, command))
        with reading_answer():
            message_id = parse_header(RecallMessageResponse, response.ext_fields).msg_id
        return make("RecallMessageResponse", status=ok_status(), message_id=message_id)


def consistent_hash(value: int, bucket_count: int) -> int:
    """Returns the bucket of a hash value, from 0 to `bucket_count` - 1, as computed by Guava's
    Hashing.consistentHash."""
    state, bucket = value & _MASK64, 0
    while True:
        state = (_MULTIPLIER * state + 1) & _MASK64
        following = int((bucket + 1) / (((state >> 33) + 1) / 0x80000000))
        if not 0 <= following < bucket_count:
            return bucket
        bucket = following


def _has_control(text: str) -> bool:
    return not text.isprintable() and any(character < " " or character == "\x7f" for character in text)


def _unzipped(body: bytes, size_max: int) -> bytes:
    """Unpacks a gzip body, so that consumers of every protocol can read it. Stops after `size_max` + 1 bytes: the
    caller refuses a longer body. Raises CallRefused if the body is malformed or truncated, or has bytes after the first
    gzip member."""
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        plain = inflater.decompress(body, size_max + 1)
    except zlib.error as error:
        raise CallRefused(Code.MESSAGE_CORRUPTED, f"the body is not gzip: {error}") from None
    if len(plain) <= size_max and not inflater.eof:
        raise CallRefused(Code.MESSAGE_CORRUPTED, "the body is truncated gzip")
    if inflater.unused_data:  # such as a second member, which would be lost
        raise CallRefused(Code.MESSAGE_CORRUPTED, "the body is more than one gzip member")
    return plain


def _type_of(system: Any) -> MessageType:
    """Returns a message's type, from its fields and not from `message_type` (except TRANSACTION), as RocketMQ does."""
    if system.message_type == MessageType.TRANSACTION:
        return MessageType.TRANSACTION
    if system.HasField("delivery_timestamp"):
        return MessageType.DELAY
    if system.message_group:
        return MessageType.FIFO
    if system.HasField("priority"):
        return MessageType.PRIORITY
    return MessageType.LITE if system.HasField("lite_topic") else MessageType.NORMAL


def _entry(response: RemotingCommand, message_id: str, kind: MessageType, broker_name: str, index: int = 0) -> Any:
    """Returns the result of a message, from the broker's response to it or to the batch in which it has `index`."""
    code = _STORED.get(response.code)
    if code is None:
        return _failed(code_of(response), reason_of(response))
    entry = CLASSES["SendResultEntry"]()
    status, fields = entry.status, response.ext_fields
    status.code = code
    status.message = "OK" if code is Code.OK else response.remark or ""
    entry.message_id = entry.transaction_id = message_id
    try:
        entry.offset = int(fields["queueOffset"]) + index
        if kind is MessageType.TRANSACTION:
            entry.transaction_id = transaction_id(message_id, broker_name, entry.offset, fields["msgId"])
    except (KeyError, ValueError, RemoteProtocolError):
        return _failed(Code.INTERNAL_SERVER_ERROR, f"answer of broker {broker_name} without offsets")
    recall_handle = fields.get("recallHandle")
    if recall_handle:
        entry.recall_handle = recall_handle
    return entry


def _failed(code: Code, message: str) -> Any:
    entry = CLASSES["SendResultEntry"]()
    entry.status.code = code
    entry.status.message = message
    return entry


def _response(entries: list[Any]) -> Any:
    response = CLASSES["SendMessageResponse"]()
    response.entries.extend(entries)
    set_status_by_entries(response)
    return response
