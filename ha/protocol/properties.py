"""Encodes and decodes the property string of a message, and computes the hashes that queues and indexes store.

    name 0x01 value 0x02  repeated

The order has no meaning. Reading: split at 0x02; pieces shorter than 3 characters, without 0x01, or with an empty name
or value are dropped; a piece is split at its first 0x01; the last piece needs no 0x02; of equal names the last wins.
Writing: every pair ends with 0x02 (RocketMQ 4.9 omits the very last one). Source: MessageDecoder
(string2messageProperties, messageProperties2String).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import mul

from ha.errors import LocalProtocolError

KEY_SEPARATOR = " "
PROPERTIES_SIZE_MAX = 32767
"""Maximum size of a property string in bytes"""

KEYS = "KEYS"
TAGS = "TAGS"
WAIT = "WAIT"
DELAY = "DELAY"
UNIQ_KEY = "UNIQ_KEY"
RETRY_TOPIC = "RETRY_TOPIC"
REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE_ID = "REAL_QID"
CLUSTER = "CLUSTER"
MSG_REGION = "MSG_REGION"
TRACE_ON = "TRACE_ON"
TRANSACTION_PREPARED = "TRAN_MSG"
PRODUCER_GROUP = "PGROUP"
TRANSACTION_ID = "__transactionId__"
TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
CHECK_IMMUNITY_TIME_S = "CHECK_IMMUNITY_TIME_IN_SECONDS"
PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
INNER_NUM = "INNER_NUM"
INNER_BASE = "INNER_BASE"
MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
RECONSUME_TIME = "RECONSUME_TIME"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
TIMER_DELAY_MS = "TIMER_DELAY_MS"
TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
TIMER_OUT_MS = "TIMER_OUT_MS"
TIMER_DELETE_UNIQUE_KEY = "TIMER_DEL_UNIQKEY"
TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"
TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
CRC32 = "__CRC32#"

DELAY_LEVELS_MS: tuple[int, ...] = (
    *(seconds * 1000 for seconds in (1, 5, 10, 30)),
    *(minutes * 60_000 for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)),
    *(hours * 3_600_000 for hours in (1, 2)),
)
"""RocketMQ's default messageDelayLevel in ms; level n is element n - 1."""

_POWERS_COUNT = 256
_POWERS: tuple[int, ...] = tuple(pow(31, exponent, 1 << 32) for exponent in range(_POWERS_COUNT - 1, -1, -1))
_POWERS_BY_LENGTH: tuple[tuple[int, ...], ...] = tuple(_POWERS[_POWERS_COUNT - n :] for n in range(_POWERS_COUNT + 1))


def java_hash(text: str, before: int = 0) -> int:
    """Returns Java's String.hashCode of `text`: the sum of unit[i] * 31^(n-1-i) over its n UTF-16 units, as an int32.

    `before` is the hash of a preceding text; the result is then the hash of both together.
    """
    try:
        units: Sequence[int] = text.encode("latin-1")
    except UnicodeEncodeError:
        units = memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H") if _LITTLE_ENDIAN else _units(text)
    count = len(units)
    value: int
    if count < _POWERS_COUNT:
        value = sum(map(mul, units, _POWERS_BY_LENGTH[count]), before * _POWERS[-1 - count])
    else:
        value = before
        for start in range(0, count, _POWERS_COUNT):
            piece = units[start : start + _POWERS_COUNT]
            value = value * pow(31, len(piece), 1 << 32) + sum(map(mul, piece, _POWERS_BY_LENGTH[len(piece)]))
            value &= 0xFFFFFFFF
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def _units(text: str) -> Sequence[int]:
    encoded = text.encode("utf-16-be", "surrogatepass")
    return [encoded[i] << 8 | encoded[i + 1] for i in range(0, len(encoded), 2)]


_LITTLE_ENDIAN = memoryview(b"\x01\x00").cast("H")[0] == 1


@lru_cache(maxsize=4096)
def _tag_hash(tags: str) -> int:
    return java_hash(tags)


