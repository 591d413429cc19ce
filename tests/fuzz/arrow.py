"""The log as Arrow columns: a damaged store must give what the plain codec gives, or say so with crcOk=false."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from ha.arrow import COLUMNS, LogReader, ReadOptions, decode_batches, decode_pull_body
from ha.arrow.properties import PropertyTable
from ha.errors import RemoteProtocolError
from ha.protocol.batch import encode_batch
from ha.protocol.codes import SysFlag
from ha.protocol.properties import decode_properties, encode_properties, find_property
from ha.protocol.record import Message, decode_record, encode_host
from ha.protocol.record_encoding import encode_record
from tests.arrow.oracle import row, rows_of
from tests.arrow.stores import STORE_HOST, StoreWriter
from tests.fuzz.damage import Edit, damaged
from tests.fuzz.harness import Harness
from tests.fuzz.records import example_records

EVERYTHING = ReadOptions(columns=tuple(COLUMNS), decompress=False)
INFLATED = ReadOptions(columns=tuple(COLUMNS))
NO_CRC = ReadOptions(columns=("topic", "queueOffset", "body", "tags", "keys", "properties"))
SEPARATOR = b"--next--"


def records(data: bytes) -> None:
    """Records cut apart by a separator, each with its total size made right, side by side in one buffer."""
    pieces = [bytearray(piece) for piece in data.split(SEPARATOR)[:8] if len(piece) >= 8]
    positions = []
    at = 0
    for piece in pieces:
        piece[0:4] = len(piece).to_bytes(4, "big")
        positions.append(at)
        at += len(piece)
    buffer = b"".join(pieces)
    if not buffer:
        return
    found = np.array(positions, np.int64)
    [batch] = decode_batches(buffer, found, base_offset=None, broker_name="b", options=EVERYTHING)
    batch.validate(full=True)
    rows = raw_rows(batch)
    assert len(rows) == len(pieces)
    for piece, line in zip(pieces, rows, strict=True):
        compare(bytes(piece), line)
    for options in (INFLATED, NO_CRC):
        for batch in decode_batches(buffer, found, base_offset=None, broker_name="b", options=options):
            batch.validate(full=True)
    for base in (0, 1 << 40):
        [batch] = decode_batches(buffer, found, base_offset=base, broker_name="b", options=EVERYTHING)
        batch.validate(full=True)
    try:
        for batch in decode_pull_body(buffer, broker_name="b", options=NO_CRC):
            batch.validate(full=True)
    except RemoteProtocolError:
        pass
    strings = [bytes(piece[-40:]) for piece in pieces]
    table = PropertyTable(pa.array(strings, pa.binary()))
    assert [dict(pairs) for pairs in table.maps().to_pylist()] == [decode_properties(raw) for raw in strings]
    assert table.find(b"TAGS").to_pylist() == [find_property(raw, b"TAGS") for raw in strings]


def raw_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows with times as integers: not every int64 is a date of Python's."""
    index = [batch.schema.get_field_index(name) for name in ("bornTimestamp", "storeTimestamp")]
    for position in index:
        if position >= 0:
            name = batch.schema.names[position]
            batch = batch.set_column(position, name, batch.column(position).cast(pa.int64()))
    return rows_of([batch])


def compare(raw: bytes, line: dict[str, Any]) -> None:
    """One row of a batch against the plain codec's."""
    try:
        record = decode_record(raw, verify_crc=False)
    except RemoteProtocolError:
        # Arrow reads property strings up to 65535 bytes, the plain codec up to 32767; nothing longer is here.
        assert line["crcOk"] is False, line
        return
    times = (record.born_timestamp_ms, record.store_timestamp_ms)
    # The oracle makes dates of times, of which Python has fewer than there are int64s.
    expected = row(msgspec.structs.replace(record, born_timestamp_ms=0, store_timestamp_ms=0), "b", decompress=False)
    for name, ms in zip(("bornTimestamp", "storeTimestamp"), times, strict=True):
        expected[name] = ms * 1000 if -(1 << 63) <= ms * 1000 < 1 << 63 else None
    assert line == expected, {name: (line[name], expected[name]) for name in expected if line[name] != expected[name]}


