"""Fetches the messages of a queue that is assigned to this consumer: finds the start offset, sends long polls, and
processes the responses.

Sources: RebalancePushImpl (computePullFromWhere), DefaultMQPushConsumerImpl (pullMessage), PullAPIWrapper.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

import anyio

from ha.client.backoff import Backoff
from ha.client.held_queue import HeldQueue
from ha.client.messages import PullStatus, RawPull, ReceivedMessage
from ha.client.positions import Positions
from ha.client.process_queue import Budget, ProcessQueue
from ha.client.push_options import PushOptions, StartFrom
from ha.client.queue_requests import QueueRequests
from ha.client.received import received_within
from ha.client.subscription import TAG
from ha.errors import ClientError, RemoteProtocolError
from ha.protocol.bodies import SubscriptionData
from ha.protocol.topic_names import RETRY_PREFIX

_log = logging.getLogger(__name__)

_QUICK_ANSWER_S = 0.1
"""Time in seconds within which a response without new messages counts as quick, so that a pause of _PAUSE_S follows."""
_PAUSE_S = 1.0


class Feeder:
    """Fetches messages into held queues, and calls `on_filled` with the queue and its number of new messages.

    Compressed bodies are inflated to at most `body_size_max` bytes each, and to about `answer_size_max` bytes per
    response."""

    def __init__(
        self,
        requests: QueueRequests,
        positions: Positions,
        subscriptions: dict[str, SubscriptionData],
        options: PushOptions,
        start_from: StartFrom | datetime,
        *,
        needs_lock: bool,
        body_size_max: int,
        answer_size_max: int,
        wall_clock_ms: Callable[[], int],
        on_filled: Callable[[HeldQueue, int], None],
    ) -> None:
        self.budget = Budget(options.total_count_max, options.total_bytes_max)
        self._requests = requests
        self._positions = positions
        self._subscriptions = subscriptions
        self._options = options
        self._start_from = start_from
        self._needs_lock = needs_lock
        self._body_size_max = body_size_max
        self._answer_size_max = answer_size_max
        self._wall_clock_ms = wall_clock_ms
        self._on_filled = on_filled

    async def feed(self, held: HeldQueue) -> None:
        """Fetches messages until the queue is revoked. Retries failures indefinitely; logs the first failure of a
        series, and the recovery."""
        is_failing = False
        backoff = Backoff(self._options.pull_pause_s)
        with held.feeding:
            while True:
                with held.pulling():
                    try:
                        await self._begin(held)
                        while held.process_queue is not None:
                            await self._pull(held, held.process_queue)
                            backoff.reset()
                            if is_failing:
                                is_failing = False
                                _log.info("client.pull_recovered queue=%s", held.queue)
                    except (ClientError, RemoteProtocolError) as error:
                        # Logged after the pause, so that failures during shutdown are not logged.
                        await anyio.sleep(backoff.next_s())
                        if not is_failing:
                            is_failing = True
                            _log.warning("client.pull_failed queue=%s reason=%r", held.queue, str(error))

    async def _begin(self, held: HeldQueue) -> None:
        """Creates the process queue at the start offset if there is none; waits for the queue's lock if one is
        needed."""
        if held.process_queue is not None:
            return
        while self._needs_lock and not held.is_locked:
            await held.lock_changed.wait()
        found = -1 if held.resume_at is not None else await self._first_offset(held)
        # Checked after the lookup: an operator may have reset the offset meanwhile.
        offset = max(found, held.resume_from) if held.resume_at is None else held.resume_at
        options = self._options
        held.resume_at, held.resume_from = None, -1
        held.process_queue = ProcessQueue(
            offset,
            self.budget,
            count_max=options.queue_count_max,
            bytes_max=options.queue_bytes_max,
            span_max=options.queue_span_max,
        )
        _log.info("client.queue_started queue=%s offset=%d", held.queue, offset)

    async def _first_offset(self, held: HeldQueue) -> int:
        queue = held.queue
        saved = await self._positions.load(queue)
        if saved is not None:
            held.mark_saved(saved, self._positions.loss_count)
            return saved
        is_retry = queue.topic.startswith(RETRY_PREFIX)
        match self._start_from:
            case StartFrom.LAST:
                return 0 if is_retry else await self._requests.max_offset(queue)
            case StartFrom.FIRST:
                return await self._requests.min_offset(queue)
            case moment:
                if is_retry:
                    return await self._requests.max_offset(queue)
                return await self._requests.offset_for_time(queue, int(moment.timestamp() * 1000))

    async def _pull(self, held: HeldQueue, process_queue: ProcessQueue) -> None:
        await process_queue.wait_room()
        while self._needs_lock and not held.is_locked:
            await held.lock_changed.wait()
        if process_queue is not held.process_queue:
            return
        queue, asked = held.queue, process_queue.next_offset
        subscription = self._subscriptions[queue.topic]
        started = anyio.current_time()
        held.last_pull_ms = self._wall_clock_ms()
        raw = await self._requests.pull(
            queue,
            asked,
            subscription=subscription.sub_string,
            expression_type=subscription.expression_type,
            subscription_version=subscription.sub_version,
            max_messages=self._options.pull_count,
            wait_s=self._options.long_poll_s,
        )
        is_moved = raw.status is PullStatus.OFFSET_ILLEGAL
        if is_moved and raw.next_offset == asked:
            await anyio.sleep(_PAUSE_S)  # contradictory response; avoid a tight loop
        # Restarted or revoked meanwhile: a cancellation comes too late for a task whose wait has ended already.
        if process_queue is not held.process_queue or process_queue.is_dropped:
            return
        if is_moved:
            self._move(held, process_queue, asked, raw)
            return
        messages: list[ReceivedMessage] = []
        next_offset = raw.next_offset
        if raw.status is PullStatus.FOUND:
            # Brokers compare only hashes of tags.
            tags = frozenset(subscription.tags_set) if subscription.expression_type == TAG else frozenset()
            size_max = min(process_queue.room_bytes, self._answer_size_max)
            messages, left_out = received_within(raw.body, queue, tags or None, self._body_size_max, size_max)
            if left_out is not None:
                next_offset = left_out  # pulled again when there is room
        process_queue.put(messages, next_offset)
        if messages:
            self._on_filled(held, len(messages))
        elif raw.next_offset == asked and anyio.current_time() - started < _QUICK_ANSWER_S:
            # The broker does not support long polls, or is a slave that is behind.
            await anyio.sleep(_PAUSE_S)

    def _move(self, held: HeldQueue, process_queue: ProcessQueue, asked: int, raw: RawPull) -> None:
        """Continues at the offset in the response, because `asked` is outside the queue, or an operator reset the
        group's offset. If `asked` is past the end, continues at the oldest unhandled message if that is earlier.

        Messages held here are kept if the broker has deleted the messages at `asked`, and dropped otherwise.
        RocketMQ's clients always drop the held messages, and never handle them if the broker has deleted those at
        `asked`.
        """
        _log.warning("client.offset_moved queue=%s from=%d to=%d", held.queue, asked, raw.next_offset)
        if asked < raw.min_offset:
            process_queue.put([], raw.next_offset)  # the deleted messages follow those held, which stay valid
        elif asked > raw.max_offset:
            held.restart(
                min(raw.next_offset, process_queue.commit_offset)
            )  # the broker lost, or lacks, the queue's end
        else:
            held.restart(raw.next_offset)
