"""How an empty slave with haStartFrom=first gets a whole log out of a RocketMQ master, which can't be asked for it.

RocketMQ takes a request of 0 for "your last segment" and any other literally, so the slave requests offset 1 and makes
up byte 0 itself. It can: a log that begins at 0 begins with the size of its first record, four bytes big-endian, and no
message is as large as 16 MiB, so byte 0 is 0. The record's magic code at offset 4 proves that it is a record's begin.

If the master's log is empty or no longer begins at 0, a request of 1 gets heartbeats at 1 instead. So an injected
question (`master_min_offset`) is asked first; if nobody can tell, the slave falls back to 0 and says so.
"""

from __future__ import annotations

from ha.errors import RemoteProtocolError
from ha.protocol.record import MAGIC_V1, MAGIC_V2

REQUEST_OFFSET = 1

_RECORD_MAGICS = tuple(magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2))
_MAGIC_END = 8


class FirstByte:
    """Restores byte 0 in front of the bytes that a master sent from offset 1 on."""

    __slots__ = ("_heartbeat_count", "_received")

    def __init__(self) -> None:
        self._received = b""
        self._heartbeat_count = 0

    def is_refused_by_heartbeat(self) -> bool:
        """Take a heartbeat at offset 1 and tell whether it means that there is nothing to send.

        Not the first one: that may have been overdue when the request came, and a master sends it before the data.
        """
        self._heartbeat_count += 1
        return self._heartbeat_count > 1

    def feed(self, chunk: memoryview) -> memoryview | None:
        """Return the log's bytes from 0 on once the first record's magic code is there, else None (at most 6 kept).

        RemoteProtocolError if what came from offset 1 isn't the rest of a record.
        """
        self._received += bytes(chunk)
        restored = b"\0" + self._received
        if len(restored) < _MAGIC_END:
            return None
        if restored[4:_MAGIC_END] not in _RECORD_MAGICS:
            raise RemoteProtocolError("the master's log does not begin with a record at offset 0")
        return memoryview(restored)
