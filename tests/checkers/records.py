"""Commitlog records, read from bytes by the format's description alone.

| off | size | field | | off | size | field |
| --- | --- | --- | --- | --- | --- | --- |
| 0 | 4 | total size | | 40 | 8 | born time, ms |
| 4 | 4 | magic: V1 DAA320A7, V2 DAA320AB | | 48 | 8 / 20 | born host (20: sysFlag bit 4) |
| 8 | 4 | CRC-32 of the body, 31 bits | | . | 8 | store time, ms |
| 12 | 4 | queue id | | . | 8 / 20 | store host (20: sysFlag bit 5) |
| 16 | 4 | flag | | . | 4 | reconsume times |
| 20 | 8 | queue offset | | . | 8 | prepared transaction offset |
| 28 | 8 | physical offset | | . | 4 + n | body |
| 36 | 4 | sysFlag | | . | 1 (V2: 2) + t | topic |
| | | | | . | 2 + p | properties: name 01 value 02 ... |

At a segment's end stands a filler: int32 bytes left, int32 CBD43194; what follows it is arbitrary. A record never fills
its segment to the last byte: 8 stay for the filler. Source: Apache RocketMQ 4.9, 5.x (MessageExtEncoder, CommitLog).

A record is good if all its lengths add up to its size, it stands where it says, and its body has its CRC. Properties
have no checksum of their own; only their form is looked at.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from struct import error as StructError  # noqa: N812

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
MAGIC_FILLER = 0xCBD43194
FILLER_SIZE = 8
RECORD_SIZE_MIN = 91
CRC_MASK = 0x7FFFFFFF

_HEAD = Struct(">iIiiiqqiq")  # up to and with the born time
_FILLER = Struct(">iI")
_INT16 = Struct(">h")
_INT32 = Struct(">i")
_INT64 = Struct(">q")

Read = Callable[[int, int], bytes]
"""(physical offset, size) -> the bytes there; fewer only where none are held."""


class BadRecord(Exception):  # noqa: N818  # a finding, not a failure of the caller
    """There is no valid record at a physical offset. `is_cut`: there may be one, but it extends beyond the given end.

    `is_blank`: there are only zeros where a record would start.
    """

    def __init__(self, offset: int, reason: str, *, is_cut: bool = False, is_blank: bool = False) -> None:
        super().__init__(f"physical offset {offset}: {reason}")
        self.offset = offset
        self.reason = reason
        self.is_cut = is_cut
        self.is_blank = is_blank


@dataclass(frozen=True)
class Rec:
    """One record. `size` in bytes; `queue_offset` in entries; `store_ms` since the epoch."""

    physical_offset: int
    size: int
    topic: str
    queue_id: int
    queue_offset: int
    body: bytes
    body_crc: int
    sys_flag: int
    store_ms: int
    properties: bytes
    raw: bytes

    @property
    def end(self) -> int:
        """Physical offset of its end."""
        return self.physical_offset + self.size

    @property
    def transaction(self) -> int:
        """0 none, 1 prepared, 2 commit, 3 rollback."""
        return self.sys_flag >> 2 & 3

    @property
    def is_copy(self) -> bool:
        """Whether it is a message that is delivered again to a group: a copy of another record."""
        return self.topic.startswith("%RETRY%")

    @property
    def is_queued(self) -> bool:
        """Whether it is in a consume queue: prepared and rolled-back transactions are not."""
        return self.transaction in (0, 2)

    @cached_property
    def property_map(self) -> dict[str, str]:
        """Its properties."""
        found = {}
        for pair in self.properties.decode("utf-8", "replace").split("\x02"):
            name, separator, value = pair.partition("\x01")
            if name and separator and value:
                found[name] = value
        return found

    @property
    def uniq_key(self) -> str:
        """The client's id of the message; "" if it has none."""
        return self.property_map.get("UNIQ_KEY", "")

    @property
    def tags(self) -> str:
        """Its tag; "" if it has none."""
        return self.property_map.get("TAGS", "")

    @property
    def keys(self) -> list[str]:
        """The words of KEYS."""
        return [word for word in self.property_map.get("KEYS", "").split(" ") if word]


