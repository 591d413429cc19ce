"""The body of a batch send: messages that share topic, queue and host fields. Used by SEND_BATCH_MESSAGE (320), and by
SEND_MESSAGE (10) and SEND_MESSAGE_V2 (310) with batch=true.

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

from collections.abc import Sequence
from struct import Struct

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.compiled import with_compiled_twin
from ha.protocol.properties import PROPERTIES_SIZE_MAX

ENTRY_SIZE_MIN = 22
_HEAD = Struct(">iiiii")
_OWN_HEAD = Struct(">i8xii")
"""The fields of the head that are not always 0: size of the entry, flag, body length"""
HEAD_SIZE = _HEAD.size
_INT16 = Struct(">h")


@with_compiled_twin
def encode_batch(entries: Sequence[tuple[int, bytes, bytes]]) -> bytes:
    """Returns the batch body of `entries`, each (flag, an int32; body; property string).

    Raises LocalProtocolError if a property string is longer than 32767 bytes.
    """
    parts: list[bytes] = []
    pack_head, pack_size = _HEAD.pack, _INT16.pack
    for flag, body, properties in entries:
        body_size, properties_size = len(body), len(properties)
        if properties_size > PROPERTIES_SIZE_MAX:
            raise LocalProtocolError(f"properties of {properties_size} bytes")
        size = ENTRY_SIZE_MIN + body_size + properties_size
        parts += (pack_head(size, 0, 0, flag, body_size), body, pack_size(properties_size), properties)
    return b"".join(parts)


@with_compiled_twin
def decode_batch(
    raw: bytes | bytearray | memoryview, *, count_max: int | None = None
) -> list[tuple[int, bytes, bytes]]:
    """Returns (flag, body, property string) of each message in the batch body `raw`.

    Raises RemoteProtocolError if `raw` is empty or truncated, the parts of an entry don't add up to its size, or there
    are more than `count_max` entries.
    """
    entries: list[tuple[int, bytes, bytes]] = []
    if type(raw) is not bytes:
        raw = bytes(raw)  # slicing bytes costs a third of slicing a view
    unpack_head, unpack_size = _OWN_HEAD.unpack_from, _INT16.unpack_from
    position, end = 0, len(raw)
    while position < end:
        if end - position < ENTRY_SIZE_MIN:
            raise RemoteProtocolError(f"batch entry of {end - position} bytes")
        size, flag, body_size = unpack_head(raw, position)
        properties_at = position + ENTRY_SIZE_MIN + body_size
        entry_end = position + size
        if body_size < 0 or entry_end > end or properties_at > entry_end:
            raise RemoteProtocolError(f"batch entry of {size} bytes and a body of {body_size}")
        (properties_size,) = unpack_size(raw, properties_at - 2)
        if properties_at + properties_size != entry_end:
            raise RemoteProtocolError(f"batch entry of {size} bytes with properties of {properties_size}")
        if len(entries) == count_max:
            raise RemoteProtocolError(f"batch of more than {count_max} messages")
        entries.append((flag, raw[position + HEAD_SIZE : properties_at - 2], raw[properties_at:entry_end]))
        position = entry_end
    if not entries:
        raise RemoteProtocolError("empty batch")
    return entries
