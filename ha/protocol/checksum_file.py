"""The checksum file of a commitlog segment, with a CRC of each of its blocks. A halog extension that RocketMQ does not
read.

A record's own CRC covers only its body, so a flipped bit in its topic, properties, queue or times is not detected.
These files cover every flushed byte. `checksums/NAME` belongs to the segment `commitlog/NAME`; all big-endian:

    off  size  field
      0   512  head: magic "HALOGSUM", version int32 = 1, block size int32, segment size int64, segment start int64,
               zeros; CRC of the bytes before it at 504, zeros
    512   512  group 0: 63 entries, CRC at 504, zeros
   1024   512  group 1 …

An entry is 8 bytes: CRC-32 of the first `length` bytes of its block, uint32, and that length, uint32 (0: unknown).
Only the block with the end of the log and the last block of a segment can be shorter than the others. A group's CRC
covers its entries and its number. A group with a wrong CRC is ignored: damage to a checksum file is never taken for
damage to the log.
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
    """Head of a checksum file: the size of a block, and size and start of the segment. Sizes in bytes; `segment_start`
    is a physical offset."""

    block_size: int
    segment_size: int
    segment_start: int

    @property
    def block_count(self) -> int:
        """The number of blocks of the segment."""
        return -(-self.segment_size // self.block_size)

    @property
    def group_count(self) -> int:
        """The number of groups of the file."""
        return -(-self.block_count // GROUP_ENTRIES)

    @property
    def file_size(self) -> int:
        """The size of the file in bytes."""
        return GROUP_SIZE * (1 + self.group_count)

    def pack(self) -> bytes:
        """Returns the encoded head, 512 bytes."""
        fields = _HEAD.pack(
            CHECKSUM_MAGIC, CHECKSUM_VERSION, self.block_size, self.segment_size, self.segment_start
        ).ljust(_CRC_AT, b"\0")
        return (fields + _CRC.pack(crc32(fields))).ljust(GROUP_SIZE, b"\0")


def unpack_head(raw: bytes) -> ChecksumHead | None:
    """Returns the head at the start of a file, or None if there is no valid one of this version."""
    if len(raw) < GROUP_SIZE or _CRC.unpack_from(raw, _CRC_AT)[0] != crc32(raw[:_CRC_AT]):
        return None
    magic, version, block_size, segment_size, segment_start = _HEAD.unpack_from(raw)
    if magic != CHECKSUM_MAGIC or version != CHECKSUM_VERSION or block_size < 1 or segment_size < 1:
        return None
    return ChecksumHead(block_size, segment_size, segment_start)


def pack_group(number: int, crcs: array[int], lengths: array[int]) -> bytes:
    """Returns the 512 bytes of group `number`; `crcs` and `lengths` hold the entries of the whole file."""
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
    """Returns the CRCs and lengths in `raw`, the 512 bytes of group `number`; None if `raw` is damaged or shorter. A
    group of zeros is valid: all its checksums are unknown."""
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
