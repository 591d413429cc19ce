"""Typed ext fields and bodies of requests between the members of consumer and producer groups and their brokers.

    request                                     ext fields or body                          answer
    HEART_BEAT (34)                             bodies.HeartbeatData                        headers.HeartbeatResponse
    UNREGISTER_CLIENT (35)                      UnregisterClientRequest                     -
    CONSUMER_SEND_MSG_BACK (36)                 SendBackRequest                             -
    END_TRANSACTION (37)                        EndTransactionRequest                       -
    GET_CONSUMER_LIST_BY_GROUP (38)             GetConsumerListRequest                      ConsumerList
    CHECK_TRANSACTION_STATE (39)*               CheckTransactionRequest, record             -
    NOTIFY_CONSUMER_IDS_CHANGED (40)*           ConsumerGroupRequest                        -
    LOCK_BATCH_MQ (41)                          LockQueuesBody                              LockedQueuesBody
    UNLOCK_BATCH_MQ (42)                        LockQueuesBody                              -
    CHECK_CLIENT_CONFIG (46)                    CheckClientBody                             -
    RESET_CONSUMER_CLIENT_OFFSET (220)*         ResetOffsetRequest, `decode_queue_offsets`  -
    GET_CONSUMER_STATUS_FROM_CLIENT (221)*      ResetOffsetRequest                          `encode_consumer_status`
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223)  ConsumerStatusRequest                       `decode_consumer_status`
    GET_CONSUMER_RUNNING_INFO (307)*            RunningInfoRequest                          `encode_running_info`
    CONSUME_MESSAGE_DIRECTLY (309)*             ConsumeDirectlyRequest, record              ConsumeDirectlyResult

*: from a broker to a client: 39 to a producer, the others to a consumer. Administrators send 223, 307 and 309 to a
broker, which then asks clients with 221, 307 and 309.

Headers and bodies are written and read like those of `headers` and `bodies`. Sources: the classes of
org.apache.rocketmq.remoting.protocol with the same meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import field

from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.bodies import SubscriptionData
from ha.protocol.headers import Header, Int32, Int64

QueueKey = tuple[str, str, int]
"""(topic, broker name, queue id): a MessageQueue as a map key"""


class UnregisterClientRequest(Header):
    """Request UNREGISTER_CLIENT (35). An empty group, as the C++ client sends it, means no group."""

    client_id: str = field(default="", name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class SendBackRequest(Header):
    """Request CONSUMER_SEND_MSG_BACK (36): delivers the record at physical offset `offset` again. `delay_level` 0: the
    broker chooses the delay."""

    offset: Int64
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    broker_name: str | None = field(default=None, name="bname")


class EndTransactionRequest(Header):
    """Request END_TRANSACTION (37). `commit_or_rollback` holds `codes.SysFlag.TRANSACTION_…`. `tran_state_table_offset`
    and `commit_log_offset`: queue offset and physical offset of the half message."""

    producer_group: str
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    commit_or_rollback: Int32
    msg_id: str
    from_transaction_check: bool = False
    transaction_id: str | None = None
    topic: str | None = None
    broker_name: str | None = field(default=None, name="bname")


class GetConsumerListRequest(Header):
    """Request GET_CONSUMER_LIST_BY_GROUP (38)."""

    consumer_group: str


class CheckTransactionRequest(Header):
    """Request CHECK_TRANSACTION_STATE (39). Offsets as in EndTransactionRequest; `msg_id` is the unique id."""

    tran_state_table_offset: Int64
    commit_log_offset: Int64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    topic: str | None = None
    broker_name: str | None = field(default=None, name="bname")


class ConsumerGroupRequest(Header):
    """Requests NOTIFY_CONSUMER_IDS_CHANGED (40) and GET_CONSUMER_CONNECTION_LIST (203)."""

    consumer_group: str


class ResetOffsetRequest(Header):
    """Requests RESET_CONSUMER_CLIENT_OFFSET (220) and GET_CONSUMER_STATUS_FROM_CLIENT (221)."""

    topic: str
    group: str
    timestamp: Int64 | None = None
    is_force: bool = False


class ConsumerStatusRequest(Header):
    """Request INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223); `client_addr` is a client id; None: all clients."""

    topic: str
    group: str
    client_addr: str | None = None


class RunningInfoRequest(Header):
    """Request GET_CONSUMER_RUNNING_INFO (307)."""

    consumer_group: str
    client_id: str = ""
    jstack_enable: bool = False


class ConsumeDirectlyRequest(Header):
    """Request CONSUME_MESSAGE_DIRECTLY (309); the body is the record."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None


