"""Recall handles: the text of one, round trips, and what is refused."""

import base64

import pytest

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
