"""Stores that are not as they should be: damaged, cut, cleaned, replaced, or written to while they are read."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from struct import Struct

import msgspec
import pytest

from ha.arrow import LogReader, ReadOptions, RowFilter, read_arrow
from ha.arrow.confirmed import Confirmed
from ha.arrow.queues import QueueId
from ha.errors import CorruptLog, OptionError, RecordsGone, StoreUnreadable
from ha.protocol.batch import encode_batch
from ha.protocol.codes import SysFlag
from ha.protocol.properties import encode_properties, tags_code
from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_record
from ha.protocol.store_files import BLANK_SIZE, ENTRY, ENTRY_SIZE, segment_name
from tests.arrow.oracle import rows_of
from tests.arrow.stores import QUEUE_FILE_ENTRIES, STORE_HOST, StoreWriter

PLACES = ReadOptions(columns=("topic", "queueOffset", "physicalOffset"))
BODIES = ReadOptions(columns=("queueOffset", "body", "crcOk"))


def filled(root: Path, count: int = 30, *, segment_size: int = 16 * 1024, first_offset: int = 0) -> StoreWriter:
    store = StoreWriter(root, segment_size=segment_size, first_offset=first_offset)
    for n in range(count):
        store.put(Message("t", 0, b"body %d" % n), store_ms=1000 + n)
    return store


# ---- what is no store


def test_directory_without_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreadable, match="the directory does not exist"):
        LogReader(tmp_path / "missing")
    with pytest.raises(StoreUnreadable, match="storePathRootDir"):
        LogReader(tmp_path)


def test_unknown_column_is_an_error(tmp_path: Path) -> None:
    store = filled(tmp_path / "s")
    with pytest.raises(OptionError, match=r"no column 'bdy'.*topic, brokerName"):
        read_arrow(store.root, columns=["bdy"])


def test_an_empty_store_has_no_rows(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "s")
    assert read_arrow(store.root).read_all().num_rows == 0
    store.write_log(0, bytes(8))  # allocated, nothing written yet
    assert read_arrow(store.root).read_all().num_rows == 0


def test_a_log_without_queues_ends_at_its_last_sound_record(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "s", segment_size=4096)
    for _ in range(60):
        store.put(Message("t", 0, b"x" * 30), is_queued=False)
    store.write_log(store.offset, b"\0\0\1\0\xda\xa3\x20\xa7 a record that was being written")
    with LogReader(store.root) as reader:
        assert reader.end_offset() == store.offset
        assert [int(o) for part in reader.walk(0, 1 << 40) for o in part] == store.offsets


# ---- the end


def test_bytes_after_the_last_queued_record_are_not_read(tmp_path: Path) -> None:
    store = filled(tmp_path / "s")
    confirmed = store.offset
    store.put(Message("t", 0, b"written, not confirmed"), is_queued=False)
    with LogReader(store.root) as reader:
        assert reader.end_offset() == confirmed
        assert len(rows_of(reader.read_range(0, reader.end_offset(), PLACES))) == 30


def test_stale_queue_entries_after_the_end_are_ignored(tmp_path: Path) -> None:
    """RocketMQ leaves entries in the file that it cut off after a crash."""
    store = filled(tmp_path / "s")
    for queue_offset in (30, 31, 32):
        store.write_entry("t", 0, queue_offset, ENTRY.pack(store.offset + 500 * queue_offset, 120, 0))
    with LogReader(store.root) as reader:
        assert reader.queue_range("t", 0) == (0, 30)
        assert reader.end_offset() == store.offset


def test_stale_entry_of_another_record_is_ignored(tmp_path: Path) -> None:
    store = filled(tmp_path / "s")
    other = store.put(Message("u", 0, b"took the place"))
    store.write_entry("t", 0, 30, ENTRY.pack(other, store.offset - other, 0))
    with LogReader(store.root) as reader:
        # The entry lies before the confirmed end, so its row is shown as the damage that it is.
        found = rows_of(reader.read_queue("t", 0, 29, 31, ReadOptions(columns=("queueOffset", "body", "crcOk"))))
    assert found == [
        {"queueOffset": 29, "body": b"body 29", "crcOk": True},
        {"queueOffset": 30, "body": None, "crcOk": False},
    ]


def test_stale_entry_of_an_unconfirmed_record_does_not_move_the_end(tmp_path: Path) -> None:
    """Of the very size: only the record itself tells that it is another queue's."""
    store = filled(tmp_path / "s")
    confirmed = store.offset
    at = store.put(Message("u", 0, b"not queued yet"), is_queued=False)
    store.write_entry("t", 0, 30, ENTRY.pack(at, store.offset - at, 0))
    with LogReader(store.root) as reader:
        assert (reader.end_offset(), reader.queue_range("t", 0)) == (confirmed, (0, 30))


def test_a_torn_last_record_is_the_end(tmp_path: Path) -> None:
    store = filled(tmp_path / "s")
    whole = store.offset
    at = store.put(Message("t", 0, b"torn"))
    store.write_log(at + 40, bytes(store.offset - at - 40))
    with LogReader(store.root) as reader:
        assert (reader.end_offset(), reader.queue_range("t", 0)) == (whole, (0, 30))


