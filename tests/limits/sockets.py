"""A server on a real TCP port, peers that exceed its limits, and a witness that must not be affected by them."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

import trio
import trio.testing

from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import Handler, RemotingServer, RemotingServerOptions
from tests.load.footprint import own_bytes
from tests.remoting.wire import Peer

TIMEOUT_S = 20.0


class Site:
    """A port, and the streams connected to it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: list[trio.abc.Stream] = []

    async def connect(self) -> Peer:
        """Connects a peer over a socket."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self._streams.append(stream)
        return Peer(stream)

    async def witness(self) -> Witness:
        """Connects a well-behaved peer."""
        return Witness(await self.connect())

    @asynccontextmanager
    async def hanging_up(self) -> AsyncIterator[Self]:
        """Closes every peer at the end of the block."""
        try:
            yield self
        finally:
            with trio.CancelScope(shield=True):
                for stream in self._streams:
                    await trio.aclose_forcefully(stream)


class ServerSite(Site):
    """The port of a bare server; `server` counts what happens there."""

    def __init__(self, port: int, server: RemotingServer) -> None:
        super().__init__(port)
        self.server = server

    async def closed(self, cause: str, count: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        """Waits until `count` connections have ended for this cause."""
        await until(lambda: self.server.statistics().closed.get(cause, 0) >= count, timeout_s)


@asynccontextmanager
async def open_site(handler: Handler, options: RemotingServerOptions | None = None) -> AsyncIterator[ServerSite]:
    """Runs a server for the duration of the block."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        server: RemotingServer = await nursery.start(RemotingServer(handler, options).serve, listeners)
        async with ServerSite(port, server).hanging_up() as site:
            yield site
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Lets other tasks run until `condition` holds, for what happens between sockets without an event."""
    with trio.fail_after(timeout_s):
        while not condition():
            await trio.testing.wait_all_tasks_blocked(0.001)


async def settled() -> None:
    """Waits until no task has had anything to do for 50 ms: the sockets are empty, or their readers have paused."""
    await trio.testing.wait_all_tasks_blocked(0.05)


async def ended(peer: Peer, timeout_s: float = TIMEOUT_S) -> bool:
    """Waits until the server has closed the peer's connection. trio.TooSlowError if it doesn't."""
    with trio.fail_after(timeout_s):
        while await peer.receive() is not None:
            pass
    return True


async def push(peer: Peer, data: bytes) -> None:
    """Sends bytes that the server may refuse to read."""
    try:
        await peer.stream.send_all(data)
    except trio.BrokenResourceError:
        pass


class Witness:
    """A well-behaved peer, connected before the others."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._opaque = 0

    async def is_served(self) -> bool:
        """Sends a small request; returns whether it is answered in time, on the same connection."""
        self._opaque += 1
        with trio.fail_after(TIMEOUT_S):
            answer = await self._peer.ask(RemotingCommand(RequestCode.GET_MAX_OFFSET, self._opaque))
        return answer.opaque == self._opaque


def anonymous_bytes() -> int:
    """This process's private memory, after a garbage collection."""
    gc.collect()
    return own_bytes("self")
