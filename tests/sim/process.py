"""Machines and their processes: start, clean stop, kill -9, power loss, pause, steps of the wall clock.

A process is one trio task and its descendants. While it is paused (SIGSTOP), none of them runs, though their timers
expire and bytes arrive in the kernel: the instrument `Processes` puts a proxy between trio and the coroutine of each
task, which keeps what trio sends and tells trio that the task waits.

A killed process is cancelled, and its disk and network are dead from the moment of the crash: its cleanup has no
effect. Its successor has its own disk object and sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import trio

from ha.node.platform import Platform
from tests.sim.disk import DiskFaults, SimDisk
from tests.sim.world import EPOCH_MS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sim.network import Network
    from tests.sim.sockets import Host, SimPort, SimStream
    from tests.sim.world import World

OWNER: ContextVar[Process | None] = ContextVar("process of the simulation", default=None)

Run = Callable[[Platform], AbstractAsyncContextManager[Any]]
"""Runs in a process: opens a node or a name server."""


EVICTED_SHARE = 0.5
"""How often the pages that a failed sync left unwritten are gone from the page cache when the next process starts"""


def _never_abort(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


class _Pausable:
    """Takes the place of a task's coroutine."""

    __slots__ = ("_coroutine", "_process", "_task")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], process: Process, task: trio.lowlevel.Task) -> None:
        self._coroutine = coroutine
        self._process = process
        self._task = task

    def send(self, value: Any) -> Any:
        process = self._process
        if process.is_paused:
            process.held.append((self._task, value))
            return process.waiting
        return self._coroutine.send(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)


class Processes(trio.abc.Instrument):
    """Knows which task belongs to which process."""

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        process = task.context.get(OWNER)
        if process is not None:
            process.tasks[task] = None
            task.coro = _Pausable(task.coro, process, task)  # type: ignore[assignment]

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        process = task.context.get(OWNER)
        if process is not None:
            process.tasks.pop(task, None)


