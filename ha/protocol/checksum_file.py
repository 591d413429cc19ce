"""The checksum file of a commitlog segment: a CRC of every block of it. halog's own; RocketMQ neither has nor reads it.

A record's own CRC covers its body alone, so a flipped bit in its topic, properties, queue or times looks sound. These
files cover every byte that was flushed. `checksums/NAME` belongs to the segment `commitlog/NAME`; all big-endian:

    off  size  field
      0   512  head: magic "HALOGSUM", version int32 = 1, block size int32, segment size int64, segment start int64,
               zeros; CRC of the bytes before it at 504, zeros
    512   512  group 0: 63 entries, CRC at 504, zeros
   1024   512  group 1 …

An entry is 8 bytes: CRC-32 of the first `length` bytes of its block, uint32, and that length, uint32; 0: none known.
Only the block that the log ends in is shorter than the others. A group's CRC is over its entries and its number, and a
group that fails it says nothing about its blocks: damage of a checksum file is never taken for damage of the log.
"""

from __future__ import annotations

import sys
from array import array
from struct import Struct

import msgspec
from isal.isal_zlib import crc32

CHECKSUM_MAGIC = b"HALOGSUM"
CHECKSUM_VERSION = 1
GROUP_SIZE = 512
GROUP_ENTRIES = 63
ENTRY_SIZE = 8

_HEAD = Struct(">8siiqq")
_CRC_AT = GROUP_ENTRIES * ENTRY_SIZE
_CRC = Struct(">I")
_NUMBER = Struct(">q")


class ChecksumHead(msgspec.Struct, frozen=True):
    """What the entries are about. Sizes in bytes, `segment_start` a physical offset."""

    block_size: int
    segment_size: int
    segment_start: int

    @property
    def block_count(self) -> int:
        """Blocks of the segment."""
        return -(-self.segment_size // self.block_size)

    @property
    def group_count(self) -> int:
        """Groups of the file."""
        return -(-self.block_count // GROUP_ENTRIES)

    @property
    def file_size(self) -> int:
        """Bytes of the file."""
        return GROUP_SIZE * (1 + self.group_count)

    def pack(self) -> bytes:
        """Return the 512 bytes."""
        fields = _HEAD.pack(
            CHECKSUM_MAGIC, CHECKSUM_VERSION, self.block_size, self.segment_size, self.segment_start
        ).ljust(_CRC_AT, b"\0")
        return (fields + _CRC.pack(crc32(fields))).ljust(GROUP_SIZE, b"\0")


def unpack_head(raw: bytes) -> ChecksumHead | None:
    """Return the head at the start of a file, None if there is no sound one of this version."""
    if len(raw) < GROUP_SIZE or _CRC.unpack_from(raw, _CRC_AT)[0] != crc32(raw[:_CRC_AT]):
        return None
    magic, version, block_size, segment_size, segment_start = _HEAD.unpack_from(raw)
    if magic != CHECKSUM_MAGIC or version != CHECKSUM_VERSION or block_size < 1 or segment_size < 1:
        return None
    return ChecksumHead(block_size, segment_size, segment_start)


def pack_group(number: int, crcs: array[int], lengths: array[int]) -> bytes:
    """Return the 512 bytes of group `number`, out of the entries of the whole file."""
    begin = number * GROUP_ENTRIES
    entries = array("I", bytes(_CRC_AT))
    end = min(begin + GROUP_ENTRIES, len(crcs))
    entries[0 : 2 * (end - begin) : 2] = crcs[begin:end]
    entries[1 : 2 * (end - begin) : 2] = lengths[begin:end]
    if sys.byteorder == "little":
        entries.byteswap()
    raw = entries.tobytes()
    return (raw + _CRC.pack(_group_crc(number, raw))).ljust(GROUP_SIZE, b"\0")


def unpack_group(number: int, raw: bytes) -> tuple[array[int], array[int]] | None:
    """Return CRCs and lengths of group `number` out of its 512 bytes; None if they are damaged (zeros: none known)."""
    if len(raw) < GROUP_SIZE:
        return None
    fields = raw[:_CRC_AT]
    if _CRC.unpack_from(raw, _CRC_AT)[0] != _group_crc(number, fields) and any(raw):
        return None
    entries = array("I", fields)
    if sys.byteorder == "little":
        entries.byteswap()
    return entries[0::2], entries[1::2]


def _group_crc(number: int, entries: bytes) -> int:
    return crc32(_NUMBER.pack(number), crc32(entries))


assert array("I").itemsize == 4
