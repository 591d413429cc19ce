"""Creates and applies the records of a failover group's tables: topics, groups, offsets, delay level progress, users.

No I/O. `TablesState` is the result of all records up to one of them; `Replica` follows the log and switches to a
complete snapshot; `pack` creates records of bounded size. The format: ha/protocol/group_records.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from ha.protocol.access_bodies import UserConfig
from ha.protocol.bodies import DataVersion, GroupConfig, LogPosition, TopicConfig
from ha.protocol.group_records import SnapshotPart, TablesRecord, config_size, entry_size_max, remember_deleted

BEFORE_ALL = LogPosition()
"""The position before the first record."""
QUEUE_COUNT = 512
"""Maximum number of queues of one group and topic whose offsets `pack` adds to a record at a time."""
RECORD_OVERHEAD = 1024
"""Maximum bytes of a record's body apart from the entries of its maps."""

TOPICS, GROUPS, OFFSETS, DELAYS, USERS = "topics", "groups", "offsets", "delays", "users"
SECTION_FIELDS = {
    TOPICS: ("topics", "deleted_topics", "topics_version"),
    GROUPS: ("groups", "groups_version"),
    OFFSETS: ("offsets",),
    DELAYS: ("delays",),
    USERS: ("users", "users_version"),
}
"""The fields of `TablesState` by table."""
SECTIONS = tuple(SECTION_FIELDS)


class TablesView(msgspec.Struct, frozen=True):
    """The current tables, or the changes in a journal, where None is a deletion. The maps are not copied."""

    topics: Mapping[str, TopicConfig | None]
    deleted_topics: Mapping[str, int]
    groups: Mapping[str, GroupConfig | None]
    offsets: Mapping[str, dict[int, int]]
    delays: Mapping[int, int]
    users: Mapping[str, UserConfig | None]
    topics_version: DataVersion | None
    groups_version: DataVersion | None
    users_version: DataVersion | None


class TablesState(msgspec.Struct):
    """All tables after one record of the log."""

    topics: dict[str, TopicConfig] = {}
    deleted_topics: dict[str, int] = {}
    groups: dict[str, GroupConfig] = {}
    offsets: dict[str, dict[int, int]] = {}
    delays: dict[int, int] = {}
    users: dict[str, UserConfig] = {}
    topics_version: DataVersion = DataVersion()
    groups_version: DataVersion = DataVersion()
    users_version: DataVersion = DataVersion()

    def apply(self, record: TablesRecord) -> None:
        """Applies the next record."""
        for topic, topic_config in record.topics.items():
            if topic_config is None:
                self.topics.pop(topic, None)
            else:
                self.topics[topic] = topic_config
        remember_deleted(self.deleted_topics, record.deleted_topics)
        for group, group_config in record.groups.items():
            if group_config is None:
                self.groups.pop(group, None)
            else:
                self.groups[group] = group_config
        for name, user in record.users.items():
            if user is None:
                self.users.pop(name, None)
            else:
                self.users[name] = user
        for key in record.removed_offsets:
            self.offsets.pop(key, None)
        offsets = self.offsets
        for key, by_queue in record.offsets.items():
            mine = offsets.get(key)
            if mine is None:
                offsets[key] = dict(by_queue)
            else:
                mine.update(by_queue)
        self.delays.update(record.delays)
        if record.topics_version is not None:
            self.topics_version = record.topics_version
        if record.groups_version is not None:
            self.groups_version = record.groups_version
        if record.users_version is not None:
            self.users_version = record.users_version


def changed_sections(record: TablesRecord) -> Iterator[str]:
    """Yields the tables that a record changes."""
    if record.topics or record.deleted_topics or record.topics_version is not None:
        yield TOPICS
    if record.groups or record.groups_version is not None:
        yield GROUPS
    if record.offsets or record.removed_offsets:
        yield OFFSETS
    if record.delays:
        yield DELAYS
    if record.users or record.users_version is not None:
        yield USERS


