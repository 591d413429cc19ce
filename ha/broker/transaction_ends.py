"""Request 37 END_TRANSACTION: a producer commits or rolls back a half message. See transactions.py.

Source: EndTransactionProcessor.
"""

from __future__ import annotations

from typing import Protocol

from ha.acl import Right
from ha.broker.core import BrokerCore
from ha.broker.detour import delay_level, is_timer, real_message, store_delayed
from ha.broker.message_queries import find_record, is_in_queue
from ha.broker.put_request import PutRequest
from ha.broker.refused import RefusedError, check_right
from ha.broker.send_message import take_timer
from ha.protocol.codes import PutStatus, RequestCode, ResponseCode, SysFlag
from ha.protocol.group_requests import EndTransactionRequest
from ha.protocol.headers import parse_header
from ha.protocol.properties import PRODUCER_GROUP, REAL_TOPIC, decode_properties
from ha.protocol.record import Message, MessageRecord
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand
from ha.protocol.topic_names import HALF_TOPIC
from ha.remoting import RemotingConnection, RequestHandler


class OnEnded(Protocol):
    """The function that TransactionEnds calls when a half message is ended."""

    def __call__(self, offset: int, waiting: tuple[RemotingConnection, RemotingCommand] | None = None) -> None:
        """Queues an op message for the half message at queue offset `offset`. `waiting`: a connection and its request,
        which is answered once the op message is stored; None: no request waits for that."""
        ...


class TransactionEnds:
    """Answers END_TRANSACTION (37)."""

    def __init__(self, core: BrokerCore, on_ended: OnEnded) -> None:
        self._store = core.store
        self._put = core.puts
        self._options = core.options
        self._wall_clock_ms = core.world.wall_clock_ms
        self._standing = core.standing
        self._guard = core.guard
        self._on_ended = on_ended
        self.committed_count = 0
        self.rolled_back_count = 0

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {RequestCode.END_TRANSACTION: self.end}

    async def end(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        """END_TRANSACTION (37): commits or rolls back a half message.

        Returns None for a rollback, which is answered once its op message is stored, and for a request that does
        neither, which gets no answer: its producer does not know the outcome yet. If the call is cancelled, a commit
        may still be stored and recorded. Raises RefusedError if the half message is not found or can't be ended by this
        request, if this broker may not store messages, or if the put fails; RemoteProtocolError if a header field is
        missing or invalid.
        """
        request = parse_header(EndTransactionRequest, command.ext_fields)
        if self._standing.is_slave:
            return command.reply(
                ResponseCode.SLAVE_NOT_AVAILABLE, f"this is a SLAVE of {self._options.broker_name}; ask its master"
            )
        if request.commit_or_rollback not in (SysFlag.TRANSACTION_COMMIT, SysFlag.TRANSACTION_ROLLBACK):
            return None
        record = await self._half(connection, command, request)
        refusal = self._standing.why_not_stored()
        if refusal:
            raise RefusedError(self._standing.refusal_code, refusal)
        if request.commit_or_rollback == SysFlag.TRANSACTION_COMMIT:
            put = PutRequest(messages=(self._committed(record),), waits=False)

            def on_done(_: object) -> None:  # also if the connection closes meanwhile, which cancels this request
                if put.status is PutStatus.PUT_OK:
                    self.committed_count += 1
                    self._on_ended(record.queue_offset)

            await self._put.settle([put], on_done)
            if put.status is not PutStatus.PUT_OK:
                raise RefusedError(put.status.response_code, put.remark)
            return command.reply(ResponseCode.SUCCESS)
        self.rolled_back_count += 1
        waits = not command.flag & FLAG_ONEWAY
        self._on_ended(record.queue_offset, (connection, command) if waits else None)
        return None

    async def _half(
        self, connection: RemotingConnection, command: RemotingCommand, request: EndTransactionRequest
    ) -> MessageRecord:
        """Returns the half message to end, after checking the permission on its topic. Raises RefusedError."""
        found, damage = await find_record(self._store, request.commit_log_offset)
        if found is None or not await self._is_half(found[1]):
            reason = damage or f"no half message begins at {request.commit_log_offset}"
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"Find prepared transaction message failed: {reason}")
        _, record = found
        properties = record.property_map()
        if self._guard is not None:
            topic = properties.get(REAL_TOPIC, "")
            check_right(self._guard, connection, command, topic, Right.PUB)
            if request.topic and request.topic != topic:
                raise RefusedError(ResponseCode.NO_PERMISSION, f"the message is not of topic[{request.topic}]")
        if properties.get(PRODUCER_GROUP) != request.producer_group:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, "The producer group wrong")
        if record.queue_offset != request.tran_state_table_offset:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, "The transaction state table offset wrong")
        return record

    async def _is_half(self, record: MessageRecord) -> bool:
        """Returns whether `record` is in the queue of half messages, or will be: without access control, a record that
        is not dispatched yet is accepted."""
        if record.topic != HALF_TOPIC:
            return False
        is_new = self._store.log.dispatched_offset.value <= record.physical_offset
        return (is_new and self._guard is None) or await is_in_queue(self._store, record)

    def _committed(self, record: MessageRecord) -> Message:
        """Returns the message that a commit stores. Raises RefusedError if the half message can't be committed."""
        try:
            message = real_message(record)
            properties = decode_properties(message.properties)
            level = delay_level(properties)
        except ValueError as error:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"the half message can't be committed: {error}") from None
        message.sys_flag = message.sys_flag & ~SysFlag.TRANSACTION_MASK | SysFlag.TRANSACTION_COMMIT
        message.prepared_transaction_offset = record.physical_offset
        if level > 0:
            store_delayed(message, properties, level, len(self._store.options.delay_levels_ms))
        elif is_timer(properties):
            take_timer(message, properties, self._wall_clock_ms(), self._options)
        return message
