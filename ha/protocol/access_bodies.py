"""Users and policies of RocketMQ 5's ACL 2.0: ext fields and bodies of the requests about them, and the users of a
broker.

    request                  ext fields        body      answer
    AUTH_CREATE_USER (3001)  UserRequest       UserInfo  -
    AUTH_UPDATE_USER (3002)  UserRequest       UserInfo  -
    AUTH_DELETE_USER (3003)  UserRequest       -         -
    AUTH_GET_USER (3004)     UserRequest       -         UserInfo; no body if there is no such user
    AUTH_LIST_USER (3005)    ListUsersRequest  -         list of UserInfo; no body if there are none
    AUTH_CREATE_ACL (3006)   SubjectRequest    AclInfo   -
    AUTH_UPDATE_ACL (3007)   SubjectRequest    AclInfo   -
    AUTH_DELETE_ACL (3008)   DeleteAclRequest  -         -
    AUTH_GET_ACL (3009)      SubjectRequest    -         AclInfo; no body if the user has no policies
    AUTH_LIST_ACL (3010)     ListAclsRequest   -         list of AclInfo; no body if there are none

A subject is `User:name`. A resource is `*`, `Type:*`, `Type:prefix*` or `Type:name`, where the type is Cluster, Topic
or Group. Sources: UserInfo, AclInfo, the headers of the same names, and the answers of a 5.5.0 broker
(tests/fixtures/acl2).
"""

from __future__ import annotations

from typing import Any

import msgspec

from ha.protocol.bodies import DataVersion, LogPosition
from ha.protocol.headers import Header

SUBJECT_PREFIX = "User:"
SUPER, NORMAL = "Super", "Normal"
ENABLE, DISABLE = "enable", "disable"
USER_TYPES, USER_STATUSES = (SUPER, NORMAL), (ENABLE, DISABLE)
CUSTOM, DEFAULT = "Custom", "Default"
POLICY_TYPES = (CUSTOM, DEFAULT)
"""The two types of a policy; the default policy applies only if no entry of the custom policy matches."""
ALLOW, DENY = "Allow", "Deny"
DECISIONS = (ALLOW, DENY)
ACTIONS = ("All", "Any", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")


class UserRequest(Header):
    """Requests AUTH_CREATE_USER (3001) to AUTH_GET_USER (3004): the name of the user. A name in the body is ignored."""

    username: str = ""


class ListUsersRequest(Header):
    """AUTH_LIST_USER (3005): selects the users whose names contain `filter`; all users if it is blank."""

    filter: str = ""


class SubjectRequest(Header):
    """Requests AUTH_CREATE_ACL (3006), AUTH_UPDATE_ACL (3007) and AUTH_GET_ACL (3009): the subject of the policies. A
    subject in the body takes precedence."""

    subject: str = ""


class DeleteAclRequest(Header):
    """AUTH_DELETE_ACL (3008): deletes the entry for `resource` from the policy of type `policy_type` (Custom if not
    given); without a resource, all policies of the subject."""

    subject: str = ""
    policy_type: str = ""
    resource: str = ""


class ListAclsRequest(Header):
    """AUTH_LIST_ACL (3010): selects the policy entries whose subject contains `subject_filter` and whose resource
    contains `resource_filter`. A blank filter selects all."""

    subject_filter: str = ""
    resource_filter: str = ""


class PolicyEntryInfo(msgspec.Struct, rename="camel", kw_only=True):
    """Allows or denies actions on one resource. If `source_ips` (addresses and networks) is not empty, the entry
    applies only to requests from there.
    """

    resource: str | None = None
    actions: list[str] | None = None
    source_ips: list[str] | None = None
    decision: str | None = None


class PolicyInfo(msgspec.Struct, rename="camel", kw_only=True):
    """The policy of one type (POLICY_TYPES)."""

    policy_type: str | None = None
    entries: list[PolicyEntryInfo] | None = None


class AclInfo(msgspec.Struct, rename="camel", kw_only=True):
    """All policies of a subject."""

    subject: str | None = None
    policies: list[PolicyInfo] | None = None


class UserInfo(msgspec.Struct, rename="camel", kw_only=True):
    """A user in the body of a request or answer. Its representation does not show the password."""

    username: str | None = None
    password: str | None = None
    user_type: str | None = None
    user_status: str | None = None

    def __repr__(self) -> str:
        return f"UserInfo({self.username!r}, {self.user_type}, {self.user_status})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("username", self.username)]


class UserConfig(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=True):
    """A user with its policies, as a broker stores them. Its representation does not show the password."""

    username: str
    password: str
    user_type: str = NORMAL
    user_status: str = ENABLE
    policies: list[PolicyInfo] = []

    def __repr__(self) -> str:
        entries = sum(len(policy.entries or ()) for policy in self.policies)
        return f"UserConfig({self.username!r}, {self.user_type}, {self.user_status}, entries={entries})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("username", self.username)]

    @property
    def is_super(self) -> bool:
        """Whether the user may do everything."""
        return self.user_type == SUPER


class UserTable(msgspec.Struct, rename="camel", kw_only=True):
    """The content of config/users.json."""

    data_version: DataVersion = DataVersion()
    log_position: LogPosition | None = None
    user_table: dict[str, UserConfig] = {}


def subject_of(username: str) -> str:
    """Returns the subject of a user."""
    return SUBJECT_PREFIX + username


def username_of(subject: str | None) -> str:
    """Returns the name of the user that `subject` stands for; "" if it is not `User:name`."""
    kind, _, name = (subject or "").partition(":")
    return name if kind.lower() == "user" else ""


def known_name(name: str | None, names: tuple[str, ...]) -> str | None:
    """Returns the name in `names` that equals `name` regardless of case; None if there is none."""
    lowered = (name or "").lower()
    return next((each for each in names if each.lower() == lowered), None)
