"""Request 370 RECALL_MESSAGE: a producer takes back a timer message before it is due.

A recall is itself a timer message, due at the same time as the one that it names (timers.py). The request succeeds if
the recall is stored, replicated as the broker's role requires, and indexed before its message is taken for delivery. So
a message whose recall succeeded is not delivered. RocketMQ answers once the recall is stored, and may deliver the
message if it was just being read. Source: RecallMessageProcessor, checks and remarks in its order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ha.broker.core import BrokerCore
from ha.broker.put_request import PutRequest
from ha.broker.refused import RefusedError, refuse_if
from ha.broker.send_message import check_properties, encode_peer, take_timer
from ha.broker.stored_properties import answered_properties
from ha.broker.timers import TimerService
from ha.errors import RemoteProtocolError
from ha.protocol.codes import Permission, PutStatus, RequestCode, ResponseCode
from ha.protocol.headers import RecallMessageRequest, RecallMessageResponse, parse_header
from ha.protocol.properties import (
    PRODUCER_GROUP,
    TAGS,
    TIMER_DELETE_UNIQUE_KEY,
    TIMER_DELIVER_MS,
    UNIQ_KEY,
    encode_properties,
)
from ha.protocol.recall_handle import RecallHandle, decode_recall_handle
from ha.protocol.record import Message
from ha.protocol.remoting import RemotingCommand

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection, RequestHandler

RECALL_TAG = "_RECALL_TAG_"
_UNAVAILABLE = "recall failed, broker service not available"


class RecallProcessor:
    """Answers RECALL_MESSAGE (370)."""

    def __init__(self, core: BrokerCore, timers: TimerService) -> None:
        self._options = core.options
        self._topics = core.tables.topics
        self._puts = core.puts
        self._standing = core.standing
        self._wall_clock_ms = core.world.wall_clock_ms
        self._timers = timers

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {RequestCode.RECALL_MESSAGE: self.recall}

    async def recall(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """RECALL_MESSAGE (370): stores the recall, and waits at most RECALL_WAIT_S (timers.py) until it is indexed.

        Raises RefusedError if the message can't be recalled; RemoteProtocolError or LocalProtocolError for an invalid
        header.
        """
        request = parse_header(RecallMessageRequest, command.ext_fields)
        handle = self._checked(request)
        message = Message(handle.topic, 0, b"0", b"", born_host=encode_peer(connection.peer))
        message.born_timestamp_ms = now_ms = self._wall_clock_ms()
        properties = {
            TAGS: RECALL_TAG,
            TIMER_DELETE_UNIQUE_KEY: handle.unique_key,
            UNIQ_KEY: handle.unique_key,
            TIMER_DELIVER_MS: str(handle.timestamp_ms - 1),
            "BORN_TIMESTAMP": str(now_ms),
            PRODUCER_GROUP: request.producer_group or "",
        }
        message.properties = encode_properties(properties)
        check_properties(message.properties)
        take_timer(message, properties, now_ms, self._options)
        put = PutRequest(messages=(message,))
        await self._puts.settle([put])
        if put.status is not PutStatus.PUT_OK:
            # RocketMQ reports success if a flush or a slave did not answer in time; then the recall may be lost.
            raise RefusedError(put.status.response_code, f"recall failed, execute error: {put.remark}")
        is_in_time = await self._timers.await_recall(put.results[0].queue_offset, handle.timestamp_ms - 1)
        if is_in_time is None:
            raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, f"{_UNAVAILABLE}: the recall is not dispatched yet")
        if not is_in_time:
            raise RefusedError(
                ResponseCode.ILLEGAL_OPERATION, "recall failed, timestamp invalid: the message is being delivered"
            )
        answer = RecallMessageResponse(msg_id=handle.unique_key).to_ext_fields()
        return command.reply(ResponseCode.SUCCESS, ext_fields={**answered_properties(self._options), **answer})

    def _checked(self, request: RecallMessageRequest) -> RecallHandle:
        """Returns the decoded handle. Raises RefusedError if it is invalid, or recalls are not possible now or for its
        due time."""
        options, illegal = self._options, ResponseCode.ILLEGAL_OPERATION
        if not options.recall_enable:
            raise RefusedError(ResponseCode.NO_PERMISSION, "recall failed, operation is forbidden")
        if self._standing.is_slave:
            raise RefusedError(ResponseCode.SLAVE_NOT_AVAILABLE, f"{_UNAVAILABLE}: {self._standing.refusal}")
        fault = self._standing.why_not_stored()
        if not options.permission & Permission.WRITE:
            fault = f"brokerPermission={options.permission}"
        refuse_if(f"{_UNAVAILABLE}: {fault}" if fault else "", ResponseCode.SERVICE_NOT_AVAILABLE)
        topic = request.topic
        if self._topics.get(topic) is None:
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"recall failed, the topic[{topic}] not exist")
        try:
            handle = decode_recall_handle(request.recall_handle)
        except RemoteProtocolError as error:
            raise RefusedError(illegal, str(error)) from None
        # The key may be empty: RocketMQ's parser drops an empty last field, so that such a handle is invalid there. A
        # recall without a key would itself be delivered as a message.
        refuse_if("" if handle.unique_key else "recall handle is invalid", illegal)
        refuse_if("" if handle.topic == topic else "recall failed, topic not match", illegal)
        refuse_if("" if handle.broker_name == options.broker_name else _UNAVAILABLE, illegal)
        # RocketMQ also accepts the millisecond in which the message is due, when it may be delivered already.
        left_ms = handle.timestamp_ms - 1 - self._wall_clock_ms()
        is_possible = 0 < left_ms < options.timer_delay_s_max * 1000
        refuse_if("" if is_possible else "recall failed, timestamp invalid", illegal)
        return handle
