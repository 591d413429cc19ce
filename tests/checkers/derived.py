"""Consume queues and key index agree with an independent reading of the commitlog.

Consume queue: `consumequeue/TOPIC/QUEUE/NNN`, entries of 20 bytes: int64 physical offset, int32 size, int64 tags code
(Java's String.hashCode of the tag; in SCHEDULE_TOPIC_XXXX the delivery time; in rmq_sys_wheel_timer twice the due time,
plus 1 unless it is a recall); entry n of the queue at byte 20·n of the
concatenated files. Entries with size 7FFFFFFF are padding.

Index file: header of 40 bytes (first and last time, first and last physical offset, used slots, next entry number),
hash slots of 4 bytes with the newest entry's number, entries of 20 bytes: int32 hash, int64 physical offset, int32
seconds since the first time, int32 previous entry in its slot. The hash is |hashCode| of `topic#key`. One entry for
UNIQ_KEY, one for each word of KEYS, from 5.4 on one for the tag as `topic#T#tag`. Sources: ConsumeQueue, IndexFile,
IndexService.

Promises: every queue entry matches the record that belongs there in offset, size and tags code; there are no holes, no
duplicates, and no entries beyond the log. With `is_complete` none is missing. Every key of the indexed records is found
once by walking its chain; with `is_complete` every record is indexed.

Fault model: any store that a node has opened since its last crash. A running node's queues may lag behind its log, and
its index file behind its memory: use `is_complete` for queues after a pause, and for the index after a stop. Records
before the image's `misread_to` need no entry, and may have a wrong one.

Not checked: entries of records deleted by retention, the order of keys within one record.
"""

from collections import Counter
from functools import lru_cache
from struct import Struct

from tests.checkers.records import Rec
from tests.checkers.store import Bytes, StoreImage
from tests.checkers.violation import Violation

CHECKER = "derived"

QUEUE_ENTRY = Struct(">qiq")
INDEX_HEADER = Struct(">qqqqii")
INDEX_ENTRY = Struct(">iqii")
_SLOT = Struct(">i")
BLANK_SIZE = 0x7FFFFFFF
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC = "rmq_sys_wheel_timer"
DELAY_LEVELS_S = (1, 5, 10, 30, *(60 * m for m in range(1, 11)), 1200, 1800, 3600, 7200)
INDEX_SLOT_COUNT = 5_000_000
_SHOWN_MAX = 5
_SECONDS_MAX = (1 << 31) - 1
"""An index entry has an int32; a flipped bit may put a store time further ahead"""


def check(
    image: StoreImage,
    *,
    is_complete: bool = False,
    is_index_complete: bool | None = None,
    index_slot_count: int = INDEX_SLOT_COUNT,
    index_tags: bool = True,
) -> list[Violation]:
    """Checks one node's queues and index. `is_index_complete` defaults to `is_complete`."""
    complete_index = is_complete if is_index_complete is None else is_index_complete
    return [
        *check_queues(image, is_complete=is_complete),
        *check_index(image, is_complete=complete_index, slot_count=index_slot_count, tags=index_tags),
    ]


# ---- consume queues


def check_queues(image: StoreImage, *, is_complete: bool, flushed_end: int | None = None) -> list[Violation]:
    """Checks the consume queues. `flushed_end`: with SYNC_FLUSH no entry may point beyond what a power loss keeps."""
    found: list[Violation] = []
    expected: dict[tuple[str, int], dict[int, Rec]] = {}
    for record in image.records():
        if record.is_queued and record.physical_offset >= image.misread_to:
            expected.setdefault((record.topic, record.queue_id), {})[record.queue_offset] = record
    for queue, entries in sorted(read_queues(image).items()):
        found.extend(_check_queue(image, queue, entries, expected.get(queue, {}), flushed_end))
        if is_complete:
            missing = sorted(set(expected.get(queue, {})) - set(entries))
            if missing:
                found.append(_missing(image, queue, missing, expected[queue]))
    if is_complete:
        for queue in sorted(set(expected) - set(read_queues(image))):
            found.append(_missing(image, queue, sorted(expected[queue]), expected[queue]))
    return found


def _missing(image: StoreImage, queue: tuple[str, int], missing: list[int], records: dict[int, Rec]) -> Violation:
    text = (
        f"{image.name}: consume queue {_name(queue)} lacks {len(missing)} entries, "
        f"the first for offset {missing[0]}, the record at {records[missing[0]].physical_offset}"
    )
    return Violation(CHECKER, text)


