"""halog as a user starts it: one process, its READY line, its log, its signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

READY_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 30.0


class Process:
    """`python -m MODULE ARGUMENTS` in `directory`. Killed at the end of the block if it still runs."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        directory: Path,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix`: a command that runs the rest of its arguments in its own place, such as `ip netns exec NAME`."""
        self.directory = directory
        self._log = (directory / f"{module}.log").open("a+")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HA_")}
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments],
            cwd=directory,
            env={**inherited, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self._log.close()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> dict[str, str]:
        """The fields of the READY line; AssertionError with the log if there is none."""
        watchdog = threading.Timer(timeout_s, self.popen.kill)
        watchdog.start()
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        watchdog.cancel()
        assert line.startswith("READY "), f"{line!r}, exit code {self.popen.poll()}\n{self.log()}"
        return {"line": line, **dict(field.split("=", 1) for field in line.split()[1:])}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.popen.send_signal(number)

    def wait_exit(self, timeout_s: float = EXIT_TIMEOUT_S) -> int:
        """The exit code; subprocess.TimeoutExpired."""
        return self.popen.wait(timeout_s)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_exit()

    def log(self) -> str:
        """All that it has written to stderr."""
        self._log.seek(0)
        return self._log.read()


FREE_PORTS = ("--set", "listenPort=0", "--set", "mappedFileSizeCommitLog=1048576", "--set", "maxHashSlotNum=1000",
              "--set", "maxIndexNum=4000")  # fmt: skip
"""A broker on ports that the system chooses, with small files."""
