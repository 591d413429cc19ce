"""Commitlog records: messages as they are on disk and in the body of a pull response.

All integers are big-endian and signed. Positions for IPv4 hosts:

    off  size  field
      0     4  total size, the whole record
      4     4  magic: V1 DAA320A7, V2 DAA320AB; filler CBD43194
      8     4  body CRC: crc32(body) & 7FFFFFFF
     12     4  queue id
     16     4  flag, set by the application
     20     8  queue offset (entries)
     28     8  physical offset (bytes)
     36     4  sysFlag; bits 4 and 5: the born host, the store host is IPv6
     40     8  born timestamp, ms
     48  8|20  born host: address 4 or 16, port int32
     56     8  store timestamp, ms
     64  8|20  store host
     72     4  reconsume times
     76     8  prepared transaction offset
     84     4  body length n
     88     n  body
           1|2 topic length t: one byte in V1, two in V2
             t topic, UTF-8
             2 properties length p
             p properties (see properties.py)

A filler ends a segment: total size = the bytes left in the segment, magic, then arbitrary bytes.
With the property CRC (5.2.0+), the properties end with 20 bytes: name (`__CRC32#`), 01, ten decimal digits with the
least significant first, 02. The number is crc32(the record without these bytes) & 7FFFFFFF.
Sources: MessageExtEncoder, CommitLog, MessageDecoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address
from mmap import mmap
from struct import Struct

import msgspec
from isal.isal_zlib import crc32

from ha.errors import RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.protocol.compiled import with_compiled_twin
from ha.protocol.properties import (
    DELAY_LEVELS_MS,
    KEYS,
    PROPERTIES_SIZE_MAX,
    TAGS,
    TIMER_DELETE_UNIQUE_KEY,
    TIMER_OUT_MS,
    UNIQ_KEY,
    decode_properties,
    delivery_time_ms,
    find_property,
    find_values,
    property_mark,
    tags_code,
)
from ha.protocol.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC

Readable = bytes | bytearray | memoryview | mmap

MAGIC_V1 = 0xDAA320A7 - (1 << 32)
MAGIC_V2 = 0xDAA320AB - (1 << 32)
FILLER_MAGIC = 0xCBD43194 - (1 << 32)
FILLER_SIZE_MIN = 8
"""Size of the smallest filler, in bytes. Every segment keeps at least this many bytes for its filler, so a record never
ends exactly where its segment does."""
RECORD_SIZE_MIN = 91
"""Size of the smallest possible record, in bytes: V1, IPv4 hosts, and an empty body, topic and properties."""
RECONSUME_TIMES_MAX = 0x7FFFFFFF
"""Largest number of retries that fits a record's field. A producer can set any number, so increments stop here."""
TOPIC_SIZE_V1_MAX = 127
"""Maximum bytes of the topic in a V1 record; longer topics (of retries and dead letters, topic_names.py) need V2"""
CRC_MASK = 0x7FFFFFFF
RECORD_PLACE = Struct(">i8xi4xqq")
"""Format of the start of any record: size, queue id, queue offset, physical offset"""

_SIZE_AND_MAGIC = Struct(">ii")
_UINT16 = Struct(">H")
_INT32 = Struct(">i")
HOSTS_V6 = SysFlag.BORNHOST_V6 | SysFlag.STOREHOST_V6

# All fields before the body, by sysFlag & HOSTS_V6; the hosts as byte strings.
HEADS = {
    0: Struct(">iiiiiqqiq8sq8siqi"),
    SysFlag.BORNHOST_V6: Struct(">iiiiiqqiq20sq8siqi"),
    SysFlag.STOREHOST_V6: Struct(">iiiiiqqiq8sq20siqi"),
    HOSTS_V6: Struct(">iiiiiqqiq20sq20siqi"),
}
_SCANNED = (property_mark(TAGS), property_mark(KEYS), property_mark(UNIQ_KEY))
_NONE_OF_THEM = (None, None, None)
_SYS_FLAG_AT = 36


class Message(msgspec.Struct, gc=False):
    """A message to be stored; the store adds offsets, store time and store host.

    `properties` is the raw property string. `born_host` comes from `encode_host`; the host bits of `sys_flag` are
    ignored and set from the sizes of the hosts when the record is written.
    """

    topic: str
    queue_id: int
    body: bytes | memoryview
    properties: bytes = b""
    flag: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int = 0
    born_host: bytes = b"\x7f\x00\x00\x01\x00\x00\x00\x00"
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


