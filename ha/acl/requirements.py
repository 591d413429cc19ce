"""The permissions that requests need, by request code, for brokers and for name servers.

A rule requires an admin, rights on topics and groups, or only a valid signature. A broker or name server that answers a
code without a rule does not start. The tables of docs/security.md are generated from the rules; tests compare both with
the codes that are answered.

The rules are those of RocketMQ 4.9.7 (PlainAccessValidator, Permission.ADMIN_CODE), with these departures, all of them
narrower:
- A send is checked for the topic that it goes to, regardless of the names of its fields. Batches (SEND_BATCH_MESSAGE,
  320) and lite pulls (LITE_PULL_MESSAGE, 361) are checked, too. 4.9.7 lets every batch through, and looks for the topic
  only in the field that the request code prescribes.
- A send to %RETRY%G needs SUB on group G. 4.9.7 looks at the producer group instead, in a field that SEND_MESSAGE (10)
  does not have, and that contains CLIENT_INNER_PRODUCER in SEND_MESSAGE_V2 (310).
- A reply (SEND_REPLY_MESSAGE, 324, or SEND_REPLY_MESSAGE_V2, 325) needs PUB on a reply topic. Otherwise PUB on any
  topic would suffice to push a message to every producer whose client id is known. 4.9.7 requires no right.
- A request that names a message by its offset needs the right on the topic of the record at that offset, even if the
  request names another topic: END_TRANSACTION (37) needs PUB on the topic of the half message, CONSUMER_SEND_MSG_BACK
  (36) and VIEW_MESSAGE_BY_ID (33) need SUB. 4.9.7 requires no right for 37 and 33, and copies any message for 36.
- A request about a topic needs PUB or SUB on the topic, and one about a group needs SUB on the group. 4.9.7 requires no
  right. The entries of a queue (QUERY_CONSUME_QUEUE, 321) tell where messages are, so reading them needs SUB.
- plain_acl.yml has no rights on producer groups. So listing their members needs an admin, and transaction checks
  (CHECK_TRANSACTION_STATE, 39) are sent only on connections whose account has PUB on the topic of the half message.
- Reading system topics (policy.py), and asking about them, needs an admin. 4.9.7 applies the account's defaults.
- Locking and unlocking queues and checking a subscription need the rights of a subscriber. 4.9.7 requires no right.
- Changing settings or the offsets of other clients, and reading tables with the state of all groups, need an admin.
  4.9.7 requires an admin for only five codes.

For users of ACL 2.0 the same rules name the required actions. They are those of 5.5.0 (the annotations RocketMQAction
of its headers, and DefaultAuthorizationContextBuilder), with these departures. Narrower:
- Sends, replies and requests that name a message are checked as described above.
- Some requests for which 5.5.0 checks only the signature need a permission. UPDATE_BROKER_CONFIG (25),
  CLEAN_EXPIRED_CONSUMEQUEUE (306), CLEAN_UNUSED_TOPIC (316) and DELETE_EXPIRED_COMMITLOG (329) need Update on the
  cluster. GET_BROKER_CONFIG (26), GET_ALL_CONSUMER_OFFSET (43) and GET_ALL_DELAY_OFFSET (45) need Get on the cluster.
  UPDATE_AND_CREATE_SUBSCRIPTIONGROUP (200) and its list form (225) need Create on each group.
- CONSUME_MESSAGE_DIRECTLY (309) can read any message, so it needs Update on the cluster instead of Sub on the group.
- Reading system topics needs a super user.

Wider:
- Sub suffices for VIEW_MESSAGE_BY_ID (33) and QUERY_CONSUME_QUEUE (321), which need Get in 5.5.0.
- VIEW_BROKER_STATS_DATA (315) needs Get on the topic and group that the statistics are about, instead of Get on the
  cluster.
- Sending traces needs no permission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from ha.protocol.admin_requests import (
    CloneOffsetRequest,
    ConsumeStatsRequest,
    CorrectionRequest,
    DeleteGroupRequest,
    GroupConfigList,
    GroupRequest,
    QueryQueueRequest,
    ResetOffsetsRequest,
    StatsRequest,
    SubscriptionRequest,
    TopicRequest,
)
from ha.protocol.bodies import (
    HEARTBEAT_SIZE_MAX,
    LIST_SIZE_MAX,
    GroupConfig,
    check_size,
    decode_heartbeat,
    read_request,
)
from ha.protocol.codes import RequestCode
from ha.protocol.group_requests import (
    CheckClientBody,
    ConsumerGroupRequest,
    ConsumerStatusRequest,
    LockQueuesBody,
    RunningInfoRequest,
)
from ha.protocol.headers import parse_header, topic_of_send
from ha.protocol.pop import BATCH_ACK_COUNT_MAX, BatchAckBody, QueryAssignmentBody, RequestModeBody, popped_topic
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import INTERNAL_TOPICS, REPLY_SUFFIX, RETRY_PREFIX, SYSTEM_TOPIC_PREFIX, TRACE_TOPIC

Needed = Iterator[tuple[str | None, int]]
"""Yields resources, each with a set of rights of which the account needs at least one. A group is named by its retry
topic (%RETRY%group), because reading that topic needs exactly the right on the group."""

NO_TOPIC = ""
"""The empty name, on which only admins have rights."""
CLUSTER = None
"""Stands for the cluster, the resource of requests about settings and whole tables."""


class Right:
    """Rights on a resource, as bits: the actions of ACL 2.0. plain_acl.yml has only PUB, SUB, and DENY, which overrides
    the others.

    Plain integers: two operations on an IntFlag take a microsecond, a fifth of a whole check.
    """

    DENY = 1
    PUB = 4
    SUB = 8
    GET = 16
    CREATE = 32
    UPDATE = 64
    DELETE = 128
    LIST = 256


def is_internal(topic: str) -> bool:
    """Returns whether only admins may read `topic`."""
    return topic in INTERNAL_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


class Needs(Enum):
    """The kind of permission that a rule requires. The value is the text in the documentation."""

    SIGNATURE = "any account"
    RIGHTS = "rights"
    ADMIN = "an admin"
    ADMIN_CHANGE = "an admin (it changes something)"
    """An admin, on a connection that aclAdminFrom allows."""


class Rule(NamedTuple):
    """The permission that one request code requires."""

    kind: Needs
    rights: str = ""
    """The required rights as the documentation shows them; used only if `kind` is RIGHTS"""
    needed: Callable[[RemotingCommand], Needed] | None = None
    """Yields each resource with a set of rights, at least one of which is needed. Raises RemoteProtocolError for a
    malformed request. With ADMIN and ADMIN_CHANGE it applies only to users of ACL 2.0, who then need these rights
    instead of being an admin; without it, they need Get (ADMIN) or Update (ADMIN_CHANGE) on the cluster"""

    @property
    def text(self) -> str:
        """The rule in words."""
        return self.rights or self.kind.value

    def needs(self, command: RemotingCommand) -> Iterable[tuple[str | None, int]]:
        """Returns the resources of a request, each with a set of rights, at least one of which ACL 2.0 requires
        (plain_acl.yml too, if `kind` is RIGHTS). Raises RemoteProtocolError, now or while iterating, for a malformed
        request."""
        return _OF_CLUSTER[self.kind] if self.needed is None else self.needed(command)


_OF_CLUSTER: Mapping[Needs, tuple[tuple[str | None, int], ...]] = {
    Needs.SIGNATURE: (),
    Needs.RIGHTS: (),
    Needs.ADMIN: ((CLUSTER, Right.GET),),
    Needs.ADMIN_CHANGE: ((CLUSTER, Right.UPDATE),),
}

GET = Right.GET
"""The right to ask about a topic or group. In plain_acl.yml, PUB or SUB on a topic, or SUB on a group, includes it."""
SUB_OR_GET = Right.SUB | Right.GET


def _group_of(name: str, right: int = Right.SUB) -> tuple[str, int]:
    return RETRY_PREFIX + name, right


def _send(command: RemotingCommand) -> Needed:
    topic = topic_of_send(command.ext_fields)
    if topic != TRACE_TOPIC:  # as in RocketMQ, every account may send traces
        yield topic, Right.SUB if topic.startswith(RETRY_PREFIX) else Right.PUB


def _recall(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic", ""), Right.PUB


def _reply(command: RemotingCommand) -> Needed:
    topic = topic_of_send(command.ext_fields)
    yield topic if topic.endswith(REPLY_SUFFIX) else NO_TOPIC, Right.PUB


def _offset(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic", ""), SUB_OR_GET
    yield _group_of(command.ext_fields.get("consumerGroup", ""), SUB_OR_GET)


def _commit(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic", ""), Right.SUB | Right.UPDATE
    yield _group_of(command.ext_fields.get("consumerGroup", ""), Right.SUB | Right.UPDATE)


def _consume(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic", ""), Right.SUB
    yield _group_of(command.ext_fields.get("consumerGroup", ""))


def _pop(command: RemotingCommand) -> Needed:
    group = command.ext_fields.get("consumerGroup", "")
    yield popped_topic(group, command.ext_fields.get("topic", ""))[0], Right.SUB
    yield _group_of(group)


def _assignment(command: RemotingCommand) -> Needed:
    asked = read_request(QueryAssignmentBody, command.body)
    yield asked.topic, Right.SUB
    yield _group_of(asked.consumer_group)


def _batch_ack(command: RemotingCommand) -> Needed:
    for ack in read_request(BatchAckBody, command.body, LIST_SIZE_MAX).acks[:BATCH_ACK_COUNT_MAX]:
        yield ack.topic, Right.SUB
        yield _group_of(ack.group)


def _read(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic") or NO_TOPIC, SUB_OR_GET


def _send_back(command: RemotingCommand) -> Needed:
    group = command.ext_fields.get("group", "")
    yield _group_of(group)
    topic = command.ext_fields.get("originTopic")
    if topic:  # the C++ client names no topic; send_back.py then checks the topic of the message
        yield popped_topic(group, topic)[0], Right.SUB


def _end(command: RemotingCommand) -> Needed:
    topic = command.ext_fields.get("topic")
    if topic:  # clients of 4.9 name no topic; transaction_ends.py checks the half message itself
        yield topic, Right.PUB


def _heartbeat(command: RemotingCommand) -> Needed:
    # The handler decodes the body again, which is cheap enough: each client sends one heartbeat every 30 s.
    check_size(command.body, HEARTBEAT_SIZE_MAX)
    for consumer in decode_heartbeat(command.body).consumer_data_set:
        yield _group_of(consumer.group_name)
        for subscription in consumer.subscription_data_set:
            yield subscription.topic, Right.SUB


def _unregister(command: RemotingCommand) -> Needed:
    group = command.ext_fields.get("consumerGroup")
    if group:  # the C++ client sends an empty group if it has none
        yield _group_of(group)


def _member(command: RemotingCommand) -> Needed:
    yield _group_of(command.ext_fields.get("consumerGroup", ""), SUB_OR_GET)


def _locks(command: RemotingCommand) -> Needed:
    yield _group_of(read_request(LockQueuesBody, command.body, LIST_SIZE_MAX).consumer_group)


def _check_client(command: RemotingCommand) -> Needed:
    asked = read_request(CheckClientBody, command.body)
    yield _group_of(asked.group)
    yield asked.subscription_data.topic, Right.SUB


def _topic(command: RemotingCommand) -> Needed:
    yield parse_header(TopicRequest, command.ext_fields).topic, GET


def _group(command: RemotingCommand) -> Needed:
    yield _group_of(parse_header(GroupRequest, command.ext_fields).group, GET)


def _group_on_topic(command: RemotingCommand) -> Needed:
    asked = parse_header(SubscriptionRequest, command.ext_fields)
    yield asked.topic, GET
    yield _group_of(asked.group, GET)


def _consumers(command: RemotingCommand) -> Needed:
    yield _group_of(parse_header(ConsumerGroupRequest, command.ext_fields).consumer_group, GET)


def _consumer_status(command: RemotingCommand) -> Needed:
    asked = parse_header(ConsumerStatusRequest, command.ext_fields)
    yield asked.topic, GET
    yield _group_of(asked.group, GET)


def _consume_stats(command: RemotingCommand) -> Needed:
    asked = parse_header(ConsumeStatsRequest, command.ext_fields)
    for topic in (asked.topic, *(asked.topic_list or "").split(";")):
        if topic:
            yield topic, GET
    yield _group_of(asked.consumer_group, GET)


def _correction(command: RemotingCommand) -> Needed:
    asked = parse_header(CorrectionRequest, command.ext_fields)
    yield asked.topic, GET
    if asked.compare_group:
        yield _group_of(asked.compare_group, GET)


def _stats(command: RemotingCommand) -> Needed:
    topic, at, group = parse_header(StatsRequest, command.ext_fields).stats_key.partition("@")
    yield topic, GET
    if at:
        yield _group_of(group, GET)


def _queue_entries(command: RemotingCommand) -> Needed:
    asked = parse_header(QueryQueueRequest, command.ext_fields)
    yield asked.topic, SUB_OR_GET
    if asked.consumer_group:
        yield _group_of(asked.consumer_group, SUB_OR_GET)


def _changed_topic(right: int) -> Callable[[RemotingCommand], Needed]:
    def needed(command: RemotingCommand) -> Needed:
        yield parse_header(TopicRequest, command.ext_fields).topic, right

    return needed


def _deleted_group(command: RemotingCommand) -> Needed:
    yield _group_of(parse_header(DeleteGroupRequest, command.ext_fields).group_name, Right.DELETE)


def _changed_group(command: RemotingCommand) -> Needed:
    if command.body:
        yield _group_of(read_request(GroupConfig, command.body, LIST_SIZE_MAX).group_name, Right.CREATE)


def _changed_groups(command: RemotingCommand) -> Needed:
    for group in read_request(GroupConfigList, command.body, LIST_SIZE_MAX).group_config_list:
        yield _group_of(group.group_name, Right.CREATE)


def _request_mode(command: RemotingCommand) -> Needed:
    yield _group_of(read_request(RequestModeBody, command.body).consumer_group, Right.UPDATE)


def _reset(command: RemotingCommand) -> Needed:
    asked = parse_header(ResetOffsetsRequest, command.ext_fields)
    yield asked.topic, Right.UPDATE
    yield _group_of(asked.group, Right.UPDATE)


def _clone(command: RemotingCommand) -> Needed:
    asked = parse_header(CloneOffsetRequest, command.ext_fields)
    for group in (asked.src_group, asked.dest_group):
        yield _group_of(group, Right.UPDATE)
    if asked.topic:
        yield asked.topic, Right.UPDATE


def _running_info(command: RemotingCommand) -> Needed:
    yield _group_of(parse_header(RunningInfoRequest, command.ext_fields).consumer_group, GET)


_SIGNATURE, _ADMIN, _CHANGE = Rule(Needs.SIGNATURE), Rule(Needs.ADMIN), Rule(Needs.ADMIN_CHANGE)


def _change(needed: Callable[[RemotingCommand], Needed]) -> Rule:
    return Rule(Needs.ADMIN_CHANGE, needed=needed)


def _rights(words: str, needed: Callable[[RemotingCommand], Needed]) -> Rule:
    return Rule(Needs.RIGHTS, words, needed)


_SEND = _rights("PUB on the topic; for a retry topic %RETRY%G: SUB on group G", _send)
_REPLY = _rights("PUB on the topic, which must be a reply topic (…_REPLY_TOPIC)", _reply)
_SUB_ON_BOTH = "SUB on topic and group"
_CONSUME = _rights(_SUB_ON_BOTH, _consume)
_POP = _rights(
    "SUB on the group and the topic; for a POP retry topic of the group, on the original topic instead", _pop
)
_TOPIC = _rights("PUB or SUB on the topic", _topic)
_GROUP = _rights("SUB on the group", _group)
_LOCKS = _rights("SUB on the group", _locks)
_BOTH = "PUB or SUB on the topic, SUB on the group"

BROKER_RULES: Mapping[int, Rule] = {
    RequestCode.SEND_MESSAGE: _SEND,
    RequestCode.PULL_MESSAGE: _CONSUME,
    RequestCode.QUERY_MESSAGE: _rights("SUB on the topic", _read),
    RequestCode.QUERY_CONSUMER_OFFSET: _rights(_SUB_ON_BOTH, _offset),
    RequestCode.UPDATE_CONSUMER_OFFSET: _rights(_SUB_ON_BOTH, _commit),
    RequestCode.UPDATE_AND_CREATE_TOPIC: _change(_changed_topic(Right.CREATE)),
    RequestCode.GET_ALL_TOPIC_CONFIG: _SIGNATURE,
    RequestCode.UPDATE_BROKER_CONFIG: _CHANGE,
    RequestCode.GET_BROKER_CONFIG: _ADMIN,
    RequestCode.GET_BROKER_RUNTIME_INFO: _SIGNATURE,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _TOPIC,
    RequestCode.GET_MAX_OFFSET: _TOPIC,
    RequestCode.GET_MIN_OFFSET: _TOPIC,
    RequestCode.GET_EARLIEST_MSG_STORETIME: _TOPIC,
    RequestCode.VIEW_MESSAGE_BY_ID: _rights(
        "SUB on the topic, which must be the message's; an admin if the request names no topic", _read
    ),
    RequestCode.HEART_BEAT: _rights("SUB on each consumer group and each topic that it subscribes to", _heartbeat),
    RequestCode.UNREGISTER_CLIENT: _rights("SUB on the consumer group, if the request names one", _unregister),
    RequestCode.CONSUMER_SEND_MSG_BACK: _rights(
        "SUB on the group; the message must be of the topic in the request, with SUB on it, or of a topic to which the "
        "group has subscribed",
        _send_back,
    ),
    RequestCode.END_TRANSACTION: _rights("PUB on the topic of the half message", _end),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: _rights("SUB on the group", _member),
    RequestCode.LOCK_BATCH_MQ: _LOCKS,
    RequestCode.UNLOCK_BATCH_MQ: _LOCKS,
    RequestCode.GET_ALL_CONSUMER_OFFSET: _ADMIN,
    RequestCode.GET_ALL_DELAY_OFFSET: _ADMIN,
    RequestCode.GET_TIMER_CHECK_POINT: _ADMIN,
    RequestCode.GET_TIMER_METRICS: _ADMIN,
    RequestCode.CHECK_CLIENT_CONFIG: _rights(_SUB_ON_BOTH, _check_client),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _change(_changed_group),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _SIGNATURE,
    RequestCode.GET_TOPIC_STATS_INFO: _TOPIC,
    RequestCode.GET_CONSUMER_CONNECTION_LIST: _rights("SUB on the group", _consumers),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: _ADMIN,
    RequestCode.DELETE_SUBSCRIPTIONGROUP: _change(_deleted_group),
    RequestCode.GET_CONSUME_STATS: _rights("SUB on the group; PUB or SUB on each topic that it names", _consume_stats),
    RequestCode.DELETE_TOPIC_IN_BROKER: _change(_changed_topic(Right.DELETE)),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: _change(_reset),
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _rights(_BOTH, _consumer_status),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _change(_changed_groups),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _TOPIC,
    RequestCode.QUERY_CONSUME_TIME_SPAN: _rights(_BOTH, _group_on_topic),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _SIGNATURE,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: _CHANGE,
    RequestCode.GET_CONSUMER_RUNNING_INFO: Rule(
        Needs.ADMIN, needed=_running_info
    ),  # with the stacks of the client's threads
    RequestCode.QUERY_CORRECTION_OFFSET: _rights(
        "PUB or SUB on the topic, SUB on the group if it names one", _correction
    ),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: _CHANGE,
    RequestCode.SEND_MESSAGE_V2: _SEND,
    RequestCode.CLONE_GROUP_OFFSET: _change(_clone),
    RequestCode.VIEW_BROKER_STATS_DATA: _rights("PUB or SUB on the topic, SUB on the group if it names one", _stats),
    RequestCode.CLEAN_UNUSED_TOPIC: _CHANGE,
    RequestCode.GET_BROKER_CONSUME_STATS: _ADMIN,
    RequestCode.SEND_BATCH_MESSAGE: _SEND,
    RequestCode.QUERY_CONSUME_QUEUE: _rights("SUB on the topic, and on the group if it names one", _queue_entries),
    RequestCode.SEND_REPLY_MESSAGE: _REPLY,
    RequestCode.SEND_REPLY_MESSAGE_V2: _REPLY,
    RequestCode.GET_ALL_PRODUCER_INFO: _ADMIN,
    RequestCode.DELETE_EXPIRED_COMMITLOG: _CHANGE,
    RequestCode.QUERY_TOPICS_BY_CONSUMER: _GROUP,
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: _rights(_BOTH, _group_on_topic),
    RequestCode.GET_TOPIC_CONFIG: _TOPIC,
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: _GROUP,
    RequestCode.LITE_PULL_MESSAGE: _CONSUME,
    RequestCode.RECALL_MESSAGE: _rights("PUB on the topic", _recall),
    RequestCode.EXCHANGE_BROKER_HA_INFO: _SIGNATURE,
    RequestCode.GET_BROKER_HA_STATUS: _SIGNATURE,
    RequestCode.QUERY_ASSIGNMENT: _rights(_SUB_ON_BOTH, _assignment),
    RequestCode.SET_MESSAGE_REQUEST_MODE: _change(_request_mode),
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: _SIGNATURE,
    RequestCode.POP_MESSAGE: _CONSUME,
    RequestCode.ACK_MESSAGE: _POP,
    RequestCode.BATCH_ACK_MESSAGE: _rights("SUB on each topic and group", _batch_ack),
    RequestCode.PEEK_MESSAGE: _CONSUME,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: _POP,
    RequestCode.NOTIFICATION: _CONSUME,
    RequestCode.POLLING_INFO: _CONSUME,
    **dict.fromkeys(
        (
            RequestCode.AUTH_CREATE_USER,
            RequestCode.AUTH_UPDATE_USER,
            RequestCode.AUTH_DELETE_USER,
            RequestCode.AUTH_CREATE_ACL,
            RequestCode.AUTH_UPDATE_ACL,
            RequestCode.AUTH_DELETE_ACL,
        ),
        _CHANGE,
    ),
    **dict.fromkeys(
        (
            RequestCode.AUTH_GET_USER,
            RequestCode.AUTH_LIST_USER,
            RequestCode.AUTH_GET_ACL,
            RequestCode.AUTH_LIST_ACL,
        ),
        _ADMIN,
    ),
}
"""The rule for each request code that a broker answers."""

NAME_SERVER_RULES: Mapping[int, Rule] = {
    RequestCode.PUT_KV_CONFIG: _CHANGE,
    RequestCode.GET_KV_CONFIG: _SIGNATURE,
    RequestCode.DELETE_KV_CONFIG: _CHANGE,
    RequestCode.REGISTER_BROKER: _CHANGE,
    RequestCode.UNREGISTER_BROKER: _CHANGE,
    RequestCode.GET_ROUTEINFO_BY_TOPIC: _SIGNATURE,
    RequestCode.GET_BROKER_CLUSTER_INFO: _SIGNATURE,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: _CHANGE,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _SIGNATURE,
    RequestCode.DELETE_TOPIC_IN_NAMESRV: _CHANGE,
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: _CHANGE,
    RequestCode.GET_KVLIST_BY_NAMESPACE: _SIGNATURE,
    RequestCode.GET_TOPICS_BY_CLUSTER: _SIGNATURE,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: _SIGNATURE,
    RequestCode.UPDATE_NAMESRV_CONFIG: _CHANGE,
    RequestCode.GET_NAMESRV_CONFIG: _ADMIN,
    RequestCode.QUERY_DATA_VERSION: _CHANGE,  # also counts as a heartbeat
    RequestCode.ADD_WRITE_PERM_OF_BROKER: _CHANGE,
    RequestCode.GET_BROKER_MEMBER_GROUP: _SIGNATURE,
    RequestCode.BROKER_HEARTBEAT: _CHANGE,
}
"""The rule for each request code that a name server answers."""

RULES: Mapping[int, Rule] = {**BROKER_RULES, **NAME_SERVER_RULES}
"""All rules: no code is answered by both brokers and name servers."""
assert len(RULES) == len(BROKER_RULES) + len(NAME_SERVER_RULES)
