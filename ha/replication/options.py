"""Settings of replication, with RocketMQ's key for each."""

from __future__ import annotations

from typing import Literal

import msgspec

from ha.replication.handshake import HandshakeOptions


class HAOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of HAService, GroupTransfer and HAClient. `__post_init__` asserts their ranges; ha/config reports
    invalid values before that."""

    heartbeat_interval_s: float = 5.0
    """haSendHeartbeatInterval: time without sending after which either side sends a heartbeat (strictly more than
    this)."""
    housekeeping_interval_s: float = 20.0
    """haHousekeepingInterval: time without bytes from the peer after which either side closes the connection (strictly
    more than this)."""

    transfer_batch_size_bytes: int = 1 << 20
    """haTransferBatchSize: maximum size of a frame's body. RocketMQ's default is 32 KiB; its slaves accept up to
    TRANSFER_BATCH_SIZE_MAX."""
    fall_behind_max_bytes: int = 256 << 20
    """haSlaveFallbehindMax / haMaxGapNotInSync: lag in bytes from which on a slave is not in sync."""
    transfer_bytes_per_s_max: int | None = None
    """maxHaTransferByteInSecond if haFlowControlEnable, per connection, headers included, at least 1024; None:
    unlimited."""
    connection_count_max: int = 64
    """Maximum number of HA connections. A further one replaces the oldest one that has not reported yet; if all have
    reported, it is refused."""
    waiting_request_count_max: int = 100_000
    """Maximum number of puts that wait for acknowledgements; further ones are answered FLUSH_SLAVE_TIMEOUT at once."""
    submitted_batch_count_max: int = 1024
    """Capacity of GroupTransfer's channel, in batches. While it is full, `submit_channel.send` waits, and
    `submit_nowait` raises trio.WouldBlock."""

    reconnect_interval_s: float = 5.0
    """Slave: maximum wait before the next attempt after a connection was lost or could not be made
    (`ha.replication.reconnect`)."""
    connect_timeout_s: float = 5.0
    """Slave: timeout for connecting, and for each call of the injected `master_min_offset`."""
    range_answer_timeout_s: float = 1.0
    """Slave: timeout for the master's answer to the question which offsets it has (range_question.py), in addition to
    the time that connecting took, which includes a round trip. A RocketMQ master never answers it."""
    receive_size_bytes: int = 1 << 20
    """Slave: maximum size of the receive buffer, which is all received data that is held in memory. The buffer has at
    least 64 KiB."""
    start_from: Literal["last", "first"] = "last"
    """haStartFrom: where an empty slave starts: the master's last segment (as RocketMQ) or its first offset."""
    out_of_range: Literal["wait", "resync"] = "wait"
    """haOutOfRange: whether a slave whose next byte the master has deleted waits, or moves its log aside and copies the
    master's from the first byte that it still has."""
    overlap_bytes_max: int = 64 << 10
    """haOverlapMax: number of bytes before its log's end that a slave compares with the master's when it connects; more
    if its last record begins before these. 0: no comparison, as RocketMQ."""
    ack_flushed: bool = False
    """Whether a slave reports only flushed bytes (SYNC_FLUSH), so that acknowledged bytes survive a power loss here. A
    failover group's master then also confirms only the bytes that it has flushed."""

    handshake: HandshakeOptions | None = None
    """haSharedSecret: no data is sent to a slave, or accepted from a master, before the peer has proved that it knows
    the secret."""

    def __post_init__(self) -> None:
        assert self.heartbeat_interval_s > 0
        assert self.housekeeping_interval_s > 0
        assert 1 <= self.transfer_batch_size_bytes <= TRANSFER_BATCH_SIZE_MAX
        assert self.fall_behind_max_bytes > 0
        assert self.transfer_bytes_per_s_max is None or self.transfer_bytes_per_s_max >= 1024
        assert self.connection_count_max >= 1
        assert self.receive_size_bytes >= 4096


TRANSFER_BATCH_SIZE_MAX = (4 << 20) - 12
"""Maximum of `transfer_batch_size_bytes`: a RocketMQ slave receives a whole frame, with its header of 12 bytes, into a
buffer of 4 MiB, and stalls on a larger one."""

TICK_S = 0.001
"""Time in seconds after an interval at which it counts as over: RocketMQ compares `elapsed ms > interval ms`, which is
true one millisecond after the interval."""
