"""The operating system behind the seam: atomic creation, locks, cold reads, and a full file system."""

import ctypes
import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio

from ha.errors import StoreLocked
from ha.protocol.checksum_file import GROUP_ENTRIES, GROUP_SIZE
from ha.protocol.codes import PutStatus
from ha.store.checksums import LOADED_COUNT_MAX, Checksums
from ha.store.files import OsDisk, OsFile, data_ranges, is_passing, zeros
from ha.store.message_store import open_message_store
from ha.store.open_files import OpenFiles
from tests.store.disks import Inode, MemoryDisk
from tests.store.stores import check_derived, message, records, small_options

CACHESTAT = 451
"""Its number, the same on all architectures"""


def test_a_file_appears_at_its_full_size_with_its_space_reserved(tmp_path: Path) -> None:
    disk = OsDisk()
    file = disk.create(tmp_path / "a", 1 << 20, allocate=True)
    assert (tmp_path / "a").stat().st_blocks * 512 >= 1 << 20
    disk.create(tmp_path / "b", 1 << 20, allocate=False)
    assert (tmp_path / "b").stat().st_size == 1 << 20
    assert (tmp_path / "b").stat().st_blocks == 0
    with pytest.raises(FileExistsError):
        disk.create(tmp_path / "a", 10, allocate=True)
    view = file.map(1 << 20)
    view[5:8] = b"abc"
    file.sync()
    assert file.pread(5, 4) == b"\x00abc\x00"
    file.cool(0, 1 << 20)
    assert bytes(view[5:8]) == b"abc"
    assert disk.list_dir(tmp_path) == ["a", "b"]


def test_a_range_is_written_back(tmp_path: Path) -> None:
    file = OsDisk().create(tmp_path / "a", 1 << 20, allocate=True)
    file.pwrite(b"x" * (1 << 20), 0)
    file.write_back(4096, (1 << 20) - 8192)
    assert file.pread(1 << 20, 0) == b"x" * (1 << 20)
    found = dirty_pages(tmp_path / "a", 4096, (1 << 20) - 8192)
    file.sync()
    if dirty_pages(tmp_path / "a", 0, 1 << 20) != 0:
        pytest.skip("this kernel can't tell, or this file system writes nothing")
    assert found == 0


def dirty_pages(path: Path, position: int, size: int) -> int:
    """Returns the number of dirty pages of a range, by cachestat(2) (Linux 6.5); -1 if not supported."""
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, under write-back, evicted, recently evicted
    with open(path, "rb") as file:
        asked = (ctypes.c_uint64 * 2)(position, size)
        if ctypes.CDLL(None).syscall(CACHESTAT, file.fileno(), asked, found, 0):
            return -1
    return found[1] + found[2]


def test_a_range_that_the_disk_refuses_is_an_error(tmp_path: Path) -> None:
    """The kernel would not report the error again to the following sync."""
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(OSError, match=os.strerror(errno.ESPIPE)):
        OsFile(tmp_path / "a", writing).write_back(0, 4096)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limits the size of files of this process: a write across the limit is done in part, the next one refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_buffer_can_grow_while_the_error_of_its_write_is_kept(tmp_path: Path) -> None:
    """The traceback keeps the frames of the write, and all their references."""
    file = OsDisk().create(tmp_path / "a", 4096, allocate=False)
    chunk = bytearray(b"x" * 8192)
    with largest_file(4096), pytest.raises(OSError, match="too large") as refused:
        file.pwrite(chunk, 0)
    assert (tmp_path / "a").read_bytes() == b"x" * 4096
    chunk += b"y"
    assert refused.value.errno == errno.EFBIG


