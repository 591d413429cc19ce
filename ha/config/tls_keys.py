"""The keys of TLS: those of every server, and those of a broker node beyond them.

RocketMQ has the ones that begin with `tls.` as system properties of its JVMs and in the file that `tls.config.file`
names (TlsSystemConfig); here they are keys like any other. Where RocketMQ's default trusts everybody, halog's doesn't:
a certificate that is asked for is checked.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ha.errors import ConfigError

from .acl_keys import AclKeys
from .key import Interval
from .key import key as _key
from .secret import SecretStr

TlsMode = Literal["disabled", "permissive", "enforcing"]

PERMISSIVE, ENFORCING = "permissive", "enforcing"


class ServerTlsKeys(AclKeys, frozen=True, kw_only=True):
    """What any port needs to speak TLS."""

    tls_server_mode: TlsMode = _key("tls.server.mode", "permissive")
    """remoting ports: plain, both (told apart by the first byte), or TLS; permissive without certPath is plain"""
    tls_server_cert_path: str = _key("tls.server.certPath", "")
    """PEM: the server's certificate, and after it those between it and its CA"""
    tls_server_key_path: str = _key("tls.server.keyPath", "")
    """PEM; derived: tls.server.certPath, for a file that holds both"""
    tls_server_key_password: SecretStr | None = _key("tls.server.keyPassword", None)
    tls_server_need_client_auth: Literal["none", "optional", "require"] = _key("tls.server.need.client.auth", "none")
    """remoting ports: whether clients are asked for a certificate; one that is given is always checked"""
    tls_server_auth_client: bool | None = _key("tls.server.authClient", None)
    """derived: whether need.client.auth asks; RocketMQ: false, which takes any certificate, is refused here"""
    tls_server_trust_cert_path: str = _key("tls.server.trustCertPath", "")
    """PEM: the CAs of clients' certificates"""
    tls_test_mode_enable: bool = _key("tls.test.mode.enable", False)
    """RocketMQ: true, a certificate made up at start that nobody can check; refused here, see docs/tls.md"""
    tls_config_file: str = _key("tls.config.file", "")
    """a properties file with further keys that begin with tls.; what is given elsewhere wins"""
    tls_reload_interval_ms: Interval = _key("tlsReloadInterval", 10_000)
    """own; ms between two looks at the files of certificates: changed ones serve new connections"""
    tls_handshake_timeout_ms: Interval = _key("tlsHandshakeTimeout", 10_000)
    """own; ms"""
    tls_handshake_count_max: Annotated[int, Meta(ge=1, le=65_535)] = _key("tlsHandshakeCountMax", 256)
    """own; handshakes under way at the same time on all ports together; one more ends the oldest"""

    @property
    def takes_tls(self) -> bool:
        """Whether clients can connect to the remoting ports with TLS."""
        return self.tls_server_mode != "disabled" and bool(self.tls_server_cert_path)


class BrokerTlsKeys(ServerTlsKeys, frozen=True, kw_only=True):
    """What a broker node needs beyond that: as a client of name servers and masters, for slaves, for its admin port."""

    tls_enable: bool = _key("tls.enable", False)
    """towards name servers and the master's remoting port; broker.conf's useTLS is the same"""
    tls_client_cert_path: str = _key("tls.client.certPath", "")
    """PEM: what this node shows name servers and its master"""
    tls_client_key_path: str = _key("tls.client.keyPath", "")
    """PEM; derived: tls.client.certPath"""
    tls_client_key_password: SecretStr | None = _key("tls.client.keyPassword", None)
    tls_client_auth_server: bool = _key("tls.client.authServer", True)
    """RocketMQ: false, which takes any server for the right one; halog warns of that"""
    tls_client_trust_cert_path: str = _key("tls.client.trustCertPath", "")
    """PEM: the CAs of servers' certificates; unset: those that the system trusts"""
    tls_client_check_host: bool = _key("tls.client.checkHost", True)
    """own: whether a server's certificate must name the address that it was reached at; RocketMQ never looks"""

    ha_tls: TlsMode = _key("haTls", "disabled")
    """own: the HA port, as tls.server.mode; enforcing: a slave's link to its master too; RocketMQ has no TLS there"""
    ha_tls_trust_cert_path: str = _key("haTlsTrustCertPath", "")
    """own; PEM: the CAs of slaves' certificates, which haTls always asks for; derived: tls.server.trustCertPath"""
    ha_tls_subjects: str = _key("haTlsSubjects", "")
    """own; common names, separated by ;, that a slave's certificate may have; unset: any that those CAs have signed"""
    admin_tls: Literal["disabled", "enforcing"] = _key("adminTls", "disabled")
    """own: HTTPS on the admin port, with tls.server.certPath"""

    @property
    def ha_tls_subject_set(self) -> frozenset[str]:
        """The common names in haTlsSubjects."""
        return frozenset(name.strip() for name in self.ha_tls_subjects.split(";") if name.strip())


