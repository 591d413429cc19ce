"""The property string with which a message is stored: the producer's properties, except those that the broker sets, and
then the broker's. POP_CK is omitted, too: a producer may forward a popped message with its receipt handle, which
clients would mistake for that of the new message.

RocketMQ writes the same properties in the order of a Java hash map; no reader depends on the order. Source:
SendMessageProcessor, AbstractSendMessageProcessor.
"""

from __future__ import annotations

from collections.abc import Callable

from ha.broker.options import BrokerOptions
from ha.broker.put_request import message_waits
from ha.protocol.compiled import with_compiled_twin
from ha.protocol.pop import POP_CK
from ha.protocol.properties import (
    CLUSTER,
    MSG_REGION,
    TRACE_ON,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
    find_property,
)

_UNUSUAL = (
    "CLUSTER\x01",
    "MSG_REGION\x01",
    "TRACE_ON\x01",
    "WAIT\x01false",
    "DELAY\x01",
    "TRAN_MSG\x01",
    "TIMER_D",
)
"""Prefixes of properties that a broker has to examine: those that it sets itself, and those that decide how or where
a message is stored."""


@with_compiled_twin
def usual_properties(text: str, suffix: bytes, unique_id: Callable[[], str]) -> tuple[bytes, str] | None:
    """Returns the property string to store for a message with the property string `text`, encoded, and the message's
    unique id: its own, or a new one. `suffix`: the properties that the broker adds, encoded.

    Returns None in unusual cases: `text` is not ASCII, has a property that the broker has to examine, has an empty
    UNIQ_KEY, or has more than one.
    """
    if not text.isascii():
        return None
    own_key = None
    for pair in text.split("\x02"):
        if pair.startswith(_UNUSUAL):
            return None
        if pair.startswith("UNIQ_KEY\x01"):
            if own_key is not None or len(pair) == 9:
                return None
            own_key = pair[9:]
    end = "\x02" if text and text[-1] != "\x02" else ""
    if own_key is not None:
        return f"{text}{end}".encode("ascii") + suffix, own_key
    unique_key = unique_id()
    return f"{text}{end}UNIQ_KEY\x01{unique_key}\x02".encode("ascii") + suffix, unique_key


class StoredProperties:
    """Makes property strings to store. `unique_id` makes the UNIQ_KEY of a message that has none."""

    def __init__(self, options: BrokerOptions, *, unique_id: Callable[[], str]) -> None:
        self._unique_id = unique_id
        self.answered = answered_properties(options)
        self._pairs = {CLUSTER: options.cluster_name, **self.answered}
        self._suffix = encode_properties(self._pairs)

    def usual(self, text: str) -> tuple[bytes, str] | None:
        """Returns the result of `usual_properties`, or None for a string with POP_CK."""
        return None if "POP_CK\x01" in text else usual_properties(text, self._suffix, self._unique_id)

    def of(self, text: str, *, is_batch: bool) -> tuple[bytes, bool, str | None]:
        """Returns the string to store for any property string, whether the put waits for a flush and slaves, and the
        message's unique id.

        The caller appends the string of a batch to that of each of its messages (`join`). A batch without UNIQ_KEY has
        no id (None).
        """
        raw = text.encode("utf-8", "replace")
        waits = "WAIT\x01false" not in text or message_waits(raw)
        if "CLUSTER\x01" in text or "MSG_REGION\x01" in text or "TRACE_ON\x01" in text or "POP_CK\x01" in text:
            raw = self._without_pairs(raw)
        unique_key = _unique_key(text, raw) if "UNIQ_KEY\x01" in text else None
        if is_batch and unique_key is not None:
            # 5.x clients give the batch itself a key; appended to a message's own pairs it would become the message's.
            raw = without(raw, UNIQ_KEY)
        end = b"\x02" if raw and raw[-1] != 2 else b""
        if unique_key is None and not is_batch:
            unique_key = self._unique_id()
            return b"%b%bUNIQ_KEY\x01%b\x02%b" % (raw, end, unique_key.encode(), self._suffix), waits, unique_key
        return raw + end + self._suffix, waits, unique_key

    def _without_pairs(self, raw: bytes) -> bytes:
        properties = decode_properties(raw)
        for name in (*self._pairs, POP_CK):
            properties.pop(name, None)
        return encode_properties(properties)


def answered_properties(options: BrokerOptions) -> dict[str, str]:
    """Returns the properties set by the broker that are also ext fields of the responses to sends."""
    return {MSG_REGION: options.region_id, TRACE_ON: "true" if options.trace_on else "false"}


def join(own: bytes, added: bytes) -> bytes:
    """Returns the property string `own` with `added` appended."""
    return own + added if not own or own[-1] == 2 else own + b"\x02" + added


def without(raw: bytes, *names: str) -> bytes:
    """Returns the property string `raw` without the properties `names`. The others keep their bytes: decoded and
    encoded again, they would be longer if they are not UTF-8."""
    marks = tuple(f"{name}\x01".encode() for name in names)
    return b"\x02".join(pair for pair in raw.split(b"\x02") if not pair.startswith(marks))


def _unique_key(text: str, raw: bytes) -> str | None:
    """Returns the value of UNIQ_KEY in a property string that contains this name, given as text and as bytes; None if
    it is only part of another name or value."""
    at = text.index("UNIQ_KEY\x01")
    end = text.find("\x02", at)
    if (at == 0 or text[at - 1] == "\x02") and end > at + 9 and text.find("UNIQ_KEY\x01", end) < 0:
        return text[at + 9 : end]
    return find_property(raw, b"UNIQ_KEY")
