"""Bodies of remoting commands, and the config files of the same form: topics, routes, registration, heartbeats,
consumer offsets, HA state.

Write them with `java_json.dumps` (or `dumps_pretty` for files) and read them with `java_json.read_as(Type, raw)`, those
of requests with `read_request`. Fields are in the order of their wire names, as the JVM writes them. A field that is
None is not written, for example one that 4.9 lacks. Registration bodies have a second, compressed form
(`encode_compressed`).
Source: the classes of the same names in org.apache.rocketmq.remoting.protocol.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, TypeVar

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.headers import Int32, Int64
from ha.protocol.java_json import as_type, dumps, loads, read_as

INFLATED_SIZE_MAX = 16 * 1024 * 1024
"""Maximum size of a decompressed registration in bytes: the largest that could be sent uncompressed"""

HEARTBEAT_SIZE_MAX = 256 * 1024
"""Maximum size of a heartbeat in bytes"""
LIST_SIZE_MAX = 1024 * 1024
"""Maximum size in bytes of a body with queues to lock (about 10,000), with consumer groups or with acknowledgements"""
REQUEST_SIZE_MAX = 256 * 1024
"""Maximum size in bytes of other JSON bodies that clients send to brokers"""

StructT = TypeVar("StructT")

_INT32 = struct.Struct(">i")


class DataVersion(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Version of a table. Two tables are the same only if all fields of their versions are equal."""

    counter: int = 0
    state_version: int | None = 0
    timestamp: int = 0

    def next(self, timestamp_ms: int) -> DataVersion:
        """Returns the version after one more change at `timestamp_ms`."""
        return DataVersion(counter=self.counter + 1, state_version=self.state_version, timestamp=timestamp_ms)


