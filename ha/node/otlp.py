"""Exports metrics and traces to an OpenTelemetry collector with OTLP over HTTP; requires the extra `halog[otel]`.

Metrics are those of /metrics, with the same names. Sends that are answered together form a group, and one group in
otelTraceEvery gets a span. The span is created when the group is answered, so that the hot path carries no context.
Without otelEndpoint, this module is not imported. The SDK's readers and processors are not used, because each has its
own thread; requests are sent one at a time in a Trio worker thread. A stopping node waits at most twice EXPORT_S_MAX
for a collector that does not respond.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import Metric as MetricData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from ha.admin.metrics import METRICS, Metric, Samples
from ha.broker.put_request import PutRequest
from ha.histogram import BOUNDS_S, Histogram
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol.codes import PutStatus
from ha.version import __version__

from .node import Node

logger = logging.getLogger(__name__)

EXPORT_S_MAX = 2.0
"""Maximum time for a request, including retries, in seconds."""
SPAN_COUNT_MAX = 2048
"""Maximum number of queued spans; the oldest are dropped."""

_UNITS = {"": "1", "bytes": "By", "seconds": "s", "ratio": "1"}
_SCOPE = InstrumentationScope("halog", __version__)


class Otlp:
    """The exporter of a node. `serve` sends to the collector; `note` queues spans of answered sends."""

    def __init__(self, node: Node, samples: Samples) -> None:
        config = node.config
        base = config.otel_endpoint.rstrip("/")
        self._samples = samples
        self._endpoint = base
        self._interval_s = config.otel_interval_ms / 1000
        self._trace_every = config.otel_trace_every
        self._wall_clock_ms = node.platform.wall_clock_ms
        self._random_bytes = node.platform.random_bytes
        self._began_ns = self._now_ns()
        self._resource = Resource.create(
            {
                "service.name": "halog",
                "service.version": __version__,
                "service.namespace": config.cluster_name,
                "service.instance.id": f"{config.broker_name}/{config.broker_id}",
            }
        )
        self._metric_exporter = OTLPMetricExporter(endpoint=f"{base}/v1/metrics", timeout=EXPORT_S_MAX)
        self._span_exporter = OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=EXPORT_S_MAX)
        self._spans: deque[ReadableSpan] = deque(maxlen=SPAN_COUNT_MAX)
        self._untraced_count = 0
        self._log_limiter = LogRateLimiter()
        self.takes_metrics = True
        """Whether the last request with metrics succeeded; True before the first. Requests with traces don't count,
        because some collectors accept only metrics."""

    def note(self, began: float, ended: float, puts: Sequence[PutRequest]) -> None:
        """At every otelTraceEvery-th call, creates a span for `puts`, which were answered together.

        The sends of these puts arrived at `began` and were answered at `ended` (Trio's clock, in seconds).
        """
        self._untraced_count += 1
        if self._untraced_count < self._trace_every:
            return
        self._untraced_count = 0
        now_ns = self._now_ns()
        worst = next((put for put in puts if put.status is not PutStatus.PUT_OK), puts[0])
        is_ok = worst.status is PutStatus.PUT_OK
        self._spans.append(
            ReadableSpan(
                name="send",
                context=SpanContext(
                    int.from_bytes(self._random_bytes(16)) or 1,
                    int.from_bytes(self._random_bytes(8)) or 1,
                    is_remote=False,
                    trace_flags=TraceFlags(TraceFlags.SAMPLED),
                ),
                resource=self._resource,
                attributes={
                    "halog.requests": len(puts),
                    "halog.status": worst.status.name,
                    "halog.next_offset": puts[-1].next_offset,
                },
                kind=SpanKind.SERVER,
                status=Status(StatusCode.UNSET) if is_ok else Status(StatusCode.ERROR, worst.remark),
                start_time=now_ns - int((ended - began) * 1e9),
                end_time=now_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    async def serve(self) -> None:
        """Sends at each interval until cancelled."""
        while True:
            await trio.sleep(self._interval_s)
            await self.send()

    async def send(self) -> None:
        """Sends metrics and spans, which takes at most twice EXPORT_S_MAX. Failures are logged; the spans of a failed
        request are lost."""
        self.takes_metrics = await self._export(
            "metrics", self._metric_exporter.export, self._metrics(), MetricExportResult.SUCCESS
        )
        with trio.CancelScope(shield=True):  # cancellation would lose the spans
            if self._spans:
                spans = list(self._spans)
                self._spans.clear()
                await self._export("traces", self._span_exporter.export, spans, SpanExportResult.SUCCESS)

    def close(self) -> None:
        """Closes the connections."""
        self._metric_exporter.shutdown()
        self._span_exporter.shutdown()  # type: ignore[no-untyped-call]

    async def _export(self, what: str, export: Callable[[Any], object], data: object, success: object) -> bool:
        try:
            is_done = await trio.to_thread.run_sync(export, data) is success
        except OSError:  # exporters before 1.40 raise the errors of requests, which are OSErrors
            is_done = False
        if not is_done:
            times = self._log_limiter.admit(what, trio.current_time())
            if times:
                logger.warning("otlp.export_failed endpoint=%s what=%s times=%d", self._endpoint, what, times)
        return is_done

    def _metrics(self) -> MetricsData:
        found: dict[str, list[tuple[tuple[str, ...], float | Histogram]]] = {}
        for name, labels, value in self._samples():
            found.setdefault(name, []).append((labels, value))
        now_ns = self._now_ns()
        metrics = [self._metric(metric, found[metric.name], now_ns) for metric in METRICS if metric.name in found]
        scope = ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
        return MetricsData([ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")])

    def _metric(
        self, metric: Metric, values: Iterable[tuple[tuple[str, ...], float | Histogram]], now_ns: int
    ) -> MetricData:
        points: list[NumberDataPoint] = []
        histograms: list[HistogramDataPoint] = []
        for labels, value in values:
            common: dict[str, Any] = {
                "attributes": dict(zip(metric.labels, labels, strict=True)),
                "start_time_unix_nano": self._began_ns,
                "time_unix_nano": now_ns,
            }
            if isinstance(value, Histogram):
                counts = list(value.counts)
                histograms.append(
                    HistogramDataPoint(
                        **common,
                        count=sum(counts),
                        sum=value.sum_s,
                        bucket_counts=counts,
                        explicit_bounds=BOUNDS_S,
                        min=None,  # type: ignore[arg-type]  # optional in the protocol
                        max=None,  # type: ignore[arg-type]
                    )
                )
            else:
                points.append(NumberDataPoint(**common, value=value))
        total = AggregationTemporality.CUMULATIVE
        data: Sum | Gauge | HistogramData
        match metric.kind:
            case "counter":
                data = Sum(points, aggregation_temporality=total, is_monotonic=True)
            case "gauge":
                data = Gauge(points)
            case "histogram":
                data = HistogramData(histograms, aggregation_temporality=total)
        return MetricData(name=metric.name, description=metric.help, unit=_UNITS[metric.unit], data=data)

    def _now_ns(self) -> int:
        return self._wall_clock_ms() * 1_000_000


@asynccontextmanager
async def open_otlp(node: Node, samples: Samples) -> AsyncIterator[None]:
    """Exports metrics and traces during the block, and once more after it unless the block raised or the last request
    with metrics failed."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # otlp.export_failed reports the same, rate-limited
    otlp = Otlp(node, samples)
    node.broker.sender.on_answered = otlp.note
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(otlp.serve)
            yield
            nursery.cancel_scope.cancel()
        if otlp.takes_metrics:
            await otlp.send()
    finally:
        node.broker.sender.on_answered = None
        otlp.close()
