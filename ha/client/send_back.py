"""Sends failed messages back: the broker redelivers them later or makes them dead letters.

The broker that stores the message is asked first, with CONSUMER_SEND_MSG_BACK (36). If that fails, and for dead letters
of ORDERLY consumers, a copy is sent to the group's retry topic on any broker, which makes it a dead letter if its
`reconsume_times` exceed the maximum. Sources: DefaultMQPushConsumerImpl (sendMessageBack),
ConsumeMessageOrderlyService.
"""

from __future__ import annotations

import logging

from ha.client.client import Client
from ha.client.messages import Message, ReceivedMessage
from ha.client.sender import Sender
from ha.errors import ClientError, ConnectionFailed, HalogError, RemoteProtocolError
from ha.protocol import properties as names
from ha.protocol.codes import RequestCode
from ha.protocol.compression import Compression, flags_of
from ha.protocol.group_requests import SendBackRequest
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

_log = logging.getLogger(__name__)

_INNER_GROUP = "CLIENT_INNER_PRODUCER"
_RECONSUME_TIMES_MAX = 16
"""Maximum redeliveries if the consumer sets none; the default of RocketMQ's clients."""
_FIRST_DELAY_LEVEL = 3
"""Delay level of the copy of a message that was delivered once; one more for each further delivery."""


class SendBack:
    """Sends back failed messages of one consumer group."""

    def __init__(self, client: Client, group: str, reconsume_times_max: int | None) -> None:
        self._client = client
        self._group = group
        self._reconsume_times_max = reconsume_times_max
        self._sender = Sender(client, _INNER_GROUP)

    async def redeliver(self, message: ReceivedMessage, delay_level: int) -> bool:
        """Requests redelivery after the delay of `delay_level`. 0: the broker chooses the delay by the number of
        deliveries; -1: no redelivery, the message becomes a dead letter. If that fails, sends a copy, whose delay
        always depends on the number of deliveries. Returns False if this failed, too; failures are logged."""
        try:
            await self._ask(message, delay_level)
            return True
        except (ClientError, RemoteProtocolError) as error:
            _log.warning("client.send_back_failed message=%s reason=%r", message.message_id, str(error))
        times_max = _RECONSUME_TIMES_MAX if self._reconsume_times_max is None else self._reconsume_times_max
        times = message.reconsume_times + 1
        return await self._send(message, times if delay_level >= 0 else max(times, times_max + 1), times_max)

    async def make_dead_letter(self, message: ReceivedMessage) -> bool:
        """Makes `message` a dead letter. Returns False if this failed, which is logged."""
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
            await self._client.connections.request(address, command)
        except ConnectionFailed:
            self._client.routes.mark_stale(queue.topic)
            raise

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
            _log.error("client.retry_send_failed message=%s reason=%r", message.message_id, str(error))
            return False
        return True
