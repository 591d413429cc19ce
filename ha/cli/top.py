"""`ha top`: shows a cluster's nodes and the lag of its slaves, updated continuously."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ha.cli.admin_pages import LOCAL_ADMINS, AdminFlags
from ha.cli.exits import EXIT_DONE, EXIT_NOT_READY, EXIT_UNREACHABLE, UsageError
from ha.cli.flags import LOCAL, PLAIN, ClusterFlags, TlsFlags
from ha.cli.flow import Flow, NodeFlow
from ha.cli.node_pages import NodePages, fetch_node_pages
from ha.cli.showing import notices, output, print_json, safe
from ha.cli.status import nodes_table, slaves_table
from ha.cli.unreachable import explain_no_node

_INTERVAL_MIN_S = 0.1


def top(
    *,
    interval: Annotated[float, Parameter(help="Interval between updates, in seconds.")] = 2.0,
    once: Annotated[bool, Parameter(negative=(), help="Sample twice, print the result, and exit.")] = False,
    json: Annotated[bool, Parameter(negative=(), help="With --once: print the result as JSON.")] = False,
    cluster: ClusterFlags = LOCAL,
    admins: AdminFlags = LOCAL_ADMINS,
    tls: TlsFlags = PLAIN,
) -> int:
    """Watch nodes and slaves: offsets, bytes and time behind, rates, estimated time to catch up. Press q to quit.

    Finds the nodes like `ha status`. Exit codes: 0 quit with q or Ctrl-C; 2 usage (for example, no terminal); with
    --once as for `ha status`: 4 a node is not ready, 69 a node or name server can't be reached.
    """
    if not _INTERVAL_MIN_S <= interval <= 3600:
        raise UsageError(f"--interval must be from {_INTERVAL_MIN_S} to 3600 s")
    if json and not once:
        raise UsageError("--json requires --once")
    for check in (cluster.addresses, cluster.credentials, admins.checked, admins.token, tls.client_tls):
        check()  # reports invalid flags and files before the full-screen view starts

    def fetch() -> NodePages:
        return fetch_node_pages(cluster, admins, tls)

    if once:
        return _once(fetch, interval, json=json)
    if not sys.stdout.isatty():
        raise UsageError("ha top requires a terminal; use ha top --once, with --json for scripts")
    _watch(fetch, interval)
    return EXIT_DONE


def _once(fetch: Callable[[], NodePages], interval_s: float, *, json: bool) -> int:
    flow = Flow()
    flow.add(time.monotonic(), [page.node for page in fetch().pages.values()])
    time.sleep(interval_s)
    pages, errors, tried = fetch()
    flows = flow.add(time.monotonic(), [page.node for page in pages.values()])
    reported = errors or ({} if pages else tried)
    if json:
        print_json({"time_ms": time.time_ns() // 1_000_000, "nodes": flows, "errors": reported})
    elif flows:
        output().print(_screen(flows, {}))
    if not flows:
        notices().print(f"ha: {safe(explain_no_node(tried))}")
        return EXIT_UNREACHABLE
    for address, reason in reported.items():
        notices().print(f"ha: {safe(address)}: {safe(reason)}")
    if reported:
        return EXIT_UNREACHABLE
    return EXIT_NOT_READY if any(node.is_ready is False for node in flows) else EXIT_DONE


def _screen(flows: list[NodeFlow], errors: dict[str, str]) -> Group:
    shown: list[RenderableType] = [nodes_table(flows)]
    if any(node.slaves for node in flows):
        shown += ["", slaves_table(flows)]
    for node in flows:
        name = safe(node.name)
        if node.waiting_sends:
            shown.append(Text(f"{node.waiting_sends:,} sends are waiting for a slave of {name}"))
        if node.link:
            shown.append(Text(f"{name} ← {safe(node.master_address or 'no master')}: {safe(node.link)}"))
        if problem := node.readiness_problem:
            shown.append(Text(safe(problem)))
    shown += [Text(f"{safe(address)}: {safe(reason)}") for address, reason in errors.items()]
    return Group(*shown)


class _Poller:
    """Polls the nodes in a thread, so that a key press ends the command even while a node does not respond."""

    def __init__(self, fetch: Callable[[], NodePages], interval_s: float) -> None:
        self._fetch = fetch
        self._interval_s = interval_s
        self._stop = threading.Event()
        self.readable, self._writable = os.pipe()
        """Read end of a pipe that receives one byte per poll"""
        self.answers = NodePages({}, {}, {})
        self.failure: Exception | None = None
        """Why polling ended, for example because the token's file was removed"""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.answers = self._fetch()
                os.write(self._writable, b"!")
                self._stop.wait(self._interval_s)
        except Exception as error:  # the main thread raises it; raised here, it would only stop the updates
            self.failure = error
            os.write(self._writable, b"!")

    def stop(self) -> None:
        """Stops polling. The pipe stays open until the process ends, because a poll may be in progress."""
        self._stop.set()


def _end(number: int, _frame: object) -> None:
    """Handles SIGTERM: ends the command with exit code 143 by an exception, so that the terminal is restored."""
    raise SystemExit(128 + number)


def _watch(fetch: Callable[[], NodePages], interval_s: float) -> None:
    flow = Flow()
    console = Console(highlight=False, markup=False, emoji=False)
    has_keys = sys.stdin.isatty()
    poller = _Poller(fetch, interval_s)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with (
            _single_keys() if has_keys else nullcontext(),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            live.update(Text("connecting …"), refresh=True)
            while True:
                watched = [poller.readable, *([sys.stdin.fileno()] if has_keys else [])]
                ready, _, _ = select.select(watched, [], [])
                if poller.readable in ready:
                    os.read(poller.readable, 4096)
                    if poller.failure is not None:
                        raise poller.failure
                    pages, errors, tried = poller.answers
                    flows = flow.add(time.monotonic(), [page.node for page in pages.values()])
                    foot = Text(f"{time.strftime('%H:%M:%S')}, every {interval_s:g} s; q quits", style="dim")
                    live.update(Group(_screen(flows, errors if pages else tried), "", foot), refresh=True)
                if len(ready) > (poller.readable in ready):
                    keys = os.read(sys.stdin.fileno(), 64)
                    if not keys or set(keys) & set(b"qQ\x03\x04"):
                        return
    except KeyboardInterrupt:
        return
    finally:
        poller.stop()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _single_keys() -> Iterator[None]:
    """Reads keys without echo as they are pressed, and restores the terminal afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
