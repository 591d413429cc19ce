"""Requests of POP consumers for messages: 200050 POP_MESSAGE, 200052 PEEK_MESSAGE, 200054 NOTIFICATION, 200055
POLLING_INFO.

The checks run in RocketMQ's order with its codes and remarks. Messages are sent once the record of the pop is
acknowledged, so that the next master knows that they are in flight. Sources: PopMessageProcessor, PeekMessageProcessor,
NotificationProcessor, PollingInfoProcessor. Differences from RocketMQ:

- A pop does not need timer messages, so timerWheelEnable=false does not forbid it.
- A pop with a maxMsgNums of 0 or less does not wait.
- `bornTime` is a time by the client's clock. It can shorten the wait, but not extend it beyond `pollTime`.
- Only the master answers; POLLING_INFO is answered by slaves, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import trio

from ha.broker.core import BrokerCore
from ha.broker.filters import Filters
from ha.broker.journal import Logged
from ha.broker.pop.pop_holds import PopHold, PopHolds
from ha.broker.pop.pop_log import PopLog
from ha.broker.pop.state import PopState
from ha.broker.pop.taking import Taken, Taker, TopicRequest
from ha.broker.queue_read import QueueReader, ReadStatus
from ha.broker.refused import REJECT_REMARK, RefusedError, refused_if_unreadable
from ha.errors import RemoteProtocolError
from ha.protocol.bodies import GroupConfig, TopicConfig
from ha.protocol.codes import Permission, RequestCode, ResponseCode
from ha.protocol.headers import Header, parse_header
from ha.protocol.pop import (
    ATTEMPT_ID_SIZE_MAX,
    INVISIBLE_MS_MAX,
    ORDER_QUEUE,
    NotificationRequest,
    NotificationResponse,
    PeekMessageRequest,
    PollingInfoRequest,
    PollingInfoResponse,
    PopMessageRequest,
    PopMessageResponse,
    retry_topic,
)
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand
from ha.protocol.request_parser import pop_request
from ha.protocol.topic_names import NAME_SIZE_MAX
from ha.remoting import RemotingConnection, RequestHandler

MESSAGE_COUNT_MAX = 32
"""Maximum number of messages per request."""
RETRY_NAMES_LENGTH_MAX = NAME_SIZE_MAX - len(retry_topic("", "", is_v2=False))
"""Maximum characters of a group's and a topic's name together. With longer ones, the name of the retry topic, which
contains both, would be too long."""
LATE_MS = 500
"""Maximum time in ms between the end of a pop's poll time and its arrival; later pops are refused."""

_FOUND, _NOTHING = ReadStatus.FOUND.value, ReadStatus.NO_MESSAGE_IN_QUEUE.value


