"""The suite of `contract.py` on a real etcd server, each node on its own way there."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from ha.failover.agreement import Agreement
from ha.failover.etcd import EtcdOptions, open_etcd_agreement
from tests.failover.contract import CONTRACT, Check
from tests.failover.etcd_servers import EtcdCluster
from tests.failover.proxy import Proxy, open_proxy

pytestmark = pytest.mark.processes


class EtcdPlace:
    def __init__(self, cluster: EtcdCluster) -> None:
        self.cluster = cluster
        self.proxies: dict[str, list[Proxy]] = {}

    @asynccontextmanager
    async def open_client(self, node: str) -> AsyncIterator[Agreement]:
        async with AsyncExitStack() as stack:
            ports = [server.port for server in self.cluster.servers]
            self.proxies[node] = [await stack.enter_async_context(open_proxy(port)) for port in ports]
            endpoints = tuple(f"http://127.0.0.1:{proxy.port}" for proxy in self.proxies[node])
            # a busy machine may take longer than the default for one answer, and a retry of what was done is refused
            options = EtcdOptions(endpoints=endpoints, attempt_timeout_s=5.0)
            yield await stack.enter_async_context(open_etcd_agreement(options, "DefaultCluster", "broker-a"))

    def cut(self, node: str) -> None:
        for proxy in self.proxies[node]:
            proxy.cut()

    def lose_answers(self, node: str) -> None:
        for proxy in self.proxies[node]:
            proxy.answers.shut()

    def heal(self, node: str) -> None:
        for proxy in self.proxies[node]:
            proxy.heal()

    async def compact(self) -> None:
        await self.cluster.compact()

    def stop(self) -> None:
        self.cluster.pause()

    def start(self) -> None:
        self.cluster.resume()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
async def test_contract(check: Check, cluster: EtcdCluster) -> None:
    await check(EtcdPlace(cluster))
