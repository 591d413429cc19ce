"""Typed ext fields of remoting requests and their responses.

On the wire, all ext fields are strings. `parse_header` converts them to a struct and checks presence, type and range
(int32 and int64 as in Java); `to_ext_fields` converts them back and omits None. Unknown fields are ignored. A boolean
is true if its text is "true" in any letter case, or "1" (false in Java, but no client sends it), and otherwise false.

    request                                          ext fields                   ext fields of the response
    SEND_MESSAGE (10)                                SendMessageRequest           SendMessageResponse
    SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320)  SendMessageRequestV2         SendMessageResponse
    PULL_MESSAGE (11), LITE_PULL_MESSAGE (361)       PullMessageRequest           PullMessageResponse
    QUERY_CONSUMER_OFFSET (14)                       QueryConsumerOffsetRequest   OffsetResponse
    UPDATE_CONSUMER_OFFSET (15)                      UpdateConsumerOffsetRequest  -
    SEARCH_OFFSET_BY_TIMESTAMP (29)                  SearchOffsetRequest          OffsetResponse
    GET_MAX_OFFSET (30)                              GetMaxOffsetRequest          OffsetResponse
    GET_MIN_OFFSET (31)                              GetMinOffsetRequest          OffsetResponse
    HEART_BEAT (34)                                  -                            HeartbeatResponse
    REGISTER_BROKER (103)                            RegisterBrokerRequest        RegisterBrokerResponse
    UNREGISTER_BROKER (104)                          UnregisterBrokerRequest      -
    GET_ROUTEINFO_BY_TOPIC (105)                     GetRouteInfoRequest          -
    RECALL_MESSAGE (370)                             RecallMessageRequest         RecallMessageResponse

Field names are RocketMQ's in snake case; the wire names are derived from them unless `name=` sets another. Sources: the
classes of org.apache.rocketmq.remoting.protocol.header with the same names plus "Header".
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import field

from ha.errors import RemoteProtocolError

Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Header(msgspec.Struct, rename="camel", kw_only=True, gc=False):
    """Ext fields of one kind of command."""

    def to_ext_fields(self) -> dict[str, str]:
        """Returns the fields as a remoting frame carries them, without those that are None."""
        fields: dict[str, str] = {}
        for attribute, name in zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True):
            value = getattr(self, attribute)
            if value is not None:
                fields[name] = value if type(value) is str else _text(value)
        return fields


def _text(value: bool | int | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


class SendMessageRequest(Header):
    """Request SEND_MESSAGE (10). `parse_header` also accepts the one-letter names of `SendMessageRequestV2`.

    `queue_id` below 0 lets the broker choose; `properties` is the property string; times in ms.
    """

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str = ""
    reconsume_times: Int32 = 0
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    batch: bool = False
    broker_name: str | None = field(default=None, name="bname")


class SendMessageRequestV2(SendMessageRequest):
    """Requests SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320): the same fields under one-letter names."""

    producer_group: str = field(name="a")
    topic: str = field(name="b")
    default_topic: str = field(name="c")
    default_topic_queue_nums: Int32 = field(name="d")
    queue_id: Int32 = field(name="e")
    sys_flag: Int32 = field(name="f")
    born_timestamp: Int64 = field(name="g")
    flag: Int32 = field(name="h")
    properties: str = field(default="", name="i")
    reconsume_times: Int32 = field(default=0, name="j")
    unit_mode: bool = field(default=False, name="k")
    max_reconsume_times: Int32 | None = field(default=None, name="l")
    batch: bool = field(default=False, name="m")
    broker_name: str | None = field(default=None, name="n")

    def to_ext_fields(self) -> dict[str, str]:
        """Returns the fields as a remoting frame carries them. No loop, for speed: it runs for each send."""
        fields = {
            "a": self.producer_group,
            "b": self.topic,
            "c": self.default_topic,
            "d": str(self.default_topic_queue_nums),
            "e": str(self.queue_id),
            "f": str(self.sys_flag),
            "g": str(self.born_timestamp),
            "h": str(self.flag),
            "i": self.properties,
            "j": str(self.reconsume_times),
            "k": "true" if self.unit_mode else "false",
            "m": "true" if self.batch else "false",
        }
        if self.max_reconsume_times is not None:
            fields["l"] = str(self.max_reconsume_times)
        if self.broker_name is not None:
            fields["n"] = self.broker_name
        return fields


class SendMessageResponse(Header):
    """Answer to a send that stored the message: response code SUCCESS (0), FLUSH_DISK_TIMEOUT (10), SLAVE_NOT_AVAILABLE
    (11) or FLUSH_SLAVE_TIMEOUT (12).

    `msg_id` is the offset message id; for a batch, the ids joined with ",", and `queue_offset` is that of its first
    message. `recall_handle`: only for a timer message.
    """

    msg_id: str
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    region_id: str | None = field(default=None, name="MSG_REGION")
    trace_on: bool | None = field(default=None, name="TRACE_ON")
    recall_handle: str | None = None

    def to_ext_fields(self) -> dict[str, str]:
        """Returns the fields as a remoting frame carries them. No loop, for speed: it runs for each answer to a
        send."""
        fields = {"msgId": self.msg_id, "queueId": str(self.queue_id), "queueOffset": str(self.queue_offset)}
        if self.transaction_id is not None:
            fields["transactionId"] = self.transaction_id
        if self.batch_uniq_id is not None:
            fields["batchUniqId"] = self.batch_uniq_id
        if self.region_id is not None:
            fields["MSG_REGION"] = self.region_id
        if self.trace_on is not None:
            fields["TRACE_ON"] = "true" if self.trace_on else "false"
        if self.recall_handle is not None:
            fields["recallHandle"] = self.recall_handle
        return fields


class RecallMessageRequest(Header):
    """Request RECALL_MESSAGE (370). `recall_handle`: from the answer to the send, see `ha.protocol.recall_handle`."""

    topic: str
    recall_handle: str
    producer_group: str | None = None
    broker_name: str | None = field(default=None, name="bname")


class RecallMessageResponse(Header):
    """Answer to RECALL_MESSAGE (370). `msg_id` is the unique key of the recalled message."""

    msg_id: str


class PullMessageRequest(Header):
    """Requests PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361). `sys_flag` holds the bits of `codes.PullSysFlag`; offsets
    are queue offsets."""

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: Int64
    suspend_timeout_millis: Int64
    sub_version: Int64
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None


class PullMessageResponse(Header):
    """Answer to a pull with response code SUCCESS (0), PULL_NOT_FOUND (19), PULL_RETRY_IMMEDIATELY (20) or
    PULL_OFFSET_MOVED (21). Offsets are queue offsets."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    offset_delta: Int64 | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
    forbidden_type: Int32 | None = None


