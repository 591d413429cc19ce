"""Handlers made of a function of one request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from ha.errors import RemoteProtocolError
from ha.protocol.remoting import RemotingCommand

from .connection import Handler, RemotingConnection

TIME_SLICE_S = 0.002
"""Time slice for the requests of one chunk before other tasks run, in seconds."""

RequestHandler = Callable[[RemotingConnection, RemotingCommand], Awaitable[RemotingCommand | None]]
"""Called for one request; what it returns is sent as the response."""


def each_request(handle: RequestHandler) -> Handler:
    """Makes a handler that calls `handle` for each request; RemoteProtocolError refuses that request with code 1.

    Between requests it lets other tasks run after a time slice, waits while too much waits to be sent, and stops if
    the connection is closed.
    """

    async def handle_chunk(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        slice_ends = trio.current_time() + TIME_SLICE_S
        for request in requests:
            if trio.current_time() >= slice_ends:
                await trio.lowlevel.checkpoint()
                slice_ends = trio.current_time() + TIME_SLICE_S
            if not await connection.is_ready():
                return
            try:
                response = await handle(connection, request)
            except RemoteProtocolError as error:
                connection.reply_error(request, error)
            else:
                if response is not None:
                    connection.reply(request, response)

    return handle_chunk
