"""A thousand idle and two hundred active clients and twenty slaves on one master; for long: `scripts/soak`."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

from ha.protocol.codes import ResponseCode
from ha.replication.ha_client import HAClient
from ha.replication.options import HAOptions
from ha.store.commitlog import CommitLog
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions
from tests.interop.stored_files import compare_commitlogs, log_range
from tests.load.fleet import Fleet
from tests.load.footprint import footprint
from tests.load.real_soak import FILES, lost_on
from tests.scenarios.brokers import Broker

pytestmark = pytest.mark.processes

SLAVE_COUNT = 20
IDLE_COUNT, ACTIVE_COUNT = 1000, 200
LOAD_S = 3.0
CONNECTION_BYTES_MAX = 40_000
"""Own pages of the master for each client connection: measured 12 KiB, and twice as much while it works."""


@asynccontextmanager
async def followers(directory: Path, address: str) -> AsyncIterator[list[CommitLog]]:
    """Replication of twenty slaves, each with its own store, over real sockets, in this process to save time."""
    async with AsyncExitStack() as stack:
        logs = []
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        for number in range(SLAVE_COUNT):
            options = StoreOptions(
                root=directory / f"s{number}",
                segment_size=FILES["mappedFileSizeCommitLog"],
                is_slave=True,
                index_enabled=False,
            )
            store = await stack.enter_async_context(open_message_store(options))
            client = HAClient(store.log, HAOptions())
            client.set_master(address)
            nursery.start_soon(client.run)
            logs.append(store.log)
        yield logs


async def wait_for(master: Broker, slaves: int, task_count_max: int) -> dict[str, int]:
    """Waits until `slaves` slaves are in sync and at most `task_count_max` tasks run; returns figures of /status."""
    with trio.fail_after(30):
        while True:
            status = await trio.to_thread.run_sync(master.status)
            found = {"in_sync": status["ha"]["in_sync"], "task_count": status["task_count"]}
            if found["in_sync"] == slaves and found["task_count"] <= task_count_max:
                return found
            await trio.sleep(0.1)


async def test_a_thousand_clients_and_twenty_slaves(tmp_path: Path) -> None:
    # Twenty slaves in one busy process may be slow to acknowledge.
    with Broker(tmp_path / "m", "SYNC_MASTER", syncFlushTimeout=20_000, **FILES) as master:
        await trio.to_thread.run_sync(master.start)
        alone = (await wait_for(master, 0, 1000))["task_count"]
        descriptors = footprint(master.pid, master.root).descriptor_count
        fleet = Fleet(master.addresses["remoting"], idle=IDLE_COUNT, active=ACTIVE_COUNT, sends_per_s=150)
        async with followers(tmp_path, master.addresses["ha"]) as logs:
            with_slaves = (await wait_for(master, SLAVE_COUNT, 1000))["task_count"]
            before = footprint(master.pid, master.root)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fleet.run)
                await fleet.wait_open()
                await trio.sleep(LOAD_S)
                loaded = footprint(master.pid, master.root)
                # Before, some slave may just have been copying the tables over a connection that is gone now.
                assert loaded.socket_count >= before.socket_count - SLAVE_COUNT + IDLE_COUNT + ACTIVE_COUNT
                assert loaded.own_bytes - before.own_bytes < (IDLE_COUNT + ACTIVE_COUNT) * CONNECTION_BYTES_MAX
                assert fleet.open_count == IDLE_COUNT + ACTIVE_COUNT
                fleet.stop()
                await trio.sleep(1)
                nursery.cancel_scope.cancel()
            assert fleet.lost_connections == []
            assert set(fleet.statuses) == {ResponseCode.SUCCESS}
            assert sum(fleet.statuses.values()) > 100

            await wait_for(master, SLAVE_COUNT, with_slaves)  # all of the clients' tasks are gone
            end = await trio.to_thread.run_sync(lambda: master.end)
            with trio.fail_after(30):
                for log in logs:
                    await log.max_offset.wait_beyond(end - 1)
        await wait_for(master, 0, alone + 1)
        assert footprint(master.pid, master.root).descriptor_count <= descriptors + 2
        await trio.to_thread.run_sync(master.stop)
    assert lost_on(master, fleet) == 0
    whole = log_range(master.commitlog)
    for number in range(SLAVE_COUNT):
        assert compare_commitlogs(tmp_path / f"s{number}" / "commitlog", master.commitlog) == whole
