"""Repairs damaged bytes of a node's log with those of other brokers of the same name, read from their HA ports.

A node asks the HA ports in healFrom first, then, on a slave, its master, then the other brokers of its name; slaves
have HA ports, too. Name servers report the remoting addresses of those brokers. The HA port is assumed to be the next
port number (RocketMQ's rule and halog's default); if a slave has another HA port, list its HA address in healFrom.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial

import msgspec
import trio

from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.addresses import split_address
from ha.protocol.bodies import ClusterInfo
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient
from ha.replication.handshake import HandshakeOptions
from ha.replication.healer import Healer

from .node import Node
from .options import ha_options
from .ports import join

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 3.0
HA_PORT_STEP = 1
PEER_COUNT_MAX = 16


async def heal(node: Node, client: RemotingClient, name_servers: list[str], handshake: HandshakeOptions | None) -> None:
    """Repairs damaged bytes until cancelled."""
    healer = Healer(
        node.store.repair,
        partial(_peers, node, client, name_servers),
        connect=node.tls.connect_to_master,
        options=msgspec.structs.replace(ha_options(node.config), handshake=handshake),
        segment_size=node.config.segment_size,
    )
    await healer.run()


async def _peers(node: Node, client: RemotingClient, name_servers: list[str]) -> list[str]:
    """Returns the HA addresses to ask, best first, without this node's own. Raises nothing."""
    config = node.config
    peers = [address for address in config.heal_from.split(";") if address]
    if node.ha_client is not None:
        master = node.ha_client.statistics().master_address
        if master is not None:
            peers.append(master)
    for address in await _addresses_by_name(client, name_servers, config.broker_name):
        with suppress(ValueError):  # a broker may register any text as its address
            host, port = split_address(address)
            if address != node.remoting_address:
                peers.append(join(host, port + HA_PORT_STEP))
    return [peer for peer in dict.fromkeys(peers) if peer != node.ha_address][:PEER_COUNT_MAX]


async def _addresses_by_name(client: RemotingClient, name_servers: list[str], broker_name: str) -> list[str]:
    for name_server in name_servers:
        try:
            answer = await client.invoke(
                name_server, RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO), ASK_TIMEOUT_S
            )
            if answer.code != ResponseCode.SUCCESS:
                continue
            known = java_json.read_as(ClusterInfo, answer.body).broker_addr_table.get(broker_name)
        except (OSError, trio.BrokenResourceError, trio.TooSlowError, RemoteProtocolError) as error:
            logger.debug("node.repair_peers_unknown namesrv=%s reason=%r", name_server, error)
            continue
        if known is not None:
            return [address for _, address in sorted(known.broker_addrs.items())]
    return []
