"""The parts of a broker that its request handlers and background services share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ha.broker.options import BrokerOptions
from ha.broker.put import PutService
from ha.broker.standing import Standing
from ha.broker.tables import Tables
from ha.broker.world import World
from ha.protocol.record import Message, encode_host

if TYPE_CHECKING:
    from ha.acl import AclGuard
    from ha.store.message_store import MessageStore


class BrokerCore(msgspec.Struct, frozen=True, kw_only=True):
    """The shared parts of one broker, passed to each family of requests (`processor.Family`) and background service."""

    options: BrokerOptions
    store: MessageStore
    tables: Tables
    puts: PutService
    world: World
    guard: AclGuard | None = None
    """Checks the rights of requests; None if access control is off"""

    def own_message(self, topic: str, body: bytes, properties: bytes = b"") -> Message:
        """Returns a message for queue 0 of a system topic, with this broker as its born host and the current time as
        its born time.
        """
        host = encode_host(self.options.host, self.options.port)
        return Message(topic, 0, body, properties, born_timestamp_ms=self.world.wall_clock_ms(), born_host=host)

    @property
    def standing(self) -> Standing:
        """The broker's current role."""
        return self.tables.standing
