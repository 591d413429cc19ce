"""Runs an entry point's service: arguments, configuration, logging, signals, exit code.

    exit code   meaning
    0           stopped cleanly by a signal, or --help or --print-config was given
    2           invalid command line
    65          the store is damaged beyond automatic recovery; nothing was deleted
    69          a port or the store's lock is in use
    70          a bug in halog (the traceback is on stderr), or shutdownTimeout expired
    74          the disk failed or is full, or a file can't be read or written
    78          invalid configuration, or another process of the group uses the broker ID
    130         ended at once by a second signal, without a flush; the next start recovers

Must not know any component. Signals use plain handlers instead of a task, because the second signal must end the
process even if the event loop is blocked.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

import trio

from ha.config import Config, NameServerConfig, ProxyConfig, load_config, render
from ha.errors import AddressInUse, ConfigError, CorruptLog, DamagedBytes, DiskFailed, DiskFull, HalogError, StoreLocked
from ha.json_log import JsonFormatter
from ha.log_lines import LogLines
from ha.text_log import TextFormatter, escape, indented

GROUP_DEPTH_MAX = 50
"""Maximum depth of nested exception groups in the traceback of a bug."""

logger = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_DAMAGED = 65
EXIT_TAKEN = 69
EXIT_BUG = 70
EXIT_DISK = 74
EXIT_CONFIG = 78
EXIT_AT_ONCE = 130

_DRAIN_TIMEOUT_S = 5.0
TO_TRY = {"preallocateCommitLog": "false"}
"""Defaults of a broker node without any configuration: it is probably only being tried out, and should take little disk
space."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

C = TypeVar("C", Config, NameServerConfig, ProxyConfig)

Open = Callable[[C], AbstractAsyncContextManager[str]]
"""Opens the service for a configuration and yields the READY line. Called once, after the configuration is checked, so
that --help and configuration errors don't import the service's modules."""


class Entry(Generic[C]):
    """An entry point: its name, its configuration type, and its service."""

    def __init__(
        self,
        name: str,
        struct: type[C],
        open_service: Open[C],
        *,
        defaults: Mapping[str, str] = {},
        unconfigured: Mapping[str, str] = {},
        later: str = "",
    ) -> None:
        """`defaults` are the entry point's own defaults, which every other source overrides. `unconfigured` are further
        defaults, used only if there is neither a configuration file nor any HA_… variable.

        `later`: name of a module that a worker thread imports after READY; "" for none. For a module that is likely to
        be needed soon, but not at the start.
        """
        self.name = name
        self.struct: type[C] = struct
        self.open_service: Open[C] = open_service
        self.defaults = defaults
        self.unconfigured = unconfigured
        self.later = later

    def main(self, arguments: list[str] | None = None) -> int:
        """Runs the service and returns the exit code. Raises SystemExit for --help (code 0) and for an invalid command
        line (code 2)."""
        stop = _StopSignals()
        options = self._parser().parse_args(arguments)
        settings: list[str] = list(options.set)
        if options.log_format:
            settings.append(f"logFormat={options.log_format}")
        try:
            loaded = load_config(
                self.struct,
                defaults=self.defaults,
                unconfigured=self.unconfigured,
                file=options.config,
                environment=os.environ,
                settings=settings,
            )
        except ConfigError as error:
            self._say(error)
            return EXIT_CONFIG
        if options.print_config:
            print(render(loaded.config), end="")
            return EXIT_STOPPED
        lines = log_to_stderr(loaded.config.log_format)
        if loaded.ignored:
            logger.warning("config.keys_ignored keys=%s", ",".join(loaded.ignored))
        raise_file_limit()
        return self._run(loaded.config, stop, lines)

    def _run(self, config: C, stop: _StopSignals, lines: LogLines) -> int:
        code = EXIT_STOPPED

        def failed(group: BaseExceptionGroup[BaseException], its_code: int) -> None:
            nonlocal code
            code = its_code
            for error in _leaves(group):
                self._say(error)

        try:
            try:
                trio.run(self._serve, config, stop, lines)
            finally:
                lines.drain(_DRAIN_TIMEOUT_S)  # before the final errors are printed
        except* ConfigError as group:
            failed(group, EXIT_CONFIG)
        except* (AddressInUse, StoreLocked) as group:
            failed(group, EXIT_TAKEN)
        except* (DiskFailed, DiskFull) as group:
            failed(group, EXIT_DISK)
        except* (CorruptLog, DamagedBytes) as group:
            failed(group, EXIT_DAMAGED)
        except* OSError as group:
            # With a file name, the error concerns a file that the store does not handle, such as the root directory.
            files, bugs = group.split(lambda error: isinstance(error, OSError) and error.filename is not None)
            if files is not None:
                failed(files, EXIT_DISK)
            if bugs is not None:
                _print_bugs(bugs)
                code = EXIT_BUG
        except* BaseException as group:
            _print_bugs(group)
            code = EXIT_BUG
        return code

    async def _serve(self, config: C, stop: _StopSignals, lines: LogLines) -> None:
        """Serves until the first signal, then closes within shutdownTimeout. A signal during the start cancels it."""
        starting = trio.CancelScope()
        is_started = False

        async def watch() -> None:
            await stop.first.wait()
            logger.info("process.stopping signal=%s", stop.name)
            _end_after(config.shutdown_timeout_ms / 1000, lines)
            if not is_started:
                starting.cancel()

        stop.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with starting:
                with _importing():
                    service = self.open_service(config)
                async with service as ready_line:
                    is_started = True  # no cancellation from here on: leaving this block closes everything cleanly
                    gc.collect()
                    gc.freeze()
                    with contextlib.suppress(OSError):  # the parent may have closed the pipe
                        print(ready_line, flush=True)
                    if self.later:
                        nursery.start_soon(trio.to_thread.run_sync, _import, self.later)
                    await stop.first.wait()
            nursery.cancel_scope.cancel()
        logger.info("process.stopped")

    def _say(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, HalogError) else f"{type(error).__name__}: {error}"
        for line in text.splitlines():
            print(f"{self.name}: {escape(line)}", file=sys.stderr)

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=self.name.replace(".", " "),
            description="Keys are RocketMQ's. --set overrides HA_… variables, which override the --config file.",
            allow_abbrev=False,
        )
        parser.add_argument(
            "--config", type=Path, metavar="FILE", help="properties file, such as RocketMQ's broker.conf"
        )
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="set a key; can be repeated"
        )
        parser.add_argument("--log-format", choices=("text", "json"), help="log format, same as --set logFormat=…")
        parser.add_argument(
            "--print-config", action="store_true", help="print all keys with their effective values and exit"
        )
        return parser


