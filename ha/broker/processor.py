"""Routes requests to their handlers by request code.

Of the requests that a connection delivers at once (a chunk), the sends are handled first and together, then
acknowledgements of popped messages, then pops, and then all other requests one at a time, in their order. RocketMQ has
a thread pool per kind of request and guarantees no order between them either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

import trio

from ha.broker.pull import PULL_CODES
from ha.broker.refused import RefusedError
from ha.broker.send import SEND_CODES, SendProcessor
from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.poller import TIME_SLICE_S
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler, serve_each

if TYPE_CHECKING:
    from ha.acl import AclGuard

FAST_REFUSED = PULL_CODES | {
    RequestCode.POP_MESSAGE,
    RequestCode.ACK_MESSAGE,
    RequestCode.PEEK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    RequestCode.NOTIFICATION,
    RequestCode.BATCH_ACK_MESSAGE,
}
"""Requests that the fast port (listenPort - 2) refuses."""

NEEDS_DISPATCH = {
    RequestCode.QUERY_MESSAGE,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
    RequestCode.GET_MAX_OFFSET,
    RequestCode.GET_EARLIEST_MSG_STORETIME,
    RequestCode.GET_TOPIC_STATS_INFO,
    RequestCode.GET_CONSUME_STATS,
    RequestCode.GET_BROKER_CONSUME_STATS,
    RequestCode.QUERY_CONSUME_TIME_SPAN,
    RequestCode.QUERY_CONSUME_QUEUE,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
}
"""Requests about the ends of queues or the index, whose answers must include every acknowledged message."""


Take = Callable[["RemotingConnection", list[RemotingCommand], float], list[RemotingCommand]]
"""Serves the requests that can be answered without waiting, until a deadline on Trio's clock. Returns the other
requests, which are passed to their handlers."""


class Family(Protocol):
    """A family of requests; implemented by classes that are constructed with a `BrokerCore`."""

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        ...


def handlers_of(families: Iterable[Family]) -> dict[int, RequestHandler]:
    """Merges the handlers of `families`, which must not overlap."""
    found: dict[int, RequestHandler] = {}
    for family in families:
        handlers = family.handlers()
        assert not found.keys() & handlers.keys(), family
        found |= handlers
    return found


def after(wait: Callable[[], Awaitable[None]], handler: RequestHandler) -> RequestHandler:
    """Wraps `handler` to call `wait` first."""

    async def handle(connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        await wait()
        return await handler(connection, command)

    return handle


class Processor:
    """Handles requests in two steps. The main port's server calls `take` for each chunk of requests, then `handle` for
    those that are left; the fast port's server calls `take_fast` and `handle_fast`."""

    def __init__(
        self,
        send: SendProcessor,
        handlers: dict[int, RequestHandler],
        guard: AclGuard | None = None,
        takes: Sequence[tuple[AbstractSet[int], Take]] = (),
    ) -> None:
        """`takes`: pairs of request codes and the function that serves such requests if it can do so without waiting;
        called in this order, after the function for sends. `guard`: refuses requests that are not allowed."""
        self._send = send
        self._handlers = handlers
        self._guard = guard
        self._takes: Sequence[tuple[AbstractSet[int], Take]] = (
            (SEND_CODES, lambda connection, commands, ends_at: send.take(connection, commands)),
            *takes,
        )

    def take(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """Serves the sends, acknowledgements and pops that can be served without waiting; returns the other requests,
        for `handle`."""
        return self.take_admitted(connection, self._admit(connection, commands))

    def take_fast(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """Serves the sends that can be served without waiting; returns the other requests, for `handle_fast`."""
        return _serve(self._takes[:1], connection, self._admit(connection, commands))

    def take_admitted(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """As `take`, for requests whose permissions the caller has checked."""
        return _serve(self._takes, connection, commands)

    def _admit(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        return commands if self._guard is None else self._guard.admit(connection, commands)

    async def handle(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> None:
        """Serves the main port's requests that `take` returned."""
        sends = [command for command in commands if command.code in SEND_CODES]
        if sends:
            await self._send.handle(connection, sends)
        if len(sends) == len(commands):
            return
        others = (command for command in commands if command.code not in SEND_CODES)
        await serve_each(connection, others, self._handle_one)

    async def handle_fast(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> None:
        """Serves the fast port's requests that `take_fast` returned; refuses those in FAST_REFUSED."""
        served = []
        for command in commands:
            if command.code in FAST_REFUSED:
                connection.reply(command, not_supported(command))
            else:
                served.append(command)
        connection.flush()
        await self.handle(connection, served)

    async def _handle_one(self, connection: RemotingConnection, command: RemotingCommand) -> None:
        handler = self._handlers.get(command.code)
        if handler is None:
            connection.reply(command, not_supported(command))
            return
        try:
            response = await handler(connection, command)
        except RefusedError as refused:
            connection.reply(command, command.reply(refused.code, refused.remark))
        except (RemoteProtocolError, LocalProtocolError) as error:  # local: the client's values don't fit a record
            connection.reply_error(command, error)
        else:
            if response is not None:
                connection.reply(command, response)


def _serve(
    takes: Sequence[tuple[AbstractSet[int], Take]], connection: RemotingConnection, commands: list[RemotingCommand]
) -> list[RemotingCommand]:
    """Serves `commands` with `takes`; returns those that are left to handlers."""
    for codes, take in takes:
        asked = {command.code for command in commands}
        mine = asked & codes
        if not mine:
            continue
        others = [] if mine == asked else [command for command in commands if command.code not in mine]
        if others:
            commands = [command for command in commands if command.code in mine]
        commands = [*take(connection, commands, trio.current_time() + TIME_SLICE_S), *others]
    return commands


def not_supported(command: RemotingCommand) -> RemotingCommand:
    """Returns RocketMQ's answer to an unknown request code; its remark begins with a space, as in RocketMQ."""
    return command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {command.code} not supported")
