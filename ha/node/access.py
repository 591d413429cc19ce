"""Reads a node's secrets, and creates the credentials and the access control that other packages use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ha.config import Config, SecretStr
from ha.config.access_keys import SECRET_LENGTH_MIN
from ha.config.link_keys import ACL_KEY_LENGTH_MIN
from ha.config.user_keys import parse_initial_user, parse_inner_client
from ha.protocol.access_bodies import SUPER, UserConfig
from ha.protocol.acl import AclCredentials
from ha.protocol.ha_handshake import HandshakeKey
from ha.replication.handshake import HandshakeOptions

from .platform import Platform

if TYPE_CHECKING:
    from ha.acl.policy_files import AclPolicyFiles


class NodeAccess(msgspec.Struct, frozen=True, kw_only=True):
    """A node's access control and secrets. A field is None if the node is configured without it."""

    acl_files: AclPolicyFiles | None
    credentials: AclCredentials | None
    handshake: HandshakeOptions | None
    admin_token: SecretStr | None
    etcd_password: SecretStr | None
    initial_users: tuple[UserConfig, ...]
    """The super users of initAuthenticationUser and innerClientAuthenticationCredentials"""


async def read_access(config: Config, platform: Platform) -> NodeAccess:
    """Reads the secrets that `config` names. Raises ConfigError, with the file's name but without its content, if a
    file can't be read or contains no valid secret."""
    broker_secret = await _secret(
        "brokerSecretKey", config.broker_secret_key, config.broker_secret_key_file, ACL_KEY_LENGTH_MIN, platform
    )
    shared_secret = await _secret(
        "haSharedSecret", config.ha_shared_secret, config.ha_shared_secret_file, SECRET_LENGTH_MIN, platform
    )
    admin_token = await _secret("adminToken", config.admin_token, config.admin_token_file, SECRET_LENGTH_MIN, platform)
    etcd_password = await _secret("etcdPassword", config.etcd_password, config.etcd_password_file, 1, platform)
    acl_files = handshake = credentials = None
    if config.acl_enable:
        from ha.acl.policy_files import AclPolicyFiles

        acl_files = AclPolicyFiles(
            Path(config.acl_file),
            Path(config.acl_directory),
            disk=platform.disk,
            run_blocking=platform.run_blocking,
            is_open_to_others=platform.is_open_to_others,
        )
    if broker_secret is not None:
        credentials = AclCredentials(config.broker_access_key, broker_secret.reveal())
    if shared_secret is not None:
        handshake = HandshakeOptions(key=HandshakeKey(shared_secret.reveal()), random_bytes=platform.random_bytes)
    initial_users = []
    if config.init_authentication_user is not None:
        initial_users.append(parse_initial_user(config.init_authentication_user))
    if config.inner_client_authentication_credentials is not None:
        inner_client = parse_inner_client(config.inner_client_authentication_credentials)
        initial_users.append(inner_client)
        credentials = credentials or AclCredentials(*inner_client)
    return NodeAccess(
        acl_files=acl_files,
        credentials=credentials,
        handshake=handshake,
        admin_token=admin_token,
        etcd_password=etcd_password,
        initial_users=tuple(
            UserConfig(username=name, password=password, user_type=SUPER) for name, password in initial_users
        ),
    )


async def _secret(
    key: str, given: SecretStr | None, file: str, length_min: int, platform: Platform
) -> SecretStr | None:
    if not file:
        return given
    from ha.acl.secret_file import read_secret_file

    text = await read_secret_file(
        f"{key}File",
        file,
        length_min,
        disk=platform.disk,
        run_blocking=platform.run_blocking,
        is_open_to_others=platform.is_open_to_others,
    )
    return SecretStr(text)
