"""Records of the topic rmq_sys_halog_tables: what a failover group knows of topics, consumer groups and offsets.

Ordinary messages of queue 0, so that every RocketMQ broker replicates, queues and shows them; the body is JSON:

    version   1; whoever meets another one does not know what the record says
    epoch     term of the master that wrote it: with a record's physical offset it tells which log this is
    snapshot  {"part": n, "isLast": bool}, in parts of a snapshot only, which have the tag `s`
    topics, groups                     name -> configuration as in topics.json, subscriptionGroup.json; null: deleted
    topicsVersion, groupsVersion       data version of that table after the change
    removedOffsets                     "topic@group" whose offsets are forgotten, before `offsets` count
    offsets                            "topic@group" -> queue id -> queue offset
    delays                             delay level (from 1) -> queue offset of the next message to be delivered

What did not change is left out. A record assigns: it says what is so from then on, not by how much something grew, so
that one that is applied twice changes nothing. A snapshot is complete when its parts 0 to the last have come one after
the other, all of one epoch; records between them count as everywhere. What was in the tables before part 0 and is
neither in the parts nor in what came since is no longer.
"""

from __future__ import annotations

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.bodies import DataVersion, GroupConfig, TopicConfig
from ha.protocol.properties import TAGS, encode_properties, tags_code

VERSION = 1
SNAPSHOT_TAG = "s"
SNAPSHOT_PROPERTIES = encode_properties({TAGS: SNAPSHOT_TAG})
SNAPSHOT_TAGS_CODE = tags_code(SNAPSHOT_TAG)
"""What a consume queue's entry says of a part of a snapshot."""


class SnapshotPart(msgspec.Struct, frozen=True, rename="camel"):
    """Which part of a snapshot a record is; counted from 0."""

    part: int
    is_last: bool = False


class TablesRecord(msgspec.Struct, kw_only=True, rename="camel", omit_defaults=True):
    """One record; see the module."""

    epoch: int
    snapshot: SnapshotPart | None = None
    topics: dict[str, TopicConfig | None] = {}
    topics_version: DataVersion | None = None
    groups: dict[str, GroupConfig | None] = {}
    groups_version: DataVersion | None = None
    removed_offsets: list[str] = []
    offsets: dict[str, dict[int, int]] = {}
    delays: dict[int, int] = {}


class _VersionAlone(msgspec.Struct):
    version: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TablesRecord).decode
_decode_version = msgspec.json.Decoder(_VersionAlone).decode


def encode_tables_record(record: TablesRecord) -> bytes:
    """The body of a record."""
    text = _encode(record)
    return b'{"version":%d,%b' % (VERSION, text[1:])


def decode_tables_record(body: bytes) -> TablesRecord:
    """Read a body. RemoteProtocolError if it is none, or of another version."""
    try:
        version = _decode_version(body).version
        if version != VERSION:
            raise RemoteProtocolError(f"a record of the tables has version {version}, known is {VERSION}")
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"no record of the tables: {error}") from None


def entry_size_max(name: str, queue_count: int) -> int:
    """Bytes that one member of `offsets` takes at most."""
    return len(_encode(name)) + 32 * queue_count + 8


def config_size(name: str, config: TopicConfig | GroupConfig) -> int:
    """Bytes that one member of `topics` or `groups` takes at most."""
    return len(_encode(name)) + len(_encode(config)) + 8
