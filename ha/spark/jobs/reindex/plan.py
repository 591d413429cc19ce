"""Defines the options of reindex, plans a rebuild before the log is read, and manages its target directory.

The plan is stored in the target until the rebuild is complete. A call with the same plan resumes the rebuild; a call
with another plan is refused, and so is a target that holds anything else.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from struct import Struct

import msgspec

from ha.arrow.segments import Segment, Segments
from ha.errors import CorruptLog, OptionError, StoreLocked, StoreUnreadable
from ha.protocol.properties import DELAY_LEVELS_MS
from ha.protocol.record import MAGIC_V1, MAGIC_V2
from ha.protocol.store_files import ENTRY_SIZE, index_file_size
from ha.spark.jobs.reindex.scan import LogRange, ScanTask
from ha.spark.jobs.synced import replace_file
from ha.store.files import OsDisk

_FLOCK = Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_MAGICS = {(magic & 0xFFFFFFFF).to_bytes(4, "big") for magic in (MAGIC_V1, MAGIC_V2)}
RANGES_MAX = 4096
"""Maximum number of ranges, as the driver keeps a summary of each; larger logs have larger ranges."""
WORK = ".reindex"
SET_ASIDE = "before-reindex"
IN_PLACE_TARGET = "reindexed"
FOLDERS = ("consumequeue", "index")


class ReindexOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Source, target and sizes of a rebuild.

    Sizes must be those of the broker: its configuration keys are named in brackets. If the store has consume queues or
    index files, their sizes must agree with the options.
    """

    path: Path
    """The store directory, with `commitlog` in it; all executors must see it and the target under the same paths"""
    target: Path | None = None
    """A new or empty directory for `consumequeue` and `index`; default with `in_place`: `path`/reindexed"""
    in_place: bool = False
    """Replace the store's files with the new ones, and move the old ones to `path`/before-reindex"""
    force: bool = False
    """Continue even if the last owner crashed (`abort` exists) or, with a separate target, if a broker is running"""
    queue_file_entries: int | None = None
    """[mappedFileSizeConsumeQueue / 20] number of entries of a consume queue file; None: that of existing files, or
    300,000 if there are none or their sizes differ"""
    index_enabled: bool = True
    """[messageIndexEnable] whether to build index files"""
    index_slot_count: int = 5_000_000
    """[maxHashSlotNum] number of hash slots of an index file"""
    index_entry_count: int = 20_000_000
    """[maxIndexNum] number of entries of an index file"""
    index_tags: bool = True
    """Index tags as well, like RocketMQ 5.4 and later and halog; 4.9 and 5.3 do not"""
    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
    """[messageDelayLevel] delay of each delay level, in ms"""
    range_bytes: int = 1 << 30
    """Bytes of log per task, rounded up to whole segments; more if the log has more than RANGES_MAX such ranges"""


class Plan(msgspec.Struct, frozen=True):
    """The plan of a rebuild: settings that all tasks share, sizes of index files, and the ranges of the log."""

    task: ScanTask
    slot_count: int
    entry_count_max: int
    ranges: tuple[LogRange, ...]


def make_plan(options: ReindexOptions) -> Plan:
    """Plans the rebuild; writes nothing. Raises OptionError, StoreUnreadable, CorruptLog or StoreLocked if a rebuild is
    impossible."""
    _check_sizes(options)
    store = options.path.absolute()
    target = target_of(options)
    commitlog = store / "commitlog"
    _check_is_store(store)
    if any((store / "batchconsumequeue").glob("*/*/*")):
        raise StoreUnreadable(store / "batchconsumequeue", "batch consume queues can't be rebuilt")
    _check_owner(options, store)
    ranges = _cut(_written_segments(commitlog), options.range_bytes)
    task = ScanTask(
        commitlog=str(commitlog),
        target=str(target),
        work=str(target / WORK),
        file_entries=_queue_file_entries(options, store),
        index_enabled=options.index_enabled,
        index_tags=options.index_tags,
        delay_levels_ms=options.delay_levels_ms,
    )
    if options.index_enabled:
        _check_index_files(options, store)
    return Plan(task, options.index_slot_count, options.index_entry_count, tuple(ranges))


def target_of(options: ReindexOptions) -> Path:
    """Returns the absolute path of the directory to build. Raises OptionError if the options name none."""
    if options.target is not None:
        return options.target.absolute()
    if options.in_place:
        return options.path.absolute() / IN_PLACE_TARGET
    raise OptionError("target", "none is given", "a new or empty directory, or in_place")


def begin_target(plan: Plan) -> None:
    """Creates the target and stores the plan there, unless it already has this plan. Raises OptionError if it holds
    anything else."""
    target = Path(plan.task.target)
    plan_file = target / WORK / "plan.json"
    encoded = msgspec.json.format(msgspec.json.encode(plan))
    if plan_file.exists():
        if plan_file.read_bytes() != encoded:
            raise OptionError(
                "target",
                f"{target} holds an unfinished rebuild with other options or of other segments of the log",
                "the options of that rebuild, or a new or empty directory",
            )
        return
    if target.exists() and any(path.name != WORK for path in target.iterdir()):
        raise OptionError("target", f"{target} is not empty", "a new or empty directory")
    plan_file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(plan_file, encoded)


