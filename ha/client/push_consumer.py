"""The SDK's push consumer: a handler is called with the messages of a group's share of its topics.

Brokers know it as a member of its group, like any RocketMQ client: it takes part in the group's rebalancing, gives back
what its handler could not handle, and saves how far it is. Source: DefaultMQPushConsumerImpl.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path

import anyio
import msgspec

from ha.client.client import Client, ClientUser, NameServers
from ha.client.connection import Connection
from ha.client.consumer_requests import ConsumerRequests
from ha.client.feeding import Feeder
from ha.client.handling import Handler, Handling, HandlingStatistics
from ha.client.messages import MessageQueue, ReadFrom
from ha.client.options import ClientOptions
from ha.client.positions import BrokerPositions, FilePositions, Positions
from ha.client.process_queue import BudgetStatistics
from ha.client.push_options import ConsumeMode, MessageModel, PushOptions, StartFrom
from ha.client.queue_requests import QueueRequests
from ha.client.rebalancing import Rebalancer
from ha.client.returning import Returns
from ha.client.subscription import SQL92, Sql92, subscription_data
from ha.errors import BrokerError, RouteNotFound
from ha.protocol import java_json
from ha.protocol.acl import AclCredentials
from ha.protocol.bodies import ConsumerData, SubscriptionData
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.group_requests import CheckClientBody
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

_log = logging.getLogger(__name__)

_GOODBYE_S = 5.0
"""How long saving, unlocking and unregistering may take at the end, cancelled or not."""


class PushStatistics(msgspec.Struct, frozen=True):
    """What a push consumer holds now and has done so far."""

    queues: list[MessageQueue]
    held: BudgetStatistics
    handling: HandlingStatistics


class PushConsumer(ClientUser):
    """Calls `handler` with messages, for as long as its block lasts. An async context manager; works under asyncio and
    trio, against halog and RocketMQ.

        async def handle(message: ReceivedMessage) -> None:
            print(message.body)

        async with PushConsumer("127.0.0.1:9876", handle, group="billing", subscriptions={"invoices": "paid||open"}):
            await anyio.sleep_forever()

    A handler that returns has handled its message. One that raises, or takes longer than consume_timeout_s, has not:
    the message comes again, later and later, and at last becomes a dead letter (topic %DLQ%group). `RetryLater` chooses
    when. A message may come more than once in any case; handlers have to bear that.

    `subscriptions`: what is wanted of each topic: "*", tags joined with "||", or Sql92. All members of a group have to
    subscribe to the same. `start_from`: where the group begins with a queue it never consumed; a datetime means what
    was stored from then on. `position_file`: where a BROADCASTING consumer keeps how far it is; None: it begins anew
    each time. `name_servers`, `options` and `credentials` as in Producer.

    Leaving the block waits up to close_grace_s for handlers at work, saves how far they got, and tells the brokers.
    """

    def __init__(
        self,
        name_servers: Client | NameServers,
        handler: Handler,
        *,
        group: str,
        subscriptions: Mapping[str, str | Sql92],
        mode: ConsumeMode = ConsumeMode.CONCURRENTLY,
        model: MessageModel = MessageModel.CLUSTERING,
        start_from: StartFrom | datetime = StartFrom.LAST,
        position_file: Path | None = None,
        push: PushOptions | None = None,
        options: ClientOptions | None = None,
        credentials: AclCredentials | None = None,
    ) -> None:
        if not subscriptions:
            raise ValueError("subscriptions: name at least one topic")
        if not group:
            raise ValueError("group: a consumer is a member of one")
        if position_file is not None and model is not MessageModel.BROADCASTING:
            raise ValueError("position_file is for BROADCASTING; brokers keep the positions of CLUSTERING groups")
        super().__init__(name_servers, options, credentials)
        self._handler = handler
        self._group = group
        self._mode = mode
        self._model = model
        self._start_from = start_from
        self._position_file = position_file
        self._push = push or PushOptions()
        version = self._client.wall_clock_ms()
        self._subscriptions = {
            topic: subscription_data(topic, wanted, version) for topic, wanted in subscriptions.items()
        }
        if model is MessageModel.CLUSTERING:
            retry_topic = RETRY_PREFIX + group
            self._subscriptions[retry_topic] = subscription_data(retry_topic, "*", version)

    async def _begin(self, stack: AsyncExitStack) -> None:
        client = self._client
        await self._make_parts(client)
        stack.callback(self._handling.close)
        for topic in self._subscriptions:
            try:
                await client.routes.find(topic)
            except RouteNotFound:
                pass  # it may be created any time
        await self._check_conditions(client)
        await stack.enter_async_context(client.joined_consumer(self))
        await stack.enter_async_context(self._consuming())

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._group

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that are this consumer's now, sorted."""
        return sorted(self._rebalancer.held)

    def statistics(self) -> PushStatistics:
        """Return what this consumer holds and has done."""
        return PushStatistics(self.assigned, self._feeder.budget.statistics(), self._handling.statistics())

    def describe(self) -> ConsumerData:
        """What heartbeats tell; the client calls it."""
        start = self._start_from
        return ConsumerData(
            consume_from_where=start.value if isinstance(start, StartFrom) else "CONSUME_FROM_TIMESTAMP",
            consume_type="CONSUME_PASSIVELY",
            group_name=self._group,
            message_model=self._model.value,
            subscription_data_set=list(self._subscriptions.values()),
        )

    def notice_members_changed(self) -> None:
        """Members of the group came or went; the client calls it."""
        self._rebalancer.wake()

    async def answer(self, connection: Connection, command: RemotingCommand) -> RemotingCommand | None:
        """What a broker asks this consumer; the client calls it."""
        return await self._requests_of_brokers.answer(command)

    async def _make_parts(self, client: Client) -> None:
        requests = QueueRequests(client, self._group, ReadFrom.SUGGESTED)
        if self._model is MessageModel.BROADCASTING:
            file_positions = FilePositions(self._position_file)
            await file_positions.open()
            positions: Positions = file_positions
        else:
            positions = BrokerPositions(requests)
        needs_lock = self._mode is ConsumeMode.ORDERLY and self._model is MessageModel.CLUSTERING
        self._handling = Handling(
            self._handler,
            self._mode,
            self._model,
            self._push,
            Returns(client, self._group, self._push.reconsume_times_max),
            needs_lock=needs_lock,
            wall_clock_ms=client.wall_clock_ms,
        )
        self._feeder = Feeder(
            requests,
            positions,
            self._subscriptions,
            self._push,
            self._start_from,
            needs_lock=needs_lock,
            body_size_max=client.options.message_size_max,
            answer_size_max=client.options.frame_size_max,
            wall_clock_ms=client.wall_clock_ms,
            on_filled=self._handling.fill,
        )
        self._rebalancer = Rebalancer(
            client,
            self._group,
            self._subscriptions,
            self._model,
            positions,
            self._push,
            needs_lock=needs_lock,
            feed=self._feeder.feed,
        )
        self._requests_of_brokers = ConsumerRequests(
            self._rebalancer,
            self._handling,
            list(self._subscriptions.values()),
            self._mode,
            client.options.message_size_max,
            client.wall_clock_ms,
        )

    async def _check_conditions(self, client: Client) -> None:
        """BrokerError for an SQL92 condition that a broker doesn't understand: later, nobody would be told."""
        for topic, subscription in self._subscriptions.items():
            route = client.routes.known(topic)
            if subscription.expression_type != SQL92 or route is None:
                continue
            body = CheckClientBody(client_id=client.client_id, group=self._group, subscription_data=subscription)
            for name in route.addresses:
                address = route.address_of(name, route.broker_id_for(name, ReadFrom.SUGGESTED))
                command = RemotingCommand(RequestCode.CHECK_CLIENT_CONFIG, body=java_json.dumps(body))
                answer = await client.connections.invoke(address, command, client.options.request_timeout_s)
                if answer.code != ResponseCode.SUCCESS:
                    raise BrokerError(address, answer.code, answer.remark or "")

    @asynccontextmanager
    async def _consuming(self) -> AsyncIterator[None]:
        try:
            async with anyio.create_task_group() as handling:
                handling.start_soon(self._handling.serve)
                async with anyio.create_task_group() as rebalancing:
                    rebalancing.start_soon(self._rebalancer.serve)
                    try:
                        yield
                    finally:
                        rebalancing.cancel_scope.cancel()
                # No queue changes hands any more, and nothing is fetched; what handlers are at may end well.
                self._handling.finish()
                handling.cancel_scope.deadline = anyio.current_time() + self._push.close_grace_s
        finally:
            with anyio.move_on_after(_GOODBYE_S, shield=True):
                await self._rebalancer.release()

    @property
    def subscriptions(self) -> list[SubscriptionData]:
        """What brokers are told that this consumer wants, the group's retries included."""
        return list(self._subscriptions.values())
