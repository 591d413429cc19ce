"""Signatures: vectors made by RocketMQ's AclSigner (4.9.7 and a later 5.x), and invalid ones."""

import pytest

from ha.errors import LocalProtocolError
from ha.protocol.acl import AclCredentials, SigningKey
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command

FIELDS = {"topic": "T1", "Zed": "z", "bname": "b0"}


@pytest.mark.parametrize(
    ("token", "signature"),
    [(None, "XLm8z6NqvG9huKltCfhaJfnf+Uc="), ("tok", "bkISKtqLtl0SG+mbDmXNYnIJcdA=")],
)
def test_signature_equals_rocketmqs(token: str | None, signature: str) -> None:
    command = RemotingCommand(310, ext_fields=dict(FIELDS), body=b"hello")
    AclCredentials("ak", "secret12", token).sign(command)
    assert command.ext_fields["Signature"] == signature
    assert command.ext_fields["AccessKey"] == "ak"
    assert command.ext_fields.get("SecurityToken") == token


def test_signing_again_gives_the_same_signature() -> None:
    command = RemotingCommand(310, ext_fields=dict(FIELDS), body=b"hello")
    credentials = AclCredentials("ak", "secret12")
    credentials.sign(command)
    credentials.sign(command)
    assert command.ext_fields["Signature"] == "XLm8z6NqvG9huKltCfhaJfnf+Uc="


def test_a_signature_survives_the_wire_in_either_encoding() -> None:
    for serialize_type in (0, 1):
        command = RemotingCommand(310, ext_fields=dict(FIELDS), body=b"x" * 20_000, serialize_type=serialize_type)
        AclCredentials("ak", "secret12").sign(command)
        [arrived] = RemotingParser().feed(encode_command(command))
        assert isinstance(arrived.body, memoryview)
        assert SigningKey("secret12").has_signed(arrived)


@pytest.mark.parametrize("field", ["topic", "Zed", "AccessKey", "added"])
def test_any_changed_field_invalidates_the_signature(field: str) -> None:
    command = RemotingCommand(310, ext_fields=dict(FIELDS), body=b"hello")
    AclCredentials("ak", "secret12").sign(command)
    assert SigningKey("secret12").has_signed(command)
    command.ext_fields[field] = command.ext_fields.get(field, "") + "!"
    assert not SigningKey("secret12").has_signed(command)


def test_body_key_and_signature_have_to_match() -> None:
    command = RemotingCommand(310, ext_fields=dict(FIELDS), body=b"hello")
    AclCredentials("ak", "secret12").sign(command)
    assert not SigningKey("secret13").has_signed(command)
    for signature in ("", "äöü", "XLm8z6NqvG9huKltCfhaJfnf+Uc", "XLm8z6NqvG9huKltCfhaJfnf+Uc=\n"):
        command.ext_fields["Signature"] = signature
        assert not SigningKey("secret12").has_signed(command)
    del command.ext_fields["Signature"]
    assert not SigningKey("secret12").has_signed(command)


def test_clients_sign_queries_by_unique_key_from_4_9_4_on() -> None:
    for version, is_signed in ((399, False), (400, True)):
        command = RemotingCommand(12, version=version, ext_fields=dict(FIELDS))
        AclCredentials("ak", "secret12").sign(command)
        command.ext_fields["_UNIQUE_KEY_QUERY"] = "true"
        assert SigningKey("secret12").has_signed(command) is not is_signed


def test_names_are_ordered_as_in_java() -> None:
    """U+1F600 is D83D DE00 in UTF-16 and so stands before U+FF21, though its code point is the larger one."""
    low, high = "\N{GRINNING FACE}", "\N{FULLWIDTH LATIN CAPITAL LETTER A}"
    assert sorted((low, high)) == [high, low]
    key = SigningKey("secret12")
    signed = key.signature(RemotingCommand(310, ext_fields={high: "2", low: "1"}))
    assert signed == key.signature(RemotingCommand(310, ext_fields={"a": "1", "b": "2"}))


def test_credentials_show_no_secret() -> None:
    credentials = AclCredentials("ak", "secret12", "token-7")
    for shown in (repr(credentials), str(credentials), repr(SigningKey("secret12"))):
        assert "secret12" not in shown
        assert "token-7" not in shown


def test_credentials_have_two_keys() -> None:
    for pair in (("", "secret12"), ("ak", "")):
        with pytest.raises(ValueError, match="non-empty access key") as caught:
            AclCredentials(*pair)
        assert "secret12" not in str(caught.value)


def test_lone_surrogate_can_not_be_signed() -> None:
    with pytest.raises(LocalProtocolError, match="can't be signed"):
        AclCredentials("ak", "secret12").sign(RemotingCommand(310, ext_fields={"a": "\ud800"}))
