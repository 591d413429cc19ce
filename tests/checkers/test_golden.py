"""The checkers accept stores of real RocketMQ brokers, and find damage in them."""

from collections.abc import Callable
from pathlib import Path
from struct import Struct

import pytest

from tests.checkers import derived, queue_offsets, soundness
from tests.checkers.derived import INDEX_ENTRY, INDEX_HEADER, QUEUE_ENTRY
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation
from tests.protocol.golden import STORES, manifest, store_files
from tests.unpacking import unpack_store

SLOTS = 1000
ENTRIES_AT = INDEX_HEADER.size + 4 * SLOTS
_INT32 = Struct(">i")


@pytest.fixture(params=STORES)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def files(version: str) -> dict[str, bytearray]:
    return {name: bytearray(content) for name, content in store_files(version).items()}


@pytest.fixture
def judge(version: str, files: dict[str, bytearray]) -> Callable[[], list[Violation]]:
    def every_checker() -> list[Violation]:
        image = StoreImage(files, name="golden")
        tags = version == "5.5.0"
        return [
            *soundness.check(image, zero_behind_end=False),
            *queue_offsets.check_log(image),
            *derived.check(image, is_complete=True, index_slot_count=SLOTS, index_tags=tags),
        ]

    return every_checker


Judge = Callable[[], list[Violation]]


def only(files: dict[str, bytearray], folder: str) -> bytearray:
    """The largest file of a folder."""
    return max(
        (content for name, content in files.items() if name.startswith(folder)), key=lambda c: len(c.strip(b"\0"))
    )


def test_real_store_is_valid(judge: Judge) -> None:
    assert judge() == []


def test_parser_agrees_with_the_manifest(version: str, files: dict[str, bytearray]) -> None:
    expected = [entry for entry in manifest(version)["commitlog"] if entry["kind"] == "message"]
    found = StoreImage(files).records()
    assert [
        (r.physical_offset, r.size, r.topic, r.queue_id, r.queue_offset, r.store_ms, r.property_map) for r in found
    ] == [
        tuple(e[name] for name in ("offset", "size", "topic", "queueId", "queueOffset", "storeTimestamp", "properties"))
        for e in expected
    ]


def test_a_directory_is_read_as_its_files_are(version: str, tmp_path: Path, files: dict[str, bytearray]) -> None:
    unpack_store(version, tmp_path)
    image = StoreImage.from_directory(tmp_path)
    assert image.records() == StoreImage(files).records()
    assert set(image.files) == set(files)
    assert image.segment_size == 16384


def test_flipped_bit_is_found_unless_unprotected_by_a_checksum(files: dict[str, bytearray], judge: Judge) -> None:
    record = StoreImage(files).records()[5]
    segment = files["commitlog/00000000000000000000"]
    # The format covers flag, born and store time, hosts, reconsume times and transaction offset by no checksum.
    unprotected = {*range(16, 20), *range(36, 84)}
    for position in range(record.size - len(record.properties)):
        if position in unprotected:
            continue
        segment[record.physical_offset + position] ^= 0x10
        assert judge(), position
        segment[record.physical_offset + position] ^= 0x10
    assert judge() == []


@pytest.mark.parametrize("at", [0, 4, 8], ids=["physical offset", "size", "tags code"])
def test_a_wrong_queue_entry_is_found(files: dict[str, bytearray], judge: Judge, at: int) -> None:
    queue = only(files, "consumequeue/")
    queue[QUEUE_ENTRY.size + at + 3] ^= 1
    [violation, *_] = judge()
    assert "entry 1" in violation.text
    assert violation.checker == "derived"


