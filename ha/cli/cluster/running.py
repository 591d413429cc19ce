"""Runs the nodes of a cluster on this machine until a signal, in one process that holds the directory's lock.

The lock shows whether the cluster runs. The kernel reports which process holds it, and releases it when that process
ends, so a crash leaves nothing to clean up.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from itertools import groupby
from pathlib import Path
from typing import IO

from ha.cli.admin_pages import TIMEOUT_S, Page, fetch_pages, open_directly
from ha.cli.cluster.layout import ETCD, LOCK_FILE, LocalNode, etcd_url, read_nodes
from ha.cli.cluster.processes import STOP_TIMEOUT_S, NodeError, NodeProcess
from ha.cli.exits import UsageError
from ha.client.credentials import read_secret_key

START_MISSING = signal.SIGUSR1
"""On this signal, the process that runs a cluster starts the nodes that don't run, for example new ones."""
_POLL_S = 0.1
_LOCK = "@hhqqi"
"""struct flock: kind, whence, start, length, process ID of the holder"""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the directory's lock during the block. Raises UsageError if another process holds it.

    This process must not open the lock's file again meanwhile, because closing it would release the lock.
    """
    with (directory / LOCK_FILE).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"the cluster in {directory} already runs; ha cluster down stops it") from None
        yield


def runner_of(directory: Path) -> int | None:
    """Returns a pidfd of the process that runs the cluster, for the caller to close; None if it does not run."""
    with suppress(FileNotFoundError), (directory / LOCK_FILE).open() as file:
        while holder := _holder_of(file):
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(holder)
                if _holder_of(file) == holder:  # the ID was not reused before the pidfd was opened
                    return descriptor
                os.close(descriptor)
    return None


def _holder_of(file: IO[str]) -> int:
    """Returns the ID of the other process that holds a lock of this file; 0 if none does."""
    asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, holder = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else int(holder)


def stop_runner(descriptor: int, timeout_s: float) -> bool:
    """Stops the cluster that the process of this pidfd runs, and closes the pidfd. Returns whether the process ended
    within `timeout_s`."""
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


@contextmanager
def _stopping(directory: Path, timeout_s: float) -> Iterator[None]:
    """Excludes other processes from stopping nodes of `directory` during the block: a second signal would end a node
    at once.

    Raises NodeError if another process is still stopping nodes after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                what = f"another ha cluster down is still stopping nodes after {timeout_s:g} s"
                raise NodeError(what, exit_code=os.EX_UNAVAILABLE)
            time.sleep(_POLL_S)  # flock has no timeout
        yield
    finally:
        os.close(descriptor)


def stop_nodes(directory: Path, nodes: Sequence[LocalNode], timeout_s: float) -> int:
    """Stops these nodes of a running cluster, stage by stage, and returns how many were running. Raises NodeError if
    one does not stop within `timeout_s`, or if another process is still stopping nodes by then."""
    deadline = time.monotonic() + timeout_s
    count = 0
    with _stopping(directory, timeout_s), ExitStack() as stack:
        for _, stage in groupby(sorted(nodes, key=lambda node: -node.stage), key=lambda node: node.stage):
            found = {node.name: _process_of(directory, node) for node in stage}
            running = {name: descriptor for name, descriptor in found.items() if descriptor is not None}
            for descriptor in running.values():
                stack.callback(os.close, descriptor)
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            for name, descriptor in running.items():
                if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise NodeError(f"{name} is still stopping after {timeout_s:g} s", exit_code=os.EX_UNAVAILABLE)
            count += len(running)
    return count


def _process_of(directory: Path, node: LocalNode) -> int | None:
    """Returns a pidfd of the process that runs a node of the cluster in `directory`, for the caller to close; or None.

    The process is found by its working directory and command in /proc, because a node does not write its process ID to
    a file.
    """
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _runs(process, directory, node):
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(int(process.name))
                if _runs(process, directory, node):  # the ID was not reused before the pidfd was opened
                    return descriptor
                os.close(descriptor)
    return None


def _runs(process: Path, directory: Path, node: LocalNode) -> bool:
    with suppress(OSError):  # it has ended, or belongs to another user
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        command = ["--config", f"{node.name}.conf", ""]
        return words[-3:] == command and (process / "cwd").readlink() == directory.resolve()
    return False


def etcd_program() -> str:
    """Returns the path of etcd. Raises UsageError if it is not on the PATH."""
    program = shutil.which(ETCD)
    if program is None:
        raise UsageError("etcd is not on the PATH, and failover needs it; on Debian: apt-get install etcd-server")
    return program


