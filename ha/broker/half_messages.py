"""The check of one half message: whether it is due, the copy that is stored for it, and the request to its producer,
CHECK_TRANSACTION_STATE (39).

A half message is checked once it is older than transactionTimeOut, at most transactionCheckMax times. Before each check
it is stored again, and the check is about the copy. The property CHECK_IMMUNITY_TIME_IN_SECONDS replaces the timeout of
one message. Until that time is over, the message is stored again without a check, so that later ones can be checked. In
RocketMQ this counts as a check, and a long immunity uses up all of them.

Sources: TransactionalMessageServiceImpl.check, TransactionalMessageBridge, DefaultTransactionalMessageCheckListener,
AbstractTransactionalMessageCheckListener.
"""

from __future__ import annotations

from enum import Enum

from ha.broker.detour import parse_int, real_message
from ha.broker.stored_properties import join
from ha.errors import LocalProtocolError
from ha.protocol.codes import RequestCode
from ha.protocol.group_requests import CheckTransactionRequest
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import (
    CHECK_IMMUNITY_TIME_S,
    CRC32,
    PREPARED_QUEUE_OFFSET,
    PROPERTIES_SIZE_MAX,
    TRANSACTION_CHECK_TIMES,
    encode_properties,
    find_property,
)
from ha.protocol.record import Message, MessageRecord, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import GIVEN_UP_TOPIC, HALF_TOPIC


class Verdict(Enum):
    """Action for an open half message."""

    WAIT = "nothing: it is too young, and so are all later ones"
    KEEP = "store it again, as its immunity has not ended"
    ASK = "store it again and ask a producer of its group"
    GIVE_UP = "move it to the topic of half messages that are no longer checked"


def judge(
    properties: dict[str, str], age_ms: int, *, timeout_ms: float, check_times_max: int, reserved_ms: float
) -> Verdict:
    """Returns the action for an open half message that was born `age_ms` ago, by its producer's clock.

    Gives up a message after `check_times_max` checks, or if it is older than `reserved_ms`, as retention may delete it.
    `timeout_ms`: minimum age for a check, unless the message has CHECK_IMMUNITY_TIME_IN_SECONDS. A message with a
    negative age (the producer's clock is ahead) is checked at once: it would otherwise be stored again until the
    broker's clock has caught up.
    """
    if _number(properties, TRANSACTION_CHECK_TIMES) >= check_times_max or age_ms > reserved_ms:
        return Verdict.GIVE_UP
    if CHECK_IMMUNITY_TIME_S in properties:
        immunity_s = _number(properties, CHECK_IMMUNITY_TIME_S, -1)
        return Verdict.KEEP if 0 <= age_ms < (timeout_ms if immunity_s == -1 else immunity_s * 1000) else Verdict.ASK
    return Verdict.WAIT if 0 <= age_ms < timeout_ms else Verdict.ASK


def _number(properties: dict[str, str], name: str, default: int = 0) -> int:
    try:
        return parse_int(properties[name])
    except (KeyError, ValueError):
        return default


def next_copy(record: MessageRecord, properties: dict[str, str], *, is_asked: bool) -> Message:
    """Returns the copy with which a half message is stored again.

    `is_asked`: a producer is asked, so the copy's number of checks is one higher. Otherwise the copy states the queue
    offset of `record`, unless `record` already states that of an earlier copy. Raises LocalProtocolError if the copy
    can't be encoded.
    """
    properties = {name: value for name, value in properties.items() if name != CRC32}
    if is_asked:
        properties[TRANSACTION_CHECK_TIMES] = str(_number(properties, TRANSACTION_CHECK_TIMES) + 1)
    else:
        properties.setdefault(PREPARED_QUEUE_OFFSET, str(record.queue_offset))
    return _moved(record, HALF_TOPIC, encode_properties(properties))


def given_up(record: MessageRecord, properties: dict[str, str]) -> Message:
    """Returns the copy of a half message that is stored in GIVEN_UP_TOPIC."""
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
    """Returns the request CHECK_TRANSACTION_STATE (39) to a producer about half message `record`, which was stored
    again as `copy` at these offsets.

    `host`: this broker's address, as `encode_host` returns it. Raises ValueError as `real_message` does.
    """
    belongs = real_message(record)
    # As in RocketMQ, the check has WAIT=false, which the stored copy lacks; omitted if the properties get too long.
    properties = join(copy.properties, b"WAIT\x01false\x02")
    if len(properties) > PROPERTIES_SIZE_MAX:
        properties = copy.properties
    unique_key = find_property(record.properties, b"UNIQ_KEY")
    asked = Message(
        belongs.topic,
        belongs.queue_id,
        copy.body,
        properties,
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
