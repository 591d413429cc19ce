"""Reads the bodies of registrations: only the version, and the queues of a broker's topics.

A registration contains all topics of its broker. The JSON that RocketMQ usually sends is decoded straight into structs
(`read_usual`), which took 7 ms for 10,000 topics. Any other body took up to 60 ms, so call `read_unusual` in a worker
thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.bodies import DataVersion, RegisterBrokerBody, TopicConfig, decode_compressed
from ha.protocol.headers import Int32
from ha.protocol.java_json import read_as

UNUSUAL_SIZE_MAX = 4 * 1024 * 1024
"""Maximum bytes of an uncompressed registration that is not standard JSON. Parsing it into Python objects takes about
30 bytes of memory for each byte."""


class TopicQueues(msgspec.Struct, rename="camel", kw_only=True, gc=False):
    """The part of a TopicConfig that routes need, with the same defaults."""

    perm: Int32 = 6
    read_queue_nums: Int32 = 16
    topic_sys_flag: Int32 = 0
    write_queue_nums: Int32 = 16


Topics = Mapping[str, TopicQueues | TopicConfig]
"""Topic name -> queues and permissions of the topic; a TopicConfig here need not contain the name."""


class _Table(msgspec.Struct, rename="camel"):
    data_version: DataVersion = DataVersion()
    topic_config_table: dict[str, TopicQueues] = {}


class _Body(msgspec.Struct, rename="camel"):
    topic_config_serialize_wrapper: _Table = msgspec.field(default_factory=_Table)


_decode = msgspec.json.Decoder(_Body, strict=False).decode

_REFERENCE = b'$ref":'
_IGNORED_REFERENCE = b'"mappingDataVersion":{"$ref":'


def read_usual(body: bytes | memoryview) -> tuple[DataVersion, Topics] | None:
    """Returns the version and topics in a body of standard JSON; None for any other body, including an invalid one.

    A body with references of fastjson ("$ref") is not standard. Only a reference in mappingDataVersion is accepted, and
    ignored.
    """
    text = bytes(body)
    if text.count(_REFERENCE) != text.count(_IGNORED_REFERENCE):
        return None
    try:
        table = _decode(text).topic_config_serialize_wrapper
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return table.data_version, table.topic_config_table


def read_unusual(body: bytes | memoryview, *, is_compressed: bool, topic_count_max: int) -> tuple[DataVersion, Topics]:
    """Returns the version and topics in a compressed body, or in JSON of any dialect. Raises RemoteProtocolError if it
    is invalid or too large, or if a compressed one has more than `topic_count_max` topics."""
    if is_compressed:
        found = decode_compressed(body, topic_count_max=topic_count_max)
    elif len(body) > UNUSUAL_SIZE_MAX:
        raise RemoteProtocolError(f"registration of {len(body)} bytes that is not standard JSON")
    else:
        found = read_as(RegisterBrokerBody, body)
    table = found.topic_config_serialize_wrapper
    return table.data_version, table.topic_config_table
