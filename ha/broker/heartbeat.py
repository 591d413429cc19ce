"""Registration of clients: 34 HEART_BEAT, 35 UNREGISTER_CLIENT, 38 GET_CONSUMER_LIST_BY_GROUP.

Sources: ClientManageProcessor, ConsumerManageProcessor.
"""

from __future__ import annotations

from ha.broker.core import BrokerCore
from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.acl import ACCESS_KEY
from ha.protocol.bodies import HeartbeatData, decode_heartbeat
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.group_requests import ConsumerList, GetConsumerListRequest, UnregisterClientRequest
from ha.protocol.headers import HeartbeatResponse, parse_header
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX
from ha.remoting import RemotingConnection, RequestHandler

NAME_LENGTH_MAX = 255
"""Maximum characters of a client id, and of the name of a producer group."""


class HeartbeatProcessor:
    """Registers clients in the `ClientRegistry`."""

    def __init__(self, core: BrokerCore) -> None:
        self._is_guarded = core.guard is not None
        self._clients = core.tables.clients
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._options = core.options
        self._standing = core.standing

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
        }

    async def heartbeat(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """HEART_BEAT (34): registers the client's groups; creates missing consumer groups and, on a master, their retry
        topics.

        Ignores a consumer group that can't be created, as 5.x does. Raises RemoteProtocolError if the heartbeat is
        malformed or exceeds a limit.
        """
        options = self._options
        if len(command.body) > options.heartbeat_size_max:
            raise RemoteProtocolError(f"heartbeat of {len(command.body)} bytes; at most {options.heartbeat_size_max}")
        heartbeat = decode_heartbeat(command.body)
        self._check_bounds(heartbeat)
        consumers = []
        for consumer in heartbeat.consumer_data_set:
            group = await self._groups.find_or_create(consumer.group_name)
            if group is None:
                continue
            if not self._standing.is_slave:
                await self._topics.ensure(RETRY_PREFIX + consumer.group_name, max(1, group.retry_queue_nums))
            consumers.append((consumer, group.notify_consumer_ids_changed_enable))
        access_key = command.ext_fields.get(ACCESS_KEY, "") if self._is_guarded else ""
        is_changed = self._clients.register(connection, command, heartbeat, consumers, access_key)
        return command.reply(
            ResponseCode.SUCCESS, ext_fields=HeartbeatResponse(is_sub_change=is_changed).to_ext_fields()
        )

    def _check_bounds(self, heartbeat: HeartbeatData) -> None:
        """Raises RemoteProtocolError for too many groups or subscriptions, or names that are too long."""
        options = self._options
        consumers, producers = heartbeat.consumer_data_set, heartbeat.producer_data_set
        for name, count, count_max in (
            ("consumer groups", len(consumers), options.groups_per_heartbeat_max),
            ("producer groups", len(producers), options.groups_per_heartbeat_max),
            (
                "subscriptions of one group",
                max((len(consumer.subscription_data_set) for consumer in consumers), default=0),
                options.subscriptions_per_group_max,
            ),
            ("characters of a client id", len(heartbeat.client_id), NAME_LENGTH_MAX),
            (
                "characters of a producer group",
                max((len(producer.group_name) for producer in producers), default=0),
                NAME_LENGTH_MAX,
            ),
        ):
            if count > count_max:
                raise RemoteProtocolError(f"heartbeat with {count} {name}; at most {count_max}")

    async def unregister(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """UNREGISTER_CLIENT (35): removes the connection from the producer group and the consumer group that the
        request names."""
        request = parse_header(UnregisterClientRequest, command.ext_fields)
        if request.producer_group:
            self._clients.leave_producers(connection, request.producer_group)
        if request.consumer_group:
            group = self._groups.get(request.consumer_group)
            notifies = group is None or group.notify_consumer_ids_changed_enable
            self._clients.leave_consumers(connection, request.consumer_group, notifies=notifies)
        return command.reply(ResponseCode.SUCCESS)

    async def consumer_list(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_CONSUMER_LIST_BY_GROUP (38): answers with the client ids of a consumer group's members; SYSTEM_ERROR if
        it has none, as in RocketMQ."""
        group = parse_header(GetConsumerListRequest, command.ext_fields).consumer_group
        client_ids = self._clients.consumer_ids(group)
        if not client_ids:
            return command.reply(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(ConsumerList(consumer_id_list=client_ids)))