class MessageRecord(msgspec.Struct, frozen=True):
    """A decoded record. Sizes in bytes, times in ms, hosts as (address, port)."""

    total_size: int
    version: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp_ms: int
    born_host: tuple[str, int]
    store_timestamp_ms: int
    store_host: tuple[str, int]
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: str
    properties: bytes

    def property_map(self) -> dict[str, str]:
        """Returns the properties as a dict."""
        return decode_properties(self.properties)

    def to_message(self) -> Message:
        """Returns the stored message. Encoding it with this record's offsets, store time and store host, and without a
        further property CRC, gives the record's bytes."""
        return Message(
            topic=self.topic,
            queue_id=self.queue_id,
            body=self.body,
            properties=self.properties,
            flag=self.flag,
            sys_flag=self.sys_flag,
            born_timestamp_ms=self.born_timestamp_ms,
            born_host=encode_host(*self.born_host),
            reconsume_times=self.reconsume_times,
            prepared_transaction_offset=self.prepared_transaction_offset,
        )


class RecordHead(msgspec.Struct, frozen=True, gc=False):
    """The fields of a record that dispatch needs. `tags_code` is the due time in ms in SCHEDULE_TOPIC_XXXX, and the
    timer code in rmq_sys_wheel_timer."""

    total_size: int
    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    store_timestamp_ms: int
    tags_code: int
    tags: str | None
    keys: list[str]
    unique_key: str | None


class Filler(msgspec.Struct, frozen=True, gc=False):
    """The filler at the end of a segment. `total_size`: the size in bytes that it states; no records follow in the
    segment."""

    total_size: int


class Unparsable(msgspec.Struct, frozen=True, gc=False):
    """Bytes that are not a record. `total_size` is the size that they claim, 0 if that is unusable."""

    total_size: int
    reason: str


@lru_cache(maxsize=4096)
def encode_host(host: str, port: int) -> bytes:
    """Returns address (4 or 16 bytes) and port (int32) of `host`, a numeric IP address. Raises ValueError if it is not
    one."""
    return ip_address(host.partition("%")[0]).packed + _INT32.pack(port)


@lru_cache(maxsize=4096)
def decode_host(raw: bytes) -> tuple[str, int]:
    """Returns (address, port) of 8 or 20 bytes as written by `encode_host`."""
    return str(ip_address(raw[:-4])), _INT32.unpack_from(raw, len(raw) - 4)[0]


class _Layout(msgspec.Struct, frozen=True, gc=False):
    """Positions of the variable-length parts of a record in its buffer, and the fixed fields as unpacked by HEADS."""

    fields: tuple[int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int]
    body_at: int
    topic_at: int
    topic_size: int
    properties_at: int
    end: int


def _parse(buffer: Readable, position: int, end: int) -> _Layout | Filler | Unparsable | None:
    """Returns the layout of the record at `position`; a Filler; or an Unparsable if the bytes are neither.

    None: it ends (or claims to end) after `end`, so more bytes may complete it. Neither the body CRC nor the physical
    offset is checked.
    """
    available = end - position
    if available < FILLER_SIZE_MIN:
        return None
    total_size, magic = _SIZE_AND_MAGIC.unpack_from(buffer, position)
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        if magic == FILLER_MAGIC:
            return Filler(total_size)
        return Unparsable(max(total_size, 0), f"magic {magic & 0xFFFFFFFF:08x}")
    if total_size < RECORD_SIZE_MIN:
        return Unparsable(0, f"total size {total_size}")
    if total_size > available:
        return None
    (sys_flag,) = _INT32.unpack_from(buffer, position + _SYS_FLAG_AT)
    head = HEADS[sys_flag & HOSTS_V6]
    if head.size > total_size:
        return Unparsable(total_size, "truncated in its head")
    fields = head.unpack_from(buffer, position)
    record_end = position + total_size
    body_at = position + head.size
    body_size = fields[14]
    topic_at = body_at + body_size + (1 if magic == MAGIC_V1 else 2)
    if body_size < 0 or topic_at + 2 > record_end:
        return Unparsable(total_size, f"body of {body_size} bytes")
    topic_size = buffer[topic_at - 1] if magic == MAGIC_V1 else _UINT16.unpack_from(buffer, topic_at - 2)[0]
    properties_at = topic_at + topic_size + 2
    if properties_at > record_end or topic_size > (TOPIC_SIZE_V1_MAX if magic == MAGIC_V1 else PROPERTIES_SIZE_MAX):
        return Unparsable(total_size, f"topic of {topic_size} bytes")
    (properties_size,) = _UINT16.unpack_from(buffer, properties_at - 2)
    if properties_size > PROPERTIES_SIZE_MAX or properties_at + properties_size != record_end:
        return Unparsable(total_size, f"properties of {properties_size} bytes")
    return _Layout(fields, body_at, topic_at, topic_size, properties_at, record_end)


