"""Causes of put statuses other than PUT_OK: a closed set, for remarks, log lines and metrics.

The remark of the response has the details. The order matters: if several slaves are not in sync for different reasons,
the cause that comes first here is reported.
"""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """The reason for a put status other than PUT_OK."""

    # replicas: SLAVE_NOT_AVAILABLE, FLUSH_SLAVE_TIMEOUT, IN_SYNC_REPLICAS_NOT_ENOUGH
    SLAVES_BEHIND = "slaves_behind"
    """A slave is haMaxGapNotInSync bytes or more behind."""
    CATCHING_UP = "catching_up"
    """A new slave has just begun to copy from the master's last file. It does not count until the puts that were
    waiting when it connected are answered."""
    SLAVE_WAITS_FOR_REPAIR = "slave_waits_for_repair"
    """The data that a slave needs next is damaged on this node."""
    OUT_OF_RANGE = "out_of_range"
    """A slave requests data that the log no longer has."""
    NOT_REPORTED = "not_reported"
    """A peer is connected to the HA port but has not reported the end of its log."""
    MEMBER_AWAY = "member_away"
    """A member of the sync-state set is not connected, or has not reported."""
    MEMBER_LATE = "member_late"
    """A member of the sync-state set has not acknowledged in time."""
    NO_SLAVE_CONNECTED = "no_slave_connected"
    """No slave is connected."""
    ACK_LATE = "ack_late"
    """Slaves are in sync, but not enough of them acknowledged within slaveTimeout."""
    TOO_FEW_SLAVES = "too_few_slaves"
    """The connected slaves are in sync, but inSyncReplicas or minInSyncReplicas requires more."""
    TOO_MANY_WAIT = "too_many_wait"
    """The maximum number of puts that wait for slaves is reached."""

    # the disk: FLUSH_DISK_TIMEOUT
    DISK_SLOW = "disk_slow"
    """The message was not flushed within syncFlushTimeout."""
    DISK_FAILED = "disk_failed"
    """A write or sync of the disk failed."""

    # the broker: any of the statuses above, or SERVICE_NOT_AVAILABLE
    STEPPED_DOWN = "stepped_down"
    """The node was master when the put was stored, but has lost that role."""
    STOPPING = "stopping"
    """The node is stopping."""
    NOT_MASTER = "not_master"
    """The node is a slave, or a member that may not store messages now."""
    NOT_WRITABLE = "not_writable"
    """The store does not accept messages: the disk is full or failed, or queues are being rebuilt."""
