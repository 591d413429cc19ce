"""A stream of committed rows whose log is away, or begins again, while the driver examines it. Without Spark."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from ha.arrow.read_options import ReadOptions
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message
from ha.spark.sink.committed_source import CommittedSource
from ha.spark.sink.control import ControlRecord
from ha.spark.sink.identity import SINK_PROPERTY
from ha.spark.sink.options import COMMIT_TOPIC
from ha.spark.source.local import LocalSource
from ha.spark.source.log_source import QueueKey, QueueSlice
from ha.spark.source.opening import open_source
from ha.spark.source.options import parse_options
from tests.arrow.stores import StoreWriter

QUEUE = QueueKey("t", "s", 0)


@pytest.fixture
def store(tmp_path: Path) -> StoreWriter:
    return StoreWriter(tmp_path / "s")


def put_row(store: StoreWriter, batch: int, queue_id: int = 0) -> None:
    store.put(Message("t", queue_id, b"row", properties=encode_properties({SINK_PROPERTY: f"sink/{batch}/0"})))


def put_commit(store: StoreWriter, batch: int, queue_offset: int, topic: str = COMMIT_TOPIC) -> None:
    ranges = {"t": {"s": {0: [(queue_offset, queue_offset + 1)]}}}
    record = ControlRecord("commit", "sink", batch, ranges=ranges, row_count=1)
    store.put(Message(topic, 0, msgspec.json.encode(record)))


@contextmanager
def set_aside(store: StoreWriter) -> Iterator[None]:
    """A resync sets the log aside and then copies it again."""
    folders = [store.root / "commitlog", store.root / "consumequeue"]
    for folder in folders:
        os.rename(folder, f"{folder}.aside-1")
    yield
    for folder in folders:
        os.rename(f"{folder}.aside-1", folder)


def test_rows_that_could_not_be_examined_may_still_be_committed(store: StoreWriter) -> None:
    put_row(store, 0)
    inner = LocalSource([str(store.root)])
    source = CommittedSource(inner, stops_at_pending=True)
    assert inner.queue_range(QUEUE) == (0, 1)
    with set_aside(store):
        assert source.queue_range(QUEUE) == (0, 0)
    source.refresh()
    assert source.queue_range(QUEUE) == (0, 0)
    put_commit(store, 0, 0)
    source.refresh()
    assert source.queue_range(QUEUE) == (0, 1)


def test_commits_that_could_not_be_read_are_read_later(store: StoreWriter) -> None:
    put_row(store, 0)
    put_commit(store, 0, 0)
    inner = LocalSource([str(store.root)])
    source = CommittedSource(inner, stops_at_pending=True)
    for queue in (QUEUE, *inner.queues(frozenset({COMMIT_TOPIC}))):
        assert inner.queue_range(queue) == (0, 1)
    with set_aside(store):
        source.queue_range(QUEUE)
    source.refresh()
    assert source.queue_range(QUEUE) == (0, 1)


@pytest.mark.parametrize("kind", ["batch", "stream"])
def test_commits_may_be_in_another_topic(store: StoreWriter, kind: Literal["batch", "stream"]) -> None:
    put_row(store, 0)
    put_commit(store, 0, 0, "commits-of-team")
    given = {"path": str(store.root), "isolation": "read_committed", "commitTopic": "commits-of-team"}
    with closing(open_source(parse_options(given, kind))) as source:
        begin, end = source.queue_range(QUEUE)
        task = source.queue_partition([QueueSlice(QUEUE, begin, end)])
    assert [row for batch in task.read(ReadOptions(columns=("body",))) for row in batch["body"].to_pylist()] == [b"row"]


def test_topics_that_were_deleted_and_created_again_are_examined_from_their_first_message(store: StoreWriter) -> None:
    for batch in range(3):
        put_row(store, batch)
        put_commit(store, batch, batch)
    source = CommittedSource(LocalSource([str(store.root)]), stops_at_pending=True)
    assert source.queue_range(QUEUE) == (0, 3)
    for topic in ("t", COMMIT_TOPIC):
        store.delete_topic(topic)
    put_row(store, 3)
    source.refresh()
    assert source.queue_range(QUEUE) == (0, 0)
    put_commit(store, 3, 0)
    source.refresh()
    assert source.queue_range(QUEUE) == (0, 1)


def test_a_batch_that_holds_a_stream_for_a_minute_is_logged(
    store: StoreWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a minute for each batch, whatever the number of its queues."""
    now_s = 1000.0
    source = CommittedSource(LocalSource([str(store.root)]), stops_at_pending=True, clock_s=lambda: now_s)
    for queue_id in range(2):
        put_row(store, 7, queue_id)

    def warnings_after(wait_s: float) -> list[str]:
        nonlocal now_s
        now_s += wait_s
        caplog.clear()
        store.put(Message("t", 0, b"plain"))
        source.refresh()
        for queue_id in range(2):
            assert source.queue_range(QueueKey("t", "s", queue_id)).end == 0
        return [record.getMessage() for record in caplog.records]

    assert warnings_after(0) == []
    assert warnings_after(59) == []
    held = "stream.held topic='t' broker=s queue=0 queue_offset=0 sink=sink batch=7 for_s="
    assert warnings_after(1) == [held + "60"]
    assert warnings_after(59) == []
    assert warnings_after(1) == [held + "120"]
    # The record that docs/spark.md gives to exclude the batch.
    store.put(Message(COMMIT_TOPIC, 0, b'{"kind": "commit", "sink": "sink", "batch": 7}'))
    source.refresh()
    assert [source.queue_range(QueueKey("t", "s", queue_id)).end for queue_id in range(2)] == [6, 1]
