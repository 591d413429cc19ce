"""The flags that commands share: whom to ask, as whom, and what to encrypt with."""

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


@Parameter(name="*")
@dataclass(frozen=True)
class ClusterFlags:
    """Which cluster, and who asks. The secret key is in a file or HALOG_SECRET_KEY, where `ps` doesn't show it."""

    servers: Annotated[str, Parameter(env_var="NAMESRV_ADDR", help="Name servers, host:port joined with ';'.")] = (
        "127.0.0.1:9876"
    )
    access_key: Annotated[
        str | None, Parameter(env_var="HALOG_ACCESS_KEY", help="Who signs, where brokers control access.")
    ] = None
    secret_key_file: Annotated[
        str | None,
        Parameter(
            env_var="HALOG_SECRET_KEY_FILE", help="A file with its secret key; or the key itself in HALOG_SECRET_KEY."
        ),
    ] = None

    def addresses(self) -> list[str]:
        """Return the name servers. UsageError."""
        try:
            return list(name_server_addresses(self.servers))
        except ValueError as error:
            raise UsageError(f"--servers: {error}") from None

    def credentials(self) -> AclCredentials | None:
        """Return what they and the environment name, None if they name nothing. UsageError."""
        try:
            return environment_credentials(access_key=self.access_key, secret_key_file=self.secret_key_file)
        except ValueError as error:
            raise UsageError(f"--access-key, --secret-key-file: {error}") from None


@Parameter(name="*")
@dataclass(frozen=True)
class TlsFlags:
    """What to encrypt with. A password is taken from HALOG_TLS_KEY_PASSWORD alone, where `ps` doesn't show it."""

    tls: Annotated[
        bool, Parameter(env_var="HALOG_TLS", negative=(), help="Encrypt, trusting the CAs that the system trusts.")
    ] = False
    tls_ca: Annotated[
        Path | None, Parameter(env_var="HALOG_TLS_CA", help="Encrypt, trusting the CAs in this PEM file.")
    ] = None
    tls_cert: Annotated[
        Path | None, Parameter(env_var="HALOG_TLS_CERT", help="A PEM file with the certificate to show.")
    ] = None
    tls_key: Annotated[
        Path | None, Parameter(env_var="HALOG_TLS_KEY", help="A PEM file with its key, if that is another.")
    ] = None
    tls_any_host: Annotated[
        bool,
        Parameter(
            env_var="HALOG_TLS_ANY_HOST",
            negative=(),
            help="A server's certificate need not name the address that it was reached at.",
        ),
    ] = False

    def checked(self) -> ClientTls | None:
        """Return what they say, None for plain connections. UsageError if a file can't be used."""
        if (self.tls_key is not None or self.tls_any_host) and not (self.tls or self.tls_ca or self.tls_cert):
            raise UsageError("--tls-key and --tls-any-host need --tls, --tls-ca or --tls-cert")
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


LOCAL, PLAIN = ClusterFlags(), TlsFlags()


@Parameter(name="*")
@dataclass(frozen=True)
class WaitFlags:
    """How long an answer is waited for."""

    timeout: Annotated[float, Parameter(help="Seconds to wait for each answer of a name server or broker.")] = 5.0

    def checked(self) -> float:
        """Return it. UsageError."""
        if not 0 < self.timeout <= 3600:
            raise UsageError("--timeout is more than 0 s, and 3600 s at most")
        return self.timeout


PATIENT = WaitFlags()


def client_options(cluster: ClusterFlags, tls: TlsFlags, wait: WaitFlags) -> ClientOptions:
    """Return what the SDK is told. UsageError."""
    timeout_s = wait.checked()
    return ClientOptions(
        credentials=cluster.credentials(),
        tls=tls.checked(),
        connect_timeout_s=min(timeout_s, 3.0),
        request_timeout_s=timeout_s,
    )
