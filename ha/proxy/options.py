"""Limits of the front. Times in ms, sizes in bytes. RocketMQ's proxy: ProxyConfig."""

from __future__ import annotations

import msgspec


class FrontOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of calls and clients."""

    message_size_max: int = 4 << 20
    """Maximum size of one body."""
    properties_size_max: int = 16_384
    """Characters of one message's own properties, tag and keys."""
    property_count_max: int = 128
    delay_ms_max: int = 40 * 86_400_000
    """Longest delay of a message with a delivery time."""
    sessions_per_connection_max: int = 1_024
    """Maximum number of client ids on one connection: a client in Node.js has one connection for all clients of its
    process.
    """
    topics_per_producer_max: int = 1_024
    """Topics for whose transactions one client is asked."""
    receive_count_max: int = 32
    """Messages of one receive."""
    invisible_ms_min: int = 10_000
    invisible_ms_max: int = 12 * 3_600_000
    polling_ms_min: int = 5_000
    polling_ms_max: int = 20_000
    heartbeat_interval_s: float = 30.0
    """Interval at which the front registers at brokers for its producers' transactions."""
    is_message_type_checked: bool = True
    """Whether a message must have a type that its topic accepts."""

    @property
    def unpacked_size_max(self) -> int:
        """Bytes of a body that is stored compressed, once it is unpacked."""
        return 4 * self.message_size_max
