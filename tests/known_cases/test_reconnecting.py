"""Slaves that can't stay connected, and their CPU usage."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.abc

from ha.protocol.ha_frame import encode_transfer_header
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.reconnect import FIRST_S, JITTER_SHARE
from ha.replication.statistics import Condition
from tests.load.footprint import cpu_s
from tests.replication.link import following
from tests.replication.master_side import MasterSide
from tests.replication.memory_log import MemoryLog
from tests.scenarios.brokers import Broker

HOUR_S = 3600


async def close_at_once(stream: trio.abc.Stream) -> None:
    await stream.aclose()


async def say_nothing(stream: trio.abc.Stream) -> None:
    await trio.sleep_forever()


async def send_garbage(stream: trio.abc.Stream) -> None:
    await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)


async def send_half_a_header(stream: trio.abc.Stream) -> None:
    await stream.send_all(encode_transfer_header(500, 100)[:7])


async def announce_more_than_fits(stream: trio.abc.Stream) -> None:
    await stream.send_all(encode_transfer_header(500, 1 << 30))


async def send_from_elsewhere(stream: trio.abc.Stream) -> None:
    await stream.send_all(encode_transfer_header(123, 10) + bytes(10))


class CountSteps(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    count = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


@pytest.mark.parametrize(
    "master",
    [
        close_at_once,
        say_nothing,
        send_garbage,
        send_half_a_header,
        announce_more_than_fits,
        send_from_elsewhere,
    ],
)
async def test_2476_slave_does_not_spin_without_a_master(master: Callable[[trio.abc.Stream], Awaitable[None]]) -> None:
    """apache/rocketmq#2476: one thread of a slave, HAClient, used a whole CPU and replication stopped: its loop never
    waited. The same happens with a connection that is lost at once and retried at once.

    In halog the pause between attempts grows to five seconds whatever the master does, minus up to half at random, and
    an attempt takes a bounded number of steps.
    """
    steps = CountSteps()
    async with trio.open_nursery() as nursery:
        side = MasterSide(nursery)
        side.on_connect = master
        client = HAClient(MemoryLog(bytes(500)), HAOptions(), side.connect)
        client.set_master("10.0.0.1:10912")
        trio.lowlevel.add_instrument(steps)
        nursery.start_soon(client.run)
        await trio.sleep(HOUR_S)
        trio.lowlevel.remove_instrument(steps)
        statistics = client.statistics()
        nursery.cancel_scope.cancel()
    pauses = [after - before for before, after in zip(side.connected_at, side.connected_at[1:], strict=False)]
    assert min(pauses) >= FIRST_S * (1 - JITTER_SHARE)
    assert min(pauses[6:]) >= HAOptions().reconnect_interval_s * (1 - JITTER_SHARE)
    assert HOUR_S / 26 < len(side.connected_at) <= HOUR_S / 2.5 + 6
    assert steps.count < 100 * len(side.connected_at)
    assert statistics.condition is not Condition.CONNECTED or master is say_nothing
    assert statistics.detail


def close_in_peace(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(1024):
        pass
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.recv(1024)  # earlier the attempt to connect may fail, which is another case
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def closing_master(close: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[float]]]:
    """A port that closes connections at once; yields its address and the time of each connection."""
    accepted: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                while True:
                    connection, _ = server.accept()
                    close(connection)
                    accepted.append(time.monotonic())
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", accepted
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.processes
@pytest.mark.parametrize(("close", "condition"), [(close_in_peace, "master_closed"), (reset, "connection_lost")])
def test_2476_slave_is_idle_if_its_master_closes_connections_at_once(
    close: Callable[[socket.socket], None], condition: str, tmp_path: Path
) -> None:
    """The same with a real process and sockets: its CPU is measured over some attempts."""
    with closing_master(close) as (address, accepted):
        settings: dict[str, Any] = {"haMasterAddress": address, "namesrvAddr": "127.0.0.1:1"}
        with Broker(tmp_path / "s", "SLAVE", **settings).start() as slave:
            began, used = time.monotonic(), cpu_s(slave.pid)
            time.sleep(5.5)
            share = (cpu_s(slave.pid) - used) / (time.monotonic() - began)
            assert share < 0.1, share
            assert 1 <= len(accepted) <= 12
            status = slave.status()
            assert "haMasterAddress" in str(slave.settings)
            assert status["ha_client"]["condition"] == condition
            assert "is that its haListenPort?" in status["not_ready_reason"]
            slave.stop()


async def test_1082_idle_connection_stays_open() -> None:
    """apache/rocketmq#1082, #1118: without messages a master and a slave of 4.4 disconnected every 20 seconds: the
    slave counted a received heartbeat as one that it had sent.

    In halog a pair without a single message keeps its first connection for an hour.
    """
    service = HAService(MemoryLog(bytes(100)), HAOptions())
    async with following(service, MemoryLog(bytes(100))) as (client, link):
        await trio.sleep(HOUR_S)
        assert len(link.times) == 1
        assert client.statistics().condition is Condition.CONNECTED
        assert service.in_sync_replicas_nums(100) == 2
