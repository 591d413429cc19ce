"""Resolves host names, finds this machine's own address, and writes addresses as text."""

from __future__ import annotations

import socket

from ha.remoting.ports import find_addresses


def resolve(host: str) -> str:
    """Returns a numeric address of `host`, preferring IPv4. Raises OSError if `host` can't be resolved."""
    found = find_addresses(host, None)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return found[0][4][0]


def own_address(wildcard: str) -> str:
    """Returns the address that this machine uses for outgoing traffic, or a loopback address if it has no route. The
    result is an IPv6 address if `wildcard` is one, otherwise an IPv4 address."""
    is_ipv6 = ":" in wildcard
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if is_ipv6 else "192.0.2.1", 9))  # sends nothing, only selects a route
        except OSError:
            return "::1" if is_ipv6 else "127.0.0.1"
        return str(probe.getsockname()[0])


def join(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Returns whether `host` stands for all IPv4 or all IPv6 addresses of the machine."""
    return host in ("0.0.0.0", "::")
