"""Two slaves that are slow at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.options import BrokerRole
from ha.protocol.codes import PutStatus, ResponseCode
from ha.replication.group_transfer import SYNC_STATE_SET, AckRequest
from ha.replication.ha_service import HAService
from ha.replication.options import TICK_S, HAOptions
from ha.replication.sync_state import SyncStateRules
from tests.broker.node import open_node
from tests.replication.members import MASTER, OTHER, SLAVE, Member, MemberSide, leading
from tests.replication.slave_side import SlaveSide

THIRD = 4
TIMEOUT_S = 3.0


async def test_9897_each_put_waits_exactly_its_timeout_for_slow_slaves(tmp_path: Path) -> None:
    """apache/rocketmq#9897: with two of three slaves slow for a minute, producers got FLUSH_SLAVE_TIMEOUT for much
    longer than the 20 s after which the two should have been removed.

    In halog each put has its own deadline, regardless of the number of slow slaves and waiting puts.
    """
    async with (
        open_node(tmp_path, role=BrokerRole.SYNC_MASTER, ha_options=HAOptions(), slave_timeout_s=TIMEOUT_S) as node,
        trio.open_nursery() as nursery,
    ):
        await node.send()
        for number in (2, 3):
            slave = SlaveSide(node.ha, f"10.0.0.{number}:40000")
            slave.start(nursery)
            await slave.report(node.store.log.max_offset.value)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        waits: list[tuple[float, float, int]] = []

        async def send(at: float) -> None:
            await trio.sleep_until(began + at)
            answer = await node.send()
            waits.append((at, round(trio.current_time() - began - at, 6), answer.code))

        async with trio.open_nursery() as sends:
            moments = [number * 0.4 for number in range(30)]
            for at in moments:
                sends.start_soon(send, at)
        assert sorted(waits) == [(at, TIMEOUT_S, ResponseCode.FLUSH_SLAVE_TIMEOUT) for at in moments]
        nursery.cancel_scope.cancel()


class Outcome:
    """When a put that waits for the sync-state set was answered, and with which status."""

    def __init__(self, service: HAService, end: int) -> None:
        self.status: PutStatus | None = None
        self.at = 0.0
        service.group_transfer.submit_nowait([AckRequest(end, SYNC_STATE_SET, trio.current_time() + 60, self._done)])

    def _done(self, status: PutStatus) -> None:
        self.status, self.at = status, trio.current_time()


@pytest.mark.parametrize("apart_s", [0.0, 0.001, 0.5])
@pytest.mark.parametrize("are_lost", [True, False], ids=["lost", "silent"])
async def test_9897_two_slow_members_both_leave_the_sync_state_set(are_lost: bool, apart_s: float) -> None:
    """In controller mode the master removed slaves whose connections it closed from its set, each starting from the set
    it had read before: of two simultaneous removals one was undone, and every put kept waiting for that slave.

    In halog the wanted set is computed from the current members at once, and again after each answer of the agreement
    service. Both slaves are out after haMaxTimeSlaveNotCatchup (at once if their connections are lost), whatever is in
    flight, and the put is acknowledged by the remaining members.
    """
    rules = SyncStateRules(not_catch_up_s_max=5.0)
    member = await Member(bytes(1000)).begin((1, 0))
    service = leading(member, SLAVE, OTHER, THIRD, rules=rules)
    leadership = service.leadership
    assert leadership is not None
    agreed: list[tuple[float, frozenset[int]]] = []

    async def agree() -> None:
        """The agreement service takes 100 ms for each change."""
        while True:
            wanted = await leadership.proposed_set.wait_value(lambda proposed: proposed is not None)
            assert wanted is not None
            await trio.sleep(0.1)
            agreed.append((trio.current_time(), wanted))
            leadership.confirm_set(wanted)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.group_transfer.run)
        nursery.start_soon(leadership.keep_set)
        nursery.start_soon(agree)
        sides = {}
        for id_ in (SLAVE, OTHER, THIRD):
            side = sides[id_] = MemberSide(service, id_)
            side.start(nursery)
            await side.greet()
            await side.report(1000)
        await wait_all_tasks_blocked()

        member.log.put(b"x" * 10)
        began = trio.current_time()
        put = Outcome(service, 1010)
        await sides[SLAVE].report(1010)
        if are_lost:
            await sides[OTHER].stream.aclose()
            await trio.sleep(apart_s)
            await sides[THIRD].stream.aclose()
        await trio.sleep(10)
        assert put.status is PutStatus.PUT_OK
        assert agreed[-1] == (put.at, frozenset({MASTER, SLAVE}))
        latest = apart_s + 0.1 + 0.1 if are_lost else rules.not_catch_up_s_max + TICK_S + 0.1
        assert put.at - began == pytest.approx(latest, abs=0.11 if are_lost else 0.002)
        nursery.cancel_scope.cancel()
