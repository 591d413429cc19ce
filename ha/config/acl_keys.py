"""The configuration keys of RocketMQ's plain ACL, for brokers, name servers and gRPC fronts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ha.errors import ConfigError

from .key import key as _key
from .limit_keys import ServerLimitKeys


class AclKeys(ServerLimitKeys, frozen=True, kw_only=True):
    """Keys for the access control of remoting ports."""

    acl_enable: bool = _key("aclEnable", False)
    """whether every request is checked against RocketMQ 4.9's plain ACL; see docs/security.md"""
    acl_file: str = _key("aclFile", "")
    """own; path of plain_acl.yml; derived: conf/plain_acl.yml"""
    acl_directory: str = _key("aclDirectory", "")
    """own; directory of further *.yml and *.yaml files; derived: acl, in the directory of aclFile"""
    acl_require_tls: bool = _key("aclRequireTls", False)
    """own; whether requests are rejected on connections without TLS, where signatures could be recorded and
    replayed"""
    acl_admin_from: str = _key("aclAdminFrom", "")
    """own; connections on which admins can make changes: `tls`, address patterns, or both, separated by `;`; unset:
    all"""


def derive_acl(keys: AclKeys) -> None:
    """Fills in values that depend on other keys."""
    put = msgspec.structs.force_setattr
    put(keys, "acl_file", keys.acl_file or "conf/plain_acl.yml")
    put(keys, "acl_directory", keys.acl_directory or str(Path(keys.acl_file).parent / "acl"))


def check_acl(keys: AclKeys, *, has_tls: bool, has_users: bool = False) -> list[ConfigError]:
    """Returns an error for each contradiction. `has_tls`: the remoting ports accept TLS connections; `has_users`:
    authenticationEnabled is set."""
    errors = []
    if not keys.acl_enable and not has_users:
        for key, value in (("aclRequireTls", keys.acl_require_tls), ("aclAdminFrom", keys.acl_admin_from)):
            if value:
                errors.append(
                    ConfigError(
                        key, "requires aclEnable=true or authenticationEnabled=true", "no value, or one of the two"
                    )
                )
    if keys.acl_require_tls and not has_tls:
        reason = "requires TLS on the remoting ports (tls.server.mode, tls.server.certPath)"
        errors.append(ConfigError("aclRequireTls", reason, "false, or a certificate in tls.server.certPath"))
    return errors
