"""Checks requests before the handlers of a broker or name server.

The order is RocketMQ's (PlainPermissionManager.validate). Addresses in globalWhiteRemoteAddresses, and this process
itself, may do anything. Otherwise, if TLS is required, the connection must be encrypted; the access key must be known;
from its whiteRemoteAddress it may do anything; the signature must be valid; and finally the account needs the
permission of the request. Refusals are answered as by RocketMQ 4.9: SYSTEM_ERROR with the exception's text (without its
place in the source).

A connection is closed after repeated authentication failures. Denied permissions do not count: a client with a valid
key that may not write to a topic is still a client.
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
from ha.protocol.remoting_protocol import CloseCause
from ha.protocol.topic_names import RETRY_PREFIX

from .origins import AdminOrigins
from .policy import Account, AclPolicy
from .requirements import RULES, Needs

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection

logger = logging.getLogger(__name__)

_EXCEPTION = "org.apache.rocketmq.acl.common.AclException: "
NO_TLS = "aclRequireTls: this connection is not encrypted, so the request was not looked at; connect with TLS"
NOT_FROM_HERE = "aclAdminFrom: request code={} is not taken from here; it needs TLS or an address that is listed"
_SHOWN_MAX = 64
"""Maximum characters of an unknown access key that are repeated in the answer and in the log."""


class AclGuardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits, and requirements on connections."""

    failures_per_connection_max: int = 10
    """A connection is closed when it has more authentication failures than this."""
    requires_tls: bool = False
    """Refuses requests on connections without TLS."""
    admin_origins: AdminOrigins | None = None
    """Connections on which admins may change something; None for all."""


class GuardKeys(Protocol):
    """The configuration keys used by a guard."""

    @property
    def acl_require_tls(self) -> bool:
        """Of aclRequireTls."""
        ...

    @property
    def acl_admin_from(self) -> str:
        """Of aclAdminFrom."""
        ...


def guard_options(keys: GuardKeys) -> AclGuardOptions:
    """Returns the options for a configuration. Raises ConfigError."""
    origins = None
    if keys.acl_admin_from:
        try:
            origins = AdminOrigins(keys.acl_admin_from)
        except ValueError as error:
            accepted = "tls and address patterns such as 10.0.0.*, separated by ;"
            raise ConfigError("aclAdminFrom", str(error), accepted) from None
    return AclGuardOptions(requires_tls=keys.acl_require_tls, admin_origins=origins)


class AclStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, except `account_count`."""

    account_count: int
    failed_count: int
    """Requests that failed authentication."""
    denied_count: int
    """Authenticated requests without the permission."""
    closed_count: int
    """Connections closed after too many authentication failures."""


class _Refusal(Exception):  # noqa: N818
    """Why a request is refused. Never leaves this module."""

    def __init__(self, text: str, *, is_authentication: bool) -> None:
        super().__init__(text)
        self.text = text
        self.is_authentication = is_authentication


class AclGuard:
    """Checks requests against `policy`, which may be replaced at any time and then applies to the next request.

    One guard serves all ports of a process. A request code without a rule only needs a signature, as it is not
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
        """A snapshot of the counters."""
        return AclStatistics(
            account_count=len(self.policy.accounts),
            failed_count=self._failed_count,
            denied_count=self._denied_count,
            closed_count=self._closed_count,
        )

    def admit(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """Returns the allowed requests in order, and answers the others. Returns none once the connection is closed."""
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
            raise _Refusal(NO_TLS, is_authentication=True)
        access_key = command.ext_fields.get(ACCESS_KEY)
        if not access_key:  # the C++ client sends an empty one for none
            raise _Refusal("No accessKey is configured", is_authentication=True)
        account = policy.accounts.get(access_key)
        if account is None:
            raise _Refusal(f"No acl config for {access_key[:_SHOWN_MAX]}", is_authentication=True)
        if account.white_hosts and account.white_hosts.matches(connection.peer[0]):
            return
        if not account.key.has_signed(command):
            raise _Refusal(f"Check signature failed for accessKey={access_key}", is_authentication=True)
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
                    is_authentication=False,
                )
            origins = self._options.admin_origins
            if rule.kind is Needs.ADMIN_CHANGE and origins is not None and not origins.match(connection):
                raise _Refusal(NOT_FROM_HERE.format(code), is_authentication=False)
            return
        for resource, right in rule.needed(command):
            if not account.may(resource, right):
                raise _Refusal(_no_permission(resource), is_authentication=False)

    # For handlers: permissions on resources that only they can determine

    def may(self, connection: RemotingConnection, access_key: str, resource: str, right: int) -> bool:
        """Whether the account `access_key`, on `connection`, has `right` on `resource` at present."""
        policy, host = self.policy, connection.peer[0]
        if connection.is_own or (policy.global_white_hosts and policy.global_white_hosts.matches(host)):
            return True
        account = policy.accounts.get(access_key)
        if account is None:
            return False
        return bool(account.white_hosts and account.white_hosts.matches(host)) or account.may(resource, right)

    def refusal(self, connection: RemotingConnection, command: RemotingCommand, resource: str, right: int) -> str:
        """Returns "" if the account of an admitted request has `right` on `resource`, else the refusal to answer."""
        if self.may(connection, command.ext_fields.get(ACCESS_KEY, ""), resource, right):
            return ""
        refusal = _Refusal(_no_permission(resource), is_authentication=False)
        self._note(connection, command, refusal)
        return _EXCEPTION + refusal.text

    def _refuse(self, connection: RemotingConnection, command: RemotingCommand, refusal: _Refusal) -> None:
        connection.reply(command, command.reply(ResponseCode.SYSTEM_ERROR, _EXCEPTION + refusal.text))
        self._note(connection, command, refusal)
        if not refusal.is_authentication:
            return
        failures = self._failures[connection] = self._failures.get(connection, 0) + 1
        if failures > self._options.failures_per_connection_max:
            self._closed_count += 1
            connection.close(CloseCause.FAILED_AUTHENTICATIONS, f"{failures} requests failed authentication")

    def _note(self, connection: RemotingConnection, command: RemotingCommand, refusal: _Refusal) -> None:
        """Counts and logs a refusal."""
        if refusal.is_authentication:
            self._failed_count += 1
        else:
            self._denied_count += 1
        host = connection.peer[0]
        count = self._log_limiter.admit((host, refusal.is_authentication), trio.current_time())
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
