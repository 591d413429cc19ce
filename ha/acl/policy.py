"""The accounts of plain_acl.yml in memory: immutable, replaced as a whole when the files change.

Sources: PlainPermissionManager, Permission, PlainAccessResource.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ha.protocol.acl import SigningKey
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

from .addresses import AddressPattern
from .requirements import Needs, Right, Rule, is_internal
from .source import PLAIN

KNOWN_HOSTS_MAX = 4096
"""Maximum number of hosts whose result is cached."""


_DENY, _SUB, _PUB_SUB = Right.DENY, Right.SUB, Right.PUB | Right.SUB
RIGHTS = {
    "DENY": Right.DENY,
    "PUB": Right.PUB,
    "SUB": Right.SUB,
    "PUB|SUB": Right.PUB | Right.SUB,
    "SUB|PUB": Right.PUB | Right.SUB,
}


class HostFilter:
    """Address patterns with a cache of results by host."""

    __slots__ = ("_known", "_patterns")

    def __init__(self, patterns: Iterable[AddressPattern]) -> None:
        self._patterns = tuple(patterns)
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def matches(self, host: str) -> bool:
        """Returns whether a pattern matches `host`."""
        known = self._known.get(host)
        if known is None:
            known = any(pattern.matches(host) for pattern in self._patterns)
            if len(self._known) >= KNOWN_HOSTS_MAX:
                self._known.clear()
            self._known[host] = known
        return known


class Account:
    """An account of plain_acl.yml: an access key with its rights. The text of the secret key is not kept."""

    __slots__ = ("_default_group", "_default_topic", "_rights", "access_key", "is_admin", "key", "white_hosts")

    dialect = PLAIN
    fault = ""

    def __init__(
        self,
        access_key: str,
        secret_key: str,
        *,
        is_admin: bool = False,
        white_host: AddressPattern | None = None,
        default_topic: int = Right.DENY,
        default_group: int = Right.DENY,
        topics: Mapping[str, int] = {},
        groups: Mapping[str, int] = {},
    ) -> None:
        """`white_host`: addresses from which the access key suffices. A topic %RETRY%G stands for the group G."""
        self.access_key = access_key
        self.key = SigningKey(secret_key)
        self.is_admin = is_admin
        self.white_hosts = HostFilter(() if white_host is None else (white_host,))
        self._default_topic = default_topic
        self._default_group = default_group
        self._rights = {**{RETRY_PREFIX + group: right for group, right in groups.items()}, **topics}

    def __repr__(self) -> str:
        return f"Account({self.access_key!r}, is_admin={self.is_admin}, rights={len(self._rights)})"

    def may(self, resource: str, needed: int) -> bool:
        """Returns whether the account has one of the rights `needed` on `resource`.

        A file grants only PUB and SUB. Either one on a topic includes GET, as does SUB on a group; other rights need an
        admin. An admin has all rights, but if the file lists rights for the admin, these and the defaults decide about
        PUB, SUB and GET, as in RocketMQ. Only admins have rights on the empty resource, and SUB and GET on system
        topics, which hold messages of all topics.
        """
        is_group = resource.startswith(RETRY_PREFIX)
        if not needed & _PUB_SUB:
            if not needed & Right.GET:
                return self.is_admin
            needed = _SUB if is_group else _PUB_SUB
        if not self.is_admin and (not resource or (needed & _SUB and is_internal(resource))):
            return False
        if not resource:
            return True
        owned = self._rights.get(resource)
        if owned is None:
            if self.is_admin and not self._rights:
                return True
            owned = self._default_group if is_group else self._default_topic
        return not owned & _DENY and owned & needed != 0

    def trusts(self, host: str) -> bool:
        """Returns whether requests from `host` with this access key need no signature and no rights."""
        return bool(self.white_hosts) and self.white_hosts.matches(host)

    def denial(self, rule: Rule, command: RemotingCommand, host: str) -> str:
        """Returns why `command` is denied; "" if it is allowed. Raises RemoteProtocolError if it is malformed."""
        if rule.kind is Needs.RIGHTS:
            for resource, right in rule.needs(command):
                denial = self.denial_of(resource, right, host)
                if denial:
                    return denial
        elif rule.kind is not Needs.SIGNATURE and not self.is_admin:
            return f"Need admin permission for request code={command.code}, but accessKey={self.access_key} is not"
        return ""

    def denial_of(self, resource: str | None, actions: int, host: str) -> str:
        """Returns why `actions`, any of which suffices, on `resource` are denied; "" if they are allowed."""
        if resource is None:
            return "" if self.is_admin else f"Need admin permission, but accessKey={self.access_key} is not"
        if self.may(resource, actions):
            return ""
        if resource.startswith(RETRY_PREFIX):
            return f"No default permission for group:{resource.removeprefix(RETRY_PREFIX)}"
        return f"No default permission for topic:{resource}"


class AclPolicy:
    """All accounts, and the hosts from which everything is allowed without an account."""

    __slots__ = ("accounts", "global_white_hosts")

    def __init__(self, accounts: Iterable[Account] = (), global_white_hosts: Iterable[AddressPattern] = ()) -> None:
        self.accounts: dict[str, Account] = {account.access_key: account for account in accounts}
        self.global_white_hosts = HostFilter(global_white_hosts)

    def __repr__(self) -> str:
        return f"<AclPolicy of {len(self.accounts)} accounts>"

    def __len__(self) -> int:
        return len(self.accounts)

    def account(self, access_key: str) -> Account | None:
        """Returns the account of `access_key`, or None."""
        return self.accounts.get(access_key)

    def admits(self, host: str) -> bool:
        """Returns whether everything is allowed from `host`."""
        return bool(self.global_white_hosts) and self.global_white_hosts.matches(host)
