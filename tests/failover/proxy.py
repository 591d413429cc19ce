"""A proxy between one node and one server on loopback that can be cut: bytes are then held, as by a network.

While requests or answers don't pass they wait in here; they go on when they may, if who sent them has not closed
meanwhile, and even then: a request whose sender gave up still arrives.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

_PIECE_SIZE = 65536


class Gate:
    """Open or shut."""

    def __init__(self) -> None:
        self._open = trio.Event()
        self._open.set()

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        if self._open.is_set():
            self._open = trio.Event()

    async def wait(self) -> None:
        await self._open.wait()


class Proxy:
    """`port` leads to `target_port`."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.requests = Gate()
        self.answers = Gate()
        self.loses_answers = False
        """Whether the connection is closed in place of an answer: the server has executed the request by then"""
        self.request_bytes = 0
        """Bytes received from the node"""

    def cut(self) -> None:
        self.requests.shut()
        self.answers.shut()

    def heal(self) -> None:
        self.requests.open()
        self.answers.open()

    async def serve_one(self, node: trio.SocketStream) -> None:
        try:
            server = await trio.open_tcp_stream("127.0.0.1", self.target_port)
        except OSError:
            await node.aclose()
            return
        async with server, node, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, server, node, self.answers)
            await self._pump(node, server, self.requests)
            # Half-closed by the node: its requests have been passed on.
            await trio.sleep(0.2)
            nursery.cancel_scope.cancel()

    async def _pump(self, source: trio.SocketStream, sink: trio.SocketStream, gate: Gate) -> None:
        try:
            async for piece in source:
                if gate is self.requests:
                    self.request_bytes += len(piece)
                elif self.loses_answers:
                    break
                await gate.wait()
                await sink.send_all(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        if gate is self.answers:
            await sink.aclose()


@asynccontextmanager
async def open_proxy(target_port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(target_port)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, proxy.serve_one, 0, host="127.0.0.1"))
        proxy.port = listeners[0].socket.getsockname()[1]
        yield proxy
        nursery.cancel_scope.cancel()
