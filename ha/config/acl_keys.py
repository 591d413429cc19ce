"""The keys of RocketMQ's plain ACL, of brokers and name servers alike. The files are read when the process starts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ha.errors import ConfigError

from .key import Interval
from .key import key as _key
from .limit_keys import ServerLimitKeys


class AclKeys(ServerLimitKeys, frozen=True, kw_only=True):
    """Who may do what at a server's remoting ports."""

    acl_enable: bool = _key("aclEnable", False)
    """RocketMQ 4.9's plain ACL: each request is checked, also by a name server; see docs/security.md"""
    acl_file: str = _key("aclFile", "")
    """own; RocketMQ's plain_acl.yml; derived: conf/plain_acl.yml"""
    acl_directory: str = _key("aclDirectory", "")
    """own; further *.yml and *.yaml; derived: acl beside aclFile"""
    acl_reload_interval_ms: Interval = _key("aclReloadInterval", 5_000)
    """own; ms between two looks at these files"""
    acl_require_tls: bool = _key("aclRequireTls", False)
    """own; refuse requests on connections without TLS, where signatures can be overheard and replayed"""
    acl_admin_from: str = _key("aclAdminFrom", "")
    """own; connections on which admins may change something: `tls`, address patterns, or both, separated by `;`; unset:
    all"""


def derive_acl(keys: AclKeys) -> None:
    """Fill in what depends on other keys."""
    put = msgspec.structs.force_setattr
    put(keys, "acl_file", keys.acl_file or "conf/plain_acl.yml")
    put(keys, "acl_directory", keys.acl_directory or str(Path(keys.acl_file).parent / "acl"))


def check_acl(keys: AclKeys, *, has_tls: bool) -> list[ConfigError]:
    """One error for each contradiction; `has_tls`: the remoting ports take TLS connections."""
    errors = []
    if not keys.acl_enable:
        for key, value in (("aclRequireTls", keys.acl_require_tls), ("aclAdminFrom", keys.acl_admin_from)):
            if value:
                errors.append(ConfigError(key, "is set, and aclEnable is false", "aclEnable=true, or nothing here"))
    if keys.acl_require_tls and not has_tls:
        reason = "is true, and tls.server.mode and tls.server.certPath let nobody connect with TLS"
        errors.append(ConfigError("aclRequireTls", reason, "false, or a certificate in tls.server.certPath"))
    return errors
