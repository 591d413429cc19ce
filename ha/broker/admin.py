"""What operators ask of a broker, put together: which request code goes to which of the admin modules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from ha.broker.admin_clients import AdminClients
from ha.broker.admin_groups import AdminGroups
from ha.broker.admin_store import AdminStore
from ha.broker.admin_topics import AdminTopics
from ha.broker.clients import ClientRegistry
from ha.broker.consume_statistics import ConsumeStatistics
from ha.broker.groups import SubscriptionGroups
from ha.broker.message_queries import MessageQueries
from ha.broker.offset_resets import OffsetResets
from ha.broker.offsets import ConsumerOffsetTable
from ha.broker.options import BrokerOptions
from ha.broker.pull import PullProcessor
from ha.broker.put import PutService
from ha.broker.runtime_info import RuntimeInfo
from ha.broker.throughput import Throughput
from ha.broker.topics import Topics
from ha.protocol.codes import RequestCode
from ha.remoting import RequestHandler
from ha.store.files import Disk

if TYPE_CHECKING:
    from ha.store.message_store import MessageStore


class Admin:
    """The admin side of a broker. `handlers` by request code; `serve` runs its services."""

    def __init__(
        self,
        store: MessageStore,
        topics: Topics,
        groups: SubscriptionGroups,
        offsets: ConsumerOffsetTable,
        clients: ClientRegistry,
        put_service: PutService,
        puller: PullProcessor,
        options: BrokerOptions,
        *,
        disk: Disk,
        run_blocking: Callable[..., Awaitable[Any]],
        wall_clock_ms: Callable[[], int],
        sends_in_flight: Callable[[], int],
    ) -> None:
        self.topics = AdminTopics(store, topics, offsets, options)
        self.clients = AdminClients(store, topics, groups, clients, options, wall_clock_ms=wall_clock_ms)
        self.throughput = Throughput(lambda: put_service.stored_count, puller.reads, wall_clock_ms=wall_clock_ms)
        self.info = RuntimeInfo(
            store,
            topics,
            self.throughput,
            options,
            disk=disk,
            run_blocking=run_blocking,
            wall_clock_ms=wall_clock_ms,
            sends_in_flight=sends_in_flight,
        )
        queries = MessageQueries(store)
        groups_admin = AdminGroups(topics, groups, offsets, clients, options)
        resets = OffsetResets(store, topics, groups, offsets, clients, puller.holds, options)
        figures = ConsumeStatistics(
            store, topics, groups, offsets, clients, puller.reads, options, wall_clock_ms=wall_clock_ms
        )
        cleaning = AdminStore(store, topics, options)
        self.handlers: dict[int, RequestHandler] = {
            RequestCode.QUERY_MESSAGE: queries.query,
            RequestCode.VIEW_MESSAGE_BY_ID: queries.view,
            RequestCode.UPDATE_AND_CREATE_TOPIC: self.topics.update,
            RequestCode.DELETE_TOPIC_IN_BROKER: self.topics.delete,
            RequestCode.GET_TOPIC_CONFIG: self.topics.show,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.topics.system_topics,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: groups_admin.update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: groups_admin.update_list,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: groups_admin.delete,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: groups_admin.show,
            RequestCode.CLONE_GROUP_OFFSET: groups_admin.clone_offsets,
            RequestCode.UPDATE_BROKER_CONFIG: self.info.configure,
            RequestCode.GET_BROKER_CONFIG: self.info.configuration,
            RequestCode.GET_BROKER_RUNTIME_INFO: self.info.runtime,
            RequestCode.EXCHANGE_BROKER_HA_INFO: self.info.exchange_addresses,
            RequestCode.GET_TOPIC_STATS_INFO: figures.topic_stats,
            RequestCode.GET_CONSUME_STATS: figures.consume_stats,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: figures.groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: figures.topics_of_group,
            RequestCode.QUERY_CONSUME_TIME_SPAN: figures.time_span,
            RequestCode.QUERY_CORRECTION_OFFSET: figures.correction,
            RequestCode.GET_BROKER_CONSUME_STATS: figures.all_consume_stats,
            RequestCode.VIEW_BROKER_STATS_DATA: figures.stats,
            RequestCode.QUERY_CONSUME_QUEUE: figures.queue_entries,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.clients.consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.clients.producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self.clients.all_producers,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self.clients.subscription,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.clients.status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.clients.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.clients.consume_directly,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: resets.reset,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: cleaning.delete_expired,
            RequestCode.DELETE_EXPIRED_COMMITLOG: cleaning.delete_expired,
            RequestCode.CLEAN_UNUSED_TOPIC: cleaning.clear_unused,
        }

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sample the counters and ask clients what is to be asked, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.throughput.serve)
            await nursery.start(self.clients.serve)
            task_status.started()
