"""The SDK's push consumer: calls a handler with the messages of its share of the group's queues.

Like any RocketMQ client it is a member of its group, takes part in rebalancing, sends failed messages back for
redelivery, and saves its positions. Source: DefaultMQPushConsumerImpl.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path

import anyio
import msgspec

from ha.client.callbacks import check_async
from ha.client.client import NOT_OPEN, Client, ClientUser, NameServers
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
from ha.client.saving import Saving
from ha.client.send_back import SendBack
from ha.client.subscription import SQL92, Sql92, checked_subscriptions, subscription_data
from ha.errors import RouteNotFound
from ha.protocol import java_json
from ha.protocol.acl import AclCredentials
from ha.protocol.bodies import ConsumerData, SubscriptionData
from ha.protocol.codes import RequestCode
from ha.protocol.group_requests import CheckClientBody
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

_log = logging.getLogger(__name__)


class PushStatistics(msgspec.Struct, frozen=True):
    """The assigned queues, held messages and handled messages of a push consumer."""

    queues: list[MessageQueue]
    held: BudgetStatistics
    handling: HandlingStatistics


class PushConsumer(ClientUser):
    """Calls `handler` with messages while its block runs. An async context manager; works under asyncio and trio, with
    halog and RocketMQ.

        async def handle(message: ReceivedMessage) -> None:
            print(message.body)

        async with PushConsumer("127.0.0.1:9876", handle, group="billing", subscriptions={"invoices": "paid||open"}):
            await anyio.sleep_forever()

    A message is handled when the handler returns. If it raises, or takes longer than consume_timeout_s, the message has
    failed: it is redelivered with a growing delay and finally becomes a dead letter (topic %DLQ%group). Raise
    `RetryLater` to choose the delay. With ORDERLY, a failed message is retried after suspend_s, before later messages
    of its queue. For BROADCASTING, see `MessageModel`. Delivery is at least once: handlers must tolerate repeated
    messages.

    Raises ValueError for invalid arguments, such as a `position_file` without BROADCASTING, and TypeError if `handler`
    is a plain function: it must be async. For other callables, this is known only at the first call: the consumer then
    ends, and its block raises an ExceptionGroup that contains the TypeError.

    `subscriptions`: for each topic "*", tags joined with "||", or Sql92. All members of a group must have the same
    subscriptions. `start_from`: where the group starts in a queue it has never consumed; a datetime means messages
    stored at that time or later. `position_file`: where a BROADCASTING consumer keeps its positions; None: it starts
    at `start_from` each time. `name_servers`, `options` and `credentials` are those of Producer.

    Entering the block raises BrokerError for an invalid Sql92; ConnectionFailed or RequestTimedOut if a broker can't be
    asked to check it; NameServersUnreachable, BrokerError or RemoteProtocolError if a route can't be looked up;
    ValueError if a shared client already has a consumer of the same group, or if TLS files can't be used; RuntimeError
    if a shared client is not open; and OSError or RemoteProtocolError for an unusable `position_file`. A missing topic
    is not an error.

    Leaving the block waits up to close_grace_s for running handlers, saves positions, and unregisters from the brokers.
    It waits up to request_timeout_s for a broker that does not answer, and logs the positions that it could not save.
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
        if position_file is not None and model is not MessageModel.BROADCASTING:
            raise ValueError("position_file is for BROADCASTING; brokers keep the positions of CLUSTERING groups")
        check_async(handler, "the handler")
        super().__init__(name_servers, options, credentials)
        self._handler = handler
        self._group = group
        self._mode = mode
        self._model = model
        self._start_from = start_from
        self._position_file = position_file
        self._push = push or PushOptions()
        self._has_parts = False
        version = self._client.wall_clock_ms()
        self._subscriptions = checked_subscriptions(group, subscriptions, version)
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
                pass  # it may be created later
        await self._check_conditions(client)
        await stack.enter_async_context(client.joined_consumer(self))
        await stack.enter_async_context(self._consuming())

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._group

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues assigned to this consumer, sorted. Raises RuntimeError before it is opened."""
        if not self._has_parts:
            raise RuntimeError(NOT_OPEN)
        return sorted(self._rebalancer.held)

    def statistics(self) -> PushStatistics:
        """Returns a snapshot of the assigned queues, and of the held and handled messages. Raises RuntimeError before
        the consumer is opened."""
        return PushStatistics(self.assigned, self._feeder.budget.statistics(), self._handling.statistics())

    def describe(self) -> ConsumerData:
        """Returns the heartbeat data; called by the client."""
        start = self._start_from
        return ConsumerData(
            consume_from_where=start.value if isinstance(start, StartFrom) else "CONSUME_FROM_TIMESTAMP",
            consume_type="CONSUME_PASSIVELY",
            group_name=self._group,
            message_model=self._model.value,
            subscription_data_set=list(self._subscriptions.values()),
        )

    def on_members_changed(self) -> None:
        """Starts a rebalance, because members joined or left the group; called by the client."""
        self._rebalancer.wake()

    async def answer(self, connection: Connection, command: RemotingCommand) -> RemotingCommand | None:
        """Handles a broker's request, and returns the response; None for no response. Called by the client."""
        return await self._requests_of_brokers.answer(command)

    async def _make_parts(self, client: Client) -> None:
        requests = QueueRequests(client, self._group, ReadFrom.SUGGESTED)
        if self._model is MessageModel.BROADCASTING:
            file_positions = FilePositions(self._position_file)
            await file_positions.open()
            positions: Positions = file_positions
        else:
            positions = BrokerPositions(requests, client.connections)
        needs_lock = self._mode is ConsumeMode.ORDERLY and self._model is MessageModel.CLUSTERING
        self._handling = Handling(
            self._handler,
            self._mode,
            self._model,
            self._push,
            SendBack(client, self._group, self._push.reconsume_times_max),
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
        self._saving = Saving(
            self._group,
            positions,
            interval_s=self._push.commit_interval_s,
            silence_s=client.options.request_timeout_s,
        )
        self._rebalancer = Rebalancer(
            client,
            self._group,
            self._subscriptions,
            self._model,
            self._saving,
            self._push,
            needs_lock=needs_lock,
            feed=self._feeder.feed,
        )
        self._requests_of_brokers = ConsumerRequests(
            self._rebalancer,
            self._saving,
            self._handling,
            list(self._subscriptions.values()),
            self._mode,
            client.options.message_size_max,
            client.wall_clock_ms,
        )
        self._has_parts = True

    async def _check_conditions(self, client: Client) -> None:
        """Makes brokers check the SQL92 conditions, because an invalid one would silently match nothing. Raises
        BrokerError for an invalid condition, ConnectionFailed or RequestTimedOut if a broker does not answer."""
        for topic, subscription in self._subscriptions.items():
            route = client.routes.known(topic)
            if subscription.expression_type != SQL92 or route is None:
                continue
            body = CheckClientBody(client_id=client.client_id, group=self._group, subscription_data=subscription)
            for name in route.addresses:
                address = route.address_of(name, route.broker_id_for(name, ReadFrom.SUGGESTED))
                command = RemotingCommand(RequestCode.CHECK_CLIENT_CONFIG, body=java_json.dumps(body))
                await client.connections.request(address, command)

    @asynccontextmanager
    async def _consuming(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as saving:
            self._saving.start(saving, self._rebalancer.held)
            try:
                async with anyio.create_task_group() as handling:
                    handling.start_soon(self._handling.serve)
                    async with anyio.create_task_group() as rebalancing:
                        rebalancing.start_soon(self._rebalancer.serve)
                        try:
                            yield
                        finally:
                            rebalancing.cancel_scope.cancel()
                    # Rebalancing and fetching have stopped; running handlers have close_grace_s to end.
                    self._handling.finish()
                    handling.cancel_scope.deadline = anyio.current_time() + self._push.close_grace_s
            finally:
                with anyio.CancelScope(shield=True):  # each step has its own time limit
                    await self._rebalancer.release()
                saving.cancel_scope.cancel()

    @property
    def subscriptions(self) -> list[SubscriptionData]:
        """The subscriptions as sent to brokers, including the one to the group's retry topic, unless the consumer is
        BROADCASTING."""
        return list(self._subscriptions.values())
