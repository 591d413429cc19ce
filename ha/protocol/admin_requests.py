"""Typed ext fields and bodies of requests from administrators to brokers and name servers.

    code      request                    answer
    12        QueryMessageRequest        records
    17        CreateTopicRequest         -
    33        ViewMessageRequest         record
    200       bodies.GroupConfig         -
    201       -                          bodies.GroupTable
    202       TopicRequest               `decode_topic_stats`
    203       ConsumerGroupRequest       ConsumerConnections
    204       ProducerGroupRequest       ProducerConnections
    207       DeleteGroupRequest         -
    208       ConsumeStatsRequest        `decode_consume_stats`
    215 - 217 TopicRequest               -
    222       ResetOffsetsRequest        group_requests.decode_queue_offsets
    225       GroupConfigList            -
    300, 343  TopicRequest, GroupRequest GroupList, bodies.TopicList
    303, 308  GroupRequest, CorrectionRequest
    314       CloneOffsetRequest         -
    315, 317  StatsRequest, BrokerStatsRequest
    321       QueryQueueRequest
    345       SubscriptionRequest
    351, 352  TopicRequest, GroupRequest bodies.TopicConfig, GroupConfig
    906       ExchangeRequest            ExchangeRequest

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
    """Request 12 QUERY_MESSAGE: messages by key, or by unique id if `unique_key_query`.

    The timestamps are store times in ms, both inclusive.
    """

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    unique_key_query: bool | None = field(default=None, name="_UNIQUE_KEY_QUERY")


class ViewMessageRequest(Header):
    """Request 33 VIEW_MESSAGE_BY_ID: the record at physical `offset`, from the message id; 4.9 sends no topic."""

    offset: Int64
    topic: str | None = None


class CreateTopicRequest(Header):
    """Request 17 UPDATE_AND_CREATE_TOPIC; `perm` as `codes.Permission`; `attributes` is `+name=value,-name` (set,
    unset)."""

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
    """Requests 202, 215, 216, 217, 300 and 351, which name only a topic."""

    topic: str
    cluster_name: str | None = None


class BrokerNameRequest(Header):
    """Requests 205 WIPE_WRITE_PERM_OF_BROKER, 327 ADD_WRITE_PERM_OF_BROKER and 901 GET_BROKER_MEMBER_GROUP."""

    broker_name: str


class GroupRequest(Header):
    """Requests 343 QUERY_TOPICS_BY_CONSUMER and 352 GET_SUBSCRIPTIONGROUP_CONFIG; 303 QUERY_CONSUME_TIME_SPAN with a
    topic."""

    group: str
    topic: str | None = None


class ProducerGroupRequest(Header):
    """Request 204 GET_PRODUCER_CONNECTION_LIST."""

    producer_group: str


class DeleteGroupRequest(Header):
    """Request 207 DELETE_SUBSCRIPTIONGROUP."""

    group_name: str
    clean_offset: bool = False


class ConsumeStatsRequest(Header):
    """Request 208 GET_CONSUME_STATS. Without `topic` and `topic_list`: all topics of the group.

    `topic_list`, since 5.3: topic names joined with ";". It takes precedence over `topic`, and may contain topics to
    which the group is not subscribed.
    """

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class ResetOffsetsRequest(Header):
    """Request 222 INVOKE_BROKER_TO_RESET_OFFSET: resets a group to `timestamp` in ms (negative: the end of each queue),
    or to queue offset `offset` in one queue.

    `is_force` False: consumer offsets only move back. Ignored if the broker resets the offsets itself, as 5.x does
    (useServerSideResetOffset).
    """

    topic: str
    group: str
    timestamp: Int64
    is_force: bool = False
    queue_id: Int32 | None = None
    offset: Int64 | None = None


class CloneOffsetRequest(Header):
    """Request 314 CLONE_GROUP_OFFSET. Without a topic: all topics for which the source has offsets."""

    src_group: str
    dest_group: str
    topic: str = ""
    offline: bool = False


class CorrectionRequest(Header):
    """Request 308 QUERY_CORRECTION_OFFSET."""

    topic: str
    compare_group: str = ""
    filter_groups: str = ""


class StatsRequest(Header):
    """Request 315 VIEW_BROKER_STATS_DATA."""

    stats_name: str
    stats_key: str


class BrokerStatsRequest(Header):
    """Request 317 GET_BROKER_CONSUME_STATS."""

    is_order: bool = False


class QueryQueueRequest(Header):
    """Request 321 QUERY_CONSUME_QUEUE: `count` entries from queue offset `index`."""

    topic: str
    queue_id: Int32
    index: Int64
    count: Int32
    consumer_group: str | None = None


class SubscriptionRequest(Header):
    """Request 345 QUERY_SUBSCRIPTION_BY_CONSUMER."""

    group: str
    topic: str


class ExchangeRequest(Header):
    """Request 906 EXCHANGE_BROKER_HA_INFO, request and response. A request without fields asks for the master's
    addresses."""

    master_ha_address: str | None = None
    master_flush_offset: Int64 | None = None
    master_address: str | None = None


class GroupConfigList(msgspec.Struct, rename="camel", kw_only=True):
    """Body of request 225: several groups to create or change."""

    group_config_list: list[GroupConfig] = []


class GroupList(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to request 300: the consumer groups of a topic."""

    group_list: list[str] = []


class ClientConnection(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """One client in the answers to requests 203 and 204. `version`: ordinal in RocketMQ's MQVersion.Version."""

    client_addr: str = ""
    client_id: str = ""
    language: str = ""
    version: int = 0


class ConsumerConnections(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to request 203: the members of a consumer group."""

    connection_set: list[ClientConnection] = []
    consume_from_where: str | None = None
    consume_type: str | None = None
    message_model: str | None = None
    subscription_table: dict[str, SubscriptionData] = {}


class ProducerConnections(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to request 204: the members of a producer group."""

    connection_set: list[ClientConnection] = []


class QueueStats(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """One queue in the answer to request 202: it holds [min_offset, max_offset); the timestamp (ms) is the store time
    of its last message."""

    last_update_timestamp: Int64 = 0
    max_offset: Int64 = 0
    min_offset: Int64 = 0


class QueueConsumption(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """One queue in the answer to request 208: its end and the group's position; the timestamp (ms) is the store time of
    the last consumed message."""

    broker_offset: Int64 = 0
    consumer_offset: Int64 = 0
    last_timestamp: Int64 = 0
    pull_offset: Int64 = 0


def decode_topic_stats(raw: bytes | bytearray | memoryview) -> dict[QueueKey, QueueStats]:
    """Return the queues in the answer to request 202. Raises RemoteProtocolError if `raw` is invalid."""
    return {queue: java_json.as_type(QueueStats, value) for queue, value in _offset_table(raw).items()}


def decode_consume_stats(raw: bytes | bytearray | memoryview) -> tuple[dict[QueueKey, QueueConsumption], float]:
    """Return the queues in the answer to request 208, and the messages consumed per second. Raises RemoteProtocolError
    if `raw` is invalid."""
    value = java_json.loads(raw)
    rate = value.get("consumeTps", 0.0) if isinstance(value, dict) else 0.0
    table = {queue: java_json.as_type(QueueConsumption, each) for queue, each in _offset_table(raw).items()}
    return table, java_json.as_type(float, rate)


def _offset_table(raw: bytes | bytearray | memoryview) -> dict[QueueKey, Any]:
    value = java_json.loads(raw)
    if not isinstance(value, dict):
        raise RemoteProtocolError("the body is not a table of queues")
    return read_queue_map(value.get("offsetTable") or {})
