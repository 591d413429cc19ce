"""Ports that a node has taken but doesn't listen on yet.

Binding tells at once that a port is taken, and which one the system chose for 0: the store needs that, as every record
holds its broker's address. Listening waits until the room behind the port serves: until then a client is refused and
goes elsewhere, instead of hanging in the backlog while a log is recovered.
"""

from __future__ import annotations

import socket
from types import TracebackType

import trio

from ha.errors import AddressInUse

BACKLOG = 1024


class BoundPort:
    """`host:port` taken for configuration key `key`. A context manager: what nobody listens on is released."""

    def __init__(self, key: str, host: str, port: int) -> None:
        """Take it. Port 0: the system chooses. AddressInUse, naming `key`."""
        self.key = key
        self.host = host
        self._sockets: list[socket.socket] = []
        try:
            for family, kind, protocol, _, address in _addresses(host, port):
                bound = socket.socket(family, kind, protocol)
                self._sockets.append(bound)
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                bound.bind((address[0], port, *address[2:]))
                port = bound.getsockname()[1]
        except OSError as error:
            self.release()
            raise AddressInUse(key, host, port, error.strerror or str(error)) from error
        self.port = port

    def listen(self) -> list[trio.SocketListener]:
        """Accept from now on; the listeners are the caller's to close. Once only. AddressInUse."""
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
        """Give up what nobody listens on."""
        for bound in self._sockets:
            bound.close()
        self._sockets = []

    def __enter__(self) -> BoundPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(a), int(b), c, d, (str(e[0]), *e[1:])) for a, b, c, d, e in found))


def resolve(host: str) -> str:
    """Return the numeric address of `host`, an IPv4 one if there is one. OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def own_address() -> str:
    """Return the address that this machine would talk to the world from; loopback if it has no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only asks which way packets would go
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def join(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether listening on `host` means all addresses of the machine."""
    return host in ("0.0.0.0", "::")
