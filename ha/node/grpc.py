"""The gRPC port of a node: the front (ha/proxy) over this node's own broker, without a socket in between.

The port serves only its broker's queues, and only while the broker is a master. Clients of a failover group have the
addresses of all members; a member that is not master closes their connections, so that they try the next address.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.lowlevel

from ha.broker.broker import Broker
from ha.broker.processor import Processor
from ha.grpc import GrpcServer
from ha.protocol import java_json
from ha.protocol.acl import ACCESS_KEY
from ha.protocol.bodies import ConsumerData, GroupConfig, HeartbeatData, SubscriptionData, TopicConfig
from ha.protocol.codes import RequestCode
from ha.protocol.properties import java_hash
from ha.protocol.remoting import RemotingCommand
from ha.proxy.access import GuardedCalls
from ha.proxy.brokers import BROKER_TIMEOUT_S, BrokerQueues, BrokerUnreachable, OnResponse, Route, accepted_types
from ha.proxy.front import Front
from ha.proxy.messages import SQL
from ha.proxy.names import resource_name
from ha.proxy.session import Session
from ha.remoting.local import LocalConnection

from . import options as make
from .node import Node
from .own_requests import ask_own_broker
from .platform import Port


class OwnBroker:
    """Implements `ha.proxy.brokers.Brokers` for the node's own broker. To the broker, each gRPC client is a connection,
    as over remoting."""

    def __init__(self, broker: Broker, processor: Processor) -> None:
        self._broker = broker
        self._processor = processor
        self._name = broker.options.broker_name
        self._routes: dict[str, tuple[TopicConfig, Route]] = {}
        self.front: Front | None = None
        self._own = LocalConnection(("127.0.0.1", 0), is_own=True, on_request=self._take_request)

    def known_route(self, topic: str) -> Route | None:
        config = self._broker.topics.get(topic)
        if config is None:
            self._routes.pop(topic, None)
            return None
        known = self._routes.get(topic)
        if known is not None and known[0] is config:
            return known[1]
        types = accepted_types((config.attributes or {}).get("message.type"))
        queues = BrokerQueues(self._name, config.perm, config.read_queue_nums, config.write_queue_nums)
        route = Route(topic, types, (queues,))
        self._routes[topic] = (config, route)
        return route

    async def route(self, topic: str) -> Route | None:
        return self.known_route(topic)

    async def group(self, group: str) -> GroupConfig | None:
        return await self._broker.groups.find_or_create(group)

    async def invoke(
        self, session: Session | None, broker_name: str, command: RemotingCommand, timeout_s: float = BROKER_TIMEOUT_S
    ) -> RemotingCommand:
        if broker_name != self._name:
            raise BrokerUnreachable(f"no broker {broker_name[:80]} here")
        connection = self._connection(session)
        if session is not None and session.access_key:
            command.ext_fields[ACCESS_KEY] = session.access_key
        try:
            answer = await ask_own_broker(self._processor, connection, command, timeout_s)
        except trio.TooSlowError:
            reason = f"broker {broker_name} has not answered code {command.code} within {timeout_s:g} s"
            raise BrokerUnreachable(reason, is_timeout=True) from None
        if answer is None:
            raise BrokerUnreachable("the client is gone")
        return answer

    def invoke_nowait(
        self, session: Session, broker_name: str, command: RemotingCommand, on_response: OnResponse
    ) -> bool:
        if broker_name != self._name:
            return False
        connection = self._connection(session)
        connection.expect(command, on_response)
        if self._processor.take_admitted(connection, [command]):
            connection.forget(command)
            return False
        return True

    async def heartbeat(self, session: Session) -> None:
        subscription = session.settings.subscription
        subscriptions = []
        for entry in subscription.subscriptions:
            expression, topic = entry.expression.expression or "*", resource_name(entry.topic)
            kind = "SQL92" if entry.expression.type == SQL else "TAG"
            tags = [tag for part in expression.split("||") if (tag := part.strip()) and kind == "TAG" and tag != "*"]
            subscriptions.append(
                SubscriptionData(
                    topic=topic,
                    sub_string=expression,
                    expression_type=kind,
                    tags_set=tags,
                    code_set=[java_hash(tag) for tag in tags],
                )
            )
        consumer = ConsumerData(
            group_name=resource_name(subscription.group),
            consume_type="CONSUME_POP",
            subscription_data_set=subscriptions,
        )
        body = java_json.dumps(HeartbeatData(client_id=session.client_id, consumer_data_set=[consumer]))
        await self.invoke(session, self._name, RemotingCommand(RequestCode.HEART_BEAT, body=body))

    def forget(self, session: Session) -> None:
        if session.local is not None:
            session.local.end()
            session.local = None

    def end(self) -> None:
        """Ends the front's own connection."""
        self._own.end()

    def _connection(self, session: Session | None) -> LocalConnection:
        if session is None:
            return self._own
        connection = session.local
        if not isinstance(connection, LocalConnection):
            outside = session.connection
            connection = session.local = LocalConnection(outside.peer, is_encrypted=outside.is_encrypted)
        return connection

    def _take_request(self, command: RemotingCommand) -> None:
        if command.code == RequestCode.CHECK_TRANSACTION_STATE and self.front is not None:
            self.front.transactions.ask(self._name, command)


@asynccontextmanager
async def open_grpc(node: Node, port: Port) -> AsyncIterator[GrpcServer]:
    """Serves the gRPC port during the block. The caller must call `GrpcServer.stop` before the block ends."""
    broker = node.broker
    backend = OwnBroker(broker, broker.processor)
    front = backend.front = Front(
        backend,
        make.front_options(node.config),
        client_id=f"front@{node.remoting_address}@{node.run_id:x}",
        wall_clock_ms=node.platform.wall_clock_ms,
        access=None if node.acl_guard is None else GuardedCalls(node.acl_guard),
    )
    server = GrpcServer(
        front,
        make.grpc_options(node.config, node.platform.open_files_max),
        tls=node.tls.grpc_port,
        poller=node.poller,
        is_serving=lambda: not broker.standing.is_slave,
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(front.serve_clients)
            await nursery.start(server.serve, port.listen())
            yield server
            with trio.move_on_after(STOP_GRACE_S, shield=True):
                await broker.sender.wait_all_answered()
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    finally:
        backend.end()


STOP_GRACE_S = 1.0
"""Maximum time to wait for sends in flight at the end, in seconds."""