@pytest.mark.parametrize("sys_flag", [0, SysFlag.TRANSACTION_COMMIT])
def test_ranges_end_at_a_record_not_queued_yet(tmp_path: Path, sys_flag: int) -> None:
    """A node fills its queues one after the other: those behind it in the log may be queued already."""
    store = filled(tmp_path / "s")
    rolled_back = Message("t", 0, b"no reader sees it", sys_flag=SysFlag.TRANSACTION_ROLLBACK)
    store.put(rolled_back, is_queued=False)
    odd = Message("no/folder", 0, b"passed over by nodes")
    store.put(odd, is_queued=False)
    waiting = store.put(Message("u", 1, b"its queue comes later", sys_flag=sys_flag), is_queued=False)
    store.put(Message("t", 0, b"queued already"))
    with LogReader(store.root) as reader:
        assert reader.end_offset() == reader.queued_end() == store.offset  # stopped cleanly: nothing is to come
    (store.root / "abort").touch()
    with LogReader(store.root) as reader:
        assert (reader.end_offset(), reader.queued_end()) == (waiting, store.offset)
        assert reader.queue_range("t", 0) == (0, 31)
        store.write_entry("u", 1, 0, ENTRY.pack(waiting, store.offsets[-1] - waiting, 0))
        reader.refresh()
        assert reader.end_offset() == store.offset


def test_ranges_do_not_end_at_records_of_deleted_topics(tmp_path: Path) -> None:
    """RocketMQ deletes their queues, and begins a new topic of the same name at queue offset 0."""
    store = filled(tmp_path / "s")
    for number in range(6):
        store.put(Message("gone", 0, b"%d" % number))
        store.put(Message("again", number % 2, b"old %d" % number))
    store.delete_topic("gone")
    store.delete_topic("again")
    store.put(Message("again", 1, b"new"))
    store.put(Message("t", 0, b"last"))
    (store.root / "abort").touch()
    (store.root / "config").mkdir()
    (store.root / "config" / "topics.json").write_bytes(b'{"topicConfigTable":{"t":{},"again":{}}}')
    with LogReader(store.root) as reader:
        assert reader.end_offset() == store.offset
        bodies = [body for batch in reader.read_range(0, store.offset, BODIES) for body in batch["body"].to_pylist()]
        assert bodies[-3:] == [b"body 29", b"new", b"last"]
        waiting = store.put(Message("again", 0, b"its queue comes later"), is_queued=False)
        store.put(Message("t", 0, b"queued already"))
        reader.refresh()
        assert reader.end_offset() == waiting
    (store.root / "config" / "broker.json").write_bytes(b'{"brokerName":"b"}')
    with LogReader(store.root) as reader:
        assert reader.end_offset() == store.offsets[30]  # a slave of halog may get the topic later


def test_ranges_end_at_a_record_that_is_not_in_its_batch_queue_yet(tmp_path: Path) -> None:
    """A topic that has only batch queues is not deleted, even if a RocketMQ slave has not got its settings yet."""
    store = filled(tmp_path / "s")
    at = store.put(Message("b", 0, b"0"), is_queued=False)
    store.write_entry(
        "b", 0, 0, Struct(">qiqqqhii").pack(at, store.offset - at, 0, 50, 0, 1, -1, 0), "batchconsumequeue"
    )
    store.next_queue_offset["b", 0] = 1
    waiting = store.put(Message("b", 0, b"1"), is_queued=False)
    store.put(Message("t", 0, b"queued already"))
    (store.root / "abort").touch()
    (store.root / "config").mkdir()
    (store.root / "config" / "topics.json").write_bytes(b'{"topicConfigTable":{"t":{}}}')
    with LogReader(store.root) as reader:
        assert reader.end_offset() == waiting


