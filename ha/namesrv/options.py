"""What a name server is told. Times in seconds of the trio clock."""

from __future__ import annotations

import msgspec

from ha.remoting import RemotingServerOptions


class NameServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where it listens, and how much it holds for whom."""

    host: str = "127.0.0.1"
    port: int = 9876
    """0 lets the system choose."""

    broker_timeout_s: float = 120.0
    """A broker that neither registered nor gave a sign of life for so long is dropped; it may ask for another time."""

    order_message_enable: bool = False
    """Whether routes say what the settings of ORDER_TOPIC_CONFIG say of their topic; clients then use these queues."""

    brokers_max: int = 1024
    topics_max: int = 100_000
    queue_entries_max: int = 1_000_000
    """Pairs of a topic and a broker that has it."""
    config_entries_max: int = 10_000
    """Bounds against strangers, far above any real cluster; a registration beyond them is refused."""

    remoting: RemotingServerOptions = RemotingServerOptions()
