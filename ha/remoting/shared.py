"""What the connections of one server or client share: totals, limits over all of them, and statistics."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec
import trio

from ha.protocol.remoting_protocol import CloseCause, Totals


class RemotingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start, and current sizes in bytes. `closed` counts connections by `CloseCause`."""

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
    """The part of a connection that the limits of all connections together use."""

    @property
    def outbox_bytes(self) -> int:
        """Bytes that wait to be sent."""

    @property
    def partial_bytes(self) -> int:
        """Bytes of an incomplete frame."""

    def close(self, cause: CloseCause, detail: str = "") -> None:
        """Closes the connection and drops what it holds."""


class SharedState(Totals):
    """Totals of one server or client, and the state that all of its connections obey."""

    connections: Collection[BufferOwner] = ()
    opened: int = 0
    refused: int = 0
    closed: dict[str, int] = msgspec.field(default_factory=dict)
    handled_bytes: int = 0
    """Bytes of the requests that handlers are working on."""
    paused_readers: trio.lowlevel.ParkingLot = msgspec.field(default_factory=trio.lowlevel.ParkingLot)
    """Readers that wait until `handled_bytes` is at most `handled_bytes_max`."""
    is_reading: bool = True
    """Whether connections read; if not, requests received before are still answered."""

    def statistics(self) -> RemotingStatistics:
        """Returns a snapshot."""
        counts = {name: getattr(self, name) for name in RemotingStatistics.__struct_fields__}
        return RemotingStatistics(**counts | {"connections": len(self.connections), "closed": dict(self.closed)})
