"""What a failover group's log says of topics, consumer groups and offsets: applied by record, packed into records.

Pure values. `TablesState` is what the records up to one of them come to; `Replica` follows the log and notices a
snapshot that is complete; `pack` makes records of at most so many bytes. The format: ha/protocol/group_records.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from ha.protocol.bodies import DataVersion, GroupConfig, LogPosition, TopicConfig
from ha.protocol.group_records import SnapshotPart, TablesRecord, config_size, entry_size_max

BEFORE_ALL = LogPosition()
"""Before the first record."""
QUEUE_COUNT = 512
"""Offsets of one group and topic that are together in a record."""
RECORD_OVERHEAD = 1024
"""Bytes of a record's body besides the members of its maps, at most."""

TOPICS, GROUPS, OFFSETS, DELAYS = "topics", "groups", "offsets", "delays"
SECTIONS = (TOPICS, GROUPS, OFFSETS, DELAYS)


class TablesView(msgspec.Struct, frozen=True):
    """The tables as they are; the maps are their owners' own."""

    topics: Mapping[str, TopicConfig | None]
    groups: Mapping[str, GroupConfig | None]
    offsets: Mapping[str, dict[int, int]]
    delays: Mapping[int, int]
    topics_version: DataVersion | None
    groups_version: DataVersion | None


class TablesState(msgspec.Struct):
    """All of the tables after one record of the log."""

    topics: dict[str, TopicConfig] = {}
    groups: dict[str, GroupConfig] = {}
    offsets: dict[str, dict[int, int]] = {}
    delays: dict[int, int] = {}
    topics_version: DataVersion = DataVersion()
    groups_version: DataVersion = DataVersion()

    def apply(self, record: TablesRecord) -> None:
        """Be what the tables are after `record`."""
        for topic, topic_config in record.topics.items():
            if topic_config is None:
                self.topics.pop(topic, None)
            else:
                self.topics[topic] = topic_config
        for group, group_config in record.groups.items():
            if group_config is None:
                self.groups.pop(group, None)
            else:
                self.groups[group] = group_config
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


def changed_sections(record: TablesRecord) -> Iterator[str]:
    """Which of the tables a record is about."""
    if record.topics or record.topics_version is not None:
        yield TOPICS
    if record.groups or record.groups_version is not None:
        yield GROUPS
    if record.offsets or record.removed_offsets:
        yield OFFSETS
    if record.delays:
        yield DELAYS


class Replica:
    """The tables as the log has them, record after record.

    `is_whole`: nothing but the log is in them. Until the first complete snapshot they are what was there before, and
    what the records since said.
    """

    def __init__(self, state: TablesState, position: LogPosition = BEFORE_ALL, *, is_whole: bool = False) -> None:
        self.state = state
        self.position = position
        self.is_whole = is_whole
        self.changed: set[str] = set()
        """Tables that are other ones than when their files were written; who writes them empties it"""
        self._built: TablesState | None = None
        self._next_part = 0
        self._epoch = -1

    @property
    def stand(self) -> LogPosition:
        """The position, for who is told of the tables."""
        return msgspec.structs.replace(self.position, is_whole=self.is_whole)

    def take(self, record: TablesRecord, position: LogPosition) -> bool:
        """Apply the next record of the log, which is at `position`. Tell whether with it a snapshot became complete
        that says something else than what was there; then it counts."""
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
            self._built = None  # whoever wrote it did not come to its end
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

    def miss(self) -> None:
        """A record can't be had: until the next snapshot nobody knows what it said."""
        self.is_whole = False
        self._built = None


def pack(
    view: TablesView, epoch: int, size_max: int, *, removed: Mapping[str, None] | None = None
) -> Iterator[TablesRecord]:
    """Make records of all that is in `view`, of at most `size_max` bytes unless one member alone is larger.

    Each value is looked up when its record is about to be returned, so that `view` may change between two records.
    Data versions are in the last one. There is always a record, perhaps an empty one.
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
        (GROUPS, view.groups, _config_size),
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
    yield record


def snapshot_parts(view: TablesView, epoch: int, size_max: int) -> Iterator[TablesRecord]:
    """The parts of a snapshot of `view`; each is to be written down before the next is asked for."""
    assert view.topics_version is not None  # which only the last one has
    for number, record in enumerate(pack(view, epoch, size_max)):
        record.snapshot = SnapshotPart(number, record.topics_version is not None)
        yield record


def _config_size(name: str, config: TopicConfig | GroupConfig | None) -> int:
    return entry_size_max(name, 0) if config is None else config_size(name, config)


def _delay_size(level: int, queue_offset: int) -> int:
    return 40
