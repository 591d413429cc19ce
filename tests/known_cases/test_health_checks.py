"""Load balancers and monitors that check whether the HA port is open."""

import gc
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.poller import open_poller
from ha.replication.connection import HAConnection
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.progress import SlaveState
from tests.replication.memory_log import MemoryLog

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
            assert await settled(service, CHECK_COUNT) == before
        assert before["connections"] == 0


async def settled(service: HAService, count: int) -> dict[str, int]:
    """The resources in use after `count` connections."""
    while sum(service.statistics().closed_counts.values()) < count or service.connection_count:  # noqa: ASYNC110
        await trio.sleep(0.01)  # the service has yet to handle connections that the system accepted
    await wait_all_tasks_blocked()
    return held()
