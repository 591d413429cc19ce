"""What can be set about replication. Units in the names; RocketMQ's key in each comment."""

from __future__ import annotations

from typing import Literal

import msgspec

from ha.replication.handshake import HandshakeOptions


class HAOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of HAService, GroupTransfer and HAClient. `__post_init__` refuses values that can't work."""

    heartbeat_interval_s: float = 5.0
    """haSendHeartbeatInterval: silence after which either side sends a heartbeat (strictly more than this)."""
    housekeeping_interval_s: float = 20.0
    """haHousekeepingInterval: silence of the peer after which either side closes (strictly more than this)."""

    transfer_batch_size_bytes: int = 1 << 20
    """haTransferBatchSize: largest body of a frame. RocketMQ's default is 32 KiB; its slaves take up to 4 MiB - 12."""
    fall_behind_max_bytes: int = 256 << 20
    """haSlaveFallbehindMax / haMaxGapNotInSync: a slave further behind is not in sync."""
    transfer_bytes_per_s_max: int | None = None
    """maxHaTransferByteInSecond if haFlowControlEnable, per connection, headers included; None: unlimited."""
    connection_count_max: int = 64
    """More HA connections than this are refused; one that never reported makes way for a new one."""
    waiting_request_count_max: int = 100_000
    """More puts than this waiting for acknowledgements: the next ones are answered FLUSH_SLAVE_TIMEOUT at once."""
    submitted_batch_count_max: int = 1024
    """Capacity of GroupTransfer's channel, in batches; whoever submits more waits."""

    reconnect_interval_s: float = 5.0
    """Slave: longest wait after a failed or ended connection (`ha.replication.reconnect`)."""
    connect_timeout_s: float = 5.0
    """Slave: longest wait for a connection, and for the injected question for the master's first offset."""
    range_answer_timeout_s: float = 1.0
    """Slave: longest wait for the answer to the range question, which a RocketMQ master never gives."""
    receive_size_bytes: int = 1 << 20
    """Slave: most bytes taken from the socket at once; also the most that is held in memory."""
    start_from: Literal["last", "first"] = "last"
    """haStartFrom: where an empty slave starts: the master's last segment (as RocketMQ) or its first offset."""
    out_of_range: Literal["wait", "resync"] = "wait"
    """haOutOfRange: what a slave does whose position the master no longer holds."""
    overlap_bytes_max: int = 64 << 10
    """haOverlapMax: so much of its log's end a slave compares with the master's when it connects; 0: as RocketMQ."""
    ack_flushed: bool = False
    """Report only what is flushed (SYNC_FLUSH), so that an acknowledgement survives a power loss here. A failover
    group's master confirms by it, too."""

    handshake: HandshakeOptions | None = None
    """haSharedSecret: nothing is sent to a slave, or taken from a master, that has not proved that it knows it."""

    def __post_init__(self) -> None:
        assert self.heartbeat_interval_s > 0
        assert self.housekeeping_interval_s > 0
        assert 1 <= self.transfer_batch_size_bytes <= TRANSFER_BATCH_SIZE_MAX
        assert self.fall_behind_max_bytes > 0
        assert self.transfer_bytes_per_s_max is None or self.transfer_bytes_per_s_max >= 1024
        assert self.connection_count_max >= 1
        assert self.receive_size_bytes >= 4096


TRANSFER_BATCH_SIZE_MAX = (4 << 20) - 12
"""A RocketMQ slave receives a whole frame into a buffer of 4 MiB and stalls on a larger one."""

TICK_S = 0.001
"""RocketMQ compares `elapsed ms > interval ms`: the first moment that passes is one millisecond after the interval."""
