"""The environment of a broker's front end; a simulation passes its own."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ha.poller import Poller
from ha.store.files import Disk, OsDisk
from ha.store.mapped_file import RunBlocking, run_in_thread
from ha.store.message_store import wall_clock_ms


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Clock, disk and threads. `unique_id` returns a new UNIQ_KEY, for a message that has none."""

    unique_id: Callable[[], str]
    wall_clock_ms: Callable[[], int] = wall_clock_ms
    disk: Disk = msgspec.field(default_factory=OsDisk)
    run_blocking: RunBlocking = run_in_thread
    poller: Poller | None = None
    """Poller that serves requests which need no task; None: the task of each connection serves them"""
