"""Delivery progress of delay levels and timer messages: config/delayOffset.json, which slaves copy
(GET_ALL_DELAY_OFFSET, 45).

The file and the answers to slaves must not be ahead of the delivered copies: if an offset survived a power loss or the
loss of the master and the copy did not, the message would be lost. So each state of the table is marked with the end of
the log at that time. The file gets the newest state whose mark is flushed; slaves get the newest one whose mark is also
replicated. RocketMQ sends the newest state. In a failover group the table is in the log itself (journal.py), where its
records follow the copies that they count. Source: ScheduleMessageService (encode, decode, persist).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from ha.broker.config_file import ConfigFile
from ha.broker.journal import Journal
from ha.protocol import java_json
from ha.protocol.bodies import DataVersion, DelayOffsets, LogPosition

MARK_COUNT_MAX = 64
"""Maximum number of states of the table that are kept for saving and for slaves."""


class _Mark(msgspec.Struct, frozen=True, gc=False):
    """The table when the log ended at `log_end` (bytes)."""

    log_end: int
    table: dict[int, int]


class DelayOffsetTable:
    """The table: level (from 1) -> queue offset of the next message to deliver. Call `load` before use.

    Negative keys are the progress of timer messages (timers.py).
    """

    def __init__(self, file: ConfigFile, *, wall_clock_ms: Callable[[], int]) -> None:
        self._file = file
        self._wall_clock_ms = wall_clock_ms
        self._table: dict[int, int] = {}
        self._marks = [_Mark(0, {})]
        self._saved: dict[int, int] = {}
        self._data_version = DataVersion()
        self.journal: Journal | None = None
        """Collects changes for the log of a failover group; None outside a group"""
        self.file_position: LogPosition | None = None
        """Position of the loaded file in the group's log, if the file states it"""
        self.rocketmq_timers: tuple[int, int] | None = None
        """Timer progress of the RocketMQ master that this slave copies, as (queue offset, time in ms): the master has
        delivered the messages of the timer topic before this offset that are due by this time. None if unknown. Used
        only by retention; a slave that becomes master delivers these messages again"""

    async def load(self, log_end: int) -> None:
        """Reads the file. Raises CorruptLog and OSError as `ConfigFile.load` does.

        `log_end`: end of the log (bytes), with which this state is marked.
        """
        loaded = await self._file.load(partial(java_json.read_as, DelayOffsets))
        if loaded is not None:
            self._adopt(loaded, log_end)
        self.file_position = loaded.log_position if loaded is not None else None

    def _adopt(self, offsets: DelayOffsets, log_end: int) -> None:
        self._table = dict(offsets.offset_table)
        self._saved = dict(offsets.offset_table)
        self._marks = [_Mark(log_end, self._saved)]
        self._data_version = offsets.data_version or DataVersion()

    def get(self, level: int) -> int:
        """Returns the queue offset of the next message of a level; 0 if none was ever delivered."""
        return self._table.get(level, 0)

    def set(self, level: int, queue_offset: int) -> None:
        """Records that every message of a level before `queue_offset` has been delivered into the log."""
        if self._table.get(level) != queue_offset:
            self._table[level] = queue_offset
            if self.journal is not None:
                self.journal.delay(level, queue_offset)

    @property
    def table(self) -> Mapping[int, int]:
        """Level -> queue offset of the next message, for levels that ever delivered one; read-only."""
        return self._table

    def adopt(self, table: Mapping[int, int], log_end: int) -> None:
        """Replaces the table with the content of a failover group's log, which ends at `log_end` (bytes)."""
        self._adopt(DelayOffsets(data_version=self._data_version, offset_table=dict(table)), log_end)

    def mark(self, log_end: int, safe_offset: int) -> bool:
        """Marks the current state of the table with `log_end`, if it changed. The messages that it counts as delivered
        lie before this offset. Returns whether the current state differs from the saved one.

        Drops the marks before the newest one at or below `safe_offset`, an offset that is flushed and replicated. All
        offsets are physical, in bytes.
        """
        marks = self._marks
        if marks[-1].table != self._table:
            marks.append(_Mark(log_end, dict(self._table)))
        while len(marks) > 1 and marks[1].log_end <= safe_offset:
            del marks[0]
        if len(marks) > MARK_COUNT_MAX:
            del marks[2]  # marks[1] stays: if it were replaced each time, a slave far behind would never reach it
        return self._saved != self._table

    def settled(self, log_offset: int) -> DelayOffsets | None:
        """Returns the newest marked state whose delivered messages lie before physical offset `log_offset`, or None."""
        for mark in reversed(self._marks):
            if mark.log_end <= log_offset:
                return DelayOffsets(data_version=self._data_version, offset_table=mark.table)
        return None

    async def save(self, flushed_offset: int) -> None:
        """Writes the newest marked state before physical offset `flushed_offset` if it differs from the saved one.

        Call `mark` first. If the disk is full, the file is written later. Does nothing in a failover group, where
        `GroupLog` writes the file. Raises DiskFailed.
        """
        if self.journal is not None:
            return
        settled = self.settled(flushed_offset)
        if settled is None or settled.offset_table == self._saved:
            return
        self._data_version = settled.data_version = self._data_version.next(self._wall_clock_ms())
        await self._file.save_when_possible(lambda: settled)
        self._saved = settled.offset_table

    async def replace(self, offsets: DelayOffsets) -> bool:
        """Copies a master's table if it differs; returns whether it did.

        Also writes the file, except in a failover group. Raises DiskFailed.
        """
        if offsets.offset_table == self._table:
            return False
        if self.journal is None:
            await self._file.save_when_possible(lambda: offsets)
        self._adopt(offsets, 0)
        return True
