"""What a member keeps on its disk beside the log: whether the log can be trusted after a crash, and the group's record.

A member is *complete* if its log still has every byte that it acknowledged. It can prove that at its start if

- it was complete when it last wrote this, and
- nothing that the kernel still had to write can have been lost since: the last stop was clean, or every byte was
  flushed before it was acknowledged (SYNC_FLUSH), or the kernel is the one that the last process ran under, whose page
  cache outlives a killed process. Another boot id, or none, proves nothing: power may have been lost, or the disk may
  have moved to another machine.

A member that can't prove it is complete again once it has caught up with a master, or is elected itself, as the log of
the elected member is the group's (`Role.wait_caught_up`). The file says so for the present boot, so a second power loss
puts it in doubt again.

A store without this file and without a log is *new*: incomplete, and if it is in the sync-state set, its disk has been
replaced. It is complete in a group that never had a master, which has acknowledged nothing.

The record shows whether the service has gone back to an older state, as a restored backup does. A master has it on the
disk before the set that it names counts for acknowledgements; others as soon as they hear of it. It is kept whole, so
that an operator can put it back (docs/failover.md).

    {"bootId": "…", "flushesFirst": false, "isComplete": true, "isNew": false, "group": {…}}

It is written before the member acknowledges anything in this life. Pure but for `StateFile`, which the node provides.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
import trio

from ha.failover.agreement import GroupRecord, RecordAge

logger = logging.getLogger(__name__)


class StateFile(Protocol):
    """The file. Errors of the disk propagate and end the process, but for a full one: `write` waits for room."""

    async def read(self) -> bytes | None:
        """Return its content; None if there is none."""

    async def write(self, content: bytes) -> None:
        """Replace its content, whole or not at all; durable on return."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """How this process finds the store."""

    boot_id: str | None
    """Of the running kernel; None if it has none to tell."""
    flushes_first: bool
    """Every byte is flushed before it is acknowledged (flushDiskType=SYNC_FLUSH)."""
    was_stopped_cleanly: bool
    """The last stop flushed everything, or there was none."""
    is_empty: bool
    """There is no log."""


class _Content(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    boot_id: str | None
    flushes_first: bool
    is_complete: bool
    is_new: bool
    group: GroupRecord | None = None


_UNKNOWN = _Content(boot_id=None, flushes_first=False, is_complete=False, is_new=False)


class DurableState:
    """One member's. `begin` first."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._content = _UNKNOWN
        self._changing = trio.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether the log has every byte that this member acknowledged."""
        return self._content.is_complete

    @property
    def is_new(self) -> bool:
        """Whether there has never been a log here."""
        return self._content.is_new

    @property
    def group(self) -> GroupRecord | None:
        """The newest record of the group that was noted; None: none was."""
        return self._content.group

    @property
    def known_age(self) -> RecordAge:
        """Of that record."""
        return (0, 0) if self.group is None else self.group.age

    async def note(self, group: GroupRecord) -> None:
        """Keep a record of the group unless it is older than what is known: durable on return."""
        if group.age > self.known_age:
            async with self._changing:
                if group.age > self.known_age:
                    await self._write(msgspec.structs.replace(self._content, group=group))

    async def begin(self, life: Life) -> None:
        """Read what the last process left, judge the log by it, and write what holds for this one."""
        last = await self._read()
        is_new = life.is_empty if last is None else last.is_new
        if last is None:  # a new store, or one of a release that did not write this
            is_flushed = life.was_stopped_cleanly
            is_complete = is_flushed and not is_new
        else:
            is_flushed = life.was_stopped_cleanly or last.flushes_first
            has_page_cache = life.boot_id is not None and life.boot_id == last.boot_id
            is_complete = last.is_complete and (is_flushed or has_page_cache)
        if not is_complete and not is_new:
            logger.warning(
                "member_incomplete boot_id=%s last_boot_id=%s reason=%r",
                life.boot_id,
                None if last is None else last.boot_id,
                "the last stop was not clean and the page cache may be lost, so acknowledged messages may be missing "
                "here; this member is not elected before others that have them, until it has caught up with a master",
            )
        # What an earlier life left in the page cache is not flushed by being found there.
        flushes_first = life.flushes_first and is_flushed
        await self._write(
            _Content(
                boot_id=life.boot_id,
                flushes_first=flushes_first,
                is_complete=is_complete,
                is_new=is_new,
                group=None if last is None else last.group,
            )
        )

    async def mark_complete(self) -> None:
        """The log has every acknowledged byte: durable on return. Cancelled, it is marked or not."""
        if not self.is_complete:
            async with self._changing:
                await self._write(msgspec.structs.replace(self._content, is_complete=True, is_new=False))
            logger.info("member_complete")

    async def _read(self) -> _Content | None:
        content = await self._file.read()
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=_Content)
        except msgspec.DecodeError as error:  # ValidationError is one
            logger.error("member_state_damaged reason=%r", str(error))
            return _UNKNOWN

    async def _write(self, content: _Content) -> None:
        await self._file.write(msgspec.json.encode(content))
        self._content = content
