"""Loads and refreshes the TLS credentials of a process's ports and outgoing connections, and encrypts their streams."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import NoReturn

import trio

from ha.config.link_keys import LinkKeys
from ha.config.tls_keys import ServerTlsKeys
from ha.errors import CertificateUnusable, ConfigError, HandshakeFailed

from .credentials import Credentials
from .files import TlsFiles, client_context, server_context
from .handshake import Handshakes

SERVER_KEYS = ("tls.server.certPath", "tls.server.keyPath", "tls.server.trustCertPath")
CLIENT_KEYS = ("tls.client.certPath", "tls.client.keyPath", "tls.client.trustCertPath")
FILE_CHECK_INTERVAL_S = 5.0
"""Interval in seconds at which the files of certificates and access control are checked for changes."""
CLIENT_AUTH = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "require": ssl.CERT_REQUIRED}


RunBlocking = Callable[[Callable[[], object]], Awaitable[object]]
"""Runs a blocking function without blocking the event loop."""
Connect = Callable[[str], Awaitable[trio.abc.Stream]]
"""Opens a stream to an address. Raises OSError if it can't."""


def load(
    role: str,
    files: TlsFiles,
    make: Callable[[TlsFiles], ssl.SSLContext],
    keys: tuple[str, str, str],
    wall_clock_ms: Callable[[], int],
) -> Credentials:
    """Loads credentials. Blocks. Raises ConfigError if a file can't be used; the error is for one of `keys`, the
    configuration keys of the certificate, the private key and the CAs."""
    try:
        return Credentials(role, files, make, wall_clock_ms=wall_clock_ms)
    except CertificateUnusable as error:
        at = {files.trust: keys[2], files.key: keys[1], files.certificate: keys[0]}
        raise ConfigError(at.get(error.path, keys[0]), str(error), "a usable PEM file") from None


def server_files(keys: ServerTlsKeys) -> TlsFiles:
    """Returns the TLS files that a server's configuration names."""
    return TlsFiles(
        certificate=keys.tls_server_cert_path,
        key=keys.tls_server_key_path,
        key_password=keys.tls_server_key_password,
        trust=keys.tls_server_trust_cert_path,
    )


def load_server(
    keys: ServerTlsKeys, wall_clock_ms: Callable[[], int], *, role: str = "server", protocols: tuple[str, ...] = ()
) -> Credentials | None:
    """Returns the credentials of a port that uses the keys tls.server.…; None if they turn TLS off. Blocks. Raises
    ConfigError if a file can't be used.

    `protocols`: names of the protocols that the port offers to clients that ask for one (ALPN).
    """
    if not keys.takes_tls:
        return None
    client_certificates = CLIENT_AUTH[keys.tls_server_need_client_auth]
    make = partial(server_context, client_certificates=client_certificates, protocols=protocols)
    return load(role, server_files(keys), make, SERVER_KEYS, wall_clock_ms)


def load_client(keys: LinkKeys, wall_clock_ms: Callable[[], int]) -> Credentials:
    """Returns the credentials of connections to name servers and brokers. Blocks. Raises ConfigError if a file can't be
    used."""
    files = TlsFiles(
        certificate=keys.tls_client_cert_path,
        key=keys.tls_client_key_path,
        key_password=keys.tls_client_key_password,
        trust=keys.tls_client_trust_cert_path,
    )
    make = partial(client_context, check_server=keys.tls_client_auth_server, check_host=keys.tls_client_check_host)
    return load("client", files, make, CLIENT_KEYS, wall_clock_ms)


def connecting(handshakes: Handshakes, credentials: Credentials, connect: Connect) -> Connect:
    """Returns a function that connects with `connect` and encrypts the stream. It raises OSError if the connection or
    the handshake fails."""

    async def connect_with_tls(address: str) -> trio.abc.Stream:
        stream = await connect(address)
        host = address.rpartition(":")[0].strip("[]")
        try:
            return await handshakes.connect(stream, credentials.context, host)
        except HandshakeFailed as error:
            raise ConnectionError(str(error)) from None

    return connect_with_tls


def securing(
    handshakes: Handshakes, credentials: Credentials
) -> Callable[[trio.abc.Stream, bytes], Awaitable[trio.abc.Stream]]:
    """Returns a function that encrypts a stream whose first bytes were already read. It raises HandshakeFailed if the
    handshake fails."""

    async def secure(stream: trio.abc.Stream, first: bytes) -> trio.abc.Stream:
        return await handshakes.accept(stream, credentials.context, first)

    return secure


async def keep_fresh(credentials: Collection[Credentials], interval_s: float, run_blocking: RunBlocking) -> NoReturn:
    """Refreshes all `credentials` now and every `interval_s` seconds, until cancelled."""
    while True:
        for each in credentials:
            await run_blocking(each.refresh)
        await trio.sleep(interval_s)
