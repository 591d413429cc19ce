"""The flags of TLS, which the commands share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ha.cli.exits import UsageError
from ha.client.tls import ClientTls
from ha.config.secret import SecretStr
from ha.errors import CertificateUnusable


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


PLAIN = TlsFlags()
