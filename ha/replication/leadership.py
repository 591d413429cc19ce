"""Replication of a failover group's master, term by term: its connected members and the sync-state set.

    idle ──lead──▶ leading ──step_down──▶ idle …

While the node leads, members identify themselves and are admitted, their acknowledgements go to the rules of the
sync-state set (sync_state.py), and consumers see only the bytes that the set has confirmed. Changes of the set that the
rules propose are written to the agreement service by the owner of the role (ha/failover, through ha/node/member.py):
`proposed_set` is the proposal, `confirm_set` the result.

Each member, identified by its broker id, has at most one connection: a new one replaces the previous one, and messages
on replaced connections, or on those of an ended term, don't count. If two processes use one broker id, the process
whose key in the agreement service was replaced by that of the other no longer counts; their run ids distinguish them.
It may be cut off from the service and not know this, and then keeps connecting. Slaves that send no run id count unless
one is known for their broker id.

`lead` and `step_down` are synchronous, so no acknowledgement counts in another term, and no put is acknowledged once
`step_down` has returned.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import trio
from trio_util import AsyncValue

from ha.protocol.auto_switch_frame import SlaveHandshake
from ha.replication.connection import HAConnection
from ha.replication.epoch_frames import EpochFrames
from ha.replication.log import MemberStore, ReplicatedLog
from ha.replication.progress import CloseReason, SlaveProgress
from ha.replication.statistics import SyncStateStatistics
from ha.replication.sync_state import SyncStateSet

logger = logging.getLogger(__name__)

PAST_RUNS_MAX = 16
"""Maximum number of earlier processes that are remembered for each broker id."""


class Leadership:
    """One node's terms as master, and the members that are connected in the current one. Owned by its HAService; the
    owner of the role calls `lead`, `step_down`, `confirm_set` and `set_live_members`."""

    def __init__(
        self, log: ReplicatedLog, store: MemberStore, on_change: Callable[[], None], *, confirms_flushed: bool = False
    ) -> None:
        """`on_change` is called when the set may have acknowledged more, and when the term ends.

        `confirms_flushed` (SYNC_FLUSH): only the flushed part of the log here counts as confirmed, as on the slaves.
        """
        self._log = log
        self._held_here = log.flushed_offset if confirms_flushed else log.max_offset
        self._store = store
        self._on_change = on_change
        self._connections: dict[int, HAConnection] = {}
        self._run_ids: dict[int, int] = {}
        """Broker id -> its newest run id in the agreement service in this term"""
        self._past_run_ids: dict[int, deque[int]] = {}
        """Broker id -> its earlier run ids"""
        self._term_changed = trio.lowlevel.ParkingLot()
        self._reported = trio.lowlevel.ParkingLot()
        self.sync_state: SyncStateSet | None = None
        """The set in the current term; None while this node does not lead"""
        self.proposed_set: AsyncValue[frozenset[int] | None] = AsyncValue(None)
        """The sync-state set that should replace the current one, None if there is no need. A proposal doesn't change
        until `confirm_set` or the end of the term."""

    # Called by the owner of the role

    def lead(self, sync_state: SyncStateSet) -> None:
        """Starts a term, with `sync_state` as its set, and admits other members from now on. If another term is
        running, it ends first. The epoch of the new term must be the last one in the store's history."""
        last = self._store.epochs.last
        assert last is not None
        assert last.epoch == sync_state.epoch, (last, sync_state.epoch)
        self.step_down()
        self.sync_state = sync_state
        self._held_here.subscribe(self._confirm)
        self._store.log.limit_dispatch(sync_state.confirm_offset)
        self._confirm()
        self._term_changed.unpark_all()

    def step_down(self) -> None:
        """Ends the term, and closes the members' connections: from now on no report of a member counts, and the set
        acknowledges no put."""
        self._held_here.unsubscribe(self._confirm)
        self.sync_state = None
        self.proposed_set.value = None
        for connection in self._connections.values():
            connection.close(CloseReason.TERM_ENDED)
        self._connections.clear()
        self._run_ids.clear()
        self._past_run_ids.clear()
        self._on_change()
        self._term_changed.unpark_all()

    def confirm_set(self, members: Iterable[int]) -> None:
        """Records that the agreement service has `members` as the set; earlier proposals can no longer take effect.
        Does nothing while this node does not lead."""
        if self.sync_state is None:
            return
        self.sync_state.confirm_set(frozenset(members))
        self.proposed_set.value = None
        self._evaluate()

    def set_live_members(self, members: Mapping[int, int]) -> None:
        """Sets the members with a lease in the agreement service: broker id -> run id, 0 if unknown. Does nothing while
        this node does not lead."""
        if self.sync_state is None:
            return
        self.sync_state.set_live_members(frozenset(members))
        for broker_id, run_id in members.items():
            self._set_run_id(broker_id, run_id)
        self._evaluate()
        self._term_changed.unpark_all()

    def _set_run_id(self, broker_id: int, run_id: int) -> None:
        """Records that process `run_id` (0: unknown) has the broker id: the processes that had it before no longer
        count."""
        known = self._run_ids.get(broker_id, 0)
        if not run_id:
            self._run_ids.pop(broker_id, None)
        if not run_id or run_id == known:
            return
        self._run_ids[broker_id] = run_id
        if known:
            self._past_run_ids.setdefault(broker_id, deque(maxlen=PAST_RUNS_MAX)).append(known)
        connection = self._connections.get(broker_id)
        if connection is not None and self._is_other_run(broker_id, connection.progress.run_id):
            connection.progress.close_detail = f"another process has broker id {broker_id} now"
            connection.close(CloseReason.OTHER_RUN)
            self.remove(connection)

    def _is_other_run(self, broker_id: int, run_id: int) -> bool:
        """Returns whether the broker id is now known to belong to another process than `run_id` (0: the slave sent
        none). False for a run id that was never known: it may be newer than the known one."""
        if not run_id:
            return broker_id in self._run_ids
        return run_id != self._run_ids.get(broker_id) and run_id in self._past_run_ids.get(broker_id, ())

    async def wait_held(self, broker_id: int, offset: int) -> None:
        """Waits until member `broker_id` has acknowledged the log up to `offset`. The end of the term does not end the
        wait: use a timeout."""
        while True:
            connection = self._connections.get(broker_id)
            if connection is not None and connection.progress.ack_offset >= offset:
                return
            await self._reported.park()

    # Called by HAService

    @property
    def acknowledged_offset(self) -> int | None:
        """The physical offset up to which the set has acknowledged the log; -1 if the set is too small, or the offsets
        of too few members are known; None while this node does not lead."""
        return None if self.sync_state is None else self.sync_state.acknowledged(self._log.max_offset.value)

    def admit(self, connection: HAConnection, handshake: SlaveHandshake) -> EpochFrames | CloseReason:
        """Admits a member; returns the encoder for the messages to it, or the reason for refusing it, with details in
        the connection's `close_detail`, if any."""
        state, broker_id, progress = self.sync_state, handshake.broker_id, connection.progress
        if state is None:
            return CloseReason.NOT_MASTER
        if broker_id == state.own_id:
            progress.close_detail = f"it claims to be broker {broker_id}, which is this node"
            return CloseReason.NO_MEMBER
        if self._is_other_run(broker_id, handshake.run_id):
            progress.close_detail = f"another process has broker id {broker_id}"
            return CloseReason.OTHER_RUN
        if broker_id in self._connections:
            self._connections[broker_id].close(CloseReason.REPLACED)
        self._connections[broker_id] = connection
        progress.broker_id, progress.identity = broker_id, f"broker {broker_id}"
        progress.run_id = handshake.run_id
        # A slave that starts with the last segment never gets the bytes before it, so it can't become master.
        can_join = not handshake.is_learner and not handshake.syncs_from_last_file
        state.connect(broker_id, trio.current_time(), can_join=can_join)
        logger.info("ha.member_connected peer=%s broker=%d epoch=%d", progress.peer, broker_id, state.epoch)
        return EpochFrames(self._log, self._store.epochs, state)

    def on_ack(self, progress: SlaveProgress) -> None:
        """Processes a member's report."""
        state = self.sync_state
        if state is None or progress.broker_id is None or not self._is_current(progress):
            return
        joining = state.joining
        state.report(progress.broker_id, progress.ack_offset, self._log.max_offset.value, trio.current_time())
        if state.joining is not joining:
            self._term_changed.unpark_all()  # puts wait for a slave that joins: `keep_set` notices if it stalls
        if self._reported:
            self._reported.unpark_all()
        if state.joining:
            self._evaluate()
        else:
            self._confirm()
            self._on_change()

    def remove(self, connection: HAConnection) -> None:
        """Removes a connection that has ended."""
        broker_id = connection.progress.broker_id
        if broker_id is None or not self._is_current(connection.progress):
            return
        del self._connections[broker_id]
        if self.sync_state is not None:
            self.sync_state.disconnect(broker_id)
            self._evaluate()

    async def keep_set(self) -> None:
        """Evaluates the set whenever the passing of time may change it, until cancelled."""
        while True:
            look_at = math.inf
            if self.sync_state is not None:
                self._evaluate()
                look_at = self.sync_state.next_check_at(self._log.max_offset.value, trio.current_time())
            with trio.move_on_at(look_at):
                await self._term_changed.park()

    def statistics(self) -> SyncStateStatistics | None:
        """Returns a snapshot; None while this node does not lead."""
        state = self.sync_state
        if state is None:
            return None
        return SyncStateStatistics(
            epoch=state.epoch,
            members=tuple(sorted(state.agreed)),
            wished=None if state.proposed is None else tuple(sorted(state.proposed)),
            confirm_offset=state.confirm_offset,
        )

    def _is_current(self, progress: SlaveProgress) -> bool:
        connection = self._connections.get(progress.broker_id or 0)
        return connection is not None and connection.progress is progress

    def _confirm(self) -> None:
        """Makes all records that are now confirmed readable for consumers."""
        state = self.sync_state
        if state is not None and state.advance(self._held_here.value):
            self._store.log.limit_dispatch(state.confirm_offset)

    def _evaluate(self) -> None:
        """Proposes another set if the rules require it, and applies the effects of the proposal or of a changed set."""
        state = self.sync_state
        if state is None:
            return
        proposal = state.propose(self._log.max_offset.value, trio.current_time())
        if proposal != self.proposed_set.value:
            logger.info("ha.sync_state_set_proposed set=%s agreed=%s", sorted(proposal or ()), sorted(state.agreed))
            self.proposed_set.value = proposal
        self._confirm()
        self._on_change()
