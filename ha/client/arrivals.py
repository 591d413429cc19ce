"""Waits until a broker may have messages for a POP consumer, at all sources at once and without taking messages.

A source is all queues of a topic on one broker (`pop_requests.ALL_QUEUES`).

Concurrent long-polling pops would take messages from several sources: those of all responses but the first would have
to wait here while their invisible time passes, and a cancelled pop could take messages that the program never gets.
`wait` therefore sends notification requests, NOTIFICATION (200054), which wait but take no messages. They stay in
flight after `wait` has returned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import anyio
from anyio.abc import TaskGroup

from ha.client.messages import MessageQueue
from ha.client.pop_requests import PopRequests
from ha.errors import ClientError, RemoteProtocolError
from ha.protocol.bodies import SubscriptionData

_log = logging.getLogger(__name__)

POLL_S = 15.0
"""Time for which a broker may hold a notification request until a message arrives, in seconds."""
_PAUSE_S = 1.0
"""Pause after a failed notification request, in seconds; none if no other notification request is in flight."""


class Arrivals:
    """Waits for messages at all sources, with at most one notification request per source. `tasks` runs the
    requests."""

    def __init__(self, requests: PopRequests, subscriptions: Mapping[str, SubscriptionData], tasks: TaskGroup) -> None:
        self._requests = requests
        self._subscriptions = subscriptions
        self._tasks = tasks
        self.is_closed = False
        self.postponed: dict[MessageQueue, ClientError | None] = {}
        """Sources not to pop from until their notification request ends, with the error of their last pop, or None if
        that pop left no messages; see `postpone`."""
        self._watched: set[MessageQueue] = set()
        self._answered = anyio.Event()
        self._turn = anyio.Lock()

    async def wait(self, sources: Iterable[MessageQueue], timeout_s: float) -> None:
        """Sends notification requests to `sources`; returns when one is answered (with or without messages) or fails,
        when `timeout_s` has passed, or when `close` is called.

        Concurrent calls wait one after the other: otherwise one message would end all of them, and each caller would
        send a pop for it."""
        with anyio.move_on_after(max(0.0, timeout_s)):
            async with self._turn:
                if self._answered.is_set():
                    self._answered = anyio.Event()
                for source in sources:
                    self._start_watch(source)
                if not self.is_closed:
                    await self._answered.wait()

    def postpone(self, source: MessageQueue, error: ClientError | None) -> None:
        """Adds `source` to `postponed` until its notification request is answered or fails. `error` is that of the last
        pop; None if the pop left no messages at the source."""
        self.postponed[source] = error
        self._start_watch(source)

    def close(self) -> None:
        """Ends all `wait` calls. No further request is started."""
        self.is_closed = True
        self._answered.set()

    def _start_watch(self, source: MessageQueue) -> None:
        if source not in self._watched and not self.is_closed:
            self._watched.add(source)
            self._tasks.start_soon(self._watch, source)

    async def _watch(self, source: MessageQueue) -> None:
        try:
            await self._requests.notify(source, self._subscriptions[source.topic], POLL_S)
        except (ClientError, RemoteProtocolError) as error:
            _log.debug("client.arrivals_unknown source=%s reason=%r", source, str(error))
            if len(self._watched) > 1:  # during the pause, `wait` waits for the other sources
                await anyio.sleep(_PAUSE_S)
        finally:
            self._watched.discard(source)
            self.postponed.pop(source, None)
            self._answered.set()
