"""Connections on which admins may make changes: with TLS, from listed addresses, or either.

tls                     encrypted connections
10.0.0.*                an address pattern, as in plain_acl.yml
tls;127.0.0.1;10.0.0.*  any of these
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .addresses import AddressPattern
from .policy import HostFilter

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection

TLS = "tls"


class AdminOrigins:
    """A parsed list of the origins from which admins may make changes."""

    __slots__ = ("_hosts", "_takes_tls")

    def __init__(self, text: str) -> None:
        """Raises ValueError with the reason if `text` is not a list of origins."""
        words = [word.strip() for word in text.split(";")]
        if not all(words):
            raise ValueError(f"{text!r} is not a list of {TLS} and address patterns, separated by ;")
        self._takes_tls = TLS in words
        self._hosts = HostFilter(AddressPattern(word) for word in words if word != TLS)

    def match(self, connection: RemotingConnection) -> bool:
        """Returns whether `connection` has one of these origins."""
        return (self._takes_tls and connection.is_encrypted) or self._hosts.matches(connection.peer[0])