class PopRequests:
    """Answers requests for messages. `holds` keeps those that wait."""

    def __init__(self, core: BrokerCore, log: PopLog) -> None:
        options = core.options
        self._store = core.store
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._options = options
        self._standing = core.standing
        self._wall_clock_ms = core.world.wall_clock_ms
        self._pop_log = log
        self._filters = Filters(options)
        self._taker = Taker(core, log)
        self._reader = QueueReader(
            core.store.log, options, run_blocking=core.store.run_blocking, repair_entry=core.store.scrub.repair_entry
        )
        self.holds = PopHolds(
            self._resume,
            self._wall_clock_ms,
            hold_count_max=options.hold_count_max,
            hold_count_per_connection_max=options.hold_count_per_connection_max,
        )
        core.store.damage.subscribe(self.holds.wake_all)  # after a repair, for example
        self._waiting_bytes = 0
        """Bytes of the popped messages that are sent once their record is acknowledged"""

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.POP_MESSAGE: self.pop,
            RequestCode.PEEK_MESSAGE: self.peek,
            RequestCode.NOTIFICATION: self.notify,
            RequestCode.POLLING_INFO: self.polling_info,
        }

    # ---- checks

    async def _check(
        self, request: TopicRequest | PollingInfoRequest, wrong_queue: ResponseCode = ResponseCode.SYSTEM_ERROR
    ) -> TopicConfig:
        """Checks topic, queue and group, and returns the topic. Creates the group if allowed. Raises RefusedError."""
        config = self._check_topic(request, wrong_queue)
        self._check_group(request.consumer_group, await self._groups.find_or_create(request.consumer_group))
        return config

    def _check_topic(self, request: TopicRequest | PollingInfoRequest, wrong_queue: ResponseCode) -> TopicConfig:
        """Checks topic and queue, and returns the topic. `wrong_queue`: the code for a queue that it does not have.
        Raises RefusedError."""
        topic, name = request.topic, request.consumer_group
        config = self._topics.get(topic)
        if config is None:
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
        if not config.perm & Permission.READ:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"the topic[{topic}] peeking message is forbidden")
        if request.queue_id >= config.read_queue_nums:
            raise RefusedError(
                wrong_queue,
                f"queueId[{request.queue_id}] is illegal, topic:[{topic}] "
                f"topicConfig.readQueueNums:[{config.read_queue_nums}] consumer:[{name}]",
            )
        return config

    @staticmethod
    def _check_group(name: str, group: GroupConfig | None) -> None:
        if group is None:
            raise RefusedError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{name}] does not exist")
        if not group.consume_enable:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"subscription group no permission, {name}")

    def _check_readable(self, verb: str) -> None:
        options = self._options
        if not options.permission & Permission.READ:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"the broker[{options.host}] {verb} message is forbidden")

    def _left_s(self, born_time_ms: int, poll_time_ms: int) -> float:
        """Returns the time in seconds that a request may still wait; negative if it arrived too late."""
        now_ms = self._wall_clock_ms()
        left_ms = min((born_time_ms or now_ms) + poll_time_ms - now_ms, poll_time_ms)
        return min(left_ms / 1000, self._options.suspend_s_max)

    # ---- pop

    def take(
        self, connection: RemotingConnection, commands: Sequence[RemotingCommand], ends_at: float
    ) -> list[RemotingCommand]:
        """Serves pops until `ends_at` (Trio's clock). Returns those that are left to `pop`: those not reached in time,
        and those that have to wait for something other than new messages."""
        left: list[RemotingCommand] = []
        for number, command in enumerate(commands):
            if number and trio.current_time() >= ends_at:
                return [*left, *commands[number:]]
            try:
                if not self._take(connection, command):
                    left.append(command)
            except RefusedError as refused:
                connection.reply(command, command.reply(refused.code, refused.remark))
            except RemoteProtocolError as error:
                connection.reply_error(command, error)
        return left

    def _take(self, connection: RemotingConnection, command: RemotingCommand) -> bool:
        """As `pop`, without waiting; returns whether that was possible. Raises RefusedError, RemoteProtocolError."""
        request = pop_request(command)
        left_s, config = self._check_pop(request)
        group = self._groups.get(request.consumer_group)
        if group is None:
            return False  # it may be created
        self._check_group(request.consumer_group, group)
        state = self._pop_log.ready_state()
        if state is None:
            return False
        self._check_waiting_bytes()
        hold = self._new_hold(connection, command, request, left_s)
        taken = self._taker.take_nowait(state, request, config, hold.selection)
        if taken is None:
            return False
        self._finish(hold, request, taken)
        return True

    async def pop(self, connection: RemotingConnection, command: RemotingCommand) -> None:
        """POP_MESSAGE (200050): takes messages, or holds the request until there are some. Raises RefusedError if a
        check fails, RemoteProtocolError if the header is invalid."""
        request = pop_request(command)
        left_s, _ = self._check_pop(request)
        self._check_group(request.consumer_group, await self._groups.find_or_create(request.consumer_group))
        await self._pop(self._new_hold(connection, command, request, left_s), request)

    def _check_pop(self, request: PopMessageRequest) -> tuple[float, TopicConfig]:
        """Checks everything but the group; returns how long the pop may wait, and its topic. Raises RefusedError."""
        left_s = self._left_s(request.born_time, request.poll_time)
        host = self._options.host
        if left_s * 1000 < -LATE_MS:
            raise RefusedError(ResponseCode.POLLING_TIMEOUT, f"the broker[{host}] pop message is timeout too much")
        self._check_readable("pop")
        if request.max_msg_nums > MESSAGE_COUNT_MAX:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER, f"the broker[{host}] pop message's num is greater than 32"
            )
        if not 0 <= request.invisible_time <= INVISIBLE_MS_MAX:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"invisibleTime {request.invisible_time} is not between 0 and {INVISIBLE_MS_MAX}",
            )
        if len(request.attempt_id or "") > ATTEMPT_ID_SIZE_MAX:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"attemptId of {len(request.attempt_id or '')} characters; at most {ATTEMPT_ID_SIZE_MAX} are accepted",
            )
        name_length = len(request.consumer_group) + len(request.topic)
        if name_length > RETRY_NAMES_LENGTH_MAX and not request.order:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"names of group and topic of {name_length} characters: the retry topic has both, and "
                f"{RETRY_NAMES_LENGTH_MAX} are accepted",
            )
        return left_s, self._check_topic(request, ResponseCode.INVALID_PARAMETER)

    def _new_hold(
        self,
        connection: RemotingConnection,
        command: RemotingCommand,
        request: PopMessageRequest | NotificationRequest,
        left_s: float,
    ) -> PopHold:
        """Returns a hold for a request that may have to wait. Raises RefusedError if its filter is invalid."""
        return PopHold(
            connection=connection,
            command=command,
            request=request,
            selection=self._filters.select(request.exp, request.exp_type if request.exp else None, is_registered=False),
            deadline=0.0,
            ends_at=trio.current_time() + left_s,
        )

    async def _pop(self, hold: PopHold, request: PopMessageRequest) -> None:
        """Answers a pop, or holds it. Raises RefusedError."""
        state = await self._pop_log.wait_ready()
        self._check_waiting_bytes()
        config = self._topics.get(request.topic)
        if config is None:
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{request.topic}] not exist, apply first please!")
        try:
            taken = await self._taker.take(state, request, config, hold.selection)
        except (RefusedError, trio.Cancelled):  # another request may have skipped the queue that this one read
            self.holds.wake_next(request)
            raise
        self._finish(hold, request, taken)

    def _check_waiting_bytes(self) -> None:
        if self._waiting_bytes > self._options.pop_waiting_bytes_max:
            raise RefusedError(ResponseCode.SYSTEM_BUSY, f"{REJECT_REMARK} (too many messages wait for the POP log)")

    def _finish(self, hold: PopHold, request: PopMessageRequest, taken: Taken) -> None:
        """Answers a pop when the record of what it took is acknowledged; holds it if it took nothing."""
        if not taken.count:
            code = self._hold_or_code(hold, request, taken)
            if code is not None:
                hold.connection.reply(hold.command, _answer(hold.command, code, request, taken))
                if taken.rest_count:
                    self.holds.wake_next(request)
            return
        if request.order:
            due_ms = taken.pop_time_ms + request.invisible_time
            self.holds.resume_ordered_by(request.topic, request.consumer_group, due_ms)
        if taken.rest_count:
            self.holds.wake_next(request)
        self._waiting_bytes += taken.size
        self._pop_log.call(partial(self._send_taken, hold, request, taken), since=taken.since)

    def _send_taken(self, hold: PopHold, request: PopMessageRequest, taken: Taken, logged: Logged) -> None:
        """Sends popped messages once their record is acknowledged.

        If the record is stored but may be lost, only a broker that no other can replace sends them: at worst they are
        delivered again. Otherwise answers with the failure.
        """
        self._waiting_bytes -= taken.size
        command = hold.command
        if not logged.fault or (logged.status.is_stored and not self._standing.can_be_replaced):
            hold.connection.reply(command, _answer(command, ResponseCode.SUCCESS, request, taken))
        else:
            hold.connection.reply(command, command.reply(logged.status.response_code, logged.fault))

    def _hold_or_code(self, hold: PopHold, request: PopMessageRequest, taken: Taken) -> ResponseCode | None:
        """Holds a pop that found nothing; returns the code of its answer if that is not possible.

        A pop that asks for no messages is not held: it would be woken instead of one that takes them.
        """
        if request.max_msg_nums <= 0 or not self._may_wait(hold, request.poll_time):
            return ResponseCode.POLLING_TIMEOUT
        return None if self._hold(hold, taken.again_ms) else ResponseCode.POLLING_FULL

    def _hold(self, hold: PopHold, again_ms: int | None) -> bool:
        """Holds a request until it is woken, until `again_ms` (ms since the epoch), or until its time ends. Returns
        False if a limit on held requests is reached or the connection is closed."""
        hold.deadline = hold.ends_at
        if again_ms is not None:
            hold.deadline = min(hold.ends_at, self.holds.time_of(again_ms))
        # Fields and filter expression may be long. Nothing reads them after this point.
        asked = hold.command
        hold.command = RemotingCommand(asked.code, asked.opaque, asked.flag, serialize_type=asked.serialize_type)
        hold.request = msgspec.structs.replace(hold.request, exp=None, exp_type=None)
        return self.holds.add(hold)

    def _may_wait(self, hold: PopHold, poll_time_ms: int) -> bool:
        return (
            poll_time_ms > 0
            and trio.current_time() < hold.ends_at
            and self._options.long_polling_enable
            and not hold.command.flag & FLAG_ONEWAY
        )

    async def _resume(self, hold: PopHold) -> None:
        """Tries again for a request that was woken or reached its deadline."""
        request = hold.request
        try:
            if isinstance(request, PopMessageRequest):
                await self._pop(hold, request)
            else:
                await self._notify(hold, request)
        except RefusedError as refused:
            hold.connection.reply(hold.command, hold.command.reply(refused.code, refused.remark))

    # ---- the other requests

    async def peek(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """PEEK_MESSAGE (200052): answers with the messages that a pop without a filter would take, but leaves them in
        their queues; PULL_NOT_FOUND if there are none."""
        request = parse_header(PeekMessageRequest, command.ext_fields)
        self._check_readable("peek")
        config = await self._check(request, ResponseCode.INVALID_PARAMETER)
        state = await self._pop_log.wait_ready()
        bodies: list[bytes] = []
        rest_count = found_count = 0
        count_max = min(request.max_msg_nums, MESSAGE_COUNT_MAX)
        for source in self._taker.sources(request, config, is_order=False):
            begin, end = self._taker.position(state, request.consumer_group, source)
            if found_count < count_max and begin < end:
                with refused_if_unreadable():
                    read = await self._reader.read(
                        self._store.queues.get(source.topic, source.queue_id),
                        begin,
                        message_count_max=count_max - found_count,
                        message_bytes_max=self._options.transfer_hot_bytes_max,
                        tags_codes=None,
                    )
                bodies.append(read.body)
                found_count += read.message_count
                begin = read.next_offset
            rest_count += max(0, end - begin)
        header = PopMessageResponse(pop_time=self._wall_clock_ms(), invisible_time=0, revive_qid=0, rest_num=rest_count)
        code, remark = (ResponseCode.SUCCESS, _FOUND) if found_count else (ResponseCode.PULL_NOT_FOUND, _NOTHING)
        return command.reply(code, remark, header.to_ext_fields(), b"".join(bodies))

    async def notify(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        """NOTIFICATION (200054): answers when there is a message to pop, or when the wait ends."""
        request = parse_header(NotificationRequest, command.ext_fields)
        self._check_readable("peeking")
        await self._check(request)
        left_s = self._left_s(request.born_time, request.poll_time)
        await self._notify(self._new_hold(connection, command, request, left_s), request)
        return None

    async def _notify(self, hold: PopHold, request: NotificationRequest) -> None:
        state = await self._pop_log.wait_ready()
        config = self._topics.get(request.topic)
        has_messages, blocked_until_ms = False, None
        if config is not None:
            has_messages, blocked_until_ms = self._look(state, request, config)
        is_full = False
        if not has_messages and self._may_wait(hold, request.poll_time):
            if self._hold(hold, blocked_until_ms):
                return
            is_full = True
        header: Header = NotificationResponse(has_msg=has_messages, polling_full=is_full)
        hold.connection.reply(hold.command, hold.command.reply(ResponseCode.SUCCESS, None, header.to_ext_fields()))

    def _look(self, state: PopState, request: NotificationRequest, config: TopicConfig) -> tuple[bool, int | None]:
        """Returns whether there are messages to pop, and if not, when the first blocked queue is free (ms since the
        epoch); None if no queue is blocked."""
        now_ms = self._wall_clock_ms()
        blocked_until_ms = None
        for source in self._taker.sources(request, config, is_order=request.order):
            queue = state.get((request.consumer_group, source.topic, source.queue_id))
            if request.order and queue is not None and queue.order is not None:
                order = queue.order
                due_ms = None if order.is_same_attempt(request.attempt_id) else order.due_ms(now_ms)
                if due_ms is not None:
                    blocked_until_ms = min(blocked_until_ms or due_ms, due_ms)
                    continue
            begin, end = self._taker.position(state, request.consumer_group, source)
            if begin < end:
                return True, None
        return False, blocked_until_ms

    async def polling_info(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """POLLING_INFO (200055): answers with how many requests of a group wait for a queue."""
        request = parse_header(PollingInfoRequest, command.ext_fields)
        self._check_readable("peeking")
        await self._check(request)
        count = self.holds.count(request.topic, request.consumer_group, request.queue_id)
        header = PollingInfoResponse(polling_num=count)
        return command.reply(ResponseCode.SUCCESS, None, header.to_ext_fields())


def _answer(command: RemotingCommand, code: ResponseCode, request: PopMessageRequest, taken: Taken) -> RemotingCommand:
    header = PopMessageResponse(
        pop_time=taken.pop_time_ms,
        invisible_time=request.invisible_time,
        revive_qid=ORDER_QUEUE if request.order else 0,
        rest_num=taken.rest_count,
        start_offset_info=taken.info.start_offset_info,
        msg_offset_info=taken.info.msg_offset_info,
        order_count_info=taken.info.order_count_info,
    )
    remark = _FOUND if code is ResponseCode.SUCCESS else _NOTHING
    return command.reply(code, remark, header.to_ext_fields(), b"".join(taken.bodies))
