"""Ports of servers, which are bound first and listen later.

Binding early detects a port in use, and determines the port number for 0, which a broker's store needs because each
record contains its broker's address. Listening starts when the service behind the port is ready: until then, clients
are refused and try another server, instead of waiting in the backlog during recovery.
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
"""Maximum number of connections that the kernel completes before they are accepted, as in listen(2)."""
_UNAVAILABLE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors for an address that this machine does not have, such as an IPv6 address while IPv6 is disabled."""


class BoundPort:
    """A port that is bound on `host` for the configuration key `key`. As a context manager, it releases the port unless
    it is listening."""

    def __init__(self, key: str, host: str, port: int) -> None:
        """Binds the port on all addresses of `host` that this machine has; 0 lets the system choose it. Blocks while
        the host name is looked up. Raises AddressInUse with `key` if `host` is unknown or the port can't be bound."""
        self.key = key
        self.host = host
        self._sockets: list[socket.socket] = []
        unavailable: OSError | None = None
        try:
            for family, kind, protocol, _, address in find_addresses(host, port, socket.AI_PASSIVE):
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
        """Starts listening; the caller closes the listeners. May be called only once. Raises AddressInUse if the system
        refuses."""
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


def find_addresses(host: str, port: int | None, flags: int = 0) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    """Returns the addresses of `host` as getaddrinfo does, without duplicates. Raises OSError if there are none, or if
    `host` is not a valid host name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:  # `host` has no IDNA encoding
        raise OSError("it is no host name") from None
    return list(dict.fromkeys((int(a), int(b), c, d, (str(e[0]), *e[1:])) for a, b, c, d, e in found))
