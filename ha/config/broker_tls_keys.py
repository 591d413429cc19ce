"""The TLS keys of broker nodes beside those of their remoting ports: clients, HA port and admin port."""

from __future__ import annotations

from typing import Literal

import msgspec

from ha.errors import ConfigError

from .acl_keys import AclKeys
from .key import key as _key
from .secret import SecretStr
from .tls_keys import ENFORCING, TlsMode


class BrokerTlsKeys(AclKeys, frozen=True, kw_only=True):
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


def derive_broker_tls(keys: BrokerTlsKeys) -> None:
    """Fills in values that depend on other keys, after `derive_tls`."""
    put = msgspec.structs.force_setattr
    put(keys, "tls_client_key_path", keys.tls_client_key_path or keys.tls_client_cert_path)
    put(keys, "ha_tls_trust_cert_path", keys.ha_tls_trust_cert_path or keys.tls_server_trust_cert_path)


def check_broker_tls(keys: BrokerTlsKeys) -> list[ConfigError]:
    """Returns an error for each contradiction. The files are checked when they are loaded."""
    pem = "a PEM file"
    found = []
    if keys.tls_client_key_path and not keys.tls_client_cert_path:
        found.append(ConfigError("tls.client.certPath", "is required if tls.client.keyPath is set", pem))
    if keys.ha_tls != "disabled":
        if not keys.tls_server_cert_path:
            found.append(ConfigError("tls.server.certPath", f"is required if haTls is {keys.ha_tls}", pem))
        if not keys.ha_tls_trust_cert_path:
            found.append(ConfigError("haTlsTrustCertPath", f"is required if haTls is {keys.ha_tls}", pem))
    elif keys.ha_tls_subjects:
        found.append(ConfigError("haTlsSubjects", "requires haTls", "no value, or haTls=enforcing"))
    if keys.admin_tls == ENFORCING and not keys.tls_server_cert_path:
        found.append(ConfigError("tls.server.certPath", "is required if adminTls is enforcing", pem))
    return found
