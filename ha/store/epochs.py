"""The epoch history of a log, which records where each master's term begins in it: the file `epochFileCheckpoint`.

A log that was never part of a failover group has none, and no file. Two nodes compare their histories to find up to
where their logs are the same (`consistent_point`), so a history must never be older than the bytes that it describes:

- `append` returns when the entry is on the disk, and no byte of the term may be acknowledged before that;
- the file and its copy, `.bak`, have the same content when a call returns, so that either may be lost. RocketMQ's copy
  has the previous content: a broker that falls back to it takes bytes of the last term for those of the term before;
- entries beyond the log's end are dropped when the log is truncated, and at the start after it has lost its end.

After a crash or an error, the file and its copy may differ: then the call that wrote them did not complete, and the
copy is newer.
Sources: EpochFileCache, CheckpointFile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import trio

from ha.errors import CorruptLog, DiskFailed, DiskFull, RemoteProtocolError
from ha.protocol.epoch_file import EpochEntry, decode_epoch_file, encode_epoch_file
from ha.store.files import Disk, is_passing, is_unreadable
from ha.store.mapped_file import RunBlocking

logger = logging.getLogger(__name__)

EPOCH_FILE = "epochFileCheckpoint"
BACKUP_SUFFIX = ".bak"
_FRESH_SUFFIX = ".fresh"
"""Suffix of a file's replacement until it is complete."""


class EpochHistory:
    """The history of one log. Call `load` first. Changes are serialized; reads never wait. Offsets are physical."""

    def __init__(self, disk: Disk, path: Path, *, run_blocking: RunBlocking) -> None:
        self._disk = disk
        self._path = path
        self._run_blocking = run_blocking
        self._entries: tuple[EpochEntry, ...] = ()
        self._lock = trio.Lock()

    # ---- reading

    @property
    def entries(self) -> Sequence[EpochEntry]:
        """All terms, ascending. A term ends where the next one begins; the last one has no end yet."""
        return self._entries

    @property
    def last(self) -> EpochEntry | None:
        """The newest term; None if there is none."""
        return self._entries[-1] if self._entries else None

    def consistent_point(self, own_end: int, master_entries: Sequence[EpochEntry], master_end: int) -> int | None:
        """Returns the physical offset up to which this log, which ends at `own_end`, equals a master's, which ends at
        `master_end`; None if no term is in both histories (then it is unknown).

        This is the end of the newest term that both histories have with the same start; if the two ends of that term
        differ, the earlier one. Source: EpochFileCache.
        """
        theirs = dict(_ends(master_entries, master_end))
        for entry, end in reversed(_ends(self._entries, own_end)):
            if entry in theirs:
                return min(end, theirs[entry])
        return None

    # ---- changing

    async def load(self) -> None:
        """Reads the file, or its copy if the file is damaged or missing, and makes both equal. No entries if neither
        exists.

        Raises CorruptLog if one or both exist and none is intact, OSError if the disk refuses.
        """
        async with self._lock:
            self._entries = await self._run_blocking(self._load)

    async def append(self, epoch: int, start_offset: int) -> None:
        """Adds a term that begins at a physical offset; durable on return.

        Raises ValueError unless both numbers are larger than the last entry's: drop a term without bytes first
        (`truncate_from`). Raises DiskFull if the disk is full or no file can be opened (nothing has changed then),
        DiskFailed if it can't be written for another reason.
        """
        async with self._lock:
            last = self.last
            if last is not None and (epoch <= last.epoch or start_offset <= last.start_offset):
                raise ValueError(f"epoch {epoch} at {start_offset} can't follow {last}")
            await self._write((*self._entries, EpochEntry(epoch, start_offset)))

    async def truncate_from(self, offset: int) -> None:
        """Drops the terms that begin at or after a physical offset; durable on return. Raises DiskFull and DiskFailed
        as `append` does."""
        async with self._lock:
            await self._write(tuple(entry for entry in self._entries if entry.start_offset < offset))

    async def drop_beyond(self, log_end: int) -> None:
        """Drops the terms that begin after the log's end, for a log that has lost bytes. Raises DiskFull and DiskFailed
        as `append` does."""
        await self.truncate_from(log_end + 1)

    async def drop_before(self, min_offset: int) -> None:
        """Drops the terms that ended before the log's first byte: retention deleted them. Raises DiskFull and
        DiskFailed as `append` does."""
        async with self._lock:
            ends = _ends(self._entries, 1 << 63)
            await self._write(tuple(entry for entry, end in ends if end >= min_offset))

    def forget(self) -> None:
        """Drops all terms without touching files, which were moved."""
        self._entries = ()

    async def _write(self, entries: tuple[EpochEntry, ...]) -> None:
        if entries == self._entries:
            return
        try:
            # In one call, so that no cancellation comes in between.
            await self._run_blocking(self._save, encode_epoch_file(entries))
        except OSError as error:
            if is_passing(error):
                raise DiskFull(self._path, 0, error) from error
            raise DiskFailed(self._path, "write", str(error)) from error
        self._entries = entries

    # ---- files; blocking

    @property
    def _backup(self) -> Path:
        return self._path.with_name(self._path.name + BACKUP_SUFFIX)

    def _load(self) -> tuple[EpochEntry, ...]:
        found: dict[Path, bytes] = {}
        troubles: list[Exception] = []
        for path in (self._path, self._backup):
            if not self._disk.exists(path):
                continue
            try:
                content = self._disk.read_bytes(path)
                decode_epoch_file(content)
            except (RemoteProtocolError, OSError) as error:
                if isinstance(error, OSError) and not is_unreadable(error):
                    raise
                troubles.append(error)
                logger.error("store.epoch_file_damaged file=%s reason=%r", path, str(error))
            else:
                found[path] = content
        if not found:
            if troubles and isinstance(troubles[0], OSError):
                raise troubles[0]
            if troubles:
                raise CorruptLog(
                    self._path,
                    0,
                    f"neither it nor its copy {self._backup.name} can be read ({troubles[0]}), so it is unknown up to"
                    " where this log equals its master's; restore both from a backup of this store, or move the whole"
                    " store directory away: the node then copies the log from its master",
                )
            return ()
        content = next(iter(found.values()))
        self._replace([path for path in (self._path, self._backup) if found.get(path) != content], content)
        return tuple(decode_epoch_file(content))

    def _save(self, content: bytes) -> None:
        self._replace([self._backup, self._path], content)  # the file last: after an error it is unchanged

    def _replace(self, paths: list[Path], content: bytes) -> None:
        """Replaces the content of files in order; at any moment each has its old or its new content."""
        fresh = [path.with_name(path.name + _FRESH_SUFFIX) for path in paths]
        for path in fresh:
            self._disk.write_bytes(path, content)  # both first: a full disk changes nothing
        for path, each in zip(paths, fresh, strict=True):
            self._disk.rename(each, path)


def _ends(entries: Sequence[EpochEntry], log_end: int) -> list[tuple[EpochEntry, int]]:
    """Returns each term with the physical offset where it ends."""
    ends = [entry.start_offset for entry in entries[1:]] + [log_end]
    return [(entry, min(end, log_end)) for entry, end in zip(entries, ends, strict=False)]
