"""Recall handles: the text of one, round trips, and what is refused."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.protocol.recall_handle import RecallHandle, decode_recall_handle, encode_recall_handle

HANDLE = RecallHandle("topic", "broker-a", 1_700_000_000_001, "0A0000010000")
TEXT = "djEgdG9waWMgYnJva2VyLWEgMTcwMDAwMDAwMDAwMSAwQTAwMDAwMTAwMDA="
"""Made by `printf 'v1 topic broker-a 1700000000001 0A0000010000' | base64`, as RecallMessageHandle does."""


def test_a_handle_is_base64_of_its_words() -> None:
    assert encode_recall_handle(HANDLE) == TEXT
    assert decode_recall_handle(TEXT) == HANDLE
    assert decode_recall_handle(TEXT.rstrip("=")) == HANDLE, "Java's decoder accepts missing padding"


@pytest.mark.parametrize("words", ["", "v1", "v2 topic broker-a 1 k", "v1 topic broker-a 1", "V1 topic broker-a 1 k"])
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(RemoteProtocolError, match="recall handle is invalid"):
        decode_recall_handle(base64.urlsafe_b64encode(words.encode()).decode())


@pytest.mark.parametrize("text", ["", "=", "a", "a b", "djEg+", "ü", TEXT + "\n", TEXT + "=", "A" * 3000])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="recall handle is invalid"):
        decode_recall_handle(text)


@given(st.text() | st.binary().map(lambda raw: base64.urlsafe_b64encode(b"v1 " + raw).decode()))
def test_any_text_is_a_handle_or_refused(text: str) -> None:
    try:
        handle = decode_recall_handle(text)
    except RemoteProtocolError:
        return
    assert -(10**18) < handle.timestamp_ms < 10**18
