"""The keys of a node's own secrets: for signing its requests, between masters and slaves, and for the admin port.
acl_keys.py and user_keys.py have those that control access to its ports.

A secret is either in the configuration or, better, in a file that only this node's user can read (`…File`). Files are
read at the start.
"""

from __future__ import annotations

from ha.errors import ConfigError

from .key import key as _key
from .secret import SecretStr
from .user_keys import UserKeys

SECRET_LENGTH_MIN = 16
"""For haSharedSecret and adminToken, because a recorded handshake can be attacked offline."""
ACL_KEY_LENGTH_MIN = 7
"""RocketMQ's minimum."""


class AccessKeys(UserKeys, frozen=True, kw_only=True):
    """Secrets of a broker node."""

    broker_access_key: str = _key("brokerAccessKey", "")
    """own; with brokerSecretKey: account that signs requests to the master and to name servers"""
    broker_secret_key: SecretStr | None = _key("brokerSecretKey", None)
    """own"""
    broker_secret_key_file: str = _key("brokerSecretKeyFile", "")
    """own"""
    ha_shared_secret: SecretStr | None = _key("haSharedSecret", None)
    """own; at least 16 characters, the same on a master and its slaves; RocketMQ's slaves have none and are rejected"""
    ha_shared_secret_file: str = _key("haSharedSecretFile", "")
    """own"""
    admin_token: SecretStr | None = _key("adminToken", None)
    """own; at least 16 characters; required by the admin port, as a bearer token or a password"""
    admin_token_file: str = _key("adminTokenFile", "")
    """own"""


def check_access(keys: AccessKeys) -> list[ConfigError]:
    """Returns an error for each contradiction. The content of files is checked when they are read."""
    errors = []
    for key, secret, file, length_min in (
        ("brokerSecretKey", keys.broker_secret_key, keys.broker_secret_key_file, ACL_KEY_LENGTH_MIN),
        ("haSharedSecret", keys.ha_shared_secret, keys.ha_shared_secret_file, SECRET_LENGTH_MIN),
        ("adminToken", keys.admin_token, keys.admin_token_file, SECRET_LENGTH_MIN),
    ):
        if secret is not None and file:
            errors.append(ConfigError(key, f"contradicts {key}File", "one of the two"))
        elif secret is not None:
            errors += check_length(key, secret, length_min)
    has_secret = keys.broker_secret_key is not None or bool(keys.broker_secret_key_file)
    if has_secret and not keys.broker_access_key:
        errors.append(ConfigError("brokerAccessKey", "is required if brokerSecretKey is set", "an access key"))
    if keys.broker_access_key and not has_secret:
        errors.append(ConfigError("brokerSecretKey", "is required if brokerAccessKey is set", "its secret key"))
    return errors


def check_length(key: str, secret: SecretStr, length_min: int) -> list[ConfigError]:
    """Returns an error if `secret` is too short."""
    length = len(secret.reveal())
    if length >= length_min:
        return []
    return [ConfigError(key, f"has {length} characters", f"at least {length_min} characters")]
