"""SDK consumers during the faults: each follows every queue from its first message, and records messages and offsets.

A queue read twice must give the same messages at the same offsets, on any broker and after any number of kills.
"""

import threading
from collections import defaultdict

import trio

from ha.client import ClientOptions, MessageQueue, PullConsumer, PullStatus, ReadFrom
from ha.errors import ClientError
from tests.faults.producing import TOPIC

RETRY_S = 0.1
STOP_TIMEOUT_S = 30.0


class JournaledConsumer(threading.Thread):
    """Pulls until `stop`. `consumed[queue_id]` holds the sequence numbers at queue offsets 0, 1, 2 …"""

    def __init__(self, name_server: str, read_from: ReadFrom) -> None:
        super().__init__(daemon=True, name=f"consumer-{read_from.name.lower()}")
        self.consumed: dict[int, list[int]] = defaultdict(list)
        self.at_end_count = 0
        """Rounds after which this consumer had everything that its brokers knew of."""
        self.error_count = 0
        self.failure: BaseException | None = None
        self._ends: dict[int, int] = {}
        self._name_server = name_server
        self._read_from = read_from
        self._is_stopping = False
        self.start()

    def run(self) -> None:
        try:
            trio.run(self._consume)
        except BaseException as failure:
            self.failure = failure
            raise

    async def _consume(self) -> None:
        options = ClientOptions(request_timeout_s=2.0, connect_timeout_s=1.0, route_refresh_interval_s=1.0)
        async with PullConsumer(
            self._name_server, group=self.name, read_from=self._read_from, options=options
        ) as consumer:
            while not self._is_stopping:
                try:
                    came = [await self._take(consumer, queue) for queue in await consumer.queues(TOPIC)]
                    self.at_end_count += all(
                        len(self.consumed[queue_id]) == end for queue_id, end in self._ends.items()
                    )
                except ClientError:
                    self.error_count += 1
                    came = []
                if not any(came):
                    await trio.sleep(RETRY_S)

    async def _take(self, consumer: PullConsumer, queue: MessageQueue) -> int:
        found = self.consumed[queue.queue_id]
        result = await consumer.pull(queue, len(found))
        self._ends[queue.queue_id] = result.max_offset
        if result.status is not PullStatus.FOUND:
            # One broker may have returned messages that the other has not dispatched yet: a slave then refers to the
            # master (RocketMQ: PULL_RETRY_IMMEDIATELY), a master that flushes first answers OFFSET_ILLEGAL. The final
            # check is whether they are there at the end, and the same.
            is_behind = result.max_offset <= len(found)
            assert is_behind or result.status is PullStatus.NO_NEW_MSG, (result, queue, len(found))
            return 0
        for message in result.messages:
            assert message.queue_offset == len(found), (message.queue_offset, len(found), queue)
            found.append(int(message.body[:10]))
        return len(result.messages)

    def ask_to_stop(self) -> None:
        """Stops it after its current round."""
        self._is_stopping = True

    def stop(self) -> None:
        """Waits until it has ended; raises its error."""
        self.ask_to_stop()
        self.join(STOP_TIMEOUT_S)
        assert not self.is_alive(), "a consumer still waits"
        if self.failure is not None:
            raise self.failure
