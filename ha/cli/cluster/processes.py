"""Starts and stops the processes of nodes, and chooses ports for them. Must be used only from the main thread."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

STOP_TIMEOUT_S = 20.0
_LINE_SIZE_MAX = 65536
_LOG_TAIL_SIZE_MAX = 16384
_PORTS = range(20_000, 25_000, 4)  # a broker opens listenPort - 2, too
_HOST = "127.0.0.1"

_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that starts this one has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a command to which the kernel sends SIGTERM when its parent ends, even by SIGKILL (PR_SET_PDEATHSIG, 1).

A pipe that a node watches for its parent's end would need a task in every server. This signal needs none, also works
for etcd, and is set in the child before it runs the command, so that no node is ever without it. The kernel sends it
when the thread that started the process ends, so only the main thread starts nodes.
"""


class NodeError(Exception):
    """A node can't be started, queried or stopped, the cluster did not become ready, or a port is not free.

    `what`: the problem; the exception's text also has the end of the process's log, if that is known. `exit_code`: that
    of the process (negative for a signal), or 69 (os.EX_UNAVAILABLE) if a given port is in use or `ha cluster down`
    takes too long; otherwise None.
    """

    def __init__(self, what: str, log_tail: str = "", exit_code: int | None = None) -> None:
        super().__init__(f"{what}\n{log_tail}" if log_tail else what)
        self.what = what
        self.exit_code = exit_code


class NodeProcess:
    """A process that prints a READY line when it serves. Its stderr is appended to `log_file`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_file: Path,
        *,
        directory: Path | None = None,
        has_ready: bool = True,
    ) -> None:
        """`command` starts with the path of its program, and runs in `directory`.

        `has_ready`: whether it prints a READY line; otherwise its stdout is appended to `log_file`, too.
        """
        self.name = name
        self.command = command
        self.log_file = log_file
        self.ready: dict[str, str] = {}
        """Fields of the READY line"""
        self._directory = directory
        self._has_ready = has_ready
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    @property
    def _popen(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    def spawn(self) -> None:
        """Starts the process. Raises OSError if that fails, or if the log file can't be opened."""
        self.ready = {}
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid()), *self.command],
                cwd=self._directory,
                stdout=subprocess.PIPE if self._has_ready else log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only the parent, which then stops all processes in order
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Waits for the READY line. Raises NodeError after `timeout_s`, or if the process ends without one."""
        line = self._read_line(time.monotonic() + timeout_s)
        if line is None:
            raise NodeError(f"{self.name} was not READY within {timeout_s:g} s", self.log_tail())
        if not line.startswith("READY"):
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(STOP_TIMEOUT_S)  # it closed its output, which nodes do only by ending
            code = self.exit_code
            raise NodeError(f"{self.name} did not start (exit code {code})", self.log_tail(), code)
        self.ready = dict(part.split("=", 1) for part in line.split()[1:] if "=" in part)

    def _read_line(self, deadline: float) -> str | None:
        """Returns the first line of the process's output, cut off at _LINE_SIZE_MAX bytes or where the output ends;
        None at the deadline."""
        stdout = self._popen.stdout
        assert stdout is not None
        line = b""
        while not line.endswith(b"\n") and len(line) < _LINE_SIZE_MAX:
            readable, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            byte = os.read(stdout.fileno(), 1)
            if not byte:
                break
            line += byte
        return line.decode(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process still runs."""
        self._popen.send_signal(number)

    def wait_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Waits for the end of the process after SIGTERM. Raises NodeError unless it exits with 0 within
        `timeout_s`."""
        try:
            code = self._popen.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            raise NodeError(f"{self.name} did not stop within {timeout_s:g} s of SIGTERM", self.log_tail()) from None
        if code != 0:
            raise NodeError(f"{self.name} stopped with exit code {code} instead of 0", self.log_tail(), code)

    def kill(self) -> None:
        """Kills the process if it still runs, waits for its end, and closes its output."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def log_tail(self) -> str:
        """Returns the last lines of the log, each with the name of the process."""
        return "\n".join(f"    {self.name}: {line}" for line in self._log_lines()[-12:])

    def last_error(self) -> str:
        """Returns what follows the first ": " in the log's last line, which says why a node ended; "" if there is no
        log."""
        lines = self._log_lines()
        return lines[-1].partition(": ")[2] if lines else ""

    def _log_lines(self) -> list[str]:
        if not self.log_file.exists():
            return []
        with self.log_file.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_TAIL_SIZE_MAX))
            return log.read().decode(errors="replace").splitlines()


@contextmanager
def reserved_ports(count: int, others: Collection[int] = ()) -> Iterator[list[int]]:
    """Yields `count` free ports on 127.0.0.1, none of `others`, that no concurrent call returns during the block.
    Raises NodeError if there are fewer.

    A node opens its ports seconds after they are chosen, and again at each start, so this function can't keep them
    bound. It binds the UDP ports with the same numbers instead.

    The ports are outside the range that the system uses for outgoing connections.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(found) == count:
                break
            if port in others:
                continue
            with suppress(OSError):
                stack.enter_context(_reserved(port))
                found.append(port)
        if len(found) < count:
            raise NodeError(f"fewer than {count} free ports between {_PORTS[0]} and {_PORTS[-1]}")
        yield found


@contextmanager
def reserved_exactly(ports: Sequence[int]) -> Iterator[list[int]]:
    """Yields these ports on 127.0.0.1, reserved as by `reserved_ports`. Raises NodeError with code 69 if one is in
    use."""
    with ExitStack() as stack:
        for port in ports:
            try:
                stack.enter_context(_reserved(port))
            except OSError as error:
                what = f"can't use port {port}: {error.strerror}; choose another --port"
                raise NodeError(what, exit_code=os.EX_UNAVAILABLE) from None
        yield list(ports)


@contextmanager
def _reserved(port: int) -> Iterator[None]:
    """Reserves a port during the block. Raises OSError if it is in use or reserved."""
    with socket.socket(type=socket.SOCK_DGRAM) as held:
        held.bind((_HOST, port))
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as nodes do: connections that ended don't count
            probe.bind((_HOST, port))
        yield
