"""The users of ACL 2.0 as accounts, which the guard uses besides those of plain_acl.yml.

The users are a table of the broker (ha/broker/users.py). An account is created from a user at the user's first
request, and created again when the user has changed.
"""

from __future__ import annotations

from collections.abc import Callable

from ha.protocol.access_bodies import DISABLE, UserConfig, subject_of
from ha.protocol.acl import SigningKey
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

from .evaluation import CLUSTER, GROUP, NO_MATCH, TOPIC, Policies, PolicyError
from .requirements import Right, Rule, is_internal
from .source import ACL2, ACL2_DISABLED, Account

_READS = Right.SUB | Right.GET


class UserAccount:
    """The account of a user of ACL 2.0, with its parsed policies."""

    __slots__ = ("_authorizes", "_cluster", "_policies", "access_key", "fault", "is_admin", "key", "user")

    dialect = ACL2

    def __init__(self, user: UserConfig, cluster: str, *, authorizes: bool) -> None:
        """`cluster`: the name of the resource for settings and whole tables. `authorizes`: authorizationEnabled; if
        False, users need no permission. Reading passwords and changing super users needs a super user in any case
        (ha/broker/admin_users.py)."""
        self.user = user
        self.access_key = user.username
        self.key = SigningKey(user.password)
        self.is_admin = user.is_super
        self.fault = ACL2_DISABLED.format(user.username) if user.user_status == DISABLE else ""
        self._cluster = cluster
        self._authorizes = authorizes
        try:
            self._policies = Policies(user.policies)
        except PolicyError as error:  # only in a table copied from another broker: AUTH_CREATE_ACL refuses it
            self.fault = f"User:{user.username} has an invalid policy: {error}"
            self._policies = Policies(())

    def trusts(self, host: str) -> bool:
        """Returns False: no user is trusted without a signature."""
        return False

    def denial(self, rule: Rule, command: RemotingCommand, host: str) -> str:
        """Returns why `command` is denied; "" if it is allowed. Raises RemoteProtocolError if it is malformed."""
        if self.is_admin or not self._authorizes:
            return ""
        for resource, actions in rule.needs(command):
            denial = self.denial_of(resource, actions, host)
            if denial:
                return denial
        return ""

    def denial_of(self, resource: str | None, actions: int, host: str) -> str:
        """Returns why `actions`, any of which suffices, on `resource` are denied; "" if they are allowed."""
        if self.is_admin or not self._authorizes:
            return ""
        if resource is None:
            kind, name = CLUSTER, self._cluster
        elif resource.startswith(RETRY_PREFIX):
            kind, name = GROUP, resource.removeprefix(RETRY_PREFIX)
        else:
            kind, name = TOPIC, resource
        if not name or (actions & _READS and kind == TOPIC and is_internal(name)):
            reason = NO_MATCH  # only for super users: no topic is named, or a system topic
        else:
            reason = self._policies.denial(kind, name, actions, host)
        if not reason:
            return ""
        return f"{subject_of(self.access_key)} has no permission to access {kind}:{name} from {host}, {reason}"


class UserAccounts:
    """Accounts of the users that `find` returns by name; `count` returns how many users there are."""

    def __init__(
        self, find: Callable[[str], UserConfig | None], count: Callable[[], int], cluster: str, *, authorizes: bool
    ) -> None:
        self._find = find
        self._count = count
        self._cluster = cluster
        self._authorizes = authorizes
        self._accounts: dict[str, UserAccount] = {}

    def __len__(self) -> int:
        return self._count()

    def account(self, access_key: str) -> Account | None:
        """Returns the account of a user, or None."""
        user = self._find(access_key)
        if user is None:
            self._accounts.pop(access_key, None)
            return None
        account = self._accounts.get(access_key)
        if account is None or account.user is not user:
            if len(self._accounts) > self._count():
                self._accounts.clear()  # drops those of deleted users
            account = self._accounts[access_key] = UserAccount(user, self._cluster, authorizes=self._authorizes)
        return account

    def admits(self, host: str) -> bool:
        """Returns False: no host is admitted without an account."""
        return False
