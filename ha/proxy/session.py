"""The clients of a front, each with its settings and the Telemetry stream over which the front sends it commands, and
the topics about whose transactions they can be asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import trio

from ha.grpc import Call, GrpcConnection


class Session:
    """A client id on a connection. It ends with the connection, with NotifyClientTermination, or when the client has
    been silent for `front.SILENT_S`."""

    def __init__(self, connection: GrpcConnection, client_id: str) -> None:
        self.connection = connection
        self.client_id = client_id
        self.settings: Any = None
        """Settings message of the client, completed by the front; None until the client has sent one, and after the end
        of the session"""
        self.telemetry: Call | None = None
        """The client's latest Telemetry stream; None before the first, and after the end of the latest"""
        self.local: Any = None
        """State that the implementation of `Brokers` keeps for this client"""
        self.is_ended = False
        """Whether the session has ended"""
        self.called_at = -math.inf
        """Time of the client's last call (Trio's clock); -inf before the first"""
        self.access_key = ""
        """Access key of the client's last authenticated call; "" before the first, and without access control"""
        self.registered_at = -math.inf
        """Time at which a consumer was last registered at brokers (Trio's clock); -inf if never"""

    def __repr__(self) -> str:
        return f"<Session {self.client_id} of {self.connection.peer[0]}:{self.connection.peer[1]}>"

    @property
    def is_consumer(self) -> bool:
        """Whether the client has sent the settings of a consumer."""
        return self.settings is not None and self.settings.HasField("subscription")


class Producers:
    """The clients that can be asked about transactions, by topic."""

    def __init__(self, topics_per_producer_max: int) -> None:
        self._topics_max = topics_per_producer_max
        self._by_topic: dict[str, dict[Session, None]] = {}
        self._topics_of: dict[Session, set[str]] = {}
        self._has_changed = trio.Event()

    @property
    def topics(self) -> list[str]:
        """Topics that have a client."""
        return list(self._by_topic)

    def add(self, session: Session, topics: Iterable[str]) -> None:
        """Adds topics about whose transactions the client may be asked, up to `topics_per_producer_max`; further topics
        are ignored. Does nothing if its session has ended."""
        if session.is_ended:
            return
        mine = self._topics_of.setdefault(session, set())
        for topic in topics:
            if topic not in mine and len(mine) < self._topics_max:
                mine.add(topic)
                if topic not in self._by_topic:
                    self._has_changed.set()
                self._by_topic.setdefault(topic, {})[session] = None

    def remove(self, session: Session) -> None:
        """Removes a client from all of its topics."""
        for topic in self._topics_of.pop(session, ()):
            sessions = self._by_topic[topic]
            del sessions[session]
            if not sessions:
                del self._by_topic[topic]
                self._has_changed.set()

    def find(self, topic: str, may_be_asked: Callable[[Session, Call, str], bool]) -> Session | None:
        """Returns the next client, round robin, that has an open Telemetry stream and that `may_be_asked` accepts; None
        if there is none.
        """
        sessions = self._by_topic.get(topic, {})
        for session in list(sessions):
            call = session.telemetry
            if call is not None and not call.is_closed and may_be_asked(session, call, topic):
                del sessions[session]
                sessions[session] = None  # to the end
                return session
        return None

    async def wait_changed(self) -> None:
        """Waits until a topic has gained its first client or lost its last since the previous call. At most one task
        may wait."""
        await self._has_changed.wait()
        self._has_changed = trio.Event()
