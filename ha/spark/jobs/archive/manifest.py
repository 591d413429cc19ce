"""Keeps the manifest of one broker: the list of the files of its archive, and atomic changes to it.

    archive/
      topic=flights/date=2026-11-21/part-<broker>-<first physical offset>-<sequence>-<n>.zstd.parquet
      _halog/<broker>/
        lock                                     held (flock) by the process that changes this broker's archive
        commits/00000000000000000007.json        one Commit each, numbered from 1, never changed; all but about
                                                 the last 1,024 are deleted
        commits/00000000000000000064.state.json  every 64th: the state after all commits up to it
        applied                                  number of the last commit whose files are in place
        staging/<run>/                           files that no commit names yet, or whose commit is being applied

Spark, Delta and pyarrow ignore names that begin with an underscore.

Steps of a commit: (1) files are written and synced in staging; (2) the commit's JSON is written, synced and *linked* as
its numbered file, which fails if the number is taken; now the commit is effective; (3) the files it removes are deleted
(unless a Delta or Iceberg table has them) and its own are renamed into place; (4) `applied` is replaced. After a kill,
the next run on the archive finishes (3) and (4), and deletes the rest of staging. Each step can be repeated.

A reader that lists the directory sees only committed rows and, without a Delta or Iceberg table, none twice. While a
commit is being applied (milliseconds), such a reader may see only some of the new files, and miss rows of files that
are being merged. A reader that lists the directory before a compaction and opens a file after it fails with "file not
found", and must be run again. `read_archive` reads the files in the manifest, so only this error can occur.

An object store has no rename and no link. There, step 2 would be a conditional put (If-None-Match: *), files would be
written under their final names, and only readers that use the manifest would be correct; Delta works this way.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from datetime import date
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ha.errors import ArchiveConflict, ArchiveDamaged, OptionError
from ha.spark.jobs.synced import create_file, replace_file, sync_folder

FOLDER = "_halog"
FORMAT_VERSION = 1
TABLE_IN_FOLDER = "."
"""Name of a Delta or Iceberg table that is at the archive's own path"""
_STATE_EVERY = 64
_COMMITS_KEPT = 1024
"""Number of commits whose files are kept; the state files include older ones. The limit keeps the folder small: readers
list it for each query, and a commit may be made every few seconds.
"""
_ESCAPED = frozenset("\"#%'*/:=?\\\x7f{[]^" + "".join(map(chr, range(1, 32))))
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
StructT = TypeVar("StructT", bound=msgspec.Struct)


class QueueSpan(msgspec.Struct, frozen=True, array_like=True):
    """The queue offsets of one queue's rows in a file or an erasure: `rows` of them, from `first` to `last`,
    inclusive."""

    queue_id: int
    first: int
    last: int
    rows: int


class ArchivedFile(msgspec.Struct, frozen=True):
    """One Parquet file. `path`, and `staged`, its path until the commit is applied, are relative to the archive.

    Its records have physical offsets in [begin, end), in bytes. `topic` or `date` is None for damaged records in which
    it can't be read.
    """

    path: str
    staged: str
    topic: str | None
    date: date | None
    rows: int
    bytes: int
    physical_begin: int
    physical_end: int
    queues: tuple[QueueSpan, ...]


class Hole(msgspec.Struct, frozen=True):
    """Physical offsets [begin, end) that were deleted from the log before they could be archived."""

    begin: int
    end: int
    reason: str


