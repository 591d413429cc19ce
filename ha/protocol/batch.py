"""The body of a batch send (320, or 10/310 with batch=true): messages that share topic, queue and host fields.

Per message, big-endian:

    0   4  size of the entry
    4   4  0 (magic)
    8   4  0 (body CRC)
    12  4  flag
    16  4  body length n
    20  n  body
        2  properties length p
        p  properties

Source: MessageDecoder.encodeMessage, decodeMessage.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.properties import PROPERTIES_SIZE_MAX

ENTRY_SIZE_MIN = 22
_HEAD = Struct(">iiiii")
_INT16 = Struct(">h")


def encode_batch(entries: Iterable[tuple[int, bytes, bytes]]) -> bytes:
    """Return the batch body of `entries`, each (flag, body, property string).

    LocalProtocolError if a property string is longer than 32767 bytes.
    """
    parts: list[bytes] = []
    for flag, body, properties in entries:
        if len(properties) > PROPERTIES_SIZE_MAX:
            raise LocalProtocolError(f"properties of {len(properties)} bytes")
        size = ENTRY_SIZE_MIN + len(body) + len(properties)
        parts += (_HEAD.pack(size, 0, 0, flag, len(body)), body, _INT16.pack(len(properties)), properties)
    return b"".join(parts)


def decode_batch(
    raw: bytes | bytearray | memoryview, *, count_max: int | None = None
) -> list[tuple[int, bytes, bytes]]:
    """Return (flag, body, property string) of each message in the batch body `raw`.

    RemoteProtocolError if `raw` is empty, is cut, an entry's parts don't sum up to its size, or there are more than
    `count_max` of them.
    """
    entries: list[tuple[int, bytes, bytes]] = []
    position, end = 0, len(raw)
    while position < end:
        if end - position < ENTRY_SIZE_MIN:
            raise RemoteProtocolError(f"batch entry of {end - position} bytes")
        size, _, _, flag, body_size = _HEAD.unpack_from(raw, position)
        body_at = position + _HEAD.size
        properties_at = body_at + body_size + 2
        entry_end = position + size
        if body_size < 0 or entry_end > end or properties_at > entry_end:
            raise RemoteProtocolError(f"batch entry of {size} bytes and a body of {body_size}")
        (properties_size,) = _INT16.unpack_from(raw, properties_at - 2)
        if properties_size < 0 or properties_at + properties_size != entry_end:
            raise RemoteProtocolError(f"batch entry of {size} bytes with properties of {properties_size}")
        if len(entries) == count_max:
            raise RemoteProtocolError(f"batch of more than {count_max} messages")
        entries.append((flag, bytes(raw[body_at : body_at + body_size]), bytes(raw[properties_at:entry_end])))
        position = entry_end
    if not entries:
        raise RemoteProtocolError("empty batch")
    return entries
