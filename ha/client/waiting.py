"""Waits for the first of several events."""

from __future__ import annotations

import anyio


async def wait_any(timeout_s: float, *events: anyio.Event) -> None:
    """Returns when one of `events` is set or after `timeout_s`. Always a checkpoint."""
    with anyio.move_on_after(max(0.0, timeout_s)):
        async with anyio.create_task_group() as tasks:
            for event in events:
                tasks.start_soon(_wait_and_cancel, event, tasks.cancel_scope)
            if not events:
                await anyio.sleep_forever()


async def _wait_and_cancel(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
