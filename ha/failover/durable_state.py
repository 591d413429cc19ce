"""A member's state on disk beside the log: whether the log is complete after a crash, and the group's record.

A member is *complete* if its log still has every byte that it acknowledged. A starting member can prove this if

- it was complete when it last wrote this file, and
- its log has a term: a log without one may have been deleted, or have lost its first records, and
- no unwritten page can have been lost since: the last stop was clean, or every byte was flushed before it was
  acknowledged (SYNC_FLUSH), or the same kernel is still running, whose page cache outlives a killed process. Another
  boot id, or none, proves nothing: power may have been lost, or the disk may have moved to another machine.

A member that can't prove it becomes complete once it has caught up with a master, or is elected itself, as the log of
the elected member is the group's (`Role.wait_caught_up`). The file then says so for the present boot, so that another
power loss makes the member incomplete again.

A log without this file is from an earlier release; it is complete if its last stop was clean. A damaged file proves
nothing.

A store that started with neither this file nor a log is *new* until its log is marked complete. If the member of a new
store is in the sync-state set, its disk has been replaced. A member that tries to become the first master of its group
marks its log complete first, as such a group has acknowledged nothing.

The group's record on disk shows whether the service was rolled back to an older state, for example by restoring a
backup. A master writes the record to its disk before a new set counts for acknowledgements; other members write it when
they learn of it. The whole record is kept, so that an operator can restore it (docs/failover.md).

    {"bootId": "…", "flushesFirst": false, "isComplete": true, "isNew": false, "group": {…}}

The file is written before this process acknowledges anything. All I/O goes through `StateFile`, which the node
provides.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
import trio

from ha.failover.agreement import GroupRecord, RecordAge

logger = logging.getLogger(__name__)


class StateFile(Protocol):
    """The file with a member's durable state.

    Disk errors propagate and end the process, except that `write` waits while the disk is full.
    """

    async def read(self) -> bytes | None:
        """Returns its content; None if it does not exist."""

    async def write(self, content: bytes) -> None:
        """Replaces its content atomically; durable on return."""


class StartConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the store and the kernel when this process starts."""

    boot_id: str | None
    """ID of the running kernel's boot; None if it is not available."""
    flushes_first: bool
    """Whether every byte is flushed before it is acknowledged (flushDiskType=SYNC_FLUSH)."""
    was_stopped_cleanly: bool
    """Whether the last process flushed everything before it ended, or there was none."""
    is_empty: bool
    """Whether there is no log."""
    has_term: bool
    """Whether the log's epoch history has a term."""
    is_shorter: bool
    """Whether the log ends before what was flushed or confirmed: the kernel can drop pages that a failed sync left
    unwritten."""
    member: str
    """Cluster, broker name and broker ID of this member"""


class _Content(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    boot_id: str | None
    flushes_first: bool
    is_complete: bool
    is_new: bool
    member: str | None = None
    """The member that wrote it; None if that was an earlier release"""
    group: GroupRecord | None = None


REASON_UNCLEAN = "the last stop was not clean and the page cache may be lost, so acknowledged messages may be missing"
REASON_NO_TERM = "there is no term in the log, so it may have been deleted or have lost its first records"
REASON_OTHER = "the store was another member's, so messages that this member acknowledged may be missing"
REASON_SHORTER = "the log ends before what had been flushed or confirmed, so acknowledged messages may be missing"

_UNKNOWN = _Content(boot_id=None, flushes_first=False, is_complete=False, is_new=False)


def _reason(start: StartConditions, *, is_own: bool) -> str:
    if not is_own:
        return REASON_OTHER
    if not start.has_term:
        return REASON_NO_TERM
    return REASON_SHORTER if start.is_shorter else REASON_UNCLEAN


class DurableState:
    """One member's durable state. Call `begin` first."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._content = _UNKNOWN
        self._write_lock = trio.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether the log is known to have every byte that this member acknowledged."""
        return self._content.is_complete

    @property
    def is_new(self) -> bool:
        """Whether the store had no log when its first state was written, and has never been complete since."""
        return self._content.is_new

    @property
    def group(self) -> GroupRecord | None:
        """The newest known record of the group; None if none is known."""
        return self._content.group

    @property
    def known_age(self) -> RecordAge:
        """Epoch and version of `group`; (0, 0) if no record is known."""
        return (0, 0) if self.group is None else self.group.age

    async def note(self, group: GroupRecord) -> None:
        """Writes a record of the group to disk unless it, or a newer one, is known already; durable on return."""
        if group.age > self.known_age:
            async with self._write_lock:
                if group.age > self.known_age:
                    await self._write(msgspec.structs.replace(self._content, group=group))

    async def begin(self, start: StartConditions) -> None:
        """Reads the last process's state, decides whether the log is complete, and writes the state of this process."""
        last = await self._read()
        is_new = start.is_empty if last is None else last.is_new
        is_own = last is None or last.member in (None, start.member)
        if last is None:  # a new store, or one of a release that did not write this file
            is_flushed = start.was_stopped_cleanly
            is_complete = is_flushed and not is_new and not start.is_shorter
        else:
            is_flushed = start.was_stopped_cleanly or last.flushes_first
            has_page_cache = start.boot_id is not None and start.boot_id == last.boot_id
            has_all = start.has_term and not start.is_shorter and (is_flushed or has_page_cache)
            is_complete = last.is_complete and has_all and is_own
        if not is_complete and not is_new:
            logger.warning(
                "member.log_incomplete boot_id=%s last_boot_id=%s reason=%r hint=%r",
                start.boot_id,
                None if last is None else last.boot_id,
                _reason(start, is_own=is_own),
                "members that have them are elected before this one, until it has caught up with a master",
            )
        # Pages that an earlier process left in the page cache may still not be flushed.
        flushes_first = start.flushes_first and is_flushed
        await self._write(
            _Content(
                boot_id=start.boot_id,
                flushes_first=flushes_first,
                is_complete=is_complete,
                is_new=is_new,
                member=start.member,
                group=None if last is None else last.group,
            )
        )

    async def mark_complete(self) -> None:
        """Records that the log has every acknowledged byte; durable on return.

        If this is cancelled, the file may already have been written.
        """
        if not self.is_complete:
            async with self._write_lock:
                await self._write(msgspec.structs.replace(self._content, is_complete=True, is_new=False))
            logger.info("member.log_completed")

    async def _read(self) -> _Content | None:
        content = await self._file.read()
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=_Content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.error("member.state_file_damaged reason=%r", str(error))
            return _UNKNOWN

    async def _write(self, content: _Content) -> None:
        await self._file.write(msgspec.json.encode(content))
        self._content = content