def _check_queue(
    image: StoreImage,
    queue: tuple[str, int],
    entries: dict[int, tuple[int, int, int]],
    expected: dict[int, Rec],
    flushed_end: int | None,
) -> list[Violation]:
    found = []
    begin, end = max(image.begin, image.misread_to), image.log_range()[1]
    previous = min(entries, default=0) - 1
    for offset, (physical, size, code) in sorted(entries.items()):
        problem = ""
        if offset != previous + 1:
            problem = f"no entry between offsets {previous} and {offset}"
        previous = offset
        if size == BLANK_SIZE or physical < begin:
            continue
        record = expected.get(offset)
        if flushed_end is not None and physical + size > flushed_end:
            problem = f"points to [{physical}, {physical + size}), but the flushed end is {flushed_end}"
        elif physical + size > end:
            problem = f"points to [{physical}, {physical + size}), beyond the log's end at {end}"
        elif record is None:
            problem = f"points to {physical}, but no record of that queue has that offset"
        elif record.physical_offset != physical:
            problem = f"points to {physical}, but the record with that offset is at {record.physical_offset}"
        elif record.size != size:
            problem = f"says {size} bytes, the record at {physical} has {record.size}"
        elif code != tags_code(record):
            problem = f"has tags code {code}, that of the record's tag {record.tags!r} is {tags_code(record)}"
        if problem:
            text = f"{image.name}: consume queue {_name(queue)}, entry {offset}: {problem}"
            found.append(Violation(CHECKER, text))
            if len(found) >= _SHOWN_MAX:
                break
    return found


