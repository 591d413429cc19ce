"""A consumer's requests about a queue, sent to one broker of its broker set.

Sources: PullAPIWrapper (choice of the broker), MQClientAPIImpl, RemoteBrokerOffsetStore.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import anyio

from ha.client.backoff import Backoff
from ha.client.client import Client
from ha.client.messages import MessageQueue, PullStatus, RawPull, ReadFrom
from ha.client.routes import TopicRoute
from ha.errors import BrokerError, ConnectionFailed, RequestTimedOut
from ha.heap import keep_heap
from ha.protocol.codes import MASTER_ID, PullSysFlag, RequestCode, ResponseCode
from ha.protocol.headers import (
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    Header,
    OffsetResponse,
    PullMessageRequest,
    PullMessageResponse,
    QueryConsumerOffsetRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
    parse_header,
)
from ha.protocol.remoting import RemotingCommand

_STATUS_OF_CODE = {
    int(ResponseCode.SUCCESS): PullStatus.FOUND,
    int(ResponseCode.PULL_NOT_FOUND): PullStatus.NO_NEW_MSG,
    int(ResponseCode.PULL_RETRY_IMMEDIATELY): PullStatus.NO_MATCHED_MSG,
    int(ResponseCode.PULL_OFFSET_MOVED): PullStatus.OFFSET_ILLEGAL,
}
UNAVAILABLE_CODES = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.GO_AWAY})
"""Response codes of a broker that does not serve the request, such as a slave that was the master when the route was
looked up; GO_AWAY is that of a RocketMQ broker that shuts down."""
_LONG_POLL_GRACE_S = 5.0
"""Added to the timeout of a long poll, because RocketMQ's brokers check for expired polls every 5 s."""
_LONG_POLL_S_MAX = 60.0
"""Maximum duration of a long poll: if the broker's host fails, only the timeout ends it."""
_LACKING_S = 1.0
"""Time in seconds for which suggestions for a queue are ignored after the suggested slave lacked the messages. Short,
because a slave also lacks messages for some milliseconds after the master has stored them."""


class Answer(NamedTuple):
    """A response, and the address and id of the broker that sent it."""

    answer: RemotingCommand
    address: str
    broker_id: int

    def error(self, hint: str = "") -> BrokerError:
        """Returns the response as a BrokerError."""
        return BrokerError(self.address, self.answer.code, self.answer.remark or "", hint)


