"""`ha log`: real brokers' stores against their manifests, which share no code with us; halog's own, live too."""

import base64
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ha.arrow import LogReader, RowFilter
from ha.arrow.rows import run_rows
from ha.audit.range import examine_range
from ha.cli import run
from ha.cli.log import examination
from ha.cli.log.checksums import bad_blocks, lost_end
from ha.cli.log.dump import Choice, dump
from ha.cli.log.verify import verify
from ha.cli.times import time_ms
from ha.protocol.batch import encode_batch
from ha.protocol.codes import SysFlag
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message
from tests.arrow.stores import StoreWriter
from tests.corruption.harm import flip
from tests.protocol.golden import STORES, manifest
from tests.spark.stores import live_store, make_store, message
from tests.unpacking import unpack_store

SEGMENT = 16_384
FIRST = "commitlog/00000000000000000000"


class Golden:
    """A real broker's store and what its manifest says."""

    def __init__(self, version: str, path: Path) -> None:
        self.path = path
        self.manifest = manifest(version)
        self.records = [entry for entry in self.manifest["commitlog"] if entry["kind"] == "message"]
        unpack_store(version, path)

    def flip(self, physical_offset: int) -> None:
        start = physical_offset // SEGMENT * SEGMENT
        flip(self.path / "commitlog" / f"{start:020d}", physical_offset - start)

    def pick(self, queue_offset: int) -> dict[str, Any]:
        return next(
            record
            for record in self.records
            if (record["topic"], record["queueId"], record["queueOffset"]) == ("GoldenTopic", 0, queue_offset)
        )


