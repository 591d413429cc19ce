"""All access of the store to the operating system's files.

The store uses `Disk` and `File` only: `OsDisk` is the real disk, and tests replace it with one that records calls or
fails. Every call except `pread_nowait` may block, and raises OSError as the system does. The content of the files is
not interpreted here.

A mapped region is passed on as a memoryview and never closed explicitly: every view keeps the mapping alive, even after
the file was unlinked, and dropping the last reference frees it. For a large deleted file that takes long, so a thread
keeps a reference until no other is left (`_close_deleted`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Protocol

import trio

logger = logging.getLogger(__name__)

_FLOCK = Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
FILE_MODE = 0o640
DIRECTORY_MODE = 0o750
"""Modes of new files and directories, independent of the umask: readable by the group, for jobs and backups that run as
other users of that group, but by no one else, because the files contain messages. Existing ones keep their mode."""

_COOL_STEP_BYTES = 1 << 20

_WRITE_AND_WAIT = 7
"""Flags of sync_file_range(2): SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER"""
_SYNCED_AT_ONCE = 4
"""Number of threads of `sync_all`: most disks make several files durable in parallel"""
_LARGE_BYTES = 32 << 20
"""Minimum size in bytes of deleted files that are closed by a thread (`_close_deleted`)."""
_HELD_S_MAX = 60.0
_HELD_CHECK_S = 0.1
"""Interval at which a thread checks whether a deleted file is still in use. The thread keeps the file's map for up to
_HELD_S_MAX, so that usually the thread unmaps it, and not a reader."""
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
BLOCK_BYTES = 4096
"""Bytes that the disk reads, or fails to read, together; on most disks and file systems."""
_FOLIO_BYTES_MAX = 2 << 20
"""Maximum size in bytes of a folio, the unit in which Linux keeps a file's pages in memory"""
_OWN_REFERENCES = 2
"""Value that sys.getrefcount returns for an object to which only a list refers"""


class DiskUsage(NamedTuple):
    """Total and free space of a file system in bytes. Neither includes free space that is reserved for root."""

    total_bytes: int
    free_bytes: int

    @property
    def used_ratio(self) -> float:
        """Share (0 to 1) of the space that is used."""
        return 1.0 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class File(Protocol):
    """An open file. Dropping the last reference closes it; positions and sizes in bytes."""

    path: Path

    @property
    def descriptor(self) -> int | None:
        """The file's descriptor, which may be written to with pwrite(2); None if this is no file of the operating
        system."""

    def map(self, size: int) -> memoryview:
        """Maps the first `size` bytes, which must exist, as shared memory, and returns a view of the map. Callers only
        read through it: on a full disk, a write through the map to a page without space would be a SIGBUS."""

    def cool(self, position: int, size: int) -> None:
        """Removes a mapped range from the resident set. A hint: its bytes stay in the file and can be read as
        before."""

    def pread(self, size: int, position: int) -> bytes:
        """Returns up to `size` bytes from `position`; fewer only at the file's end."""

    def pread_nowait(self, size: int, position: int) -> bytes | bytearray | None:
        """Like `pread`, but returns only what can be read without waiting for the disk (at least a byte); None if
        nothing can."""

    def pwrite(self, chunk: bytes | bytearray | memoryview, position: int) -> None:
        """Writes all of `chunk` at `position`. If the disk refuses (OSError), a part of it may be written.

        Neither the file nor the error keeps a view of `chunk`: its buffer can be resized afterwards.
        """

    def next_range(self, position: int) -> tuple[int, int] | None:
        """Returns the next range (begin, end) at or after `position` that may contain anything but zeros; None if none
        does."""

    def zero(self, position: int, size: int) -> None:
        """Fills a range with zeros, not synced; its space stays allocated."""

    def write_back(self, position: int, size: int) -> None:
        """Writes the dirty pages of a range to the disk and waits until they are written. The range is durable only
        after `sync`. Raises OSError as `sync` does.

        While the kernel submits the pages of a sync, a write to one of them waits. If the pages that no longer change
        were written back before, only few are left for the sync.
        """

    def sync(self) -> None:
        """Returns when everything written to the file, even through its map, is on the disk (fdatasync).

        Raises OSError, never with ENOSPC or EDQUOT: what a failed sync did not write, no later sync will write, unlike
        bytes that a full disk refused.
        """


