"""Each put that is not answered PUT_OK is counted by status and cause, said in the log, and explained in its remark."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from ha.broker.options import BrokerRole, ReplicaPolicy
from ha.broker.put_request import PutRequest
from ha.causes import Cause
from ha.protocol.codes import PutStatus
from ha.replication.group_transfer import GroupTransfer
from ha.replication.options import HAOptions
from tests.broker.node import Node, StalledSync, open_node
from tests.broker.test_put import fill, message, put, slave_of
from tests.broker.test_terms import leading, member, put_later
from tests.store.disks import run_inline

SYNC = {"role": BrokerRole.SYNC_MASTER}
ALONE, UNKNOWN, UNFLUSHED = (
    PutStatus.SLAVE_NOT_AVAILABLE,
    PutStatus.FLUSH_SLAVE_TIMEOUT,
    PutStatus.FLUSH_DISK_TIMEOUT,
)

Open = Callable[..., AbstractAsyncContextManager[Node]]


@pytest.fixture
async def opened(tmp_path: Path, autojump_clock: object, caplog: pytest.LogCaptureFixture) -> Open:
    """Opens a node with one message in its log, so that a slave's report is not 0."""
    caplog.set_level(logging.WARNING, "ha.broker.explained")

    @asynccontextmanager
    async def open_seeded(**changes: Any) -> AsyncIterator[Node]:
        async with open_node(tmp_path, **changes) as node:
            await node.store.log.put([message(b"first")])
            yield node

    return open_seeded


def counted(node: Node) -> dict[tuple[PutStatus, Cause], int]:
    return dict(node.broker.put_service.acknowledgements.explained.counts)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ha.broker.explained"]