def _checked(buffer: Readable, position: int, end: int, *, verify_crc: bool) -> _Layout | Filler:
    """Returns the record or filler at `position`. Raises RemoteProtocolError if there is none, or if the body CRC is
    wrong and `verify_crc` is set."""
    found = _parse(buffer, position, end)
    if found is None:
        raise RemoteProtocolError(f"{end - position} bytes are too few for the record")
    if isinstance(found, Unparsable):
        raise RemoteProtocolError(f"not a record (total size {found.total_size}): {found.reason}")
    if verify_crc and isinstance(found, _Layout) and not _is_crc_right(buffer, found):
        raise RemoteProtocolError(f"body CRC of the record at physical offset {found.fields[6]} is wrong")
    return found


def _is_crc_right(buffer: Readable, layout: _Layout) -> bool:
    with memoryview(buffer) as view, view[layout.body_at : layout.body_at + layout.fields[14]] as body:
        return crc32(body) & CRC_MASK == layout.fields[2]


def _record_at(buffer: Readable, position: int, *, verify_crc: bool) -> _Layout:
    """Returns the record at `position`. Raises RemoteProtocolError if there is none (a filler is not one), or if the
    body CRC is wrong and `verify_crc` is set."""
    found = _checked(buffer, position, len(buffer), verify_crc=verify_crc)
    if isinstance(found, Filler):
        raise RemoteProtocolError("not a record: a filler")
    return found


def decode_record(buffer: Readable, position: int = 0, *, verify_crc: bool = True) -> MessageRecord:
    """Returns the record at `position`. Raises RemoteProtocolError if there is none, or if the body CRC is wrong and
    `verify_crc` is set.

    The body and properties are copied, so the buffer may be reused. Invalid UTF-8 in the topic or in properties becomes
    U+FFFD in str form, as in Java; `properties` keeps the bytes.
    """
    layout = _record_at(buffer, position, verify_crc=verify_crc)
    f = layout.fields
    return MessageRecord(
        total_size=f[0],
        version=1 if f[1] == MAGIC_V1 else 2,
        body_crc=f[2],
        queue_id=f[3],
        flag=f[4],
        queue_offset=f[5],
        physical_offset=f[6],
        sys_flag=f[7],
        born_timestamp_ms=f[8],
        born_host=decode_host(f[9]),
        store_timestamp_ms=f[10],
        store_host=decode_host(f[11]),
        reconsume_times=f[12],
        prepared_transaction_offset=f[13],
        body=bytes(buffer[layout.body_at : layout.body_at + f[14]]),
        topic=str(buffer[layout.topic_at : layout.topic_at + layout.topic_size], "utf-8", "replace"),
        properties=bytes(buffer[layout.properties_at : layout.end]),
    )


def record_properties(buffer: Readable) -> bytes:
    """Returns the raw property string of the record that `buffer` begins with. Raises RemoteProtocolError if there is
    none."""
    layout = _record_at(buffer, 0, verify_crc=False)
    return bytes(buffer[layout.properties_at : layout.end])


def decode_records(body: Readable, *, verify_crc: bool = True) -> list[MessageRecord]:
    """Returns the consecutive records in `body` (a pull response). Raises RemoteProtocolError as `decode_record`, for
    any of them."""
    records = []
    position = 0
    while position < len(body):
        record = decode_record(body, position, verify_crc=verify_crc)
        records.append(record)
        position += record.total_size
    return records


RecordParts = tuple[tuple[int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int], bytes, bytes]
"""The fixed fields of a record in their order (from total size to body length, hosts as bytes), its body and its
property string."""


@with_compiled_twin
def split_records(body: bytes, *, verify_crc: bool = True) -> list[RecordParts]:
    """Returns the `RecordParts` of each record that `decode_records` would return, at a fraction of the cost. Raises
    the same errors."""
    found: list[RecordParts] = []
    position = 0
    while position < len(body):
        layout = _record_at(body, position, verify_crc=verify_crc)
        content = body[layout.body_at : layout.body_at + layout.fields[14]]
        found.append((layout.fields, content, body[layout.properties_at : layout.end]))
        position = layout.end
    return found


