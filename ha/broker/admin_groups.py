"""Requests about consumer groups: 200 UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, 225
UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, 207 DELETE_SUBSCRIPTIONGROUP, 352 GET_SUBSCRIPTIONGROUP_CONFIG, 314
CLONE_GROUP_OFFSET.

Source: AdminBrokerProcessor, SubscriptionGroupManager.
"""

from __future__ import annotations

import msgspec

from ha.broker.core import BrokerCore
from ha.broker.refused import RefusedError, refuse_if, refuse_on_slave
from ha.broker.topics import topic_fault
from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.admin_requests import CloneOffsetRequest, DeleteGroupRequest, GroupConfigList, GroupRequest
from ha.protocol.bodies import LIST_SIZE_MAX, GroupConfig, GroupTable
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import parse_header
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler

GROUP_LENGTH_MAX = 120
"""Maximum characters of a group's name, which becomes part of topic names."""
RETRY_QUEUE_COUNT_MAX = 1024
"""Maximum number of queues of a group's retry topic."""


class AdminGroups:
    """Answers admin requests about consumer groups."""

    def __init__(self, core: BrokerCore) -> None:
        tables = core.tables
        self._topics = tables.topics
        self._groups = tables.groups
        self._offsets = tables.offsets
        self._clients = tables.clients
        self._reads = tables.reads
        self._standing = tables.standing

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self.update_list,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self.show,
            RequestCode.CLONE_GROUP_OFFSET: self.clone_offsets,
        }

    async def update(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP (200): creates or changes a group. An empty body changes nothing, as in
        RocketMQ."""
        _check_size(command)
        if not command.body:
            return command.reply(ResponseCode.SUCCESS)
        return await self._update(command, [java_json.read_as(GroupConfig, command.body)])

    async def update_list(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225): creates or changes several groups, all or none."""
        _check_size(command)
        return await self._update(command, java_json.read_as(GroupConfigList, command.body).group_config_list)

    async def _update(self, command: RemotingCommand, groups: list[GroupConfig]) -> RemotingCommand:
        for group in groups:
            refuse_if(group_fault(group), ResponseCode.INVALID_PARAMETER)
        refuse_on_slave(self._standing, "Can't change a group on a slave: it takes over its master's groups")
        refuse_if(await self._groups.update(groups))
        return command.reply(ResponseCode.SUCCESS)

    async def delete(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """DELETE_SUBSCRIPTIONGROUP (207): deletes a group, and its offsets if requested."""
        request = parse_header(DeleteGroupRequest, command.ext_fields)
        refuse_on_slave(self._standing, "Can't delete a group on a slave: it takes over its master's groups")
        refuse_if(await self._groups.delete(request.group_name))
        self._reads.forget(group=request.group_name)
        if request.clean_offset:
            self._offsets.remove(group=request.group_name)
            refuse_if(await self._offsets.logged())
        return command.reply(ResponseCode.SUCCESS)

    async def show(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_SUBSCRIPTIONGROUP_CONFIG (352): answers with one group's configuration; SUBSCRIPTION_GROUP_NOT_EXIST if
        there is no such group.

        RocketMQ creates the group if allowed; here a query changes nothing.
        """
        config = self._groups.get(parse_header(GroupRequest, command.ext_fields).group)
        if config is None:
            return command.reply(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "No group in this broker")
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(config))

    async def clone_offsets(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """CLONE_GROUP_OFFSET (314): copies a group's offsets of one topic, or of all its topics, to another group.

        Skips topics that this broker does not have and, if the group is online and `offline` is false, topics to which
        it is no longer subscribed.
        """
        request = parse_header(CloneOffsetRequest, command.ext_fields)
        refuse_if(group_fault(GroupConfig(group_name=request.dest_group)), ResponseCode.INVALID_PARAMETER)
        if self._offsets.journal is not None:
            refuse_on_slave(self._standing, "only the master of this failover group copies offsets")
        members = self._clients.consumer_group(request.src_group)
        for topic in [request.topic] if request.topic else self._offsets.topics_of(request.src_group):
            if self._topics.get_readable(topic) is None:
                continue
            if not request.offline and members is not None and topic not in members.subscriptions:
                continue  # no longer subscribed
            if not self._offsets.clone(request.src_group, request.dest_group, topic):
                return command.reply(ResponseCode.SYSTEM_ERROR, "this broker holds its maximum of offsets")
        refuse_if(await self._offsets.logged())
        return command.reply(ResponseCode.SUCCESS)


def group_fault(group: GroupConfig) -> str:
    """Returns why a group's name or configuration is invalid; "" if both are valid."""
    name = group.group_name
    fault = topic_fault(name).replace("topic", "group")
    if fault:
        return fault
    if len(name) > GROUP_LENGTH_MAX:
        return f"The specified group is longer than group max length: {GROUP_LENGTH_MAX}."
    if not 0 <= group.retry_queue_nums <= RETRY_QUEUE_COUNT_MAX:
        return f"retryQueueNums={group.retry_queue_nums}: a retry topic has 0 to {RETRY_QUEUE_COUNT_MAX} queues"
    for field in msgspec.structs.fields(group):
        value = getattr(group, field.name)
        if field.type is int and not -(1 << 31) <= value < 1 << 31:
            return f"{field.encode_name}={value}: not a 32-bit number"
    try:
        msgspec.json.encode(group.group_retry_policy)
        text = java_json.dumps(GroupTable(subscription_group_table={name: group}))
        java_json.loads(text)
    except TypeError:  # a JSON object as a key, which RocketMQ's parser accepts
        return "groupRetryPolicy: keys must be strings"
    except RemoteProtocolError as error:  # it could not be read from a file or a slave's answer
        return f"groupRetryPolicy: {error}"
    if b'"$ref"' in text:
        return "a group can't contain the key $ref, which would be read as a reference to another value"
    return ""


def _check_size(command: RemotingCommand) -> None:
    size = len(command.body)
    if size > LIST_SIZE_MAX:
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER, f"a body of {size} bytes; at most {LIST_SIZE_MAX} are accepted"
        )
