"""The protobuf messages of RocketMQ's gRPC API (package apache.rocketmq.v2), as classes of Google's runtime.

The schema is written as data, from which the classes are built at import: no generated code, no compiler, and no copy
of the .proto files. A field is `number name type`, followed by `|NAME` if it belongs to the oneof NAME. `*` after a
type means repeated, `?` optional (with presence). The type `enum` stands for any enum, `map` for a map of strings.
Fields that neither clients nor this front use are omitted; protobuf keeps them as unknown fields. Tests compare the
schema with the descriptors that a real client ships.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, timestamp_pb2
from google.protobuf.message import DecodeError

from ha.errors import RemoteProtocolError

PACKAGE = "apache.rocketmq.v2"


class Code(IntEnum):
    """Some of the codes of a response's status."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_ACCESS_POINT = 40001
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    UNAUTHORIZED = 40100
    FORBIDDEN = 40300
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    TOO_MANY_REQUESTS = 42900
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    PROXY_TIMEOUT = 50400
    MASTER_PERSISTENCE_TIMEOUT = 50401
    SLAVE_PERSISTENCE_TIMEOUT = 50402


class MessageType(IntEnum):
    """Types of messages, and of topics."""

    UNSPECIFIED = 0
    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4
    LITE = 5
    PRIORITY = 6


class ClientType(IntEnum):
    """Some of the types of clients."""

    PUSH_CONSUMER = 2
    LITE_PUSH_CONSUMER = 5


class Permission(IntEnum):
    """Permissions of a queue."""

    NONE = 1
    READ = 2
    WRITE = 3
    READ_WRITE = 4


TAG, SQL = 1, 2
"""Types of a filter expression."""
MD5 = 2
"""Type of a digest."""
IDENTITY, GZIP = 1, 2
"""Encodings of a body."""
COMMIT, ROLLBACK = 1, 2
"""Resolutions of a transaction."""
SERVER_CHECK = 2
"""Source of a resolution: the producer answers a broker's check."""

