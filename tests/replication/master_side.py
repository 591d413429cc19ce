"""Masters controlled by the test: scripted ones, and ones that behave as RocketMQ's does where halog's differs."""

from collections.abc import Awaitable, Callable

import trio
from trio.testing import memory_stream_pair

from ha.protocol.ha_frame import encode_transfer_header
from tests.replication.memory_log import MemoryLog


class MasterSide:
    """Hands out one end of a memory stream per connection; `reports`: (time since the start, value, connection)."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.began = trio.current_time()
        self.connected_at: list[float] = []
        self.reports: list[tuple[float, int, int]] = []
        self.closed: list[tuple[float, int]] = []
        self.streams: list[trio.abc.Stream] = []
        self.refuses = False
        self.connect_s = 0.0
        self.on_connect: Callable[[trio.abc.Stream], Awaitable[None]] | None = None

    @property
    def now(self) -> float:
        return round(trio.current_time() - self.began, 6)

    async def connect(self, address: str) -> trio.abc.Stream:
        await trio.sleep(self.connect_s)
        self.connected_at.append(self.now)
        if self.refuses:
            raise ConnectionRefusedError(address)
        ours, theirs = memory_stream_pair()
        self.streams.append(ours)
        self._nursery.start_soon(self._receive, ours, len(self.streams) - 1)
        if self.on_connect is not None:
            self._nursery.start_soon(self.on_connect, ours)
        return theirs

    async def send(self, offset: int, body: bytes = b"") -> None:
        """Send a frame over the newest connection."""
        await self.streams[-1].send_all(encode_transfer_header(offset, len(body)) + body)

    async def close(self) -> None:
        await self.streams[-1].aclose()

    @property
    def values(self) -> list[int]:
        return [value for _, value, _ in self.reports]

    async def _receive(self, stream: trio.abc.Stream, number: int) -> None:
        try:
            received = b""
            while chunk := await stream.receive_some(4096):
                received += chunk
                while len(received) >= 8:
                    self.reports.append((self.now, int.from_bytes(received[:8], "big", signed=True), number))
                    received = received[8:]
            self.closed.append((self.now, number))
        except trio.ClosedResourceError:
            pass


async def serve_as_rocketmq(stream: trio.abc.Stream, log: MemoryLog) -> None:
    """The write and read rules of DefaultHAConnection 5.x as the protocol's description gives them, faults included.

    A request of -1 is none; 0 is the last segment; anything else is literal; what isn't held gets heartbeats for ever.
    """
    request = -1
    written_at = trio.current_time()
    position = -1

    async def read() -> None:
        nonlocal request
        received = b""
        while chunk := await stream.receive_some(4096):
            received += chunk
            size = len(received) - len(received) % 8
            if size and request < 0:
                request = int.from_bytes(received[size - 8 : size], "big", signed=True)
            received = received[size:]

    async def write() -> None:
        nonlocal position, written_at
        while True:
            if request == -1:
                await trio.sleep(0.01)
                continue
            end = log.max_offset.value
            if position == -1:
                position = end - end % log.segment_size if request == 0 else request
            if trio.current_time() - written_at > 5:
                await stream.send_all(encode_transfer_header(position, 0))
                written_at = trio.current_time()
            chunk = log.read_hot(position, 32768) if log.min_offset <= position < end else None
            if chunk:
                await stream.send_all(encode_transfer_header(position, len(chunk)))
                await stream.send_all(chunk)
                position += len(chunk)
                written_at = trio.current_time()
            else:
                await trio.sleep(0.1)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await read()
            nursery.cancel_scope.cancel()
    except* (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    finally:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)
