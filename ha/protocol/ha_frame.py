"""The default HA protocol (DefaultHAService of RocketMQ 4.x and 5.x), both directions.

Slave to master, the only message, a report:

    0   8  slave max offset: the first on a connection is the request offset, each later one an acknowledgement

Master to slave, the only message, a transfer frame:

    0   8  physical offset of the first body byte
    8   4  body size n; 0 is a heartbeat, which carries the offset that will be sent next
    12  n  commitlog bytes [physical offset, physical offset + n); cut without regard to records, within one segment

All big-endian and signed. The parsers do no I/O and don't know the log: callers check whether an offset fits it.
Sources: DefaultHAConnection, DefaultHAClient; checked against captures of 4.9.7 and 5.5.0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from struct import Struct
from typing import Generic, TypeVar

import msgspec

from ha.errors import LocalProtocolError, RemoteProtocolError

REPORT_SIZE = 8
TRANSFER_HEADER_SIZE = 12
BODY_SIZE_MAX = 1 << 30
"""Default limit of a transfer body in bytes: RocketMQ's default segment size. A body never spans two segments."""

_REPORT = Struct(">q")
_TRANSFER_HEADER = Struct(">qi")
_INT64_MAX = (1 << 63) - 1
_INT32_MAX = (1 << 31) - 1


def encode_report(slave_max_offset: int) -> bytes:
    """Returns the 8 bytes that report `slave_max_offset`, the end of the slave's commitlog. Raises LocalProtocolError
    if it is negative or not an int64."""
    if not 0 <= slave_max_offset <= _INT64_MAX:
        raise LocalProtocolError(f"a report can't carry offset {slave_max_offset}")
    return _REPORT.pack(slave_max_offset)


def encode_transfer_header(physical_offset: int, body_size: int) -> bytes:
    """Returns the 12 bytes before a body of `body_size` bytes (0: a heartbeat) that starts at `physical_offset`.
    Raises LocalProtocolError if a number is negative or does not fit its field."""
    if not 0 <= physical_offset <= _INT64_MAX or not 0 <= body_size <= _INT32_MAX:
        raise LocalProtocolError(f"a transfer frame can't carry {body_size} bytes at offset {physical_offset}")
    return _TRANSFER_HEADER.pack(physical_offset, body_size)


class ReportParser:
    """Parses reports from a slave.

    Of several complete reports in one chunk, only the last is returned, as in RocketMQ: acknowledgements are
    cumulative, and even the request offset of a connection is the last report of the first read. Unlike RocketMQ, the
    parser also checks the others. A slave's reports never decrease, so data of another protocol is usually rejected
    even if its last 8 bytes could be a report, such as zeros. Buffers at most 7 bytes.
    """

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, chunk: bytes | bytearray | memoryview) -> int | None:
        """Parses `chunk` and returns the physical offset in the last report that it completes; None if it completes
        none.

        Raises RemoteProtocolError if an offset is negative or lower than the one before it in this chunk.
        """
        received = self._partial + bytes(chunk) if self._partial else bytes(chunk)
        complete = len(received) - len(received) % REPORT_SIZE
        self._partial = received[complete:]
        if not complete:
            return None
        offset = 0
        for at in range(0, complete, REPORT_SIZE):
            previous = offset
            offset = _REPORT.unpack_from(received, at)[0]
            if offset < previous:
                raise RemoteProtocolError(f"slave reports offset {offset} after {previous}")
        return offset


class TransferHeader(msgspec.Struct, frozen=True, gc=False):
    """The start of a transfer frame. `body_size` bytes follow as `TransferBody` events; none after a heartbeat (0)."""

    physical_offset: int
    body_size: int

    @property
    def is_heartbeat(self) -> bool:
        """Whether the frame has no body."""
        return self.body_size == 0


class TransferBody(msgspec.Struct, frozen=True):
    """Bytes of the current frame's body, the first at `physical_offset`; a view of the chunk passed to `feed`."""

    physical_offset: int
    chunk: memoryview


HeadT = TypeVar("HeadT")


class MasterStreamParser(ABC, Generic[HeadT]):
    """Parses the stream of a master in either HA protocol: heads, some of which are followed by a body.

    The head is a separate event, so that a slave can refuse an offset before the body has arrived; the bytes of a body
    are passed on as they arrive, without copying or buffering them.
    """

    def __init__(self, *, body_size_max: int = BODY_SIZE_MAX) -> None:
        self._body_size_max = body_size_max
        self._partial = b""
        self._body_offset = 0
        self._body_missing = 0

    @property
    def is_between_frames(self) -> bool:
        """Whether all frames received so far are complete."""
        return not self._partial and not self._body_missing

    def feed(self, chunk: bytes | bytearray | memoryview) -> Iterator[HeadT | TransferBody]:
        """Iterates over the events that `chunk` completes.

        The iterator parses as it is advanced and must be exhausted before the next feed; the views it yields are valid
        as long as `chunk` is unchanged. Raises RemoteProtocolError for an invalid head or a body above the size limit,
        after yielding the events before it; the parser must not be used after that.
        """
        view = memoryview(chunk)
        position, end = 0, len(view)
        while position < end:
            if self._body_missing:
                body = TransferBody(self._body_offset, view[position : position + self._body_missing])
                position += len(body.chunk)
                self._body_missing -= len(body.chunk)
                self._body_offset += len(body.chunk)
                yield body
                continue
            taken = min(self._head_size(self._partial) - len(self._partial), end - position)
            head = self._partial + bytes(view[position : position + taken])
            position += taken
            if len(head) < self._head_size(head):
                self._partial = head
                continue
            self._partial = b""
            yield self._parse_head(head)

    @abstractmethod
    def _head_size(self, partial: bytes) -> int:
        """Returns the size in bytes of the head that begins with `partial`. If these bytes don't determine the size
        yet, returns how many bytes of the head are needed to continue."""

    @abstractmethod
    def _parse_head(self, head: bytes) -> HeadT:
        """Returns the event for a complete head. Calls `_expect_body` first if a body may follow."""

    def _expect_body(self, physical_offset: int, size: int, offset_min: int) -> None:
        if physical_offset < offset_min or not 0 <= size <= self._body_size_max:
            raise RemoteProtocolError(f"transfer frame of {size} bytes at physical offset {physical_offset}")
        self._body_offset, self._body_missing = physical_offset, size


class TransferParser(MasterStreamParser[TransferHeader]):
    """Parses transfer frames from a master. Buffers at most 11 bytes."""

    def _head_size(self, partial: bytes) -> int:
        return TRANSFER_HEADER_SIZE

    def _parse_head(self, head: bytes) -> TransferHeader:
        header = TransferHeader(*_TRANSFER_HEADER.unpack(head))
        self._expect_body(header.physical_offset, header.body_size, 0)
        return header
