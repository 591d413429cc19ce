"""The live part of the overview: one response for all viewers, computed at most once per ANSWER_S.

Samples are taken only while somebody looks at the dashboard, one per response. The charts show the last
SAMPLE_COUNT_MAX samples. Rates and estimated times are computed from the samples of the last RATE_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import trio

from .peers import name_peers
from .source import DashboardSource, Neighbour

ANSWER_S = 1.0
POLL_S = 2.5
"""Interval of a viewer's requests while the page is visible, in seconds; all viewers send them at the same times."""
SAMPLE_COUNT_MAX = 300
GAP_S = 15.0
"""Time between two samples, in seconds, from which the charts show a gap."""
RATE_S = 10.0
PEERS_IN_SAMPLE_MAX = 8


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """State of a node at one moment. `at`: wall clock, ms; `time_s`: Trio's clock; `log_end`: bytes."""

    at: int
    time_s: float
    log_end: int
    stored_count: int
    read_count: int
    behind: Mapping[str, int]
    """Number of unacknowledged bytes, by identity of the slave"""
    acknowledged: Mapping[str, int]
    """Acknowledged physical offset, by identity of the slave"""


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Rates per second; None if unknown."""

    log_bytes_per_s: float | None
    stored_per_s: float | None
    read_per_s: float | None
    eta_s: Mapping[str, float | None]
    """Estimated time in seconds until a slave has caught up, by its identity; None if it already has, if it is not
    catching up, or if the rates are unknown."""


class LiveView:
    """The overview's live part. `render` returns its HTML from the status (builtin types), rates and neighbours."""

    def __init__(
        self,
        source: DashboardSource,
        render: Callable[[Mapping[str, Any], Flow, Sequence[Neighbour]], str],
        *,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._source = source
        self._render = render
        self._wall_clock_ms = wall_clock_ms
        self._samples: deque[Sample] = deque(maxlen=SAMPLE_COUNT_MAX)
        self._status: Mapping[str, Any] = {}
        self._html = ""
        self._answer = self._history = b""
        self._history_at = -ANSWER_S

    def status(self) -> Mapping[str, Any]:
        """Returns the data of /status, at most ANSWER_S old."""
        self._refresh()
        return self._status

    def html(self) -> str:
        """Returns the HTML of the live part, at most ANSWER_S old."""
        self._refresh()
        return self._html

    def answer(self) -> bytes:
        """Returns as JSON the node's role, the HTML, the newest sample, and the names of slaves by identity; at most
        ANSWER_S old."""
        self._refresh()
        return self._answer

    def history(self) -> bytes:
        """Returns the samples as JSON, oldest first."""
        self._refresh()
        if trio.current_time() - self._history_at >= ANSWER_S:
            self._history_at = trio.current_time()
            self._history = msgspec.json.encode(list(self._samples))
        return self._history

    def _refresh(self) -> None:
        now = trio.current_time()
        if self._samples and now - self._samples[-1].time_s < ANSWER_S:
            return
        status = msgspec.to_builtins(self._source.status())
        neighbours = self._source.neighbours()
        name_peers(status, neighbours)
        sample = self._sample(status, now)
        if self._samples and sample.log_end < self._samples[-1].log_end:
            self._samples.clear()  # the log was truncated or replaced
        self._samples.append(sample)
        self._status = status
        self._html = self._render(status, self._flow(), neighbours)
        names = {slave["identity"]: slave["name"] for slave in status["ha"]["slaves"]}
        answer = {"role": status["role"], "html": self._html, "sample": sample, "names": names}
        self._answer = msgspec.json.encode(answer)

    def _sample(self, status: Mapping[str, Any], now: float) -> Sample:
        counts = self._source.counts()
        slaves = sorted(status["ha"]["slaves"], key=lambda each: str(each["identity"]))[:PEERS_IN_SAMPLE_MAX]
        reporting = [slave for slave in slaves if slave["ack_offset"] >= 0]
        return Sample(
            at=self._wall_clock_ms(),
            time_s=now,
            log_end=status["commitlog"]["max_offset"],
            stored_count=counts.stored_count,
            read_count=counts.read_count,
            behind={slave["identity"]: max(0, slave["lag_bytes"]) for slave in reporting},
            acknowledged={slave["identity"]: slave["ack_offset"] for slave in reporting},
        )

    def _flow(self) -> Flow:
        recent = self._recent()
        last = recent[-1]
        written = _per_s([(each.time_s, each.log_end) for each in recent])
        eta_s: dict[str, float | None] = {}
        for name, behind in last.behind.items():
            points = [(each.time_s, each.acknowledged[name]) for each in recent if name in each.acknowledged]
            acknowledged = _per_s(points)
            gains = None if acknowledged is None or written is None else acknowledged - written
            eta_s[name] = behind / gains if behind and gains is not None and gains > 0 else None
        return Flow(
            log_bytes_per_s=written,
            stored_per_s=_per_s([(each.time_s, each.stored_count) for each in recent]),
            read_per_s=_per_s([(each.time_s, each.read_count) for each in recent]),
            eta_s=eta_s,
        )

    def _recent(self) -> list[Sample]:
        """Returns the samples of the last RATE_S since the last gap."""
        found: list[Sample] = []
        for sample in reversed(self._samples):
            if found and (found[0].time_s - sample.time_s > GAP_S or found[-1].time_s - sample.time_s > RATE_S):
                break
            found.insert(0, sample)
        return found


def _per_s(points: Sequence[tuple[float, int]]) -> float | None:
    (first_at, first), (last_at, last) = points[0], points[-1]
    return (last - first) / (last_at - first_at) if last_at > first_at else None
