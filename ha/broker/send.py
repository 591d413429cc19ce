"""Requests that put messages: 10 SEND_MESSAGE, 310 SEND_MESSAGE_V2, 320 SEND_BATCH_MESSAGE.

`SendProcessor.take` checks the sends of one chunk and queues them for the put service, which appends those of all
connections that are served in one turn of the poller (ha/poller.py) at once. What has to wait before it can be checked,
for the log, for room among the connection's sends in flight or for its topic to be created, is left to `handle`, in
the task of the connection. The checks run in RocketMQ's order (remoting §3, SendMessageProcessor and
AbstractSendMessageProcessor.msgCheck) with its codes (those of 5.x) and remarks; a remark may say more than RocketMQ's,
never less.

Delayed messages and half messages are stored in another topic first (detour.py). Refused rather than stored where
nobody would deliver them: timer messages (1), half messages that are also delayed (13), which RocketMQ takes and
discards when they are due, and what has transaction bits without being a half message (16).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

import trio

from ha.broker.core import BrokerCore
from ha.broker.detour import TIMER_PROPERTIES, delay_level, is_half, store_delayed, store_half
from ha.broker.put_request import PutRequest
from ha.broker.refused import RefusedError
from ha.broker.stored_properties import StoredProperties, join
from ha.broker.topics import NO_SEND_TOPICS, TOPIC_LENGTH_MAX, topic_fault
from ha.errors import RemoteProtocolError
from ha.histogram import Histogram
from ha.protocol.batch import decode_batch
from ha.protocol.bodies import TopicConfig
from ha.protocol.codes import Permission, PutStatus, RequestCode, ResponseCode, SysFlag
from ha.protocol.headers import SendMessageRequest, SendMessageResponse
from ha.protocol.message_id import encode_message_ids
from ha.protocol.properties import decode_properties
from ha.protocol.record import RECORD_SIZE_MIN, Message, encode_host
from ha.protocol.remoting import (
    FLAG_ONEWAY,
    SERIALIZE_JSON,
    CommandTemplate,
    RemotingCommand,
    encode_command,
    json_text,
)
from ha.protocol.send_parser import SendCommand, send_request
from ha.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX
from ha.store.record_maker import RECORD_OVERHEAD_MAX, AppendResult

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection

SEND_CODES = frozenset({RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE})
REJECT_REMARK = "[REJECTREQUEST]system busy, start flow control for a while"
APPLY_TOPIC_REMARK = "topic[{}] not exist, apply first please!"
_BATCH = int(RequestCode.SEND_BATCH_MESSAGE)  # asking an enum for a member takes longer than comparing it
_GATHERED_FROM = 4
"""Outside a poller's turn: number of sends that other connections have in flight from which on the put service gathers
those of several connections for one step of the event loop. An append for each would cost more than all else."""
V3_4_9 = 121
"""Client version from which a send says its own maxReconsumeTimes."""


class _Send(PutRequest, kw_only=True):
    """A put with what its answer needs to know about the request."""

    command: RemotingCommand
    queue_id: int
    transaction_id: str | None


class _Chunk:
    """The sends of one chunk of a connection, which came at `began`: in flight until each is answered."""

    __slots__ = ("_began", "_connection", "_processor")

    def __init__(self, processor: SendProcessor, connection: RemotingConnection, count: int, began: float) -> None:
        self._processor = processor
        self._connection = connection
        self._began = began
        processor._in_flight += count
        connection.in_flight += count

    def on_done(self, done: Sequence[_Send]) -> None:
        """Answer `done`, which are some or all of the chunk."""
        processor = self._processor
        processor._in_flight -= len(done)
        self._connection.in_flight -= len(done)
        if processor._answered:
            processor._answered.unpark_all()
        processor._answer(self._connection, done)
        now = trio.current_time()
        processor.ack_times.observe(now - self._began, len(done))
        if processor.on_answered is not None:
            processor.on_answered(self._began, now, done)


class SendProcessor:
    """Answers sends."""

    def __init__(self, core: BrokerCore) -> None:
        options = core.options
        self._put = core.puts
        self._poller = core.world.poller
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._options = options
        self._standing = core.standing
        self._properties = StoredProperties(options, unique_id=core.world.unique_id)
        self._delay_level_count = len(core.store.options.delay_levels_ms)
        self._next_queue = count()
        self._in_flight = 0
        self.ack_times = Histogram()
        """From a send's arrival here until its answer leaves, for each send that was put"""
        self.on_answered: Callable[[float, float, Sequence[PutRequest]], None] | None = None
        """Told of sends that were answered together: when they came, now (trio's clock), and the puts"""
        self.not_master_count = self.flow_control_count = 0
        """Sends refused because this broker may not store now, and because too many are in flight"""
        self._answered = trio.lowlevel.ParkingLot()
        # A batch is stored as a whole of bounded size, so a larger number of messages could not be stored anyway.
        self._batch_count_max = (options.message_size_max + RECORD_OVERHEAD_MAX) // RECORD_SIZE_MIN
        self._is_writable = bool(options.permission & Permission.WRITE)
        self._store_host = encode_host(options.host, options.port)
        self._usual_answer = self._make_usual_answer()

    @property
    def in_flight_count(self) -> int:
        """Sends that are on their way into the log, or wait for a flush or a slave."""
        return self._in_flight

    async def wait_all_answered(self) -> None:
        """Wait until no send is in flight, neither on its way into the log nor waiting for a flush or a slave."""
        while self._in_flight:
            await self._answered.park()

    def take(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """Check the sends of one chunk, and put or refuse them; return those that are for `handle`.

        Answers go out as they become known, also after this returns.
        """
        options, standing = self._options, self._standing
        refusal = standing.why_not_stored()
        if refusal:
            self.not_master_count += len(commands)
            self._refuse_all(connection, commands, f"{REJECT_REMARK} ({refusal})", standing.refusal_code)
            return []
        if self._in_flight + len(commands) > options.sends_in_flight_max:
            # Those who ask now shall come back, as RocketMQ lets them.
            self.flow_control_count += len(commands)
            remark = f"{REJECT_REMARK} ({self._in_flight} sends wait for a flush or a slave)"
            self._refuse_all(connection, commands, remark)
            return []
        if connection.in_flight >= options.sends_in_flight_per_connection_max or self._put.is_blocked:
            return commands  # the connection is read no further, and no more messages gather
        puts: list[_Send] = []
        refusals: list[bytes] = []
        waiting: list[RemotingCommand] = []
        born_host = encode_peer(connection.peer)
        find_topic, to_put = self._topics.get, self._to_put
        for command in commands:
            try:
                request = command.request if type(command) is SendCommand else send_request(command)
                config = find_topic(request.topic)
                if config is None or request.topic[0] == "%":
                    waiting.append(command)  # the topic must be created, or looked at more closely
                else:
                    puts.append(to_put(command, request, config, born_host))
            except RefusedError as refused:
                self._refuse(command, refused.code, refused.remark, refusals)
            except RemoteProtocolError as error:
                self._refuse(command, ResponseCode.SYSTEM_ERROR, str(error), refusals)
        self._put_chunk(connection, puts, refusals)
        return waiting

    async def handle(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> None:
        """Put the sends that `take` has left, after waiting for the log, for sends in flight, and for topics."""
        await self._put.wait_unblocked()
        while connection.in_flight >= self._options.sends_in_flight_per_connection_max and not connection.is_closed:
            await self._answered.park()
        puts: list[_Send] = []
        refusals: list[bytes] = []
        born_host = encode_peer(connection.peer)
        for command in self.take(connection, commands):
            try:
                request = command.request if type(command) is SendCommand else send_request(command)
                puts.append(await self._prepare(command, request, born_host))
            except RefusedError as refused:
                self._refuse(command, refused.code, refused.remark, refusals)
            except RemoteProtocolError as error:
                self._refuse(command, ResponseCode.SYSTEM_ERROR, str(error), refusals)
        self._put_chunk(connection, puts, refusals)

    def _put_chunk(self, connection: RemotingConnection, puts: Sequence[_Send], refusals: Sequence[bytes]) -> None:
        """Send refusals, and put the rest of what was checked together."""
        if refusals:
            connection.send_soon(b"".join(refusals))
        if not puts:
            return
        in_flight_elsewhere = self._in_flight - connection.in_flight
        on_done = _Chunk(self, connection, len(puts), connection.received_at).on_done
        for put in puts:
            put.on_done = on_done
        service, poller = self._put, self._poller
        service.enqueue(puts)
        if poller is not None and poller.is_in_turn:
            poller.at_turn_end(service.drain, is_early=True)
        elif in_flight_elsewhere >= _GATHERED_FROM:
            service.drain_soon()
        else:
            service.drain()

    async def _prepare(self, command: RemotingCommand, request: SendMessageRequest, born_host: bytes) -> _Send:
        """Check a send to a topic that has to be created, or is a group's."""
        topic = request.topic
        fault = topic_fault(topic)
        if fault:
            raise RefusedError(ResponseCode.INVALID_PARAMETER, fault)
        self._check_may_send(topic, self._topics.get(topic))
        created: TopicConfig | str
        if topic.startswith(RETRY_PREFIX) and self._topics.get(topic) is None:
            created = await self._topics.ensure(topic, 1)
        else:
            created = await self._topics.create_on_send(topic, request.default_topic, request.default_topic_queue_nums)
        if isinstance(created, str):
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"{APPLY_TOPIC_REMARK.format(topic)} {created}")
        if topic.startswith(RETRY_PREFIX) and not (request.batch or command.code == _BATCH):
            request, created = await self._route_retry(command, request, created)
        return self._to_put(command, request, created, born_host)

    async def _route_retry(
        self, command: RemotingCommand, request: SendMessageRequest, config: TopicConfig
    ) -> tuple[SendMessageRequest, TopicConfig]:
        """Send a message that was retried too often to the dead letters of its group instead."""
        name = request.topic.removeprefix(RETRY_PREFIX)
        group = await self._groups.find_or_create(name)
        if group is None:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group not exist, {name} (auto-creation is off)",
            )
        times_max = group.retry_max_times
        if command.version >= V3_4_9 and request.max_reconsume_times is not None:
            times_max = request.max_reconsume_times
        if request.reconsume_times <= times_max:
            return request, config
        dead_letters = await self._topics.ensure(DLQ_PREFIX + name, 1)
        if isinstance(dead_letters, str):
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"topic[{DLQ_PREFIX}{name}] not exist: {dead_letters}")
        properties = decode_properties(request.properties.encode("utf-8", "replace"))
        properties["DELAY"] = "0"
        request.topic = dead_letters.topic_name
        request.queue_id = 0
        request.properties = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
        return request, dead_letters

    def _check_may_send(self, topic: str, config: TopicConfig | None) -> None:
        if not self._is_writable and config is not None and config.order:
            raise RefusedError(
                ResponseCode.NO_PERMISSION, f"the broker[{self._options.host}] sending message is forbidden"
            )
        if topic in NO_SEND_TOPICS:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.")

    def _to_put(
        self, command: RemotingCommand, request: SendMessageRequest, config: TopicConfig, born_host: bytes
    ) -> _Send:
        topic = request.topic
        if not self._is_writable or topic in NO_SEND_TOPICS:
            self._check_may_send(topic, config)
        queue_id = request.queue_id
        if queue_id < 0:
            if not config.write_queue_nums:
                raise RefusedError(ResponseCode.INVALID_PARAMETER, f"topic[{topic}] has no queue to write to")
            queue_id = next(self._next_queue) % config.write_queue_nums
        elif queue_id >= config.write_queue_nums and queue_id >= config.read_queue_nums:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{queue_id}] is illegal, topic[{topic}] has {config.write_queue_nums} write and "
                f"{config.read_queue_nums} read queues, producer group: {request.producer_group}",
            )
        body = command.body
        if not body:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, "the request has no body")
        if len(body) > self._options.message_size_max:
            raise RefusedError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the message is illegal: body of {len(body)} bytes, maxMessageSize={self._options.message_size_max}",
            )
        is_batch = request.batch or command.code == _BATCH
        text = request.properties
        usual = None if is_batch else self._properties.usual(text)
        # Worth decoding them: the message may have to be stored elsewhere first.
        may_wait_elsewhere = usual is None and ("DELAY\x01" in text or "TRAN_MSG\x01" in text or "TIMER_D" in text)
        strange = request.sys_flag & _SYS_FLAGS_STRANGE
        if strange and (is_batch or not may_wait_elsewhere or strange != SysFlag.TRANSACTION_PREPARED):
            raise RefusedError(*_flag_fault(request.sys_flag))
        transaction_id: str | None
        if usual is None:
            properties, waits, transaction_id = self._properties.of(text, is_batch=is_batch)
        else:
            properties, transaction_id = usual
            waits = True
        messages: Sequence[Message]
        if is_batch:
            if topic.startswith(RETRY_PREFIX) or len(topic) > TOPIC_LENGTH_MAX:
                raise RefusedError(
                    ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry or long topics: {topic}"
                )
            if may_wait_elsewhere:
                _check_batch(properties)
            sys_flag, born_timestamp, times = request.sys_flag, request.born_timestamp, request.reconsume_times
            messages = [
                Message(topic, queue_id, part, join(own, properties), flag, sys_flag, born_timestamp, born_host, times)
                for flag, part, own in decode_batch(body, count_max=self._batch_count_max)
            ]
        else:
            message = Message(
                topic,
                queue_id,
                body,
                properties,
                request.flag,
                request.sys_flag,
                request.born_timestamp,
                born_host,
                request.reconsume_times,
            )
            messages = (message,)
            if may_wait_elsewhere:
                self._take_detour(message)
        command.body = b""  # the message holds it until it is stored, the answer doesn't need it
        return _Send(
            messages=messages,
            is_batch=is_batch,
            waits=waits,
            command=command,
            queue_id=queue_id,
            transaction_id=transaction_id,
        )

    def _take_detour(self, message: Message) -> None:
        """Redirect a delayed message or a half message to the system topic that keeps it first."""
        properties = decode_properties(message.properties)
        level = _delay_level(properties)
        is_retry = message.reconsume_times > 0 and level > 0  # of clients before 4.6.1, which keep TRAN_MSG
        if is_half(properties) and not is_retry:
            if self._options.reject_transactions:
                raise RefusedError(
                    ResponseCode.NO_PERMISSION,
                    f"the broker[{self._options.host}] sending transaction message is forbidden",
                )
            if level > 0:
                raise RefusedError(
                    ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: TRAN_MSG with DELAY={properties['DELAY']}"
                )
            _check_no_timer(properties)
            store_half(message, properties)
            return
        if message.sys_flag & SysFlag.TRANSACTION_MASK and not is_retry:
            raise RefusedError(*_flag_fault(message.sys_flag))
        message.sys_flag &= ~SysFlag.TRANSACTION_MASK
        if level > 0:
            store_delayed(message, properties, level, self._delay_level_count)
        else:
            _check_no_timer(properties)

    def _refuse_all(
        self,
        connection: RemotingConnection,
        commands: Sequence[RemotingCommand],
        remark: str,
        code: ResponseCode = ResponseCode.SYSTEM_BUSY,
    ) -> None:
        refusals: list[bytes] = []
        for command in commands:
            self._refuse(command, code, remark, refusals)
        if refusals:
            connection.send_soon(b"".join(refusals))

    def _refuse(self, command: RemotingCommand, code: ResponseCode, remark: str, frames: list[bytes]) -> None:
        if not command.flag & FLAG_ONEWAY:
            frames.append(encode_command(command.reply(code, remark, dict(self._properties.told))))

    def _answer(self, connection: RemotingConnection, puts: Sequence[_Send]) -> None:
        """Answer `puts`, all done, with one burst of frames."""
        if connection.is_closed:
            return
        frames: list[bytes] = []
        ok, encode_usual = PutStatus.PUT_OK, self._usual_answer.encode
        for put in puts:
            command = put.command
            if command.flag & FLAG_ONEWAY:
                continue
            status, results, transaction_id = put.status, put.results, put.transaction_id
            if (
                status is ok
                and len(results) == 1
                and transaction_id is not None
                and command.serialize_type == SERIALIZE_JSON
            ):
                result = results[0]
                frames.append(
                    encode_usual(
                        result.physical_offset,
                        put.queue_id,
                        result.queue_offset,
                        json_text(transaction_id),
                        command.opaque,
                    )
                )
            elif status.is_stored:
                frames.append(encode_command(self._answer_to(put)))
            else:
                self._refuse(command, status.response_code, put.remark, frames)
        if not frames:
            return
        burst = b"".join(frames) if len(frames) > 1 else frames[0]
        if connection.in_flight:  # answers of the same turn leave with one system call
            connection.send_soon(burst)
        else:
            connection.send_now(burst)

    def _answer_to(self, put: _Send) -> RemotingCommand:
        """The answer to any put that is stored."""
        results = put.results
        header = SendMessageResponse(
            msg_id=encode_message_ids(self._store_host, [result.physical_offset for result in results]),
            queue_id=put.queue_id,
            queue_offset=results[0].queue_offset,
            transaction_id=put.transaction_id,
            region_id=self._options.region_id,
            trace_on=self._options.trace_on,
        )
        remark = None if put.status is PutStatus.PUT_OK else put.remark
        return put.command.reply(put.status.response_code, remark, header.to_ext_fields())

    def _make_usual_answer(self) -> CommandTemplate:
        """The template of the answer to one message that is stored as it should be: its values are the physical offset,
        queue id, queue offset, transaction id and opaque."""
        marked = _Send(
            messages=(),
            command=RemotingCommand(RequestCode.SEND_MESSAGE_V2, opaque=2_000_000_001),
            queue_id=2_000_000_002,
            transaction_id="the transaction id",
            status=PutStatus.PUT_OK,
            results=(AppendResult(PutStatus.PUT_OK, 0x0123456789ABCDEF, queue_offset=2_000_000_000_000_000_003),),
        )
        marks = [
            (b"0123456789ABCDEF", b"%016X"),
            (b"2000000002", b"%d"),
            (b"2000000000000000003", b"%d"),
            (b'"the transaction id"', b"%b"),
            (b"2000000001", b"%d"),
        ]
        return CommandTemplate(self._answer_to(marked), marks)


