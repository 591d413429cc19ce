"""Preparation of messages: the fast path and the full path agree."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ha.client import Client, ClientOptions, Message
from ha.client.sender import Outgoing, Sender, with_id
from ha.errors import HalogError
from ha.protocol.properties import decode_properties

BODY_SIZE_MAX = 30


def sender() -> Sender:
    """A sender of a client that is not open; its unique ids are U0, U1, …"""
    options = ClientOptions(message_size_max=BODY_SIZE_MAX, compress_from_bytes=20)
    ids = SimpleNamespace(next=map("U{}".format, itertools.count()).__next__)
    return Sender(cast(Client, SimpleNamespace(options=options, unique_ids=ids)), "g")


def outcome(make: Callable[[], Outgoing | None]) -> Outgoing | type[Exception] | None:
    """The result of `make`, or the type of its exception."""
    try:
        return make()
    except (HalogError, ValueError) as error:
        return type(error)


words = st.text(st.sampled_from("ab ü\x01\x02\ud800"), max_size=3)
messages = st.builds(
    Message,
    topic=st.sampled_from(["T", "ü" * 127, "t" * 128, "%RETRY%g"]),
    body=st.binary(max_size=BODY_SIZE_MAX + 1),
    tags=st.none() | words,
    keys=words | st.lists(words, max_size=3).map(tuple),
    properties=st.just({}) | st.dictionaries(words, words, max_size=2),
    flag=st.integers(-(2**31), 2**31 - 1),
    wait_stored=st.sampled_from([True, True, False]),
    delay_level=st.sampled_from([0, 0, 0, 1]),
    delay_s=st.sampled_from([None, None, None, 1.5]),
    deliver_at_ms=st.sampled_from([None, None, None, 7]),
)


@given(messages)
def test_fast_and_full_preparation_agree(message: Message) -> None:
    usual = outcome(lambda: sender().prepare_simple(message))
    if isinstance(usual, Outgoing):
        usual = with_id(usual, "U0")
    assert usual is None or usual == outcome(lambda: trio.run(sender().prepare, message))


@pytest.mark.parametrize(
    ("changes", "properties"),
    [
        ({}, {}),
        ({"tags": "ü"}, {"TAGS": "ü"}),
        ({"tags": "a", "keys": "k"}, {"TAGS": "a", "KEYS": "k"}),
        ({"keys": ("k", "l")}, {"KEYS": "k l"}),
    ],
)
def test_simple_message_takes_the_fast_path(changes: dict[str, Any], properties: dict[str, str]) -> None:
    outgoing = sender().prepare_simple(msgspec.structs.replace(Message("T", b"x" * 19), **changes))
    assert outgoing is not None
    assert decode_properties(outgoing.properties) == properties
    assert outgoing.message_id is None
    leaving = with_id(outgoing, "U7")
    assert decode_properties(leaving.properties) == {**properties, "UNIQ_KEY": "U7"}
    assert leaving.message_id == "U7"
    assert with_id(leaving, "U8") == leaving
    assert outgoing.is_batchable


@pytest.mark.parametrize(
    "changes",
    [
        {"body": b"x" * 20},
        {"body": b""},
        {"topic": "t" * 128},
        {"topic": "%RETRY%g"},
        {"wait_stored": False},
        {"properties": {"a": "b"}},
        {"delay_level": 1},
        {"delay_s": 1.0},
        {"deliver_at_ms": 1},
        {"keys": ("",)},
        {"keys": "a\x02b"},
        {"keys": "\ud800"},
        {"keys": "k" * 32767},
    ],
    ids=str,
)
def test_rarer_features_take_the_full_path(changes: dict[str, Any]) -> None:
    assert sender().prepare_simple(msgspec.structs.replace(Message("T", b"x", tags="a"), **changes)) is None
