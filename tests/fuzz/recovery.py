"""A store opened over damaged files, in memory."""

import functools

from ha.errors import CorruptLog, DamagedBytes
from ha.protocol.record import Message, decode_record
from ha.protocol.store_files import segment_name
from ha.store.message_store import MessageStore, open_message_store
from tests.fuzz.damage import Edit, damaged, edits
from tests.fuzz.harness import Harness
from tests.fuzz.replication import run_virtually
from tests.store.disks import Inode, MemoryDisk, run_inline
from tests.store.stores import ROOT, SEGMENT, WallClock, dispatched, message, small_options

IS_CRASHED, IS_SLAVE, IS_WITHOUT_QUEUES, IS_SYNC_FLUSH, IS_RAW = 1, 2, 4, 8, 16
"""Flags in the first byte of an input. Raw: the rest is the start of the only segment, and there are no other files."""


@functools.cache
def good_files() -> dict[str, bytes]:
    """A store of three segments, two topics, several queue and index files, stopped in order; names below its root."""
    disk = MemoryDisk()

    async def fill() -> None:
        async with open_message_store(
            small_options(), disk=disk, run_blocking=run_inline, wall_clock_ms=WallClock()
        ) as store:
            for n in range(40):
                topic = ("T", "größe")[n % 2]
                await store.log.put([message(n, topic=topic, queue_id=n % 3 // 2, size=60 + n)])
            await dispatched(store)

    run_virtually(fill)
    return {str(path.relative_to(ROOT)): bytes(inode.content) for path, inode in disk.inodes.items()}


def recover(data: bytes) -> None:
    """Damage of any file: CorruptLog, or a store that reads, takes a message, and opens again as it was closed.

    If the log alone was damaged, after an orderly stop, then nothing is read but what was written: the checksums tell.
    """
    if not data:
        return
    marks = data[0]
    files = damaged(good_files(), data[1:])
    if marks & IS_RAW:
        files = {f"commitlog/{segment_name(0)}": data[1 : SEGMENT + 1].ljust(SEGMENT, b"\x00")}
    if marks & IS_WITHOUT_QUEUES:
        files = {name: content for name, content in files.items() if not name.startswith(("consumequeue", "index"))}
    if marks & IS_CRASHED:
        files["abort"] = b""
    before = {name: content for name, content in files.items() if name.startswith("commitlog/")}
    names = sorted(good_files())
    touched = {names[edit.file % len(names)] for edit in edits(data[1:])}
    is_log_alone = all(name.startswith("commitlog/") for name in touched) and not marks & (
        IS_CRASHED | IS_WITHOUT_QUEUES | IS_RAW
    )
    written = good_log() if is_log_alone else None
    options = small_options(
        is_slave=bool(marks & IS_SLAVE), flush_mode="SYNC_FLUSH" if marks & IS_SYNC_FLUSH else "ASYNC_FLUSH"
    )
    disk = MemoryDisk({ROOT / name: Inode(bytearray(content)) for name, content in files.items()})
    clock = WallClock(1_700_000_100_000)
    ends: list[int] = []

    async def open_and_put() -> None:
        async with open_message_store(options, disk=disk, run_blocking=run_inline, wall_clock_ms=clock) as store:
            await check_reads(store, written)
            [result] = await store.log.put([Message("new", 0, b"after", b"KEYS\x01new\x02")])
            if result.status.is_stored:
                record = decode_record(bytes(await store.log.read(result.physical_offset, result.size)))
                assert record.body == b"after"
            ends.append(store.log.max_offset.value)

    async def open_again() -> None:
        async with open_message_store(options, disk=disk, run_blocking=run_inline, wall_clock_ms=clock) as store:
            await check_reads(store, None)
            assert store.log.max_offset.value == ends[0], (store.log.max_offset.value, ends)

    try:
        run_virtually(open_and_put)
    except* CorruptLog:
        after = {str(p.relative_to(ROOT)): bytes(i.content) for p, i in disk.inodes.items() if "commitlog" in p.parts}
        # Only an empty last file may have been deleted; short or missing files may have been filled with zeros.
        for name, content in before.items():
            held = after.pop(name, b"")
            assert held.startswith(content), name
            assert not any(held[len(content) :]), name
        assert not any(map(any, after.values()))
    if ends:
        run_virtually(open_again)


@functools.cache
def good_log() -> bytes:
    """The commitlog of the good store."""
    return b"".join(content for name, content in sorted(good_files().items()) if name.startswith("commitlog/"))


async def check_reads(store: MessageStore, written: bytes | None) -> None:
    """Queues lie within the log, ascend, and can be read; the log can be walked from its first record to the end.

    `written`: the expected content of the log.
    """
    log = store.log
    for queue in store.queues:
        entries = queue.read(queue.min_offset, queue.max_offset - queue.min_offset)
        assert len(entries) == queue.max_offset - queue.min_offset
    for key in ("k1", "new", "U5"):
        await store.query("T", key, 64, 0, 1 << 62)
    position = max(log.min_offset, 0)
    while position < log.max_offset.value:
        try:
            chunk = bytes(await log.read(position, log.segment_size))
        except DamagedBytes as damage:
            position = max(damage.end, position + 1)
            continue
        assert chunk
        assert written is None or chunk == written[position : position + len(chunk)]
        position += len(chunk)


def seeds() -> list[bytes]:
    """No damage, and some of every kind to every file."""
    names = sorted(good_files())
    first = good_files()[f"commitlog/{segment_name(0)}"]
    found = [bytes([marks]) for marks in range(16)]
    found += [bytes([IS_RAW | marks]) + first[:size] for marks in (0, IS_CRASHED) for size in (600, 900)]
    for number, name in enumerate(names):
        size = len(good_files()[name])
        for kind, content, count in ((0, b"\xff\xff\xff\xff", 4), (1, b"\x01", 0), (2, b"", 9), (3, b"", 0)):
            for position in (4, size // 2):
                found.append(bytes([number % 4]) + Edit(number, position, kind, count, content).to_bytes())
    return found


WORDS = (
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\xda\xa3\x20\xa7",
    b"\xcb\xd4\x31\x94",
    b"\x00\x00\x00\x08",
    b"../..",
    *(bytes([number]) + b"\x00\x00" for number in range(12)),
)

HARNESSES = {
    "recovery": Harness(run=recover, seeds=seeds, words=WORDS, size_max=1000, seconds_max=5.0, memory_max=32 << 20)
}
