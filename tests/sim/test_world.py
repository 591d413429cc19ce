"""The simulated machines: pauses, power losses, connections."""

import errno
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from ha.node.platform import Platform
from tests.sim import runner
from tests.sim.disk import PAGE, DiskFaults, Inode, SimDisk
from tests.sim.groups.scenario import draw_group_plan
from tests.sim.network import Network
from tests.sim.process import Machine, Processes
from tests.sim.scenario import AnyPlan, draw_plan
from tests.sim.sockets import SimStream
from tests.sim.world import World

PATH = Path("/store/commitlog/00000000000000000000")


def simulate(run: Callable[[World, Network, trio.Nursery], Awaitable[None]], *, window: int = 1000) -> None:
    async def main() -> None:
        world = World(1)
        network = Network(world, base_s=0.01, jitter_s=0.02, window=window, split_chance=0.5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.timers.run)
            await run(world, network, nursery)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[Processes()])


# ---- processes


class Ticker:
    """A process with two tasks that count seconds."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.cleaned_up = 0

    @asynccontextmanager
    async def __call__(self, platform: Platform) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(self._tick)
            yield
            nursery.cancel_scope.cancel()

    async def _tick(self) -> None:
        try:
            while True:
                await trio.sleep(1)
                self.ticks.append(trio.current_time())
        finally:
            self.cleaned_up += 1


def test_paused_process_does_not_run_when_its_timers_expire() -> None:
    ticker = Ticker()

    async def run(world: World, network: Network, nursery: trio.Nursery) -> None:
        machine = Machine(world, network, network.add_host("m", "10.0.0.1"), Path("/store"), nursery)
        machine.run = ticker
        process = machine.start()
        await trio.sleep(1.5)
        machine.pause()
        await trio.sleep(5)
        assert ticker.ticks == [1, 1]
        machine.resume()
        await trio.sleep(0.1)
        assert ticker.ticks == [1, 1, 6.5, 6.5]  # the timer of second 2, late
        await trio.sleep(1)
        assert ticker.ticks == [1, 1, 6.5, 6.5, 7.5, 7.5]
        machine.stop()
        await process.ended.wait()
        await trio.lowlevel.checkpoint()
        assert not process.tasks

    simulate(run)
    assert ticker.cleaned_up == 2


def test_a_process_started_while_paused_and_one_killed_while_paused() -> None:
    ticker = Ticker()

    async def run(world: World, network: Network, nursery: trio.Nursery) -> None:
        machine = Machine(world, network, network.add_host("m", "10.0.0.1"), Path("/store"), nursery)
        machine.run = ticker
        process = machine.start()
        machine.pause()  # before its first step
        await trio.sleep(3)
        assert not ticker.ticks
        machine.resume()
        await trio.sleep(1.5)
        assert len(ticker.ticks) == 2
        machine.pause()
        await trio.sleep(2)
        machine.kill()
        await trio.sleep(1)
        assert len(ticker.ticks) == 2
        assert not process.tasks

    simulate(run)
    assert ticker.cleaned_up == 2


# ---- disks


def disk() -> SimDisk:
    return SimDisk(World(1), "m", DiskFaults(), lambda: 0)


async def in_trio(run: Callable[[], None]) -> None:
    run()


def test_full_disk_rejects_writes_that_need_space() -> None:
    def run() -> None:
        full = disk()
        sparse = full.create(PATH, 2 * PAGE, allocate=False)
        sparse.pwrite(b"there", 0)
        full.faults.is_full = True
        sparse.pwrite(b"again", 0)
        for attempt in (
            lambda: sparse.pwrite(b"new", PAGE),
            lambda: full.create(PATH.with_name("2"), PAGE, allocate=True),
            lambda: full.write_bytes(PATH.with_name("3"), b"content"),
        ):
            with pytest.raises(OSError, match="No space") as caught:
                attempt()
            assert caught.value.errno == errno.ENOSPC
        assert full.usage(PATH).used_ratio == 1.0

    trio.run(in_trio, run)


def test_full_disk_accepts_a_partial_write() -> None:
    size = 64 * PAGE

    def run() -> None:
        full = disk()
        full.faults.is_full = True
        found = set()
        for _ in range(20):
            full.inodes[path] = Inode(bytearray(size), is_allocated=False)
            chunk = bytearray(b"x" * size)
            with pytest.raises(OSError, match="No space") as refused:
                full.open(path).pwrite(chunk, 0)
            found.add(taken := len(bytes(full.inodes[path].content).rstrip(b"\0")))
            assert taken % PAGE == 0
            chunk += b"y"  # no view is left, though the error is
            assert refused.value.errno == errno.ENOSPC
        assert 0 in found
        assert len(found) > 5
        assert size not in found

    path = PATH.with_name("full")
    trio.run(in_trio, run)


# ---- the network


async def pair(network: Network, nursery: trio.Nursery) -> tuple[SimStream, SimStream]:
    one, other = network.add_host("a", "10.0.0.1"), network.add_host("b", "10.0.0.2")
    with network.bind(other, "port", "10.0.0.2", 80) as port:
        [listener] = port.listen()
    client = await network.connect(one, "10.0.0.2:80")
    return client, await listener.accept()


async def read_all(stream: SimStream, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = await stream.receive_some(700)
        assert piece
        found += piece
    return found


def test_machine_without_power_is_silent_and_resets_connections_later() -> None:
    async def run(world: World, network: Network, nursery: trio.Nursery) -> None:
        client, server = await pair(network, nursery)
        network.power_off(server.host)
        await client.send_all(b"hello")
        with trio.move_on_after(10) as scope:
            await client.receive_some(10)
        assert scope.cancelled_caught, "nobody told the client"
        network.power_on(server.host)
        with trio.fail_after(5), pytest.raises(trio.BrokenResourceError):
            await client.receive_some(10)

    simulate(run)


def test_a_connection_cut_in_a_frame_and_one_that_is_half_open() -> None:
    async def run(world: World, network: Network, nursery: trio.Nursery) -> None:
        client, server = await pair(network, nursery)
        client.out.cut_after = 7
        await client.send_all(b"0123456789")
        assert await read_all(server, 7) == b"0123456"
        with pytest.raises(trio.BrokenResourceError):
            await server.receive_some(10)
        network.hosts.clear()
        client, server = await pair(network, nursery)
        network.forget(client)
        await client.send_all(b"hello")
        with trio.move_on_after(100) as scope:
            await server.receive_some(10)
        assert scope.cancelled_caught

    simulate(run)


@pytest.mark.parametrize("plan", [draw_plan(1), draw_plan(25), draw_group_plan(4)], ids=["1", "25", "group"])
def test_a_finished_runs_world_is_collected(plan: AnyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand runs must take no more memory than a few."""
    worlds: list[weakref.ref[World]] = []

    def noted(seed: int) -> World:
        world = World(seed)
        worlds.append(weakref.ref(world))
        return world

    monkeypatch.setattr(runner, "World", noted)
    runner.run_plan(plan)
    gc.collect()
    assert [world() for world in worlds] == [None]
