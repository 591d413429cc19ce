"""The SDK's pull consumer: reads queues from given offsets, which the program keeps track of.

Sources: DefaultMQPullConsumerImpl, PullAPIWrapper (choice of the broker, tags compared again), MQClientAPIImpl.
"""

from __future__ import annotations

from collections.abc import Mapping

from ha.client.client import Client, ClientUser, NameServers
from ha.client.messages import MessageQueue, PullResult, PullStatus, RawPull, ReadFrom, ReceivedMessage
from ha.client.options import ClientOptions
from ha.client.queue_requests import QueueRequests
from ha.client.reading import Reading
from ha.client.received import received_within
from ha.client.subscription import wanted_tags
from ha.protocol.acl import AclCredentials


class PullConsumer(ClientUser):
    """Reads queues at any offset. An async context manager; works under asyncio and trio, with halog and RocketMQ.

        async with PullConsumer("127.0.0.1:9876", group="audit", read_from=ReadFrom.SLAVE) as consumer:
            for queue in await consumer.queues("invoices"):
                result = await consumer.pull(queue, await consumer.min_offset(queue))

    `read_from` selects the broker of a set: a `ReadFrom` or a broker id. Committed offsets are read from and written to
    the master or, if there is none, the slave with the lowest id, as with RocketMQ's consumers. A PullConsumer does
    not join its group, so push consumers of the group ignore it when they divide up the queues. The other arguments are
    those of Producer. Methods about a queue raise BrokerError, RouteNotFound, RequestTimedOut, ConnectionFailed, and
    RemoteProtocolError for a malformed response; docs/errors.md says what is retried.
    """

    def __init__(
        self,
        name_servers: Client | NameServers = None,
        *,
        group: str = "halog-consumer",
        read_from: ReadFrom | int = ReadFrom.SUGGESTED,
        options: ClientOptions | None = None,
        credentials: AclCredentials | None = None,
    ) -> None:
        super().__init__(name_servers, options, credentials)
        self._requests = QueueRequests(self._client, group, read_from)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of `topic`, sorted. Raises RouteNotFound, NameServersUnreachable, BrokerError, and
        RemoteProtocolError for a malformed response."""
        return list((await self._client.routes.find(topic)).read_queues)

    async def topics(self) -> list[str]:
        """All topics that the name servers know, including system topics, sorted. Raises NameServersUnreachable,
        BrokerError, and RemoteProtocolError for a malformed response."""
        return await self._client.routes.topics()

    async def broker_names(self) -> list[str]:
        """The names of all broker sets that the name servers know, sorted. Raises NameServersUnreachable, BrokerError,
        and RemoteProtocolError for a malformed response."""
        return await self._client.routes.broker_names()

    async def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        *,
        max_messages: int = 32,
        tags: str = "*",
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> PullResult:
        """Pulls up to `max_messages` messages from `queue_offset` on; brokers may send fewer (RocketMQ at most 32).

        A message whose body can't be decompressed is included, with `body_error`. Once the decompressed bodies of a
        pull add up to frame_size_max bytes, the result ends before the next compressed message, and `next_offset` is
        the offset of that message.

        `tags`: "*" or tags joined by "||". Raises ValueError if `tags` names no tag. `wait_s`: longest time for which
        the broker waits for a message to arrive, at most 60 s; RocketMQ's brokers may take 5 s longer. `timeout_s`:
        timeout of each attempt; by default request_timeout_s, plus `wait_s` + 5 s if `wait_s` > 0."""
        wanted = wanted_tags(tags)
        raw = await self.pull_raw(
            queue, queue_offset, max_messages=max_messages, tags=tags, wait_s=wait_s, timeout_s=timeout_s
        )
        status, next_offset = raw.status, raw.next_offset
        messages: list[ReceivedMessage] = []
        if status is PullStatus.FOUND:
            # Brokers compare only hashes of tags.
            options = self._client.options
            messages, left_out = received_within(
                raw.body, queue, wanted, options.message_size_max, options.frame_size_max
            )
            if left_out is not None:
                next_offset = left_out
            if not messages:
                status = PullStatus.NO_MATCHED_MSG
        return PullResult(status, messages, next_offset, raw.min_offset, raw.max_offset, raw.broker_id)

    async def pull_raw(
        self,
        queue: MessageQueue,
        queue_offset: int,
        *,
        max_messages: int = 32,
        tags: str = "*",
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> RawPull:
        """As `pull`, but returns the undecoded records, for readers with their own codec.

        With `tags`, the records may include messages with other tags of the same hash."""
        return await self._requests.pull(
            queue, queue_offset, subscription=tags, max_messages=max_messages, wait_s=wait_s, timeout_s=timeout_s
        )

    def reading(
        self,
        source: str | MessageQueue | Mapping[MessageQueue, int],
        *,
        max_messages: int = 32,
        tags: str = "*",
        wait_s: float = 0.0,
    ) -> Reading:
        """Returns an iterator over a topic or queue from its first message, or over queues from given queue offsets.

            async with consumer.reading("invoices", max_messages=1024) as reading:
                async for stretch in reading:
                    for message in stretch.messages:
                        …

        The next pull of each queue runs while the block works on a stretch; at most one response per queue is buffered.
        Messages of one queue come in order; different queues alternate as their brokers respond. The iteration ends at
        the end of the queues; with `wait_s` > 0 it waits there for new messages, in long polls of that length, and
        never ends. If an offset is outside the queue, reading continues at the nearest one inside; see `Stretch`. While
        a broker can't read a message, because the message is damaged and may be repaired, reading of that queue pauses;
        the first pause is logged. `reading.positions` never includes messages that were not returned: commit the
        positions, or pass them as `source` to resume.
        The other arguments are those of `pull`. The iteration raises the errors of `pull`; entering the block, those of
        `queues` and `min_offset`.
        """

        async def positions() -> dict[MessageQueue, int]:
            if isinstance(source, Mapping):
                return dict(source)
            queues = [source] if isinstance(source, MessageQueue) else await self.queues(source)
            return {queue: await self.min_offset(queue) for queue in queues}

        async def pull(queue: MessageQueue, queue_offset: int) -> PullResult:
            return await self.pull(queue, queue_offset, max_messages=max_messages, tags=tags, wait_s=wait_s)

        return Reading(positions, pull, ends=wait_s <= 0)

    async def min_offset(self, queue: MessageQueue) -> int:
        """The queue offset of the oldest message that the broker has of `queue`."""
        return await self._requests.min_offset(queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """The queue offset of the next message to be stored, as known to the broker."""
        return await self._requests.max_offset(queue)

    async def offset_for_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """The queue offset of the first message stored at `timestamp_ms` or later, as known to the broker.

        If there is none, halog returns the queue's max offset, but RocketMQ the offset of the last message: check that
        message's store time."""
        return await self._requests.offset_for_time(queue, timestamp_ms)

    async def committed_offset(self, queue: MessageQueue) -> int | None:
        """The queue offset that this group has committed; None if there is none. As long as the queue still has its
        first message, brokers may report 0 for a group that has committed nothing."""
        return await self._requests.committed_offset(queue)

    async def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """Commits `queue_offset`, that of the first message not yet consumed, for this group. RocketMQ 5 rejects a
        group that has never pulled (BrokerError with SUBSCRIPTION_GROUP_NOT_EXIST, 26)."""
        await self._requests.commit(queue, queue_offset)
