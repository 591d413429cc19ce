"""The lag that a listener publishes, from progress events in Spark's own form over real stores. No Spark is started.

That Spark calls it is shown in test_stream_spark.
"""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.listener import QueryIdleEvent, QueryProgressEvent, QueryStartedEvent, QueryTerminatedEvent

from ha.arrow import LogReader
from ha.errors import OptionError
from ha.protocol.record import MessageRecord
from ha.spark.metrics import replace_metrics
from ha.spark.source.listener import LagListener, LagReport, QueueLag, prometheus_text
from tests.spark.stores import ODD_TIMES_MS, live_store, make_store, message, records_of, set_store_time

QUERY = uuid.UUID(int=7)
SOURCE = "org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStreamWithAdmissionControl@1"


def started(name: str | None = "delays", query: uuid.UUID = QUERY) -> QueryStartedEvent:
    return QueryStartedEvent.fromJson(
        {"id": str(query), "runId": str(query), "name": name, "timestamp": "2026-01-01T00:00:00.000Z"}
    )


def progress(
    offsets: Any,
    batch_id: int = 3,
    name: str | None = "delays",
    description: str = SOURCE,
    query: uuid.UUID = QUERY,
) -> QueryProgressEvent:
    source = {
        "description": description,
        "startOffset": None,
        "endOffset": offsets if isinstance(offsets, str) else json.dumps(offsets),
        "latestOffset": None,
        "numInputRows": 1,
        "inputRowsPerSecond": 1.0,
        "processedRowsPerSecond": 1.0,
    }
    other = {**source, "description": "RateStreamV2[rowsPerSecond=1]", "endOffset": "5"}
    found = {
        "id": str(query),
        "runId": str(query),
        "name": name,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "batchId": batch_id,
        "batchDuration": 1,
        "durationMs": {},
        "eventTime": {},
        "stateOperators": [],
        "sources": [other, source],
        "sink": {"description": "x", "numOutputRows": 1},
    }
    return QueryProgressEvent.fromJson({"progress": found})


def idle() -> QueryIdleEvent:
    return QueryIdleEvent(QUERY, QUERY, "2026-01-01T00:00:00.000Z")


def terminated(query: uuid.UUID = QUERY) -> QueryTerminatedEvent:
    return QueryTerminatedEvent(query, query, None, None)


def test_lag_in_messages_bytes_and_seconds(tmp_path: Path) -> None:
    path = make_store(tmp_path / "broker-a", [message(n) for n in range(40)])
    make_store(path, [message(n, topic="later", queue_id=0) for n in range(40, 43)])
    records = records_of(path)
    now_ms = records[-1].store_timestamp_ms + 60_000
    reports: list[LagReport] = []
    metrics = tmp_path / "lag.prom"
    listener = LagListener({"path": str(path)}, publish=reports.append, metrics_file=metrics, clock_ms=lambda: now_ms)
    listener.onQueryStarted(started())
    listener.onQueryProgress(
        progress({"flights": {"0": 10, "1": 4, "2": 10, "3": 10}, "$start": {"flights": {"0": 0}}})
    )
    [report] = reports
    unread = [record for record in records if record.queue_id == 1 and record.queue_offset >= 4]
    later = [record for record in records if record.topic == "later"]

    def lag(unread: list[MessageRecord], headroom: int) -> QueueLag:
        first, count = unread[0], len(unread)
        return QueueLag(
            topic=first.topic,
            broker="broker-a",
            queue_id=first.queue_id,
            next_offset=first.queue_offset,
            end_offset=first.queue_offset + count,
            messages=count,
            bytes=sum(record.total_size for record in unread),
            seconds=(now_ms - first.store_timestamp_ms) / 1000,
            headroom=headroom,
            lost=0,
        )

    behind = {(each.topic, each.queue_id): each for each in report.queues if each.messages}
    assert behind == {("flights", 1): lag(unread, headroom=4), ("later", 0): lag(later, headroom=0)}
    assert len(report.queues) == 5
    assert (report.query, report.batch_id, report.messages, report.lost) == ("delays", 3, 9, 0)
    assert report.bytes == sum(record.total_size for record in [*unread, *later])
    assert report.seconds == behind["flights", 1].seconds >= 60
    lines = metrics.read_text().splitlines()
    assert 'halog_stream_lag_messages{query="delays",topic="flights",broker="broker-a",queue="1"} 6' in lines
    assert 'halog_stream_active{query="delays"} 1' in lines
    listener.onQueryTerminated(terminated())
    assert 'halog_stream_active{query="delays"} 0' in metrics.read_text().splitlines()
    assert list(tmp_path.glob(".lag*")) == []


