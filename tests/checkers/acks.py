"""A slave acknowledges only bytes that it has written, and a master sends only what its log holds.

Checks the bytes on the wire: reports of 8 bytes from slave to master (int64: the end of the slave's log; the first
report is its request; -1 asks a halog master for its range), and frames of 12 + n bytes from master to slave (int64
physical offset, int32 n, then n bytes of the log; n = 0 is a heartbeat).

Promises, checked when a side hands bytes to the network:
- A report R says that the slave holds everything before R: all bytes that the master sent on this connection before R
  are in the slave's log at their offset, and R is not beyond the offset requested or sent. With `slaves_flush` they are
  on the slave's disk.
- One report may be beyond the bytes sent, because it acknowledges nothing. An empty slave requests 0, is sent its
  master's last segment, and learns its start offset from the first frame. If the master's log ends exactly at a segment
  boundary, the log starts there and the frame is a heartbeat: the slave creates that segment and reports its start
  (RocketMQ: DefaultHAClient). The checker requires that the slave requested 0, that this was the first frame, that the
  offset is a segment boundary within the master's log, and that the slave holds that segment and nothing before it.
- Reports of one connection never decrease. Frames with a body are contiguous, do not cross a segment boundary, and
  carry what the master's log holds at their offset.

Fault model: any. The bytes of a connection count until it ends.

Not checked: how the master uses a report (statuses), bytes that the slave held before the connection (prefix).
"""

from collections import deque
from collections.abc import Callable
from struct import Struct

from tests.checkers.violation import Violation

CHECKER = "acks"
REPORT_SIZE = 8
FRAME_HEADER_SIZE = 12
_REPORT = Struct(">q")
_HEADER = Struct(">qi")
_QUESTION = -1
FIRST_BYTE = 1
"""Request of an empty halog slave that wants the log from its first byte."""

Read = Callable[[int, int], bytes]
"""(physical offset, size) -> current bytes of a node's log; fewer where it holds none"""