def scan(read: Read, begin: int, end: int, segment_size: int) -> Iterator[Rec]:
    """Yields the records of [begin, end), where `begin` must be a record's offset; BadRecord where the chain breaks
    before `end`.

    Fillers are skipped. `begin` = `end` yields nothing.
    """
    at = begin
    while at < end:
        room = segment_size - at % segment_size
        limit = min(room, end - at)
        head = read(at, min(FILLER_SIZE, limit))
        if len(head) < FILLER_SIZE:
            blank = not any(head)
            raise BadRecord(at, f"only {limit} bytes are left", is_cut=limit == end - at, is_blank=blank)
        size, magic = _FILLER.unpack(head)
        if magic == MAGIC_FILLER:
            if size != room:
                raise BadRecord(at, f"a filler says {size} bytes where {room} are left of the segment")
            at += room
            continue
        record = _parse(read, at, size, magic, room, limit)
        yield record
        at = record.end


def parse_at(read: Read, offset: int, end: int, segment_size: int) -> Rec:
    """Returns the record at a physical offset. BadRecord if there is none, or a filler."""
    for record in scan(read, offset, end, segment_size):
        if record.physical_offset != offset:
            break
        return record
    raise BadRecord(offset, "no record begins here")


def _parse(read: Read, at: int, size: int, magic: int, room: int, limit: int) -> Rec:
    if magic not in (MAGIC_V1, MAGIC_V2):
        if magic == 0 and size == 0:
            raise BadRecord(at, "zeros where a record or a filler should be", is_blank=True)
        raise BadRecord(at, f"{magic:08x} is no magic number")
    if size < RECORD_SIZE_MIN:
        raise BadRecord(at, f"a record of {size} bytes is too short")
    if size + FILLER_SIZE > room:
        raise BadRecord(at, f"a record of {size} bytes leaves no room for a filler in the {room} left of its segment")
    if size > limit:
        raise BadRecord(at, f"a record of {size} bytes goes beyond the end, {limit} bytes on", is_cut=True)
    raw = read(at, size)
    if len(raw) < size:
        raise BadRecord(at, f"{len(raw)} bytes of {size} can be read")
    _, _, crc, queue_id, _, queue_offset, physical_offset, sys_flag, _ = _HEAD.unpack_from(raw)
    if physical_offset != at:
        raise BadRecord(at, f"the record here says that it stands at {physical_offset}")
    position = _HEAD.size + (20 if sys_flag & 16 else 8)
    try:
        (store_ms,) = _INT64.unpack_from(raw, position)
        position += 8 + (20 if sys_flag & 32 else 8) + 4 + 8
        body, position = _take(raw, position, _INT32.unpack_from(raw, position)[0], 4, "body")
        if magic == MAGIC_V1:
            topic, position = _take(raw, position, raw[position], 1, "topic")
        else:
            topic, position = _take(raw, position, _INT16.unpack_from(raw, position)[0], 2, "topic")
        properties, position = _take(raw, position, _INT16.unpack_from(raw, position)[0], 2, "properties")
        name = topic.decode()
    except (IndexError, ValueError, OverflowError, StructError) as error:
        raise BadRecord(at, f"the parts of the record don't fit: {error}") from None
    if position != size:
        raise BadRecord(at, f"the parts of the record take {position} bytes of its {size}")
    found = zlib.crc32(body) & CRC_MASK
    if found != crc:
        raise BadRecord(at, f"the body's CRC is {found:08x}, the record says {crc & 0xFFFFFFFF:08x}")
    if not name or "\x00" in name or b"\x00" in properties:
        raise BadRecord(at, "zeros in topic or properties: a page of it never reached the disk")
    return Rec(at, size, name, queue_id, queue_offset, body, crc, sys_flag, store_ms, properties, raw)


def _take(raw: bytes, position: int, size: int, length_size: int, what: str) -> tuple[bytes, int]:
    begin = position + length_size
    if size < 0 or begin + size > len(raw):
        raise ValueError(f"{what} of {size} bytes at {begin} of {len(raw)}")
    return raw[begin : begin + size], begin + size
