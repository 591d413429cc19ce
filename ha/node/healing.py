"""Whom a node asks for bytes that are damaged in its own log: the HA ports of the others of its name.

A slave asks its master. A master asks its slaves, which serve their HA ports like it: the name servers tell their
addresses for requests, and a slave's HA port is the one after that (RocketMQ's rule, halog's default). Where that isn't
so, and for anybody else who holds the log, there is healFrom.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.bodies import ClusterInfo
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient

from .master_address import split

if TYPE_CHECKING:
    from .node import Node

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 3.0
HA_PORT_STEP = 1
PEER_COUNT_MAX = 16


async def heal_peers(node: Node, client: RemotingClient, name_servers: list[str]) -> list[str]:
    """Return the HA addresses to ask for damaged bytes, best first, never this node's own; raises nothing."""
    config = node.config
    peers = [address for address in config.heal_from.split(";") if address]
    if node.ha_client is not None:
        master = node.ha_client.statistics().master_address
        if master is not None:
            peers.append(master)
    for address in await _brokers_of_the_name(client, name_servers, config.broker_name):
        host, port = split(address)
        if address != node.remoting_address and port.isdigit():
            peers.append(f"{host}:{int(port) + HA_PORT_STEP}")
    return [peer for peer in dict.fromkeys(peers) if peer != node.ha_address][:PEER_COUNT_MAX]


async def _brokers_of_the_name(client: RemotingClient, name_servers: list[str], broker_name: str) -> list[str]:
    for name_server in name_servers:
        try:
            answer = await client.invoke(
                name_server, RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO), ASK_TIMEOUT_S
            )
            if answer.code != ResponseCode.SUCCESS:
                continue
            known = java_json.read_as(ClusterInfo, answer.body).broker_addr_table.get(broker_name)
        except (OSError, trio.BrokenResourceError, trio.TooSlowError, RemoteProtocolError) as error:
            logger.debug("heal_peers_unknown namesrv=%s reason=%r", name_server, error)
            continue
        if known is not None:
            return [address for _, address in sorted(known.broker_addrs.items())]
    return []
