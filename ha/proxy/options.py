"""Options of the front. In RocketMQ's proxy: ProxyConfig."""

from __future__ import annotations

import msgspec


class FrontOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of calls and clients, the heartbeat interval, and whether message types are checked."""

    message_size_max: int = 4 << 20
    """Maximum size of one message body in bytes; of a gzip body, when unpacked."""
    properties_size_max: int = 16_384
    """Maximum characters of one message's own properties, tag and keys together."""
    property_count_max: int = 128
    delay_ms_max: int = 40 * 86_400_000
    """Longest delay of a message with a delivery time."""
    sessions_per_connection_max: int = 1_024
    """Maximum number of client ids on one connection. The Node.js SDK uses one connection for all clients of its
    process."""
    topics_per_producer_max: int = 1_024
    """Maximum number of topics about whose transactions one client is asked; further topics are ignored."""
    receive_count_max: int = 32
    """Maximum number of messages of one receive; larger requests are reduced to it."""
    invisible_ms_min: int = 10_000
    """Minimum invisible time of a receive without auto_renew."""
    invisible_ms_max: int = 12 * 3_600_000
    """Maximum invisible time of a receive without auto_renew, and of ChangeInvisibleDuration."""
    polling_ms_min: int = 5_000
    polling_ms_max: int = 20_000
    """Maximum poll time of a receive. A poll time below polling_ms_min or above polling_ms_max is set to that limit,
    but a poll always ends before the client's deadline."""
    heartbeat_interval_s: float = 30.0
    """Interval in seconds at which the front registers at brokers as a producer of its clients' topics, to get
    transaction checks."""
    is_message_type_checked: bool = True
    """Whether a message is refused if its topic does not accept its type."""

    @property
    def unpacked_size_max(self) -> int:
        """Maximum bytes of a stored compressed body once it is unpacked; a larger one is delivered compressed."""
        return 4 * self.message_size_max
