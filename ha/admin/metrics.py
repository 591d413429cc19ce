"""Defines every metric of /metrics with name, help, unit and labels; also used by the reference page and deploy/.

Names follow Prometheus' conventions: base units, `_total` for counters. Label values come from a closed set or are
bounded by the configuration (see `LABELS`). Topics, queues, groups and clients are not labels, because untrusted
clients could create thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from ha.histogram import Histogram

Where = Literal["every", "master", "slave", "member", "tls", "acl", "process"]
"""Nodes that export a metric: every node, current masters or slaves, failover group members, nodes with TLS or an ACL.
`process` marks the standard process metrics."""


Sample = tuple[str, tuple[str, ...], float | Histogram]
"""A measured value: name of the metric, values of its labels in the order of `Metric.labels`, value."""

Samples = Callable[[], Iterable[Sample]]


class Metric(msgspec.Struct, frozen=True):
    """A metric. The unit and, unless it is a histogram, the kind follow from its name, by Prometheus' conventions."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    where: Where = "every"
    is_histogram: bool = False

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """`histogram` as given; otherwise `counter` if the name ends in _total, else `gauge`."""
        if self.is_histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def unit(self) -> str:
        """The base unit in the name: bytes, seconds or ratio; "" if it has none."""
        unit = self.name.removesuffix("_total").rpartition("_")[2]
        return unit if unit in ("bytes", "seconds", "ratio") else ""


LABELS = {
    "broker": "brokerName",
    "broker_id": "brokerId as configured",
    "cause": "reason for a status other than PUT_OK: the values of ha.causes.Cause",
    "cluster": "brokerClusterName",
    "condition": "state of a slave's link, or why it ended: the values of ha.replication.statistics.Condition",
    "due": "time until it is due: 1h, 24h, 7d (more than 24h), later",
    "kind": "remoting (the main port), remoting_fast (listenPort - 2), grpc, ha, admin",
    "level": "INFO to CRITICAL of log lines; 1 to 18 (the levels of messageDelayLevel) of delayed messages",
    "name_server": "the addresses of namesrvAddr",
    "outcome": "of half messages committed, rolled_back, asked, unasked, given_up, dropped; of timer messages "
    "delivered, recalled, dropped; of messages in flight revived (delivered again), lost",
    "python": "version of Python",
    "reason": "why connections were closed: for kind ha the values of ha.replication.progress.CloseReason, for grpc of "
    "ha.grpc.EndCause, for others of ha.remoting.CloseCause, with underscores; not_master, flow_control for rejected "
    "sends; failed, denied for the ACL",
    "result": "registered, failed for name servers; found, missed for pulls; completed, failed, refused for handshakes",
    "role": "ASYNC_MASTER, SYNC_MASTER, SLAVE; for certificates server, grpc, ha, admin, client, etcd",
    "slave": "a slave's identity: its IP address (on loopback with the port), its certificate's name or `broker N`; at "
    "most 64, of slaves that have reported the end of their log",
    "state": "for slaves connected, transfer, out_of_range, shutdown; for members following, candidate, master, fenced",
    "status": "the names of ha.protocol.codes.PutStatus",
    "version": "version of halog",
}

_ONE = "Exactly one series is 1."

