"""Records of every kind, side by side in one buffer, against the plain codec."""

import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ha.arrow import COLUMNS, LogReader, ReadOptions, RowFilter, decode_pull_body, read_arrow
from ha.arrow.properties import PropertyTable
from ha.arrow.slices import take_slices
from ha.errors import CorruptLog, OptionError, RemoteProtocolError
from ha.protocol.batch import encode_batch
from ha.protocol.codes import SysFlag
from ha.protocol.properties import decode_properties, encode_properties, find_property
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from tests.arrow.oracle import plain_rows, row, rows_of
from tests.arrow.stores import STORE_HOST, StoreWriter

ALL = ReadOptions(columns=tuple(COLUMNS))
V6 = encode_host("2001:db8::1", 4321)
V4 = encode_host("192.168.7.9", 55555)
COUNTED = pa.proxy_memory_pool(pa.default_memory_pool())  # Arrays do not keep their pool alive, so this one stays.

names = st.sampled_from([b"TAGS", b"KEYS", b"UNIQ_KEY", b"a", b"index", "größe".encode(), b"TAG", b"XTAGS", b""])
texts = st.sampled_from([b"TagA", b"", b"x", b"k1 k2", b" k1  k2 ", "数".encode(), b"a\x01b", b"\xff\xfe", b"v" * 300])
pieces = st.tuples(names, texts).map(lambda p: p[0] + b"\x01" + p[1])
property_strings = st.lists(
    st.one_of(pieces, pieces, pieces, st.sampled_from([b"", b"nonsense", b"\x01", b"ab"]))
).flatmap(lambda found: st.sampled_from([b"\x02".join(found), b"\x02".join([*found, b""])]))


@settings(max_examples=300)
@given(st.lists(property_strings, min_size=1, max_size=8), st.booleans())
def test_property_columns_equal_the_reference_parser(strings: list[bytes], has_maps: bool) -> None:
    table = PropertyTable(pa.array(strings, pa.binary()), has_maps=has_maps)
    maps = [dict(pairs) for pairs in table.maps().to_pylist()]
    assert maps == [decode_properties(raw) for raw in strings]
    assert all(len(pairs) == len(m) for pairs, m in zip(table.maps().to_pylist(), maps, strict=True))
    for name in (b"TAGS", b"UNIQ_KEY", b"a"):
        assert table.find(name).to_pylist() == [find_property(raw, name) for raw in strings]
    keys = [decode_properties(raw).get("KEYS") for raw in strings]
    assert table.keys().to_pylist() == [None if k is None else [w for w in k.split(" ") if w] for k in keys]
    assert table.text().to_pylist() == [str(raw, "utf-8", "replace") for raw in strings]
    table.maps().validate(full=True)


@pytest.mark.parametrize("other", [None, b"c\x01%d\x02b\x01x\x02", b"b\x01%d\x02a\x01x\x02", b"a\x01%d\x02\x02", b""])
@pytest.mark.parametrize(
    "row", [b"a\x01%d\x02b\x01x\x02", b"a\x01%d\x02a\x01y", b"KEYS\x01k%d k\x02", b"KEYS\x01k%d", b"b\x01%d"]
)
def test_rows_with_the_same_names_equal_the_reference_parser(row: bytes, other: bytes | None) -> None:
    """Equal names in every row take a shorter way, also where a name is repeated in each; another row ends that."""
    strings = [row % number for number in range(3)]
    if other is not None:
        strings.append(other % 3 if b"%" in other else other)
    table = PropertyTable(pa.array(strings, pa.binary()), has_maps=True)
    expected = [decode_properties(raw) for raw in strings]
    assert [dict(pairs) for pairs in table.maps().to_pylist()] == expected
    assert [len(pairs) for pairs in table.maps().to_pylist()] == [len(pairs) for pairs in expected]
    keys = [None if "KEYS" not in row else row["KEYS"].split() for row in expected]
    assert table.keys().to_pylist() == keys
    assert table.keys().type == pa.list_(pa.string())
    for name in (b"a", b"b", b"c", b"KEYS"):
        assert table.find(name).to_pylist() == [find_property(raw, name) for raw in strings]


