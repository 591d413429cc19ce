"""Collects the samples of ha.admin.metrics from the packages of a node, at each scrape."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from ha.admin.metrics import Sample
from ha.broker.options import BrokerRole
from ha.failover.member_state import MemberState
from ha.grpc import GrpcServer
from ha.histogram import Histogram
from ha.remoting import RemotingServer
from ha.replication.progress import SlaveState
from ha.replication.statistics import Condition, SlaveStatistics
from ha.version import __version__

from .node import Node
from .status import count_tasks

if TYPE_CHECKING:
    from ha.failover.member import Member
    from ha.replication.ha_client import HAClient


def samples(node: Node) -> Iterator[Sample]:
    """Returns all samples of `node`."""
    yield from _identity(node)
    yield from _store(node)
    yield from _damage(node)
    yield from _puts(node)
    yield from _pulls(node)
    yield from _detours(node)
    yield from _connections(node)
    yield from _master(node)
    if node.ha_client is not None and node.broker.standing.is_slave:
        yield from _slave(node.ha_client)
    if node.member is not None:
        yield from _member(node, node.member)
    yield from _name_servers(node)
    yield from _access(node)


def _plain(values: Mapping[str, float | Histogram]) -> Iterator[Sample]:
    for name, value in values.items():
        yield name, (), value


def _one_of(name: str, states: Iterable[Enum], current: Enum, *labels: str) -> Iterator[Sample]:
    """Yields a series for each state: 1 for the current state, 0 for the others."""
    for state in states:
        yield name, (*labels, state.value), float(state is current)


def _identity(node: Node) -> Iterator[Sample]:
    config = node.config
    yield "halog_build_info", (__version__, platform.python_version()), 1
    yield "halog_node_info", (config.cluster_name, config.broker_name, str(config.broker_id)), 1
    yield from _one_of("halog_role", BrokerRole, BrokerRole(node.role))
    yield "halog_ready", (), float(not node.not_ready())
    yield "halog_tasks", (), count_tasks()
    yield "halog_event_loop_delay_seconds", (), node.loop_delay.times
    for level, count in node.events.counts.copy().items():
        yield "halog_log_lines_total", (level,), count


def _store(node: Node) -> Iterator[Sample]:
    store = node.store
    found = store.statistics()
    yield from _plain(
        {
            "halog_commitlog_min_offset_bytes": found.min_offset,
            "halog_commitlog_max_offset_bytes": found.max_offset,
            "halog_commitlog_flushed_offset_bytes": found.flushed_offset,
            "halog_commitlog_dispatched_offset_bytes": found.dispatched_offset,
            "halog_commitlog_segments": found.segment_count,
            "halog_consume_queues": found.queue_count,
            "halog_index_files": found.index_file_count,
            "halog_disk_used_ratio": found.disk_used_ratio,
            "halog_store_writable": float(found.is_writable),
            "halog_dispatch_paused": float(bool(found.dispatch_paused_reason)),
            "halog_dispatch_skipped_records_total": found.dispatch_skipped_count,
            "halog_recovery_seconds": found.recovery_s,
            "halog_recovery_clean": float(found.recovered_clean),
            "halog_recovery_truncated_bytes": found.truncated_bytes,
            "halog_append_seconds": store.log.append_times,
            "halog_flush_seconds": store.flusher.sync_times,
            "halog_flush_waiting_requests": found.flush_waiting_count,
        }
    )


def _damage(node: Node) -> Iterator[Sample]:
    found = node.store.damage_statistics()
    yield from _plain(
        {
            "halog_damage_found_total": found.log.found_count,
            "halog_damage_healed_total": found.log.healed_count,
            "halog_damage_open_ranges": found.log.open_count,
            "halog_damage_open_bytes": found.log.open_bytes,
            "halog_damage_hopeless_ranges": found.log.hopeless_count,
            "halog_checksum_rebuilt_total": found.checksum_rebuilt_count,
            "halog_verified_bytes_total": found.verified_bytes,
            "halog_scrubbed_bytes_total": found.scrub.scrubbed_bytes,
            "halog_scrub_rounds_total": found.scrub.round_count,
            "halog_queue_entries_mended_total": found.scrub.queue_entries_mended_count,
            "halog_index_rebuilt_total": found.scrub.index_rebuilt_count,
        }
    )


def _puts(node: Node) -> Iterator[Sample]:
    puts, sender = node.broker.put_service, node.broker.sender
    yield "halog_stored_messages_total", (), puts.stored_count
    for (status, cause), count in puts.acknowledgements.explained.counts.items():
        yield "halog_put_not_ok_total", (status.name, cause.value), count
    yield "halog_sends_refused_total", ("not_master",), sender.not_master_count
    yield "halog_sends_refused_total", ("flow_control",), sender.flow_control_count
    yield "halog_send_ack_seconds", (), sender.ack_times
    yield "halog_sends_in_flight", (), sender.in_flight_count


def _pulls(node: Node) -> Iterator[Sample]:
    tables = node.broker.tables
    members = tables.clients.statistics()
    pop = node.broker.pop.statistics()
    yield "halog_pop_messages_total", ("revived",), pop.revived_count
    yield "halog_pop_messages_total", ("lost",), pop.lost_count
    yield "halog_pulls_total", ("found",), tables.reads.found_count
    yield "halog_pulls_total", ("missed",), tables.reads.missed_count
    yield from _plain(
        {
            "halog_pulled_messages_total": tables.reads.message_count,
            "halog_held_pulls": len(node.broker.puller.holds),
            "halog_pop_messages_in_flight": pop.in_flight_count,
            "halog_held_pops": pop.waiting_count,
            "halog_topics": len(tables.topics),
            "halog_subscription_groups": len(tables.groups),
            "halog_producers": members["producers"],
            "halog_consumers": members["consumers"],
        }
    )


def _detours(node: Node) -> Iterator[Sample]:
    """Yields the samples of delayed, timer and half messages, which are stored in a system topic first."""
    delay, halves = node.broker.delay.statistics(), node.broker.transactions.statistics()
    yield "halog_delayed_messages_delivered_total", (), delay.delivered_count
    yield "halog_delayed_messages_dropped_total", (), delay.dropped_count
    for level in range(1, len(node.store.options.delay_levels_ms) + 1):
        yield "halog_delayed_messages_waiting", (str(level),), delay.waiting_counts.get(level, 0)
    timers = node.broker.timers.statistics()
    for due, count in timers.due_counts.items():
        yield "halog_timer_messages_pending", (due,), count
    for outcome in ("delivered", "recalled", "dropped"):
        yield "halog_timer_messages_total", (outcome,), getattr(timers, f"{outcome}_count")
    yield "halog_half_messages_open", (), halves.open_count
    for outcome in ("committed", "rolled_back", "asked", "unasked", "given_up", "dropped"):
        yield "halog_half_messages_total", (outcome,), getattr(halves, f"{outcome}_count")


def _connections(node: Node) -> Iterator[Sample]:
    for kind, server in zip(("remoting", "remoting_fast"), node.broker.servers, strict=False):
        yield from _port(kind, server)
    yield from _grpc(node.grpc_server)
    service = node.ha_service
    yield "halog_connections", ("ha",), service.connection_count
    for reason, count in service.statistics().closed_counts.items():
        yield "halog_connections_closed_total", ("ha", reason.value), count


def _grpc(server: GrpcServer | None) -> Iterator[Sample]:
    found = None if server is None else server.statistics()
    yield "halog_grpc_calls_total", (), 0 if found is None else found.calls
    yield "halog_grpc_calls_in_progress", (), 0 if found is None else found.calls_in_flight
    if found is not None:
        yield "halog_connections", ("grpc",), found.connections
        yield "halog_connections_opened_total", ("grpc",), found.opened
        yield "halog_connections_refused_total", ("grpc",), found.refused
        for cause, count in found.ended.items():
            yield "halog_connections_closed_total", ("grpc", cause.replace(" ", "_").lower()), count


def _port(kind: str, server: RemotingServer) -> Iterator[Sample]:
    found = server.statistics()
    yield "halog_connections", (kind,), found.connections
    yield "halog_connections_opened_total", (kind,), found.opened
    yield "halog_connections_refused_total", (kind,), found.refused
    yield "halog_requests_total", (kind,), found.requests
    yield "halog_received_bytes_total", (kind,), found.bytes_received
    yield "halog_sent_bytes_total", (kind,), found.bytes_sent
    yield "halog_outbox_bytes", (kind,), found.outbox_bytes
    yield "halog_partial_frames_bytes", (kind,), found.partial_bytes
    for cause, count in found.closed.items():
        yield "halog_connections_closed_total", (kind, cause.replace(" ", "_").lower()), count


def _master(node: Node) -> Iterator[Sample]:
    """Yields the samples of a node's slaves; a slave can have slaves, too."""
    found = node.ha_service.statistics()
    for state in SlaveState:
        count = sum(slave.state is state for slave in found.slaves)
        yield "halog_slaves", (state.value,), count
    if not node.broker.standing.is_slave:
        yield "halog_in_sync_replicas", (), found.in_sync_replicas_nums
    yield "halog_acknowledged_offset_bytes", (), found.push2_slave_max_offset
    yield "halog_replication_waiting_requests", (), found.waiting_request_count
    yield "halog_replicate_seconds", (), node.ha_service.replicate_times
    for slave in _by_identity(found.slaves):
        labels = (slave.identity,)
        yield from _one_of("halog_slave_state", SlaveState, slave.state, slave.identity)
        yield "halog_slave_in_sync", labels, float(slave.is_in_sync)
        yield "halog_slave_lag_bytes", labels, slave.lag_bytes
        yield "halog_slave_lag_seconds", labels, slave.lag_s
        yield "halog_slave_sent_bytes_total", labels, slave.transferred_bytes
        yield "halog_slave_last_report_age_seconds", labels, slave.last_report_age_s


