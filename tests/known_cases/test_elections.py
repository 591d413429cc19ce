"""Detection of failed masters, and false positives."""

from __future__ import annotations

import pytest
import trio

from tests.failover.group import Group, Node, open_group, until

LEASE_S = 2.0
"""Lease time of the members of `tests.failover.group`; a lease ends up to half a second late there."""
REPLACED_S = LEASE_S + 1.0
QUIET_S = (0.0, 30.0)
"""Time without any event before the master is lost"""


async def three(group: Group) -> Node:
    """Waits until all of three members are in the set; returns the master."""
    await group.settle()
    await group.in_set(1, 2, 3)
    return await group.wait_master()


@pytest.mark.parametrize("quiet_s", QUIET_S)
async def test_10875_failed_master_is_replaced_every_time(quiet_s: float) -> None:
    """apache/rocketmq#10875, #9717 (and #10416): the JRaft controller checked whether a broker was *not* active where
    it meant active, and never started its scan for inactive brokers: a dead master stayed the master.

    Halog needs no scan: the master's key ends with its lease, and the members watching it elect another master, after
    any time and any number of times.
    """
    async with open_group(1, 2, 3) as group:
        await three(group)
        for round_ in range(6):
            await trio.sleep(quiet_s)
            lost = await group.wait_master()
            lost.kill()
            lost_at = trio.current_time()
            heir = await group.wait_master(other_than=lost.id)
            assert trio.current_time() - lost_at < REPLACED_S, round_
            assert heir.role.term is not None
            assert heir.role.term.epoch == len(group.masters) == round_ + 2
            group.restart(lost.id)
            await group.settle()
            heir.role.want(1, 2, 3)
            await until(lambda heir=heir: heir.role.confirmed == {1, 2, 3})  # type: ignore[misc]


async def test_10875_master_cut_off_from_etcd_is_replaced() -> None:
    """The same for a master that runs and is connected to everything else: only its lease counts."""
    async with open_group(1, 2, 3) as group:
        master = await three(group)
        master.way.cut(True)
        cut_at = trio.current_time()
        heir = await group.wait_master(other_than=master.id)
        assert trio.current_time() - cut_at < REPLACED_S
        assert not master.may_acknowledge
        master.way.cut(False)
        await group.settle()
        assert master.role.following == heir.id


@pytest.mark.parametrize("how", ["killed", "cut off", "restarted"])
async def test_8380_loss_of_a_follower_causes_no_election(how: str) -> None:
    """apache/rocketmq#8380: the JRaft controller held an election for a broker set as soon as any broker of it was
    inactive, although its master was active.

    In halog only the loss of the master's key causes an election: the term continues while followers are lost one after
    the other.
    """
    async with open_group(1, 2, 3) as group:
        master = await three(group)
        term = group.masters[-1]
        for id_ in (1, 2, 3):
            if id_ == master.id:
                continue
            node = group.nodes[id_]
            if how == "cut off":
                node.way.cut(True)
            else:
                node.kill()
            if how == "restarted":
                await trio.sleep(0.2)
                group.restart(id_)
            await trio.sleep(30)
            assert group.masters == [term]
            assert master.may_acknowledge
            assert master.member.progress.state.name == "MASTER"