class HaTap:
    """Checks one HA connection. Feed it the bytes that each side hands to the network, at that time.

    `read_slave` and `read_master` read the two logs; `read_slave_disk` reads what the slave's disk would keep in a
    power loss, if it acknowledges only flushed bytes. `on_report` is called with (slave's name, offset) for each
    report.
    """

    def __init__(
        self,
        slave: str,
        master: str,
        read_slave: Read,
        read_master: Read,
        *,
        segment_size: int,
        read_slave_disk: Read | None = None,
        on_report: Callable[[str, int], None] | None = None,
    ) -> None:
        self.slave = slave
        self.master = master
        self._read_slave = read_slave
        self._read_master = read_master
        self._read_slave_disk = read_slave_disk
        self._segment_size = segment_size
        self._on_report = on_report
        self._reports = b""
        self._frames = b""
        self._body_left = 0
        self._body_at = 0
        self._sent_to: int | None = None
        self._first_heartbeat_at: int | None = None
        """Offset of the first frame after the request; -1 if that frame had a body"""
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self.reported = -1
        """The last report; -1 before the first"""

    def from_slave(self, chunk: bytes) -> list[Violation]:
        """The slave handed bytes to the network."""
        self._reports += chunk
        found = []
        whole = len(self._reports) - len(self._reports) % REPORT_SIZE
        for at in range(0, whole, REPORT_SIZE):
            (offset,) = _REPORT.unpack_from(self._reports, at)
            if offset == _QUESTION and self.reported < 0:
                continue
            found.extend(self._judge_report(offset))
        self._reports = self._reports[whole:]
        return found

    def _judge_report(self, offset: int) -> list[Violation]:
        before, self.reported = self.reported, max(offset, self.reported)
        if self._on_report is not None:
            self._on_report(self.slave, offset)
        if before < 0:
            return self._judge_request(offset)
        if offset < before:
            text = f"{self.slave} reported {offset} after {before} on the same connection to {self.master}"
            return [Violation(CHECKER, text)]
        limit = max(before, self._sent_to or 0)
        if offset > limit and not (before == 0 and self._takes_begin_over(offset)):
            text = f"{self.slave} reported {offset}, but {self.master} has sent it bytes only up to {limit}"
            return [Violation(CHECKER, text)]
        found = []
        while self._unacknowledged and self._unacknowledged[0][0] < offset:
            at, body = self._unacknowledged.popleft()
            if at + len(body) > offset:
                self._unacknowledged.appendleft((offset, body[offset - at :]))
                body = body[: offset - at]
            found.extend(self._judge_written(offset, at, body))
        return found

    def _judge_request(self, offset: int) -> list[Violation]:
        begins_here = offset % self._segment_size == 0 and len(self._read_slave(offset, 1)) == 1
        if offset > FIRST_BYTE and not begins_here and len(self._read_slave(offset - 1, 1)) < 1:
            text = f"{self.slave} requested {offset} from {self.master}, but holds nothing before that"
            return [Violation(CHECKER, text)]
        return []

    def _takes_begin_over(self, offset: int) -> bool:
        """Whether a slave that was empty may report `offset` because a heartbeat announced it as its start offset."""
        return (
            offset == self._first_heartbeat_at
            and self._sent_to is None
            and offset % self._segment_size == 0
            and len(self._read_slave(offset, 1)) == 1
            and not self._read_slave(offset - 1, 1)
            and bool(self._read_master(offset - 1, 1) or self._read_master(offset, 1))
        )

    def _judge_written(self, reported: int, at: int, body: bytes) -> list[Violation]:
        held = self._read_slave(at, len(body))
        if held != body:
            place = at + _common(held, body)
            text = (
                f"{self.slave} acknowledged {reported}, but at {place} it does not hold what {self.master} sent: "
                f"{held[place - at : place - at + 8].hex(' ') or 'nothing'} instead of "
                f"{body[place - at : place - at + 8].hex(' ')}"
            )
            return [Violation(CHECKER, text)]
        if self._read_slave_disk is not None and self._read_slave_disk(at, len(body)) != body:
            text = f"{self.slave} acknowledged {reported}, but [{at}, {at + len(body)}) is not flushed there"
            return [Violation(CHECKER, text)]
        return []

    def from_master(self, chunk: bytes) -> list[Violation]:
        """The master handed bytes to the network."""
        found = []
        self._frames += chunk
        while self._frames:
            if self._body_left == 0:
                if len(self._frames) < FRAME_HEADER_SIZE:
                    break
                offset, size = _HEADER.unpack_from(self._frames)
                self._frames = self._frames[FRAME_HEADER_SIZE:]
                found.extend(self._judge_header(offset, size))
                self._body_at, self._body_left = offset, max(size, 0)
                continue
            piece = self._frames[: self._body_left]
            self._frames = self._frames[len(piece) :]
            held = self._read_master(self._body_at, len(piece))
            if held != piece:
                place = self._body_at + _common(held, piece)
                text = f"{self.master} sent {self.slave} bytes for {place} that its own log does not hold there"
                found.append(Violation(CHECKER, text))
            self._unacknowledged.append((self._body_at, piece))
            self._body_at += len(piece)
            self._body_left -= len(piece)
            self._sent_to = self._body_at
        return found

    def _judge_header(self, offset: int, size: int) -> list[Violation]:
        found = []
        if self.reported >= 0 and self._first_heartbeat_at is None:
            self._first_heartbeat_at = -1 if size else offset
        if size < 0:
            text = f"{self.master} sent {self.slave} a frame of {size} bytes"
            found.append(Violation(CHECKER, text))
        elif size > 0:
            if self._sent_to is not None and offset != self._sent_to:
                text = f"{self.master} sent {self.slave} bytes for {offset} after those up to {self._sent_to}"
                found.append(Violation(CHECKER, text))
            room = self._segment_size - offset % self._segment_size
            if size > room:
                text = f"{self.master} sent {self.slave} {size} bytes at {offset}, {room} before the segment's end"
                found.append(Violation(CHECKER, text))
        return found


def _common(one: bytes, other: bytes) -> int:
    """Length of the common prefix."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))
