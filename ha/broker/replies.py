"""Replies of consumers to requests of producers: 324 SEND_REPLY_MESSAGE and 325 SEND_REPLY_MESSAGE_V2.

A requesting producer (Java's `request`) sets the property REPLY_TO_CLIENT of the message to its client id. The consumer
sends its reply, with the same property, to the broker of the message. The broker pushes the reply to that client
(PUSH_REPLY_MESSAGE_TO_CLIENT, 326) over the connection of the client's heartbeats, and tells the consumer whether the
client accepted it. The reply is also stored in its topic (the cluster's name and _REPLY_TOPIC), unless
storeReplyMessageEnable is false. Tasks of `serve` wait for the client, so that the consumer's connection is read
meanwhile. Sources: ReplyMessageProcessor, Broker2Client.callClient.
"""

from __future__ import annotations

import logging

import trio

from ha.broker.core import BrokerCore
from ha.broker.put_request import PutRequest, message_waits
from ha.broker.queue_locks import QueueLocks
from ha.broker.refused import REJECT_REMARK, RefusedError, check_stores
from ha.broker.send_message import MessageMaker, check_properties, encode_peer
from ha.broker.stored_properties import answered_properties, join
from ha.errors import LocalProtocolError
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import SendMessageRequest, SendMessageResponse, parse_header
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import decode_properties, encode_properties
from ha.protocol.record import Message, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler

logger = logging.getLogger(__name__)

REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
REPLY_CODES = frozenset({RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2})
CLIENT_TIMEOUT_S = 10.0


class ReplyProcessor:
    """Handles replies: `handle` queues a reply, and a task of `serve` pushes it to the producer, stores it, and
    responds to the consumer."""

    def __init__(self, core: BrokerCore, queue_locks: QueueLocks) -> None:
        options = core.options
        self._put = core.puts
        self._maker = MessageMaker(core, queue_locks)
        self._clients = core.tables.clients
        self._options = options
        self._standing = core.standing
        self._wall_clock_ms = core.world.wall_clock_ms
        self._answered_properties = answered_properties(options)
        self._reply_count = self._reply_bytes = 0
        self._send, self._receive = trio.open_memory_channel[
            tuple[RemotingConnection, RemotingCommand, SendMessageRequest, int]
        ](options.replies_in_flight_max)

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return dict.fromkeys(REPLY_CODES, self.handle)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pushes replies until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            async for reply in self._receive:
                nursery.start_soon(self._hand_over, *reply)

    async def handle(self, connection: RemotingConnection, command: RemotingCommand) -> None:
        """SEND_REPLY_MESSAGE (324) and SEND_REPLY_MESSAGE_V2 (325): accepts a reply, which `serve` answers later.
        Raises RefusedError and RemoteProtocolError."""
        options = self._options
        check_stores(self._standing)
        request = parse_header(SendMessageRequest, command.ext_fields)
        queue_id = self._maker.queue_for(request, await self._maker.topic_for(request))
        self._maker.check_size(command.body)
        check_properties(request.properties)
        size_after = self._reply_bytes + len(command.body) + len(request.properties)
        if self._reply_count >= options.replies_in_flight_max or size_after > options.reply_bytes_max:
            waiting = f"{self._reply_count} replies of {self._reply_bytes} bytes wait"
            raise RefusedError(ResponseCode.SYSTEM_BUSY, f"{REJECT_REMARK} ({waiting})")
        self._reply_count += 1
        self._reply_bytes = size_after
        self._send.send_nowait((connection, command, request, queue_id))

    async def _hand_over(
        self, connection: RemotingConnection, command: RemotingCommand, request: SendMessageRequest, queue_id: int
    ) -> None:
        try:
            fault = await self._push(connection, command, request)
            header = SendMessageResponse(msg_id="0", queue_id=queue_id, queue_offset=0)
            if self._options.store_reply_message:
                stored = await self._store(connection, command, request, queue_id)
                header = stored if stored is not None else header
        finally:
            self._reply_count -= 1
            self._reply_bytes -= len(command.body) + len(request.properties)
        if fault:
            logger.warning("reply.push_failed topic=%s reason=%r", request.topic, fault)
            connection.reply(command, command.reply(ResponseCode.SYSTEM_ERROR, fault, dict(self._answered_properties)))
        else:
            connection.reply(
                command, command.reply(ResponseCode.SUCCESS, None, header.to_ext_fields() | self._answered_properties)
            )

    async def _push(self, connection: RemotingConnection, command: RemotingCommand, request: SendMessageRequest) -> str:
        """Pushes the reply to the client that waits for it; returns why that failed, or ""."""
        properties = decode_properties(request.properties.encode("utf-8", "replace")) | self._answered_properties
        client_id = properties.get(REPLY_TO_CLIENT)
        if client_id is None:
            return f"reply message properties[{REPLY_TO_CLIENT}] is null"
        client = self._clients.find_producer(client_id)
        if client is None:
            return f"push reply message fail, channel of <{client_id[:255]}> not found."
        now_ms = self._wall_clock_ms()
        properties[PUSH_REPLY_TIME] = str(now_ms)
        fields = {
            "bornHost": "{}:{}".format(*connection.peer),
            "storeHost": f"{self._options.host}:{self._options.port}",
            "storeTimestamp": str(now_ms),
            "producerGroup": request.producer_group,
            "topic": request.topic,
            "defaultTopic": request.default_topic,
            "defaultTopicQueueNums": str(request.default_topic_queue_nums),
            "queueId": str(request.queue_id),
            "sysFlag": str(request.sys_flag),
            "bornTimestamp": str(request.born_timestamp),
            "flag": str(request.flag),
            "reconsumeTimes": str(request.reconsume_times),
            "unitMode": "true" if request.unit_mode else "false",
        }
        try:
            fields["properties"] = encode_properties(properties).decode("utf-8", "replace")
            question = RemotingCommand(
                RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, ext_fields=fields, body=bytes(command.body)
            )
            # Shorter than the timeout of `invoke`, which closes the connection of a client that has sent nothing.
            with trio.fail_after(CLIENT_TIMEOUT_S):
                answer = await client.invoke(question, 2 * CLIENT_TIMEOUT_S)
        except (trio.TooSlowError, trio.BrokenResourceError, LocalProtocolError) as error:
            return f"push reply message to {client_id[:255]}fail. {error}".rstrip()
        if answer.code != ResponseCode.SUCCESS:
            return f"push reply message to {client_id[:255]}fail. {answer.remark or ''}".rstrip()
        return ""

    async def _store(
        self, connection: RemotingConnection, command: RemotingCommand, request: SendMessageRequest, queue_id: int
    ) -> SendMessageResponse | None:
        """Stores the reply and returns its position; None if it can't be stored, which does not fail the request."""
        properties = join(request.properties.encode("utf-8", "replace"), encode_properties(self._answered_properties))
        message = Message(
            request.topic,
            queue_id,
            command.body,
            properties,
            request.flag,
            0,
            request.born_timestamp,
            encode_peer(connection.peer),
            request.reconsume_times,
        )
        put = PutRequest(messages=(message,), waits=message_waits(properties))
        await self._put.settle([put])
        if not put.status.is_stored:
            logger.warning(
                "reply.store_failed topic=%s status=%s reason=%r", request.topic, put.status.name, put.remark
            )
            return None
        [result] = put.results
        host = encode_host(self._options.host, self._options.port)
        return SendMessageResponse(
            msg_id=encode_message_id(host, result.physical_offset), queue_id=queue_id, queue_offset=result.queue_offset
        )
