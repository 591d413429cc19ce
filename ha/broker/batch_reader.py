"""How the broker reads its own topics, where delayed and half messages wait: batch by batch, whatever is in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ha.broker.options import BrokerOptions
from ha.broker.queue_read import QueueRead, QueueReader

if TYPE_CHECKING:
    from ha.store.consume_queue import ConsumeQueue
    from ha.store.message_store import MessageStore

BATCH_COUNT_MAX = 256
BATCH_BYTES_MAX = 1024 * 1024
"""What of one queue is read, and put, at once; one message may be larger."""
UNREADABLE_S_MAX = 60.0
"""So long a message is waited for whose entry is wrong, and the log not known to be damaged; then it is left out."""


class BatchReader:
    """Reads queues of one store, whether their messages are taken to be in memory or not."""

    def __init__(self, store: MessageStore) -> None:
        limits = BrokerOptions(
            transfer_hot_count_max=BATCH_COUNT_MAX,
            transfer_hot_bytes_max=BATCH_BYTES_MAX,
            transfer_cold_count_max=BATCH_COUNT_MAX,
            transfer_cold_bytes_max=BATCH_BYTES_MAX,
        )
        self._reader = QueueReader(store.log, limits, run_blocking=store.run_blocking, mend=store.scrub.mend)

    async def read(self, queue: ConsumeQueue, queue_offset: int, count_max: int = BATCH_COUNT_MAX) -> QueueRead:
        """Read the messages from `queue_offset` on, at most `count_max`. See `QueueReader.read`."""
        return await self._reader.read(
            queue, queue_offset, message_count_max=count_max, message_bytes_max=BATCH_BYTES_MAX, tags_codes=None
        )


def split(body: bytes) -> Iterator[bytes]:
    """The records of what was read, one by one."""
    position = 0
    while position < len(body):
        size = int.from_bytes(body[position : position + 4], "big")
        yield body[position : position + size]
        position += size