_SCHEMA = """
FilterExpression: 1 type enum, 2 expression string
RetryPolicy: 1 max_attempts int32, 2 exponential_backoff ExponentialBackoff |strategy,
    3 customized_backoff CustomizedBackoff |strategy
ExponentialBackoff: 1 initial Duration, 2 max Duration, 3 multiplier float
CustomizedBackoff: 1 next Duration*
Resource: 1 resource_namespace string, 2 name string
SubscriptionEntry: 1 topic Resource, 2 expression FilterExpression
Address: 1 host string, 2 port int32
Endpoints: 1 scheme enum, 2 addresses Address*
Broker: 1 name string, 2 id int32, 3 endpoints Endpoints
MessageQueue: 1 topic Resource, 2 id int32, 3 permission enum, 4 broker Broker, 5 accept_message_types enum*
Digest: 1 type enum, 2 checksum string
DeadLetterQueue: 1 topic string, 2 message_id string
SystemProperties: 1 tag string?, 2 keys string*, 3 message_id string, 4 body_digest Digest, 5 body_encoding enum,
    6 message_type enum, 7 born_timestamp Timestamp, 8 born_host string, 9 store_timestamp Timestamp?,
    10 store_host string, 11 delivery_timestamp Timestamp?, 12 receipt_handle string?, 13 queue_id int32,
    14 queue_offset int64?, 15 invisible_duration Duration?, 16 delivery_attempt int32?, 17 message_group string?,
    18 trace_context string?, 19 orphaned_transaction_recovery_duration Duration?,
    20 dead_letter_queue DeadLetterQueue?, 21 lite_topic string?, 22 priority int32?
Message: 1 topic Resource, 2 user_properties map, 3 system_properties SystemProperties, 4 body bytes
Assignment: 1 message_queue MessageQueue
Status: 1 code enum, 2 message string
UA: 1 language enum, 2 version string, 3 platform string, 4 hostname string
Settings: 1 client_type enum?, 2 access_point Endpoints?, 3 backoff_policy RetryPolicy?, 4 request_timeout Duration?,
    5 publishing Publishing |pub_sub, 6 subscription Subscription |pub_sub, 7 user_agent UA, 8 metric Metric
Publishing: 1 topics Resource*, 2 max_body_size int32, 3 validate_message_type bool
Subscription: 1 group Resource?, 2 subscriptions SubscriptionEntry*, 3 fifo bool?, 4 receive_batch_size int32?,
    5 long_polling_timeout Duration?, 6 lite_subscription_quota int32?, 7 max_lite_topic_size int32?
Metric: 1 on bool, 2 endpoints Endpoints?
QueryRouteRequest: 1 topic Resource, 2 endpoints Endpoints
QueryRouteResponse: 1 status Status, 2 message_queues MessageQueue*
SendMessageRequest: 1 messages Message*
SendResultEntry: 1 status Status, 2 message_id string, 3 transaction_id string, 4 offset int64, 5 recall_handle string
SendMessageResponse: 1 status Status, 2 entries SendResultEntry*
QueryAssignmentRequest: 1 topic Resource, 2 group Resource, 3 endpoints Endpoints
QueryAssignmentResponse: 1 status Status, 2 assignments Assignment*
ReceiveMessageRequest: 1 group Resource, 2 message_queue MessageQueue, 3 filter_expression FilterExpression,
    4 batch_size int32, 5 invisible_duration Duration?, 6 auto_renew bool, 7 long_polling_timeout Duration?,
    8 attempt_id string?
ReceiveMessageResponse: 1 status Status |content, 2 message Message |content, 3 delivery_timestamp Timestamp |content
AckMessageEntry: 1 message_id string, 2 receipt_handle string, 3 lite_topic string?
AckMessageRequest: 1 group Resource, 2 topic Resource, 3 entries AckMessageEntry*
AckMessageResultEntry: 1 message_id string, 2 receipt_handle string, 3 status Status
AckMessageResponse: 1 status Status, 2 entries AckMessageResultEntry*
ForwardMessageToDeadLetterQueueRequest: 1 group Resource, 2 topic Resource, 3 receipt_handle string,
    4 message_id string, 5 delivery_attempt int32, 6 max_delivery_attempts int32, 7 lite_topic string?
ForwardMessageToDeadLetterQueueResponse: 1 status Status
HeartbeatRequest: 1 group Resource?, 2 client_type enum
HeartbeatResponse: 1 status Status
EndTransactionRequest: 1 topic Resource, 2 message_id string, 3 transaction_id string, 4 resolution enum, 5 source enum,
    6 trace_context string
EndTransactionResponse: 1 status Status
PrintThreadStackTraceCommand: 1 nonce string
ReconnectEndpointsCommand: 1 nonce string
ThreadStackTrace: 1 nonce string, 2 thread_stack_trace string?
VerifyMessageCommand: 1 nonce string, 2 message Message
VerifyMessageResult: 1 nonce string
RecoverOrphanedTransactionCommand: 1 message Message, 2 transaction_id string
NotifyUnsubscribeLiteCommand: 1 lite_topic string
TelemetryCommand: 1 status Status?, 2 settings Settings |command, 3 thread_stack_trace ThreadStackTrace |command,
    4 verify_message_result VerifyMessageResult |command,
    5 recover_orphaned_transaction_command RecoverOrphanedTransactionCommand |command,
    6 print_thread_stack_trace_command PrintThreadStackTraceCommand |command,
    7 verify_message_command VerifyMessageCommand |command,
    8 reconnect_endpoints_command ReconnectEndpointsCommand |command,
    9 notify_unsubscribe_lite_command NotifyUnsubscribeLiteCommand |command
NotifyClientTerminationRequest: 1 group Resource?
NotifyClientTerminationResponse: 1 status Status
ChangeInvisibleDurationRequest: 1 group Resource, 2 topic Resource, 3 receipt_handle string,
    4 invisible_duration Duration, 5 message_id string, 6 lite_topic string?, 7 suspend bool?
ChangeInvisibleDurationResponse: 1 status Status, 2 receipt_handle string
RecallMessageRequest: 1 topic Resource, 2 recall_handle string
RecallMessageResponse: 1 status Status, 2 message_id string
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "float": _Field.TYPE_FLOAT,
    "enum": _Field.TYPE_INT32,  # the same on the wire; values that are not known here are kept
}
_WELL_KNOWN = {"Duration": ".google.protobuf.Duration", "Timestamp": ".google.protobuf.Timestamp"}


def _file() -> descriptor_pb2.FileDescriptorProto:
    """Returns the schema as a descriptor."""
    file = descriptor_pb2.FileDescriptorProto(name="halog/rocketmq_v2.proto", package=PACKAGE, syntax="proto3")
    file.dependency.extend((duration_pb2.DESCRIPTOR.name, timestamp_pb2.DESCRIPTOR.name))
    for definition in _SCHEMA.strip().replace(",\n   ", ",").splitlines():
        name, _, fields = definition.partition(": ")
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            _add_field(message, *field.split())
        for field_proto in [each for each in message.field if each.proto3_optional]:
            # proto3 represents each optional field as a synthetic oneof, after the real ones.
            field_proto.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field_proto.name}")
    return file


def _add_field(message: Any, number: str, name: str, kind: str, oneof: str = "") -> None:
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind[-1] == "*":
        field.label = _Field.LABEL_REPEATED
    field.proto3_optional = kind[-1] == "?"
    kind = kind.rstrip("*?")
    if kind == "map":
        entry = message.nested_type.add(name="UserPropertiesEntry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
        entry.field.add(name="value", number=2, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
        field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.UserPropertiesEntry"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = _WELL_KNOWN.get(kind, f".{PACKAGE}.{kind}")
    if oneof:
        names = [each.name for each in message.oneof_decl]
        if oneof[1:] not in names:
            message.oneof_decl.add(name=oneof[1:])
            names.append(oneof[1:])
        field.oneof_index = names.index(oneof[1:])


def _classes() -> dict[str, Any]:
    pool = (
        descriptor_pool.DescriptorPool()
    )  # not the default pool: a program may also import a client's generated classes
    for known in (duration_pb2, timestamp_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.Add(_file())
    found = pool.FindFileByName("halog/rocketmq_v2.proto").message_types_by_name
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


CLASSES = _classes()
"""Message classes by name. Their instances have an attribute for each field, which type checkers don't know."""


def parse(name: str, data: bytes) -> Any:
    """Decodes a message of the class `name`. Raises RemoteProtocolError if `data` is not one."""
    try:
        return CLASSES[name].FromString(data)
    except DecodeError as error:
        raise RemoteProtocolError(f"not a {name}: {error}") from None


def make(name: str, /, **fields: Any) -> Any:
    """Returns a new message of the class `name`."""
    return CLASSES[name](**fields)


def milliseconds(value: Any) -> int:
    """Returns a Timestamp or Duration in milliseconds, rounded down."""
    return int(value.seconds * 1000 + value.nanos // 1_000_000)


def set_milliseconds(field: Any, value: int) -> None:
    """Sets a Timestamp or Duration to `value` milliseconds."""
    field.seconds, rest = divmod(value, 1000)
    field.nanos = rest * 1_000_000
