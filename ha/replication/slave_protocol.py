"""The slave's side of one connection as a state machine without I/O: decides whether a frame fits the log, and what it
means.

    CONNECTED ─┬─▶ GREETING ──▶ RECONCILING ─┬─▶ PREPARING ─┬─▶ REQUESTED ─┬─▶ FOLLOWING
               ├─▶ ASKING ───────────────────┤              ├─▶ COMPARING ─┤
               └─────────────────────────────┘              └─▶ RESTORING ─┘        any state ─▶ CLOSED

`HASession` does the I/O. Until the request is sent, `HASession` and the master's answers change the state; afterwards
the master's frames do. Any state changes to CLOSED when the session ends.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec
from trio_util import AsyncValue

from ha.errors import RemoteProtocolError
from ha.replication import first_byte
from ha.replication.first_byte import FirstByte
from ha.replication.log import ReplicatedLog
from ha.replication.options import HAOptions
from ha.replication.overlap import Overlap
from ha.replication.session_plan import Retry, SessionEnd, SessionPlan
from ha.replication.statistics import Condition


class SessionState(Enum):
    """State of a slave's connection to its master, on the slave."""

    CONNECTED = "connected"
    """Nothing has been sent yet, except the proof of haSharedSecret if that is set."""
    GREETING = "greeting"
    """A member of a failover group sends its handshake and waits for the master's."""
    RECONCILING = "reconciling"
    """The member truncates its log to the part that the master has too (epoch_follower.py)."""
    ASKING = "asking"
    """The slave asks which offsets the master has, and waits for the answer (range_question.py)."""
    PREPARING = "preparing"
    """The slave chooses its request and reads the end of the log here."""
    REQUESTED = "requested"
    """The request is sent; the first frame must start at the end of the log or, if the log is empty, at the start of
    any segment."""
    COMPARING = "comparing"
    """The master's bytes are compared with the end of the log (overlap.py)."""
    RESTORING = "restoring"
    """An empty slave that requested offset 1 waits for enough bytes to restore byte 0 (first_byte.py)."""
    FOLLOWING = "following"
    """The master's bytes are appended and acknowledged."""
    CLOSED = "closed"
    """The session has ended; status pages show the condition that ended it."""


TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    SessionState.CONNECTED: frozenset(
        {SessionState.GREETING, SessionState.ASKING, SessionState.PREPARING, SessionState.CLOSED}
    ),
    SessionState.GREETING: frozenset({SessionState.RECONCILING, SessionState.CLOSED}),
    SessionState.RECONCILING: frozenset({SessionState.PREPARING, SessionState.CLOSED}),
    SessionState.ASKING: frozenset({SessionState.PREPARING, SessionState.CLOSED}),
    SessionState.PREPARING: frozenset(
        {SessionState.REQUESTED, SessionState.COMPARING, SessionState.RESTORING, SessionState.CLOSED}
    ),
    SessionState.REQUESTED: frozenset({SessionState.FOLLOWING, SessionState.CLOSED}),
    SessionState.COMPARING: frozenset({SessionState.FOLLOWING, SessionState.CLOSED}),
    SessionState.RESTORING: frozenset({SessionState.FOLLOWING, SessionState.CLOSED}),
    SessionState.FOLLOWING: frozenset({SessionState.CLOSED}),
    SessionState.CLOSED: frozenset(),
}

Piece = tuple[int, memoryview]
"""(physical offset, bytes to append there)"""


class Request(msgspec.Struct, frozen=True):
    """The first report of a connection. `check`: checks the first bytes that the master sends; None if they need no
    check."""

    offset: int
    check: Overlap | FirstByte | None = None


