"""A master that ends with 200 requests in flight tells no lie. More often: `scripts/soak --stops 100`."""

from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ha.protocol.codes import ResponseCode
from ha.replication.progress import SlaveState
from tests.load.memory_cluster import Client, Host, MemoryNetwork, open_client
from tests.load.stopping import CONNECTION_COUNT, WINDOW, Kind, StopTally, stop_under_load

SEEDS = (6, 2)
"""The slave is well and the flush synchronous; the slave is stuck and the flush asynchronous."""


@pytest.mark.processes
@pytest.mark.parametrize("kind", Kind)
def test_every_answer_is_true(kind: Kind, tmp_path: Path) -> None:
    tally = StopTally()
    for seed in SEEDS:
        tally = stop_under_load(tmp_path / str(seed), kind, seed=seed, tally=tally)
    print(tally)
    assert tally.statuses["SUCCESS"] > 100
    assert tally.sent > 2 * 200


@pytest.mark.parametrize("at_byte", range(200_000, 208_000, 1000))
async def test_graceful_stop_answers_everything_stored(autojump_clock: MockClock, at_byte: int) -> None:
    """No request is stored and then left without an answer: its producer would send it again."""
    network = MemoryNetwork()
    machine = Host(network, "10.0.0.1")
    codes: Counter[int] = Counter()
    async with Host(network, "10.0.0.2").node("SLAVE", name_server_addresses="10.0.0.1:9876") as slave:

        async def produce(client: Client) -> None:
            for number in count():
                try:
                    answer = await client.send(b"%d" % number, queue_id=number % 4)
                except (OSError, trio.BrokenResourceError):
                    return
                codes[answer.code] += 1

        async def connect() -> None:
            async with open_client(network, "10.0.0.1:10911") as client, trio.open_nursery() as producers:
                for _ in range(WINDOW):
                    producers.start_soon(produce, client)

        async with trio.open_nursery() as connections, machine.node("SYNC_MASTER") as master:
            await master.ha_service.wait_state(SlaveState.TRANSFER)
            for _ in range(CONNECTION_COUNT):
                connections.start_soon(connect)
            await slave.store.log.max_offset.wait_beyond(at_byte)
        assert set(codes) == {ResponseCode.SUCCESS}
        async with machine.node("SYNC_MASTER") as master:
            stored = sum(queue.max_offset for queue in master.store.queues)
    assert stored == codes[ResponseCode.SUCCESS] > 200
