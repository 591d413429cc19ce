"""The configuration keys of RocketMQ 5's ACL 2.0, whose users and policies a broker keeps in a table. See
docs/security.md."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ha.errors import ConfigError

from .broker_tls_keys import BrokerTlsKeys
from .key import key as _key
from .secret import SecretStr


class UserKeys(BrokerTlsKeys, frozen=True, kw_only=True):
    """Keys for the users and policies of a broker."""

    authentication_enabled: bool = _key("authenticationEnabled", False)
    """whether every request must be signed by a user (or by an account of plain_acl.yml); see docs/security.md"""
    authorization_enabled: bool = _key("authorizationEnabled", False)
    """whether the policies of users are checked; requires authenticationEnabled"""
    init_authentication_user: SecretStr | None = _key("initAuthenticationUser", None)
    """super user that is created if it does not exist: `{"username":"…","password":"…"}`"""
    inner_client_authentication_credentials: SecretStr | None = _key("innerClientAuthenticationCredentials", None)
    """super user that is created if it does not exist, and signs requests to the master and to name servers unless
    brokerAccessKey is set: `{"accessKey":"…","secretKey":"…"}`"""
    authentication_whitelist: str = _key("authenticationWhitelist", "")
    """requests that need no signature: request codes and names of gRPC messages, separated by `,`; a request that needs
    a permission must be in authorizationWhitelist too"""
    authorization_whitelist: str = _key("authorizationWhitelist", "")
    """requests for which users need no permission: request codes and names of gRPC messages, separated by `,`"""


ParsedT = TypeVar("ParsedT", bound=msgspec.Struct)


class _InitialUser(msgspec.Struct):
    username: str
    password: str


class _InnerClient(msgspec.Struct):
    accessKey: str  # noqa: N815
    secretKey: str  # noqa: N815


def parse_initial_user(secret: SecretStr) -> tuple[str, str]:
    """Returns the name and password of initAuthenticationUser. Raises ValueError, without quoting the value, if it is
    not the expected JSON."""
    found = _parse(secret, _InitialUser)
    return found.username, found.password


def parse_inner_client(secret: SecretStr) -> tuple[str, str]:
    """Returns the access key and secret key of innerClientAuthenticationCredentials. Raises ValueError, without quoting
    the value, if it is not the expected JSON."""
    found = _parse(secret, _InnerClient)
    return found.accessKey, found.secretKey


def check_users(keys: UserKeys) -> list[ConfigError]:
    """Returns an error for each contradiction, and for each value that is not JSON with a name and a password."""
    errors = []
    if keys.authorization_enabled and not keys.authentication_enabled:
        reason = "requires authenticationEnabled=true: rights belong to users who have signed"
        errors.append(ConfigError("authorizationEnabled", reason, "false, or authenticationEnabled=true"))
    for key, secret, parse, accepted in (
        (
            "initAuthenticationUser",
            keys.init_authentication_user,
            parse_initial_user,
            'JSON such as {"username":"…","password":"…"}',
        ),
        (
            "innerClientAuthenticationCredentials",
            keys.inner_client_authentication_credentials,
            parse_inner_client,
            'JSON such as {"accessKey":"…","secretKey":"…"}',
        ),
    ):
        if secret is None:
            continue
        try:
            name, password = parse(secret)
        except ValueError as error:
            errors.append(ConfigError(key, str(error), accepted))
            continue
        if not name.strip() or not password.strip():
            errors.append(ConfigError(key, "has a blank name or password", accepted))
    return errors


def _parse(secret: SecretStr, kind: type[ParsedT]) -> ParsedT:
    try:
        return msgspec.json.decode(secret.reveal(), type=kind)
    except (msgspec.MsgspecError, UnicodeError):
        raise ValueError("is not the expected JSON") from None