def _by_identity(slaves: Iterable[SlaveStatistics]) -> Iterable[SlaveStatistics]:
    """Returns the most advanced connection of each slave, without those that have not reported a position."""
    best: dict[str, SlaveStatistics] = {}
    for slave in slaves:
        if slave.start_offset < 0:
            continue
        other = best.get(slave.identity)
        if other is None or slave.ack_offset > other.ack_offset:
            best[slave.identity] = slave
    return best.values()


def _slave(client: HAClient) -> Iterator[Sample]:
    found = client.statistics()
    yield from _one_of("halog_ha_client_condition", Condition, found.condition)
    for condition, count in found.ended_counts.items():
        yield "halog_ha_client_ended_total", (condition.value,), count
    yield from _plain(
        {
            "halog_ha_client_received_bytes_total": found.received_bytes,
            "halog_ha_client_connections_total": found.connection_count,
            "halog_ha_client_resyncs_total": found.resync_count,
            "halog_ha_client_skipped_bytes_total": found.skipped_bytes,
        }
    )
    if found.last_read_age_s is not None:
        yield "halog_ha_client_last_read_age_seconds", (), found.last_read_age_s


def _member(node: Node, member: Member) -> Iterator[Sample]:
    view, held = member.known.view, member.keeper.held.value
    group = None if view is None else view.group
    yield from _one_of("halog_member_state", MemberState, member.progress.state)
    yield from _plain(
        {
            "halog_epoch": member.progress.epoch,
            "halog_lease_remaining_seconds": 0.0 if held is None else max(0.0, held.deadline.remaining_s),
            "halog_agreement_ok": float(not (member.keeper.last_error or member.known.last_error)),
            "halog_sync_state_set_members": 0 if group is None else len(group.sync_state_set),
        }
    )


