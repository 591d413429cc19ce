"""State of one slave's connection on the master: the slave's offsets, and the transitions between states.

    CONNECTED ──become_transfer──▶ TRANSFER ──become_out_of_range──▶ OUT_OF_RANGE
        │                              │                                  │
        └──────────────────────────────┴────────become_shutdown───────────┴──▶ SHUTDOWN

If the first report asks for deleted bytes, CONNECTED changes to OUT_OF_RANGE directly. RocketMQ (HAConnectionState)
calls the first three states TRANSFER. The design follows etcd raft's tracker.Progress.
"""

from __future__ import annotations

from enum import Enum

from ha.errors import DamagedBytes
from ha.replication.caught_up import CaughtUp
from ha.replication.flow_monitor import FlowMonitor


class SlaveState(Enum):
    """State of one slave's connection on the master."""

    CONNECTED = "connected"
    """The slave has not reported its position. It isn't counted, and no bytes of the log are sent."""
    TRANSFER = "transfer"
    """Bytes are sent from `transfer_offset` on, and acknowledgements count."""
    OUT_OF_RANGE = "out_of_range"
    """The slave needs bytes that the log no longer holds. It gets heartbeats, as from RocketMQ, and isn't counted. It
    can leave this state only with a new connection."""
    SHUTDOWN = "shutdown"
    """The connection has ended; `close_reason` says why."""


TRANSITIONS: dict[SlaveState, frozenset[SlaveState]] = {
    SlaveState.CONNECTED: frozenset({SlaveState.TRANSFER, SlaveState.OUT_OF_RANGE, SlaveState.SHUTDOWN}),
    SlaveState.TRANSFER: frozenset({SlaveState.OUT_OF_RANGE, SlaveState.SHUTDOWN}),
    SlaveState.OUT_OF_RANGE: frozenset({SlaveState.SHUTDOWN}),
    SlaveState.SHUTDOWN: frozenset(),
}


class CloseReason(Enum):
    """Why a slave's connection to this master ended."""

    SLAVE_CLOSED = "slave_closed"
    CONNECTION_LOST = "connection_lost"
    HOUSEKEEPING_TIMEOUT = "housekeeping_timeout"
    MALFORMED_REPORT = "malformed_report"
    REPORT_BEYOND_END = "report_beyond_end"
    """The slave claims bytes that the master lacks: it follows another log, the master's log was longer before, or it
    is no slave."""
    OFFSET_MISMATCH = "offset_mismatch"
    """A report below the previous one of this connection, or above what was sent on it."""
    LOG_TRUNCATED = "log_truncated"
    """The master's own log was truncated to before the slave's position (`transfer_offset`)."""
    DAMAGED_HERE = "damaged_here"
    """The peer reads to heal its log, and the bytes that it needs are damaged here, too; or the disk here can't read
    the bytes that a peer needs."""
    TOO_MANY_CONNECTIONS = "too_many_connections"
    HANDSHAKE_FAILED = "handshake_failed"
    """TLS failed, or the slave's certificate is not among those that are accepted."""
    NOT_AUTHENTICATED = "not_authenticated"
    """The slave has not proved that it knows haSharedSecret."""
    NOT_MASTER = "not_master"
    """A member of the group connected to this node as its master, but this node is not the master, or not yet."""
    NO_MEMBER = "no_member"
    """The peer states the broker id of this node as its own."""
    OTHER_RUN = "other_run"
    """The member's key in the agreement service belongs to another process with the same broker id."""
    REPLACED = "replaced"
    """The same member has opened a newer connection."""
    TERM_ENDED = "term_ended"
    """The term in which this node was master and the member connected to it has ended."""
    SERVICE_STOPPED = "service_stopped"


