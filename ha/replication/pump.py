"""The steady state of a slave's connection: receives, checks the frames' headers, appends and reports with one call.

`HASession` calls `pump` once per wake-up while the master's frames only have to be appended. It treats the rest of the
buffer like any other input: an incomplete frame, a heartbeat, a frame that is not the next one or doesn't fit the
segment. So `pump` decides nothing: it takes only frames that the session would append unchanged. The compiled twin
(_pump.pyx) does the same without the GIL.
"""

from __future__ import annotations

import os
from struct import Struct

from ha.protocol.compiled import with_compiled_twin
from ha.protocol.ha_frame import TRANSFER_HEADER_SIZE

FRAMES_MAX = 64
"""Maximum number of frames that one call takes. A wake-up usually finds one."""

_HEADER = Struct(">qi")
_REPORT = Struct(">q")


@with_compiled_twin
def pump(
    source: int, buffer: memoryview, offset: int, file: int, position: int, room: int, bulk_size_min: int
) -> tuple[int, int, int, int]:
    """Receives from descriptor `source` into `buffer`; appends and reports the complete frames at its start.

    Takes frames as long as the first starts at physical offset `offset`, and each further one where the one before it
    ends. Their bodies are written to descriptor `file` from `position` on, `room` bytes at most. Then the report of the
    new end is sent, unless the frames have `bulk_size_min` bytes or more in all.

    Returns four sizes in bytes: received (0 at the end of the stream), taken from the start of the buffer, appended to
    the log, and sent of the report. If the disk does not accept all bodies, nothing is taken; if the socket does not
    accept the whole report, the last size is less than the report's. Raises OSError if receiving fails, BlockingIOError
    if nothing has arrived.
    """
    received = os.readv(source, (buffer,))
    taken = size = 0
    bodies: list[memoryview] = []
    while len(bodies) < FRAMES_MAX and taken + TRANSFER_HEADER_SIZE < received:
        frame_offset, body_size = _HEADER.unpack_from(buffer, taken)
        body_at = taken + TRANSFER_HEADER_SIZE
        if frame_offset != offset + size or not 0 < body_size <= min(room - size, received - body_at):
            break
        bodies.append(buffer[body_at : body_at + body_size])
        size += body_size
        taken = body_at + body_size
    if not bodies:
        return received, 0, 0, 0
    try:
        written = os.pwritev(file, bodies, position)
    except OSError:
        written = 0
    finally:
        for body in bodies:
            body.release()
    if written < size:
        return received, 0, 0, 0
    if taken >= bulk_size_min:
        return received, taken, size, 0
    try:
        sent = os.write(source, _REPORT.pack(offset + size))
    except OSError:  # also BlockingIOError; the session sends the report, and finds out
        sent = 0
    return received, taken, size, sent
