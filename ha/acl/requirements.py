"""The permissions that requests need, by request code, for brokers and for name servers.

A rule requires an admin, rights on topics and groups, or only a valid signature. A broker or name server that answers a
code without a rule does not start. The tables of docs/security.md are generated from the rules; tests compare both with
the codes that are answered.

As PlainAccessValidator and Permission.ADMIN_CODE of 4.9.7, with these departures, all of them narrower:
- A send is checked for the topic that it goes to under whichever names its fields have, batches (320) and lite pulls
  (361) too. 4.9.7 lets every batch through, and looks only where the code says that the topic should be.
- A send to %RETRY%G needs SUB on group G. 4.9.7 looks at the producer group instead, under a name that 10
  SEND_MESSAGE does not have, and for 310 it is CLIENT_INNER_PRODUCER.
- A reply (324, 325) needs PUB on a reply topic. Otherwise PUB on any topic would suffice to push a message to every
  producer whose client id is known. 4.9.7 requires no right.
- A request that names a message by its offset needs the right on the topic of the record at that offset, whatever topic
  the request names: 37 PUB on the topic of the half message, 36 and 33 SUB. 4.9.7 requires nothing for 37 and 33, and
  copies any message for 36.
- A request about a topic needs PUB or SUB on it, one about a group SUB on the group, where 5.x's ACL 2.0 requires GET.
  4.9.7 requires no right. Queue entries (321) tell where messages are, so they need SUB.
- plain_acl.yml has no rights on producer groups. So listing their members needs an admin, and check requests (39) are
  sent only on connections whose account has PUB on the topic of the half message.
- Reading system topics (policy.py), and asking about them, needs an admin. 4.9.7 applies the account's defaults.
- Locking and unlocking queues and checking a subscription need the rights of a subscriber. 4.9.7 requires no right.
- Changing settings or other clients' offsets, and tables of what all groups do, need an admin. 4.9.7 requires one for
  five codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from ha.protocol import java_json
from ha.protocol.admin_requests import (
    ConsumeStatsRequest,
    CorrectionRequest,
    GroupRequest,
    QueryQueueRequest,
    StatsRequest,
    SubscriptionRequest,
    TopicRequest,
)
from ha.protocol.bodies import decode_heartbeat
from ha.protocol.codes import RequestCode
from ha.protocol.group_requests import (
    CheckClientBody,
    ConsumerGroupRequest,
    ConsumerStatusRequest,
    LockQueuesBody,
)
from ha.protocol.headers import parse_header, topic_of_send
from ha.protocol.pop import BATCH_ACK_COUNT_MAX, BatchAckBody, popped_topic
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import REPLY_SUFFIX, RETRY_PREFIX, TRACE_TOPIC

from .policy import Right

Needed = Iterator[tuple[str, int]]

NO_TOPIC = ""
"""A name that only admins have rights on."""


class Needs(Enum):
    """The kind of permission that a rule requires. The value is the text in the documentation."""

    SIGNATURE = "any account"
    RIGHTS = "rights"
    ADMIN = "an admin"
    ADMIN_CHANGE = "an admin (it changes something)"
    """An admin, on a connection that `aclAdminFrom` allows"""


class Rule(NamedTuple):
    """The permission that one request code requires."""

    kind: Needs
    rights: str = ""
    """Of RIGHTS: the text in the documentation"""
    needed: Callable[[RemotingCommand], Needed] | None = None
    """Of RIGHTS: yields each topic or group and the right on it; RemoteProtocolError for a malformed request"""

    @property
    def text(self) -> str:
        """The rule in words."""
        return self.rights or self.kind.value


ANY = Right.PUB | Right.SUB
"""Either of the two."""


def _group_of(name: str) -> tuple[str, int]:
    return RETRY_PREFIX + name, Right.SUB


def _send(command: RemotingCommand) -> Needed:
    topic = topic_of_send(command.ext_fields)
    if topic != TRACE_TOPIC:  # as in RocketMQ, every account may send traces
        yield topic, Right.SUB if topic.startswith(RETRY_PREFIX) else Right.PUB


def _recall(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic", ""), Right.PUB


def _reply(command: RemotingCommand) -> Needed:
    topic = topic_of_send(command.ext_fields)
    yield topic if topic.endswith(REPLY_SUFFIX) else NO_TOPIC, Right.PUB


def _consume(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic", ""), Right.SUB
    yield _group_of(command.ext_fields.get("consumerGroup", ""))


def _pop(command: RemotingCommand) -> Needed:
    group = command.ext_fields.get("consumerGroup", "")
    yield popped_topic(group, command.ext_fields.get("topic", ""))[0], Right.SUB
    yield _group_of(group)


def _batch_ack(command: RemotingCommand) -> Needed:
    for ack in java_json.read_as(BatchAckBody, command.body).acks[:BATCH_ACK_COUNT_MAX]:
        yield ack.topic, Right.SUB
        yield _group_of(ack.group)


def _read(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic") or NO_TOPIC, Right.SUB


def _send_back(command: RemotingCommand) -> Needed:
    yield _group_of(command.ext_fields.get("group", ""))
    topic = command.ext_fields.get("originTopic")
    if topic:  # the C++ client names none; send_back.py then checks the topic of the message
        yield topic, Right.SUB


def _end(command: RemotingCommand) -> Needed:
    topic = command.ext_fields.get("topic")
    if topic:  # 4.9 names none; transaction_ends.py checks the half message itself
        yield topic, Right.PUB


def _heartbeat(command: RemotingCommand) -> Needed:
    # Decoded once more by its handler: one in 30 s for each client.
    for consumer in decode_heartbeat(command.body).consumer_data_set:
        yield _group_of(consumer.group_name)
        for subscription in consumer.subscription_data_set:
            yield subscription.topic, Right.SUB


def _unregister(command: RemotingCommand) -> Needed:
    group = command.ext_fields.get("consumerGroup")
    if group:  # the C++ client sends an empty one for none
        yield _group_of(group)


def _member(command: RemotingCommand) -> Needed:
    yield _group_of(command.ext_fields.get("consumerGroup", ""))


def _locks(command: RemotingCommand) -> Needed:
    yield _group_of(java_json.read_as(LockQueuesBody, command.body).consumer_group)


def _check_client(command: RemotingCommand) -> Needed:
    asked = java_json.read_as(CheckClientBody, command.body)
    yield _group_of(asked.group)
    yield asked.subscription_data.topic, Right.SUB


def _topic(command: RemotingCommand) -> Needed:
    yield parse_header(TopicRequest, command.ext_fields).topic, ANY


def _group(command: RemotingCommand) -> Needed:
    yield _group_of(parse_header(GroupRequest, command.ext_fields).group)


def _group_on_topic(command: RemotingCommand) -> Needed:
    asked = parse_header(SubscriptionRequest, command.ext_fields)
    yield asked.topic, ANY
    yield _group_of(asked.group)


def _consumers(command: RemotingCommand) -> Needed:
    yield _group_of(parse_header(ConsumerGroupRequest, command.ext_fields).consumer_group)


def _consumer_status(command: RemotingCommand) -> Needed:
    asked = parse_header(ConsumerStatusRequest, command.ext_fields)
    yield asked.topic, ANY
    yield _group_of(asked.group)


def _consume_stats(command: RemotingCommand) -> Needed:
    asked = parse_header(ConsumeStatsRequest, command.ext_fields)
    for topic in (asked.topic, *(asked.topic_list or "").split(";")):
        if topic:
            yield topic, ANY
    yield _group_of(asked.consumer_group)


def _correction(command: RemotingCommand) -> Needed:
    asked = parse_header(CorrectionRequest, command.ext_fields)
    yield asked.topic, ANY
    if asked.compare_group:
        yield _group_of(asked.compare_group)


def _stats(command: RemotingCommand) -> Needed:
    topic, at, group = parse_header(StatsRequest, command.ext_fields).stats_key.partition("@")
    yield topic, ANY
    if at:
        yield _group_of(group)


def _queue_entries(command: RemotingCommand) -> Needed:
    asked = parse_header(QueryQueueRequest, command.ext_fields)
    yield asked.topic, Right.SUB
    if asked.consumer_group:
        yield _group_of(asked.consumer_group)


_SIGNATURE, _ADMIN, _CHANGE = Rule(Needs.SIGNATURE), Rule(Needs.ADMIN), Rule(Needs.ADMIN_CHANGE)


def _rights(words: str, needed: Callable[[RemotingCommand], Needed]) -> Rule:
    return Rule(Needs.RIGHTS, words, needed)


_SEND = _rights("PUB on the topic; of %RETRY%G, SUB on G", _send)
_REPLY = _rights("PUB on the topic, which is one of replies (…_REPLY_TOPIC)", _reply)
_CONSUME = _rights("SUB on topic and group", _consume)
_POP = _rights("SUB on topic and group; for a message from the group's retry topic, on the topic itself", _pop)
_TOPIC = _rights("PUB or SUB on the topic", _topic)
_GROUP = _rights("SUB on the group", _group)
_LOCKS = _rights("SUB on the group", _locks)
_BOTH = "PUB or SUB on the topic, SUB on the group"

BROKER_RULES: Mapping[int, Rule] = {
    RequestCode.SEND_MESSAGE: _SEND,
    RequestCode.PULL_MESSAGE: _CONSUME,
    RequestCode.QUERY_MESSAGE: _rights("SUB on the topic", _read),
    RequestCode.QUERY_CONSUMER_OFFSET: _CONSUME,
    RequestCode.UPDATE_CONSUMER_OFFSET: _CONSUME,
    RequestCode.UPDATE_AND_CREATE_TOPIC: _CHANGE,
    RequestCode.GET_ALL_TOPIC_CONFIG: _SIGNATURE,
    RequestCode.UPDATE_BROKER_CONFIG: _CHANGE,
    RequestCode.GET_BROKER_CONFIG: _ADMIN,
    RequestCode.GET_BROKER_RUNTIME_INFO: _SIGNATURE,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _TOPIC,
    RequestCode.GET_MAX_OFFSET: _TOPIC,
    RequestCode.GET_MIN_OFFSET: _TOPIC,
    RequestCode.GET_EARLIEST_MSG_STORETIME: _TOPIC,
    RequestCode.VIEW_MESSAGE_BY_ID: _rights(
        "SUB on the topic that it names, which the message must be of; if it names none, an admin", _read
    ),
    RequestCode.HEART_BEAT: _rights("SUB on each consumer group and each topic that it subscribes to", _heartbeat),
    RequestCode.UNREGISTER_CLIENT: _rights("SUB on the consumer group, if it names one", _unregister),
    RequestCode.CONSUMER_SEND_MSG_BACK: _rights(
        "SUB on the group; the message is of a topic that it names and has SUB on, or that the group has subscribed to",
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
    RequestCode.CHECK_CLIENT_CONFIG: _rights("SUB on topic and group", _check_client),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _CHANGE,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _SIGNATURE,
    RequestCode.GET_TOPIC_STATS_INFO: _TOPIC,
    RequestCode.GET_CONSUMER_CONNECTION_LIST: _rights("SUB on the group", _consumers),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: _ADMIN,
    RequestCode.DELETE_SUBSCRIPTIONGROUP: _CHANGE,
    RequestCode.GET_CONSUME_STATS: _rights("SUB on the group; PUB or SUB on each topic that it names", _consume_stats),
    RequestCode.DELETE_TOPIC_IN_BROKER: _CHANGE,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: _CHANGE,
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _rights(_BOTH, _consumer_status),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _CHANGE,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _TOPIC,
    RequestCode.QUERY_CONSUME_TIME_SPAN: _rights(_BOTH, _group_on_topic),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _SIGNATURE,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: _CHANGE,
    RequestCode.GET_CONSUMER_RUNNING_INFO: _ADMIN,  # with the stacks of the client's threads
    RequestCode.QUERY_CORRECTION_OFFSET: _rights(
        "PUB or SUB on the topic, SUB on the group if it names one", _correction
    ),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: _CHANGE,
    RequestCode.SEND_MESSAGE_V2: _SEND,
    RequestCode.CLONE_GROUP_OFFSET: _CHANGE,
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
    RequestCode.POP_MESSAGE: _CONSUME,
    RequestCode.ACK_MESSAGE: _POP,
    RequestCode.BATCH_ACK_MESSAGE: _rights("SUB on each topic and group", _batch_ack),
    RequestCode.PEEK_MESSAGE: _CONSUME,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: _POP,
    RequestCode.NOTIFICATION: _CONSUME,
    RequestCode.POLLING_INFO: _CONSUME,
}
"""The permissions at a broker, by request code."""

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
    RequestCode.QUERY_DATA_VERSION: _CHANGE,  # also a sign of life
    RequestCode.ADD_WRITE_PERM_OF_BROKER: _CHANGE,
    RequestCode.GET_BROKER_MEMBER_GROUP: _SIGNATURE,
    RequestCode.BROKER_HEARTBEAT: _CHANGE,
}
"""The permissions at a name server, by request code."""

RULES: Mapping[int, Rule] = {**BROKER_RULES, **NAME_SERVER_RULES}
"""All of them: no code is answered by both."""
assert len(RULES) == len(BROKER_RULES) + len(NAME_SERVER_RULES)
