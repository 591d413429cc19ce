"""A JSON file under config/, written as RocketMQ does: the previous version is kept as `.bak`.

A table may have many thousands of entries, so the event loop only copies it, and a worker encodes the copy.

A crash at any point leaves either the file or the `.bak` intact: new content is written and synced under a third name
first, and a damaged file never becomes the `.bak`. If the disk is full, the old version stays, and `catch_up` later
repeats a `save_when_possible` that failed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import trio

from ha.errors import CorruptLog, DiskFailed, DiskFull, RemoteProtocolError
from ha.protocol import java_json
from ha.store.files import Disk, OsDisk, is_passing
from ha.store.mapped_file import RunBlocking, run_in_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ConfigFile:
    """The file `path`, and its previous version `path`.bak. Saves one table at a time."""

    def __init__(
        self,
        path: Path,
        *,
        disk: Disk | None = None,
        run_blocking: RunBlocking = run_in_thread,
        encode: Callable[[Any], bytes] = java_json.dumps_pretty,
    ) -> None:
        """`encode` returns the content of the file for a table; `run_blocking` runs it, and the calls of `disk`."""
        self.path = path
        self._encode = encode
        self._disk = disk if disk is not None else OsDisk()
        self.backup_path = path.with_name(path.name + ".bak")
        self._run_blocking = run_blocking
        self._lock = trio.Lock()
        self._pending: Callable[[], object] | None = None
        self.is_found = False
        """Whether `load` found a file"""
        self.is_backup = False
        """Whether `load` used the `.bak`"""
        self._is_damaged = False
        """Whether only the `.bak` is intact"""

    async def load(self, decode: Callable[[bytes], T]) -> T | None:
        """Returns the decoded file, or else its `.bak`; None if both are missing or empty.

        A file that the disk can't read (EIO) counts as damaged, as does one for which `decode` raises
        RemoteProtocolError. Raises CorruptLog if only damaged content is found: starting with an empty table would
        overwrite what an operator can still repair. Raises OSError for other errors of the disk.
        """
        damage: CorruptLog | None = None
        was_empty = False
        for path in (self.path, self.backup_path):
            try:
                content = await self._run_blocking(self._read, path)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                damage = damage or CorruptLog(path, 0, str(error))
                continue
            if not content.strip():
                was_empty = True
                continue
            try:
                table = decode(content)
            except RemoteProtocolError as error:
                damage = damage or CorruptLog(path, 0, str(error))
                continue
            if path == self.backup_path and (damage is not None or was_empty):
                reason = damage.reason if damage is not None else "it is missing or empty"
                logger.error("config.file_damaged file=%s reason=%r used=%s", self.path, reason, path.name)
            self.is_found, self.is_backup = True, path == self.backup_path
            self._is_damaged = self.is_backup
            return table
        if damage is not None:
            raise damage
        return None

    async def save(self, copy: Callable[[], object]) -> None:
        """Waits for earlier saves, then calls `copy` and writes the table that it returns, which must not change later.

        Raises DiskFull (also if too many files are open) or DiskFailed; in either case the old version stays.
        """
        async with self._lock:
            content = await self._run_blocking(self._encode, copy())
            try:
                await self._run_blocking(self._write, content)
            except OSError as error:
                if is_passing(error):
                    raise DiskFull(self.path, len(content), error) from error
                raise DiskFailed(self.path, "write", str(error)) from error
            if self._pending is not None:
                self._pending = None
                logger.warning("config.file_saved file=%s", self.path)

    async def save_when_possible(self, copy: Callable[[], object]) -> None:
        """As `save`, but if the disk is full, a later `catch_up` calls `copy` again and writes. Raises DiskFailed."""
        try:
            await self.save(copy)
        except DiskFull as error:
            if self._pending is None:
                logger.error("config.file_save_failed file=%s reason=%r", self.path, str(error.__cause__))
            self._pending = copy

    async def catch_up(self) -> None:
        """Repeats the last `save_when_possible` if it could not write the file. Raises DiskFailed."""
        if self._pending is not None:
            await self.save_when_possible(self._pending)

    def _read(self, path: Path) -> bytes:
        try:
            return self._disk.read_bytes(path)
        except FileNotFoundError:
            return b""

    def _write(self, content: bytes) -> None:
        disk = self._disk
        disk.make_dirs(self.path.parent)
        fresh_path = self.path.with_name(self.path.name + ".tmp")
        try:
            disk.write_bytes(fresh_path, content)
        except OSError:
            with contextlib.suppress(OSError):
                disk.unlink(fresh_path)  # a partial file would occupy the remaining space
            raise
        if disk.exists(self.path) and not self._is_damaged:
            disk.rename(self.path, self.backup_path)
        disk.rename(fresh_path, self.path)
        self._is_damaged = False