class ConsumerList(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to GET_CONSUMER_LIST_BY_GROUP (38): the client ids of a group's members."""

    consumer_id_list: list[str] = []


class QueueBody(msgspec.Struct, rename="camel", kw_only=True, frozen=True, order=True):
    """A MessageQueue inside a body."""

    broker_name: str = ""
    queue_id: Int32 = 0
    topic: str = ""


class LockQueuesBody(msgspec.Struct, rename="camel", kw_only=True):
    """Body of LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ (42)."""

    client_id: str = ""
    consumer_group: str = ""
    mq_set: list[QueueBody] = []
    only_this_broker: bool = False


class LockedQueuesBody(msgspec.Struct, kw_only=True):
    """Answer to LOCK_BATCH_MQ (41): the queues that the caller now holds."""

    queues: list[QueueBody] = field(default_factory=list, name="lockOKMQSet")


class CheckClientBody(msgspec.Struct, rename="camel", kw_only=True):
    """Body of CHECK_CLIENT_CONFIG (46)."""

    client_id: str = ""
    group: str = ""
    namespace: str | None = None
    subscription_data: SubscriptionData = field(default_factory=SubscriptionData)


class ConsumeDirectlyResult(msgspec.Struct, rename="camel", kw_only=True):
    """Answer to CONSUME_MESSAGE_DIRECTLY (309). `consume_result` is a value of RocketMQ's enum CMResult;
    `spent_time_mills` is the time spent, in ms."""

    auto_commit: bool = True
    consume_result: str = "CR_SUCCESS"
    order: bool = False
    remark: str | None = None
    spent_time_mills: int = 0


class ProcessQueueInfo(msgspec.Struct, rename="camel", kw_only=True):
    """One queue in the answer to GET_CONSUMER_RUNNING_INFO (307). Offsets are queue offsets, timestamps ms."""

    cached_msg_count: int = 0
    cached_msg_max_offset: int = 0
    cached_msg_min_offset: int = 0
    cached_msg_size_in_mib: int = field(default=0, name="cachedMsgSizeInMiB")
    commit_offset: int = 0
    droped: bool = False
    last_consume_timestamp: int = 0
    last_lock_timestamp: int = 0
    last_pull_timestamp: int = 0
    locked: bool = False
    transaction_msg_count: int = 0
    transaction_msg_max_offset: int = 0
    transaction_msg_min_offset: int = 0
    try_unlock_times: int = 0


class ConsumeStatus(msgspec.Struct, kw_only=True):
    """One topic in the answer to GET_CONSUMER_RUNNING_INFO (307). `…_tps`: messages per second. `…_rt`: average time in
    ms, of handling a message or of a pull."""

    consume_failed_msgs: int = field(default=0, name="consumeFailedMsgs")
    consume_failed_tps: float = field(default=0.0, name="consumeFailedTPS")
    consume_ok_tps: float = field(default=0.0, name="consumeOKTPS")
    consume_rt: float = field(default=0.0, name="consumeRT")
    pull_rt: float = field(default=0.0, name="pullRT")
    pull_tps: float = field(default=0.0, name="pullTPS")


QueueObject = tuple[tuple[str, str | int], ...]
"""A MessageQueue in the form in which `java_json` reads and writes map keys"""


def queue_key(topic: str, broker_name: str, queue_id: int) -> QueueObject:
    """Returns the key that `java_json` writes as a MessageQueue object."""
    return (("brokerName", broker_name), ("queueId", queue_id), ("topic", topic))


def read_queue_map(value: Any) -> dict[QueueKey, Any]:
    """Converts a map whose keys are MessageQueue objects, as `java_json.loads` returns it: the keys become (topic,
    broker name, queue id).

    Raises RemoteProtocolError if `value` is not such a map.
    """
    if not isinstance(value, dict):
        raise RemoteProtocolError("not a map of queues")
    found: dict[QueueKey, Any] = {}
    for key, member in value.items():
        if not isinstance(key, tuple):
            raise RemoteProtocolError(f"{str(key)[:80]!r} is not a queue")
        queue = java_json.as_type(QueueBody, dict(key))
        found[queue.topic, queue.broker_name, queue.queue_id] = member
    return found


def encode_queue_offsets(offsets: Mapping[QueueKey, int]) -> bytes:
    """Returns `{"offsetTable":{queue:offset,…}}`: the body of RESET_CONSUMER_CLIENT_OFFSET (220), and the content of a
    broadcasting consumer's offset file."""
    return java_json.dumps({"offsetTable": {queue_key(*queue): offset for queue, offset in offsets.items()}})


def encode_queue_offset_list(offsets: Mapping[QueueKey, int]) -> bytes:
    """Returns the body of RESET_CONSUMER_CLIENT_OFFSET (220) for clients that can't read objects as keys:
    `{"offsetTable":[{…,"offset":offset,…},…]}`."""
    listed = [
        _QueueOffset(broker_name=broker_name, offset=offset, queue_id=queue_id, topic=topic)
        for (topic, broker_name, queue_id), offset in offsets.items()
    ]
    return java_json.dumps({"offsetTable": listed})


def decode_queue_offsets(raw: bytes | bytearray | memoryview) -> dict[QueueKey, int]:
    """Returns the queue offsets in the body of RESET_CONSUMER_CLIENT_OFFSET (220), in either of its forms. Raises
    RemoteProtocolError if `raw` is invalid."""
    value = java_json.loads(raw)
    table = value.get("offsetTable") if isinstance(value, dict) else None
    if isinstance(table, list):  # for clients that can't read objects as keys
        listed = java_json.as_type(list[_QueueOffset], table)
        return {(each.topic, each.broker_name, each.queue_id): each.offset for each in listed}
    return {queue: java_json.as_type(int, offset) for queue, offset in read_queue_map(table or {}).items()}


class _QueueOffset(msgspec.Struct, rename="camel", kw_only=True):
    broker_name: str
    offset: int
    queue_id: int
    topic: str


def decode_consumer_status(raw: bytes | bytearray | memoryview) -> dict[str, dict[QueueKey, int]]:
    """Returns the answer to INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223): by client id, the consumer offset of each
    queue. Raises RemoteProtocolError if `raw` is invalid."""
    value = java_json.loads(raw)
    table = value.get("consumerTable") if isinstance(value, dict) else None
    if not isinstance(table, dict):
        raise RemoteProtocolError("the body is not a consumer status")
    return {
        str(client_id): {queue: java_json.as_type(int, offset) for queue, offset in read_queue_map(offsets).items()}
        for client_id, offsets in table.items()
    }


def encode_consumer_status(offsets: Mapping[QueueKey, int]) -> bytes:
    """Returns the answer to GET_CONSUMER_STATUS_FROM_CLIENT (221): the consumer offset of each queue."""
    table = {queue_key(*queue): offset for queue, offset in offsets.items()}
    return java_json.dumps({"consumerTable": {}, "messageQueueTable": table})


class RunningInfo(msgspec.Struct, kw_only=True):
    """The answer to GET_CONSUMER_RUNNING_INFO (307): the state of a consumer by queue, its properties, its statistics
    by topic, and its subscriptions."""

    queues: dict[QueueKey, ProcessQueueInfo]
    properties: dict[str, str]
    statuses: dict[str, ConsumeStatus]
    subscriptions: list[SubscriptionData]


def decode_running_info(raw: bytes | bytearray | memoryview) -> RunningInfo:
    """Returns the answer to GET_CONSUMER_RUNNING_INFO (307). Raises RemoteProtocolError if `raw` is invalid."""
    value = java_json.loads(raw)
    if not isinstance(value, dict):
        raise RemoteProtocolError("the body is not a running info")
    queues = read_queue_map(value.get("mqTable") or {})
    return RunningInfo(
        queues={queue: java_json.as_type(ProcessQueueInfo, state) for queue, state in queues.items()},
        properties=java_json.as_type(dict[str, str], value.get("properties") or {}),
        statuses=java_json.as_type(dict[str, ConsumeStatus], value.get("statusTable") or {}),
        subscriptions=java_json.as_type(list[SubscriptionData], value.get("subscriptionSet") or []),
    )


def encode_running_info(
    queues: Mapping[QueueKey, ProcessQueueInfo],
    properties: Mapping[str, str],
    statuses: Mapping[str, ConsumeStatus],
    subscriptions: list[SubscriptionData],
) -> bytes:
    """Returns the answer to GET_CONSUMER_RUNNING_INFO (307)."""
    return java_json.dumps(
        {
            "mqPopTable": {},
            "mqTable": {queue_key(*queue): msgspec.to_builtins(state) for queue, state in queues.items()},
            "properties": dict(properties),
            "statusTable": dict(statuses),
            "subscriptionSet": subscriptions,
            "userConsumerInfo": {},
        }
    )
