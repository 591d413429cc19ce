"""Addresses of peers as text, as in requests, route data and configurations."""

from __future__ import annotations

_PORT_MAX = 65_535


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` into the host and the port, from 1 to 65,535. An IPv6 host may be in brackets, which are
    removed. Raises ValueError if `address` has another form.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and len(port) <= len(str(_PORT_MAX)) and 0 < int(port) <= _PORT_MAX
    if not host or not is_port:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)
