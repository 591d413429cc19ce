"""Which records at the begin of a buffer are good: what `verify_record` says of each of them, of many at once.

Most of a log is good, and a start after a crash reads a segment or two of it. One record after the other, the checks
of sizes and offsets take several times as long as the CRC of a body of 1 KiB.
"""

from __future__ import annotations

from struct import Struct

from isal.isal_zlib import crc32

from ha.protocol.compiled import with_compiled_twin
from ha.protocol.properties import PROPERTIES_SIZE_MAX
from ha.protocol.record import CRC_MASK, RECORD_SIZE_MIN

_INT32 = Struct(">i")
_RECORDS_MAX = 4096
"""Records looked at together: the columns of more leave the processor's caches."""


@with_compiled_twin
def sound_records(buffer: bytes, base_offset: int, end: int) -> tuple[int, int]:
    """Return how many bytes the good records at the begin of `buffer` take, and where the last of them begins, or -1.

    They lie end to end within the first `end` bytes, each at the physical offset that it says, `base_offset` being that
    of the buffer's first byte. `verify_record` passes each of them; it may pass what follows, too.
    """
    import numpy as np  # for which the compiled twin has no use: then a node does without it

    from ha.protocol.heads import Heads

    position, last = 0, -1
    with memoryview(buffer) as view:
        while True:
            begins = _begins(buffer, position, end)
            heads = Heads(np.frombuffer(buffer, np.uint8), np.array(begins, np.int64), base_offset)
            sound = heads.sound & (heads.topic_size <= PROPERTIES_SIZE_MAX)
            sound &= heads.properties_size <= PROPERTIES_SIZE_MAX
            count = len(begins) if sound.all() else int(np.argmin(sound))
            stops = (heads.body_at + heads.body_size)[:count].tolist()
            bodies = zip(heads.body_at[:count].tolist(), stops, strict=True)
            crcs = np.array([crc32(view[begin:stop]) & CRC_MASK for begin, stop in bodies], np.int64)
            is_right = crcs == heads.field("body_crc")[:count]
            count = count if is_right.all() else int(np.argmin(is_right))
            if count:
                last = begins[count - 1]
                position = int(heads.record_end[count - 1])
            if count < _RECORDS_MAX:
                return position, last


def _begins(buffer: bytes, position: int, end: int) -> list[int]:
    """Where the next records begin, by the sizes that they say; the last one ends within `end`."""
    begins: list[int] = []
    unpack, last = _INT32.unpack_from, end - RECORD_SIZE_MIN
    while position <= last and len(begins) < _RECORDS_MAX:
        (size,) = unpack(buffer, position)
        if size < RECORD_SIZE_MIN or position + size > end:
            break
        begins.append(position)
        position += size
    return begins
