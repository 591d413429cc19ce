"""What becomes of one half message: whether it is time to ask about it, its next self, and the question (39).

A half message is asked about once it is older than transactionTimeOut, at most transactionCheckMax times, and each time
it is stored anew first: the question is about the new one. CHECK_IMMUNITY_TIME_IN_SECONDS is its own timeout; while
that lasts it is stored anew too, so that what came after it can be asked about. That counts as no question here; in
RocketMQ it does, and a long immunity uses them all up. Sources: TransactionalMessageServiceImpl.check,
TransactionalMessageBridge, DefaultTransactionalMessageCheckListener, AbstractTransactionalMessageCheckListener.
"""

from __future__ import annotations

from enum import Enum

from ha.broker.detour import parse_int, real_message
from ha.errors import LocalProtocolError
from ha.protocol.codes import RequestCode
from ha.protocol.group_requests import CheckTransactionRequest
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import (
    CHECK_IMMUNITY_TIME_S,
    CRC32,
    PREPARED_QUEUE_OFFSET,
    TRANSACTION_CHECK_TIMES,
    encode_properties,
    find_property,
)
from ha.protocol.record import Message, MessageRecord, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import GIVEN_UP_TOPIC, HALF_TOPIC


class Verdict(Enum):
    """What is to be done about an open half message."""

    WAIT = "it is too young, and so is what came after it"
    KEEP = "store it anew: it has an immunity of its own"
    ASK = "store it anew and ask a producer of its group"
    GIVE_UP = "put it where no producer is asked about it any more"


def judge(
    properties: dict[str, str], age_ms: int, *, timeout_ms: float, check_times_max: int, reserved_ms: float
) -> Verdict:
    """What is to be done about a half message with `properties`, born `age_ms` ago by its producer's clock."""
    if _number(properties, TRANSACTION_CHECK_TIMES) >= check_times_max or age_ms > reserved_ms:
        return Verdict.GIVE_UP
    if CHECK_IMMUNITY_TIME_S in properties:
        immunity_s = _number(properties, CHECK_IMMUNITY_TIME_S, -1)
        return Verdict.KEEP if age_ms < (timeout_ms if immunity_s == -1 else immunity_s * 1000) else Verdict.ASK
    return Verdict.WAIT if 0 <= age_ms < timeout_ms else Verdict.ASK


def _number(properties: dict[str, str], name: str, default: int = 0) -> int:
    try:
        return parse_int(properties[name])
    except (KeyError, ValueError):
        return default


def next_self(record: MessageRecord, properties: dict[str, str], *, is_asked: bool) -> Message:
    """The half message as it is to be stored anew. LocalProtocolError if it can't be written."""
    properties = {name: value for name, value in properties.items() if name != CRC32}
    if is_asked:
        properties[TRANSACTION_CHECK_TIMES] = str(_number(properties, TRANSACTION_CHECK_TIMES) + 1)
    else:
        properties.setdefault(PREPARED_QUEUE_OFFSET, str(record.queue_offset))
    return _moved(record, HALF_TOPIC, encode_properties(properties))


def given_up(record: MessageRecord, properties: dict[str, str]) -> Message:
    """The half message as it is to be stored where nobody asks about it any more."""
    raw = record.properties
    if CRC32 in properties:
        try:
            raw = encode_properties({name: value for name, value in properties.items() if name != CRC32})
        except LocalProtocolError:
            pass
    return _moved(record, GIVEN_UP_TOPIC, raw)


def _moved(record: MessageRecord, topic: str, properties: bytes) -> Message:
    message = record.to_message()
    message.topic, message.queue_id, message.properties = topic, 0, properties
    return message


def question(
    record: MessageRecord, copy: Message, *, queue_offset: int, physical_offset: int, broker_name: str, host: bytes
) -> RemotingCommand:
    """39 about the half message that was `record` and is `copy`, at these offsets, now. ValueError as real_message."""
    belongs = real_message(record)
    properties = copy.properties if copy.properties[-1:] == b"\x02" else copy.properties + b"\x02"
    unique_key = find_property(record.properties, b"UNIQ_KEY")
    asked = Message(
        belongs.topic,
        belongs.queue_id,
        copy.body,
        properties + b"WAIT\x01false\x02",  # as RocketMQ has it there, and not in the stored copy
        copy.flag,
        copy.sys_flag,
        copy.born_timestamp_ms,
        copy.born_host,
        copy.reconsume_times,
    )
    body = encode_record(
        asked,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        store_timestamp_ms=record.store_timestamp_ms,
        store_host=encode_host(*record.store_host),
    )
    header = CheckTransactionRequest(
        tran_state_table_offset=queue_offset,
        commit_log_offset=physical_offset,
        msg_id=unique_key,
        transaction_id=unique_key,
        offset_msg_id=encode_message_id(host, physical_offset),
        topic=HALF_TOPIC,
        broker_name=broker_name,
    )
    return RemotingCommand(RequestCode.CHECK_TRANSACTION_STATE, ext_fields=header.to_ext_fields(), body=body)
