"""Every metric that /metrics may show: name, help, unit, labels. The one list, for the page, the reference and deploy/.

Names follow Prometheus' conventions: base units, `_total` for what only grows. Each label takes its values from a set
that is closed, or bounded by the configuration: `LABELS` says which. Topics, queues, groups and clients are no labels:
there may be thousands, and strangers can make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from ha.histogram import Histogram

Where = Literal["every", "master", "slave", "member", "tls", "acl", "process"]
"""Which nodes show a metric: every one; one that is master or slave now; a member of a failover group; one with TLS or
with an ACL. And what the system tells of the process."""


Sample = tuple[str, tuple[str, ...], float | Histogram]
"""Name, label values, value."""

Samples = Callable[[], Iterable[Sample]]


class Metric(msgspec.Struct, frozen=True):
    """One metric. `unit` is a base unit, "" of a plain number."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: Literal["", "bytes", "seconds", "ratio"] = ""
    labels: tuple[str, ...] = ()
    where: Where = "every"


LABELS = {
    "broker": "brokerName",
    "broker_id": "brokerId as configured",
    "cause": "why a put was not answered PUT_OK: the values of ha.causes.Cause",
    "cluster": "brokerClusterName",
    "condition": "how a slave's link is or ended: the values of ha.replication.statistics.Condition",
    "kind": "remoting (the main port), remoting_fast (listenPort - 2), ha, admin",
    "level": "INFO to CRITICAL of log lines; 1 to 18 (as many as messageDelayLevel has) of delayed messages",
    "name_server": "the addresses of namesrvAddr",
    "outcome": "committed, rolled_back, asked, unasked, given_up, dropped",
    "python": "version of Python",
    "reason": "why connections were closed: of kind ha the values of ha.replication.progress.CloseReason, of others "
    "ha.node.metrics.CLOSE_CAUSES; not_master, flow_control of refused sends; failed, denied of the ACL",
    "result": "registered, failed of name servers; found, missed of pulls; completed, failed, refused of handshakes",
    "role": "ASYNC_MASTER, SYNC_MASTER, SLAVE; of certificates server, ha, admin, client, etcd",
    "slave": "a slave's identity: its IP address (on loopback with the port), its certificate's name or `broker N`; at "
    "most 64, of slaves that have said where their log ends",
    "state": "of slaves connected, transfer, out_of_range, shutdown; of members following, candidate, master, fenced",
    "status": "the names of ha.protocol.codes.PutStatus",
    "version": "version of halog",
}

_ONE = "Exactly one of them is 1."