class QueryConsumerOffsetRequest(Header):
    """Request QUERY_CONSUMER_OFFSET (14)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffsetRequest(Header):
    """Request UPDATE_CONSUMER_OFFSET (15). `commit_offset` is a queue offset."""

    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: Int64


class GetMaxOffsetRequest(Header):
    """Request GET_MAX_OFFSET (30)."""

    topic: str
    queue_id: Int32
    committed: bool = True


class GetMinOffsetRequest(Header):
    """Request GET_MIN_OFFSET (31)."""

    topic: str
    queue_id: Int32


class SearchOffsetRequest(Header):
    """Request SEARCH_OFFSET_BY_TIMESTAMP (29). `timestamp` in ms; `boundary_type`: "lower" or "upper" (any case)."""

    topic: str
    queue_id: Int32
    timestamp: Int64
    boundary_type: str = "lower"


class OffsetResponse(Header):
    """Answer to QUERY_CONSUMER_OFFSET (14), SEARCH_OFFSET_BY_TIMESTAMP (29), GET_MAX_OFFSET (30) and GET_MIN_OFFSET
    (31): a queue offset."""

    offset: Int64


class HeartbeatResponse(Header):
    """Answer to HEART_BEAT (34) by RocketMQ's brokers since 5.x, and by halog's."""

    is_support_heart_beat_v2: bool = field(default=True, name="IS_SUPPORT_HEART_BEAT_V2")
    is_sub_change: bool = field(default=True, name="IS_SUB_CHANGE")


class RegisterBrokerRequest(Header):
    """Request REGISTER_BROKER (103). `body_crc32` is crc32 & 7FFFFFFF of the body as sent; 0: not checked."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: Int64
    heartbeat_timeout_millis: Int64 | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: Int32 = field(default=0, name="bodyCrc32")


class RegisterBrokerResponse(Header):
    """Answer to REGISTER_BROKER (103): the addresses of the master, for a slave (None for a master, or if no master is
    known)."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class UnregisterBrokerRequest(Header):
    """Request UNREGISTER_BROKER (104)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class GetRouteInfoRequest(Header):
    """Request GET_ROUTEINFO_BY_TOPIC (105)."""

    topic: str
    accept_standard_json_only: bool | None = None


HeaderT = TypeVar("HeaderT", bound=Header)


def parse_header(header_type: type[HeaderT], ext_fields: dict[str, str]) -> HeaderT:
    """Returns the typed header in `ext_fields`. Raises RemoteProtocolError if a field is missing or invalid; the error
    names the field.

    For `SendMessageRequest`, one-letter names are accepted too; the result is then a `SendMessageRequestV2`.
    """
    wanted: type[Any] = header_type
    if wanted is SendMessageRequest and "a" in ext_fields:
        wanted = SendMessageRequestV2
    try:
        return msgspec.convert(ext_fields, wanted, strict=False)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        return _parse_again(wanted, ext_fields)  # type: ignore[no-any-return]


def topic_of_send(ext_fields: dict[str, str]) -> str:
    """Returns the topic of a send under either set of names; "" if there is none."""
    return ext_fields.get("b" if "a" in ext_fields else "topic", "")


def _parse_again(header_type: type[Header], ext_fields: dict[str, str]) -> Any:
    """Parses again after an error, with Java's rules for booleans. Raises RemoteProtocolError if a field is still
    missing or invalid."""
    fields = dict(ext_fields)
    for name in _BOOLEANS[header_type]:
        if name in fields:
            fields[name] = "true" if fields[name].lower() == "true" else "false"
    try:
        return msgspec.convert(fields, header_type, strict=False)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(f"{header_type.__name__}: {_in_full(header_type, str(error))}") from None


def _in_full(header_type: type[Header], text: str) -> str:
    """Adds the long names to one-letter names in an error text."""
    if header_type is SendMessageRequestV2:
        for long, short in zip(header_type.__struct_fields__, header_type.__struct_encode_fields__, strict=True):
            text = text.replace(f"`{short}`", f"`{short}` ({long})").replace(f"$.{short}`", f"$.{short}` ({long})")
    return text


class _Booleans(dict[type[Header], list[str]]):
    """Wire names of the boolean fields of each header type, determined at its first error."""

    def __missing__(self, header_type: type[Header]) -> list[str]:
        names = [f.encode_name for f in msgspec.structs.fields(header_type) if bool in _alternatives(f.type)]
        self[header_type] = names
        return names


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ()) or (annotation,)


_BOOLEANS = _Booleans()
