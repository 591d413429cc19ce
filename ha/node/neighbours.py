"""Finds the other brokers of a node's cluster, with the addresses of their dashboards and replication connections.

A name server lists the brokers of the cluster (GET_BROKER_CLUSTER_INFO, 106). halog's brokers report their addresses
among their runtime statistics (GET_BROKER_RUNTIME_INFO, 28); RocketMQ's don't. The name server and the brokers are
asked at most once every REFRESH_S seconds, and only while somebody looks at the dashboard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import trio

from ha.admin.dashboard.source import Neighbour
from ha.config import is_loopback
from ha.errors import RemoteProtocolError
from ha.protocol.bodies import ClusterInfo
from ha.protocol.codes import RequestCode
from ha.protocol.java_json import read_as
from ha.remoting import RemotingClient

from .master_address import ask, ask_runtime_info, split
from .node import Node
from .ports import is_wildcard, join

REFRESH_S = 10.0
BROKER_COUNT_MAX = 32
"""Maximum number of brokers asked for their addresses: the node's own requests need connections, too."""

ADMIN_URL = "adminUrl"
HA_ADDRESS = "haAddress"
HA_CLIENT_ADDRESS = "haClientAddress"
_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}")


def own_addresses(node: Node) -> Mapping[str, str]:
    """Returns the addresses that this node reports among its runtime statistics.

    adminUrl: URL of the admin port, with the host of brokerIP1 if the port listens on all addresses. haAddress: the
    HA port's address, as slaves get it from name servers. haClientAddress: local address of the connection to the
    master; "" if there is none.
    """
    link = node.ha_client
    host, port = split(node.admin_address)
    if is_wildcard(node.config.admin_bind_address):
        host = node.advertised.client_host
    scheme = "http" if node.tls.secure_admin is None else "https"
    return {
        ADMIN_URL: f"{scheme}://{join(host.strip('[]'), int(port))}",
        HA_ADDRESS: node.ha_address,
        HA_CLIENT_ADDRESS: "" if link is None else link.local_address,
    }


class Neighbours:
    """The other brokers of the node's cluster, as they were when last asked. `serve` is the task that asks them."""

    def __init__(self, node: Node, client: RemotingClient) -> None:
        self._node = node
        self._client = client
        self._known: Sequence[Neighbour] = ()
        self._asked_at = -REFRESH_S
        self._wanted = trio.Event()

    def known(self) -> Sequence[Neighbour]:
        """Returns the other brokers, sorted by name and ID; none before `serve` has asked for the first time. If the
        answers are older than REFRESH_S, returns them nevertheless, and makes `serve` ask again."""
        if trio.current_time() - self._asked_at >= REFRESH_S:
            self._wanted.set()
        return self._known

    async def serve(self) -> None:
        """Asks the name server and the brokers when `known` requests it, until cancelled."""
        while True:
            await self._wanted.wait()
            self._asked_at = trio.current_time()
            self._wanted = trio.Event()
            self._known = await self._ask()

    async def _ask(self) -> Sequence[Neighbour]:
        found: dict[tuple[str, int], Neighbour] = {}

        async def find(name: str, broker_id: int, address: str) -> None:
            told = await ask_runtime_info(self._client, address)
            found[name, broker_id] = self._neighbour(name, broker_id, address, told)

        async with trio.open_nursery() as nursery:
            for name, broker_id, address in (await self._brokers())[:BROKER_COUNT_MAX]:
                nursery.start_soon(find, name, broker_id, address)
        return [found[key] for key in sorted(found)]

    async def _brokers(self) -> list[tuple[str, int, str]]:
        """Returns name, ID and address of the cluster's other brokers; those with this node's brokerName come first.
        They are from the first name server that has registered this node and answers; empty if there is none."""
        config, own = self._node.config, self._node.remoting_address
        for server, state in self._node.registration.states.items():
            if not state.is_registered:
                continue
            body = await ask(self._client, server, RequestCode.GET_BROKER_CLUSTER_INFO)
            try:
                info = read_as(ClusterInfo, body or b"")
            except RemoteProtocolError:
                continue
            in_cluster = info.cluster_addr_table.get(config.cluster_name, ())
            names = sorted(in_cluster, key=lambda name: (name != config.broker_name, name))
            return [
                (name, broker_id, address)
                for name in names
                if name in info.broker_addr_table
                for broker_id, address in sorted(info.broker_addr_table[name].broker_addrs.items())
                if address != own
            ]
        return []

    def _neighbour(self, name: str, broker_id: int, address: str, told: Mapping[str, str]) -> Neighbour:
        host = split(address)[0]
        url = told.get(ADMIN_URL, "")
        is_here = is_loopback(host) or host == self._node.advertised.client_host
        return Neighbour(
            broker_name=name,
            broker_id=broker_id,
            host=host,
            url=url if self._leads_there(url, is_here=is_here) else "",
            ha_address=told.get(HA_ADDRESS, ""),
            ha_client_address=told.get(HA_CLIENT_ADDRESS, ""),
        )

    def _leads_there(self, url: str, *, is_here: bool) -> bool:
        """Returns whether a browser that shows this node's pages can open another broker's `url`.

        If `url` has a loopback address, the browser must be on this machine, and so must the broker (`is_here`).
        """
        match = _URL.fullmatch(url)
        if match is None:
            return False
        return not is_loopback(match[1].strip("[]")) or (is_here and is_loopback(self._node.config.admin_bind_address))
