"""TCP for the HA port: connecting to a master, and identifying peers."""

from __future__ import annotations

from ipaddress import ip_address
from socket import AF_INET, AF_INET6

import trio

from ha.errors import ConfigError
from ha.protocol.addresses import split_address
from ha.transport import open_tcp

IP_FAMILIES = (AF_INET, AF_INET6)


async def connect_tcp(address: str) -> trio.abc.Stream:
    """Connects to `host:port` (IPv6 in brackets). Raises OSError if that fails, ConfigError for haMasterAddress if the
    address is malformed."""
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ConfigError("haMasterAddress", str(error), "host:port, for example 10.0.0.1:10912") from None
    return await open_tcp(host, port)


def peer_name(stream: trio.abc.Stream) -> str:
    """Returns the peer of a stream as `host:port`: that of the socket ("gone:0" if it is no longer connected) or of the
    stream's attribute `peer_address`; without either, a unique name."""
    if isinstance(stream, trio.SocketStream):
        try:
            host, port = stream.socket.getpeername()[:2]
        except OSError:
            return "gone:0"
    elif hasattr(stream, "peer_address"):
        host, port = stream.peer_address
    else:
        return f"{type(stream).__name__.lower()}-{id(stream):x}"
    return _join(host, port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_name(stream: trio.abc.Stream) -> str:
    """Returns the local end of a TCP or TLS stream as `host:port`, which is the peer's name for it; an empty string for
    other streams."""
    stream = getattr(stream, "transport_stream", stream)  # the TCP stream below TLS
    if not isinstance(stream, trio.SocketStream) or stream.socket.family not in IP_FAMILIES:
        return ""
    try:
        return _join(*stream.socket.getsockname()[:2])
    except OSError:
        return ""


def leads_to_itself(stream: trio.abc.Stream, own_port: int) -> bool:
    """Returns whether `stream`, which this process opened, leads to its own HA port: both ends have the same address,
    and the peer's port is `own_port`."""
    stream = getattr(stream, "transport_stream", stream)  # the TCP stream below TLS
    if not isinstance(stream, trio.SocketStream) or stream.socket.family not in IP_FAMILIES:
        return False
    try:
        (here, _), (there, port) = stream.socket.getsockname()[:2], stream.socket.getpeername()[:2]
    except OSError:
        return False
    return bool(here == there and port == own_port)


def host_of(peer: str) -> str:
    """Returns the address of a `host:port`, without brackets; "" if it has none."""
    return peer.rpartition(":")[0].removeprefix("[").removesuffix("]")


def identify_by_address(peer: str) -> str:
    """Returns the slave's identity: its IP address, so that two connections of one slave count once. If `peer` has no
    IP address, `peer` itself.

    On loopback every connection is a separate slave, because the slaves of a test or demonstration share the address.
    """
    host = host_of(peer)
    try:
        return peer if ip_address(host).is_loopback else host
    except ValueError:
        return peer
