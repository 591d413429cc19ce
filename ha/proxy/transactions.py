"""EndTransaction, and brokers' checks of open transactions, which are passed to producers.

The transaction id that the client gets and sends back contains the message id, the broker name, and the half message's
queue offset and physical offset, joined by blanks. So the front keeps no state: any front of a cluster can end any
transaction, also after a restart. RocketMQ's proxy uses the message id as the transaction id, and keeps the place of
the half message for about 30 s. Sources: EndTransactionActivity, ProxyClientRemotingProcessor.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ha.errors import RemoteProtocolError
from ha.protocol.codes import RequestCode, SysFlag
from ha.protocol.group_requests import CheckTransactionRequest, EndTransactionRequest
from ha.protocol.headers import parse_header
from ha.protocol.message_id import decode_message_id
from ha.protocol.properties import REAL_TOPIC, UNIQ_KEY
from ha.protocol.record import decode_record
from ha.protocol.remoting import RemotingCommand

from .brokers import Brokers
from .conversion import set_message
from .messages import COMMIT, ROLLBACK, SERVER_CHECK, Code, make
from .names import resource_name, topic_name
from .options import FrontOptions
from .refusal import CallRefused, check
from .status import ok

if TYPE_CHECKING:
    from ha.grpc import Call

    from .session import Producers, Session
    from .telemetry import Access

logger = logging.getLogger(__name__)

_RESOLUTIONS = {COMMIT: SysFlag.TRANSACTION_COMMIT, ROLLBACK: SysFlag.TRANSACTION_ROLLBACK}


def transaction_id(message_id: str, broker_name: str, queue_offset: int, offset_message_id: str) -> str:
    """Returns the transaction id of a half message. Raises RemoteProtocolError if `offset_message_id` is invalid."""
    return _join(message_id, broker_name, queue_offset, decode_message_id(offset_message_id)[2])


def _join(message_id: str, broker_name: str, queue_offset: int, physical_offset: int) -> str:
    return f"{message_id} {broker_name} {queue_offset} {physical_offset}"


class Transactions:
    """Ends transactions, and passes brokers' checks to producers."""

    def __init__(
        self, brokers: Brokers, options: FrontOptions, producers: Producers, access: Access | None = None
    ) -> None:
        self._options = options
        self._access = access
        self._brokers = brokers
        self._producers = producers

    async def end(self, session: Session, request: Any) -> Any:
        """EndTransaction: commits or rolls back; does nothing for another resolution. Raises CallRefused,
        BrokerUnreachable."""
        topic = topic_name(request.topic)
        if not request.transaction_id.strip():
            raise CallRefused(Code.INVALID_TRANSACTION_ID, "transaction id cannot be blank")
        words = request.transaction_id.rsplit(" ", 3)  # the message id is the client's, and may have blanks
        if len(words) != 4 or not words[2].isdecimal() or not words[3].isdecimal() or len(words[2] + words[3]) > 38:
            raise CallRefused(Code.INTERNAL_SERVER_ERROR, "cannot found transaction data")
        message_id, broker_name, queue_offset, physical_offset = words
        route = await self._brokers.route(topic)
        if route is None or broker_name not in [each.broker_name for each in route.brokers]:
            raise CallRefused(
                Code.INTERNAL_SERVER_ERROR, f"broker {broker_name[:80]} of the transaction has no topic {topic}"
            )
        resolution = _RESOLUTIONS.get(request.resolution)
        if resolution is None:
            return ok("EndTransactionResponse")  # not decided yet: the producer is asked later
        header = EndTransactionRequest(
            producer_group=topic,
            topic=topic,
            tran_state_table_offset=int(queue_offset),
            commit_log_offset=int(physical_offset),
            commit_or_rollback=resolution,
            from_transaction_check=request.source == SERVER_CHECK,
            msg_id=message_id,
            transaction_id=message_id,
            broker_name=broker_name,
        )
        command = RemotingCommand(RequestCode.END_TRANSACTION, ext_fields=header.to_ext_fields())
        check(await self._brokers.invoke(session, broker_name, command))
        return ok("EndTransactionResponse")

    def _may_be_asked(self, session: Session, call: Call, topic: str) -> bool:
        return self._access is None or self._access.may_be_asked(session, call, topic)

    def ask(self, broker_name: str, command: RemotingCommand) -> bool:
        """Passes a broker's check, CHECK_TRANSACTION_STATE (39), to a client that may be asked about the topic. Returns
        False if there is none, or the request is malformed."""
        try:
            request = parse_header(CheckTransactionRequest, command.ext_fields)
            record = decode_record(command.body, verify_crc=False)
        except RemoteProtocolError as error:
            logger.warning("proxy.check_malformed broker=%r reason=%r", broker_name, str(error))
            return False
        properties = record.property_map()
        topic = properties.get(REAL_TOPIC) or record.topic
        session = self._producers.find(topic, self._may_be_asked)
        if session is None or session.telemetry is None:
            logger.info("proxy.check_without_producer broker=%r topic=%r", broker_name, topic)
            return False
        message_id = properties.get(UNIQ_KEY) or request.msg_id or ""
        identity = _join(message_id, broker_name, request.tran_state_table_offset, request.commit_log_offset)
        known = () if session.settings is None else session.settings.publishing.topics
        named = (each for each in known if resource_name(each) == topic)
        resource = next(named, make("Resource", name=topic))
        telemetry = make("TelemetryCommand")
        recover = telemetry.recover_orphaned_transaction_command
        recover.transaction_id = identity
        set_message(recover.message, record, properties, resource, self._options.unpacked_size_max)
        session.telemetry.send_nowait(telemetry.SerializeToString())
        return True
