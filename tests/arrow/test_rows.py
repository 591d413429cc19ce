"""Rows of Python objects are those of the record batches, for regular, irregular and damaged records."""

import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ha.arrow import COLUMNS, LogReader, ReadOptions, RowFilter
from ha.arrow.places import RecordRun
from ha.arrow.rows import run_rows
from ha.protocol.batch import encode_batch
from ha.protocol.codes import SysFlag
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, encode_host
from ha.protocol.store_files import ENTRY
from tests.arrow.oracle import rows_of
from tests.arrow.stores import StoreWriter

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> StoreWriter:
    store = StoreWriter(tmp_path / "s", segment_size=4096)
    for n in range(60):
        properties = encode_properties({"TAGS": f"tag{n % 4}", "KEYS": f"k{n} all", "UNIQ_KEY": f"u{n}"})
        host = encode_host("2001:db8::1" if n % 11 == 0 else "10.0.0.1", 7)
        store.put(Message(f"t{n % 3}", n % 2, b"b" * n, properties=properties, born_host=host), store_ms=1_000 * n)
    begin = store.put(Message("t0", 0, zlib.compress(b"x" * 500), sys_flag=SysFlag.COMPRESSED))
    store.write_entry("%LMQ%mine", 0, 0, ENTRY.pack(begin, store.offset - begin, 0))
    store.put(Message("t0", 0, b"no deflate", sys_flag=SysFlag.COMPRESSED))
    store.put(Message("t1", 0, b"in no queue"), is_queued=False)
    # Damage: a wrong CRC, an entry whose record is no longer one, and an entry that is not its record's.
    wrong, destroyed, other = store.offsets[40], store.offsets[20], store.queued["t2", 0][5]
    segment = sorted((store.root / "commitlog").iterdir())[other // 4096].read_bytes()
    store.write_entry("t2", 0, 5, ENTRY.pack(other, int.from_bytes(segment[other % 4096 :][:4], "big") + 1, 0))
    store.write_log(wrong + 88, b"?")
    store.write_log(destroyed + 4, b"\0\0\0\0")
    return store


def both(reader: LogReader, options: ReadOptions, kind: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records as batches, and as rows."""
    begin, end = reader.min_offset, reader.end_offset()
    read: dict[str, Any] = {
        "range": (reader.read_range, reader.range_runs, (begin, end)),
        "walk": (reader.walk_range, reader.walk_runs, (begin, end)),
        "queue": (reader.read_queue, reader.queue_runs, ("t2", 0, 0, 8)),
        "light": (reader.read_queue, reader.queue_runs, ("%LMQ%mine", 0, 0, 1)),
    }
    as_batches, as_runs, arguments = read[kind]
    return rows_of(as_batches(*arguments, options)), list(plain(as_runs(*arguments, options)))


def plain(runs: Iterator[RecordRun]) -> Iterator[dict[str, Any]]:
    for run in runs:
        for row in run_rows(run, "s"):
            shown: dict[str, Any] = {name: row.get(name) for name in COLUMNS}
            for name in ("bornTimestamp", "storeTimestamp"):
                if shown[name] is not None:
                    shown[name] = EPOCH + timedelta(microseconds=shown[name])
            if shown["properties"] is not None:
                shown["properties"] = dict(shown["properties"])
            yield shown


@pytest.mark.parametrize("kind", ["range", "walk", "queue", "light"])
@pytest.mark.parametrize(
    "where",
    [
        RowFilter(),
        RowFilter(topics=frozenset({"t1", "t2"}), tags=frozenset({"tag1"})),
        RowFilter(keys=frozenset({"k5", "u20"})),
        RowFilter(queue_offset_begin=3, queue_offset_end=9, queue_ids=frozenset({0})),
        RowFilter(store_begin_ms=20_000, store_end_ms=40_000),
    ],
    ids=["all", "tags", "keys", "offsets", "times"],
)
def test_rows_are_those_of_the_batches(store: StoreWriter, kind: str, where: RowFilter) -> None:
    options = ReadOptions(
        columns=tuple(COLUMNS), fail_on_data_loss=False, on_damage="report", where=where, batch_rows=7
    )
    with LogReader(store.root, broker_name="s") as reader:
        batches, rows = both(reader, options, kind)
        assert rows == batches
    if where == RowFilter() and kind in ("range", "walk"):
        assert len(rows) > 55
        assert sum(row["crcOk"] is False for row in rows) == (3 if kind == "range" else 1)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_inner_batches_are_split(tmp_path: Path, is_compressed: bool) -> None:
    store = StoreWriter(tmp_path / "s")
    body = encode_batch([(0, b"body %d" % n, b"") for n in range(3)])
    flags = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP | (SysFlag.COMPRESSED if is_compressed else 0)
    properties = encode_properties({"INNER_NUM": "3", "INNER_BASE": "0"})
    stored = zlib.compress(body) if is_compressed else body
    at = store.put(Message("b", 0, stored, properties=properties, sys_flag=flags), is_queued=False)
    entry = struct.pack(">qiqqqh8x", at, store.offset - at, 0, 1_700_000_000_000, 0, 3)
    store.write_entry("b", 0, 0, entry, "batchconsumequeue")
    with LogReader(store.root) as reader:
        for decompress in (True, False):
            rows = list(plain(reader.queue_runs("b", 0, 0, 3, ReadOptions(decompress=decompress))))
            assert [(row["queueOffset"], row["body"]) for row in rows] == [(n, b"body %d" % n) for n in range(3)]


def test_rows_need_no_pyarrow(store: StoreWriter) -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from ha.arrow import LogReader, ReadOptions\n"
        "from ha.arrow.rows import run_rows\n"
        f"reader = LogReader({str(store.root)!r})\n"
        "options = ReadOptions(fail_on_data_loss=False)\n"
        "print(sum(len(list(run_rows(run, ''))) for run in reader.range_runs(0, reader.end_offset(), options)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == 62
