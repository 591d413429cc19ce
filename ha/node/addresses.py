"""Binds a node's ports, and determines the addresses that it reports to others."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from ipaddress import ip_address

import msgspec

from ha.config import Config, OptionalPort
from ha.errors import AddressInUse, ConfigError

from .options import Advertised
from .platform import Platform, Port
from .ports import is_wildcard

logger = logging.getLogger(__name__)

NAME_SERVER_PORT = 9876
FAST_PORT_STEP = 2


class NodePorts(msgspec.Struct, frozen=True, kw_only=True):
    """All ports of a node, bound but not listening yet."""

    remoting: Port
    ha: Port
    admin: Port
    fast: Port | None
    """RocketMQ's second port, for all requests except pulls; None if it is not available."""
    grpc: Port | None
    """Port for RocketMQ 5's gRPC clients; None if it is disabled, or if the default port is not available."""
    name_server: Port | None
    """Port of the node's own name server; None if it has none."""


async def take_ports(config: Config, platform: Platform, bound: ExitStack) -> NodePorts:
    """Binds the ports of `config` until `bound` is closed. A worker thread looks up host names; cancellation waits for
    the lookup. Raises AddressInUse, with the port's key, if one that the node needs can't be bound."""
    if _is_numeric(config.bind_address) and _is_numeric(config.admin_bind_address):
        return _bind_ports(config, platform, bound)
    ports: NodePorts = await platform.run_blocking(_bind_ports, config, platform, bound)
    return ports


def _is_numeric(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _bind_ports(config: Config, platform: Platform, bound: ExitStack) -> NodePorts:
    remoting, ha, admin = [
        bound.enter_context(platform.bind(key, host, port))
        for key, host, port in (
            ("listenPort", config.bind_address, config.listen_port),
            ("haListenPort", config.bind_address, config.ha_listen_port),
            ("adminListenPort", config.admin_bind_address, config.admin_listen_port),
        )
    ]
    name_server = None
    if config.embeds_name_server:
        # If the system chooses listenPort, there may be several nodes on this machine.
        wanted = NAME_SERVER_PORT if config.listen_port else 0
        name_server = bound.enter_context(platform.bind("namesrvAddr", config.bind_address, wanted))
    fast = _take_fast_port(config, platform, bound)  # last, as a node also runs without these
    grpc = _take_grpc_port(config, platform, bound)
    return NodePorts(remoting=remoting, ha=ha, admin=admin, fast=fast, grpc=grpc, name_server=name_server)


def _take_fast_port(config: Config, platform: Platform, bound: ExitStack) -> Port | None:
    """Binds listenPort - 2, RocketMQ's second port for all requests except pulls.

    RocketMQ's slaves copy the topics from it. halog itself does not need it, so a node also runs without it. Returns
    None if the port is in use, or if the system chooses listenPort.
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


def _take_grpc_port(config: Config, platform: Platform, bound: ExitStack) -> Port | None:
    """Binds grpcListenPort. Returns None if it is 0, or if it is not set and the default port is in use, so that a node
    with default settings can run beside RocketMQ's proxy. Raises AddressInUse if a configured port is in use."""
    port = config.grpc_listen_port
    if not port:
        return None
    try:
        number = int(port)  # getaddrinfo refuses subclasses of int
        return bound.enter_context(platform.bind("grpcListenPort", config.bind_address, number))
    except AddressInUse as error:
        if not isinstance(port, OptionalPort):
            raise
        hint = "gRPC clients can't connect; set grpcListenPort"
        logger.warning('node.grpc_port_unavailable port=%d reason=%r hint="%s"', port, error.reason, hint)
        return None


async def advertise(config: Config, platform: Platform, ports: NodePorts) -> Advertised:
    """Returns the addresses that the node reports. Raises ConfigError if brokerIP1, or its default, can't be
    resolved."""
    client_host = config.broker_ip1
    if not client_host:
        client_host = config.bind_address
        if is_wildcard(client_host):
            client_host = await platform.run_blocking(platform.own_address, client_host)
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
    """Returns an address that reaches a listener on `host` from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