def test_a_partly_written_small_file_is_an_error(tmp_path: Path) -> None:
    with largest_file(4096), pytest.raises(OSError, match="too large"):
        OsDisk().write_bytes(tmp_path / "a", b"x" * 8192)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the directories that are synced, in that order."""
    paths: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return paths


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_a_file_whose_name_can_not_be_synced_is_removed(
    has_unnamed_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later attempt found that the name exists, so that a log could not grow before the next start."""
    disk, opened = OsDisk(), os.open

    def refuse_unnamed(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and not has_unnamed_files:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, mode)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "open", refuse_unnamed)
    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            disk.create(tmp_path / "a", 4096, allocate=True)
    assert disk.list_dir(tmp_path) == []
    disk.create(tmp_path / "a", 4096, allocate=True)


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_an_error_of_a_read_names_the_file(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = OsDisk().create(tmp_path / "a", 4096, allocate=True)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        (file.pread if call == "pread" else file.pread_nowait)(100, 0)
    assert caught.value.filename == str(tmp_path / "a")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_failed_sync_is_no_full_disk(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that waits for room would go on without the bytes, which no later sync writes."""

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    disk = OsDisk()
    file = disk.create(tmp_path / "a", 4096, allocate=True)
    monkeypatch.setattr(os, "fdatasync", fail)
    for sync in (file.sync, lambda: disk.sync_all([tmp_path / "a"])):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            sync()
        assert not is_passing(caught.value)
        assert caught.value.filename == str(tmp_path / "a")


def test_a_new_directory_is_synced_in_its_parent(tmp_path: Path, synced: list[str]) -> None:
    """Syncing a file and its directory does not make the name of the directory durable."""
    disk = OsDisk()
    disk.make_dirs(tmp_path / "root" / "commitlog")
    assert synced == [str(tmp_path), str(tmp_path / "root")]
    disk.make_dirs(tmp_path / "root" / "commitlog")
    assert len(synced) == 2


def test_a_rename_syncs_each_directory_once(tmp_path: Path, synced: list[str]) -> None:
    disk = OsDisk()
    disk.make_dirs(tmp_path / "new")
    disk.write_bytes(tmp_path / "a", b"a")
    synced.clear()
    disk.rename(tmp_path / "a", tmp_path / "b")
    assert synced == [str(tmp_path)]
    synced.clear()
    disk.rename(tmp_path / "b", tmp_path / "new" / "b")
    assert synced == [str(tmp_path / "new"), str(tmp_path)]


@pytest.mark.parametrize("change", ["unlink", "rename"])
def test_no_name_changes_if_its_directory_can_not_be_synced(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller goes on as if nothing had changed, because files can be opened again later."""

    def refuse(*arguments: object, **more: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    disk = OsDisk()
    disk.write_bytes(tmp_path / "a", b"a")
    paths = [tmp_path / "a"] if change == "unlink" else [tmp_path / "a", tmp_path / "b"]
    with monkeypatch.context() as limited:
        limited.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            getattr(disk, change)(*paths)
    assert disk.list_dir(tmp_path) == ["a"]


@pytest.mark.parametrize("creation", ["make_dirs", "create", "write_bytes"])
def test_no_name_is_made_if_its_directory_can_not_be_synced(
    creation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt found that the name exists, for ever."""
    disk, opened = OsDisk(), os.open

    def refuse_directories(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))  # as on some file systems
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, mode)

    def call() -> None:
        if creation == "make_dirs":
            disk.make_dirs(tmp_path / "a")
        elif creation == "create":
            disk.create(tmp_path / "a", 4096, allocate=True)
        else:
            disk.write_bytes(tmp_path / "a", b"a")

    with monkeypatch.context() as limited:
        limited.setattr(os, "open", refuse_directories)
        with pytest.raises(OSError, match="Too many open files"):
            call()
    assert disk.list_dir(tmp_path) == []
    call()
    assert disk.list_dir(tmp_path) == ["a"]


def test_a_view_survives_its_file(tmp_path: Path) -> None:
    disk = OsDisk()
    file = disk.create(tmp_path / "a", 4096, allocate=True)
    view = file.map(4096)[100:200]
    view[:3] = b"abc"
    disk.unlink(tmp_path / "a")
    del file
    assert bytes(view[:3]) == b"abc"


def test_zeroing_keeps_the_space(tmp_path: Path) -> None:
    file = OsDisk().create(tmp_path / "a", 1 << 16, allocate=True)
    file.pwrite(b"x" * (1 << 16), 0)
    file.zero(1000, (1 << 16) - 1000)
    assert file.pread(1 << 16, 0) == b"x" * 1000 + bytes((1 << 16) - 1000)
    assert (tmp_path / "a").stat().st_blocks * 512 >= 1 << 16


def test_reserved_space_is_no_data_after_it_was_read(tmp_path: Path) -> None:
    size = 8 << 20
    file = OsDisk().create(tmp_path / "a", size, allocate=True)
    file.pwrite(b"x" * 4096, 0)
    file.sync()
    file.pread(size, 0)
    if data_ranges(file, 0, size) != [(0, size)]:
        pytest.skip("this file system tells what was read from what was written")
    file.zero(4096, size - 4096)
    assert data_ranges(file, 0, size) == [(0, 4096)]


def test_zeros_that_a_failed_sync_left_unwritten_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache shows them as clean pages; once the kernel drops these, the old bytes are back."""
    size = 1 << 16
    on_disk = b"x" * size

    def drop_clean_pages(descriptor: int, position: int, length: int, advice: int) -> None:
        os.pwrite(descriptor, on_disk[position : position + length], position)

    file = OsDisk().create(tmp_path / "a", size, allocate=True)
    monkeypatch.setattr(os, "posix_fadvise", drop_clean_pages)
    file.zero(0, size)
    assert file.pread(size, 0) == bytes(size)


def test_zeros_are_written_where_pages_may_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps a folio of 2 MiB that lies only partly in the range: after a failed sync it may show zeros where
    the disk has other bytes."""
    size, begin, folio = 12 << 20, (3 << 20) + 100, 2 << 20
    file = OsFile(tmp_path / "a", os.open(tmp_path / "a", os.O_CREAT | os.O_RDWR))
    file.pwrite(bytes(size), 0)
    file.sync()
    written = bytearray(size)
    pwrite = os.pwrite

    def note(descriptor: int, chunk: memoryview, position: int) -> int:
        written[position : position + len(chunk)] = b"w" * len(chunk)
        return pwrite(descriptor, chunk, position)

    monkeypatch.setattr(os, "pwrite", note)
    file.zero(begin, size - 100 - begin)
    if data_ranges(file, 0, size) != [(0, size)]:
        pytest.skip("this file system stores no zeros")
    assert all(written[begin : 2 * folio])
    assert all(written[size - folio : size - 100])
    assert not any(written[3 * folio : 4 * folio]), "the rest reads as zeros"
    assert not any(written[:begin] + written[size - 100 :])


def test_cached_bytes_are_read_without_a_worker(tmp_path: Path) -> None:
    file = OsDisk().create(tmp_path / "a", 1 << 16, allocate=True)
    file.pwrite(b"x" * 100, 0)
    assert file.pread_nowait(100, 0) in (b"x" * 100, None)
    assert file.pread_nowait(100, 1 << 20) is None


def descriptor_count(directory: Path) -> int:
    """Number of this process's descriptors of files in `directory`; others come and go."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{directory}/")
    return found


def test_many_files_need_few_descriptors(tmp_path: Path) -> None:
    disk = OsDisk()
    files = OpenFiles(disk, count_max=5)
    for number in range(50):
        disk.write_bytes(tmp_path / str(number), b"%d" % number)
    for number in range(50):
        assert files.get(tmp_path / str(number)).pread(9, 0) == b"%d" % number
    assert descriptor_count(tmp_path) <= 5


def test_created_files_count_as_open(tmp_path: Path) -> None:
    disk = OsDisk()
    files = OpenFiles(disk, count_max=5)
    for number in range(50):
        files.add(disk.create(tmp_path / str(number), 100, allocate=False))
    assert descriptor_count(tmp_path) == 5
    assert files.get(tmp_path / "0").pread(9, 0) == bytes(9)


def test_the_limit_of_open_files_can_be_lowered(tmp_path: Path) -> None:
    disk = OsDisk()
    files = OpenFiles(disk, count_max=50)
    for number in range(50):
        disk.write_bytes(tmp_path / str(number), b"%d" % number)
        files.get(tmp_path / str(number))
    assert descriptor_count(tmp_path) == 50
    files.limit(5)
    assert descriptor_count(tmp_path) == 5
    assert files.get(tmp_path / "49").pread(9, 0) == b"49"
    for number in range(50):
        files.get(tmp_path / str(number))
    assert descriptor_count(tmp_path) == 5


def test_many_files_are_synced_in_parallel_without_deleted_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = OsDisk()
    paths = [tmp_path / str(number) for number in range(30)]
    for path in paths:
        disk.create(path, 100, allocate=False)
    synced: list[str] = []
    sync = OsFile.sync

    def note(self: OsFile) -> None:
        if self.path == broken:
            raise OSError(errno.EIO, "broken")
        synced.append(self.path.name)
        sync(self)

    broken = None
    monkeypatch.setattr(OsFile, "sync", note)
    for number in (0, 7, 29):
        paths[number].unlink()
    disk.sync_all(paths)
    assert sorted(synced) == sorted(str(number) for number in range(30) if number not in (0, 7, 29))
    broken = paths[11]
    with pytest.raises(OSError, match="broken"):
        disk.sync_all(paths)


TRIER = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
except OSError:
    sys.exit(3)
"""
HOLDER = """
import fcntl, sys, time
f = open(sys.argv[1], "w+b")
fcntl.lockf(f, fcntl.LOCK_EX, 1, 0)
print("locked", flush=True)
sys.stdin.read()
"""


async def test_a_lock_of_another_process_is_respected_and_ends_with_it(tmp_path: Path) -> None:
    """The same POSIX lock on byte 0 that Java's FileChannel.lock takes."""
    lock_file = tmp_path / "lock"
    holder = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", HOLDER, str(lock_file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(StoreLocked):
            async with open_message_store(small_options(root=tmp_path)):
                pass
    finally:
        holder.stdin.close()
        holder.wait(10)
        holder.stdout.close()
    async with open_message_store(small_options(root=tmp_path)):
        assert lock_file.read_bytes() == b"lock"
        with pytest.raises(StoreLocked):  # of this process too, which POSIX locks alone would not tell
            async with open_message_store(small_options(root=tmp_path)):
                pass
        with pytest.raises(StoreLocked):
            async with open_message_store(small_options(root=tmp_path)):
                pass
        other = subprocess.run([sys.executable, "-c", TRIER, str(lock_file)], check=False)  # noqa: ASYNC221
        assert other.returncode == 3
    async with open_message_store(small_options(root=tmp_path)):
        pass


async def test_two_stores_can_not_have_one_commitlog(tmp_path: Path) -> None:
    """Both appended to it, if only their other files were apart."""
    log = tmp_path / "disk" / "log"
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    async with open_message_store(small_options(root=tmp_path / "a", commitlog_directory=log)):
        for path in (log, tmp_path / "link" / "log"):
            with pytest.raises(StoreLocked) as caught:
                async with open_message_store(small_options(root=tmp_path / "b", commitlog_directory=path)):
                    pass
            assert caught.value.lock_file == path
    async with open_message_store(small_options(root=tmp_path / "b", commitlog_directory=log)):
        pass


def test_a_process_ends_that_holds_a_large_deleted_file_until_then(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from ha.store.files import OsDisk
disk, path = OsDisk(), Path(sys.argv[1])
file = disk.create(path, 64 << 20, allocate=False)
file.map(64 << 20)
disk.unlink(path)
held = [file]
held.append(held)
del file
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a")], timeout=30, check=True)


async def test_segments_roll_under_load_on_a_real_disk(tmp_path: Path) -> None:
    options = small_options(root=tmp_path, segment_size=1 << 14, queue_entry_count=1000, index_entry_count=4000)
    async with open_message_store(options) as store:

        async def produce(first: int) -> None:
            for number in range(first, first + 200, 10):
                results = await store.log.put(
                    [message(number + n, size=n * 50, queue_id=first // 200) for n in range(10)]
                )
                assert {result.status for result in results} == {PutStatus.PUT_OK}

        async with trio.open_nursery() as nursery:
            for first in range(0, 800, 200):
                nursery.start_soon(produce, first)
        assert len(store.log.segments) > 10
        assert len(await records(store)) == 800
        await check_derived(store)
    async with open_message_store(options) as store:
        assert len(await records(store)) == 800
        await check_derived(store)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "halog-test", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"can't mount a small disk: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def test_a_full_file_system_refuses_puts_until_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))
    options = small_options(
        root=small_disk, segment_size=1 << 17, queue_entry_count=5000, index_slot_count=500, index_entry_count=20_000,
        allocate_retry_s=0.05,
    )  # fmt: skip
    async with open_message_store(options) as store:
        stored = 0
        while True:
            [result] = await store.log.put([message(stored, size=1000)])
            if result.status is not PutStatus.PUT_OK:
                break
            stored += 1
            await trio.lowlevel.checkpoint()
        assert result.status is PutStatus.CREATE_MAPPED_FILE_FAILED
        assert "no space left" in result.remark
        assert stored > 100
        assert len(await records(store)) == stored
        ballast.unlink()
        await trio.sleep(0.1)
        [result] = await store.log.put([message(stored, size=1000)])
        assert result.status is PutStatus.PUT_OK
        with trio.fail_after(10):
            await check_derived(store)
    async with open_message_store(options) as store:
        assert len(await records(store)) == stored + 1
        await check_derived(store)


def test_another_thread_frees_the_space_of_a_large_deleted_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing: dict[int, threading.Thread] = {}
    close = os.close

    def noted(descriptor: int) -> None:
        closing[descriptor] = threading.current_thread()
        close(descriptor)

    disk, path, size = OsDisk(), tmp_path / "file", 64 << 20
    file = disk.create(path, size, allocate=False)
    assert isinstance(file, OsFile)
    descriptor = file._descriptor
    read = file.map(size)[10:20]
    disk.unlink(path)
    monkeypatch.setattr(os, "close", noted)
    del file
    time.sleep(0.3)
    assert bytes(read) == bytes(10)
    assert descriptor not in closing, "a view of it is still held"
    del read
    latest = time.monotonic() + 10
    while descriptor not in closing and time.monotonic() < latest:
        time.sleep(0.01)
    assert closing[descriptor] is not threading.main_thread()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_pages_of_large_memory_are_allocated_in_advance() -> None:
    """The event loop writes to it later, and must not wait for page faults."""
    step = resource.getpagesize()
    count = 5000

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    before = faults()
    memory = zeros(count * step)
    made = faults()
    assert memory[::step].tobytes() == bytes(count)
    for position in range(0, count * step, step):
        memory[position] = 1
    assert faults() - made < count // 10 < made - before


@contextmanager
def hasty_threads() -> Iterator[None]:
    """Makes threads take turns as often as possible."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


def beside_a_worker(work: Callable[[], None], others: Callable[[], None]) -> None:
    """Calls `others` repeatedly for as long as a thread calls `work`, two seconds."""
    ends_at = time.monotonic() + 2.0

    def repeat(call: Callable[[], None]) -> None:
        while time.monotonic() < ends_at:
            call()

    with hasty_threads(), ThreadPoolExecutor(1) as threads:
        working = threads.submit(repeat, work)
        repeat(others)
        working.result()


def test_workers_and_the_event_loop_share_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention opens the files of all queues in a worker, while dispatch writes."""
    paths = [Path(f"/consumequeue/T/0/{number}") for number in range(3)]
    inodes = {path: Inode(bytearray()) for path in paths}
    disk = MemoryDisk(inodes)
    opened = {path: disk.open(path) for path in paths}
    monkeypatch.setattr(disk, "open", opened.__getitem__)
    files = OpenFiles(disk, count_max=1)

    def get_all() -> None:
        for path in paths:
            assert files.get(path) is opened[path]

    beside_a_worker(get_all, get_all)


def test_checksums_are_loaded_by_a_worker_while_the_event_loop_asks_for_unwritten_ones() -> None:
    checksums = Checksums(MemoryDisk(), Path("/checksums"), 4096, 1024)

    def load_all() -> None:
        for number in range(2 * LOADED_COUNT_MAX):
            checksums.load(number * 4096)

    def ask() -> None:
        assert not checksums.is_dirty

    beside_a_worker(load_all, ask)


def test_a_removal_of_checksums_that_failed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache shows the removed entries as removed, although the disk has them."""
    size, block, removed_at = 1 << 20, 1024, 700
    disk = OsDisk()
    sums = Checksums(disk, tmp_path, size, block)
    for number in range(size // block):
        sums.load(0).set(number, number, block)
    sums.write_back()
    file_size = sums.path_of(0).stat().st_size

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            sums.truncate(removed_at * block)
    written = bytearray(file_size)
    pwrite = os.pwrite

    def note(descriptor: int, chunk: memoryview, position: int) -> int:
        written[position : position + len(chunk)] = b"w" * len(chunk)
        return pwrite(descriptor, chunk, position)

    monkeypatch.setattr(os, "pwrite", note)
    restarted = Checksums(disk, tmp_path, size, block)
    restarted.truncate(removed_at * block)
    first = GROUP_SIZE * (1 + removed_at // GROUP_ENTRIES)
    assert all(written[first:])
    assert not any(written[:first])
    assert restarted.known_end() == removed_at * block