def data_ranges(file: File, position: int, end: int) -> list[tuple[int, int]]:
    """Returns the ranges (begin, end) within [`position`, `end`) that may contain anything but zeros.

    A list and not an iterator: preallocated space counts as data once it has been read, or read ahead, so a caller that
    read one range before asking for the next would get the whole rest of the file.
    """
    found = []
    while position < end and (following := file.next_range(position)) is not None and following[0] < end:
        begin, position = max(position, following[0]), min(following[1], end)
        found.append((begin, position))
    return found


def write_all(write: Callable[[memoryview, int], int], chunk: bytes | bytearray | memoryview, position: int) -> None:
    """Writes all of `chunk` at `position`. `write` writes a part, as pwrite(2) does, and returns its size, or raises.

    Releases every view before an error reaches the caller: the traceback keeps the frames, and what they refer to, as
    long as the error exists, and a buffer with a view can't be resized.
    """
    with memoryview(chunk) as view:
        written = 0
        while written < len(view):
            with view[written:] as rest:
                written += write(rest, position + written)


class Lock(Protocol):
    """An exclusive lock of a file against other processes, and against other stores of this process."""

    def release(self) -> None:
        """Releases the lock."""


class Disk(Protocol):
    """The operations of a file system that the store needs."""

    def make_dirs(self, path: Path) -> None:
        """Makes a directory and its parents, if missing; their names are durable on return."""

    def list_dir(self, path: Path) -> list[str]:
        """Returns the names in a directory, sorted; none if it does not exist. Raises NotADirectoryError if it is a
        file."""

    def exists(self, path: Path) -> bool:
        """Returns whether there is such a file, directory or symbolic link, even one whose target does not exist."""

    def size(self, path: Path) -> int:
        """Returns a file's size in bytes."""

    def modified_ms(self, path: Path) -> int:
        """Returns the time at which a file was last written, in ms since the epoch."""

    def create(self, path: Path, size: int, *, allocate: bool) -> File:
        """Creates a file of `size` zeros at `path`, completely or not at all; its name is durable on return.

        `allocate`: reserves its space (OSError ENOSPC if there is none). Otherwise the file is sparse, and each write
        may find the disk full. Raises FileExistsError if the name exists. On a file system without O_TMPFILE, a crash
        may leave a shorter file.
        """

    def open(self, path: Path) -> File:
        """Opens an existing file for reading and writing."""

    def sync_all(self, paths: Sequence[Path]) -> None:
        """Returns when everything written to these files is on the disk; ignores files that don't exist."""

    def read_bytes(self, path: Path) -> bytes:
        """Returns a small file's content."""

    def write_bytes(self, path: Path, content: bytes) -> None:
        """Creates or overwrites a small file and syncs it; not atomic."""

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file or directory, replacing a file or an empty directory of the new name; the names are durable on
        return."""

    def unlink(self, path: Path) -> None:
        """Removes a file's name; the removal is durable on return. Open and mapped files stay usable."""

    def usage(self, path: Path) -> DiskUsage:
        """Returns the total and the free bytes of the file system that contains `path`. Raises OSError."""

    def lock(self, path: Path, content: bytes) -> Lock | None:
        """Locks byte 0 of a file, created if missing, and writes `content` to it (RocketMQ: FileChannel.lock). Returns
        None if it is locked already."""

    def lock_directory(self, path: Path) -> Lock | None:
        """Locks an existing directory against other calls of this method; returns None if it is locked already. On a
        file system that can't lock directories, nothing is locked."""


