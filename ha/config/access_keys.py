"""The keys by which a node shows who it is and asks others: what it signs its own requests with, a secret between
masters and slaves, a token for the admin port. Whose requests it serves is in acl_keys.py.

A secret may stand in the configuration itself or, better, in a file of its own that only this node's user can read
(`…File`); giving both is a mistake. Files are read when the node starts.
"""

from __future__ import annotations

from ha.errors import ConfigError

from .key import Interval
from .key import key as _key
from .secret import SecretStr
from .tls_keys import BrokerTlsKeys

SECRET_LENGTH_MIN = 16
"""Of haSharedSecret and adminToken: what is heard of a handshake can be tried out offline."""
ACL_KEY_LENGTH_MIN = 7
"""RocketMQ's."""


class AccessKeys(BrokerTlsKeys, frozen=True, kw_only=True):
    """What a broker node asks of others, and what it shows them."""

    broker_access_key: str = _key("brokerAccessKey", "")
    """own; with brokerSecretKey: what this node signs its requests to its master and to name servers with"""
    broker_secret_key: SecretStr | None = _key("brokerSecretKey", None)
    """own"""
    broker_secret_key_file: str = _key("brokerSecretKeyFile", "")
    """own"""
    ha_shared_secret: SecretStr | None = _key("haSharedSecret", None)
    """own; 16 characters or more, the same on a master and its slaves; RocketMQ's slaves can't prove it and stay out"""
    ha_shared_secret_file: str = _key("haSharedSecretFile", "")
    """own"""
    ha_handshake_timeout_ms: Interval = _key("haHandshakeTimeout", 10_000)
    """own; ms in which haSharedSecret has to be proved"""
    admin_token: SecretStr | None = _key("adminToken", None)
    """own; at least 16 characters; needed for every page of the admin port, as a bearer token or a password"""
    admin_token_file: str = _key("adminTokenFile", "")
    """own"""


def check_access(keys: AccessKeys) -> list[ConfigError]:
    """One error for each contradiction. What is in the files is seen when they are read."""
    errors = []
    for key, secret, file, length_min in (
        ("brokerSecretKey", keys.broker_secret_key, keys.broker_secret_key_file, ACL_KEY_LENGTH_MIN),
        ("haSharedSecret", keys.ha_shared_secret, keys.ha_shared_secret_file, SECRET_LENGTH_MIN),
        ("adminToken", keys.admin_token, keys.admin_token_file, SECRET_LENGTH_MIN),
    ):
        if secret is not None and file:
            errors.append(ConfigError(key, f"is set, and {key}File too", "one of the two"))
        elif secret is not None:
            errors += check_length(key, secret, length_min)
    has_secret = keys.broker_secret_key is not None or bool(keys.broker_secret_key_file)
    if has_secret and not keys.broker_access_key:
        errors.append(ConfigError("brokerAccessKey", "is unset, and brokerSecretKey is set", "an access key"))
    if keys.broker_access_key and not has_secret:
        errors.append(ConfigError("brokerSecretKey", "is unset, and brokerAccessKey is set", "its secret key"))
    return errors


def check_length(key: str, secret: SecretStr, length_min: int) -> list[ConfigError]:
    """An error if `secret` is too short, or none."""
    length = len(secret.reveal())
    if length >= length_min:
        return []
    return [ConfigError(key, f"has {length} characters", f"at least {length_min} characters")]
