"""The master's side of replication: accepts slaves, tracks their positions, and decides which of them count
(RocketMQ: DefaultHAService).

RocketMQ counts every socket. Here:
- Each slave has an identity, by default its IP address. Several connections with one identity count as one slave, with
  the highest acknowledgement among them.
- A connection counts only after a valid report, and while it can still acknowledge (TRANSFER). RocketMQ counts
  connections that never send anything, and slaves that are out of range.
- `is_slave_ok` considers the slaves that are connected now. RocketMQ considers the highest acknowledgement ever, so if
  a slave is replaced by one that is gigabytes behind, producers wait for it until their timeouts.
- An empty slave that starts at a later segment never gets the bytes before that segment, so its acknowledgements don't
  cover those bytes. Its acknowledgements are therefore withheld until every put that was waiting before has been
  answered (at most slaveTimeout). In RocketMQ they count at once.

In a failover group there is also a sync-state set, and a node is master for one term at a time (leadership.py).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import trio

from ha.causes import Cause
from ha.errors import HandshakeFailed
from ha.histogram import Histogram
from ha.log_rate_limiter import LogRateLimiter
from ha.poller import Poller
from ha.replication.connection import HAConnection
from ha.replication.flow_monitor import FlowMonitor
from ha.replication.group_transfer import GroupTransfer
from ha.replication.leadership import Leadership
from ha.replication.log import MemberStore, ReplicatedLog
from ha.replication.options import HAOptions
from ha.replication.peers import host_of, identify_by_address, peer_name
from ha.replication.progress import CloseReason, SlaveProgress, SlaveState
from ha.replication.statistics import HAStatistics, SlaveStatistics

logger = logging.getLogger(__name__)

SecureSlave = Callable[[trio.abc.Stream], Awaitable[tuple[trio.abc.Stream, str | None]]]
"""Does the TLS handshake of an accepted stream. Returns the encrypted stream and the slave's identity by its
certificate, None if the address identifies it. Raises HandshakeFailed after closing the stream."""

REMEMBERED_IDENTITIES_MAX = 256
"""Maximum number of identities whose last close reason is kept, so that the same reason is logged only once in a
row."""

REMEMBERED_SLAVES_MAX = 256
"""Maximum number of disconnected slaves whose position is kept."""

REMEMBERED_TABLE_COPIES_MAX = 16
"""Maximum number of hosts for which the time of their last copy of the tables is kept."""

TABLE_COPY_AGE_S_MAX = 60.0
"""Time in seconds without a copy of the tables after which a slave is assumed not to run; slaves copy them every 10
s."""

EXPLAINED_SLAVES_MAX = 3
"""Maximum number of slaves that `explain` names: its text goes into responses."""


class HAService:
    """Serves the slaves of one master. `serve` accepts them and owns every task."""

    def __init__(
        self,
        log: ReplicatedLog,
        options: HAOptions | None = None,
        *,
        identify: Callable[[str], str] = identify_by_address,
        secure: SecureSlave | None = None,
        advertised_address: str = "the HA port",
        member: MemberStore | None = None,
        poller: Poller | None = None,
    ) -> None:
        """`identify` maps a peer's `host:port` to the identity of its slave; `secure` does a peer's TLS handshake.

        `advertised_address`: `host:port` under which slaves look for this service, for explanations. `member`: the
        store of `log`, if this node is a member of a failover group. With a `poller` (ha/poller.py), its task receives
        the reports.
        """
        self._poller = poller
        self._log = log
        self._options = options or HAOptions()
        self._identify = identify
        self._secure = secure
        self._securing: list[trio.CancelScope] = []
        self._connections: list[HAConnection] = []
        self._closed_counts: Counter[CloseReason] = Counter()
        self._last_close_reasons: OrderedDict[str, CloseReason] = OrderedDict()
        self._left_at: OrderedDict[str, int] = OrderedDict()
        """Positions of disconnected slaves that are no members of a failover group"""
        self._members_left_at: OrderedDict[str, int] = OrderedDict()
        """Positions of members that were disconnected in this node's term as master"""
        self._had_slave = False
        self._copied_at: OrderedDict[str, float] = OrderedDict()
        self._advertised_address = advertised_address
        self._log_limiter = LogRateLimiter()
        self._last_end = ""
        self._last_end_at = 0.0
        self._push2_slave_max_offset = 0
        self._changed = trio.lowlevel.ParkingLot()
        self.replicate_times = Histogram()
        """Times in seconds from an append until a slave whose acknowledgements count acknowledges it, measured for one
        append at a time per connection"""
        self.group_transfer = GroupTransfer(
            self,
            waiting_count_max=self._options.waiting_request_count_max,
            batch_count_max=self._options.submitted_batch_count_max,
        )
        self.leadership: Leadership | None = None
        """The sync-state set and its members, in a failover group; None on any other node"""
        if member is not None:
            self.leadership = Leadership(log, member, self._on_set_changed, confirms_flushed=self._options.ack_flushed)

    # Serving

    async def serve(
        self,
        listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accepts slaves on `listeners` and runs GroupTransfer until cancelled. No task or connection outlives this.

        At the end the listeners are closed, and waiting requests are answered FLUSH_SLAVE_TIMEOUT.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.group_transfer.run)
            if self.leadership is not None:
                nursery.start_soon(self.leadership.keep_set)
            await nursery.start(trio.serve_listeners, self.handle, listeners)
            task_status.started()

    async def handle(self, stream: trio.abc.Stream, peer: str | None = None) -> CloseReason:
        """Serves one slave over `stream`; returns why that ended. `peer`: its host:port, by default the socket's
        peer."""
        peer = peer or peer_name(stream)
        name = None
        if self._secure is not None:
            if len(self._securing) >= self._options.connection_count_max:
                self._securing.pop(0).cancel()  # as in `_make_room`: the oldest silent connection is evicted
            with trio.CancelScope() as scope:
                self._securing.append(scope)
                try:
                    stream, name = await self._secure(stream)
                except HandshakeFailed as error:
                    return await self._refuse(stream, peer, CloseReason.HANDSHAKE_FAILED, error.reason)
                finally:
                    if scope in self._securing:
                        self._securing.remove(scope)
            if scope.cancelled_caught:
                return await self._refuse(
                    stream, peer, CloseReason.TOO_MANY_CONNECTIONS, "evicted for a newer connection"
                )
        now = trio.current_time()
        flow = FlowMonitor(now, self._options.transfer_bytes_per_s_max)
        progress = SlaveProgress(identity=name or self._identify(peer), peer=peer, flow=flow, now=now)
        if not self._make_room():
            progress.become_shutdown(CloseReason.TOO_MANY_CONNECTIONS)
            self._note_end(progress, CloseReason.TOO_MANY_CONNECTIONS)
            await trio.aclose_forcefully(stream)
            return CloseReason.TOO_MANY_CONNECTIONS
        connection = HAConnection(
            stream,
            self._log,
            self._options,
            progress,
            on_ack=self._on_ack,
            on_state=self._on_state,
            on_handshake=None if self.leadership is None else self.leadership.admit,
            poller=self._poller,
        )
        self._connections.append(connection)
        is_new = self._log_limiter.admit((host_of(peer), "connected"), now)
        level = logging.INFO if is_new else logging.DEBUG
        logger.log(level, "ha.slave_connected peer=%s identity=%s", peer, progress.identity)
        try:
            return await connection.run()
        finally:
            self._connections.remove(connection)
            if self.leadership is not None:
                self.leadership.remove(connection)
            self._changed.unpark_all()

    async def _refuse(self, stream: trio.abc.Stream, peer: str, reason: CloseReason, detail: str) -> CloseReason:
        """Closes a connection that failed before an HAConnection was made for it; returns `reason`. Logs at a limited
        rate."""
        self._closed_counts[reason] += 1
        times = self._log_limiter.admit((host_of(peer), reason), trio.current_time())
        level = logging.WARNING if times else logging.DEBUG
        logger.log(
            level, "ha.connection_refused peer=%s reason=%s detail=%r times=%d", peer, reason.value, detail, times
        )
        await trio.aclose_forcefully(stream)
        return reason

    def _make_room(self) -> bool:
        """Evicts the oldest connection without a report if there are too many; returns whether there is room."""
        if len(self._connections) < self._options.connection_count_max:
            return True
        for connection in self._connections:
            if connection.progress.state is SlaveState.CONNECTED and not connection.is_closing:
                connection.close(CloseReason.TOO_MANY_CONNECTIONS)
                return True
        return False

    def _remember(self, progress: SlaveProgress) -> None:
        """Records the position of a disconnected slave for retention, as it may reconnect."""
        if progress.start_offset < 0 or progress.close_reason in HOSTILE_ENDS or progress.is_reader:
            return
        self._had_slave = True
        for slave in self._following():
            # One that was connected while this one still reported is another slave, behind the same address.
            if slave.identity == progress.identity and slave.connected_at >= progress.last_report_at:
                return  # it has reconnected already: the loss of this connection was noticed late
        left_at = self._left_at_of(progress)
        if left_at is self._members_left_at and not self._leads:
            return  # it follows another master
        name, position = _lasting_name(progress), progress.held_offset
        if position >= self._log.min_offset:
            other = left_at.get(name, position)  # of another slave with that name
            left_at[name] = min(position, other) if other >= self._log.min_offset else position
        if len(left_at) > REMEMBERED_SLAVES_MAX:
            left_at.popitem(last=False)

    def _left_at_of(self, progress: SlaveProgress) -> OrderedDict[str, int]:
        """Returns where the slave's position is kept after a disconnection."""
        return self._left_at if progress.broker_id is None else self._members_left_at

    @property
    def _leads(self) -> bool:
        """Whether this node is the master of its failover group."""
        return self.leadership is not None and self.leadership.sync_state is not None

    def _note_end(self, progress: SlaveProgress, reason: CloseReason) -> None:
        self._closed_counts[reason] += 1
        if progress.is_reader:
            level = self._limited(logging.INFO, "reader_disconnected", progress)
            text = "ha.reader_disconnected peer=%s reason=%s from=%d"
            logger.log(level, text, progress.peer, reason.value, progress.start_offset)
            return
        self._last_end = f"the last one, {progress.peer}, {progress.close_detail or ENDS_IN_WORDS[reason]}"
        self._last_end_at = trio.current_time()
        self._copied_at.pop(host_of(progress.peer), None)  # its process may have ended: wait for its next copy
        repeated = self._last_close_reasons.pop(progress.identity, None) is reason
        if progress.start_offset < 0:
            # Anybody can cause this at any rate, and on loopback each connection is a separate identity.
            repeated |= not self._log_limiter.admit((host_of(progress.peer), reason), trio.current_time())
        self._last_close_reasons[progress.identity] = reason
        if len(self._last_close_reasons) > REMEMBERED_IDENTITIES_MAX:
            self._last_close_reasons.popitem(last=False)
        level = logging.DEBUG if repeated else logging.INFO if reason in EXPECTED_ENDS else logging.WARNING
        logger.log(
            level,
            "ha.slave_disconnected peer=%s identity=%s reason=%s ack=%d end=%d%s",
            progress.peer,
            progress.identity,
            reason.value,
            progress.ack_offset,
            self._log.max_offset.value,
            f" detail={progress.close_detail!r}" if progress.close_detail else "",
        )

    def _note_state(self, progress: SlaveProgress) -> None:
        """Logs that a slave gets the log, or is out of range."""
        if progress.state is SlaveState.TRANSFER:
            logger.log(
                self._limited(logging.INFO, "transfer_started", progress),
                "ha.transfer_started peer=%s request=%d start=%d end=%d",
                progress.peer,
                progress.request_offset,
                progress.start_offset,
                progress.end_at_request,
            )
        elif progress.state is SlaveState.OUT_OF_RANGE:
            logger.log(
                self._limited(logging.WARNING, "slave_out_of_range", progress),
                "ha.slave_out_of_range peer=%s identity=%s position=%d first_offset=%d missing_bytes=%d",
                progress.peer,
                progress.identity,
                progress.transfer_offset,
                self._log.min_offset,
                self._log.min_offset - progress.transfer_offset,
            )

    def _limited(self, level: int, event: str, progress: SlaveProgress) -> int:
        """Returns `level`, or DEBUG if `event` was logged for this slave recently: anybody can cause it at any rate."""
        is_new = self._log_limiter.admit((_lasting_name(progress), event), trio.current_time())
        return level if is_new else logging.DEBUG

    # Callbacks of the connections and of Leadership

    def _on_set_changed(self) -> None:
        if not self._leads:
            self._members_left_at.clear()
        self.group_transfer.advance()

    def _on_ack(self, progress: SlaveProgress) -> None:
        if progress.broker_id is not None and self.leadership is not None:
            self.leadership.on_ack(progress)
        if progress.is_withheld and self.group_transfer.lowest_waiting_offset > progress.end_at_request:
            progress.is_withheld = False
        if progress.is_counted:
            if 0 <= progress.sample_offset <= progress.ack_offset:
                self.replicate_times.observe(progress.last_report_at - progress.sample_started_at)
                progress.sample_offset = -1
            self._push2_slave_max_offset = max(self._push2_slave_max_offset, progress.acknowledged_offset)
            self.group_transfer.advance()

    def _on_state(self, progress: SlaveProgress) -> None:
        self._changed.unpark_all()
        self._note_state(progress)
        if progress.close_reason is not None:  # SHUTDOWN: handled now, as its socket may take a while to close
            self._remember(progress)
            self._note_end(progress, progress.close_reason)
        if progress.state is SlaveState.TRANSFER and not progress.is_reader:
            self._left_at_of(progress).pop(_lasting_name(progress), None)
        if progress.state is not SlaveState.TRANSFER:
            self.group_transfer.advance()

    # Which slaves count

    @property
    def push2_slave_max_offset(self) -> int:
        """The highest physical offset that any slave has acknowledged since the start (RocketMQ:
        push2SlaveMaxOffset)."""
        return self._push2_slave_max_offset

    def acknowledged(self) -> list[int]:
        """Returns one acknowledged offset for each slave that is counted, highest first."""
        return sorted((slave.acknowledged_offset for slave in self._counted()), reverse=True)

    def acknowledged_in_sync(self, offset: int | None = None) -> list[int]:
        """Returns one acknowledged offset for each slave that is counted and has reported an offset less than
        fall_behind_max before `offset`, by default the log's end; highest first."""
        behind = (self._log.max_offset.value if offset is None else offset) - self._options.fall_behind_max_bytes
        return sorted(
            (slave.acknowledged_offset for slave in self._counted() if slave.ack_offset > behind), reverse=True
        )

    def _counted(self) -> Collection[SlaveProgress]:
        """Returns the slaves that are counted, each by its connection with the highest report."""
        slaves: dict[str, SlaveProgress] = {}
        for connection in self._connections:
            progress = connection.progress
            if progress.is_counted:
                other = slaves.get(progress.identity)
                if other is None or progress.ack_offset > other.ack_offset:
                    slaves[progress.identity] = progress
        return slaves.values()

    def is_slave_ok(self, offset: int) -> bool:
        """Returns whether some slave is close enough for a put that ends at `offset` to wait for it (RocketMQ:
        isSlaveOK)."""
        return bool(self.acknowledged_in_sync(offset))

    def in_sync_replicas_nums(self, offset: int) -> int:
        """Returns how many replicas are in sync for a put at `offset`, the master included (inSyncReplicasNums). On the
        master of a failover group, this is the size of the sync-state set."""
        if self.leadership is not None and self.leadership.sync_state is not None:
            return self.leadership.sync_state.in_sync_replicas_nums
        return 1 + len(self.acknowledged_in_sync(offset))

    def acknowledged_by_set(self) -> int | None:
        """Returns the physical offset up to which the sync-state set has acknowledged the log, as
        `Leadership.acknowledged_offset`; None unless this node leads."""
        return None if self.leadership is None else self.leadership.acknowledged_offset

    def explain(self, offset: int) -> str:
        """Returns why slaves are not in sync for a put that ends at `offset`, as a text for people; "" if all connected
        slaves are in sync. If no slave is connected, the text says so, and how the last connection ended.

        On the master of a failover group, returns which members have not acknowledged the put; "" if all have.
        """
        if self.leadership is not None and self.leadership.sync_state is not None:
            return self.leadership.sync_state.explain(offset)
        texts = [text for _, text in self._reasons(offset)]
        if len(texts) > EXPLAINED_SLAVES_MAX:
            texts[EXPLAINED_SLAVES_MAX:] = [f"{len(texts) - EXPLAINED_SLAVES_MAX} more"]
        return "; ".join(texts)

    def cause(self, offset: int) -> Cause | None:
        """Returns the cause under which a put that ends at `offset` is counted if it fails; None if `explain` returns
        an empty string."""
        if self.leadership is not None and self.leadership.sync_state is not None:
            reasons = self.leadership.sync_state.reasons(offset)
        else:
            reasons = self._reasons(offset)
        causes = {cause for cause, _ in reasons}
        return next((cause for cause in Cause if cause in causes), None)

    def _reasons(self, offset: int) -> list[tuple[Cause, str]]:
        # A connection that has ended stays in the list until its socket is closed.
        progresses = [
            connection.progress
            for connection in self._connections
            if connection.progress.state is not SlaveState.SHUTDOWN and not connection.progress.is_reader
        ]
        if not progresses:
            return [(Cause.NO_SLAVE_CONNECTED, self._explain_no_slave())]
        limit = self._options.fall_behind_max_bytes
        now = trio.current_time()
        reasons = []
        silent = 0
        for progress in progresses:
            if progress.state is SlaveState.CONNECTED:
                silent += 1
            elif progress.state is SlaveState.OUT_OF_RANGE:
                text = f"asks for offset {progress.transfer_offset}, the log begins at {self._log.min_offset}"
                reasons.append((Cause.OUT_OF_RANGE, f"slave {progress.identity} {text}"))
            elif progress.waits_for is not None:
                text = f"waits at {progress.transfer_offset}: {progress.waits_for}"
                reasons.append((Cause.SLAVE_WAITS_FOR_REPAIR, f"slave {progress.identity} {text}"))
            elif progress.is_withheld:
                text = f"slave {progress.identity} has just started at offset {progress.start_offset}"
                reasons.append((Cause.CATCHING_UP, text))
            elif offset - progress.ack_offset >= limit:
                behind, rate = offset - progress.ack_offset, progress.flow.bytes_per_s(now)
                text = f"slave {progress.identity} is {behind} bytes behind, {limit} or more is too far"
                if rate:
                    text += f"; at its present {rate} bytes/s it would have them in {behind / rate:.0f} s"
                reasons.append((Cause.SLAVES_BEHIND, text))
        if silent:
            reasons.append((Cause.NOT_REPORTED, f"{silent} connected, not yet reported an offset"))
        return reasons

    def record_table_copy(self, host: str) -> None:
        """Records that `host` has copied this broker's tables, as slaves do. While no slave is connected, `explain`
        names the last host that did so within TABLE_COPY_AGE_S_MAX."""
        self._copied_at[host] = trio.current_time()
        self._copied_at.move_to_end(host)
        if len(self._copied_at) > REMEMBERED_TABLE_COPIES_MAX:
            self._copied_at.popitem(last=False)

    def _explain_no_slave(self) -> str:
        """Returns a text for people: no slave is connected, how the last connection ended, and which host may be unable
        to connect."""
        now = trio.current_time()
        text = "no slave is connected"
        if self._last_end:
            text += f"; {self._last_end}, {now - self._last_end_at:.0f} s ago"
        hosts = [host for host, at in self._copied_at.items() if now - at <= TABLE_COPY_AGE_S_MAX]
        if hosts:
            text += (
                f"; a slave at {hosts[-1]} copies the topics but has no HA connection: "
                f"can it reach {self._advertised_address}, the HA address advertised here (brokerIP2, haListenPort)?"
            )
        return text

    def lowest_needed_offset(self) -> int | None:
        """Returns, for retention, the lowest physical offset that a slave still needs; None if there is no slave.

        A disconnected slave counts with its last position until it reconnects (if several slaves have one address, as
        on loopback: until one of them does), this process ends, or retention has deleted that position. A disconnected
        member of a failover group counts only while this node is master. Positions of at most REMEMBERED_SLAVES_MAX
        slaves are kept, and of as many members.
        """
        following = [slave.held_offset for slave in self._following()]
        first = self._log.min_offset
        left_at = *self._left_at.values(), *self._members_left_at.values()
        return min((*following, *(left for left in left_at if left >= first)), default=None)

    def _following(self) -> list[SlaveProgress]:
        """Returns the state of each connection on which a slave gets the log."""
        progresses = [connection.progress for connection in self._connections]
        return [each for each in progresses if each.state is SlaveState.TRANSFER and not each.is_reader]

    # Status

    @property
    def connection_count(self) -> int:
        """Number of open connections, including those without a report."""
        return len(self._connections)

    async def wait_state(self, state: SlaveState, peer: str | None = None) -> None:
        """Waits until a connection is in `state` or, if that is SHUTDOWN, until there is no connection. With `peer`,
        only connections with this peer or identity are considered.

        For tests and demonstrations. Has no timeout.
        """
        await trio.lowlevel.checkpoint()
        while not self._is_in(state, peer):
            await self._changed.park()

    def _is_in(self, state: SlaveState, peer: str | None) -> bool:
        states = [
            connection.progress.state
            for connection in self._connections
            if peer is None or peer in (connection.progress.peer, connection.progress.identity)
        ]
        return state in states or (state is SlaveState.SHUTDOWN and not states)

    def statistics(self) -> HAStatistics:
        """Returns a snapshot."""
        end, now = self._log.max_offset.value, trio.current_time()
        limit = self._options.fall_behind_max_bytes
        slaves = tuple(
            SlaveStatistics(
                identity=progress.identity,
                broker_id=progress.broker_id,
                peer=progress.peer,
                state=progress.state,
                request_offset=progress.request_offset,
                start_offset=progress.start_offset,
                transfer_offset=progress.transfer_offset,
                ack_offset=progress.ack_offset,
                lag_bytes=end - progress.ack_offset if progress.ack_offset >= 0 else end,
                lag_s=progress.behind_s(end, now),
                is_in_sync=progress.is_counted and end - progress.ack_offset < limit,
                transferred_bytes=progress.flow.total_bytes,
                transferred_bytes_per_s=progress.flow.bytes_per_s(now),
                connected_s=now - progress.connected_at,
                last_report_age_s=now - progress.last_report_at,
            )
            for progress in (connection.progress for connection in self._connections)
            if not progress.is_reader
        )
        return HAStatistics(
            min_offset=self._log.min_offset,
            max_offset=end,
            push2_slave_max_offset=self._push2_slave_max_offset,
            slave_count=len(self.acknowledged()),
            in_sync_replicas_nums=self.in_sync_replicas_nums(end),
            slaves=slaves,
            closed_counts=dict(self._closed_counts),
            had_slave=self._had_slave,
            waiting_request_count=self.group_transfer.waiting_count,
            sync_state=None if self.leadership is None else self.leadership.statistics(),
        )


