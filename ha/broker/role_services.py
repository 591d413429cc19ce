"""The services that only a master or only a slave runs, started and ended as the role changes.

They run in a task that lives as long as the broker, so that a caller who changes the role needs no nursery. The caller
alternates `begin` and `end`. Changes of role are shielded from cancellation, so the broker may end during one. In that
case `begin` starts nothing and returns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

Service = Callable[..., Awaitable[object]]
"""A function that is started with `nursery.start`, reports its start to `task_status`, and runs until cancelled."""


class RoleServices:
    """Runs the services of the current role: `begin` starts them, `end` ends them. `serve` must be running
    meanwhile."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[tuple[Sequence[Service], trio.Event]](0)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._ended.set()

    async def begin(self, services: Sequence[Service]) -> None:
        """Starts `services` in order; returns when all have started, or the broker has ended."""
        assert self._ended.is_set()
        self._ended, self._scope = trio.Event(), trio.CancelScope()
        started = trio.Event()
        try:
            await self._send.send((services, started))
        except trio.BrokenResourceError:  # the broker has ended
            self._ended.set()
        else:
            await started.wait()

    async def end(self) -> None:
        """Ends the services and waits until they have ended. They end even if this call is cancelled."""
        self._scope.cancel()
        await self._ended.wait()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs the services of each `begin`, until cancelled."""
        task_status.started()
        with self._receive:
            async for services, started in self._receive:
                try:
                    with self._scope:
                        async with trio.open_nursery() as nursery:
                            for service in services:
                                await nursery.start(service)
                            started.set()
                            await trio.sleep_forever()
                finally:
                    started.set()
                    self._ended.set()
