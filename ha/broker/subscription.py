"""RocketMQ's TAG expressions, which select messages of a topic by tag.

    "*" or ""       everything
    "a || b"        messages with tag a or b; blanks around each are ignored

The broker compares hashes only (a consume-queue entry has the tag's hash); consumers compare the text again.
Source: FilterAPI, DefaultMessageFilter.
"""

from __future__ import annotations

from ha.errors import RemoteProtocolError
from ha.protocol.properties import java_hash

SUB_ALL = "*"
TAG = "TAG"
TAG_COUNT_MAX = 1024


def parse_tag_expression(expression: str | None) -> frozenset[int] | None:
    """Returns the tag hashes that `expression` selects, or None for all messages.

    Raises RemoteProtocolError if it names no tag (`||`) or more than TAG_COUNT_MAX.
    """
    if expression is None or not expression.strip() or expression.strip() == SUB_ALL:
        return None
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    if not tags:
        raise RemoteProtocolError(f"subscription {expression!r} names no tag")
    if len(tags) > TAG_COUNT_MAX:
        raise RemoteProtocolError(f"subscription names {len(tags)} tags; at most {TAG_COUNT_MAX} are accepted")
    return frozenset(map(java_hash, tags))


def is_tag_type(expression_type: str | None) -> bool:
    """Returns whether `expression_type` means TAG, which is the default if it is absent or empty."""
    return not expression_type or expression_type == TAG
