"""Consumer offsets (14, 15), kept in config/consumerOffset.json, and where queues begin and end (29, 30, 31, 32).

Offsets are queue offsets, in entries. What consumers commit to a slave while its master is away is marked: it outlives
the master's older offsets and is handed to the master when that returns (`SlaveSync`). RocketMQ's slave takes over its
master's offsets whatever they are, and groups get messages again: apache/rocketmq#1094. The marks have a file of their
own, takenOffsets.json, so that a slave may restart meanwhile; a slave that finds its master there at its start forgets
them, since the master may have sent a group back in between.

The file is written each `flush_consumer_offset_interval_s` if something changed, and at stop; a crash takes the commits
since then, after which consumers read those messages again. In a failover group commits are records of the group's log
(journal.py): who waits for an answer has it when the record is acknowledged, and only the master gives one. Sources:
ConsumerOffsetManager, ConsumerManageProcessor, AdminBrokerProcessor.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ha.broker.config_file import ConfigFile
from ha.broker.options import BrokerOptions
from ha.broker.standing import Standing, fixed_standing
from ha.protocol import java_json
from ha.protocol.bodies import ConsumerOffsets, LogPosition
from ha.protocol.headers import UpdateConsumerOffsetRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ha.broker.journal import Journal

logger = logging.getLogger(__name__)


class ConsumerOffsetTable:
    """What consumer groups have committed. `load` before use, `save` now and then and at stop."""

    def __init__(
        self,
        file: ConfigFile,
        options: BrokerOptions,
        *,
        standing: Standing | None = None,
        taken_file: ConfigFile | None = None,
    ) -> None:
        """`taken_file` keeps what a slave is told while its master is away."""
        self._file = file
        self._taken_file = taken_file
        self._options = options
        self._standing = fixed_standing(options) if standing is None else standing
        self._table: dict[str, dict[int, int]] = {}
        self._is_dirty = False
        self._is_full = False
        self._resets: dict[tuple[str, int], int] = {}
        """(topic@group, queue id) -> where an operator sent the group, which has not pulled there since"""
        self._taken_here: dict[tuple[str, int], int] = {}
        """(topic@group, queue id) -> what a slave was told by a consumer and its master may not know"""
        self._restored: set[tuple[str, int]] = set()
        """those of them that are from before this start, until the master is there or is known to be away"""
        self._is_taken_dirty = False
        self.journal: Journal | None = None
        """In a failover group, what writes commits into its log"""
        self.file_position: LogPosition | None = None
        """Where in the group's log the file that was loaded stands, if it says so"""

    async def load(self) -> None:
        """Read the file. Raises CorruptLog if it and its `.bak` are damaged."""
        loaded = await self._file.load(partial(java_json.read_as, ConsumerOffsets))
        if loaded is not None:
            self._table = {key: dict(offsets) for key, offsets in loaded.offset_table.items()}
        self.file_position = loaded.log_position if loaded is not None else None
        if self._taken_file is None:
            return
        taken = await self._taken_file.load(partial(java_json.read_as, ConsumerOffsets))
        marks = taken.offset_table if taken is not None else {}
        if self._standing.is_slave:
            self._taken_here = {(key, queue): offset for key, by in marks.items() for queue, offset in by.items()}
            self._restored = set(self._taken_here)
        else:
            self._is_taken_dirty = bool(marks)  # a master's word counts by itself

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """The committed offset, or None."""
        return self._table.get(f"{topic}@{group}", {}).get(queue_id)

    def of(self, group: str, topic: str) -> dict[int, int]:
        """Queue id -> committed offset."""
        return dict(self._table.get(f"{topic}@{group}", {}))

    def topics_of(self, group: str) -> list[str]:
        """Topics of which the group has committed offsets."""
        return [key[: -len(group) - 1] for key in self._table if key.endswith(f"@{group}")]

    def groups_of(self, topic: str) -> list[str]:
        """Groups that have committed offsets of the topic."""
        return [key[len(topic) + 1 :] for key in self._table if key.startswith(f"{topic}@")]

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Remember that `group` goes on at `offset`. Lower ones are taken too: a consumer may go back.

        False, and nothing is remembered, for a group and topic beyond `offset_key_count_max` of them. What a consumer
        says that has not noticed yet that it was sent elsewhere (`reset`) is passed over, as in 5.x.
        """
        key = f"{topic}@{group}"
        if self._resets and (key, queue_id) in self._resets:
            return True
        offsets = self._table.get(key)
        if offsets is None:
            if len(self._table) >= self._options.offset_key_count_max:
                if not self._is_full:
                    self._is_full = True
                    logger.warning('offsets.full keys=%d hint="further groups have no offsets"', len(self._table))
                return False
            offsets = self._table[key] = {}
        if self._standing.is_slave:
            self._taken_here[key, queue_id] = offset
            self._restored.discard((key, queue_id))
            self._is_taken_dirty = True
        if offsets.get(queue_id) != offset:
            offsets[queue_id] = offset
            self._is_dirty = True
            if self.journal is not None:
                self.journal.offset(key, queue_id, offset)
        return True

    def reset(self, group: str, topic: str, queue_id: int, offset: int, *, waits_for_pull: bool = True) -> bool:
        """Send a group to `offset`; False if there is no room. Its next pull has to be told: `take_reset`.

        `waits_for_pull` False: its members are told otherwise.
        """
        key = f"{topic}@{group}", queue_id
        self._resets.pop(key, None)
        if not self.commit(group, topic, queue_id, offset):
            return False
        if waits_for_pull:
            self._resets[key] = offset
        return True

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Where the group was sent since its last pull of the queue; None if nowhere."""
        return self._resets.pop((f"{topic}@{group}", queue_id), None) if self._resets else None

    def remove(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Forget the offsets of a topic, or of a group."""
        for key in list(self._table):
            of_topic, _, of_group = key.partition("@")
            if topic == of_topic or group == of_group:
                del self._table[key]
                self._is_dirty = True
                self._is_full = False
                if self.journal is not None:
                    self.journal.offsets_removed(key)
        for marks in (self._resets, self._taken_here):
            for mark in list(marks):
                of_topic, _, of_group = mark[0].partition("@")
                if topic == of_topic or group == of_group:
                    del marks[mark]
                    self._is_taken_dirty = True

    def clone(self, source: str, target: str, topic: str) -> bool:
        """Give group `target` the offsets that `source` has of a topic; False if there is no room."""
        return all(self.commit(target, topic, queue_id, offset) for queue_id, offset in self.of(source, topic).items())

    def merge(self, offsets: ConsumerOffsets) -> None:
        """Take over a master's offsets; what only this broker knows stays, and what it was told that is further on."""
        self._merge(offsets.offset_table)

    def _merge(self, table: Mapping[str, Mapping[int, int]]) -> None:
        for key, by_queue in table.items():
            mine = self._table.setdefault(key, {})
            for queue_id, offset in by_queue.items():
                if self._taken_here.get((key, queue_id), -1) > offset:
                    continue
                if self._taken_here.pop((key, queue_id), None) is not None:
                    self._is_taken_dirty = True
                if mine.get(queue_id) != offset:
                    mine[queue_id] = offset
                    self._is_dirty = True

    # ---- in a failover group

    @property
    def table(self) -> Mapping[str, dict[int, int]]:
        """All of them, by topic@group; not to be changed."""
        return self._table

    async def logged(self) -> str:
        """Wait until what was committed so far is acknowledged; returns why it may be lost, or "". Without a group, "":
        the file has it after the next `save`."""
        return "" if self.journal is None else (await self.journal.logged()).fault

    def adopt(self, table: Mapping[str, Mapping[int, int]]) -> None:
        """Be what the group's log says, but for what was told here and is further on."""
        self._table = {}
        self._is_full = False
        for (key, queue_id), offset in self._taken_here.items():
            self._table.setdefault(key, {})[queue_id] = offset
        self._merge(table)

    def follow(self, removed: Iterable[str], changes: Mapping[str, Mapping[int, int]]) -> None:
        """Make the changes that the next record of the group's log tells."""
        for key in removed:
            self._table.pop(key, None)
            for mark in [mark for mark in self._taken_here if mark[0] == key]:
                del self._taken_here[mark]
                self._is_taken_dirty = True
        self._merge(changes)

    def begin_epoch(self, beyond: Callable[[str, dict[int, int]], Iterator[tuple[int, int]]]) -> None:
        """This broker is the master from now on: have it written what it was told as a slave, and cut offsets back to
        the ends of queues. `beyond` tells the queues of a topic that end before what is committed, and where."""
        for key, queue_id in self._taken_here:
            offset = self._table.get(key, {}).get(queue_id)
            if offset is not None and self.journal is not None:
                self.journal.offset(key, queue_id, offset)
        self._taken_here.clear()
        self._restored.clear()
        self._is_taken_dirty = True
        for key, by_queue in self._table.items():
            for queue_id, end in beyond(key.partition("@")[0], by_queue):
                logger.warning(
                    "offsets.truncated key=%s queue=%d from=%d to=%d", key, queue_id, by_queue[queue_id], end
                )
                by_queue[queue_id] = end
                if self.journal is not None:
                    self.journal.offset(key, queue_id, end)

    # ---- on a slave

    def taken_here(self) -> list[UpdateConsumerOffsetRequest]:
        """What consumers committed to this slave and its master does not know, as far as the last `merge` told."""
        found = []
        for (key, queue_id), offset in self._taken_here.items():
            topic, _, group = key.partition("@")
            found.append(
                UpdateConsumerOffsetRequest(consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset)
            )
        return found

    def handed_on(self, commit: UpdateConsumerOffsetRequest) -> None:
        """The master has been told of `commit`; a newer one for the same queue stays marked."""
        key = f"{commit.topic}@{commit.consumer_group}", commit.queue_id
        if self._taken_here.get(key) == commit.commit_offset:
            del self._taken_here[key]
            self._is_taken_dirty = True

    def master_found(self, *, is_there: bool) -> None:
        """The first thing known of the master since this start: whether it was there. If so, marks from before that
        start are forgotten."""
        for mark in self._restored if is_there else ():
            self._taken_here.pop(mark, None)
            self._is_taken_dirty = True
        self._restored = set()

    def snapshot(self) -> ConsumerOffsets:
        """The table as it is now: body of 43, content of the file."""
        return ConsumerOffsets(offset_table={key: dict(offsets) for key, offsets in self._table.items()})

    async def save(self) -> None:
        """Write the file if something changed since the last time; on a full disk, once there is room. In a failover
        group `GroupLog` writes it."""
        if self._is_dirty and self.journal is None:
            self._is_dirty = False
            await self._file.save_when_possible(lambda: java_json.dumps_pretty(self.snapshot()))
        if self._is_taken_dirty and self._taken_file is not None:
            self._is_taken_dirty = False
            await self._taken_file.save_when_possible(lambda: java_json.dumps_pretty(self._taken_snapshot()))

    def _taken_snapshot(self) -> ConsumerOffsets:
        by_key: dict[str, dict[int, int]] = {}
        for (key, queue_id), offset in self._taken_here.items():
            by_key.setdefault(key, {})[queue_id] = offset
        return ConsumerOffsets(offset_table=by_key)
