"""Checks of this machine by `ha doctor`: file descriptor limits, and a store directory with its disk."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ha.cli.doctor.checks import DISK_ERROR, DISK_WARNING, FILES_MIN
from ha.cli.doctor.findings import Finding, Weight
from ha.cli.exits import UsageError
from ha.cli.showing import size
from ha.protocol.record import RECORD_SIZE_MIN, Unparsable, scan_record
from ha.protocol.store_files import segment_start

WRITTEN_MAX = 64 << 20
WRITE_TIME_MAX_S = 3.0
_CHUNK_BYTES = 1 << 20
SLOW_BYTES_PER_S = 50 << 20
SLOW_SYNC_S = 0.1
_CHECK_DISK = "check with dmesg whether the disk fails, and with mount whether its file system has become read-only"


def examine_process(pid: int, label: str, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Checks the file descriptor limit of a node on this machine. Yields nothing if it can't be read."""
    try:
        limits = (proc / str(pid) / "limits").read_text()
        open_count = len(os.listdir(proc / str(pid) / "fd"))
    except OSError:
        return
    line = next((line for line in limits.splitlines() if line.startswith("Max open files")), "")
    words = line.split()
    if len(words) < 4 or not words[3].isdecimal():
        return
    limit = int(words[3])
    cure = "raise the limit with LimitNOFILE=1048576 in its systemd unit, or ulimit -n before it starts"
    if open_count > limit * 0.8:
        what = f"{open_count:,} of {limit:,} file descriptors are in use: new connections will soon be refused"
        yield Finding(check="file-limit", weight=Weight.ERROR, where=label, what=what, cure=cure)
    elif limit < FILES_MIN:
        what = f"its limit is {limit:,} file descriptors ({open_count:,} in use); RocketMQ recommends 655,350"
        yield Finding(check="file-limit", weight=Weight.WARNING, where=label, what=what, cure=cure)


def examine_own_limit() -> Iterator[Finding]:
    """Checks the file descriptor limit of nodes started from this shell."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < FILES_MIN:
        yield Finding(
            check="file-limit-here",
            weight=Weight.NOTE,
            where="this shell",
            what=f"the limit for nodes started from it is {limit:,} file descriptors",
            cure="run ulimit -n 1048576 before you start a node",
        )


def examine_directory(path: Path) -> Iterator[Finding]:
    """Checks free space and inodes at `path`. Raises UsageError if `path` does not exist or can't be read."""
    try:
        usage = shutil.disk_usage(path)
        files = os.statvfs(path)
    except OSError as error:
        raise UsageError(f"--store {path}: {error.strerror}") from None
    ratio = usage.used / usage.total if usage.total else 0.0
    if ratio >= DISK_WARNING:
        yield Finding(
            check="store-space",
            weight=Weight.ERROR if ratio >= DISK_ERROR else Weight.WARNING,
            where=str(path),
            what=f"its disk is {ratio:.0%} full, {size(usage.free)} free",
            cure="free space, lower fileReservedTime, or use a larger disk",
        )
    if files.f_files and files.f_favail < files.f_files * 0.05:
        yield Finding(
            check="store-inodes",
            weight=Weight.ERROR,
            where=str(path),
            what=f"{files.f_favail:,} of {files.f_files:,} inodes are free: "
            "soon no files can be created, although there is free space",
            cure="remove small files, or create the file system with more inodes",
        )


def examine_format(path: Path) -> Iterator[Finding]:
    """Checks that the log in the store directory `path` starts with a record of RocketMQ or halog.

    Yields nothing if there is no log yet. Raises UsageError if the user may not read it.
    """
    try:
        names = [name for name in os.listdir(path / "commitlog") if segment_start(name) is not None]
        if not names:
            return
        first = path / "commitlog" / min(names)
        with first.open("rb") as opened:
            head = opened.read(RECORD_SIZE_MIN)
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise UsageError(f"--store {path}: {error.strerror}") from None
    except OSError as error:
        yield Finding(
            check="store-read",
            weight=Weight.ERROR,
            where=str(path),
            what=f"its log can't be read: {error.strerror}",
            cure=f"{_CHECK_DISK}; ha log verify shows what can be read",
        )
        return
    found = scan_record(head, 0, len(head))
    if any(head) and isinstance(found, Unparsable):
        yield Finding(
            check="store-format",
            weight=Weight.ERROR,
            where=str(first),
            what=f"the log starts with {found.reason}, which is not a record of RocketMQ 4 or 5: another version "
            "wrote it, or its start is damaged",
            cure="start the version that wrote it and send its messages to this cluster, or give this node an "
            "empty directory; ha log verify shows whether it is damaged",
        )


def examine_speed(path: Path) -> tuple[dict[str, float] | None, list[Finding]]:
    """Writes up to 64 MiB for up to 3 s to a temporary file in `path`, with an fdatasync per MiB.

    Returns the figures by name (the names contain the units), and the findings. If the disk takes no more data, there
    are no figures, but a finding. Raises UsageError if `path` is no directory, or if the user may not write to it.
    """
    chunk = os.urandom(_CHUNK_BYTES)
    written = 0
    syncs: list[float] = []
    try:
        with tempfile.TemporaryFile(dir=path, prefix=".ha-doctor-") as file:
            begin = time.perf_counter()
            while written < WRITTEN_MAX and time.perf_counter() - begin < WRITE_TIME_MAX_S:
                written += os.write(file.fileno(), chunk)
                before = time.perf_counter()
                os.fdatasync(file.fileno())
                syncs.append(time.perf_counter() - before)
            took_s = time.perf_counter() - begin
    except (PermissionError, NotADirectoryError) as error:
        raise UsageError(f"--write-test: {path}: {error.strerror}") from None
    except OSError as error:
        failure = Finding(
            check="store-write",
            weight=Weight.ERROR,
            where=str(path),
            what=f"it can't be written to: {error.strerror}",
            cure=f"free space, or if there is enough, {_CHECK_DISK}",
        )
        return None, [failure]
    syncs.sort()
    figures = {
        "written_bytes": float(written),
        "bytes_per_s": written / took_s,
        "sync_median_s": syncs[len(syncs) // 2],
        "sync_max_s": syncs[-1],
    }
    found = []
    if figures["bytes_per_s"] < SLOW_BYTES_PER_S:
        found.append(
            Finding(
                check="store-speed",
                weight=Weight.WARNING,
                where=str(path),
                what=f"it writes {size(int(figures['bytes_per_s']))} per second with fsync",
                cure="use a local SSD or NVMe disk that nothing else writes to; check with iostat -x 1",
            )
        )
    if figures["sync_median_s"] > SLOW_SYNC_S:
        found.append(
            Finding(
                check="store-sync",
                weight=Weight.WARNING,
                where=str(path),
                what=f"an fsync of 1 MiB takes {figures['sync_median_s'] * 1000:.0f} ms (median), "
                f"{syncs[-1] * 1000:.0f} ms (maximum)",
                cure="with SYNC_FLUSH each send waits for it: use a disk with power-loss protection or ASYNC_FLUSH",
            )
        )
    return figures, found
