"""Writes op messages, which record which half messages have ended. Half messages that end at about the same time share
one op message.

A rollback that has to be answered is written at once, and answered when its op message is in the log. Other ends are
written LINGER_S after the first of them (RocketMQ 5.x: at most 3 s), or as soon as OFFSET_COUNT_MAX are pending. Half
messages whose op message is lost in a crash are checked once more. Source: TransactionalOpBatchService.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from ha.broker.core import BrokerCore
from ha.broker.half_queue import OP_TAG, encode_op
from ha.broker.limited_log import LimitedLog
from ha.broker.put_request import PutRequest
from ha.protocol.codes import PutStatus, ResponseCode
from ha.protocol.properties import TAGS, WAIT, encode_properties
from ha.protocol.record import Message
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import OP_TOPIC
from ha.remoting import RemotingConnection

logger = logging.getLogger(__name__)

LINGER_S = 0.1
"""Maximum time in seconds that an ended half message waits for others to share its op message."""
OFFSET_COUNT_MAX = 256
"""Maximum number of half messages per op message."""
PENDING_COUNT_MAX = 65_536
"""Maximum number of ended half messages that wait for an op message. Beyond it the oldest are dropped; after a restart
or a change of master they may be checked again.
"""
PAUSE_S = 1.0
"""Time in seconds before the next attempt after a put failed."""

_PROPERTIES = encode_properties({WAIT: "true", TAGS: OP_TAG})


class OpWriter:
    """Writes op messages for the half messages passed to `add`, in their order. Run `serve` while the broker is a
    master, and call `write_all` at shutdown."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._pending: dict[int, None] = {}
        self._waiting: list[tuple[RemotingConnection, RemotingCommand]] = []
        self._some = trio.Event()
        self._urgent = trio.Event()
        self._log = LimitedLog(logger)

    def add(self, offsets: Sequence[int], waiting: tuple[RemotingConnection, RemotingCommand] | None = None) -> None:
        """Queues ended half messages (queue offsets) for an op message. `waiting`: a connection and its request, which
        is answered with the outcome of the put."""
        self._pending.update(dict.fromkeys(offsets))
        while len(self._pending) > PENDING_COUNT_MAX:
            del self._pending[next(iter(self._pending))]
        self._some.set()
        if waiting is not None:
            self._waiting.append(waiting)
        if waiting is not None or len(self._pending) >= OFFSET_COUNT_MAX:
            self._urgent.set()

    def forget(self, code: ResponseCode, remark: str) -> None:
        """Drops everything queued, and answers waiting requests with `code` and `remark`.

        The next master checks the half messages that are open in its log.
        """
        self._pending.clear()
        waiting, self._waiting = self._waiting, []
        for connection, command in waiting:
            connection.reply(command, command.reply(code, remark))

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Writes queued op messages until cancelled."""
        task_status.started()
        while True:
            await self._some.wait()
            with trio.move_on_after(LINGER_S):
                await self._urgent.wait()
            if not await self.write_all():
                await trio.sleep(PAUSE_S)

    async def write_all(self) -> bool:
        """Writes everything queued, and answers waiting requests with the outcome.

        Returns False if a put failed; the half messages then stay queued for the next attempt. If cancelled, everything
        stays queued.
        """
        while self._pending or self._waiting:
            self._urgent = trio.Event()
            waiting = list(self._waiting)
            pending = list(self._pending)
            puts = [
                PutRequest(messages=(self._message(pending[at : at + OFFSET_COUNT_MAX]),), waits=False)
                for at in range(0, len(pending), OFFSET_COUNT_MAX)
            ]
            await self._core.puts.settle(puts)
            del self._waiting[: len(waiting)]
            failed = next((put for put in puts if put.status is not PutStatus.PUT_OK), None)
            for connection, command in waiting:
                answer = command.reply(ResponseCode.SUCCESS)
                if failed is not None:
                    answer = command.reply(failed.status.response_code, failed.remark)
                connection.reply(command, answer)
            if failed is not None:
                self._log.write("transaction.op_put_failed reason=%r", failed.remark)
                return False
            for offset in pending:
                self._pending.pop(offset, None)
        self._some = trio.Event()
        return True

    def _message(self, offsets: Sequence[int]) -> Message:
        return self._core.own_message(OP_TOPIC, encode_op(offsets), _PROPERTIES)
