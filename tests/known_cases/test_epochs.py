"""Histories of terms: a master that starts a second term, and terms without any byte in the log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import memory_stream_pair

from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.statistics import Condition
from tests.replication.members import MASTER, Member, lead

OPTIONS = HAOptions(start_from="first")


class Machine:
    """A member of a group whose leader the test chooses: its store, its service while it leads, its client."""

    def __init__(self, id_: int) -> None:
        self.id = id_
        self.member = Member()
        self.service = HAService(self.member.log, OPTIONS, member=self.member)
        self.client: HAClient | None = None
        self._following = trio.CancelScope()

    async def begin_term(self, epoch: int) -> None:
        """Becomes master, or starts another term as master, as `ha.node.member` does."""
        self.stop_following()
        await self.member.epochs.truncate_from(self.end)
        await self.member.epochs.append(epoch, self.end)
        lead(self.service, self.member)

    def step_down(self) -> None:
        assert self.service.leadership is not None
        self.service.leadership.step_down()

    @property
    def end(self) -> int:
        return self.member.log.max_offset.value

    def stop_following(self) -> None:
        self._following.cancel()
        self.client = None

    def follow(self, master: Machine, nursery: trio.Nursery) -> None:
        self.stop_following()
        self.step_down()
        self._following = trio.CancelScope()

        async def connect(address: str) -> trio.abc.Stream:
            ours, theirs = memory_stream_pair()
            nursery.start_soon(master.service.handle, theirs, f"10.0.0.{self.id}:40000")
            return ours

        client = self.client = HAClient(
            self.member.log, OPTIONS, connect, member=self.member, broker_id=MASTER + self.id
        )
        client.set_master(f"10.0.0.{master.id}:10912")

        async def run() -> None:
            with self._following:
                await client.run()

        nursery.start_soon(run)

    @property
    def condition(self) -> Condition | None:
        return None if self.client is None else self.client.statistics().condition


@asynccontextmanager
async def machines(count: int) -> AsyncIterator[tuple[list[Machine], trio.Nursery]]:
    async with trio.open_nursery() as nursery:
        yield [Machine(number) for number in range(1, count + 1)], nursery
        nursery.cancel_scope.cancel()


def check_equal(master: Machine, *others: Machine) -> None:
    for other in others:
        assert other.condition is Condition.CONNECTED, other.client and other.client.statistics()
        assert other.member.log.content == master.member.log.content
        assert other.member.history == master.member.history or not master.member.log.content


@pytest.mark.parametrize("writes", [True, False])
async def test_9689_master_that_follows_itself_keeps_replicating(writes: bool) -> None:
    """apache/rocketmq#9689: a new epoch started with the same master. Its connections continued with their old epoch;
    the history no longer had it, because no byte belonged to it, and replication stopped: "Failed to find epochEntry
    with epoch 13".

    In halog each term starts with new connections, and a frame's epoch is looked up by its physical offset.
    """
    async with machines(3) as ((master, *slaves), nursery):
        await master.begin_term(1)
        for slave in slaves:
            slave.follow(master, nursery)
        await trio.sleep(20)
        for epoch in range(2, 20):
            if writes or epoch == 12:
                master.member.log.put(b"%04d" % epoch * 10)
            await master.begin_term(epoch)
            if epoch % 3:
                master.member.log.put(b"at once")
            await trio.sleep(12 if epoch % 2 else 0.01)
        master.member.log.put(b"the last")
        await trio.sleep(20)
        check_equal(master, *slaves)
        assert master.member.history[-1][0] == 19
        assert master.service.acknowledged() == [master.end] * 2


@pytest.mark.parametrize("written", [b"", b"some bytes"])
async def test_9942_terms_without_bytes_do_not_make_logs_diverge(written: bytes) -> None:
    """apache/rocketmq#9942: in a group without messages three slaves were slow, one after the other, and missed terms.
    When the master was lost, the epoch files differed, and the former master could not follow the new one.

    In halog a term without any byte in the log is in no history, so a member that missed it lacks nothing.
    """
    async with machines(4) as (all_, nursery):
        first, *slaves = all_
        await first.begin_term(1)
        for slave in slaves:
            slave.follow(first, nursery)
        await trio.sleep(10)
        first.member.log.put(written)
        await trio.sleep(10)
        epoch = 1
        for slow in slaves:  # a minute, in which the others see two more terms
            slow.stop_following()
            for _ in range(2):
                epoch += 1
                await first.begin_term(epoch)
                await trio.sleep(30)
            slow.follow(first, nursery)
            await trio.sleep(1)  # it is hardly back when the next one is slow
        for heir in reversed(slaves):  # each is master once; its predecessor follows it
            epoch += 1
            await heir.begin_term(epoch)
            for other in all_:
                if other is not heir:
                    other.follow(heir, nursery)
            await trio.sleep(20)
            check_equal(heir, *(other for other in all_ if other is not heir))
        heir.member.log.put(b"more")
        await trio.sleep(20)
        check_equal(heir, *(other for other in all_ if other is not heir))
        with pytest.raises(ValueError, match="can't follow"):  # a term has to leave a byte, or is dropped first
            await heir.member.epochs.append(epoch + 1, heir.member.history[-1][1])
        assert all(machine.member.cuts == [] for machine in all_)
        assert heir.member.log.content == written + b"more"
        assert all(machine.member.history == heir.member.history for machine in all_)