class QueueRequests:
    """Requests on behalf of `group`; `read_from` selects the broker of a set. All methods raise BrokerError,
    RequestTimedOut, ConnectionFailed, RouteNotFound, RemoteProtocolError."""

    def __init__(self, client: Client, group: str, read_from: ReadFrom | int = ReadFrom.SUGGESTED) -> None:
        self._client = client
        self._group = group
        self._read_from = read_from
        self._suggested: dict[MessageQueue, int] = {}  # queue -> id of the slave that the broker suggested for it
        self._lacking_until: dict[MessageQueue, float] = {}  # queue -> time until which suggestions for it are ignored
        keep_heap()  # responses and their messages are repeated allocations of up to some MiB

    async def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        *,
        subscription: str,
        expression_type: str = "TAG",
        subscription_version: int = 0,
        max_messages: int = 32,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> RawPull:
        """Pulls once, and again from the broker that `read_from` selects if a suggested slave lacks the messages; see
        PullConsumer.pull_raw. A pull never carries a commit: brokers could execute it after a commit that was sent
        later."""
        wait_s = min(wait_s, _LONG_POLL_S_MAX)
        header = PullMessageRequest(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=queue_offset,
            max_msg_nums=max_messages,
            sys_flag=PullSysFlag.SUBSCRIPTION | (PullSysFlag.SUSPEND if wait_s > 0 else 0),
            commit_offset=0,
            suspend_timeout_millis=int(wait_s * 1000),
            sub_version=subscription_version,
            subscription=subscription,
            expression_type=expression_type,
        )
        if timeout_s is None:
            timeout_s = self._client.options.request_timeout_s + (wait_s + _LONG_POLL_GRACE_S if wait_s > 0 else 0)
        code, waits = RequestCode.PULL_MESSAGE, wait_s > 0
        answered = await self.ask(queue, code, header, timeout_s, waits=waits)
        answer = answered.answer
        status = _STATUS_OF_CODE.get(answer.code)
        if status is None:
            raise answered.error()
        found = parse_header(PullMessageResponse, answer.ext_fields)
        body, broker_id, next_offset = bytes(answer.body), answered.broker_id, found.next_begin_offset
        is_suggested = self._suggested.pop(queue, None) == broker_id
        is_inside = found.min_offset <= queue_offset <= found.max_offset
        now = anyio.current_time()
        if is_suggested and next_offset == queue_offset and not is_inside:
            # The slave lacks the messages, perhaps for a long time; the master may suggest it all the same.
            self._lacking_until[queue] = now + _LACKING_S
            return await self.pull(
                queue,
                queue_offset,
                subscription=subscription,
                expression_type=expression_type,
                subscription_version=subscription_version,
                max_messages=max_messages,
                wait_s=wait_s,
                timeout_s=timeout_s,
            )
        # A slave that returns the requested offset may lack the messages: then the next pull goes to the master, even
        # if the slave suggests itself (the group's setting brokerId). An empty long poll inside the slave's queue
        # doesn't count: it may simply have ended without new messages.
        is_lacking = broker_id != MASTER_ID and next_offset == queue_offset and not (waits and is_inside)
        if (
            self._read_from is ReadFrom.SUGGESTED
            and found.suggest_which_broker_id != MASTER_ID
            and not is_lacking
            and now >= self._lacking_until.get(queue, -math.inf)
        ):
            self._suggested[queue] = found.suggest_which_broker_id
        if self._read_from is not ReadFrom.SUGGESTED and next_offset == queue_offset < found.min_offset:
            # The program reads only from this broker. A slave that lacks messages returns the requested offset, at
            # which the next pull would find nothing either.
            status, next_offset = PullStatus.OFFSET_ILLEGAL, found.min_offset
        remark = answer.remark or ""
        return RawPull(status, body, next_offset, found.min_offset, found.max_offset, broker_id, remark)

    async def min_offset(self, queue: MessageQueue) -> int:
        """See PullConsumer.min_offset."""
        header = GetMinOffsetRequest(topic=queue.topic, queue_id=queue.queue_id)
        return await self._ask_offset(queue, RequestCode.GET_MIN_OFFSET, header)

    async def max_offset(self, queue: MessageQueue) -> int:
        """See PullConsumer.max_offset."""
        header = GetMaxOffsetRequest(topic=queue.topic, queue_id=queue.queue_id)
        return await self._ask_offset(queue, RequestCode.GET_MAX_OFFSET, header)

    async def offset_for_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """See PullConsumer.offset_for_time."""
        header = SearchOffsetRequest(topic=queue.topic, queue_id=queue.queue_id, timestamp=timestamp_ms)
        return await self._ask_offset(queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)

    async def committed_offset(self, queue: MessageQueue) -> int | None:
        """See PullConsumer.committed_offset."""
        header = QueryConsumerOffsetRequest(consumer_group=self._group, topic=queue.topic, queue_id=queue.queue_id)
        answered = await self.ask(queue, RequestCode.QUERY_CONSUMER_OFFSET, header, choose=self._offsets_id)
        return None if answered.answer.code == ResponseCode.QUERY_NOT_FOUND else _offset(answered)

    async def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """See PullConsumer.commit."""
        header = UpdateConsumerOffsetRequest(
            consumer_group=self._group, topic=queue.topic, queue_id=queue.queue_id, commit_offset=queue_offset
        )
        # A repeated commit could be executed after one that was sent later.
        code = RequestCode.UPDATE_CONSUMER_OFFSET
        answered = await self.ask(queue, code, header, choose=self._offsets_id, is_repeatable=False)
        if answered.answer.code != ResponseCode.SUCCESS:
            raise answered.error()

    def _broker_id(self, route: TopicRoute, queue: MessageQueue) -> int:
        suggested = self._suggested.get(queue)
        if suggested is not None and suggested in route.addresses.get(queue.broker_name, {}):
            return suggested
        return self._chosen_id(route, queue)

    def _chosen_id(self, route: TopicRoute, queue: MessageQueue) -> int:
        return route.broker_id_for(queue.broker_name, self._read_from)

    @staticmethod
    def _offsets_id(route: TopicRoute, queue: MessageQueue) -> int:
        return route.broker_id_for(queue.broker_name, ReadFrom.SUGGESTED)

    async def _ask_offset(self, queue: MessageQueue, code: RequestCode, header: Header) -> int:
        answer = await self.ask(queue, code, header, choose=self._chosen_id)  # a suggested slave may lack messages
        return _offset(answer)

    async def ask(
        self,
        queue: MessageQueue,
        code: RequestCode,
        header: Header,
        timeout_s: float | None = None,
        *,
        choose: Callable[[TopicRoute, MessageQueue], int] | None = None,
        waits: bool = False,
        is_repeatable: bool = True,
        retries: bool = True,
    ) -> Answer:
        """Sends a request to the broker whose id `choose` returns, by default the one to read from, and returns the
        response, whatever its code.

        `timeout_s`: timeout of each attempt; None: request_timeout_s. `waits`: the request is a long poll.

        If the connection fails, the request is repeated for up to request_timeout_s after the first failure, unless
        `retries` or ClientOptions.retry_unreachable is False, the request may have been executed and `is_repeatable`
        is False, or the client was closed.
        """
        client, options = self._client, self._client.options
        routes, connections = client.routes, client.connections  # a client that is closed during a pause has none
        backoff, give_up_at = Backoff(), math.inf
        timeout_s = options.request_timeout_s if timeout_s is None else timeout_s
        while True:
            try:
                route = await routes.find(queue.topic)
                broker_id = (choose or self._broker_id)(route, queue)
                address = route.address_of(queue.broker_name, broker_id)
                command = RemotingCommand(code, ext_fields=header.to_ext_fields())
                answer = await connections.invoke(address, command, timeout_s, is_prompt=not waits)
            except ConnectionFailed as error:
                routes.mark_stale(queue.topic)
                self._suggested.pop(queue, None)
                now, pause_s = anyio.current_time(), backoff.next_s()
                give_up_at = min(give_up_at, now + options.request_timeout_s)
                retries = retries and options.retry_unreachable and client.is_open
                is_final = not retries or (error.was_sent and not is_repeatable)
                if is_final or now + pause_s >= give_up_at:
                    raise
                await anyio.sleep(pause_s)
            except RequestTimedOut:
                self._suggested.pop(queue, None)  # the next request goes to the master, which may suggest it again
                raise
            else:
                break
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            routes.forget(queue.topic)
        elif answer.code in UNAVAILABLE_CODES:
            routes.mark_stale(queue.topic)
            self._suggested.pop(queue, None)
        return Answer(answer, address, broker_id)


def _offset(found: Answer) -> int:
    if found.answer.code != ResponseCode.SUCCESS:
        raise found.error()
    return parse_header(OffsetResponse, found.answer.ext_fields).offset
