"""Accounts of plain_acl.yml and the users that they become have the same rights, except for what is listed."""

from __future__ import annotations

import itertools

import pytest

from ha.acl import Right
from ha.acl.conversion import users_of
from ha.acl.policy import RIGHTS
from ha.acl.requirements import GET
from ha.acl.users import UserAccount
from ha.acl.yaml_file import parse_acl_file
from ha.protocol.access_bodies import SUPER

FILE = """
globalWhiteRemoteAddresses: [10.10.103.*]
accounts:
  - {{accessKey: account, secretKey: the-secret, defaultTopicPerm: "{default_topic}",
     defaultGroupPerm: "{default_group}", topicPerms: ["T={topic}", "%RETRY%r={topic}"],
     groupPerms: ["g={group}"]}}
"""
NAMES = ("T", "other", "%RETRY%g", "%RETRY%r", "%RETRY%other", "SCHEDULE_TOPIC_XXXX", "")
NEEDS = (Right.PUB, Right.SUB, GET, Right.SUB | GET, Right.SUB | Right.UPDATE, Right.CREATE)


@pytest.mark.parametrize("default", RIGHTS)
def test_users_have_the_rights_of_their_accounts(default: str) -> None:
    for topic, group, default_group in itertools.product(RIGHTS, RIGHTS, ("DENY", "SUB")):
        text = FILE.format(topic=topic, group=group, default_topic=default, default_group=default_group)
        file = parse_acl_file(text.encode())
        [account] = file.accounts
        conversion = users_of(file)
        [user] = conversion.users
        assert "the-secret" not in repr(file) + repr(conversion)
        converted = UserAccount(user, "C", authorizes=True)
        wider = "applies to it too" in str(conversion.losses)
        for name, need in itertools.product(NAMES, NEEDS):
            before, after = account.denial_of(name, need, "h"), converted.denial_of(name, need, "h")
            if wider and name in ("T", "%RETRY%g", "%RETRY%r"):
                continue
            if bool(before) != bool(after):  # only narrower, and listed
                assert after, (text, name, need)
                assert need == GET
                assert "Pub alone does not allow requests about a topic" in str(conversion.losses)


def test_losses_are_listed() -> None:
    file = parse_acl_file(b"""
globalWhiteRemoteAddresses: [10.10.103.*]
accounts:
  - {accessKey: account, secretKey: the-secret, whiteRemoteAddress: 10.0.0.1, defaultTopicPerm: SUB,
     topicPerms: [T=PUB, "a*=SUB"]}
  - {accessKey: admin-key, secretKey: the-secret, admin: true}
  - {accessKey: some-admin, secretKey: the-secret, admin: true, topicPerms: [T=SUB]}
""")
    users, losses = users_of(file)
    assert losses == [
        "globalWhiteRemoteAddresses '10.10.103.*': every request needs a signature",
        "account: whiteRemoteAddress '10.0.0.1': every request needs a signature",
        "account: topic 'T': the default Sub applies to it too",
        "account: topic 'a*': a name in a policy contains no *; the default applies to it",
        "account: Pub alone does not allow requests about a topic, such as for its offsets",
        "some-admin: an admin with listed rights can't read system topics and can't change super users",
    ]
    assert [(user.user_type == SUPER, len(user.policies)) for user in users] == [(False, 2), (True, 0), (False, 2)]
    assert not UserAccount(users[2], "C", authorizes=True).denial_of(None, Right.UPDATE, "h")
    assert UserAccount(users[2], "C", authorizes=True).denial_of("other", Right.SUB, "h")
