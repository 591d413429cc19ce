"""A remoting server over memory streams, and a peer that exchanges frames with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.testing

from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from ha.remoting import Handler, RemotingConnection, RemotingServer, RemotingServerOptions


class MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts the streams that `connect` makes."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](1000)

    def connect(self, *, lockstep: bool = False) -> trio.abc.Stream:
        """Returns the client's end. Lockstep streams apply back-pressure, memory streams never do."""
        pair = trio.testing.lockstep_stream_pair() if lockstep else trio.testing.memory_stream_pair()
        try:
            self._send.send_nowait(pair[1])
        except trio.BrokenResourceError:
            raise ConnectionRefusedError(111, "Connection refused") from None
        return pair[0]

    async def accept(self) -> trio.abc.Stream:
        return await self._receive.receive()

    async def aclose(self) -> None:
        await self._receive.aclose()


@asynccontextmanager
async def socket_pair() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """Two ends of a TCP connection."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with (
        listeners[0] as listener,
        await trio.open_tcp_stream(*listener.socket.getsockname()) as theirs,
        await listener.accept() as ours,
    ):
        yield ours, theirs


class Peer:
    """The other end of a connection, frame by frame."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._parser = RemotingParser()
        self._arrived: list[RemotingCommand] = []

    async def send(self, *commands: RemotingCommand) -> None:
        await self.stream.send_all(b"".join(map(encode_command, commands)))

    async def receive(self) -> RemotingCommand | None:
        """The next frame; None at the end of the stream."""
        while not self._arrived:
            try:
                chunk = await self.stream.receive_some(65536)
            except trio.BrokenResourceError:
                chunk = b""
            if not chunk:
                return None
            self._arrived = self._parser.feed(bytes(chunk))
        return self._arrived.pop(0)

    async def expect(self) -> RemotingCommand:
        """The next frame, which must come."""
        command = await self.receive()
        assert command is not None
        return command

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        await self.send(command)
        return await self.expect()


class Wire:
    """A running server, and how to connect to it."""

    def __init__(self, server: RemotingServer, listener: MemoryListener) -> None:
        self.server = server
        self.listener = listener

    def connect(self, *, lockstep: bool = False) -> Peer:
        return Peer(self.listener.connect(lockstep=lockstep))


@asynccontextmanager
async def open_wire(handler: Handler, options: RemotingServerOptions | None = None) -> AsyncIterator[Wire]:
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:
        server: RemotingServer = await nursery.start(RemotingServer(handler, options).serve, [listener])
        yield Wire(server, listener)
        nursery.cancel_scope.cancel()


class Recorder:
    """A handler that records the chunks it gets and echoes each request's body."""

    def __init__(self) -> None:
        self.chunks: list[list[RemotingCommand]] = []
        self.connections: list[RemotingConnection] = []

    async def __call__(self, connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        self.chunks.append(requests)
        if connection not in self.connections:
            self.connections.append(connection)
        for request in requests:
            connection.reply(request, request.reply(0, body=request.body))


def request(
    opaque: int, body: bytes = b"", *, code: int = 10, flag: int = 0, serialize_type: int = 0
) -> RemotingCommand:
    return RemotingCommand(code, opaque, flag, body=body, serialize_type=serialize_type)
