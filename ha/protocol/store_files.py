"""Byte layouts and names of the files that a store keeps in addition to its commitlog.

Consume queue: entries of 20 bytes, `int64 physical offset | int32 size | int64 tags code`.

Index file, all big-endian:

    0   8  begin timestamp, ms          24  8  end physical offset
    8   8  end timestamp, ms            32  4  used slots
    16  8  begin physical offset        36  4  index count: 1 + entries, as entry 0 is unused
    40      slots: int32, the newest entry's number or 0
            entries of 20 bytes: int32 key hash | int64 physical offset | int32 seconds since begin
                                 | int32 number of the previous entry in the slot

Checkpoint, 4096 bytes: six int64 (physic, logics and index message timestamp in ms; master flushed offset and confirm
physical offset, since 5.0; logics physical offset, seen in 5.5.0: start of the last record dispatched), then zeros.

config/broker.json, halog's own: the name of the broker, for programs that read a store's files.
Sources: ConsumeQueue, IndexFile, IndexHeader, StoreCheckpoint.
"""

from __future__ import annotations

from struct import Struct

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.properties import java_hash

SEGMENT_NAME_SIZE = 20

ENTRY = Struct(">qiq")
"""Consume-queue entry: physical offset, record size in bytes, tags code."""
ENTRY_SIZE = ENTRY.size
BLANK_SIZE = 0x7FFFFFFF
"""Record size in entries without a message, before the first message of a queue (RocketMQ: fillPreBlank)"""
ENTRY_FILL = ENTRY.pack(0, BLANK_SIZE, 0)
"""Blank entry. A queue that does not start at 0 is filled with blank entries up to its first entry."""

INDEX_HEADER = Struct(">qqqqii")
INDEX_HEADER_SIZE = INDEX_HEADER.size
INDEX_SLOT = Struct(">i")
INDEX_SLOT_SIZE = INDEX_SLOT.size
INDEX_ENTRY = Struct(">iqii")
INDEX_ENTRY_SIZE = INDEX_ENTRY.size

CHECKPOINT_SIZE = 4096
_CHECKPOINT = Struct(">qqqqqq")


BROKER_FILE = "broker.json"


class BrokerFile(msgspec.Struct, rename="camel"):
    """The content of `BROKER_FILE`."""

    broker_name: str = ""


def segment_name(start_offset: int) -> str:
    """Returns the name of the file that starts `start_offset` bytes after the start of its queue or log."""
    return f"{start_offset:020d}"


def segment_start(name: str) -> int | None:
    """Returns the `start_offset` in a file name made by `segment_name`; None if `name` is not of that form."""
    if len(name) == SEGMENT_NAME_SIZE and name.isascii() and name.isdecimal():
        return int(name)
    return None


class IndexHeader(msgspec.Struct, gc=False):
    """First 40 bytes of an index file. Timestamps in ms, offsets physical; `index_count` starts at 1."""

    begin_timestamp_ms: int = 0
    end_timestamp_ms: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    hash_slot_count: int = 0
    index_count: int = 1

    def pack(self) -> bytes:
        """Returns the encoded header, 40 bytes."""
        return INDEX_HEADER.pack(*msgspec.structs.astuple(self))

    @classmethod
    def unpack(cls, raw: bytes | bytearray | memoryview) -> IndexHeader:
        """Returns the header at the start of `raw`. Raises RemoteProtocolError if `raw` is shorter than a header."""
        if len(raw) < INDEX_HEADER_SIZE:
            raise RemoteProtocolError(f"index header of {len(raw)} bytes")
        return cls(*INDEX_HEADER.unpack_from(raw))


def index_file_size(slot_count: int, index_count_max: int) -> int:
    """Returns the size in bytes of an index file with `slot_count` slots and `index_count_max` entries (including entry
    0)."""
    return INDEX_HEADER_SIZE + slot_count * INDEX_SLOT_SIZE + index_count_max * INDEX_ENTRY_SIZE


def index_slot_position(slot: int) -> int:
    """Returns the position of a slot in an index file, in bytes."""
    return INDEX_HEADER_SIZE + slot * INDEX_SLOT_SIZE


def index_entry_position(slot_count: int, entry_number: int) -> int:
    """Returns the position of an entry in an index file, in bytes."""
    return INDEX_HEADER_SIZE + slot_count * INDEX_SLOT_SIZE + entry_number * INDEX_ENTRY_SIZE


def index_key(topic: str, key: str) -> str:
    """Returns the text that is hashed for `key` of a message in `topic`."""
    return f"{topic}#{key}"


def index_key_hash(key: str, before: int = 0) -> int:
    """Returns the hash of an `index_key`: the absolute value of its Java hash, or 0 if that is 2^31, which an
    int32 can't hold.

    `before` is the Java hash of the part of the index key before `key`, if `key` is only its end.
    """
    value = abs(java_hash(key, before))
    return 0 if value == 1 << 31 else value


class Checkpoint(msgspec.Struct, gc=False):
    """The checkpoint file: store timestamps (ms) up to which the log, the queues and the index are synced, and physical
    offsets."""

    physic_msg_timestamp_ms: int = 0
    logics_msg_timestamp_ms: int = 0
    index_msg_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirm_physical_offset: int = 0
    logics_physical_offset: int = 0

    def pack(self) -> bytes:
        """Returns the 4096 bytes of the file."""
        return _CHECKPOINT.pack(*msgspec.structs.astuple(self)).ljust(CHECKPOINT_SIZE, b"\0")

    @classmethod
    def unpack(cls, raw: bytes | bytearray | memoryview) -> Checkpoint:
        """Returns the checkpoint in `raw`. Raises RemoteProtocolError if `raw` is too short for one."""
        if len(raw) < _CHECKPOINT.size:
            raise RemoteProtocolError(f"checkpoint of {len(raw)} bytes")
        return cls(*_CHECKPOINT.unpack_from(raw))
