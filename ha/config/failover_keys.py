"""The keys of a failover group member: its etcd, its lease, and its elections.

A broker with etcdEndpoints is a member. Without etcdEndpoints, none of these keys has an effect.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ha.errors import ConfigError

from .access_keys import AccessKeys
from .check import check_addresses
from .key import INT_MAX, Interval
from .key import key as _key
from .secret import SecretStr

Endpoints = Annotated[str, Meta(pattern=r"^$|^https?://[A-Za-z0-9._-]+:\d{1,5}(;https?://[A-Za-z0-9._-]+:\d{1,5})*;?$")]
LEASE_MS_MIN = 1_000


class FailoverKeys(AccessKeys, frozen=True, kw_only=True):
    """Keys of `ha.member` beyond those of masters and slaves."""

    etcd_endpoints: Endpoints = _key("etcdEndpoints", "")
    """own; URLs of the etcd servers that hold the state of the failover group; makes this node a member"""
    etcd_user: str = _key("etcdUser", "")
    """own; user name for etcd"""
    etcd_password: SecretStr | None = _key("etcdPassword", None)
    """own; password of etcdUser"""
    etcd_password_file: str = _key("etcdPasswordFile", "")
    """own; file with the password of etcdUser, instead of etcdPassword"""
    etcd_trust_cert_path: str = _key("etcdTrustCertPath", "")
    """own; PEM file with the CAs of etcd servers with https; unset: the system's CAs"""
    etcd_cert_path: str = _key("etcdCertPath", "")
    """own; PEM file with the client certificate for etcd servers with https"""
    etcd_key_path: str = _key("etcdKeyPath", "")
    """own; PEM file with the key of the certificate in etcdCertPath; derived: etcdCertPath, for a file with both"""
    lease_ttl_ms: Annotated[int, Meta(ge=LEASE_MS_MIN, le=INT_MAX)] = _key("leaseTtl", 3_000)
    """own; time after which a failed master is detected, in ms, rounded up to whole seconds; etcd's minimum is 2000"""
    switch_timeout_ms: Interval = _key("switchTimeout", 2_000)
    """own; maximum time for which a switchover delays sends, until the next master has all messages, in ms"""
    election_priority: Annotated[int, Meta(ge=0, le=INT_MAX)] = _key("brokerElectionPriority", INT_MAX)
    """priority in elections; among equal candidates, the one with the lowest number wins"""
    elect_unclean_master: bool = _key("enableElectUncleanMaster", False)
    """whether a member that lacks acknowledged messages can be elected if no other can; those messages are then
    lost"""
    slave_not_catch_up_ms_max: Interval = _key("haMaxTimeSlaveNotCatchup", 15_000)
    """time for which a slave may lack the end of the log before it is removed from the sync-state set, in ms"""
    async_learner: bool = _key("asyncLearner", False)
    """whether this member only copies the log: sends never wait for it, and it is never elected"""

    @property
    def is_member(self) -> bool:
        """Whether elections decide the role."""
        return bool(self.etcd_endpoints)

    @property
    def etcd_servers(self) -> tuple[str, ...]:
        """The URLs in etcdEndpoints."""
        return tuple(url for url in self.etcd_endpoints.split(";") if url)


def derive_failover(keys: FailoverKeys) -> None:
    """Fills in values that depend on other keys."""
    msgspec.structs.force_setattr(keys, "etcd_key_path", keys.etcd_key_path or keys.etcd_cert_path)


def check_failover(keys: FailoverKeys) -> list[ConfigError]:
    """Returns an error for each contradiction or invalid port."""
    errors = check_addresses("etcdEndpoints", keys.etcd_endpoints)
    if keys.etcd_password is not None and keys.etcd_password_file:
        errors.append(ConfigError("etcdPassword", "contradicts etcdPasswordFile", "one of the two"))
    has_password = keys.etcd_password is not None or bool(keys.etcd_password_file)
    if has_password != bool(keys.etcd_user):
        wanted, given = ("etcdUser", "etcdPassword") if has_password else ("etcdPassword", "etcdUser")
        errors.append(ConfigError(wanted, f"is required if {given} is set", "both or none"))
    if keys.etcd_key_path and not keys.etcd_cert_path:
        errors.append(ConfigError("etcdCertPath", "is required if etcdKeyPath is set", "a PEM file"))
    schemes = {url.partition("://")[0] for url in keys.etcd_servers}
    if len(schemes) > 1:
        errors.append(ConfigError("etcdEndpoints", "http and https are mixed", "one of the two"))
    elif schemes == {"http"} and (keys.etcd_cert_path or keys.etcd_trust_cert_path):
        errors.append(ConfigError("etcdEndpoints", "certificates require https", "https URLs"))
    return errors
