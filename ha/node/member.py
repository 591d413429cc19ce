"""Applies the role changes that `ha.failover` decides to the store, replication and broker of a member.

All parts stay open: the store, the HA port (which accepts slaves only while this node is master), the link to the
master, and the broker (which accepts puts only while this node is master). A change of role is a sequence of steps in
an order that prevents logs from diverging:

    to master    stop the link, so that the log no longer grows → the store accepts puts → the epoch is durable in the
                 history → the HA port accepts members, and the sync-state set is in effect → the broker rebuilds its
                 tables and accepts puts
    to slave     the broker stops accepting and acknowledging, and the sync-state set is dropped (in one step of the
                 event loop) → pending appends complete → the store accepts a master's bytes → the link follows the new
                 master
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import trio

from ha.broker.registration import MasterAddresses
from ha.config import SecretStr
from ha.errors import DamagedBytes, DiskFailed, DiskFull
from ha.failover.agreement import MasterRecord
from ha.failover.durable_state import DurableState, StartConditions
from ha.failover.member import Member, open_member
from ha.failover.role import LogPosition, Term
from ha.failover.switchover import SwitchOutcome
from ha.replication.statistics import HAClientState
from ha.replication.sync_state import SyncStateSet
from ha.store.files import is_passing, is_unreadable

from . import options as make
from .node import NOT_JOINED, Node

logger = logging.getLogger(__name__)

LEAVE_SHARE = 0.3
"""Share (0 to 1) of shutdownTimeout for handing over the master role and ending the lease."""

STATE_FILE = "memberstate"
"""Name of the file with the member's durable state, in the store's directory."""
STATE_RETRY_S = 1.0
"""Interval in seconds between attempts to write the state while the disk is full or too many files are open."""

FROM_GROUP_RECORD = "from the group's record"
SWITCHING = "the group is switching to another master; send again"


class NodeStateFile:
    """Implements `ha.failover.durable_state.StateFile` with a file in the store's directory."""

    def __init__(self, node: Node) -> None:
        self._path = node.config.root / STATE_FILE
        self._disk = node.platform.disk
        self._run_blocking = node.platform.run_blocking

    async def read(self) -> bytes | None:
        try:
            content: bytes | None = await self._run_blocking(self._read)
        except OSError as error:
            raise DiskFailed(self._path, "read", str(error)) from error
        return content

    async def write(self, content: bytes) -> None:
        while True:
            try:
                await self._run_blocking(self._replace, content)
            except OSError as error:
                if not is_passing(error):
                    raise DiskFailed(self._path, "write", str(error)) from error
                logger.warning("member.state_write_failed file=%s reason=%r", self._path, str(error))
                await trio.sleep(STATE_RETRY_S)
            else:
                return

    def _read(self) -> bytes | None:
        return self._disk.read_bytes(self._path) if self._disk.exists(self._path) else None

    def _replace(self, content: bytes) -> None:
        fresh = self._path.with_name(self._path.name + ".fresh")
        self._disk.write_bytes(fresh, content)
        self._disk.rename(fresh, self._path)


class NodeRole:
    """Implements `ha.failover.role.Role` for a node."""

    def __init__(self, node: Node) -> None:
        assert node.ha_client is not None
        assert node.ha_service.leadership is not None
        self._node = node
        self._client = node.ha_client
        self._leadership = node.ha_service.leadership
        self._is_promoted = False
        """Whether `become_master` was called since the last `become_slave`; the next `become_slave` then undoes its
        steps."""

    @property
    def position(self) -> LogPosition:
        store = self._node.store
        last = store.epochs.last
        return LogPosition(0 if last is None else last.epoch, store.log.max_offset.value)

    async def become_master(self, term: Term) -> None:
        node, store = self._node, self._node.store
        self._is_promoted = True
        node.master_addresses = None
        await self._unfollow()
        try:
            await store.become_master()
        except OSError as error:
            if is_passing(error):
                raise DiskFull(node.config.root, 0, error) from error
            if is_unreadable(error):
                log = store.log
                raise DamagedBytes(log.dispatched_offset.value, log.max_offset.value, str(error)) from error
            raise
        end = store.log.max_offset.value
        await store.epochs.truncate_from(end)  # removes terms without any bytes
        await store.epochs.append(term.epoch, end)
        self._client.note_caught_up()
        self._leadership.lead(
            SyncStateSet(
                node.config.broker_id,
                term.sync_state_set,
                epoch=term.epoch,
                epoch_start=end,
                confirm_offset=min(store.log.dispatch_limit.value, end),
                now=trio.current_time(),
                rules=make.sync_state_rules(node.config),
            )
        )
        term.lease.on_change(node.broker.standing.extend)
        await self._promote_broker(term)
        logger.info(
            "member.became_master epoch=%d start=%d sync_state_set=%s", term.epoch, end, sorted(term.sync_state_set)
        )

    async def _promote_broker(self, term: Term) -> None:
        """Makes the broker master. Cancellation does not interrupt the change, but reverts it, as DamagedBytes does."""
        broker = self._node.broker

        async def revert_if_cancelled() -> None:
            try:
                await trio.sleep_forever()
            finally:
                if not is_done:
                    with trio.CancelScope(shield=True):
                        await broker.become_slave(term.epoch, "its term ended before it started")

        is_done = False
        damaged: DamagedBytes | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(revert_if_cancelled)
            with trio.CancelScope(shield=True):
                try:
                    await broker.become_master(term.epoch, term.lease.until)
                except DamagedBytes as error:
                    damaged = error
                else:
                    broker.standing.extend(term.lease.until)  # it may have changed while the tables were read
                    is_done = True
            nursery.cancel_scope.cancel()
        if damaged is not None:
            raise damaged

    async def become_slave(self, epoch: int, master: MasterRecord | None) -> None:
        node = self._node
        standing = node.broker.standing
        epoch = max(epoch, standing.epoch)
        self._client.adopt_epoch(epoch)
        if self._is_promoted or epoch != standing.epoch:
            self._leadership.step_down()
            await node.broker.become_slave(epoch)
            node.store.become_slave()
            self._is_promoted = False
        known = None if master is None else MasterAddresses(master.broker_address, master.ha_address)
        if known is None:
            await self._unfollow()
        else:
            assert master is not None
            self._client.set_master(master.ha_address, origin=FROM_GROUP_RECORD, reads_run_ids=master.reads_run_ids)
        if known != node.master_addresses:
            node.master_addresses = known
            if node.broker.slave_sync is not None:
                node.broker.slave_sync.sync_soon()

    async def _unfollow(self) -> None:
        """Stops following the master. After the return, none of its bytes are appended."""
        self._client.set_master(None)
        await self._client.state.wait_value(lambda state: state is not HAClientState.TRANSFER)

    async def wait_caught_up(self) -> None:
        await self._client.has_caught_up.wait()

    async def wait_wanted_set(self) -> frozenset[int]:
        wanted: frozenset[int] = await self._leadership.proposed_set.wait_value(lambda proposed: proposed is not None)
        return wanted

    def set_live_members(self, members: Mapping[int, int]) -> None:
        self._leadership.set_live_members(members)

    def confirm_set(self, sync_state_set: frozenset[int]) -> None:
        self._leadership.confirm_set(sync_state_set)

    def hold_puts(self) -> None:
        self._node.broker.standing.stop_storing(SWITCHING)

    async def wait_replicated_to(self, broker_id: int) -> None:
        puts = self._node.broker.put_service
        await puts.wait_appended()
        await self._leadership.wait_held(broker_id, self._node.store.log.max_offset.value)
        await puts.acknowledgements.wait_all_answered()

    def release_puts(self) -> None:
        self._node.broker.standing.store_again()


