"""What each request needs: an admin, rights on topics and groups, or no more than a good signature.

As PlainAccessValidator and Permission.ADMIN_CODE of 4.9.7, with these departures, all of them narrower:
- A send is checked for the topic that it goes to under whichever names its fields have, batches (320) and lite pulls
  (361) too. 4.9.7 lets every batch through, and looks only where the code says that the topic should be.
- A send to %RETRY%G needs SUB on group G. 4.9.7 looks at the producer group instead, under a name that 10
  SEND_MESSAGE does not have, and for 310 it is CLIENT_INNER_PRODUCER.
- 36 needs SUB on the topic that it names, too, and the message must be of a topic that the group may read
  (send_back.py). 4.9.7 copies any message to whoever has a group.
- 33 needs SUB on the topic that the message is in, and an admin if it names none. 4.9.7 gives any message to anybody.
- A transaction that names its topic, as 5.x clients do, is ended with PUB on it; 4.9.7 asks for no right.
- Queues are locked and unlocked, and a subscription is checked, by who could subscribe. 4.9.7 asks for no right.
- All that changes accounts, settings or other clients' offsets needs an admin; 4.9.7 names five codes and leaves out
  even those that write plain_acl.yml.
- What a broker serves and nobody thought of here needs an admin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ha.protocol import java_json
from ha.protocol.bodies import decode_heartbeat
from ha.protocol.codes import RequestCode
from ha.protocol.group_requests import CheckClientBody, LockQueuesBody
from ha.protocol.headers import topic_of_send
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

from .policy import Right

Needed = Iterator[tuple[str, int]]

NO_TOPIC = ""
"""What only an admin has a right on."""


def _send(command: RemotingCommand) -> Needed:
    topic = topic_of_send(command.ext_fields)
    yield topic, Right.SUB if topic.startswith(RETRY_PREFIX) else Right.PUB


def _pull(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic", ""), Right.SUB
    yield RETRY_PREFIX + command.ext_fields.get("consumerGroup", ""), Right.SUB


def _query(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic", ""), Right.SUB


def _view(command: RemotingCommand) -> Needed:
    yield command.ext_fields.get("topic") or NO_TOPIC, Right.SUB


def _send_back(command: RemotingCommand) -> Needed:
    yield RETRY_PREFIX + command.ext_fields.get("group", ""), Right.SUB
    topic = command.ext_fields.get("originTopic")
    if topic:  # the C++ client names none; send_back.py says what the message may then be of
        yield topic, Right.SUB


def _heartbeat(command: RemotingCommand) -> Needed:
    # Decoded once more by its handler: one in 30 s for each client.
    for consumer in decode_heartbeat(command.body).consumer_data_set:
        yield RETRY_PREFIX + consumer.group_name, Right.SUB
        for subscription in consumer.subscription_data_set:
            yield subscription.topic, Right.SUB


def _unregister(command: RemotingCommand) -> Needed:
    group = command.ext_fields.get("consumerGroup")
    if group:  # the C++ client sends an empty one for none
        yield RETRY_PREFIX + group, Right.SUB


def _end(command: RemotingCommand) -> Needed:
    topic = command.ext_fields.get("topic")
    if topic:  # 4.9 names none
        yield topic, Right.PUB


def _group(command: RemotingCommand) -> Needed:
    yield RETRY_PREFIX + command.ext_fields.get("consumerGroup", ""), Right.SUB


def _locks(command: RemotingCommand) -> Needed:
    yield RETRY_PREFIX + java_json.read_as(LockQueuesBody, command.body).consumer_group, Right.SUB


def _check_client(command: RemotingCommand) -> Needed:
    asked = java_json.read_as(CheckClientBody, command.body)
    yield RETRY_PREFIX + asked.group, Right.SUB
    yield asked.subscription_data.topic, Right.SUB


RESOURCES: dict[int, Callable[[RemotingCommand], Needed]] = {
    RequestCode.SEND_MESSAGE: _send,
    RequestCode.SEND_MESSAGE_V2: _send,
    RequestCode.SEND_BATCH_MESSAGE: _send,
    RequestCode.SEND_REPLY_MESSAGE: _send,
    RequestCode.SEND_REPLY_MESSAGE_V2: _send,
    RequestCode.CONSUMER_SEND_MSG_BACK: _send_back,
    RequestCode.PULL_MESSAGE: _pull,
    RequestCode.LITE_PULL_MESSAGE: _pull,
    RequestCode.END_TRANSACTION: _end,
    RequestCode.QUERY_MESSAGE: _query,
    RequestCode.VIEW_MESSAGE_BY_ID: _view,
    RequestCode.HEART_BEAT: _heartbeat,
    RequestCode.UNREGISTER_CLIENT: _unregister,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: _group,
    RequestCode.UPDATE_CONSUMER_OFFSET: _pull,
    RequestCode.LOCK_BATCH_MQ: _locks,
    RequestCode.CHECK_CLIENT_CONFIG: _check_client,
    RequestCode.UNLOCK_BATCH_MQ: _locks,
}
"""Request code -> what it needs of topics and groups. Raises RemoteProtocolError for a body that is none."""

SIGNATURE_SUFFICES = frozenset(
    {
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        RequestCode.GET_ALL_TOPIC_CONFIG,
        RequestCode.GET_ALL_CONSUMER_OFFSET,
        RequestCode.GET_ALL_DELAY_OFFSET,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.GET_BROKER_HA_STATUS,
        RequestCode.EXCHANGE_BROKER_HA_INFO,
        RequestCode.GET_BROKER_RUNTIME_INFO,
        RequestCode.GET_TOPIC_CONFIG,
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.GET_CONSUME_STATS,
        RequestCode.GET_BROKER_CONSUME_STATS,
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
        RequestCode.QUERY_TOPICS_BY_CONSUMER,
        RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER,
        RequestCode.QUERY_CONSUME_TIME_SPAN,
        RequestCode.QUERY_CORRECTION_OFFSET,
        RequestCode.VIEW_BROKER_STATS_DATA,
        RequestCode.QUERY_CONSUME_QUEUE,
        RequestCode.GET_CONSUMER_CONNECTION_LIST,
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        RequestCode.GET_ALL_PRODUCER_INFO,
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
    }
)
"""They tell names and positions, no messages."""

ADMIN_CODES = frozenset(
    {
        # RocketMQ 4.9.7's
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        # what it leaves out
        RequestCode.GET_BROKER_CONFIG,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.CLONE_GROUP_OFFSET,
        RequestCode.GET_CONSUMER_RUNNING_INFO,  # with the stacks of the client's threads
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CLEAN_UNUSED_TOPIC,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        50,  # UPDATE_AND_CREATE_ACL_CONFIG
        51,  # DELETE_ACL_CONFIG
        52,  # GET_BROKER_CLUSTER_ACL_INFO
        53,  # UPDATE_GLOBAL_WHITE_ADDRS_CONFIG
        54,  # GET_BROKER_CLUSTER_ACL_CONFIG, which shows every secret key
    }
)