_SYS_FLAGS_STRANGE = ~(
    SysFlag.COMPRESSED
    | SysFlag.MULTI_TAGS
    | SysFlag.BORNHOST_V6
    | SysFlag.STOREHOST_V6
    | SysFlag.COMPRESSION_TYPE_MASK
    | ~0x7FF
)


def _flag_fault(sys_flag: int) -> tuple[ResponseCode, str]:
    if sys_flag & SysFlag.TRANSACTION_MASK:
        return (
            ResponseCode.NO_PERMISSION,
            f"sending transaction message is forbidden: sysFlag {sys_flag:#x}, no TRAN_MSG",
        )
    return ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: sysFlag {sys_flag:#x} marks an inner batch"


def _check_batch(raw: bytes) -> None:
    """A batch is stored as one whole, where it was sent to: refuse one that should not be, by its own properties."""
    properties = decode_properties(raw)
    if is_half(properties):
        raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, "the message is illegal: a batch with TRAN_MSG")
    if _delay_level(properties) > 0:
        raise RefusedError(
            ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: a batch with DELAY={properties['DELAY']}"
        )
    _check_no_timer(properties)


def _delay_level(properties: dict[str, str]) -> int:
    try:
        return delay_level(properties)
    except ValueError as error:
        raise RefusedError(
            ResponseCode.SYSTEM_ERROR, f"java.lang.NumberFormatException: {error}, the property DELAY"
        ) from None


def _check_no_timer(properties: dict[str, str]) -> None:
    if any(name in properties for name in TIMER_PROPERTIES):
        raise RefusedError(
            ResponseCode.SYSTEM_ERROR,
            "accurate timer message is not enabled, timerWheelEnable is false: timer messages are not served here",
        )


def encode_peer(peer: tuple[str, int]) -> bytes:
    """Return the sender's address as records encode it."""
    host, port = peer
    try:
        return encode_host(host, port)
    except ValueError:  # a stream without an address: in memory, or already gone
        return encode_host("127.0.0.1", port)
