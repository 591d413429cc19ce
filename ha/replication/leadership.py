"""A failover group's master, for the terms that it is one: which members are connected, and what the set of them holds.

    idle ──lead──▶ leading ──step_down──▶ idle …

While it leads, members are let in, which say who they are; what they acknowledge is told to the rules of the sync-state
set (sync_state.py); and consumers are shown no more than what is confirmed by it. What the rules wish for is made true
by whoever talks to the agreement service: `wished_set` out, `confirm_set` in.

A member is a broker id, with one connection: a later one takes the place of an earlier. What comes over the others, or
over one of a term that is over, counts for nothing. Of two processes with one broker id the one counts whose key the
agreement service holds, which its run id tells: a process that was cut off from the service may not know that another
one has its id now, and goes on connecting. Slaves that tell no run id count unless one is known of their id.

 `lead` and `step_down` are synchronous: no acknowledgement of one
term gets into another, and none is given once `step_down` has returned.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import trio
from trio_util import AsyncValue

from ha.protocol.auto_switch_frame import SlaveHandshake
from ha.replication.epoch_frames import EpochFrames
from ha.replication.log import MemberStore, ReplicatedLog
from ha.replication.progress import CloseReason, SlaveProgress
from ha.replication.statistics import SyncStateStatistics
from ha.replication.sync_state import SyncStateSet

if TYPE_CHECKING:
    from ha.replication.connection import HAConnection

logger = logging.getLogger(__name__)

PAST_RUNS_MAX = 16
"""Of each broker id so many processes are remembered that had it before."""


class Leadership:
    """One node's. Owned by its HAService; `lead`, `step_down` and `confirm_set` are for whoever keeps its role."""

    def __init__(
        self, log: ReplicatedLog, store: MemberStore, on_change: Callable[[], None], *, confirms_flushed: bool = False
    ) -> None:
        """`on_change` is called when more may be acknowledged by the set, or nothing any more.

        `confirms_flushed` (SYNC_FLUSH): of the log here only what is flushed counts as confirmed, as of the others'.
        """
        self._log = log
        self._held_here = log.flushed_offset if confirms_flushed else log.max_offset
        self._store = store
        self._on_change = on_change
        self._connections: dict[int, HAConnection] = {}
        self._run_ids: dict[int, int] = {}
        """Broker id -> the last run id that the agreement service told of it in this term"""
        self._past_run_ids: dict[int, deque[int]] = {}
        """Broker id -> those before it"""
        self._term_changed = trio.lowlevel.ParkingLot()
        self._reported = trio.lowlevel.ParkingLot()
        self.sync_state: SyncStateSet | None = None
        """The rules of the present term; None while this node does not lead"""
        self.wished_set: AsyncValue[frozenset[int] | None] = AsyncValue(None)
        """What the sync-state set should be instead, None if it is as it should be. A wish stands until `confirm_set`
        or the end of the term."""

    # For whoever keeps the role

    def lead(self, sync_state: SyncStateSet) -> None:
        """Be master for a term, whose epoch is the last one of the store's history; let its other members in."""
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
        """End the term: from now on nothing that a member says counts, and no put is acknowledged by the set."""
        self._held_here.unsubscribe(self._confirm)
        self.sync_state = None
        self.wished_set.value = None
        for connection in self._connections.values():
            connection.close(CloseReason.TERM_ENDED)
        self._connections.clear()
        self._run_ids.clear()
        self._past_run_ids.clear()
        self._on_change()
        self._term_changed.unpark_all()

    def confirm_set(self, members: Iterable[int]) -> None:
        """The agreement service holds `members`; nothing that was wished for before can come about any more."""
        if self.sync_state is None:
            return
        self.sync_state.confirm_set(frozenset(members))
        self.wished_set.value = None
        self._look()

    def set_live_members(self, members: Mapping[int, int]) -> None:
        """The agreement service knows these broker ids to live, and no others; each with its run id, 0 if not told."""
        if self.sync_state is None:
            return
        self.sync_state.set_live_members(frozenset(members))
        for broker_id, run_id in members.items():
            self._note_run(broker_id, run_id)
        self._look()
        self._term_changed.unpark_all()

    def _note_run(self, broker_id: int, run_id: int) -> None:
        """The process `run_id` has the id now: what another one acknowledges counts no more."""
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
        """Whether a process is not the one with this id. One never heard of may be newer than what is known."""
        if not run_id:
            return broker_id in self._run_ids
        return run_id != self._run_ids.get(broker_id) and run_id in self._past_run_ids.get(broker_id, ())

    async def wait_held(self, broker_id: int, offset: int) -> None:
        """Wait until that member has acknowledged the log up to `offset` in this term: it could go on with it."""
        while True:
            connection = self._connections.get(broker_id)
            if connection is not None and connection.progress.ack_offset >= offset:
                return
            await self._reported.park()

    # For the service

    @property
    def acknowledged_offset(self) -> int | None:
        """Up to where the set has acknowledged, -1 if it can't; None while this node does not lead."""
        return None if self.sync_state is None else self.sync_state.acknowledged(self._log.max_offset.value)

    def admit(self, connection: HAConnection, handshake: SlaveHandshake) -> EpochFrames | CloseReason:
        """Let a member in; return how to talk to it, or why not to."""
        state, broker_id, progress = self.sync_state, handshake.broker_id, connection.progress
        if state is None:
            return CloseReason.NOT_MASTER
        if broker_id == state.own_id:
            progress.close_detail = f"it says that it is broker {broker_id}, which this node is"
            return CloseReason.NO_MEMBER
        if self._is_other_run(broker_id, handshake.run_id):
            progress.close_detail = f"another process has broker id {broker_id}"
            return CloseReason.OTHER_RUN
        if broker_id in self._connections:
            self._connections[broker_id].close(CloseReason.REPLACED)
        self._connections[broker_id] = connection
        progress.broker_id, progress.identity = broker_id, f"broker {broker_id}"
        progress.run_id = handshake.run_id
        # Who begins with the last segment lacks what is before it, for good, and can't be master of that.
        can_join = not handshake.is_learner and not handshake.syncs_from_last_file
        state.connect(broker_id, trio.current_time(), can_join=can_join)
        logger.info("ha.member_connected peer=%s broker=%d epoch=%d", progress.peer, broker_id, state.epoch)
        return EpochFrames(self._log, self._store.epochs, state)

    def take_ack(self, progress: SlaveProgress) -> None:
        """A member reported."""
        state = self.sync_state
        if state is None or progress.broker_id is None or not self._is_current(progress):
            return
        state.report(progress.broker_id, progress.ack_offset, self._log.max_offset.value, trio.current_time())
        if self._reported:
            self._reported.unpark_all()
        if state.joining:
            self._look()
        else:
            self._confirm()
            self._on_change()

    def remove(self, connection: HAConnection) -> None:
        """A connection is over."""
        broker_id = connection.progress.broker_id
        if broker_id is None or not self._is_current(connection.progress):
            return
        del self._connections[broker_id]
        if self.sync_state is not None:
            self.sync_state.disconnect(broker_id)
            self._look()

    async def keep_set(self) -> None:
        """Look at the set when time alone may have changed what it should be; until cancelled."""
        while True:
            look_at = math.inf
            if self.sync_state is not None:
                self._look()
                look_at = self.sync_state.next_look_at(self._log.max_offset.value, trio.current_time())
            with trio.move_on_at(look_at):
                await self._term_changed.park()

    def statistics(self) -> SyncStateStatistics | None:
        """Return a snapshot; None while this node does not lead."""
        state = self.sync_state
        if state is None:
            return None
        return SyncStateStatistics(
            epoch=state.epoch,
            members=tuple(sorted(state.agreed)),
            wished=None if state.wished is None else tuple(sorted(state.wished)),
            confirm_offset=state.confirm_offset,
        )

    def _is_current(self, progress: SlaveProgress) -> bool:
        connection = self._connections.get(progress.broker_id or 0)
        return connection is not None and connection.progress is progress

    def _confirm(self) -> None:
        """Show consumers what is confirmed now."""
        state = self.sync_state
        if state is not None and state.advance(self._held_here.value):
            self._store.log.limit_dispatch(state.confirm_offset)

    def _look(self) -> None:
        """Wish for another set if need be, and do what follows from that, or from a change of it."""
        state = self.sync_state
        if state is None:
            return
        wish = state.wish(self._log.max_offset.value, trio.current_time())
        if wish != self.wished_set.value:
            logger.info("ha.sync_state_set_proposed set=%s agreed=%s", sorted(wish or ()), sorted(state.agreed))
            self.wished_set.value = wish
        self._confirm()
        self._on_change()
