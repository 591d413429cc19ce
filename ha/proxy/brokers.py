"""The interface between the front and the brokers behind it: `OwnBroker` (ha/node/grpc.py) and `Cluster` implement
`Brokers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import Permission
from ha.protocol.remoting import RemotingCommand

from .messages import MessageType

if TYPE_CHECKING:
    from .session import Session

BROKER_TIMEOUT_S = 3.0
"""Timeout of a request in seconds, except for long polls."""

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
"""Message types that a topic accepts if its brokers know no message types (RocketMQ 4)."""


class BrokerUnreachable(Exception):  # noqa: N818
    """A broker or name server could not be asked, did not answer in time (`is_timeout`), or gave an unusable answer."""

    def __init__(self, reason: str, *, is_timeout: bool = False) -> None:
        super().__init__(reason)
        self.is_timeout = is_timeout


@contextmanager
def reading_answer() -> Iterator[None]:
    """Context manager for reading a server's answer: raises a RemoteProtocolError of the block as BrokerUnreachable,
    because the client is not at fault if the answer is malformed."""
    try:
        yield
    except RemoteProtocolError as error:
        raise BrokerUnreachable(f"malformed answer: {error}") from None


class BrokerQueues(msgspec.Struct, frozen=True):
    """The queues of a topic on one broker."""

    broker_name: str
    perm: int
    read_count: int
    write_count: int

    @property
    def readable(self) -> int:
        """Number of queues that may be read; their IDs start at 0."""
        return self.read_count if self.perm & Permission.READ else 0

    @property
    def writable(self) -> int:
        """Number of queues that may be written; their IDs start at 0."""
        return self.write_count if self.perm & Permission.WRITE else 0


class Route(msgspec.Struct, frozen=True):
    """The queues of a topic on each broker that has it, and the message types that the topic accepts."""

    topic: str
    message_types: tuple[MessageType, ...]
    brokers: tuple[BrokerQueues, ...]


def accepted_types(message_type: str | None) -> tuple[MessageType, ...]:
    """Returns the types that a topic with this attribute message.type accepts; NORMAL if it has none, as in RocketMQ,
    or an unknown one."""
    return _ACCEPTED.get((message_type or "NORMAL").upper(), _ACCEPTED["NORMAL"])


class Brokers(Protocol):
    """The brokers behind a front."""

    def known_route(self, topic: str) -> Route | None:
        """Returns a topic's route if it is known without asking and its brokers take requests without waiting; None
        otherwise, and if no broker has the topic."""
        ...

    async def route(self, topic: str) -> Route | None:
        """Returns a topic's route; None if no broker has the topic. Raises BrokerUnreachable."""
        ...

    async def group(self, group: str) -> GroupConfig | None:
        """Returns a consumer group's configuration; None if it does not exist and brokers do not create it. Raises
        BrokerUnreachable."""
        ...

    async def invoke(
        self, session: Session | None, broker_name: str, command: RemotingCommand, timeout_s: float = BROKER_TIMEOUT_S
    ) -> RemotingCommand:
        """Sends a request to the master of `broker_name`, for a client or for the front itself (`session` None), and
        returns the response, whatever its code. Raises BrokerUnreachable."""
        ...

    def invoke_nowait(
        self, session: Session, broker_name: str, command: RemotingCommand, on_response: OnResponse
    ) -> bool:
        """Sends a request for a client, if it can do so without waiting; returns whether it did. `on_response` is
        called only if the request was sent."""
        ...

    async def heartbeat(self, session: Session) -> None:
        """Registers a consumer as a member of its group, from its settings. Raises BrokerUnreachable."""
        ...

    def forget(self, session: Session) -> None:
        """Drops the state of a client whose session has ended."""
        ...
