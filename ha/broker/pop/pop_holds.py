"""Long polling of pops and notifications: requests that found nothing yet, by topic and group.

A message wakes one waiting pop of each group that wants it, and a pop that leaves messages wakes the next one. So a
batch of messages for many consumers wakes as many pops as are needed to deliver it. The first notification before a
woken pop is woken, too, as it takes no message. A copy in a retry topic wakes a request for the topic itself. Source:
PopLongPollingService.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import chain

import msgspec
import trio

from ha.broker.filters import Selection
from ha.broker.holds import Hold, Holds, wants
from ha.broker.pop.state import QueueKey
from ha.protocol.pop import NORMAL, NotificationRequest, PopMessageRequest, popped_topic, retry_topic
from ha.store.dispatch import Arrival

ALL_QUEUES = -1


class PopHold(Hold):
    """One held request. It is answered at `ends_at` (Trio's clock) at the latest. `deadline` is earlier if the request
    has to be tried again before that."""

    request: PopMessageRequest | NotificationRequest
    selection: Selection
    ends_at: float


class _Group(msgspec.Struct, eq=False):
    """The held requests of one group for one topic, by queue id, in order of arrival."""

    topic: str
    by_queue: dict[int, dict[PopHold, None]] = {}


class PopHolds(Holds[PopHold]):
    """The held requests."""

    def __init__(
        self, resume: Callable[[PopHold], Awaitable[None]], wall_clock_ms: Callable[[], int], **limits: int
    ) -> None:
        super().__init__(resume, **limits)
        self._wall_clock_ms = wall_clock_ms
        self._by_topic: dict[str, dict[tuple[str, str], _Group]] = {}
        """Topic of a request, or one of the two retry topics for it -> (group, topic of the request) -> the group's
        requests"""

    def count(self, topic: str, group: str, queue_id: int) -> int:
        """Returns how many requests of a group are held for this queue id (-1: for all queues)."""
        found = self._by_topic.get(topic, {}).get((group, topic))
        return 0 if found is None else len(found.by_queue.get(queue_id, ()))

    def on_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Wakes requests waiting for these messages. Called by the store once per dispatched batch; never blocks."""
        by_topic = self._by_topic
        if not by_topic:
            return
        for arrival in arrivals:
            for group in list(by_topic.get(arrival.topic, {}).values()):
                if arrival.topic == group.topic:
                    waiting = chain(group.by_queue.get(arrival.queue_id, ()), group.by_queue.get(ALL_QUEUES, ()))
                    self._wake_first(hold for hold in waiting if wants(hold.selection, arrival.tags_codes))
                else:
                    self._wake_for_retry(group)

    def wake_one(self, topic: str, group: str, queue_id: int = ALL_QUEUES) -> None:
        """Wakes one request that waits for this queue or for all queues. With ALL_QUEUES, wakes one of the requests
        with each queue id, as the messages may be in any queue."""
        found = self._by_topic.get(topic, {}).get((group, topic))
        if found is None:
            return
        if queue_id == ALL_QUEUES:
            for holds in list(found.by_queue.values()):
                self._wake_first(holds)
        else:
            self._wake_first(chain(found.by_queue.get(queue_id, ()), found.by_queue.get(ALL_QUEUES, ())))

    def wake_for(self, key: QueueKey) -> None:
        """Wakes one request that may pop from the queue `key`, whose topic may be a retry topic."""
        group, topic, queue_id = key
        asked, flag = popped_topic(group, topic)
        if flag == NORMAL:
            self.wake_one(asked, group, queue_id)
        elif (found := self._by_topic.get(asked, {}).get((group, asked))) is not None:
            self._wake_for_retry(found)

    def wake_next(self, request: PopMessageRequest | NotificationRequest) -> None:
        """Wakes requests that may pop what `request` left: one for the same queue or queues and, if `request` is for a
        single queue and not in order mode, one for any queue that reads retry topics."""
        self.wake_one(request.topic, request.consumer_group, request.queue_id)
        found = self._by_topic.get(request.topic, {}).get((request.consumer_group, request.topic))
        if found is not None and request.queue_id != ALL_QUEUES and not request.order:
            self._wake_for_retry(found)

    def resume_ordered_by(self, topic: str, group: str, due_ms: int) -> None:
        """Makes requests in order mode try again at `due_ms` (ms since the epoch), when a blocked queue becomes
        free."""
        found = self._by_topic.get(topic, {}).get((group, topic))
        if found is None:
            return
        deadline = self.time_of(due_ms)
        for hold in chain(*found.by_queue.values()):
            if hold.request.order:
                self.resume_by(hold, deadline)

    def time_of(self, at_ms: int) -> float:
        """Converts a wall-clock time (ms since the epoch) to Trio's clock; a past time becomes the current time."""
        return trio.current_time() + max(0, at_ms - self._wall_clock_ms()) / 1000

    def wake_all(self) -> None:
        """Wakes every request after a change other than an arrival."""
        groups = [group for by_group in self._by_topic.values() for group in by_group.values()]
        self.wake({hold: None for group in groups for holds in group.by_queue.values() for hold in holds})

    def _wake_for_retry(self, group: _Group) -> None:
        """Wakes one request that reads retry topics: one for any queue, but not in order mode."""
        self._wake_first(hold for hold in chain(*group.by_queue.values()) if not hold.request.order)

    def _wake_first(self, holds: Iterable[PopHold]) -> None:
        """Wakes the first pop of `holds`, and the first notification before it, which takes no message."""
        woken: list[PopHold] = []
        for hold in holds:
            is_pop = isinstance(hold.request, PopMessageRequest)
            if is_pop or not woken:
                woken.append(hold)
            if is_pop:
                break
        self.wake(woken)

    def _on_skipped(self, hold: PopHold) -> None:
        self.wake_next(hold.request)

    def _enter(self, hold: PopHold) -> None:
        request = hold.request
        key = request.consumer_group, request.topic
        group = self._by_topic.get(request.topic, {}).get(key)
        if group is None:
            group = _Group(request.topic)
            for topic in _topics(request.topic, request.consumer_group):
                self._by_topic.setdefault(topic, {})[key] = group
        group.by_queue.setdefault(request.queue_id, {})[hold] = None

    def _leave(self, hold: PopHold) -> None:
        request = hold.request
        key = request.consumer_group, request.topic
        group = self._by_topic[request.topic][key]
        holds = group.by_queue[request.queue_id]
        holds.pop(hold, None)
        if holds:
            return
        del group.by_queue[request.queue_id]
        if group.by_queue:
            return
        for topic in _topics(request.topic, request.consumer_group):
            del self._by_topic[topic][key]
            if not self._by_topic[topic]:
                del self._by_topic[topic]


def _topics(topic: str, group: str) -> tuple[str, str, str]:
    return topic, retry_topic(group, topic, is_v2=False), retry_topic(group, topic, is_v2=True)
