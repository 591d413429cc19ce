"""The configuration keys of a server port's resource limits. docs/limits.md lists all limits, including these."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .key import key as _key
from .tls_keys import ServerTlsKeys

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
FrameSize = Annotated[int, Meta(ge=65_536, le=16_777_216)]
TotalBytes = Annotated[int, Meta(ge=16_777_216, le=2**40)]


class ServerLimitKeys(ServerTlsKeys, frozen=True, kw_only=True):
    """Keys for limits per connection and per port."""

    connections_max: Count = _key("maxConnections", 8192)
    """own; maximum number of connections of a port; when it is reached, a new connection replaces the oldest one that
    has sent no request and is at least 5 s old; if there is none, the new one is closed"""
    connections_per_host_max: Count = _key("maxConnectionsPerHost", 4096)
    """own; maximum number of connections from one IP address; when it is reached, a connection is closed as for
    maxConnections"""
    frame_size_max: FrameSize = _key("maxFrameSize", 16_777_216)
    """own; maximum bytes of a frame; in RocketMQ the system property com.rocketmq.remoting.frameMaxLength"""
    partial_bytes_max: TotalBytes = _key("maxPartialBytes", 268_435_456)
    """own; maximum bytes of incomplete frames on all connections, above which the connection with the longest one is
    closed"""
    handled_bytes_max: TotalBytes = _key("maxHandledBytes", 134_217_728)
    """own; maximum bytes of requests in progress on all connections, above which no connection is read"""
    outbox_total_bytes_max: TotalBytes = _key("maxOutboxBytes", 536_870_912)
    """own; maximum bytes of queued responses on all connections, above which the connection with the longest queue is
    closed"""