class Replica:
    """The tables according to the log, updated record by record.

    `is_whole`: whether they come from the log alone. Before the first complete snapshot they are the state passed to
    `__init__` plus the records since.
    """

    def __init__(self, state: TablesState, position: LogPosition = BEFORE_ALL, *, is_whole: bool = False) -> None:
        self.state = state
        self.position = position
        self.is_whole = is_whole
        self.changed: set[str] = set()
        """Tables that changed since their files were written; cleared when they are written"""
        self._built: TablesState | None = None
        self._next_part = 0
        self._epoch = -1

    @property
    def reported_position(self) -> LogPosition:
        """The position including `is_whole`, for files and slaves."""
        return msgspec.structs.replace(self.position, is_whole=self.is_whole)

    def take(self, record: TablesRecord, position: LogPosition) -> bool:
        """Applies the next record of the log, at `position`.

        Returns True if the record completes a snapshot that differs from the state; the snapshot then replaces it.
        """
        self.position = position
        self.state.apply(record)
        self.changed.update(changed_sections(record))
        part = record.snapshot
        if part is not None and part.part == 0:
            self._built, self._next_part, self._epoch = TablesState(), 0, record.epoch
        built = self._built
        if built is None:
            return False
        if record.epoch != self._epoch or (part is not None and part.part != self._next_part):
            self._built = None  # that snapshot was not finished
            return False
        built.apply(record)
        if part is None:
            return False
        self._next_part += 1
        if not part.is_last:
            return False
        self._built = None
        is_another = built != self.state
        self.state = built
        self.is_whole = True
        if is_another:
            self.changed.update(SECTIONS)
        return is_another

    def mark_incomplete(self) -> None:
        """Marks the tables as incomplete until the next snapshot, for example because a record can't be read."""
        self.is_whole = False
        self._built = None


def pack(
    view: TablesView, epoch: int, size_max: int, *, removed: Mapping[str, None] | None = None
) -> Iterator[TablesRecord]:
    """Yields records with everything in `view`, each of at most about `size_max` bytes unless a single entry is larger.

    `removed`: "topic@group" keys whose offsets are removed; they come first. Values are read just before their record
    is yielded, so `view` may change between two records. The last record has the data versions. There is always at
    least one record, possibly empty.
    """
    record = TablesRecord(epoch=epoch)
    size = RECORD_OVERHEAD
    for key in removed or ():
        if size > size_max:
            yield record
            record, size = TablesRecord(epoch=epoch), RECORD_OVERHEAD
        record.removed_offsets.append(key)
        size += entry_size_max(key, 0)
    sections: tuple[tuple[str, Mapping[Any, Any], Callable[[Any, Any], int]], ...] = (
        (TOPICS, view.topics, _config_size),
        ("deleted_topics", view.deleted_topics, lambda topic, _: entry_size_max(topic, 1)),
        (GROUPS, view.groups, _config_size),
        (USERS, view.users, _config_size),
        (DELAYS, view.delays, _delay_size),
    )
    for key in list(view.offsets):
        queue_ids = list(view.offsets.get(key, ()))
        for at in range(0, len(queue_ids), QUEUE_COUNT):
            some = queue_ids[at : at + QUEUE_COUNT]
            added = entry_size_max(key, len(some))
            if size + added > size_max and size > RECORD_OVERHEAD:
                yield record
                record, size = TablesRecord(epoch=epoch), RECORD_OVERHEAD
            offsets = view.offsets.get(key, {})
            record.offsets.setdefault(key, {}).update({queue: offsets[queue] for queue in some if queue in offsets})
            size += added
    for section, source, size_of in sections:
        for name in list(source):
            if name not in source:
                continue
            added = size_of(name, source[name])
            if size + added > size_max and size > RECORD_OVERHEAD:
                yield record
                record, size = TablesRecord(epoch=epoch), RECORD_OVERHEAD
                if name not in source:
                    continue
                added = size_of(name, source[name])
            getattr(record, section)[name] = source[name]
            size += added
    record.topics_version, record.groups_version = view.topics_version, view.groups_version
    record.users_version = view.users_version
    yield record


def snapshot_parts(view: TablesView, epoch: int, size_max: int) -> Iterator[TablesRecord]:
    """Yields the parts of a snapshot of `view`; each must be encoded before the next is requested."""
    assert view.topics_version is not None  # marks the last part
    for number, record in enumerate(pack(view, epoch, size_max)):
        record.snapshot = SnapshotPart(number, record.topics_version is not None)
        yield record


def _config_size(name: str, config: TopicConfig | GroupConfig | UserConfig | None) -> int:
    return entry_size_max(name, 0) if config is None else config_size(name, config)


def _delay_size(level: int, queue_offset: int) -> int:
    return 40
