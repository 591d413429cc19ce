"""Messages that are first stored in a system topic, and later in their own: delayed, timer and half messages.

    DELAY=n        SCHEDULE_TOPIC_XXXX, queue n - 1           until it is due (delay.py)
    TIMER_…        rmq_sys_wheel_timer, queue 0               until it is due (timers.py)
    TRAN_MSG=true  RMQ_SYS_TRANS_HALF_TOPIC, queue 0          until its producer commits

In the system topic, the properties REAL_TOPIC and REAL_QID name the message's own topic and queue. The transaction bits
of a half message are cleared, so that it is dispatched. The copy in the message's own topic keeps DELAY, TRAN_MSG and
REAL_*.

Sources: HookUtils.handleScheduleMessage and transformTimerMessage, ScheduleMessageService.messageTimeUp,
TransactionalMessageBridge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ha.broker.stored_properties import join, without
from ha.protocol.codes import SysFlag
from ha.protocol.properties import (
    CRC32,
    DELAY,
    PROPERTIES_SIZE_MAX,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELETE_UNIQUE_KEY,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    TRANSACTION_ID,
    TRANSACTION_PREPARED,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
)
from ha.protocol.record import Message, MessageRecord, encode_host
from ha.protocol.record_encoding import PROPERTY_CRC_SIZE
from ha.protocol.topic_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

NOTED_SIZE_MAX = PROPERTIES_SIZE_MAX - PROPERTY_CRC_SIZE - 1
"""Maximum bytes of the result of `with_notes`: leaves room for a separator and a CRC, which the store may append."""
TIMER_PROPERTIES = (TIMER_DELIVER_MS, TIMER_DELAY_SEC, TIMER_DELAY_MS)

_INT = re.compile(r"[+-]?[0-9]{1,10}", re.ASCII)
_INT_MAX = 2**31 - 1
_LONG = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)


def parse_int(text: str) -> int:
    """Parses a property like Java's Integer.parseInt. Raises ValueError with Java's message if it is not an int32."""
    if _INT.fullmatch(text) and -_INT_MAX - 1 <= (number := int(text)) <= _INT_MAX:
        return number
    raise ValueError(f'For input string: "{text[:40]}"')


def delay_level(properties: dict[str, str]) -> int:
    """Returns the requested delay level; 0 or less: no delay, as without DELAY. Raises ValueError if DELAY is not an
    int32."""
    text = properties.get(DELAY)
    return parse_int(text) if text is not None else 0


def is_half(properties: dict[str, str]) -> bool:
    """Returns whether `properties` are those of a half message."""
    return properties.get(TRANSACTION_PREPARED, "").lower() == "true"


def store_delayed(message: Message, properties: dict[str, str], level: int, level_count: int) -> None:
    """Redirects `message` to the queue of its delay `level`, from 1; levels beyond the last become the last.

    Changes both `message` and `properties`, its decoded properties. Removes timer properties, as a level takes
    precedence over a timer (HookUtils.checkIfTimerMessage). Raises LocalProtocolError if the new properties can't be
    encoded.
    """
    if level > level_count:
        level = level_count
        properties[DELAY] = str(level)
    for name in TIMER_PROPERTIES:
        properties.pop(name, None)
    _store_elsewhere(message, properties, SCHEDULE_TOPIC, level - 1)


def is_timer(properties: dict[str, str]) -> bool:
    """Returns whether `properties` request a delivery time, and are not those of a timer message that has been
    delivered."""
    return TIMER_OUT_MS not in properties and any(name in properties for name in TIMER_PROPERTIES)


def store_timer(message: Message, properties: dict[str, str], now_ms: int, delay_ms_max: int) -> bool:
    """Redirects a timer message to the timer topic, or leaves it unchanged if its delivery time has passed.

    Returns False if the message must be refused: its delay is not a number or is longer than `delay_ms_max`, or it
    recalls another message and its delivery time has passed. Changes both `message` and `properties`, its decoded
    properties. The due time is exact to the millisecond; RocketMQ rounds it down to seconds, and delivers up to a
    second early. Raises LocalProtocolError if the new properties can't be encoded.
    """
    if TIMER_DELAY_SEC in properties:
        text, scale, since_ms = properties[TIMER_DELAY_SEC], 1000, now_ms
    elif TIMER_DELAY_MS in properties:
        text, scale, since_ms = properties[TIMER_DELAY_MS], 1, now_ms
    else:
        text, scale, since_ms = properties[TIMER_DELIVER_MS], 1, 0
    if _LONG.fullmatch(text) is None:
        return False
    due_ms = since_ms + int(text) * scale
    if due_ms <= now_ms:
        return TIMER_DELETE_UNIQUE_KEY not in properties
    if due_ms - now_ms > delay_ms_max:
        return False
    properties[TIMER_OUT_MS] = str(due_ms)
    _store_elsewhere(message, properties, TIMER_TOPIC, 0)
    return True


def store_half(message: Message, properties: dict[str, str]) -> None:
    """Redirects `message` to the half topic until its producer ends the transaction.

    Changes both `message` and `properties`, its decoded properties. Raises LocalProtocolError if the new properties
    can't be encoded.
    """
    message.sys_flag &= ~SysFlag.TRANSACTION_MASK
    if UNIQ_KEY in properties:
        properties[TRANSACTION_ID] = properties[UNIQ_KEY]
    _store_elsewhere(message, properties, HALF_TOPIC, 0)


def _store_elsewhere(message: Message, properties: dict[str, str], topic: str, queue_id: int) -> None:
    properties[REAL_TOPIC] = message.topic
    properties[REAL_QUEUE_ID] = str(message.queue_id)
    message.properties = encode_properties(properties)
    message.topic = topic
    message.queue_id = queue_id


def real_message(record: MessageRecord) -> Message:
    """Returns the message in `record`, which is in a system topic, addressed to its own topic and queue.

    Raises ValueError if its properties don't name them, or REAL_QID is not an int32.
    """
    properties = decode_properties(record.properties)
    topic, queue_id = properties.get(REAL_TOPIC), properties.get(REAL_QUEUE_ID)
    if topic is None or queue_id is None:
        raise ValueError(f"the message has no {REAL_TOPIC if topic is None else REAL_QUEUE_ID}")
    raw = record.properties
    if CRC32 in properties:  # of the record in the system topic; the store computes a new one
        raw = without(raw, CRC32)
    return message_of(record, topic, parse_int(queue_id), raw)


def with_notes(properties: bytes, notes: Mapping[str, str]) -> bytes:
    """Returns `properties` with the informational `notes` appended, or unchanged if that exceeds NOTED_SIZE_MAX."""
    noted = join(properties, encode_properties(notes))
    return noted if len(noted) <= NOTED_SIZE_MAX else properties


def message_of(record: MessageRecord, topic: str, queue_id: int, properties: bytes) -> Message:
    """Returns the message in `record`, but with the given topic, queue and property string."""
    return Message(
        topic,
        queue_id,
        record.body,
        properties,
        record.flag,
        record.sys_flag,
        record.born_timestamp_ms,
        encode_host(*record.born_host),
        record.reconsume_times,
    )
