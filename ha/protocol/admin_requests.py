"""Typed ext fields and bodies of requests from administrators to brokers and name servers.

    request                                         ext fields or body                   answer
    QUERY_MESSAGE (12)                              QueryMessageRequest                  records
    UPDATE_AND_CREATE_TOPIC (17)                    CreateTopicRequest                   -
    VIEW_MESSAGE_BY_ID (33)                         ViewMessageRequest                   record
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP (200)       bodies.GroupConfig                   -
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201)          -                                    bodies.GroupTable
    GET_TOPIC_STATS_INFO (202)                      TopicRequest                         `decode_topic_stats`
    GET_CONSUMER_CONNECTION_LIST (203)              ConsumerGroupRequest                 ConsumerConnections
    GET_PRODUCER_CONNECTION_LIST (204)              ProducerGroupRequest                 ProducerConnections
    DELETE_SUBSCRIPTIONGROUP (207)                  DeleteGroupRequest                   -
    GET_CONSUME_STATS (208)                         ConsumeStatsRequest                  `decode_consume_stats`
    DELETE_TOPIC_IN_BROKER (215)                    TopicRequest                         -
    DELETE_TOPIC_IN_NAMESRV (216)                   TopicRequest                         -
    REGISTER_TOPIC_IN_NAMESRV (217)                 TopicRequest, bodies.TopicRouteData  -
    INVOKE_BROKER_TO_RESET_OFFSET (222)             ResetOffsetsRequest                  `decode_queue_offsets`
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225)  GroupConfigList                      -
    QUERY_TOPIC_CONSUME_BY_WHO (300)                TopicRequest                         GroupList
    QUERY_CONSUME_TIME_SPAN (303)                   GroupRequest                         *
    QUERY_CORRECTION_OFFSET (308)                   CorrectionRequest                    *
    CLONE_GROUP_OFFSET (314)                        CloneOffsetRequest                   -
    VIEW_BROKER_STATS_DATA (315)                    StatsRequest                         *
    GET_BROKER_CONSUME_STATS (317)                  BrokerStatsRequest                   *
    QUERY_CONSUME_QUEUE (321)                       QueryQueueRequest                    *
    QUERY_TOPICS_BY_CONSUMER (343)                  GroupRequest                         bodies.TopicList
    QUERY_SUBSCRIPTION_BY_CONSUMER (345)            SubscriptionRequest                  *
    GET_TOPIC_CONFIG (351)                          TopicRequest                         bodies.TopicConfig
    GET_SUBSCRIPTIONGROUP_CONFIG (352)              GroupRequest                         bodies.GroupConfig
    EXCHANGE_BROKER_HA_INFO (906)                   ExchangeRequest                      ExchangeRequest

*: this module has no type for the answer, which the broker's handler builds. ConsumerGroupRequest and
`decode_queue_offsets` are in group_requests.py.

Sources: the classes of org.apache.rocketmq.remoting.protocol with the same meaning.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import field

from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.bodies import GroupConfig, SubscriptionData
from ha.protocol.group_requests import QueueKey, read_queue_map
from ha.protocol.headers import Header, Int32, Int64
from ha.protocol.topic_names import AUTO_CREATE_TOPIC


class QueryMessageRequest(Header):
    """Request QUERY_MESSAGE (12): messages by key, or by unique id if `unique_key_query`.

    The timestamps are store times in ms, both inclusive.
    """

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    unique_key_query: bool | None = field(default=None, name="_UNIQUE_KEY_QUERY")


class ViewMessageRequest(Header):
    """Request VIEW_MESSAGE_BY_ID (33): the record at physical `offset`, from the message id; 4.9 sends no topic."""

    offset: Int64
    topic: str | None = None


class CreateTopicRequest(Header):
    """Request UPDATE_AND_CREATE_TOPIC (17). `perm` holds the bits of `codes.Permission`; `attributes` is
    `+name=value,-name`, which sets the first attribute and removes the second."""

    topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    default_topic: str = AUTO_CREATE_TOPIC
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int32 = 0
    order: bool = False
    attributes: str | None = None


class TopicRequest(Header):
    """Requests about one topic; the module's docstring lists them. `cluster_name` is only in DELETE_TOPIC_IN_NAMESRV
    (216): the cluster from which the topic is deleted; None: all clusters."""

    topic: str
    cluster_name: str | None = None


class BrokerNameRequest(Header):
    """Requests WIPE_WRITE_PERM_OF_BROKER (205), ADD_WRITE_PERM_OF_BROKER (327) and GET_BROKER_MEMBER_GROUP (901)."""

    broker_name: str


class GroupRequest(Header):
    """Requests QUERY_TOPICS_BY_CONSUMER (343) and GET_SUBSCRIPTIONGROUP_CONFIG (352); QUERY_CONSUME_TIME_SPAN (303)
    with a topic."""

    group: str
    topic: str | None = None


class ProducerGroupRequest(Header):
    """Request GET_PRODUCER_CONNECTION_LIST (204)."""

    producer_group: str


class DeleteGroupRequest(Header):
    """Request DELETE_SUBSCRIPTIONGROUP (207)."""

    group_name: str
    clean_offset: bool = False


class ConsumeStatsRequest(Header):
    """Request GET_CONSUME_STATS (208). Without `topic` and `topic_list`: all topics of the group.

    `topic_list`, since 5.3: topic names joined with ";". It takes precedence over `topic`, and may contain topics to
    which the group is not subscribed.
    """

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class ResetOffsetsRequest(Header):
    """Request INVOKE_BROKER_TO_RESET_OFFSET (222): resets a group to `timestamp` in ms (negative: the end of each
    queue), or to queue offset `offset` in one queue.

    With `is_force` False, consumer offsets only move back. A broker that resets the offsets itself
    (useServerSideResetOffset), as 5.x does, ignores `is_force`; otherwise `queue_id` and `offset` are ignored.
    """

    topic: str
    group: str
    timestamp: Int64
    is_force: bool = False
    queue_id: Int32 | None = None
    offset: Int64 | None = None


class CloneOffsetRequest(Header):
    """Request CLONE_GROUP_OFFSET (314). Without a topic: all topics for which the source has offsets."""

    src_group: str
    dest_group: str
    topic: str = ""
    offline: bool = False


class CorrectionRequest(Header):
    """Request QUERY_CORRECTION_OFFSET (308): the lowest committed offset of any group in each queue of a topic.

    `filter_groups`: names of groups to ignore, joined with ",". `compare_group`: a group; for each queue in which its
    offset is lower than the result would be, Long.MAX_VALUE is returned instead.
    """

    topic: str
    compare_group: str = ""
    filter_groups: str = ""


class StatsRequest(Header):
    """Request VIEW_BROKER_STATS_DATA (315). `stats_key`: a topic, or topic@group."""

    stats_name: str
    stats_key: str


class BrokerStatsRequest(Header):
    """Request GET_BROKER_CONSUME_STATS (317). `is_order`: only ordered topics."""

    is_order: bool = False


class QueryQueueRequest(Header):
    """Request QUERY_CONSUME_QUEUE (321): `count` entries from queue offset `index`."""

    topic: str
    queue_id: Int32
    index: Int64
    count: Int32
    consumer_group: str | None = None


class SubscriptionRequest(Header):
    """Request QUERY_SUBSCRIPTION_BY_CONSUMER (345)."""

    group: str
    topic: str


class ExchangeRequest(Header):
    """Request and response EXCHANGE_BROKER_HA_INFO (906). A request without fields asks for the master's addresses."""

    master_ha_address: str | None = None
    master_flush_offset: Int64 | None = None
    master_address: str | None = None


