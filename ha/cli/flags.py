"""Flags that commands share: cluster, credentials, TLS and timeouts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ha.cli.exits import UsageError
from ha.client.credentials import environment_credentials
from ha.client.options import ClientOptions, name_server_addresses
from ha.client.tls import ClientTls
from ha.config.secret import SecretStr
from ha.errors import CertificateUnusable
from ha.protocol.acl import AclCredentials

SERVERS_NAMES = ("--servers", "--namesrv", "-n")
"""Spellings of the flag for the name servers; -n is mqadmin's"""


def check_timeout(timeout_s: float) -> None:
    """Raises UsageError unless a value of --timeout is above 0 and at most 3600."""
    if not 0 < timeout_s <= 3600:
        raise UsageError("--timeout must be greater than 0 and at most 3600 s")


@Parameter(name="*")
@dataclass(frozen=True)
class ClusterFlags:
    """Cluster and credentials. The secret key comes from a file or HALOG_SECRET_KEY, where `ps` doesn't show it."""

    servers: Annotated[
        str,
        Parameter(name=SERVERS_NAMES, env_var="NAMESRV_ADDR", help="Name servers as host:port, separated by ';'."),
    ] = "127.0.0.1:9876"
    access_key: Annotated[
        str | None, Parameter(env_var="HALOG_ACCESS_KEY", help="Access key, if brokers control access.")
    ] = None
    secret_key_file: Annotated[
        str | None,
        Parameter(
            env_var="HALOG_SECRET_KEY_FILE", help="File with the secret key. Alternatively set HALOG_SECRET_KEY."
        ),
    ] = None

    def addresses(self) -> list[str]:
        """Returns the name servers. Raises UsageError if one is not host:port, or if there is none."""
        try:
            return list(name_server_addresses(self.servers))
        except ValueError as error:
            raise UsageError(f"--servers: {error}") from None

    def credentials(self) -> AclCredentials | None:
        """Returns the credentials from flags and environment; None if there are none.

        Raises UsageError if only one of the two keys is given, or if the file can't be used.
        """
        try:
            return environment_credentials(access_key=self.access_key, secret_key_file=self.secret_key_file)
        except ValueError as error:
            raise UsageError(f"--access-key, --secret-key-file: {error}") from None


@Parameter(name="*")
@dataclass(frozen=True)
class TlsFlags:
    """TLS settings. The key's password comes only from HALOG_TLS_KEY_PASSWORD, where `ps` doesn't show it."""

    tls: Annotated[bool, Parameter(env_var="HALOG_TLS", negative=(), help="Use TLS with the system's trusted CAs.")] = (
        False
    )
    tls_ca: Annotated[Path | None, Parameter(env_var="HALOG_TLS_CA", help="Use TLS with the CAs in this PEM file.")] = (
        None
    )
    tls_cert: Annotated[
        Path | None, Parameter(env_var="HALOG_TLS_CERT", help="PEM file with the client certificate.")
    ] = None
    tls_key: Annotated[
        Path | None, Parameter(env_var="HALOG_TLS_KEY", help="PEM file with the certificate's key, if separate.")
    ] = None
    tls_any_host: Annotated[
        bool,
        Parameter(
            env_var="HALOG_TLS_ANY_HOST",
            negative=(),
            help="Don't check that a server's certificate contains its address.",
        ),
    ] = False

    def client_tls(self) -> ClientTls | None:
        """Returns the TLS options, or None for plaintext. Raises UsageError for an unusable file or a missing flag."""
        if (self.tls_key is not None or self.tls_any_host) and not (self.tls or self.tls_ca or self.tls_cert):
            raise UsageError("--tls-key and --tls-any-host require --tls, --tls-ca or --tls-cert")
        if not (self.tls or self.tls_ca or self.tls_cert):
            return None
        password = os.environ.get("HALOG_TLS_KEY_PASSWORD")
        found = ClientTls(
            trust=str(self.tls_ca or ""),
            certificate=str(self.tls_cert or ""),
            key=str(self.tls_key or ""),
            key_password=SecretStr(password) if password else None,
            check_host=not self.tls_any_host,
        )
        try:
            found.context()
        except CertificateUnusable as error:
            raise UsageError(f"TLS: {error}") from None
        return found


@Parameter(name="*")
@dataclass(frozen=True)
class ClientFlags(TlsFlags, ClusterFlags):
    """Flags of a command that uses the SDK."""

    timeout: Annotated[float, Parameter(help="Timeout of each request to a name server or broker, in seconds.")] = 5.0

    def timeout_s(self) -> float:
        """Returns the timeout in seconds. Raises UsageError unless it is above 0 and at most 3600."""
        check_timeout(self.timeout)
        return self.timeout

    def options(self) -> ClientOptions:
        """Returns the SDK's options. Raises UsageError if a flag is invalid or a file can't be used."""
        timeout_s = self.timeout_s()
        return ClientOptions(
            credentials=self.credentials(),
            tls=self.client_tls(),
            connect_timeout_s=min(timeout_s, 3.0),
            request_timeout_s=timeout_s,
            retry_unreachable=False,
        )


LOCAL, PLAIN, LOCAL_CLIENT = ClusterFlags(), TlsFlags(), ClientFlags()
