"""Why a put that is or could have been stored is not answered PUT_OK: a closed set, for remarks, log lines, metrics.

The remark of the answer has the words and the numbers; this is what it can be counted by. Ordered: of several slaves
that can't be waited for, the cause that comes first here is the one that is told of.
"""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """One cause for each put."""

    # replicas: SLAVE_NOT_AVAILABLE, FLUSH_SLAVE_TIMEOUT, IN_SYNC_REPLICAS_NOT_ENOUGH
    SLAVES_BEHIND = "slaves_behind"
    """The nearest slave is further behind than haMaxGapNotInSync."""
    CATCHING_UP = "catching_up"
    """A slave has just begun, with the last file; puts from before it still wait."""
    SLAVE_WAITS_FOR_REPAIR = "slave_waits_for_repair"
    """What a slave needs next is damaged here."""
    OUT_OF_RANGE = "out_of_range"
    """A slave asks for what the log no longer holds."""
    NOT_REPORTED = "not_reported"
    """Something is connected to the HA port and has not said where its log ends."""
    MEMBER_AWAY = "member_away"
    """A member of the sync-state set is not connected, or has not reported."""
    MEMBER_LATE = "member_late"
    """A member of the sync-state set has not acknowledged in time."""
    NO_SLAVE_CONNECTED = "no_slave_connected"
    ACK_LATE = "ack_late"
    """Slaves are in sync, and none, or not as many as needed, acknowledged within slaveTimeout."""
    TOO_FEW_SLAVES = "too_few_slaves"
    """Those that are there are in sync, but inSyncReplicas or minInSyncReplicas asks for more."""
    TOO_MANY_WAIT = "too_many_wait"
    """More puts wait for slaves than there is room for."""

    # the disk: FLUSH_DISK_TIMEOUT
    DISK_SLOW = "disk_slow"
    """Not flushed within syncFlushTimeout."""
    DISK_FAILED = "disk_failed"

    # the broker: any of them, SERVICE_NOT_AVAILABLE
    STEPPED_DOWN = "stepped_down"
    """It was the master of its group when the put was stored, and is no longer."""
    STOPPING = "stopping"
    NOT_MASTER = "not_master"
    """A slave, or a member that may not store now."""
    NOT_WRITABLE = "not_writable"
    """The store takes nothing: its disk is full or has failed, or its queues are being built."""
