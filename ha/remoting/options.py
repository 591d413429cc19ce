"""The bounds of a remoting connection. Times in seconds of the trio clock, sizes in bytes."""

from __future__ import annotations

import msgspec


class ConnectionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one connection, accepted or opened, may take in bytes and in time."""

    frame_size_max: int = 16_777_216
    """Longest frame, its length field included (RocketMQ: com.rocketmq.remoting.frameMaxLength)."""

    header_size_max: int = 262_144
    """Longest header, of frames that this side takes. A message's properties take 196,602 bytes at most: 32,767, each
    written as six characters of JSON."""

    chunk_size_max: int = 262_144
    """Most bytes taken from the socket at once, and so handed to the handler at once."""

    partial_bytes_max: int = 268_435_456
    """Bytes of incomplete frames that all connections of one server or client may hold together; the one that goes
    beyond is closed."""

    handled_bytes_max: int = 134_217_728
    """With more bytes of requests than this in the hands of the handler, for all connections of one server or client,
    nothing more is read from any until some are done."""

    idle_timeout_s: float = 120.0
    """Closed when no byte went either way for this long (RocketMQ: serverChannelMaxIdleTimeSeconds)."""

    frame_timeout_s: float = 30.0
    """Closed when a frame that was begun is not complete after this long."""

    send_timeout_s: float = 30.0
    """Closed when the peer has not taken one batch of replies (`batch_size_max` or one longer frame) in this time."""

    batch_size_max: int = 262_144
    """Frames waiting in the outbox are joined into one send up to this size."""

    outbox_high_bytes: int = 1_048_576
    """With more than this waiting to be sent, no further request is read from the connection."""

    outbox_bytes_max: int = 67_108_864
    """With more than this waiting to be sent, the connection is closed at once."""

    outbox_total_bytes_max: int = 536_870_912
    """With more than this waiting to be sent on all connections of a server or client, the one with most is closed."""


class RemotingServerOptions(ConnectionOptions, frozen=True, kw_only=True):
    """A server's bounds: those of each connection, and those of all of them together."""

    connections_max: int = 8192
    """Connections beyond this are closed as soon as they are accepted. An idle one takes 2 tasks and 12 KiB."""

    connections_per_host_max: int = 4096
    """The same for connections of one IP address."""

    silent_s_max: float = 5.0
    """When there is no room, the oldest connection that has not brought one request in this time makes way."""


class RemotingClientOptions(ConnectionOptions, frozen=True, kw_only=True):
    """A client's bounds: those of each connection, and how many addresses it talks to."""

    header_size_max: int = 16_777_215
    """A broker's answer to a batch names all of its messages in the header."""

    connect_timeout_s: float = 3.0
    """RocketMQ: connectTimeoutMillis."""

    connections_max: int = 64
    """Most addresses connected at a time; one more is refused."""