class Meanwhile:
    """A node that writes while a reader examines the queues one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write: Callable[[], object] | None = None
        """Called once, after the next queue is examined"""
        self.examined_count = 0
        examine = Confirmed._examine

        def examine_and_write(confirmed: Confirmed, key: QueueId) -> int | None:
            end = examine(confirmed, key)
            self.examined_count += 1
            write, self.write = self.write, None
            if write is not None:
                write()
            return end

        monkeypatch.setattr(Confirmed, "_examine", examine_and_write)


@pytest.mark.parametrize("stops", [False, True])
def test_ranges_are_complete_although_the_log_grows_while_its_queues_are_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    store = StoreWriter(tmp_path / "s", segment_size=16 << 20)
    abort = store.root / "abort"
    abort.touch()

    def put(count: int, topics: str = "ab") -> None:
        for n in range(count):
            store.put(Message(topics[n % len(topics)], 0, bytes(30_000)))

    def write() -> None:
        put(1, "c")  # a new topic
        put(140)  # more than a file of a queue has room for
        if stops:
            abort.unlink()

    put(20)
    meanwhile = Meanwhile(monkeypatch)
    with LogReader(store.root) as reader:
        meanwhile.write = write
        before = store.offset
        end = reader.end_offset()
        found = rows_of(reader.read_range(0, end, PLACES))
        assert before < end <= store.offset
        assert [row["physicalOffset"] for row in found] == [offset for offset in store.offsets if offset < end]


def test_the_end_of_a_growing_log_does_not_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreWriter(tmp_path / "s", segment_size=16 << 20)
    (store.root / "abort").touch()

    def write() -> None:
        for n in range(30):
            store.put(Message("ab"[n % 2], 0, bytes(100_000)))

    write()
    meanwhile = Meanwhile(monkeypatch)
    found: list[int] = []
    seen = 0
    with LogReader(store.root) as reader:
        for _ in range(8):
            meanwhile.write = write
            reader.refresh()
            end = reader.end_offset()
            assert end >= seen
            found += [row["physicalOffset"] for row in rows_of(reader.read_range(seen, end, PLACES))]
            assert found == [offset for offset in store.offsets if offset < end]
            seen = end
    assert seen > store.offsets[7 * 30]


def test_queues_of_an_idle_log_are_examined_twice_only_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "s")
    store.put(Message("u", 0, b"another queue"))
    (store.root / "abort").touch()
    meanwhile = Meanwhile(monkeypatch)
    counts: list[int] = []
    with LogReader(store.root) as reader:
        for _ in range(4):
            meanwhile.examined_count = 0
            reader.refresh()
            assert reader.end_offset() == store.offset
            counts.append(meanwhile.examined_count)
    assert counts == [4, 2, 0, 0]


def test_a_log_counts_as_unchanged_only_once_everything_in_it_is_queued(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", segment_size=4096)
    (store.root / "abort").touch()

    def look(reader: LogReader) -> bool:
        has_changed = reader.refresh()
        assert reader.queued_end()  # examines every queue
        return has_changed

    with LogReader(store.root) as reader:
        assert [look(reader) for _ in range(4)] == [True, True, False, False]
        waiting = store.put(Message("u", 1, b"its entry comes later"), is_queued=False)
        size = store.offset - waiting
        assert [look(reader) for _ in range(3)] == [True] * 3
        store.put(Message("t", 0, b"queued already"))
        assert [look(reader) for _ in range(3)] == [True] * 3
        store.write_entry("u", 1, 0, ENTRY.pack(waiting, size, 0))
        assert [look(reader) for _ in range(3)] == [True, False, False]
        assert reader.queue_range("u", 1) == (0, 1)
        while store.offset % store.segment_size + 300 < store.segment_size:
            store.put(Message("t", 0, b"to the end of the segment"))
        store.write_log(-(-store.offset // store.segment_size) * store.segment_size, bytes(8))  # allocated in advance
        assert [look(reader) for _ in range(3)] == [True, True, False]
        store.put(Message("t", 0, b"x" * 300))  # in the next segment
        assert [look(reader) for _ in range(3)] == [True, True, False]
        assert reader.queue_range("t", 0).end == store.next_queue_offset["t", 0]


# ---- a node that starts after a crash takes entries away, and writes them again


class Restart:
    """A node that starts while somebody reads: it has cut a queue, and writes the entries when the reader waits."""

    def __init__(self, store: StoreWriter, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = store.root / "consumequeue" / "t" / "0"
        self.whole = {path: path.read_bytes() for path in sorted(self.directory.iterdir())}
        self.waits = 0
        self.store = store
        self.keep = keep
        (store.root / "abort").touch()
        monkeypatch.setattr("ha.arrow.log_reader.sleep", self.sleep)

    def cut(self) -> None:
        """Zero the entries from `keep` on; files that hold nothing else are removed, but for the first."""
        for path in self.whole:
            start = int(path.name) // ENTRY_SIZE
            if start and start >= self.keep:
                path.unlink()
                continue
            at = max(0, self.keep - start) * ENTRY_SIZE
            path.write_bytes(self.whole[path][:at].ljust(len(self.whole[path]), b"\0"))

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.waits += 1
        if self.waits == 2:
            for path, raw in self.whole.items():
                path.write_bytes(raw)


@pytest.mark.parametrize("by_queue", [True, False])
@pytest.mark.parametrize("keep", [0, 20, 50, 110])
def test_reader_waits_for_entries_being_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, by_queue: bool
) -> None:
    store = filled(tmp_path / "s", 120)
    restart = Restart(store, keep, monkeypatch)
    restart.cut()
    with LogReader(store.root) as reader:
        assert reader.queue_range("t", 0) == (0, keep)
        read = reader.read_queue("t", 0, 0, 120, PLACES) if by_queue else reader.read_range(0, store.offset, PLACES)
        found = rows_of(read)
    assert [line["queueOffset"] for line in found] == list(range(120))
    assert restart.waits == 2


@pytest.mark.parametrize("kept", [0, 1, 70, 150])
def test_a_queue_does_not_begin_behind_entries_being_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """A node starts between two looks of a planner: retention has deleted no more than before."""
    store = filled(tmp_path / "s", 200, segment_size=4096)
    (store.root / "commitlog" / segment_name(0)).unlink()
    first = sum(offset < 4096 for offset in store.offsets)
    restart = Restart(store, first + kept, monkeypatch)
    with LogReader(store.root) as reader:
        assert reader.queued_end() == store.offset
        restart.cut()
        assert reader.queue_range("t", 0) == (first, 200)
        for records in (1, 50, 150):
            assert reader.offset_for_time("t", 0, 1000 + first + records) == first + records
            restart.waits = 0
            restart.cut()
        found = rows_of(reader.read_range(4096, store.offset, PLACES))
    assert [line["queueOffset"] for line in found] == list(range(first, 200))


def test_range_is_complete_although_the_node_restarts_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "s", 120)
    restart = Restart(store, 20, monkeypatch)
    middle = store.offsets[60]
    monkeypatch.setattr("ha.arrow.log_reader._RANGE_BYTES", middle)
    with LogReader(store.root) as reader:
        batches = reader.read_range(0, store.offset, msgspec.structs.replace(PLACES, batch_rows=10))
        first = next(batches)
        restart.cut()
        found = rows_of([first, *batches])
    assert [line["queueOffset"] for line in found] == list(range(120))
    assert restart.waits == 2


def test_entries_that_are_not_rewritten_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "s", 60)
    end = store.offset
    restart = Restart(store, 20, monkeypatch)
    restart.cut()
    restart.waits = 2  # it writes no more
    monkeypatch.setattr("ha.arrow.log_reader._REWRITE_TIMEOUT_S", 0.0)
    lenient = ReadOptions(columns=("queueOffset",), fail_on_data_loss=False)
    with LogReader(store.root) as reader:
        with pytest.raises(RecordsGone, match="offsets 20 to 59 are gone: the queue ends before them"):
            list(reader.read_queue("t", 0, 0, 60, PLACES))
        with pytest.raises(
            RecordsGone, match=f"offsets {store.offsets[20]} to {end - 1} are gone: the queues end before them"
        ):
            list(reader.read_range(0, end, PLACES))
        assert len(rows_of(reader.read_range(0, end, lenient))) == 20


def test_reader_does_not_wait_for_a_stopped_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "s", 60)
    restart = Restart(store, 20, monkeypatch)
    restart.cut()
    (store.root / "abort").unlink()
    with LogReader(store.root) as reader:
        with pytest.raises(RecordsGone):
            list(reader.read_queue("t", 0, 0, 60, PLACES))
        with pytest.raises(RecordsGone):
            list(reader.read_range(0, store.offset, PLACES))
    assert restart.waits == 0


# ---- damage in the middle


def damaged_store(root: Path) -> tuple[StoreWriter, int, int]:
    """A flipped bit in the body of message 5, a destroyed head of message 9."""
    store = filled(root)
    store.write_log(store.offsets[5] + 88, b"B")
    store.write_log(store.offsets[9] + 4, b"\0")
    return store, 5, 9


def test_damaged_record_is_a_marked_row(tmp_path: Path) -> None:
    store, flipped, destroyed = damaged_store(tmp_path / "s")
    found = rows_of(read_arrow(store.root, columns=["queueOffset", "body", "crcOk", "physicalOffset", "bornHost"]))
    assert [line["queueOffset"] for line in found] == list(range(30))
    assert [line["queueOffset"] for line in found if not line["crcOk"]] == [flipped, destroyed]
    assert found[flipped]["body"] == b"Body 5"
    assert found[destroyed] == {
        "queueOffset": destroyed,
        "body": None,
        "crcOk": False,
        "physicalOffset": store.offsets[destroyed],
        "bornHost": None,
    }


@pytest.mark.parametrize(
    "columns", [("queueOffset",), ("queueOffset", "body"), ("tags", "queueOffset", "storeTimestamp")]
)
def test_damaged_record_can_be_skipped_and_counted(tmp_path: Path, columns: tuple[str, ...]) -> None:
    store, flipped, destroyed = damaged_store(tmp_path / "s")
    options = ReadOptions(columns=columns, on_damage="skip", verify_crc=True)
    with LogReader(store.root) as reader:
        found = rows_of(reader.read_queue("t", 0, 0, 30, options))
        assert [line["queueOffset"] for line in found] == [n for n in range(30) if n not in (flipped, destroyed)]
        assert (reader.counts.rows, reader.counts.damaged, reader.counts.skipped) == (28, 2, 2)


def test_damaged_record_can_raise_an_error_with_its_position(tmp_path: Path) -> None:
    store, flipped, _ = damaged_store(tmp_path / "s")
    options = ReadOptions(columns=("body",), on_damage="fail", verify_crc=True)
    with LogReader(store.root) as reader, pytest.raises(CorruptLog) as caught:
        list(reader.read_queue("t", 0, 0, 30, options))
    assert caught.value.position == store.offsets[flipped]
    assert str(store.offsets[flipped]) in str(caught.value)
    assert "CRC" in str(caught.value)


def test_walk_stops_at_damage_or_resumes_at_next_queued_record(tmp_path: Path) -> None:
    store, _, destroyed = damaged_store(tmp_path / "s")
    with LogReader(store.root) as reader:
        with pytest.raises(CorruptLog) as caught:
            list(reader.walk(0, reader.end_offset()))
        assert caught.value.position == store.offsets[destroyed]
        found = [int(o) for part in reader.walk(0, reader.end_offset(), on_damage="skip") for o in part]
        assert found == [at for n, at in enumerate(store.offsets) if n != destroyed]
        assert reader.damages == [(store.offsets[destroyed], store.offsets[destroyed + 1], "magic 00a320a7")]


def test_walk_resumes_at_the_segment_after_damage(tmp_path: Path) -> None:
    """Whose first record is in no queue, so that only the file's start tells its place."""
    store = StoreWriter(tmp_path / "s", segment_size=4096)
    while store.offset < 3800:
        store.put(Message("t", 0, b"x" * 100))
    lost = store.offsets[-1]
    store.write_log(lost + 4, bytes(4))
    store.put(Message("t", 0, b"x" * 1000), is_queued=False)
    store.put(Message("t", 0, b"x"))
    with LogReader(store.root) as reader:
        found = [int(o) for part in reader.walk(0, reader.end_offset(), on_damage="skip") for o in part]
        assert found == [at for at in store.offsets if at != lost]
        assert reader.damages == [(lost, 4096, "magic 00000000")]