def _name_servers(node: Node) -> Iterator[Sample]:
    for address, state in node.registration.states.items():
        yield "halog_name_server_registered", (address,), float(state.is_registered)
        yield "halog_name_server_registrations_total", (address, "registered"), state.registered_count
        yield "halog_name_server_registrations_total", (address, "failed"), state.failed_count


def _access(node: Node) -> Iterator[Sample]:
    handshakes = node.tls.handshakes.statistics()
    yield "halog_tls_handshakes_total", ("completed",), handshakes.completed
    yield "halog_tls_handshakes_total", ("failed",), handshakes.failed - handshakes.refused
    yield "halog_tls_handshakes_total", ("refused",), handshakes.refused
    yield "halog_tls_handshakes_under_way", (), handshakes.under_way
    for role, held in node.tls.credentials().items():
        if held.expires_at_ms is not None:
            yield "halog_tls_certificate_expiry_timestamp_seconds", (role,), held.expires_at_ms / 1000
        yield "halog_tls_reload_failed", (role,), float(bool(held.error))
    if node.broker.acl_guard is not None:
        found = node.broker.acl_guard.statistics()
        yield "halog_acl_accounts", (), found.account_count
        yield "halog_acl_refused_requests_total", ("failed",), found.failed_count
        yield "halog_acl_refused_requests_total", ("denied",), found.denied_count
        yield "halog_acl_closed_connections_total", (), found.closed_count
