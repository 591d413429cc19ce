"""`ha produce`: sends messages from the command line, a file or standard input, or generated ones."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import anyio.to_thread
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ha.cli.exits import EXIT_DONE, EXIT_STORED_WEAKLY, UsageError
from ha.cli.flags import LOCAL, PLAIN, ClusterFlags, TlsFlags, check_timeout
from ha.cli.pipes import unread_output_dropped
from ha.cli.showing import notices, safe, safe_json
from ha.client import ClientOptions, Message, Producer, SendResult, SendStatus

_CHUNK_SIZE = 64 * 1024


def produce(
    topic: str,
    /,
    *,
    body: Annotated[str | None, Parameter(help="Body of the message.")] = None,
    file: Annotated[Path | None, Parameter(help="Send each line of this file.")] = None,
    stdin: Annotated[bool, Parameter(negative=(), help="Send each line of standard input.")] = False,
    count: Annotated[
        int | None, Parameter(help="Number of messages to send, only with --body or --size. Default: 1.")
    ] = None,
    size: Annotated[int | None, Parameter(help="Send generated messages of this size in bytes.")] = None,
    skip: Annotated[int, Parameter(help="Skip the first N messages (resume an earlier run).")] = 0,
    tag: Annotated[str | None, Parameter(help="Tag of the messages.")] = None,
    key: Annotated[
        tuple[str, ...], Parameter(help="Key of the messages, for lookups. Can be repeated.", negative=())
    ] = (),
    group: Annotated[str, Parameter(help="Producer group.")] = "halog-cli",
    in_flight: Annotated[int, Parameter(help="Maximum number of messages in flight.")] = 64,
    timeout: Annotated[float, Parameter(help="Timeout per message including retries, in seconds.")] = 10.0,
    json: Annotated[bool, Parameter(negative=(), help="Print each result as one line of JSON.")] = False,
    cluster: ClusterFlags = LOCAL,
    tls: TlsFlags = PLAIN,
) -> int:
    """Send messages to TOPIC.

    If it stops early, it prints how to resume. Exit codes: 0 every message SEND_OK; 1 rejected by the broker; 2 usage;
    3 all stored, some with another status than SEND_OK; 69 no name server or broker reachable, or no response in time;
    130 interrupted.
    """
    chosen = sum((body is not None, file is not None, stdin, size is not None))
    if chosen > 1:
        raise UsageError("use only one of --body, --file, --stdin and --size")
    if count is None:
        count = 1
    elif body is None and size is None:
        raise UsageError("--count requires --body or --size")
    if count < 1 or in_flight < 1 or (size is not None and size < 1):
        raise UsageError("--count, --size and --in-flight must be at least 1")
    if skip < 0:
        raise UsageError("--skip must not be negative")
    check_timeout(timeout)
    if chosen == 0 and sys.stdin.isatty():
        raise UsageError("no message: use --body TEXT, --file FILE, --size BYTES, or lines on standard input")

    if file is not None and not file.is_file():
        reason = "not a regular file; use --stdin" if file.exists() else "no such file"
        raise UsageError(f"--file {file}: {reason}")

    async def messages() -> AsyncIterator[Message]:
        left = skip
        async for each in bodies():
            left -= 1
            if left < 0:
                yield Message(topic, each, tags=tag, keys=key)

    async def bodies() -> AsyncIterator[bytes]:
        if body is not None:
            for _ in range(count):
                yield os.fsencode(body)  # preserves bytes of the command line that are not UTF-8
        elif size is not None:
            for number in range(count):
                yield (b"%010d " % number * (size // 11 + 1))[:size]
        elif file is not None:
            with file.open("rb") as opened:
                for line in lines(opened):
                    yield line
        else:
            async for line in _lines_of_stdin():
                yield line

    total = max(0, count - skip) if body is not None or size is not None else None
    work = _Work(messages(), skip, total, in_flight, json)
    options = ClientOptions(
        send_timeout_s=timeout, credentials=cluster.credentials(), tls=tls.client_tls(), retry_unreachable=False
    )
    anyio.run(work.run, cluster.addresses(), group, options, backend="trio")
    return EXIT_DONE if set(work.statuses) <= {SendStatus.SEND_OK} else EXIT_STORED_WEAKLY


def lines(opened: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the lines without line ends, and skips empty lines."""
    for line in opened:
        stripped = line.rstrip(b"\r\n")
        if stripped:
            yield stripped


