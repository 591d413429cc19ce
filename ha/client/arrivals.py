"""Waits at all brokers at once until one of them may have messages for a POP consumer, without taking any.

A pop that waits at each of them would take messages from all, of which those beyond the first response would wait here
while their invisible time passes; and one that the program cancels would still take messages. So a request that waits
without taking (200054) is kept at each source, across calls.
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

_POLL_S = 15.0
"""How long a request waits at its broker."""
_PAUSE_S = 1.0
"""Pause after a failed request."""


class Arrivals:
    """Waits for messages at all sources, with at most one waiting request per source, in a task of `tasks`."""

    def __init__(self, requests: PopRequests, subscriptions: Mapping[str, SubscriptionData], tasks: TaskGroup) -> None:
        self._requests = requests
        self._subscriptions = subscriptions
        self._tasks = tasks
        self.drained: set[MessageQueue] = set()
        """Sources whose last pop left no messages, and that have announced none since"""
        self._watched: set[MessageQueue] = set()
        self._answered = anyio.Event()
        self._turn = anyio.Lock()

    async def wait(self, sources: Iterable[MessageQueue], timeout_s: float) -> None:
        """Returns when a source has answered, with messages or without, or failed, or after `timeout_s`.

        Concurrent calls wait in turn: if all of them returned for one message, each would send a pop for it."""
        with anyio.move_on_after(max(0.0, timeout_s)):
            async with self._turn:
                if self._answered.is_set():
                    self._answered = anyio.Event()
                for source in sources:
                    if source not in self._watched:
                        self._watched.add(source)
                        self._tasks.start_soon(self._watch, source)
                await self._answered.wait()

    async def _watch(self, source: MessageQueue) -> None:
        try:
            await self._requests.notify(source, self._subscriptions[source.topic], _POLL_S)
        except (ClientError, RemoteProtocolError) as error:
            _log.debug("client.arrivals_unknown source=%s reason=%r", source, str(error))
            if len(self._watched) > 1:  # the other sources are waited for
                await anyio.sleep(_PAUSE_S)
        finally:
            self._watched.discard(source)
            self.drained.discard(source)
            self._answered.set()