class GroupConfigList(msgspec.Struct, rename="camel", kw_only=True):
    """Body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225): several groups to create or change."""

    group_config_list: list[GroupConfig] = []


class GroupList(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to QUERY_TOPIC_CONSUME_BY_WHO (300): the consumer groups of a topic."""

    group_list: list[str] = []


class ClientConnection(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """One client in the answers to GET_CONSUMER_CONNECTION_LIST (203) and GET_PRODUCER_CONNECTION_LIST (204).
    `version`: ordinal in RocketMQ's MQVersion.Version."""

    client_addr: str = ""
    client_id: str = ""
    language: str = ""
    version: int = 0


class ConsumerConnections(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to GET_CONSUMER_CONNECTION_LIST (203): the members of a consumer group."""

    connection_set: list[ClientConnection] = []
    consume_from_where: str | None = None
    consume_type: str | None = None
    message_model: str | None = None
    subscription_table: dict[str, SubscriptionData] = {}


class ProducerConnections(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to GET_PRODUCER_CONNECTION_LIST (204): the members of a producer group."""

    connection_set: list[ClientConnection] = []


class QueueStats(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """One queue in the answer to GET_TOPIC_STATS_INFO (202). The queue holds queue offsets [min_offset, max_offset).
    `last_update_timestamp`: store time of its last message in ms."""

    last_update_timestamp: Int64 = 0
    max_offset: Int64 = 0
    min_offset: Int64 = 0


class QueueConsumption(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """One queue in the answer to GET_CONSUME_STATS (208): its end, and the group's positions in it, as queue offsets.
    `last_timestamp`: store time of the last consumed message in ms."""

    broker_offset: Int64 = 0
    consumer_offset: Int64 = 0
    last_timestamp: Int64 = 0
    pull_offset: Int64 = 0


def decode_topic_stats(raw: bytes | bytearray | memoryview) -> dict[QueueKey, QueueStats]:
    """Returns the queues in the answer to GET_TOPIC_STATS_INFO (202). Raises RemoteProtocolError if `raw` is
    invalid."""
    return {queue: java_json.as_type(QueueStats, value) for queue, value in _offset_table(raw).items()}


def decode_consume_stats(raw: bytes | bytearray | memoryview) -> tuple[dict[QueueKey, QueueConsumption], float]:
    """Returns the queues in the answer to GET_CONSUME_STATS (208), and the number of messages consumed per second (0.0
    if the answer lacks it). Raises RemoteProtocolError if `raw` is invalid."""
    value = java_json.loads(raw)
    rate = value.get("consumeTps", 0.0) if isinstance(value, dict) else 0.0
    table = {queue: java_json.as_type(QueueConsumption, each) for queue, each in _offset_table(raw).items()}
    return table, java_json.as_type(float, rate)


def _offset_table(raw: bytes | bytearray | memoryview) -> dict[QueueKey, Any]:
    value = java_json.loads(raw)
    if not isinstance(value, dict):
        raise RemoteProtocolError("the body is not a table of queues")
    return read_queue_map(value.get("offsetTable") or {})
