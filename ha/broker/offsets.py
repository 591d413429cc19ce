"""Committed offsets of consumer groups, kept in config/consumerOffset.json. Offsets are queue offsets, in entries.

Offsets committed to a slave are marked: they take precedence over lower offsets of the master, which gets them with the
slave's next sync (`SlaveSync`). A RocketMQ slave always copies its master's offsets, so groups receive messages again
(apache/rocketmq#1094). The marks are kept in takenOffsets.json, so that a slave can restart while its master is down. A
slave that reaches its master when it starts drops them, since a group may have been reset in the meantime.

A changed table is written to consumerOffset.json every `flush_consumer_offset_interval_s`, and at shutdown. A crash
loses the commits since the last write, and consumers receive those messages again. In a failover group commits are
records of the group's log (journal.py), and the master answers a commit once its record is acknowledged. Source:
ConsumerOffsetManager.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial

import trio

from ha.broker.config_file import ConfigFile
from ha.broker.journal import Journal
from ha.broker.options import BrokerOptions
from ha.broker.standing import Standing, fixed_standing
from ha.protocol import java_json
from ha.protocol.bodies import ConsumerOffsets, LogPosition
from ha.protocol.headers import UpdateConsumerOffsetRequest

logger = logging.getLogger(__name__)


class ConsumerOffsetTable:
    """The committed offsets by group, topic and queue. Call `load` before use, `save` periodically and at shutdown."""

    def __init__(
        self,
        file: ConfigFile,
        options: BrokerOptions,
        *,
        standing: Standing | None = None,
        taken_file: ConfigFile | None = None,
        flush_log: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """`taken_file` keeps the marks of commits to a slave. `flush_log` flushes the log up to its current end."""
        self._file = file
        self._taken_file = taken_file
        self._flush_log = flush_log
        self._options = options
        self._standing = fixed_standing(options) if standing is None else standing
        self._table: dict[str, dict[int, int]] = {}
        self._offset_count = 0
        """Number of offsets in `_table`"""
        self._change_count = self._saved_count = 0
        self._is_full = False
        self._resets: dict[tuple[str, int], int] = {}
        """(topic@group, queue id) -> reset offset, until the group's next pull of the queue"""
        self._local_commits: dict[tuple[str, int], int] = {}
        """(topic@group, queue id) -> offset committed to this slave, which its master may not know"""
        self._restored: set[tuple[str, int]] = set()
        """Keys of `_local_commits` loaded from the file, until the master is first reached or known to be down"""
        self._are_local_commits_dirty = False
        self.journal: Journal | None = None
        """Collects changes for the log of a failover group; None outside a group"""
        self.on_removed: Callable[[str | None, str | None], None] = lambda topic, group: None
        """Called with (topic, None) or (None, group) when the offsets of a topic or of a group were deleted"""
        self.on_reset: Callable[[str, str, int, int], None] = lambda group, topic, queue_id, offset: None
        """Called after a reset with the group, topic, queue id and new queue offset"""
        self.file_position: LogPosition | None = None
        """Position of the last record of the group's log that the loaded file includes, as stated in the file; None if
        the file states none"""

    async def load(self) -> None:
        """Reads the files. Raises CorruptLog if a file is damaged and has no intact `.bak`, and OSError."""
        loaded = await self._file.load(partial(java_json.read_as, ConsumerOffsets))
        if loaded is not None:
            self._table = {key: dict(offsets) for key, offsets in loaded.offset_table.items()}
            self._offset_count = sum(map(len, self._table.values()))
        self.file_position = loaded.log_position if loaded is not None else None
        if self._taken_file is None:
            return
        taken = await self._taken_file.load(partial(java_json.read_as, ConsumerOffsets))
        marks = taken.offset_table if taken is not None else {}
        if self._standing.is_slave:
            self._local_commits = {(key, queue): offset for key, by in marks.items() for queue, offset in by.items()}
            self._restored = set(self._local_commits)
        else:
            self._are_local_commits_dirty = bool(marks)  # a master's own table is authoritative

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """Returns the group's committed queue offset in a queue; None if there is none."""
        return self._table.get(f"{topic}@{group}", {}).get(queue_id)

    def of(self, group: str, topic: str) -> dict[int, int]:
        """Returns the group's committed offsets in a topic, by queue id; empty if there are none."""
        return dict(self._table.get(f"{topic}@{group}", {}))

    def topics_of(self, group: str) -> list[str]:
        """Returns the topics for which the group has committed offsets."""
        return [key[: -len(group) - 1] for key in self._table if key.endswith(f"@{group}")]

    def groups_of(self, topic: str) -> list[str]:
        """Returns the groups that have committed offsets in the topic."""
        return [key[len(topic) + 1 :] for key in self._table if key.startswith(f"{topic}@")]

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Commits an offset. Lower offsets are accepted too: a consumer may go back.

        Returns False if the group has no offset in the queue yet and the table is full (`offset_count_max` offsets, or
        `offset_key_count_max` pairs of group and topic if this one is new). Between a `reset` and its `take_reset`,
        commits are ignored and True is returned, as in 5.x: the consumer has not noticed the reset yet.
        """
        key = f"{topic}@{group}"
        if self._resets and self._pending_reset(key, queue_id) is not None:
            return True
        offsets = self._table.get(key)
        if offsets is None or queue_id not in offsets:
            key_count, options = len(self._table), self._options
            if self._offset_count >= options.offset_count_max or (
                offsets is None and key_count >= options.offset_key_count_max
            ):
                if not self._is_full:
                    self._is_full = True
                    logger.warning(
                        'offsets.full keys=%d offsets=%d hint="further groups and queues have no offsets"',
                        key_count,
                        self._offset_count,
                    )
                return False
            offsets = self._table.setdefault(key, {})
            self._offset_count += 1
        if self._standing.is_slave:
            self._local_commits[key, queue_id] = offset
            self._restored.discard((key, queue_id))
            self._are_local_commits_dirty = True
        if offsets.get(queue_id) != offset:
            offsets[queue_id] = offset
            self._change_count += 1
            if self.journal is not None:
                self.journal.offset(key, queue_id, offset)
        return True

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Sets a group's offset in one queue to `offset`. The group's next pull from the queue gets it (`take_reset`).

        Returns False if the table is full, as `commit` does.
        """
        key = f"{topic}@{group}", queue_id
        self._resets.pop(key, None)
        if not self.commit(group, topic, queue_id, offset):
            return False
        self._resets[key] = offset
        self.on_reset(group, topic, queue_id, offset)
        return True

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Returns the offset to which the queue was reset since the group's last pull or pop from it, and ends the
        reset; None if there was none."""
        key = f"{topic}@{group}"
        if not self._resets or self._pending_reset(key, queue_id) is None:
            return None
        return self._resets.pop((key, queue_id))

    def _pending_reset(self, key: str, queue_id: int) -> int | None:
        """Returns the offset of a reset that no pull has received yet, or None. Drops an outdated reset."""
        offset = self._resets.get((key, queue_id))
        if offset is not None and self._table.get(key, {}).get(queue_id) != offset:
            # The group has committed at another master since: resetting it now would repeat messages.
            del self._resets[key, queue_id]
            return None
        return offset

    def remove(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Deletes the offsets of a topic, or of a group."""
        for key in list(self._table):
            of_topic, _, of_group = key.partition("@")
            if topic == of_topic or group == of_group:
                self._offset_count -= len(self._table.pop(key))
                self._change_count += 1
                self._is_full = False
                if self.journal is not None:
                    self.journal.offsets_removed(key)
        for marks in (self._resets, self._local_commits):
            for mark in list(marks):
                of_topic, _, of_group = mark[0].partition("@")
                if topic == of_topic or group == of_group:
                    del marks[mark]
                    self._are_local_commits_dirty = True
        self.on_removed(topic, group)

    def clone(self, source: str, target: str, topic: str) -> bool:
        """Copies the offsets of group `source` in a topic to group `target`. Returns False if the table is
        full, as `commit` does; some offsets may then have been copied."""
        return all(self.commit(target, topic, queue_id, offset) for queue_id, offset in self.of(source, topic).items())

    def merge(self, offsets: ConsumerOffsets) -> None:
        """Merges a master's offsets into the table. Keeps offsets that only this broker has, and offsets committed to
        this slave that are higher than the master's."""
        self._merge(offsets.offset_table)

    def _merge(self, table: Mapping[str, Mapping[int, int]]) -> None:
        for key, by_queue in table.items():
            mine = self._table.setdefault(key, {})
            for queue_id, offset in by_queue.items():
                if self._local_commits.get((key, queue_id), -1) > offset:
                    continue
                if self._local_commits.pop((key, queue_id), None) is not None:
                    self._are_local_commits_dirty = True
                if mine.get(queue_id) != offset:
                    self._offset_count += queue_id not in mine
                    mine[queue_id] = offset
                    self._change_count += 1

    # ---- in a failover group

    @property
    def table(self) -> Mapping[str, dict[int, int]]:
        """All committed offsets: topic@group -> queue id -> queue offset; read-only."""
        return self._table

    async def logged(self) -> str:
        """Waits for the outcome of all earlier commits; returns why they may be lost, or "" if they are acknowledged.

        Outside a failover group, returns "" at once: the next `save` writes the commits.
        """
        return "" if self.journal is None else (await self.journal.logged()).fault

    def adopt(self, table: Mapping[str, Mapping[int, int]]) -> None:
        """Replaces the table with the content of the group's log, except for higher offsets committed to this slave."""
        self._table = {}
        self._is_full = False
        for (key, queue_id), offset in self._local_commits.items():
            self._table.setdefault(key, {})[queue_id] = offset
        self._offset_count = len(self._local_commits)
        self._merge(table)

    def follow(self, removed: Iterable[str], changes: Mapping[str, Mapping[int, int]]) -> None:
        """Applies the next record of the group's log: removes the offsets with the keys `removed` (topic@group), then
        merges `changes` (topic@group -> queue id -> queue offset)."""
        for key in removed:
            self._offset_count -= len(self._table.pop(key, ()))
            for mark in [mark for mark in self._local_commits if mark[0] == key]:
                del self._local_commits[mark]
                self._are_local_commits_dirty = True
        self._merge(changes)

    def begin_epoch(self, beyond: Callable[[str, dict[int, int]], Iterator[tuple[int, int]]]) -> None:
        """Adds the offsets that were committed to this broker as a slave to the journal, and lowers offsets beyond the
        end of their queue. Called when the broker becomes master.

        `beyond` is called with a topic and a group's offsets by queue id; it yields the id and the end of each queue
        that ends before the group's offset.
        """
        for key, queue_id in self._local_commits:
            offset = self._table.get(key, {}).get(queue_id)
            if offset is not None and self.journal is not None:
                self.journal.offset(key, queue_id, offset)
        self._local_commits.clear()
        self._restored.clear()
        self._are_local_commits_dirty = True
        self._cut(beyond)

    def start_as_master(self, beyond: Callable[[str, dict[int, int]], Iterator[tuple[int, int]]]) -> None:
        """Lowers offsets beyond the end of their queue, like `begin_epoch`. Called outside a failover group, before
        anything is stored: the next messages get these offsets, and would be skipped.

        The next pull of such a queue gets the new offset, as after a `reset`, since a consumer that is still running
        asks for the old one. RocketMQ keeps the offsets, and answers that pull with the queue's end at that time.
        """
        self._resets.update(self._cut(beyond))

    def _cut(self, beyond: Callable[[str, dict[int, int]], Iterator[tuple[int, int]]]) -> dict[tuple[str, int], int]:
        """Lowers offsets beyond the end of their queue; returns them by topic@group and queue id."""
        ends = {
            (key, queue_id): end
            for key, by_queue in self._table.items()
            for queue_id, end in beyond(key.partition("@")[0], by_queue)
        }
        for (key, queue_id), end in ends.items():
            by_queue = self._table[key]
            logger.warning("offsets.truncated key=%s queue=%d from=%d to=%d", key, queue_id, by_queue[queue_id], end)
            by_queue[queue_id] = end
            self._change_count += 1
            if self.journal is not None:
                self.journal.offset(key, queue_id, end)
        return ends

    # ---- on a slave

    def local_commits(self) -> list[UpdateConsumerOffsetRequest]:
        """Returns the offsets committed to this slave that its master does not know, according to the last `merge`."""
        found = []
        for (key, queue_id), offset in self._local_commits.items():
            topic, _, group = key.partition("@")
            found.append(
                UpdateConsumerOffsetRequest(consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset)
            )
        return found

    def drop_local_commit(self, commit: UpdateConsumerOffsetRequest) -> None:
        """Removes the mark of `commit`, which the master has accepted or refused; a newer commit of the same queue
        stays marked."""
        key = f"{commit.topic}@{commit.consumer_group}", commit.queue_id
        if self._local_commits.get(key) == commit.commit_offset:
            del self._local_commits[key]
            self._are_local_commits_dirty = True

    def on_master_contact(self, *, is_reachable: bool) -> None:
        """Records the result of an attempt to reach the master.

        The first call decides whether marks loaded from the file are dropped: they are if the master is reachable.
        """
        for mark in self._restored if is_reachable else ():
            self._local_commits.pop(mark, None)
            self._are_local_commits_dirty = True
        self._restored = set()

    def snapshot(self) -> ConsumerOffsets:
        """Returns a copy of the table: the body of the answer to GET_ALL_CONSUMER_OFFSET (43), and the content of
        consumerOffset.json."""
        return ConsumerOffsets(offset_table={key: dict(offsets) for key, offsets in self._table.items()})

    async def save(self) -> None:
        """Writes the files whose content changed; if the disk is full, `ConfigFile.catch_up` writes them later. In a
        failover group, `GroupLog` writes the table instead.

        Flushes the log before it writes the table: offsets that POP commits depend on records in the log (pop_log.py),
        and must not be ahead of them after a power loss. Raises DiskFailed.
        """
        if self._change_count > self._saved_count and self.journal is None:
            offsets, count = self.snapshot(), self._change_count
            await self._flush_log()
            await self._file.save_when_possible(lambda: offsets)
            self._saved_count = count
        if self._are_local_commits_dirty and self._taken_file is not None:
            self._are_local_commits_dirty = False
            with trio.CancelScope(shield=True):  # a save at shutdown would not write these marks again
                await self._taken_file.save_when_possible(self._taken_snapshot)

    def _taken_snapshot(self) -> ConsumerOffsets:
        by_key: dict[str, dict[int, int]] = {}
        for (key, queue_id), offset in self._local_commits.items():
            by_key.setdefault(key, {})[queue_id] = offset
        return ConsumerOffsets(offset_table=by_key)