def _lasting_name(progress: SlaveProgress) -> str:
    """Returns the name under which a slave's position is kept: its identity or, if each connection has its own
    identity, as on loopback, its host."""
    return host_of(progress.peer) if progress.identity == progress.peer else progress.identity


HOSTILE_ENDS = frozenset({CloseReason.MALFORMED_REPORT, CloseReason.REPORT_BEYOND_END, CloseReason.OFFSET_MISMATCH})
"""Close reasons that show that the peer was no slave of this log: its position is not kept for retention."""

ENDS_IN_WORDS: Mapping[CloseReason, str] = {
    CloseReason.SLAVE_CLOSED: "closed its connection",
    CloseReason.CONNECTION_LOST: "lost its connection",
    CloseReason.HOUSEKEEPING_TIMEOUT: "was silent for haHousekeepingInterval",
    CloseReason.MALFORMED_REPORT: "did not speak the HA protocol",
    CloseReason.REPORT_BEYOND_END: "claimed more than this log holds",
    CloseReason.OFFSET_MISMATCH: "reported an impossible offset",
    CloseReason.LOG_TRUNCATED: "was beyond the end of this log",
    CloseReason.DAMAGED_HERE: "asked for what is damaged here",
    CloseReason.TOO_MANY_CONNECTIONS: "exceeded the maximum number of connections",
    CloseReason.HANDSHAKE_FAILED: "failed the TLS handshake",
    CloseReason.NOT_AUTHENTICATED: "did not prove haSharedSecret",
    CloseReason.NOT_MASTER: "expected this node to be the master of its group",
    CloseReason.NO_MEMBER: "has the broker id of this node",
    CloseReason.OTHER_RUN: "is not the process that its group knows under its broker id",
    CloseReason.REPLACED: "connected again",
    CloseReason.TERM_ENDED: "was disconnected when this node stopped being the master of its group",
    CloseReason.SERVICE_STOPPED: "was disconnected at a stop",
}

EXPECTED_ENDS = frozenset(
    {CloseReason.SLAVE_CLOSED, CloseReason.REPLACED, CloseReason.TERM_ENDED, CloseReason.SERVICE_STOPPED}
)
"""Close reasons that need no attention: logged as INFO, not WARNING."""