def test_repeated_names_in_rows_of_different_lengths() -> None:
    strings = [b"a\x01x", b"b\x01y\x02a\x01z\x02b\x01w"]
    table = PropertyTable(pa.array(strings, pa.binary()), has_maps=True)
    assert [dict(pairs) for pairs in table.maps().to_pylist()] == [{"a": "x"}, {"b": "w", "a": "z"}]
    assert table.find(b"b").to_pylist() == [None, "w"]


def test_more_names_than_bits_in_a_word() -> None:
    strings = [b"".join(b"name%d\x01v\x02" % (n * 7 % 90) for n in range(k, k + 40)) for k in range(50)]
    strings[17] += b"name119\x01again\x02name119\x01last\x02"
    maps = PropertyTable(pa.array(strings, pa.binary())).maps().to_pylist()
    assert [dict(pairs) for pairs in maps] == [decode_properties(raw) for raw in strings]
    assert [len(pairs) for pairs in maps] == [len(decode_properties(raw)) for raw in strings]


messages = st.builds(
    Message,
    topic=st.sampled_from(["flights", "größe", "%RETRY%" + "g" * 200, "t"]),
    queue_id=st.integers(0, 2),
    body=st.binary(max_size=200),
    properties=property_strings,
    flag=st.integers(-(1 << 31), (1 << 31) - 1),
    sys_flag=st.sampled_from([0, SysFlag.MULTI_TAGS, SysFlag.TRANSACTION_COMMIT]),
    born_timestamp_ms=st.integers(0, 1 << 42),
    born_host=st.sampled_from([V4, V6]),
    reconsume_times=st.integers(0, 16),
    prepared_transaction_offset=st.integers(0, 1 << 50),
)


@settings(max_examples=150)
@given(st.lists(st.tuples(messages, st.sampled_from([STORE_HOST, V6])), min_size=1, max_size=10))
def test_rows_of_any_response_equal_the_reference_decoder(sent: list[tuple[Message, bytes]]) -> None:
    raws = [
        encode_record(m, queue_offset=n, physical_offset=n * 1000, store_timestamp_ms=1 << 41, store_host=host)
        for n, (m, host) in enumerate(sent)
    ]
    (batch,) = decode_pull_body(b"".join(raws), broker_name="b", options=ALL)
    from ha.protocol.record import decode_record

    assert rows_of([batch]) == [row(decode_record(raw), "b") for raw in raws]
    batch.validate(full=True)


def test_empty_and_truncated_responses() -> None:
    assert [len(batch) for batch in decode_pull_body(b"", broker_name="b", options=ALL)] == [0]
    raw = encode_record(
        Message("t", 0, b"x"), queue_offset=0, physical_offset=0, store_timestamp_ms=0, store_host=STORE_HOST
    )
    for size in range(1, len(raw)):
        with pytest.raises(RemoteProtocolError):
            decode_pull_body(raw + raw[:size], broker_name="b", options=ALL)


def compressed(body: bytes, kind: str) -> Message:
    codes = {
        "zlib": SysFlag.COMPRESSION_ZLIB,
        "old zlib": 0,
        "lz4": SysFlag.COMPRESSION_LZ4,
        "zstd": SysFlag.COMPRESSION_ZSTD,
    }
    packed = zlib.compress(body) if "zlib" in kind else pa.Codec(kind).compress(body).to_pybytes()
    return Message("t", 0, packed, sys_flag=SysFlag.COMPRESSED | codes[kind])


