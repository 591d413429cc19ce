"""The small files of a store: consume queues, index, checkpoint, and the tables under config/."""

from array import array
from functools import partial
from pathlib import Path
from zlib import crc32

from ha.broker.config_file import ConfigFile
from ha.broker.groups import SubscriptionGroups
from ha.broker.offsets import ConsumerOffsetTable
from ha.broker.options import BrokerOptions
from ha.broker.topics import Topics
from ha.errors import CorruptLog, RemoteProtocolError
from ha.protocol.checksum_file import (
    GROUP_ENTRIES,
    GROUP_SIZE,
    ChecksumHead,
    pack_group,
    unpack_group,
    unpack_head,
)
from ha.protocol.store_files import Checkpoint, IndexHeader
from ha.store.checkpoint import load_checkpoint, load_flushed_to, min_timestamp_ms
from ha.store.consume_queues import ConsumeQueues
from ha.store.key_index import KeyIndex
from ha.store.queue_ends import QUEUE_ENDS_FILE, load_queue_ends, save_queue_ends
from ha.store.truncation import load_intent, save_intent
from tests.fuzz.bodies import config_texts
from tests.fuzz.damage import Edit, damaged
from tests.fuzz.harness import Harness
from tests.fuzz.recovery import good_files
from tests.fuzz.replication import run_virtually
from tests.store.disks import Inode, MemoryDisk, run_inline

ROOT = Path("/store")
TABLES = ("topics.json", "consumerOffset.json", "subscriptionGroup.json")
SEPARATOR = b"\x00--bak--\x00"


def queues_and_index(data: bytes) -> None:
    """The first byte chooses: 0 a consume queue's only file, 1 an index file, 2 the checkpoint, 3 damage to all."""
    if not data:
        return
    kind, content = data[0] % 4, data[1:]
    files = {name: raw for name, raw in good_files().items() if not name.startswith("commitlog")}
    if kind == 0:
        files = {"consumequeue/T/0/00000000000000000000": content[:160].ljust(160, b"\x00")}
    elif kind == 1:
        size = next(len(raw) for name, raw in files.items() if name.startswith("index/"))
        files = {"index/20260101000000000": content[:size].ljust(size, b"\x00")}
    elif kind == 2:
        files = {"checkpoint": content}
    else:
        files = damaged(files, content)
    disk = MemoryDisk({ROOT / name: Inode(bytearray(raw)) for name, raw in files.items()})
    read_derived(disk)
    try:
        assert Checkpoint.unpack(Checkpoint.unpack(content).pack()) == Checkpoint.unpack(content)
    except RemoteProtocolError:
        assert len(content) < 48
    try:
        assert IndexHeader.unpack(content).pack() == content[:40]
    except RemoteProtocolError:
        assert len(content) < 40


def read_derived(disk: MemoryDisk) -> None:
    """Open and ask everything that is derived from the log."""
    assert min_timestamp_ms(load_checkpoint(disk, ROOT / "checkpoint")) >= 0
    assert load_flushed_to(disk, ROOT / "checkpoint") >= 0
    queues = ConsumeQueues(disk, ROOT / "consumequeue", 8)
    queues.load(is_clean=False)
    assert queues.max_physical_offset >= 0
    for queue in queues:
        assert 0 <= queue.min_offset <= queue.max_offset
        queue.read(queue.min_offset, 100)
        for offset in (0, 100, 4096, 1 << 62):
            queue.first_record_from(offset)
            queue.has_record_at(offset)
    queues.correct_min(200)
    queues.truncate(4096)
    assert all(queue.min_offset <= queue.max_offset for queue in queues)
    index = KeyIndex(
        disk,
        ROOT / "index",
        slot_count=50,
        entry_count=40,
        index_tags=True,
        wall_clock_ms=lambda: 1_700_000_000_000,
    )
    index.load(None)
    for key in ("k1", "U2", "x"):
        assert len(index.query("T", key, 64, 0, 1 << 62)) <= 64
    index.drop_files_beyond(2000)
    index.write(index.take_unwritten())


def checksum_files(data: bytes) -> None:
    """The checksums of a segment: those that are read are unchanged after writing; invalid ones are ignored."""
    head = unpack_head(data)
    if head is not None:
        assert unpack_head(head.pack()) == head
        assert head.block_count >= 1
        assert head.group_count >= 1
    for number in (0, 1, 1 << 40):
        group = unpack_group(number, data[:GROUP_SIZE])
        if group is not None and any(data[:GROUP_SIZE]):
            crcs, lengths = group
            assert len(crcs) == len(lengths) == GROUP_ENTRIES
    fields = data[: GROUP_ENTRIES * 8].ljust(GROUP_ENTRIES * 8, b"\x00")
    words = array("I", fields)
    again = unpack_group(0, pack_group(0, words[0::2], words[1::2]))
    assert again == (words[0::2], words[1::2])


