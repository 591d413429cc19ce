"""Stands before a broker's handlers and lets through what the policy allows.

The order is RocketMQ's (PlainPermissionManager.validate): an address of globalWhiteRemoteAddresses may do anything, and
so may this process itself; then, where TLS is required, the connection must be encrypted; then the access key must be
known; from its whiteRemoteAddress it may do anything too; then the signature must be good, and only then is it looked
at what the request needs. Refusals are answered as by RocketMQ 4.9: SYSTEM_ERROR with the exception's text (its place
in the source is left out).

Whoever fails to say who he is again and again on one connection loses it. Denied rights don't count for that: a client
that knows its key but may not write a topic is a client.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import msgspec
import trio

from ha.errors import ConfigError, RemoteProtocolError
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol.acl import ACCESS_KEY
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

from .origins import AdminOrigins
from .policy import Account, AclPolicy
from .requirements import RULES, Needs

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection

logger = logging.getLogger(__name__)

CLOSE_CAUSE = "failed authentications"
_EXCEPTION = "org.apache.rocketmq.acl.common.AclException: "
NO_TLS = "aclRequireTls: this connection is not encrypted, so the request was not looked at; connect with TLS"
NOT_FROM_HERE = "aclAdminFrom: request code={} is not taken from here; it needs TLS or an address that is listed"
_SHOWN_MAX = 64
"""Characters of what a stranger calls himself that are repeated to him and in the log."""


class AclGuardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits, and requirements on connections."""

    failures_per_connection_max: int = 10
    """With one more failed authentication a connection is closed."""
    requires_tls: bool = False
    """Whether requests on connections without TLS are refused."""
    admin_origins: AdminOrigins | None = None
    """Connections on which admins may change something; None: all."""


class GuardKeys(Protocol):
    """The configuration keys that a guard needs."""

    @property
    def acl_require_tls(self) -> bool:
        """Of aclRequireTls."""
        ...

    @property
    def acl_admin_from(self) -> str:
        """Of aclAdminFrom."""
        ...


def guard_options(keys: GuardKeys) -> AclGuardOptions:
    """Return the options that a configuration asks for. ConfigError."""
    origins = None
    if keys.acl_admin_from:
        try:
            origins = AdminOrigins(keys.acl_admin_from)
        except ValueError as error:
            accepted = "tls and address patterns such as 10.0.0.*, separated by ;"
            raise ConfigError("aclAdminFrom", str(error), accepted) from None
    return AclGuardOptions(requires_tls=keys.acl_require_tls, admin_origins=origins)


class AclStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start, except `account_count`."""

    account_count: int
    failed_count: int
    """Requests of which it is not known who sent them."""
    denied_count: int
    """Requests of somebody known who may not."""
    closed_count: int
    """Connections closed for failing too often."""


class _Refusal(Exception):  # noqa: N818
    """Why a request is refused. Never leaves this module."""

    def __init__(self, text: str, *, is_stranger: bool) -> None:
        super().__init__(text)
        self.text = text
        self.is_stranger = is_stranger


class AclGuard:
    """Checks requests against `policy`, which may be replaced at any time; the next request sees the new one.

    One guard serves all ports of a process. A request code without a rule needs only a signature, since it is not
    answered.
    """

    def __init__(self, policy: AclPolicy, options: AclGuardOptions | None = None) -> None:
        self.policy = policy
        self._options = options or AclGuardOptions()
        self._failures: WeakKeyDictionary[RemotingConnection, int] = WeakKeyDictionary()
        self._log_limiter = LogRateLimiter()
        self._failed_count = 0
        self._denied_count = 0
        self._closed_count = 0

    def statistics(self) -> AclStatistics:
        """Return a snapshot."""
        return AclStatistics(
            account_count=len(self.policy.accounts),
            failed_count=self._failed_count,
            denied_count=self._denied_count,
            closed_count=self._closed_count,
        )

    def admit(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """Return the requests that are allowed, in order; the others are answered. None once the connection is lost."""
        policy, host = self.policy, connection.peer[0]
        if connection.is_own or (policy.global_white_hosts and policy.global_white_hosts.matches(host)):
            return commands
        admitted = []
        for command in commands:
            try:
                self._check(policy, connection, command)
            except _Refusal as refusal:
                self._refuse(connection, command, refusal)
                if connection.is_closed:
                    return []
            except RemoteProtocolError as error:
                connection.reply_error(command, error)
            else:
                admitted.append(command)
        return admitted

    def _check(self, policy: AclPolicy, connection: RemotingConnection, command: RemotingCommand) -> None:
        if self._options.requires_tls and not connection.is_encrypted:
            raise _Refusal(NO_TLS, is_stranger=True)
        access_key = command.ext_fields.get(ACCESS_KEY)
        if not access_key:  # the C++ client sends an empty one for none
            raise _Refusal("No accessKey is configured", is_stranger=True)
        account = policy.accounts.get(access_key)
        if account is None:
            raise _Refusal(f"No acl config for {access_key[:_SHOWN_MAX]}", is_stranger=True)
        if account.white_hosts and account.white_hosts.matches(connection.peer[0]):
            return
        if not account.key.has_signed(command):
            raise _Refusal(f"Check signature failed for accessKey={access_key}", is_stranger=True)
        self._check_rights(account, connection, command)

    def _check_rights(self, account: Account, connection: RemotingConnection, command: RemotingCommand) -> None:
        code = command.code
        rule = RULES.get(code)
        if rule is None:
            return
        if rule.needed is None:
            if rule.kind is not Needs.SIGNATURE and not account.is_admin:
                raise _Refusal(
                    f"Need admin permission for request code={code}, but accessKey={account.access_key} is not",
                    is_stranger=False,
                )
            origins = self._options.admin_origins
            if rule.kind is Needs.ADMIN_CHANGE and origins is not None and not origins.match(connection):
                raise _Refusal(NOT_FROM_HERE.format(code), is_stranger=False)
            return
        for resource, right in rule.needed(command):
            if not account.may(resource, right):
                raise _Refusal(_no_permission(resource), is_stranger=False)

    # For handlers: permissions on what only they can look up

    def may(self, connection: RemotingConnection, access_key: str, resource: str, right: int) -> bool:
        """Tell whether the account `access_key`, on `connection`, has `right` on `resource` now."""
        policy, host = self.policy, connection.peer[0]
        if connection.is_own or (policy.global_white_hosts and policy.global_white_hosts.matches(host)):
            return True
        account = policy.accounts.get(access_key)
        if account is None:
            return False
        return bool(account.white_hosts and account.white_hosts.matches(host)) or account.may(resource, right)

    def refusal(self, connection: RemotingConnection, command: RemotingCommand, resource: str, right: int) -> str:
        """Return "" if the account of an admitted request has `right` on `resource`, else the refusal to answer."""
        if self.may(connection, command.ext_fields.get(ACCESS_KEY, ""), resource, right):
            return ""
        refusal = _Refusal(_no_permission(resource), is_stranger=False)
        self._note(connection, command, refusal)
        return _EXCEPTION + refusal.text

    def _refuse(self, connection: RemotingConnection, command: RemotingCommand, refusal: _Refusal) -> None:
        connection.reply(command, command.reply(ResponseCode.SYSTEM_ERROR, _EXCEPTION + refusal.text))
        self._note(connection, command, refusal)
        if not refusal.is_stranger:
            return
        failures = self._failures[connection] = self._failures.get(connection, 0) + 1
        if failures > self._options.failures_per_connection_max:
            self._closed_count += 1
            connection.close(CLOSE_CAUSE, f"{failures} requests of nobody known")

    def _note(self, connection: RemotingConnection, command: RemotingCommand, refusal: _Refusal) -> None:
        """Count a refusal and log it."""
        if refusal.is_stranger:
            self._failed_count += 1
        else:
            self._denied_count += 1
        host = connection.peer[0]
        count = self._log_limiter.admit((host, refusal.is_stranger), trio.current_time())
        if count:
            logger.warning(
                "acl.refused peer=%s:%d code=%d reason=%r times=%d",
                *connection.peer,
                command.code,
                refusal.text[: 4 * _SHOWN_MAX],
                count,
            )


def _no_permission(resource: str) -> str:
    if resource.startswith(RETRY_PREFIX):
        return f"No default permission for group:{resource.removeprefix(RETRY_PREFIX)}"
    return f"No default permission for topic:{resource}"
