"""Load balancers and monitors that check whether the HA port is open."""

import gc
import os
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.poller import open_poller
from ha.replication.connection import HAConnection
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.progress import CloseReason, SlaveState
from tests.replication.memory_log import MemoryLog
from tests.replication.slave_side import SlaveSide

CHECK_COUNT, SILENT_COUNT = 1000, 300
LOG = bytes(5000)


def close_at_once(check: socket.socket) -> None:
    check.close()


def reset(check: socket.socket) -> None:
    check.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    check.close()


def write_the_time(check: socket.socket) -> None:
    """As the script in the issue does."""
    check.sendall(b"2024-10-30 11:00:00")
    check.close()


def held() -> dict[str, int]:
    """The resources that connections use in this process."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "connections": sum(isinstance(each, HAConnection) for each in gc.get_objects()),
    }


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[HAService, int]]:
    """A master's HA service on a loopback port, with a socket poller, as in a node."""
    async with open_poller() as poller, trio.open_nursery() as nursery:
        service = HAService(MemoryLog(LOG), HAOptions(), poller=poller)
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        await nursery.start(service.serve, listeners)
        yield service, port
        nursery.cancel_scope.cancel()


@pytest.mark.real_time
@pytest.mark.parametrize("end", [close_at_once, reset, write_the_time])
async def test_8875_immediately_closed_connections_leave_no_state(end: Callable[[socket.socket], None]) -> None:
    """apache/rocketmq#8875: HAConnection started its threads before it was added to the list of connections; one that
    failed at once was removed first and added afterwards, permanently. Under TCP health checks of the HA port the
    master's heap was full after some weeks.

    In halog thousands of such connections leave no connection, task or descriptor behind.
    """
    async with serving() as (service, port):
        with trio.fail_after(60):
            before: dict[str, int] = {}
            for number in range(CHECK_COUNT):
                end(socket.create_connection(("127.0.0.1", port)))
                if number % 20 == 0:
                    await service.wait_state(SlaveState.SHUTDOWN)
                if number == 100:
                    before = await settled(service, 101)
            after = await settled(service, CHECK_COUNT)
            # Fewer descriptors: the interpreter has released some that earlier tests left.
            assert all(after[resource] <= count for resource, count in before.items()), (before, after)
        assert before["connections"] == 0


async def settled(service: HAService, count: int) -> dict[str, int]:
    """The resources in use after `count` connections."""
    while sum(service.statistics().closed_counts.values()) < count or service.connection_count:  # noqa: ASYNC110
        await trio.sleep(0.01)  # the service has yet to handle connections that the system accepted
    await wait_all_tasks_blocked()
    return held()


async def test_8875_silent_connections_are_limited_and_do_not_block_slaves() -> None:
    """Silent connections are closed after haHousekeepingInterval, and the oldest of them if there are too many. A slave
    that follows is not, and a new one is accepted."""
    options = HAOptions(connection_count_max=64)
    service = HAService(MemoryLog(LOG), options)
    async with trio.open_nursery() as nursery:
        slave = SlaveSide(service, "10.0.0.2:40000")
        slave.start(nursery)
        await slave.report(len(LOG))

        async def follow() -> None:
            while True:
                await trio.sleep(5)
                await slave.report(len(LOG))

        nursery.start_soon(follow)
        await wait_all_tasks_blocked()
        most = 0
        for number in range(SILENT_COUNT):  # one per second, like health checks
            SlaveSide(service, f"10.0.1.1:{number}").start(nursery)
            await trio.sleep(1)
            most = max(most, service.connection_count)
        assert most <= options.housekeeping_interval_s + 3
        for number in range(SILENT_COUNT):  # all at once
            SlaveSide(service, f"10.0.1.2:{number}").start(nursery)
            if number % 50 == 0:
                await wait_all_tasks_blocked()
                assert service.connection_count <= options.connection_count_max
        newcomer = SlaveSide(service, "10.0.0.3:40000")
        newcomer.start(nursery)
        await newcomer.report(len(LOG))
        await wait_all_tasks_blocked()
        assert service.acknowledged() == [len(LOG)] * 2
        assert slave.close_reason is newcomer.close_reason is None
        await trio.sleep(options.housekeeping_interval_s - 1)
        await newcomer.report(len(LOG))
        await trio.sleep(3)
        assert service.connection_count == 2
        reasons = Counter(service.statistics().closed_counts)
        assert reasons.keys() == {CloseReason.HOUSEKEEPING_TIMEOUT, CloseReason.TOO_MANY_CONNECTIONS}
        assert reasons.total() == 2 * SILENT_COUNT
        nursery.cancel_scope.cancel()
