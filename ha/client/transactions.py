"""Transactional messages: delivered only if the application's own work succeeds.

The message is first stored as a half message, which consumers don't receive. Then the application does its work, and
the producer asks the broker to commit (deliver) or roll back (drop) the message. If the outcome does not arrive, the
broker asks one of the group's producers, which answers with the result of its `check`. Sources: DefaultMQProducerImpl
(sendMessageInTransaction, checkTransactionState), EndTransactionRequestHeader.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum

import anyio
import msgspec

from ha.client.callbacks import failure_of
from ha.client.client import Client
from ha.client.connection import Connection
from ha.client.connections import Connections
from ha.client.messages import Message, MessageQueue, ReceivedMessage, SendResult, SendStatus
from ha.client.received import received
from ha.client.sender import Sender, Sent
from ha.errors import ClientError, RemoteProtocolError
from ha.protocol import properties as names
from ha.protocol.codes import RequestCode, SysFlag
from ha.protocol.group_requests import CheckTransactionRequest, EndTransactionRequest
from ha.protocol.headers import parse_header
from ha.protocol.message_id import decode_message_id
from ha.protocol.record import decode_record
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand

_log = logging.getLogger(__name__)

_CHECK_TIMEOUT_S = 60.0


class TransactionState(Enum):
    """Outcome of a local transaction, for example of a change in the application's own database."""

    COMMIT = "COMMIT_MESSAGE"
    """The local transaction was committed: the message is delivered."""
    ROLLBACK = "ROLLBACK_MESSAGE"
    """The local transaction was rolled back: the message is dropped for good."""
    UNKNOWN = "UNKNOW"
    """Not known yet: the broker asks again later, a limited number of times."""


Check = Callable[[ReceivedMessage], Awaitable[TransactionState]]
"""Finds out how the transaction of a half message ended, possibly much later and in another process."""
Local = Callable[[SendResult], Awaitable[TransactionState]]
"""Executes the local transaction once the half message is stored, and returns its outcome."""

_FLAG_OF_STATE = {
    TransactionState.COMMIT: SysFlag.TRANSACTION_COMMIT,
    TransactionState.ROLLBACK: SysFlag.TRANSACTION_ROLLBACK,
    TransactionState.UNKNOWN: SysFlag.TRANSACTION_NOT,
}


class TransactionResult(msgspec.Struct, frozen=True):
    """Result of a transaction. `send`: how the half message was stored. `is_acknowledged`: whether the broker has
    acknowledged the outcome `state`; if not, `state` is UNKNOWN or may not have arrived, and the broker asks for it."""

    send: SendResult
    state: TransactionState
    is_acknowledged: bool


class Transactions:
    """Begins and ends transactions for one producer group, and answers brokers' checks."""

    def __init__(self, client: Client, group: str, sender: Sender, check: Check) -> None:
        self._client = client
        self._group = group
        self._sender = sender
        self._check = check

    async def send(
        self, message: Message, local: Local, queue: MessageQueue | None, timeout_s: float | None
    ) -> TransactionResult:
        """See Producer.send_in_transaction."""
        if message.delay_level or message.delay_s is not None or message.deliver_at_ms is not None:
            raise ValueError("a message of a transaction can't be delayed")
        connections = self._client.connections  # a client that is closed while `local` runs has none
        half = await self._sender.prepare(
            message,
            extra={names.TRANSACTION_PREPARED: "true", names.PRODUCER_GROUP: self._group},
            sys_flag=SysFlag.TRANSACTION_PREPARED,
        )
        sent = await self._sender.send(half, queue, timeout_s)
        result = sent.result
        # As in RocketMQ, `local` runs only if the half message is safe. If it raises, the broker will ask for the
        # state.
        is_safe = result.status is SendStatus.SEND_OK
        state = _checked(await local(result), "local") if is_safe else TransactionState.ROLLBACK
        if state is TransactionState.UNKNOWN:
            return TransactionResult(result, state, False)
        return TransactionResult(result, state, await self._end(connections, sent, state))

    async def answer(self, connection: Connection, command: RemotingCommand) -> RemotingCommand | None:
        """CHECK_TRANSACTION_STATE (39): calls `check` and sends the outcome. Returns None.

        Sends nothing if `check` raises, takes longer than 60 s, or returns anything but COMMIT or ROLLBACK; the broker
        then asks again. Raises RemoteProtocolError if the request is malformed, ConnectionFailed or RequestTimedOut if
        the outcome can't be sent."""
        asked = parse_header(CheckTransactionRequest, command.ext_fields)
        record = decode_record(command.body)
        queue = MessageQueue(record.topic, asked.broker_name or "", record.queue_id)
        message = received(record, queue, self._client.options.message_size_max)
        try:
            with anyio.fail_after(_CHECK_TIMEOUT_S):
                state = _checked(await self._check(message), "check")
        except (Exception, anyio.get_cancelled_exc_class(), BaseExceptionGroup) as error:  # the broker asks again
            failure = failure_of(error)
            _log.error("client.transaction_check_failed message=%s", message.message_id, exc_info=failure)
            return None
        if state is TransactionState.UNKNOWN:
            return None
        header = EndTransactionRequest(
            producer_group=self._group,
            tran_state_table_offset=asked.tran_state_table_offset,
            commit_log_offset=asked.commit_log_offset,
            commit_or_rollback=_FLAG_OF_STATE[state],
            msg_id=message.message_id,
            from_transaction_check=True,
            transaction_id=asked.transaction_id,
            topic=record.topic,
            broker_name=asked.broker_name,
        )
        end = RemotingCommand(RequestCode.END_TRANSACTION, flag=FLAG_ONEWAY, ext_fields=header.to_ext_fields())
        await connection.send_oneway(end, self._client.options.request_timeout_s)
        return None

    async def _end(self, connections: Connections, sent: Sent, state: TransactionState) -> bool:
        """Sends the outcome to the half message's broker; returns whether it was acknowledged. Never retried, because a
        second commit would deliver the message twice."""
        result = sent.result
        try:
            _, _, physical_offset = decode_message_id(result.offset_message_id)
            header = EndTransactionRequest(
                producer_group=self._group,
                tran_state_table_offset=result.queue_offset,
                commit_log_offset=physical_offset,
                commit_or_rollback=_FLAG_OF_STATE[state],
                msg_id=result.message_id,
                transaction_id=sent.transaction_id,
                topic=result.queue.topic,
                broker_name=result.queue.broker_name,
            )
            command = RemotingCommand(RequestCode.END_TRANSACTION, ext_fields=header.to_ext_fields())
            await connections.request(sent.address, command)
        except (ClientError, RemoteProtocolError) as error:
            _log.warning("client.transaction_not_ended message=%s reason=%r", result.message_id, str(error))
            return False
        return True


def _checked(state: object, callback: str) -> TransactionState:
    if not isinstance(state, TransactionState):
        raise TypeError(f"{callback} has returned {state!r}, which is no TransactionState")
    return state
