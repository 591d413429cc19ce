"""Requests about connected clients: the broker answers 203 GET_CONSUMER_CONNECTION_LIST, 204
GET_PRODUCER_CONNECTION_LIST, 328 GET_ALL_PRODUCER_INFO and 345 QUERY_SUBSCRIPTION_BY_CONSUMER itself, and relays 223
INVOKE_BROKER_TO_GET_CONSUMER_STATUS, 307 GET_CONSUMER_RUNNING_INFO and 309 CONSUME_MESSAGE_DIRECTLY to clients.

A relayed request goes over the client's own connection and may take seconds, so it runs in a task of `serve`, while the
requester's connection is still read. Signatures are not passed on to clients. Sources:
AdminBrokerProcessor.callConsumer, Broker2Client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import trio

from ha.acl import Right
from ha.broker.clients import BROADCASTING, Member, subscription_body
from ha.broker.core import BrokerCore
from ha.broker.message_queries import is_in_queue, read_record
from ha.broker.refused import check_right, refused_if_unreadable
from ha.errors import DamagedBytes, LocalProtocolError, OffsetGone, RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.acl import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE
from ha.protocol.admin_requests import (
    ClientConnection,
    ConsumerConnections,
    ProducerConnections,
    ProducerGroupRequest,
    SubscriptionRequest,
)
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.group_requests import (
    ConsumeDirectlyRequest,
    ConsumerGroupRequest,
    ConsumerStatusRequest,
    RunningInfoRequest,
)
from ha.protocol.headers import parse_header
from ha.protocol.message_id import decode_message_id
from ha.protocol.remoting import FRAME_SIZE_MAX, RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler

logger = logging.getLogger(__name__)

RELAY_COUNT_MAX = 64
"""Maximum number of requests waiting for clients."""
CLIENT_TIMEOUT_S = 10.0
"""Maximum time in seconds that GET_CONSUMER_RUNNING_INFO (307) and CONSUME_MESSAGE_DIRECTLY (309) wait for the
client."""
STATUS_TIMEOUT_S = 5.0
"""Maximum time in seconds that INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223) waits for each client."""
STATUS_SIZE_MAX = FRAME_SIZE_MAX
"""Maximum bytes of the answers of all clients to INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223), which become one
answer."""


Relay = Callable[[], Coroutine[Any, Any, RemotingCommand]]


class AdminClients:
    """Answers admin requests about connected clients. `serve` runs those that are relayed."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._clients = core.tables.clients
        self._options = core.options
        self._guard = core.guard
        self._wall_clock_ms = core.world.wall_clock_ms
        self._relay_count = 0
        self._send, self._receive = trio.open_memory_channel[tuple[RemotingConnection, RemotingCommand, Relay]](
            RELAY_COUNT_MAX
        )

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self.all_producers,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self.subscription,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
        }

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Relays requests until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            async for connection, command, relay in self._receive:
                nursery.start_soon(self._relay, connection, command, relay)

    async def _relay(self, connection: RemotingConnection, command: RemotingCommand, relay: Relay) -> None:
        try:
            connection.reply(command, await relay())
        finally:
            self._relay_count -= 1

    def _later(self, connection: RemotingConnection, command: RemotingCommand, relay: Relay) -> RemotingCommand | None:
        """Schedules `relay`, which answers later; returns None, or a refusal if RELAY_COUNT_MAX requests wait."""
        if self._relay_count >= RELAY_COUNT_MAX:
            return command.reply(ResponseCode.SYSTEM_BUSY, f"{RELAY_COUNT_MAX} requests wait for answers of clients")
        self._relay_count += 1
        self._send.send_nowait((connection, command, relay))
        return None

    # ---- requests answered from the registry

    async def consumers(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_CONSUMER_CONNECTION_LIST (203): answers with a consumer group's members and subscriptions;
        CONSUMER_NOT_ONLINE if it has no members."""
        name = parse_header(ConsumerGroupRequest, command.ext_fields).consumer_group
        group = self._clients.consumer_group(name)
        if group is None:
            return command.reply(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        body = ConsumerConnections(
            connection_set=[_connection(client, member) for client, member in group.members.items()],
            consume_from_where=group.consume_from_where,
            consume_type=group.consume_type,
            message_model=BROADCASTING if group.is_broadcasting else "CLUSTERING",
            subscription_table={topic: subscription_body(topic, each) for topic, each in group.subscriptions.items()},
        )
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(body))

    async def producers(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_PRODUCER_CONNECTION_LIST (204): answers with a producer group's members; SYSTEM_ERROR if it has none."""
        name = parse_header(ProducerGroupRequest, command.ext_fields).producer_group
        members = self._clients.producer_group(name)
        if not members:
            return command.reply(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        body = ProducerConnections(connection_set=[_connection(client, member) for client, member in members.items()])
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(body))

    async def all_producers(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_ALL_PRODUCER_INFO (328): answers with the members of all producer groups."""
        now, now_ms = trio.current_time(), self._wall_clock_ms()
        data = {
            group: [
                {
                    "clientId": member.client_id,
                    "language": member.language.name,
                    "lastUpdateTimestamp": now_ms - int((now - member.seen_at) * 1000),
                    "remoteIP": f"/{_address(client)}",
                    "version": member.version,
                }
                for client, member in self._clients.producer_group(group).items()
            ]
            for group in self._clients.producer_groups()
        }
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps({"data": data}))

    async def subscription(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_SUBSCRIPTION_BY_CONSUMER (345): answers with a consumer group's subscription to a topic; null if it has
        none or no members."""
        request = parse_header(SubscriptionRequest, command.ext_fields)
        group = self._clients.consumer_group(request.group)
        found = group.subscriptions.get(request.topic) if group is not None else None
        body = {
            "group": request.group,
            "subscriptionData": None if found is None else subscription_body(request.topic, found),
            "topic": request.topic,
        }
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(body))

    # ---- requests relayed to clients

    async def status(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        """INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223): asks the members of a group, or only the one that the request
        names, for their progress (GET_CONSUMER_STATUS_FROM_CLIENT, 221).

        The answer omits members that don't report their progress within STATUS_TIMEOUT_S. It is SYSTEM_ERROR if the
        group has no members, or if their answers exceed STATUS_SIZE_MAX.
        """
        request = parse_header(ConsumerStatusRequest, command.ext_fields)
        group = self._clients.consumer_group(request.group)
        if group is None:
            return command.reply(
                ResponseCode.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{request.group}]"
            )
        asked = [
            (client, member.client_id)
            for client, member in group.members.items()
            if not request.client_addr or request.client_addr == member.client_id
        ]
        question = RemotingCommand(
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, ext_fields={"topic": request.topic, "group": request.group}
        )

        async def relay() -> RemotingCommand:
            table: dict[str, Any] = {}
            size = 0

            async def ask(client: RemotingConnection, client_id: str) -> None:
                nonlocal size
                try:
                    answer = await _ask(client, question, STATUS_TIMEOUT_S)
                    size += len(answer.body)
                    if size > STATUS_SIZE_MAX:
                        return
                    body = java_json.loads(answer.body) if answer.code == ResponseCode.SUCCESS and answer.body else {}
                except (trio.TooSlowError, trio.BrokenResourceError, RemoteProtocolError) as error:
                    logger.warning("clients.status_failed client=%s reason=%r", client_id, str(error) or "too slow")
                    return
                if isinstance(body, dict) and isinstance(queues := body.get("messageQueueTable"), dict):
                    table[client_id] = queues

            async with trio.open_nursery() as nursery:
                for client, client_id in asked:
                    nursery.start_soon(ask, client, client_id)
            if size > STATUS_SIZE_MAX:
                reason = f"the members answer with more than {STATUS_SIZE_MAX} bytes; ask each alone"
                return command.reply(ResponseCode.SYSTEM_ERROR, reason)
            body = {"consumerTable": table, "messageQueueTable": {}}
            return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(body))

        return self._later(connection, command, relay)

    async def running_info(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        """GET_CONSUMER_RUNNING_INFO (307): asks a consumer for its running information.

        RocketMQ also relays the request's body, which tools leave empty and no client reads. halog does not, as a body
        could fill a whole frame.
        """
        request = parse_header(RunningInfoRequest, command.ext_fields)
        return self._ask_consumer(connection, command, request, _without_signature(command.ext_fields), b"")

    async def consume_directly(
        self, connection: RemotingConnection, command: RemotingCommand
    ) -> RemotingCommand | None:
        """CONSUME_MESSAGE_DIRECTLY (309): asks a consumer to process one message again, which the request names by its
        offset message id; SYSTEM_ERROR if there is no such message.

        Raises RefusedError if the requester may not read the message's topic, or if the disk can't read.
        """
        request = parse_header(ConsumeDirectlyRequest, command.ext_fields)
        _, _, offset = decode_message_id(request.msg_id or "")
        try:
            with refused_if_unreadable():
                raw, record = await read_record(self._store, offset)
            if not await is_in_queue(self._store, record):
                raise RemoteProtocolError("its topic has no such message")
        except (OffsetGone, DamagedBytes, RemoteProtocolError) as error:
            return command.reply(ResponseCode.SYSTEM_ERROR, f"can not find message {request.msg_id}: {error}")
        check_right(self._guard, connection, command, record.topic, Right.SUB | Right.GET)
        fields = _without_signature(command.ext_fields)
        fields["brokerName"] = self._options.broker_name
        topic, group = self._topics.get(request.topic or ""), self._groups.get(request.consumer_group)
        if topic is not None:
            fields["topicSysFlag"] = str(topic.topic_sys_flag)
        if group is not None:
            fields["groupSysFlag"] = str(group.group_sys_flag)
        return self._ask_consumer(connection, command, request, fields, raw)

    def _ask_consumer(
        self,
        connection: RemotingConnection,
        command: RemotingCommand,
        request: RunningInfoRequest | ConsumeDirectlyRequest,
        ext_fields: dict[str, str],
        body: bytes | memoryview,
    ) -> RemotingCommand | None:
        """Relays a request to one member of a group, and the member's answer to the requester."""
        name, client_id = request.consumer_group, request.client_id or ""
        client = self._clients.find_consumer(name, client_id)
        if client is None:
            return command.reply(ResponseCode.SYSTEM_ERROR, f"The Consumer <{name}> <{client_id}> not online")
        question = RemotingCommand(command.code, ext_fields=ext_fields, body=bytes(body))

        async def relay() -> RemotingCommand:
            try:
                answer = await _ask(client, question, CLIENT_TIMEOUT_S)
            except trio.TooSlowError:
                return command.reply(
                    ResponseCode.CONSUME_MSG_TIMEOUT,
                    f"consumer <{name}> <{client_id}> Timeout: no answer within {CLIENT_TIMEOUT_S:g} s",
                )
            except (trio.BrokenResourceError, LocalProtocolError) as error:
                return command.reply(
                    ResponseCode.SYSTEM_ERROR, f"invoke consumer <{name}> <{client_id}> Exception: {error}"
                )
            return command.reply(answer.code, answer.remark, dict(answer.ext_fields), bytes(answer.body))

        return self._later(connection, command, relay)


async def _ask(client: RemotingConnection, question: RemotingCommand, timeout_s: float) -> RemotingCommand:
    """Sends `question` to a client and returns its answer.

    Raises TooSlowError after `timeout_s`, without closing the connection, and the other errors of `client.invoke`.
    """
    with trio.fail_after(timeout_s):
        return await client.invoke(question, 2 * timeout_s)


def _without_signature(ext_fields: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in ext_fields.items() if name not in (ACCESS_KEY, SECURITY_TOKEN, SIGNATURE)}


def _address(connection: RemotingConnection) -> str:
    host, port = connection.peer
    return f"{host}:{port}"


def _connection(connection: RemotingConnection, member: Member) -> ClientConnection:
    return ClientConnection(
        client_addr=_address(connection),
        client_id=member.client_id,
        language=member.language.name,
        version=member.version,
    )
