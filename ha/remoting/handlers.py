"""Makes a connection's handler from a function that handles a single request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import trio

from ha.errors import RemoteProtocolError
from ha.poller import TIME_SLICE_S
from ha.protocol.remoting import RemotingCommand

from .connection import Handler, RemotingConnection

RequestHandler = Callable[[RemotingConnection, RemotingCommand], Awaitable[RemotingCommand | None]]
"""Handles one request. The returned command is sent as the response; None: no response is sent."""


async def serve_each(
    connection: RemotingConnection,
    requests: Iterable[RemotingCommand],
    serve: Callable[[RemotingConnection, RemotingCommand], Awaitable[None]],
) -> None:
    """Calls `serve` for each request of a chunk, in order.

    Before each request, lets other tasks run if the time slice (TIME_SLICE_S) is over, and waits while too many bytes
    of responses are queued (`connection.is_ready`). While `serve` waits, the responses to earlier requests are sent. If
    the connection is closed, drops the remaining requests.
    """
    slice_ends = trio.current_time() + TIME_SLICE_S
    for request in requests:
        if trio.current_time() >= slice_ends:
            await trio.lowlevel.checkpoint()
            slice_ends = trio.current_time() + TIME_SLICE_S
        if not await connection.is_ready():
            return
        connection.flush()
        await serve(connection, request)


def each_request(handle: RequestHandler) -> Handler:
    """Makes a handler that calls `handle` for each request, one after the other. If `handle` raises
    RemoteProtocolError, the request is answered with SYSTEM_ERROR."""

    async def serve(connection: RemotingConnection, request: RemotingCommand) -> None:
        try:
            response = await handle(connection, request)
        except RemoteProtocolError as error:
            connection.reply_error(request, error)
        else:
            if response is not None:
                connection.reply(request, response)

    async def handle_chunk(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        await serve_each(connection, requests, serve)

    return handle_chunk
