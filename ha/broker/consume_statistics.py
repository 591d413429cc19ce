"""Requests for statistics of topics, queues and consumer groups. `ConsumeStatistics.handlers` lists them.

Offsets are queue offsets; times are in ms. Statistics are computed for each request from queues, committed offsets and
records; other tasks run after every QUEUES_PER_SLICE queues. Source: AdminBrokerProcessor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import trio

from ha.broker.clients import subscription_body
from ha.broker.core import BrokerCore
from ha.broker.queue_times import bounds, known_store_time_ms, offset_at
from ha.broker.refused import refused_if_unreadable
from ha.protocol import java_json
from ha.protocol.admin_requests import (
    BrokerStatsRequest,
    ConsumeStatsRequest,
    CorrectionRequest,
    GroupList,
    GroupRequest,
    QueryQueueRequest,
    QueueConsumption,
    QueueStats,
    StatsRequest,
    TopicRequest,
)
from ha.protocol.bodies import TopicConfig
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.group_requests import QueueObject, queue_key
from ha.protocol.headers import parse_header
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX
from ha.remoting import RemotingConnection, RequestHandler
from ha.store.consume_queue import ConsumeQueue

QUEUES_PER_SLICE = 64
"""Maximum number of queues visited before other tasks run."""
ENTRY_COUNT_MAX = 8192
"""Maximum number of queue entries in an answer to QUERY_CONSUME_QUEUE (321)."""
MINUTE_S = 60
QUEUE_LIST_MAX = 50_000
"""Maximum number of queues in an answer to GET_BROKER_CONSUME_STATS (317), of all groups together, or to
GET_CONSUME_STATS (208), of all topics together; a single topic in the latter may have more."""


class ConsumeStatistics:
    """Answers requests for statistics of topics and consumer groups."""

    def __init__(self, core: BrokerCore, *, in_flight_count: Callable[[str, str, int], int]) -> None:
        """`in_flight_count`: see `PopService.in_flight_count`."""
        tables = core.tables
        self._store = core.store
        self._topics = tables.topics
        self._groups = tables.groups
        self._offsets = tables.offsets
        self._clients = tables.clients
        self._reads = tables.reads
        self._options = core.options
        self._wall_clock_ms = core.world.wall_clock_ms
        self._in_flight_count = in_flight_count

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.GET_TOPIC_STATS_INFO: self.topic_stats,
            RequestCode.GET_CONSUME_STATS: self.consume_stats,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self.time_span,
            RequestCode.QUERY_CORRECTION_OFFSET: self.correction,
            RequestCode.GET_BROKER_CONSUME_STATS: self.all_consume_stats,
            RequestCode.VIEW_BROKER_STATS_DATA: self.stats,
            RequestCode.QUERY_CONSUME_QUEUE: self.queue_entries,
        }

    # ---- topics

    async def topic_stats(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_TOPIC_STATS_INFO (202): answers with the bounds of each queue, the store time of its last message, and
        the topic's put rate in the last minute (messages per second); TOPIC_NOT_EXIST if there is no such topic."""
        topic = parse_header(TopicRequest, command.ext_fields).topic
        config = self._topics.get_readable(topic)
        if config is None:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        table: dict[QueueObject, QueueStats] = {}
        for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
            await self._yield_sometimes(queue_id)
            queue = self._queue(topic, queue_id)
            begin, end = bounds(queue)
            begin = max(0, begin)
            last_ms = await known_store_time_ms(self._store, queue, end - 1) if end > begin else 0
            table[self._key(topic, queue_id)] = QueueStats(
                last_update_timestamp=max(0, last_ms), max_offset=end, min_offset=begin
            )
        per_s = await self._put_count(config, MINUTE_S) / MINUTE_S
        return _body(command, {"offsetTable": table, "topicPutTps": per_s})

    async def _put_count(self, config: TopicConfig, period_s: int) -> int:
        """Returns the number of messages in a topic's queues that were stored in the last `period_s` seconds."""
        since_ms = self._wall_clock_ms() - period_s * 1000
        count = 0
        for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
            await self._yield_sometimes(queue_id)
            queue = self._queue(config.topic_name, queue_id)
            if queue is None or queue.max_offset <= queue.min_offset:
                continue
            if await known_store_time_ms(self._store, queue, queue.max_offset - 1) >= since_ms:
                count += queue.max_offset - await offset_at(self._store, queue, since_ms)
        return count

    async def stats(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """VIEW_BROKER_STATS_DATA (315): answers with the number of messages stored in a topic in the last minute, hour
        and day (TOPIC_PUT_NUMS), or received by a group in the last minute (GROUP_GET_NUMS, key topic@group).

        Requests for RocketMQ's other statistics are answered SYSTEM_ERROR, as if they did not exist.
        """
        request = parse_header(StatsRequest, command.ext_fields)
        key = request.stats_key
        periods = {"statsMinute": MINUTE_S, "statsHour": 60 * MINUTE_S, "statsDay": 24 * 60 * MINUTE_S}
        config = self._topics.get_readable(key)
        if request.stats_name == "TOPIC_PUT_NUMS" and config is not None:
            counts = {name: await self._put_count(config, period_s) for name, period_s in periods.items()}
        elif request.stats_name == "GROUP_GET_NUMS":
            topic, _, group = key.partition("@")
            counts = dict.fromkeys(periods, 0)
            counts["statsMinute"] = round(self._reads.per_s(group, topic) * MINUTE_S)
        else:
            return command.reply(ResponseCode.SYSTEM_ERROR, f"The stats <{request.stats_name}> <{key}> not exist")
        body = {
            name: {"avgpt": 1.0 if count else 0.0, "sum": count, "tps": count / periods[name]}
            for name, count in counts.items()
        }
        return _body(command, body)

    async def groups_of_topic(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_TOPIC_CONSUME_BY_WHO (300): answers with the groups whose members subscribe to a topic, or that have
        committed offsets in it."""
        topic = parse_header(TopicRequest, command.ext_fields).topic
        names = dict.fromkeys([*self._clients.consumer_groups_of(topic), *self._offsets.groups_of(topic)])
        return _body(command, GroupList(group_list=list(names)))

    async def topics_of_group(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_TOPICS_BY_CONSUMER (343): answers with the topics in which a group has committed offsets."""
        group = parse_header(GroupRequest, command.ext_fields).group
        address = f"{self._options.host}:{self._options.port}"
        return _body(command, {"brokerAddr": address, "topicList": self._offsets.topics_of(group)})

    # ---- groups

    async def consume_stats(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_CONSUME_STATS (208): answers with a group's progress in each queue of the requested topics, or of all
        topics in which it has offsets.

        If the group is online and the request has no list of topics, omits topics to which the group is not subscribed.
        """
        request = parse_header(ConsumeStatsRequest, command.ext_fields)
        group = request.consumer_group
        listed = [topic for topic in (request.topic_list or "").split(";") if topic]
        topics: Iterable[str] = listed or (
            topic
            for topic in ([request.topic] if request.topic else self._offsets.topics_of(group))
            if self._is_subscribed(group, topic)
        )
        table: dict[QueueObject, QueueConsumption] = {}
        per_s = 0.0
        for topic in dict.fromkeys(topics):
            await self._yield_sometimes(0)
            config = self._topics.get_readable(topic)
            if config is None:
                continue
            if table and len(table) + config.read_queue_nums > QUEUE_LIST_MAX:
                return command.reply(
                    ResponseCode.SYSTEM_ERROR, f"more than {QUEUE_LIST_MAX} queues; request each topic separately"
                )
            table |= await self._progress(group, topic, config.read_queue_nums)
            per_s += self._reads.per_s(group, topic)
        return _body(command, {"consumeTps": per_s, "offsetTable": table})

    async def _progress(self, group: str, topic: str, queue_count: int) -> dict[QueueObject, QueueConsumption]:
        """Returns a group's progress in the first `queue_count` queues of a topic, and in each other queue in which it
        has an offset and unread messages.

        RocketMQ omits the other queues: once a topic has fewer queues, a group seems to have read everything.
        """
        table: dict[QueueObject, QueueConsumption] = {}
        hidden = [
            queue_id
            for queue_id, offset in self._offsets.of(group, topic).items()
            if queue_id >= queue_count and self._has_messages(topic, queue_id, offset)
        ]
        for queue_id in [*range(queue_count), *sorted(hidden)]:
            await self._yield_sometimes(queue_id)
            queue = self._queue(topic, queue_id)
            consumed = max(0, self._offsets.get(group, topic, queue_id) or 0)
            consumed_ms = await known_store_time_ms(self._store, queue, consumed - 1) if consumed else 0
            table[self._key(topic, queue_id)] = QueueConsumption(
                broker_offset=queue.max_offset if queue is not None else 0,
                consumer_offset=consumed,
                last_timestamp=max(0, consumed_ms),
                pull_offset=max(consumed, self._reads.position(group, topic, queue_id))
                + self._in_flight_count(group, topic, queue_id),
            )
        return table

    async def all_consume_stats(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_CONSUME_STATS (317): answers with the progress of every group in its topics, or only in its
        ordered topics, and the totals of messages not consumed, and of messages received but not consumed."""
        is_order = parse_header(BrokerStatsRequest, command.ext_fields).is_order
        listed: list[dict[str, list[Any]]] = []
        behind = in_flight = queue_count = 0
        for group in list(self._groups.table):
            await self._yield_sometimes(0)
            stats = []
            for topic in self._offsets.topics_of(group):
                config = self._topics.get_readable(topic)
                if config is None or (is_order and not config.order) or not self._is_subscribed(group, topic):
                    continue
                queue_count += config.write_queue_nums
                if queue_count > QUEUE_LIST_MAX:
                    return command.reply(
                        ResponseCode.SYSTEM_ERROR, f"more than {QUEUE_LIST_MAX} queues; request each group separately"
                    )
                table = await self._progress(group, topic, config.write_queue_nums)
                behind += sum(each.broker_offset - each.consumer_offset for each in table.values())
                in_flight += sum(each.pull_offset - each.consumer_offset for each in table.values())
                stats.append({"consumeTps": self._reads.per_s(group, topic), "offsetTable": table})
            listed.append({group: stats})
        body = {
            "brokerAddr": f"{self._options.host}:{self._options.port}",
            "consumeStatsList": listed,
            "totalDiff": behind,
            "totalInflightDiff": in_flight,
        }
        return _body(command, body)

    async def time_span(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_CONSUME_TIME_SPAN (303): answers with the store times of each queue's first, last, and last consumed
        message, and the group's delay in the queue.

        If no message is consumed, the time of the first one takes the place of the last consumed one's. A time is -1 if
        it is unknown. The delay is the age of the next message to consume, 0 if there is none.
        """
        request = parse_header(GroupRequest, command.ext_fields)
        topic = request.topic or ""
        config = self._topics.get_readable(topic)
        if config is None:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        spans = []
        for queue_id in range(config.write_queue_nums):
            await self._yield_sometimes(queue_id)
            queue = self._queue(topic, queue_id)
            begin, end = bounds(queue)
            first_ms = await known_store_time_ms(self._store, queue, begin)
            last_ms = await known_store_time_ms(self._store, queue, end - 1)
            consumed = self._offsets.get(request.group, topic, queue_id) or 0
            consumed_ms, delay_ms = first_ms, 0
            if consumed > 0:
                consumed_ms = await known_store_time_ms(self._store, queue, consumed - 1)
            if consumed < end:
                next_ms = await known_store_time_ms(self._store, queue, max(consumed, begin))
                delay_ms = self._wall_clock_ms() - next_ms if next_ms >= 0 else 0
            spans.append(
                {
                    "consumeTimeStamp": consumed_ms,
                    "delayTime": delay_ms,
                    "maxTimeStamp": last_ms,
                    "messageQueue": dict(self._key(topic, queue_id)),
                    "minTimeStamp": first_ms,
                }
            )
        return _body(command, {"consumeTimeSpanSet": spans})

    async def correction(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_CORRECTION_OFFSET (308): answers with the lowest committed offset of any group in each queue, or
        Long.MAX_VALUE if the offset of `compareGroup` is lower.

        Ignores the groups in `filterGroups`, and offsets before the start of the queue. RocketMQ also deletes the
        offsets of the groups in `filterGroups`; here a query changes nothing.
        """
        request = parse_header(CorrectionRequest, command.ext_fields)
        topic, left_out = request.topic, set(request.filter_groups.split(","))
        lowest: dict[int, int] = {}
        for group in self._offsets.groups_of(topic):
            if group in left_out:
                continue
            for queue_id, offset in self._offsets.of(group, topic).items():
                queue = self._queue(topic, queue_id)
                if queue is not None and offset >= queue.min_offset:
                    lowest[queue_id] = min(offset, lowest.get(queue_id, offset))
        for queue_id, offset in self._offsets.of(request.compare_group, topic).items():
            if queue_id in lowest and lowest[queue_id] > offset:
                lowest[queue_id] = (1 << 63) - 1
        return _body(command, {"correctionOffsets": lowest})

    # ---- queues

    async def queue_entries(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_CONSUME_QUEUE (321): answers with entries of a consume queue as stored, at most ENTRY_COUNT_MAX, and
        the subscription of a group."""
        request = parse_header(QueryQueueRequest, command.ext_fields)
        queue = self._queue(request.topic, request.queue_id)
        if queue is None:
            return command.reply(ResponseCode.SYSTEM_ERROR, f"{request.queue_id}@{request.topic} is not exist!")
        body: dict[str, Any] = {"maxQueueIndex": queue.max_offset, "minQueueIndex": max(0, queue.min_offset)}
        if request.consumer_group is not None:
            members = self._clients.consumer_group(request.consumer_group)
            subscription = members.subscriptions.get(request.topic) if members is not None else None
            if subscription is None:
                body["filterData"] = f"{request.consumer_group}@{request.topic} is not online!"
            else:
                body["filterData"] = "null"
                body["subscriptionData"] = subscription_body(request.topic, subscription)
        with refused_if_unreadable():
            entries = queue.read(request.index, min(max(0, request.count), ENTRY_COUNT_MAX))
        if not entries and request.count > 0:
            remark = f"Index {request.index} of {request.queue_id}@{request.topic} is not exist!"
            return command.reply(ResponseCode.SUCCESS, remark)
        body["queueData"] = [
            {
                "eval": False,
                "physicOffset": entry.physical_offset,
                "physicSize": entry.size,
                "tagsCode": entry.tags_code,
            }
            for entry in entries
        ]
        return _body(command, body)

    # ---- common

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self._store.queues.get(topic, queue_id)

    def _has_messages(self, topic: str, queue_id: int, offset: int) -> bool:
        """Returns whether a queue has messages at or after the queue offset `offset`."""
        begin, end = bounds(self._queue(topic, queue_id))
        return max(begin, offset) < end

    def _key(self, topic: str, queue_id: int) -> QueueObject:
        return queue_key(topic, self._options.broker_name, queue_id)

    def _is_subscribed(self, group: str, topic: str) -> bool:
        """Returns False only for an online group that has subscriptions, but none to the topic, which is no retry
        topic: POP consumers get messages of these without a subscription."""
        members = self._clients.consumer_group(group)
        if members is None or not members.subscriptions:
            return True
        return topic in members.subscriptions or topic.startswith(RETRY_PREFIX)

    async def _yield_sometimes(self, queue_id: int) -> None:
        if queue_id % QUEUES_PER_SLICE == 0:
            await trio.lowlevel.checkpoint()


def _body(command: RemotingCommand, body: Any) -> RemotingCommand:
    return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(body))
