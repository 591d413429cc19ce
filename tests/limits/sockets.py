"""A server on a real TCP port, peers that break its limits, and a witness who must notice nothing of them."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import trio

from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import Handler, RemotingServer, RemotingServerOptions, serve_remoting
from tests.remoting.wire import Peer

TIMEOUT_S = 20.0


class Site:
    """A port, and whom it was connected from."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: list[trio.abc.Stream] = []

    async def connect(self) -> Peer:
        """A peer over a socket."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self._streams.append(stream)
        return Peer(stream)

    async def witness(self) -> Witness:
        """A well-behaved one."""
        return Witness(await self.connect())

    @asynccontextmanager
    async def hanging_up(self) -> AsyncIterator[Self]:
        """Close every peer at the end of the block."""
        try:
            yield self
        finally:
            with trio.CancelScope(shield=True):
                for stream in self._streams:
                    await trio.aclose_forcefully(stream)


class ServerSite(Site):
    """The port of a bare server; `server` counts what happened there."""

    def __init__(self, port: int, server: RemotingServer) -> None:
        super().__init__(port)
        self.server = server

    async def closed(self, cause: str, count: int = 1) -> None:
        """Wait until so many connections have ended for this cause."""
        with trio.fail_after(TIMEOUT_S):
            while self.server.statistics().closed.get(cause, 0) < count:  # noqa: ASYNC110 (a server has no such event)
                await trio.sleep(0.01)


@asynccontextmanager
async def open_site(handler: Handler, options: RemotingServerOptions | None = None) -> AsyncIterator[ServerSite]:
    """A server of its own while the block runs."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_remoting, handler, listeners, options)
        async with ServerSite(port, server).hanging_up() as site:
            yield site
        nursery.cancel_scope.cancel()


async def ended(peer: Peer) -> bool:
    """Wait until the server has closed the peer's connection. trio.TooSlowError if it doesn't."""
    with trio.fail_after(TIMEOUT_S):
        while await peer.receive() is not None:
            pass
    return True


async def push(peer: Peer, data: bytes) -> None:
    """Send what the server may refuse to take."""
    try:
        await peer.stream.send_all(data)
    except trio.BrokenResourceError:
        pass


class Witness:
    """A well-behaved peer, connected before the others came."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._opaque = 0

    async def is_served(self) -> bool:
        """Ask something small; whether it is answered in time, on the same connection."""
        self._opaque += 1
        with trio.fail_after(TIMEOUT_S):
            answer = await self._peer.ask(RemotingCommand(RequestCode.GET_MAX_OFFSET, self._opaque))
        return answer.opaque == self._opaque


def anonymous_bytes() -> int:
    """This process's own memory, after the garbage is out."""
    gc.collect()
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024