class Process:
    """One process of a node. `node` is what runs in it, once open."""

    def __init__(self, machine: Machine, disk: SimDisk, number: int) -> None:
        self.machine = machine
        self.disk = disk
        self.number = number
        self.is_dead = False
        self.is_paused = False
        self.held: list[tuple[trio.lowlevel.Task, Any]] = []
        self.tasks: dict[trio.lowlevel.Task, None] = {}
        self.scope = trio.CancelScope()
        self.node: Any = None
        self.stop_wanted = trio.Event()
        self.ended = trio.Event()
        self.blocking_count = 0
        """Number of blocking calls in progress"""
        self.failure: BaseException | None = None
        """The exception that ended it"""
        self._waiting = trio.lowlevel.wait_task_rescheduled(_never_abort)  # noqa: ASYNC105
        self.waiting = self._waiting.send(None)
        """The value a task yields to trio in order to wait"""

    def pause(self) -> None:
        """SIGSTOP."""
        self.is_paused = True

    def resume(self) -> None:
        """SIGCONT: each task continues with the value it was about to receive."""
        self.is_paused = False
        held, self.held = self.held, []
        for task, value in held:
            trio.lowlevel.reschedule(task, value)

    # the platform of its node

    def platform(self) -> Platform:
        """Returns the platform of its node."""
        machine = self.machine
        return Platform(
            disk=self.disk,
            run_blocking=self.run_blocking,
            wall_clock_ms=machine.wall_clock_ms,
            bind=self._bind,
            connect=self._connect,
            own_address=lambda wildcard: machine.host.address,
            resolve=lambda host: host,
            process_id=1000 + self.number,
            boot_id=lambda: f"{machine.name} {machine.boot_count}",
            process_hash=machine.world.chance(f"process {machine.name}").getrandbits(31),
            jitter=machine.world.chance(f"jitter {machine.name}").random,
        )

    async def run_blocking(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Simulates a worker thread: it takes time, and is awaited even if the caller is cancelled."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.blocking_count += 1
        try:
            with trio.CancelScope(shield=True):
                return await self._call(call, *arguments)
        finally:
            self.blocking_count -= 1

    async def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        disk = self.disk
        if disk.chance.random() < 0.3:
            await trio.sleep(0.0001 * disk.chance.randrange(1, 20))
        else:
            await trio.lowlevel.checkpoint()
        disk.take_owed_s()
        try:
            return call(*arguments)
        finally:
            # Performed at the start, reported at the end: bytes written meanwhile are not covered.
            owed_s, slowness_s = disk.take_owed_s()
            if owed_s and not disk.is_dead:
                with trio.move_on_after(owed_s):
                    await self.ended.wait()  # a dead process does not wait for a disk
                await self._wait_slow(slowness_s)

    async def _wait_slow(self, slowness_s: float) -> None:
        """Waits for slow syncs until the disk is fast."""
        if not slowness_s or not self.disk.faults.slowness_s:
            return
        slowed = self.disk.faults.slowed
        with trio.move_on_after(slowness_s) as scope:
            slowed[scope] = None
            try:
                await self.ended.wait()
            finally:
                del slowed[scope]

    def _bind(self, key: str, address: str, port: int) -> AbstractContextManager[SimPort]:
        if self.is_dead:
            raise OSError("the process is dead")
        return self.machine.network.bind(self.machine.host, key, address, port)

    async def _connect(self, address: str) -> SimStream:
        if self.is_dead:
            raise OSError("the process is dead")
        stream = await self.machine.network.connect(self.machine.host, address)
        if self.is_dead:
            stream.close()
            raise OSError("the process is dead")
        return stream


class Machine:
    """A host with a disk and a clock, and at most one process. `run` opens what the process runs."""

    def __init__(self, world: World, network: Network, host: Host, root: Path, nursery: trio.Nursery) -> None:
        self.world = world
        self.network = network
        self.host = host
        self.name = host.name
        self.root = root
        self.disk_faults = DiskFaults()
        self.disk = SimDisk(world, self.name, self.disk_faults, self.wall_clock_ms)
        self.clock_step_ms = 0
        self.process: Process | None = None
        self.start_count = 0
        self.boot_count = 1
        self.run: Run
        self.on_open: Callable[[Machine], None] = lambda machine: None
        """Called when its node serves"""
        self.on_ended: Callable[[Process], None] = lambda process: None
        """Called when a process has ended that was not killed: stopped, or failed"""
        self.on_crash: Callable[[Machine, str], None] = lambda machine, kind: None
        """Called at each kill and power loss, before anything is lost"""
        self.on_power_lost: Callable[[Machine], None] = lambda machine: None
        """Called at each power loss, when the disk has its final state"""
        self._nursery = nursery

    def wall_clock_ms(self) -> int:
        """Time of day on this machine."""
        return EPOCH_MS + self.clock_step_ms + int(trio.current_time() * 1000)

    @property
    def is_running(self) -> bool:
        """Whether there is a process, paused or not."""
        return self.process is not None

    def start(self) -> Process:
        """Starts a process; turns power on if it is off."""
        assert self.process is None, f"{self.name} runs already"
        if not self.host.is_up:
            self.network.power_on(self.host)
        self.start_count += 1
        process = self.process = Process(self, self.disk, self.start_count)
        self.world.note(f"{self.name} start")
        token = OWNER.set(process)
        try:
            self._nursery.start_soon(self._live, process, name=f"{self.name} {self.start_count}")
        finally:
            OWNER.reset(token)
        return process

    async def _live(self, process: Process) -> None:
        try:
            with process.scope:
                async with self.run(process.platform()) as process.node:
                    if not process.is_dead:
                        self.on_open(self)
                    await process.stop_wanted.wait()
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            process.failure = error
        finally:
            process.node = None
        if not process.is_dead:
            self._leave(process)

    def _leave(self, process: Process) -> None:
        """The process has ended on its own: its kernel cleans up."""
        process.is_dead = True
        self.process = None
        self.world.note(f"{self.name} ended {type(process.failure).__name__ if process.failure else 'cleanly'}")
        self.network.close_all(self.host)
        is_evicted = self.disk.has_lost_pages and self.disk.chance.random() < EVICTED_SHARE
        if is_evicted:
            self.world.note(f"{self.name} evicts pages that a failed sync left unwritten")
            self.on_crash(self, "power")
        self.disk = self.disk.after_eviction() if is_evicted else self.disk.after_kill()
        self.on_ended(process)
        if is_evicted:
            self.on_power_lost(self)
        process.ended.set()

    def _die(self, kind: str) -> Process:
        process = self.process
        assert process is not None, f"{self.name} does not run"
        self.on_crash(self, kind)
        self.world.note(f"{self.name} {kind}")
        process.is_dead = True
        self.process = None
        process.scope.cancel()
        process.ended.set()
        if process.is_paused:
            process.resume()
        return process

    def kill(self) -> None:
        """kill -9."""
        self._die("kill")
        self.disk = self.disk.after_kill()
        self.network.close_all(self.host)

    def power_off(self) -> None:
        """Loses power; `start` turns it on again."""
        self._die("power")
        self.boot_count += 1
        self.disk = self.disk.after_power_loss()
        self.network.power_off(self.host)
        self.on_power_lost(self)

    def pause(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        self.world.note(f"{self.name} pause")
        self.process.pause()

    def resume(self) -> None:
        """SIGCONT, if it is paused."""
        if self.process is not None and self.process.is_paused:
            self.world.note(f"{self.name} resume")
            self.process.resume()

    def stop(self) -> None:
        """SIGTERM; `on_ended` reports the end."""
        assert self.process is not None
        self.world.note(f"{self.name} stop")
        self.process.stop_wanted.set()


def leaves(error: BaseException) -> list[BaseException]:
    """Returns the errors within exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]
