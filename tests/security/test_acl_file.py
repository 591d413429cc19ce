"""plain_acl.yml: the file that RocketMQ ships, address patterns, and errors, which never contain a secret."""

import traceback

import pytest

from ha.acl.addresses import AddressPattern
from ha.acl.policy import KNOWN_HOSTS_MAX, HostFilter
from ha.acl.requirements import Right
from ha.acl.yaml_file import AclFileError, parse_acl_file

SHIPPED = b"""
globalWhiteRemoteAddresses:
  - 10.10.103.*
  - 192.168.0.*

accounts:
  - accessKey: RocketMQ
    secretKey: 12345678
    whiteRemoteAddress:
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      - topicA=DENY
      - topicB=PUB|SUB
      - topicC=SUB
    groupPerms:
      # the group should convert to retry topic
      - groupA=DENY
      - groupB=PUB|SUB
      - groupC=SUB

  - accessKey: rocketmq2
    secretKey: 12345678
    whiteRemoteAddress: 192.168.1.*
    # if it is admin, it could access all resources
    admin: true
"""
"""The values of distribution/conf/plain_acl.yml of 4.9.7."""


def test_shipped_file() -> None:
    found = parse_acl_file(SHIPPED)
    assert [pattern.text for pattern in found.global_white_hosts] == ["10.10.103.*", "192.168.0.*"]
    plain, admin = found.accounts
    assert found.warnings == []
    assert (plain.access_key, plain.is_admin, bool(plain.white_hosts)) == ("RocketMQ", False, False)
    assert (admin.access_key, admin.is_admin) == ("rocketmq2", True)
    assert admin.white_hosts.matches("192.168.1.77")
    assert not admin.white_hosts.matches("192.168.2.77")
    rights = {
        name: "".join("ps"[right == Right.SUB] for right in (Right.PUB, Right.SUB) if plain.may(name, right))
        for name in (
            "topicA",
            "topicB",
            "topicC",
            "other",
            *(f"%RETRY%{g}" for g in ("groupA", "groupB", "groupC", "x")),
        )
    }
    assert rights == {
        "topicA": "",
        "topicB": "ps",
        "topicC": "s",
        "other": "",
        "%RETRY%groupA": "",
        "%RETRY%groupB": "ps",
        "%RETRY%groupC": "s",
        "%RETRY%x": "s",
    }
    assert admin.may("anything", Right.PUB)
    assert admin.may("%RETRY%any", Right.SUB)


def test_admin_with_listed_rights_has_only_these() -> None:
    """PlainPermissionManager.checkPerm: an admin is let off only while ownedPermMap is null."""
    text = b"accounts: [{accessKey: 'admin-1', secretKey: 'secret-1', admin: true, topicPerms: ['a=PUB']}]"
    [admin] = parse_acl_file(text).accounts
    assert admin.may("a", Right.PUB)
    assert not admin.may("a", Right.SUB)
    assert not admin.may("b", Right.PUB)


def test_empty_file() -> None:
    for text in (b"", b"# only a comment\n", b"accounts:\nglobalWhiteRemoteAddresses:\n"):
        assert parse_acl_file(text) == ([], [], [])


SECRET = "s3cr3t-that-nobody-sees"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("accounts: [{accessKey: abcdefg, secretKey: %s", "it is not valid YAML"),
        ("accounts: [{accessKey: abcdefg, secretKey: !!python/object %s}]\n\t", "it is not valid YAML"),
        ("[%s]", "the file is not a mapping"),
        ("accounts: %s", "accounts is not a list"),
        ("accounts: [%s]", r"accounts\[0\] is not a mapping"),
        ("accounts: [{secretKey: %s}]", "longer than 6 characters"),
        ("accounts: [{accessKey: abcdef, secretKey: %s}]", "longer than 6 characters"),
        ("accounts: [{accessKey: %s, secretKey: abcdef}]", "longer than 6 characters"),
        ("accounts: [{accessKey: abcdefg, secretKey: %s, secretKey: abcdefg}]", "secretKey is duplicated"),
        (
            "x: &x {topicPerms: [a=DENY]}\naccounts: [{<<: *x, accessKey: abcdefg, secretKey: %s}]",
            "<< is not supported",
        ),
        ("accounts: [{accessKey: abcdefg, secretKey: [%s]}]", "secretKey is not text"),
        ("accounts: [{accessKey: abcdefg, secretKey: 0123456, whiteRemoteAddress: %s}]", "put it in quotes"),
        ("accounts: [{accessKey: abcdefg, secretKey: 1234567e10, topicPerms: [%s]}]", "put it in quotes"),
        ("accounts: [{accessKey: abcdefg, secretKey: 2026-01-01, topicPerms: [%s]}]", "put it in quotes"),
        (r'accounts: [{accessKey: abcdefg, secretKey: "\ud800%s"}]', "secretKey is not valid text"),
        (r'accounts: [{accessKey: abcdefg, secretKey: "\U99999999%s"}]', "it is not valid YAML"),
        ("accounts: [{accessKey: abcdefg, secretKey: %s, admin: yes}]", "neither true nor false"),
        ("accounts: [{accessKey: abcdefg, secretKey: %s, topicPerms: [a]}]", r"topicPerms\[0\] is not name=right"),
        ("accounts: [{accessKey: abcdefg, secretKey: %s, topicPerms: a=PUB}]", "topicPerms is not a list"),
        ("accounts: [{accessKey: abcdefg, secretKey: abcdefg, whiteRemoteAddress: %s}]", "not an address pattern"),
        ("globalWhiteRemoteAddresses: [%s]", "not an address pattern"),
        ("x: &a [*a, %s]\naccounts: *b", "it is not valid YAML"),
        ("[" * 1000 + "%s", "it is not valid YAML"),
        ("%s: " + "x" * (1 << 20), "at most 1048576"),
    ],
)
def test_errors_do_not_contain_the_secret(text: str, reason: str) -> None:
    with pytest.raises(AclFileError, match=reason) as caught:
        parse_acl_file((text % SECRET).encode())
    assert SECRET not in "".join(traceback.format_exception(caught.value))  # YAML's own words quote the line