@asynccontextmanager
async def open_membership(node: Node, etcd_password: SecretStr | None) -> AsyncIterator[Member]:
    """Makes the node a member of its group during the block. Store, replication and broker must be open before the
    block begins and stay open until it has ended. Raises ConfigError if httpx is not installed, DiskFailed if the
    member's state can't be read or written."""
    config = node.config
    async with node.platform.open_agreement(config, etcd_password, node.tls.etcd_context) as agreement:
        options = make.member_options(config, node.ha_address, node.remoting_address, node.run_id)
        leave_timeout_s = config.shutdown_timeout_ms / 1000 * LEAVE_SHARE
        state, store = DurableState(NodeStateFile(node)), node.store.statistics()
        await state.begin(
            StartConditions(
                boot_id=await node.platform.run_blocking(node.platform.boot_id),
                flushes_first=config.flush_mode == "SYNC_FLUSH",
                was_stopped_cleanly=store.recovered_clean,
                is_empty=not store.max_offset and node.store.epochs.last is None,
                has_term=node.store.epochs.last is not None,
                is_shorter=node.store.recovery.is_shorter,
                member=f"{config.cluster_name}/{config.broker_name}/{config.broker_id}",
            )
        )
        async with open_member(agreement, NodeRole(node), options, state, leave_timeout_s=leave_timeout_s) as member:
            node.member = member
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_register_by_id, node, member)
                yield member
                nursery.cancel_scope.cancel()


async def _register_by_id(node: Node, member: Member) -> None:
    """Registers again at name servers when the member gains or loses its broker ID. See `Node.not_registered`."""
    async for _ in member.keeper.broker_id.eventual_values():
        node.registration.topics_changed()


async def wait_role(member: Member) -> None:
    """Waits until the member serves as master, or has a master to follow."""
    await member.progress.changed.wait_value(lambda now: now[1] is not None)


def describe_member(member: Member) -> Mapping[str, object]:
    """Returns the member's state and view of its group for the status page."""
    progress, view = member.progress, member.known.view
    group = None if view is None else view.group
    switch = None if view is None else view.switch
    held, taken = member.keeper.held.value, member.keeper.broker_id.value.taken
    return {
        "state": progress.state.value,
        "epoch": progress.epoch,
        "master_id": progress.master_id,
        "reason": progress.reason,
        "is_complete": member.state.is_complete,
        "group_record": None if group is None else msgspec.to_builtins(group),
        "known_group_record": msgspec.to_builtins(member.state.group),
        "state_age_s": round(trio.current_time() - progress.since, 3),
        "lease_remaining_s": None if held is None else round(held.deadline.remaining_s, 3),
        "lease_ttl_s": None if held is None else held.lease.ttl_s,
        "id_taken_by": None if taken is None else taken.holder.broker_address,
        "agreement_fault": member.keeper.last_error or member.known.last_error,
        "sync_state_set": None if group is None else sorted(group.sync_state_set),
        "members": [] if view is None else sorted(view.members),
        "switch": None if switch is None else msgspec.to_builtins(switch),
    }


async def switch_master(node: Node, to: int | None, reason: str, wait_s: float) -> Mapping[str, object]:
    """Switches the group to another master (see `SwitchoverRequests.request`), and returns the outcome. Used by the
    admin port."""
    if node.member is None:
        outcome = SwitchOutcome(is_done=False, master_id=None, epoch=0, seconds=0.0, why_not=NOT_JOINED)
    else:
        outcome = await node.member.switches.request(to, reason, wait_s=wait_s)
    found: Mapping[str, object] = msgspec.to_builtins(outcome)
    return found