class LastRecord(msgspec.Struct, frozen=True):
    """The last undamaged record that was archived, by which later runs recognize the log."""

    physical_offset: int
    store_size: int
    body_crc: int | None
    store_timestamp_us: int | None


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that one erasure removed. Their keys are not recorded."""

    rows: int
    topics: dict[str, int] = {}
    """Topic -> physical offset (bytes) before which all of its rows were erased"""
    physical_offsets: tuple[int, ...] = ()
    """Physical offsets of the other erased rows, ascending"""
    spans: dict[str, tuple[QueueSpan, ...]] = {}
    """Topic -> queue offsets of its erased rows"""


class BodyColumns(msgspec.Struct, frozen=True):
    """The columns that are decoded from bodies."""

    format: Literal["json", "avro", "protobuf"]
    schemas: dict[str, dict[str, Any]]
    """Topic -> schema as its format stores it; with JSON: column -> type as Spark writes it, such as `long`"""


class Scope(msgspec.Struct, frozen=True):
    """The records and columns that a broker's archive has within the covered offsets; the same in all its commits."""

    format: Literal["parquet", "delta", "iceberg"]
    topics: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    on_damage: str = "report"
    left_out: tuple[str, ...] = ()
    """Topics that are not archived although `topics` is None; empty in archives of earlier versions"""
    table: str = ""
    """The Delta or Iceberg table with the same files: TABLE_IN_FOLDER, or `catalog.namespace.table`; "" for none"""
    body_columns: BodyColumns | None = None


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One change of an archive. After it, the archive is complete up to physical offset `covered_end` (bytes)."""

    version: int = FORMAT_VERSION
    sequence: int
    kind: Literal["append", "compact", "void", "erase"]
    """The operation that made the commit; "void" occurs only in Delta archives of halog 0.1"""
    time_ms: int
    scope: Scope
    covered_begin: int
    covered_end: int
    added: tuple[ArchivedFile, ...] = ()
    removed: tuple[str, ...] = ()
    holes: tuple[Hole, ...] = ()
    damaged: int = 0
    last: LastRecord | None = None
    erased: Erasure | None = None


class State(msgspec.Struct, kw_only=True):
    """The state after all commits of one broker up to `sequence`."""

    version: int = FORMAT_VERSION
    broker_name: str
    sequence: int = 0
    scope: Scope | None = None
    covered_begin: int | None = None
    covered_end: int | None = None
    files: dict[str, ArchivedFile] = {}
    holes: list[Hole] = []
    damaged: int = 0
    last: LastRecord | None = None
    erased: list[Erasure] = []

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return sum(file.rows for file in self.files.values())

    def holds(self, topic: str) -> bool:
        """Returns whether the archive has the messages of `topic` within its covered offsets."""
        scope = self.scope
        return scope is not None and topic not in scope.left_out and (scope.topics is None or topic in scope.topics)

    def spans(self) -> Iterator[tuple[str, QueueSpan]]:
        """Yields the topic and the queue offsets of all rows, including erased ones, except rows without a topic."""
        for file in self.files.values():
            if file.topic is not None:
                yield from ((file.topic, span) for span in file.queues)
        for erasure in self.erased:
            for topic, spans in erasure.spans.items():
                yield from ((topic, span) for span in spans)

    def created_again(self, topics: Container[str] | None = None) -> set[tuple[str, int]]:
        """Returns the queues (topic, queue id) with messages from before and after their topic was deleted and created
        again. RocketMQ then begins again at queue offset 0, so later messages do not have higher queue offsets.

        `topics`: the topics whose files are checked (None: all); erasures of all topics are checked. Files whose
        physical offsets overlap, because the broker's clock was set back, are not compared.
        """
        found = set()
        parts: dict[tuple[str, int], list[tuple[int, int, QueueSpan]]] = {}
        for file in self.files.values():
            if file.topic is not None and (topics is None or file.topic in topics):
                for span in file.queues:
                    end = max(file.physical_end, file.physical_begin + 1)
                    parts.setdefault((file.topic, span.queue_id), []).append((file.physical_begin, end, span))
        for erasure in self.erased:
            for topic, spans in erasure.spans.items():
                end = erasure.topics.get(topic) or max(erasure.physical_offsets, default=0) + 1
                for span in spans:
                    parts.setdefault((topic, span.queue_id), []).append((-1, end, span))
        for queue, of_queue in parts.items():
            ended, count, highest = sorted(of_queue, key=itemgetter(1)), 0, -1
            for begin, _, span in sorted(of_queue, key=itemgetter(0)):
                while ended[count][1] <= begin:
                    highest = max(highest, ended[count][2].last)
                    count += 1
                if span.first <= highest or span.rows > span.last - span.first + 1:
                    found.add(queue)
        return found

    def fold(self, commit: Commit) -> None:
        """Changes this state by `commit`, which must be the next one."""
        self.sequence = commit.sequence
        self.scope = commit.scope
        if self.covered_begin is None:
            self.covered_begin = commit.covered_begin
        self.covered_end = commit.covered_end
        for path in commit.removed:
            del self.files[path]
        self.files.update({file.path: file for file in commit.added})
        self.holes.extend(commit.holes)
        self.damaged += commit.damaged
        self.last = commit.last or self.last
        if commit.erased is not None:
            self.erased.append(commit.erased)


def no_failure(step: str) -> None:
    """Does nothing: the failpoint of callers that inject no failure."""


class Manifest:
    """The manifest of `broker_name` in the archive at `archive`. Reading needs no lock; changes need `locked()`.

    `failpoint` is called with the name of each step before it is taken; tests raise there.
    """

    def __init__(self, archive: Path, broker_name: str, *, failpoint: Callable[[str], None] = no_failure) -> None:
        self.archive = archive
        self.broker_name = broker_name
        self.folder = archive / FOLDER / escape_path_name(broker_name)
        self._commits = self.folder / "commits"
        self._staging = self.folder / "staging"
        self.failpoint = failpoint

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the broker's lock in the block. Raises ArchiveConflict if an archiver or erasure already holds it,
        OSError if its file can't be opened."""
        self._commits.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArchiveConflict(self.archive, "another archiver or erasure is running; stop it first") from None
            yield

    def state(self, *, applied_only: bool = False) -> State:
        """Returns the state after all commits; with `applied_only`, after those whose files are in place.

        Raises ArchiveDamaged if a commit is missing or can't be read; OptionError for a Delta archive of halog 0.1.
        """
        end = self.applied() if applied_only else None
        state = State(broker_name=self.broker_name)
        numbers, states = self._numbers()
        usable = [number for number in states if end is None or number <= end]
        if usable:
            state = _decode(self._commits / f"{max(usable):020d}.state.json", State)
            self._check_format(state.scope)
        for number in numbers:
            if number > state.sequence and (end is None or number <= end):
                if number != state.sequence + 1:
                    raise ArchiveDamaged(self.archive, f"commit {state.sequence + 1} of {self.broker_name} is missing")
                state.fold(self._commit(number))
        return state

    def applied(self) -> int:
        """Returns the number of the last commit whose files are in place; 0 if there is none. Raises ArchiveDamaged if
        `applied` contains no number."""
        try:
            return int((self.folder / "applied").read_text())
        except FileNotFoundError:
            return 0
        except ValueError:
            raise ArchiveDamaged(self.archive, f"{self.folder / 'applied'} holds no number") from None

    def unapplied(self) -> Commit | None:
        """Returns the last commit if its files are not known to be in place, else None. Errors as in `state`."""
        numbers, _ = self._numbers()
        return self._commit(numbers[-1]) if numbers and numbers[-1] > self.applied() else None

    def recover(self) -> State:
        """Applies the last commit if a killed archiver did not, deletes leftover files, and returns the state.

        Requires the lock. Raises ArchiveDamaged if a file of the last commit is missing; other errors as in `state`.
        """
        commit = self.unapplied()
        if commit is not None:
            self.apply(commit)
        self.clear_staging()
        for folder in (self.folder, self._commits):
            for left in folder.glob("*.tmp"):
                left.unlink()
        return self.state()

    def stage(self, sequence: int) -> str:
        """Creates a folder in staging for the files of commit `sequence`, and returns its name."""
        run = f"{sequence:08d}-{time.time_ns():x}"
        (self._staging / run).mkdir(parents=True)
        return run

    def clear_staging(self) -> None:
        """Deletes the files in staging; committed files are no longer there.

        Files that can't be deleted remain until the next call, for example if a task that Spark has given up on still
        writes there.
        """
        self.failpoint("clear staging")
        shutil.rmtree(self._staging, ignore_errors=True)

    def commit(self, commit: Commit) -> None:
        """Makes `commit` effective.

        Raises ArchiveConflict, with nothing changed, if its number is taken or a staged file is gone.
        """
        for file in commit.added:
            if not (self.archive / file.staged).exists():
                raise ArchiveConflict(self.archive, f"the staged file {file.staged} is gone")
        for folder in {(self.archive / file.staged).parent for file in commit.added}:
            sync_folder(folder)
        target = self._commits / f"{commit.sequence:020d}.json"
        self.failpoint("link commit")
        try:
            create_file(target, msgspec.json.format(msgspec.json.encode(commit), indent=1))
        except FileExistsError:
            raise ArchiveConflict(self.archive, f"another archiver made commit {commit.sequence} first") from None

    def apply(self, commit: Commit) -> None:
        """Moves the files of the last commit into place, and deletes those that it removes unless there is a table. Can
        be repeated. Raises ArchiveDamaged, with nothing changed, if an added file is missing or cut short."""
        for file in commit.added:
            staged, final = self.archive / file.staged, self.archive / file.path
            found = staged if staged.exists() else final
            if not found.exists() or found.stat().st_size != file.bytes:
                raise ArchiveDamaged(self.archive, f"{file.path} of commit {commit.sequence} is missing or cut short")
        folders = set()
        # Earlier versions of a Delta or Iceberg table still need the removed files.
        for path in commit.removed if not commit.scope.table else ():
            self.failpoint(f"remove {path}")
            (self.archive / path).unlink(missing_ok=True)
            folders.add((self.archive / path).parent)
        for file in commit.added:
            self.failpoint(f"rename {file.path}")
            staged, final = self.archive / file.staged, self.archive / file.path
            final.parent.mkdir(parents=True, exist_ok=True)
            if staged.exists():
                staged.rename(final)
            folders.update((final.parent, final.parent.parent, self.archive))
        for folder in folders:
            sync_folder(folder)
        self.mark_applied(commit.sequence)

    def mark_applied(self, sequence: int) -> None:
        """Records that the files of commit `sequence` are in place.

        Every _STATE_EVERY commits, also writes the state file and deletes commits older than the last _COMMITS_KEPT.
        """
        self.failpoint("mark applied")
        replace_file(self.folder / "applied", b"%d\n" % sequence)
        if sequence % _STATE_EVERY == 0:
            self.failpoint("write state")
            replace_file(self._commits / f"{sequence:020d}.state.json", msgspec.json.encode(self.state()))
            self._delete_commits(sequence - _COMMITS_KEPT)

    def _delete_commits(self, before: int) -> None:
        """Deletes the commits up to `before` and all older state files; does nothing if `before` has no state file."""
        commits, states = self._numbers()
        if before in states:
            self.failpoint("delete commits")
            for number in commits:
                if number <= before:
                    (self._commits / f"{number:020d}.json").unlink()
            for number in states:
                if number < before:
                    (self._commits / f"{number:020d}.state.json").unlink()

    def _numbers(self) -> tuple[list[int], list[int]]:
        """Returns the numbers of the commits and of the state files, each ascending."""
        commits: list[int] = []
        states: list[int] = []
        for name in os.listdir(self._commits) if self._commits.exists() else ():
            number, _, kind = name.partition(".")
            if kind in ("json", "state.json"):
                (commits if kind == "json" else states).append(int(number))
        return sorted(commits), sorted(states)

    def _commit(self, number: int) -> Commit:
        commit = _decode(self._commits / f"{number:020d}.json", Commit)
        self._check_format(commit.scope)
        return commit

    def _check_format(self, scope: Scope | None) -> None:
        if scope is not None and scope.format == "delta" and not scope.table:
            raise OptionError(
                "archive",
                f"{self.archive} is a Delta archive of halog 0.1, whose manifest has no files",
                "a new archive; spark.read.format('delta') reads the old one",
            )


def brokers(archive: Path) -> list[str]:
    """Returns the names of the brokers that have a manifest in `archive`, sorted."""
    folder = archive / FOLDER
    return sorted(unescape_path_name(each.name) for each in folder.iterdir()) if folder.is_dir() else []


def escape_path_name(value: str | None) -> str:
    """Escapes a partition's value for its path, as Hive does (FileUtils.escapePathName); "" and None become
    _NO_VALUE."""
    if not value:
        return _NO_VALUE
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in value)


def unescape_path_name(name: str) -> str:
    """Reverses `escape_path_name`, except for _NO_VALUE."""
    first, *rest = name.split("%")
    return first + "".join(chr(int(piece[:2], 16)) + piece[2:] for piece in rest)


def partition_path(topic: str | None, day: date | None) -> str:
    """Returns the folder, relative to the archive, of the rows of one topic and day."""
    return f"topic={escape_path_name(topic)}/date={day.isoformat() if day else _NO_VALUE}"


def _decode(path: Path, kind: type[StructT]) -> StructT:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArchiveDamaged(path.parent, f"{path.name} can't be read: {error}") from None
