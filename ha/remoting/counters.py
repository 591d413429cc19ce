"""What has passed over the connections of one server or client, which bounds what they may take together."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
import trio

if TYPE_CHECKING:
    from .connection import RemotingConnection


class Counters(msgspec.Struct):
    """What has passed, counted for all connections of one server or client."""

    requests: int = 0
    responses: int = 0
    responses_unmatched: int = 0
    partial_bytes: int = 0
    handled_bytes: int = 0
    """Of requests that handlers have in hand now."""
    outbox_bytes: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    sends: int = 0
    readers: trio.lowlevel.ParkingLot = msgspec.field(default_factory=trio.lowlevel.ParkingLot)
    """Connections that don't read because of `handled_bytes`."""
    is_reading: bool = True
    """False: whatever comes from now on is left unread, on all connections; what is in hand goes on."""
    connections: Collection[RemotingConnection] = ()
    closed_by_cause: dict[str, int] = msgspec.field(default_factory=dict)
