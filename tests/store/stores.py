"""Small stores for tests: tiny files, a wall clock under the test's control, blocking calls inline."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from ha.protocol.record import Filler as FillerRecord
from ha.protocol.record import Message, MessageRecord, decode_record, scan_record
from ha.store.commitlog import CommitLog
from ha.store.files import Disk
from ha.store.message_store import MessageStore, open_message_store
from ha.store.options import StoreOptions
from ha.store.record_maker import AppendResult
from ha.store.watched_offset import WatchedOffset
from tests.store.disks import MemoryDisk, run_inline

ROOT = Path("/store")
SEGMENT = 4096


class WallClock:
    """Milliseconds since the epoch, set by the test; advances by one with each call."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        self.now_ms += 1
        return self.now_ms


def small_options(**changes: Any) -> StoreOptions:
    given = {
        "root": ROOT,
        "segment_size": SEGMENT,
        "queue_entry_count": 8,
        "index_slot_count": 50,
        "index_entry_count": 40,
        "message_size_max": 2048,
        "recovery_scan_bytes": 5000,
        "clean_first_s": 0.0,
        **changes,
    }
    return StoreOptions(**given)


@asynccontextmanager
async def open_small(
    disk: Disk | None = None, clock: WallClock | None = None, **changes: Any
) -> AsyncIterator[MessageStore]:
    async with open_message_store(
        small_options(**changes),
        disk=disk if disk is not None else MemoryDisk(),
        run_blocking=run_inline,
        wall_clock_ms=clock if clock is not None else WallClock(),
    ) as store:
        yield store


def message(number: int, *, size: int = 100, topic: str = "T", queue_id: int = 0, **more: Any) -> Message:
    properties = b"UNIQ_KEY\x01U%d\x02KEYS\x01k%d\x02TAGS\x01tag%d\x02" % (number, number, number % 3)
    return Message(topic=topic, queue_id=queue_id, body=(b"%d." % number) * (size // 3), properties=properties, **more)


async def put_batch(log: CommitLog, messages: Sequence[Message]) -> list[AppendResult]:
    """Appends messages as one batch, like the broker's put service, adding a segment if necessary."""
    while not (results := log.append_batch(messages)):
        failure = await log.add_segment()
        if failure is not None:
            return [failure] * len(messages)
    return results


async def reached(offset: WatchedOffset, end: int) -> None:
    """Waits until an offset is at least `end`."""
    with trio.fail_after(60):
        while offset.value < end:
            await offset.wait_beyond(offset.value)


async def dispatched(store: MessageStore) -> None:
    """Waits until everything in the log is in queues and index."""
    await reached(store.log.dispatched_offset, store.log.max_offset.value)


async def all_bytes(store: MessageStore) -> bytes:
    """Returns the whole log, read as for a slave."""
    log = store.log
    position = max(log.min_offset, 0)
    pieces = []
    while position < log.max_offset.value:
        chunk = bytes(await log.read(position, 1000))
        assert chunk
        pieces.append(chunk)
        position += len(chunk)
    return b"".join(pieces)


async def records(store: MessageStore) -> list[MessageRecord]:
    """Returns every record of the log, decoded and checked."""
    raw = await all_bytes(store)
    base = max(store.log.min_offset, 0)
    size = store.log.segment_size
    found = []
    position = 0
    while position < len(raw):
        head = scan_record(raw, position, len(raw))
        if isinstance(head, FillerRecord):
            position += size - (base + position) % size
            continue
        record = decode_record(raw, position)
        assert record.physical_offset == base + position
        found.append(record)
        position += record.total_size
    return found


async def check_derived(store: MessageStore) -> None:
    """Checks that the queues have exactly the records of the log, and that every key is found."""
    await dispatched(store)
    expected: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for record in await records(store):
        entry = (record.queue_offset, record.physical_offset, record.total_size)
        expected.setdefault((record.topic, record.queue_id), []).append(entry)
        if store.index is not None:
            for key in (record.property_map()["UNIQ_KEY"], record.property_map()["KEYS"]):
                assert record.physical_offset in await store.query(record.topic, key, 64, 0, 1 << 62), record
    for queue in store.queues:
        entries = queue.read(queue.min_offset, queue.max_offset - queue.min_offset)
        got = [(queue.min_offset + n, e.physical_offset, e.size) for n, e in enumerate(entries)]
        assert got == expected.pop((queue.topic, queue.queue_id), [])
    assert not expected
