"""Slaves that can't stay connected, and their CPU usage."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.abc
from trio.testing import MockClock

from ha.protocol.ha_frame import encode_transfer_header
from ha.replication.ha_client import HAClient
from ha.replication.options import HAOptions
from ha.replication.reconnect import FIRST_S, JITTER_SHARE
from ha.replication.statistics import Condition
from tests.replication.master_side import MasterSide
from tests.replication.memory_log import MemoryLog

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
async def test_2476_slave_does_not_spin_without_a_master(
    master: Callable[[trio.abc.Stream], Awaitable[None]], autojump_clock: MockClock
) -> None:
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
