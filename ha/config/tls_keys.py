"""The configuration keys of TLS on the ports of all servers.

In RocketMQ, keys that start with `tls.` are JVM system properties, or are in the file named by `tls.config.file`
(TlsSystemConfig); here they are ordinary keys. Unlike RocketMQ, halog by default verifies every certificate that a peer
presents.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ha.errors import ConfigError

from .key import key as _key
from .secret import SecretStr

TlsMode = Literal["disabled", "permissive", "enforcing"]

PERMISSIVE, ENFORCING = "permissive", "enforcing"


class ServerTlsKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys for TLS on remoting ports and gRPC ports."""

    tls_server_mode: TlsMode = _key("tls.server.mode", "permissive")
    """whether remoting and gRPC ports accept only plaintext (disabled), plaintext and TLS (permissive), or only TLS
    (enforcing); without tls.server.certPath, permissive accepts only plaintext"""
    tls_server_cert_path: str = _key("tls.server.certPath", "")
    """PEM file with the server's certificate and its intermediate certificates"""
    tls_server_key_path: str = _key("tls.server.keyPath", "")
    """PEM file with the key of the certificate in tls.server.certPath; derived: tls.server.certPath, for a file with
    both"""
    tls_server_key_password: SecretStr | None = _key("tls.server.keyPassword", None)
    """password of the key in tls.server.keyPath, if it is encrypted"""
    tls_server_need_client_auth: Literal["none", "optional", "require"] = _key("tls.server.need.client.auth", "none")
    """whether clients of remoting and gRPC ports must present a certificate (require), may present one (optional), or
    are not asked for one (none); a certificate is always verified"""
    tls_server_auth_client: bool | None = _key("tls.server.authClient", None)
    """whether clients' certificates are verified; derived: true unless tls.server.need.client.auth is none; any other
    value is rejected (with false, RocketMQ accepts any certificate)"""
    tls_server_trust_cert_path: str = _key("tls.server.trustCertPath", "")
    """PEM file with the CAs of clients' certificates"""
    tls_test_mode_enable: bool = _key("tls.test.mode.enable", False)
    """must be false; with true, RocketMQ uses a generated certificate that nobody can verify; see docs/tls.md"""
    tls_config_file: str = _key("tls.config.file", "")
    """properties file with further keys that start with tls.; other sources override it"""

    @property
    def takes_tls(self) -> bool:
        """Whether the remoting ports accept TLS."""
        return self.tls_server_mode != "disabled" and bool(self.tls_server_cert_path)


def derive_tls(keys: ServerTlsKeys) -> None:
    """Fills in values that depend on other keys."""
    put = msgspec.structs.force_setattr
    put(keys, "tls_server_key_path", keys.tls_server_key_path or keys.tls_server_cert_path)
    if keys.tls_server_auth_client is None:
        put(keys, "tls_server_auth_client", keys.tls_server_need_client_auth != "none")


def check_tls(keys: ServerTlsKeys) -> list[ConfigError]:
    """Returns an error for each contradiction. The files are checked when they are loaded."""
    pem = "a PEM file"
    found = []

    def wrong(key: str, reason: str, accepted: str) -> None:
        found.append(ConfigError(key, reason, accepted))

    asks, checks = keys.tls_server_need_client_auth, keys.tls_server_auth_client
    if keys.tls_test_mode_enable:
        wrong("tls.test.mode.enable", "a generated certificate can't be verified", "false, and a certificate")
    if keys.tls_server_mode == ENFORCING and not keys.tls_server_cert_path:
        wrong("tls.server.certPath", "is required if tls.server.mode is enforcing", pem)
    if keys.tls_server_key_path and not keys.tls_server_cert_path:
        wrong("tls.server.certPath", "is required if tls.server.keyPath is set", pem)
    if asks != "none" and not checks:
        wrong(
            "tls.server.authClient", f"certificates required by need.client.auth={asks} would not be verified", "true"
        )
    if asks == "none" and checks:
        wrong("tls.server.need.client.auth", "contradicts tls.server.authClient=true", "optional, require")
    if asks != "none" and not keys.tls_server_trust_cert_path:
        wrong("tls.server.trustCertPath", f"is required if tls.server.need.client.auth is {asks}", pem)
    if asks == "require" and keys.tls_server_mode == PERMISSIVE:
        wrong("tls.server.need.client.auth", "require needs tls.server.mode=enforcing", "optional, none")
    return found
