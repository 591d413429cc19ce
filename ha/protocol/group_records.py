"""Records of the topic rmq_sys_halog_tables: the topics, consumer groups, offsets and users of a failover group.

They are ordinary messages in queue 0, so that every RocketMQ broker replicates, queues and shows them. The body is
JSON:

    version   1; records with another version can't be interpreted
    epoch     epoch of the master that wrote the record; epoch and physical offset together distinguish the record
              from those of other logs
    snapshot  {"part": n, "isLast": bool}, only in parts of a snapshot, which have the tag `s`
    topics, groups                     name -> configuration as in topics.json, subscriptionGroup.json; null: deleted
    users                              name -> user as in users.json, with its password; null: deleted
    deletedTopics                      name -> physical offset before which the topic's messages are deleted
    topicsVersion, groupsVersion, usersVersion  data version of that table after the change
    removedOffsets                     "topic@group" whose offsets are removed, before `offsets` apply
    offsets                            "topic@group" -> queue id -> queue offset
    delays                             as `offset_table` of delayOffset.json (bodies.DelayOffsets)

Unchanged fields are omitted. Records hold absolute values, not differences, so applying one twice changes nothing. A
snapshot is complete when all of its parts, starting at 0, have arrived in order with the same epoch; records between
them apply as usual. A complete snapshot removes every entry that is neither in its parts nor in another record after
part 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.access_bodies import UserConfig
from ha.protocol.bodies import DataVersion, GroupConfig, TopicConfig
from ha.protocol.properties import TAGS, encode_properties, tags_code

VERSION = 1
SNAPSHOT_TAG = "s"
SNAPSHOT_PROPERTIES = encode_properties({TAGS: SNAPSHOT_TAG})
SNAPSHOT_TAGS_CODE = tags_code(SNAPSHOT_TAG)
"""Tags code of a snapshot part in the consume queue"""


class SnapshotPart(msgspec.Struct, frozen=True, rename="camel"):
    """Number of a snapshot part, from 0, and whether it is the last part."""

    part: int
    is_last: bool = False


class TablesRecord(msgspec.Struct, kw_only=True, rename="camel", omit_defaults=True):
    """The content of one record; the module's docstring describes the fields."""

    epoch: int
    snapshot: SnapshotPart | None = None
    topics: dict[str, TopicConfig | None] = {}
    deleted_topics: dict[str, int] = {}
    topics_version: DataVersion | None = None
    groups: dict[str, GroupConfig | None] = {}
    groups_version: DataVersion | None = None
    users: dict[str, UserConfig | None] = {}
    users_version: DataVersion | None = None
    removed_offsets: list[str] = []
    offsets: dict[str, dict[int, int]] = {}
    delays: dict[int, int] = {}


class _VersionAlone(msgspec.Struct):
    version: int


DELETED_TOPICS_MAX = 1024
"""Maximum number of deleted topics that a broker remembers; those with the lowest offsets are forgotten"""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TablesRecord).decode
_decode_version = msgspec.json.Decoder(_VersionAlone).decode


def encode_tables_record(record: TablesRecord) -> bytes:
    """Returns the body of a record."""
    text = _encode(record)
    return b'{"version":%d,%b' % (VERSION, text[1:])


def decode_tables_record(body: bytes) -> TablesRecord:
    """Returns the record with this body. Raises RemoteProtocolError if it is invalid or has another version."""
    try:
        version = _decode_version(body).version
        if version != VERSION:
            raise RemoteProtocolError(f"tables record of version {version}; {VERSION} is supported")
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"invalid tables record: {error}") from None


def remember_deleted(known: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds the deleted topics `more` to `known` (name -> physical offset), keeping the higher offset of each. If there
    are then more than DELETED_TOPICS_MAX topics, removes those with the lowest offsets."""
    for topic, before in more.items():
        known[topic] = max(before, known.get(topic, 0))
    for topic in sorted(known, key=lambda name: (known[name], name))[: max(0, len(known) - DELETED_TOPICS_MAX)]:
        del known[topic]


def entry_size_max(name: str, queue_count: int) -> int:
    """Returns the maximum size in bytes of the entry `name` of `offsets` with `queue_count` queues. Queue ids take up
    to 10 characters, offsets up to 20."""
    return len(_encode(name)) + 34 * queue_count + 8


def config_size(name: str, config: TopicConfig | GroupConfig | UserConfig) -> int:
    """Returns the maximum size in bytes of one entry of `topics`, `groups` or `users`."""
    return len(_encode(name)) + len(_encode(config)) + 8
