"""A TCP proxy that injects network faults where nothing else is available: one thread, one target.

Each direction is a `Link`: closed (data waits, like TCP's retransmissions while a network is cut), slow, or delayed.
Connections can be reset. A proxy can't lose packets or prevent a connection from being established.
"""

import math
import socket
import struct
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import trio

LOOK_S = 0.01
"""Interval at which links are checked for changes by the test's thread"""
IN_FLIGHT_CHUNKS = 64


class Link:
    """One direction, for all connections together."""

    def __init__(self) -> None:
        self.is_open = True
        self.delay_s = 0.0
        self.bytes_per_s = math.inf
        self.carried_bytes = 0

    def clear(self) -> None:
        """Removes all faults."""
        self.is_open, self.delay_s, self.bytes_per_s = True, 0.0, math.inf

    async def wait_open(self) -> None:
        while not self.is_open:  # noqa: ASYNC110 - set by another thread, which knows no event of ours
            await trio.sleep(LOOK_S)


class Proxy:
    """Forwards `address` to `target` while the block runs."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.there = Link()
        """From the client to the target"""
        self.back = Link()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._streams: set[trio.SocketStream] = set()
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,), daemon=True, name="proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
        self._thread.join()

    @property
    def links(self) -> tuple[Link, Link]:
        return self.there, self.back

    def reset(self) -> None:
        """Resets every connection on both sides (RST), including data in flight."""
        assert self._token is not None
        trio.from_thread.run_sync(self._reset, trio_token=self._token)

    def _reset(self) -> None:
        for stream in list(self._streams):
            with suppress(OSError):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener))
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._is_ready.set()
                await trio.serve_listeners(self._carry, [listener], handler_nursery=nursery)

    async def _carry(self, stream: trio.SocketStream) -> None:
        host, _, port = self.target.rpartition(":")
        async with stream:
            try:
                other = await trio.open_tcp_stream(host, int(port))
            except OSError:
                return
            async with other:
                self._streams |= {stream, other}
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._pump, stream, other, self.there, nursery.cancel_scope)
                        nursery.start_soon(self._pump, other, stream, self.back, nursery.cancel_scope)
                finally:
                    self._streams -= {stream, other}

    async def _pump(
        self, source: trio.SocketStream, sink: trio.SocketStream, link: Link, scope: trio.CancelScope
    ) -> None:
        send, receive = trio.open_memory_channel[tuple[float, bytes]](IN_FLIGHT_CHUNKS)

        async def take() -> None:
            async with send:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    async for chunk in source:
                        await send.send((trio.current_time() + link.delay_s, bytes(chunk)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            async for due, chunk in receive:
                await trio.sleep_until(due)
                await link.wait_open()
                await trio.sleep(len(chunk) / link.bytes_per_s)
                try:
                    await sink.send_all(chunk)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    break
                link.carried_bytes += len(chunk)
            # The end of the stream is delayed like everything else.
            await link.wait_open()
            scope.cancel()