def test_compressed_bodies_are_decompressed(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "s", segment_size=1 << 20)
    bodies = []
    for kind in ("zlib", "lz4", "zstd", "old zlib"):
        for size in (10, 70_000):
            bodies.append(kind.encode() * size)
            store.put(compressed(bodies[-1], kind))
            bodies.append(b"plain")
            store.put(Message("t", 0, b"plain"))
    assert read_arrow(store.root).read_all()["body"].to_pylist() == bodies
    as_stored = read_arrow(store.root, columns=["body", "bodySize"], options=ReadOptions(decompress=False)).read_all()
    assert [len(body) for body in as_stored["body"].to_pylist()] == as_stored["bodySize"].to_pylist()
    assert as_stored["body"].to_pylist() != bodies


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "among inner batches"])
def test_body_that_cannot_be_decompressed_is_damaged(tmp_path: Path, wraps: bool) -> None:
    store = StoreWriter(tmp_path / "s")
    store.put(Message("t", 0, b"a"))
    damaged = store.put(Message("t", 0, b"no zlib at all", sys_flag=SysFlag.COMPRESSED))
    store.put(Message("t", 0, encode_batch([(0, b"c", b"")]) if wraps else b"c", sys_flag=SysFlag.INNER_BATCH * wraps))
    with LogReader(store.root) as reader:
        options = ReadOptions(columns=("body", "queueOffset"))
        found = rows_of(reader.read_range(0, store.offset, options))
        assert found == [{"body": b, "queueOffset": n} for n, b in enumerate([b"a", None, b"c"])]
        assert reader.counts.damaged == 1
        with pytest.raises(CorruptLog) as caught:
            list(reader.read_range(0, store.offset, ReadOptions(columns=("body",), on_damage="fail")))
        assert caught.value.position == damaged
        list(reader.read_range(0, store.offset, ReadOptions(columns=("queueOffset",), on_damage="fail")))


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd"])
def test_body_above_the_size_limit_is_damaged(tmp_path: Path, kind: str) -> None:
    store = StoreWriter(tmp_path / "s", segment_size=1 << 20)
    for size in (1000, 1001, 999):
        store.put(compressed(bytes(size), kind))
    options = ReadOptions(message_size_max=1000)
    found = read_arrow(store.root, columns=["body"], options=options).read_all()["body"].to_pylist()
    assert found == [bytes(1000), None, bytes(999)]
    with pytest.raises(CorruptLog, match="inflates to more than 1000 bytes"):
        read_arrow(
            store.root, columns=["body"], options=ReadOptions(message_size_max=1000, on_damage="fail")
        ).read_all()


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "among inner batches"])
def test_decompressed_size_of_a_batch_is_bounded(tmp_path: Path, wraps: bool) -> None:
    """100 bodies of 1 MB in 2 KB each, or less, come in batches of 4 MiB: the batches hold all rows, each once."""
    store = StoreWriter(tmp_path / "s", segment_size=1 << 20)
    for number in range(100):
        store.put(compressed(bytes([number]) * 1_000_000, "zstd"))
        if number % 10 == 0:
            store.put(Message("t", 0, b"plain"))
    if wraps:
        store.put(Message("t", 0, encode_batch([(0, b"inner", b"")]), sys_flag=SysFlag.INNER_BATCH))
    options = ReadOptions(batch_bytes=1 << 20)
    sizes = []
    found: list[bytes] = []
    for batch in read_arrow(store.root, columns=["body"], options=options):
        sizes.append(batch.nbytes)
        found += batch.column("body").to_pylist()
    assert max(sizes) < (4 << 20) + (1 << 16)
    assert [body[0] for body in found if len(body) == 1_000_000] == list(range(100))
    assert len(found) == 110 + wraps


def test_missing_compression_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreWriter(tmp_path / "s")
    store.put(compressed(bytes(1000), "zstd"))
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as where it is not installed
    with pytest.raises(OptionError, match=r"zstd.*halog\[compression\]"):
        read_arrow(store.root, columns=["body"]).read_all()
    as_stored = read_arrow(store.root, columns=["body"], options=ReadOptions(decompress=False)).read_all()
    assert len(as_stored) == 1


def test_an_inner_batch_is_a_row_for_each_message(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "s")
    inner = [(n, b"body %d" % n, encode_properties({"TAGS": f"t{n}", "KEYS": f"k{n} all"})) for n in range(3)]
    store.put(Message("t", 0, b"before"))
    store.put(
        Message(
            "t",
            0,
            encode_batch(inner),
            properties=encode_properties({"INNER_NUM": "3", "INNER_BASE": "1", "UNIQ_KEY": "X"}),
            sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP,
        )
    )
    found = read_arrow(store.root, columns=["queueOffset", "body", "tags", "keys", "flag"]).read_all().to_pylist()
    assert found == [
        {"queueOffset": 0, "body": b"before", "tags": None, "keys": None, "flag": 0},
        *(
            {"queueOffset": 1 + n, "body": b"body %d" % n, "tags": f"t{n}", "keys": [f"k{n}", "all"], "flag": n}
            for n in range(3)
        ),
    ]


