"""Calculates rates and lags of a cluster's logs and slaves from samples of the nodes' status.

A slave's time behind is the age of the first byte that it has not acknowledged, that is, the time since its master's
log ended at the acknowledged offset. If no sample is old enough, it is estimated as the lag in bytes divided by the
write rate. The `lag_s` of a node's status page is another time: since the slave last caught up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ha.cli.admin_pages import NodeStatus, Slave, SlaveSide

SAMPLES_MAX = 600


class SlaveFlow(msgspec.Struct, frozen=True, kw_only=True):
    """A slave as its master sees it. Offsets and lag in bytes, times in seconds; None: unknown."""

    identity: str
    state: str
    ack_offset: int
    lag_bytes: int
    lag_s: float | None
    """Time behind: age of the first byte that the slave has not acknowledged"""
    ack_bytes_per_s: float | None
    eta_s: float | None
    """Time to catch up at the current rates; None: never, or unknown"""
    last_ack_age_s: float | None
    counts: bool
    """Whether the slave is in sync; sends to a SYNC_MASTER wait only for slaves in sync"""
    why_not: str


class NodeFlow(msgspec.Struct, frozen=True, kw_only=True):
    """A node with its log and slaves. Offsets are physical, in bytes; None: unknown."""

    name: str
    role: str
    remoting: str
    is_ready: bool | None
    """Whether the node is ready; None: unknown"""
    why_not_ready: str
    """Why the node is not ready, or why its readiness is unknown"""
    min_offset: int
    max_offset: int
    unflushed_bytes: int | None
    undispatched_bytes: int | None
    written_bytes_per_s: float | None
    behind_bytes: int | None
    """Bytes of its master's log that a slave lacks; None for a master, and if the slave's master is not shown"""
    waiting_sends: int
    uptime_s: float
    master_address: str | None
    link: str
    """Description of a slave's link to its master"""
    slaves: list[SlaveFlow]

    @property
    def readiness_problem(self) -> str:
        """Text that says that the node is not ready, or that its readiness is unknown, and why; "" if it is ready."""
        if self.is_ready:
            return ""
        what = f"can't tell whether {self.name} is ready" if self.is_ready is None else f"{self.name} is not ready"
        return f"{what}: {self.why_not_ready or 'it does not report why'}"


class _Sample(NamedTuple):
    at_s: float
    max_offset: int
    acks: dict[str, int]


class Flow:
    """Calculates the flow of each node from its last SAMPLES_MAX samples."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}

    def add(self, at_s: float, nodes: Sequence[NodeStatus]) -> list[NodeFlow]:
        """Adds a sample taken at `at_s` (monotonic clock), and returns the flow of each node."""
        ends: dict[tuple[str, str], int] = {}
        """End of the master's log by cluster and broker name"""
        for node in nodes:
            if node.role != "SLAVE":
                group = node.cluster_name, node.broker_name
                ends[group] = max(node.commitlog.max_offset, ends.get(group, 0))
        return [self._node(at_s, node, ends.get((node.cluster_name, node.broker_name))) for node in nodes]

    def _node(self, at_s: float, node: NodeStatus, end: int | None) -> NodeFlow:
        log = node.commitlog
        samples = self._samples.setdefault(
            node.name + (node.addresses.get("remoting") or ""), deque(maxlen=SAMPLES_MAX)
        )
        if samples and samples[-1].max_offset > log.max_offset:
            samples.clear()  # the log was truncated or recreated
        acks = {slave.identity: slave.ack_offset for slave in node.ha.slaves}
        samples.append(_Sample(at_s, log.max_offset, acks))
        written = _rate([(sample.at_s, sample.max_offset) for sample in samples])
        link = node.link
        return NodeFlow(
            name=node.name,
            role=node.role,
            remoting=node.addresses.get("remoting") or "",
            is_ready=node.is_ready,
            why_not_ready=node.not_ready_reason,
            min_offset=log.min_offset,
            max_offset=log.max_offset,
            unflushed_bytes=None if log.flushed_offset is None else log.max_offset - log.flushed_offset,
            undispatched_bytes=None if log.dispatched_offset is None else log.max_offset - log.dispatched_offset,
            written_bytes_per_s=written,
            behind_bytes=None if end is None or node.role != "SLAVE" else max(0, end - log.max_offset),
            waiting_sends=node.ha.waiting_request_count,
            uptime_s=node.uptime_s,
            master_address=None if link is None else link.master_address,
            link="" if link is None else _link(link),
            slaves=[_slave(samples, slave, written) for slave in node.ha.slaves],
        )


def _link(link: SlaveSide) -> str:
    if link.state == "transfer" and link.condition not in ("connected", "out_of_range"):
        return "transfer (no data yet)"  # halog 0.1.0 still reports why the previous connection ended
    return f"{link.state} ({link.detail or link.condition})"


_RATE_S = 10.0
"""Time over which rates are computed, in seconds."""


def _rate(points: Sequence[tuple[float, int]]) -> float | None:
    """Returns bytes per second over the last _RATE_S, or between the last two points if they are further apart.

    None if there is only one point, or if the points have the same time.
    """
    last_at, last = points[-1]
    recent = [point for point in points if last_at - point[0] <= _RATE_S]
    if len(recent) < 2:
        recent = list(points[-2:])
    at, first = recent[0]
    return (last - first) / (last_at - at) if last_at > at else None


def _slave(samples: Sequence[_Sample], slave: Slave, written: float | None) -> SlaveFlow:
    acked = _ack_rate(samples, slave.identity)
    eta_s: float | None = None
    if slave.ack_offset >= 0 and slave.lag_bytes <= 0:
        eta_s = 0.0
    elif acked is not None and written is not None and acked > written:
        eta_s = slave.lag_bytes / (acked - written)
    return SlaveFlow(
        identity=slave.identity,
        state=slave.state,
        ack_offset=slave.ack_offset,
        lag_bytes=slave.lag_bytes,
        lag_s=_lag_s(samples, slave, written),
        ack_bytes_per_s=acked,
        eta_s=eta_s,
        last_ack_age_s=slave.last_report_age_s,
        counts=slave.is_in_sync,
        why_not=slave.why_not_in_sync,
    )


def _ack_rate(samples: Sequence[_Sample], identity: str) -> float | None:
    """Returns at how many bytes per second a slave acknowledges, since it last connected or began to copy again."""
    points: list[tuple[float, int]] = []
    for sample in samples:
        ack = sample.acks.get(identity, -1)
        if points and ack < points[-1][1]:
            points.clear()
        if ack >= 0:
            points.append((sample.at_s, ack))
    return _rate(points) if points else None


def _lag_s(samples: Sequence[_Sample], slave: Slave, written: float | None) -> float | None:
    if slave.ack_offset < 0:
        return None  # nothing acknowledged yet
    if slave.lag_bytes <= 0:
        return 0.0
    now_s = samples[-1].at_s
    before = None
    for sample in reversed(samples):
        if sample.max_offset <= slave.ack_offset:
            before = sample
            break
    if before is not None:
        # Interpolate between this sample and the next.
        after = next((sample for sample in samples if sample.at_s > before.at_s), None)
        if after is None:
            return 0.0  # remoting ports report the log's end and its slaves separately: the log grew in between
        share = (slave.ack_offset - before.max_offset) / max(1, after.max_offset - before.max_offset)
        return now_s - (before.at_s + share * (after.at_s - before.at_s))
    return slave.lag_bytes / written if written else None