def read_queues(image: StoreImage) -> dict[tuple[str, int], dict[int, tuple[int, int, int]]]:
    """(topic, queue id) -> offset -> entry. Padding is left out."""
    queues: dict[tuple[str, int], dict[int, tuple[int, int, int]]] = {}
    for path, content in image.folder("consumequeue"):
        topic, queue_id, name = path.split("/")
        entries = queues.setdefault((topic, int(queue_id)), {})
        first = int(name) // QUEUE_ENTRY.size
        used = _used_size(content)
        for number in range(-(-used // QUEUE_ENTRY.size)):
            entry = QUEUE_ENTRY.unpack_from(content, number * QUEUE_ENTRY.size)
            if entry[1] > 0:
                entries[first + number] = entry
    return queues


def _used_size(content: Bytes) -> int:
    """End of the last nonzero byte of a file."""
    size = len(content)
    while size:
        begin = max(0, size - 65_536)
        piece = bytes(content[begin:size]).rstrip(b"\x00")
        if piece:
            return begin + len(piece)
        size = begin
    return 0


def _name(queue: tuple[str, int]) -> str:
    return f"{queue[0]}-{queue[1]}"


def tags_code(record: Rec) -> int:
    """The expected tags code of a record's entry."""
    if record.topic == SCHEDULE_TOPIC and "DELAY" in record.property_map:
        level = min(int(record.property_map["DELAY"]), len(DELAY_LEVELS_S))
        return record.store_ms + DELAY_LEVELS_S[level - 1] * 1000
    due = record.property_map.get("TIMER_OUT_MS", "") if record.topic == TIMER_TOPIC else ""
    if due.isascii() and due.isdigit() and len(due) <= 19 and 1 << 31 <= int(due) < 1 << 61:
        return 2 * int(due) + ("TIMER_DEL_UNIQKEY" not in record.property_map)
    return java_hash(record.tags)  # also if a flipped bit that no node can notice made the time unusable


@lru_cache(maxsize=1 << 16)  # Cached because the same keys are looked up after each crash.
def java_hash(text: str) -> int:
    """Java's String.hashCode: signed 32 bits over UTF-16 units."""
    raw = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for at in range(0, len(raw), 2):
        value = (31 * value + (raw[at] << 8 | raw[at + 1])) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


# ---- index


def check_index(image: StoreImage, *, is_complete: bool, slot_count: int, tags: bool = True) -> list[Violation]:
    """Checks the index files: `slot_count` is maxHashSlotNum, `tags` whether tags are indexed."""
    found: list[Violation] = []
    held: Counter[tuple[int, int]] = Counter()  # (physical offset, hash)
    begin = max(image.begin, image.misread_to)
    records = {record.physical_offset: record for record in image.records() if record.physical_offset >= begin}
    for name, content in image.folder("index"):
        found.extend(_check_index_file(image, name, content, slot_count, held, records))
        if len(found) >= _SHOWN_MAX:
            return found
    wanted: Counter[tuple[int, int]] = Counter()
    if is_complete:
        for record in records.values():
            wanted.update((record.physical_offset, key_hash(key)) for key in index_keys(record, tags=tags))
    lacking = wanted - held
    if lacking:
        physical, hashed = min(lacking)
        keys = [key for key in index_keys(records[physical], tags=tags) if key_hash(key) == hashed]
        text = (
            f"{image.name}: the index lacks {lacking.total()} entries; the first is of the record at {physical}, "
            f"key {keys[0]!r}"
        )
        found.append(Violation(CHECKER, text))
    for (physical, hashed), count in sorted(held.items()):
        keys = index_keys(records[physical], tags=tags) if physical in records else []
        times = sum(key_hash(key) == hashed for key in keys)
        if keys and count > times:
            text = (
                f"{image.name}: the index has {count} entries of hash {hashed} for the record at {physical}, "
                f"whose keys call for {times}"
            )
            found.append(Violation(CHECKER, text))
            break
    return found


def _check_index_file(
    image: StoreImage,
    name: str,
    content: Bytes,
    slot_count: int,
    held: Counter[tuple[int, int]],
    records: dict[int, Rec],
) -> list[Violation]:
    where = f"{image.name}: index file {name}"
    entries_at = INDEX_HEADER.size + slot_count * _SLOT.size
    if len(content) < entries_at + INDEX_ENTRY.size:
        return [Violation(CHECKER, f"{where} has {len(content)} bytes, too few for {slot_count} slots")]
    begin_ms, _, _, _, used_slots, next_entry = INDEX_HEADER.unpack_from(content)
    room = (len(content) - entries_at) // INDEX_ENTRY.size
    if next_entry > room:
        return [Violation(CHECKER, f"{where} claims {next_entry} entries where {room} have room")]
    found: list[Violation] = []
    reached: set[int] = set()
    slots = bytes(content[INDEX_HEADER.size : entries_at])
    used = 0
    for slot, (newest,) in enumerate(_SLOT.iter_unpack(slots)):
        if not 0 < newest < next_entry:
            continue  # empty, or newer than the header, which is written last
        used += 1
        number = newest
        while 0 < number < next_entry:
            if number in reached:
                return [Violation(CHECKER, f"{where}: entry {number} is reached twice, from slot {slot} the last time")]
            reached.add(number)
            hashed, _, _, before = INDEX_ENTRY.unpack_from(content, entries_at + number * INDEX_ENTRY.size)
            if hashed % slot_count != slot:
                return [Violation(CHECKER, f"{where}: entry {number} of hash {hashed} is in the chain of slot {slot}")]
            if before >= number:
                return [Violation(CHECKER, f"{where}: entry {number} names {before} as the one before it")]
            number = before
    if used != used_slots and used_slots:
        found.append(Violation(CHECKER, f"{where}: {used} slots are used, the header says {used_slots}"))
    for number in range(1, next_entry):
        hashed, physical, seconds, _ = INDEX_ENTRY.unpack_from(content, entries_at + number * INDEX_ENTRY.size)
        if physical < max(image.begin, image.misread_to):
            continue
        problem = ""
        record = records.get(physical)
        if number not in reached:
            problem = "no chain leads to it"
        elif record is None:
            problem = f"it points to {physical}, where no record begins"
        elif hashed not in {key_hash(key) for key in index_keys(record, tags=True)}:
            problem = f"no key of the record at {physical} has the hash {hashed}"
        elif number > 1 and seconds != min(max(0, (record.store_ms - begin_ms) // 1000), _SECONDS_MAX):
            problem = f"says {seconds} s after {begin_ms} ms, the record at {physical} was stored at {record.store_ms}"
        if problem:
            found.append(Violation(CHECKER, f"{where}, entry {number}: {problem}"))
            if len(found) >= _SHOWN_MAX:
                return found
        held[physical, hashed] += 1
    return found


def index_keys(record: Rec, *, tags: bool) -> list[str]:
    """The keys of a record, one entry each."""
    if record.transaction == 3:
        return []
    keys = [record.uniq_key] if record.uniq_key else []
    keys.extend(record.keys)
    if tags and record.tags:
        keys.append(f"T#{record.tags}")
    return [f"{record.topic}#{key}" for key in keys]


def key_hash(key: str) -> int:
    """The hash of a key in the index."""
    value = abs(java_hash(key))
    return 0 if value == 1 << 31 else value
