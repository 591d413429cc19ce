"""Answers requests that operators send to a push consumer through brokers: RESET_CONSUMER_CLIENT_OFFSET (220) resets
its offsets, GET_CONSUMER_STATUS_FROM_CLIENT (221) and GET_CONSUMER_RUNNING_INFO (307) ask for its offsets and its
state, and CONSUME_MESSAGE_DIRECTLY (309) makes it handle a message.

Sources: ClientRemotingProcessor, DefaultMQPushConsumerImpl (consumerRunningInfo), MQClientInstance (resetOffset).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

import anyio

from ha.client.handling import Handling
from ha.client.held_queue import HeldQueue
from ha.client.messages import MessageQueue
from ha.client.push_options import ConsumeMode
from ha.client.rebalancing import Rebalancer
from ha.client.received import received
from ha.client.saving import Saving
from ha.errors import RetryLater
from ha.protocol import java_json
from ha.protocol.bodies import SubscriptionData
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.group_requests import (
    ConsumeDirectlyRequest,
    ConsumeDirectlyResult,
    ConsumeStatus,
    ProcessQueueInfo,
    ResetOffsetRequest,
    decode_queue_offsets,
    encode_consumer_status,
    encode_running_info,
)
from ha.protocol.headers import parse_header
from ha.protocol.record import decode_record
from ha.protocol.remoting import RemotingCommand

_log = logging.getLogger(__name__)

_DESCRIPTION_SIZE_MAX = 65_536
"""Maximum number of characters that describe a handler's exception."""


class ConsumerRequests:
    """The request handlers of one consumer."""

    def __init__(
        self,
        rebalancer: Rebalancer,
        saving: Saving,
        handling: Handling,
        subscriptions: list[SubscriptionData],
        mode: ConsumeMode,
        body_size_max: int,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._rebalancer = rebalancer
        self._saving = saving
        self._handling = handling
        self._subscriptions = subscriptions
        self._mode = mode
        self._body_size_max = body_size_max
        self._wall_clock_ms = wall_clock_ms
        self._started_ms = wall_clock_ms()

    async def answer(self, command: RemotingCommand) -> RemotingCommand | None:
        """Returns the response to one request. Raises RemoteProtocolError if the request is malformed."""
        match command.code:
            case RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
                self._reset(command)
                return command.reply(ResponseCode.SUCCESS)
            case RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
                return self._status(command)
            case RequestCode.GET_CONSUMER_RUNNING_INFO:
                return self._running_info(command)
            case RequestCode.CONSUME_MESSAGE_DIRECTLY:
                return await self._consume(command)
            case _:
                return command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)

    def _reset(self, command: RemotingCommand) -> None:
        """RESET_CONSUMER_CLIENT_OFFSET (220): restarts the held queues of a topic at the offsets in the request, and
        saves these offsets."""
        topic = parse_header(ResetOffsetRequest, command.ext_fields).topic
        moved = []
        for (queue_topic, broker_name, queue_id), offset in decode_queue_offsets(command.body).items():
            held = self._rebalancer.held.get(MessageQueue(queue_topic, broker_name, queue_id))
            if held is not None and queue_topic == topic:
                held.restart(offset)
                moved.append((held, offset))
        _log.warning("client.offsets_reset topic=%s queues=%s", topic, [(held.queue, offset) for held, offset in moved])
        self._saving.want(held for held, _ in moved)

    def _status(self, command: RemotingCommand) -> RemotingCommand:
        topic = parse_header(ResetOffsetRequest, command.ext_fields).topic
        offsets = {
            (queue.topic, queue.broker_name, queue.queue_id): held.process_queue.commit_offset
            for queue, held in self._rebalancer.held.items()
            if held.process_queue is not None and topic in ("", queue.topic)
        }
        return command.reply(ResponseCode.SUCCESS, body=encode_consumer_status(offsets))

    def _running_info(self, command: RemotingCommand) -> RemotingCommand:
        queues = {
            (queue.topic, queue.broker_name, queue.queue_id): _info(held)
            for queue, held in self._rebalancer.held.items()
        }
        properties = {
            "PROP_CLIENT_VERSION": "halog",
            "PROP_CONSUME_ORDERLY": "true" if self._mode is ConsumeMode.ORDERLY else "false",
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
            "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
        }
        body = encode_running_info(queues, properties, self._rates(), self._subscriptions)
        return command.reply(ResponseCode.SUCCESS, body=body)

    def _rates(self) -> dict[str, ConsumeStatus]:
        """Returns, by topic, the average rates (per second) and handling time (in ms) since the start."""
        done = self._handling.statistics()
        seconds = max((self._wall_clock_ms() - self._started_ms) / 1000, 1e-3)
        found = {}
        for topic in (subscription.topic for subscription in self._subscriptions):
            handled, failed = done.handled.get(topic, 0), done.failed.get(topic, 0)
            found[topic] = ConsumeStatus(
                consume_failed_msgs=failed,
                consume_failed_tps=failed / seconds,
                consume_ok_tps=handled / seconds,
                consume_rt=1000 * done.seconds.get(topic, 0.0) / max(handled + failed, 1),
            )
        return found

    async def _consume(self, command: RemotingCommand) -> RemotingCommand:
        """CONSUME_MESSAGE_DIRECTLY (309): calls the handler with the message in the request, independently of the
        queues."""
        header = parse_header(ConsumeDirectlyRequest, command.ext_fields)
        record = decode_record(command.body)
        queue = MessageQueue(record.topic, header.broker_name or "", record.queue_id)
        message = received(record, queue, self._body_size_max)
        started = anyio.current_time()
        failure: Exception | None
        try:
            failure = await self._handling.call(message)
        except TypeError as error:  # also ends the consumer, but not its client, which runs this task
            failure = error
        result = ConsumeDirectlyResult(
            order=self._mode is ConsumeMode.ORDERLY, spent_time_mills=int(1000 * (anyio.current_time() - started))
        )
        if isinstance(failure, RetryLater):
            result.consume_result = "CR_LATER"
        elif failure is not None:
            result.consume_result, result.remark = "CR_THROW_EXCEPTION", _description(failure)
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(result))


def _description(failure: Exception) -> str:
    """Returns the type and text of `failure`, up to _DESCRIPTION_SIZE_MAX characters. Escapes characters that UTF-8
    can't encode."""
    text = "".join(traceback.format_exception_only(failure)).strip()
    return text[:_DESCRIPTION_SIZE_MAX].encode(errors="backslashreplace").decode()


def _info(held: HeldQueue) -> ProcessQueueInfo:
    info = ProcessQueueInfo(
        droped=held.is_revoked,
        last_consume_timestamp=held.last_consume_ms,
        last_lock_timestamp=held.last_lock_ms,
        last_pull_timestamp=held.last_pull_ms,
        locked=held.is_locked,
    )
    process_queue = held.process_queue
    if process_queue is not None:
        info.commit_offset = process_queue.commit_offset
        info.cached_msg_count = process_queue.count
        info.cached_msg_size_in_mib = process_queue.byte_count >> 20
        if process_queue.count:
            info.cached_msg_min_offset = process_queue.commit_offset
            info.cached_msg_max_offset = process_queue.last_offset
    return info
