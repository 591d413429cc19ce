"""Reads queues in whole batches, without a filter or a consumer's limits: for services of the broker that read its
system topics, and for tools of the node.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import msgspec
import trio

from ha.broker.options import BrokerOptions
from ha.broker.queue_read import QueueRead, QueueReader, ReadStatus
from ha.store.consume_queue import ConsumeQueue
from ha.store.message_store import MessageStore

BATCH_COUNT_MAX = 256
BATCH_BYTES_MAX = 1024 * 1024
"""Maximum messages, and bytes, of a batch that is read or put; a single message may be larger."""
UNREADABLE_S_MAX = 60.0
"""Time in seconds for which reads of a record must fail before the record is skipped. It does not count while damage of
the log may still be repaired, or while too many files are open."""


class BatchReader:
    """Reads queues of one store, with the same limits for messages in memory and on disk."""

    def __init__(self, store: MessageStore) -> None:
        limits = BrokerOptions(
            transfer_hot_count_max=BATCH_COUNT_MAX,
            transfer_hot_bytes_max=BATCH_BYTES_MAX,
            transfer_cold_count_max=BATCH_COUNT_MAX,
            transfer_cold_bytes_max=BATCH_BYTES_MAX,
        )
        self._damage = store.damage
        self._reader = QueueReader(
            store.log, limits, run_blocking=store.run_blocking, repair_entry=store.scrub.repair_entry
        )

    async def read(self, queue: ConsumeQueue, queue_offset: int, count_max: int = BATCH_COUNT_MAX) -> QueueRead:
        """Reads at most `count_max` messages from `queue_offset` on, as `QueueReader.read`. Raises OSError if the disk
        can't read.

        The status is never NO_MATCHED_MESSAGE: as there is no filter, it would mean that all entries are blank, and
        becomes MESSAGE_WAS_REMOVING.
        """
        read = await self._reader.read(
            queue, queue_offset, message_count_max=count_max, message_bytes_max=BATCH_BYTES_MAX, tags_codes=None
        )
        if read.status is ReadStatus.NO_MATCHED_MESSAGE:
            return msgspec.structs.replace(read, status=ReadStatus.MESSAGE_WAS_REMOVING)
        return read

    def lost_since(self, failed_since: float) -> float:
        """Returns the time (Trio's clock) from which failed reads of a record count towards UNREADABLE_S_MAX.

        `failed_since`: time of the first failed read. The result is the current time while the log has damage that may
        still be repaired; otherwise `failed_since`, or the last time at which any read failed because too many files
        were open, if that is later.
        """
        if not all(damage.is_hopeless for damage in self._damage.open):
            return trio.current_time()
        return max(failed_since, self._reader.interrupted_at)


class LossDetector:
    """Decides when a reader skips a record that it can't read."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader
        self._place: Hashable = None
        self._since = 0.0

    def is_lost(self, place: Hashable) -> bool:
        """Records a failed read at `place`; returns whether reads there have failed for UNREADABLE_S_MAX.

        The time restarts when a read fails at another place, and as `BatchReader.lost_since` describes.
        """
        now = trio.current_time()
        if place != self._place:
            self._place, self._since = place, now
        self._since = self._reader.lost_since(self._since)
        return now - self._since >= UNREADABLE_S_MAX


def split(body: bytes) -> Iterator[bytes]:
    """Yields the records of a batch, as stored."""
    position = 0
    while position < len(body):
        size = int.from_bytes(body[position : position + 4], "big")
        yield body[position : position + size]
        position += size
