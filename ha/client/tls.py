"""TLS of the SDK: trusted CAs, the client's certificate, and the environment variables that configure them.

HALOG_TLS               "true": encrypt, trusting the CAs that the system trusts
HALOG_TLS_CA            a PEM file with the CAs of brokers and name servers; implies HALOG_TLS
HALOG_TLS_CERT          a PEM file with the client's own certificate; implies HALOG_TLS
HALOG_TLS_KEY           a PEM file with its key, if that is another file
HALOG_TLS_KEY_PASSWORD  the key's password
HALOG_TLS_ANY_HOST      "true": a server's certificate need not match its address

HALOG_TLS=false has no effect if HALOG_TLS_CA or HALOG_TLS_CERT is set: unset them to disable TLS.

HALOG_TLS and HALOG_TLS_ANY_HOST also accept yes, y, 1, t and false, no, n, 0, f, like the flags of `ha`.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

import anyio
import msgspec
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from ha.errors import CertificateUnusable
from ha.tls.files import SecretStr, TlsFiles, client_context

Connect = Callable[[str, int], Awaitable[ByteStream]]
"""Opens a stream to a host and port. Raises OSError if it can't."""

TRUE, FALSE = frozenset({"true", "t", "yes", "y", "1"}), frozenset({"", "false", "f", "no", "n", "0"})


class ClientTls(msgspec.Struct, frozen=True, kw_only=True):
    """A client's TLS settings. `trust`, `certificate` and `key` are paths of PEM files, which `context`
    reads at each call."""

    trust: str = ""
    """File with the CAs of servers' certificates; "": the system's CAs."""
    certificate: str = ""
    """File with the client's certificate, for servers that require one; "": none."""
    key: str = ""
    """File with the private key of `certificate`; "": it is in the same file."""
    key_password: SecretStr | None = None
    check_host: bool = True
    """Whether a server's certificate must match its address: for brokers the one registered at the name servers,
    usually an IP address."""
    check_server: bool = True
    """Whether a server's certificate must be signed by a trusted CA. False accepts any certificate, like RocketMQ's
    clients by default; for tests."""

    def context(self) -> ssl.SSLContext:
        """Reads the files and returns a context. Blocks. Raises CertificateUnusable if a file can't be used."""
        files = TlsFiles(certificate=self.certificate, key=self.key, key_password=self.key_password, trust=self.trust)
        return client_context(files, check_server=self.check_server, check_host=self.check_host)


def environment_tls(environment: Mapping[str, str] = os.environ) -> ClientTls | None:
    """Returns the TLS settings in the environment; None if they don't enable TLS. Raises ValueError if they are invalid
    or incomplete."""

    def flag(name: str) -> bool:
        text = environment.get(name, "").lower()
        if text not in TRUE | FALSE:
            raise ValueError(f"{name}={text!r}; accepted: true, false")
        return text in TRUE

    trust, certificate = environment.get("HALOG_TLS_CA", ""), environment.get("HALOG_TLS_CERT", "")
    key, any_host = environment.get("HALOG_TLS_KEY", ""), flag("HALOG_TLS_ANY_HOST")
    if not (flag("HALOG_TLS") or trust or certificate):
        if (key or any_host) and not environment.get("HALOG_TLS"):
            raise ValueError("HALOG_TLS_KEY and HALOG_TLS_ANY_HOST require HALOG_TLS, HALOG_TLS_CA or HALOG_TLS_CERT")
        return None
    password = environment.get("HALOG_TLS_KEY_PASSWORD")
    return ClientTls(
        trust=trust,
        certificate=certificate,
        key=key,
        key_password=SecretStr(password) if password else None,
        check_host=not any_host,
    )


def connector(tls: ssl.SSLContext | ClientTls | None, connect: Connect | None) -> Connect:
    """Returns a function that opens streams with `connect` (None: TCP), over TLS if it is configured.

    `tls` takes precedence over the environment. Blocks while it reads files. Raises ValueError if they can't be used,
    or if the environment is invalid.
    """
    opens = anyio.connect_tcp if connect is None else connect
    try:
        tls = tls or environment_tls()
        context = tls.context() if isinstance(tls, ClientTls) else tls
    except CertificateUnusable as error:
        raise ValueError(str(error)) from None
    if context is None:
        return opens

    async def connect_tls(host: str, port: int) -> ByteStream:
        async with AsyncExitStack() as unless_secured:
            stream = await opens(host, port)
            unless_secured.push_async_callback(anyio.aclose_forcefully, stream)
            try:
                # Frames have lengths, so truncation is detected without a TLS close_notify.
                secured = await TLSStream.wrap(stream, hostname=host, ssl_context=context, standard_compatible=False)
            except anyio.BrokenResourceError as error:
                raise ConnectionError("TLS handshake failed") from (error.__cause__ or error)
            except anyio.EndOfStream:
                raise ConnectionError("the server closed the connection during the TLS handshake") from None
            unless_secured.pop_all()
        return secured

    return connect_tls