def queue_ends(data: bytes) -> None:
    """Where queues ended, as a file of any content, and with a guard that is right: numbers, or nothing is known. The
    same of the place where a log is being cut."""
    path = ROOT / QUEUE_ENDS_FILE
    guarded = b"%08x\n%b" % (crc32(data), data)
    for content in (data, guarded):
        ends = load_queue_ends(MemoryDisk({path: Inode(bytearray(content))}), path)
        disk = MemoryDisk({})
        save_queue_ends(disk, path, ends)
        assert load_queue_ends(disk, path) == ends
        cut_at = load_intent(MemoryDisk({path: Inode(bytearray(content))}), path)
        if cut_at is not None:
            save_intent(disk, path, cut_at)
            assert load_intent(disk, path) == cut_at


def tables(data: bytes) -> None:
    """The first byte chooses the table, the rest is its file and, behind a separator, its .bak: CorruptLog or a table
    that is the same after it was saved and loaded again."""
    if not data:
        return
    name = TABLES[data[0] % len(TABLES)]
    content, _, backup = data[1:].partition(SEPARATOR)
    disk = MemoryDisk({ROOT / name: Inode(bytearray(content)), ROOT / (name + ".bak"): Inode(bytearray(backup))})
    options = BrokerOptions(config_dir=ROOT)
    file = ConfigFile(ROOT / name, disk=disk, run_blocking=run_inline)

    async def scenario() -> None:
        match name:
            case "topics.json":
                topics = partial(Topics, file, options, wall_clock_ms=lambda: 5)
                first = topics()
                await first.load()
                again = topics()
                await again.load()
                assert first.snapshot().topic_config_table == again.snapshot().topic_config_table
                assert isinstance(await again.ensure("one_more", 1), object)
            case "consumerOffset.json":
                offsets = ConsumerOffsetTable(file, options)
                await offsets.load()
                offsets.commit("g", "t", 0, 1)
                await offsets.save()
                saved = ConsumerOffsetTable(file, options)
                await saved.load()
                assert saved.get("g", "t", 0) == 1
                assert saved.snapshot() == offsets.snapshot()
            case _:
                groups = SubscriptionGroups(file, options, wall_clock_ms=lambda: 5)
                await groups.load()
                await groups.find_or_create("one_more")
                loaded = SubscriptionGroups(file, options, wall_clock_ms=lambda: 5)
                await loaded.load()
                assert loaded.get("one_more") is not None

    try:
        run_virtually(scenario)
    except* CorruptLog:
        pass


def file_seeds() -> list[bytes]:
    """The files of a good store, and damage to each."""
    files = {name: raw for name, raw in good_files().items() if not name.startswith("commitlog")}
    found = []
    for number, (name, raw) in enumerate(sorted(files.items())):
        if name.startswith("consumequeue"):
            found.append(b"\x00" + raw)
        elif name.startswith("index"):
            found.append(b"\x01" + raw)
        elif name == "checkpoint":
            found.append(b"\x02" + raw[:48])
        for kind in range(4):
            found.append(b"\x03" + Edit(number, 20, kind, 4, b"\xff\x00\x7f\x01").to_bytes())
    return found


def table_seeds() -> list[bytes]:
    """The tables of the golden stores."""
    numbers = {name: number for number, name in enumerate(TABLES)}
    return [
        bytes([number]) + content + tail
        for name, content in config_texts()
        for table, number in numbers.items()
        if name.endswith("/" + table)
        for tail in (b"", SEPARATOR + b'{"topicConfigTable":{}}')
    ]


WORDS = (
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\x00\x00\x00\x01",
    SEPARATOR,
    b'"offsetTable":{',
    b'"topicConfigTable":{',
    b'"subscriptionGroupTable":{',
    b'"groupRetryPolicy":{',
    b"{0:",
    b"null",
    b"[[[[[[",
)

HARNESSES = {
    "queue_and_index_files": Harness(run=queues_and_index, seeds=file_seeds, words=WORDS, size_max=1100),
    "checksum_files": Harness(
        run=checksum_files,
        seeds=lambda: [
            ChecksumHead(4096, 1 << 20, 0).pack(),
            pack_group(0, array("I", range(63)), array("I", [4096] * 63)),
            bytes(GROUP_SIZE),
        ],
        words=WORDS,
        size_max=1024,
    ),
    "queue_ends": Harness(
        run=queue_ends,
        seeds=lambda: [b"{}", b'{"T":{"0":7,"1":0}}', b'00000000\n{"T":{"0":7}}', b"4096"],
        words=(b'{"T":', b'"0":', b"9223372036854775808", b"-1", b"}}"),
    ),
    "config_files": Harness(run=tables, seeds=table_seeds, words=WORDS, memory_max=16 << 20),
}
