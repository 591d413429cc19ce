"""A connection without a network: requests that this process makes to its own handlers on behalf of a client.

Handlers see the client's address and answer as on any connection. If a handler has encoded its response, the response
is decoded again here, which costs 3 µs. So handlers need no special case for this kind of connection.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import trio

from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand, RemotingParser
from ha.protocol.remoting_protocol import CloseCause

from .connection import RemotingConnection

OnResponse = Callable[[RemotingCommand | None], None]
"""Called once with the response, or with None if the connection ends first. It must not raise."""

OPAQUE_MAX = 0x7FFFFFFF
HEADER_SIZE_MAX = 16_777_215
"""Maximum header size of a response in bytes. It is large because the response to a batch lists all messages in its
header, and because responses come from this process and not from a peer."""


class LocalConnection(RemotingConnection):
    """A connection within the process: its owner passes requests to the handlers on behalf of a client."""

    def __init__(
        self,
        peer: tuple[str, int],
        *,
        is_own: bool = False,
        is_encrypted: bool = False,
        on_request: Callable[[RemotingCommand], None] = lambda command: None,
    ) -> None:
        """`peer`: host and port of the client or, with `is_own`, of this process.

        `on_request` is called with each oneway request that a handler sends to the client; it must not raise.
        """
        self.peer = peer
        self.is_own = is_own
        self.is_encrypted = is_encrypted
        self.in_flight = 0
        self.opened_at = trio.current_time()
        self._on_request = on_request
        self._expected: dict[int, OnResponse] = {}
        self._opaque = 0
        self._parser = RemotingParser(header_size_max=HEADER_SIZE_MAX)
        self._has_ended = False
        self._close_callbacks: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<LocalConnection {self.peer[0]}:{self.peer[1]}>"

    # For the code that makes requests on behalf of the client

    def expect(self, command: RemotingCommand, on_response: OnResponse) -> None:
        """Assigns an opaque to a request, and registers `on_response` to be called with its response, or with None if
        the connection ends first."""
        self._opaque = command.opaque = (self._opaque + 1) & OPAQUE_MAX
        self._expected[command.opaque] = on_response

    def forget(self, command: RemotingCommand) -> None:
        """Makes the connection drop the response to a request, if there is one later."""
        self._expected.pop(command.opaque, None)

    def end(self) -> None:
        """Ends the connection: calls the `on_response` of each pending request with None, then the close callbacks."""
        self._has_ended = True
        expected, self._expected = self._expected, {}
        for on_response in expected.values():
            on_response(None)
        callbacks, self._close_callbacks = self._close_callbacks, []
        for callback in callbacks:
            callback()

    # For handlers

    @property
    def is_closed(self) -> bool:
        return self._has_ended

    @property
    def outbox_bytes(self) -> int:
        return 0

    @property
    def received_at(self) -> float:
        return trio.current_time()

    def send_soon(self, frame: bytes) -> None:
        for command in self._parser.feed(frame):
            self._deliver(command)

    send_now = send_soon

    def reply(self, request: RemotingCommand, response: RemotingCommand) -> None:
        if not request.flag & FLAG_ONEWAY:
            self._deliver(response)

    def reply_success(self, request: RemotingCommand) -> None:
        self.reply(request, request.reply(ResponseCode.SUCCESS))

    def send_oneway(self, command: RemotingCommand) -> None:
        if not self._has_ended:
            self._on_request(msgspec.structs.replace(command, flag=FLAG_ONEWAY))

    async def invoke(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        """Raises trio.BrokenResourceError: a client of another protocol can't answer remoting requests."""
        raise trio.BrokenResourceError(f"{self!r} answers no requests")

    def flush(self) -> None:
        pass

    async def flushed(self, bytes_left_max: int = 0) -> None:
        await trio.lowlevel.checkpoint()

    async def is_ready(self) -> bool:
        return not self._has_ended

    def on_close(self, callback: Callable[[], None]) -> None:
        if self._has_ended:
            callback()
        else:
            self._close_callbacks.append(callback)

    def close(self, cause: CloseCause, detail: str = "") -> None:
        self.end()

    def _deliver(self, response: RemotingCommand) -> None:
        on_response = self._expected.pop(response.opaque, None)
        if on_response is not None:
            on_response(response)
