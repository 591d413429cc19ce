"""The keys for connections to other brokers and to name servers: their TLS, and the account that signs requests."""

from __future__ import annotations

import msgspec

from ha.errors import ConfigError

from .acl_keys import AclKeys
from .key import key as _key
from .secret import SecretStr

ACL_KEY_LENGTH_MIN = 7
"""Minimum characters of a secret key, as in RocketMQ."""


class LinkKeys(AclKeys, frozen=True, kw_only=True):
    """Keys for connections that brokers and the gRPC front open."""

    tls_enable: bool = _key("tls.enable", False)
    """whether connections to name servers and to brokers (of a slave: to its master's remoting port) use TLS; also set
    by useTLS"""
    tls_client_cert_path: str = _key("tls.client.certPath", "")
    """PEM file with the certificate to present to name servers and brokers"""
    tls_client_key_path: str = _key("tls.client.keyPath", "")
    """PEM file with the key of the certificate in tls.client.certPath; derived: tls.client.certPath, for a file with
    both"""
    tls_client_key_password: SecretStr | None = _key("tls.client.keyPassword", None)
    """password of the key in tls.client.keyPath, if it is encrypted"""
    tls_client_auth_server: bool = _key("tls.client.authServer", True)
    """whether servers' certificates are verified; halog warns if not"""
    tls_client_trust_cert_path: str = _key("tls.client.trustCertPath", "")
    """PEM file with the CAs of servers' certificates; unset: the system's CAs"""
    tls_client_check_host: bool = _key("tls.client.checkHost", True)
    """own; whether a server's certificate must name the address used to reach it; RocketMQ doesn't check"""

    broker_access_key: str = _key("brokerAccessKey", "")
    """own; with brokerSecretKey: account that signs this process's own requests to name servers and brokers"""
    broker_secret_key: SecretStr | None = _key("brokerSecretKey", None)
    """own; secret key of brokerAccessKey"""
    broker_secret_key_file: str = _key("brokerSecretKeyFile", "")
    """own; file with the secret key of brokerAccessKey, instead of brokerSecretKey"""


def derive_link(keys: LinkKeys) -> None:
    """Fills in values that depend on other keys."""
    msgspec.structs.force_setattr(keys, "tls_client_key_path", keys.tls_client_key_path or keys.tls_client_cert_path)


def check_link(keys: LinkKeys) -> list[ConfigError]:
    """Returns an error for each contradiction, and if brokerSecretKey is too short. The content of files is checked
    when they are read."""
    errors = check_secret("brokerSecretKey", keys.broker_secret_key, keys.broker_secret_key_file, ACL_KEY_LENGTH_MIN)
    if keys.tls_client_key_path and not keys.tls_client_cert_path:
        errors.append(ConfigError("tls.client.certPath", "is required if tls.client.keyPath is set", "a PEM file"))
    has_secret = keys.broker_secret_key is not None or bool(keys.broker_secret_key_file)
    if has_secret and not keys.broker_access_key:
        errors.append(ConfigError("brokerAccessKey", "is required if brokerSecretKey is set", "an access key"))
    if keys.broker_access_key and not has_secret:
        errors.append(ConfigError("brokerSecretKey", "is required if brokerAccessKey is set", "its secret key"))
    return errors


def check_secret(key: str, secret: SecretStr | None, file: str, length_min: int) -> list[ConfigError]:
    """Returns an error if a secret is given both as a value and as a file, or has fewer than `length_min`
    characters."""
    if secret is None:
        return []
    if file:
        return [ConfigError(key, f"contradicts {key}File", "one of the two")]
    return check_length(key, secret, length_min)


def check_length(key: str, secret: SecretStr, length_min: int) -> list[ConfigError]:
    """Returns an error if `secret` has fewer than `length_min` characters."""
    length = len(secret.reveal())
    if length >= length_min:
        return []
    return [ConfigError(key, f"has {length} characters", f"at least {length_min} characters")]
