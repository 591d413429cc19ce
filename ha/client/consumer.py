"""The SDK's pull consumer: asks one queue for what it holds from a queue offset on. Keeps no position of its own.

Sources: DefaultMQPullConsumerImpl, PullAPIWrapper (which broker is asked, tags compared again here), MQClientAPIImpl.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

from ha.client.client import Client, ClientUser, NameServers
from ha.client.messages import MessageQueue, PullResult, PullStatus, RawPull, ReadFrom, ReceivedMessage
from ha.client.options import ClientOptions
from ha.client.queue_requests import QueueRequests
from ha.client.reading import Reading
from ha.client.received import received_within
from ha.client.subscription import wanted_tags
from ha.protocol.acl import AclCredentials


class PullConsumer(ClientUser):
    """Reads queues, one pull at a time. An async context manager; works under asyncio and trio, against halog and
    RocketMQ.

        async with PullConsumer("127.0.0.1:9876", group="audit", read_from=ReadFrom.SLAVE) as consumer:
            for queue in await consumer.queues("invoices"):
                result = await consumer.pull(queue, await consumer.min_offset(queue))

    `read_from` says which broker of a set answers: as the broker suggests, the master, a slave, or the one with this
    id. Offsets are committed at and asked of the master while there is one, like RocketMQ's consumers do. It is no
    member of its group: push consumers of the same group share the queues as if it weren't there. The other arguments
    are those of Producer.
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
        self._group = group
        self._read_from = read_from

    async def _begin(self, stack: AsyncExitStack) -> None:
        self._routes = self._client.routes
        self._requests = QueueRequests(self._client, self._group, self._read_from)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of `topic`, sorted. RouteNotFound, NameServersUnreachable."""
        return list((await self._routes.find(topic)).read_queues)

    async def topics(self) -> list[str]:
        """Every topic that the name servers know, also those that brokers keep for themselves, sorted."""
        return await self._routes.topics()

    async def broker_names(self) -> list[str]:
        """The names of all broker sets that the name servers know, sorted."""
        return await self._routes.broker_names()

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
        """Asks for up to `max_messages` messages from `queue_offset` on; brokers may send fewer (RocketMQ at most 32).

        A message whose body can't be inflated is among them, with `body_error`. Of compressed bodies no more are taken
        than an answer could hold inflated (frame_size_max); `next_offset` is then where the rest begins.

        `tags`: "*" or tags joined by "||". `wait_s` > 0 lets the broker wait that long for a message to arrive;
        RocketMQ's may take 5 s more. Raises BrokerError (e.g. no such topic or queue), RequestTimedOut,
        ConnectionFailed, RouteNotFound."""
        raw = await self.pull_raw(
            queue, queue_offset, max_messages=max_messages, tags=tags, wait_s=wait_s, timeout_s=timeout_s
        )
        status, next_offset = raw.status, raw.next_offset
        messages: list[ReceivedMessage] = []
        if status is PullStatus.FOUND:
            # Brokers compare hashes of tags only.
            options = self._client.options
            messages, left_out = received_within(
                raw.body, queue, wanted_tags(tags), options.message_size_max, options.frame_size_max
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
        """As `pull`, but the records stay the bytes that the broker sent, for a reader with a codec of its own.

        With `tags`, records of other tags with the same hash are among them."""
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
        """Reads a topic or a queue from its first message on, or queues from these queue offsets on.

            async with consumer.reading("invoices", max_messages=1024) as reading:
                async for stretch in reading:
                    for message in stretch.messages:
                        …

        While the block works on a stretch the next pull of its queue is under way, one at a time; at most one answer a
        queue waits. Messages of a queue come in order, the queues as they answer. It ends where the queues ended when
        they were asked last; with `wait_s` > 0 it waits there for more, so long at a time, and never ends. Where an
        offset is no longer in the queue it goes on at the nearest one that is, as `Stretch` says. `reading.positions`
        never runs ahead of what was handed out: commit it, or begin there again. The other arguments are those of
        `pull`; what that raises the iteration raises, what `queues` and `min_offset` raise the block's begin.
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
        """The queue offset of the oldest message that the broker asked still has."""
        return await self._requests.min_offset(queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """The queue offset that the next message will get, as the broker asked knows."""
        return await self._requests.max_offset(queue)

    async def offset_for_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """The queue offset of the first message stored at `timestamp_ms` or later, as the broker asked knows.

        The queue's max offset if there is none with halog. RocketMQ then names the last message instead, and it
        compares with its own store times, so a caller who needs to be sure looks at the message."""
        return await self._requests.offset_for_time(queue, timestamp_ms)

    async def committed_offset(self, queue: MessageQueue) -> int | None:
        """The queue offset that this group has committed; None if none is known. 0 may also mean "begin at the
        start"."""
        return await self._requests.committed_offset(queue)

    async def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """Stores `queue_offset`, the first not yet consumed, for this group. RocketMQ 5 refuses a group that never
        pulled (26)."""
        await self._requests.commit(queue, queue_offset)
