"""What wires a process's ports to its credentials: loading with errors that name keys, keeping fresh, securing."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import NoReturn

import trio

from ha.config.tls_keys import ServerTlsKeys
from ha.errors import CertificateUnusable, ConfigError

from .credentials import Credentials
from .files import TlsFiles, server_context
from .handshake import Handshakes

SERVER_KEYS = ("tls.server.certPath", "tls.server.keyPath", "tls.server.trustCertPath")
FILE_CHECK_INTERVAL_S = 5.0
"""Interval at which the files of certificates and access control are checked for changes."""
CLIENT_AUTH = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "require": ssl.CERT_REQUIRED}


RunBlocking = Callable[[Callable[[], object]], Awaitable[object]]
"""Runs a function that blocks without blocking the event loop."""


def load(
    role: str,
    files: TlsFiles,
    make: Callable[[TlsFiles], ssl.SSLContext],
    keys: tuple[str, str, str],
    wall_clock_ms: Callable[[], int],
) -> Credentials:
    """Make credentials; `keys` name certificate, key and trust in the ConfigError that a bad file raises. Blocks."""
    try:
        return Credentials(role, files, make, wall_clock_ms=wall_clock_ms)
    except CertificateUnusable as error:
        at = {files.trust: keys[2], files.key: keys[1], files.certificate: keys[0]}
        raise ConfigError(at.get(error.path, keys[0]), str(error), "a PEM file that can be used") from None


def server_files(keys: ServerTlsKeys) -> TlsFiles:
    """Return the files of a server."""
    return TlsFiles(
        certificate=keys.tls_server_cert_path,
        key=keys.tls_server_key_path,
        key_password=keys.tls_server_key_password,
        trust=keys.tls_server_trust_cert_path,
    )


def load_server(keys: ServerTlsKeys, wall_clock_ms: Callable[[], int]) -> Credentials | None:
    """Return what a remoting port needs; None where there is to be no TLS. Blocks. ConfigError."""
    if not keys.takes_tls:
        return None
    make = partial(server_context, client_certificates=CLIENT_AUTH[keys.tls_server_need_client_auth])
    return load("server", server_files(keys), make, SERVER_KEYS, wall_clock_ms)


def securing(
    handshakes: Handshakes, credentials: Credentials
) -> Callable[[trio.abc.Stream, bytes], Awaitable[trio.abc.Stream]]:
    """Return a function that makes an encrypted stream of one whose first bytes were read already."""

    async def secure(stream: trio.abc.Stream, first: bytes) -> trio.abc.Stream:
        return await handshakes.accept(stream, credentials.context, first)

    return secure


async def keep_fresh(credentials: Collection[Credentials], interval_s: float, run_blocking: RunBlocking) -> NoReturn:
    """Look after the files of all `credentials` for ever."""
    while True:
        for each in credentials:
            await run_blocking(each.refresh)
        await trio.sleep(interval_s)
