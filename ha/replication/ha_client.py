"""The slave's side of replication: connects to its master and follows it, for ever (RocketMQ: DefaultHAClient).

    READY ──connected──▶ TRANSFER ──session ended──▶ READY … until `run` is cancelled: SHUTDOWN

reconnect.py decides how long to wait between two attempts; another master address, or a later term of the failover
group, ends the wait. With a permanent obstacle (the master's log is shorter than ours, or starts later), the slave
retries for ever, slowly, and logs each change of condition, not each attempt.

haOutOfRange=resync: a master that no longer holds the slave's next byte sends heartbeats for ever, just like a master
without new messages. A halog master states which case it is (range_question.py). For a RocketMQ master, the owner can
inject `master_min_offset`, which is called when heartbeats arrive, at most once for each. It can send
GET_BROKER_RUNTIME_INFO (28) over remoting, whose response contains commitLogMinOffset. Without `master_min_offset`, the
slave of a RocketMQ master waits, as a RocketMQ slave does. A resync happens only on such an explicit statement that the
master's first offset is above our end, never on silence, errors or a closed connection, and at most once per
RESYNC_PAUSE_S.

haStartFrom=first, for an empty log: a halog master is asked; for a RocketMQ master see first_byte.py.

A member of a failover group (`member`) speaks only the protocol with epochs, whose handshake states haStartFrom. It
doesn't follow a master whose last term is earlier than the latest one that it knows: from its own history, from a
handshake, or from `adopt_epoch`. Once `set_master` or `adopt_epoch` has returned, nothing more is acknowledged to the
former master; no append of its bytes is in progress once `state` is no longer TRANSFER.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
import trio
from trio_util import AsyncValue

from ha.errors import ConfigError, DiskFull
from ha.poller import Poller
from ha.protocol.auto_switch_frame import NO_EPOCH, SlaveHandshake
from ha.replication.epoch_follower import EpochFollower
from ha.replication.ha_session import HASession
from ha.replication.log import MemberStore, ReplicatedLog
from ha.replication.options import HAOptions
from ha.replication.peers import connect_tcp, leads_to_itself, local_name
from ha.replication.reconnect import Reconnect
from ha.replication.session_plan import Retry, SessionEnd, SessionPlan
from ha.replication.statistics import Condition, HAClientState, HAClientStatistics

logger = logging.getLogger(__name__)

RESYNC_PAUSE_S = 60.0
"""Minimum time between two resyncs, in seconds: each moves a whole log aside, and a faulty master must not fill the
disk."""


class _Findings(msgspec.Struct):
    """Results of the earlier connections to the master at `address`, which decide how the next one begins."""

    address: str = ""
    is_diagnosing: bool = False
    """Whether the last connection ended before it followed the master"""
    has_asked_only: bool = False
    """Whether a connection was made for the range question alone since the master was last followed"""
    has_refused_first_byte: bool = False
    refused_overlap_at: int = -1
    """End of the log here when the master sent no bytes from before that end to compare; -1: it has always sent some"""


class HAClient:
    """Keeps `log` a copy of the master's log. `run` owns every task; the other public methods are synchronous."""

    def __init__(
        self,
        log: ReplicatedLog,
        options: HAOptions | None = None,
        connect: Callable[[str], Awaitable[trio.abc.Stream]] = connect_tcp,
        *,
        truncate: Callable[[int], Awaitable[None]] | None = None,
        master_min_offset: Callable[[], Awaitable[int | None]] | None = None,
        own_port: int = 0,
        member: MemberStore | None = None,
        broker_id: int = 0,
        run_id: int = 0,
        is_learner: bool = False,
        jitter: Callable[[], float] = random.random,
        poller: Poller | None = None,
    ) -> None:
        """`connect` opens a stream to `host:port`; it raises OSError or ConfigError if it can't. `own_port`: HA port of
        this node, to detect a connection to itself.

        `truncate` truncates the log at the start of the record that contains a physical offset; it raises DiskFull or
        OSError if nothing has changed. Without it, a torn record at the end of the log is left to an operator.

        `master_min_offset` returns the first physical offset that the master holds, None if it is not known now; it
        raises nothing, and is cancelled after connect_timeout_s.

        `member`: the store of `log`, if this node is a member of a failover group; `broker_id` and `run_id` identify
        the member and its process. A learner (asyncLearner) is never in the sync-state set. `jitter` returns numbers in
        [0, 1) that shorten the waits between attempts. `poller`: see `HASession`.
        """
        self._poller = poller
        self._log = log
        self._options = options or HAOptions()
        self._connect = connect
        self._truncate = truncate
        self._master_min_offset = master_min_offset
        self._own_port = own_port
        self._member = member
        from_last = self._options.start_from == "last"
        self._greeting = SlaveHandshake(broker_id, syncs_from_last_file=from_last, is_learner=is_learner)
        self._run_id = run_id
        self._master_reads_run_ids = False
        self.min_epoch = NO_EPOCH
        """Latest term of the group that is known: masters of earlier terms are not followed."""
        self.has_caught_up = trio.Event()
        """Set once this member's log has everything that a master's log had when this member connected to it."""
        self._origin = ""
        self._master: AsyncValue[str | None] = AsyncValue(None)
        self._connecting = trio.CancelScope()
        """Cancel scope of the attempt to connect, or of a resync; cancelled when the master changes"""
        self._waiting = trio.CancelScope()
        """Cancel scope of the wait between two attempts; cancelled when the group reaches a later term"""
        self._session: HASession | None = None
        self.local_address = ""
        """Local `host:port` of the connection to the master, under which the master sees it; "" if there is none."""
        self._logged_condition = Condition.NOT_STARTED
        self._condition = AsyncValue(Condition.NOT_STARTED)
        self._detail = ""
        self._ended_counts: Counter[Condition] = Counter()
        self._connection_count = 0
        self._received_bytes = 0
        self._resync_count = 0
        self._skipped_bytes = 0
        self._resynced_at = -math.inf
        self._reconnect = Reconnect(self._options.reconnect_interval_s, jitter)
        self._has_followed = False
        """Whether the last session followed the master"""
        self._findings = _Findings()
        self.state: AsyncValue[HAClientState] = AsyncValue(HAClientState.READY)
        """READY, TRANSFER or SHUTDOWN; set by `run` only."""

    def set_master(self, address: str | None, *, origin: str = "", reads_run_ids: bool = False) -> None:
        """Follows the master whose HA port is at `address` (`host:port`), or no master (None).

        If the address changes, the connection to the previous master ends, and so does an attempt to connect, a resync,
        or a wait between two attempts. If it is the same, they continue.

        `origin`: where the address is configured, for error messages. `reads_run_ids`: whether the master understands
        run ids.
        """
        self._origin = origin
        self._master_reads_run_ids = reads_run_ids
        previous = self._master.value
        if address != previous and self._session is not None:
            self._session.close(SessionEnd(Condition.MASTER_CHANGED, f"from {previous} to {address}"))
        if address != previous:
            self._connecting.cancel()
            self._reconnect.reset()
        self._master.value = address

    def adopt_epoch(self, epoch: int) -> None:
        """Records that the group has reached `epoch`; from now on no master of an earlier term is followed. A term
        later than all before ends the wait between two attempts to connect."""
        if epoch <= self.min_epoch:
            return
        self.min_epoch = epoch
        self._reconnect.reset()
        self._waiting.cancel()
        if self._session is not None and self._session.epoch < epoch:
            detail = f"its last term is {self._session.epoch}, the group is in {epoch}"
            self._session.close(SessionEnd(Condition.STALE_MASTER, detail))

    @property
    def may_differ(self) -> bool:
        """Whether the log here may have another history than the master's: it is not empty, and the master is not
        followed."""
        return self._log.min_offset >= 0 and self._condition.value is not Condition.CONNECTED

    async def wait_following(self) -> None:
        """Waits until the master is followed on another connection than now."""
        await self._condition.wait_transition(Condition.CONNECTED)

    def has_reached(self, physical_offset: int) -> bool:
        """Returns whether the log here ends at or beyond `physical_offset` (bytes)."""
        return self._log.max_offset.value >= physical_offset

    async def wait_reached(self, physical_offset: int) -> None:
        """Waits until the log here ends at or beyond `physical_offset` (bytes)."""
        while not self.has_reached(physical_offset):
            await self._log.max_offset.wait_beyond(physical_offset - 1)

    def note_caught_up(self) -> None:
        """Sets `has_caught_up`."""
        self.has_caught_up.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follows the master until cancelled. No task or connection outlives this; what was appended stays.

        Failures of the peer or the network, a full disk and bytes that can't be written become conditions. DiskFailed
        and other errors of the store propagate.
        """
        task_status.started()
        try:
            while True:
                address = await self._wait_for_master()
                end = await self._follow(address)
                self._ended_counts[end.condition] += 1
                self._set_condition(end.condition, end.detail)
                if end.condition is Condition.MASTER_CHANGED or self._prepare_retry(end):
                    continue
                if await self._resync(end):
                    continue
                now = trio.current_time()
                wait_s = self._reconnect.wait_s(end.condition, now, has_followed=self._has_followed)
                self._waiting = trio.move_on_after(wait_s)
                with self._waiting:
                    await self._master.wait_value(lambda current, last=address: current != last)
        finally:
            self._set_condition(Condition.STOPPED, "")
            self.state.value = HAClientState.SHUTDOWN

    async def _wait_for_master(self) -> str:
        if self._master.value is None:
            self._set_condition(Condition.NO_MASTER, "no master address is known yet")
        address: str | None = None
        while address is None:
            await self._master.wait_value(lambda current: current is not None)
            address = self._master.value  # may have changed since the wait ended
        return address

    async def _follow(self, address: str) -> SessionEnd:
        """Connects, and follows the master until the session ends."""
        self._has_followed = False
        if address != self._findings.address:
            self._findings = _Findings(address)
        self._connecting = trio.CancelScope()
        stream, began = None, trio.current_time()
        try:
            with trio.fail_after(self._options.connect_timeout_s), self._connecting:
                stream = await self._connect(address)
        except (OSError, ConfigError, trio.TooSlowError) as error:
            silence = f"no answer within {self._options.connect_timeout_s:g} s, as behind a firewall"
            return self._unreachable(address, str(error) or silence)
        if stream is None or self._master.value != address:
            if stream is not None:
                await trio.aclose_forcefully(stream)
            return SessionEnd(Condition.MASTER_CHANGED, f"from {address} to {self._master.value}")
        if leads_to_itself(stream, self._own_port):
            await trio.aclose_forcefully(stream)
            return self._unreachable(address, "that is this slave itself")
        self._connection_count += 1
        connect_s = trio.current_time() - began
        follower = None
        if self._member is not None:
            run_id = self._run_id if self._master_reads_run_ids else 0
            greeting = msgspec.structs.replace(self._greeting, run_id=run_id)
            follower = EpochFollower(self._member, self._log, greeting, self)
        session = HASession(
            stream,
            self._log,
            self._options,
            self._plan(connect_s),
            on_condition=self._set_condition,
            follower=follower,
            poller=self._poller,
        )
        self._session = session
        self.local_address = local_name(stream)
        self._note_open()
        self.state.value = HAClientState.TRANSFER
        try:
            return await self._remove_torn(await session.run())
        finally:
            self._received_bytes += session.flow.total_bytes
            self._has_followed = session.has_followed
            self._findings.is_diagnosing = not session.has_followed
            self._findings.has_asked_only &= not session.has_followed
            self.local_address = ""
            self.state.value = HAClientState.READY

    def _unreachable(self, address: str, reason: str) -> SessionEnd:
        origin = f" ({self._origin})" if self._origin else ""
        return SessionEnd(Condition.CONNECT_FAILED, f"{address}{origin}: {reason}")

    def _plan(self, connect_s: float) -> SessionPlan:
        options, findings = self._options, self._findings
        is_empty, is_member = self._log.min_offset < 0, self._member is not None
        first = is_empty and options.start_from == "first"
        resync = not is_empty and options.out_of_range == "resync"
        asks_only = is_empty and not first and findings.is_diagnosing and not findings.has_asked_only
        # False if the master sent no bytes from before this end of the log: they are deleted, or not written yet. Once
        # the log here has another end, there is something to compare again.
        compares = findings.refused_overlap_at != self._log.max_offset.value
        asks_range = first or resync or (not is_empty and (findings.is_diagnosing or not compares)) or asks_only
        return SessionPlan(
            is_member=is_member,
            asks_range=asks_range and not is_member,
            answer_timeout_s=options.range_answer_timeout_s + connect_s,
            asks_only=asks_only and not is_member,
            tries_first_byte=first and not findings.has_refused_first_byte and not is_member,
            compares_overlap=compares,
            master_min_offset=self._ask_min_offset,
            watches_min_offset=options.out_of_range == "resync" and self._master_min_offset is not None,
        )

    async def _ask_min_offset(self) -> int | None:
        if self._master_min_offset is None:
            return None
        with trio.move_on_after(self._options.connect_timeout_s):
            return await self._master_min_offset()
        return None

    def _prepare_retry(self, end: SessionEnd) -> bool:
        """Records how the next connection differs, according to `end.retry`; returns whether it is made at once."""
        if end.retry is Retry.WITHOUT_OVERLAP:
            self._findings.refused_overlap_at = self._log.max_offset.value
        elif end.retry is Retry.WITHOUT_QUESTION:
            self._findings.has_asked_only = True
        elif end.retry is Retry.FROM_LAST_SEGMENT:
            self._findings.has_refused_first_byte = True
            logger.warning("ha.start_offset_unknown fallback=last_segment reason=%r", end.detail)
        return end.retry is not None

    async def _remove_torn(self, end: SessionEnd) -> SessionEnd:
        """Truncates the log before a torn record, if the session found one. Returns `end`, with a retry if the log was
        truncated; APPEND_FAILED if it should be truncated but can't be."""
        own_end = self._log.max_offset.value
        if end.torn_at is None or self._truncate is None:
            return end
        try:
            await self._truncate(end.torn_at)
        except (DiskFull, OSError) as error:
            return SessionEnd(Condition.APPEND_FAILED, str(error))
        logger.warning("ha.torn_record_removed from=%d to=%d", own_end, self._log.max_offset.value)
        return msgspec.structs.replace(end, retry=Retry.WITHOUT_TORN_RECORD)

    async def _resync(self, end: SessionEnd) -> bool:
        """Moves the log aside and begins an empty one at the first physical offset of the master's log, if configured
        and needed. Returns whether that was done."""
        first, own = end.first_offset, self._log.max_offset.value
        if end.condition is not Condition.OUT_OF_RANGE or self._options.out_of_range != "resync" or first is None:
            return False
        if self._master.value != self._findings.address:
            return False  # another master may still have the next byte
        if first <= own or first % self._log.segment_size:
            logger.warning("ha.resync_refused own_end=%d master_first_offset=%d", own, first)
            return False
        if trio.current_time() < self._resynced_at + RESYNC_PAUSE_S:
            return False
        logger.warning("ha.resync_started own_end=%d master_first_offset=%d skipped_bytes=%d", own, first, first - own)
        self._connecting = trio.CancelScope()
        try:
            with self._connecting:
                await self._log.reset(first)
        except (DiskFull, OSError) as error:
            self._set_condition(Condition.APPEND_FAILED, str(error))
            return False
        if self._connecting.cancelled_caught:
            return False
        self._resynced_at = trio.current_time()
        self._resync_count += 1
        self._skipped_bytes += first - own
        return True

    def _note_open(self) -> None:
        """Sets the condition NO_DATA_YET without logging it, so that a lasting obstacle is logged once, not once per
        attempt."""
        detail = "the connection is open, but no data has come yet"
        before = self._condition.value
        if before not in GOOD_CONDITIONS:
            detail += f"; before that {before.value}: {self._detail}"
        self._condition.value, self._detail = Condition.NO_DATA_YET, detail

    def _set_condition(self, condition: Condition, detail: str) -> None:
        """Sets the condition; logs it if it differs from the last one logged."""
        if condition is not self._logged_condition:
            level = logging.INFO if condition in GOOD_CONDITIONS else logging.WARNING
            master = self._master.value
            logger.log(level, "ha.client_%s master=%s detail=%r", condition.value, master, detail)
        self._logged_condition = condition
        self._detail = detail
        self._condition.value = condition

    def statistics(self) -> HAClientStatistics:
        """Returns a snapshot."""
        now, session = trio.current_time(), self._session
        is_open = self.state.value is HAClientState.TRANSFER and session is not None
        return HAClientStatistics(
            state=self.state.value,
            condition=self._condition.value,
            detail=self._detail,
            master_address=self._master.value,
            max_offset=self._log.max_offset.value,
            reported_offset=session.reported_offset if session else -1,
            received_bytes=self._received_bytes + (session.flow.total_bytes if session and is_open else 0),
            received_bytes_per_s=session.flow.bytes_per_s(now) if session else 0,
            connection_count=self._connection_count,
            ended_counts=dict(self._ended_counts),
            resync_count=self._resync_count,
            skipped_bytes=self._skipped_bytes,
            last_read_age_s=now - session.last_read_at if session else None,
            last_write_age_s=now - session.last_write_at if session else None,
        )


GOOD_CONDITIONS = frozenset(
    {
        Condition.NOT_STARTED,
        Condition.CONNECTED,
        Condition.STOPPED,
        Condition.NO_MASTER,
        Condition.MASTER_CHANGED,
    }
)
"""Conditions that need no attention: logged as INFO, not WARNING."""
