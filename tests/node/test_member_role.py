"""What a change of role does to a member's store, set and standing; its front and its link to a master stand still."""

import errno
import os
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio_util import AsyncValue

from ha.broker.standing import Standing
from ha.config import Config
from ha.errors import DamagedBytes, DiskFull
from ha.failover.lease import LeaseDeadline, MasterLease
from ha.failover.role import Term
from ha.node.member import NodeRole
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.statistics import HAClientState
from ha.store.message_store import MessageStore
from tests.store.stores import message, open_small


class Link:
    """To a master: there is none."""

    state = AsyncValue(HAClientState.READY)

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def adopt_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def set_master(self, address: str | None, *, origin: str = "", reads_run_ids: bool = False) -> None:
        pass

    def note_caught_up(self) -> None:
        pass


class Front:
    """Admits what its standing says."""

    slave_sync = None

    def __init__(self) -> None:
        self.standing = Standing("b0", 1, is_slave=True, is_elected=True)
        self.reads_tables_s = 0.0

    async def become_master(self, epoch: int, acknowledges_until: float) -> bool:
        await trio.sleep(self.reads_tables_s)
        self.standing.become_master(epoch, acknowledges_until)
        return True

    async def become_slave(self, epoch: int, reason: str = "") -> None:
        self.standing.become_slave(epoch, reason)


class Node:
    master_addresses = None

    def __init__(self, store: MessageStore) -> None:
        self.config = Config(
            etcd_endpoints="http://e:2379",
            broker_name="b0",
            name_server_addresses="n:1",
            broker_role="SYNC_MASTER",
            broker_id=1,
        )
        self.store, self.broker, self.ha_client = store, Front(), Link()
        self.ha_service = HAService(store.log, HAOptions(), member=store)


async def test_a_term_begins_with_what_was_confirmed_and_leaves_nothing_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_small() as other:
        results = [(await other.log.put([message(number)]))[0] for number in range(10)]
        log = bytes(await other.log.read(0, other.log.max_offset.value))
    async with open_small(is_slave=True, dispatch_confirmed=True) as store:
        node = Node(store)
        role = NodeRole(cast("Any", node))
        await store.epochs.append(4, 0)
        await store.log.append_raw(0, log)
        store.log.limit_dispatch(results[5].physical_offset)
        lease = LeaseDeadline()
        lease.renewed(trio.current_time(), 2.0)
        await role.become_master(Term(epoch=5, sync_state_set=frozenset({1, 2}), lease=MasterLease(lease)))
        assert store.log.dispatch_limit.value == results[5].physical_offset
        assert [(entry.epoch, entry.start_offset) for entry in store.epochs.entries] == [(4, 0), (5, len(log))]
        role.hold_puts()
        assert node.broker.standing.why_not_stored()
        role.release_puts()
        assert not node.broker.standing.why_not_stored()
        await role.become_slave(6, None)
        leadership = node.ha_service.leadership
        assert leadership is not None
        assert leadership.sync_state is None
        assert store.log.is_slave
        assert (node.broker.standing.is_slave, node.broker.standing.epoch) == (True, 6)
        assert node.ha_client.epochs == [6]


async def test_a_lease_that_is_renewed_during_the_promotion_counts(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    async with open_small(is_slave=True, dispatch_confirmed=True) as store:
        node = Node(store)
        node.broker.reads_tables_s = 2.0
        lease = LeaseDeadline()
        lease.renewed(trio.current_time(), 2.0)
        term = Term(epoch=1, sync_state_set=frozenset({1}), lease=MasterLease(lease))

        async def renew() -> None:
            await trio.sleep(1.0)
            lease.renewed(trio.current_time(), 2.0)

        nursery.start_soon(renew)
        await NodeRole(cast("Any", node)).become_master(term)
        assert term.lease.is_held
        assert not node.broker.standing.why_not_stored()


@pytest.mark.parametrize(
    ("code", "raised", "text"),
    [(errno.EMFILE, DiskFull, "too many files are open"), (errno.EIO, DamagedBytes, "Input/output error")],
)
async def test_a_promotion_that_the_disk_refused_can_be_repeated(
    code: int,
    raised: type[Exception],
    text: str,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read_undispatched(log: object, begin: int) -> None:
        raise OSError(code, os.strerror(code))

    async with open_small(is_slave=True, dispatch_confirmed=True) as store:
        node = Node(store)
        role = NodeRole(cast("Any", node))
        lease = LeaseDeadline()
        lease.renewed(trio.current_time(), 60.0)
        with monkeypatch.context() as busy:
            busy.setattr("ha.store.message_store.read_undispatched", read_undispatched)
            with pytest.raises(raised, match=text):
                await role.become_master(Term(epoch=1, sync_state_set=frozenset({1}), lease=MasterLease(lease)))
        await role.become_slave(1, None)
        assert store.log.is_slave
        await role.become_master(Term(epoch=2, sync_state_set=frozenset({1}), lease=MasterLease(lease)))
        assert [(entry.epoch, entry.start_offset) for entry in store.epochs.entries] == [(2, 0)]


async def test_a_promotion_can_be_repeated_after_the_tables_could_not_be_read(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sector of the log could not be read for a moment, and the node ended."""

    async def become_master(epoch: int, acknowledges_until: float) -> bool:
        raise DamagedBytes(0, 4096, "the disk can't read it")

    async with open_small(is_slave=True, dispatch_confirmed=True) as store:
        node = Node(store)
        role = NodeRole(cast("Any", node))
        lease = LeaseDeadline()
        lease.renewed(trio.current_time(), 60.0)
        with monkeypatch.context() as unreadable:
            unreadable.setattr(node.broker, "become_master", become_master)
            with pytest.raises(DamagedBytes):
                await role.become_master(Term(epoch=1, sync_state_set=frozenset({1}), lease=MasterLease(lease)))
        assert node.broker.standing.is_slave
        await role.become_slave(1, None)
        assert store.log.is_slave
        await role.become_master(Term(epoch=2, sync_state_set=frozenset({1}), lease=MasterLease(lease)))
        assert not node.broker.standing.why_not_stored()