class SlaveProgress:
    """State and offsets of one slave's connection. HAConnection owns it; HAService and Leadership set a few fields.
    Offsets are physical, in bytes; times are Trio's, in seconds.

    request_offset   first report, -1 before it (RocketMQ: slaveRequestOffset)
    start_offset     where the transfer began, -1 before it; differs from the request only if that was 0
    transfer_offset  next byte to send (RocketMQ: nextTransferFromWhere); start_offset <= it <= the log's end
    ack_offset       last report, -1 before the first; never falls, never above max(request_offset, transfer_offset)
    is_withheld      acknowledgements don't count yet, see ha_service.py; only ever true for a slave that began empty
    end_at_request   the log's end at the time of the request
    has_asked        the slave asked the range question (range_question.py), so it is a halog slave
    is_reader        it is no slave but reads a range to heal its own log: never counted or remembered
    broker_id        its broker id in the failover group, None if it is no member
    run_id           identifies its process among those with that id, 0 if unknown
    sample_offset    the log's end when a measurement of the replication time started; -1 if none is running
    waits_for        the damaged range of the log here at which the transfer waits, None if it doesn't
    close_detail     details of close_reason, for people; "" if there are none
    """

    __slots__ = (
        "ack_offset",
        "broker_id",
        "caught_up",
        "close_detail",
        "close_reason",
        "connected_at",
        "end_at_request",
        "flow",
        "has_asked",
        "identity",
        "is_reader",
        "is_withheld",
        "last_report_at",
        "last_write_at",
        "peer",
        "request_offset",
        "run_id",
        "sample_offset",
        "sample_started_at",
        "start_offset",
        "state",
        "transfer_offset",
        "waits_for",
    )

    def __init__(self, *, identity: str, peer: str, flow: FlowMonitor, now: float) -> None:
        self.identity = identity
        self.peer = peer
        self.flow = flow
        self.state = SlaveState.CONNECTED
        self.request_offset = -1
        self.start_offset = -1
        self.transfer_offset = -1
        self.ack_offset = -1
        self.end_at_request = -1
        self.is_withheld = False
        self.has_asked = False
        self.is_reader = False
        self.broker_id: int | None = None
        self.run_id = 0
        self.waits_for: DamagedBytes | None = None
        self.close_reason: CloseReason | None = None
        self.close_detail = ""
        self.connected_at = self.last_report_at = self.last_write_at = now
        self.caught_up = CaughtUp()
        self.sample_offset = -1
        self.sample_started_at = now

    def become_transfer(self, request_offset: int, start_offset: int, end: int) -> None:
        """Moves to TRANSFER: the slave requested `request_offset` and gets the log, which ends at `end`, from
        `start_offset` on."""
        self._move(SlaveState.TRANSFER)
        self.request_offset = self.ack_offset = request_offset
        self.start_offset = self.transfer_offset = start_offset
        self.end_at_request = end
        self.is_withheld = request_offset < start_offset

    def become_out_of_range(self, offset: int) -> None:
        """Moves to OUT_OF_RANGE: the bytes at the slave's position, `offset`, are deleted."""
        if self.state is SlaveState.CONNECTED:
            self.request_offset = self.ack_offset = self.start_offset = offset
        self._move(SlaveState.OUT_OF_RANGE)
        self.transfer_offset = offset

    def become_shutdown(self, reason: CloseReason) -> None:
        """Moves to SHUTDOWN: the connection has ended for `reason`."""
        self._move(SlaveState.SHUTDOWN)
        self.close_reason = reason

    def contradicts(self, offset: int) -> bool:
        """Returns whether a report of `offset` contradicts the earlier reports on this connection, or the bytes sent on
        it.

        RocketMQ's and halog's slaves truncate their logs only before their first report, so a report lower than the
        last one comes from a slave whose log was replaced while it was connected. A report beyond the bytes that were
        sent is wrong, too.
        """
        return offset < self.ack_offset or offset > max(self.request_offset, self.transfer_offset)

    def take_report(self, offset: int, end: int, now: float) -> None:
        """Records a report: the slave has the log up to `offset`, and the log ends at `end`."""
        self.ack_offset = offset
        self.last_report_at = now
        self.caught_up.note_report(offset, end, now)

    def note_sent(self, size: int, now: float) -> None:
        """Records that the slave was sent `size` bytes."""
        self.last_write_at = now
        self.flow.count(size, now)

    def behind_s(self, end: int, now: float) -> float:
        """Returns the time in seconds since the slave last had the whole log or, if that is later, since it connected.
        0 if it has the whole log, which ends at `end`."""
        return 0.0 if self.ack_offset >= end else now - max(self.caught_up.at, self.connected_at)

    @property
    def held_offset(self) -> int:
        """Physical offset below which the slave needs no byte; -1 before the first report."""
        return max(self.ack_offset, self.start_offset)

    @property
    def acknowledged_offset(self) -> int:
        """Physical offset up to which the slave acknowledges puts; 0 while it may have another log.

        A request proves nothing: the slave's log may have another history. The slave notices that when it compares the
        end of its log with the bytes it receives (overlap.py), so it acknowledges only with a report beyond its
        request. A slave that requests the log's end compares nothing, like RocketMQ's slaves, and is trusted. A
        member's history is compared before its request.
        """
        has_compared = self.ack_offset > self.request_offset or self.broker_id is not None
        return self.ack_offset if has_compared or self.request_offset >= self.end_at_request else 0

    @property
    def is_counted(self) -> bool:
        """Whether this slave can acknowledge puts."""
        return self.state is SlaveState.TRANSFER and not self.is_withheld and not self.is_reader

    def _move(self, state: SlaveState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state
