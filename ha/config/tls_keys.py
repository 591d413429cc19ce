"""The TLS keys of all servers, and further ones of broker nodes.

In RocketMQ, keys that start with `tls.` are JVM system properties, or are in the file named by `tls.config.file`
(TlsSystemConfig); here they are ordinary keys. Unlike RocketMQ's, halog's defaults verify every certificate.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ha.errors import ConfigError

from .acl_keys import AclKeys
from .key import key as _key
from .secret import SecretStr

TlsMode = Literal["disabled", "permissive", "enforcing"]

PERMISSIVE, ENFORCING = "permissive", "enforcing"


class ServerTlsKeys(AclKeys, frozen=True, kw_only=True):
    """TLS of remoting ports."""

    tls_server_mode: TlsMode = _key("tls.server.mode", "permissive")
    """remoting ports: plaintext, both, or TLS only; permissive without certPath is plaintext"""
    tls_server_cert_path: str = _key("tls.server.certPath", "")
    """PEM file with the server's certificate and its intermediate certificates"""
    tls_server_key_path: str = _key("tls.server.keyPath", "")
    """PEM file; derived: tls.server.certPath, for a file that contains both"""
    tls_server_key_password: SecretStr | None = _key("tls.server.keyPassword", None)
    tls_server_need_client_auth: Literal["none", "optional", "require"] = _key("tls.server.need.client.auth", "none")
    """remoting ports: whether clients present a certificate, which is always verified"""
    tls_server_auth_client: bool | None = _key("tls.server.authClient", None)
    """derived from tls.server.need.client.auth; false, which in RocketMQ accepts any certificate, is rejected"""
    tls_server_trust_cert_path: str = _key("tls.server.trustCertPath", "")
    """PEM file with the CAs of clients' certificates"""
    tls_test_mode_enable: bool = _key("tls.test.mode.enable", False)
    """true, which in RocketMQ uses a generated certificate that nobody can verify, is rejected; see docs/tls.md"""
    tls_config_file: str = _key("tls.config.file", "")
    """properties file with further keys that start with tls.; other sources override it"""

    @property
    def takes_tls(self) -> bool:
        """Whether the remoting ports accept TLS."""
        return self.tls_server_mode != "disabled" and bool(self.tls_server_cert_path)


class BrokerTlsKeys(ServerTlsKeys, frozen=True, kw_only=True):
    """TLS of a broker node's connections, HA port and admin port."""

    tls_enable: bool = _key("tls.enable", False)
    """whether connections to name servers and to the master's remoting port use TLS; also set by useTLS"""
    tls_client_cert_path: str = _key("tls.client.certPath", "")
    """PEM file with the certificate that this node presents to name servers and its master"""
    tls_client_key_path: str = _key("tls.client.keyPath", "")
    """PEM file; derived: tls.client.certPath"""
    tls_client_key_password: SecretStr | None = _key("tls.client.keyPassword", None)
    tls_client_auth_server: bool = _key("tls.client.authServer", True)
    """whether servers' certificates are verified; halog warns if not"""
    tls_client_trust_cert_path: str = _key("tls.client.trustCertPath", "")
    """PEM file with the CAs of servers' certificates; unset: the system's CAs"""
    tls_client_check_host: bool = _key("tls.client.checkHost", True)
    """own; whether a server's certificate must name the address used to reach it; RocketMQ doesn't check"""

    ha_tls: TlsMode = _key("haTls", "disabled")
    """own; the HA port, like tls.server.mode; enforcing also applies to a slave's link to its master"""
    ha_tls_trust_cert_path: str = _key("haTlsTrustCertPath", "")
    """own; PEM file with the CAs of slaves' certificates, which haTls requires; derived: tls.server.trustCertPath"""
    ha_tls_subjects: str = _key("haTlsSubjects", "")
    """own; common names of slaves' certificates, separated by ;; unset: any name signed by those CAs"""
    admin_tls: Literal["disabled", "enforcing"] = _key("adminTls", "disabled")
    """own; HTTPS on the admin port, with tls.server.certPath"""

    @property
    def ha_tls_subject_set(self) -> frozenset[str]:
        """The common names in haTlsSubjects."""
        return frozenset(name.strip() for name in self.ha_tls_subjects.split(";") if name.strip())


def derive_tls(keys: ServerTlsKeys) -> None:
    """Fills in values that depend on other keys."""
    put = msgspec.structs.force_setattr
    put(keys, "tls_server_key_path", keys.tls_server_key_path or keys.tls_server_cert_path)
    if keys.tls_server_auth_client is None:
        put(keys, "tls_server_auth_client", keys.tls_server_need_client_auth != "none")
    if isinstance(keys, BrokerTlsKeys):
        put(keys, "tls_client_key_path", keys.tls_client_key_path or keys.tls_client_cert_path)
        put(keys, "ha_tls_trust_cert_path", keys.ha_tls_trust_cert_path or keys.tls_server_trust_cert_path)


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
    if isinstance(keys, BrokerTlsKeys):
        if keys.tls_client_key_path and not keys.tls_client_cert_path:
            wrong("tls.client.certPath", "is required if tls.client.keyPath is set", pem)
        if keys.ha_tls != "disabled":
            if not keys.tls_server_cert_path:
                wrong("tls.server.certPath", f"is required if haTls is {keys.ha_tls}", pem)
            if not keys.ha_tls_trust_cert_path:
                wrong("haTlsTrustCertPath", f"is required if haTls is {keys.ha_tls}", pem)
        elif keys.ha_tls_subjects:
            wrong("haTlsSubjects", "requires haTls", "no value, or haTls=enforcing")
        if keys.admin_tls == ENFORCING and not keys.tls_server_cert_path:
            wrong("tls.server.certPath", "is required if adminTls is enforcing", pem)
    return found
