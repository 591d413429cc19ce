"""`ha cluster …`: runs several broker groups on this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import anyio
import cyclopts
from cyclopts import Parameter
from rich.table import Table

from ha.cli.asking import Json
from ha.cli.cluster.background import Background, fork_to_background
from ha.cli.cluster.layout import (
    ETCD,
    GROUPS_MAX,
    NAME_SERVER,
    OUTPUT_FILE,
    PORT_MAX,
    REPLICAS_MAX,
    LocalNode,
    add_nodes,
    etcd_url,
    name_server_of,
    read_nodes,
)
from ha.cli.cluster.processes import NodeError
from ha.cli.cluster.running import (
    START_MISSING,
    LocalCluster,
    etcd_program,
    locked,
    pages_of_nodes,
    runner_of,
    start_missing,
    stop_nodes,
    stop_runner,
    wait_settled,
)
from ha.cli.exits import EXIT_DONE, EXIT_REFUSED, EXIT_UNREACHABLE, UsageError
from ha.cli.flags import check_timeout
from ha.cli.node_pages import answers_of
from ha.cli.nodes import reach
from ha.cli.showing import notices, output, print_json, safe
from ha.cli.status import show_status

app = cyclopts.App(name="cluster", help="Run several broker groups on this machine.", help_format="markdown")

Directory = Annotated[Path, Parameter(name="--dir", help="Directory with the cluster's configurations, logs and data.")]
Timeout = Annotated[float, Parameter(help="Timeout for all nodes together, in seconds.")]
_DIRECTORY = Path("halog-cluster")


@app.command
def up(
    *,
    groups: Annotated[int | None, Parameter(help="Number of groups. Default: those that exist, or 1.")] = None,
    replicas: Annotated[
        int | None,
        Parameter(help="Nodes per group, including the master. Default: those that exist, or 2, with --failover 3."),
    ] = None,
    failover: Annotated[
        bool, Parameter(negative=(), help="Let each group elect its master, with an etcd that this command starts.")
    ] = False,
    detach: Annotated[
        bool, Parameter(name=("--detach", "-d"), negative=(), help="Return when the cluster is ready; it goes on.")
    ] = False,
    port: Annotated[
        int | None,
        Parameter(
            help="Port P of the name server. Brokers get the ports P+11 to P+13, P+21 to P+23, and so on. Give the "
            "same port again to add groups. Default: random free ports."
        ),
    ] = None,
    dir_: Directory = _DIRECTORY,
    timeout: Timeout = 120.0,
    json: Json = False,
) -> int:
    """Run a name server and broker groups on this machine until Ctrl-C or `ha cluster down`.

    The first start creates the directory with a configuration for each node; all nodes listen on 127.0.0.1. Later
    starts use the same ports and data, and your changes to the configurations. With a higher number of groups or
    replicas, nodes are added. If the cluster already runs, the process that runs it starts the nodes that are missing,
    and this command ends when they are ready. With --detach, later output is written to cluster.log in the directory.

    Exit codes: 0 stopped, or with --detach ready, or the missing nodes run; 1 a node did not start, or all ended; 2
    usage; 69 a port is in use.
    """
    for name, value, limit in (("groups", groups, GROUPS_MAX), ("replicas", replicas, REPLICAS_MAX)):
        if value is not None and not 1 <= value <= limit:
            raise UsageError(f"--{name} must be from 1 to {limit}")
    check_timeout(timeout)
    if port is not None and not 1 <= port <= PORT_MAX:
        raise UsageError(f"--port must be from 1 to {PORT_MAX}")
    if failover:
        etcd_program()  # raises UsageError before the directory is created for failover groups
    dir_.mkdir(parents=True, exist_ok=True)
    try:
        runner = runner_of(dir_)
        if runner is None:
            background = fork_to_background(dir_ / OUTPUT_FILE) if detach else None
            if isinstance(background, int):
                return background  # the exit code of this process; the other one goes on
            with _interruptible() as wakeup, locked(dir_):
                add_nodes(dir_, groups, replicas, failover=failover, first_port=port)
                return _run(dir_, wakeup, timeout, background, json=json)
        try:
            nodes = add_nodes(dir_, groups, replicas, failover=failover, first_port=port)
            start_missing(runner)
            wait_settled(dir_.absolute(), nodes, timeout, runner)
        finally:
            os.close(runner)
        _show(nodes, json=json)
    except NodeError as error:
        notices().print(f"ha: {error.what}")
        return EXIT_UNREACHABLE if error.exit_code == EXIT_UNREACHABLE else EXIT_REFUSED
    return EXIT_DONE


def _run(directory: Path, wakeup: int, timeout_s: float, background: Background | None, *, json: bool) -> int:
    def report(line: str) -> None:
        with suppress(OSError):  # nodes don't end because the disk is full or the terminal is gone
            notices().print(f"ha: {line}")

    def start() -> None:
        try:
            cluster.start(timeout_s)
        except (NodeError, UsageError) as error:
            report(error.what if isinstance(error, NodeError) else str(error))

    cluster = LocalCluster(directory.absolute(), report)
    started = time.monotonic()
    try:
        nodes = cluster.start(timeout_s)
        wait_settled(directory.absolute(), nodes, timeout_s - (time.monotonic() - started))
        _show(nodes, json=json)
        if background is not None:
            background.detach()
        cluster.serve(wakeup, start)
    except KeyboardInterrupt:
        return EXIT_DONE
    finally:
        cluster.close()
    return EXIT_REFUSED


@contextmanager
def _interruptible() -> Iterator[int]:
    """Makes SIGTERM raise KeyboardInterrupt like Ctrl-C. Yields the read end of a pipe.

    The pipe gets a byte per signal START_MISSING. After the first SIGTERM or Ctrl-C, SIGTERM is ignored, so that a
    second `ha cluster down` also waits for the stop. A second Ctrl-C kills the nodes.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)

    def interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    def wake(_number: int, _frame: object) -> None:
        os.write(writable, b"!")

    handlers = {signal.SIGTERM: interrupt, signal.SIGINT: interrupt, START_MISSING: wake}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield readable
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(readable)
        os.close(writable)


