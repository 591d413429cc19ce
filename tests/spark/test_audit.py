"""Every damage to a copy of a real broker's store is found at its place, and nothing else is.

Without Spark: the ranges run inline. Expected values come from the fixtures' manifests, which share no code with halog.
"""

import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from ha.errors import OptionError, StoreUnreadable
from ha.protocol.record import Message
from ha.protocol.store_files import BLANK_SIZE, ENTRY
from ha.spark.jobs.archive import ArchiveOptions, archive
from ha.spark.jobs.audit.job import AuditOptions, AuditResult, audit, audit_with
from tests.arrow.stores import QUEUE_FILE_ENTRIES, StoreWriter
from tests.protocol.golden import STORES, manifest
from tests.spark.inline import inline_runner, inline_spark
from tests.unpacking import unpack_store

SEGMENT = 16_384


class Golden:
    """A real broker's store, twice, and its manifest."""

    def __init__(self, version: str, folder: Path) -> None:
        self.manifest = manifest(version)
        self.records = [entry for entry in self.manifest["commitlog"] if entry["kind"] == "message"]
        (self.filler,) = (entry for entry in self.manifest["commitlog"] if entry["kind"] == "blank")
        self.end = self.records[-1]["offset"] + self.records[-1]["size"]
        self.master, self.slave = folder / "master", folder / "slave"
        for path in (self.master, self.slave):
            unpack_store(version, path)

    def patch(self, path: Path, physical_offset: int, new: bytes) -> None:
        """Overwrites bytes of a commitlog."""
        start = physical_offset // SEGMENT * SEGMENT
        patch_file(path / "commitlog" / f"{start:020d}", physical_offset - start, new)

    def byte(self, physical_offset: int) -> int:
        start = physical_offset // SEGMENT * SEGMENT
        return (self.master / "commitlog" / f"{start:020d}").read_bytes()[physical_offset - start]

    def flip(self, path: Path, physical_offset: int) -> None:
        self.patch(path, physical_offset, bytes([self.byte(physical_offset) ^ 0x40]))

    def pick(self, queue_offset: int = 5, topic: str = "GoldenTopic", queue_id: int = 0) -> dict[str, Any]:
        return next(
            record
            for record in self.records
            if (record["topic"], record["queueId"], record["queueOffset"]) == (topic, queue_id, queue_offset)
        )

    def audit(self, range_bytes: int = 4096, *paths: Path) -> AuditResult:
        chosen = tuple(str(path) for path in (paths or (self.master, self.slave)))
        return audit_with(inline_runner(), AuditOptions(paths=chosen, range_bytes=range_bytes, broker_name="b"))


