"""Requests about consumer offsets and the bounds of queues: 14 QUERY_CONSUMER_OFFSET, 15 UPDATE_CONSUMER_OFFSET, 29
SEARCH_OFFSET_BY_TIMESTAMP, 30 GET_MAX_OFFSET, 31 GET_MIN_OFFSET, 32 GET_EARLIEST_MSG_STORETIME.

All offsets are queue offsets (entries). Sources: ConsumerManageProcessor, AdminBrokerProcessor.
"""

from __future__ import annotations

from ha.broker.core import BrokerCore
from ha.broker.journal import WAITING_COUNT_MAX, Logged
from ha.broker.queue_times import known_store_time_ms, offset_at
from ha.broker.refused import refused_if_unreadable
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import (
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
    parse_header,
)
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler
from ha.store.consume_queue import ConsumeQueue

FIRST_BOOT_REMARK = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"


class OffsetProcessor:
    """Answers requests about consumer offsets and the bounds of queues."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._tables = core.tables
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._offsets = core.tables.offsets
        self._options = core.options

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.QUERY_CONSUMER_OFFSET: self.query,
            RequestCode.UPDATE_CONSUMER_OFFSET: self.update,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.search,
            RequestCode.GET_MAX_OFFSET: self.max_offset,
            RequestCode.GET_MIN_OFFSET: self.min_offset,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest_store_time,
        }

    async def query(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_CONSUMER_OFFSET (14): answers with the offset that a group has committed in a queue.

        Without a committed offset, the answer is 0 if the queue exists and never had a message, or if its first message
        has offset 0 and lies at most `access_in_memory_bytes_max` before the end of the log. Otherwise, and always with
        setZeroIfNotFound=false, the answer is QUERY_NOT_FOUND (code 22). For an empty queue, RocketMQ 4.9 answers 0,
        too. 5.x answers QUERY_NOT_FOUND, after which a client asks for the queue's end and misses a message that
        arrives in between.

        In a failover group, a slave whose tables are not complete (`Tables.are_complete`) answers SYSTEM_BUSY if it has
        no offset: after QUERY_NOT_FOUND, a consumer would start at the queue's end. A 4.9 client treats SYSTEM_BUSY
        like QUERY_NOT_FOUND, and next sends SEARCH_OFFSET_BY_TIMESTAMP (29) or GET_MAX_OFFSET (30), so the slave always
        refuses these two. A former master also answers SYSTEM_BUSY if it has an offset, while that may be older than
        the one that it answered as master (`Tables.are_behind`).
        """
        request = parse_header(QueryConsumerOffsetRequest, command.ext_fields)
        offset = self._offsets.get(request.consumer_group, request.topic, request.queue_id)
        if self._tables.are_behind or (offset is None and not self._tables.are_complete):
            return _refuse(command)
        if offset is not None:
            return _offset(command, offset)
        if request.set_zero_if_not_found is False:
            return command.reply(
                ResponseCode.QUERY_NOT_FOUND, "Not found, do not set to zero, maybe this group boot first"
            )
        queue = self._queue(request.topic, request.queue_id)
        if queue is None or queue.max_offset == 0:
            config = self._topics.get_readable(request.topic)
            is_recent = config is not None and 0 <= request.queue_id < config.read_queue_nums
        else:
            is_recent = queue.min_offset <= 0 and self._starts_in_memory(queue)
        if is_recent:
            return _offset(command, 0)
        return command.reply(ResponseCode.QUERY_NOT_FOUND, FIRST_BOOT_REMARK)

    async def update(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        """UPDATE_CONSUMER_OFFSET (15): commits an offset of an existing group and topic. In a failover group, a commit
        that is not oneway is accepted only by the master, which answers it once its record is acknowledged."""
        request = parse_header(UpdateConsumerOffsetRequest, command.ext_fields)
        group, topic, queue_id = request.consumer_group, request.topic, request.queue_id
        config = self._topics.get_readable(topic)
        if self._groups.get(group) is None:
            return command.reply(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} not exist!")
        if config is None:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, f"Topic {topic} not exist!")
        if not 0 <= queue_id < max(config.read_queue_nums, config.write_queue_nums):
            return command.reply(
                ResponseCode.INVALID_PARAMETER, f"queueId[{queue_id}] is illegal, topic[{topic}] has no such queue"
            )
        journal = self._offsets.journal
        is_answered = journal is not None and not command.flag & FLAG_ONEWAY
        if journal is not None and is_answered:
            # A slave also accepts a oneway commit, and sends it to its master. If it is lost, messages are redelivered.
            if not journal.is_open:
                return command.reply(ResponseCode.SYSTEM_BUSY, "only the master of this group takes commits")
            if journal.is_crowded:
                return command.reply(ResponseCode.SYSTEM_BUSY, f"{WAITING_COUNT_MAX} commits wait for the log")
        if not self._offsets.commit(group, topic, queue_id, request.commit_offset):
            return command.reply(ResponseCode.SYSTEM_ERROR, "this broker holds its maximum of offsets")
        if journal is None or not is_answered:
            return command.reply(ResponseCode.SUCCESS)

        def answer(logged: Logged) -> None:
            connection.reply(command, command.reply(logged.status.response_code, logged.fault or None))

        journal.call_when_logged(answer)
        return None

    async def max_offset(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_MAX_OFFSET (30): answers with the offset after the queue's last message; 0 if the queue does not exist.
        SYSTEM_BUSY if the tables are not complete (see `query`)."""
        if not self._tables.are_complete:
            return _refuse(command)
        request = parse_header(GetMaxOffsetRequest, command.ext_fields)
        queue = self._queue(request.topic, request.queue_id)
        return _offset(command, queue.max_offset if queue is not None else 0)

    async def min_offset(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_MIN_OFFSET (31): answers with the offset of the queue's first message; 0 if the queue does not exist."""
        request = parse_header(GetMinOffsetRequest, command.ext_fields)
        queue = self._queue(request.topic, request.queue_id)
        return _offset(command, max(0, queue.min_offset) if queue is not None else 0)

    async def earliest_store_time(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_EARLIEST_MSG_STORETIME (32): answers with the store time of the queue's first message, in ms since the
        epoch; -1 if the queue is empty or does not exist, or if the message is damaged."""
        request = parse_header(GetMinOffsetRequest, command.ext_fields)
        queue = self._queue(request.topic, request.queue_id)
        timestamp_ms = -1
        if queue is not None and queue.min_offset < queue.max_offset:
            timestamp_ms = await known_store_time_ms(self._store, queue, queue.min_offset)
        return command.reply(ResponseCode.SUCCESS, ext_fields={"timestamp": str(timestamp_ms)})

    async def search(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """SEARCH_OFFSET_BY_TIMESTAMP (29): answers with the offset of the first message stored at or after a time (ms);
        the queue's end if there is none.

        With boundaryType upper, the answer is the offset of the last message stored at or before that time; the queue's
        start if there is none. With any boundaryType, it is 0 if the queue does not exist, and SYSTEM_BUSY if the
        tables are not complete (see `query`).
        """
        if not self._tables.are_complete:
            return _refuse(command)
        request = parse_header(SearchOffsetRequest, command.ext_fields)
        is_upper = request.boundary_type.lower() == "upper"
        queue = self._queue(request.topic, request.queue_id)
        return _offset(command, await offset_at(self._store, queue, request.timestamp, is_upper=is_upper))

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self._store.queues.get(topic, queue_id)

    def _starts_in_memory(self, queue: ConsumeQueue) -> bool:
        with refused_if_unreadable():
            entries = queue.read(0, 1)
        if not entries:
            return False
        behind = self._store.log.max_offset.value - entries[0].physical_offset
        return behind <= self._options.access_in_memory_bytes_max


def _refuse(command: RemotingCommand) -> RemotingCommand:
    return command.reply(
        ResponseCode.SYSTEM_BUSY, "this member does not know the latest offsets of its group yet; ask its master"
    )


def _offset(command: RemotingCommand, offset: int) -> RemotingCommand:
    return command.reply(ResponseCode.SUCCESS, ext_fields=OffsetResponse(offset=offset).to_ext_fields())
