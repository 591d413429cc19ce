"""Acknowledgements of POP consumers: 200051 ACK_MESSAGE, 200151 BATCH_ACK_MESSAGE, 200053 CHANGE_MESSAGE_INVISIBLETIME.

A handle is valid while its message is in flight with the pop time that the handle states. An acknowledgement with an
invalid handle (the message was acknowledged or delivered again, or the handle was replaced) succeeds without effect, as
in RocketMQ. A change of the invisible time with an invalid handle succeeds without effect, too; RocketMQ would then
deliver an acknowledged message again. Each request is answered when the record of its change is acknowledged. Sources:
AckMessageProcessor, ChangeInvisibleTimeProcessor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import trio

from ha.broker.core import BrokerCore
from ha.broker.journal import Logged
from ha.broker.pop.ordered import OrderedBatch
from ha.broker.pop.pop_holds import PopHolds
from ha.broker.pop.pop_log import PopLog
from ha.broker.pop.state import PopQueue, PopState
from ha.broker.queue_times import bounds
from ha.broker.refused import RefusedError
from ha.errors import RemoteProtocolError
from ha.protocol.bodies import LIST_SIZE_MAX, read_request
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import parse_header
from ha.protocol.pop import (
    BATCH_ACK_COUNT_MAX,
    INVISIBLE_MS_MAX,
    ORDER_QUEUE,
    BatchAckBody,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    Handle,
    parse_handle,
)
from ha.protocol.remoting import RemotingCommand
from ha.protocol.request_parser import AckCommand, AckedPop, ack_command
from ha.remoting import RemotingConnection, RequestHandler


class AckRequests:
    """Answers acknowledgements and changes of the invisible time."""

    def __init__(self, core: BrokerCore, log: PopLog, holds: PopHolds) -> None:
        self._store = core.store
        self._topics = core.tables.topics
        self._wall_clock_ms = core.world.wall_clock_ms
        self._pop_log = log
        self._holds = holds
        log.on_room = lambda queue: holds.wake_for(queue.key)
        self._steps: dict[int, Callable[[PopState, RemotingCommand], RemotingCommand]] = {
            RequestCode.BATCH_ACK_MESSAGE: self._acknowledge_batch,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self._change,
        }

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.ACK_MESSAGE: self._handle,
            RequestCode.BATCH_ACK_MESSAGE: self._handle,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self._handle,
        }

    def take(
        self, connection: RemotingConnection, commands: list[RemotingCommand], ends_at: float
    ) -> list[RemotingCommand]:
        """Serves requests of `handlers` until `ends_at` (Trio's clock); returns those not served.

        Returns all of them while a new master is still reading the POP log.
        """
        try:
            state = self._pop_log.ready_state()
        except RefusedError as refused:
            for command in commands:
                connection.reply(command, command.reply(refused.code, refused.remark))
            return []
        if state is None:
            return commands
        for number, command in enumerate(commands):
            if number and trio.current_time() >= ends_at:
                return commands[number:]
            self._serve(state, connection, command)
        return []

    async def _handle(self, connection: RemotingConnection, command: RemotingCommand) -> None:
        self._serve(await self._pop_log.wait_ready(), connection, command)

    def _serve(self, state: PopState, connection: RemotingConnection, command: RemotingCommand) -> None:
        """Changes the state as requested; answers when the change is acknowledged, or at once if the request is
        refused."""
        try:
            step = self._steps.get(command.code)
            if step is None:
                self._acknowledge(state, connection, ack_command(command))
            else:
                self._pop_log.call(partial(_reply, connection, command, step(state, command)))
        except RefusedError as refused:
            connection.reply(command, command.reply(refused.code, refused.remark))
        except RemoteProtocolError as error:
            connection.reply_error(command, error)

    def _acknowledge(self, state: PopState, connection: RemotingConnection, ack: AckCommand) -> None:
        """ACK_MESSAGE (200051): acknowledges messages of one pop. Refuses a queue offset outside the queue, unless its
        message is in flight."""
        popped = ack.popped
        queue = state.get((popped.group, popped.topic, popped.queue_id))
        missing: Sequence[int] = ack.offsets
        if queue is not None:
            missing = self._finish(state, queue, missing, popped.pop_time_ms, is_order=popped.is_order)
        for each in [ack] if not missing else map(ack.alone, range(len(ack.offsets))):
            try:
                if each.offsets[0] in missing:
                    self._check_offset(popped, each.offsets[0])
            except RefusedError as refused:
                connection.reply(each, each.reply(refused.code, refused.remark))
            else:
                self._pop_log.call(partial(_reply, connection, each, None), len(each.offsets))

    # ---- the other requests: each changes the state, and returns the answer to send once the change is acknowledged

    def _acknowledge_batch(self, state: PopState, command: RemotingCommand) -> RemotingCommand:
        """BATCH_ACK_MESSAGE (200151): acknowledges messages of several pops. Queue offsets outside their queues are
        skipped."""
        body = read_request(BatchAckBody, command.body, LIST_SIZE_MAX) if command.body else BatchAckBody()
        if not body.acks:
            raise RefusedError(ResponseCode.NO_MESSAGE, "the request has no acknowledgements")
        acks = []
        left = BATCH_ACK_COUNT_MAX
        for ack in body.acks:
            offsets = list(islice(ack.offsets(), left + 1))
            left -= len(offsets)
            acks.append((ack, offsets))
            if left < 0 or len(acks) > BATCH_ACK_COUNT_MAX:
                raise RefusedError(
                    ResponseCode.INVALID_PARAMETER, f"the request acknowledges more than {BATCH_ACK_COUNT_MAX} messages"
                )
        for ack, offsets in acks:
            queue = state.get((ack.group, ack.real_topic(), ack.queue_id))
            if queue is not None:
                self._finish(state, queue, offsets, ack.pop_time_ms, is_order=ack.revive_queue == ORDER_QUEUE)
        return command.reply(ResponseCode.SUCCESS)

    def _change(self, state: PopState, command: RemotingCommand) -> RemotingCommand:
        """CHANGE_MESSAGE_INVISIBLETIME (200053): sets the time until a message becomes visible again, counted from
        now."""
        request = parse_header(ChangeInvisibleTimeRequest, command.ext_fields)
        self._check_queue(request.topic, request.queue_id, request.consumer_group)
        begin, end = self._bounds(request.topic, request.queue_id)
        if not begin <= request.offset < end:
            raise RefusedError(
                ResponseCode.NO_MESSAGE, f"offset {request.offset} is not in the queue's range {begin}~{end}"
            )
        if not 0 <= request.invisible_time <= INVISIBLE_MS_MAX:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"invisibleTime {request.invisible_time} is not between 0 and {INVISIBLE_MS_MAX}",
            )
        handle = parse_handle(request.extra_info)
        now_ms = self._wall_clock_ms()
        queue = state.get((request.consumer_group, request.topic, request.queue_id))
        pop_time_ms, invisible_ms = max(now_ms, handle.pop_time_ms + 1), request.invisible_time
        if handle.is_order:
            pop_time_ms, invisible_ms = handle.pop_time_ms, now_ms + request.invisible_time - handle.pop_time_ms
        if queue is not None:
            self._delay(state, queue, request, handle, pop_time_ms, now_ms + request.invisible_time)
        header = ChangeInvisibleTimeResponse(
            pop_time=pop_time_ms, invisible_time=invisible_ms, revive_qid=handle.revive_queue
        )
        return command.reply(ResponseCode.SUCCESS, None, header.to_ext_fields())

    # ---- the state

    def _finish(
        self, state: PopState, queue: PopQueue, offsets: Sequence[int], pop_time_ms: int, *, is_order: bool
    ) -> list[int]:
        """Acknowledges messages popped at `pop_time_ms`; returns those that were not in flight since then."""
        if is_order:
            return [offset for offset in offsets if not self._finish_ordered(state, queue, offset, pop_time_ms)]
        return state.acknowledge(queue, offsets, pop_time_ms)

    def _finish_ordered(self, state: PopState, queue: PopQueue, offset: int, pop_time_ms: int) -> bool:
        order = queue.order
        if order is None or order.pop_time_ms != pop_time_ms or offset not in order.messages:
            return False
        order = order.acknowledge(offset)
        state.set_order(queue, order)
        state.move(queue, max(queue.next_offset, order.next_offset))
        self._on_order_changed(queue, order)
        return True

    def _delay(
        self,
        state: PopState,
        queue: PopQueue,
        request: ChangeInvisibleTimeRequest,
        handle: Handle,
        pop_time_ms: int,
        due_ms: int,
    ) -> None:
        offset = request.offset
        if not handle.is_order:
            if queue.in_flight(offset, handle.pop_time_ms) is not None:
                state.change(queue, offset, pop_time_ms, due_ms, is_suspended=request.suspend)
            return
        order = queue.order
        if order is not None and order.pop_time_ms == handle.pop_time_ms and offset in order.messages:
            order = order.delay(offset, due_ms)
            state.set_order(queue, order)
            self._on_order_changed(queue, order)

    def _on_order_changed(self, queue: PopQueue, order: OrderedBatch) -> None:
        """Wakes a request that waits for the queue if the queue is free; otherwise makes the group's requests try again
        when it becomes free."""
        group, topic, _ = queue.key
        due_ms = order.due_ms(self._wall_clock_ms())
        if due_ms is None:
            self._holds.wake_for(queue.key)
        else:
            self._holds.resume_ordered_by(topic, group, due_ms)

    # ---- checks

    def _check_queue(self, topic: str, queue_id: int, group: str) -> None:
        config = self._topics.get(topic)
        if config is None:
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
        if not 0 <= queue_id < config.read_queue_nums:
            raise RefusedError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"queueId[{queue_id}] is illegal, topic:[{topic}] "
                f"topicConfig.readQueueNums:[{config.read_queue_nums}] consumer:[{group}]",
            )

    def _check_offset(self, popped: AckedPop, offset: int) -> None:
        self._check_queue(popped.topic, popped.queue_id, popped.group)
        begin, end = self._bounds(popped.topic, popped.queue_id)
        if not begin <= offset <= end:
            raise RefusedError(
                ResponseCode.NO_MESSAGE,
                f"offset is illegal, key:{popped.topic}@{popped.queue_id}, commit:{offset}, store:{begin}~{end}",
            )

    def _bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Returns the first queue offset, and the one after the last record in the log, including records that a new
        master has not dispatched yet.
        """
        begin, end = bounds(self._store.queues.get(topic, queue_id))
        return begin, max(end, self._store.log.next_queue_offset(topic, queue_id))


def _reply(
    connection: RemotingConnection, command: RemotingCommand, answer: RemotingCommand | None, logged: Logged
) -> None:
    """Answers a request with `answer` (None: just SUCCESS), or with the failure if its change may be lost."""
    if logged.fault:
        connection.reply(command, command.reply(logged.status.response_code, logged.fault))
    elif answer is None:
        connection.reply_success(command)
    else:
        connection.reply(command, answer)
