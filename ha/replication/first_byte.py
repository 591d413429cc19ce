"""How an empty slave with haStartFrom=first copies a whole log from a RocketMQ master.

RocketMQ interprets a request of 0 as "the last segment", and any other literally. So the slave requests offset 1 and
restores byte 0 itself: a log that starts at 0 starts with the size of its first record, four bytes big-endian, and all
records are smaller than 16 MiB, so byte 0 is 0. The record's magic code at offset 4 proves that a record starts there.

If the master's log is empty or no longer starts at 0, a request of 1 gets only heartbeats at 1. So the slave first
calls the injected `master_min_offset`, and requests the offset that it returns. If the result is 0 or None, the slave
requests 1; if it then gets only heartbeats, it logs a warning, and requests 0 on a new connection.
"""

from __future__ import annotations

from ha.errors import RemoteProtocolError
from ha.protocol.record import MAGIC_V1, MAGIC_V2

REQUEST_OFFSET = 1

_RECORD_MAGICS = tuple(magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2))
_MAGIC_END = 8


class FirstByte:
    """Restores byte 0 in front of the bytes that a master sends from offset 1 on."""

    __slots__ = ("_heartbeat_count", "_received")

    def __init__(self) -> None:
        self._received = b""
        self._heartbeat_count = 0

    def is_refused_by_heartbeat(self) -> bool:
        """Counts a heartbeat at offset 1; returns whether it means that the master has nothing to send.

        The first one doesn't: it may have been due when the request came, and a master sends it before the data.
        """
        self._heartbeat_count += 1
        return self._heartbeat_count > 1

    def feed(self, chunk: memoryview) -> memoryview | None:
        """Returns the log's bytes from 0 on once the first record's magic code is complete, else None.

        At most 6 bytes are kept meanwhile. Raises RemoteProtocolError if no record's magic code is at offset 4.
        """
        self._received += bytes(chunk)
        restored = b"\0" + self._received
        if len(restored) < _MAGIC_END:
            return None
        if restored[4:_MAGIC_END] not in _RECORD_MAGICS:
            raise RemoteProtocolError("the master's log does not begin with a record at offset 0")
        return memoryview(restored)
