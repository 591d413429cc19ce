"""Limits of remoting connections. Times in seconds, sizes in bytes."""

from __future__ import annotations

from ha.protocol.remoting_protocol import ConnectionLimits


class ConnectionOptions(ConnectionLimits, frozen=True, kw_only=True):
    """Limits of one connection, accepted or opened."""

    chunk_size_max: int = 262_144
    """Maximum bytes that are received at once, and so passed to the handler at once."""

    handled_bytes_max: int = 134_217_728
    """While handlers hold more bytes of requests than this, of all connections of a server or client, no connection
    reads."""

    outbox_high_bytes: int = 1_048_576
    """While more than this waits to be sent, no further request is read from the connection."""


class RemotingServerOptions(ConnectionOptions, frozen=True, kw_only=True):
    """Limits of each connection of a server, and of all of them together."""

    connections_max: int = 8192
    """Further connections are closed as soon as they are accepted, unless one can be evicted (`evictable_after_s`). An
    idle one takes 2 tasks and 12 KiB."""

    connections_per_host_max: int = 4096
    """The same for the connections of one IP address."""

    evictable_after_s: float = 5.0
    """When there is no room, the oldest connection without a request is evicted if it is older than this."""


class RemotingClientOptions(ConnectionOptions, frozen=True, kw_only=True):
    """Limits of each connection of a client, and of their number."""

    header_size_max: int = 16_777_215
    """A broker's response to a batch lists all of its messages in the header."""

    connect_timeout_s: float = 3.0
    """RocketMQ: connectTimeoutMillis."""

    connections_max: int = 64
    """Maximum number of addresses that are connected at a time."""
