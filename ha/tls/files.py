"""Creates SSL contexts from PEM files, for servers and clients; used by nodes, the SDK and the `ha` command.

Protocols and ciphers are those of ssl.create_default_context: TLS 1.2 with forward secrecy, and 1.3. Renegotiation and
resumption are disabled: connections are long-lived, so resuming a session would save little, and it would not verify a
certificate that has been replaced since.
"""

from __future__ import annotations

import re
import ssl
from typing import NoReturn

import msgspec

from ha.config.secret import SecretStr
from ha.errors import CertificateUnusable

__all__ = ["SecretStr", "TlsFiles", "client_context", "read_pem", "reason_of", "server_context"]

PEM_SIZE_MAX = 4 << 20


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of the PEM files for one side of a connection; "" for none."""

    certificate: str = ""
    """File with this side's certificate, followed by intermediate certificates."""
    key: str = ""
    """File with the private key; "" if the key is in the certificate's file."""
    key_password: SecretStr | None = None
    trust: str = ""
    """File with the CAs of the other side's certificates; "" for the system's CAs (only in a client's context)."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all files, each once."""
        return tuple(dict.fromkeys(path for path in (self.certificate, self.key, self.trust) if path))


def server_context(
    files: TlsFiles, *, client_certificates: ssl.VerifyMode = ssl.CERT_NONE, protocols: tuple[str, ...] = ()
) -> ssl.SSLContext:
    """Returns a server's context. Clients' certificates, if requested, are verified with `files.trust`.

    `protocols`: names of the protocols that are offered to clients that ask for one (ALPN).

    Blocks to read files. Raises CertificateUnusable if one can't be used, or if certificates are requested without
    `files.trust`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    _load_own(context, files)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    if client_certificates is not ssl.CERT_NONE:
        if not files.trust:
            raise CertificateUnusable("", "no CAs to verify clients' certificates with")
        _load_trust(context, files.trust)
        context.verify_mode = client_certificates
    return _hardened(context)


def client_context(files: TlsFiles, *, check_server: bool = True, check_host: bool = True) -> ssl.SSLContext:
    """Returns a client's context, with a client certificate if `files` has one.

    `check_host`: the server's certificate must name the requested host. Without `check_server`, any certificate is
    accepted. Blocks to read files. Raises CertificateUnusable if one can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.check_hostname = check_server and check_host
    if not check_server:
        context.verify_mode = ssl.CERT_NONE
    elif files.trust:
        _load_trust(context, files.trust)
    else:
        context.load_default_certs()
    if files.certificate:
        _load_own(context, files)
    return _hardened(context)


def read_pem(path: str) -> str:
    """Returns a file's text. Raises CertificateUnusable if it can't be read, or exceeds PEM_SIZE_MAX bytes."""
    try:
        with open(path, encoding="ascii", errors="backslashreplace") as file:
            text = file.read(PEM_SIZE_MAX + 1)
    except OSError as error:
        _unreadable(path, error)
    if len(text) > PEM_SIZE_MAX:
        raise CertificateUnusable(path, f"it has more than {PEM_SIZE_MAX} bytes")
    return text


def _hardened(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    asked = False

    def password() -> str:  # without a callback, OpenSSL would prompt on the terminal
        nonlocal asked
        asked = True
        return "" if files.key_password is None else files.key_password.reveal()

    if "-----END CERTIFICATE-----" not in read_pem(files.certificate):
        raise CertificateUnusable(files.certificate, "it contains no PEM certificate")
    key = files.key or files.certificate
    if not re.search("-----END [A-Z ]*PRIVATE KEY-----", read_pem(key)):
        raise CertificateUnusable(key, "it contains no PEM private key")
    try:
        context.load_cert_chain(files.certificate, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateUnusable(key, f"it is not the key of {files.certificate}") from None
        if asked:
            wrong = "its password is missing" if files.key_password is None else "its password is wrong"
            raise CertificateUnusable(key, wrong) from None
        raise CertificateUnusable(files.certificate, f"{reason_of(error)} (with the key in {key})") from None
    except OSError as error:
        _unreadable(files.certificate, error)
    except ValueError:  # OpenSSL accepts at most 1,024 bytes
        raise CertificateUnusable(key, "its password is too long") from None


def _load_trust(context: ssl.SSLContext, path: str) -> None:
    pem = read_pem(path)
    try:
        context.load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError):
        found = "a damaged PEM certificate" if "CERTIFICATE-----" in pem else "no PEM certificates"
        raise CertificateUnusable(path, f"it contains {found}") from None


def _unreadable(path: str, error: OSError) -> NoReturn:
    raise CertificateUnusable(path, error.strerror or str(error)) from None


def reason_of(error: BaseException) -> str:
    """Describes a TLS error: with the reason why a certificate is not valid, or with OpenSSL's reason in lower case."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error) or type(error).__name__
