"""One JSON file under config/, written the way RocketMQ does: the version before stays beside it as `.bak`.

A crash at any point leaves the main file or the `.bak` whole: the new text is written and synced under a third name
first.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import trio

from ha.errors import CorruptLog, DiskFailed, RemoteProtocolError

T = TypeVar("T")
RunBlocking = Callable[..., Awaitable[Any]]


class ConfigFile:
    """`path` and `path`.bak. Blocking calls go through `run_blocking`; one save at a time."""

    def __init__(self, path: Path, *, run_blocking: RunBlocking = trio.to_thread.run_sync) -> None:
        self.path = path
        self.backup_path = path.with_name(path.name + ".bak")
        self._run_blocking = run_blocking
        self._lock = trio.Lock()

    async def load(self, decode: Callable[[bytes], T]) -> T | None:
        """Decode the file, else its `.bak`; None if neither exists or both are empty.

        Raises CorruptLog when something is there and neither can be decoded: starting with an empty table would
        overwrite what an operator can still repair.
        """
        damage: CorruptLog | None = None
        for path in (self.path, self.backup_path):
            content = await self._run_blocking(_read, path)
            if not content.strip():
                continue
            try:
                return decode(content)
            except RemoteProtocolError as error:
                damage = damage or CorruptLog(path, 0, str(error))
        if damage is not None:
            raise damage
        return None

    async def save(self, make_content: Callable[[], bytes]) -> None:
        """Write what `make_content` returns when its turn comes. Raises DiskFailed; the old version stays then."""
        async with self._lock:
            content = make_content()
            try:
                await self._run_blocking(_write, self.path, self.backup_path, content)
            except OSError as error:
                raise DiskFailed(self.path, "write", str(error)) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _write(path: Path, backup_path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh_path = path.with_name(path.name + ".tmp")
    with open(fresh_path, "wb") as fresh:
        fresh.write(content)
        fresh.flush()
        os.fsync(fresh.fileno())
    if path.exists():
        os.replace(path, backup_path)
    os.replace(fresh_path, path)
