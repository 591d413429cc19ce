"""Ports that are bound first and listen later.

Binding early detects a port in use, and determines the port number for 0, which the store needs because each record
contains its broker's address. Listening starts when the service behind the port is ready: until then, clients are
refused and try another broker, instead of waiting in the backlog during recovery.
"""

from __future__ import annotations

import errno
import logging
import socket
from types import TracebackType

import trio

from ha.errors import AddressInUse

logger = logging.getLogger(__name__)

BACKLOG = 1024
_UNAVAILABLE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors of an address that is not of this machine, such as an IPv6 address while IPv6 is disabled"""


class BoundPort:
    """A port that is bound on `host` for the configuration key `key`. As a context manager, it releases the port unless
    it is listening."""

    def __init__(self, key: str, host: str, port: int) -> None:
        """Binds the port on all addresses of `host` that this machine has; 0 lets the system choose it. Raises
        AddressInUse with `key`."""
        self.key = key
        self.host = host
        self._sockets: list[socket.socket] = []
        unavailable: OSError | None = None
        try:
            for family, kind, protocol, _, address in _addresses(host, port, socket.AI_PASSIVE):
                try:
                    bound = _bind(family, kind, protocol, (address[0], port, *address[2:]))
                except OSError as error:
                    if error.errno not in _UNAVAILABLE:
                        raise
                    unavailable = error
                    logger.warning("node.address_unavailable key=%s address=%s reason=%r", key, address[0], str(error))
                else:
                    self._sockets.append(bound)
                    port = bound.getsockname()[1]
            if unavailable is not None and not self._sockets:
                raise unavailable
        except OSError as error:
            self.release()
            raise AddressInUse(key, host, port, error.strerror or str(error)) from error
        self.port = port

    def listen(self) -> list[trio.SocketListener]:
        """Starts listening; the caller closes the listeners. May be called only once. Raises AddressInUse."""
        listeners = []
        try:
            for bound in self._sockets:
                bound.listen(BACKLOG)
                listeners.append(trio.SocketListener(trio.socket.from_stdlib_socket(bound)))
        except OSError as error:
            raise AddressInUse(self.key, self.host, self.port, error.strerror or str(error)) from error
        self._sockets = []
        return listeners

    def release(self) -> None:
        """Releases the port unless it is listening."""
        for bound in self._sockets:
            bound.close()
        self._sockets = []

    def __enter__(self) -> BoundPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _bind(family: int, kind: int, protocol: int, address: tuple[str | int, ...]) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _addresses(host: str, port: int | None, flags: int = 0) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    """Returns the addresses of `host` as getaddrinfo does. Raises OSError, also if `host` can't be a host name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:  # `host` has no IDNA encoding
        raise OSError("it is no host name") from None
    return list(dict.fromkeys((int(a), int(b), c, d, (str(e[0]), *e[1:])) for a, b, c, d, e in found))


def resolve(host: str) -> str:
    """Returns a numeric address of `host`, preferring IPv4. Raises OSError."""
    found = _addresses(host, None)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return found[0][4][0]


def own_address(wildcard: str) -> str:
    """Returns the address that this machine uses for outgoing traffic, an IPv6 address if `wildcard` is one, otherwise
    an IPv4 address; a loopback address if it has no route."""
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
    """Whether `host` stands for all IPv4 or all IPv6 addresses of the machine."""
    return host in ("0.0.0.0", "::")