def _show(nodes: list[LocalNode], *, json: bool) -> None:
    servers = name_server_of(nodes)
    brokers = [node for node in nodes if node.is_broker]
    if json:
        rows = {node.name: {"remoting": node.address(), "admin": node.address("adminListenPort")} for node in brokers}
        print_json({"name_server": servers, "brokers": rows})
        return
    table = Table("broker", "remoting", "admin", box=None)
    for node in brokers:
        table.add_row(node.name, node.address(), node.address("adminListenPort"))
    console = output()
    console.print(table)
    console.print(f"The cluster is ready. For clients and ha: export NAMESRV_ADDR={servers}")
    sys.stdout.flush()


@app.command
def down(
    *,
    group: Annotated[
        str | None, Parameter(help="Stop only the nodes of this group, for example after `ha broker drain`.")
    ] = None,
    dir_: Directory = _DIRECTORY,
    timeout: Timeout = 60.0,
    json: Json = False,
) -> int:
    """Stop the cluster that `ha cluster up` runs. Its data is kept.

    A group that is stopped starts again with the next `ha cluster up`, unless you delete its files NAME-*.

    Exit codes: 0 it has stopped, or did not run; 2 usage; 69 it is still stopping after --timeout.
    """
    check_timeout(timeout)
    if group is not None:
        return _stop_group(dir_, group, timeout, json=json)
    runner = runner_of(dir_)
    is_stopped = runner is None or stop_runner(runner, timeout)
    if json:
        print_json({"was_running": runner is not None, "is_stopped": is_stopped})
    elif runner is None:
        notices().print(f"ha: the cluster in {dir_} does not run")
    if not is_stopped:
        notices().print(f"ha: the cluster in {dir_} is still stopping after {timeout:g} s")
        return EXIT_UNREACHABLE
    return EXIT_DONE


def _stop_group(directory: Path, group: str, timeout_s: float, *, json: bool) -> int:
    nodes = [node for node in read_nodes(directory) if node.is_broker and node.keys.get("brokerName") == group]
    if not nodes:
        raise UsageError(f"no group {safe(group)} in {directory}")
    try:
        count = stop_nodes(directory, nodes, timeout_s)
    except NodeError as error:
        notices().print(f"ha: {error.what}")
        return EXIT_UNREACHABLE
    if json:
        print_json({"was_running": count > 0, "is_stopped": True})
    elif count == 0:
        notices().print(f"ha: no node of {safe(group)} runs")
    return EXIT_DONE


@app.command
def status(*, dir_: Directory = _DIRECTORY, timeout: Timeout = 3.0, json: Json = False) -> int:
    """Show the nodes of the cluster in a directory, like `ha status`, with the same exit codes.

    Nodes that don't run count as errors, even if the name server no longer knows them.
    """
    check_timeout(timeout)
    nodes = read_nodes(dir_)
    others = {NAME_SERVER: name_server_of(nodes)}
    if any(node.name == ETCD for node in nodes):
        others[ETCD] = etcd_url(dir_).removeprefix("http://")
    try:
        fetch = pages_of_nodes(dir_, nodes)
    except NodeError as error:
        notices().print(f"ha: {error.what}")
        return EXIT_UNREACHABLE
    exit_code = show_status(lambda: answers_of(fetch(timeout)), json=json)
    for name, address in others.items():
        if not anyio.run(reach, address, timeout).is_open:
            notices().print(f"ha: {name} does not respond at {address}")
            exit_code = EXIT_UNREACHABLE
    return exit_code