def test_age_of_messages_in_light_queues(tmp_path: Path) -> None:
    """Their records have other topics. The age was 0."""
    path = make_store(tmp_path / "broker-a", [message(n, queue_id=0) for n in range(6)])
    with LogReader(path) as reader:
        entries = reader.entries("flights", 0, 2, 5)
    for name in ("%LMQ%one", "%LMQ%two"):
        queue = path / "consumequeue" / name / "0"
        queue.mkdir(parents=True)
        (queue / "00000000000000000000").write_bytes(entries.tobytes().ljust(20 * 1000, b"\0"))
    stored_ms = [record.store_timestamp_ms for record in records_of(path)]
    now_ms = stored_ms[-1] + 60_000
    reports: list[LagReport] = []
    given = {"path": str(path), "subscribe": "%LMQ%one,%LMQ%two,flights"}
    listener = LagListener(given, publish=reports.append, clock_ms=lambda: now_ms)
    listener.onQueryProgress(progress({"%LMQ%one": {"0": 1}, "%LMQ%two": {"0": 2}, "flights": {"0": 5}}))
    oldest = {"%LMQ%one": 3, "%LMQ%two": 4, "flights": 5}
    found = {queue.topic: queue.seconds for queue in reports[0].queues}
    assert found == {topic: (now_ms - stored_ms[number]) / 1000 for topic, number in oldest.items()}


@pytest.mark.parametrize("store_ms", ODD_TIMES_MS)
def test_damaged_store_times_have_no_age(tmp_path: Path, store_ms: int) -> None:
    path = make_store(tmp_path / "broker-a", [message(n, queue_id=0) for n in range(3)])
    set_store_time(path, 1, store_ms)
    reports: list[LagReport] = []
    LagListener({"path": str(path)}, publish=reports.append).onQueryProgress(progress({"flights": {"0": 1}}))
    assert [(report.messages, report.seconds) for report in reports] == [(2, 0.0)]


def test_measurement_interval_is_respected_and_idle_progress_counts(tmp_path: Path) -> None:
    now = [10**12]
    path = make_store(tmp_path / "broker-a", [message(n, queue_id=0) for n in range(10)])
    reports: list[LagReport] = []
    listener = LagListener({"path": str(path)}, publish=reports.append, interval_s=5, clock_ms=lambda: now[0])
    listener.onQueryIdle(idle())  # nothing is known of it yet
    listener.onQueryProgress(progress({"flights": {"0": 2}}))
    now[0] += 4999
    listener.onQueryProgress(progress({"flights": {"0": 10}}, batch_id=4))
    assert [report.messages for report in reports] == [8]
    now[0] += 1
    listener.onQueryIdle(idle())
    assert [(report.messages, report.batch_id) for report in reports] == [(8, 3), (0, 4)]
    assert reports[-1].seconds == 0


def test_lag_is_measured_after_the_clock_was_set_back(tmp_path: Path) -> None:
    now = [10**12]
    path = make_store(tmp_path / "broker-a", [message(n, queue_id=0) for n in range(10)])
    reports: list[LagReport] = []
    listener = LagListener({"path": str(path)}, publish=reports.append, clock_ms=lambda: now[0])
    listener.onQueryProgress(progress({"flights": {"0": 2}}))
    now[0] -= 3_600_000
    listener.onQueryProgress(progress({"flights": {"0": 10}}))
    assert [report.messages for report in reports] == [8, 0]


def test_messages_deleted_before_reading_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "broker-a"
    reports: list[LagReport] = []
    with live_store(path, segment_size=16 << 10) as live:
        live.put([message(n, queue_id=0) for n in range(300)])
        listener = LagListener({"path": str(path)}, publish=reports.append, interval_s=0)
        listener.onQueryProgress(progress({"flights": {"0": 20}}))
        assert live.clean() > 0
        listener.onQueryProgress(progress({"flights": {"0": 20}}))
    first = records_of(path)[0].queue_offset
    [before], [after] = reports[0].queues, reports[1].queues
    assert (before.messages, before.headroom, before.lost) == (280, 20, 0)
    assert (after.messages, after.headroom, after.lost) == (300 - first, 0, first - 20)
    assert f"lag.messages_lost query='delays' count={first - 20}" in caplog.text


