"""Certificate authorities and certificates of the tests, made when they run."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from ha.tls.files import TlsFiles, client_context

HOSTS = ("127.0.0.1", "localhost")


class Pki:
    """A CA, and what it has signed, as PEM files in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.authority = trustme.CA(organization_name=name)
        self.trust = str(folder / f"{name}.pem")
        self.authority.cert_pem.write_to_path(self.trust)

    def issue(
        self,
        name: str,
        *,
        hosts: tuple[str, ...] = HOSTS,
        common_name: str | None = None,
        valid_for: timedelta = timedelta(days=365),
        password: str = "",
    ) -> tuple[str, str]:
        """Write `name`.pem and `name`.key (over what is there) and return their paths."""
        end = datetime.now(UTC) + valid_for
        issued = self.authority.issue_cert(
            *hosts,
            common_name=common_name,
            not_before=min(datetime.now(UTC), end) - timedelta(days=1),
            not_after=end,
        )
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        private = load_pem_private_key(issued.private_key_pem.bytes(), None)
        encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
        secret = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)  # what Java reads
        key.touch(mode=0o600)
        key.write_bytes(secret)
        return str(certificate), str(key)

    def files(
        self, name: str, *, common_name: str | None = None, valid_for: timedelta = timedelta(days=365)
    ) -> TlsFiles:
        """Issue `name`, and trust this CA."""
        certificate, key = self.issue(name, common_name=common_name, valid_for=valid_for)
        return TlsFiles(certificate=certificate, key=key, trust=self.trust)

    def client(self, name: str | None = None) -> ssl.SSLContext:
        """A client that trusts this CA, with a certificate of its own if it has a `name`."""
        return client_context(TlsFiles(trust=self.trust) if name is None else self.files(name, common_name=name))
