"""Sound logs of every kind are clean, also while they are written to."""

import shutil
import struct
from functools import partial
from pathlib import Path

import pytest
import trio

from ha.arrow.queues import BATCH_ENTRY_DTYPE
from ha.protocol.codes import SysFlag
from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_record
from ha.spark.jobs.audit.job import AuditOptions, AuditResult, audit_with
from tests.arrow.stores import STORE_HOST, StoreWriter
from tests.spark.derived_stores import write_store
from tests.spark.inline import inline_runner
from tests.spark.stores import live_store, message, records_of

BATCH_ENTRY = struct.Struct(">qiqqqh8x")


def look(*paths: Path, range_bytes: int = 4096) -> AuditResult:
    return audit_with(inline_runner(), AuditOptions(paths=tuple(map(str, paths)), range_bytes=range_bytes))


@pytest.mark.parametrize("range_bytes", [2000, 50_000])
def test_every_kind_of_record_is_understood(tmp_path: Path, range_bytes: int) -> None:
    """V1 and V2, IPv6, batches, transactions, delays, topics and tags that are not ASCII."""
    master, slave = tmp_path / "master", tmp_path / "slave"
    trio.run(partial(write_store, master, 500))
    shutil.copytree(master, slave)
    result = look(master, slave, range_bytes=range_bytes)
    assert result.findings == ()
    assert result.exit_code == 0
    assert [copy.record_count for copy in result.copies] == [500, 500]


@pytest.mark.parametrize("range_bytes", [1024, 1700, 5000, 1 << 20])
def test_records_inside_a_body_are_ignored(tmp_path: Path, range_bytes: int) -> None:
    """Bodies full of records that name their own place, so that each would pass for one where a range begins."""
    writer = StoreWriter(tmp_path / "store", segment_size=64 * 1024)
    for _ in range(12):
        body, at = b"", writer.offset + 88
        for _ in range(30):
            body += encode_record(
                Message("fake", 9, b"inner"),
                queue_offset=7,
                physical_offset=at + len(body),
                store_timestamp_ms=1,
                store_host=STORE_HOST,
            )
        writer.put(Message("real", 0, body))
    result = look(writer.root, range_bytes=range_bytes)
    assert result.findings == ()
    assert result.copies[0].record_count == 12
    assert {row.topic for row in result.topic_hours} == {"real"}


def test_batch_queues_are_followed_by_their_records(tmp_path: Path) -> None:
    """An inner batch takes several queue offsets; its 46-byte entries are not checked, holes between records are."""
    assert BATCH_ENTRY.size == BATCH_ENTRY_DTYPE.itemsize
    writer = StoreWriter(tmp_path / "store")
    queue_offset = 0
    for number, count in enumerate((3, 1, 4)):
        properties = f"INNER_NUM\x01{count}\x02INNER_BASE\x01{queue_offset}\x02".encode()
        inner = Message("batches", 0, b"%d" % number, properties, sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP)
        writer.next_queue_offset["batches", 0] = queue_offset
        at = writer.put(inner, is_queued=False)
        size = writer.offset - at
        entry = BATCH_ENTRY.pack(at, size, 0, 1_700_000_000_000, queue_offset, count)
        writer.write_entry("batches", 0, number, entry, "batchconsumequeue")
        queue_offset += count
    writer.put(message(1))
    result = look(writer.root)
    assert result.findings == ()
    assert result.copies[0].record_count == 4


def test_light_queues_hold_other_topics_records(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "store")
    at = writer.put(message(0))
    writer.put(message(1))
    writer.write_entry("%LMQ%device", 0, 0, struct.pack(">qiq", at, 200, 0))
    result = look(writer.root)
    assert result.findings == ()


def test_a_store_that_is_being_written_is_clean_up_to_its_confirmed_end(tmp_path: Path) -> None:
    master = tmp_path / "master"
    with live_store(master, 64 << 10) as live:
        live.put([message(number) for number in range(400)])
        copy = tmp_path / "copy"
        shutil.copytree(master, copy)
        written = 400

        def write_more(stage: str, done: int, total: int) -> None:
            nonlocal written
            if written < 2000:
                live.put([message(number) for number in range(written, written + 100)])
                written += 100

        options = AuditOptions(paths=(str(master), str(copy)), range_bytes=8192)
        result = audit_with(inline_runner(2), options, write_more)
        assert written > 400
    assert result.findings == ()
    assert [copy.record_count for copy in result.copies] == [400, 400]
    assert result.compared_bytes == records_of(copy)[-1].physical_offset + records_of(copy)[-1].total_size


def test_lagging_slave_is_compared_up_to_its_end(tmp_path: Path) -> None:
    master, slave = tmp_path / "master", tmp_path / "slave"
    with live_store(master, 64 << 10) as live:
        live.put([message(number) for number in range(200)])
        shutil.copytree(master, slave)
        live.put([message(number) for number in range(200, 300)])
        result = look(master, slave)
    assert (result.findings, result.exit_code) == ((), 0)
    assert [copy.record_count for copy in result.copies] == [300, 200]
    assert [(c.begin, c.end, c.copies) for c in result.only_in] == [
        (result.copies[1].end, result.copies[0].end, ("master",))
    ]


def test_a_record_inside_a_damaged_one_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """The body holds a sound record of another place, as copies of messages do."""
    writer = StoreWriter(tmp_path / "store")
    inner = encode_record(
        Message("old", 0, b"inner"), queue_offset=3, physical_offset=99, store_timestamp_ms=1, store_host=STORE_HOST
    )
    writer.put(message(0))
    at = writer.put(message(1, body=inner * 5))
    end = writer.put(message(2))
    writer.write_log(at + 4, b"\0\0\0\0")
    result = look(writer.root)
    (finding,) = result.findings
    assert (finding.kind, finding.physical_offset, finding.length) == ("unreadable", at, end - at)
    assert result.copies[0].record_count == 2
