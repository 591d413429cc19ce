"""Sends a consumer's POP requests: to take messages, to wait for them, to acknowledge them, and to change when they
become visible again.

Only masters answer them. Brokers register the group when they get such a request, so a consumer need not send
heartbeats. Sources: MQClientAPIImpl (popMessageAsync, ackMessageAsync, changeInvisibleTimeAsync), pop.md of the
specification.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from ha.client.client import Client
from ha.client.messages import MessageQueue, ReadFrom
from ha.client.push_options import StartFrom
from ha.client.queue_requests import Answer, QueueRequests
from ha.client.subscription import SQL92
from ha.protocol.bodies import SubscriptionData
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import Header, parse_header
from ha.protocol.pop import NotificationRequest, NotificationResponse, PopMessageRequest, PopMessageResponse
from ha.protocol.popped import Popped, ReceiptHandle, read_popped
from ha.protocol.remoting import RemotingCommand

ALL_QUEUES = -1
"""Queue id of a source: all queues of a topic on one broker."""
_FROM_FIRST, _FROM_LAST = 0, 1
"""Values of the request field initMode: where a group without a committed offset starts."""
_BORN_NOW = 0
"""Value of the request field bornTime that makes the broker use its own clock, so that a client's wrong clock doesn't
shorten a long poll."""
_NOTHING_CODES = frozenset({ResponseCode.POLLING_TIMEOUT, ResponseCode.POLLING_FULL, ResponseCode.PULL_NOT_FOUND})


class PopRequests:
    """Requests of one group. A source is a `MessageQueue` with queue id ALL_QUEUES.

    The async methods raise BrokerError, RequestTimedOut, ConnectionFailed, RouteNotFound, RemoteProtocolError."""

    def __init__(self, client: Client, group: str, start_from: StartFrom, *, is_ordered: bool = False) -> None:
        """`is_ordered`: a broker gives out a queue's next messages only after those that it gave out before are
        acknowledged, or visible again."""
        self._client = client
        self._group = group
        self._init_mode = _FROM_FIRST if start_from is StartFrom.FIRST else _FROM_LAST
        self._is_ordered = is_ordered
        self._lost_attempts: dict[MessageQueue, list[str]] = {}
        """Attempt ids of ordered pops whose messages were lost here, by source. The next pop of the source repeats one,
        so that it gets these messages at once, not after their invisible time. A source has at most as many ids as it
        had concurrent pops."""
        self._requests = QueueRequests(client, group, ReadFrom.MASTER)

    async def pop(
        self,
        source: MessageQueue,
        subscription: SubscriptionData,
        *,
        message_count_max: int,
        invisible_ms: int,
        wait_s: float,
        attempt_id: str | None,
    ) -> tuple[list[Popped], bool]:
        """Takes messages with one request, POP_MESSAGE (200050). Returns them and whether the broker has more; no
        messages if none arrive within `wait_s`, or the broker already holds its maximum number of long polls.

        If the connection is lost, the request times out or this is cancelled, the broker may have taken messages, which
        become visible again after `invisible_ms`; see `attempt`."""
        header = PopMessageRequest(
            consumer_group=self._group,
            topic=source.topic,
            queue_id=source.queue_id,
            max_msg_nums=message_count_max,
            invisible_time=invisible_ms,
            poll_time=int(wait_s * 1000),
            born_time=_BORN_NOW,
            init_mode=self._init_mode,
            exp_type=subscription.expression_type,
            exp=subscription.sub_string,
            order=self._is_ordered,
            attempt_id=attempt_id,
        )
        answered = await self._wait(source, RequestCode.POP_MESSAGE, header, wait_s)
        if answered.answer.code in _NOTHING_CODES:
            return [], False
        answer = self._successful(answered, source.topic)
        has_more = parse_header(PopMessageResponse, answer.ext_fields).rest_num > 0
        return read_popped(answer, source.broker_name), has_more

    @contextmanager
    def attempt(self, source: MessageQueue) -> Iterator[str | None]:
        """Yields the attempt id for a pop in the block; None unless the consumer is ordered. If the block raises or is
        cancelled, the next attempt for `source` has the same id, so that its pop gets the messages."""
        if not self._is_ordered:
            yield None
            return
        lost = self._lost_attempts.setdefault(source, [])
        attempt_id = lost.pop() if lost else uuid.uuid4().hex
        try:
            yield attempt_id
        except BaseException:  # a cancellation, too
            lost.append(attempt_id)
            raise

    async def notify(self, source: MessageQueue, subscription: SubscriptionData, wait_s: float) -> bool:
        """Waits for at most `wait_s` until there may be messages to take: NOTIFICATION (200054). Returns False if there
        are none."""
        header = NotificationRequest(
            consumer_group=self._group,
            topic=source.topic,
            queue_id=source.queue_id,
            poll_time=int(wait_s * 1000),
            born_time=_BORN_NOW,
            exp_type=subscription.expression_type,
            exp=subscription.sub_string,
            order=self._is_ordered,
        )
        answered = await self._wait(source, RequestCode.NOTIFICATION, header, wait_s)
        answer = self._successful(answered, source.topic)
        return parse_header(NotificationResponse, answer.ext_fields).has_msg

    async def ack(self, source: MessageQueue, receipt: ReceiptHandle) -> None:
        """Acknowledges a message: ACK_MESSAGE (200051). Safe to repeat."""
        header = receipt.ack_request(self._group, source.topic)
        self._successful(await self._requests.ask(source, RequestCode.ACK_MESSAGE, header), source.topic)

    async def change(
        self, source: MessageQueue, receipt: ReceiptHandle, invisible_ms: int, *, suspends: bool = False
    ) -> ReceiptHandle:
        """Makes a message visible again `invisible_ms` from now: CHANGE_MESSAGE_INVISIBLETIME (200053). Returns its new
        handle.

        `suspends`: the next delivery does not count as a retry. A request that may have been executed is not repeated,
        because its handle is then no longer valid."""
        header = receipt.change_request(self._group, source.topic, invisible_ms, suspends=suspends)
        code = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
        answered = await self._requests.ask(source, code, header, is_repeatable=False)
        return receipt.changed(self._successful(answered, source.topic))

    async def _wait(self, source: MessageQueue, code: RequestCode, header: Header, wait_s: float) -> Answer:
        timeout_s = self._client.options.request_timeout_s + wait_s
        return await self._requests.ask(source, code, header, timeout_s, waits=wait_s > 0, retries=False)

    def _successful(self, answered: Answer, topic: str) -> RemotingCommand:
        if answered.answer.code != ResponseCode.SUCCESS:
            raise answered.error(self._hint(answered.answer, topic))
        return answered.answer

    def _hint(self, answer: RemotingCommand, topic: str) -> str:
        """Returns advice on how to fix the cause of a rejection; "" if there is none."""
        match answer.code:
            case ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                return "this broker has no POP (RocketMQ has it since version 5): use PushConsumer or PullConsumer"
            case ResponseCode.TOPIC_NOT_EXIST:
                return f"create topic {topic}, or check its name"
            case ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                return f"create group {self._group}, or set autoCreateSubscriptionGroup=true on the broker"
            case ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                return f"check the subscription to topic {topic}"
            case ResponseCode.SYSTEM_ERROR if SQL92 in (answer.remark or ""):
                return "set enablePropertyFilter=true on the broker"
            case _:
                return ""
