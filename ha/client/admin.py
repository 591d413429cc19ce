"""Administers a cluster: topics, consumer groups, users and their policies, and offsets. Also finds messages by key, id
or time.

Each broker knows only its own topics, groups and messages, so most methods combine the responses of all masters.
Sources: DefaultMQAdminExtImpl, MQAdminImpl.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TypeVar

import msgspec

from ha.client.client import Client, ClientUser, NameServers
from ha.client.connections import Connections
from ha.client.messages import MessageQueue, PullStatus, ReadFrom, ReceivedMessage
from ha.client.options import ClientOptions
from ha.client.queue_requests import QueueRequests
from ha.client.reading import pull_on
from ha.client.received import received
from ha.client.routes import Routes, TopicRoute
from ha.errors import BrokerError, ClientError, ConnectionFailed, RemoteProtocolError
from ha.protocol import java_json
from ha.protocol import properties as names
from ha.protocol.access_bodies import (
    AclInfo,
    DeleteAclRequest,
    PolicyInfo,
    SubjectRequest,
    UserInfo,
    UserRequest,
    subject_of,
    username_of,
)
from ha.protocol.acl import AclCredentials
from ha.protocol.admin_requests import (
    BrokerNameRequest,
    ClientConnection,
    ConsumerConnections,
    ConsumeStatsRequest,
    CreateTopicRequest,
    DeleteGroupRequest,
    GroupList,
    GroupRequest,
    ProducerConnections,
    ProducerGroupRequest,
    QueryMessageRequest,
    QueueStats,
    ResetOffsetsRequest,
    TopicRequest,
    ViewMessageRequest,
    decode_consume_stats,
    decode_topic_stats,
)
from ha.protocol.bodies import ClusterInfo, GroupConfig, GroupTable, KVTable, TopicConfig, TopicConfigTable, TopicList
from ha.protocol.codes import MASTER_ID, Permission, RequestCode, ResponseCode
from ha.protocol.group_requests import (
    ConsumeDirectlyRequest,
    ConsumeDirectlyResult,
    ConsumerGroupRequest,
    ConsumerStatusRequest,
    RunningInfo,
    RunningInfoRequest,
    decode_consumer_status,
    decode_queue_offsets,
    decode_running_info,
)
from ha.protocol.headers import Header
from ha.protocol.java_json import read_as
from ha.protocol.message_id import decode_message_id
from ha.protocol.record import MessageRecord, decode_record, decode_records
from ha.protocol.remoting import RemotingCommand

ListT = TypeVar("ListT")

_FOUND_MAX = 64
_TIME_END_MS = (1 << 63) - 1
_GROUP = "halog-admin"
_VERSION_BEFORE_SIGNED_QUERIES = 399
"""Protocol version (V4_9_3) sent with QUERY_MESSAGE requests. From clients of later versions, brokers with access
control expect a signature that includes the field _UNIQUE_KEY_QUERY; 4.9 brokers always leave the field out."""


class Broker(msgspec.Struct, frozen=True):
    """One broker set. `addresses` has host:port by broker id: 0 is the master, the others are slaves."""

    cluster: str
    name: str
    addresses: dict[int, str]


class QueueProgress(msgspec.Struct, frozen=True):
    """A group's progress in one queue: it has consumed the queue offsets [0, consumer_offset) of [0, broker_offset).

    `last_timestamp_ms`: store time of the last consumed message, 0 if unknown. `in_flight`: number of messages that
    members have received but not committed or acknowledged."""

    queue: MessageQueue
    broker_offset: int
    consumer_offset: int
    last_timestamp_ms: int
    in_flight: int

    @property
    def lag(self) -> int:
        """Number of messages not consumed yet."""
        return self.broker_offset - self.consumer_offset


class ConsumerProgress(msgspec.Struct, frozen=True):
    """A group's progress in its queues, or in those of one topic, and the rate at which it consumes, summed over the
    brokers."""

    group: str
    queues: list[QueueProgress]
    messages_per_s: float

    @property
    def lag(self) -> int:
        """Number of messages not consumed yet, over all queues."""
        return sum(queue.lag for queue in self.queues)


class Admin(ClientUser):
    """Inspects and changes a cluster. An async context manager; works under asyncio and trio, with halog and RocketMQ.

        async with Admin("127.0.0.1:9876") as admin:
            print((await admin.consumer_progress("billing")).lag)

    `name_servers`, `options` and `credentials` are those of Producer. All methods raise BrokerError, RequestTimedOut,
    ConnectionFailed, and RemoteProtocolError for a malformed response. A change on several brokers stops at the first
    that fails; it is safe to repeat. `broker_names`: the broker sets whose masters are asked, by default all broker
    sets that have a master. ConnectionFailed is raised if a named broker set has no master, or if no broker set has
    one.
    """

    def __init__(
        self,
        name_servers: Client | NameServers = None,
        *,
        options: ClientOptions | None = None,
        credentials: AclCredentials | None = None,
    ) -> None:
        super().__init__(name_servers, options, credentials)

        self._options = self._client.options
        self._requests = QueueRequests(self._client, _GROUP, ReadFrom.SUGGESTED)

    @property
    def _routes(self) -> Routes:
        return self._client.routes

    @property
    def _connections(self) -> Connections:
        return self._client.connections

    # The cluster

    async def brokers(self) -> list[Broker]:
        """All broker sets that the name servers know, sorted by cluster and name."""
        answer = await self._routes.ask_name_servers(RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO))
        found = read_as(ClusterInfo, answer.body).broker_addr_table.values()
        brokers = [Broker(each.cluster, each.broker_name, dict(each.broker_addrs)) for each in found]
        return sorted(brokers, key=lambda broker: (broker.cluster, broker.name))

    async def wipe_write_permission(self, broker_name: str) -> int:
        """Removes write permission for the queues of a broker set from the routes of all name servers, so that
        producers send to other broker sets: WIPE_WRITE_PERM_OF_BROKER (205). Returns the number of topics on the broker
        set.

        The change lasts until the broker set registers changed topics, or `add_write_permission` is called. The broker
        itself still accepts messages: producers learn of the change when they next look up routes, by default every
        30 s."""
        return await self._set_write_permission(RequestCode.WIPE_WRITE_PERM_OF_BROKER, "wipeTopicCount", broker_name)

    async def add_write_permission(self, broker_name: str) -> int:
        """Undoes `wipe_write_permission` with ADD_WRITE_PERM_OF_BROKER (327): sets read and write permission for all
        queues of a broker set, even for queues that had fewer permissions before. Returns the number of topics on the
        broker set."""
        return await self._set_write_permission(RequestCode.ADD_WRITE_PERM_OF_BROKER, "addTopicCount", broker_name)

    async def _set_write_permission(self, code: RequestCode, count_field: str, broker_name: str) -> int:
        count = 0
        for address in self._client.name_servers:
            answer = await self._ask(address, code, BrokerNameRequest(broker_name=broker_name))
            told = answer.ext_fields.get(count_field, "")
            count = max(count, int(told) if told.isdecimal() and len(told) < 10 else 0)
        return count

    async def broker_figures(self, address: str) -> dict[str, str]:
        """Runtime figures of the broker at `address` (host:port) as text, by RocketMQ's names: GET_BROKER_RUNTIME_INFO
        (28)."""
        answer = await self._ask(address, RequestCode.GET_BROKER_RUNTIME_INFO)
        return read_as(KVTable, answer.body).table

    # Topics

    async def topics(self) -> list[str]:
        """All topics that the name servers know, including system topics, sorted."""
        return await self._routes.topics()

    async def route(self, topic: str) -> TopicRoute:
        """The route of `topic`. Raises RouteNotFound if no name server knows the topic."""
        return await self._routes.find(topic)

    async def topic_configs(self, broker_name: str) -> dict[str, TopicConfig]:
        """The topic configurations of one broker set's master."""
        answer = await self._ask(await self._master(broker_name), RequestCode.GET_ALL_TOPIC_CONFIG)
        return read_as(TopicConfigTable, answer.body).topic_config_table

    async def create_topic(
        self,
        topic: str,
        *,
        queue_count: int = 8,
        permission: int = Permission.READ | Permission.WRITE,
        attributes: Mapping[str, str] | None = None,
        broker_names: Sequence[str] | None = None,
    ) -> None:
        """Creates or changes `topic`, with `queue_count` queues on each of the named broker sets. If the topic had
        more, consumers no longer read the others; `change_topic` can lower the number of write queues alone.

        `permission`: bits of `Permission`. `attributes`: topic attributes of RocketMQ 5 to set, for example
        {"message.type": "PRIORITY"}; all others are left as they are."""
        config = TopicConfig(
            topic_name=topic, read_queue_nums=queue_count, write_queue_nums=queue_count, perm=permission
        )
        await self.change_topic(config, attributes=attributes, broker_names=broker_names)

    async def change_topic(
        self,
        config: TopicConfig,
        *,
        attributes: Mapping[str, str] | None = None,
        broker_names: Sequence[str] | None = None,
    ) -> None:
        """Creates a topic with the settings of `config` on each of the named broker sets, or gives all of these
        settings to an existing topic.

        Sets only the topic attributes in `attributes`, and leaves the others as they are. `config.attributes` is
        ignored."""
        header = CreateTopicRequest(
            topic=config.topic_name,
            read_queue_nums=config.read_queue_nums,
            write_queue_nums=config.write_queue_nums,
            perm=config.perm,
            topic_filter_type=config.topic_filter_type,
            topic_sys_flag=config.topic_sys_flag,
            order=config.order,
            attributes=",".join(f"+{name}={value}" for name, value in attributes.items()) if attributes else None,
        )
        await self._ask_masters(RequestCode.UPDATE_AND_CREATE_TOPIC, header, broker_names=broker_names)
        self._routes.mark_stale(config.topic_name)

    async def delete_topic(self, topic: str) -> None:
        """Deletes `topic` on all masters and name servers; its messages become unreachable at once. Broker sets without
        a master are skipped; ConnectionFailed is then raised at the end."""
        known = await self.brokers()
        await self._ask_masters(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic=topic))
        # The first name server comes last: clients look up routes there, and find the topic until all others have
        # deleted it.
        for address in reversed(self._client.name_servers):
            await self._ask(address, RequestCode.DELETE_TOPIC_IN_NAMESRV, TopicRequest(topic=topic))
        self._routes.forget(topic)
        check_masters(known)

    async def topic_stats(self, topic: str) -> dict[MessageQueue, QueueStats]:
        """Offsets and last store time of each queue of `topic`, from the masters that have it. Raises RouteNotFound.

        Empty for a topic that was deleted on brokers but is still known to name servers."""
        route = await self._routes.find(topic)
        found: dict[MessageQueue, QueueStats] = {}
        for address in _masters_of(route):
            answer = await self._ask_if(
                address,
                RequestCode.GET_TOPIC_STATS_INFO,
                TopicRequest(topic=topic),
                absent=(ResponseCode.TOPIC_NOT_EXIST,),
            )
            if answer is not None:
                found |= {MessageQueue(*queue): stats for queue, stats in decode_topic_stats(answer.body).items()}
        return dict(sorted(found.items()))

    # Users of ACL 2.0

    async def users(self, *, broker_names: Sequence[str] | None = None) -> list[UserInfo]:
        """All users, sorted by name. Passwords are included only if `credentials` are those of a super user."""
        found: dict[str, UserInfo] = {}
        for answer in await self._ask_masters(RequestCode.AUTH_LIST_USER, broker_names=broker_names):
            found |= {user.username or "": user for user in _list_of(list[UserInfo], answer.body)}
        return [found[name] for name in sorted(found)]

    async def policies(self, *, broker_names: Sequence[str] | None = None) -> dict[str, list[PolicyInfo]]:
        """The policies of all users that have any, by user name."""
        found: dict[str, list[PolicyInfo]] = {}
        for answer in await self._ask_masters(RequestCode.AUTH_LIST_ACL, broker_names=broker_names):
            found |= {username_of(acl.subject): acl.policies or [] for acl in _list_of(list[AclInfo], answer.body)}
        return found

    async def create_user(self, user: UserInfo, *, broker_names: Sequence[str] | None = None) -> None:
        """Creates a user on all masters that don't have it yet. Raises BrokerError if every master has it.

        Without `broker_names`, broker sets without a master are skipped, and ConnectionFailed is raised at the end."""
        header, body = UserRequest(username=user.username or ""), java_json.dumps(user)
        code = RequestCode.AUTH_CREATE_USER
        await self._change_masters(code, header, body, done="user is existed", broker_names=broker_names)

    async def delete_user(self, name: str) -> None:
        """Deletes a user and its policies on all masters. Broker sets without a master are skipped; ConnectionFailed is
        then raised at the end."""
        await self._change_masters(RequestCode.AUTH_DELETE_USER, UserRequest(username=name))

    async def update_policies(
        self, name: str, policies: list[PolicyInfo], *, broker_names: Sequence[str] | None = None
    ) -> None:
        """Adds entries to a user's policies, and replaces those of the same type and resource, on all masters.

        Without `broker_names`, broker sets without a master are skipped, and ConnectionFailed is raised at the end."""
        body = java_json.dumps(AclInfo(subject=subject_of(name), policies=policies))
        header = SubjectRequest(subject=subject_of(name))
        await self._change_masters(RequestCode.AUTH_UPDATE_ACL, header, body, broker_names=broker_names)

    async def delete_policy(self, name: str, resource: str, policy_type: str) -> None:
        """Deletes the entry for `resource` from a user's policy of type `policy_type`, on all masters.

        Raises BrokerError if no master has policies of the user. Broker sets without a master are skipped;
        ConnectionFailed is then raised at the end."""
        header = DeleteAclRequest(subject=subject_of(name), resource=resource, policy_type=policy_type)
        await self._change_masters(RequestCode.AUTH_DELETE_ACL, header, done="is not exist")

    # Groups

    async def groups(self, *, broker_names: Sequence[str] | None = None) -> dict[str, GroupConfig]:
        """The configurations of all consumer groups, sorted by group name. If brokers have different configurations of
        a group, one of them is returned."""
        found: dict[str, GroupConfig] = {}
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        for answer in await self._ask_masters(code, broker_names=broker_names):
            found |= read_as(GroupTable, answer.body).subscription_group_table
        return dict(sorted(found.items()))

    async def create_group(self, config: GroupConfig, *, broker_names: Sequence[str] | None = None) -> None:
        """Creates or changes a consumer group. Its attributes are left as they are; those in `config` are ignored."""
        config = msgspec.structs.replace(config, attributes={})  # RocketMQ 5 expects changes here: `+name` and `-name`
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await self._ask_masters(code, body=java_json.dumps(config), broker_names=broker_names)

    async def delete_group(self, group: str, *, forget_offsets: bool = True) -> None:
        """Deletes a consumer group on all masters, with `forget_offsets` also its committed offsets. Broker sets
        without a master are skipped; ConnectionFailed is then raised at the end."""
        header = DeleteGroupRequest(group_name=group, clean_offset=forget_offsets)
        await self._change_masters(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    async def groups_of(self, topic: str) -> list[str]:
        """The groups that consume or have consumed `topic`, sorted. Raises RouteNotFound."""
        found: set[str] = set()
        for address in _masters_of(await self._routes.find(topic)):
            answer = await self._ask(address, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicRequest(topic=topic))
            found |= set(read_as(GroupList, answer.body).group_list)
        return sorted(found)

    async def topics_of(self, group: str) -> list[str]:
        """The topics that `group` consumes or has consumed, sorted. Not supported by RocketMQ 4.9 (BrokerError with
        REQUEST_CODE_NOT_SUPPORTED, 3)."""
        found: set[str] = set()
        for answer in await self._ask_masters(RequestCode.QUERY_TOPICS_BY_CONSUMER, GroupRequest(group=group)):
            found |= set(read_as(TopicList, answer.body).topic_list)
        return sorted(found)

    async def consumer_connections(self, group: str) -> ConsumerConnections:
        """The current members of a consumer group on all masters, and the subscriptions known to one of the masters;
        empty if no member is connected."""
        found = ConsumerConnections()
        known: set[ClientConnection] = set()
        for address in await self._masters(None):
            answer = await self._ask_if(
                address,
                RequestCode.GET_CONSUMER_CONNECTION_LIST,
                ConsumerGroupRequest(consumer_group=group),
                absent=(ResponseCode.CONSUMER_NOT_ONLINE,),
            )
            if answer is not None:
                found = read_as(ConsumerConnections, answer.body)
                known |= set(found.connection_set)
        found.connection_set = sorted(known, key=lambda each: (each.client_id, each.client_addr))
        return found

    async def producer_connections(self, group: str) -> list[ClientConnection]:
        """The current members of a producer group, sorted by client id; empty if there are none."""
        known: set[ClientConnection] = set()
        for address in await self._masters(None):
            try:
                answer = await self._ask(
                    address, RequestCode.GET_PRODUCER_CONNECTION_LIST, ProducerGroupRequest(producer_group=group)
                )
            except BrokerError as error:
                # Denied access has the code SYSTEM_ERROR, too.
                if error.remark != f"the producer group[{group}] not exist":
                    raise
            else:
                known |= set(read_as(ProducerConnections, answer.body).connection_set)
        return sorted(known, key=lambda each: (each.client_id, each.client_addr))

    async def running_info(self, group: str, client_id: str) -> RunningInfo:
        """The runtime state of one member of a consumer group: its queues, subscriptions and rates. A broker requests
        it from the member. Raises BrokerError if the member is not connected. If a master can't be asked, raises that
        master's error instead, because the member may be connected there."""
        header = RunningInfoRequest(consumer_group=group, client_id=client_id)
        answer = await self._ask_first(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        return decode_running_info(answer.body)

    async def consume_directly(self, group: str, client_id: str, offset_message_id: str) -> ConsumeDirectlyResult:
        """Makes one member of a consumer group handle the message with this offset message id, whether or not the
        message's queue is assigned to the member. Raises ValueError for an invalid id."""
        address = _address_in(offset_message_id)
        header = ConsumeDirectlyRequest(consumer_group=group, client_id=client_id, msg_id=offset_message_id)
        answer = await self._ask(address, RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
        return read_as(ConsumeDirectlyResult, answer.body)

    async def consumer_status(self, topic: str, group: str) -> dict[str, dict[MessageQueue, int]]:
        """The queue offsets that each member of a group reports for its queues of `topic`, by client id and queue.
        Raises RouteNotFound."""
        header = ConsumerStatusRequest(topic=topic, group=group)
        found: dict[str, dict[MessageQueue, int]] = {}
        for address in _masters_of(await self._routes.find(topic)):
            answer = await self._ask(address, RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)
            for client_id, offsets in decode_consumer_status(answer.body).items():
                known = found.setdefault(client_id, {})
                known.update({MessageQueue(*queue): offset for queue, offset in offsets.items()})
        return found

    # Offsets

    async def consumer_progress(
        self, group: str, topic: str | None = None, *, broker_names: Sequence[str] | None = None
    ) -> ConsumerProgress:
        """The progress of `group` in `topic`, by default in all topics that it consumes."""
        queues: list[QueueProgress] = []
        rate = 0.0
        header = ConsumeStatsRequest(consumer_group=group, topic=topic)
        for answer in await self._ask_masters(RequestCode.GET_CONSUME_STATS, header, broker_names=broker_names):
            table, consumed_per_s = decode_consume_stats(answer.body)
            rate += consumed_per_s
            for queue, each in table.items():
                in_flight = max(0, each.pull_offset - each.consumer_offset)
                queues.append(
                    QueueProgress(
                        MessageQueue(*queue), each.broker_offset, each.consumer_offset, each.last_timestamp, in_flight
                    )
                )
        return ConsumerProgress(group, sorted(queues, key=lambda each: each.queue), rate)

    async def reset_offsets(self, group: str, topic: str, to: datetime | None) -> dict[MessageQueue, int]:
        """Moves `group`, in each queue of `topic`, to the first message stored at `to` or later; None: to the end.

        Connected members follow at once. Returns the new queue offset of each queue. RocketMQ 4.9 rejects this
        (BrokerError with CONSUMER_NOT_ONLINE, 206) while no member is connected. Raises RouteNotFound."""
        # A negative time means the end of the queue.
        time_ms = -1 if to is None else max(0, int(to.timestamp() * 1000))
        header = ResetOffsetsRequest(topic=topic, group=group, timestamp=time_ms, is_force=True)
        found: dict[MessageQueue, int] = {}
        for address in _masters_of(await self._routes.find(topic)):
            answer = await self._ask(address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
            found |= {MessageQueue(*queue): offset for queue, offset in decode_queue_offsets(answer.body).items()}
        return dict(sorted(found.items()))

    # Messages

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        begin: datetime | None = None,
        end: datetime | None = None,
        max_count: int = _FOUND_MAX,
    ) -> list[ReceivedMessage]:
        """The newest messages of `topic` with `key`, oldest first: up to `max_count` (each broker returns at most 64).

        Includes only messages stored from `begin` to `end` (both inclusive, to the second); None: no limit. Raises
        RouteNotFound."""
        found = await self._query(topic, key, begin, end, max_count, is_unique=False)
        same = [message for message in found if key in message.keys]
        return same[max(0, len(same) - max_count) :]

    async def message_by_id(self, topic: str, message_id: str) -> ReceivedMessage | None:
        """The message with this unique id (`SendResult.message_id`), the newest if there are several; None if there is
        none. Raises RouteNotFound."""
        found = await self._query(topic, message_id, None, None, _FOUND_MAX, is_unique=True)
        same = [message for message in found if message.properties.get(names.UNIQ_KEY) == message_id]
        return same[-1] if same else None

    async def message_at(self, offset_message_id: str) -> ReceivedMessage | None:
        """The message with this offset message id; None if it no longer exists. Raises ValueError for an invalid id,
        and BrokerError if the message is damaged."""
        address = _address_in(offset_message_id)
        _, _, physical_offset = decode_message_id(offset_message_id)
        try:
            answer = await self._ask(
                address, RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(offset=physical_offset)
            )
        except BrokerError as error:
            # Damage and denied access have the code SYSTEM_ERROR, too.
            is_absent = error.remark == f"can not find message by the offset, {physical_offset}"
            if is_absent or error.code == ResponseCode.QUERY_NOT_FOUND:
                return None
            raise
        record = decode_record(answer.body)
        at = [broker.name for broker in await self.brokers() if address in broker.addresses.values()]
        return self._received(record, MessageQueue(record.topic, at[0] if at else "", record.queue_id))

    def _received(self, record: MessageRecord, queue: MessageQueue) -> ReceivedMessage:
        return received(record, queue, self._options.message_size_max)

    async def messages_between(
        self, topic: str, begin: datetime, end: datetime | None = None
    ) -> AsyncIterator[ReceivedMessage]:
        """Yields the messages of `topic` stored in [begin, end), queue by queue, in order. Raises RouteNotFound.

        `end` None: up to the last message. Messages that arrive in a queue while it is being read are not included.
        Waits while a message can't be read at present (see `PullConsumer.reading`). Raises ConnectionFailed if a queue
        turns out to be shorter than when its reading began, for example because only a slave that is behind can be
        reached."""
        begin_ms, end_ms = _ms(begin, 0), _ms(end, _TIME_END_MS)
        pull = partial(self._requests.pull, subscription="*")
        for queue in (await self._routes.find(topic)).read_queues:
            last = await self._requests.max_offset(queue)
            offset = await self._requests.offset_for_time(queue, begin_ms)
            while offset < last:
                raw = await pull_on(pull, queue, offset)
                if raw.status is PullStatus.FOUND:
                    records = decode_records(raw.body)
                    for record in records:
                        if record.queue_offset < last and begin_ms <= record.store_timestamp_ms < end_ms:
                            yield self._received(record, queue)
                    if records and records[-1].store_timestamp_ms >= end_ms:
                        break
                if raw.next_offset <= offset:
                    reason = (
                        f"the queue now ends at queue offset {raw.next_offset}, before its end at the start, {last}"
                    )
                    raise ConnectionFailed(f"{queue.broker_name} queue {queue.queue_id}", reason)
                offset = raw.next_offset

    async def _query(
        self, topic: str, key: str, begin: datetime | None, end: datetime | None, max_count: int, *, is_unique: bool
    ) -> list[ReceivedMessage]:
        header = QueryMessageRequest(
            topic=topic,
            key=key,
            max_num=max_count,
            begin_timestamp=_ms(begin, 0),
            end_timestamp=_ms(end, _TIME_END_MS),
            unique_key_query=is_unique or None,
        )
        route = await self._routes.find(topic)
        found = []
        for name in route.addresses:
            address = route.address_of(name, route.broker_id_for(name, ReadFrom.SUGGESTED))
            answer = await self._ask_if(
                address, RequestCode.QUERY_MESSAGE, header, absent=(ResponseCode.QUERY_NOT_FOUND,)
            )
            if answer is not None:
                for record in decode_records(answer.body):
                    found.append(self._received(record, MessageQueue(record.topic, name, record.queue_id)))
        return sorted(found, key=lambda message: message.store_timestamp_ms)

    async def _ask_masters(
        self,
        code: RequestCode,
        header: Header | None = None,
        body: bytes = b"",
        *,
        broker_names: Sequence[str] | None = None,
    ) -> list[RemotingCommand]:
        """Sends a request to the masters of `broker_names` (see `_masters`), one after the other, and returns the
        responses. Raises BrokerError at the first rejection."""
        return [await self._ask(address, code, header, body) for address in await self._masters(broker_names)]

    async def _change_masters(
        self,
        code: RequestCode,
        header: Header,
        body: bytes = b"",
        *,
        done: str | None = None,
        broker_names: Sequence[str] | None = None,
    ) -> None:
        """Sends a request for a change to the masters of `broker_names` (see `_masters`), one after the other.

        `done`: part of the remark with which a master rejects a change that it has made before. Raises BrokerError at
        the first other rejection, or if all masters reject with `done`. Without `broker_names`, broker sets without a
        master are skipped; ConnectionFailed is then raised at the end."""
        refusals: list[BrokerError] = []
        known = await self.brokers()
        masters = await self._masters(broker_names)
        for address in masters:
            try:
                await self._ask(address, code, header, body)
            except BrokerError as error:
                if done is None or done not in error.remark:
                    raise
                refusals.append(error)
        if refusals and len(refusals) == len(masters):
            raise refusals[0]
        if broker_names is None:
            check_masters(known)

    async def _ask_first(self, code: RequestCode, header: Header) -> RemotingCommand:
        """Asks one master after the other; returns the first successful response.

        If none succeeds, raises the error of the first master that did not answer, because that one might have
        succeeded, or the last BrokerError if all have answered."""
        failure: ClientError | None = None
        for address in await self._masters(None):
            try:
                return await self._ask(address, code, header)
            except ClientError as error:
                if failure is None or isinstance(failure, BrokerError):
                    failure = error
        assert failure is not None  # there is at least one master
        raise failure

    async def _master(self, broker_name: str) -> str:
        (address,) = await self._masters([broker_name])
        return address

    async def _masters(self, broker_names: Sequence[str] | None) -> list[str]:
        """The addresses of the masters of `broker_names`; None: of all broker sets that have a master. Raises
        ConnectionFailed if a named broker set has no master, or if no broker set has one."""
        known = {broker.name: broker.addresses.get(MASTER_ID) for broker in await self.brokers()}
        if broker_names is None:
            masters = [address for address in known.values() if address is not None]
            if not masters:
                raise ConnectionFailed("; ".join(self._client.name_servers), "no master is registered")
            return masters
        found = []
        for name in broker_names:
            address = known.get(name)
            if address is None:
                raise ConnectionFailed(name, "no master is registered for this name")
            found.append(address)
        return found

    async def _ask(
        self, address: str, code: RequestCode, header: Header | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """Sends a request and returns the successful response. Raises BrokerError for any other code."""
        fields = {} if header is None else header.to_ext_fields()
        command = RemotingCommand(code, ext_fields=fields, body=body)
        if code == RequestCode.QUERY_MESSAGE:
            command.version = _VERSION_BEFORE_SIGNED_QUERIES
        return await self._connections.request(address, command)

    async def _ask_if(
        self, address: str, code: RequestCode, header: Header, absent: tuple[int, ...]
    ) -> RemotingCommand | None:
        """As `_ask`, but returns None for the response codes in `absent`, which mean that the broker has nothing to
        return."""
        try:
            return await self._ask(address, code, header)
        except BrokerError as error:
            if error.code in absent:
                return None
            raise


def check_masters(brokers: Sequence[Broker]) -> None:
    """Raises ConnectionFailed if one of `brokers` has no master, or if `brokers` is empty. Call this after a change
    on all masters, which has skipped the broker sets without a master."""
    unchanged = [broker.name for broker in brokers if MASTER_ID not in broker.addresses]
    if unchanged or not brokers:
        name = ", ".join(unchanged) or "all brokers"
        raise ConnectionFailed(name, "no master is registered, so nothing changed there; repeat it")


def _list_of(kind: type[ListT], body: bytes | memoryview) -> ListT:
    """Returns the list in a response body; an empty body is an empty list."""
    return read_as(kind, body or b"[]")


def _address_in(offset_message_id: str) -> str:
    try:
        host, port, _ = decode_message_id(offset_message_id)
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _masters_of(route: TopicRoute) -> list[str]:
    return [route.master_of(name) for name in sorted(route.addresses)]


def _ms(moment: datetime | None, otherwise: int) -> int:
    return otherwise if moment is None else int(moment.timestamp() * 1000)
