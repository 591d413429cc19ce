"""What /live and /ready say, as docs/observability.md has it."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from ha.failover.agreement import Agreement
from ha.node import Node, open_node
from ha.node.member import wait_role
from ha.node.platform import Platform
from ha.protocol.codes import PutStatus
from ha.protocol.record import Message
from ha.replication.statistics import HAClientState
from ha.store.files import DiskUsage, OsDisk
from tests.failover.group import Way
from tests.metrics.nodes import ask, settings
from tests.sim.agreement import SimAgreementService
from tests.sim.world import Timers
from tests.tls.nodes import until

MESSAGE = Message(topic="greetings", queue_id=0, body=b"hello")


async def readiness(node: Node) -> tuple[int, str]:
    assert (await ask(node.admin_address, "/live"))[0] == 200
    status, _, body = await ask(node.admin_address, "/ready")
    return status, body


async def test_a_master_is_ready_whoever_else_is_there(tmp_path: Path) -> None:
    keys = ("inSyncReplicas=2", "minInSyncReplicas=2", "namesrvAddr=127.0.0.1:1")
    async with open_node(settings(tmp_path, "SYNC_MASTER", *keys)) as master:
        assert (await master.put(MESSAGE)).status is PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH
        assert await readiness(master) == (200, "ready\n")


class FullDisk(OsDisk):
    def usage(self, path: Path) -> DiskUsage:
        return DiskUsage(total_bytes=1_000_000, free_bytes=50_000)


async def test_a_master_whose_disk_is_too_full_is_not(tmp_path: Path) -> None:
    config = settings(tmp_path, "ASYNC_MASTER", "cleanResourceInterval=20")
    async with open_node(config, Platform(disk=FullDisk())) as master:
        await until(lambda: not master.store.is_writable[0])
        assert await readiness(master) == (503, "not ready: disk is 95.0% full, puts are refused above 90%\n")
        assert (await master.put(MESSAGE)).status is PutStatus.SERVICE_NOT_AVAILABLE


async def test_a_slave_is_ready_while_it_follows(tmp_path: Path) -> None:
    async with open_node(settings(tmp_path, "ASYNC_MASTER")) as master:
        addresses = (f"namesrvAddr={master.name_server_address}", f"haMasterAddress={master.ha_address}")
        async with open_node(settings(tmp_path, "SLAVE", *addresses)) as slave:
            assert slave.ha_client is not None
            with trio.fail_after(20):
                await slave.ha_client.state.wait_value(lambda state: state is HAClientState.TRANSFER)
            assert await readiness(slave) == (200, "ready\n")
            slave.ha_client.set_master("127.0.0.1:1")
            with trio.fail_after(20):
                await slave.ha_client.state.wait_value(lambda state: state is not HAClientState.TRANSFER)
            status, why = await readiness(slave)
            assert (status, why.startswith("not ready: not connected to its master")) == (503, True)


async def test_a_member_is_ready_once_it_has_a_role(tmp_path: Path) -> None:
    timers = Timers()
    service = SimAgreementService(timers, random.Random(1))
    way = Way(service, 1)
    way.cut(True)

    @asynccontextmanager
    async def open_way(*_: Any) -> AsyncIterator[Agreement]:
        yield way

    keys = ("brokerId=1", "namesrvAddr=127.0.0.1:1", "etcdEndpoints=http://127.0.0.1:1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timers.run)
        platform = Platform(open_agreement=open_way)
        async with open_node(settings(tmp_path, "SYNC_MASTER", *keys), platform) as node:
            status, why = await readiness(node)
            assert (status, "without a master" in why) == (503, True), why
            way.cut(False)
            assert node.member is not None
            with trio.fail_after(60):
                await wait_role(node.member)
                while (await readiness(node))[0] != 200:  # noqa: ASYNC110
                    await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
