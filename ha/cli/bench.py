"""`ha bench`: measures throughput and latency of sends. Memory use does not grow with the run."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated

import anyio
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ha.cli.exits import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_STORED_WEAKLY, UsageError
from ha.cli.flags import LOCAL_CLIENT, ClientFlags
from ha.cli.showing import notices, output, print_json, safe, stoppable
from ha.client import ClientOptions, Message, Producer, SendStatus
from ha.errors import ClientError

_STEPS = 32
"""Number of buckets per power of two: latencies are accurate to about 3 %"""
_PROGRESS_S = 0.1
_GRACE_S = 1.0
_ERROR_PAUSE_S = 0.2
_ERROR_KINDS_MAX = 5


class Latencies:
    """A latency histogram with logarithmic buckets."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self._sum_s = 0.0
        self._min_s = float("inf")
        self._max_s = 0.0

    def add(self, latency_s: float) -> None:
        """Counts a latency."""
        micros = max(1, round(latency_s * 1e6))
        doublings = max(0, micros.bit_length() - _STEPS.bit_length())
        self._counts[doublings * _STEPS + (micros >> doublings)] += 1
        self.count += 1
        self._sum_s += latency_s
        self._min_s = min(self._min_s, latency_s)
        self._max_s = max(self._max_s, latency_s)

    @staticmethod
    def _top_s(bucket: int) -> float:
        """Returns the largest latency of a bucket."""
        doublings = max(0, bucket // _STEPS - 1)
        return ((bucket - doublings * _STEPS + 1) << doublings) / 1e6

    def percentile_s(self, percent: float) -> float:
        """Returns a percentile (0 to 100) in seconds, at most about 3 % too high; 0.0 if nothing was counted."""
        left = self.count * percent / 100
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return min(self._top_s(bucket), self._max_s)
        return self._max_s

    def summary(self) -> dict[str, float]:
        """Returns min, mean, p50, p90, p99, p99.9 and max in ms, by these names; empty if nothing was counted."""
        if not self.count:
            return {}
        found = {"min": self._min_s, "mean": self._sum_s / self.count}
        found |= {f"p{percent:g}": self.percentile_s(percent) for percent in (50, 90, 99, 99.9)}
        return {name: round(value * 1000, 3) for name, value in (found | {"max": self._max_s}).items()}

    def doublings(self) -> list[tuple[float, int]]:
        """Returns (upper bound in ms, count) for each range between successive powers of two (in µs), from the lowest
        to the highest range that has latencies."""
        by_bound: Counter[int] = Counter()
        for bucket, count in self._counts.items():
            by_bound[max(1, round(self._top_s(bucket) * 1e6) - 1).bit_length()] += count
        bounds = range(min(by_bound, default=0), max(by_bound, default=-1) + 1)
        return [((1 << bound) / 1000, by_bound[bound]) for bound in bounds]


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run."""

    topic: str
    size: int
    in_flight: int
    is_complete: bool
    """Whether the run reached its end; False after Ctrl-C or SIGTERM"""
    sent: int
    """Number of messages that were stored; `errors` counts the failed sends"""
    statuses: dict[str, int]
    errors: dict[str, int]
    duration_s: float
    messages_per_s: float
    megabytes_per_s: float
    latency_ms: dict[str, float]
    histogram: list[tuple[float, int]]
    """For each range of latencies: its upper bound in ms, and the number of messages in it"""
    last_remark: str


def bench(
    topic: str = "halog_bench",
    /,
    *,
    size: Annotated[int, Parameter(help="Size of each body, in bytes.")] = 1024,
    seconds: Annotated[
        float | None, Parameter(help="Duration in seconds. Default: 10, unless --count is given.")
    ] = None,
    count: Annotated[int | None, Parameter(help="Number of messages to send.")] = None,
    rate: Annotated[float | None, Parameter(help="Maximum messages per second.")] = None,
    in_flight: Annotated[int, Parameter(help="Maximum number of messages in flight.")] = 64,
    batching: Annotated[
        bool, Parameter(negative=(), help="Combine waiting messages into one request (the SDK's batching option).")
    ] = False,
    json: Annotated[bool, Parameter(negative=(), help="Print the results as JSON.")] = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> int:
    """Send messages to TOPIC and measure throughput and latency.

    The messages stay in the topic: use a separate one. Exit codes: 0 all SEND_OK; 1 some failed; 2 usage; 3 all
    stored, some with another status than SEND_OK; 69 no name server or broker reachable; 130 interrupted, with partial
    results.
    """
    if size < 1 or in_flight < 1 or in_flight > 100_000 or (count is not None and count < 1):
        raise UsageError("--size, --count and --in-flight must be at least 1, --in-flight at most 100000")
    if (rate is not None and not rate > 0) or (seconds is not None and not 0 < seconds <= 86_400):
        raise UsageError("--rate and --seconds must be greater than 0, --seconds at most 86400")
    options = ClientOptions(
        credentials=client.credentials(),
        tls=client.client_tls(),
        request_timeout_s=client.timeout_s(),
        send_timeout_s=client.timeout_s(),
        batching=batching,
        retry_unreachable=False,
    )
    work = _Bench(topic, size, count, seconds or (None if count else 10.0), rate, in_flight)
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("sending"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with stoppable() as stop, Progress(*columns, console=console) if console.is_terminal else nullcontext() as bar:
        task = bar.add_task("", total=1.0, rate="") if bar else None

        def show(share: float, shown_rate: str) -> None:
            if bar is not None and task is not None:
                bar.update(task, completed=share, rate=shown_rate)

        anyio.run(work.run, client.addresses(), options, stop, show, backend="trio")
    result = work.result(is_complete=not stop.is_set())
    if json:
        print_json(result)
    else:
        _show(result)
    if not result.is_complete:
        return EXIT_INTERRUPTED
    if result.errors:
        return EXIT_REFUSED
    return EXIT_DONE if set(result.statuses) <= {SendStatus.SEND_OK.name} else EXIT_STORED_WEAKLY


class _Bench:
    def __init__(
        self, topic: str, size: int, count: int | None, seconds: float | None, rate: float | None, in_flight: int
    ) -> None:
        self._topic = topic
        self._body = (b"halog bench " * (size // 12 + 1))[:size]
        self._count = count
        self._seconds = seconds
        self._rate = rate
        self._in_flight = in_flight
        self._sender_count = min(in_flight, count or in_flight)
        self._latencies = Latencies()
        self._statuses: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._started_count = 0
        self._duration_s = 0.0
        self._last_remark = ""

    async def run(
        self, servers: list[str], options: ClientOptions, stop: threading.Event, show: Callable[[float, str], None]
    ) -> None:
        async with Producer(servers, group="halog-bench", options=options) as producer:
            self._began = time.perf_counter()
            self._stopped = anyio.Event()
            try:
                with anyio.CancelScope() as everything:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._watch, stop, show, everything)
                        async with anyio.create_task_group() as senders:
                            for _ in range(self._sender_count):
                                senders.start_soon(self._send, producer, stop)
                        tasks.cancel_scope.cancel()
            finally:
                self._duration_s = time.perf_counter() - self._began

    def _is_over(self, stop: threading.Event) -> bool:
        if stop.is_set() or (self._count is not None and self._started_count >= self._count):
            return True
        if not self._started_count:
            return False  # even the shortest run sends one message
        return self._seconds is not None and time.perf_counter() - self._began >= self._seconds

    async def _watch(
        self, stop: threading.Event, show: Callable[[float, str], None], everything: anyio.CancelScope
    ) -> None:
        stopped_at: float | None = None
        while True:
            await anyio.sleep(_PROGRESS_S)
            passed = time.perf_counter() - self._began
            share = self._latencies.count / self._count if self._count else passed / (self._seconds or 1)
            show(min(share, 1.0), f"{self._latencies.count / passed:,.0f}/s")
            if stop.is_set() or (self._seconds is not None and passed >= self._seconds):
                self._stopped.set()
            if stop.is_set():
                stopped_at = passed if stopped_at is None else stopped_at
                if passed - stopped_at > _GRACE_S:
                    everything.cancel()  # don't let unresponsive brokers delay Ctrl-C

    async def _send(self, producer: Producer, stop: threading.Event) -> None:
        message = Message(self._topic, self._body)
        while not self._is_over(stop):
            number = self._started_count
            self._started_count += 1
            if self._rate is not None:
                await self._wait_due(number)
                if self._stopped.is_set():
                    return
            began = time.perf_counter()
            try:
                result = await producer.send(message)
            except ValueError as error:
                raise UsageError(str(error)) from None
            except ClientError as error:
                self._errors[str(error) if len(self._errors) < _ERROR_KINDS_MAX else "others"] += 1
                if not self._latencies.count and sum(self._errors.values()) >= self._sender_count:
                    raise  # every send fails: there is nothing to measure
                await anyio.sleep(_ERROR_PAUSE_S)
                continue
            self._latencies.add(time.perf_counter() - began)
            self._statuses[result.status.name] += 1
            self._last_remark = result.remark or self._last_remark

    async def _wait_due(self, number: int) -> None:
        """Waits until message `number` is due, or the run stops."""
        assert self._rate is not None
        due = self._began + number / self._rate
        with anyio.move_on_after(due - time.perf_counter()):
            await self._stopped.wait()

    def result(self, *, is_complete: bool) -> BenchResult:
        """Returns the results."""
        count = self._latencies.count
        per_s = count / self._duration_s if self._duration_s else 0.0
        return BenchResult(
            topic=self._topic,
            size=len(self._body),
            in_flight=self._in_flight,
            is_complete=is_complete,
            sent=count,
            statuses=dict(self._statuses),
            errors=dict(self._errors),
            duration_s=self._duration_s,
            messages_per_s=per_s,
            megabytes_per_s=per_s * len(self._body) / 1e6,
            latency_ms=self._latencies.summary(),
            histogram=self._latencies.doublings(),
            last_remark=self._last_remark,
        )


def figure(value: float) -> str:
    """Formats a number with three significant digits, more for thousands: 0.0204, 43.1, 12,345."""
    decimals = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, decimals)}f}"


def _show(result: BenchResult) -> None:
    console = output()
    most = max((count for _, count in result.histogram), default=0)
    for bound_ms, count in result.histogram:
        console.print(f"  up to {bound_ms:>10,.3f} ms  {count:>12,}  {'█' * round(40 * count / most)}", soft_wrap=True)
    latencies = ", ".join(f"{name} {value:,.2f}" for name, value in result.latency_ms.items())
    if latencies:
        console.print(f"latency in ms: {latencies}", soft_wrap=True)
    counts = ", ".join(f"{count:,} {name}" for name, count in result.statuses.items()) or "nothing stored"
    console.print(
        f"{counts} in {figure(result.duration_s)} s: {figure(result.messages_per_s)} messages/s, "
        f"{figure(result.megabytes_per_s)} MB/s of {result.size:,} bytes each, {result.in_flight} in flight",
        soft_wrap=True,
    )
    for error, count in result.errors.items():
        notices().print(f"ha: {count:,} × {safe(error)}")
    if result.last_remark:
        notices().print(f"ha: last remark: {safe(result.last_remark)}")
