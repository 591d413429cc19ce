"""Runs a master for tests, in a separate process on ports that the system chooses.

    with ha.testing.running_master(Path("test-master")) as master:
        …  # connect to master.name_server_address

ha/pytest_plugin.py makes a fixture of `running_master`. The master's process ends with the block, and also when the
process that started it ends or is killed, because it stops when its standard input is closed. A separate process is not
affected by patches of a test, for example of the clock, and does not use the test's event loop. Only this module runs
`python -m ha.testing`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ha.config import Config

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
"""Time limit for a clean stop, in seconds, after which the process is killed."""

_LOG_SHOWN_BYTES = 4000
_SETTINGS = {
    "listenPort": "0",
    "brokerName": "test",
    "shutdownTimeout": "5000",
    # Small files: a few MiB on disk, and room for a body of maxMessageSize.
    "mappedFileSizeCommitLog": str(8 << 20),
    "mappedFileSizeConsumeQueue": "200000",
    "maxHashSlotNum": "10000",
    "maxIndexNum": "40000",
}


@dataclass(frozen=True)
class Master:
    """A running master. Addresses are host:port."""

    name_server_address: str
    """Address for `ha.client`, and other clients of RocketMQ."""
    remoting_address: str
    admin_address: str
    """Address of the HTTP port with /status, /metrics and the dashboard."""
    directory: Path
    """Directory with the store and `master.log`."""


@contextmanager
def running_master(directory: Path, settings: Mapping[str, str] = {}) -> Iterator[Master]:
    """Runs a master with its own name server during the block, with its files in `directory`.

    `settings` are keys of broker.conf (docs/configuration.md), such as {"brokerRole": "SYNC_MASTER"}. By default, files
    are small and the system chooses the ports. Environment variables (HA_…) have no effect. A directory can be used
    again: the master then has the messages that were stored before.

    Raises RuntimeError with the end of `master.log` if the master ends before it is ready, or is not ready within
    START_TIMEOUT_S. After the block the master is stopped, and killed if that takes longer than STOP_TIMEOUT_S."""
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    log_file = directory / "master.log"
    keys = {**_SETTINGS, "storePathRootDir": str(directory / "store"), **settings}
    command = [sys.executable, "-m", "ha.testing", *(f"--set={key}={value}" for key, value in keys.items())]
    with (
        log_file.open("ab") as log,
        subprocess.Popen(
            command,
            cwd=directory,  # -m would import modules of the caller's directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests, which then end the block
        ) as process,
    ):
        assert process.stdin is not None
        try:
            yield _started(process, directory, log_file)
        finally:
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            process.kill()


def _started(process: subprocess.Popen[bytes], directory: Path, log_file: Path) -> Master:
    """Waits for the line with the addresses. Raises RuntimeError if the process ends first, or after
    START_TIMEOUT_S."""
    assert process.stdout is not None
    waiting = select.poll()  # select() refuses descriptors above 1023
    waiting.register(process.stdout, select.POLLIN)
    readable = waiting.poll(START_TIMEOUT_S * 1000)
    line = process.stdout.readline() if readable else b""
    if not line:
        process.kill()
        reason = f"exit code {process.wait()}" if readable else f"not ready within {START_TIMEOUT_S:g} s"
        raise RuntimeError(f"the master did not start: {reason}\n{log_file.read_text()[-_LOG_SHOWN_BYTES:]}")
    return Master(**json.loads(line), directory=directory)


# ---- in the master's process


@asynccontextmanager
async def _serve(config: Config) -> AsyncIterator[str]:
    """Runs the master, and yields the line with its addresses."""
    from ha.node import open_master

    async with open_master(config) as node:
        addresses = {
            "name_server_address": node.name_server_address or config.name_server_addresses,
            "remoting_address": node.remoting_address,
            "admin_address": node.admin_address,
        }
        yield json.dumps(addresses)


def _stop_when_stdin_closes() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> int:
    from ha.config import Config
    from ha.config.loading import ENVIRONMENT_PREFIX, STANDARD_VARIABLES
    from ha.process import Entry

    for name in list(os.environ):
        if name.startswith(ENVIRONMENT_PREFIX) or name in STANDARD_VARIABLES:
            del os.environ[name]
    threading.Thread(target=_stop_when_stdin_closes, daemon=True).start()
    return Entry("ha.testing", Config, _serve).main()


if __name__ == "__main__":
    sys.exit(_main())