def test_unknown_fields_of_damaged_records_match_no_filter(tmp_path: Path) -> None:
    """As in SQL, where null passes no comparison: Spark may apply the filter itself, with the same rows."""
    store, _, destroyed = damaged_store(tmp_path / "s")
    columns = ["queueOffset", "storeTimestamp", "tags"]
    for where in (RowFilter(store_begin_ms=0), RowFilter(store_end_ms=1 << 40)):
        found = read_arrow(store.root, columns=columns, where=where).read_all()["queueOffset"].to_pylist()
        assert found == [n for n in range(30) if n != destroyed]
    # The fields of a damaged record that the queue entry has match filters.
    where = RowFilter(queue_offset_begin=destroyed, queue_ids=frozenset({0}), topics=frozenset({"t"}))
    assert read_arrow(store.root, columns=columns, where=where).read_all().num_rows == 30 - destroyed


@pytest.mark.parametrize("position", [0, 1, 4, 36, 84, 87])
def test_damaged_head_does_not_affect_neighbouring_records(tmp_path: Path, position: int) -> None:
    store = filled(tmp_path / "s")
    for value in (0x00, 0x7F, 0xFF):
        store.write_log(store.offsets[9] + position, bytes([value]))
        found = rows_of(read_arrow(store.root, columns=["queueOffset", "body", "tags", "crcOk"]))
        assert [line["body"] for line in found if line["queueOffset"] != 9] == [
            b"body %d" % n for n in range(30) if n != 9
        ]