class _StopSignals:
    """Handles STOP_SIGNALS: each sets `first`, and the second SIGTERM or SIGINT ends the process at once.

    A terminal that is closed may send SIGHUP more than once, and its shell another signal. SIGHUP stays ignored if it
    was (nohup).
    """

    def __init__(self) -> None:
        self.first = trio.Event()
        self.name = ""
        self._is_requested = False
        self._token: trio.lowlevel.TrioToken | None = None
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._take)

    def connect(self) -> None:
        """Connects signals to `first`, including one that has already arrived. Call inside trio.run."""
        self._token = trio.lowlevel.current_trio_token()
        if self.name:
            self.first.set()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            if self._is_requested:
                os._exit(EXIT_AT_ONCE)
            self._is_requested = True
        self.name = self.name or signal.Signals(number).name
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self.first.set)


def _end_after(timeout_s: float, lines: LogLines) -> None:
    """Ends the process with EXIT_BUG if it still runs after `timeout_s`. Uses a thread, because the event loop or a
    disk may be blocked."""

    def end() -> None:
        logger.error('process.shutdown_timed_out timeout_s=%g hint="the next start recovers"', timeout_s)
        lines.drain(_DRAIN_TIMEOUT_S)
        os._exit(EXIT_BUG)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Disables garbage collection during the block, and permanently exempts all objects that exist at the block's end.

    Most of these belong to modules, which are never freed. A full collection blocks every task for 10 ms or more, and
    the imports in the block would trigger about a dozen.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import(module: str) -> None:
    with _importing():
        import_module(module)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def log_to_stderr(log_format: str) -> LogLines:
    """Configures logging to stderr: one line per record with UTC time, level, logger and text, or the same as JSON.

    Returns the writer of the lines; call its `drain` before the process ends.
    """
    # Without stderr, descriptor 2 belongs to the first opened file, which may be the store's.
    lines = LogLines(os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno())
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("trio.serve_listeners").addFilter(_AcceptErrorFilter())
    return lines


class _AcceptErrorFilter(logging.Filter):
    """Passes one record of failed accepts per _PAUSE_S seconds, without its traceback.

    Without free descriptors, Trio retries accept ten times a second and logs a traceback each time.
    """

    _PAUSE_S = 10.0

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + self._PAUSE_S
        record.exc_info = None
        return True


def raise_file_limit() -> None:
    """Raises the process's limit of open files to the hard limit: each segment, queue and connection uses one file
    descriptor. Does nothing if the system refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _print_bugs(bugs: BaseExceptionGroup[BaseException]) -> None:
    """Prints the whole traceback to stderr. Python's default depth is too small for the exception groups of nested
    nurseries."""
    whole = "".join(traceback.TracebackException.from_exception(bugs, max_group_depth=GROUP_DEPTH_MAX).format())
    print(indented(whole), file=sys.stderr)
