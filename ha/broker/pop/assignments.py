"""Requests 400 QUERY_ASSIGNMENT, 401 SET_MESSAGE_REQUEST_MODE and 402 GET_ALL_MESSAGE_REQUEST_MODE: the queues that a
client of a group gets, and whether it pops or pulls.

Push consumers of 5.x ask for their queues (QUERY_ASSIGNMENT) instead of computing them. An administrator sets a group's
mode for a topic (SET_MESSAGE_REQUEST_MODE); in mode POP every client gets all queues of all brokers or, with a positive
popShareQueueNum, its own queues and those of that many neighbours. GET_ALL_MESSAGE_REQUEST_MODE returns all modes.

The mode is an attribute of the group, so it is persisted, copied by slaves, and part of a failover group's log like the
group itself; RocketMQ has a separate file for it. The queues are those of all brokers, as known to the name servers. An
answer without assignments tells the client to keep its current queues. Source: QueryAssignmentProcessor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from ha.broker.clients import BROADCASTING
from ha.broker.core import BrokerCore
from ha.broker.detour import parse_int
from ha.broker.groups import REQUEST_MODE_PREFIX
from ha.broker.refused import RefusedError, refuse_if, refuse_on_slave
from ha.protocol import java_json
from ha.protocol.bodies import read_request
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.pop import (
    AssignedQueue,
    Assignment,
    AssignmentsBody,
    QueryAssignmentBody,
    RequestModeBody,
    RequestModeTable,
)
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX
from ha.remoting import RemotingConnection, RequestHandler

PULL, POP = "PULL", "POP"
ALL_QUEUES = -1


class Assignments:
    """Assigns queues to consumers, and reads and sets the mode (PULL or POP) of consumer groups."""

    def __init__(self, core: BrokerCore) -> None:
        self._options = core.options
        self._standing = core.standing
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._clients = core.tables.clients
        self.find_queues: Callable[[str], Awaitable[Mapping[str, int] | None]] = self._own_queues
        """Returns the number of read queues of a topic by broker name; None if it is not known at present"""

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.QUERY_ASSIGNMENT: self.assign,
            RequestCode.SET_MESSAGE_REQUEST_MODE: self.set_mode,
            RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: self.all_modes,
        }

    async def set_mode(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """SET_MESSAGE_REQUEST_MODE (401): sets whether a group pops or pulls a topic."""
        asked = read_request(RequestModeBody, command.body)
        refuse_on_slave(self._standing, "Can't change a group on a slave: it takes over its master's groups")
        if asked.topic.startswith(RETRY_PREFIX):
            raise RefusedError(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        if not asked.topic or asked.mode not in (PULL, POP):
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER, f"topic {asked.topic!r}, mode {asked.mode[:40]!r}: use PULL or POP"
            )
        await self._groups.find_or_create(asked.consumer_group)
        await self._groups.wait_written(asked.consumer_group)
        group = self._groups.get(asked.consumer_group)
        if group is None:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{asked.consumer_group}] does not exist",
            )
        value = f"{asked.mode}:{asked.pop_share_queue_num}"
        attributes = {**group.attributes, REQUEST_MODE_PREFIX + asked.topic: value}
        refuse_if(await self._groups.update([msgspec.structs.replace(group, attributes=attributes)]))
        return command.reply(ResponseCode.SUCCESS)

    async def all_modes(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_ALL_MESSAGE_REQUEST_MODE (402): answers with every mode that was set."""
        table = RequestModeTable()
        for name, group in self._groups.table.items():
            for key in group.attributes:
                if key.startswith(REQUEST_MODE_PREFIX):
                    topic = key.removeprefix(REQUEST_MODE_PREFIX)
                    mode, share_count = self._mode(name, topic)
                    table.message_request_mode_map.setdefault(topic, {})[name] = RequestModeBody(
                        topic=topic, consumer_group=name, mode=mode, pop_share_queue_num=share_count
                    )
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(table))

    async def assign(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_ASSIGNMENT (400): answers with the queues of a topic for one client."""
        asked = read_request(QueryAssignmentBody, command.body)
        mode, share_count = self._mode(asked.consumer_group, asked.topic)
        body = AssignmentsBody(message_queue_assignments=None)
        found = await self.find_queues(asked.topic)
        if found is not None:
            queues = [(name, queue_id) for name in sorted(found) for queue_id in range(found[name])]
            mine = self._queues_for(asked, queues, mode, share_count)
            if mine is not None:
                body.message_queue_assignments = [
                    Assignment(
                        message_queue=AssignedQueue(topic=asked.topic, broker_name=name, queue_id=queue_id), mode=mode
                    )
                    for name, queue_id in mine
                ]
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(body))

    def _queues_for(
        self, asked: QueryAssignmentBody, queues: list[tuple[str, int]], mode: str, share_count: int
    ) -> list[tuple[str, int]] | None:
        """Returns the client's queues, as (broker name, queue id or ALL_QUEUES); all queues in a broadcasting group.

        In other groups, returns None if the group has no members or the strategy is unknown, and an empty list if the
        members divide the queues among themselves and the client is not a member.
        """
        if asked.message_model == BROADCASTING:
            return queues
        clients = sorted(self._clients.consumer_ids(asked.consumer_group))
        strategy = _STRATEGIES.get(asked.strategy_name)
        if not clients or strategy is None:
            return None
        if mode == POP and share_count <= 0:
            return list(dict.fromkeys((name, ALL_QUEUES) for name, _ in queues))
        if asked.client_id not in clients:
            return []
        index = clients.index(asked.client_id)
        if mode == PULL:
            return list(strategy(queues, index, len(clients)))
        if len(clients) > len(queues):
            return [queues[index % len(queues)]] if queues else []
        shared: dict[tuple[str, int], None] = {}
        for number in range(min(share_count, len(clients) - 1) + 1):
            shared.update(dict.fromkeys(strategy(queues, (index + number) % len(clients), len(clients))))
        return list(shared)

    def _mode(self, group: str, topic: str) -> tuple[str, int]:
        """Returns the mode of a group for a topic, and popShareQueueNum; PULL if none was set, and for retry topics."""
        config = self._groups.get(group)
        value = "" if config is None else config.attributes.get(REQUEST_MODE_PREFIX + topic, "")
        mode, _, share_count = value.partition(":")
        if mode != POP or topic.startswith(RETRY_PREFIX):
            return PULL, 0
        try:
            return POP, parse_int(share_count)
        except ValueError:  # an administrator may set the attribute to anything
            return POP, 0

    async def _own_queues(self, topic: str) -> Mapping[str, int] | None:
        config = self._topics.get_readable(topic)
        return None if config is None else {self._options.broker_name: config.read_queue_nums}


def _averagely(queues: Sequence[tuple[str, int]], index: int, client_count: int) -> Sequence[tuple[str, int]]:
    """Selects neighbouring queues; if they can't be divided evenly, the first clients get one more (RocketMQ:
    AllocateMessageQueueAveragely)."""
    size, rest = divmod(len(queues), client_count)
    begin = index * size + min(index, rest)
    return queues[begin : begin + size + (index < rest)]


def _by_circle(queues: Sequence[tuple[str, int]], index: int, client_count: int) -> Sequence[tuple[str, int]]:
    """Selects every n-th queue for n clients (RocketMQ: AllocateMessageQueueAveragelyByCircle)."""
    return queues[index::client_count]


_STRATEGIES = {"AVG": _averagely, "AVG_BY_CIRCLE": _by_circle}
