"""Identifies the rows of a micro-batch in the log, by a property and the unique id.

    HALOG_SINK   sink "/" batch "/" partition            owner of the message; `sink` is the query's id, or `sinkId`
    UNIQ_KEY     32 hex digits: 10 bytes hash of (sink, batch, partition, the row) | 6 bytes number within the attempt

Rows of two attempts are matched by the hash, not the number: Spark repeats the rows of a partition, but after a shuffle
not their order. Rows of equal content have equal hashes and are matched by count. The format is RocketMQ's (32 hex
digits, `MessageClientIDSetter`), so that all clients and tools support it. It has zeros where RocketMQ has a time of
the current month, so RocketMQ's tools search from the start of the month.
"""

from __future__ import annotations

import re
from hashlib import blake2b

import msgspec

from ha.errors import OptionError

SINK_PROPERTY = "HALOG_SINK"
SINK_PROPERTY_BYTES = SINK_PROPERTY.encode()
HASH_DIGITS = 20
_NUMBER = re.compile("[0-9]{1,18}")
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
NAME_LENGTH_MAX = 64


def check_sink_name(name: str) -> str:
    """Returns `name` if it is a valid name of a sink: 1 to 64 ASCII letters, digits, "_", "." or "-". Otherwise raises
    OptionError."""
    if not 0 < len(name) <= NAME_LENGTH_MAX or not _NAME_CHARACTERS.issuperset(name):
        raise OptionError(
            "sinkId",
            f"{name!r} is not a valid name of a sink",
            f"1 to {NAME_LENGTH_MAX} letters, digits, '_', '.' or '-'",
        )
    return name


def hash_number(unique_key: str) -> int:
    """Returns the row's hash in a UNIQ_KEY as a number; 0 if the key is of another form."""
    try:
        return int(unique_key[:HASH_DIGITS], 16)
    except ValueError:
        return 0


class SinkPart(msgspec.Struct, frozen=True):
    """One partition of one micro-batch of one sink."""

    sink: str
    batch: int
    partition: int

    @property
    def text(self) -> str:
        """Value of HALOG_SINK."""
        return f"{self.sink}/{self.batch}/{self.partition}"


def parse_sink_property(value: str) -> SinkPart | None:
    """Parses a value of HALOG_SINK; returns None if it does not have the form of `SinkPart.text`."""
    parts = value.split("/")
    if len(parts) != 3 or not parts[0] or not all(_NUMBER.fullmatch(number) for number in parts[1:]):
        return None
    return SinkPart(parts[0], int(parts[1]), int(parts[2]))


class UniqueKeys:
    """Generates the unique ids of the rows of one attempt at a part."""

    def __init__(self, part: SinkPart) -> None:
        self._prefix = blake2b(part.text.encode() + b"\0", digest_size=HASH_DIGITS // 2, person=b"halog-sink")
        self._number = 0

    def hash(self, head: str, body: bytes) -> str:
        """Returns the hash of a row in this part: HASH_DIGITS hex digits. `head`: see `Row`."""
        digest = self._prefix.copy()
        digest.update(b"%d\0" % len(body))
        digest.update(body)
        digest.update(head.encode("utf-8", "surrogatepass"))
        return digest.hexdigest().upper()

    def key(self, row_hash: str) -> str:
        """Returns a new UNIQ_KEY for a row with the hash `row_hash`."""
        self._number += 1
        return f"{row_hash}{self._number:012X}"