METRICS: tuple[Metric, ...] = (
    # who it is
    Metric("halog_build_info", "gauge", "Always 1; the labels say what runs.", labels=("version", "python")),
    Metric(
        "halog_node_info",
        "gauge",
        "Always 1; the labels say which node this is.",
        labels=("cluster", "broker", "broker_id"),
    ),
    Metric("halog_role", "gauge", f"Whether this is what the node is now. {_ONE}", labels=("role",)),
    Metric("halog_ready", "gauge", "Whether the node serves its role: what /ready says."),
    Metric("halog_tasks", "gauge", "Trio tasks of the process; a number that only grows is a leak."),
    Metric(
        "halog_event_loop_delay_seconds",
        "histogram",
        "How much later than due a task ran, five times a second.",
        "seconds",
    ),
    Metric(
        "halog_log_lines_total",
        "counter",
        "Lines logged at INFO and above, unless their logger is set to less.",
        labels=("level",),
    ),
    # the store
    Metric(
        "halog_commitlog_min_offset_bytes",
        "gauge",
        "First physical offset that the commitlog holds; -1 while it is empty.",
        "bytes",
    ),
    Metric("halog_commitlog_max_offset_bytes", "gauge", "End of the commitlog.", "bytes"),
    Metric("halog_commitlog_flushed_offset_bytes", "gauge", "Up to here the commitlog is on the disk.", "bytes"),
    Metric(
        "halog_commitlog_dispatched_offset_bytes", "gauge", "Up to here queues and index know the commitlog.", "bytes"
    ),
    Metric("halog_commitlog_segments", "gauge", "Files of the commitlog."),
    Metric("halog_consume_queues", "gauge", "Consume queues."),
    Metric("halog_index_files", "gauge", "Files of the key index."),
    Metric("halog_disk_used_ratio", "gauge", "Used part of the file system that has the store, 0 to 1.", "ratio"),
    Metric(
        "halog_store_writable",
        "gauge",
        "Whether the store takes messages: 0 if its disk is too full or has failed, or its queues are being built.",
    ),
    Metric("halog_dispatch_paused", "gauge", "Whether dispatch waits for something, such as room on the disk."),
    Metric("halog_dispatch_skipped_records_total", "counter", "Records that dispatch could not read and left out."),
    Metric("halog_recovery_seconds", "gauge", "How long recovery took at the start.", "seconds"),
    Metric("halog_recovery_clean", "gauge", "Whether the last owner of the store had closed it in order."),
    Metric("halog_recovery_truncated_bytes", "gauge", "Bytes that recovery cut off at the start.", "bytes"),
    Metric(
        "halog_append_seconds",
        "histogram",
        "From an append's call until its bytes are in the file; one for each chunk.",
        "seconds",
    ),
    Metric("halog_flush_seconds", "histogram", "How long the disk took for each sync of the commitlog.", "seconds"),
    Metric("halog_flush_waiting_requests", "gauge", "Chunks of puts that wait for a flush."),
    Metric("halog_damage_found_total", "counter", "Ranges of the commitlog found damaged."),
    Metric("halog_damage_healed_total", "counter", "Ranges that were healed."),
    Metric("halog_damage_open_ranges", "gauge", "Ranges that are damaged now."),
    Metric("halog_damage_open_bytes", "gauge", "Their bytes.", "bytes"),
    Metric("halog_damage_hopeless_ranges", "gauge", "Damaged ranges for which every known peer was asked in vain."),
    Metric("halog_checksum_rebuilt_total", "counter", "Checksum files made anew."),
    Metric("halog_verified_bytes_total", "counter", "Bytes read from the disk that had their checksum.", "bytes"),
    Metric("halog_scrubbed_bytes_total", "counter", "Bytes that the scrub has read.", "bytes"),
    Metric("halog_scrub_rounds_total", "counter", "Rounds that the scrub has completed."),
    Metric("halog_queue_entries_mended_total", "counter", "Entries of consume queues that were wrong and mended."),
    Metric("halog_index_rebuilt_total", "counter", "How often the key index was built again."),
    # puts and pulls
    Metric(
        "halog_stored_messages_total",
        "counter",
        "Messages stored by puts here; those copied from a master are not counted.",
    ),
    Metric(
        "halog_put_not_ok_total",
        "counter",
        "Puts that were not answered PUT_OK, by what they were answered and why.",
        labels=("status", "cause"),
    ),
    Metric("halog_sends_refused_total", "counter", "Sends refused before they were looked at.", labels=("reason",)),
    Metric(
        "halog_send_ack_seconds",
        "histogram",
        "From a send's arrival until its answer leaves; one for each send that was put.",
        "seconds",
    ),
    Metric("halog_sends_in_flight", "gauge", "Sends that wait for a flush or a slave."),
    Metric("halog_pulls_total", "counter", "Pulls, by whether they brought messages.", labels=("result",)),
    Metric("halog_pulled_messages_total", "counter", "Messages that pulls brought."),
    Metric("halog_held_pulls", "gauge", "Pulls that wait for messages."),
    Metric("halog_topics", "gauge", "Topics."),
    Metric("halog_subscription_groups", "gauge", "Consumer groups that have settings here."),
    Metric("halog_producers", "gauge", "Producers that sent a heartbeat lately, once for each of their groups."),
    Metric("halog_consumers", "gauge", "Consumers that sent a heartbeat lately, once for each of their groups."),
    Metric("halog_delayed_messages_waiting", "gauge", "Delayed messages that are not due yet.", labels=("level",)),
    Metric("halog_delayed_messages_delivered_total", "counter", "Delayed messages delivered."),
    Metric("halog_delayed_messages_dropped_total", "counter", "Delayed messages that could be read or stored no more."),
    Metric("halog_half_messages_open", "gauge", "Half messages not known to be ended."),
    Metric("halog_half_messages_total", "counter", "What became of half messages.", labels=("outcome",)),
    # connections
    Metric("halog_connections", "gauge", "Open connections.", labels=("kind",)),
    Metric("halog_connections_opened_total", "counter", "Connections accepted.", labels=("kind",)),
    Metric(
        "halog_connections_refused_total", "counter", "Connections closed at once, for want of room.", labels=("kind",)
    ),
    Metric("halog_connections_closed_total", "counter", "Connections ended, by why.", labels=("kind", "reason")),
    Metric("halog_requests_total", "counter", "Requests received.", labels=("kind",)),
    Metric("halog_received_bytes_total", "counter", "Bytes received by the remoting ports.", "bytes", ("kind",)),
    Metric("halog_sent_bytes_total", "counter", "Bytes sent by the remoting ports.", "bytes", ("kind",)),
    Metric("halog_outbox_bytes", "gauge", "Bytes of answers that peers have not taken yet.", "bytes", ("kind",)),
    Metric("halog_partial_frames_bytes", "gauge", "Bytes of requests that are not complete.", "bytes", ("kind",)),
    # replication, the master's side
    Metric("halog_slaves", "gauge", "Connections of slaves, by state.", labels=("state",)),
    Metric("halog_in_sync_replicas", "gauge", "Replicas in sync for a put now, the master included.", where="master"),
    Metric("halog_acknowledged_offset_bytes", "gauge", "The highest offset that any slave has acknowledged.", "bytes"),
    Metric("halog_replication_waiting_requests", "gauge", "Chunks of puts that wait for slaves."),
    Metric(
        "halog_replicate_seconds",
        "histogram",
        "From an append until a slave acknowledges it; one sample at a time of each slave.",
        "seconds",
    ),
    Metric(
        "halog_slave_state",
        "gauge",
        f"Whether this is the slave's state. {_ONE}",
        labels=("slave", "state"),
        where="master",
    ),
    Metric("halog_slave_in_sync", "gauge", "Whether puts count on the slave.", labels=("slave",), where="master"),
    Metric(
        "halog_slave_lag_bytes",
        "gauge",
        "The log's end less what the slave has acknowledged.",
        "bytes",
        ("slave",),
        "master",
    ),
    Metric(
        "halog_slave_lag_seconds",
        "gauge",
        "For how long at least the slave has not had all of the log.",
        "seconds",
        ("slave",),
        "master",
    ),
    Metric(
        "halog_slave_sent_bytes_total",
        "counter",
        "Bytes sent on the slave's present connection.",
        "bytes",
        ("slave",),
        "master",
    ),
    Metric(
        "halog_slave_last_report_age_seconds",
        "gauge",
        "Since the slave last said how far it is.",
        "seconds",
        ("slave",),
        "master",
    ),
    # replication, the slave's side
    Metric(
        "halog_ha_client_condition",
        "gauge",
        f"How the link to the master is, or why the last one ended. {_ONE}",
        labels=("condition",),
        where="slave",
    ),
    Metric("halog_ha_client_received_bytes_total", "counter", "Bytes received from masters.", "bytes", where="slave"),
    Metric("halog_ha_client_connections_total", "counter", "Connections made to masters.", where="slave"),
    Metric(
        "halog_ha_client_ended_total",
        "counter",
        "Links to masters that ended, by why.",
        labels=("condition",),
        where="slave",
    ),
    Metric(
        "halog_ha_client_last_read_age_seconds", "gauge", "Since the master was last heard.", "seconds", where="slave"
    ),
    Metric(
        "halog_ha_client_resyncs_total",
        "counter",
        "How often the log was set aside to start anew (haOutOfRange=resync).",
        where="slave",
    ),
    Metric("halog_ha_client_skipped_bytes_total", "counter", "Bytes that resyncs left out.", "bytes", where="slave"),
    # failover
    Metric(
        "halog_member_state",
        "gauge",
        f"Where a member of a failover group stands. {_ONE}",
        labels=("state",),
        where="member",
    ),
    Metric("halog_epoch", "gauge", "The term that the member knows of.", where="member"),
    Metric(
        "halog_lease_remaining_seconds",
        "gauge",
        "How long the member's lease still is; 0 without one.",
        "seconds",
        where="member",
    ),
    Metric("halog_agreement_ok", "gauge", "Whether etcd was reached the last time.", where="member"),
    Metric(
        "halog_sync_state_set_members",
        "gauge",
        "Members of the sync-state set; 0 while it is not known.",
        where="member",
    ),
    # the cluster, TLS, access
    Metric(
        "halog_name_server_registered",
        "gauge",
        "Whether the last registration there succeeded.",
        labels=("name_server",),
    ),
    Metric(
        "halog_name_server_registrations_total", "counter", "Registrations tried.", labels=("name_server", "result")
    ),
    Metric("halog_tls_handshakes_total", "counter", "TLS handshakes, by how they ended.", labels=("result",)),
    Metric("halog_tls_handshakes_under_way", "gauge", "TLS handshakes under way."),
    Metric(
        "halog_tls_certificate_expiry_timestamp_seconds",
        "gauge",
        "When the certificate ends, seconds since 1970.",
        "seconds",
        ("role",),
        "tls",
    ),
    Metric(
        "halog_tls_reload_failed",
        "gauge",
        "Whether the files as they are now can't be used; those from before are in force then.",
        labels=("role",),
        where="tls",
    ),
    Metric("halog_acl_accounts", "gauge", "Accounts in the ACL's files.", where="acl"),
    Metric(
        "halog_acl_refused_requests_total",
        "counter",
        "Requests refused: of whom it is not known, or who may not.",
        labels=("reason",),
        where="acl",
    ),
    Metric("halog_acl_closed_connections_total", "counter", "Connections closed for failing too often.", where="acl"),
    # the process, as every Prometheus client tells it
    Metric("process_cpu_seconds_total", "counter", "Processor time, user and system.", "seconds", where="process"),
    Metric(
        "process_resident_memory_bytes",
        "gauge",
        "Resident memory, mapped pages of the log included.",
        "bytes",
        where="process",
    ),
    Metric(
        "process_virtual_memory_bytes", "gauge", "Virtual memory, the log's maps included.", "bytes", where="process"
    ),
    Metric(
        "process_start_time_seconds", "gauge", "Start of the process, seconds since 1970.", "seconds", where="process"
    ),
    Metric("process_open_fds", "gauge", "Open file descriptors.", where="process"),
    Metric("process_max_fds", "gauge", "Most file descriptors.", where="process"),
)