class LocalCluster:
    """Processes of the nodes in a directory. `close` ends them all; if this process is killed, the kernel does so."""

    def __init__(self, directory: Path, report: Callable[[str], None]) -> None:
        """`report` is called with a line for the user when a node ends or does not stop cleanly."""
        self._directory = directory
        self._report = report
        self._running: dict[str, tuple[LocalNode, NodeProcess]] = {}

    def start(self, timeout_s: float) -> list[LocalNode]:
        """Starts the nodes that don't run, and waits until they serve. Returns all nodes.

        Brokers start together, after etcd and the name server. Raises NodeError if a node can't be started or does not
        serve within `timeout_s`, UsageError if a configuration can't be read or etcd is not installed. After an error,
        the nodes that were started keep running.
        """
        deadline = time.monotonic() + timeout_s
        nodes = read_nodes(self._directory)
        for _, stage in groupby(nodes, key=lambda node: min(node.stage, 2)):
            started = [(node, self._spawn(node)) for node in stage if node.name not in self._running]
            for node, process in started:
                self._wait_ready(node, process, max(0.1, deadline - time.monotonic()))
        return nodes

    def _wait_ready(self, node: LocalNode, process: NodeProcess, timeout_s: float) -> None:
        try:
            if node.name == ETCD:
                _wait_etcd(process, etcd_url(self._directory), timeout_s)
            else:
                process.wait_ready(timeout_s)
        except NodeError as error:
            if process.exit_code is not None:
                del self._running[node.name]
                process.kill()
            what = f"{error.what}: {process.last_error()} (log: {process.log_file})"
            raise NodeError(what, exit_code=error.exit_code) from None

    def _spawn(self, node: LocalNode) -> NodeProcess:
        if node.name == ETCD:
            command = [etcd_program(), "--config-file", f"{ETCD}.yml"]
        else:
            command = [sys.executable, "-P", "-m", node.module, "--config", f"{node.name}.conf"]
        process = NodeProcess(
            node.name,
            command,
            self._directory / f"{node.name}.log",
            directory=self._directory,
            has_ready=node.name != ETCD,
        )
        try:
            process.spawn()
        except OSError as error:
            raise NodeError(f"{node.name} can't be started: {error}") from None
        self._running[node.name] = node, process
        return process

    def serve(self, wanted: int, start_missing: Callable[[], None]) -> None:
        """Reports each node that ends, and returns when all have ended. The end of a node does not stop the others.

        When the descriptor `wanted` has data, reads the data and calls `start_missing`.
        """
        while self._running:
            ends = {os.pidfd_open(process.pid): name for name, (_, process) in self._running.items()}
            try:
                readable, _, _ = select.select([wanted, *ends], [], [])
            finally:
                for descriptor in ends:
                    os.close(descriptor)
            for name in [ends[descriptor] for descriptor in readable if descriptor in ends]:
                _, process = self._running.pop(name)
                self._report(f"{name} ended: {_ending(process)}; {process.last_error()} (log: {process.log_file})")
                process.kill()
            if wanted in readable:
                os.read(wanted, 4096)
                start_missing()

    def close(self) -> None:
        """Stops the nodes in order, each stage within STOP_TIMEOUT_S, and kills those that don't stop.

        Kills all, and raises NodeError, if another process is still stopping nodes after STOP_TIMEOUT_S.
        """
        try:
            with _stopping(self._directory, STOP_TIMEOUT_S):
                self._stop()
        finally:
            for _, process in self._running.values():
                process.kill()
            self._running.clear()

    def _stop(self) -> None:
        by_stage = sorted(self._running.values(), key=lambda each: -each[0].stage)
        for _, group in groupby(by_stage, key=lambda each: each[0].stage):
            stage = list(group)
            for _, process in stage:
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for node, process in stage:
                try:
                    process.wait_exit(deadline - time.monotonic())
                except NodeError as error:
                    if (node.name, error.exit_code) != (ETCD, -signal.SIGTERM):  # etcd ends by the signal
                        self._report(error.what)


def _ending(process: NodeProcess) -> str:
    code = process.exit_code
    return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name


