"""Output of commands (tables, progress bars, JSON, sizes), and handling of Ctrl-C.

Text from a log or a peer passes through `safe`, `safe_json` or a console of this module before it reaches a terminal:
control characters and bidirectional overrides are escaped.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ha.cli.pipes import drop_output, unread_output_dropped
from ha.text_log import TextFormatter

WIDTH = 100_000
"""Line width in characters, so large that nothing is cut off or wrapped, except by a terminal."""
ShowProgress = Callable[[str, int, int], None]
"""Called with the name of a stage, the amount done, and the total."""
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def safe(text: str) -> str:
    """Returns `text` as one line that is safe for a terminal."""
    return _UNSAFE.sub(_escape, text)


def safe_json(value: Any) -> bytes:
    """Returns `value` as one line of JSON that is safe for a terminal; escapes don't change what JSON parsers read.

    Characters that can't be encoded as UTF-8 become "?".
    """
    try:
        encoded = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:  # the name of a file that is not UTF-8
        plain = msgspec.to_builtins(value, enc_hook=str)
        encoded = json.dumps(plain, ensure_ascii=False).encode(errors="replace")
    if encoded.isascii() and b"\x7f" not in encoded:
        return encoded  # the encoder escapes control characters below U+0020
    return _UNSAFE_IN_JSON.sub(_escape, encoded.decode(errors="replace")).encode()


def print_json(value: Any) -> None:
    """Prints `value` as indented JSON."""
    with unread_output_dropped():
        sys.stdout.buffer.write(msgspec.json.format(safe_json(value), indent=2) + b"\n")
        sys.stdout.buffer.flush()


class _PlainConsole(Console):
    """Prints texts literally, also in tables: without markup, and with each line escaped by `safe`."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escapes a text; rich calls this for each text."""
        return super().render_str("\n".join(map(safe, text.split("\n"))), **options)

    def on_broken_pipe(self) -> None:
        """Discards further output; rich calls this if the reader of the output is gone."""
        drop_output(self.file.fileno())


def output() -> Console:
    """Returns the console for results (standard output)."""
    return _PlainConsole(highlight=False, markup=False, emoji=False, width=WIDTH)


def notices() -> Console:
    """Returns the console for messages other than results (standard error)."""
    return _PlainConsole(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


@contextmanager
def bars() -> Iterator[ShowProgress]:
    """Shows a progress bar per stage on standard error if that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown_bars:
        shown: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in shown:
                shown[stage] = shown_bars.add_task(stage, amount="")
            text = f"{amount(done)} of {amount(total)}"
            shown_bars.update(shown[stage], completed=done, total=max(total, 1), amount=text)

        yield show


@contextmanager
def warnings_shown(name: str = "ha.client") -> Iterator[None]:
    """Shows the SDK's warnings (those of the logger `name`) on standard error during the block, for commands that
    continue while a server can't be reached or a message can't be read."""
    logger, handler = logging.getLogger(name), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ha: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def events_shown(name: str) -> Iterator[ShowProgress]:
    """Shows the log lines of the logger `name` on standard error during the block, for services. Yields a function that
    ignores progress."""
    logger, handler = logging.getLogger(name), logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lambda stage, done, total: None
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM or Ctrl-C sets, for a clean end; a second signal raises KeyboardInterrupt."""
    stop = threading.Event()

    def ask(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def amount(count: float) -> str:
    """Formats a count in a few characters: 950, 1.5k, 20.0M, 200M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 1000 or unit == "T":
            return f"{count:.0f}{unit}" if not unit or count >= 100 else f"{count:.1f}{unit}"
        count /= 1000
    raise AssertionError


def size(byte_count: int | None) -> str:
    """Formats a number of bytes: 950 bytes, 1.5 KiB; "unknown" for None."""
    if byte_count is None:
        return "unknown"
    left = float(byte_count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if left < 1024:
            return f"{left:,.0f} {unit}" if unit == "bytes" else f"{left:,.1f} {unit}"
        left /= 1024
    return f"{left:,.1f} TiB"


def duration(seconds: float) -> str:
    """Formats a duration: 3 d 4 h, 4 h 5 min, 5 min, 6 s."""
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
