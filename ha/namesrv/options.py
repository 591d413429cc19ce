"""Options of a name server. Times are in seconds of the trio clock."""

from __future__ import annotations

import msgspec

from ha.remoting import RemotingServerOptions


class NameServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Listening address, timeouts and limits of a name server."""

    host: str = "127.0.0.1"
    port: int = 9876
    """Port to listen on; 0 lets the system choose."""

    broker_timeout_s: float = 120.0
    """Time in seconds without a registration or heartbeat after which a broker is dropped; brokers can request another
    timeout of at least processor.TIMEOUT_MIN_S."""

    order_message_enable: bool = False
    """Whether the route of a topic includes the topic's setting in namespace ORDER_TOPIC_CONFIG (see settings.py)."""

    brokers_max: int = 4096
    topics_max: int = 200_000
    queue_entries_max: int = 1_000_000
    """Maximum number of pairs of a topic and a broker name."""
    config_entries_max: int = 10_000
    """Maximum number of key-value settings. This and the three limits above are far beyond what any real cluster needs;
    a request that exceeds one is rejected."""

    remoting: RemotingServerOptions = RemotingServerOptions()
