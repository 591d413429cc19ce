"""The keys of a member of a failover group: where the group's agreement is kept, how fast and whom it elects.

RocketMQ's names where it has them. A broker becomes a member by etcdEndpoints; without it none of these keys is read.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ha.errors import ConfigError

from .access_keys import AccessKeys
from .key import INT_MAX, Interval
from .key import key as _key
from .secret import SecretStr

Endpoints = Annotated[str, Meta(pattern=r"^$|^https?://[A-Za-z0-9._-]+:\d{1,5}(;https?://[A-Za-z0-9._-]+:\d{1,5})*;?$")]
LEASE_MS_MIN = 1_000


class FailoverKeys(AccessKeys, frozen=True, kw_only=True):
    """What `ha.member` needs beyond what a master and a slave need."""

    etcd_endpoints: Endpoints = _key("etcdEndpoints", "")
    """own; `ha.member` alone: the etcd servers on which the members of its group agree who is master"""
    etcd_user: str = _key("etcdUser", "")
    """own"""
    etcd_password: SecretStr | None = _key("etcdPassword", None)
    """own"""
    etcd_password_file: str = _key("etcdPasswordFile", "")
    """own"""
    etcd_trust_cert_path: str = _key("etcdTrustCertPath", "")
    """own; PEM: the CAs of https servers' certificates; unset: those that the system trusts"""
    etcd_cert_path: str = _key("etcdCertPath", "")
    """own; PEM: what this node shows https servers"""
    etcd_key_path: str = _key("etcdKeyPath", "")
    """own; PEM; derived: etcdCertPath"""
    lease_ttl_ms: Annotated[int, Meta(ge=LEASE_MS_MIN, le=INT_MAX)] = _key("leaseTtl", 3_000)
    """own; ms, rounded up to whole seconds: a master that is gone is missed after so long; etcd's least is 2000"""
    switch_timeout_ms: Interval = _key("switchTimeout", 2_000)
    """own; ms: so long a planned switch waits for the next master to have everything"""
    election_priority: Annotated[int, Meta(ge=0, le=INT_MAX)] = _key("brokerElectionPriority", INT_MAX)
    """member: of equally good candidates the one with the lowest number is elected"""
    elect_unclean_master: bool = _key("enableElectUncleanMaster", False)
    """member: rather elect one that lacks acknowledged messages than none; loses them"""
    slave_not_catch_up_ms_max: Interval = _key("haMaxTimeSlaveNotCatchup", 15_000)
    """ms; member: a slave that has not had everything for so long is no longer waited for, nor elected"""
    async_learner: bool = _key("asyncLearner", False)
    """member: copies the log, is never waited for and never elected"""

    @property
    def is_member(self) -> bool:
        """Whether roles are decided by elections."""
        return bool(self.etcd_endpoints)

    @property
    def etcd_servers(self) -> tuple[str, ...]:
        """The URLs in etcdEndpoints."""
        return tuple(url for url in self.etcd_endpoints.split(";") if url)


def derive_failover(keys: FailoverKeys) -> None:
    """Fill in what depends on other keys."""
    msgspec.structs.force_setattr(keys, "etcd_key_path", keys.etcd_key_path or keys.etcd_cert_path)


def check_failover(keys: FailoverKeys) -> list[ConfigError]:
    """One error for each contradiction."""
    errors = []
    if keys.etcd_password is not None and keys.etcd_password_file:
        errors.append(ConfigError("etcdPassword", "is set, and etcdPasswordFile too", "one of the two"))
    has_password = keys.etcd_password is not None or bool(keys.etcd_password_file)
    if has_password != bool(keys.etcd_user):
        wanted, given = ("etcdUser", "etcdPassword") if has_password else ("etcdPassword", "etcdUser")
        errors.append(ConfigError(wanted, f"is unset, and {given} is set", "both, or none"))
    if keys.etcd_key_path and not keys.etcd_cert_path:
        errors.append(ConfigError("etcdCertPath", "is unset, and etcdKeyPath is set", "a PEM file"))
    schemes = {url.partition("://")[0] for url in keys.etcd_servers}
    if len(schemes) > 1:
        errors.append(ConfigError("etcdEndpoints", "some are http, some https", "all the same"))
    elif schemes == {"http"} and (keys.etcd_cert_path or keys.etcd_trust_cert_path):
        errors.append(ConfigError("etcdEndpoints", "are http, and certificates are given", "https URLs"))
    return errors
