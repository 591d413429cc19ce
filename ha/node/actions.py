"""Carries out the changes that an operator makes on the dashboard, with the requests that command-line tools send.

The requests go to the node's own broker, which checks them like requests from the network, but without access control,
because the admin port has already checked the operator's adminToken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio

from ha.admin.dashboard.source import DeadLetters, Missing, NewMessage, OffsetMove, Outcome
from ha.broker.batch_reader import BatchReader
from ha.broker.queue_times import bounds, offset_at
from ha.errors import RemoteProtocolError
from ha.protocol.admin_requests import CreateTopicRequest, ResetOffsetsRequest
from ha.protocol.codes import Permission, RequestCode, ResponseCode
from ha.protocol.headers import Header, SendMessageRequest
from ha.protocol.properties import (
    CRC32,
    DELAY,
    KEYS,
    TAGS,
    UNIQ_KEY,
    WAIT,
    decode_properties,
    encode_properties,
)
from ha.protocol.record import MessageRecord, decode_records
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import AUTO_CREATE_TOPIC, DLQ_PREFIX, RETRY_PREFIX
from ha.remoting.local import LocalConnection
from ha.store.consume_queue import ConsumeQueue

from .messages import reads_files
from .node import Node
from .own_requests import ask_own_broker

TIMEOUT_S = 10.0
PRODUCER_GROUP = "halog-dashboard"
READ_COUNT_MAX = 32
_NOT_SENT_BACK = (CRC32, DELAY, WAIT)
"""Properties of a dead letter that are removed when its message is sent again, because they describe only the stored
dead letter."""
_STORED = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    }
)


class NodeActions:
    """Implements `DashboardActions` for one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._tables = node.broker.tables
        self._reader = BatchReader(node.store)

    async def send(self, message: NewMessage) -> Outcome:
        """See `DashboardActions.send`."""
        properties = {UNIQ_KEY: self._node.unique_ids.next(), KEYS: message.keys, TAGS: message.tags}
        header = self._send_header(
            message.topic, -1 if message.queue_id is None else message.queue_id,
            {name: value for name, value in properties.items() if value},
        )  # fmt: skip
        answer = await self._ask(RequestCode.SEND_MESSAGE, header, message.body)
        if isinstance(answer, str):
            return Outcome(False, answer)
        told = answer.ext_fields or {}
        place = f"queue {told.get('queueId')}, offset {told.get('queueOffset')}"
        if answer.code == ResponseCode.SUCCESS:
            return Outcome(True, f"Stored in {message.topic}, {place}.")
        name = ResponseCode(answer.code).name if answer.code in set(ResponseCode) else answer.code
        if answer.code in _STORED:
            return Outcome(True, f"Stored in {message.topic}, {place}, but {name}: {answer.remark or 'no remark'}")
        return Outcome(False, f"{name}: {answer.remark or 'no remark'}")

    async def change_topic(self, name: str, queue_count: int, *, is_readable: bool, is_writable: bool) -> Outcome:
        """See `DashboardActions.change_topic`."""
        known = self._tables.topics.get(name)
        perm = (Permission.READ if is_readable else 0) | (Permission.WRITE if is_writable else 0)
        header = CreateTopicRequest(
            topic=name,
            read_queue_nums=queue_count,
            write_queue_nums=queue_count,
            perm=perm if known is None else perm | (known.perm & ~(Permission.READ | Permission.WRITE)),
        )
        if known is not None:
            header.topic_filter_type = known.topic_filter_type
            header.topic_sys_flag = known.topic_sys_flag
            header.order = known.order
        answer = await self._ask(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        return _outcome(answer, f"Topic {name} has {queue_count} queues now.")

    @reads_files
    async def planned_reset(self, group: str, topic: str, to_ms: int | None) -> Sequence[OffsetMove] | Missing:
        """See `DashboardActions.planned_reset`."""
        config = self._tables.topics.get(topic)
        if config is None:
            return Missing(f"Topic {topic} does not exist on this node.")
        if self._tables.groups.get(group) is None:
            return Missing(f"Consumer group {group} does not exist on this node.")
        moves = []
        for queue_id in range(config.read_queue_nums):
            queue = self._node.store.queues.get(topic, queue_id)
            _, end = bounds(queue)
            after = end if to_ms is None else await offset_at(self._node.store, queue, to_ms)
            moves.append(OffsetMove(queue_id, self._tables.offsets.get(group, topic, queue_id), after, end))
        return moves

    async def reset(self, group: str, topic: str, to_ms: int | None, offsets: Mapping[int, int]) -> Outcome:
        """See `DashboardActions.reset`."""
        header = ResetOffsetsRequest(topic=topic, group=group, timestamp=-1 if to_ms is None else to_ms, is_force=True)
        if not self._node.config.server_side_reset_offset:
            answer = await self._ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
            return _outcome(answer, f"The members of {group} were asked to reset their offsets of {topic}.")
        for count, (queue_id, offset) in enumerate(offsets.items()):
            begin, end = bounds(self._node.store.queues.get(topic, queue_id))
            header.queue_id, header.offset = queue_id, min(max(offset, begin), end)  # retention may have moved `begin`
            outcome = _outcome(await self._ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header), "")
            if not outcome.is_done:
                done = f"{count:,} of {len(offsets):,} queues were reset; queue {queue_id}: " if count else ""
                return Outcome(False, f"{done}{outcome.text}")
        return Outcome(True, f"{group} continues at the new offsets in {len(offsets)} queues of {topic}.")

    def dead_letters(self, group: str) -> DeadLetters | Missing:
        """See `DashboardActions.dead_letters`."""
        begin, end = bounds(self._dead_queue(group))
        if begin >= end:
            return Missing(f"Consumer group {group} has no dead letters on this node.")
        return DeadLetters(begin, end)

    async def send_back(self, group: str, begin: int, count: int) -> Outcome:
        """See `DashboardActions.send_back`."""
        queue = self._dead_queue(group)
        sent_count, offset, end = 0, begin, begin + count
        while queue is not None and offset < min(end, queue.max_offset):
            try:
                read = await self._reader.read(queue, offset, min(READ_COUNT_MAX, end - offset))
                records = decode_records(read.body, verify_crc=False)
            except (OSError, RemoteProtocolError):
                break
            for record in records:
                reason = await self._send_back_one(group, record)
                if reason:
                    text = f"Sent back {sent_count:,} messages; that at offset {record.queue_offset} failed: {reason}"
                    return Outcome(False, text)
                sent_count += 1
            if read.next_offset <= offset:
                break
            offset = read.next_offset
        if sent_count < count:
            return Outcome(
                False, f"Sent back {sent_count:,} of {count:,} messages to {group}; the others can't be read."
            )
        return Outcome(True, f"Sent back {sent_count:,} messages to {group}.")

    async def _send_back_one(self, group: str, record: MessageRecord) -> str:
        """Sends a dead letter to its group again, with the full number of retries. Returns why that failed; "" if it
        was stored."""
        properties = decode_properties(record.properties)
        for name in _NOT_SENT_BACK:
            properties.pop(name, None)
        header = self._send_header(RETRY_PREFIX + group, -1, properties)
        header.flag, header.sys_flag, header.born_timestamp = record.flag, record.sys_flag, record.born_timestamp_ms
        answer = await self._ask(RequestCode.SEND_MESSAGE, header, bytes(record.body))
        if isinstance(answer, str):
            return answer
        return "" if answer.code in _STORED else f"{answer.code} {answer.remark or ''}".rstrip()

    def _dead_queue(self, group: str) -> ConsumeQueue | None:
        return self._node.store.queues.get(DLQ_PREFIX + group, 0)

    def _send_header(self, topic: str, queue_id: int, properties: dict[str, str]) -> SendMessageRequest:
        return SendMessageRequest(
            producer_group=PRODUCER_GROUP,
            topic=topic,
            default_topic=AUTO_CREATE_TOPIC,
            default_topic_queue_nums=1,
            queue_id=queue_id,
            sys_flag=0,
            born_timestamp=self._node.platform.wall_clock_ms(),
            flag=0,
            properties=encode_properties(properties).decode("utf-8", "surrogateescape"),
        )

    async def _ask(self, code: RequestCode, header: Header, body: bytes = b"") -> RemotingCommand | str:
        """Returns the broker's response, or why there is none."""
        connection = LocalConnection(("127.0.0.1", 0), is_own=True)
        command = RemotingCommand(code, ext_fields=header.to_ext_fields(), body=body)
        try:
            answer = await ask_own_broker(self._node.broker.processor, connection, command, TIMEOUT_S)
        except trio.TooSlowError:
            return f"no answer within {TIMEOUT_S:g} s; it may still be carried out"
        finally:
            connection.end()
        return "the node is stopping" if answer is None else answer


def _outcome(answer: RemotingCommand | str, text: str) -> Outcome:
    if isinstance(answer, str):
        return Outcome(False, answer)
    if answer.code != ResponseCode.SUCCESS:
        return Outcome(False, answer.remark or f"code {answer.code}")
    return Outcome(True, text)
