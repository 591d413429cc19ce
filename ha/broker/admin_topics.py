"""Requests about topics: 17 UPDATE_AND_CREATE_TOPIC, 215 DELETE_TOPIC_IN_BROKER, 351 GET_TOPIC_CONFIG, 305
GET_SYSTEM_TOPIC_LIST_FROM_BROKER.

A change is answered once it is saved (in a failover group: once its record is acknowledged) and the name servers know
it, or `topics.ANNOUNCE_TIMEOUT_S` later if one of them does not answer. Deleting a topic deletes its configuration and
the offsets of consumer groups, and removes its messages from the queues, on slaves as soon as they copy the table of
topics. The log keeps the records until retention deletes them. If a topic of that name is created again, its queue
offsets continue. In RocketMQ they restart at 0; slaves, and brokers that rebuild their queues, then mistake new
messages for old ones. Source: AdminBrokerProcessor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import trio

from ha.broker.core import BrokerCore
from ha.broker.refused import refuse_if, refuse_on_slave
from ha.broker.topics import NO_SEND_TOPICS, system_topics, topic_fault
from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.admin_requests import CreateTopicRequest, TopicRequest
from ha.protocol.bodies import TopicConfig, TopicList
from ha.protocol.codes import Permission, RequestCode, ResponseCode
from ha.protocol.headers import parse_header
from ha.protocol.pop import retry_topic
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import AUTO_CREATE_TOPIC, RETRY_PREFIX, SYSTEM_TOPIC_PREFIX, TRACE_TOPIC
from ha.remoting import RemotingConnection, RequestHandler

logger = logging.getLogger(__name__)

QUEUE_COUNT_MAX = 16_384
"""Maximum number of read or write queues of a topic."""
ATTRIBUTES_SIZE_MAX = 4096
"""Maximum characters of the attribute changes in one request."""
DISPATCH_TIMEOUT_S = 3.0
"""Maximum time in seconds that DELETE_TOPIC_IN_BROKER (215) waits for the dispatch of messages that are already
stored."""

TOPIC_FILTER_TYPES = frozenset({"SINGLE_TAG", "MULTI_TAG"})
_PERM_MAX = Permission.INHERIT | Permission.WRITE | Permission.READ | Permission.PRIORITY
_SERVED_ATTRIBUTES = {"queue.type": "SimpleCQ", "cleanup.policy": "DELETE"}
"""Attributes by which RocketMQ 5 selects how a topic is stored, each with the only value that is accepted here."""
_ATTRIBUTES = _SERVED_ATTRIBUTES.keys() | {"message.type", "reserve.time"}

NO_REMARK = "not set any response code"
"""RocketMQ's remark in successful answers to UPDATE_AND_CREATE_TOPIC (17), and to requests about users
(admin_users.py)."""


class AdminTopics:
    """Answers admin requests about topics."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._puts = core.puts
        self._tables = core.tables
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._offsets = core.tables.offsets
        self._reads = core.tables.reads
        self._options = core.options
        self._standing = core.standing

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.UPDATE_AND_CREATE_TOPIC: self.update,
            RequestCode.DELETE_TOPIC_IN_BROKER: self.delete,
            RequestCode.GET_TOPIC_CONFIG: self.show,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.system_topics,
        }

    async def update(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_AND_CREATE_TOPIC (17): creates or changes a topic."""
        request = parse_header(CreateTopicRequest, command.ext_fields)
        topic = request.topic
        refuse_if(self._fault(topic) or _request_fault(request), ResponseCode.INVALID_PARAMETER)
        refuse_on_slave(self._standing, "Can't create or update a topic on a slave: it takes over its master's topics")
        await self._topics.wait_written(topic)
        known = self._topics.get(topic)
        try:
            attributes = changed_attributes(None if known is None else known.attributes or {}, request.attributes or "")
        except RemoteProtocolError as error:
            return command.reply(ResponseCode.SYSTEM_ERROR, str(error))
        config = TopicConfig(
            topic_name=topic,
            read_queue_nums=request.read_queue_nums,
            write_queue_nums=request.write_queue_nums,
            perm=request.perm,
            topic_filter_type=request.topic_filter_type,
            topic_sys_flag=request.topic_sys_flag,
            order=request.order,
            attributes=attributes,
        )
        refuse_if(await self._topics.update(config))
        return command.reply(ResponseCode.SUCCESS, NO_REMARK)

    async def delete(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """DELETE_TOPIC_IN_BROKER (215): deletes a topic and the topics of its POP retries. Also succeeds if the topic
        does not exist."""
        topic = parse_header(TopicRequest, command.ext_fields).topic
        is_known = self._topics.get(topic) is not None  # a known name may exceed the limit for new topics
        fault = self._system_fault(topic) if is_known else self._fault(topic)
        refuse_if(fault, ResponseCode.INVALID_PARAMETER)
        refuse_on_slave(self._standing, "Can't delete a topic on a slave: it takes over its master's topics")
        log = self._store.log
        retry_topics = self._retry_topics(topic)
        for each in retry_topics:
            refuse_if(await self._topics.delete(each))
        # Before the offsets are removed, without which a repetition of this request would not find these topics.
        refuse_if(await self._delete_messages(retry_topics, log.max_offset.value))
        self._puts.drain()
        while self._puts.is_blocked:
            await self._puts.wait_unblocked()
            self._puts.drain()
        refuse_if(await self._topics.delete(topic))  # the last one: others may create it again from then on
        self._puts.drain()  # messages that were sent before the topic was deleted
        topics = [*retry_topics, topic]
        end = log.max_offset.value  # later messages belong to a topic that was created again
        for each in topics:
            self._offsets.remove(topic=each)
            self._reads.forget(topic=each)
        refuse_if(await self._offsets.logged())
        with trio.move_on_after(DISPATCH_TIMEOUT_S):
            while log.dispatched_offset.value < end:
                await log.dispatched_offset.wait_beyond(log.dispatched_offset.value)
        refuse_if(await self._delete_messages(topics, end))
        refuse_if(await self._tables.clear_deleted_topics())
        await self._topics.announce()
        return command.reply(ResponseCode.SUCCESS)

    async def _delete_messages(self, topics: Sequence[str], end: int) -> str:
        """Records that the messages of `topics` before physical offset `end` are deleted, if there are or may be some.
        Returns why it is not possible, or ""."""
        if self._store.log.dispatched_offset.value >= end:
            topics = [each for each in topics if self._store.queues.not_empty((each,))]
        return await self._topics.delete_messages(topics, end)

    def _retry_topics(self, topic: str) -> list[str]:
        """Returns the topics of POP retries of a topic, for the groups that have offsets in it. Includes a retry topic
        that is already deleted, but still has offsets or messages, because an earlier deletion failed.

        Excludes a name that is also the retry topic of an existing group. (RocketMQ: clearRetryTopicWhenDeleteTopic.)
        """
        groups = {
            retry_topic(group, topic, is_v2=is_v2): group
            for group in self._offsets.groups_of(topic)
            for is_v2 in (True, False)
        }
        not_empty = {queue.topic for queue in self._store.queues.not_empty(groups)}
        return [
            name
            for name, group in groups.items()
            if (self._topics.get(name) is not None or self._offsets.of(group, name) or name in not_empty)
            and self._groups.get(name.removeprefix(RETRY_PREFIX)) is None
        ]

    async def show(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_TOPIC_CONFIG (351): answers with one topic's configuration; TOPIC_NOT_EXIST if there is no such topic."""
        topic = parse_header(TopicRequest, command.ext_fields).topic
        config = self._topics.get_readable(topic)
        if config is None:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {topic}")
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(config))

    async def system_topics(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_SYSTEM_TOPIC_LIST_FROM_BROKER (305): answers with the names of the system topics."""
        topics = TopicList(topic_list=sorted(self.system_names()))
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(topics))

    def is_system(self, topic: str) -> bool:
        """Returns whether a topic belongs to the broker and can't be changed or deleted."""
        return topic.startswith(SYSTEM_TOPIC_PREFIX) or topic in self.system_names()

    def system_names(self) -> set[str]:
        """Returns the names of the known system topics. Others are recognized only by SYSTEM_TOPIC_PREFIX."""
        return (
            {config.topic_name for config in system_topics(self._options)}
            | NO_SEND_TOPICS
            | {AUTO_CREATE_TOPIC, TRACE_TOPIC}
        )

    def _fault(self, topic: str) -> str:
        return topic_fault(topic) or self._system_fault(topic)

    def _system_fault(self, topic: str) -> str:
        return f"The topic[{topic}] is conflict with system topic." if self.is_system(topic) else ""


def _request_fault(request: CreateTopicRequest) -> str:
    for name, count in (("readQueueNums", request.read_queue_nums), ("writeQueueNums", request.write_queue_nums)):
        if not 0 <= count <= QUEUE_COUNT_MAX:
            return f"{name}={count}: a topic has 0 to {QUEUE_COUNT_MAX} queues"
    if not 0 <= request.perm <= _PERM_MAX:
        return f"perm={request.perm}: a permission is a sum of 1 (inherit), 2 (write), 4 (read) and 8 (priority)"
    if request.topic_filter_type not in TOPIC_FILTER_TYPES:
        return f"topicFilterType={request.topic_filter_type[:80]!r}: there are {', '.join(sorted(TOPIC_FILTER_TYPES))}"
    return ""


def changed_attributes(current: Mapping[str, str] | None, changes: str) -> dict[str, str]:
    """Returns the attributes of a topic after `changes` (`+name=value,-name`). `current` is None for a new topic.

    Raises RemoteProtocolError, with RocketMQ's text, for an invalid change; also for more than ATTRIBUTES_SIZE_MAX
    characters, and for values that only RocketMQ supports.
    """
    attributes = dict(current or {})
    if len(changes) > ATTRIBUTES_SIZE_MAX:
        raise RemoteProtocolError(f"attributes of {len(changes)} characters; at most {ATTRIBUTES_SIZE_MAX}")
    seen: set[str] = set()
    for change in filter(None, changes.split(",")):
        signed, has_value, value = change.partition("=")
        name = signed[1:]
        if signed[:1] != ("+" if has_value else "-"):
            kind = "add/alter" if has_value else "delete"
            raise RemoteProtocolError(f"{kind} attribute format is wrong: {signed}")
        if name in seen:
            raise RemoteProtocolError(f"alter duplication key. key: {name}")
        seen.add(name)
        if name not in _ATTRIBUTES:
            raise RemoteProtocolError(f"unsupported key: {name}")
        if not has_value:
            if current is None:
                raise RemoteProtocolError(f"only add attribute is supported while creating topic. key: {name}")
            if attributes.pop(name, None) is None:
                raise RemoteProtocolError(f"attempt to delete a nonexistent key: {name}")
            continue
        served = _SERVED_ATTRIBUTES.get(name)
        if served is not None and value != served:
            raise RemoteProtocolError(f"{name}={value} is not served here, only {served}")
        attributes[name] = value
    return attributes
