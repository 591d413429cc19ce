"""Writes op messages, which say that half messages are ended: several ends, if they come together, in one record.

Whoever waits for the answer to a rollback gets it once that record is in the log. For others it is written a moment
later (RocketMQ 5.x: up to 3 s); what a crash takes is asked about once more. Source: TransactionalOpBatchService.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from ha.broker.half_queue import OP_TAG, encode_op
from ha.broker.options import BrokerOptions
from ha.broker.put import PutService
from ha.broker.put_request import PutRequest
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol.codes import PutStatus, ResponseCode
from ha.protocol.properties import TAGS, WAIT, encode_properties
from ha.protocol.record import Message, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import OP_TOPIC

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection

logger = logging.getLogger(__name__)

LINGER_S = 0.1
OFFSET_COUNT_MAX = 256
"""Half messages of one op message."""
PENDING_COUNT_MAX = 65_536
"""Ends that wait to be written: of further ones a later process may ask again."""
PAUSE_S = 1.0

_PROPERTIES = encode_properties({WAIT: "true", TAGS: OP_TAG})


class OpWriter:
    """Writes what `add` is told, in order. `serve` while the broker is a master, `write_all` at its end."""

    def __init__(self, put_service: PutService, options: BrokerOptions, *, wall_clock_ms: Callable[[], int]) -> None:
        self._put = put_service
        self._wall_clock_ms = wall_clock_ms
        self._host = encode_host(options.host, options.port)
        self._pending: dict[int, None] = {}
        self._waiting: list[tuple[RemotingConnection, RemotingCommand]] = []
        self._some = trio.Event()
        self._urgent = trio.Event()
        self._log_limiter = LogRateLimiter()

    def add(self, offsets: Sequence[int], waiting: tuple[RemotingConnection, RemotingCommand] | None = None) -> None:
        """Have it written that the half messages at `offsets` are ended; then `waiting` gets its answer."""
        self._pending.update(dict.fromkeys(offsets))
        while len(self._pending) > PENDING_COUNT_MAX:
            del self._pending[next(iter(self._pending))]
        self._some.set()
        if waiting is not None:
            self._waiting.append(waiting)
        if waiting is not None or len(self._pending) >= OFFSET_COUNT_MAX:
            self._urgent.set()

    def forget(self, code: ResponseCode, remark: str) -> None:
        """Write nothing of it: whoever waits is answered with `code`. The next master asks about what is open there."""
        self._pending.clear()
        waiting, self._waiting = self._waiting, []
        for connection, command in waiting:
            connection.reply(command, command.reply(code, remark))

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write, until cancelled."""
        task_status.started()
        while True:
            await self._some.wait()
            with trio.move_on_after(LINGER_S):
                await self._urgent.wait()
            if not await self.write_all():
                await trio.sleep(PAUSE_S)

    async def write_all(self) -> bool:
        """Write what is to be written; False if that can't be done now, which those who wait are told."""
        while self._pending or self._waiting:
            self._urgent = trio.Event()
            waiting = list(self._waiting)
            pending = list(self._pending)
            puts = [
                PutRequest(messages=(self._message(pending[at : at + OFFSET_COUNT_MAX]),), waits=False)
                for at in range(0, len(pending), OFFSET_COUNT_MAX)
            ]
            await self._put.settle(puts)
            del self._waiting[: len(waiting)]
            failed = next((put for put in puts if put.status is not PutStatus.PUT_OK), None)
            for connection, command in waiting:
                answer = command.reply(ResponseCode.SUCCESS)
                if failed is not None:
                    answer = command.reply(failed.status.response_code, failed.remark)
                connection.reply(command, answer)
            if failed is not None:
                times = self._log_limiter.admit(failed.remark, trio.current_time())
                if times:
                    logger.error("transaction.op_not_put reason=%s times=%d", failed.remark, times)
                return False
            for offset in pending:
                self._pending.pop(offset, None)
        self._some = trio.Event()
        return True

    def _message(self, offsets: Sequence[int]) -> Message:
        return Message(
            OP_TOPIC,
            0,
            encode_op(offsets),
            _PROPERTIES,
            born_timestamp_ms=self._wall_clock_ms(),
            born_host=self._host,
        )