class LogPosition(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Position of the last record of the group's log (topic rmq_sys_halog_tables, see group_records.py) that a table
    includes. A halog extension; RocketMQ ignores it.

    A log contains this record if its record at `queue_offset` of the topic has the same physical offset and was written
    in the same epoch. All three numbers are -1 if the table includes no record. `is_whole`: whether all entries of the
    table come from the log; otherwise some come from elsewhere, until a complete snapshot replaces them.
    """

    epoch: int = -1
    is_whole: bool = True
    physical_offset: int = -1
    queue_offset: int = -1


_CHECK_POINT = struct.Struct(">7q")


class TopicConfig(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """One topic on one broker. `perm` holds the bits of `codes.Permission`."""

    attributes: dict[str, str] | None = {}
    order: bool = False
    perm: Int32 = 6
    read_queue_nums: Int32 = 16
    topic_filter_type: str = "SINGLE_TAG"
    topic_name: str = ""
    topic_sys_flag: Int32 = 0
    write_queue_nums: Int32 = 16


class TopicConfigTable(msgspec.Struct, rename="camel", kw_only=True):
    """All topics of a broker: topics.json, the answer to GET_ALL_TOPIC_CONFIG (21), and the main part of a
    registration.

    `deleted_topics`, which only halog writes and reads: name -> physical offset before which messages are deleted.
    """

    data_version: DataVersion = DataVersion()
    deleted_topics: dict[str, int] | None = None
    log_position: LogPosition | None = None
    mapping_data_version: DataVersion | None = None
    topic_config_table: dict[str, TopicConfig] = {}
    topic_queue_mapping_detail_map: dict[str, Any] | None = None
    topic_queue_mapping_info_map: dict[str, Any] | None = None


class GroupConfig(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """One consumer group on one broker (RocketMQ: SubscriptionGroupConfig).

    4.9 ignores the fields that it does not have; halog applies those of the features it implements.
    """

    attributes: dict[str, str] = {}
    broker_id: int = 0
    consume_broadcast_enable: bool = True
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_message_orderly: bool = False
    consume_timeout_minute: int = 15
    group_name: str
    group_retry_policy: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "CUSTOMIZED"})
    group_sys_flag: int = 0
    notify_consumer_ids_changed_enable: bool = True
    retry_max_times: int = 16
    retry_queue_nums: int = 1
    which_broker_when_consume_slowly: int = 1


class GroupTable(msgspec.Struct, rename="camel", kw_only=True):
    """All consumer groups of a broker: subscriptionGroup.json and the answer to GET_ALL_SUBSCRIPTIONGROUP_CONFIG
    (201)."""

    data_version: DataVersion = DataVersion()
    forbidden_table: dict[str, dict[str, int]] = {}
    log_position: LogPosition | None = None
    subscription_group_table: dict[str, GroupConfig] = {}


class RegisterBrokerBody(msgspec.Struct, rename="camel", kw_only=True):
    """Body of REGISTER_BROKER (103)."""

    filter_server_list: list[str] = []
    topic_config_serialize_wrapper: TopicConfigTable = msgspec.field(default_factory=TopicConfigTable)


class BrokerData(msgspec.Struct, rename="camel", kw_only=True):
    """The brokers of one broker set. `broker_addrs`: broker id (0 is the master) -> `ip:port`."""

    broker_addrs: dict[int, str] = {}
    broker_name: str = ""
    cluster: str = ""
    enable_acting_master: bool | None = None
    zone_name: str | None = None


class QueueData(msgspec.Struct, rename="camel", kw_only=True):
    """The queues of a topic in one broker set."""

    broker_name: str = ""
    perm: Int32 = 6
    read_queue_nums: Int32 = 0
    topic_sys_flag: Int32 = 0
    write_queue_nums: Int32 = 0


class TopicRouteData(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to GET_ROUTEINFO_BY_TOPIC (105): the brokers and queues of a topic."""

    broker_datas: list[BrokerData] = []
    filter_server_table: dict[str, list[str]] = {}
    order_topic_conf: str | None = None
    queue_datas: list[QueueData] = []


class ClusterInfo(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to GET_BROKER_CLUSTER_INFO (106): all brokers that the name server knows."""

    broker_addr_table: dict[str, BrokerData] = {}
    cluster_addr_table: dict[str, list[str]] = {}


class KVTable(msgspec.Struct):
    """Answer to GET_BROKER_RUNTIME_INFO (28) and GET_KVLIST_BY_NAMESPACE (219): texts by name."""

    table: dict[str, str] = {}


class TopicList(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to GET_ALL_TOPIC_LIST_FROM_NAMESERVER (206), GET_TOPICS_BY_CLUSTER (224), GET_SYSTEM_TOPIC_LIST_FROM_NS
    (304), GET_SYSTEM_TOPIC_LIST_FROM_BROKER (305) and QUERY_TOPICS_BY_CONSUMER (343): topics, unordered."""

    topic_list: list[str] = []


class SubscriptionData(msgspec.Struct, rename="camel", kw_only=True):
    """The subscription of a consumer group to a topic. `code_set` holds the tags codes (Java hashes) of `tags_set`."""

    class_filter_mode: bool = False
    code_set: list[Int64] = []
    expression_type: str = "TAG"
    sub_string: str = "*"
    sub_version: Int64 = 0
    tags_set: list[str] = []
    topic: str = ""


CONSUME_FROM_WHERE = {
    0: "CONSUME_FROM_LAST_OFFSET",
    1: "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    2: "CONSUME_FROM_MIN_OFFSET",
    3: "CONSUME_FROM_MAX_OFFSET",
    4: "CONSUME_FROM_FIRST_OFFSET",
    5: "CONSUME_FROM_TIMESTAMP",
}
CONSUME_TYPE = {0: "CONSUME_ACTIVELY", 1: "CONSUME_PASSIVELY", 2: "CONSUME_POP"}
MESSAGE_MODEL = {0: "BROADCASTING", 1: "CLUSTERING"}


class ConsumerData(msgspec.Struct, rename="camel", kw_only=True):
    """One consumer group in a heartbeat. Enum values are names; `decode_heartbeat` converts the ordinals that the C++
    client sends."""

    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    consume_type: str = "CONSUME_PASSIVELY"
    group_name: str = ""
    message_model: str = "CLUSTERING"
    subscription_data_set: list[SubscriptionData] = []
    unit_mode: bool = False


class ProducerData(msgspec.Struct, rename="camel", kw_only=True):
    """One producer group in a heartbeat."""

    group_name: str = ""


class HeartbeatData(msgspec.Struct, rename="camel", kw_only=True):
    """Body of HEART_BEAT (34). Read it with `decode_heartbeat`, which accepts the variants of all clients."""

    client_id: str = msgspec.field(default="", name="clientID")
    consumer_data_set: list[ConsumerData] = []
    heartbeat_fingerprint: Int64 | None = None
    producer_data_set: list[ProducerData] = []
    without_sub: bool | None = None


class ConsumerOffsets(msgspec.Struct, rename="camel", kw_only=True):
    """consumerOffset.json and the answer to GET_ALL_CONSUMER_OFFSET (43). Both tables map "topic@group" -> queue id ->
    queue offset."""

    data_version: DataVersion | None = None
    group_topic_map: dict[str, list[str]] | None = None
    log_position: LogPosition | None = None
    offset_table: dict[str, dict[int, int]] = {}
    pull_offset_table: dict[str, dict[int, int]] | None = None


class TimerCheckPoint(msgspec.Struct, frozen=True):
    """The answer to GET_TIMER_CHECK_POINT (60): the progress of timer messages, as 7 big-endian int64 (RocketMQ:
    TimerCheckpoint).

    lastReadTimeMs           `read_ms`: messages that were due before this time are delivered
    lastTimerLogFlushPos     0: there is no timer log
    lastTimerQueueOffset     `queue_offset`: offset in the timer queue; `read_ms` applies to the messages before it
    masterTimerQueueOffset   `queue_offset`: RocketMQ's slaves put no message from there on into their timer wheels
    stateVersion, timestamp, counter   `version`
    """

    read_ms: int
    queue_offset: int
    version: DataVersion = DataVersion()

    def encode(self) -> bytes:
        """Returns the body."""
        seen, version = self.queue_offset, self.version
        return _CHECK_POINT.pack(
            self.read_ms, 0, seen, seen, version.state_version or 0, version.timestamp, version.counter
        )

    @classmethod
    def decode(cls, body: bytes) -> TimerCheckPoint:
        """Returns the progress in a body. Raises RemoteProtocolError if `body` is not 56 bytes long."""
        if len(body) != _CHECK_POINT.size:
            raise RemoteProtocolError(f"timer checkpoint of {len(body)} bytes, not {_CHECK_POINT.size}")
        read_ms, _, queue_offset, _, state_version, timestamp, counter = _CHECK_POINT.unpack(body)
        version = DataVersion(state_version=state_version, timestamp=timestamp, counter=counter)
        return cls(read_ms, queue_offset, version)


class DelayOffsets(msgspec.Struct, rename="camel", kw_only=True):
    """delayOffset.json and the answer to GET_ALL_DELAY_OFFSET (45). `offset_table`: delay level (from 1) -> queue
    offset of the next message to be delivered. Negative keys are a halog extension: the progress of timer messages."""

    data_version: DataVersion | None = None
    log_position: LogPosition | None = None
    offset_table: dict[int, int] = {}


class HAConnectionRuntimeInfo(msgspec.Struct, rename="camel", kw_only=True):
    """One slave as its master sees it. Offsets and `diff` (master's end minus ack) in bytes."""

    addr: str = ""
    diff: Int64 = 0
    in_sync: bool = False
    slave_ack_offset: Int64 = 0
    transfer_from_where: Int64 = 0
    transferred_byte_in_second: Int64 = 0


class HAClientRuntimeInfo(msgspec.Struct, rename="camel", kw_only=True):
    """A slave as it sees itself. Offsets in bytes, timestamps in ms."""

    last_read_timestamp: Int64 = 0
    last_write_timestamp: Int64 = 0
    master_addr: str | None = None
    master_flush_offset: Int64 = 0
    max_offset: Int64 = 0
    transferred_byte_in_second: Int64 = 0


class HARuntimeInfo(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to GET_BROKER_HA_STATUS (907). A slave fills only `ha_client_runtime_info`, a master all other fields."""

    ha_client_runtime_info: HAClientRuntimeInfo = msgspec.field(default_factory=HAClientRuntimeInfo)
    ha_connection_info: list[HAConnectionRuntimeInfo] = []
    in_sync_slave_nums: Int64 = 0
    master: bool = False
    master_commit_log_max_offset: Int64 = 0


def read_request(kind: type[StructT], body: bytes | memoryview, size_max: int = REQUEST_SIZE_MAX) -> StructT:
    """Decodes the JSON body of a request. Raises RemoteProtocolError if it is invalid, or longer than `size_max`
    bytes."""
    check_size(body, size_max)
    return read_as(kind, body)


def check_size(body: bytes | memoryview, size_max: int) -> None:
    """Raises RemoteProtocolError if `body` is longer than `size_max` bytes."""
    if len(body) > size_max:
        raise RemoteProtocolError(f"a body of {len(body)} bytes; at most {size_max}")


def decode_heartbeat(raw: bytes | bytearray | memoryview) -> HeartbeatData:
    """Returns the heartbeat in `raw`, as Java, Go or C++ clients send it. Enum values may be names or ordinals, and
    numbers may be strings.

    Raises RemoteProtocolError if `raw` is invalid, or an ordinal has no name.
    """
    value = loads(raw)
    if isinstance(value, dict) and isinstance(consumers := value.get("consumerDataSet"), list):
        for consumer in consumers:
            if isinstance(consumer, dict):
                _name_ordinal(consumer, "consumeFromWhere", CONSUME_FROM_WHERE)
                _name_ordinal(consumer, "consumeType", CONSUME_TYPE)
                _name_ordinal(consumer, "messageModel", MESSAGE_MODEL)
    return as_type(HeartbeatData, value)


def _name_ordinal(consumer: dict[str, Any], key: str, names: dict[int, str]) -> None:
    ordinal = consumer.get(key)
    if isinstance(ordinal, int):
        if ordinal not in names:
            raise RemoteProtocolError(f"heartbeat with {key} {ordinal}")
        consumer[key] = names[ordinal]


def encode_compressed(body: RegisterBrokerBody) -> bytes:
    """Returns the form of `body` for compressed=true: a zlib stream of

        int32 n | dataVersion JSON | int32 topic count | count × (int32 n | text) | int32 n | filter server list JSON
        | int32 0, the number of static topic mappings, which halog does not have (read by 5.x, ignored by 4.9)

    with each topic as "name readQueues writeQueues perm filterType attributesJSON".
    """
    wrapper = body.topic_config_serialize_wrapper
    parts = [_with_size(dumps(wrapper.data_version)), _INT32.pack(len(wrapper.topic_config_table))]
    for config in wrapper.topic_config_table.values():
        text = (
            f"{config.topic_name} {config.read_queue_nums} {config.write_queue_nums} {config.perm} "
            f"{config.topic_filter_type}"
        ).encode()
        if config.attributes is not None:
            text += b" " + dumps(config.attributes)
        parts.append(_with_size(text))
    parts += (_with_size(dumps(body.filter_server_list)), _INT32.pack(0))
    return zlib.compress(b"".join(parts))


def _with_size(text: bytes) -> bytes:
    return _INT32.pack(len(text)) + text


def decode_compressed(raw: bytes | bytearray | memoryview, *, topic_count_max: int | None = None) -> RegisterBrokerBody:
    """Returns the registration in the compressed form `raw`. Raises RemoteProtocolError if it is invalid, decompresses
    to more than INFLATED_SIZE_MAX bytes, or has more than `topic_count_max` topics.

    The static topic mappings that 5.x appends after the filter server list are not read.
    """
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(raw, INFLATED_SIZE_MAX)
    except zlib.error as error:
        raise RemoteProtocolError(f"compressed registration: {error}") from None
    if not inflater.eof:
        raise RemoteProtocolError(f"compressed registration is truncated or exceeds {INFLATED_SIZE_MAX} bytes")
    reader = _Reader(data)
    data_version = as_type(DataVersion, loads(reader.text()))
    topics: dict[str, TopicConfig] = {}
    topic_count = reader.count()
    if topic_count_max is not None and topic_count > topic_count_max:
        raise RemoteProtocolError(f"compressed registration of {topic_count} topics; at most {topic_count_max}")
    for _ in range(topic_count):
        config = _topic_config(str(reader.text(), "utf-8", "replace"))
        topics[config.topic_name] = config
    filter_servers = as_type(list[str], loads(reader.text() or b"[]"))
    wrapper = TopicConfigTable(data_version=data_version, topic_config_table=topics)
    return RegisterBrokerBody(filter_server_list=filter_servers, topic_config_serialize_wrapper=wrapper)


def _topic_config(text: str) -> TopicConfig:
    name, *rest = text.split(" ", 5)
    if len(rest) < 4:
        raise RemoteProtocolError(f"compressed registration: topic {text[:80]!r}")
    fields: dict[str, Any] = {
        "topicName": name,
        "readQueueNums": rest[0],
        "writeQueueNums": rest[1],
        "perm": rest[2],
        "topicFilterType": rest[3],
        "attributes": loads(rest[4].encode()) if len(rest) > 4 else None,
    }
    return as_type(TopicConfig, fields)


class _Reader:
    """Reads the parts of a decompressed registration."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def count(self) -> int:
        try:
            (count,) = _INT32.unpack_from(self._data, self._position)
        except struct.error:
            raise RemoteProtocolError("compressed registration is truncated") from None
        self._position += _INT32.size
        if not 0 <= count <= len(self._data) - self._position:
            raise RemoteProtocolError(f"compressed registration: size or count {count}")
        return int(count)

    def text(self) -> bytes:
        size = self.count()
        self._position += size
        return self._data[self._position - size : self._position]
