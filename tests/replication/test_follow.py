"""Master and slave together over memory streams: the slave's log becomes the master's."""

from __future__ import annotations

import random

import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.progress import SlaveState
from ha.replication.statistics import Condition, HAClientState
from tests.replication.memory_log import MemoryLog


class Link:
    """Connects clients to a service over memory streams; `cut` ends the newest connection."""

    def __init__(self, service: HAService, nursery: trio.Nursery) -> None:
        self.service = service
        self.nursery = nursery
        self.times: list[float] = []
        self.streams: list[trio.abc.Stream] = []
        self.is_up = True

    async def connect(self, address: str) -> trio.abc.Stream:
        self.times.append(trio.current_time())
        if not self.is_up:
            raise ConnectionRefusedError(address)
        ours, theirs = memory_stream_pair()
        self.nursery.start_soon(self.service.handle, theirs, f"127.0.0.1:{len(self.times)}")
        self.streams.append(ours)
        return ours

    async def cut(self) -> None:
        await self.streams[-1].aclose()


async def test_a_slave_becomes_a_copy_and_follows(autojump_clock: MockClock) -> None:
    content = random.Random(1).randbytes(3 * 4096 + 777)
    master, slave = MemoryLog(content), MemoryLog(content[:100])
    options = HAOptions(transfer_batch_size_bytes=1000)
    service = HAService(master, options)
    async with trio.open_nursery() as nursery:
        link = Link(service, nursery)
        client = HAClient(slave, options, link.connect)
        nursery.start_soon(client.run)
        client.set_master("master:1")
        await service.wait_state(SlaveState.TRANSFER)
        await wait_all_tasks_blocked()
        assert slave.content == master.content
        master.put(b"more")
        await wait_all_tasks_blocked()
        assert slave.content == content + b"more"
        assert service.push2_slave_max_offset == len(content) + 4
        assert service.statistics().slaves[0].ack_offset == len(content) + 4
        assert client.statistics().condition is Condition.CONNECTED
        assert client.state.value is HAClientState.TRANSFER
        nursery.cancel_scope.cancel()
    assert client.statistics().state is HAClientState.SHUTDOWN
    assert service.connection_count == 0
