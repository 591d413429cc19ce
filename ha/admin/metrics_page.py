"""/metrics: the metrics of a node in the text formats of Prometheus and OpenMetrics.

Values are read at each scrape. Each node has its own registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ha.histogram import BOUNDS_S, Histogram

from .metrics import METRICS, Metric, Samples

_BOUNDS = (*map(floatToGoString, BOUNDS_S), "+Inf")
_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_BY_NAME = {metric.name: metric for metric in METRICS}


class MetricsPage:
    """Renders `samples` and the process metrics."""

    def __init__(self, *samples: Samples) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SampleCollector(samples))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the page and its content type, in the format that the header `accept` requests."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # the header has a version that is not a number
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type


class SampleCollector(Collector):
    """Converts samples, whose names and labels are defined in METRICS, to prometheus-client's families."""

    def __init__(self, samples: Iterable[Samples]) -> None:
        self._samples = tuple(samples)

    def collect(self) -> Iterator[_Family]:
        """Yields the metrics with their current samples; called at each scrape."""
        families: dict[str, _Family] = {}
        for source in self._samples:
            for name, labels, value in source():
                family = families.get(name)
                if family is None:
                    family = families[name] = _family(_BY_NAME[name])
                if isinstance(family, HistogramMetricFamily):
                    assert isinstance(value, Histogram), name
                    buckets = list(zip(_BOUNDS, accumulate(value.counts), strict=True))
                    family.add_metric(labels, buckets, value.sum_s)
                else:
                    assert not isinstance(value, Histogram), name
                    family.add_metric(labels, value)
        yield from families.values()


def _family(metric: Metric) -> _Family:
    match metric.kind:
        case "counter":
            return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        case "gauge":
            return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        case "histogram":
            return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