def patch_file(path: Path, position: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(new)


@pytest.fixture(params=STORES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    return Golden(request.param, tmp_path)


@pytest.fixture
def one(tmp_path: Path) -> Golden:
    return Golden("5.5.0", tmp_path)


def found(result: AuditResult) -> set[tuple[str, str, int]]:
    return {(finding.kind, finding.copy, finding.physical_offset) for finding in result.findings}


@pytest.mark.parametrize("range_bytes", [1024, 1500, 4096, 1 << 20])
def test_two_sound_copies_are_clean_and_counted_like_the_manifest(golden: Golden, range_bytes: int) -> None:
    result = golden.audit(range_bytes)
    assert result.exit_code == 0
    assert result.findings == ()
    assert result.found == {}
    assert result.only_in == ()
    assert result.compared_bytes == golden.end
    for copy in result.copies:
        assert (copy.begin, copy.end) == (0, golden.end)
        assert copy.record_count == len(golden.records)
        assert copy.byte_count == sum(record["size"] for record in golden.records)
    assert len({copy.digest for copy in result.copies}) == 1
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    for record in golden.records:
        cell = (record["topic"], record["storeTimestamp"] // 3_600_000)
        before = counts.get(cell, (0, 0))
        counts[cell] = (before[0] + 1, before[1] + record["size"])
    assert {(row.topic, row.hour): (row.record_count, row.byte_count) for row in result.topic_hours} == counts


# Each: the damage done to the slave, and the expected findings.
Damage = Callable[[Golden], set[tuple[str, str, int]]]


def body_byte(golden: Golden) -> set[tuple[str, str, int]]:
    record = golden.pick()
    golden.flip(golden.slave, record["offset"] + 88 + 3)
    return {("crc", "slave", record["offset"]), ("different", "slave", record["offset"])}


def property_byte(golden: Golden) -> set[tuple[str, str, int]]:
    record = golden.pick()
    start = record["offset"] // SEGMENT * SEGMENT
    raw = (golden.slave / "commitlog" / f"{start:020d}").read_bytes()
    golden.flip(golden.slave, start + raw.index(b"PeerCluster", record["offset"] - start))
    return {("different", "slave", record["offset"])}


def born_host_byte(golden: Golden) -> set[tuple[str, str, int]]:
    record = golden.pick()
    golden.flip(golden.slave, record["offset"] + 50)
    return {("different", "slave", record["offset"])}


def size_too_small(golden: Golden) -> set[tuple[str, str, int]]:
    record = golden.pick()
    golden.patch(golden.slave, record["offset"], struct.pack(">i", record["size"] - 60))
    return {("unreadable", "slave", record["offset"]), ("missing", "slave", record["offset"])}


def size_over_three_records(golden: Golden) -> set[tuple[str, str, int]]:
    at = golden.records.index(golden.pick())
    size = sum(record["size"] for record in golden.records[at : at + 3])
    offset = golden.records[at]["offset"]
    golden.patch(golden.slave, offset, struct.pack(">i", size))
    return {("unreadable", "slave", offset), ("missing", "slave", offset)}


def size_huge(golden: Golden) -> set[tuple[str, str, int]]:
    offset = golden.pick()["offset"]
    golden.patch(golden.slave, offset, struct.pack(">i", 0x7FFFFFF0))
    return {("unreadable", "slave", offset), ("missing", "slave", offset)}


def body_length(golden: Golden) -> set[tuple[str, str, int]]:
    offset = golden.pick()["offset"]
    golden.patch(golden.slave, offset + 84, struct.pack(">i", -1))
    return {("unreadable", "slave", offset), ("missing", "slave", offset)}


def magic(golden: Golden) -> set[tuple[str, str, int]]:
    offset = golden.pick()["offset"]
    golden.flip(golden.slave, offset + 4)
    return {("unreadable", "slave", offset), ("missing", "slave", offset)}


def first_record(golden: Golden) -> set[tuple[str, str, int]]:
    golden.flip(golden.slave, 4)
    return {("unreadable", "slave", 0), ("missing", "slave", 0)}


def several_records_zeroed(golden: Golden) -> set[tuple[str, str, int]]:
    at = golden.records.index(golden.pick())
    lost = golden.records[at : at + 4]
    golden.patch(golden.slave, lost[0]["offset"], bytes(sum(record["size"] for record in lost)))
    return {("unreadable", "slave", lost[0]["offset"])} | {("missing", "slave", record["offset"]) for record in lost}


def physical_offset_field(golden: Golden) -> set[tuple[str, str, int]]:
    offset = golden.pick()["offset"]
    golden.patch(golden.slave, offset + 28, struct.pack(">q", offset + 1))
    return {("misplaced", "slave", offset), ("different", "slave", offset)}


def queue_offset_field(golden: Golden) -> set[tuple[str, str, int]]:
    offset = golden.pick()["offset"]
    golden.patch(golden.slave, offset + 20, struct.pack(">q", 4711))
    return {
        ("out_of_order", "slave", offset),
        ("entry_missing", "slave", offset),
        ("different", "slave", offset),
    }


def queue_offset_twice(golden: Golden) -> set[tuple[str, str, int]]:
    offset = golden.pick(5)["offset"]
    golden.patch(golden.slave, offset + 20, struct.pack(">q", 4))
    return {
        ("duplicate", "slave", offset),
        ("entry_wrong", "slave", offset),
        ("different", "slave", offset),
    }


def filler_padding(golden: Golden) -> set[tuple[str, str, int]]:
    at = golden.filler["offset"] + 20
    golden.flip(golden.slave, at)
    return {("padding", "slave", at)}


def filler_head(golden: Golden) -> set[tuple[str, str, int]]:
    golden.flip(golden.slave, golden.filler["offset"] + 5)
    return {("unreadable", "slave", golden.filler["offset"])}


def filler_size(golden: Golden) -> set[tuple[str, str, int]]:
    golden.patch(golden.slave, golden.filler["offset"], struct.pack(">i", golden.filler["size"] - 1))
    return {("unreadable", "slave", golden.filler["offset"])}


def file_cut(golden: Golden) -> set[tuple[str, str, int]]:
    """The first segment loses its last 2000 bytes."""
    cut = SEGMENT - 2000
    path = golden.slave / "commitlog" / f"{0:020d}"
    path.write_bytes(path.read_bytes()[:cut])
    lost = [record for record in golden.records if cut < record["offset"] + record["size"] <= SEGMENT]
    return {("unreadable", "slave", lost[0]["offset"])} | {("missing", "slave", record["offset"]) for record in lost}


def queue_file(golden: Golden, queue_id: int = 0) -> Path:
    return golden.slave / "consumequeue" / "GoldenTopic" / str(queue_id) / f"{0:020d}"


def entries_swapped(golden: Golden) -> set[tuple[str, str, int]]:
    raw = queue_file(golden).read_bytes()
    patch_file(queue_file(golden), 3 * 20, raw[4 * 20 : 5 * 20] + raw[3 * 20 : 4 * 20])
    return {("entry_wrong", "slave", golden.pick(3)["offset"]), ("entry_wrong", "slave", golden.pick(4)["offset"])}


def entry_blank(golden: Golden) -> set[tuple[str, str, int]]:
    patch_file(queue_file(golden), 3 * 20, struct.pack(">qiq", 0, 0x7FFFFFFF, 0))
    return {("entry_missing", "slave", golden.pick(3)["offset"])}


def entry_tags_code(golden: Golden) -> set[tuple[str, str, int]]:
    patch_file(queue_file(golden), 3 * 20 + 12, struct.pack(">q", 7))
    return {("entry_wrong", "slave", golden.pick(3)["offset"])}


def entry_size(golden: Golden) -> set[tuple[str, str, int]]:
    patch_file(queue_file(golden), 3 * 20 + 8, struct.pack(">i", 7))
    return {("entry_wrong", "slave", golden.pick(3)["offset"])}


def last_entry_removed(golden: Golden) -> set[tuple[str, str, int]]:
    last = max(
        record["queueOffset"]
        for record in golden.records
        if record["topic"] == "GoldenTopic" and record["queueId"] == 1
    )
    record = golden.pick(last, queue_id=1)
    path = golden.slave / "consumequeue" / "GoldenTopic" / "1" / f"{last // 10 * 200:020d}"
    patch_file(path, last % 10 * 20, bytes(20))
    return {("entry_missing", "slave", record["offset"])}


def entry_too_many(golden: Golden) -> set[tuple[str, str, int]]:
    last = max(
        record["queueOffset"]
        for record in golden.records
        if record["topic"] == "GoldenTopic" and record["queueId"] == 1
    )
    patch_file(
        golden.slave / "consumequeue" / "GoldenTopic" / "1" / f"{(last + 1) // 10 * 200:020d}",
        (last + 1) % 10 * 20,
        struct.pack(">qiq", 277, 296, 7),
    )
    return {("entry_extra", "slave", 277)}


DAMAGES: list[Damage] = [
    body_byte,
    property_byte,
    born_host_byte,
    size_too_small,
    size_over_three_records,
    size_huge,
    body_length,
    magic,
    first_record,
    several_records_zeroed,
    physical_offset_field,
    queue_offset_field,
    queue_offset_twice,
    filler_padding,
    filler_head,
    filler_size,
    file_cut,
    entries_swapped,
    entry_blank,
    entry_tags_code,
    entry_size,
    last_entry_removed,
    entry_too_many,
]


@pytest.mark.parametrize("range_bytes", [1500, 1 << 20])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_found_only_where_it_is(one: Golden, damage: Damage, range_bytes: int) -> None:
    expected = damage(one)
    result = one.audit(range_bytes)
    assert found(result) == expected
    assert result.exit_code == (0 if damage is filler_padding else 1)
    assert sum(sum(by_copy.values()) for by_copy in result.found.values()) == len(expected)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_single_copy_audit_finds_damage_that_needs_no_comparison(golden: Golden, damage: Damage) -> None:
    expected = {item for item in damage(golden) if item[0] not in ("different", "missing", "padding")}
    assert found(golden.audit(4096, golden.slave)) == expected


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bit_is_found_in_its_record_only(golden: Golden, seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(5):
        record = random_.choice(golden.records)
        at = record["offset"] + random_.randrange(record["size"])
        golden.patch(golden.slave, at, bytes([golden.byte(at) ^ 1 << random_.randrange(8)]))
        range_bytes = random_.choice([1024, 1777, 4096, 1 << 20])
        places = {item[1:] for item in found(golden.audit(range_bytes)) if item[0] != "time_backwards"}
        assert places == {("slave", record["offset"])}, at - record["offset"]
        alone = found(golden.audit(range_bytes, golden.slave))
        assert {item[2] for item in alone if item[0] != "time_backwards"} <= {record["offset"]}, at - record["offset"]
        golden.patch(golden.slave, at, bytes([golden.byte(at)]))


def test_difference_after_the_end_of_the_records_range(one: Golden) -> None:
    record = one.pick()
    one.flip(one.slave, record["offset"] + record["size"] - 2)
    result = one.audit(record["offset"] + record["size"] - 10)
    assert found(result) == {("different", "slave", record["offset"])}


def test_wrong_copy_is_named_even_if_first(one: Golden) -> None:
    record = one.pick()
    one.flip(one.master, record["offset"] + 91)
    assert found(one.audit()) == {("crc", "master", record["offset"]), ("different", "master", record["offset"])}


def test_of_three_copies_the_odd_one_is_named(one: Golden, tmp_path: Path) -> None:
    third = tmp_path / "third"
    shutil.copytree(one.slave, third)
    record = one.pick()
    one.flip(one.master, record["offset"] + 50)
    result = one.audit(4096, one.master, one.slave, third)
    assert found(result) == {("different", "master", record["offset"])}
    (finding,) = result.findings
    assert (finding.topic, finding.queue_id, finding.queue_offset) == ("GoldenTopic", 0, 5)
    assert finding.hour == record["storeTimestamp"] // 3_600_000
    assert "born host" in finding.detail


def test_repeated_records_are_counted_by_queue_and_hour(one: Golden) -> None:
    """Four records of a queue carry queue offsets that earlier ones have."""
    again = [one.pick(offset, queue_id=1) for offset in range(8, 12)]
    for number, record in enumerate(again):
        one.patch(one.slave, record["offset"] + 20, struct.pack(">q", 2 + number))
    result = one.audit(1 << 20, one.slave)
    assert result.found["duplicate"] == {"slave": 4}
    hour = again[0]["storeTimestamp"] // 3_600_000
    assert sum(row.found.get("duplicate", 0) for row in result.topic_hours if row.hour == hour) == 4
    assert {f.physical_offset for f in result.findings} == {record["offset"] for record in again}


def test_damaged_bytes_are_measured_and_their_queue_offset_is_known(one: Golden) -> None:
    record = one.pick()
    one.flip(one.slave, record["offset"] + 4)
    (finding,) = one.audit(4096, one.slave).findings
    assert (finding.physical_offset, finding.length) == (record["offset"], record["size"])
    assert (finding.topic, finding.queue_id, finding.queue_offset) == ("GoldenTopic", 0, 5)


def test_a_hole_in_a_queue_is_found_where_the_log_has_never_had_the_record(one: Golden) -> None:
    """Records behind the hole carry one more than they should, in log and queue alike, in both copies."""
    moved = sorted(
        (r for r in one.records if (r["topic"], r["queueId"]) == ("GoldenTopic", 3) and r["queueOffset"] >= 4),
        key=lambda record: -record["queueOffset"],
    )
    for path in (one.master, one.slave):
        queue = path / "consumequeue" / "GoldenTopic" / "3"
        raw = b"".join(file.read_bytes() for file in sorted(queue.iterdir()))
        entries = raw[: 4 * 20] + struct.pack(">qiq", 0, 0x7FFFFFFF, 0) + raw[4 * 20 :]
        for number in range(0, len(entries), 200):
            (queue / f"{number:020d}").write_bytes(entries[number : number + 200].ljust(200, b"\0"))
        for record in moved:
            one.patch(path, record["offset"] + 20, struct.pack(">q", record["queueOffset"] + 1))
    result = one.audit()
    behind = one.pick(4, queue_id=3)["offset"]
    assert found(result) == {("hole", "master", behind), ("hole", "slave", behind)}
    assert [(f.queue_id, f.queue_offset, f.length) for f in result.findings] == [(3, 4, 1), (3, 4, 1)]


def test_damaged_last_record_is_distinguished_from_lag(one: Golden) -> None:
    last = one.records[-1]
    one.patch(one.slave, last["offset"], struct.pack(">i", last["size"] + 1))
    result = one.audit()
    assert result.exit_code == 1
    assert found(result) == {("different", "slave", last["offset"])}


def test_bytes_of_one_copy_only_are_not_damage(one: Golden) -> None:
    """The slave has deleted its first segment and has not received the last record yet."""
    last = one.records[-1]
    (one.slave / "commitlog" / f"{0:020d}").unlink()
    one.patch(one.slave, last["offset"], bytes(last["size"]))
    patch_file(one.slave / "consumequeue" / last["topic"] / "0" / f"{0:020d}", last["queueOffset"] * 20, bytes(20))
    result = one.audit()
    assert result.findings == ()
    assert result.exit_code == 0
    assert [(c.begin, c.end, c.copies) for c in result.only_in] == [
        (0, SEGMENT, ("master",)),
        (last["offset"], one.end, ("master",)),
    ]
    assert result.compared_bytes == last["offset"] - SEGMENT


def test_a_deleted_topic_is_no_damage(one: Golden) -> None:
    """Its queues disappear at once, its records only with their segments."""
    topic = "RMQ_SYS_TRANS_HALF_TOPIC"
    shutil.rmtree(one.slave / "consumequeue" / topic)
    result = one.audit()
    count = sum(record["topic"] == topic for record in one.records)
    assert (result.exit_code, result.found) == (0, {"topic_deleted": {"slave": count}})
    shutil.rmtree(one.master / "consumequeue")
    assert one.audit().exit_code == 0


def test_a_lost_queue_of_a_topic_is_damage(one: Golden) -> None:
    shutil.rmtree(one.slave / "consumequeue" / "GoldenTopic" / "3")
    result = one.audit()
    lost = [r for r in one.records if (r["topic"], r["queueId"]) == ("GoldenTopic", 3)]
    assert found(result) == {("entry_missing", "slave", record["offset"]) for record in lost}


@pytest.mark.parametrize("range_bytes", [1024, 1 << 20])
def test_a_topic_of_rocketmq_that_was_created_again_is_no_damage(tmp_path: Path, range_bytes: int) -> None:
    """Its queue offsets begin at 0 again, and its new queues have no entries for the records of the earlier topic."""

    def put(count: int, queues: int) -> None:
        for number in range(count):
            store.put(Message("again", number % queues, b"%d" % number))
            store.put(Message("other", 0, b"%d" % number))

    def audit() -> AuditResult:
        return audit_with(inline_runner(), AuditOptions(paths=(str(store.root),), range_bytes=range_bytes))

    store = StoreWriter(tmp_path / "store")
    for count, queues in ((30, 3), (20, 2), (40, 2)):
        store.delete_topic("again")
        put(count, queues)
    assert (audit().exit_code, audit().found) == (0, {"topic_deleted": {"store": 50}})
    archive_folder = tmp_path / "archive"
    archive(inline_spark(), ArchiveOptions(path=str(store.root), archive=str(archive_folder)))
    options = AuditOptions(paths=(str(store.root),), archive=str(archive_folder), range_bytes=range_bytes)
    assert audit_with(inline_runner(), options).found == {"topic_deleted": {"store": 50, "archive": 50}}
    # Damage in the new topic is damage.
    lost, wrong = store.queued["again", 0][-2:]
    begin = store.next_queue_offset["again", 0] - 2
    store.write_entry("again", 0, begin, ENTRY.pack(0, BLANK_SIZE, 0))
    store.write_entry("again", 0, begin + 1, ENTRY.pack(wrong, 100, 0))
    store.write_entry("again", 1, 0, ENTRY.pack(store.queued["again", 1][-1], 100, 0))
    assert {("entry_missing", "store", lost), ("entry_wrong", "store", wrong)} <= found(audit())
    store.delete_topic("again")
    assert audit().found == {"topic_deleted": {"store": 90}}


def test_retention_during_an_audit_is_no_damage(one: Golden) -> None:
    """The slave's first segment is deleted when two of its four ranges have been examined."""
    examined = 0

    def run(function: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterator[list[Any]]:
        nonlocal examined
        for task in tasks:
            if examined == 2:
                (one.slave / "commitlog" / f"{0:020d}").unlink()
            yield [function(task)]
            examined += 1

    options = AuditOptions(paths=(str(one.master), str(one.slave)), range_bytes=4096)
    result = audit_with(run, options)
    assert result.findings == ()
    assert result.exit_code == 0
    (note,) = result.notes
    assert note.startswith("slave: retention deleted")
    assert "16384" in note
    assert result.copies[0].record_count == len(one.records)
    examined = 0


def test_logs_of_different_origin_share_nothing(tmp_path: Path) -> None:
    old, new = Golden("4.9.7", tmp_path / "a"), Golden("5.5.0", tmp_path / "b")
    result = audit_with(
        inline_runner(), AuditOptions(paths=(str(old.master), str(new.master)), names=("old", "new"), range_bytes=4096)
    )
    assert result.exit_code == 1
    assert result.found["missing"]["new"] + result.found["different"]["new"] == sum(
        record["offset"] < new.end for record in old.records
    )


def test_examples_are_bounded_and_counts_are_not(one: Golden) -> None:
    for record in one.records:
        one.flip(one.slave, record["offset"] + 50)
    options = AuditOptions(paths=(str(one.master), str(one.slave)), range_bytes=4096, examples_max=3)
    result = audit_with(inline_runner(), options)
    assert len(result.findings) == 3
    assert result.found == {"different": {"slave": len(one.records)}}
    assert sum(row.found.get("different", 0) for row in result.topic_hours) == len(one.records)


def test_bad_input_is_refused_with_its_name(one: Golden, tmp_path: Path) -> None:
    with pytest.raises(StoreUnreadable, match="nowhere"):
        one.audit(4096, one.master, tmp_path / "nowhere")
    with pytest.raises(OptionError, match="paths"):
        audit_with(inline_runner(), AuditOptions(paths=()))
    with pytest.raises(OptionError, match="names"):
        audit_with(inline_runner(), AuditOptions(paths=(str(one.master),), names=("a", "b")))
    with pytest.raises(OptionError, match="range_bytes"):
        audit_with(inline_runner(), AuditOptions(paths=(str(one.master),), range_bytes=0))


def test_executors_find_what_the_driver_would(one: Golden, spark: SparkSession) -> None:
    expected = body_byte(one)
    steps: list[tuple[str, int, int]] = []
    options = AuditOptions(paths=(str(one.master), str(one.slave)), range_bytes=4096)
    result = audit(spark, options, lambda *step: steps.append(step))
    assert found(result) == expected
    inline = audit_with(inline_runner(), options)
    assert (result.copies, result.findings, result.topic_hours) == (inline.copies, inline.findings, inline.topic_hours)
    assert ("compare", one.end, one.end) in steps
    assert steps[-1] == ("queues", 2, 2)


def test_entries_before_a_queue_file_that_vanished_during_an_audit_are_not_wrong(tmp_path: Path) -> None:
    """For example while a node removes the last entries after a crash, to write them again."""
    store = StoreWriter(tmp_path / "store")
    for number in range(2 * QUEUE_FILE_ENTRIES + 20):
        store.put(Message("t", 0, b"body %d" % number))

    def run(function: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterator[list[Any]]:
        for task in tasks:
            yield [function(task)]
            last = store.root / "consumequeue" / "t" / "0" / f"{2 * QUEUE_FILE_ENTRIES * ENTRY.size:020d}"
            last.unlink(missing_ok=True)

    result = audit_with(run, AuditOptions(paths=(str(store.root),), range_bytes=store.offsets[80]))
    assert result.found == {"entry_missing": {"store": 20}}
