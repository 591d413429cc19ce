"""36 CONSUMER_SEND_MSG_BACK: a consumer could not consume a message and wants it again later.

A copy of it goes to %RETRY%group by way of its delay level, which grows with each time, and after as many times as the
group allows to %DLQ%group. The copy waits for no flush and no slave, as its property WAIT says, except with failover.
Source: AbstractSendMessageProcessor.consumerSendMsgBack, checks and remarks in its order.

Where access control is on, the message must be of a topic that the group may read: of its own retries, of a topic that
the group's consumers have subscribed to, or of the one that the request names, for which the right is then needed.
RocketMQ looks at the group alone: whoever knows an offset gets any message into the retries of a group of his own.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from ha.broker.core import BrokerCore
from ha.broker.detour import store_delayed
from ha.broker.message_queries import read_record
from ha.broker.put_request import PutRequest
from ha.broker.refused import RefusedError, check_stores
from ha.broker.send_message import retries_max
from ha.broker.topics import NO_SEND_TOPICS
from ha.errors import DamagedBytes, OffsetGone, RemoteProtocolError
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
from ha.protocol.record import Message, MessageRecord, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection, RequestHandler

FIRST_RETRY_LEVEL = 3
"""The delay level of the first retry, unless the consumer says another."""


class SendBackProcessor:
    """Answers 36."""

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
        self._turn = count()

    def handlers(self) -> dict[int, RequestHandler]:
        """What is answered here."""
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.handle}

    async def handle(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """Store the message for its next time, or among the dead letters. Raises RemoteProtocolError for no header."""
        request = parse_header(SendBackRequest, command.ext_fields)
        message = await self._next(request, command.version)
        if message is None:
            return command.reply(ResponseCode.SUCCESS)
        # Its consumer passes over the message now. With failover the copy must be where the next master will be, too.
        put = PutRequest(messages=(message,), waits=self._standing.can_be_replaced)
        await self._put.settle([put])
        if put.status is PutStatus.PUT_OK:
            return command.reply(ResponseCode.SUCCESS)
        return command.reply(ResponseCode.SYSTEM_ERROR, f"{put.status.name} {put.remark}".rstrip())

    async def _next(self, request: SendBackRequest, version: int) -> Message | None:
        """What is to be stored; None if the group wants no retries. Raises RefusedError."""
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
            next(self._turn) % min(group.retry_queue_nums, max(1, retries.write_queue_nums)),
            record.body,
            b"",
            record.flag,
            record.sys_flag,
            record.born_timestamp_ms,
            encode_host(*record.born_host),
            record.reconsume_times + 1,
        )
        level = request.delay_level
        times_max = retries_max(group, version, request.max_reconsume_times)
        if level < 0 or record.reconsume_times >= times_max:
            message.topic = (await self._topic(DLQ_PREFIX + name, 1)).topic_name
            message.queue_id = 0
            properties[DELAY] = "0"
            message.properties = encode_properties(properties)
        else:
            level = level or FIRST_RETRY_LEVEL + record.reconsume_times
            properties[DELAY] = str(level)
            store_delayed(message, properties, level, self._level_count)
        return message

    async def _topic(self, topic: str, queue_count: int) -> TopicConfig:
        config = await self._topics.ensure(topic, queue_count)
        if isinstance(config, str):
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"topic[{topic}] not exist: {config}")
        return config

    async def _record(self, request: SendBackRequest) -> MessageRecord:
        reason = ""
        try:
            _, record = await read_record(self._store, request.offset)
            if record.topic not in NO_SEND_TOPICS:  # nobody consumes those
                self._check_may_read(request, record)
                return record
        except DamagedBytes as damaged:
            reason = f": {damaged}"
        except (OffsetGone, RemoteProtocolError):
            pass
        raise RefusedError(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {request.offset}{reason}")

    def _check_may_read(self, request: SendBackRequest, record: MessageRecord) -> None:
        if not self._is_guarded or record.topic in (RETRY_PREFIX + request.group, request.origin_topic):
            return
        members = self._clients.consumer_group(request.group)
        if members is None or record.topic not in members.subscriptions:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"the message is of topic[{record.topic}], which group[{request.group}] has not subscribed to",
            )