def test_questionable_entries_are_warnings() -> None:
    text = f"""
accounts:
  - {{accessKey: account-1, secretKey: {SECRET}, defaultTopicPerm: pub, topicPerms: [a=PUBSUB, "b = PUB | SUB"]}}
  - {{accessKey: account-1, secretKey: {SECRET}2, {SECRET}: x}}
"""
    found = parse_acl_file(text.encode())
    [account] = found.accounts
    assert not account.may("a", Right.PUB)
    assert not account.may("b", Right.PUB)
    assert not account.may("c", Right.PUB)
    assert len(found.warnings) == 5
    assert not any(SECRET in warning for warning in found.warnings)


def test_unknown_keys_are_not_quoted_and_may_be_repeated() -> None:
    """A secret may have been typed in the place of a key."""
    text = f"accounts:\n- accessKey: account-1\n  secretKey: abcdefg\n  {SECRET}: x\n  {SECRET}: y\n"
    found = parse_acl_file(text.encode())
    assert [account.access_key for account in found.accounts] == ["account-1"]
    assert [" line 4 " in found.warnings[0], " line 5 " in found.warnings[1], len(found.warnings)] == [True, True, 2]
    assert SECRET not in "".join(found.warnings)


@pytest.mark.parametrize(
    ("pattern", "meant", "not_meant"),
    [
        ("*", ["1.2.3.4", "::1", "memory"], []),
        ("*.*.*.*", ["1.2.3.4"], []),
        ("*:*:*:*:*:*:*:*", ["::1"], []),
        ("127.0.0.1", ["127.0.0.1", "::ffff:127.0.0.1"], ["127.0.0.2", "memory", "", "127.0.0.1.evil.example"]),
        ("192.168.0.*", ["192.168.0.0", "192.168.0.255"], ["192.168.1.0", "192.168.00.1"]),
        ("192.168.*.*", ["192.168.7.9"], ["192.169.7.9"]),
        ("192.168.1-3.*", ["192.168.1.0", "192.168.3.9"], ["192.168.4.0", "192.168.0.0"]),
        ("192.168.*.5", ["192.168.9.5"], ["192.168.9.6"]),
        ("10.0.0.1,10.0.0.9", ["10.0.0.1", "10.0.0.9"], ["10.0.0.5"]),
        ("10.0.0.{1,9}", ["10.0.0.1", "10.0.0.9"], ["10.0.0.5"]),
        ("5::7:6:1-200:*", ["5::7:6:1:0", "5:0:0:0:7:6:200:ffff"], ["5::7:6:201:0", "5::7:7:1:0"]),
        ("2::ac5:78:1-200", ["2::ac5:78:1ff"], ["2::ac5:78:201"]),
        ("1050::0005:0600:300c:*", ["1050::5:600:300C:1"], ["1050::5:600:300d:1"]),
        ("2001:db8:*", ["2001:db8::1", "2001:db8:1:2:3:4:5:6"], ["2001:db9::1"]),
        ("::{1,2}", ["::1", "::2%eth0"], ["::3"]),
    ],
)
def test_address_patterns(pattern: str, meant: list[str], not_meant: list[str]) -> None:
    """All were given to the real RemoteAddressStrategyFactory of 4.9.7 as well, which says the same but for these: it
    takes 192.168.*.5 for 192.168.*.*, and knows neither IPv4 addresses written as IPv6 ones nor zones."""
    parsed = AddressPattern(pattern)
    assert [host for host in meant if not parsed.matches(host)] == []
    assert [host for host in not_meant if parsed.matches(host)] == []


def test_cached_hosts_are_bounded() -> None:
    hosts = HostFilter([AddressPattern("10.0.0.*")])
    for number in range(3 * KNOWN_HOSTS_MAX // 2):
        assert hosts.matches(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}") == (number < 256)
    assert len(hosts._known) <= KNOWN_HOSTS_MAX
    assert hosts.matches("10.0.0.1")


@pytest.mark.parametrize(
    "pattern",
    [
        "192.*",
        "256.0.0.1",
        "10.0.0.5-1",
        "10.0.0.-1",
        "10.0.0.1/8",
        "a.b.c.d",
        "1:2:3",
        "1::2::3",
        "10.0.0{1}",
        "10.0.0.x",
        "10.0.0.{1}2}",
        "1:2:3:4:5:6:7:8:9",
        "10000::1",
        "localhost",
    ],
)
def test_invalid_address_patterns(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        AddressPattern(pattern)
