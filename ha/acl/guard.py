"""Stands before a broker's handlers and lets through what the policy allows.

The order is RocketMQ's (PlainPermissionManager.validate): an address of globalWhiteRemoteAddresses may do anything;
then the access key must be known; from its whiteRemoteAddress it may do anything too; then the signature must be good,
and only then is it looked at what the request needs. Refusals are answered as by RocketMQ 4.9: SYSTEM_ERROR with the
exception's text (its place in the source is left out).

Whoever fails to say who he is again and again on one connection loses it. Denied rights don't count for that: a client
that knows its key but may not write a topic is a client.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec
import trio

from ha.errors import RemoteProtocolError
from ha.protocol.acl import ACCESS_KEY
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX, TRACE_TOPIC
from ha.repeats import Repeats

from .policy import Account, AclPolicy, Right
from .requirements import ADMIN_CODES, RESOURCES, SIGNATURE_SUFFICES

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection

logger = logging.getLogger(__name__)

CLOSE_CAUSE = "failed authentications"
_EXCEPTION = "org.apache.rocketmq.acl.common.AclException: "
_SHOWN_MAX = 64
"""Characters of what a stranger calls himself that are repeated to him and in the log."""


class AclGuardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds."""

    failures_per_connection_max: int = 10
    """With one more failed authentication a connection is closed."""


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
    """Checks requests against `policy`, which may be replaced at any time; the next request sees the new one."""

    def __init__(
        self, policy: AclPolicy, options: AclGuardOptions | None = None, *, served: Collection[int] = ()
    ) -> None:
        """`served` are the codes that have a handler: those that requirements.py does not name need an admin."""
        self.policy = policy
        self._options = options or AclGuardOptions()
        known = RESOURCES.keys() | SIGNATURE_SUFFICES
        self._admin_codes = ADMIN_CODES | frozenset(code for code in served if code not in known)
        self._failures: WeakKeyDictionary[RemotingConnection, int] = WeakKeyDictionary()
        self._repeats = Repeats()
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
        if policy.global_white_hosts and policy.global_white_hosts.matches(host):
            return commands
        admitted = []
        for command in commands:
            try:
                self._check(policy, host, command)
            except _Refusal as refusal:
                self._refuse(connection, command, refusal)
                if connection.is_closed:
                    return []
            except RemoteProtocolError as error:
                connection.reply_error(command, error)
            else:
                admitted.append(command)
        return admitted

    def _check(self, policy: AclPolicy, host: str, command: RemotingCommand) -> None:
        access_key = command.ext_fields.get(ACCESS_KEY)
        if not access_key:  # the C++ client sends an empty one for none
            raise _Refusal("No accessKey is configured", is_stranger=True)
        account = policy.accounts.get(access_key)
        if account is None:
            raise _Refusal(f"No acl config for {access_key[:_SHOWN_MAX]}", is_stranger=True)
        if account.white_hosts and account.white_hosts.matches(host):
            return
        if not account.key.has_signed(command):
            raise _Refusal(f"Check signature failed for accessKey={access_key}", is_stranger=True)
        self._check_rights(account, command)

    def _check_rights(self, account: Account, command: RemotingCommand) -> None:
        code = command.code
        if code in self._admin_codes and not account.is_admin:
            raise _Refusal(
                f"Need admin permission for request code={code}, but accessKey={account.access_key} is not",
                is_stranger=False,
            )
        needs = RESOURCES.get(code)
        if needs is None:
            return
        for resource, right in needs(command):
            if account.may(resource, right) or (resource == TRACE_TOPIC and right == Right.PUB):
                continue
            if resource.startswith(RETRY_PREFIX):
                name = f"group:{resource.removeprefix(RETRY_PREFIX)}"
            else:
                name = f"topic:{resource}"
            raise _Refusal(f"No default permission for {name}", is_stranger=False)

    def _refuse(self, connection: RemotingConnection, command: RemotingCommand, refusal: _Refusal) -> None:
        connection.reply(command, command.reply(ResponseCode.SYSTEM_ERROR, _EXCEPTION + refusal.text))
        host = connection.peer[0]
        count = self._repeats.count_if_due((host, refusal.is_stranger), trio.current_time())
        if count:
            logger.warning(
                "acl.refused peer=%s:%d code=%d reason=%r times=%d",
                *connection.peer,
                command.code,
                refusal.text[: 4 * _SHOWN_MAX],
                count,
            )
        if not refusal.is_stranger:
            self._denied_count += 1
            return
        self._failed_count += 1
        failures = self._failures[connection] = self._failures.get(connection, 0) + 1
        if failures > self._options.failures_per_connection_max:
            self._closed_count += 1
            connection.close(CLOSE_CAUSE, f"{failures} requests of nobody known")