@pytest.mark.parametrize(("decompress", "expected"), [(True, [2, 3]), (False, [3])])
def test_inner_batches_of_a_response_are_filtered_by_queue_offset(decompress: bool, expected: list[int]) -> None:
    """By those of their messages, or as stored by that of the first one."""
    raws = [
        encode_record(
            Message(
                "t",
                0,
                encode_batch([(0, b"x", b"")] * 3),
                encode_properties({"INNER_NUM": "3", "INNER_BASE": str(base)}),
                sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP,
            ),
            queue_offset=base,
            physical_offset=0,
            store_timestamp_ms=0,
            store_host=STORE_HOST,
        )
        for base in (0, 3, 6)
    ]
    where = RowFilter(queue_offset_begin=2, queue_offset_end=4)
    options = ReadOptions(columns=("queueOffset",), decompress=decompress, where=where)
    (batch,) = decode_pull_body(b"".join(raws), broker_name="b", options=options)
    assert batch["queueOffset"].to_pylist() == expected


def test_damage_in_an_inner_batch_marks_each_of_its_messages(tmp_path: Path) -> None:
    """The batch can still be taken apart, so nothing but the record's checksum tells."""
    store = StoreWriter(tmp_path / "s")
    properties = encode_properties({"INNER_NUM": "2", "INNER_BASE": "1"})
    body = encode_batch([(0, b"body 0", b""), (0, b"body 1", b"")])
    store.put(Message("t", 0, b"before"))
    at = store.put(Message("t", 0, body, properties=properties, sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP))
    log = (store.root / "commitlog" / "00000000000000000000").read_bytes()
    store.write_log(log.index(b"body 1", at), b"bodY 1")
    columns = ["queueOffset", "body", "crcOk"]
    found = read_arrow(store.root, columns=columns).read_all().to_pylist()
    assert [(row["queueOffset"], row["crcOk"]) for row in found] == [(0, True), (1, False), (2, False)]
    with LogReader(store.root) as reader:
        options = ReadOptions(columns=("queueOffset",), verify_crc=True, on_damage="skip")
        assert rows_of(reader.read_range(0, reader.end_offset(), options)) == [{"queueOffset": 0}]


def test_many_segments_queues_and_scripts(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "s", segment_size=4096)
    for n in range(400):
        store.put(
            Message(
                f"topic{n % 3}",
                n % 5,
                b"b" * (n % 97),
                properties=encode_properties({"TAGS": f"tag{n % 4}", "n": str(n)}),
                born_host=V6 if n % 11 == 0 else V4,
            ),
            store_ms=1_700_000_000_000 + n,
            store_host=V6 if n % 7 == 0 else STORE_HOST,
        )
    assert rows_of(read_arrow(store.root, columns=COLUMNS)) == plain_rows(store.root, store.offsets, "s")
    with LogReader(store.root) as reader:
        assert reader.end_offset() == store.offset
        for (topic, queue_id), offsets in store.queued.items():
            begin, end = reader.queue_range(topic, queue_id)
            assert (begin, end) == (0, len(offsets))
            assert rows_of(reader.read_queue(topic, queue_id, begin, end, ALL)) == plain_rows(store.root, offsets, "s")
            part = rows_of(reader.read_queue(topic, queue_id, 3, 11, ALL))
            assert part == plain_rows(store.root, offsets[3:11], "s")
            assert reader.offset_for_time(topic, queue_id, 1_700_000_000_000 + 200) == next(
                i for i, at in enumerate(offsets) if store.offsets.index(at) >= 200
            )


