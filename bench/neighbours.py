"""What else runs on the machine while a server is measured: processes that only compute, or one that fills the disk's
queue.

`python -m bench.neighbours FOLDER` writes and syncs a large file until it is stopped. After the first sync it prints
the rate as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.clients import RunError
from bench.measure import MIB

BUSY_COUNT = 6
FILE_BYTES = 1024 * MIB
SYNC_BYTES = 256 * MIB
CHUNK_BYTES = MIB
_START_S_MAX = 60.0
_WRITES = "write,writev,pwrite64,pwritev,pwritev2,sendto,fdatasync,fsync,sync_file_range,ftruncate,fallocate"
"""System calls of an event loop that may wait for the disk"""
SLOW_S = 0.02


@contextmanager
def busy_loops(folder: Path) -> Iterator[dict[str, int]]:
    """Runs BUSY_COUNT processes that compute, each in a session of its own, as those of other users would; yields their
    ids.
    """
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(BUSY_COUNT)]
    try:
        yield {f"busy loop {number}": process.pid for number, process in enumerate(running)}
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def saturated_disk(folder: Path) -> Iterator[dict[str, int]]:
    """Runs a process that writes and syncs files in `folder`; yields its id once the disk is busy."""
    command = [sys.executable, "-m", "bench.neighbours", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise RunError("the process that saturates the disk did not start")
        yield {"disk": process.pid}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_START_S_MAX)  # a sync can't be interrupted
        finally:
            process.kill()
            process.stdout.close()
            (folder / "neighbour").unlink(missing_ok=True)


def fill_disk(folder: Path) -> None:
    """Writes and syncs a file of FILE_BYTES in `folder` repeatedly, until the process is stopped."""
    chunk = os.urandom(CHUNK_BYTES)
    written, began = 0, time.monotonic()
    with (folder / "neighbour").open("wb", buffering=0) as file:
        while True:
            file.write(chunk)
            written += CHUNK_BYTES
            if written % SYNC_BYTES == 0:
                os.fsync(file.fileno())
                if written == SYNC_BYTES:
                    print(json.dumps({"mb_per_s": written / 1e6 / (time.monotonic() - began)}), flush=True)
            if written % FILE_BYTES == 0:
                file.seek(0)


@contextmanager
def traced_writes(pid: int, output: Path) -> Iterator[None]:
    """Records the duration of each write of the process's main thread, which runs its event loop, with strace.

    Raises RunError if strace is not installed, or can't attach to the process.
    """
    command = ["strace", "-p", str(pid), "-T", "-ttt", "-y", "-s", "0", "-e", f"trace={_WRITES}", "-o", str(output)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        raise RunError("strace is not installed") from None
    try:
        time.sleep(0.5)  # until it is attached
        if process.poll() is not None:
            raise RunError(f"strace can't attach to process {pid}")
        yield
    finally:
        process.send_signal(signal.SIGINT)  # lets it detach
        process.wait()


_CALL = re.compile(r"^\S+ (\w+)\((\d+)?(?:<([^>]*)>)?.* <(\d+\.\d+)>$")


def read_trace(text: str) -> dict[str, float]:
    """Returns the number of writes to files, how many took SLOW_S or more, and the longest, in milliseconds: of the
    log, and of all files. Sockets don't count.
    """
    seconds: dict[str, list[float]] = {"log": [], "file": []}
    for line in text.splitlines():
        match = _CALL.match(line)
        if match is None or not (match[3] or "").startswith("/"):
            continue
        seconds["file"].append(float(match[4]))
        if "/commitlog/" in match[3]:
            seconds["log"].append(float(match[4]))
    found: dict[str, float] = {}
    for what, each in seconds.items():
        found |= {
            f"{what}_writes": len(each),
            f"{what}_slow": sum(one >= SLOW_S for one in each),
            f"{what}_max_ms": max(each, default=0.0) * 1e3,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    fill_disk(parser.parse_args().folder)


if __name__ == "__main__":
    main()
