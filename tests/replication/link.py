"""A slave's client and the service that it follows, over memory streams."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import memory_stream_pair

from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from tests.replication.memory_log import MemoryLog


class Link:
    """Connects clients to a service over memory streams. `times`: when."""

    def __init__(self, service: HAService, nursery: trio.Nursery) -> None:
        self.service = service
        self.nursery = nursery
        self.times: list[float] = []

    async def connect(self, address: str) -> trio.abc.Stream:
        self.times.append(trio.current_time())
        ours, theirs = memory_stream_pair()
        self.nursery.start_soon(self.service.handle, theirs, f"127.0.0.1:{len(self.times)}")
        return ours


@asynccontextmanager
async def following(
    service: HAService, log: MemoryLog, options: HAOptions | None = None
) -> AsyncIterator[tuple[HAClient, Link]]:
    """A client that copies the service's log into `log` while the block runs, and its link. Its waits are not
    shortened at random."""
    async with trio.open_nursery() as nursery:
        link = Link(service, nursery)
        client = HAClient(log, options, link.connect, jitter=lambda: 0.0)
        client.set_master("10.0.0.1:10912")
        nursery.start_soon(client.run)
        yield client, link
        nursery.cancel_scope.cancel()