# ---- what is gone


def test_records_deleted_by_retention_are_an_error_or_counted(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", 200, segment_size=4096)
    reader = LogReader(store.root)
    planned = reader.queue_range("t", 0)
    (store.root / "commitlog" / segment_name(0)).unlink()
    first = next(n for n, at in enumerate(store.offsets) if at >= 4096)
    with pytest.raises(RecordsGone) as caught:
        list(reader.read_queue("t", 0, *planned, PLACES))
    assert (caught.value.first, caught.value.end) == (0, first)
    lenient = ReadOptions(columns=("queueOffset", "body"), fail_on_data_loss=False)
    fresh = LogReader(store.root)
    assert fresh.queue_range("t", 0) == (first, 200)
    assert fresh.min_offset == 4096
    found = rows_of(fresh.read_queue("t", 0, 0, 200, lenient))
    assert [line["queueOffset"] for line in found] == list(range(first, 200))
    assert fresh.counts.gone == first
    assert len(rows_of(fresh.read_range(0, fresh.end_offset(), lenient))) == 200 - first
    with pytest.raises(RecordsGone, match="segments were deleted"):
        list(fresh.read_range(0, fresh.end_offset(), PLACES))


def test_walk_continues_after_deleted_segments(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", 200, segment_size=4096)
    with LogReader(store.root) as reader:
        walk = reader.walk(0, reader.end_offset())
        found = next(walk).tolist()
        for start in (0, 4096, 8192):
            (store.root / "commitlog" / segment_name(start)).unlink()
        found += [at for part in walk for at in part.tolist()]
    assert found == [at for at in store.offsets if at < 4096 or at >= 12_288]


def test_deleted_segment_that_is_mapped_is_still_read(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", 200, segment_size=4096)
    options = ReadOptions(columns=("queueOffset", "body"), batch_rows=10)
    with LogReader(store.root) as reader:
        batches = reader.read_queue("t", 0, 0, 20, options)
        found = [next(batches)]
        (store.root / "commitlog" / segment_name(0)).unlink()
        found.extend(batches)
    assert [line["body"] for line in rows_of(found)] == [b"body %d" % n for n in range(20)]


def test_queue_files_that_are_deleted(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", 120)
    (store.root / "consumequeue" / "t" / "0" / segment_name(0)).unlink()
    with LogReader(store.root) as reader:
        assert reader.queue_range("t", 0) == (QUEUE_FILE_ENTRIES, 120)
        with pytest.raises(RecordsGone) as caught:
            list(reader.read_queue("t", 0, 0, 120, PLACES))
        assert (caught.value.first, caught.value.end) == (0, QUEUE_FILE_ENTRIES)


def test_offsets_after_the_queue_end_are_gone(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", 10)
    with LogReader(store.root) as reader:
        with pytest.raises(RecordsGone) as caught:
            list(reader.read_queue("t", 0, 5, 15, PLACES))
        assert (caught.value.first, caught.value.end) == (10, 15)
        with pytest.raises(RecordsGone, match="the queue does not exist"):
            list(reader.read_queue("t", 7, 0, 1, PLACES))


# ---- oddities


def test_log_that_starts_in_the_middle(tmp_path: Path) -> None:
    """A slave that joined late: blank entries up to its first message, as RocketMQ fills them."""
    store = StoreWriter(tmp_path / "s", first_offset=5 * 16 * 1024)
    for queue_offset in range(100, 107):
        store.blank_entry("t", 0, queue_offset)
    store.next_queue_offset["t", 0] = 107
    for n in range(40):
        store.put(Message("t", 0, b"%d" % n))
    with LogReader(store.root) as reader:
        assert reader.queue_range("t", 0) == (107, 147)
        found = rows_of(reader.read_queue("t", 0, 107, 147, BODIES))
        assert [line["body"] for line in found] == [b"%d" % n for n in range(40)]
        assert len(rows_of(reader.read_queue("t", 0, 100, 147, PLACES))) == 40
        assert len(rows_of(reader.read_range(reader.min_offset, reader.end_offset(), PLACES))) == 40


def test_blank_entries_are_not_messages(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "s")
    for queue_offset in range(5):
        store.blank_entry("t", 0, queue_offset)
    store.next_queue_offset["t", 0] = 5
    for n in range(3):
        store.put(Message("t", 0, b"%d" % n))
    with LogReader(store.root) as reader:
        assert reader.queue_range("t", 0) == (5, 8)
        assert [line["queueOffset"] for line in rows_of(reader.read_range(0, reader.end_offset(), PLACES))] == [5, 6, 7]


def test_record_in_several_queues_is_read_in_each_and_once_from_the_log(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", 6)
    for n, at in enumerate(store.offsets[2:5]):
        end = store.offsets[n + 3] if n + 3 < 6 else store.offset
        store.write_entry("%LMQ%mine", 0, n, ENTRY.pack(at, end - at, 0))
    columns = ReadOptions(columns=("topic", "queueOffset", "body"))
    with LogReader(store.root) as reader:
        assert [tuple(line.values()) for line in rows_of(reader.read_queue("%LMQ%mine", 0, 0, 3, columns))] == [
            ("t", n, b"body %d" % (n + 2)) for n in range(3)
        ]
        whole = [tuple(line.values()) for line in rows_of(reader.read_range(0, reader.end_offset(), columns))]
        assert whole == [("t", n, b"body %d" % n) for n in range(6)]


def test_batch_queues(tmp_path: Path) -> None:
    """46-byte entries, one a batch; queue offsets count messages."""
    store = StoreWriter(tmp_path / "s")
    entry = Struct(">qiqqqhii")
    bodies, sizes, base = [], [], 0
    for number, count in enumerate((3, 1, 4)):
        inner = [(0, b"%d.%d" % (number, n), b"") for n in range(count)]
        bodies += [b"%d.%d" % (number, n) for n in range(count)]
        message = Message(
            "b",
            2,
            encode_batch(inner),
            properties=encode_properties({"INNER_NUM": str(count), "INNER_BASE": str(base)}),
            sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP,
        )
        raw = encode_record(
            message, queue_offset=base, physical_offset=store.offset, store_timestamp_ms=50, store_host=STORE_HOST
        )
        sizes.append(len(raw))
        store.write_log(store.offset, raw)
        packed = entry.pack(store.offset, len(raw), 0, 50, base, count, -1, 0)
        store.write_entry("b", 2, number, packed, "batchconsumequeue")
        store.offset += len(raw)
        base += count
    with LogReader(store.root) as reader:
        assert reader.queue_range("b", 2) == (0, 8)
        assert reader.queue_bytes("b", 2, 0, 8) == store.offset
        assert reader.queue_bytes("b", 2, 3, 4) == sizes[1]
        options = ReadOptions(columns=("queueOffset", "body"))
        for begin, end in ((0, 8), (2, 5), (3, 4), (7, 8)):
            found = rows_of(reader.read_queue("b", 2, begin, end, options))
            assert [(line["queueOffset"], line["body"]) for line in found] == [
                (n, bodies[n]) for n in range(begin, end)
            ]
        with pytest.raises(RecordsGone, match=r"offsets 8 to 9 are gone.*the queue ends before them"):
            list(reader.read_queue("b", 2, 5, 10, options))
        # As stored, a batch is one row, at its first queue offset: of one task, however it is cut.
        stored = ReadOptions(columns=("queueOffset", "body"), decompress=False)
        found = [row for cut in ((0, 5), (5, 8)) for row in rows_of(reader.read_queue("b", 2, *cut, stored))]
        assert [line["queueOffset"] for line in found] == [0, 3, 4]
        counted = ReadOptions(columns=("queueOffset",))
        assert [line["queueOffset"] for line in rows_of(reader.read_queue("b", 2, 0, 8, counted))] == list(range(8))


def test_single_messages_in_a_batch_queue_are_filtered(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "s")
    for n in range(4):
        at = store.put(Message("b", 2, b"%d" % n), is_queued=False)
        store.next_queue_offset["b", 2] = n + 1
        packed = Struct(">qiqqqhii").pack(at, store.offset - at, 0, 50, n, 1, -1, 0)
        store.write_entry("b", 2, n, packed, "batchconsumequeue")
    options = ReadOptions(columns=("queueOffset", "body"), where=RowFilter(physical_begin=store.offsets[2]))
    with LogReader(store.root) as reader:
        assert [line["queueOffset"] for line in rows_of(reader.read_queue("b", 2, 0, 4, options))] == [2, 3]


def test_tags_with_the_same_hash_are_distinguished(tmp_path: Path) -> None:
    assert tags_code("Aa") == tags_code("BB")  # Java's String.hashCode
    store = StoreWriter(tmp_path / "s")
    for n in range(10):
        store.put(Message("t", 0, b"", properties=encode_properties({"TAGS": ("Aa", "BB")[n % 2]})))
    found = read_arrow(store.root, columns=["queueOffset"], where=RowFilter(tags=frozenset({"Aa"}))).read_all()
    assert found["queueOffset"].to_pylist() == [0, 2, 4, 6, 8]


def test_a_store_that_grows_while_it_is_read(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", 3, segment_size=4096)
    with LogReader(store.root) as reader:
        seen = 0
        for round_number in range(40):
            for _ in range(7):
                store.put(Message("t", 0, b"more"))
            if round_number == 20:
                store.put(Message("later", 1, b"a topic that came later"))
            assert reader.queue_range("t", 0).end >= seen
            reader.refresh()
            begin, end = reader.queue_range("t", 0)
            assert (begin, end) == (0, 3 + 7 * (round_number + 1))
            found = rows_of(reader.read_queue("t", 0, seen, end, PLACES))
            assert [line["physicalOffset"] for line in found] == store.queued["t", 0][seen:end]
            seen = end
        assert ("later", 1) in reader.queues()


def test_a_log_that_is_replaced(tmp_path: Path) -> None:
    """A resync sets the old log aside and begins elsewhere, under the same names."""
    store = filled(tmp_path / "s", 30)
    with LogReader(store.root) as reader:
        assert reader.queue_range("t", 0) == (0, 30)
        assert len(rows_of(reader.read_queue("t", 0, 0, 30, BODIES))) == 30
        os.rename(store.root, tmp_path / "aside")
        again = StoreWriter(store.root)
        for n in range(4):
            again.put(Message("t", 0, b"new %d" % n))
        reader.refresh()
        assert reader.queue_range("t", 0) == (0, 4)
        assert [line["body"] for line in rows_of(reader.read_queue("t", 0, 0, 4, BODIES))] == [
            b"new %d" % n for n in range(4)
        ]


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_between_the_renames_of_a_resync_the_log_is_empty(tmp_path: Path, is_made_anew: bool) -> None:
    """First the commitlog goes, then its folder is made again, then the queues go."""
    store = filled(tmp_path / "s", 30)
    with LogReader(store.root) as reader:
        os.rename(store.root / "commitlog", store.root / "commitlog.aside-1")
        if is_made_anew:
            (store.root / "commitlog").mkdir()
        reader.refresh()
        assert reader.queue_range("t", 0) == (0, 0)
        assert (reader.min_offset, reader.end_offset()) == (0, 0)
        with LogReader(store.root) as opened_then:
            assert opened_then.queue_range("t", 0) == (0, 0)
            with pytest.raises(RecordsGone, match="t queue 0 of"):
                list(opened_then.read_queue("t", 0, 0, 30, BODIES))


@pytest.mark.parametrize("is_blank", [False, True])
def test_times_are_found_beside_records_without_a_time(tmp_path: Path, is_blank: bool) -> None:
    """A damaged record, or a blank entry in the middle of a queue, says nothing about those before it."""
    store = StoreWriter(tmp_path / "s")
    for n in range(100):
        store.put(Message("t", 0, b"%d" % n), store_ms=1000 + n)
    for n in (50, 51, 75):
        if is_blank:
            store.write_entry("t", 0, n, ENTRY.pack(store.offsets[n], BLANK_SIZE, 0))
        else:
            store.write_log(store.offsets[n] + 4, bytes(4))
    with LogReader(store.root) as reader:
        for n in (0, 10, 49, 52, 60, 76, 99):
            found = reader.offset_for_time("t", 0, 1000 + n)
            assert found in ({n, n - 1, n - 2} if n in (52, 76) else {n}), n
            assert reader.physical_offset_for_time(1000 + n) == store.offsets[found]
        assert reader.offset_for_time("t", 0, 1100) is None


def test_a_store_time_beyond_all_timestamps_passes_no_condition(tmp_path: Path) -> None:
    """The column is null, and a comparison with null is not true in SQL."""
    store = filled(tmp_path / "s", 3)
    file = store.root / "commitlog" / segment_name(0)
    for offset, store_ms in zip(store.offsets, (1 << 62, -(1 << 62)), strict=False):
        raw = bytearray(file.read_bytes())
        raw[offset + 56 : offset + 64] = store_ms.to_bytes(8, "big", signed=True)
        file.write_bytes(raw)
    columns = ("queueOffset", "storeTimestamp")
    with LogReader(store.root) as reader:
        for where in (RowFilter(store_begin_ms=-(1 << 61)), RowFilter(store_end_ms=1 << 61)):
            found = rows_of(reader.read_range(0, store.offset, ReadOptions(columns=columns, where=where)))
            assert [line["queueOffset"] for line in found] == [2]


# ---- directories that change or can't be listed


def test_a_queue_file_that_is_deleted_while_it_is_listed_does_not_empty_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "s", 120)
    oldest = store.root / "consumequeue" / "t" / "0" / segment_name(0)
    listdir = os.listdir

    def names(directory: str) -> list[str]:
        listed = listdir(directory)
        if Path(directory) == oldest.parent:
            oldest.unlink(missing_ok=True)
        return listed

    monkeypatch.setattr(os, "listdir", names)
    with LogReader(store.root) as reader:
        assert reader.queue_range("t", 0) == (QUEUE_FILE_ENTRIES, 120)


@pytest.mark.parametrize("folder", ["consumequeue", "consumequeue/u"])
def test_queues_that_cannot_be_listed_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """They are not left out, as if they did not exist."""
    store = filled(tmp_path / "s")
    store.put(Message("u", 0, b"cannot be found"))
    listdir = os.listdir

    def names(directory: str) -> list[str]:
        if Path(directory) == store.root / folder:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), directory)
        return listdir(directory)

    monkeypatch.setattr(os, "listdir", names)
    with LogReader(store.root) as reader, pytest.raises(StoreUnreadable, match=f"{folder} .*: Too many open files"):
        reader.queues()


# ---- entries that RocketMQ left after a crash, whose place another topic's record has taken


def store_with_a_stale_entry(root: Path, *, is_queued: bool = True) -> StoreWriter:
    """Topics of the same name length and record sizes: the last message of "t" was lost in a crash, and the next one of
    "u" has its place, size, queue id and queue offset."""
    store = StoreWriter(root)
    for number in range(6):
        store.put(Message("tu"[number % 2], 0, b"body %d" % number))
    taken = store.put(Message("u", 0, b"body 6"), is_queued=is_queued)
    store.write_entry("t", 0, 3, ENTRY.pack(taken, store.offset - taken, 0))
    return store


@pytest.mark.parametrize("columns", [("body",), ("body", "tags"), ("topic", "body", "crcOk")])
def test_stale_entry_does_not_return_a_message_of_another_topic(tmp_path: Path, columns: tuple[str, ...]) -> None:
    store = store_with_a_stale_entry(tmp_path / "s")
    options = ReadOptions(columns=(*columns, "queueOffset"))
    with LogReader(store.root) as reader:
        found = rows_of(reader.read_queue("t", 0, 0, 4, options))
        assert [line["body"] for line in found] == [b"body 0", b"body 2", b"body 4", None]
        assert reader.counts.damaged == 1
        counted = ReadOptions(columns=columns, on_damage="skip")
        assert [line["body"] for line in rows_of(reader.read_queue("t", 0, 0, 4, counted))] == [
            b"body 0",
            b"body 2",
            b"body 4",
        ]


def test_record_with_a_stale_entry_is_read_from_the_log_by_its_own_entry(tmp_path: Path) -> None:
    """Reads by queue and by range have the same rows."""
    store = store_with_a_stale_entry(tmp_path / "s")
    options = ReadOptions(columns=("topic", "queueOffset", "body"))
    with LogReader(store.root) as reader:
        by_queue = [row for topic in "tu" for row in rows_of(reader.read_queue(topic, 0, 0, 4, options))]
        by_range = rows_of(reader.read_range(0, reader.end_offset(), options))
    assert sorted(by_range, key=lambda row: (row["topic"], row["queueOffset"])) == by_queue
    assert by_queue[-1] == {"topic": "u", "queueOffset": 3, "body": b"body 6"}


def test_stale_entry_of_another_topic_does_not_move_the_end(tmp_path: Path) -> None:
    store = store_with_a_stale_entry(tmp_path / "s", is_queued=False)
    with LogReader(store.root) as reader:
        assert (reader.end_offset(), reader.queue_range("t", 0)) == (store.offsets[-1], (0, 3))


def test_a_segment_that_was_mapped_while_it_was_allocated_is_mapped_again(tmp_path: Path) -> None:
    """ext4 shows the size of a file grow while it is allocated."""
    store = filled(tmp_path / "s", 30)
    segment = store.root / "commitlog" / segment_name(0)
    os.truncate(segment, 4096)
    with LogReader(store.root) as reader:
        assert reader.queue_range("t", 0) == (0, 30)
        os.truncate(segment, store.segment_size)
        for _ in range(30):
            store.put(Message("t", 0, b"more"))
        reader.refresh()
        assert reader.queue_range("t", 0) == (0, 60)
        assert reader.counts.damaged == 0
        assert len(rows_of(reader.read_queue("t", 0, 0, 60, BODIES))) == 60
        assert reader.counts.damaged == 0


def test_entries_after_a_missing_queue_file_keep_their_queue_offsets(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", 120)
    (store.root / "consumequeue" / "t" / "0" / segment_name(QUEUE_FILE_ENTRIES * ENTRY_SIZE)).unlink()
    lenient = ReadOptions(columns=("queueOffset", "body", "crcOk"), fail_on_data_loss=False)
    with LogReader(store.root) as reader:
        with pytest.raises(RecordsGone, match="offsets 50 to 119 are gone"):
            list(reader.read_queue("t", 0, 0, 120, BODIES))
        found = rows_of(reader.read_queue("t", 0, 0, 120, lenient))
        assert [line["queueOffset"] for line in found if line["crcOk"]] == list(range(50))
        assert len(found) == 50
        sizes = reader.entries("t", 0, 0, 120)["size"]
        assert [n for n in range(120) if not sizes[n]] == list(range(50, 100))


@pytest.mark.parametrize("size", [0, 100, 16 * 1024])
def test_a_segment_that_a_resync_is_creating_again_is_not_read(tmp_path: Path, size: int) -> None:
    store = filled(tmp_path / "s", 30)
    segment = store.root / "commitlog" / segment_name(0)
    with LogReader(store.root) as reader:
        os.rename(segment, tmp_path / "aside")
        segment.write_bytes(bytes(size))
        with pytest.raises(StoreUnreadable, match="was replaced while it was read"):
            list(reader.read_queue("t", 0, 0, 30, BODIES))


def test_log_that_is_replaced_while_it_is_read_has_no_damaged_records(tmp_path: Path) -> None:
    """A resync sets the log aside, and the new one has only zeros at first."""
    store = filled(tmp_path / "s", 200, segment_size=4096)
    with LogReader(store.root) as reader:
        batches = reader.read_queue("t", 0, 0, 200, msgspec.structs.replace(BODIES, batch_rows=10))
        assert next(batches).num_rows == 10
        walk = reader.walk(0, reader.end_offset())
        next(walk)
        for folder in ("commitlog", "consumequeue"):
            os.rename(store.root / folder, store.root / f"{folder}.aside-1")
        again = StoreWriter(store.root, segment_size=4096)
        for start in range(0, store.offset, 4096):
            again.write_log(start, bytes(8))
        with pytest.raises(StoreUnreadable, match="was replaced while it was read"):
            list(batches)
        with pytest.raises(StoreUnreadable, match="was replaced while it was read"):
            list(walk)
        assert reader.counts.damaged == 0