def tags_code(tags: str | None) -> int:
    """Returns the tags code of a consume-queue entry: the Java hash of `tags`, or 0 without a tag."""
    return _tag_hash(tags) if tags else 0


def delivery_time_ms(level: int, store_timestamp_ms: int, delay_levels_ms: Sequence[int] = DELAY_LEVELS_MS) -> int:
    """Returns the due time of a delayed message in ms, which is also the tags code of its entry in SCHEDULE_TOPIC_XXXX.

    `level` counts from 1; values above the last level mean the last. Without levels, the delay is 1 s. Source:
    ScheduleMessageService.computeDeliverTimestamp.
    """
    if not delay_levels_ms:
        return store_timestamp_ms + 1000
    return store_timestamp_ms + delay_levels_ms[min(level, len(delay_levels_ms)) - 1]


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Returns the property string of `properties`, each pair ended by 0x02.

    Pairs with an empty name or value are omitted, as readers drop them. Raises LocalProtocolError if a name contains
    0x01 or 0x02, if a value contains 0x02 (readers would split the pair there), or if one can't be encoded as UTF-8.
    """
    parts = []
    for name, value in properties.items():
        if not name or not value:
            continue
        if "\x01" in name or "\x02" in name or "\x02" in value:
            raise LocalProtocolError(f"property {name!r} contains a separator, so it would be read as another one")
        parts.append(f"{name}\x01{value}\x02")
    try:
        return "".join(parts).encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"a property can't be written as UTF-8: {error}") from None


def decode_properties(raw: bytes | bytearray | memoryview) -> dict[str, str]:
    """Returns the properties in the stored string `raw`. Never raises: bad UTF-8 becomes U+FFFD, as in Java."""
    found: dict[str, str] = {}
    for piece in str(raw, "utf-8", "replace").split("\x02"):
        if len(piece) < 3:
            continue
        name, separator, value = piece.partition("\x01")
        if separator and name and value:
            found[name] = value
    return found


def property_mark(name: str) -> str:
    """Returns the pattern before the value of a property, for `find_values`."""
    return f"\x02{name}\x01"


def find_values(raw: bytes | bytearray | memoryview, marks: tuple[str, ...]) -> list[str | None]:
    """Returns the values of some properties of the string `raw`, None for each that is missing.

    Equal to the values that decode_properties returns, without decoding the others; `marks` are from `property_mark`.
    """
    text = "\x02" + str(raw, "utf-8", "replace")
    values: list[str | None] = []
    for mark in marks:
        start = text.rfind(mark)
        if start < 0:
            values.append(None)
            continue
        start += len(mark)
        end = text.find("\x02", start)
        value = text[start:] if end < 0 else text[start:end]
        # A pair with an empty value is ignored, so an earlier one of the same name may apply.
        values.append(value or decode_properties(raw).get(mark[1:-1]))
    return values


class _Marks(dict[bytes, tuple[bytes, bytes]]):
    """Cache by property name: the bytes that precede the property's value inside a property string, and at the start of
    one."""

    def __missing__(self, name: bytes) -> tuple[bytes, bytes]:
        self[name] = marks = (b"\x02" + name + b"\x01", name + b"\x01")
        return marks


_MARKS = _Marks()


def find_property(raw: bytes, name: bytes) -> str | None:
    """Returns one property of the string `raw`, or None. Same result as decode_properties, without decoding the others.

    `name` is the UTF-8 name without separator. It must be one of a fixed set, because its search pattern is cached
    forever.
    """
    inner, first = _MARKS[name]
    position = raw.rfind(inner)
    if position >= 0:
        start = position + len(inner)
    elif raw.startswith(first):
        start = len(first)
    else:
        return None
    end = raw.find(b"\x02", start)
    value = raw[start:] if end < 0 else raw[start:end]
    if not value:  # as in find_values
        return decode_properties(raw).get(str(name, "utf-8", "replace"))
    return str(value, "utf-8", "replace")
