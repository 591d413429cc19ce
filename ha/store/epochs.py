"""The epoch history of a log: which master's term began at which physical offset of it. The file `epochFileCheckpoint`.

A log that was never part of a failover group has none, and no file. With it two nodes find out up to where their logs
are the same (`consistent_point`); what it says of the log's bytes must therefore never be older than these:

- `append` returns when the entry is on the disk, before a byte of the term may be acknowledged;
- the file and its copy, `.bak`, say the same when a call returns, so that either may be lost. RocketMQ has in the copy
  what the file said before: who falls back to it takes bytes of the last term for those of the term before;
- what names a place behind the log's end is dropped when the log is cut there, and at a start after its end was lost.

A crash may leave the two different: then the call that wrote them had not returned, and the file is the newer one.
Sources: EpochFileCache, CheckpointFile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import trio

from ha.errors import CorruptLog, DiskFailed, DiskFull, RemoteProtocolError
from ha.protocol.epoch_file import EpochEntry, decode_epoch_file, encode_epoch_file
from ha.store.files import Disk, is_passing
from ha.store.mapped_file import RunBlocking

logger = logging.getLogger(__name__)

EPOCH_FILE = "epochFileCheckpoint"
BACKUP_SUFFIX = ".bak"
_FRESH_SUFFIX = ".fresh"
"""Of what is about to take a file's place, until it is complete"""


class EpochHistory:
    """One log's. `load` it first; then one call at a time changes it, however many ask. Reading never waits."""

    def __init__(self, disk: Disk, path: Path, *, run_blocking: RunBlocking) -> None:
        self._disk = disk
        self._path = path
        self._run_blocking = run_blocking
        self._entries: tuple[EpochEntry, ...] = ()
        self._turn = trio.Lock()

    # ---- what it says

    @property
    def entries(self) -> Sequence[EpochEntry]:
        """All terms, ascending; a term ends where the next one begins, the last one goes on."""
        return self._entries

    @property
    def last(self) -> EpochEntry | None:
        """The newest term; None if there is none."""
        return self._entries[-1] if self._entries else None

    def consistent_point(self, own_end: int, master_entries: Sequence[EpochEntry], master_end: int) -> int | None:
        """Return up to which physical offset this log, which ends at `own_end`, is a master's, which ends at
        `master_end`; None if no term is in both histories (then nothing is known to be).

        That is where the newest term that both began at the same place ends first. Source: EpochFileCache.
        """
        theirs = dict(_ends(master_entries, master_end))
        for entry, end in reversed(_ends(self._entries, own_end)):
            if entry in theirs:
                return min(end, theirs[entry])
        return None

    # ---- changing it

    async def load(self) -> None:
        """Read the file, or its copy if that is damaged or gone; no entries if there is neither.

        CorruptLog if both are damaged, OSError if the disk refuses.
        """
        async with self._turn:
            self._entries = await self._run_blocking(self._load)

    async def append(self, epoch: int, start_offset: int) -> None:
        """Note that a term begins at a physical offset: durable on return.

        ValueError unless both are larger than the last entry's: a term that left no byte is dropped first
        (`truncate_from`). DiskFull if there is no room (nothing has changed then), DiskFailed if the disk refuses.
        """
        async with self._turn:
            last = self.last
            if last is not None and (epoch <= last.epoch or start_offset <= last.start_offset):
                raise ValueError(f"epoch {epoch} at {start_offset} can't follow {last}")
            await self._write((*self._entries, EpochEntry(epoch, start_offset)))

    async def truncate_from(self, offset: int) -> None:
        """Drop the terms that begin at or behind a physical offset. DiskFull, DiskFailed."""
        async with self._turn:
            await self._write(tuple(entry for entry in self._entries if entry.start_offset < offset))

    async def drop_beyond(self, log_end: int) -> None:
        """Drop the terms that begin behind the log's end, where it lost bytes. DiskFull, DiskFailed."""
        await self.truncate_from(log_end + 1)

    async def drop_before(self, min_offset: int) -> None:
        """Drop the terms that ended before the log's first byte: retention deleted them. DiskFull, DiskFailed."""
        async with self._turn:
            ends = _ends(self._entries, 1 << 63)
            await self._write(tuple(entry for entry, end in ends if end >= min_offset))

    def forget(self) -> None:
        """Be empty without touching files (somebody moved them)."""
        self._entries = ()

    async def _write(self, entries: tuple[EpochEntry, ...]) -> None:
        if entries == self._entries:
            return
        try:
            # In one call, so that no cancellation comes in between.
            await self._run_blocking(self._save, encode_epoch_file(entries))
        except OSError as error:
            if is_passing(error):
                raise DiskFull(self._path, 0, str(error)) from error
            raise DiskFailed(self._path, "write", str(error)) from error
        self._entries = entries

    # ---- files; blocking

    @property
    def _backup(self) -> Path:
        return self._path.with_name(self._path.name + BACKUP_SUFFIX)

    def _load(self) -> tuple[EpochEntry, ...]:
        found: dict[Path, bytes] = {}
        troubles = []
        for path in (self._path, self._backup):
            if not self._disk.exists(path):
                continue
            content = self._disk.read_bytes(path)
            try:
                decode_epoch_file(content)
            except RemoteProtocolError as error:
                troubles.append(str(error))
                logger.error("store.epoch_file_damaged file=%s reason=%s", path, error)
            else:
                found[path] = content
        if not found:
            if troubles:
                raise CorruptLog(
                    self._path,
                    0,
                    f"neither it nor its copy {self._backup.name} can be read ({troubles[0]}), so nothing tells up to"
                    " where this log is its master's; put both back from a backup of this very store, or move the"
                    " whole store directory away: the node then gets all of the log from its master",
                )
            return ()
        content = next(iter(found.values()))
        self._replace([path for path in (self._path, self._backup) if found.get(path) != content], content)
        return tuple(decode_epoch_file(content))

    def _save(self, content: bytes) -> None:
        self._replace([self._path, self._backup], content)

    def _replace(self, paths: list[Path], content: bytes) -> None:
        """Have files hold `content`, one after the other: at any moment each holds that or what it held before."""
        fresh = [path.with_name(path.name + _FRESH_SUFFIX) for path in paths]
        for path in fresh:
            self._disk.write_bytes(path, content)  # both first: a full disk changes nothing
        for path, each in zip(paths, fresh, strict=True):
            self._disk.rename(each, path)


def _ends(entries: Sequence[EpochEntry], log_end: int) -> list[tuple[EpochEntry, int]]:
    """Each term with the physical offset where it ends."""
    ends = [entry.start_offset for entry in entries[1:]] + [log_end]
    return [(entry, min(end, log_end)) for entry, end in zip(entries, ends, strict=False)]


__all__ = ["BACKUP_SUFFIX", "EPOCH_FILE", "EpochHistory"]
