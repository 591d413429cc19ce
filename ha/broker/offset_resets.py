"""Request 222 INVOKE_BROKER_TO_RESET_OFFSET: resets a consumer group's offsets in a topic to a point in time, or its
offset in one queue to a given value.

The broker resets the offsets itself, as in RocketMQ 5: it commits the new offset of each queue, ignores the group's
commits for the queue until the group's next pull from it, and answers that pull with PULL_OFFSET_MOVED and the new
offset. With useServerSideResetOffset=false, it asks the group's consumers to reset (RESET_CONSUMER_CLIENT_OFFSET, 220),
as in 4.9; if none is connected, the request fails. Sources: AdminBrokerProcessor.resetOffsetInner,
Broker2Client.resetOffset.
"""

from __future__ import annotations

import logging

from ha.broker.core import BrokerCore
from ha.broker.holds import PullHolds
from ha.broker.queue_times import bounds, offset_at
from ha.broker.refused import refuse_if, refuse_on_slave
from ha.protocol.admin_requests import ResetOffsetsRequest
from ha.protocol.bodies import TopicConfig
from ha.protocol.codes import LanguageCode, RequestCode, ResponseCode
from ha.protocol.group_requests import QueueKey, ResetOffsetRequest, encode_queue_offset_list, encode_queue_offsets
from ha.protocol.headers import parse_header
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler

logger = logging.getLogger(__name__)

ON_SLAVE = "Can not reset offset in slave broker"


class OffsetResets:
    """Resets offsets of consumer groups."""

    def __init__(self, core: BrokerCore, holds: PullHolds) -> None:
        tables = core.tables
        self._store = core.store
        self._topics = tables.topics
        self._groups = tables.groups
        self._offsets = tables.offsets
        self._clients = tables.clients
        self._holds = holds
        self._options = core.options
        self._standing = tables.standing

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self.reset}

    async def reset(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """INVOKE_BROKER_TO_RESET_OFFSET (222): answers with the group's new offset in each queue that is reset. Raises
        RefusedError on a slave and, in a failover group, if the new offsets may be lost."""
        request = parse_header(ResetOffsetsRequest, command.ext_fields)
        refuse_on_slave(self._standing, ON_SLAVE)
        topic = self._topics.get(request.topic)
        if topic is None:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, f"Topic {request.topic} does not exist")
        if self._options.server_side_reset_offset:
            return await self._reset_here(command, request, topic)
        return await self._reset_by_members(command, request, topic)

    async def _reset_here(
        self, command: RemotingCommand, request: ResetOffsetsRequest, topic: TopicConfig
    ) -> RemotingCommand:
        name, group, chosen = request.topic, request.group, request.queue_id
        chosen = -1 if chosen is None else chosen
        if self._groups.get(group) is None:
            return command.reply(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} does not exist")
        if chosen >= max(topic.read_queue_nums, topic.write_queue_nums):
            return command.reply(ResponseCode.SYSTEM_ERROR, f"topic {name} has no queue {chosen}")
        targets: dict[int, int] = {}
        if chosen >= 0 and request.offset not in (None, -1):
            assert request.offset is not None
            queue = self._store.queues.get(name, chosen)
            begin, end = bounds(queue)
            if not begin <= request.offset <= end + 1:
                return command.reply(
                    ResponseCode.SYSTEM_ERROR,
                    f"Target offset {request.offset} not in consume queue range [{begin}-{end}]",
                )
            targets[chosen] = request.offset
        else:
            for queue_id in [chosen] if chosen >= 0 else range(topic.read_queue_nums):
                targets[queue_id] = await self._offset_at(name, queue_id, request.timestamp)
        if not targets:
            return command.reply(ResponseCode.SYSTEM_ERROR, "No queues to reset.")
        refuse_on_slave(self._standing, ON_SLAVE)  # it may have become one during the search
        for queue_id, offset in targets.items():
            if not self._offsets.reset(group, name, queue_id, offset):
                return command.reply(ResponseCode.SYSTEM_ERROR, "this broker holds its maximum of offsets")
        self._holds.wake_all(name)
        refuse_if(await self._offsets.logged())
        logger.info("offsets.reset group=%s topic=%s offsets=%s", group, name, targets)
        return command.reply(ResponseCode.SUCCESS, body=encode_queue_offsets(self._by_queue(name, targets)))

    async def _reset_by_members(
        self, command: RemotingCommand, request: ResetOffsetsRequest, topic: TopicConfig
    ) -> RemotingCommand:
        name, group = request.topic, request.group
        targets: dict[int, int] = {}
        for queue_id in range(topic.write_queue_nums):
            committed = self._offsets.get(group, name, queue_id)
            if committed is None:
                return command.reply(ResponseCode.SYSTEM_ERROR, f"THe consumer group <{group}> not exist")
            wanted = await self._offset_at(name, queue_id, request.timestamp)
            targets[queue_id] = wanted if request.is_force or wanted < committed else committed
        members = self._clients.consumer_group(group)
        if members is None:
            return command.reply(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"Consumer not online, so can not reset offset, Group: {group} Topic: {name} "
                f"Timestamp: {request.timestamp}",
            )
        header = ResetOffsetRequest(topic=name, group=group, timestamp=request.timestamp, is_force=request.is_force)
        table = self._by_queue(name, targets)
        told = RemotingCommand(
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
            ext_fields=header.to_ext_fields(),
            body=(encode_queue_offset_list if command.language is LanguageCode.CPP else encode_queue_offsets)(table),
        )
        for client in members.members:
            if not client.is_closed:
                client.send_oneway(told)
        logger.info("offsets.reset_sent group=%s topic=%s offsets=%s", group, name, targets)
        return command.reply(ResponseCode.SUCCESS, body=encode_queue_offsets(table))

    async def _offset_at(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        queue = self._store.queues.get(topic, queue_id)
        if timestamp_ms < 0:
            return queue.max_offset if queue is not None else 0
        return await offset_at(self._store, queue, timestamp_ms)

    def _by_queue(self, topic: str, targets: dict[int, int]) -> dict[QueueKey, int]:
        return {(topic, self._options.broker_name, queue_id): offset for queue_id, offset in targets.items()}
