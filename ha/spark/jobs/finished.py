"""Stores the results of a job's tasks until the job succeeds, so that an interrupted job can be resumed.

The driver writes each wave of results to a SQLite file, which stays consistent if the process is killed. Each
combination of job and options has its own file, which is deleted when the job succeeds. The key of a result is a hash
of its task and of the log files that the task reads: their names, inodes, sizes and modification times. So a range is
read again if its files have changed or belong to another log, or if `ha spark reindex` has replaced the consume queues.
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
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ha.protocol.store_files import segment_start
from ha.spark.jobs.waves import Runner
from ha.version import __version__

logger = logging.getLogger("ha.spark")

_TAKEN_AT_ONCE = 256
"""Maximum number of stored results in the driver's memory at a time."""
_ENDINGS = ("", "-journal")


def state_folder() -> Path:
    """Returns the default directory for results of unfinished jobs: below XDG_STATE_HOME, or ~/.local/state."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "halog" / "jobs"


@contextmanager
def finished_tasks(job: str, options: msgspec.Struct, folder: str | None) -> Iterator[FinishedTasks]:
    """Opens the results of an earlier, unfinished attempt at `job` with the same `options`, if there was one, and adds
    new results to them.

    Both attempts must run in the same working directory and use the same `folder`, which contains the results (None:
    `state_folder()`). The results are deleted when the block ends without an error. If they can't be stored, a warning
    is logged, and the job can't be resumed.
    """
    digest = hashlib.sha256(msgspec.msgpack.encode((os.getcwd(), options), enc_hook=str)).hexdigest()[:16]
    found = FinishedTasks((state_folder() if folder is None else Path(folder)) / f"{job}-{digest}.sqlite")
    try:
        yield found
    except BaseException:
        found.close()
        raise
    found.delete()


class FinishedTasks:
    """The file with one job's results. Errors of reading or writing it are logged, never raised."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.taken_count = 0
        """Number of stored results that were used in place of running their task"""
        self.first_ms: int | None = None
        """Time at which the oldest of the used results was stored, in ms since 1970; None if none was used"""
        self._is_failing = False
        self._database: sqlite3.Connection | None = None
        if file.exists():
            self._open()

    def runner(self, run: Runner, key_of: Callable[[Any], bytes | None]) -> Runner:
        """Returns a runner that uses the stored results of tasks, executes the other tasks with `run`, and stores their
        results.

        The functions given to the runner must be annotated with the struct that they return.

        `key_of`: returns a key of everything that the result of a task depends on; None for a task that must always
        run.
        """

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
        """Returns a note for the report about results of an earlier attempt; None if none was used."""
        if self.first_ms is None:
            return None
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.first_ms / 1000))
        return f"{self.taken_count} ranges were read by an earlier, unfinished attempt, from {began} on"

    def close(self) -> None:
        """Closes the file and keeps it for the next attempt."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def delete(self) -> None:
        """Deletes the file, which a job that has succeeded no longer needs; a failure is logged."""
        self.close()
        for ending in _ENDINGS:
            file = self.file.with_name(self.file.name + ending)
            try:
                file.unlink(missing_ok=True)
            except NotADirectoryError:
                pass  # nothing could be stored there
            except OSError as error:
                logger.warning("job.results_not_deleted file=%s error=%r", file, str(error))

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
        logger.warning("job.results_not_stored file=%s error=%r resumable=false", self.file, str(error))
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
        try:
            at_ms, result = int(row[0]), msgspec.msgpack.decode(zlib.decompress(row[1]), type=kind)
        except (TypeError, ValueError, zlib.error, msgspec.MsgspecError):
            return None  # it is damaged: the task runs again
        self.taken_count += 1
        self.first_ms = at_ms if self.first_ms is None else min(self.first_ms, at_ms)
        return result

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
    """The segment files of a store at construction, for keys of tasks that read them.

    Files deleted during the listing are not included. If the log can't be read, there are none; the tasks that read it
    report the error.

    `queues`: inode of the folder of consume queues; None if there is no such folder, or no access to it. The inode
    changes when `ha spark reindex` replaces the folder, because reindex builds the new one beside the old. It may not
    change in other rebuilds, because a folder that is deleted and created again can get the same inode. The folder's
    times are not used, because each new topic changes them, too.
    """

    def __init__(self, store: str) -> None:
        self.queues: int | None = None
        with suppress(OSError):
            self.queues = Path(store, "consumequeue").stat().st_ino
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
        """Returns start, size, inode and modification time of each file that has bytes of [begin, end)."""
        first = max(bisect_right(self._starts, begin) - 1, 0)
        return [file for file in self._files[first:] if file[0] < end and file[0] + file[1] > begin]

    def end_of(self, begin: int, end: int) -> int:
        """Returns the physical end of the last file that `between` returns; `end` if there is none."""
        return max((start + size for start, size, _, _ in self.between(begin, end)), default=end)


def task_key(kind: str, *parts: Any) -> bytes:
    """Returns the key of a result of `kind`: a hash of `parts` and of halog's version. The result must not depend on
    anything else.
    """
    return hashlib.sha256(msgspec.msgpack.encode((__version__, kind, *parts), order="deterministic")).digest()
