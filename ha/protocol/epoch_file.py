"""The epoch file: the epochs of the log and the physical offset at which each starts.

`epochFileCheckpoint` is text: a line with the number of entries, a line with the CRC-32 (31 bits; 0: unchecked) of all
that follows, and a line `epoch-startOffset` for each entry, ascending. Sources: EpochFileCache, CheckpointFile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
from isal.isal_zlib import crc32

from ha.errors import RemoteProtocolError
from ha.protocol.record import CRC_MASK


class EpochEntry(msgspec.Struct, frozen=True, order=True, gc=False):
    """An epoch and the physical offset at which it starts. An epoch ends where the next one starts."""

    epoch: int
    start_offset: int


def encode_epoch_file(entries: Sequence[EpochEntry]) -> bytes:
    """Returns the file's content."""
    lines = "".join(f"{entry.epoch}-{entry.start_offset}\n" for entry in entries).encode()
    return b"%d\n%d\n%s" % (len(entries), crc32(lines) & CRC_MASK, lines)


def decode_epoch_file(content: bytes) -> list[EpochEntry]:
    """Returns the entries. Raises RemoteProtocolError if the content is damaged, or epochs or start offsets don't
    ascend."""
    try:
        count, crc, lines = content.split(b"\n", 2)
        pairs = [line.split(b"-") for line in lines.splitlines()]
        entries = [EpochEntry(int(epoch), int(start)) for epoch, start in pairs]
        expected_count, expected_crc = int(count), int(crc)
    except ValueError as error:
        raise RemoteProtocolError(f"not an epoch file: {content[:80]!r}") from error
    if expected_count != len(entries) or expected_crc not in (0, crc32(lines) & CRC_MASK):
        raise RemoteProtocolError(f"the epoch file does not match its {expected_count} entries and CRC {expected_crc}")
    for before, after in itertools.pairwise(entries):
        if before.epoch >= after.epoch or before.start_offset >= after.start_offset:
            raise RemoteProtocolError(f"epoch {after.epoch} at {after.start_offset} can't follow {before}")
    return entries
