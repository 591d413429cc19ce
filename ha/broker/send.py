"""Requests that put messages: 10 SEND_MESSAGE, 310 SEND_MESSAGE_V2, 320 SEND_BATCH_MESSAGE.

`SendProcessor.take` checks the sends that one read from a connection delivered (a chunk), with send_message.py. It
queues them for the put service, which appends those of all connections served in one turn of the poller (ha/poller.py)
together. Sends that have to wait before they can be checked (for the log, for room among the connection's sends in
flight, or for their topic to be created) are left to `handle`, in the task of the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from ha.broker.core import BrokerCore
from ha.broker.put_request import PutRequest
from ha.broker.queue_locks import QueueLocks
from ha.broker.refused import REJECT_REMARK, RefusedError
from ha.broker.send_message import MessageMaker, Send, encode_peer
from ha.errors import RemoteProtocolError
from ha.histogram import Histogram
from ha.protocol.codes import PutStatus, RequestCode, ResponseCode
from ha.protocol.headers import SendMessageResponse
from ha.protocol.message_id import encode_message_ids
from ha.protocol.record import encode_host
from ha.protocol.remoting import (
    FLAG_ONEWAY,
    SERIALIZE_JSON,
    CommandTemplate,
    RemotingCommand,
    encode_command,
    json_text,
)
from ha.protocol.request_parser import SendCommand, send_request
from ha.remoting import RemotingConnection
from ha.store.record_maker import AppendResult

SEND_CODES = frozenset({RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE})
_GATHERED_FROM = 4
"""Minimum number of sends in flight on other connections at which, outside a turn of the poller, the sends of several
connections are appended together in the next step of the event loop. With one append per connection, the appends would
dominate the cost."""


class _Chunk:
    """The sends that were read from a connection at once, at time `began` (Trio's clock). They count as in flight until
    they are answered."""

    __slots__ = ("_began", "_connection", "_processor")

    def __init__(self, processor: SendProcessor, connection: RemotingConnection, count: int, began: float) -> None:
        self._processor = processor
        self._connection = connection
        self._began = began
        processor._in_flight += count
        connection.in_flight += count

    def on_done(self, done: Sequence[Send]) -> None:
        """Answers `done`, some or all sends of the chunk."""
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
    """Answers send requests: checks them, and puts their messages."""

    def __init__(self, core: BrokerCore, queue_locks: QueueLocks) -> None:
        options = core.options
        self._put = core.puts
        self._poller = core.world.poller
        self._topics = core.tables.topics
        self._options = options
        self._standing = core.standing
        self._maker = MessageMaker(core, queue_locks)
        self._in_flight = 0
        self.ack_times = Histogram()
        """Seconds from the arrival of a send to its response, for sends that reached the put service, stored or not"""
        self.on_answered: Callable[[float, float, Sequence[PutRequest]], None] | None = None
        """Called when sends are answered together, with the time of their arrival, the current time (both Trio's
        clock), and their puts; None: not called"""
        self.not_master_count = self.flow_control_count = 0
        """`not_master_count`: number of sends refused because this broker may not store messages; `flow_control_count`:
        because too many are in flight"""
        self._answered = trio.lowlevel.ParkingLot()
        self._store_host = encode_host(options.host, options.port)
        self._usual_answer = self._make_usual_answer()

    @property
    def in_flight_count(self) -> int:
        """Number of sends that are queued for the log, or wait for a flush or a slave."""
        return self._in_flight

    async def wait_all_answered(self) -> None:
        """Waits until no send is in flight."""
        while self._in_flight:
            await self._answered.park()

    def take(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """Checks the sends of one chunk, and queues them for the log or refuses them; returns those that have to wait,
        for `handle`.

        Each response is sent when the outcome of its send is known, which may be after this returns.
        """
        options, standing = self._options, self._standing
        refusal = standing.why_not_stored()
        if refusal:
            self.not_master_count += len(commands)
            self._refuse_all(connection, commands, f"{REJECT_REMARK} ({refusal})", standing.refusal_code)
            return []
        if self._in_flight + len(commands) > options.sends_in_flight_max:
            # Clients retry these, as with RocketMQ's flow control.
            self.flow_control_count += len(commands)
            remark = f"{REJECT_REMARK} ({self._in_flight} sends wait for a flush or a slave)"
            self._refuse_all(connection, commands, remark)
            return []
        if connection.in_flight >= options.sends_in_flight_per_connection_max or self._put.is_blocked:
            return commands  # the connection is not read further meanwhile
        puts: list[Send] = []
        refusals: list[bytes] = []
        waiting: list[RemotingCommand] = []
        born_host = encode_peer(connection.peer)
        find_topic, make = self._topics.get, self._maker.make
        for command in commands:
            try:
                request = command.request if type(command) is SendCommand else send_request(command)
                config = find_topic(request.topic)
                if config is None or request.topic[0] == "%":
                    waiting.append(command)  # the topic has to be created, or belongs to a group
                else:
                    puts.append(make(command, request, config, born_host))
            except RefusedError as refused:
                self._refuse(command, refused.code, refused.remark, refusals)
            except RemoteProtocolError as error:
                self._refuse(command, ResponseCode.SYSTEM_ERROR, str(error), refusals)
        self._put_chunk(connection, puts, refusals)
        return waiting

    async def handle(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> None:
        """Puts the sends that `take` returned, after waiting for the log, for room among the connection's sends in
        flight, and for topics and groups.

        Before it waits for the topic or group of a send, it puts the sends before this one and sends the responses that
        are ready.
        """
        await self._put.wait_unblocked()
        while connection.in_flight >= self._options.sends_in_flight_per_connection_max and not connection.is_closed:
            await self._answered.park()
        puts: list[Send] = []
        refusals: list[bytes] = []
        born_host = encode_peer(connection.peer)
        for command in self.take(connection, commands):
            try:
                request = command.request if type(command) is SendCommand else send_request(command)
                if self._topics.get(request.topic) is None or request.topic[0] == "%":  # its group may lack a topic
                    self._put_chunk(connection, puts, refusals)
                    puts, refusals = [], []
                    connection.flush()
                puts.append(await self._maker.prepare(command, request, born_host))
            except RefusedError as refused:
                self._refuse(command, refused.code, refused.remark, refusals)
            except RemoteProtocolError as error:
                self._refuse(command, ResponseCode.SYSTEM_ERROR, str(error), refusals)
        self._put_chunk(connection, puts, refusals)

    def _put_chunk(self, connection: RemotingConnection, puts: Sequence[Send], refusals: Sequence[bytes]) -> None:
        """Sends the refusals, and puts the other sends together."""
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
            frames.append(encode_command(command.reply(code, remark, dict(self._maker.properties.answered))))

    def _answer(self, connection: RemotingConnection, puts: Sequence[Send]) -> None:
        """Answers finished `puts`, whose frames are sent together."""
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
                and put.recall_handle is None
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
        if connection.in_flight:  # more answers of this turn follow: send them with one system call
            connection.send_soon(burst)
        else:
            connection.send_now(burst)

    def _answer_to(self, put: Send) -> RemotingCommand:
        """Returns the answer to a put that is stored."""
        results = put.results
        header = SendMessageResponse(
            msg_id=encode_message_ids(self._store_host, [result.physical_offset for result in results]),
            queue_id=put.queue_id,
            queue_offset=results[0].queue_offset,
            transaction_id=put.transaction_id,
            region_id=self._options.region_id,
            trace_on=self._options.trace_on,
            recall_handle=put.recall_handle,
        )
        remark = None if put.status is PutStatus.PUT_OK else put.remark
        return put.command.reply(put.status.response_code, remark, header.to_ext_fields())

    def _make_usual_answer(self) -> CommandTemplate:
        """Returns the template of the answer to one message with PUT_OK.

        Its values: physical offset, queue id, queue offset, transaction id, opaque.
        """
        marked = Send(
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
