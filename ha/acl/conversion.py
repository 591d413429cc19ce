"""Turns plain_acl.yml into users of ACL 2.0. No I/O.

SUB becomes Sub and Get, because the file allows a subscriber to ask about its topics and groups (requirements.py);
RocketMQ's migration grants only Sub. PUB becomes Pub only, although the file also allows a publisher to ask about its
topics, because Get would permit reading messages as well. DENY becomes an entry that denies All, and a default right an
entry of the type Default. An admin without listed rights becomes a super user. An admin with listed rights becomes a
normal user with these rights and with All on the cluster. Rules without an equivalent are reported
(`Conversion.losses`). Source: AuthMigrator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ha.protocol.access_bodies import (
    ALLOW,
    CUSTOM,
    DEFAULT,
    DENY,
    NORMAL,
    SUPER,
    PolicyEntryInfo,
    PolicyInfo,
    UserConfig,
)
from ha.protocol.topic_names import RETRY_PREFIX

from .requirements import Right
from .yaml_file import AclFile, PlainAccount

_WORDS = (("Pub", Right.PUB), ("Sub", Right.SUB))


class Conversion(NamedTuple):
    """The users, and a line of text for each rule of the file that has no equivalent in their policies."""

    users: list[UserConfig]
    losses: list[str]


def users_of(file: AclFile) -> Conversion:
    """Returns the users for the accounts of `file`."""
    losses = [
        f"globalWhiteRemoteAddresses {pattern.text!r}: every request needs a signature"
        for pattern in file.global_white_hosts
    ]
    users = []
    for account in file.plain_accounts:
        losses += _losses(account)
        users.append(_user(account))
    return Conversion(users, losses)


def _user(account: PlainAccount) -> UserConfig:
    has_rights = bool(account.topics or account.groups)
    is_super = account.is_admin and not has_rights
    custom = [_entry("Cluster:*", Right.PUB | Right.SUB, "All")] if account.is_admin and has_rights else []
    for name, right in account.topics.items():
        if "*" not in name:
            custom.append(_entry(_resource_of(name), right))
    custom += [_entry(f"Group:{name}", right) for name, right in account.groups.items() if "*" not in name]
    default = [_entry("Topic:*", account.default_topic), _entry("Group:*", account.default_group)]
    policies = [
        PolicyInfo(policy_type=kind, entries=entries)
        for kind, entries in ((CUSTOM, custom), (DEFAULT, default))
        if entries and not is_super
    ]
    return UserConfig(
        username=account.access_key,
        password=account.secret_key,
        user_type=SUPER if is_super else NORMAL,
        policies=policies,
    )


def _losses(account: PlainAccount) -> Iterator[str]:
    name = account.access_key
    if account.white_host is not None:
        yield f"{name}: whiteRemoteAddress {account.white_host.text!r}: every request needs a signature"
    for kind, rights in (("topic", account.topics), ("group", account.groups)):
        for resource, right in rights.items():
            is_topic = kind == "topic" and not resource.startswith(RETRY_PREFIX)
            default = account.default_topic if is_topic else account.default_group
            if "*" in resource:
                yield f"{name}: {kind} {resource!r}: a name in a policy contains no *; the default applies to it"
            elif not (right | default) & Right.DENY and default & ~right:
                yield f"{name}: {kind} {resource!r}: the default {_words_of(default & ~right)} applies to it too"
    if Right.PUB in (account.default_topic, *account.topics.values()):
        yield f"{name}: Pub alone does not allow requests about a topic, such as for its offsets"
    if account.is_admin and (account.topics or account.groups):
        yield f"{name}: an admin with listed rights can't read system topics and can't change super users"


def _words_of(right: int) -> str:
    """Returns the names of the rights in `right`, joined by "and"."""
    return " and ".join(word for word, bit in _WORDS if right & bit)


def _resource_of(topic: str) -> str:
    if topic.startswith(RETRY_PREFIX):
        return f"Group:{topic.removeprefix(RETRY_PREFIX)}"
    return f"Topic:{topic}"


def _entry(resource: str, right: int, actions: str = "") -> PolicyEntryInfo:
    is_denied = bool(right & Right.DENY)
    names = ["All"] if is_denied or actions else [word for word, bit in _WORDS if right & bit]
    if not is_denied and not actions and right & Right.SUB:
        names.append("Get")
    return PolicyEntryInfo(resource=resource, actions=names, decision=DENY if is_denied else ALLOW)
