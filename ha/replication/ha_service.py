"""The master's side of replication: accepts slaves, knows how far each is, answers who counts (DefaultHAService).

What counts, where RocketMQ counts every socket:
- A slave is an identity, by default its IP address. Several connections of one identity count once, with the highest
  acknowledgement among them.
- Only a connection with a valid report counts, and only while it can still acknowledge (TRANSFER). RocketMQ counts
  strangers that never say a word, and slaves that are out of range.
- `is_slave_ok` looks at the slaves that are there now. RocketMQ compares with the highest acknowledgement ever, so
  that after the exchange of a slave producers wait into their timeouts for one that is gigabytes behind.
- An empty slave that starts at a later segment never gets the bytes before it, so its acknowledgements say nothing
  about them. They are withheld until no put waits any more that was there before it (at most slaveTimeout); in RocketMQ
  they count.

In a failover group there is a set of slaves besides that the group's rules name, and a node is master for a term at a
time: leadership.py.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

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
"""Makes an encrypted stream of one that was accepted, and says who its certificate names: the slave's identity, None
if it has to be told by its address. HandshakeFailed, the stream closed."""

REMEMBERED_IDENTITIES_MAX = 256
"""Of so many identities the last close reason is remembered, so that a repeated one is not logged again and again."""

REMEMBERED_SLAVES_MAX = 256
"""Of so many hosts it is remembered where their slave was when it left."""

REMEMBERED_COPIERS_MAX = 16
"""Of so many hosts it is remembered when they last copied the tables."""

COPIER_S_MAX = 60.0
"""A slave copies the tables every 10 s; who has not done so for this long is no longer taken for one that runs."""

EXPLAINED_SLAVES_MAX = 3
"""`explain` names at most so many slaves: its text goes into responses."""


class HAService:
    """One master's slaves. `serve` accepts and owns every task; most else is synchronous."""

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
        """`identify` maps a peer's `host:port` to the identity of its slave, `secure` does the TLS handshake with it.

        `advertised_address`: `host:port` at which slaves are told to look for this service, for explanations.
        `member`: the store that has `log`, if this node is of a failover group. `poller`: whose turns take reports.
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
        self._copied_at: OrderedDict[str, float] = OrderedDict()
        self._advertised_address = advertised_address
        self._log_limiter = LogRateLimiter()
        self._last_end = ""
        self._last_end_at = 0.0
        self._push2_slave_max_offset = 0
        self._changed = trio.lowlevel.ParkingLot()
        self.replicate_times = Histogram()
        """From an append until a slave that counts acknowledges it: one sample at a time of each connection"""
        self.group_transfer = GroupTransfer(
            self,
            waiting_count_max=self._options.waiting_request_count_max,
            batch_count_max=self._options.submitted_batch_count_max,
        )
        self.leadership: Leadership | None = None
        """What there is to a member of a failover group besides; None of any other node."""
        if member is not None:
            self.leadership = Leadership(
                log, member, self.group_transfer.advance, confirms_flushed=self._options.ack_flushed
            )

    # Serving

    async def serve(
        self,
        listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept slaves on `listeners` and run GroupTransfer until cancelled. No task or connection outlives this.

        The listeners are closed in the end. Waiting requests are answered FLUSH_SLAVE_TIMEOUT.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.group_transfer.run)
            if self.leadership is not None:
                nursery.start_soon(self.leadership.keep_set)
            await nursery.start(trio.serve_listeners, self.handle, listeners)
            task_status.started()

    async def handle(self, stream: trio.abc.Stream, peer: str | None = None) -> CloseReason:
        """Serve one slave over `stream` until it ends and return why. `peer` is its host:port, by default looked up."""
        peer = peer or peer_name(stream)
        name = None
        if self._secure is not None:
            if len(self._securing) >= self._options.connection_count_max:
                self._securing.pop(0).cancel()  # as `_has_room`: who says nothing makes way
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
                return await self._refuse(stream, peer, CloseReason.TOO_MANY_CONNECTIONS, "it made way for another")
        now = trio.current_time()
        flow = FlowMonitor(now, self._options.transfer_bytes_per_s_max)
        progress = SlaveProgress(identity=name or self._identify(peer), peer=peer, flow=flow, now=now)
        if not self._has_room():
            progress.become_shutdown(CloseReason.TOO_MANY_CONNECTIONS)
            self._note_end(progress, CloseReason.TOO_MANY_CONNECTIONS)
            await trio.aclose_forcefully(stream)
            return CloseReason.TOO_MANY_CONNECTIONS
        connection = HAConnection(
            stream,
            self._log,
            self._options,
            progress,
            on_ack=self._take_ack,
            on_state=self._take_state,
            on_handshake=None if self.leadership is None else self.leadership.admit,
            poller=self._poller,
        )
        self._connections.append(connection)
        logger.info("ha.slave_connected peer=%s identity=%s", peer, progress.identity)
        try:
            return await connection.run()
        finally:
            self._connections.remove(connection)
            if self.leadership is not None:
                self.leadership.remove(connection)
            self._changed.unpark_all()

    async def _refuse(self, stream: trio.abc.Stream, peer: str, reason: CloseReason, detail: str) -> CloseReason:
        """Close a connection before it is one of a slave."""
        self._closed_counts[reason] += 1
        times = self._log_limiter.admit((host_of(peer), reason), trio.current_time())
        level = logging.WARNING if times else logging.DEBUG
        logger.log(
            level, "ha.connection_refused peer=%s reason=%s detail=%r times=%d", peer, reason.value, detail, times
        )
        await trio.aclose_forcefully(stream)
        return reason

    def _has_room(self) -> bool:
        """Make room for one more connection if need be: the oldest that hasn't said where it is must go."""
        if len(self._connections) < self._options.connection_count_max:
            return True
        for connection in self._connections:
            if connection.progress.state is SlaveState.CONNECTED and not connection.is_closing:
                connection.close(CloseReason.TOO_MANY_CONNECTIONS)
                return True
        return False

    def _remember(self, progress: SlaveProgress) -> None:
        """Keep for retention where a slave was that may come back. By host: on loopback an identity is a socket."""
        if progress.start_offset < 0 or progress.close_reason in HOSTILE_ENDS or progress.is_reader:
            return
        if progress.transfer_offset >= self._log.min_offset:
            self._left_at[host_of(progress.peer)] = progress.held_offset
        if len(self._left_at) > REMEMBERED_SLAVES_MAX:
            self._left_at.popitem(last=False)

    def _note_end(self, progress: SlaveProgress, reason: CloseReason) -> None:
        self._closed_counts[reason] += 1
        if progress.is_reader:
            logger.info(
                "ha.reader_disconnected peer=%s reason=%s from=%d", progress.peer, reason.value, progress.start_offset
            )
            return
        self._last_end = f"the last one, {progress.peer}, {progress.close_detail or ENDS_IN_WORDS[reason]}"
        self._last_end_at = trio.current_time()
        self._copied_at.pop(host_of(progress.peer), None)  # it may be gone altogether: wait for its next copy
        repeated = self._last_close_reasons.pop(progress.identity, None) is reason
        if progress.start_offset < 0 and reason not in EXPECTED_ENDS:
            # Anybody can do this as often as he likes, and on loopback each connection is an identity of its own.
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

    # What the connections tell

    def _take_ack(self, progress: SlaveProgress) -> None:
        if progress.broker_id is not None and self.leadership is not None:
            self.leadership.take_ack(progress)
        if progress.is_withheld and self.group_transfer.lowest_waiting_offset > progress.end_at_request:
            progress.is_withheld = False
        if progress.is_counted:
            if 0 <= progress.sample_offset <= progress.ack_offset:
                self.replicate_times.observe(progress.last_report_at - progress.sample_began)
                progress.sample_offset = -1
            self._push2_slave_max_offset = max(self._push2_slave_max_offset, progress.ack_offset)
            self.group_transfer.advance()

    def _take_state(self, progress: SlaveProgress) -> None:
        self._changed.unpark_all()
        if progress.close_reason is not None:  # SHUTDOWN: told now, as its socket may take a while to close
            self._remember(progress)
            self._note_end(progress, progress.close_reason)
        if progress.state is SlaveState.TRANSFER and not progress.is_reader:
            self._left_at.pop(host_of(progress.peer), None)
        if progress.state is not SlaveState.TRANSFER:
            self.group_transfer.advance()

    # Who counts

    @property
    def push2_slave_max_offset(self) -> int:
        """The highest offset that any slave ever acknowledged (RocketMQ: push2SlaveMaxOffset)."""
        return self._push2_slave_max_offset

    def acknowledged(self) -> list[int]:
        """One acknowledged offset for each slave that is counted, highest first."""
        slaves: dict[str, int] = {}
        for connection in self._connections:
            progress = connection.progress
            if progress.is_counted and progress.ack_offset > slaves.get(progress.identity, -1):
                slaves[progress.identity] = progress.ack_offset
        return sorted(slaves.values(), reverse=True)

    def acknowledged_in_sync(self, offset: int | None = None) -> list[int]:
        """The same, of the slaves less than fall_behind_max behind `offset`, by default the log's end."""
        behind = (self._log.max_offset.value if offset is None else offset) - self._options.fall_behind_max_bytes
        return [acknowledged for acknowledged in self.acknowledged() if acknowledged > behind]

    def is_slave_ok(self, offset: int) -> bool:
        """Whether some slave is close enough to be waited for by a put that ends at `offset` (RocketMQ: isSlaveOK)."""
        return bool(self.acknowledged_in_sync(offset))

    def in_sync_replicas_nums(self, offset: int) -> int:
        """Return how many replicas are in sync for a put at `offset`, the master included (inSyncReplicasNums)."""
        if self.leadership is not None and self.leadership.sync_state is not None:
            return self.leadership.sync_state.in_sync_replicas_nums
        return 1 + len(self.acknowledged_in_sync(offset))

    def acknowledged_by_set(self) -> int | None:
        """Up to where the sync-state set has acknowledged, -1 if it can't; None if this node doesn't lead its group."""
        return None if self.leadership is None else self.leadership.acknowledged_offset

    def explain(self, offset: int) -> str:
        """Return why not all connected slaves are in sync for a put that ends at `offset`, in words; "" if all are."""
        if self.leadership is not None and self.leadership.sync_state is not None:
            return self.leadership.sync_state.explain(offset)
        texts = [text for _, text in self._reasons(offset)]
        if len(texts) > EXPLAINED_SLAVES_MAX:
            texts[EXPLAINED_SLAVES_MAX:] = [f"{len(texts) - EXPLAINED_SLAVES_MAX} more"]
        return "; ".join(texts)

    def cause(self, offset: int) -> Cause | None:
        """Return of what `explain` says what a put that ends at `offset` is to be counted by; None if there is none."""
        if self.leadership is not None and self.leadership.sync_state is not None:
            reasons = self.leadership.sync_state.reasons(offset)
        else:
            reasons = self._reasons(offset)
        causes = {cause for cause, _ in reasons}
        return next((cause for cause in Cause if cause in causes), None)

    def _reasons(self, offset: int) -> list[tuple[Cause, str]]:
        # One that is over stays in the list for as long as its socket takes to close.
        progresses = [
            connection.progress
            for connection in self._connections
            if connection.progress.state is not SlaveState.SHUTDOWN and not connection.progress.is_reader
        ]
        if not progresses:
            return [(Cause.NO_SLAVE_CONNECTED, self._explain_nobody())]
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
                text = f"slave {progress.identity} has just begun at offset {progress.start_offset}"
                reasons.append((Cause.CATCHING_UP, text))
            elif offset - progress.ack_offset >= limit:
                behind, rate = offset - progress.ack_offset, progress.flow.bytes_per_s(now)
                text = f"slave {progress.identity} is {behind} bytes behind, {limit} or more is too far"
                if rate:
                    text += f"; at the {rate} bytes/s that it gets it would have them in {behind / rate:.0f} s"
                reasons.append((Cause.SLAVES_BEHIND, text))
        if silent:
            reasons.append((Cause.NOT_REPORTED, f"{silent} connected, not yet reported an offset"))
        return reasons

    def record_table_copy(self, host: str) -> None:
        """`host` copies this broker's tables, as slaves do: one that has no HA connection is worth telling about."""
        self._copied_at[host] = trio.current_time()
        self._copied_at.move_to_end(host)
        if len(self._copied_at) > REMEMBERED_COPIERS_MAX:
            self._copied_at.popitem(last=False)

    def _explain_nobody(self) -> str:
        """Return what is known of slaves where none is connected: of the last one, and of one that can't get here."""
        now = trio.current_time()
        text = "no slave is connected"
        if self._last_end:
            text += f"; {self._last_end}, {now - self._last_end_at:.0f} s ago"
        copiers = [host for host, at in self._copied_at.items() if now - at <= COPIER_S_MAX]
        if copiers:
            text += (
                f"; a slave at {copiers[-1]} copies the topics but has no HA connection: "
                f"can it reach {self._advertised_address}, the HA address advertised here (brokerIP2, haListenPort)?"
            )
        return text

    def lowest_needed_offset(self) -> int | None:
        """Return, for retention, the lowest offset that a slave has yet to confirm; None if no slave needs any.

        Slaves that left count from where they were, until one from the same host follows again or this process ends.
        Those whose place is gone need nothing any more.
        """
        following = [
            connection.progress.held_offset
            for connection in self._connections
            if connection.progress.state is SlaveState.TRANSFER and not connection.progress.is_reader
        ]
        first = self._log.min_offset
        return min((*following, *(left for left in self._left_at.values() if left >= first)), default=None)

    # Watching

    @property
    def connection_count(self) -> int:
        """Open connections, silent ones included."""
        return len(self._connections)

    async def wait_state(self, state: SlaveState, peer: str | None = None) -> None:
        """Wait until a connection is in `state`; SHUTDOWN: until none is left. `peer` narrows to a peer or an identity.

        For tests, demonstrations and RocketMQ's HAConnectionStateNotificationRequest. Put a deadline around it.
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
        """Return a snapshot."""
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
            waiting_request_count=self.group_transfer.waiting_count,
            sync_state=None if self.leadership is None else self.leadership.statistics(),
        )


HOSTILE_ENDS = frozenset({CloseReason.MALFORMED_REPORT, CloseReason.REPORT_BEYOND_END, CloseReason.OFFSET_MISMATCH})
"""Ends of what was no slave of this log."""

ENDS_IN_WORDS: Mapping[CloseReason, str] = {
    CloseReason.SLAVE_CLOSED: "closed its connection",
    CloseReason.CONNECTION_LOST: "lost its connection",
    CloseReason.HOUSEKEEPING_TIMEOUT: "was silent for haHousekeepingInterval",
    CloseReason.MALFORMED_REPORT: "did not speak the HA protocol",
    CloseReason.REPORT_BEYOND_END: "claimed more than this log holds",
    CloseReason.OFFSET_MISMATCH: "reported what can't be",
    CloseReason.LOG_TRUNCATED: "was beyond the end of this log",
    CloseReason.DAMAGED_HERE: "asked for what is damaged here",
    CloseReason.TOO_MANY_CONNECTIONS: "was one too many",
    CloseReason.HANDSHAKE_FAILED: "did not get through the TLS handshake",
    CloseReason.NOT_AUTHENTICATED: "did not prove haSharedSecret",
    CloseReason.NOT_MASTER: "took this node for the master of its group",
    CloseReason.NO_MEMBER: "has the broker id of this node",
    CloseReason.OTHER_RUN: "is not the process that its group knows under its broker id",
    CloseReason.REPLACED: "connected again",
    CloseReason.TERM_ENDED: "was let go when this node was no longer the master of its group",
    CloseReason.SERVICE_STOPPED: "was let go at a stop",
}

EXPECTED_ENDS = frozenset(
    {CloseReason.SLAVE_CLOSED, CloseReason.REPLACED, CloseReason.TERM_ENDED, CloseReason.SERVICE_STOPPED}
)
"""Ends that call for nobody's attention."""
