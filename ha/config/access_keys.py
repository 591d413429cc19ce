"""The keys of a broker node's own secrets: for the HA port and for the admin port. link_keys.py has the keys of the
account that signs the node's requests; acl_keys.py and user_keys.py have those of access control to its ports.

A secret is either in the configuration or, better, in a file that only this node's user can read (`…File`). Files are
read at the start.
"""

from __future__ import annotations

from ha.errors import ConfigError

from .key import key as _key
from .link_keys import check_secret
from .secret import SecretStr
from .user_keys import UserKeys

SECRET_LENGTH_MIN = 16
"""Minimum number of characters of haSharedSecret and adminToken. A shorter haSharedSecret could be guessed offline from
a recorded handshake."""


class AccessKeys(UserKeys, frozen=True, kw_only=True):
    """Keys for the secrets of a broker node."""

    ha_shared_secret: SecretStr | None = _key("haSharedSecret", None)
    """own; secret with which master and slaves authenticate each other; at least 16 characters; RocketMQ's slaves
    don't support it and are rejected"""
    ha_shared_secret_file: str = _key("haSharedSecretFile", "")
    """own; file with the shared secret, instead of haSharedSecret"""
    admin_token: SecretStr | None = _key("adminToken", None)
    """own; bearer token or password that the admin port requires; at least 16 characters"""
    admin_token_file: str = _key("adminTokenFile", "")
    """own; file with the token of the admin port, instead of adminToken"""


def check_access(keys: AccessKeys) -> list[ConfigError]:
    """Returns an error for each secret that is too short, or given both as a value and as a file. The content of files
    is checked when they are read."""
    return [
        *check_secret("haSharedSecret", keys.ha_shared_secret, keys.ha_shared_secret_file, SECRET_LENGTH_MIN),
        *check_secret("adminToken", keys.admin_token, keys.admin_token_file, SECRET_LENGTH_MIN),
    ]
