"""Moves the files of a store aside and begins an empty log at a new offset, for haOutOfRange=resync.

    the new log's first segment is made beside the log ─▶ queues, index, checksums and terms are moved aside
      ─▶ the commitlog, then queueends and checkpoint are moved aside ─▶ the segment becomes the commitlog

The segment waits in the file `commitlog.new-OFFSET`. A start that finds it completes the reset if the commitlog was
moved, so that the new log never begins elsewhere. If the commitlog is still there, the start deletes the segment, and
rebuilds queues, index and checksums from the log; the terms are then unknown. If a rename fails, everything is moved
back.

Nothing is deleted: `NAME` is renamed to `NAME.aside-N`. If `NAME` is a symbolic link, the directory that it leads to is
renamed and created again, so that the new files are on the same disk as the old ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ha.errors import DiskFailed, DiskFull
from ha.protocol.store_files import segment_name, segment_start
from ha.store.epochs import BACKUP_SUFFIX, EPOCH_FILE
from ha.store.files import Disk, is_full, real_path
from ha.store.mapped_file import Segment, segment_starts
from ha.store.options import StoreOptions
from ha.store.queue_ends import QUEUE_ENDS_FILE

logger = logging.getLogger(__name__)

_DERIVED = ("consumequeue", "index", "checksums", EPOCH_FILE, EPOCH_FILE + BACKUP_SUFFIX)
_RECORDS = (QUEUE_ENDS_FILE, "checkpoint")
"""Files that describe the log to the next start. They are moved after the log, and before the new log exists"""
_HINT = "it must not be a mount point, and the user of the process must be able to write to its parent directory"


def waiting_segment(disk: Disk, options: StoreOptions) -> Path | None:
    """Returns the path of the segment that waits to become the new log, because a reset is incomplete; None if there is
    none."""
    directory = real_path(options.commitlog_path)
    prefix = f"{directory.name}.new-"
    names: list[str] = []
    with suppress(PermissionError):  # `make_waiting_segment` fails, too, where names can't be listed
        names = disk.list_dir(directory.parent)
    for name in names:
        if name.startswith(prefix) and segment_start(name.removeprefix(prefix)) is not None:
            return directory.with_name(name)
    return None


def make_waiting_segment(disk: Disk, options: StoreOptions, start: int) -> Path:
    """Creates the first segment of the new log, which begins at physical offset `start`, beside the old log. Returns
    its path. Blocking. After DiskFull or OSError nothing has changed."""
    directory = real_path(options.commitlog_path)
    path = directory.with_name(f"{directory.name}.new-{segment_name(start)}")
    try:
        disk.list_dir(directory.parent)
        disk.create(path, options.segment_size, allocate=options.preallocate)
    except OSError as error:
        if is_full(error):
            raise DiskFull(path, options.segment_size) from error
        raise _refused(directory, error) from error
    return path


def move_aside(disk: Disk, options: StoreOptions, waiting: Path) -> Segment:
    """Moves the store aside; returns the first segment of the new log, mapped. Blocking.

    After OSError nothing has changed. Raises DiskFailed if part of it could not be moved back; the process must then
    stop.
    """
    root, log = options.root, real_path(options.commitlog_path)
    paths = [*(real_path(root / name) for name in _DERIVED), log, *(root / name for name in _RECORDS)]
    number = _free_number(disk, paths)
    moved: list[Path] = []
    path = log
    try:
        for path in paths:
            if disk.exists(path):
                moved.append(path)
                disk.rename(path, _aside(path, number))
        path = log
        begun = _begin(disk, options, waiting)
        segment = Segment(int(begun.name), options.segment_size, disk.open(begun))
        segment.map()
    except OSError as error:
        _move_back(disk, moved, number, waiting, _begun(log, waiting))
        raise _refused(path, error) from error
    logger.warning("store.set_aside root=%s number=%d", root, number)
    return segment


def finish_reset(disk: Disk, options: StoreOptions) -> None:
    """Completes a reset that a crash interrupted, or deletes its segment if the log was not moved. Blocking.
    Raises OSError."""
    waiting = waiting_segment(disk, options)
    if waiting is None:
        return
    if segment_starts(disk.list_dir(options.commitlog_path)):
        disk.unlink(waiting)
        return
    logger.warning("store.reset_resumed root=%s segment=%s", options.root, waiting.name)
    for path in (options.root / name for name in _RECORDS):
        if disk.exists(path):
            disk.rename(path, _aside(path, _free_number(disk, [path])))
    _begin(disk, options, waiting)


def _begin(disk: Disk, options: StoreOptions, waiting: Path) -> Path:
    """Makes the waiting segment the log, and returns its new path."""
    directory = real_path(options.commitlog_path)
    for path in (directory, *(real_path(options.root / name) for name in ("consumequeue", "index"))):
        disk.make_dirs(path)
    path = _begun(directory, waiting)
    disk.rename(waiting, path)
    return path


def _begun(directory: Path, waiting: Path) -> Path:
    """Returns the path that the waiting segment gets when it becomes the log in `directory`."""
    return directory / waiting.name[-len(segment_name(0)) :]


def _move_back(disk: Disk, moved: list[Path], number: int, waiting: Path, begun: Path) -> None:
    try:
        if disk.exists(_aside(begun.parent, number)) and disk.exists(begun):  # not a segment of the old log
            disk.rename(begun, waiting)
        for path in reversed(moved):
            if disk.exists(_aside(path, number)):
                disk.rename(_aside(path, number), path)  # replaces a directory that was made again and is empty
        if disk.exists(waiting):
            disk.unlink(waiting)
    except OSError as error:
        raise DiskFailed(waiting.parent, f"moving *.aside-{number} back", str(error)) from error


def _free_number(disk: Disk, paths: Sequence[Path]) -> int:
    number = 1
    while any(disk.exists(_aside(path, number)) for path in paths):
        number += 1
    return number


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.aside-{number}")


def _refused(path: Path, error: OSError) -> OSError:
    reason = f"it can't be moved aside for a resync ({error.strerror or error}): {_HINT}"
    return OSError(error.errno, reason, str(path))
