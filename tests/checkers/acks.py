"""No slave acknowledges bytes that it has not written, and no master sends what its log does not hold.

Judged from the wire, where every claim passes: slave to master reports of 8 bytes (int64: the slave's end; the first is
its request; -1 asks a halog master for its range), master to slave frames of 12 + n bytes (int64 physical offset, int32
n, then n bytes of the log; n = 0 is a heartbeat).

Promises, live, at the moment at which a side hands bytes to the network:
- A report R says that the slave holds everything before R: whatever the master sent on this connection before R is in
  the slave's log at its place, byte for byte, and R is not beyond what was requested or sent. With `slaves_flush` it is
  on the slave's disk.
- One report may be beyond what was sent, as it says nothing of any byte. A slave that holds nothing requests 0, is
  given its master's last segment, and learns from the first frame where that begins. If the master's log ends exactly
  where a segment does, it begins there, and the frame is a heartbeat: the slave makes the segment of that name and
  reports its begin (RocketMQ: DefaultHAClient). It is judged that it requested 0, that this was the first frame, that
  the offset is a segment's begin, that the master's log is there, and that the slave holds that segment and nothing
  before it.
- Reports of one connection never fall. Frames with a body follow each other without gap, do not cross the end of a
  segment, and carry what the master's log holds at their offset.
Fault model: any. The bytes of a connection count up to its end.
Does not look at: what the master makes of a report (statuses), bytes the slave held before the connection (prefix).
"""

from __future__ import annotations

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
"""An empty halog slave asks an unknown master for 1 when it wants the log from its first byte on."""

Read = Callable[[int, int], bytes]
"""(physical offset, size) -> bytes of a node's log as they are now, fewer where it holds none"""


class HaTap:
    """Listens to one HA connection and judges it. Feed it what each side hands to the network, when it does.

    `read_slave` and `read_master` read the two logs; `read_slave_disk` what a power cut would leave of the slave's, if
    it acknowledges only what is flushed. `on_report` is called with (slave's name, offset) for each report.
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
        """The offset of the first frame behind the request; -1 if that had a body"""
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
        """Whether a slave that had nothing may report `offset` since a heartbeat has told it where to begin."""
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
    """How many bytes two strings begin with in common."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))