async def _lines_of_stdin() -> AsyncIterator[bytes]:
    """Yields the lines of standard input as they arrive, so that they are sent while the next one is awaited."""
    rest = b""
    while chunk := await anyio.to_thread.run_sync(os.read, sys.stdin.fileno(), _CHUNK_SIZE, abandon_on_cancel=True):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in lines(iter(whole)):
            yield line
    for line in lines(iter([rest])):
        yield line


def _nothing() -> None:
    """Used instead of advancing a progress bar if there is none."""


class _Work:
    """Sends `messages`, up to `in_flight` at a time, and counts statuses."""

    def __init__(
        self, messages: AsyncIterator[Message], skipped: int, total: int | None, in_flight: int, json: bool
    ) -> None:
        self.statuses: Counter[SendStatus] = Counter()
        self._messages = messages
        self._taking = anyio.Lock(fast_acquire=True)
        self._begun = skipped
        self._in_flight_numbers: set[int] = set()
        """Numbers, from 0, of the messages that were taken and are not known to be stored"""
        self._is_complete = False
        self._total = total
        self._in_flight = in_flight
        self._json = json
        self._last: SendResult | None = None

    async def run(self, servers: list[str], group: str, options: ClientOptions) -> None:
        console = notices()
        columns = (TextColumn("sending"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        wants_bar = console.is_terminal and self._total != 1
        started = time.monotonic()
        try:
            with Progress(*columns, console=console, transient=True) if wants_bar else nullcontext() as bar:
                advance = partial(bar.advance, bar.add_task("", total=self._total)) if bar else _nothing
                async with (
                    Producer(servers, group=group, options=options) as producer,
                    anyio.create_task_group() as tasks,
                ):
                    for _ in range(min(self._in_flight, self._total or self._in_flight)):
                        tasks.start_soon(self._send, producer, advance)
            self._is_complete = True
        finally:
            self._summarise(console, time.monotonic() - started)

    async def _next(self) -> Message | None:
        async with self._taking:
            return await anext(self._messages, None)

    async def _send(self, producer: Producer, advance: Callable[[], None]) -> None:
        while (message := await self._next()) is not None:
            number = self._begun
            self._begun += 1
            self._in_flight_numbers.add(number)
            try:
                self._last = result = await producer.send(message)
            except ValueError as error:
                raise UsageError(str(error)) from None
            self._in_flight_numbers.remove(number)
            self.statuses[result.status] += 1
            advance()
            if self._json:
                with unread_output_dropped():
                    sys.stdout.buffer.write(safe_json(result) + b"\n")
        with unread_output_dropped():
            sys.stdout.buffer.flush()

    def _summarise(self, console: Console, seconds: float) -> None:
        sent = sum(self.statuses.values())
        if sent == 1 and self._last is not None and not self._json:
            result = self._last
            remark = result.remark and f"  {safe(result.remark)}"
            print(
                f"{result.status.name} {result.message_id} {result.queue.topic}/{safe(result.queue.broker_name)}/"
                f"{result.queue.queue_id}@{result.queue_offset}{remark}"
            )
        elif sent > 1 or (sent == 0 and self._total != 1):
            counts = ", ".join(f"{number:,} {status.name}" for status, number in self.statuses.items()) or "0"
            console.print(f"sent {counts} in {seconds:.1f} s ({sent / max(seconds, 1e-9):,.0f}/s)")
            if self._last is not None and self._last.remark:
                console.print(f"last remark: {safe(self._last.remark)}")
        first = min(self._in_flight_numbers, default=self._begun)
        if not self._is_complete and first > 0:
            again = f"; up to {self._begun - first:,} of the next messages may already be stored" * (
                self._begun > first
            )
            console.print(f"ha: incomplete; resume with --skip {first}{again}")