async def test_no_slave_said_once_a_minute_with_how_many_puts(
    opened: Open, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(**SYNC) as node:
        await put(node, message(), message())
        await put(node, message())
        assert counted(node) == {(ALONE, Cause.NO_SLAVE_CONNECTED): 3}
        await trio.sleep(60)
        await put(node, message())
        assert lines(caplog) == [
            f"put.not_ok status=SLAVE_NOT_AVAILABLE cause=no_slave_connected puts={puts} remark='no slave is connected'"
            for puts in (2, 2)
        ]


async def test_a_slave_that_says_nothing(opened: Open, autojump_clock: object) -> None:
    async with opened(**SYNC) as node, trio.open_nursery() as nursery:
        ours, theirs = memory_stream_pair()
        nursery.start_soon(node.ha.handle, theirs, "10.0.0.2:5555")
        await wait_all_tasks_blocked()
        await put(node)
        assert counted(node) == {(ALONE, Cause.NOT_REPORTED): 1}
        await ours.aclose()


async def test_a_slave_too_far_behind(opened: Open, autojump_clock: object) -> None:
    async with opened(**SYNC, ha_options=HAOptions(fall_behind_max_bytes=4096)) as node, slave_of(node):
        _, _, remark = await put(node, message(bytes(5000)))
        assert counted(node) == {(ALONE, Cause.SLAVES_BEHIND): 1}
        assert "bytes behind, 4096 or more is too far" in remark
        assert "bytes/s" not in remark
        await trio.sleep(1.5)  # into the window after the one in which it was sent that
        _, _, remark = await put(node)
        assert "bytes/s it would have them in 1 s" in remark


async def test_a_slave_that_acknowledges_too_late(opened: Open, autojump_clock: object) -> None:
    async with opened(**SYNC) as node, slave_of(node):
        _, _, remark = await put(node)
        assert counted(node) == {(UNKNOWN, Cause.ACK_LATE): 1}
        assert "the slaves have acknowledged up to physical offset" in remark


async def test_a_slow_slave_is_not_excused_by_a_stranger(opened: Open, autojump_clock: object) -> None:
    """Of two connections one says nothing: the put waited for the other."""
    async with opened(**SYNC) as node, slave_of(node), trio.open_nursery() as nursery:
        ours, theirs = memory_stream_pair()
        nursery.start_soon(node.ha.handle, theirs, "10.0.0.3:5555")
        await wait_all_tasks_blocked()
        _, _, remark = await put(node)
        assert counted(node) == {(UNKNOWN, Cause.ACK_LATE): 1}
        assert remark.endswith("; 1 connected, not yet reported an offset")
        await ours.aclose()


async def test_more_slaves_wanted_than_there_are(opened: Open, autojump_clock: object) -> None:
    policy = ReplicaPolicy(in_sync_replicas=3)
    async with opened(**SYNC, replica_policy=policy) as node, slave_of(node):
        _, _, remark = await put(node)
        assert counted(node) == {(UNKNOWN, Cause.TOO_FEW_SLAVES): 1}
        assert remark.endswith("1 slaves are there, inSyncReplicas asks for 2")


async def test_too_few_in_sync_to_store_anything(opened: Open, autojump_clock: object) -> None:
    policy = ReplicaPolicy(in_sync_replicas=3, min_in_sync_replicas=3)
    async with opened(**SYNC, replica_policy=policy) as node:
        await put(node)
        async with slave_of(node):
            await put(node)
        refused = PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH
        assert counted(node) == {(refused, Cause.NO_SLAVE_CONNECTED): 1, (refused, Cause.TOO_FEW_SLAVES): 1}


async def test_no_room_among_those_that_wait(opened: Open, autojump_clock: object) -> None:
    options = HAOptions(waiting_request_count_max=1)
    async with opened(**SYNC, ha_options=options) as node, slave_of(node), trio.open_nursery() as nursery:
        found = await put_later(node, nursery)
        statuses, took_s, remark = await put(node)
        assert (statuses, took_s) == ([UNKNOWN], 0.0)
        assert remark.endswith("1 puts wait for slaves, more than that are not let in")
        assert counted(node) == {(UNKNOWN, Cause.TOO_MANY_WAIT): 1}
        await trio.sleep(3.1)
        assert found["statuses"] == [UNKNOWN]
        assert counted(node)[UNKNOWN, Cause.ACK_LATE] == 1


async def test_replication_that_stops(opened: Open, autojump_clock: object, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = trio.CancelScope()
    run = GroupTransfer.run

    async def run_in_scope(transfer: GroupTransfer) -> None:
        with scope:
            await run(transfer)

    monkeypatch.setattr(GroupTransfer, "run", run_in_scope)
    async with opened(**SYNC) as node, slave_of(node), trio.open_nursery() as nursery:
        found = await put_later(node, nursery)
        scope.cancel()
        await wait_all_tasks_blocked()
        assert (found["statuses"], found["took_s"]) == ([UNKNOWN], 0.0)
        assert found["remark"].endswith("this broker stops")
        assert counted(node) == {(UNKNOWN, Cause.STOPPING): 1}


async def test_a_slow_disk(opened: Open, autojump_clock: object) -> None:
    stalled = StalledSync()
    async with opened(flush_sync=True, run_blocking=stalled) as node:
        await trio.sleep(1)
        stalled.stall_s = 6
        _, _, remark = await put(node)
        assert counted(node) == {(UNFLUSHED, Cause.DISK_SLOW): 1}
        assert remark.endswith("within 5 s")
        stalled.stall_s = 0
        assert node.store.flusher.sync_times.sum_s == 0.0, "the slow one is not over"
        await trio.sleep(2)
        assert node.store.flusher.sync_times.sum_s == 6.0


async def test_a_failed_disk(tmp_path: Path, autojump_clock: object) -> None:
    is_broken = False

    async def run(call: Callable[..., Any], *arguments: Any) -> Any:
        if is_broken and getattr(call, "__name__", "") == "sync":
            raise OSError(5, "Input/output error")
        return await run_inline(call, *arguments)

    request = PutRequest(messages=(message(),))
    with pytest.raises(BaseExceptionGroup):  # noqa: PT012
        async with open_node(tmp_path, flush_sync=True, run_blocking=run) as node:
            await put(node)
            is_broken = True
            await node.broker.put_service.settle([request])
    assert request.status is UNFLUSHED
    assert "Input/output error" in request.remark
    assert counted(node) == {(UNFLUSHED, Cause.DISK_FAILED): 1}


async def test_both_at_once_count_once_for_the_slave(opened: Open, autojump_clock: object) -> None:
    async with opened(**SYNC, flush_sync=True) as node:
        await put(node)
        assert counted(node) == {(ALONE, Cause.NO_SLAVE_CONNECTED): 1}


async def test_a_slave_that_may_not_store(tmp_path: Path, autojump_clock: object) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        await put(node)
        assert counted(node) == {(PutStatus.SERVICE_NOT_AVAILABLE, Cause.NOT_MASTER): 1}
        await node.send()
        assert node.broker.sender.not_master_count == 1


async def test_a_former_master(tmp_path: Path, autojump_clock: object) -> None:
    async with member(tmp_path, **SYNC) as node, slave_of(node), trio.open_nursery() as nursery:
        await node.broker.become_master(1)
        await put_later(node, nursery, message(b"a"), message(b"b"))
        await node.broker.become_slave(1)
        assert counted(node) == {(UNKNOWN, Cause.STEPPED_DOWN): 2}


async def test_members_of_the_set(tmp_path: Path, autojump_clock: object) -> None:
    async with leading(tmp_path, 2, 3) as (node, sides):
        await put(node)
        assert counted(node) == {(UNKNOWN, Cause.MEMBER_LATE): 1}
        await sides[3].stream.aclose()
        await wait_all_tasks_blocked()
        await put(node)
        assert counted(node)[UNKNOWN, Cause.MEMBER_AWAY] == 1, "one is late and one is away"


async def test_where_the_channel_is_full(opened: Open, autojump_clock: object) -> None:
    """A put that is cancelled there is nobody's, but it is counted."""
    async with opened(**SYNC) as node, slave_of(node):
        fill(node.ha.group_transfer.submit_channel)
        with trio.CancelScope() as scope:
            scope.cancel()
            await node.broker.put_service.settle([PutRequest(messages=(message(),))])
        assert sum(counted(node).values()) == 1