def derive_tls(keys: ServerTlsKeys) -> None:
    """Fill in what depends on other keys."""
    put = msgspec.structs.force_setattr
    put(keys, "tls_server_key_path", keys.tls_server_key_path or keys.tls_server_cert_path)
    if keys.tls_server_auth_client is None:
        put(keys, "tls_server_auth_client", keys.tls_server_need_client_auth != "none")
    if isinstance(keys, BrokerTlsKeys):
        put(keys, "tls_client_key_path", keys.tls_client_key_path or keys.tls_client_cert_path)
        put(keys, "ha_tls_trust_cert_path", keys.ha_tls_trust_cert_path or keys.tls_server_trust_cert_path)


def check_tls(keys: ServerTlsKeys) -> list[ConfigError]:
    """One error for each contradiction. Whether the files are any good is seen when they are loaded."""
    pem = "a PEM file"
    found = []

    def wrong(key: str, reason: str, accepted: str) -> None:
        found.append(ConfigError(key, reason, accepted))

    asks, checks = keys.tls_server_need_client_auth, keys.tls_server_auth_client
    if keys.tls_test_mode_enable:
        wrong("tls.test.mode.enable", "a certificate that is made up proves nothing", "false, and a certificate")
    if keys.tls_server_mode == ENFORCING and not keys.tls_server_cert_path:
        wrong("tls.server.certPath", "is unset, and tls.server.mode is enforcing", pem)
    if keys.tls_server_key_path and not keys.tls_server_cert_path:
        wrong("tls.server.certPath", "is unset, and tls.server.keyPath is set", pem)
    if asks != "none" and not checks:
        wrong(
            "tls.server.authClient", f"certificates that need.client.auth={asks} asks for would not be checked", "true"
        )
    if asks == "none" and checks:
        wrong("tls.server.need.client.auth", "is none, and tls.server.authClient is true", "optional, require")
    if asks != "none" and not keys.tls_server_trust_cert_path:
        wrong("tls.server.trustCertPath", f"is unset, and tls.server.need.client.auth is {asks}", pem)
    if asks == "require" and keys.tls_server_mode == PERMISSIVE:
        wrong("tls.server.need.client.auth", "is require, but tls.server.mode lets plain clients in", "optional, none")
    if isinstance(keys, BrokerTlsKeys):
        if keys.tls_client_key_path and not keys.tls_client_cert_path:
            wrong("tls.client.certPath", "is unset, and tls.client.keyPath is set", pem)
        if keys.ha_tls != "disabled":
            if not keys.tls_server_cert_path:
                wrong("tls.server.certPath", f"is unset, and haTls is {keys.ha_tls}", pem)
            if not keys.ha_tls_trust_cert_path:
                wrong("haTlsTrustCertPath", f"is unset, and haTls is {keys.ha_tls}", pem)
        elif keys.ha_tls_subjects:
            wrong("haTlsSubjects", "is set, and haTls is disabled", "nothing, or haTls=enforcing")
        if keys.admin_tls == ENFORCING and not keys.tls_server_cert_path:
            wrong("tls.server.certPath", "is unset, and adminTls is enforcing", pem)
    return found
