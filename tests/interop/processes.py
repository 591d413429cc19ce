"""Child processes of one test: started, watched line by line, and always ended, by their own pid.

A process is ready when its standard output has a certain line: an event, not a polled port. Output goes to files below
the test's folder, which the report of a failed test quotes.
"""

import math
import os
import re
import shutil
import signal
import socket
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

import trio

T = TypeVar("T")

# Below Linux's ephemeral range (from 32768), so that no outgoing connection takes one while a broker restarts, and
# above those of `scripts.nodes`.
_PORTS = range(25_000, 32_000, 5)
_END_TIMEOUT_S = 20.0


class ChildError(Exception):
    """A process ended, or printed nothing for too long, while the test waited for one of its lines."""


class Child:
    """One running process. `log` has its standard output, `log.with_suffix(".err")` its standard error."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        assert popen.stdin is not None
        assert popen.stdout is not None
        self.name = name
        self.pid = popen.pid
        self.log = log
        self.stdin = trio.lowlevel.FdStream(os.dup(popen.stdin.fileno()))
        popen.stdin.close()
        self.ended = trio.Event()
        self.exit_code: int | None = None
        self._popen = popen
        self._lines: list[str] = []
        self._grown = trio.Event()

    async def wait_line(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """Waits for the first line of standard output, from the start, that matches `pattern`."""
        seen = 0
        with trio.move_on_after(timeout_s):
            while True:
                for line in self._lines[seen:]:
                    if match := re.search(pattern, line):
                        return match
                seen = len(self._lines)
                if self.ended.is_set():
                    reason = f"{self.name} ended with {self.exit_code} before it printed {pattern!r}"
                    raise ChildError(f"{reason}\n{self.tail()}")
                await self._grown.wait()
        raise ChildError(f"{self.name} did not print {pattern!r} within {timeout_s} s\n{self.tail()}")

    def send_signal(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            self._popen.send_signal(number)

    async def kill(self) -> None:
        """Sends SIGKILL, and waits for the end of the process."""
        self.send_signal(signal.SIGKILL)
        await self.ended.wait()

    async def stop(self, timeout_s: float = _END_TIMEOUT_S) -> int:
        """Sends SIGTERM, then SIGKILL after `timeout_s`; returns the exit code."""
        self.send_signal(signal.SIGCONT)  # a stopped process does not receive SIGTERM
        self.send_signal(signal.SIGTERM)
        with trio.move_on_after(timeout_s):
            await self.ended.wait()
        await self.kill()
        assert self.exit_code is not None
        return self.exit_code

    def tail(self, line_count: int = 40) -> str:
        parts = []
        for path in (self.log, self.log.with_suffix(".err")):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            if lines:
                parts.append("\n".join([f"--- {path.name}", *lines[-line_count:]]))
        return "\n".join(parts)

    async def _watch(self, on_line: Callable[[str], None] | None) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, on_line)
            pid_fd = os.pidfd_open(self.pid)
            try:
                await trio.lowlevel.wait_readable(pid_fd)
            finally:
                os.close(pid_fd)
            self.exit_code = self._popen.wait()
        await self.stdin.aclose()
        self.ended.set()
        self._wake()

    async def _read(self, on_line: Callable[[str], None] | None) -> None:
        assert self._popen.stdout is not None
        rest = b""
        async with trio.lowlevel.FdStream(os.dup(self._popen.stdout.fileno())) as stream:
            self._popen.stdout.close()
            with self.log.open("ab") as log:
                async for chunk in stream:
                    log.write(chunk)
                    log.flush()
                    *lines, rest = (rest + chunk).split(b"\n")
                    for raw in lines:
                        line = raw.decode(errors="replace")
                        if on_line is None:
                            self._lines.append(line)
                        else:
                            on_line(line)
                    self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = trio.Event()


class Children:
    """The processes of one test, which may write to `folder`."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self.folder = folder
        self.all: list[Child] = []
        self._nursery = nursery

    def start_soon(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Child:
        """Starts a process; this object owns the task that watches it."""
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{len(self.all):02d}-{name}.out"
        # Should the test run itself be killed, the kernel ends what it started. The death signal is tied to the thread
        # that forked, which is why Popen is called here and not in one of trio's short-lived worker threads.
        guard = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        with log.with_suffix(".err").open("wb") as errors:
            popen = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        child = Child(name, popen, log)
        self.all.append(child)
        self._nursery.start_soon(child._watch, on_line)
        return child


@asynccontextmanager
async def open_children(folder: Path) -> AsyncIterator[Children]:
    """Processes that are killed when the block ends; for a clean stop use `Child.stop`."""
    async with trio.open_nursery() as nursery:
        children = Children(folder, nursery)
        try:
            yield children
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_TIMEOUT_S):
                for child in reversed(children.all):
                    await child.kill()


def free_ports() -> int:
    """Returns a port p such that p-2 ("fast remoting"), p, p+1 (HA) and p+2 (administration) are free.

    No other test of the run gets it before the broker opens it: each test process has its own ports, and hands out the
    least recently used one.
    """
    for _ in range(len(_own_ports)):
        _own_ports.rotate()
        port = _own_ports[0]
        if all(_is_free(port + step) for step in (-2, 0, 1, 2)):
            return port
    raise AssertionError(f"no four free ports together among {len(_own_ports)} places from {_PORTS[0]} to {_PORTS[-1]}")


def _share_of_ports() -> deque[int]:
    """This test process's share of the ports, in random order, because another test run may use the same machine."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = _PORTS[worker :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    return deque(2 + place for place in SystemRandom().sample(share, len(share)))


_own_ports = _share_of_ports()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


async def eventually(what: str, probe: Callable[[], T | None], timeout_s: float, interval_s: float = 0.1) -> T:
    """Polls `probe` until it is true, for changes by other processes that send no event; returns its value. Fails with
    `what`."""
    with trio.move_on_after(timeout_s):
        for _ in range(math.ceil(timeout_s / interval_s) + 1):
            if value := probe():
                return value
            await trio.sleep(interval_s)
    raise AssertionError(f"not within {timeout_s} s: {what}")