def test_a_query_that_starts_again_without_its_checkpoint_replaces_the_former_one(tmp_path: Path) -> None:
    path, metrics = make_store(tmp_path / "broker-a", [message(0)]), tmp_path / "lag.prom"
    listener = LagListener({"path": str(path)}, publish=lambda _: None, metrics_file=metrics)
    listener.onQueryProgress(progress({"flights": {"0": 0}}))
    listener.onQueryTerminated(terminated())
    assert 'halog_stream_active{query="delays"} 0' in metrics.read_text()
    again = uuid.UUID(int=8)
    listener.onQueryStarted(started(query=again))
    listener.onQueryProgress(progress({"flights": {"0": 0}}, query=again))
    told = metrics.read_text()
    assert told.count('halog_stream_active{query="delays"}') == 1
    assert 'halog_stream_active{query="delays"} 1' in told


def test_metrics_have_the_last_100_ended_queries(tmp_path: Path) -> None:
    path, metrics = make_store(tmp_path / "broker-a", [message(0)]), tmp_path / "lag.prom"
    listener = LagListener({"path": str(path)}, metrics_file=metrics)
    queries = [uuid.UUID(int=number) for number in range(103)]
    for query in queries:
        listener.onQueryStarted(started(None, query))
        listener.onQueryProgress(progress({"flights": {"0": 0}}, name=None, query=query))
        if query != queries[0]:
            listener.onQueryTerminated(terminated(query))
    told = metrics.read_text()
    assert told.count("halog_stream_active{") == 101
    assert f'halog_stream_active{{query="{queries[0]}"}} 1' in told
    assert [f'halog_stream_active{{query="{query}"}} 0' in told for query in queries[1:4]] == [False, False, True]


def test_other_queries_and_unreadable_logs_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_store(tmp_path / "broker-a", [message(n) for n in range(10)])
    reports: list[LagReport] = []
    listener = LagListener({"path": str(path)}, publish=reports.append, interval_s=0, queries=["delays"])
    listener.onQueryProgress(progress({"flights": {"0": 2}}, name="another"))
    listener.onQueryProgress(progress({"flights": {"0": 2}}, description="KafkaV2[Subscribe[flights]]"))
    assert caplog.text == ""
    listener.onQueryProgress(progress({"flights": {"broker-x:0": 2}}))
    listener.onQueryProgress(progress("[1]"))
    listener.onQueryProgress(progress("not JSON"))
    assert caplog.text.count("lag.not_measured query='delays'") == 3
    assert "lag.not_measured" in caplog.text
    gone = LagListener({"path": str(tmp_path / "none")}, publish=reports.append)
    gone.onQueryProgress(progress({"flights": {"0": 2}}))
    assert "the directory does not exist" in caplog.text
    assert reports == []
    with pytest.raises(OptionError):
        LagListener({"paht": "x"})


def test_errors_of_publish_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, metrics = make_store(tmp_path / "broker-a", [message(0)]), tmp_path / "lag.prom"

    def publish(report: LagReport) -> None:
        raise RuntimeError("the application's")

    listener = LagListener({"path": str(path)}, publish=publish, metrics_file=metrics)
    listener.onQueryProgress(progress({"flights": {"0": 0}}))
    assert 'halog_stream_active{query="delays"} 1' in metrics.read_text()
    assert "lag.not_published query='delays'" in caplog.text
    assert "RuntimeError: the application's" in caplog.text


def test_metrics_that_can_not_be_written_leave_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError("no space left")

    file = tmp_path / "lag.prom"
    replace_metrics(file, "a 1\n")
    monkeypatch.setattr(Path, "replace", full)
    replace_metrics(file, "a 2\n")
    assert "metrics.not_written" in caplog.text
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("lag.prom", "a 1\n")]


def test_names_in_metrics_are_quoted() -> None:
    report = LagReport(query='a"b\\c\n', query_id="1", batch_id=1, measured_at_ms=1500, queues=())
    assert prometheus_text([report]).splitlines()[-1] == (
        'halog_stream_measured_timestamp_seconds{query="a\\"b\\\\c\\n"} 1.5'
    )
