"""Converts consecutive records to consume-queue entries and index keys, for dispatch.

A consume-queue entry is a `store_files.ENTRY`. An index key is a `KEY`: its hash, and the record's physical offset and
store time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

import msgspec

from ha.protocol.codes import SysFlag
from ha.protocol.compiled import with_compiled_twin
from ha.protocol.properties import java_hash
from ha.protocol.record import Filler, Readable, RecordHead, Unparsable, scan_record
from ha.protocol.store_files import ENTRY, index_key, index_key_hash

KEY = Struct("=iqq")
"""Format of an index key: hash, physical offset, store time in ms"""
KEY_SIZE = KEY.size
TAG_INFIX = "T#"
VISIBLE = (SysFlag.TRANSACTION_NOT, SysFlag.TRANSACTION_COMMIT)
"""Transaction bits of sysFlag for records that are visible to consumers"""
_UNIQUE_KEY_TAIL = 8
"""Number of characters at the end of a UNIQ_KEY that differ between messages (low digits of the time, and a counter).
The rest stays the same for about a minute per client, so its hash is cached. Source: MessageClientIDSetter."""


class QueueRun(msgspec.Struct, frozen=True, gc=False):
    """The records of one queue that are visible to consumers, in log order.

    queue_offset: queue offset of the first record.
    entries: consume queue entries of all records, concatenated.
    tags_codes: tags codes of all records, for consumers that wait for certain tags.
    queue_offsets: queue offsets of all records if they are not consecutive; otherwise None.
    """

    topic: str
    queue_id: int
    queue_offset: int
    entries: bytes
    tags_codes: list[int]
    queue_offsets: list[int] | None


class RecordDigest(msgspec.Struct, frozen=True, gc=False):
    """Consume-queue entries and index keys of consecutive records of the log.

    count, size: the number of records and their size in bytes, including a filler after them.
    damage: describes the bytes that follow, if they are not a record and more bytes can't complete one; else None.
    first_offset, last_offset: physical offsets of the first and last record; -1 if there is none.
    store_timestamp_ms: store timestamp of the last record; -1 if there is none.
    queues: the records that are visible to consumers, by queue, ordered by their first record.
    keys: `KEY`s in ascending order of physical offset.
    """

    count: int
    size: int
    damage: Unparsable | None
    first_offset: int
    last_offset: int
    store_timestamp_ms: int
    queues: list[QueueRun]
    keys: bytes


def end_of_run(
    found: RecordHead | Filler | Unparsable | None, buffer: Readable, position: int, base_offset: int, segment_end: int
) -> tuple[int, Unparsable | None]:
    """Returns the position in `buffer` at which a run of records ends, and the damage there, if any.

    `found` is what `scan_record` returned for `position`, the end of the last record; a RecordHead only if its physical
    offset is wrong. A filler belongs to the run.
    `base_offset` and `segment_end`: physical offsets of the buffer's first byte and of the end of the segment.
    """
    if isinstance(found, RecordHead):
        return position, Unparsable(found.total_size, f"its physical offset is {found.physical_offset}")
    if isinstance(found, Filler):
        return segment_end - base_offset, None
    if found is None and len(buffer) - position >= 4:
        claimed = int.from_bytes(buffer[position : position + 4], "big", signed=True)
        if claimed > segment_end - base_offset - position:
            return position, Unparsable(0, f"{claimed} bytes do not fit the segment")
    return position, found


def index_key_hashes(head: RecordHead, *, with_tags: bool) -> list[int]:
    """Returns the hash of each index key of a record, in the order of their entries: UNIQ_KEY, KEYS, TAGS. The record
    of a rolled back transaction has none.

    Source: IndexService.buildIndex.
    """
    hashes: list[int] = []
    if head.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_ROLLBACK:
        return hashes
    topic, unique_key = head.topic, head.unique_key
    if unique_key:
        before = hash_before(topic, unique_key[:-_UNIQUE_KEY_TAIL])
        hashes.append(index_key_hash(unique_key[-_UNIQUE_KEY_TAIL:], before))
    if head.keys:
        before = hash_before(topic, "")
        hashes += [index_key_hash(key, before) for key in head.keys]
    if with_tags and head.tags:
        hashes.append(_tag_hash(topic, head.tags))
    return hashes


@lru_cache(maxsize=4096)
def hash_before(topic: str, begin: str) -> int:
    """Returns the Java hash of the part of an index key that consists of the topic and `begin`."""
    return java_hash(index_key(topic, begin))


@lru_cache(maxsize=4096)
def _tag_hash(topic: str, tags: str) -> int:
    return index_key_hash(index_key(topic, TAG_INFIX + tags))


@with_compiled_twin
def digest_records(
    buffer: Readable,
    base_offset: int,
    segment_end: int,
    *,
    count_max: int,
    bytes_max: int,
    delay_levels_ms: Sequence[int],
    with_keys: bool,
    with_tags: bool,
) -> RecordDigest:
    """Returns the digest of the records at the start of `buffer`, whose first byte is at physical offset `base_offset`.

    The digest has at most `count_max` records, which start within the first `bytes_max` bytes. `segment_end`: physical
    offset at which the segment ends. `with_keys`: whether to make index keys; `with_tags`: whether these include tags.
    """
    end = len(buffer)
    position = count = 0
    damage: Unparsable | None = None
    last: RecordHead | None = None
    runs: dict[tuple[str, int], tuple[list[int], list[bytes], list[int]]] = {}
    keys: list[bytes] = []
    pack, pack_key = ENTRY.pack, KEY.pack
    while position < end and count < count_max and position < bytes_max:
        found = scan_record(buffer, position, end, delay_levels_ms=delay_levels_ms)
        if type(found) is not RecordHead or found.physical_offset != base_offset + position:
            position, damage = end_of_run(found, buffer, position, base_offset, segment_end)
            break
        physical_offset = found.physical_offset
        if found.sys_flag & SysFlag.TRANSACTION_MASK in VISIBLE:
            run = runs.get((found.topic, found.queue_id))
            if run is None:
                run = runs[found.topic, found.queue_id] = [], [], []
            run[0].append(found.queue_offset)
            run[1].append(pack(physical_offset, found.total_size, found.tags_code))
            run[2].append(found.tags_code)
        if with_keys:
            for key_hash in index_key_hashes(found, with_tags=with_tags):
                keys.append(pack_key(key_hash, physical_offset, found.store_timestamp_ms))
        last = found
        count += 1
        position += found.total_size
    return RecordDigest(
        count,
        position,
        damage,
        base_offset if count else -1,
        -1 if last is None else last.physical_offset,
        -1 if last is None else last.store_timestamp_ms,
        [
            QueueRun(
                topic,
                queue_id,
                offsets[0],
                b"".join(entries),
                codes,
                None if offsets == list(range(offsets[0], offsets[0] + len(offsets))) else offsets,
            )
            for (topic, queue_id), (offsets, entries, codes) in runs.items()
        ],
        b"".join(keys),
    )
