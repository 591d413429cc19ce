"""Builds and connects the parts of one store: the log, what is derived from it, and the services that advance both.

`MessageStore` runs the services; recovery, truncation and the checkpointer work on the same parts.
"""

from __future__ import annotations

from collections.abc import Callable

from ha.store.checksums import Checksums
from ha.store.commitlog import CommitLog
from ha.store.consume_queues import ConsumeQueues
from ha.store.damage import DamageRegistry
from ha.store.dispatch import Dispatcher
from ha.store.epochs import EPOCH_FILE, EpochHistory
from ha.store.files import Disk
from ha.store.flusher import Flusher
from ha.store.key_index import KeyIndex
from ha.store.mapped_file import RunBlocking
from ha.store.options import StoreOptions


class StoreParts:
    """The parts of one store. `index` is None if it is disabled; `epochs` is empty in a store that was never part of a
    failover group."""

    def __init__(
        self, options: StoreOptions, disk: Disk, run_blocking: RunBlocking, wall_clock_ms: Callable[[], int]
    ) -> None:
        self.options = options
        self.disk = disk
        self.run_blocking = run_blocking
        self.epochs = EpochHistory(disk, options.root / EPOCH_FILE, run_blocking=run_blocking)
        self.queues = ConsumeQueues(disk, options.root / "consumequeue", options.queue_entry_count)
        self.index: KeyIndex | None = None
        if options.index_enabled:
            self.index = KeyIndex(
                disk,
                options.root / "index",
                slot_count=options.index_slot_count,
                entry_count=options.index_entry_count,
                index_tags=options.index_tags,
                wall_clock_ms=wall_clock_ms,
            )
        self.damage = DamageRegistry(wall_clock_ms)
        self.checksums = Checksums(disk, options.root / "checksums", options.segment_size, options.checksum_block_size)
        self.log = CommitLog(
            disk,
            options,
            run_blocking=run_blocking,
            wall_clock_ms=wall_clock_ms,
            initial_queue_offset=self.queues.next_queue_offset,
            checksums=self.checksums,
            damage=self.damage,
        )
        self.verified = self.log.verified
        self.flusher = Flusher(self.log, options)
        self.dispatcher = Dispatcher(self.log, self.queues, self.index, options, disk, run_blocking)