@functools.cache
def good_files() -> dict[str, bytes]:
    """A small store of two topics, with compressed, IPv6, tagged and long-topic records; names below its root."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "s"
        store = StoreWriter(root, segment_size=2048)
        for n in range(16):
            properties = encode_properties({"TAGS": f"tag{n % 2}", "KEYS": f"k{n} x", "UNIQ_KEY": f"U{n}"})
            message = Message(("t", "größe")[n % 2], n % 3 // 2, b"body %d " % n * 5, properties)
            if n % 5 == 3:
                message.born_host = encode_host("2001:db8::1", 4321)
            store.put(message, store_ms=1_700_000_000_000 + n)
        return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def store(data: bytes) -> None:
    """Damage to any file of a store: every row that is read is the record that stands there, or says crcOk=false."""
    files = damaged(good_files(), data)
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
        root = Path(folder)
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with LogReader(root, broker_name="b") as reader:
            check_reader(reader, files)


def check_reader(reader: LogReader, files: dict[str, bytes]) -> None:
    """Every way to read, compared with the bytes."""
    lenient = ReadOptions(columns=tuple(COLUMNS), decompress=False, fail_on_data_loss=False)
    for key in reader.queues():
        begin, end = reader.queue_range(*key)
        reader.offset_for_time(*key, 1_700_000_000_005)
        reader.queue_bytes(*key, begin, end)
        for batch in reader.read_queue(*key, begin, end, lenient):
            batch.validate(full=True)
            for line in raw_rows(batch):
                check_row(line, files)
    for batch in reader.read_range(reader.min_offset, reader.end_offset(), lenient):
        for line in raw_rows(batch):
            check_row(line, files)
    reader.key_hits(["t"], ["k1"])
    reader.physical_offset_for_time(1_700_000_000_003)


def check_row(line: dict[str, Any], files: dict[str, bytes]) -> None:
    """A row that claims to be good is the record at the place it names."""
    if not line["crcOk"]:
        return
    at = line["physicalOffset"]
    segment = files[f"commitlog/{at - at % 2048:020d}"]
    compare(segment[at % 2048 : at % 2048 + line["storeSize"]], line)


@functools.cache
def _fast_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def record_seeds() -> list[bytes]:
    """Records of every kind, alone and together."""
    examples = example_records()
    inner = Message(
        "b",
        0,
        encode_batch([(0, b"x", b"K\x01v\x02"), (1, b"y", b"")]),
        encode_properties({"INNER_NUM": "2", "INNER_BASE": "4"}),
        sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP,
    )
    packed = [
        Message("c", 0, pa.Codec(kind).compress(b"hello" * 9).to_pybytes(), sys_flag=SysFlag.COMPRESSED | flag)
        for kind, flag in (("lz4", SysFlag.COMPRESSION_LZ4), ("zstd", SysFlag.COMPRESSION_ZSTD))
    ]
    more = [
        encode_record(m, queue_offset=4, physical_offset=0, store_timestamp_ms=1_700_000_000_000, store_host=STORE_HOST)
        for m in (inner, *packed)
    ]
    everything = [*examples, *more]
    return [*everything, SEPARATOR.join(everything)]


def store_seeds() -> list[bytes]:
    """No damage, and some to every file."""
    found = [b""]
    for number, content in enumerate(good_files().values()):
        for kind, raw, count in ((0, b"\xff\xff\xff\xff", 4), (1, b"\x01", 0), (2, b"", 9), (3, b"", 0)):
            found += [Edit(number, position, kind, count, raw).to_bytes() for position in (4, len(content) // 2)]
    return found


WORDS = (
    SEPARATOR,
    b"\xda\xa3\x20\xa7",
    b"\xda\xa3\x20\xab",
    b"\xcb\xd4\x31\x94",
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\x00\x00\x00\x30",
    b"\x00\x00\x01\xc1",
    b"INNER_BASE\x01x\x02",
    b"INNER_BASE\x0199999999999999999999\x02",
    b"TAGS\x01",
    b"KEYS\x01",
)

HARNESSES = {
    "arrow_records": Harness(run=records, seeds=record_seeds, words=WORDS, size_max=2000, memory_max=160 << 20),
    "arrow_store": Harness(run=store, seeds=store_seeds, words=WORDS, seconds_max=5.0),
}