def test_a_lost_queue_entry_is_found_in_the_middle_and_at_the_end(files: dict[str, bytearray], judge: Judge) -> None:
    queue = only(files, "consumequeue/")
    whole = bytes(queue)
    queue[QUEUE_ENTRY.size : 2 * QUEUE_ENTRY.size] = bytes(QUEUE_ENTRY.size)
    assert "no entry between offsets 0 and 2" in str(judge())
    queue[:] = whole
    used = -(-len(whole.rstrip(b"\0")) // QUEUE_ENTRY.size)
    queue[(used - 1) * QUEUE_ENTRY.size : used * QUEUE_ENTRY.size] = bytes(QUEUE_ENTRY.size)
    assert "lacks 1 entries" in str(judge())


def test_a_doubled_queue_entry_is_found(files: dict[str, bytearray], judge: Judge) -> None:
    queue = next(c for n, c in files.items() if n.startswith("consumequeue/") and not any(c[-QUEUE_ENTRY.size :]))
    used = -(-len(bytes(queue).rstrip(b"\0")) // QUEUE_ENTRY.size) * QUEUE_ENTRY.size
    queue[used : used + QUEUE_ENTRY.size] = queue[used - QUEUE_ENTRY.size : used]
    assert "no record of that queue has that offset" in str(judge())


def test_a_missing_queue_is_found(files: dict[str, bytearray], judge: Judge) -> None:
    name = next(name for name in files if name.startswith("consumequeue/"))
    del files[name]
    assert "lacks" in str(judge())


def index_damage(name: str, index: bytearray) -> None:
    """Damages the entries around the second-newest one in one way."""
    *_, next_entry = INDEX_HEADER.unpack_from(index)
    last = ENTRIES_AT + (next_entry - 1) * INDEX_ENTRY.size
    if name == "hash":
        index[last + 3] ^= 1
    elif name == "physical offset":
        index[last + 11] ^= 1
    elif name == "seconds":
        index[last + 14] ^= 1
    elif name == "slot emptied":
        hashed = INDEX_ENTRY.unpack_from(index, last)[0]
        at = INDEX_HEADER.size + 4 * (hashed % SLOTS)
        index[at : at + 4] = bytes(4)
    elif name == "last entry dropped":
        index[36:40] = _INT32.pack(next_entry - 1)
    elif name == "chain cut":
        for number in range(next_entry - 1, 0, -1):
            at = ENTRIES_AT + number * INDEX_ENTRY.size
            if INDEX_ENTRY.unpack_from(index, at)[3] > 0:
                index[at + 16 : at + 20] = bytes(4)
                return
        raise AssertionError("no chain of two")
    elif name == "entry doubled":
        hashed, physical, seconds, _ = INDEX_ENTRY.unpack_from(index, last)
        index[last + 20 : last + 40] = INDEX_ENTRY.pack(hashed, physical, seconds, next_entry - 1)
        at = INDEX_HEADER.size + 4 * (hashed % SLOTS)
        index[at : at + 4] = _INT32.pack(next_entry)
        index[36:40] = _INT32.pack(next_entry + 1)


@pytest.mark.parametrize(
    "name",
    ["hash", "physical offset", "seconds", "slot emptied", "last entry dropped", "chain cut", "entry doubled"],
)
def test_a_damaged_index_is_found(files: dict[str, bytearray], judge: Judge, name: str) -> None:
    index_damage(name, only(files, "index/"))
    found = judge()
    assert found
    assert {violation.checker for violation in found} == {"derived"}


def test_a_missing_index_is_found(files: dict[str, bytearray], judge: Judge) -> None:
    for name in [name for name in files if name.startswith("index/")]:
        del files[name]
    assert "the index lacks" in str(judge())


def test_hole_in_the_log_is_found_and_records_behind_it_are_counted(files: dict[str, bytearray], judge: Judge) -> None:
    record = StoreImage(files).records()[10]
    files["commitlog/00000000000000000000"][record.physical_offset : record.end] = bytes(record.size)
    found = judge()
    assert f"the chain of records breaks at physical offset {record.physical_offset}" in str(found)
    assert "can't be reached" in str(found)


def test_a_filler_lost_at_the_end_of_a_segment_is_found(files: dict[str, bytearray], judge: Judge) -> None:
    segment = files["commitlog/00000000000000000000"]
    filler = bytes(segment).rindex(b"\xcb\xd4\x31\x94") - 4
    segment[filler:] = bytes(len(segment) - filler)
    assert "can't be reached" in str(judge())


def test_a_missing_segment_is_found(files: dict[str, bytearray], judge: Judge) -> None:
    files["commitlog/00000000000000049152"] = bytearray(16384)
    assert "no segment between" in str(judge())
