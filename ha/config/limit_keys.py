"""The keys that bound what peers may take of a server's remoting port. docs/limits.md has all limits, these included.

Fields have the names of ha.remoting's options, so that `remoting_limits` can hand them on.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .key import key as _key

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
FrameSize = Annotated[int, Meta(ge=65_536, le=16_777_216)]
HeaderSize = Annotated[int, Meta(ge=1024, le=16_777_215)]
TotalBytes = Annotated[int, Meta(ge=16_777_216, le=2**40)]


class ServerLimitKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of each connection, and of all connections of a port together."""

    connections_max: Count = _key("maxConnections", 8192)
    """own; further ones are closed; when full, the oldest that has asked nothing for 5 s makes way"""
    connections_per_host_max: Count = _key("maxConnectionsPerHost", 4096)
    """own; the same for one IP address"""
    frame_size_max: FrameSize = _key("maxFrameSize", 16_777_216)
    """own; bytes; RocketMQ: the system property com.rocketmq.remoting.frameMaxLength"""
    header_size_max: HeaderSize = _key("maxHeaderSize", 262_144)
    """own; bytes of a frame's header"""
    partial_bytes_max: TotalBytes = _key("maxPartialBytes", 268_435_456)
    """own; bytes of frames that are not complete, of all connections together"""
    handled_bytes_max: TotalBytes = _key("maxHandledBytes", 134_217_728)
    """own; bytes of requests being handled, of all connections together; beyond it none is read"""
    outbox_total_bytes_max: TotalBytes = _key("maxOutboxBytes", 536_870_912)
    """own; bytes that wait to be sent, of all connections together; beyond it the one with most is closed"""


def remoting_limits(config: ServerLimitKeys) -> dict[str, Any]:
    """Return the limits as arguments of ha.remoting's RemotingServerOptions."""
    return {name: getattr(config, name) for name in ServerLimitKeys.__struct_fields__}
