"""Giving messages back that could not be handled: the broker delivers them again later, or keeps them as dead letters.

The broker that has the message is asked to do it (36). If that fails, the message is sent anew to the group's retry
topic, wherever that can be. Sources: DefaultMQPushConsumerImpl (sendMessageBack), ConsumeMessageOrderlyService.
"""

from __future__ import annotations

import logging

from ha.client.client import Client
from ha.client.messages import Message, ReceivedMessage
from ha.client.sender import Sender
from ha.errors import BrokerError, ClientError, ConnectionFailed, HalogError
from ha.protocol import properties as names
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.compression import Compression, flags_of
from ha.protocol.group_requests import SendBackRequest
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

_log = logging.getLogger(__name__)

_INNER_GROUP = "CLIENT_INNER_PRODUCER"
_RECONSUME_TIMES_MAX = 16
"""What RocketMQ's clients say where nothing was configured."""
_FIRST_DELAY_LEVEL = 3


class Returns:
    """Gives messages back for one group."""

    def __init__(self, client: Client, group: str, reconsume_times_max: int | None) -> None:
        self._client = client
        self._group = group
        self._reconsume_times_max = reconsume_times_max
        self._sender = Sender(client, _INNER_GROUP)

    async def give_back(self, message: ReceivedMessage, delay_level: int) -> bool:
        """Has `message` delivered again: after `delay_level`, 0 for what the broker finds right for the number of
        deliveries, -1 for never (a dead letter). False if nobody could be told."""
        try:
            await self._ask(message, delay_level)
            return True
        except ClientError as error:
            _log.warning("give_back_failed message=%s reason=%r", message.message_id, str(error))
        times_max = _RECONSUME_TIMES_MAX if self._reconsume_times_max is None else self._reconsume_times_max
        times = message.reconsume_times + 1
        return await self._send(message, times if delay_level >= 0 else max(times, times_max + 1), times_max)

    async def give_up(self, message: ReceivedMessage) -> bool:
        """Makes `message`, which was handled often enough, a dead letter. False if nobody could be told."""
        times_max = self._reconsume_times_max or 0
        return await self._send(message, max(message.reconsume_times, times_max) + 1, times_max)

    async def _ask(self, message: ReceivedMessage, delay_level: int) -> None:
        queue = message.queue
        times_max = self._reconsume_times_max
        header = SendBackRequest(
            offset=message.physical_offset,
            group=self._group,
            delay_level=delay_level,
            origin_msg_id=message.message_id,
            origin_topic=message.topic,
            max_reconsume_times=_RECONSUME_TIMES_MAX if times_max is None else times_max,
            broker_name=queue.broker_name,
        )
        command = RemotingCommand(RequestCode.CONSUMER_SEND_MSG_BACK, ext_fields=header.to_ext_fields())
        route = await self._client.routes.find(queue.topic)
        address = route.master_of(queue.broker_name)
        try:
            answer = await self._client.connections.invoke(address, command, self._client.options.request_timeout_s)
        except ConnectionFailed:
            self._client.routes.distrust(queue.topic)
            raise
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(address, answer.code, answer.remark or "")

    async def _send(self, message: ReceivedMessage, reconsume_times: int, times_max: int) -> bool:
        known = dict(message.properties)
        known.pop(names.TRANSACTION_PREPARED, None)
        known.setdefault(names.ORIGIN_MESSAGE_ID, message.message_id)
        known[names.RETRY_TOPIC] = message.topic
        known[names.RECONSUME_TIME] = str(reconsume_times)
        known[names.MAX_RECONSUME_TIMES] = str(times_max)
        known[names.DELAY] = str(_FIRST_DELAY_LEVEL + message.reconsume_times)
        again = Message(RETRY_PREFIX + self._group, message.stored_body, properties=known, flag=message.flag)
        sys_flag = 0 if message.compression is None else flags_of(Compression(message.compression))
        try:
            await self._sender.send(await self._sender.prepare(again, sys_flag=sys_flag), None, None)
        except (HalogError, ValueError) as error:
            _log.error("give_back_failed_again message=%s reason=%r", message.message_id, str(error))
            return False
        return True
