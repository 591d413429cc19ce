"""The recall handle of a timer message, by which RECALL_MESSAGE (370) identifies the message to recall.

    URL-safe base64, padded, of `v1 <topic> <broker name> <timestamp> <unique key>`

The timestamp is the due time of the message plus 1, in ms since the epoch. Source: RecallMessageHandle.
"""

from __future__ import annotations

import base64
import re

import msgspec

from ha.errors import RemoteProtocolError

VERSION = "v1"
HANDLE_SIZE_MAX = 2048
"""Maximum number of characters of a handle; topics, broker names and unique keys have at most 255."""

_ALPHABET = re.compile(r"[A-Za-z0-9_-]+={0,2}", re.ASCII)
_LONG = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


class RecallHandle(msgspec.Struct, frozen=True):
    """The message that a recall handle names. `timestamp_ms`: its due time plus 1; -1 if the handle has no number
    there."""

    topic: str
    broker_name: str
    timestamp_ms: int
    unique_key: str


def encode_recall_handle(handle: RecallHandle) -> str:
    """Returns the text of a handle."""
    words = (VERSION, handle.topic, handle.broker_name, str(handle.timestamp_ms), handle.unique_key)
    return base64.urlsafe_b64encode(" ".join(words).encode()).decode("ascii")


def decode_recall_handle(text: str) -> RecallHandle:
    """Decodes a recall handle. Raises RemoteProtocolError with RocketMQ's remark if `text` is not one."""
    words: list[str] = []
    if len(text) <= HANDLE_SIZE_MAX and _ALPHABET.fullmatch(text):
        padded = text if "=" in text else text + "=" * (-len(text) % 4)  # Java's decoder accepts missing padding
        if len(padded) % 4 == 0 and not padded.endswith("==="):
            words = base64.urlsafe_b64decode(padded).decode("utf-8", "replace").split(" ")
    if len(words) < 5 or words[0] != VERSION:
        raise RemoteProtocolError("recall handle is invalid")
    _, topic, broker_name, timestamp, unique_key = words[:5]
    return RecallHandle(topic, broker_name, int(timestamp) if _LONG.fullmatch(timestamp) else -1, unique_key)
