"""How far each delay level has been delivered, kept in config/delayOffset.json and handed to slaves (45).

What a file or a slave is told must not run ahead of the delivered copies: with the offset kept and the copy lost, in a
power cut or with the master, the message would be gone. So each state of the table is marked with the end of the log at
that time, and what leaves this process is the newest state whose mark is flushed, or replicated. RocketMQ hands out
the newest state. In a failover group the table is in the log itself (journal.py): a record of it stands behind the
copies that it counts, so whoever has the one has the others. Source: ScheduleMessageService (encode, decode, persist).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ha.broker.config_file import ConfigFile
from ha.protocol import java_json
from ha.protocol.bodies import DataVersion, DelayOffsets, LogPosition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ha.broker.journal import Journal

MARK_COUNT_MAX = 64


class _Mark(msgspec.Struct, frozen=True, gc=False):
    """The table when the log ended at `log_end` (bytes)."""

    log_end: int
    table: dict[int, int]


class DelayOffsetTable:
    """Level (from 1) to the queue offset (entries) of the next message to be delivered. `load` before use."""

    def __init__(self, file: ConfigFile, *, wall_clock_ms: Callable[[], int]) -> None:
        self._file = file
        self._wall_clock_ms = wall_clock_ms
        self._table: dict[int, int] = {}
        self._marks = [_Mark(0, {})]
        self._saved: dict[int, int] = {}
        self._data_version = DataVersion()
        self.journal: Journal | None = None
        """In a failover group, what writes changes into its log"""
        self.file_position: LogPosition | None = None
        """Where in the group's log the file that was loaded stands, if it says so"""

    async def load(self, log_end: int) -> None:
        """Read the file; the log ends at `log_end` (bytes). Raises CorruptLog if it and its `.bak` are damaged."""
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
        """Where delivery of a level goes on; 0 if it never began."""
        return self._table.get(level, 0)

    def set(self, level: int, queue_offset: int) -> None:
        """Everything of a level before `queue_offset` is in the log under its own topic."""
        if self._table.get(level) != queue_offset:
            self._table[level] = queue_offset
            if self.journal is not None:
                self.journal.delay(level, queue_offset)

    @property
    def table(self) -> Mapping[int, int]:
        """All levels that ever had something delivered; not to be changed."""
        return self._table

    def adopt(self, table: Mapping[int, int], log_end: int) -> None:
        """Be what a failover group's log says; it ends at `log_end` (bytes)."""
        self._adopt(DelayOffsets(data_version=self._data_version, offset_table=dict(table)), log_end)

    def mark(self, log_end: int, safe_offset: int) -> bool:
        """Note that the log holds, before `log_end`, what was delivered by now; tell whether that is not yet saved.

        Nobody needs marks older than the last one at or before `safe_offset` (bytes).
        """
        marks = self._marks
        if marks[-1].table != self._table:
            marks.append(_Mark(log_end, dict(self._table)))
        while len(marks) > 1 and marks[1].log_end <= safe_offset:
            del marks[0]
        if len(marks) > MARK_COUNT_MAX:
            del marks[1]
        return self._saved != self._table

    def settled(self, log_offset: int) -> DelayOffsets | None:
        """The newest marked table whose copies lie before `log_offset` (bytes); None if there is none any more."""
        for mark in reversed(self._marks):
            if mark.log_end <= log_offset:
                return DelayOffsets(data_version=self._data_version, offset_table=mark.table)
        return None

    async def save(self, flushed_offset: int) -> None:
        """Write what is settled by the flush up to `flushed_offset`, if that is new; on a full disk when it has room.

        The marks are needed for it: call `mark` first. In a failover group `GroupLog` writes the file.
        """
        if self.journal is not None:
            return
        settled = self.settled(flushed_offset)
        if settled is None or settled.offset_table == self._saved:
            return
        self._saved = settled.offset_table
        self._data_version = settled.data_version = self._data_version.next(self._wall_clock_ms())
        await self._file.save_when_possible(lambda: java_json.dumps_pretty(settled))

    async def replace(self, offsets: DelayOffsets) -> bool:
        """Take over a master's table and write it, if it is another one; tell whether it was."""
        if offsets.offset_table == self._table:
            return False
        self._adopt(offsets, 0)
        if self.journal is not None:
            return True
        await self._file.save_when_possible(lambda: java_json.dumps_pretty(offsets))
        return True
