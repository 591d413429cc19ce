"""A slave controlled by the test: sends reports and collects frames with the times at which they came."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from ha.protocol.ha_frame import TransferBody, TransferHeader, TransferParser, encode_report
from ha.replication.ha_service import HAService
from ha.replication.progress import CloseReason


class SlaveSide:
    """One connection to `service`. `frames`: (time since connecting, offset, body) of each complete frame."""

    def __init__(self, service: HAService, peer: str = "127.0.0.1:40000") -> None:
        self.stream, self._theirs = memory_stream_pair()
        self._service = service
        self._peer = peer
        self.began = trio.current_time()
        self.frames: list[tuple[float, int, bytes]] = []
        self.received = b""
        self.close_reason: CloseReason | None = None
        self.closed_at: float | None = None

    async def serve(self) -> None:
        """The master's side of this connection; to be run in a task."""
        self.close_reason = await self._service.handle(self._theirs, self._peer)

    async def receive(self) -> None:
        """Collect frames until the master closes; to be run in a task."""
        parser, offset, body, missing = TransferParser(), 0, b"", 0
        async with self.stream:
            async for chunk in self.stream:
                now = round(trio.current_time() - self.began, 6)
                self.received += chunk
                for event in parser.feed(chunk):
                    if isinstance(event, TransferHeader):
                        offset, body, missing = event.physical_offset, b"", event.body_size
                    elif isinstance(event, TransferBody):
                        body += event.chunk
                    if len(body) == missing:
                        self.frames.append((now, offset, body))
        self.closed_at = round(trio.current_time() - self.began, 6)

    async def report(self, offset: int) -> None:
        await self.stream.send_all(encode_report(offset))

    def start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.serve)
        nursery.start_soon(self.receive)

    @property
    def heads(self) -> list[tuple[float, int, int]]:
        """(time, offset, body size) of each frame."""
        return [(time, offset, len(body)) for time, offset, body in self.frames]


@asynccontextmanager
async def until_closed(service: HAService, report: int | None = None) -> AsyncIterator[SlaveSide]:
    """A slave that connects, and reports `report` if that is given; the block's end waits for its connection's."""
    slave = SlaveSide(service)
    async with trio.open_nursery() as nursery:
        slave.start(nursery)
        if report is not None:
            await slave.report(report)
        await wait_all_tasks_blocked()
        yield slave


@asynccontextmanager
async def connected(service: HAService, report: int | None = None) -> AsyncIterator[SlaveSide]:
    """The same, but the block's end closes the connection."""
    with trio.CancelScope() as scope:
        async with until_closed(service, report) as slave:
            yield slave
            scope.cancel()
