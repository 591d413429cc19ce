"""How the SDK encrypts: whom it trusts, what it shows, and where that is told if the program doesn't.

HALOG_TLS               "true": encrypt, trusting the CAs that the system trusts
HALOG_TLS_CA            a PEM file with the CAs of brokers and name servers; implies HALOG_TLS
HALOG_TLS_CERT          a PEM file with the client's own certificate; implies HALOG_TLS
HALOG_TLS_KEY           a PEM file with its key, if that is another file
HALOG_TLS_KEY_PASSWORD  the key's password
HALOG_TLS_ANY_HOST      "true": a server's certificate need not name the address that it was reached at

For true and false one may write what the flags of the command take as well: yes, y, 1, t and no, n, 0, f.
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
"""Opens a stream to a host and port. OSError if it can't."""

TRUE, FALSE = frozenset({"true", "t", "yes", "y", "1"}), frozenset({"", "false", "f", "no", "n", "0"})


class ClientTls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files; "" where there is none. `context` reads them, anew each time."""

    trust: str = ""
    """The CAs of servers' certificates; "": those that the system trusts."""
    certificate: str = ""
    """The client's own certificate, for servers that ask for one."""
    key: str = ""
    """Its key; "": it is in the same file."""
    key_password: SecretStr | None = None
    check_host: bool = True
    """A server's certificate must name the address that it was reached at: what name servers tell of brokers, mostly
    IP addresses."""
    check_server: bool = True
    """False: any server is taken for the right one, as RocketMQ's clients do by default. For tests."""

    def context(self) -> ssl.SSLContext:
        """Return a context made of the files. Blocks. CertificateUnusable."""
        files = TlsFiles(certificate=self.certificate, key=self.key, key_password=self.key_password, trust=self.trust)
        return client_context(files, check_server=self.check_server, check_host=self.check_host)


def environment_tls(environment: Mapping[str, str] = os.environ) -> ClientTls | None:
    """What the environment says, None if it says nothing. ValueError for a value that is neither true nor false."""

    def flag(name: str) -> bool:
        text = environment.get(name, "").lower()
        if text not in TRUE | FALSE:
            raise ValueError(f"{name}={text!r}; accepted: true, false")
        return text in TRUE

    trust, certificate = environment.get("HALOG_TLS_CA", ""), environment.get("HALOG_TLS_CERT", "")
    if not (flag("HALOG_TLS") or trust or certificate):
        return None
    password = environment.get("HALOG_TLS_KEY_PASSWORD")
    return ClientTls(
        trust=trust,
        certificate=certificate,
        key=environment.get("HALOG_TLS_KEY", ""),
        key_password=SecretStr(password) if password else None,
        check_host=not flag("HALOG_TLS_ANY_HOST"),
    )


def connector(tls: ssl.SSLContext | ClientTls | None, connect: Connect | None) -> Connect:
    """Return what opens streams: `connect`, by default TCP, and TLS on top of it if `tls` or the environment say so.

    Blocks if there are files to read. ValueError if they can't be used.
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
                # Frames have lengths: a connection that is cut off needs no goodbye to be told from a complete one.
                secured = await TLSStream.wrap(stream, hostname=host, ssl_context=context, standard_compatible=False)
            except anyio.BrokenResourceError as error:
                raise ConnectionError("TLS handshake failed") from (error.__cause__ or error)
            except anyio.EndOfStream:
                raise ConnectionError("the server hung up in the TLS handshake") from None
            unless_secured.pop_all()
        return secured

    return connect_tls