def verify_record(buffer: Readable, position: int, end: int, *, verify_crc: bool = True) -> int | Filler:
    """Checks the record at `position` as recovery does, and returns its size in bytes, or the Filler found there.

    Raises RemoteProtocolError if there is neither before `end`: the magic is unknown, the sizes don't add up, or, with
    `verify_crc`, the body CRC is wrong. Does not check the physical offset. Source:
    CommitLog.checkMessageAndReturnSize.
    """
    found = _checked(buffer, position, end, verify_crc=verify_crc)
    return found if isinstance(found, Filler) else found.fields[0]


@with_compiled_twin
def sound_records(buffer: bytes, base_offset: int, end: int) -> tuple[int, int]:
    """Returns the total size in bytes of the sound records at the start of `buffer`, and the position of the last one;
    -1 if there is none.

    A record is sound if `verify_record` accepts it, and it is at the physical offset that it states. Only records
    within the first `end` bytes count. `base_offset`: physical offset of the buffer's first byte.
    """
    position, last = 0, -1
    end = min(end, len(buffer))
    while isinstance(layout := _parse(buffer, position, end), _Layout):
        if layout.fields[6] != base_offset + position or not _is_crc_right(buffer, layout):
            break
        last, position = position, layout.end
    return position, last


def scan_record(
    buffer: Readable, position: int, end: int, *, delay_levels_ms: Sequence[int] = DELAY_LEVELS_MS
) -> RecordHead | Filler | Unparsable | None:
    """Returns the fields of the record at `position` that dispatch needs. No CRC is checked, and the body is not read.

    Returns None if the record ends (or claims to end) after `end`, so that more bytes may complete it; if `end` is the
    end of the segment, the record is damaged. Returns an Unparsable if the bytes can't become a record or filler.
    """
    layout = _parse(buffer, position, end)
    if not isinstance(layout, _Layout):
        return layout
    fields = layout.fields
    topic = str(buffer[layout.topic_at : layout.topic_at + layout.topic_size], "utf-8", "replace")
    properties = buffer[layout.properties_at : layout.end]
    tags, keys, unique_key = find_values(properties, _SCANNED) if properties else _NONE_OF_THEM
    if topic == SCHEDULE_TOPIC:
        code = schedule_code(bytes(properties), tags_code(tags), fields[10], delay_levels_ms)
    elif topic == TIMER_TOPIC:
        code = timer_code(bytes(properties), tags_code(tags))
    else:
        code = tags_code(tags)
    return RecordHead(
        fields[0],
        topic,
        fields[3],
        fields[5],
        fields[6],
        fields[7],
        fields[10],
        code,
        tags,
        [] if keys is None else [keys] if " " not in keys else [key for key in keys.split(" ") if key],
        unique_key,
    )


def schedule_code(properties: bytes, code: int, store_timestamp_ms: int, delay_levels_ms: Sequence[int]) -> int:
    """Returns the tags code of a record in SCHEDULE_TOPIC_XXXX: its due time in ms, or `code` if its property DELAY is
    missing or not a number above 0."""
    delay = find_property(properties, b"DELAY")
    try:
        level = int(delay) if delay else 0
    except ValueError:
        level = 0
    return delivery_time_ms(level, store_timestamp_ms, delay_levels_ms) if level > 0 else code


def timer_code(properties: bytes, code: int) -> int:
    """Returns the tags code of a record in rmq_sys_wheel_timer: 2 × due time (ms since the epoch), plus 1 unless it
    recalls another message, so that a recall sorts before the message that it recalls. `code` if there is no usable
    due time.

    RocketMQ stores the hash of the tags there and does not read it. Hashes are 32-bit numbers; timer codes are larger.
    """
    due = find_property(properties, TIMER_OUT_MS.encode())
    if due is None or not due.isascii() or not due.isdigit() or len(due) > _DUE_DIGITS_MAX:
        return code
    if not TIMER_CODE_MIN <= 2 * int(due) < 2**62:
        return code
    return 2 * int(due) + (find_property(properties, TIMER_DELETE_UNIQUE_KEY.encode()) is None)


_DUE_DIGITS_MAX = 19
"""Maximum number of digits of a due time; int() refuses more than 4,300."""
TIMER_CODE_MIN = 1 << 32
"""Smallest timer code; smaller tags codes in rmq_sys_wheel_timer are hashes, written by RocketMQ."""
