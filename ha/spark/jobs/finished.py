"""What the tasks of a job have found, kept until the job ends: one that was stopped goes on where it was.

The driver writes each wave of results into a file (SQLite: a kill at any moment leaves it whole), one for each job and
its options. A result is found again by its task and by the files of the log that the task read: their names, inodes,
sizes and times of change. So what was written to since is read again, and another log in the same place shares
nothing with the one before. The file is deleted when the job ends well, and a later run reads everything again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ha import __version__
from ha.protocol.store_files import segment_start
from ha.spark.jobs.waves import Runner

logger = logging.getLogger("ha.spark")

_TAKEN_AT_ONCE = 256
"""Kept results that are on the driver at a time."""
_ENDINGS = ("", "-journal")


def state_folder() -> Path:
    """Where the results of unfinished jobs are unless told otherwise: below XDG_STATE_HOME, or ~/.local/state."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "halog" / "jobs"


@contextmanager
def finished_tasks(job: str, options: msgspec.Struct, folder: str | None) -> Iterator[FinishedTasks]:
    """The results of an earlier attempt at `job` with the same `options`, if it did not end; new ones are added.

    `folder` holds them, None: `state_folder()`. They are deleted when the block ends without an error. Where they can't
    be kept, that is logged, and the job goes on without."""
    digest = hashlib.sha256(msgspec.msgpack.encode((os.getcwd(), options), enc_hook=str)).hexdigest()[:16]
    found = FinishedTasks((state_folder() if folder is None else Path(folder)) / f"{job}-{digest}.sqlite")
    try:
        yield found
    except BaseException:
        found.close()
        raise
    found.delete()


class FinishedTasks:
    """The file of one job."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.taken_count = 0
        """Results that were there and spared a task"""
        self.first_ms: int | None = None
        """When the first of these was found, since 1970"""
        self._is_failing = False
        self._database: sqlite3.Connection | None = None
        if file.exists():
            self._open()

    def runner(self, run: Runner, key_of: Callable[[Any], bytes | None]) -> Runner:
        """As `run`, for functions that return a struct, leaving out tasks whose result is here.

        `key_of`: what a task's result follows from; None for a task that is always run."""

        def kept(function: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterator[list[Any]]:
            kind = get_type_hints(function)["return"]
            keys = [key_of(task) for task in tasks]
            at = 0
            while at < len(tasks):
                taken: list[Any] = []
                while len(taken) < _TAKEN_AT_ONCE and at < len(tasks):
                    result = self._take(keys[at], kind)
                    if result is None:
                        break
                    taken.append(result)
                    at += 1
                if taken:
                    yield taken
                    continue
                stop = next((i for i in range(at + 1, len(tasks)) if self._has(keys[i])), len(tasks))
                for wave in run(function, tasks[at:stop]):
                    self._keep(keys[at : at + len(wave)], wave)
                    at += len(wave)
                    yield wave

        return kept

    def note(self) -> str | None:
        """What a report should say of results that are from an earlier attempt; None without any."""
        if self.first_ms is None:
            return None
        began = datetime.fromtimestamp(self.first_ms / 1000, UTC).isoformat(" ", "seconds").replace("+00:00", " UTC")
        return f"{self.taken_count} ranges were read by an earlier attempt that did not end, from {began} on"

    def close(self) -> None:
        """Leave the file for the next attempt."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def delete(self) -> None:
        """The job has ended: nothing is left."""
        self.close()
        for ending in _ENDINGS:
            file = self.file.with_name(self.file.name + ending)
            try:
                file.unlink(missing_ok=True)
            except NotADirectoryError:
                pass  # nothing could be kept there
            except OSError as error:
                logger.warning("%s can't be deleted, so a later run may take results from it: %s", file, error)

    def _open(self) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self.file)
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS finished (key BLOB PRIMARY KEY, at_ms INTEGER, result BLOB) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logger.warning("%s: what is found can't be kept, so a stopped job would begin anew: %s", self.file, error)
        self._is_failing = True
        self.close()

    def _row(self, columns: str, key: bytes | None) -> Any:
        if key is None or self._database is None:
            return None
        try:
            return self._database.execute(f"SELECT {columns} FROM finished WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._fail(error)
            return None

    def _has(self, key: bytes | None) -> bool:
        return self._row("1", key) is not None

    def _take(self, key: bytes | None, kind: Any) -> Any:
        row = self._row("at_ms, result", key)
        if row is None:
            return None
        self.taken_count += 1
        self.first_ms = row[0] if self.first_ms is None else min(self.first_ms, row[0])
        return msgspec.msgpack.decode(zlib.decompress(row[1]), type=kind)

    def _keep(self, keys: Sequence[bytes | None], results: Sequence[Any]) -> None:
        if self._database is None and not self._is_failing:
            self._open()
        if self._database is None:
            return
        now_ms = time.time_ns() // 1_000_000
        rows = [
            (key, now_ms, zlib.compress(msgspec.msgpack.encode(result), 1))
            for key, result in zip(keys, results, strict=True)
            if key is not None
        ]
        try:
            with self._database:
                self._database.executemany("INSERT OR REPLACE INTO finished VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            self._fail(error)


class LogFiles:
    """The segment files of a store as they are when this is made, for keys of what is read from them.

    Files that vanish meanwhile are left out, as are all if the log can't be listed: readers say what that means."""

    def __init__(self, store: str) -> None:
        found = []
        with suppress(OSError):
            for path in Path(store, "commitlog").iterdir():
                start = segment_start(path.name)
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if start is not None:
                        found.append((start, status.st_size, status.st_ino, status.st_mtime_ns))
        self._files = sorted(found)
        self._starts = [file[0] for file in self._files]

    def between(self, begin: int, end: int) -> list[tuple[int, int, int, int]]:
        """Start, size, inode and time of change of each file that has bytes of [begin, end)."""
        first = max(bisect_right(self._starts, begin) - 1, 0)
        return [file for file in self._files[first:] if file[0] < end and file[0] + file[1] > begin]

    def end_of(self, begin: int, end: int) -> int:
        """Where the last of these files ends; `end` if there is none."""
        return max((start + size for start, size, _, _ in self.between(begin, end)), default=end)


def task_key(kind: str, *parts: Any) -> bytes:
    """A key of what a result of `kind` follows from."""
    return hashlib.sha256(msgspec.msgpack.encode((__version__, kind, *parts))).digest()
