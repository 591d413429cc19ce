"""The ports that a node takes, and where it tells others to look for it."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import msgspec

from ha.config import Config
from ha.errors import AddressInUse, ConfigError

from .options import Advertised
from .platform import Platform, Port
from .ports import is_wildcard

logger = logging.getLogger(__name__)

NAME_SERVER_PORT = 9876
FAST_PORT_STEP = 2


class NodePorts(msgspec.Struct, frozen=True, kw_only=True):
    """All ports of a node, taken and not listened on yet."""

    remoting: Port
    ha: Port
    admin: Port
    fast: Port | None
    """RocketMQ's second port for all but pulls, if it could be had."""
    name_server: Port | None
    """Of the name server inside a node that was given none."""


def take_ports(config: Config, platform: Platform, bound: ExitStack) -> NodePorts:
    """Take all that `config` asks for, until `bound` is closed. AddressInUse, naming the key."""
    remoting, ha, admin = [
        bound.enter_context(platform.bind(key, host, port))
        for key, host, port in (
            ("listenPort", config.bind_address, config.listen_port),
            ("haListenPort", config.bind_address, config.ha_listen_port),
            ("adminListenPort", config.admin_bind_address, config.admin_listen_port),
        )
    ]
    fast = _take_fast_port(config, platform, bound)
    name_server = None
    if config.embeds_name_server:
        # Whoever lets the system choose listenPort has another node on this machine.
        wanted = NAME_SERVER_PORT if config.listen_port else 0
        name_server = bound.enter_context(platform.bind("namesrvAddr", config.bind_address, wanted))
    return NodePorts(remoting=remoting, ha=ha, admin=admin, fast=fast, name_server=name_server)


def _take_fast_port(config: Config, platform: Platform, bound: ExitStack) -> Port | None:
    """Take listenPort - 2, RocketMQ's second port for all but pulls, from which its slaves copy the topics.

    Nothing of halog's own needs it, so a node goes on without it. There is none while the system chooses listenPort.
    """
    port = config.listen_port - FAST_PORT_STEP
    if port <= 0:
        return None
    try:
        return bound.enter_context(platform.bind("listenPort", config.bind_address, port))
    except AddressInUse as error:
        hint = "RocketMQ slaves can't copy topics"
        logger.warning('node.fast_port_unavailable port=%d reason=%r hint="%s"', port, error.reason, hint)
        return None


async def advertise(config: Config, platform: Platform, ports: NodePorts) -> Advertised:
    """Return what others are to be told. ConfigError if the own address can't be resolved."""
    client_host = config.broker_ip1
    if not client_host:
        wildcard = is_wildcard(config.bind_address)
        client_host = await platform.run_blocking(platform.own_address) if wildcard else config.bind_address
    try:
        store_address = await platform.run_blocking(platform.resolve, client_host)
    except OSError as error:
        accepted = "an IP address, or a name that resolves here"
        raise ConfigError("brokerIP1", f"{client_host}: {error.strerror or error}", accepted) from None
    return Advertised(
        client_host=client_host,
        client_port=ports.remoting.port,
        ha_host=config.broker_ip2 or client_host,
        ha_port=ports.ha.port,
        store_address=store_address,
    )


def reachable(host: str) -> str:
    """Return an address at which this machine itself reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
