"""Connected clients: producer and consumer groups, their members, and the subscriptions of consumer groups.

A member is a connection, as in RocketMQ: it leaves when its connection closes, when it unregisters (UNREGISTER_CLIENT,
35), or after `channel_expired_s` without a heartbeat. When the members or the topics of a consumer group change, every
member gets a oneway NOTIFY_CONSUMER_IDS_CHANGED, so that consumers rebalance at once. It is not sent in a broadcasting
group, nor for a change by a heartbeat or UNREGISTER_CLIENT if the group's configuration forbids that. Sources:
ConsumerManager, ProducerManager, ConsumerGroupInfo.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec
import trio

from ha.broker.options import BrokerOptions
from ha.broker.subscription import SUB_ALL, is_tag_type
from ha.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from ha.protocol.codes import LanguageCode, RequestCode
from ha.protocol.group_requests import ConsumerGroupRequest
from ha.protocol.properties import java_hash
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection

logger = logging.getLogger(__name__)

BROADCASTING = "BROADCASTING"


class Member(msgspec.Struct):
    """One client of a group, on one connection.

    seen_at: time of its last heartbeat, by Trio's clock.
    fingerprint: fingerprint of its last heartbeat; 0 if the heartbeat had none.
    """

    client_id: str
    language: LanguageCode
    version: int
    seen_at: float
    fingerprint: int = 0
    access_key: str = ""
    """Access key of the account that sent the heartbeat; "" without access control"""


class Subscription(msgspec.Struct, frozen=True):
    """A consumer group's subscription to one topic. `version`: the client's subVersion, a timestamp in ms."""

    expression: str
    expression_type: str
    version: int


class ConsumerGroup(msgspec.Struct):
    """A consumer group with at least one member. `members` are in order of arrival; the other fields are from the last
    heartbeat of any member."""

    members: dict[RemotingConnection, Member] = {}
    subscriptions: dict[str, Subscription] = {}
    is_broadcasting: bool = False
    consume_type: str = "CONSUME_PASSIVELY"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"


class ClientRegistry:
    """The groups and their members, at most `client_count_max` memberships; further members are not registered."""

    def __init__(self, options: BrokerOptions) -> None:
        self._options = options
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[RemotingConnection, Member]] = {}
        self._groups_of: dict[RemotingConnection, dict[tuple[bool, str], None]] = {}
        self._producers_by_id: dict[str, dict[RemotingConnection, str]] = {}
        """Client id -> connections that claim it, latest last, and their access keys"""
        self._claimed_ids: dict[RemotingConnection, str] = {}
        """Connection -> the client id of its last heartbeat as a producer"""
        self._membership_count = 0
        self._is_full = False

    def consumer_group(self, group: str) -> ConsumerGroup | None:
        """Returns the group; None if it has no members."""
        return self._consumers.get(group)

    def consumer_groups_of(self, topic: str) -> list[str]:
        """Returns the groups whose members subscribe to a topic."""
        return [name for name, group in self._consumers.items() if topic in group.subscriptions]

    def find_consumer(self, group: str, client_id: str) -> RemotingConnection | None:
        """Returns the connection of the group's member with this client id, the earliest if there are several; or
        None."""
        found = self._consumers.get(group)
        members = found.members.items() if found is not None else ()
        return next((connection for connection, member in members if member.client_id == client_id), None)

    def producer_group(self, group: str) -> Mapping[RemotingConnection, Member]:
        """Returns the producer group's members; empty if it has none."""
        return self._producers.get(group, {})

    def find_producer(self, client_id: str) -> RemotingConnection | None:
        """Returns the connection of the producer with this client id, in any group; of several, the one with the latest
        heartbeat. None if there is none.

        Also None while connections of several accounts claim the client id, as at most one of them is that client.
        """
        claims = self._producers_by_id.get(client_id, {})
        return next(reversed(claims)) if len(set(claims.values())) == 1 else None

    def producer_groups(self) -> list[str]:
        """Returns the producer groups that have members."""
        return list(self._producers)

    def consumer_ids(self, group: str) -> list[str]:
        """Returns the distinct client ids of the group's members, in order of arrival."""
        found = self._consumers.get(group)
        return list(dict.fromkeys(member.client_id for member in found.members.values())) if found else []

    def statistics(self) -> dict[str, int]:
        """Returns the number of memberships by kind: {"producers": n, "consumers": n}."""
        return {
            "producers": sum(map(len, self._producers.values())),
            "consumers": sum(len(group.members) for group in self._consumers.values()),
        }

    def register(
        self,
        connection: RemotingConnection,
        command: RemotingCommand,
        heartbeat: HeartbeatData,
        consumers: Iterable[tuple[ConsumerData, bool]],
        access_key: str = "",
    ) -> bool:
        """Processes a heartbeat.

        consumers: the consumer groups in the heartbeat that exist here, each with a flag whether to notify its members
        of a change.
        access_key: access key of the account that signed the heartbeat; "" without access control.

        Returns IS_SUB_CHANGE, which tells a client that sends fingerprints whether to send its full subscriptions: True
        if the heartbeat has no fingerprint, or if this connection was not yet a member of one of `consumers` with the
        same fingerprint. Does nothing and returns False if the connection is closed.
        """
        if connection.is_closed:
            return False  # closed while its groups were being created: nothing would remove its members
        now = trio.current_time()
        fingerprint = heartbeat.heartbeat_fingerprint or 0
        is_known = fingerprint != 0

        def member() -> Member:
            return Member(heartbeat.client_id, command.language, command.version, now, fingerprint, access_key)

        for producer in heartbeat.producer_data_set:
            self._join(connection, False, producer.group_name, member())
        for consumer, notifies in consumers:
            group = self._consumers.get(consumer.group_name)
            known = group.members.get(connection) if group is not None else None
            is_known = is_known and known is not None and known.fingerprint == fingerprint
            is_new = self._join(connection, True, consumer.group_name, member())
            group = self._consumers.get(consumer.group_name)
            if group is None or connection not in group.members:
                continue  # client_count_max reached
            group.is_broadcasting = consumer.message_model == BROADCASTING
            group.consume_type = consumer.consume_type
            group.consume_from_where = consumer.consume_from_where
            has_changed = not heartbeat.without_sub and _update_subscriptions(group, consumer.subscription_data_set)
            if (is_new or has_changed) and notifies and not group.is_broadcasting:
                self._notify(consumer.group_name)
        return not is_known

    def leave_consumers(self, connection: RemotingConnection, group: str, *, notifies: bool) -> None:
        """Removes a connection from a consumer group; `notifies`: whether to notify the other members."""
        self._leave(connection, True, group, notifies=notifies)

    def leave_producers(self, connection: RemotingConnection, group: str) -> None:
        """Removes a connection from a producer group."""
        self._leave(connection, False, group)

    def drop(self, connection: RemotingConnection) -> None:
        """Removes a closed connection from all groups."""
        for is_consumer, group in list(self._groups_of.get(connection, ())):
            self._leave(connection, is_consumer, group)
        self._groups_of.pop(connection, None)

    async def expire_forever(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Removes members without a heartbeat for `channel_expired_s`; checks every `channel_scan_interval_s`."""
        task_status.started()
        while True:
            await trio.sleep(self._options.channel_scan_interval_s)
            oldest = trio.current_time() - self._options.channel_expired_s
            for connection, memberships in list(self._groups_of.items()):
                for is_consumer, group in list(memberships):
                    members = self._members(is_consumer, group)
                    if members[connection].seen_at < oldest:
                        logger.info("clients.member_expired group=%r client=%r", group, members[connection].client_id)
                        self._leave(connection, is_consumer, group)

    def _members(self, is_consumer: bool, group: str) -> dict[RemotingConnection, Member]:
        return self._consumers[group].members if is_consumer else self._producers[group]

    def _join(self, connection: RemotingConnection, is_consumer: bool, group: str, member: Member) -> bool:
        """Adds or refreshes a membership; returns whether it was added. Adds none beyond `client_count_max`."""
        mine = self._groups_of.get(connection)
        if mine is not None and (is_consumer, group) in mine:
            self._members(is_consumer, group)[connection] = member
            if not is_consumer:
                self._claim_id(connection, member)
            return False
        if self._membership_count >= self._options.client_count_max:
            if not self._is_full:
                self._is_full = True
                logger.warning('clients.full memberships=%d hint="new members are refused"', self._membership_count)
            return False
        if mine is None:
            mine = self._groups_of[connection] = {}
            connection.on_close(lambda: self.drop(connection))
        mine[is_consumer, group] = None
        self._membership_count += 1
        if is_consumer:
            self._consumers.setdefault(group, ConsumerGroup()).members[connection] = member
        else:
            self._producers.setdefault(group, {})[connection] = member
            self._claim_id(connection, member)
        return True

    def _claim_id(self, connection: RemotingConnection, member: Member) -> None:
        self._release_id(connection)
        self._claimed_ids[connection] = member.client_id
        self._producers_by_id.setdefault(member.client_id, {})[connection] = member.access_key

    def _release_id(self, connection: RemotingConnection) -> None:
        client_id = self._claimed_ids.pop(connection, None)
        if client_id is not None:
            claims = self._producers_by_id[client_id]
            del claims[connection]
            if not claims:
                del self._producers_by_id[client_id]

    def _leave(self, connection: RemotingConnection, is_consumer: bool, group: str, *, notifies: bool = True) -> None:
        mine = self._groups_of.get(connection, {})
        if (is_consumer, group) not in mine:
            return
        del mine[is_consumer, group]
        self._membership_count -= 1
        self._is_full = False
        members = self._members(is_consumer, group)
        del members[connection]
        if is_consumer:
            if members and notifies and not self._consumers[group].is_broadcasting:
                self._notify(group)
            if not members:
                del self._consumers[group]
            return
        if not members:
            del self._producers[group]
        is_producer = any(not consumes for consumes, _ in mine)
        if not is_producer:
            self._release_id(connection)

    def _notify(self, group: str) -> None:
        """Sends NOTIFY_CONSUMER_IDS_CHANGED to every member of a group, also to the one that caused the change."""
        command = RemotingCommand(
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
            ext_fields=ConsumerGroupRequest(consumer_group=group).to_ext_fields(),
        )
        for connection in self._consumers[group].members:
            if not connection.is_closed:
                connection.send_oneway(command)


def subscription_body(topic: str, subscription: Subscription) -> SubscriptionData:
    """Returns a subscription as `SubscriptionData`, the form in which answers contain it."""
    tags: list[str] = []
    if is_tag_type(subscription.expression_type) and subscription.expression.strip() != SUB_ALL:
        tags = [tag for part in subscription.expression.split("||") if (tag := part.strip())]
    return SubscriptionData(
        code_set=[java_hash(tag) for tag in tags],
        expression_type=subscription.expression_type,
        sub_string=subscription.expression,
        sub_version=subscription.version,
        tags_set=tags,
        topic=topic,
    )


def _update_subscriptions(group: ConsumerGroup, asked: Iterable[SubscriptionData]) -> bool:
    """Sets the group's subscriptions to those of a heartbeat; returns whether the set of topics changed.

    A known subscription is replaced only by one with a higher version.
    """
    wanted = {subscription.topic: subscription for subscription in asked}
    dropped = [topic for topic in group.subscriptions if topic not in wanted]
    for topic in dropped:
        del group.subscriptions[topic]
    has_changed = bool(dropped)
    for topic, subscription in wanted.items():
        known = group.subscriptions.get(topic)
        has_changed |= known is None
        if known is None or subscription.sub_version > known.version:
            group.subscriptions[topic] = Subscription(
                subscription.sub_string, subscription.expression_type, subscription.sub_version
            )
    return has_changed
