"""Request 36 CONSUMER_SEND_MSG_BACK: a consumer could not process a message and requests it again later.

A copy goes to %RETRY%group after a delay, whose level grows with each retry unless the request states one. It goes to
%DLQ%group instead after the maximum number of retries, or if the request has a negative delayLevel. The copy has the
property WAIT=false, and the answer waits for no flush and no slave, except with failover. If the group has no retry
queues, nothing is stored, and the answer is SUCCESS. Source: AbstractSendMessageProcessor.consumerSendMsgBack, checks
and remarks in its order.

With access control, the message must be of a topic that the group may read: its retry topic, a topic that the group's
consumers subscribe to, or the topic named in the request, on which the client then needs the right SUB. RocketMQ only
checks the group: a client that knows the offset of any message can copy it into its group's retry topic.
"""

from __future__ import annotations

from itertools import count

from ha.broker.core import BrokerCore
from ha.broker.detour import store_delayed
from ha.broker.message_queries import find_record, is_in_queue
from ha.broker.put_request import PutRequest
from ha.broker.refused import RefusedError, check_stores
from ha.broker.send_message import retries_max
from ha.broker.topics import NO_SEND_TOPICS
from ha.protocol.bodies import TopicConfig
from ha.protocol.codes import Permission, PutStatus, RequestCode, ResponseCode
from ha.protocol.group_requests import SendBackRequest
from ha.protocol.headers import parse_header
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import (
    CRC32,
    DELAY,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    WAIT,
    decode_properties,
    encode_properties,
)
from ha.protocol.record import RECONSUME_TIMES_MAX, Message, MessageRecord, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX
from ha.remoting import RemotingConnection, RequestHandler

FIRST_RETRY_LEVEL = 3
"""The delay level of the first retry, unless the consumer sets another one."""


class SendBackProcessor:
    """Answers CONSUMER_SEND_MSG_BACK (36)."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._put = core.puts
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._clients = core.tables.clients
        self._options = core.options
        self._standing = core.standing
        self._is_guarded = core.guard is not None
        self._level_count = len(core.store.options.delay_levels_ms)
        self._next_queue = count()

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.handle}

    async def handle(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """CONSUMER_SEND_MSG_BACK (36): stores a message for its next retry, or as a dead letter. Raises RefusedError
        and RemoteProtocolError."""
        request = parse_header(SendBackRequest, command.ext_fields)
        message = await self._next(request, command.version)
        if message is None:
            return command.reply(ResponseCode.SUCCESS)
        # The consumer skips the message now, so with failover the copy must not be lost with this master.
        put = PutRequest(messages=(message,), waits=self._standing.can_be_replaced)
        await self._put.settle([put])
        if put.status is PutStatus.PUT_OK:
            return command.reply(ResponseCode.SUCCESS)
        return command.reply(ResponseCode.SYSTEM_ERROR, f"{put.status.name} {put.remark}".rstrip())

    async def _next(self, request: SendBackRequest, version: int) -> Message | None:
        """Returns the message to store; None if the group has no retry queues, so that the message is dropped. Raises
        RefusedError."""
        options = self._options
        check_stores(self._standing)
        name = request.group
        group = await self._groups.find_or_create(name)
        if group is None:
            raise RefusedError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {name}")
        if not options.permission & Permission.WRITE:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"the broker[{options.host}] sending message is forbidden")
        if group.retry_queue_nums <= 0:
            return None
        retries = await self._topic(RETRY_PREFIX + name, group.retry_queue_nums)
        if not retries.perm & Permission.WRITE:
            raise RefusedError(
                ResponseCode.NO_PERMISSION, f"the topic[{retries.topic_name}] sending message is forbidden"
            )
        record = await self._record(request)
        properties = decode_properties(record.properties)
        properties.pop(CRC32, None)
        properties.setdefault(RETRY_TOPIC, record.topic)
        properties[WAIT] = "false"
        properties.setdefault(
            ORIGIN_MESSAGE_ID, encode_message_id(encode_host(*record.store_host), record.physical_offset)
        )
        message = Message(
            retries.topic_name,
            next(self._next_queue) % min(group.retry_queue_nums, max(1, retries.write_queue_nums)),
            record.body,
            b"",
            record.flag,
            record.sys_flag,
            record.born_timestamp_ms,
            encode_host(*record.born_host),
            min(record.reconsume_times + 1, RECONSUME_TIMES_MAX),
        )
        level = request.delay_level
        times_max = retries_max(group, version, request.max_reconsume_times)
        if level < 0 or record.reconsume_times >= times_max:
            message.topic = (await self._topic(DLQ_PREFIX + name, 1)).topic_name
            message.queue_id = 0
            properties[DELAY] = "0"
            message.properties = encode_properties(properties)
        else:
            level = level or max(1, FIRST_RETRY_LEVEL + record.reconsume_times)  # producers may set a negative count
            properties[DELAY] = str(level)
            store_delayed(message, properties, level, self._level_count)
        return message

    async def _topic(self, topic: str, queue_count: int) -> TopicConfig:
        config = await self._topics.ensure(topic, queue_count)
        if isinstance(config, str):
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"topic[{topic}] not exist: {config}")
        return config

    async def _record(self, request: SendBackRequest) -> MessageRecord:
        found, damage = await find_record(self._store, request.offset)
        if (
            found is None
            or found[1].topic in NO_SEND_TOPICS  # not consumed by clients
            or (self._is_guarded and not await is_in_queue(self._store, found[1]))
        ):
            reason = damage and f": {damage}"
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {request.offset}{reason}")
        self._check_may_read(request, found[1])
        return found[1]

    def _check_may_read(self, request: SendBackRequest, record: MessageRecord) -> None:
        if not self._is_guarded or record.topic in (RETRY_PREFIX + request.group, request.origin_topic):
            return
        members = self._clients.consumer_group(request.group)
        if members is None or record.topic not in members.subscriptions:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"the message is of topic[{record.topic}], which group[{request.group}] has not subscribed to",
            )
