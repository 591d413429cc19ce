"""The events of a cluster in the order in which they happened. Append-only.

The checkers read it; the driver of the cluster writes it: a simulated client, or a load generator against real
processes. Times are seconds of one clock; only their order matters. Nodes and clients have names.

Message bodies are made by `make_body`, so that a stored body identifies its message and shows whether it is intact.

    history.add(Promise("m", is_sync_flush=True, copies=2))
    history.add(Sent(1.0, "p1", 0, "T", 3, b"p1-0"))
    history.add(Answered(1.1, "p1", 0, "PUT_OK", queue_offset=17, physical_offset=4711, node="m"))
    history.add(Crashed(2.0, "m", "power"))
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

STATUS_OF_CODE = {0: "PUT_OK", 10: "FLUSH_DISK_TIMEOUT", 11: "SLAVE_NOT_AVAILABLE", 12: "FLUSH_SLAVE_TIMEOUT"}
"""Response codes of sends -> statuses of `Answered`"""

STORED_STATUSES = frozenset(STATUS_OF_CODE.values())
"""Statuses which mean that the message is in the master's log."""


@dataclass(frozen=True)
class Promise:
    """What PUT_OK from `node` means from here on.

    `is_sync_flush`: flushed on that node. `copies`: number of nodes that have written it, including that one
    (SYNC_MASTER of 4.9, any slave: 2; 5.x: inSyncReplicas). `slaves_flush`: a slave acknowledges only flushed bytes.
    `waits_for_slaves`: the master waits for those in sync, of which there may be none (allAckInSyncStateSet).
    """

    node: str
    is_sync_flush: bool
    copies: int
    slaves_flush: bool = False
    waits_for_slaves: bool = False


@dataclass(frozen=True)
class Sent:
    """A client sent a message. `body_id` identifies the message."""

    time_s: float
    client: str
    seq: int
    topic: str
    queue_id: int
    body_id: bytes


@dataclass(frozen=True)
class Answered:
    """The answer to a client; `status` is a name of PutStatus, or another word for a rejection or an unknown outcome.

    Offsets are -1 if the message is not reported as stored. `seq` identifies the Sent. `node` answered.
    """

    time_s: float
    client: str
    seq: int
    status: str
    queue_offset: int = -1
    physical_offset: int = -1
    node: str = ""


@dataclass(frozen=True)
class Crashed:
    """A node lost something. `kill`: its process (all written bytes stay). `power`: unflushed bytes may be lost.
    `corrupt`: bytes of its files were damaged. `wipe`: its store was emptied, by an operator or a new disk.
    """

    time_s: float
    node: str
    kind: Literal["kill", "power", "corrupt", "wipe"]


@dataclass(frozen=True)
class Recovered:
    """A node opened its store and its log ends at physical offset `end`."""

    time_s: float
    node: str
    end: int


@dataclass(frozen=True)
class Connected:
    """A slave reconnected to its master; its own log was used up to physical offset `end`.

    Bytes in flight on an older connection have arrived, or never will.
    """

    time_s: float
    node: str
    end: int


@dataclass(frozen=True)
class Converged:
    """All of these nodes hold the same log, up to physical offset `end`."""

    time_s: float
    nodes: tuple[str, ...]
    end: int


@dataclass(frozen=True)
class Consumed:
    """A consumer received a message at a queue offset from `node`."""

    time_s: float
    client: str
    topic: str
    queue_id: int
    queue_offset: int
    body_id: bytes
    node: str = ""


Event = Promise | Sent | Answered | Crashed | Recovered | Connected | Converged | Consumed
EventT = TypeVar("EventT", Promise, Sent, Answered, Crashed, Recovered, Converged, Consumed)


@dataclass
class Accepted:
    """A send, its answer, and the answer's position in the history."""

    sent: Sent
    answered: Answered
    position: int
    """Index of the answer in `History.events`"""

    @property
    def is_stored(self) -> bool:
        """Whether the status means that the message is in the log."""
        return self.answered.status in STORED_STATUSES

    def __str__(self) -> str:
        sent, answered = self.sent, self.answered
        return (
            f"message {sent.body_id.decode('utf-8', 'backslashreplace')} of client {sent.client} "
            f"to {sent.topic}-{sent.queue_id}, answered {answered.status} at {answered.time_s:.3f} s "
            f"(physical offset {answered.physical_offset}, queue offset {answered.queue_offset})"
        )


@dataclass
class History:
    """Every event, in order."""

    events: list[Event] = field(default_factory=list)
    _sent: dict[tuple[str, int], Sent] = field(default_factory=dict)
    answers: list[Accepted] = field(default_factory=list)
    """Every answer, with its send"""
    _crashes: list[Crashed] = field(default_factory=list)
    _by_kind: dict[type, list[Event]] = field(default_factory=dict)
    _promises: list[tuple[int, Promise]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Appends. ValueError for an answer without a request."""
        if isinstance(event, Sent):
            self._sent[event.client, event.seq] = event
        elif isinstance(event, Answered):
            sent = self._sent.get((event.client, event.seq))
            if sent is None:
                raise ValueError(f"client {event.client} never sent {event.seq}")
            self.answers.append(Accepted(sent, event, len(self.events)))
        elif isinstance(event, Crashed):
            self._crashes.append(event)
        elif isinstance(event, Promise):
            self._promises.append((len(self.events), event))
        self._by_kind.setdefault(type(event), []).append(event)
        self.events.append(event)

    def of(self, kind: type[EventT]) -> Iterator[EventT]:
        """Yields the events of one type."""
        yield from self._by_kind.get(kind, ())  # type: ignore[misc]

    def sent_by(self, client: str, seq: int) -> Sent | None:
        """Returns the send of a client with that number."""
        return self._sent.get((client, seq))

    def sent(self) -> dict[bytes, Sent]:
        """Body id -> its send."""
        return {sent.body_id: sent for sent in self._sent.values()}

    def crashes(self, node: str, since_s: float = -math.inf, before_s: float = math.inf) -> Iterator[Crashed]:
        """Yields the faults of a node in [since_s, before_s]."""
        for event in self._crashes:
            if event.node == node and since_s <= event.time_s <= before_s:
                yield event

    def promise_at(self, node: str, position: int) -> Promise | None:
        """The promise of a node in force at a position of `events`."""
        held = None
        for at, event in self._promises:
            if at < position and event.node == node:
                held = event
        return held

    def promise_of(self, accepted: Accepted) -> Promise | None:
        """The promise in force when an answer was given."""
        return self.promise_at(accepted.answered.node, accepted.position)


# ---- bodies

SEPARATOR = b"\n"


def make_body(body_id: bytes, size: int = 0) -> bytes:
    """Returns a body of at least `size` bytes that starts with its message's id; the rest is derived from that."""
    assert SEPARATOR not in body_id
    body = body_id + SEPARATOR
    if len(body) < size:
        body += hashlib.shake_128(body_id).digest(size - len(body))
    return body


def body_id_of(body: bytes) -> bytes | None:
    """Returns the message id of a body; None if `make_body` did not make it, or it is damaged."""
    body_id, separator, _ = body.partition(SEPARATOR)
    if not separator or make_body(body_id, len(body)) != body:
        return None
    return body_id
