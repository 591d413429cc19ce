"""Functions that answer the requests of a connection: those of a chunk that need no wait, the rest, or one request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ha.errors import RemoteProtocolError
from ha.protocol.remoting import RemotingCommand

from .connection import RemotingConnection

Take = Callable[[RemotingConnection, list[RemotingCommand]], list[RemotingCommand]]
"""Called once per chunk with every complete request in it, in order. Serves those that need no wait, and returns the
rest, which the connection's reader calls the `Handler` with."""

Handler = Callable[[RemotingConnection, list[RemotingCommand]], Awaitable[None]]
"""Called with the requests of one chunk, in order; each is answered with `connection.reply`, then or later. The next
chunk is read when it returns. Raising RemoteProtocolError ends the connection: to refuse only one request,
`connection.reply_error` it, or wrap a function of one request in `each_request`."""

RequestHandler = Callable[[RemotingConnection, RemotingCommand], Awaitable[RemotingCommand | None]]
"""Called for one request; what it returns is sent as the answer."""


def each_request(handle: RequestHandler) -> Handler:
    """Make a chunk handler of a function of one request; its RemoteProtocolError answers that request with code 1."""

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