@pytest.fixture(params=STORES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    return Golden(request.param, tmp_path / "store")


@pytest.fixture
def one(tmp_path: Path) -> Golden:
    return Golden("5.5.0", tmp_path / "store")


class Out:
    """Runs commands and takes what they print."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self._capture = capture
        self.err = ""

    def text(self, *words: str | Path, code: int = 0) -> str:
        found = run([str(word) for word in words])
        captured = self._capture.readouterr()
        self.err = captured.err.decode()
        assert found == code, captured.out.decode() + self.err
        return captured.out.decode()

    def lines(self, *words: str | Path, code: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(*words, code=code).splitlines()]

    def json(self, *words: str | Path, code: int = 0) -> Any:
        return json.loads(self.text(*words, "--json", code=code))


@pytest.fixture
def out(capsysbinary: pytest.CaptureFixture[bytes]) -> Out:
    return Out(capsysbinary)


# ---- dump


def test_every_record_of_a_real_broker_is_shown_as_its_manifest_has_it(golden: Golden, out: Out) -> None:
    rows = out.lines("log", "dump", golden.path)
    assert [
        (
            row["topic"],
            row["queue"],
            row["queue_offset"],
            row["physical_offset"],
            row["size"],
            row["store_timestamp_ms"],
        )
        for row in rows
    ] == [
        (each["topic"], each["queueId"], each["queueOffset"], each["offset"], each["size"], each["storeTimestamp"])
        for each in golden.records
    ]
    assert all(row["crc_ok"] for row in rows)
    by_place = {row["physical_offset"]: row for row in rows}
    for consumed in golden.manifest["stored"]:
        row = by_place[consumed["commitLogOffset"]]
        body = row["body"].encode() if "body" in row else base64.b64decode(row["body_base64"])
        assert body == base64.b64decode(consumed["body_base64"])
        assert (row["message_id"], row["tags"]) == (consumed["properties"]["UNIQ_KEY"], consumed["tags"])
        assert row["keys"] == (None if consumed["keys"] is None else consumed["keys"].split())


def test_dump_shows_the_selected_records(golden: Golden, out: Out) -> None:
    everything = out.lines("log", "dump", golden.path)

    def like(**wanted: Any) -> list[int]:
        return [row["physical_offset"] for row in everything if all(row[key] == wanted[key] for key in wanted)]

    def shown(*words: str) -> list[int]:
        return [row["physical_offset"] for row in out.lines("log", "dump", golden.path, *words)]

    assert shown("--topic", "GoldenTopic") == like(topic="GoldenTopic")
    assert shown("--topic", "GoldenTopic", "--queue", "1") == like(topic="GoldenTopic", queue=1)
    assert shown("--topic", "GoldenTopic", "--queue", "0", "--queue-offset", "3:5") == [
        golden.pick(3)["offset"],
        golden.pick(4)["offset"],
    ]
    assert shown("--topic", "GoldenTopic", "--queue", "0", "--queue-offset", "3") == [golden.pick(3)["offset"]]
    with_key = [row["physical_offset"] for row in everything if "k0b" in (row["keys"] or ())]
    assert len(with_key) == 1
    assert shown("--key", "k0b") == with_key
    assert shown("--tag", "TagA") == like(tags="TagA")
    assert shown("--count", "3") == [row["physical_offset"] for row in everything[:3]]
    low, high = everything[4]["physical_offset"], everything[9]["physical_offset"]
    assert shown("--from", str(low), "--to", str(high)) == [row["physical_offset"] for row in everything[4:9]]
    since, until = everything[10]["store_timestamp_ms"], everything[30]["store_timestamp_ms"]
    between = [row["physical_offset"] for row in everything if since <= row["store_timestamp_ms"] < until]
    assert between
    assert shown("--since", str(since), "--until", str(until)) == between
    assert "body" not in out.lines("log", "dump", golden.path, "--no-body", "--count", "1")[0]


def test_dump_cuts_batch_queues_by_physical_offset(tmp_path: Path, out: Out) -> None:
    store = StoreWriter(tmp_path / "store")
    begins = []
    for base in (0, 2):
        body = encode_batch([(0, b"%d" % (base + n), b"") for n in range(2)])
        properties = encode_properties({"INNER_NUM": "2", "INNER_BASE": str(base)})
        store.next_queue_offset["b", 0] = base
        flags = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP
        begins.append(store.put(Message("b", 0, body, properties, sys_flag=flags), is_queued=False))
        entry = struct.pack(">qiqqqh8x", begins[-1], store.offset - begins[-1], 0, 1_700_000_000_000, base, 2)
        store.write_entry("b", 0, base // 2, entry, "batchconsumequeue")

    def bodies(*words: str) -> list[str]:
        return [row["body"] for row in out.lines("log", "dump", store.root, "--topic", "b", *words)]

    assert bodies() == ["0", "1", "2", "3"]
    assert bodies("--to", str(begins[1])) == ["0", "1"]
    assert bodies("--from", str(begins[1])) == ["2", "3"]


def test_dump_since_a_time_includes_records_in_no_queue(tmp_path: Path, out: Out) -> None:
    """Such as those of a topic that was deleted."""
    store = StoreWriter(tmp_path / "store")
    begin_ms = 1_700_000_000_000
    for second, topic in enumerate(("kept", "deleted", "deleted", "kept")):
        store.put(Message(topic, 0, b"%d" % second), store_ms=begin_ms + 1000 * second, is_queued=topic == "kept")
    for second in range(5):
        rows = out.lines("log", "dump", store.root, "--since", str(begin_ms + 1000 * second))
        assert [row["body"] for row in rows] == ["0", "1", "2", "3"][second:]


def test_interrupted_dump_of_batch_queues_omits_nothing_when_resumed(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """They are printed queue by queue, not in physical order."""
    store = StoreWriter(tmp_path / "store")
    for number, queue_id in enumerate((1, 0, 1, 0)):
        base = number // 2
        body = encode_batch([(0, b"%d" % number, b"")])
        properties = encode_properties({"INNER_NUM": "1", "INNER_BASE": str(base)})
        store.next_queue_offset["b", queue_id] = base
        flags = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP
        begin = store.put(Message("b", queue_id, body, properties, sys_flag=flags), is_queued=False)
        entry = struct.pack(">qiqqqh8x", begin, store.offset - begin, 0, 1_700_000_000_000, base, 1)
        store.write_entry("b", queue_id, base, entry, "batchconsumequeue")

    def bodies() -> list[str]:
        return [json.loads(line)["body"] for line in capsysbinary.readouterr().out.splitlines()]

    choice = Choice(where=RowFilter(topics=frozenset({"b"})))
    done = dump(store.root, msgspec.structs.replace(choice, count=2), threading.Event())
    assert bodies() == ["1", "3"]
    dump(store.root, msgspec.structs.replace(choice, from_=done.next_offset), threading.Event())
    assert {"0", "2"} <= {*bodies()}


def test_interrupted_dump_within_a_batch_omits_nothing_when_resumed(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    store = StoreWriter(tmp_path / "store")
    body = encode_batch([(0, b"%d" % number, b"") for number in range(3)])
    properties = encode_properties({"INNER_NUM": "3", "INNER_BASE": "0"})
    store.put(Message("b", 0, body, properties, sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP), is_queued=False)

    def bodies() -> list[str]:
        return [json.loads(line)["body"] for line in capsysbinary.readouterr().out.splitlines()]

    done = dump(store.root, Choice(count=1), threading.Event())
    assert bodies() == ["0"]
    dump(store.root, Choice(from_=done.next_offset), threading.Event())
    assert {"1", "2"} <= {*bodies()}


def test_nothing_in_a_record_reaches_a_terminal_as_a_command(tmp_path: Path, out: Out) -> None:
    """Neither ESC nor C1 controls, nor what turns the direction of writing; and readers of JSON get the same text."""
    nasty = "\x1b[31mred\x07\x7f\u009b2J \u202eevil\u2066 é 漢"
    store = make_store(
        tmp_path / "store",
        [
            message(1, body=nasty.encode(), name="a\x1b]0;title\x07"),
            message(2, body=b"\xff\x00\x1b[2J"),
        ],
    )
    text = out.text("log", "dump", store)
    assert not [char for char in text if (ord(char) < 32 and char != "\n") or 0x7F <= ord(char) < 0xA0]
    assert not set(text) & set("\u202e\u2066")
    first, second = (json.loads(line) for line in text.splitlines())
    assert first["body"] == nasty
    assert first["properties"]["name"] == "a\x1b]0;title\x07"
    assert base64.b64decode(second["body_base64"]) == b"\xff\x00\x1b[2J"
    assert "body" not in second


def test_a_body_that_inflates_beyond_the_bound_is_named_and_the_rest_is_there(tmp_path: Path, out: Out) -> None:
    store = StoreWriter(tmp_path / "store")
    for size in (1000, 1001):
        store.put(Message("t", 0, zlib.compress(b"x" * size), sys_flag=SysFlag.COMPRESSED))
    first, second = out.lines("log", "dump", store.root, "--max-message-size", "1000")
    assert first["body"] == "x" * 1000
    assert "body" not in second
    assert second["crc_ok"]
    assert "longer than maxMessageSize" in second["body_error"]
    assert out.lines("log", "dump", store.root)[1]["body"] == "x" * 1001


def test_a_body_that_needs_a_missing_package_is_named_and_the_rest_is_there(
    tmp_path: Path, out: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ha.arrow.plain.inflated", lambda body, kind, size_max: None)
    store = StoreWriter(tmp_path / "store")
    flags = SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZSTD
    store.put(Message("t", 0, b"compressed", sys_flag=flags))
    store.put(Message("t", 0, b"plain"))
    first, second = out.lines("log", "dump", store.root)
    assert "body" not in first
    assert first["crc_ok"]
    assert "needs halog[compression]" in first["body_error"]
    assert second["body"] == "plain"
    assert len(out.lines("log", "dump", store.root, "--no-body")) == 2


def test_a_damaged_record_is_shown_as_one_and_the_rest_is_there(one: Golden, out: Out) -> None:
    record = one.pick(5)
    one.flip(record["offset"] + 88 + 3)
    rows = out.lines("log", "dump", one.path, code=65)
    assert [row["physical_offset"] for row in rows if not row["crc_ok"]] == [record["offset"]]
    assert len(rows) == len(one.records)
    assert "ha log verify" in out.err
    one.flip(one.pick(7)["offset"] + 4)
    rows = out.lines("log", "dump", one.path, code=65)
    assert len(rows) == len(one.records) - 1
    assert f"physical offsets [{one.pick(7)['offset']}, " in out.err


def test_dump_goes_on_after_bytes_that_no_segment_has(tmp_path: Path, one: Golden, out: Out) -> None:
    store = make_store(tmp_path / "flights", [message(n, body=b"x" * 500) for n in range(600)], segment_size=1 << 16)
    everything = [row["physical_offset"] for row in out.lines("log", "dump", store)]
    sorted((store / "commitlog").iterdir())[2].unlink()
    left = [at for at in everything if not 2 << 16 <= at < 3 << 16]
    for words in ([], ["--topic", "flights"]):
        rows = out.lines("log", "dump", store, *words, code=65)
        assert [row["physical_offset"] for row in rows] == left
        assert f"ha: physical offsets [{2 << 16}, {3 << 16}) are in no segment file\n" in out.err
    assert len(out.lines("log", "dump", store, "--count", "9")) == 9
    assert out.lines("log", "dump", store, "--from", str(3 << 16))[0]["physical_offset"] == 3 << 16
    os.truncate(one.path / FIRST, 10_000)
    rows = out.lines("log", "dump", one.path, code=65)
    left = [record["offset"] for record in one.records]
    assert [row["physical_offset"] for row in rows] == [at for at in left if at < 9_800 or at >= SEGMENT]
    assert f"physical offsets [10000, {SEGMENT}) are in no segment file" in out.err


@pytest.mark.parametrize("topics", [None, frozenset({"flights"})], ids=["log", "queues"])
def test_dump_continues_after_segments_that_retention_deletes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Out, topics: frozenset[str] | None
) -> None:
    store = make_store(tmp_path / "store", [message(n, body=b"x" * 500) for n in range(600)], segment_size=1 << 16)
    everything = [row["physical_offset"] for row in out.lines("log", "dump", store)]
    segments = sorted((store / "commitlog").iterdir())

    def cleaned(run: Any, broker_name: str) -> Any:
        for segment in segments[:4]:
            segment.unlink(missing_ok=True)
        return run_rows(run, broker_name)

    monkeypatch.setattr("ha.cli.log.dump.run_rows", cleaned)
    done = dump(store, Choice(where=RowFilter(topics=topics)), threading.Event())
    assert done.is_complete
    assert done.count == len([at for at in everything if at < 1 << 16 or at >= 4 << 16])
    assert done.gaps == [f"physical offsets [0, {4 << 16}) are in no segment file"]


def test_interrupted_dump_names_the_offset_to_resume_from(tmp_path: Path) -> None:
    count = 3000
    store = make_store(tmp_path / "store", [message(number, body=b"x" * 200) for number in range(count)])
    command = [sys.executable, "-m", "ha.cli", "log", "dump", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)  # it waits for room in the pipe
        shown = [first, *process.stdout.readlines()]
        said = process.stderr.read().decode()
        assert process.wait(30) == 130, said
    assert len(shown) < count
    assert "Traceback" not in said
    resume = said.rpartition("resume with ")[2].split()
    rest = subprocess.run([*command, *resume], capture_output=True, check=True, timeout=60).stdout.splitlines()
    assert len(shown) + len(rest) == count
    offsets = [json.loads(line)["physical_offset"] for line in [*shown, *rest]]
    assert offsets == sorted(set(offsets))


def test_dump_is_interrupted_although_no_record_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "store", [message(number) for number in range(1000)])
    stop = threading.Event()
    begins = []

    def interrupted(run: Any, broker_name: str) -> Any:
        stop.set()
        begins.append(int(run.positions[0]))
        return run_rows(run, broker_name)

    monkeypatch.setattr("ha.cli.log.dump.run_rows", interrupted)
    choice = Choice(where=RowFilter(tags=frozenset({"no such tag"})))
    done = dump(store, choice, stop)
    assert (done.is_complete, done.count, begins) == (False, 0, [0])
    stop.clear()
    dump(store, msgspec.structs.replace(choice, from_=done.next_offset), stop)
    assert begins[1] == done.next_offset > 0


def test_records_of_a_topic_are_not_found_without_queues(one: Golden, out: Out) -> None:
    """A copy of the commitlog alone has them nevertheless."""
    shutil.rmtree(one.path / "consumequeue")
    for words in (["--topic", "GoldenTopic"], ["--key", "k0b"]):
        assert out.text("log", "dump", one.path, *words, code=66) == ""
        assert "'consumequeue' has no queue" in out.err
    assert len(out.lines("log", "dump", one.path)) == len(one.records)


def test_times_are_read_as_they_are_written() -> None:
    assert time_ms("1700000000123") == 1_700_000_000_123
    assert time_ms("2023-11-14T22:13:20Z") == 1_700_000_000_000
    assert time_ms("2023-11-14T23:13:20.5+01:00") == 1_700_000_000_500


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dump", "{store}", "--since", "yesterday"], "--since 'yesterday' is invalid: use a time"),
        (["dump", "{store}", "--count", "0"], "--count is 1 or more"),
        (["dump", "{store}", "--queue-offset", "5"], "--queue-offset requires --topic"),
        (["dump", "{store}", "--topic", "T", "--queue-offset", "x"], "use 7, 7:20"),
        pytest.param(["dump", "{store}", "--topic", "T", "--queue-offset", "9" * 5000], "use 7, 7:20", id="digits"),
        pytest.param(["dump", "{store}", "--since", "9" * 5000], "is invalid: use a time", id="digits of a time"),
        (["verify", "{store}", "--from", "99999999"], "the log has no bytes between --from and --to"),
        (["verify", "{store}", "--examples", "0"], "--examples is 1 or more"),
    ],
)
def test_usage_errors(one: Golden, out: Out, words: list[str], says: str) -> None:
    out.text("log", *(word.format(store=one.path) for word in words), code=2)
    assert says in out.err


@pytest.mark.parametrize("command", ["dump", "verify", "diff"])
def test_directory_without_store(tmp_path: Path, out: Out, command: str) -> None:
    paths = [tmp_path] * (2 if command == "diff" else 1)
    out.text("log", command, *paths, code=66)
    assert "give the directory that storePathRootDir names" in out.err


@pytest.mark.parametrize("command", ["dump", "verify", "diff"])
def test_a_file_that_can_t_be_read(one: Golden, out: Out, command: str) -> None:
    last = one.path / "commitlog" / f"{SEGMENT:020d}"
    last.unlink()
    last.symlink_to(last)
    out.text("log", command, *[one.path] * (2 if command == "diff" else 1), code=66)
    assert out.err == f"ha: {last} can't be read as a store: Too many levels of symbolic links\n"


# ---- verify


def test_a_real_broker_s_store_is_clean(golden: Golden, out: Out) -> None:
    result = out.json("log", "verify", golden.path)
    assert (result["is_clean"], result["is_complete"], result["findings"]) == (True, True, [])
    assert result["record_count"] == len(golden.records)
    assert result["record_bytes"] == sum(record["size"] for record in golden.records)
    assert "clean" in out.text("log", "verify", golden.path)


def findings(result: Any) -> list[tuple[str, str, int, int]]:
    return [(each["kind"], each["file"], each["file_begin"], each["file_end"]) for each in result["findings"]]


def test_wrong_body_crc_is_reported_with_its_bytes(one: Golden, out: Out) -> None:
    record = one.pick(5)
    one.flip(record["offset"] + 88 + 3)
    result = out.json("log", "verify", one.path, code=65)
    assert findings(result) == [("crc", FIRST, record["offset"], record["offset"] + record["size"])]
    text = out.text("log", "verify", one.path, code=65)
    assert "1 findings of damage" in text
    assert f"{record['offset']:,} to {record['offset'] + record['size']:,}" in text


def test_invalid_magic_code_is_reported_and_following_records_are_checked(one: Golden, out: Out) -> None:
    record, later = one.pick(5), one.pick(8)
    one.flip(record["offset"] + 5)
    one.flip(later["offset"] + 88 + 1)
    result = out.json("log", "verify", one.path, code=65)
    assert findings(result) == [
        ("unreadable", FIRST, record["offset"], record["offset"] + record["size"]),
        ("crc", *_place(later)),
    ]


def _place(record: dict[str, Any]) -> tuple[str, int, int]:
    start = record["offset"] // SEGMENT * SEGMENT
    begin = record["offset"] - start
    return f"commitlog/{start:020d}", begin, begin + record["size"]


def test_wrong_queue_entry_is_reported(one: Golden, out: Out) -> None:
    queue = one.path / "consumequeue" / "GoldenTopic" / "0" / f"{0:020d}"
    flip(queue, 5 * 20 + 11)
    result = out.json("log", "verify", one.path, code=65)
    assert findings(result)[0] == ("entry_wrong", f"consumequeue/GoldenTopic/0/{0:020d}", 100, 120)
    assert result["findings"][0]["queue_offset"] == 5


def test_a_hole_in_the_queue_offsets_is_found(one: Golden, out: Out) -> None:
    """A record that says a queue offset that is not its own leaves its own to nobody."""
    record = one.pick(5)
    with (one.path / FIRST).open("r+b") as file:
        file.seek(record["offset"] + 20)
        file.write(struct.pack(">q", 4_000))
    kinds = {found["kind"] for found in out.json("log", "verify", one.path, code=65)["findings"]}
    assert kinds & {"hole", "out_of_order", "entry_missing", "entry_extra"}


def test_a_segment_that_is_gone_is_damage_with_its_range(tmp_path: Path, out: Out) -> None:
    store = make_store(tmp_path / "store", [message(n, body=b"x" * 500) for n in range(600)], segment_size=1 << 16)
    segments = sorted((store / "commitlog").iterdir())
    segments[2].unlink()
    result = out.json("log", "verify", store, code=65)
    gone = f"commitlog/{segments[2].name}"
    assert ("missing_file", gone, 0, 1 << 16) in findings(result)


def test_a_segment_that_is_too_short_is_damage_with_the_bytes_it_lacks(one: Golden, out: Out) -> None:
    os.truncate(one.path / FIRST, 10_000)
    result = out.json("log", "verify", one.path, code=65)
    assert ("missing_file", FIRST, 10_000, SEGMENT) in findings(result)


def test_a_segment_that_is_too_long_is_damage_with_its_last_bytes(one: Golden, out: Out) -> None:
    os.truncate(one.path / FIRST, 20_000)
    result = out.json("log", "verify", one.path, code=65)
    assert findings(result) == [("overlap", FIRST, SEGMENT, 20_000)]


def test_surplus_entries_of_a_queue_file_are_not_used(one: Golden, out: Out) -> None:
    """They are at positions of the next file."""
    first, _ = sorted((one.path / "consumequeue/GoldenTopic/0").iterdir())
    with first.open("ab") as file:
        file.write(b"\xff" * 100)
    assert out.json("log", "verify", one.path)["is_clean"]
    out.text("log", "diff", one.path, one.path)


def test_a_segment_that_was_deleted_meanwhile_is_no_damage(tmp_path: Path) -> None:
    """RocketMQ, on a store that halog wrote before, leaves the checksum file."""
    store = make_store(tmp_path / "store", [message(n) for n in range(300)])
    with LogReader(store) as reader:
        end = reader.end_offset()
    with LogReader(store) as reader:
        (store / FIRST).rename(store / "commitlog" / f"{1 << 20:020d}")
        assert list(bad_blocks(reader, 0, end)) == []
        assert list(lost_end(reader)) == []


def test_checksums_find_damage_outside_crcs(tmp_path: Path, out: Out) -> None:
    store = make_store(tmp_path / "store", [message(n) for n in range(300)])
    assert out.json("log", "verify", store)["has_checksums"]
    path = store / FIRST
    at = path.read_bytes().index(b"tag1")
    flip(path, at)
    result = out.json("log", "verify", store, code=65)
    [bad] = [found for found in result["findings"] if found["kind"] == "checksum"]
    assert bad["file"] == FIRST
    assert bad["file_begin"] <= at < bad["file_end"]


def test_checksums_show_that_the_end_of_the_log_is_missing(tmp_path: Path, out: Out) -> None:
    """The last confirmed record is then an earlier one, after which nothing else looks wrong."""
    store = make_store(tmp_path / "store", [message(n) for n in range(120)], segment_size=SEGMENT)
    last = f"commitlog/{SEGMENT:020d}"
    with LogReader(store) as reader:
        end = reader.end_offset() - SEGMENT

    def damage() -> list[tuple[str, str, int, int]]:
        found = findings(out.json("log", "verify", store, code=65))
        return [each for each in found if each[0] != "tail"]

    (store / last).write_bytes(bytes(SEGMENT))
    assert damage() == [("checksum", last, 0, end)]
    os.truncate(store / last, 300)
    assert damage() == [("missing_file", last, 300, end)]
    (store / last).unlink()
    assert damage() == [("missing_file", last, 0, end)]
    (store / FIRST).unlink()
    assert damage() == [("missing_file", FIRST, 0, SEGMENT), ("missing_file", last, 0, end)]


def test_damaged_last_record_is_reported(one: Golden, out: Out) -> None:
    """Without checksums nobody knows whether it was cut off or damaged: that is said, and counts as neither."""
    one.flip(one.records[-1]["offset"] + 4)
    result = out.json("log", "verify", one.path)
    assert [found["kind"] for found in result["findings"]] == ["tail"]
    assert result["findings"][0]["physical_offset"] == one.records[-1]["offset"]


def test_a_log_is_read_anew_by_each_examination_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "store", [message(1)])
    examine = examine_range
    ids = []

    def noted(task: Any) -> Any:
        ids.append(task.audit_id)
        return examine(task)

    monkeypatch.setattr(examination, "examine_range", noted)
    for _ in range(10):
        verify(store, from_=None, to=None, examples_max=1, stop=threading.Event(), progress=lambda done, total: None)
    assert len(set(ids)) == 10


def test_parts_of_a_log_add_up_to_the_whole(golden: Golden, out: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever --from and --to cut: a record counts where it begins, and the rest of one is no damage."""
    monkeypatch.setattr(examination, "RANGE_BYTES", 1024)
    whole = out.json("log", "verify", golden.path)
    for cut in (1, 300, 1024, 5000, 16_384, 20_001):
        parts = [
            out.json("log", "verify", golden.path, "--to", str(cut)),
            out.json("log", "verify", golden.path, "--from", str(cut)),
        ]
        assert sum(part["record_count"] for part in parts) == whole["record_count"], cut


def test_interrupted_verification_shows_findings_and_how_to_resume(
    one: Golden, out: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = one.pick(0)
    one.flip(record["offset"] + 88 + 3)
    monkeypatch.setattr(examination, "RANGE_BYTES", 1024)
    examine = examine_range
    ranges = []

    def interrupted(task: Any) -> Any:
        ranges.append(task)
        if len(ranges) == 3:
            signal.raise_signal(signal.SIGINT)
        return examine(task)

    monkeypatch.setattr(examination, "examine_range", interrupted)
    result = out.json("log", "verify", one.path, code=130)
    assert len(ranges) == 3
    assert (result["is_complete"], result["examined_end"], result["resume"]) == (False, 3072, "--from 3072")
    assert [found["kind"] for found in result["findings"]] == ["crc"]
    assert "resume with --from 3072" in out.err
    rest = out.json("log", "verify", one.path, *result["resume"].split())
    assert result["record_count"] + rest["record_count"] == len(one.records)
    assert rest["is_complete"]


def test_a_store_that_is_written_meanwhile_is_clean(tmp_path: Path, out: Out) -> None:
    with live_store(tmp_path / "store", segment_size=1 << 16) as live:
        for turn in range(5):
            live.put([message(turn * 100 + number) for number in range(100)])
            assert out.json("log", "verify", live.path)["record_count"] == (turn + 1) * 100
            assert len(out.lines("log", "dump", live.path, "--no-body")) == (turn + 1) * 100


# ---- diff


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Golden, Golden]:
    return Golden("5.5.0", tmp_path / "left"), Golden("5.5.0", tmp_path / "right")


def test_copies_are_equal(pair: tuple[Golden, Golden], out: Out) -> None:
    left, right = pair
    result = out.json("log", "diff", left.path, right.path)
    assert (result["is_equal"], result["first"], result["counts"]) == (True, None, {})
    assert "equal" in out.text("log", "diff", left.path, right.path)


def test_the_first_difference_is_shown_with_both_records(pair: tuple[Golden, Golden], out: Out) -> None:
    left, right = pair
    record, later = left.pick(5), left.pick(9)
    body_at = record["offset"] + 88 + 3
    right.flip(body_at)
    right.flip(later["offset"] + 88)
    result = out.json("log", "diff", left.path, right.path, code=1)
    first = result["first"]
    assert (first["physical_offset"], first["record_offset"]) == (body_at, record["offset"])
    assert set(first["differing_fields"]) == {"body", "crc_ok"}
    assert first["left"]["record"]["body"] != first["right"]["record"]["body"]
    assert (first["right"]["file"], first["right"]["file_begin"]) == (FIRST, record["offset"])
    assert (result["counts"]["different"], result["counts"]["crc"]) == (2, 2)
    assert f"First difference at physical offset {body_at:,}" in out.text("log", "diff", left.path, right.path, code=1)


@pytest.mark.parametrize("command", ["verify", "diff"])
def test_a_range_that_retention_deletes_meanwhile_does_not_count_as_compared(
    pair: tuple[Golden, Golden], out: Out, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    right = pair[1]
    right.flip(right.pick(5)["offset"] + 88 + 3)
    monkeypatch.setattr(examination, "RANGE_BYTES", SEGMENT)

    def deleted(task: Any) -> Any:
        (right.path / FIRST).unlink(missing_ok=True)
        return examine_range(task)

    monkeypatch.setattr(examination, "examine_range", deleted)
    result = out.json("log", command, *[each.path for each in pair[command == "verify" :]])
    assert result["begin" if command == "verify" else "compared_begin"] == SEGMENT


def test_a_record_that_one_store_lacks(pair: tuple[Golden, Golden], out: Out) -> None:
    left, right = pair
    record = left.pick(5)
    left.flip(record["offset"] + 4)
    first = out.json("log", "diff", left.path, right.path, code=1)["first"]
    assert first["left"]["record"] is None
    assert first["right"]["record"]["queue_offset"] == 5


def test_stores_without_a_byte_in_common(tmp_path: Path, one: Golden, out: Out) -> None:
    (tmp_path / "empty" / "commitlog").mkdir(parents=True)
    result = out.json("log", "diff", one.path, tmp_path / "empty", code=4)
    assert result["compared_begin"] == result["compared_end"]
    assert "no physical offset in common" in out.err