def _close_deleted(descriptor: int, kept: list[mmap.mmap | None]) -> None:
    """Closes a deleted file when `kept` has the last reference to its map, or after _HELD_S_MAX. Blocking: runs in a
    thread of its own."""
    latest = time.monotonic() + _HELD_S_MAX
    while kept[0] is not None and sys.getrefcount(kept[0]) > _OWN_REFERENCES and time.monotonic() < latest:
        time.sleep(_HELD_CHECK_S)
    kept.clear()
    os.close(descriptor)


def _ignore(outcome: object) -> None:
    """Does nothing: there is no use for the result of closing a deleted file."""


class OsFile:
    """A file of the operating system."""

    __slots__ = ("_descriptor", "_map", "_nowait", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._nowait = True

    def __del__(self) -> None:
        descriptor, mapped = self._descriptor, self._map
        status = os.fstat(descriptor)
        # While the interpreter shuts down, a new thread never runs, and starting one would wait for it.
        if status.st_nlink or status.st_size < _LARGE_BYTES or sys.is_finalizing():
            os.close(descriptor)
            return
        # The last close of a deleted file frees its space, which takes 60 ms for 256 MiB, and any reader may be the one
        # that closes it last.
        self._map = None
        try:
            trio.lowlevel.start_thread_soon(partial(_close_deleted, descriptor, [mapped]), _ignore)
        except RuntimeError:  # no new threads: the interpreter ends
            os.close(descriptor)

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def map(self, size: int) -> memoryview:
        self._map = mmap.mmap(self._descriptor, size)
        return memoryview(self._map)

    def cool(self, position: int, size: int) -> None:
        mapped = self._map
        begin = -(-position // mmap.PAGESIZE) * mmap.PAGESIZE
        if mapped is None:
            return
        end = min(position + size, len(mapped))
        while begin < end:
            step = min(_COOL_STEP_BYTES, end - begin)
            mapped.madvise(mmap.MADV_DONTNEED, begin, step)
            begin += step
            time.sleep(0)

    def pread(self, size: int, position: int) -> bytes:
        pieces = []
        got = 0
        while got < size:
            try:
                piece = os.pread(self._descriptor, size - got, position + got)
            except OSError as error:
                error.filename = str(self.path)
                raise
            if not piece:
                break
            pieces.append(piece)
            got += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pread_nowait(self, size: int, position: int) -> bytearray | None:
        if not self._nowait:
            return None
        buffer = bytearray(size)
        try:
            count = os.preadv(self._descriptor, [buffer], position, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                error.filename = str(self.path)
                raise
            self._nowait = False  # not supported by this file system; a worker does every read of the file
            return None
        if count == 0:
            return None
        if count < size:
            del buffer[count:]
        return buffer

    def pwrite(self, chunk: bytes | bytearray | memoryview, position: int) -> None:
        write_all(partial(os.pwrite, self._descriptor), chunk, position)

    def next_range(self, position: int) -> tuple[int, int] | None:
        try:
            begin = os.lseek(self._descriptor, position, os.SEEK_DATA)
            return begin, os.lseek(self._descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        end = os.fstat(self._descriptor).st_size
        return (position, end) if position < end else None

    def zero(self, position: int, size: int) -> None:
        self._evict(position, size)
        # Written, not punched: a hole would free the space, and a later write could then find the disk full.
        zeros = bytes(min(size, 1 << 20))
        first_evicted = -(-position // _FOLIO_BYTES_MAX) * _FOLIO_BYTES_MAX
        last_evicted = (position + size) // _FOLIO_BYTES_MAX * _FOLIO_BYTES_MAX
        for begin, stop in data_ranges(self, position, position + size):
            while begin < stop:
                step = min(len(zeros), stop - begin)
                expected = zeros if step == len(zeros) else bytes(step)
                is_evicted = first_evicted <= begin and begin + step <= last_evicted
                if not is_evicted or self.pread(step, begin) != expected:  # a file system may report zeros as data
                    self.pwrite(expected, begin)
                begin += step

    def _evict(self, position: int, size: int) -> None:
        # Pages that were preallocated and then read stay in the page cache and count as data until they are evicted:
        # each start would read all of them, and some more ahead, when it searches for data. Pages that a failed sync
        # has left unwritten are clean, too, and may show zeros where the disk has other bytes. The kernel keeps a folio
        # that lies only partly in the range.
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, position, size, os.POSIX_FADV_DONTNEED)

    def write_back(self, position: int, size: int) -> None:
        call = _sync_file_range()
        if call is not None and call(self._descriptor, position, size, _WRITE_AND_WAIT):
            number = ctypes.get_errno()
            if number not in (errno.ENOSYS, errno.EINVAL):  # not supported: `sync` alone does it
                # Must be raised, as the kernel reports a failure once per descriptor.
                raise self._sync_failed(OSError(number, os.strerror(number)))

    def sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise self._sync_failed(error) from error

    def _sync_failed(self, error: OSError) -> OSError:
        return OSError(errno.EIO if is_full(error) else error.errno, f"sync failed: {error.strerror}", str(self.path))


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Returns sync_file_range(2), which Python's os lacks; None if the C library lacks it too. Calling it releases the
    GIL."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


class _OsLock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class OsDisk:
    """The operating system's file system (Linux)."""

    def make_dirs(self, path: Path) -> None:
        missing = []
        ancestor = path
        while not os.path.exists(ancestor):
            missing.append(ancestor)
            ancestor = ancestor.parent
        for each in reversed(missing):
            with self._synced(each.parent):  # a synced file is lost if the name of its directory is
                try:
                    os.mkdir(each, DIRECTORY_MODE)
                except FileExistsError:
                    if not os.path.isdir(each):
                        raise
                else:
                    # The umask restricts the mode of mkdir; an inherited group is kept.
                    os.chmod(each, DIRECTORY_MODE | os.stat(each).st_mode & stat.S_ISGID)
        if not os.path.isdir(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    def list_dir(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def size(self, path: Path) -> int:
        return os.stat(path).st_size

    def modified_ms(self, path: Path) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def create(self, path: Path, size: int, *, allocate: bool) -> File:
        # An unnamed file gets its name when it is complete: a crash in between must not leave a short file, which
        # RocketMQ refuses to load, nor one with a name that RocketMQ can't parse.
        try:
            descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
            return self._create_named(path, size, allocate=allocate)
        try:
            self._extend(descriptor, size, allocate=allocate)
            directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # With a directory descriptor this is linkat(AT_SYMLINK_FOLLOW); link(2) would link the symbolic link.
                os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=directory, follow_symlinks=True)
                try:
                    os.fsync(directory)
                except BaseException:
                    os.unlink(path)
                    raise
            finally:
                os.close(directory)
        except BaseException:
            os.close(descriptor)
            raise
        return OsFile(path, descriptor)

    def _create_named(self, path: Path, size: int, *, allocate: bool) -> File:
        file = None
        try:
            with self._synced(path.parent):
                file = OsFile(path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
                self._extend(file.descriptor, size, allocate=allocate)
        except BaseException:
            if file is not None:
                os.unlink(path)
            raise
        return file

    @staticmethod
    def _extend(descriptor: int, size: int, *, allocate: bool) -> None:
        os.fchmod(descriptor, FILE_MODE)
        if allocate:
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)

    def open(self, path: Path) -> File:
        return OsFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def sync_all(self, paths: Sequence[Path]) -> None:
        # Not syncfs: it would wait for all writes to the file system, and reports an error only once.
        def sync_some(first: int) -> None:
            for path in paths[first::_SYNCED_AT_ONCE]:
                with suppress(FileNotFoundError):
                    self.open(path).sync()

        with ThreadPoolExecutor(_SYNCED_AT_ONCE) as threads:
            for _ in threads.map(sync_some, range(min(_SYNCED_AT_ONCE, len(paths)))):
                pass

    def read_bytes(self, path: Path) -> bytes:
        return path.read_bytes()

    def write_bytes(self, path: Path, content: bytes) -> None:
        existed = os.path.exists(path)
        with nullcontext() if existed else self._synced(path.parent):
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_TRUNC, FILE_MODE)
            try:
                if not existed:
                    os.fchmod(descriptor, FILE_MODE)
                write_all(partial(os.pwrite, descriptor), content, 0)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        with ExitStack() as directories:
            for each in dict.fromkeys((old.parent, new.parent)):
                directories.enter_context(self._synced(each))
            os.rename(old, new)

    def unlink(self, path: Path) -> None:
        with self._synced(path.parent):
            os.unlink(path)

    def usage(self, path: Path) -> DiskUsage:
        found = os.statvfs(path)
        return DiskUsage(
            (found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize, found.f_bavail * found.f_frsize
        )

    def lock(self, path: Path, content: bytes) -> Lock | None:
        # Java's FileChannel.lock is a POSIX lock: it belongs to the process, so a second store of this process would
        # not notice it, and closing any descriptor of the file releases it. Locks of the open file description have
        # neither problem, and conflict with POSIX locks of other processes.
        existed = os.path.exists(path)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
        try:
            if not existed:
                os.fchmod(descriptor, FILE_MODE)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
            os.pwrite(descriptor, content, 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return None
            raise
        return _OsLock(descriptor)

    def lock_directory(self, path: Path) -> Lock | None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:  # NFS locks only what is open for writing
            logger.warning("store.directory_not_locked directory=%s reason=%r", path, str(error))
        return _OsLock(descriptor)

    @staticmethod
    @contextmanager
    def _synced(path: Path) -> Iterator[None]:
        """Syncs a directory after the block. Opens it before the block, so that no name changes if it can't be
        opened."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Returns whether `error` means that the disk, or a quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_passing(error: OSError) -> bool:
    """Returns whether an error is temporary: the disk is full, or too many files are open."""
    return is_full(error) or error.errno in (errno.EMFILE, errno.ENFILE)


def is_unreadable(error: OSError) -> bool:
    """Returns whether the disk can't read a part of a file (EIO)."""
    return error.errno == errno.EIO


def read_readable(file: File, size: int, position: int) -> bytes:
    """Returns `size` bytes of a file from `position` on, with zeros for blocks that the disk can't read, and after the
    end of the file. Raises OSError for other errors."""
    pieces = []
    end = position + size
    while position < end:
        stop = min(end, position - position % BLOCK_BYTES + BLOCK_BYTES)
        try:
            piece = file.pread(stop - position, position)
        except OSError as error:
            if not is_unreadable(error):
                raise
            piece = b""
        pieces.append(piece.ljust(stop - position, b"\0"))
        position = stop
    return b"".join(pieces)


def read_if_readable(disk: Disk, path: Path) -> bytes:
    """Returns a small file's content; nothing if the disk can't read it, so that it counts as damaged. Raises
    OSError."""
    try:
        return disk.read_bytes(path)
    except OSError as error:
        if not is_unreadable(error):
            raise
        return b""


def zeros(size: int) -> memoryview:
    """Returns `size` (> 0) zero bytes of writable memory. Blocking, but releases the GIL.

    Making a bytearray or an array of 20 MB would hold the GIL for 20 ms: the system fills each page, and Python copies.
    """
    memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    # Allocates the pages now, not at their first use; that can be skipped if no descriptor is left.
    with suppress(OSError), open("/dev/zero", "rb", buffering=0) as source:
        source.readinto(memory)
    return memory


def real_path(path: Path) -> Path:
    """Returns the absolute path with all symbolic links resolved; the target need not exist."""
    return Path(os.path.realpath(path))


def boot_id() -> str | None:
    """Returns the kernel's ID of the machine's current boot; None if it can't be read."""
    try:
        return _BOOT_ID_FILE.read_text().strip() or None
    except OSError:
        return None


def is_open_to_others(path: Path) -> bool:
    """Returns whether users other than the file's owner and group may read it. Raises OSError if there is no such
    file."""
    return bool(os.stat(path).st_mode & stat.S_IROTH)
