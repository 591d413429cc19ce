"""Checks send requests and makes the messages to store, with the topic and queue in which each is stored.

The checks run in RocketMQ's order (SendMessageProcessor, AbstractSendMessageProcessor.msgCheck) with the codes of 5.x.
Most remarks begin as RocketMQ's do. Replies (replies.py) share the checks of topic, queue and size.

Delayed messages, timer messages and half messages are stored in another topic first (detour.py). Two kinds of message
are refused, since nothing would deliver them: half messages that are also delayed by level (MESSAGE_ILLEGAL, 13;
RocketMQ discards these when they are due), and messages with transaction bits that are not half messages
(NO_PERMISSION, 16).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from ha.broker.core import BrokerCore
from ha.broker.detour import delay_level, is_half, is_timer, parse_int, store_delayed, store_half, store_timer
from ha.broker.options import BrokerOptions
from ha.broker.put_request import PutRequest
from ha.broker.queue_locks import QueueLocks
from ha.broker.refused import RefusedError
from ha.broker.stored_properties import StoredProperties, join
from ha.broker.topics import NO_SEND_TOPICS, TOPIC_LENGTH_MAX, topic_fault
from ha.protocol.batch import decode_batch
from ha.protocol.bodies import GroupConfig, TopicConfig
from ha.protocol.codes import Permission, RequestCode, ResponseCode, SysFlag
from ha.protocol.headers import SendMessageRequest
from ha.protocol.pop import MESSAGE_TYPE, PRIORITY, PRIORITY_TYPE
from ha.protocol.properties import TIMER_OUT_MS, UNIQ_KEY, decode_properties
from ha.protocol.recall_handle import RecallHandle, encode_recall_handle
from ha.protocol.record import RECORD_SIZE_MIN, Message, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX
from ha.store.record_maker import RECORD_OVERHEAD_MAX

_BATCH = int(RequestCode.SEND_BATCH_MESSAGE)  # accessing an enum member costs more than the comparison
_V3_4_9 = 121
"""Client version from which a request carries its own maxReconsumeTimes."""


class Send(PutRequest, kw_only=True):
    """The put of one send, with the fields that its answer needs."""

    command: RemotingCommand
    queue_id: int
    transaction_id: str | None
    recall_handle: str | None = None


class MessageMaker:
    """Checks sends and makes the messages to store. All methods raise RefusedError, and RemoteProtocolError for a
    malformed batch."""

    def __init__(self, core: BrokerCore, queue_locks: QueueLocks) -> None:
        options = core.options
        self._queue_locks = queue_locks
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._options = options
        self.properties = StoredProperties(options, unique_id=core.world.unique_id)
        self._delay_level_count = len(core.store.options.delay_levels_ms)
        self._wall_clock_ms = core.world.wall_clock_ms
        self._next_queue = count()
        # A batch is stored as a whole of bounded size, so a larger number of messages could not be stored anyway.
        self._batch_count_max = (options.message_size_max + RECORD_OVERHEAD_MAX) // RECORD_SIZE_MIN
        self._is_writable = bool(options.permission & Permission.WRITE)

    # ---- topics and groups, which may have to be created

    async def topic_for(self, request: SendMessageRequest) -> TopicConfig:
        """Returns the topic to store in, created if necessary and allowed."""
        topic = request.topic
        fault = topic_fault(topic)
        if fault:
            raise RefusedError(ResponseCode.INVALID_PARAMETER, fault)
        self._check_may_send(topic, self._topics.get(topic))
        created: TopicConfig | str
        if topic.startswith(RETRY_PREFIX) and self._topics.get(topic) is None:
            created = await self._topics.ensure(topic, 1)
        else:
            created = await self._topics.create_on_send(topic, request.default_topic, request.default_topic_queue_nums)
        if isinstance(created, str):
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please! {created}")
        return created

    async def prepare(self, command: RemotingCommand, request: SendMessageRequest, born_host: bytes) -> Send:
        """Makes the put of a send whose topic may have to be created, or belongs to a group."""
        config = await self.topic_for(request)
        if request.topic.startswith(RETRY_PREFIX) and not (request.batch or command.code == _BATCH):
            request, config = await self._route_retry(command, request, config)
        return self.make(command, request, config, born_host)

    async def _route_retry(
        self, command: RemotingCommand, request: SendMessageRequest, config: TopicConfig
    ) -> tuple[SendMessageRequest, TopicConfig]:
        """Redirects a message in a retry topic to the dead letters of its group if it was retried too often, or if the
        group consumes in order; otherwise returns `request` and `config` unchanged.

        An orderly consumer retries a message itself before it sends the message back, and another retry would be out of
        order. (RocketMQ 5: isLockAllExpired.)
        """
        name = request.topic.removeprefix(RETRY_PREFIX)
        group = await self._groups.find_or_create(name)
        if group is None:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group not exist, {name} (auto-creation is off)",
            )
        times_max = retries_max(group, command.version, request.max_reconsume_times)
        if request.reconsume_times <= times_max and not self._queue_locks.has_locks(name):
            return request, config
        dead_letters = await self._topics.ensure(DLQ_PREFIX + name, 1)
        if isinstance(dead_letters, str):
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"topic[{DLQ_PREFIX}{name}] not exist: {dead_letters}")
        properties = decode_properties(request.properties.encode("utf-8", "replace"))
        properties["DELAY"] = "0"
        request.topic = dead_letters.topic_name
        request.queue_id = 0
        request.properties = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
        return request, dead_letters

    # ---- the message

    def make(
        self, command: RemotingCommand, request: SendMessageRequest, config: TopicConfig, born_host: bytes
    ) -> Send:
        """Makes the put of a send to a topic that exists. Takes the body out of `command`."""
        topic = request.topic
        if not self._is_writable or topic in NO_SEND_TOPICS:
            self._check_may_send(topic, config)
        queue_id = request.queue_id
        if not 0 <= queue_id < config.write_queue_nums:
            queue_id = self.queue_for(request, config)
        if config.attributes and config.attributes.get(MESSAGE_TYPE) == PRIORITY_TYPE:
            queue_id = _queue_of_priority(request.properties, config, queue_id)
        body = command.body
        if not body:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, "the request has no body")
        if len(body) > self._options.message_size_max:
            self.check_size(body)
        is_batch = request.batch or command.code == _BATCH
        text = request.properties
        check_properties(text)
        usual = None if is_batch else self.properties.usual(text)
        # Properties are decoded only if the message may have to be stored elsewhere first.
        may_take_detour = usual is None and ("DELAY\x01" in text or "TRAN_MSG\x01" in text or "TIMER_D" in text)
        sys_flag = request.sys_flag
        unusual_flags = sys_flag & _UNUSUAL_SYS_FLAGS
        if unusual_flags and (is_batch or not may_take_detour or unusual_flags != SysFlag.TRANSACTION_PREPARED):
            raise RefusedError(*_flag_fault(sys_flag))
        transaction_id: str | None
        recall_handle: str | None = None
        if usual is None:
            properties, waits, transaction_id = self.properties.of(text, is_batch=is_batch)
        else:
            properties, transaction_id = usual
            waits = True
        messages: Sequence[Message]
        if is_batch:
            if may_take_detour:
                _check_batch(properties)
            messages = self._batch_messages(request, queue_id, body, properties, born_host)
        else:
            born_timestamp = request.born_timestamp
            message = Message(topic, queue_id, body, properties, request.flag, sys_flag, born_timestamp, born_host)
            message.reconsume_times = request.reconsume_times
            messages = (message,)
            if may_take_detour:
                recall_handle = self._take_detour(message)
        command.body = b""  # the message holds the body until it is stored; the answer doesn't need it
        return Send(
            messages=messages,
            is_batch=is_batch,
            waits=waits,
            command=command,
            queue_id=queue_id,
            transaction_id=transaction_id,
            recall_handle=recall_handle,
        )

    def _check_may_send(self, topic: str, config: TopicConfig | None) -> None:
        if not self._is_writable and config is not None and config.order:
            raise RefusedError(
                ResponseCode.NO_PERMISSION, f"the broker[{self._options.host}] sending message is forbidden"
            )
        if topic in NO_SEND_TOPICS:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.")

    def queue_for(self, request: SendMessageRequest, config: TopicConfig) -> int:
        """Returns the queue to store in: the requested one, or the next one in round robin if the requested id is
        negative."""
        queue_id = request.queue_id
        if queue_id < 0 < config.write_queue_nums:
            return next(self._next_queue) % config.write_queue_nums
        if queue_id < 0:
            raise RefusedError(ResponseCode.INVALID_PARAMETER, f"topic[{request.topic}] has no queue to write to")
        if queue_id >= max(config.write_queue_nums, config.read_queue_nums):
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{queue_id}] is illegal, topic[{request.topic}] has {config.write_queue_nums} write "
                f"and {config.read_queue_nums} read queues, producer group: {request.producer_group}",
            )
        return queue_id

    def check_size(self, body: bytes | memoryview) -> None:
        """Raises RefusedError for a body larger than maxMessageSize."""
        size_max = self._options.message_size_max
        if len(body) > size_max:
            raise RefusedError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the message is illegal: body of {len(body)} bytes, maxMessageSize={size_max}",
            )

    def _batch_messages(
        self, request: SendMessageRequest, queue_id: int, body: bytes | memoryview, properties: bytes, born_host: bytes
    ) -> list[Message]:
        topic = request.topic
        if topic.startswith(RETRY_PREFIX) or len(topic) > TOPIC_LENGTH_MAX:
            raise RefusedError(
                ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry or long topics: {topic}"
            )
        sys_flag, born_timestamp, times = request.sys_flag, request.born_timestamp, request.reconsume_times
        parts = decode_batch(body, count_max=self._batch_count_max)
        for _, _, own in parts:
            check_properties(own)
        return [
            Message(topic, queue_id, part, join(own, properties), flag, sys_flag, born_timestamp, born_host, times)
            for flag, part, own in parts
        ]

    def _take_detour(self, message: Message) -> str | None:
        """Redirects a delayed, timer or half message to the system topic that holds it until it is delivered.

        Returns the recall handle of a timer message; None for other messages, for a timer message that is due already
        or has no UNIQ_KEY, and for one in a retry topic, which belongs to a consumer.
        """
        topic = message.topic
        properties = decode_properties(message.properties)
        level = _delay_level(properties)
        is_retry = message.reconsume_times > 0 and level > 0  # of clients before 4.6.1, which keep TRAN_MSG
        if is_half(properties) and not is_retry:
            if self._options.reject_transactions:
                raise RefusedError(
                    ResponseCode.NO_PERMISSION,
                    f"the broker[{self._options.host}] sending transaction message is forbidden",
                )
            if level > 0:
                raise RefusedError(
                    ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: TRAN_MSG with DELAY={properties['DELAY']}"
                )
            store_half(message, properties)
            return None
        if message.sys_flag & SysFlag.TRANSACTION_MASK and not is_retry:
            raise RefusedError(*_flag_fault(message.sys_flag))
        message.sys_flag &= ~SysFlag.TRANSACTION_MASK
        if level > 0:
            store_delayed(message, properties, level, self._delay_level_count)
        elif is_timer(properties):
            take_timer(message, properties, self._wall_clock_ms(), self._options)
            due, unique_key = properties.get(TIMER_OUT_MS), properties.get(UNIQ_KEY)
            if due is not None and unique_key is not None and not topic.startswith(RETRY_PREFIX):
                handle = RecallHandle(topic, self._options.broker_name, int(due) + 1, unique_key)
                return encode_recall_handle(handle)
        return None


_UNUSUAL_SYS_FLAGS = ~(
    SysFlag.COMPRESSED
    | SysFlag.MULTI_TAGS
    | SysFlag.BORNHOST_V6
    | SysFlag.STOREHOST_V6
    | SysFlag.COMPRESSION_TYPE_MASK
    | ~0x7FF
)


def check_properties(properties: str | bytes) -> None:
    """Raises RefusedError for a property string with the character NUL.

    Recovery after a crash would take it for a part of the record that was never written, and cut the log off there.
    """
    if "\0" in properties if isinstance(properties, str) else 0 in properties:
        raise RefusedError(
            ResponseCode.MESSAGE_ILLEGAL, "the message is illegal: its properties contain the character NUL"
        )


def _flag_fault(sys_flag: int) -> tuple[ResponseCode, str]:
    if sys_flag & SysFlag.TRANSACTION_MASK:
        return (
            ResponseCode.NO_PERMISSION,
            f"sending transaction message is forbidden: sysFlag {sys_flag:#x}, no TRAN_MSG",
        )
    return ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: sysFlag {sys_flag:#x} marks an inner batch"


def _check_batch(raw: bytes) -> None:
    """Refuses a batch whose common properties would redirect it to a system topic: half, delayed and timer messages
    can't be batched.
    """
    properties = decode_properties(raw)
    if is_half(properties):
        raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, "the message is illegal: a batch with TRAN_MSG")
    if _delay_level(properties) > 0:
        raise RefusedError(
            ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: a batch with DELAY={properties['DELAY']}"
        )
    if is_timer(properties):
        raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, "the message is illegal: a batch with a delivery time")


def _delay_level(properties: dict[str, str]) -> int:
    try:
        return delay_level(properties)
    except ValueError as error:
        raise RefusedError(
            ResponseCode.SYSTEM_ERROR, f"java.lang.NumberFormatException: {error}, the property DELAY"
        ) from None


def take_timer(message: Message, properties: dict[str, str], now_ms: int, options: BrokerOptions) -> None:
    """Redirects a timer message to the timer topic, unless it is due already. Raises RefusedError if timers are
    disabled, the delay is invalid or above `timer_delay_s_max`, or the message is a recall and due already."""
    if not options.timer_enable:
        raise RefusedError(
            ResponseCode.SYSTEM_ERROR, "accurate timer message is not enabled, timerWheelEnable is false"
        )
    delay_ms_max = options.timer_delay_s_max * 1000
    if not store_timer(message, properties, now_ms, delay_ms_max):
        raise RefusedError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"timer message illegal, the delay time should not be bigger than the max delay {delay_ms_max}ms; or if "
            "set del msg, the delay time should be bigger than the current time",
        )


def _queue_of_priority(properties: str, config: TopicConfig, queue_id: int) -> int:
    """Returns the id of the queue for a message's priority, in a topic with priorities; `queue_id` if the message
    states no valid priority, or if the topic has no queues to write to."""
    try:
        priority = parse_int(decode_properties(properties.encode(errors="surrogateescape")).get(PRIORITY, ""))
    except ValueError:
        return queue_id
    highest = config.write_queue_nums - 1
    return queue_id if priority < 0 or highest < 0 else min(priority, highest)


def retries_max(group: GroupConfig, version: int, asked: int | None) -> int:
    """Returns the maximum number of retries: `asked`, if a client of `version` 3.4.9 or later states it, otherwise the
    group's."""
    return asked if version >= _V3_4_9 and asked is not None else group.retry_max_times


def encode_peer(peer: tuple[str, int]) -> bytes:
    """Returns the sender's address as records encode it; 127.0.0.1 with its port if the host is no IP address."""
    host, port = peer
    try:
        return encode_host(host, port)
    except ValueError:  # a stream without an address: in memory, or already gone
        return encode_host("127.0.0.1", port)
