"""Master and slave together over memory streams: the slave's log becomes the master's."""

import random

from trio.testing import MockClock, wait_all_tasks_blocked

from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.progress import SlaveState
from ha.replication.statistics import Condition, HAClientState
from tests.replication.link import following
from tests.replication.memory_log import MemoryLog


async def test_a_slave_becomes_a_copy_and_follows(autojump_clock: MockClock) -> None:
    content = random.Random(1).randbytes(3 * 4096 + 777)
    master, slave = MemoryLog(content), MemoryLog(content[:100])
    options = HAOptions(transfer_batch_size_bytes=1000)
    service = HAService(master, options)
    async with following(service, slave, options) as (client, _):
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
    assert client.statistics().state is HAClientState.SHUTDOWN
    assert service.connection_count == 0
