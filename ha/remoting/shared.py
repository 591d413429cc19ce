"""State that the connections of one server or client share: totals, joint limits, and statistics."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec
import trio

from ha.protocol.remoting_protocol import CloseCause, Totals


class RemotingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start, except for the current values `connections`, `outbox_bytes`, `partial_bytes` and
    `handled_bytes`. Sizes in bytes. `closed` counts connections by `CloseCause`; `Totals` describes `sends`."""

    connections: int
    opened: int
    refused: int
    """Number of connections that a server had no room for, or that a client could not open."""
    requests: int
    responses: int
    responses_unmatched: int
    bytes_received: int
    bytes_sent: int
    sends: int
    outbox_bytes: int
    partial_bytes: int
    handled_bytes: int
    closed: dict[str, int]


class BufferOwner(Protocol):
    """The part of a connection that is needed to limit the buffers of all connections together."""

    @property
    def outbox_bytes(self) -> int:
        """Number of bytes that wait to be sent."""

    @property
    def partial_bytes(self) -> int:
        """Number of received bytes that belong to an incomplete frame."""

    def close(self, cause: CloseCause, detail: str = "") -> None:
        """Closes the connection and drops its buffered bytes."""


class SharedState(Totals):
    """Totals of one server or client, and the state with which its connections enforce their joint limits."""

    connections: Collection[BufferOwner] = ()
    opened: int = 0
    refused: int = 0
    closed: dict[str, int] = msgspec.field(default_factory=dict)
    handled_bytes: int = 0
    """Bytes of the requests that handlers are working on."""
    paused_readers: trio.lowlevel.ParkingLot = msgspec.field(default_factory=trio.lowlevel.ParkingLot)
    """Readers that wait until `handled_bytes` is at most `handled_bytes_max`."""
    is_reading: bool = True
    """Whether connections are read; if not, requests that were received earlier are still answered."""

    def statistics(self) -> RemotingStatistics:
        """Returns a snapshot."""
        counts = {name: getattr(self, name) for name in RemotingStatistics.__struct_fields__}
        return RemotingStatistics(**counts | {"connections": len(self.connections), "closed": dict(self.closed)})
