"""The configuration keys of TLS on a broker node's HA port and admin port."""

from __future__ import annotations

from typing import Literal

import msgspec

from ha.errors import ConfigError

from .key import key as _key
from .link_keys import LinkKeys
from .tls_keys import ENFORCING, TlsMode


class BrokerTlsKeys(LinkKeys, frozen=True, kw_only=True):
    """Keys for TLS on a broker node's HA port and admin port."""

    ha_tls: TlsMode = _key("haTls", "disabled")
    """own; whether the HA port accepts plaintext, TLS or both, with the values of tls.server.mode; enforcing also
    applies to a slave's link to its master"""
    ha_tls_trust_cert_path: str = _key("haTlsTrustCertPath", "")
    """own; PEM file with the CAs of slaves' certificates, which haTls requires; derived: tls.server.trustCertPath"""
    ha_tls_subjects: str = _key("haTlsSubjects", "")
    """own; common names of slaves' certificates, separated by `;`; unset: any name in a certificate signed by
    the CAs in haTlsTrustCertPath"""
    admin_tls: Literal["disabled", "enforcing"] = _key("adminTls", "disabled")
    """own; whether the admin port uses HTTPS, with the certificate in tls.server.certPath"""

    @property
    def ha_tls_subject_set(self) -> frozenset[str]:
        """The common names in haTlsSubjects."""
        return frozenset(name.strip() for name in self.ha_tls_subjects.split(";") if name.strip())


def derive_broker_tls(keys: BrokerTlsKeys) -> None:
    """Fills in values that depend on other keys, after `derive_tls`."""
    trust = keys.ha_tls_trust_cert_path or keys.tls_server_trust_cert_path
    msgspec.structs.force_setattr(keys, "ha_tls_trust_cert_path", trust)


def check_broker_tls(keys: BrokerTlsKeys) -> list[ConfigError]:
    """Returns an error for each contradiction. The files are checked when they are loaded."""
    pem = "a PEM file"
    found = []
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
