"""Metrics and traces as an OpenTelemetry collector gets them: a receiver that knows OTLP's protobuf, on loopback."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ha.config import Config, load_config
from ha.errors import ConfigError
from ha.node import open_node
from ha.version import __version__
from tests.docs.pages import ROOT
from tests.metrics.nodes import samples, scrape, send, settings, value
from tests.tls.nodes import until

BODIES: dict[str, Any] = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}


class Collector(ThreadingHTTPServer):
    """Keeps what it is sent. While `answers` is not set it says nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.requests: list[Any] = []
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.takes_traces = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def of(self, kind: type[Any]) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.set()
        self.server.answers.wait(20)
        self.server.requests.append(BODIES[self.path].FromString(body))
        self.send_response(200 if self.server.takes_traces or self.path == "/v1/metrics" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.answers.set()
        server.shutdown()
        thread.join()


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in of.attributes}


async def test_metrics_and_spans_are_what_the_node_did(tmp_path: Path, collector: Collector) -> None:
    keys = (f"otelEndpoint={collector.endpoint}", "otelInterval=100", "otelTraceEvery=2")
    before = set(threading.enumerate())
    async with open_node(settings(tmp_path, "SYNC_MASTER", *keys)) as master:
        assert len(await send(master, 6)) == 6
        page = samples(await scrape(master))
    last = collector.of(ExportMetricsServiceRequest)[-1]  # the one at the end
    [resource] = last.resource_metrics
    named = attributes(resource.resource)
    assert (named["service.name"], named["service.version"]) == ("halog", __version__)
    assert named["service.instance.id"] == "broker-a/0"
    [scope] = resource.scope_metrics
    metrics = {metric.name: metric for metric in scope.metrics}
    stored = metrics["halog_stored_messages_total"]
    assert (stored.sum.is_monotonic, stored.sum.data_points[0].as_int) == (True, 6)
    [refused] = metrics["halog_put_not_ok_total"].sum.data_points
    assert attributes(refused) == {"status": "SLAVE_NOT_AVAILABLE", "cause": "no_slave_connected"}
    assert refused.as_int == 6
    end = metrics["halog_commitlog_max_offset_bytes"]
    assert (end.unit, end.gauge.data_points[0].as_int) == ("By", value(page, "halog_commitlog_max_offset_bytes"))
    [answers] = metrics["halog_send_ack_seconds"].histogram.data_points
    assert (answers.count, sum(answers.bucket_counts)) == (6, 6)
    buckets = [number for labels, number in page["halog_send_ack_seconds_bucket"]]
    assert len(answers.bucket_counts) == len(answers.explicit_bounds) + 1 == len(buckets)
    assert answers.sum == pytest.approx(value(page, "halog_send_ack_seconds_sum"))

    spans = [
        span
        for request in collector.of(ExportTraceServiceRequest)
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]
    assert len(spans) == 3, "of one in two"
    assert {span.name for span in spans} == {"send"}
    assert len({span.trace_id for span in spans}) == 3
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert attributes(span)["halog.status"] == "SLAVE_NOT_AVAILABLE"
        assert span.status.message == "no slave is connected"
    left = {thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("Trio thread")}
    assert not [thread for thread in left if thread._target is None or "process_request" not in repr(thread._target)]  # type: ignore[attr-defined]


async def test_a_collector_that_does_not_answer_holds_up_nobody(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    keys = (f"otelEndpoint={collector.endpoint}", "otelInterval=100")
    collector.answers.clear()
    with trio.fail_after(30):
        async with open_node(settings(tmp_path, "ASYNC_MASTER", *keys)) as master:
            await trio.to_thread.run_sync(collector.asked.wait)
            assert len(await send(master, 3)) == 3, "while the request waits"
            assert not collector.requests
            await until(lambda: "otlp.export_failed" in caplog.text)
    assert caplog.text.count("otlp.export_failed") == 1
    collector.answers.set()


async def test_spans_are_not_lost_by_a_stop_beside_an_export(tmp_path: Path, collector: Collector) -> None:
    keys = (f"otelEndpoint={collector.endpoint}", "otelInterval=100", "otelTraceEvery=1")
    collector.answers.clear()
    with trio.fail_after(30):
        async with (
            trio.open_nursery() as nursery,
            open_node(settings(tmp_path, "ASYNC_MASTER", *keys)) as master,
        ):
            await trio.to_thread.run_sync(collector.asked.wait)
            await send(master, 3)

            async def answer_once_it_stops() -> None:
                await trio.sleep(0.3)
                collector.answers.set()

            nursery.start_soon(answer_once_it_stops)
    spans = collector.of(ExportTraceServiceRequest)
    assert sum(len(of_scope.spans) for each in spans for of in each.resource_spans for of_scope in of.scope_spans) == 3


async def test_a_collector_of_metrics_alone_gets_the_last_ones(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.takes_traces = False
    keys = (f"otelEndpoint={collector.endpoint}", "otelInterval=1000", "otelTraceEvery=1")
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *keys)) as master:
        await send(master, 1)
        await until(lambda: f"otlp.export_failed endpoint={collector.endpoint} what=traces times=1" in caplog.text)
        await send(master, 5)
    [resource] = collector.of(ExportMetricsServiceRequest)[-1].resource_metrics
    [stored] = [each for each in resource.scope_metrics[0].metrics if each.name == "halog_stored_messages_total"]
    assert stored.sum.data_points[0].as_int == 6


async def test_a_collector_that_is_not_there_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_node(settings(tmp_path, "ASYNC_MASTER", "otelEndpoint=http://127.0.0.1:1", "otelInterval=100")):
        await until(lambda: "otlp.export_failed endpoint=http://127.0.0.1:1 what=metrics times=1" in caplog.text)


async def test_exporter_that_raises_does_not_end_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those before 1.40 do when they can't connect."""

    def export(*_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(OTLPMetricExporter, "export", export)
    async with open_node(
        settings(tmp_path, "ASYNC_MASTER", "otelEndpoint=http://127.0.0.1:1", "otelInterval=100")
    ) as master:
        await until(lambda: "otlp.export_failed endpoint=http://127.0.0.1:1 what=metrics times=1" in caplog.text)
        assert len(await send(master, 1)) == 1


async def test_without_the_extra_the_cure_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ha.node.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=r"halog\[otel\]"), flatten_subgroups=True):
        async with open_node(settings(tmp_path, "ASYNC_MASTER", "otelEndpoint=http://127.0.0.1:1")):
            pass


def test_only_a_node_that_has_a_collector_imports_opentelemetry() -> None:
    for path in (ROOT / "ha").rglob("*.py"):
        assert path.name == "otlp.py" or not re.search(r"(?m)^ *(from|import) opentelemetry", path.read_text()), path
    program = "import sys, ha.master, ha.slave, ha.member; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_standard_variable_is_heard_and_our_own_words_win() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    assert load_config(Config, environment=environment).config.otel_endpoint == "http://collector:4318"
    given = load_config(Config, environment=environment, settings=["otelEndpoint=https://other/path"])
    assert given.config.otel_endpoint == "https://other/path"
    with pytest.raises(ConfigError, match="otelEndpoint"):
        load_config(Config, settings=["otelEndpoint=collector:4318"])