METRICS: tuple[Metric, ...] = (
    # identity and health of the node
    Metric("halog_build_info", "Always 1; the labels have the versions.", labels=("version", "python")),
    Metric("halog_node_info", "Always 1; the labels identify the node.", labels=("cluster", "broker", "broker_id")),
    Metric("halog_role", f"Whether the node has this role. {_ONE}", labels=("role",)),
    Metric("halog_ready", "Whether the node serves its role (result of /ready)."),
    Metric("halog_tasks", "Trio tasks of the process; constant growth indicates a leak."),
    Metric(
        "halog_event_loop_delay_seconds", "Delay of a periodic task, measured five times a second.", is_histogram=True
    ),
    Metric("halog_log_lines_total", "Log lines at INFO and above, if enabled for their logger.", labels=("level",)),
    # the store
    Metric("halog_commitlog_min_offset_bytes", "Minimum physical offset of the commitlog; -1 while it is empty."),
    Metric("halog_commitlog_max_offset_bytes", "End of the commitlog."),
    Metric("halog_commitlog_flushed_offset_bytes", "Physical offset up to which the commitlog is flushed."),
    Metric("halog_commitlog_dispatched_offset_bytes", "Physical offset up to which queues and index are built."),
    Metric("halog_commitlog_segments", "Files of the commitlog."),
    Metric("halog_consume_queues", "Consume queues."),
    Metric("halog_index_files", "Files of the key index."),
    Metric("halog_disk_used_ratio", "Used share of the store's file system, 0 to 1."),
    Metric(
        "halog_store_writable",
        "Whether the store accepts messages: 0 if its disk is too full or failed, or its queues are being built.",
    ),
    Metric("halog_dispatch_paused", "Whether dispatch is waiting, for example for disk space."),
    Metric("halog_dispatch_skipped_records_total", "Unreadable records that dispatch skipped."),
    Metric("halog_recovery_seconds", "Duration of recovery at the start."),
    Metric("halog_recovery_clean", "Whether the store was closed cleanly before the start."),
    Metric("halog_recovery_truncated_bytes", "Bytes that recovery truncated at the start."),
    Metric("halog_append_seconds", "Duration of an append to the file, per chunk.", is_histogram=True),
    Metric("halog_flush_seconds", "Duration of each sync of the commitlog.", is_histogram=True),
    Metric("halog_flush_waiting_requests", "Groups of puts, each appended together, that wait for a flush."),
    Metric("halog_damage_found_total", "Ranges of the commitlog found damaged."),
    Metric("halog_damage_healed_total", "Damaged ranges that were repaired."),
    Metric("halog_damage_open_ranges", "Damaged ranges that are not repaired."),
    Metric("halog_damage_open_bytes", "Bytes of unrepaired ranges."),
    Metric("halog_damage_hopeless_ranges", "Damaged ranges that no peer could repair in time, so consumers skip them."),
    Metric("halog_checksum_rebuilt_total", "Checksum files rebuilt."),
    Metric("halog_verified_bytes_total", "Bytes read from disk and verified by checksum."),
    Metric("halog_scrubbed_bytes_total", "Bytes read by the scrub."),
    Metric("halog_scrub_rounds_total", "Completed rounds of the scrub."),
    Metric("halog_queue_entries_mended_total", "Consume queue entries repaired."),
    Metric("halog_index_rebuilt_total", "Rebuilds of the key index."),
    # puts and pulls
    Metric("halog_stored_messages_total", "Messages stored by puts, without those replicated from a master."),
    Metric(
        "halog_put_not_ok_total",
        "Puts with a status other than PUT_OK, by status and cause.",
        labels=("status", "cause"),
    ),
    Metric("halog_sends_refused_total", "Sends rejected before processing.", labels=("reason",)),
    Metric("halog_send_ack_seconds", "Time from the arrival of a send to its response, per send.", is_histogram=True),
    Metric("halog_sends_in_flight", "Sends that wait for a flush or a slave."),
    Metric("halog_pulls_total", "Pulls, by whether they returned messages.", labels=("result",)),
    Metric("halog_pulled_messages_total", "Messages returned by pulls."),
    Metric("halog_held_pulls", "Pulls that wait for messages."),
    Metric("halog_pop_messages_in_flight", "Messages that POP consumers have popped and not acknowledged."),
    Metric(
        "halog_pop_messages_total", "Messages in flight that were due: delivered again, or gone.", labels=("outcome",)
    ),
    Metric("halog_held_pops", "Pops and notifications that wait for messages."),
    Metric("halog_topics", "Topics."),
    Metric("halog_subscription_groups", "Consumer groups with settings on this node."),
    Metric("halog_producers", "Producers with a recent heartbeat, counted per group."),
    Metric("halog_consumers", "Consumers with a recent heartbeat, counted per group."),
    Metric("halog_delayed_messages_waiting", "Delayed messages that are not due yet.", labels=("level",)),
    Metric("halog_delayed_messages_delivered_total", "Delayed messages delivered."),
    Metric("halog_delayed_messages_dropped_total", "Delayed messages that could no longer be read or stored."),
    Metric("halog_timer_messages_pending", "Pending timer messages, exact to the hour.", labels=("due",)),
    Metric("halog_timer_messages_total", "Timer messages, by outcome.", labels=("outcome",)),
    Metric("halog_half_messages_open", "Half messages that are neither committed nor rolled back."),
    Metric("halog_half_messages_total", "Half messages, by outcome.", labels=("outcome",)),
    # connections
    Metric("halog_connections", "Open connections.", labels=("kind",)),
    Metric("halog_connections_opened_total", "Connections accepted.", labels=("kind",)),
    Metric("halog_connections_refused_total", "Connections rejected because of a limit.", labels=("kind",)),
    Metric("halog_connections_closed_total", "Closed connections, by reason.", labels=("kind", "reason")),
    Metric("halog_grpc_calls_total", "Calls of gRPC clients."),
    Metric("halog_grpc_calls_in_progress", "Calls of gRPC clients in progress, long polls included."),
    Metric("halog_requests_total", "Requests received.", labels=("kind",)),
    Metric("halog_received_bytes_total", "Bytes received by the remoting ports.", labels=("kind",)),
    Metric("halog_sent_bytes_total", "Bytes sent by the remoting ports.", labels=("kind",)),
    Metric("halog_outbox_bytes", "Bytes of responses that peers have not read yet.", labels=("kind",)),
    Metric("halog_partial_frames_bytes", "Bytes of incomplete requests.", labels=("kind",)),
    # replication, the master's side
    Metric("halog_slaves", "Slave connections, by state.", labels=("state",)),
    Metric("halog_in_sync_replicas", "Replicas in sync, including the master.", where="master"),
    Metric("halog_acknowledged_offset_bytes", "The highest physical offset that any slave has acknowledged."),
    Metric("halog_replication_waiting_requests", "Groups of puts, each appended together, that wait for slaves."),
    Metric(
        "halog_replicate_seconds",
        "Time from an append to a slave's acknowledgement, measured for one append at a time per slave.",
        is_histogram=True,
    ),
    Metric("halog_slave_state", f"Whether the slave has this state. {_ONE}", labels=("slave", "state"), where="master"),
    Metric("halog_slave_in_sync", "Whether the slave is in sync.", labels=("slave",), where="master"),
    Metric(
        "halog_slave_lag_bytes",
        "Bytes of the log that the slave has not acknowledged.",
        labels=("slave",),
        where="master",
    ),
    Metric(
        "halog_slave_lag_seconds",
        "Time since the slave last caught up with the log or, if that is later, connected; 0 if it has the whole log.",
        labels=("slave",),
        where="master",
    ),
    Metric(
        "halog_slave_sent_bytes_total",
        "Bytes sent on the slave's current connection.",
        labels=("slave",),
        where="master",
    ),
    Metric(
        "halog_slave_last_report_age_seconds", "Time since the slave's last report.", labels=("slave",), where="master"
    ),
    # replication, the slave's side
    Metric(
        "halog_ha_client_condition",
        f"State of the link to the master, or why the last one ended. {_ONE}",
        labels=("condition",),
        where="slave",
    ),
    Metric("halog_ha_client_received_bytes_total", "Bytes received from masters.", where="slave"),
    Metric("halog_ha_client_connections_total", "Connections to masters.", where="slave"),
    Metric(
        "halog_ha_client_ended_total", "Closed links to masters, by condition.", labels=("condition",), where="slave"
    ),
    Metric("halog_ha_client_last_read_age_seconds", "Time since the master last sent data.", where="slave"),
    Metric(
        "halog_ha_client_resyncs_total",
        "Resyncs, which move the log aside and copy it again (haOutOfRange=resync).",
        where="slave",
    ),
    Metric("halog_ha_client_skipped_bytes_total", "Bytes skipped by resyncs.", where="slave"),
    # failover
    Metric(
        "halog_member_state",
        f"Whether the failover group member has this state. {_ONE}",
        labels=("state",),
        where="member",
    ),
    Metric("halog_epoch", "Current epoch known to the member.", where="member"),
    Metric("halog_lease_remaining_seconds", "Remaining time of the member's lease; 0 without a lease.", where="member"),
    Metric("halog_agreement_ok", "Whether the last request to etcd succeeded.", where="member"),
    Metric("halog_sync_state_set_members", "Members of the sync-state set; 0 if unknown.", where="member"),
    # the cluster, TLS, access
    Metric("halog_name_server_registered", "Whether the last registration succeeded.", labels=("name_server",)),
    Metric("halog_name_server_registrations_total", "Registration attempts.", labels=("name_server", "result")),
    Metric("halog_tls_handshakes_total", "TLS handshakes, by result.", labels=("result",)),
    Metric("halog_tls_handshakes_under_way", "TLS handshakes in progress."),
    Metric(
        "halog_tls_certificate_expiry_timestamp_seconds",
        "Expiry of the certificate, in seconds since 1970.",
        labels=("role",),
        where="tls",
    ),
    Metric(
        "halog_tls_reload_failed",
        "Whether the current files can't be loaded; the previous ones stay in use.",
        labels=("role",),
        where="tls",
    ),
    Metric("halog_acl_accounts", "Accounts in the ACL's files.", where="acl"),
    Metric(
        "halog_acl_refused_requests_total",
        "Requests rejected by authentication or authorization.",
        labels=("reason",),
        where="acl",
    ),
    Metric(
        "halog_acl_closed_connections_total", "Connections closed after repeated authentication failures.", where="acl"
    ),
    # the standard process metrics of Prometheus clients
    Metric("process_cpu_seconds_total", "Processor time, user and system.", where="process"),
    Metric("process_resident_memory_bytes", "Resident memory, including mapped pages of the log.", where="process"),
    Metric("process_virtual_memory_bytes", "Virtual memory, including mappings of the log.", where="process"),
    Metric("process_start_time_seconds", "Start of the process, seconds since 1970.", where="process"),
    Metric("process_open_fds", "Open file descriptors.", where="process"),
    Metric("process_max_fds", "Limit of file descriptors.", where="process"),
)
