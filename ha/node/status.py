"""Describes a node for /status, which `ha status`, the dashboard and health checks use.

Offsets are physical, in bytes; ages are in seconds. Keys are stable; new ones can be added.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import trio

from ha.replication.progress import SlaveState
from ha.replication.statistics import HAStatistics, SlaveStatistics
from ha.version import __version__

from .member import describe_member
from .node import Node
from .options import promised_copies

_OFFSETS = ("min_offset", "max_offset", "flushed_offset", "dispatched_offset")


def describe(node: Node) -> Mapping[str, object]:
    """Returns the state of `node`."""
    config = node.config
    store = msgspec.to_builtins(node.store.statistics())
    commitlog = {key: store.pop(key) for key in _OFFSETS}
    ha = node.ha_service.statistics()
    reason = node.not_ready()
    return {
        "version": __version__,
        "pid": node.platform.process_id,
        "uptime_s": round(trio.current_time() - node.opened_at, 3),
        "task_count": count_tasks(),
        "role": node.role,
        "cluster_name": config.cluster_name,
        "broker_name": config.broker_name,
        "broker_id": config.broker_id,
        "is_ready": not reason,
        "not_ready_reason": reason,
        "degraded_reason": degraded_reason(node, ha),
        "single_copy_reason": single_copy_reason(node, ha),
        "addresses": {
            "remoting": node.remoting_address,
            "ha": node.ha_address,
            "admin": node.admin_address,
            "embedded_name_server": node.name_server_address,
            "grpc": node.grpc_address,
        },
        "store": {"root": str(config.root.absolute()), "flush_disk_type": config.flush_mode, **store},
        "commitlog": commitlog,
        "delay": node.broker.delay.statistics(),
        "timers": node.broker.timers.statistics(),
        "pop": node.broker.pop.statistics(),
        "transactions": node.broker.transactions.statistics(),
        "damage": node.store.damage_statistics(),
        "grpc": None if node.grpc_server is None else node.grpc_server.statistics(),
        "tls": node.tls.status(),
        "acl": None if node.broker.acl_guard is None else node.broker.acl_guard.statistics(),
        "member": None if node.member is None else describe_member(node.member),
        "ha": _master_side(node, ha),
        "ha_client": None if node.ha_client is None else node.ha_client.statistics(),
        "name_servers": [
            {
                "address": address,
                "is_registered": state.is_registered,
                "error": state.error,
                "registered_count": state.registered_count,
                "failed_count": state.failed_count,
                "other_address": state.other_address,
            }
            for address, state in node.registration.states.items()
        ],
        "topic_count": len(node.broker.topics),
        "events": node.events.newest_first(),
    }


def count_tasks() -> int:
    """Returns the number of Trio tasks of this process; constant growth indicates a leak."""
    count, left = 0, [trio.lowlevel.current_root_task()]
    while left:
        task = left.pop()
        assert task is not None
        count += 1
        for nursery in task.child_nurseries:
            left += nursery.child_tasks
    return count


def degraded_reason(node: Node, ha: HAStatistics) -> str:
    """Returns why sends to this node fail, or reach fewer nodes than a SYNC_MASTER is configured for. "" if neither is
    the case, and on a slave, which accepts no sends.

    `ha status --check`, `ha doctor` and the dashboard report this text.
    """
    if node.role == "SLAVE":
        return ""
    if reason := node.not_ready():
        return f"the node is not ready: {reason}"
    is_writable, reason = node.store.is_writable
    if not is_writable:
        return f"nothing can be stored: {reason}"
    if node.role != "SYNC_MASTER":
        return ""
    needed = promised_copies(node.config)
    if ha.in_sync_replicas_nums >= needed:
        return ""
    if reason := single_copy_reason(node, ha):
        return f"messages are stored on one node only: {reason}"
    explanation = node.ha_service.explain(ha.max_offset) or "too few slaves are connected"
    return f"messages are stored on {ha.in_sync_replicas_nums} of {needed} nodes: {explanation}"


def single_copy_reason(node: Node, ha: HAStatistics) -> str:
    """Returns why no slave of this master is in sync, so that new messages are on this node only. "" if one is in sync,
    and on a slave."""
    if node.role == "SLAVE" or ha.in_sync_replicas_nums > 1:
        return ""
    return node.ha_service.explain(ha.max_offset) or "no slave is in sync"


def _master_side(node: Node, ha: HAStatistics) -> Mapping[str, object]:
    limit = node.config.ha_fall_behind_max_bytes
    return {
        "in_sync": ha.in_sync_replicas_nums - 1,
        "slave_count": ha.slave_count,
        "push2_slave_max_offset": ha.push2_slave_max_offset,
        "waiting_request_count": ha.waiting_request_count,
        "closed_counts": {reason.value: count for reason, count in ha.closed_counts.items()},
        "had_slave": ha.had_slave,
        "explanation": node.ha_service.explain(ha.max_offset),
        "slaves": [
            {**msgspec.to_builtins(slave), "why_not_in_sync": why_not_in_sync(slave, ha, limit)} for slave in ha.slaves
        ],
    }


def why_not_in_sync(slave: SlaveStatistics, ha: HAStatistics, gap_bytes_max: int) -> str:
    """Returns why puts don't wait for this slave, or ""."""
    if slave.is_in_sync:
        return ""
    if slave.state is SlaveState.CONNECTED:
        return "it has not reported an offset yet"
    if slave.state is SlaveState.OUT_OF_RANGE:
        return f"it requests offset {slave.transfer_offset}, but the log contains [{ha.min_offset}, {ha.max_offset})"
    if slave.state is not SlaveState.TRANSFER:
        return f"its connection is in state {slave.state.value}"
    if slave.lag_bytes >= gap_bytes_max:
        return f"it is {slave.lag_bytes} bytes behind, haMaxGapNotInSync is {gap_bytes_max}"
    return f"it started at offset {slave.start_offset}, and earlier puts are still waiting"
