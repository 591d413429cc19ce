"""Checks requests before the handlers of a broker or name server.

Accounts come from plain_acl.yml and from the users of ACL 2.0 (source.py); if both have an access key, the file's
account counts. The checks are in RocketMQ's order (PlainPermissionManager.validate):

    1. All requests of this process, and from globalWhiteRemoteAddresses, are allowed.
    2. Requests that the whitelists exempt are allowed (`_is_exempt`).
    3. If aclRequireTls is set, the connection must be encrypted.
    4. The access key must be known. All requests of the account from its whiteRemoteAddress are allowed.
    5. The account must be usable, and the signature valid.
    6. The account must have the permissions that the request needs.
    7. Changes by admins must come from aclAdminFrom.

A refusal has the response code and text of RocketMQ 4.9 for accounts of the file, and of RocketMQ 5 for users of ACL
2.0.

A remoting connection is closed after several authentication failures within a minute. Denied permissions do not count,
as the client has proved who it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import msgspec
import trio

from ha.errors import ConfigError, RemoteProtocolError
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol.acl import ACCESS_KEY, SigningKey
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.protocol.remoting_protocol import CloseCause

from .grpc_signature import read_signature
from .origins import AdminOrigins
from .policy import AclPolicy
from .requirements import RULES, Needs, Rule
from .source import ACL2, PLAIN, Account, Dialect, PolicySource

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection

logger = logging.getLogger(__name__)

NO_TLS = "aclRequireTls: this connection is not encrypted, so the request was not looked at; connect with TLS"
NOT_FROM_HERE = "aclAdminFrom: request code={} is not taken from here; it needs TLS or an address that is listed"
FAILURES_WITHIN_S = 60.0
"""Time in seconds after which the authentication failures of a connection are counted from 0 again"""
_SHOWN_MAX = 64
"""Maximum number of characters of an unknown access key that a refusal repeats."""


class AclGuardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a guard."""

    failures_per_connection_max: int = 10
    """Maximum number of authentication failures of a remoting connection within FAILURES_WITHIN_S; one with more is
    closed."""
    requires_tls: bool = False
    """Whether requests on connections without TLS are refused."""
    admin_origins: AdminOrigins | None = None
    """Connections on which admins may make changes; None for all."""
    unauthenticated_codes: frozenset[str] = frozenset()
    """Requests that need no signature: request codes, and full names of gRPC request messages. Ignored if
    `requires_tls`."""
    unauthorized_codes: frozenset[str] = frozenset()
    """Requests that need no permission; for accounts of plain_acl.yml, only those that need no signature either."""


class GuardKeys(Protocol):
    """The configuration keys used by a guard."""

    @property
    def acl_require_tls(self) -> bool:
        """The value of aclRequireTls."""
        ...

    @property
    def acl_admin_from(self) -> str:
        """The value of aclAdminFrom."""
        ...


def guard_options(keys: GuardKeys, *, unauthenticated: str = "", unauthorized: str = "") -> AclGuardOptions:
    """Returns the options for a configuration. Raises ConfigError if aclAdminFrom is invalid.

    `unauthenticated`, `unauthorized`: the values of authenticationWhitelist and authorizationWhitelist.
    """
    origins = None
    if keys.acl_admin_from:
        try:
            origins = AdminOrigins(keys.acl_admin_from)
        except ValueError as error:
            accepted = "tls and address patterns such as 10.0.0.*, separated by ;"
            raise ConfigError("aclAdminFrom", str(error), accepted) from None
    return AclGuardOptions(
        requires_tls=keys.acl_require_tls,
        admin_origins=origins,
        unauthenticated_codes=_words(unauthenticated),
        unauthorized_codes=_words(unauthorized),
    )


def _words(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",") if word.strip())


class AclStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, except `account_count`."""

    account_count: int
    failed_count: int
    """Number of requests that failed authentication."""
    denied_count: int
    """Number of requests denied for lack of a permission, or because of aclAdminFrom."""
    closed_count: int
    """Number of connections closed after too many authentication failures."""


class AclRefusal(Exception):  # noqa: N818
    """A request is refused. `code` and `remark` are those of the response; `text` is the reason, a part of `remark`.
    `is_authentication`: True if authentication failed, False if a permission is missing."""

    def __init__(self, dialect: Dialect, text: str, *, is_authentication: bool) -> None:
        super().__init__(text)
        self.code = ResponseCode(dialect.code)
        self.text = text
        self.remark = dialect.prefix + text
        self.is_authentication = is_authentication


class AclGuard:
    """Checks requests against `policy` and `users`, which may be replaced at any time; the next request is checked
    against the new ones.

    One guard serves all ports of a process. A request code without a rule needs only a signature, because no handler
    supports it.
    """

    def __init__(
        self,
        policy: AclPolicy | None = None,
        options: AclGuardOptions | None = None,
        users: PolicySource | None = None,
    ) -> None:
        self.policy = AclPolicy() if policy is None else policy
        """The accounts of plain_acl.yml."""
        self.users = users
        """The users of ACL 2.0; None if ACL 2.0 is off."""
        self._options = options or AclGuardOptions()
        self._failures: WeakKeyDictionary[RemotingConnection, tuple[float, int]] = WeakKeyDictionary()
        """Time of the first of the failures that are counted (Trio's clock), and their number"""
        self._log_limiter = LogRateLimiter()
        self._failed_count = 0
        self._denied_count = 0
        self._closed_count = 0

    def statistics(self) -> AclStatistics:
        """Returns a snapshot of the counters."""
        return AclStatistics(
            account_count=len(self.policy) + (0 if self.users is None else len(self.users)),
            failed_count=self._failed_count,
            denied_count=self._denied_count,
            closed_count=self._closed_count,
        )

    def admit(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """Returns the allowed requests in order, and answers the others. Returns none if a refusal closes the
        connection."""
        if connection.is_own or self._admits(connection.peer[0]):
            return commands
        admitted = []
        for command in commands:
            try:
                self._check(connection, command)
            except AclRefusal as refusal:
                self._refuse(connection, command, refusal)
                if connection.is_closed:
                    return []
            except RemoteProtocolError as error:
                connection.reply_error(command, error)
            else:
                admitted.append(command)
        return admitted

    def _check(self, connection: RemotingConnection, command: RemotingCommand) -> None:
        rule, host = RULES.get(command.code), connection.peer[0]
        access_key = command.ext_fields.get(ACCESS_KEY, "")  # without credentials, the C++ client sends it empty
        if self._is_exempt(rule, str(command.code)):
            named = self.account(access_key)
            if named is None or named.fault or not named.key.has_signed(command):
                command.ext_fields.pop(ACCESS_KEY, None)  # so that no handler takes the sender for this account
            return
        account = self._authenticated(
            access_key, lambda key: key.has_signed(command), host, is_encrypted=connection.is_encrypted
        )
        if account is None or rule is None:
            return
        if not self._needs_no_right(account, str(command.code)):
            denial = account.denial(rule, command, host)
            if denial:
                raise AclRefusal(account.dialect, denial, is_authentication=False)
        origins = self._options.admin_origins
        if rule.kind is Needs.ADMIN_CHANGE and origins is not None and not origins.match(connection):
            raise AclRefusal(account.dialect, NOT_FROM_HERE.format(command.code), is_authentication=False)

    def _is_exempt(self, rule: Rule | None, code: str) -> bool:
        """Returns whether a request needs neither a signature nor a permission. Rights can be checked only for an
        account that has signed, so a request that needs rights is exempt only if it is in both whitelists."""
        if not self._needs_no_signature(code):
            return False
        return code in self._options.unauthorized_codes or rule is None or rule.kind is Needs.SIGNATURE

    def _needs_no_signature(self, code: str) -> bool:
        return code in self._options.unauthenticated_codes and not self._options.requires_tls

    def _needs_no_right(self, account: Account | None, code: str) -> bool:
        """Returns whether a request of `account` (None: it is not signed) needs no right, because its code is in
        authorizationWhitelist. For an account of plain_acl.yml, that is so only if the code needs no signature
        either."""
        if code not in self._options.unauthorized_codes:
            return False
        return account is None or account.dialect is ACL2 or self._needs_no_signature(code)

    def _authenticated(
        self, access_key: str, has_signed: Callable[[SigningKey], bool], host: str, *, is_encrypted: bool
    ) -> Account | None:
        """Returns the account that made a request; None if the account may do everything from `host`. Raises AclRefusal
        if authentication fails."""
        dialect = PLAIN if self.users is None else ACL2
        if self._options.requires_tls and not is_encrypted:
            raise AclRefusal(dialect, NO_TLS, is_authentication=True)
        if not access_key:
            raise AclRefusal(dialect, dialect.no_key, is_authentication=True)
        account = self.account(access_key)
        if account is None:
            raise AclRefusal(dialect, dialect.unknown_key.format(access_key[:_SHOWN_MAX]), is_authentication=True)
        if account.trusts(host):
            return None
        dialect = account.dialect
        if account.fault:
            raise AclRefusal(dialect, account.fault, is_authentication=True)
        if not has_signed(account.key):
            raise AclRefusal(dialect, dialect.wrong_signature.format(access_key), is_authentication=True)
        return account

    def account(self, access_key: str) -> Account | None:
        """Returns the account of an access key, or None."""
        account: Account | None = self.policy.account(access_key)
        if account is None and self.users is not None:
            account = self.users.account(access_key)
        return account

    def _admits(self, host: str) -> bool:
        return self.policy.admits(host) or (self.users is not None and self.users.admits(host))

    # For handlers: permissions on resources that only they can determine

    def may(self, connection: RemotingConnection, access_key: str, resource: str, right: int) -> bool:
        """Returns whether the account `access_key`, on `connection`, has at least one of the rights in `right` on
        `resource` at present."""
        host = connection.peer[0]
        if connection.is_own or self._admits(host):
            return True
        account = self.account(access_key)
        if account is None or account.fault:
            return False
        return account.trusts(host) or not account.denial_of(resource, right, host)

    def check(self, connection: RemotingConnection, command: RemotingCommand, resource: str, right: int) -> None:
        """Raises AclRefusal unless the account of an admitted request has at least one of the rights in `right` on
        `resource`, or the request needs no right."""
        access_key, host = command.ext_fields.get(ACCESS_KEY, ""), connection.peer[0]
        if self.may(connection, access_key, resource, right):
            return
        account = self.account(access_key)
        if self._needs_no_right(account, str(command.code)):
            return
        if account is None:  # deleted since the request was admitted, or the request was exempt
            refusal = AclRefusal(ACL2, ACL2.unknown_key.format(access_key[:_SHOWN_MAX]), is_authentication=False)
        else:
            text = account.fault or account.denial_of(resource, right, host)
            refusal = AclRefusal(account.dialect, text, is_authentication=False)
        self._note(connection.peer, command.code, refusal)
        raise refusal

    def is_admin(self, connection: RemotingConnection, command: RemotingCommand) -> bool:
        """Returns whether an admitted request comes from an admin, a super user, a trusted address or this process."""
        host = connection.peer[0]
        if connection.is_own or self._admits(host):
            return True
        account = self.account(command.ext_fields.get(ACCESS_KEY, ""))
        return account is not None and (account.is_admin or account.trusts(host))

    # For calls of gRPC clients

    def authenticate(
        self, metadata: Mapping[str, str], peer: tuple[str, int], call: str, *, is_encrypted: bool = False
    ) -> str:
        """Returns the access key of a gRPC call; "" for any call from globalWhiteRemoteAddresses, and for a call that
        has no valid signature and needs none.

        `metadata`: the metadata of the call, with names in lower case; `call`: the full name of its request message, as
        in authenticationWhitelist. Raises AclRefusal if authentication fails.
        """
        host = peer[0]
        if self._admits(host):
            return ""
        try:
            signature = read_signature(metadata)
            self._authenticated(signature.access_key, signature.is_by, host, is_encrypted=is_encrypted)
        except (AclRefusal, RemoteProtocolError) as error:
            if self._needs_no_signature(call):
                return ""
            refusal = error if isinstance(error, AclRefusal) else AclRefusal(ACL2, str(error), is_authentication=True)
            self._note(peer, call, refusal)
            raise refusal from None
        return signature.access_key

    def authorize(
        self, access_key: str, peer: tuple[str, int], call: str, needs: Iterable[tuple[str | None, int]]
    ) -> None:
        """Raises AclRefusal unless `access_key`, which `authenticate` returned, has one of the rights on each resource
        of `needs`.

        `needs`: pairs of a resource and rights, as `requirements.Rule.needs` returns them.
        """
        host = peer[0]
        if self._admits(host):
            return
        account = self.account(access_key)
        if account is not None and account.trusts(host):
            return
        if self._needs_no_right(account, call):
            return
        for resource, right in needs:
            if account is None:
                text = ACL2.unknown_key.format(access_key[:_SHOWN_MAX]) if access_key else ACL2.no_key
                refusal = AclRefusal(ACL2, text, is_authentication=True)
            else:
                denial = account.fault or account.denial_of(resource, right, host)
                if not denial:
                    continue
                refusal = AclRefusal(account.dialect, denial, is_authentication=bool(account.fault))
            self._note(peer, call, refusal)
            raise refusal

    def _refuse(self, connection: RemotingConnection, command: RemotingCommand, refusal: AclRefusal) -> None:
        connection.reply(command, command.reply(refusal.code, refusal.remark))
        self._note(connection.peer, command.code, refusal)
        if not refusal.is_authentication:
            return
        now = trio.current_time()
        since, failures = self._failures.get(connection, (now, 0))
        if now - since >= FAILURES_WITHIN_S:
            since, failures = now, 0
        failures += 1
        self._failures[connection] = since, failures
        if failures > self._options.failures_per_connection_max:
            self._closed_count += 1
            connection.close(CloseCause.FAILED_AUTHENTICATIONS, f"{failures} requests failed authentication")

    def _note(self, peer: tuple[str, int], code: int | str, refusal: AclRefusal) -> None:
        """Counts and logs a refusal."""
        if refusal.is_authentication:
            self._failed_count += 1
        else:
            self._denied_count += 1
        count = self._log_limiter.admit((peer[0], refusal.is_authentication), trio.current_time())
        if count:
            logger.warning(
                "acl.refused peer=%s:%d code=%s reason=%r times=%d",
                *peer,
                code,
                refusal.text[: 4 * _SHOWN_MAX],
                count,
            )
