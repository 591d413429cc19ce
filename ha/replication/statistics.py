"""Snapshots of replication, for status pages, metrics and RocketMQ's HARuntimeInfo.

Offsets are physical, in bytes; ages and durations in seconds of Trio's clock. For wall-clock timestamps, subtract an
age from the wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from ha.replication.progress import CloseReason, SlaveState


class SlaveStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A slave's connection, as its master sees it."""

    identity: str
    peer: str
    state: SlaveState
    request_offset: int
    start_offset: int
    transfer_offset: int
    ack_offset: int
    lag_bytes: int
    """The end of the master's log minus the acknowledged offset, or the end itself before the first report
    (HARuntimeInfo: diff)."""
    lag_s: float
    """Time since caught up: since the slave last had all that the log contained at that moment (see CaughtUp) or, if
    that is later, since it connected. 0 if the slave has the whole log. After a reconnection it begins at 0 again, so
    the first byte that the slave lacks may be older; `ha top` shows that byte's age."""
    is_in_sync: bool
    transferred_bytes: int
    transferred_bytes_per_s: int
    connected_s: float
    last_report_age_s: float
    broker_id: int | None = None
    """Broker id of the slave; None if it is not a member of the failover group."""


class SyncStateStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The sync-state set, on the master of a failover group."""

    epoch: int
    members: tuple[int, ...]
    wished: tuple[int, ...] | None
    """The set that the master has proposed to replace `members`, None if there is no proposal."""
    confirm_offset: int


class HAStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of the master's side of replication."""

    min_offset: int
    max_offset: int
    push2_slave_max_offset: int
    slave_count: int
    """Number of slaves that are counted, each identity once."""
    in_sync_replicas_nums: int
    """Number of replicas that are in sync, the master included."""
    slaves: tuple[SlaveStatistics, ...]
    closed_counts: Mapping[CloseReason, int]
    had_slave: bool
    """Whether a slave that had reported its position has disconnected since the start. A peer whose connection shows
    that it was no slave of this log (ha_service.py: HOSTILE_ENDS) does not count."""
    waiting_request_count: int
    sync_state: SyncStateStatistics | None = None
    """The sync-state set; None unless this node leads a failover group."""


class HAClientState(Enum):
    """State of the slave's side, with RocketMQ's names (HAConnectionState)."""

    READY = "ready"
    TRANSFER = "transfer"
    SHUTDOWN = "shutdown"


class Condition(Enum):
    """State of the slave's connection to its master, or why there is none."""

    NOT_STARTED = "not_started"
    NO_MASTER = "no_master"
    """No master address is known."""
    CONNECT_FAILED = "connect_failed"
    NO_DATA_YET = "no_data_yet"
    """The connection is open, but the master has not sent anything that fits the log here."""
    CONNECTED = "connected"
    MASTER_CHANGED = "master_changed"
    MASTER_CLOSED = "master_closed"
    CONNECTION_LOST = "connection_lost"
    HOUSEKEEPING_TIMEOUT = "housekeeping_timeout"
    MALFORMED_FRAME = "malformed_frame"
    """Bytes that are not of the HA protocol, or a frame across segments: the master has another
    mappedFileSizeCommitLog.
    """
    OFFSET_MISMATCH = "offset_mismatch"
    """The master sends from another physical offset than the one that this slave needs next."""
    STALE_MASTER = "stale_master"
    """The group has reached a later term than this master's, which may not know that it was replaced."""
    NO_COMMON_EPOCH = "no_common_epoch"
    """The two logs' histories have no common term, so it is unknown up to where the logs are equal."""
    CONFIRMED_DIVERGED = "confirmed_diverged"
    """The master lacks bytes that were confirmed: following it would lose them."""
    MASTER_BEHIND = "master_behind"
    """The master's log ends before ours: it lost its tail, or it is another master."""
    DIVERGED = "diverged"
    """The end of our log differs from the master's bytes at that position."""
    OUT_OF_RANGE = "out_of_range"
    """The master has deleted the bytes that our log needs next, or, if it can't be asked, sends nothing from there."""
    NOT_AUTHENTICATED = "not_authenticated"
    """The two sides don't know the same haSharedSecret, or one of them has none."""
    DAMAGED = "damaged"
    """The end of our own log is damaged, so it can't be compared with the master's, or contains a torn record."""
    APPEND_FAILED = "append_failed"
    """The store could not take the bytes: the disk is full, a write failed, or a segment was not ready in time."""
    STOPPED = "stopped"


class HAClientStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of the slave's side of replication. Counts are since the start."""

    state: HAClientState
    condition: Condition
    detail: str
    """Details of the condition, for people."""
    master_address: str | None
    max_offset: int
    reported_offset: int
    """Physical offset in the last report on the current connection or, between connections, on the last one; -1 if
    there was none."""
    received_bytes: int
    received_bytes_per_s: int
    connection_count: int
    """Number of connections made since the start."""
    ended_counts: Mapping[Condition, int]
    resync_count: int
    skipped_bytes: int
    """Number of bytes that resyncs skipped, from the end of the old log to the master's first offset."""
    last_read_age_s: float | None
    last_write_age_s: float | None