class SlaveProtocol:
    """One connection's protocol state. Reads the positions of `log`, never its bytes."""

    def __init__(
        self,
        log: ReplicatedLog,
        options: HAOptions,
        plan: SessionPlan,
        on_condition: Callable[[Condition, str], None],
    ) -> None:
        """`on_condition` gets a condition and its details. It is called with CONNECTED when the session begins to
        follow the master, and at each later heartbeat that fits the log; with OUT_OF_RANGE or NO_DATA_YET if the slave
        stays connected and waits."""
        self._log = log
        self._options = options
        self._plan = plan
        self._on_condition = on_condition
        self._check: Overlap | FirstByte | None = None
        self._master_min_offset: int | None = None
        self.state: AsyncValue[SessionState] = AsyncValue(SessionState.CONNECTED)
        self.master_range: tuple[int, int] | None = None
        """Begin and end of the master's log; None unless the master has answered the range question, which only halog
        masters do."""
        self.has_followed = False
        """Whether FOLLOWING was reached."""
        self.end: SessionEnd | None = None

    @property
    def expected_offset(self) -> int:
        """Physical offset of the next byte that the master must send."""
        return self._check.position if isinstance(self._check, Overlap) else self._log.max_offset.value

    @property
    def is_appending(self) -> bool:
        """Whether a frame that continues the log is appended without another check."""
        return self.state.value is SessionState.FOLLOWING

    def become(self, state: SessionState) -> None:
        """Moves to GREETING, RECONCILING, ASKING or PREPARING."""
        assert state in TRANSITIONS[self.state.value], f"{self.state.value} -> {state}"
        self.state.value = state

    def become_requested(self, request: Request) -> None:
        """Moves to the state that belongs to the request's check. Call this before the request is sent: the answer may
        be read before the sender runs again."""
        self._check = request.check
        if isinstance(request.check, Overlap):
            self.become(SessionState.COMPARING)
        elif isinstance(request.check, FirstByte):
            self.become(SessionState.RESTORING)
        else:
            self.become(SessionState.REQUESTED)

    def close(self, end: SessionEnd) -> None:
        """Moves to CLOSED, in which frames are ignored. Only the first call has an effect."""
        if self.end is None:
            self.end = end
            self.become(SessionState.CLOSED)

    def starts_empty_log(self, offset: int, size: int) -> bool:
        """Returns whether a frame is a heartbeat that determines where an empty log starts: as in RocketMQ, the slave
        creates the segment at its offset."""
        is_awaited = self.state.value is SessionState.REQUESTED and self._log.min_offset < 0
        return is_awaited and not size and offset != self.expected_offset and not offset % self._log.segment_size

    def take_header(self, offset: int, size: int) -> SessionEnd | None:
        """Checks a frame's position before its body is processed. Returns None if the connection continues, else why it
        ends.

        Raises RemoteProtocolError if no master sends such a frame in this state.
        """
        state, check, segment_size = self.state.value, self._check, self._log.segment_size
        if state is SessionState.CLOSED:
            return self.end
        if state not in REQUESTED_STATES:
            self._take_range_answer(offset, size)
            return None
        if offset % segment_size + size > segment_size:
            raise RemoteProtocolError(f"{size} bytes at {offset} span two segments of {segment_size}")
        if isinstance(check, FirstByte):
            return _check_first_byte(check, offset, size)
        if isinstance(check, Overlap) and offset == check.position:
            return None if size else self._take_early_heartbeat(check)
        if offset != self.expected_offset:
            if self._log.min_offset >= 0:
                return self._take_unexpected_offset(offset, size)
            if offset % segment_size:
                detail = f"the master starts at {offset}, which is not a multiple of the segment size {segment_size}"
                return SessionEnd(Condition.OFFSET_MISMATCH, f"{detail}: mappedFileSizeCommitLog differs")
        if state is SessionState.REQUESTED or not size:
            self._follow(offset)
        return None

    def take_body(self, offset: int, chunk: memoryview) -> Piece | SessionEnd | None:
        """Returns the part of a frame's next bytes that is to be appended, None if there is none yet, or why the
        session ends.

        Raises RemoteProtocolError if they can't be the start of a log.
        """
        check = self._check
        if self.end is not None:
            return self.end
        if check is None:
            return offset, chunk
        if isinstance(check, FirstByte):
            restored = check.feed(chunk)
            if restored is None:
                return None
            self._follow(first_byte.REQUEST_OFFSET)
            return 0, restored
        rest = check.feed(chunk)
        if rest is None:
            return SessionEnd(
                Condition.DIVERGED,
                f"the logs differ at {check.position}: the master lost its tail, or is another one; "
                "to replace this log by the master's, stop this slave and empty its store",
            )
        if not check.is_compared:
            return None
        if check.torn_at is not None:
            detail = f"the log here lacks the rest of a sector from {check.torn_at} on, as after a power loss"
            return SessionEnd(Condition.DAMAGED, detail, torn_at=check.torn_at)
        self._follow(check.end)
        return (check.end, rest) if rest else None

    def _follow(self, offset: int) -> None:
        self._check = None
        if self.state.value is not SessionState.FOLLOWING:
            self.become(SessionState.FOLLOWING)
        self.has_followed = True
        self._on_condition(Condition.CONNECTED, f"from offset {offset}")

    def _take_range_answer(self, offset: int, size: int) -> None:
        """Takes one of the two empty frames that answer the range question. Raises RemoteProtocolError for anything
        else before the request."""
        was_asked = self._plan.asks_range and self.state.value in {SessionState.ASKING, SessionState.PREPARING}
        if not was_asked or size or self.master_range is not None:
            raise RemoteProtocolError(f"a frame of {size} bytes at {offset} before any request")
        if self._master_min_offset is None:
            self._master_min_offset = offset
            return
        if self._master_min_offset > offset:
            raise RemoteProtocolError(f"the master claims to hold [{self._master_min_offset}, {offset})")
        self.master_range = self._master_min_offset, offset
        if self.state.value is SessionState.ASKING:
            self.become(SessionState.PREPARING)

    def _take_early_heartbeat(self, overlap: Overlap) -> SessionEnd | None:
        """Handles a heartbeat that arrives before the end of the log is compared: the master has nothing to send at
        this position, or can't read it.
        """
        at, own = overlap.position, overlap.end
        has_begun = at > overlap.start
        is_held_there = self.master_range is not None or (has_begun and self._plan.is_member)
        if has_begun and not is_held_there:
            return SessionEnd(Condition.MASTER_BEHIND, f"the log here ends at {own}, the master's at {at}")
        overlap.early_heartbeat_count += 1
        if overlap.early_heartbeat_count == 1:
            return None  # it may have been overdue when the request came, and is then sent before the data
        if is_held_there:
            detail = f"the master has the bytes from {at} to the end here at {own}, but sends none: damaged there?"
            self._on_condition(Condition.NO_DATA_YET, detail)
            return None
        cause = "deleted or damaged there" if self._plan.is_member else "deleted, or its log is shorter"
        detail = f"the master sends nothing from {at}, before the end here at {own}: {cause}"
        is_in_earlier_segment = at // self._log.segment_size < own // self._log.segment_size
        if is_in_earlier_segment and self._plan.compares_overlap:
            return SessionEnd(Condition.OUT_OF_RANGE, detail, retry=Retry.WITHOUT_OVERLAP)
        if not self._plan.asks_range and not self._plan.is_member:
            return SessionEnd(Condition.OUT_OF_RANGE, detail)  # the next connection asks which of the two it is
        self._on_condition(Condition.OUT_OF_RANGE, detail)
        return None

    def _take_unexpected_offset(self, offset: int, size: int) -> SessionEnd | None:
        own = self._log.max_offset.value
        if self.master_range is not None and not size and offset > own:
            # A halog master that was asked sends its first offset once the slave's position is deleted.
            detail = f"the next byte here is {own}, the master's log begins at {offset}"
            if self._options.out_of_range == "resync":
                return SessionEnd(Condition.OUT_OF_RANGE, detail, first_offset=offset)
            self._on_condition(Condition.OUT_OF_RANGE, detail)
            return None
        return SessionEnd(Condition.OFFSET_MISMATCH, f"the master sends from {offset}, expected {self.expected_offset}")


REQUESTED_STATES = frozenset(
    {SessionState.REQUESTED, SessionState.COMPARING, SessionState.RESTORING, SessionState.FOLLOWING}
)
"""States in which the request is sent, so that the master may send its log."""


def _check_first_byte(check: FirstByte, offset: int, size: int) -> SessionEnd | None:
    if offset != first_byte.REQUEST_OFFSET:
        return SessionEnd(Condition.OFFSET_MISMATCH, f"the master sends from {offset}, asked for offset 1")
    if size or not check.is_refused_by_heartbeat():
        return None
    detail = "the master has no byte 1: its log is empty, or begins later and can't be asked where"
    return SessionEnd(Condition.OUT_OF_RANGE, detail, retry=Retry.FROM_LAST_SEGMENT)