@contextmanager
def store_lock(store: Path) -> Iterator[None]:
    """Holds the lock that marks a store as in use. Raises StoreLocked if another process holds it, StoreUnreadable if
    there is no store."""
    _check_is_store(store)
    held = OsDisk().lock(store / "lock", b"")
    if held is None:
        raise StoreLocked(store / "lock")
    try:
        yield
    finally:
        held.release()


def swap_in(store: Path, target: Path) -> None:
    """Replaces the store's directories with the target's, and moves the old ones to SET_ASIDE.

    Can be repeated after a crash. Raises OSError.
    """
    aside = store / SET_ASIDE
    for name in FOLDERS:
        built, live = target / name, store / name
        if not built.exists():
            continue
        if live.exists() and not (aside / name).exists():
            aside.mkdir(exist_ok=True)
            live.rename(aside / name)
        built.rename(live)


def check_set_aside(store: Path, target: Path) -> None:
    """Raises OptionError if SET_ASIDE still has files that an earlier rebuild replaced, unless this call resumes it."""
    aside = store / SET_ASIDE
    if aside.exists() and not (target / WORK / "built").exists():
        raise OptionError(
            "in_place", f"{aside} holds what an earlier rebuild replaced", "delete it or move it away first"
        )


def _check_is_store(store: Path) -> None:
    if not (store / "commitlog").is_dir():
        raise StoreUnreadable(store, "there is no directory commitlog in it")


def _check_sizes(options: ReindexOptions) -> None:
    for name in ("index_slot_count", "index_entry_count", "range_bytes"):
        value = getattr(options, name)
        least = 2 if name == "index_entry_count" else 1
        if not least <= value <= 1 << 62 or (name != "range_bytes" and value > 0x7FFFFFFF):
            raise OptionError(name, f"{value} is out of range", f"{least} or more, as in the broker's configuration")
    entries = options.queue_file_entries
    if entries is not None and not 1 <= entries <= 0x7FFFFFFF // ENTRY_SIZE:
        raise OptionError(
            "queue_file_entries", f"{entries} is out of range", "1 or more: mappedFileSizeConsumeQueue / 20"
        )


def _check_owner(options: ReindexOptions, store: Path) -> None:
    # In place, the caller holds the lock.
    if not options.in_place and not options.force and _is_locked(store / "lock"):
        raise StoreLocked(store / "lock")
    if (store / "abort").exists() and not options.force:
        raise OptionError(
            "path",
            f"{store} has an abort file: a broker owns it or crashed",
            "a store that was stopped, or force: the log then ends at its first damaged record",
        )


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        found: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
        return found != fcntl.F_UNLCK
    finally:
        os.close(descriptor)


def _written_segments(commitlog: Path) -> list[Segment]:
    """Returns the segments up to the last that begins with a record. Raises CorruptLog if one is missing or of another
    size."""
    found = Segments(commitlog).all()
    while found and not _begins_with_record(found[-1]):
        found.pop()  # preallocated, or the log was truncated before it
    for before, segment in pairwise(found):
        if segment.start != before.end:
            raise CorruptLog(segment.path, 0, f"a segment is missing between {before.path.name} and this one")
        if segment.size != before.size:
            raise CorruptLog(segment.path, segment.size, f"it has {segment.size} bytes, the previous one {before.size}")
    return found


def _begins_with_record(segment: Segment) -> bool:
    with segment.path.open("rb") as file:
        return file.read(8)[4:] in _MAGICS


def _cut(segments: list[Segment], range_bytes: int) -> list[LogRange]:
    if not segments:
        return []
    size = segments[0].size
    total = segments[-1].end - segments[0].start
    per_range = max(1, -(-max(range_bytes, total // RANGES_MAX) // size))
    groups = [segments[first : first + per_range] for first in range(0, len(segments), per_range)]
    return [LogRange(number, group[0].start, group[-1].end, group is groups[-1]) for number, group in enumerate(groups)]


def _queue_file_entries(options: ReindexOptions, store: Path) -> int:
    sizes = {path.stat().st_size for path in store.glob("consumequeue/*/*/*") if path.is_file()} - {0}
    if len(sizes) > 1:
        sizes = set()  # files of different sizes: the store is damaged
    found = sizes.pop() // ENTRY_SIZE if sizes else None
    asked = options.queue_file_entries
    if asked is not None and found is not None and asked != found:
        raise OptionError(
            "queue_file_entries",
            f"{asked}, but the store's queue files have {found}",
            "none, or the broker's mappedFileSizeConsumeQueue / 20",
        )
    return asked or found or 300_000


def _check_index_files(options: ReindexOptions, store: Path) -> None:
    """Raises OptionError if an index file of the store has another size than the new ones: the options are then not
    those of the broker, which deletes or rejects files of a wrong size."""
    expected = index_file_size(options.index_slot_count, options.index_entry_count)
    for path in (store / "index").glob("*"):
        size = path.stat().st_size
        if size != expected:
            raise OptionError(
                "index_slot_count, index_entry_count",
                f"they make files of {expected} bytes, {path.name} has {size}",
                "the broker's maxHashSlotNum and maxIndexNum",
            )
