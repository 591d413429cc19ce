"""Handlers made of a function of one request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ha.errors import RemoteProtocolError
from ha.protocol.remoting import RemotingCommand

from .connection import Handler, RemotingConnection

RequestHandler = Callable[[RemotingConnection, RemotingCommand], Awaitable[RemotingCommand | None]]
"""Called for one request; what it returns is sent as the response."""


def each_request(handle: RequestHandler) -> Handler:
    """Makes a handler that calls `handle` for each request; RemoteProtocolError refuses that request with code 1."""

    async def handle_chunk(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        for request in requests:
            try:
                response = await handle(connection, request)
            except RemoteProtocolError as error:
                connection.reply_error(request, error)
            else:
                if response is not None:
                    connection.reply(request, response)

    return handle_chunk
