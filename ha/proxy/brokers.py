"""What the front needs of the brokers behind it, with one implementation for each place where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import Permission
from ha.protocol.remoting import RemotingCommand

from .messages import MessageType

if TYPE_CHECKING:
    from .session import Session

BROKER_TIMEOUT_S = 3.0
"""Longest wait for an answer, except that of a long poll."""

OnResponse = Callable[[RemotingCommand | None], None]
"""Called once with the response, or with None if there will be none. It must not raise."""

_ACCEPTED = {
    "NORMAL": (MessageType.NORMAL,),
    "FIFO": (MessageType.FIFO,),
    "DELAY": (MessageType.DELAY,),
    "TRANSACTION": (MessageType.TRANSACTION,),
    "PRIORITY": (MessageType.PRIORITY,),
    "LITE": (MessageType.LITE,),
    "MIXED": (MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION),
}
UNTYPED = (*_ACCEPTED["MIXED"], MessageType.PRIORITY)


class BrokerUnreachable(Exception):  # noqa: N818
    """A broker could not be asked, or did not answer; `is_timeout` tells which."""

    def __init__(self, reason: str, *, is_timeout: bool = False) -> None:
        super().__init__(reason)
        self.is_timeout = is_timeout


class BrokerQueues(msgspec.Struct, frozen=True):
    """The queues of a topic at one broker."""

    broker_name: str
    perm: int
    read_count: int
    write_count: int

    @property
    def readable(self) -> int:
        """Queues that may be read, numbered from 0."""
        return self.read_count if self.perm & Permission.READ else 0

    @property
    def writable(self) -> int:
        """Queues that may be written, numbered from 0."""
        return self.write_count if self.perm & Permission.WRITE else 0


class Route(msgspec.Struct, frozen=True):
    """Where a topic is, by broker name, and which messages it accepts."""

    topic: str
    message_types: tuple[MessageType, ...]
    brokers: tuple[BrokerQueues, ...]


def accepted_types(message_type: str | None) -> tuple[MessageType, ...]:
    """Returns what a topic with the attribute message.type accepts: NORMAL if it has none, as in RocketMQ."""
    return _ACCEPTED.get((message_type or "NORMAL").upper(), _ACCEPTED["NORMAL"])


class Brokers(Protocol):
    """The brokers behind a front."""

    def known_route(self, topic: str) -> Route | None:
        """Returns a topic's route if that is known without asking."""
        ...

    async def route(self, topic: str) -> Route | None:
        """Returns a topic's route; None if no broker has the topic. BrokerUnreachable."""
        ...

    async def group(self, group: str) -> GroupConfig | None:
        """Returns a consumer group's configuration; None if no broker has it. BrokerUnreachable."""
        ...

    async def invoke(
        self, session: Session | None, broker_name: str, command: RemotingCommand, timeout_s: float = BROKER_TIMEOUT_S
    ) -> RemotingCommand:
        """Sends a request for a client, or for the front itself, and returns the response. BrokerUnreachable."""
        ...

    def invoke_nowait(
        self, session: Session, broker_name: str, command: RemotingCommand, on_response: OnResponse
    ) -> bool:
        """Sends a request for a client if that needs no wait; returns whether it did, and will call `on_response`."""
        ...

    async def heartbeat(self, session: Session) -> None:
        """Registers a consumer where its group's members are listed. BrokerUnreachable."""
        ...

    def forget(self, session: Session) -> None:
        """Drops the state of a client whose session has ended."""
        ...