def test_reading_does_not_import_pandas(tmp_path: Path) -> None:
    """Importing it costs more than a small query does."""
    store = StoreWriter(tmp_path / "s")
    for n in range(50):
        store.put(
            Message("t", n % 3, b"x" * n, properties=encode_properties({"TAGS": "a", "KEYS": "a b", "n": str(n)}))
        )
    code = (
        "import sys; from ha.arrow import COLUMNS, RowFilter, read_arrow\n"
        f"path = {str(store.root)!r}\n"
        "for name in COLUMNS: assert read_arrow(path, columns=[name]).read_all().num_rows == 50\n"
        "where = RowFilter(tags=frozenset({'a'}), topics=frozenset({'t'}), store_begin_ms=0)\n"
        "assert read_arrow(path, where=where).read_all().num_rows == 50\n"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("base", ["x", "-1", "9" * 30, "٣"])
def test_inner_batch_without_base_offset_is_damaged(tmp_path: Path, base: str) -> None:
    store = StoreWriter(tmp_path / "s")
    for properties, body in (
        ({"INNER_BASE": base}, encode_batch([(0, b"x", b"")])),
        ({"INNER_BASE": "5"}, b"no batch"),
    ):
        message = Message("t", 0, body, encode_properties(properties), sys_flag=SysFlag.INNER_BATCH)
        store.put(message)
    store.put(Message("t", 0, b"good"))
    found = read_arrow(store.root, columns=["queueOffset", "crcOk"]).read_all()
    assert found["crcOk"].to_pylist() == [False, False, True]


@pytest.mark.parametrize("verify_crc", [False, True])
@pytest.mark.parametrize("body", [b"no batch", zlib.compress(b"no batch"), b"no zlib at all"])
def test_inner_batch_that_cannot_be_divided_is_damaged(tmp_path: Path, body: bytes, verify_crc: bool) -> None:
    store = StoreWriter(tmp_path / "s")
    store.put(Message("t", 0, b"a"))
    is_plain = body == b"no batch"
    damaged = store.put(Message("t", 0, body, sys_flag=SysFlag.INNER_BATCH | SysFlag.COMPRESSED * (not is_plain)))
    store.put(Message("t", 0, b"c"))
    options = ReadOptions(columns=("queueOffset", "body"), verify_crc=verify_crc)
    with LogReader(store.root) as reader:
        found = rows_of(reader.read_range(0, store.offset, options))
        assert [(line["queueOffset"], line["body"]) for line in found] == [(0, b"a"), (1, None), (2, b"c")]
        assert (reader.counts.damaged, reader.counts.skipped) == (1, 0)
        skipping = msgspec.structs.replace(options, on_damage="skip")
        found = rows_of(reader.read_range(0, store.offset, skipping))
        assert [line["queueOffset"] for line in found] == [0, 2]
        assert (reader.counts.damaged, reader.counts.skipped) == (2, 1)
        for columns in (("body",), ("queueOffset",)):
            failing = ReadOptions(columns=columns, verify_crc=verify_crc, on_damage="fail")
            with pytest.raises(CorruptLog, match="inner batch") as caught:
                list(reader.read_range(0, store.offset, failing))
            assert caught.value.position == damaged


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "inner batch"])
def test_a_body_is_counted_as_damaged_once(tmp_path: Path, wraps: bool) -> None:
    store = StoreWriter(tmp_path / "s")
    at = store.put(Message("t", 0, b"no zlib", sys_flag=SysFlag.COMPRESSED | SysFlag.INNER_BATCH * wraps))
    store.write_log(at + 88, b"N")
    with LogReader(store.root) as reader:
        found = rows_of(reader.read_range(0, store.offset, ReadOptions(columns=("body", "crcOk"))))
        assert found == [{"body": None, "crcOk": False}]
        assert reader.counts.damaged == 1


def test_time_that_overflows_microseconds_is_null() -> None:
    times = [0, 1 << 62, -(1 << 63), ((1 << 63) - 1) // 1000]
    for sys_flag in (0, SysFlag.INNER_BATCH):
        raw = b"".join(
            encode_record(
                Message("t", 0, b"", born_timestamp_ms=ms, sys_flag=sys_flag),
                queue_offset=0,
                physical_offset=0,
                store_timestamp_ms=ms,
                store_host=STORE_HOST,
            )
            for ms in times
        )
        options = ReadOptions(columns=("bornTimestamp", "storeTimestamp"))
        (batch,) = decode_pull_body(raw, broker_name="b", options=options)
        for column in batch.columns:
            assert column.cast(pa.int64()).to_pylist() == [0, None, None, times[3] * 1000]


def test_slices_are_copied_once() -> None:
    count, each = 5_000, 1_024
    log = pa.py_buffer(bytes(each * count * 3))
    before = pa.default_memory_pool()
    pa.set_memory_pool(COUNTED)
    try:
        taken = take_slices(log, np.arange(count) * (each + 200), np.full(count, each))
    finally:
        pa.set_memory_pool(before)
    # Where its room is found too small, all that was copied is copied again into more.
    peak = COUNTED.max_memory()
    assert peak is not None
    assert peak < 1.1 * taken.nbytes
