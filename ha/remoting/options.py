"""Limits of remoting connections. Times in seconds, sizes in bytes."""

from __future__ import annotations

from ha.protocol.remoting_protocol import ConnectionLimits


class ConnectionOptions(ConnectionLimits, frozen=True, kw_only=True):
    """Limits of one connection, accepted or opened."""

    chunk_size_max: int = 262_144
    """Maximum bytes received at once (a chunk). The handler gets the requests that a chunk completes in one call."""

    handled_bytes_max: int = 134_217_728
    """Bytes of requests held by the handlers of all connections of a server or client, above which no connection is
    read."""

    outbox_high_bytes: int = 1_048_576
    """Bytes waiting to be sent on a connection, above which no further request is read from it."""


class RemotingServerOptions(ConnectionOptions, frozen=True, kw_only=True):
    """Limits of each connection of a server, and of all of them together."""

    connections_max: int = 8192
    """Maximum number of connections; further ones are closed as soon as they are accepted, unless an older one can be
    evicted (`evictable_after_s`). An idle connection takes 2 tasks and 12 KiB."""

    connections_per_host_max: int = 4096
    """Maximum number of connections from one IP address; further ones are treated like those beyond
    `connections_max`."""

    evictable_after_s: float = 5.0
    """Minimum age of a connection that may be evicted. When a limit is reached, the oldest connection on which no
    request was received is closed to make room for a new one."""


class RemotingClientOptions(ConnectionOptions, frozen=True, kw_only=True):
    """Limits of each connection of a client, and of their number."""

    header_size_max: int = 16_777_215
    """Maximum size in bytes of a response's header. It is large because a broker's response to a batch lists all
    messages in its header."""

    connect_timeout_s: float = 3.0
    """Timeout for opening a connection (RocketMQ: connectTimeoutMillis)."""

    connections_max: int = 64
    """Maximum number of connections, one per address."""