def _wait_etcd(process: NodeProcess, url: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if process.exit_code is not None:
            raise NodeError(f"etcd did not start (exit code {process.exit_code})", process.log_tail())
        with suppress(OSError, HTTPException), open_directly(f"{url}/health", 1.0) as answer:
            if b"true" in answer.read(4096):
                return
        if time.monotonic() > deadline:
            raise NodeError(f"etcd did not respond within {timeout_s:g} s", process.log_tail())
        time.sleep(_POLL_S)  # HTTP offers no notification


def start_missing(runner: int) -> None:
    """Makes the process of this pidfd, which runs a cluster, start the nodes that don't run, unless it has ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(runner, START_MISSING)


def wait_settled(directory: Path, nodes: Sequence[LocalNode], timeout_s: float, runner: int | None = None) -> None:
    """Waits until every broker of `directory` is ready and registered, and every group has a master with its slaves in
    sync.

    Raises NodeError after `timeout_s`, with the first reason why this is not so; if the process of the pidfd `runner`
    ends; or if a token or certificate can't be read.
    """
    deadline = time.monotonic() + timeout_s
    brokers = {node.address("adminListenPort"): node for node in nodes if node.is_broker}
    fetch = pages_of_nodes(directory, nodes)
    while True:
        masterless = {node.keys.get("brokerName", "") for node in brokers.values()}
        faults = []
        for address, page in fetch(TIMEOUT_S).items():
            if why := _fault(page):
                faults.append(f"{brokers[address].name}: {why}")
            if isinstance(page, Page) and page.node.role != "SLAVE":
                masterless.discard(page.node.broker_name)
        faults += [f"{name} has no master" for name in sorted(masterless)]
        if not faults:
            return
        if runner is not None and select.select([runner], [], [], 0)[0]:
            raise NodeError("the cluster was stopped meanwhile; repeat ha cluster up")
        if time.monotonic() > deadline:
            raise NodeError(f"the cluster is not ready within {timeout_s:g} s; {faults[0]}")
        time.sleep(_POLL_S)  # HTTP offers no notification


def pages_of_nodes(directory: Path, nodes: Sequence[LocalNode]) -> Callable[[float], dict[str, Page | str]]:
    """Returns a function that fetches the status page of each broker of `directory`, with the broker's own token and
    certificate. It takes a timeout in seconds, and returns by address the page, or why there is none.

    Raises NodeError if a token or certificate can't be read.
    """
    by_access: dict[tuple[str, Path | None], list[str]] = {}
    for node in nodes:
        if node.is_broker:
            access = _admin_token(directory, node), _admin_certificate(directory, node)
            by_access.setdefault(access, []).append(node.address("adminListenPort"))
    contexts = {certificate: _trusting(certificate) for _, certificate in by_access}

    def fetch(timeout_s: float) -> dict[str, Page | str]:
        pages: dict[str, Page | str] = {}
        for (token, certificate), addresses in by_access.items():
            pages |= fetch_pages(addresses, token, contexts[certificate], timeout_s)
        return pages

    return fetch


def _admin_token(directory: Path, node: LocalNode) -> str:
    """Returns the token of a node's admin port; "" for none. Reads it from the same places as the node, or else from
    HALOG_ADMIN_TOKEN. Raises NodeError if the token's file can't be read."""
    given = os.environ.get("HA_ADMIN_TOKEN") or node.keys.get("adminToken")
    if given:
        return given
    if file := os.environ.get("HA_ADMIN_TOKEN_FILE") or node.keys.get("adminTokenFile"):
        try:
            return read_secret_key(str(directory / file))
        except ValueError as error:
            raise NodeError(f"adminTokenFile of {node.name}: {error}") from None
    return os.environ.get("HALOG_ADMIN_TOKEN", "")


def _admin_certificate(directory: Path, node: LocalNode) -> Path | None:
    """Returns the file of the certificate of a node's admin port; None if the port has no TLS."""
    is_encrypted = node.keys.get("adminTls") == "enforcing"
    return directory / node.keys.get("tls.server.certPath", "") if is_encrypted else None


def _trusting(certificate: Path | None) -> ssl.SSLContext | None:
    """Returns a TLS context that trusts this certificate without checking its names; None if `certificate` is None.

    Raises NodeError if the certificate can't be loaded.
    """
    if certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=certificate)
    except OSError as error:
        raise NodeError(f"tls.server.certPath {certificate}: {error}") from None
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be that of a CA
    return context


def _fault(page: Page | str) -> str:
    if isinstance(page, str):
        return page
    node = page.node
    if not node.is_ready:
        return node.not_ready_reason or "not ready"
    if not all(server.is_registered for server in node.name_servers):
        return "not registered at the name server"
    return node.degraded_reason or ""
