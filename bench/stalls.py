"""Measures what blocks the event loops of a master and two slaves under mixed load: as many sends in flight as the
nodes accept, a consumer that reads parts of the log that are only on disk, a second slave that copies the log
repeatedly, and deletion of old segments, which limits the use of the disk.

Each node watches its own loop (`/loop` on its admin port, ha/admin/loop_watch.py), and so does an almost idle process,
the bystander (bystander.py). The program prints every report as a line of JSON, a table of delays and holds, and the
longest holds: where each task waited afterwards, and how the time divides into work, waiting for a processor (caused by
other processes, if there are fewer cores than busy processes) and sleep, how long the host had the processors, and what
else happened at that time.

The load runs for `--warm` minutes before the measurement; by then the host has provided the necessary memory.

Without `--spare` the load uses all processors, so a loop waits mostly for a processor. With it, clients and copies keep
to rates that leave processor time, or to multiples of these rates: a host that gives a virtual machine two cores for
processors and disk together pauses the machine for 20 to 40 ms of each 100 ms if it uses more.

Clients, which would normally run on other machines, get the lowest priority (nice 19). Nodes and the bystander get the
highest (nice -15, which requires root), so that their reports show what the nodes do and not what else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.clients import RunError, ask
from bench.measure import MIB, alone, empty_folder, hold_memory, machine, machine_busy_s
from scripts.nodes import Cluster, Node, NodeError, cluster, log_range, wait_until_attached

SEGMENT_BYTES = 256 * MIB
LONG_S = 0.02
_LOOK_S = 0.02
_STOLEN_FIELD = 8
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_FIRST, _LAST = -15, 19
_TOKEN = "watches-the-event-loop"
_DELETE_EXPIRED_COMMITLOG = 329
_OLD_S = 7200
_STARTING_S = 5.0
"""How long the senders continue after the measurement, in seconds."""
_SPARE_SENDS_PER_S = 5_000
_SPARE_PULLED_PER_S = 30_000
_SPARE_COPY_BYTES_PER_S = 100 * MIB  # RocketMQ's default if it limits a slave
_LARGE_PULLS = {"maxTransferCountOnMessageInMemory": 1024, "maxTransferBytesOnMessageInMemory": 4 * MIB}


@dataclass
class Timeline:
    """What happened when, in wall-clock seconds."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    stolen: list[tuple[float, float, float]] = field(default_factory=list)
    """(begin, end, processor seconds that the host took) of each interval between two samples in which it took any."""
    _open: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Records the duration of the block."""
        self._open[what] = began = time.time()
        try:
            yield
        finally:
            del self._open[what]
            self.spans.append((what, began, time.time()))

    def forget(self) -> None:
        """Forgets finished intervals; current ones remain."""
        self.spans.clear()
        self.stolen.clear()

    def during(self, begin: float, end: float) -> list[str]:
        """Returns what happened in some part of that interval, in order of start."""
        spans = [*self.spans, *((what, began, end) for what, began in self._open.items())]
        return [
            what for what, began, ended in sorted(spans, key=lambda span: span[1]) if began <= end and ended >= begin
        ]

    def stolen_s(self, begin: float, end: float) -> float:
        """Returns the processor seconds that the host took in that interval, extended by one sample, as the kernel
        counts in ticks of 10 ms.
        """
        return sum(
            seconds for before, now, seconds in self.stolen if before <= end + _LOOK_S and now >= begin - _LOOK_S
        )


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges several reports of one node; p99 is the highest of any."""
    return {
        "seconds": sum(each["seconds"] for each in reports),
        **{key: sum(each[key] for each in reports) for key in ("beat_count", "long_delay_count", "step_count")},
        "long_hold_count": sum(each["long_hold_count"] for each in reports),
        **{key: max(each[key] for each in reports) for key in ("delay_p99_s", "delay_max_s", "hold_max_s")},
        **{
            key: sorted((each for report in reports for each in report[key]), key=lambda each: -each["seconds"])
            for key in ("delays", "holds")
        },
    }


def own_seconds(stall: dict[str, Any]) -> float:
    """Returns the part of a hold or delay that is the node's own: everything except waiting for a processor."""
    own: float = stall["seconds"] - (stall["queued_s"] or 0.0)
    return own


def own_count(stalls: Sequence[dict[str, Any]], timeline: Timeline) -> int:
    """Counts holds or delays whose own part is over LONG_S, in intervals in which the host took no processor time."""
    return sum(
        own_seconds(stall) >= LONG_S and not timeline.stolen_s(stall["at_s"] - stall["seconds"], stall["at_s"])
        for stall in stalls
    )


def markdown(reports: dict[str, dict[str, Any]], timeline: Timeline, shown: int = 12) -> str:
    """Returns the tables of merged reports by node."""
    rows = [
        "| node | s | delay p99 ms | longest ms | over 20 ms | own | longest hold ms | over 20 ms | own "
        "| longest work ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        delays = f"{report['long_delay_count']:,} of {report['beat_count']:,}"
        holds = f"{report['long_hold_count']:,} of {report['step_count']:,}"
        own_delays, own_holds = (f"{own_count(report[key], timeline):,}" for key in ("delays", "holds"))
        longest_work_s = max((hold["cpu_s"] for hold in report["holds"]), default=0.0)
        p99, longest, held, work = (
            f"{seconds * 1e3:.1f}"
            for seconds in (report["delay_p99_s"], report["delay_max_s"], report["hold_max_s"], longest_work_s)
        )
        cells = (name, f"{report['seconds']:.0f}", p99, longest, delays, own_delays, held, holds, own_holds, work)
        rows.append("| " + " | ".join(cells) + " |")
    rows += [
        "",
        "| node | hold ms | work | queued | sleep | garbage collection | stolen | task | waited at | other activity |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    all_holds = [(name, hold) for name, report in reports.items() for hold in report["holds"]]
    for name, hold in sorted(all_holds, key=lambda each: -own_seconds(each[1]))[:shown]:
        queued_s = hold["queued_s"] or 0.0
        slept_s = max(0.0, hold["seconds"] - hold["cpu_s"] - queued_s)
        began, ended = hold["at_s"] - hold["seconds"], hold["at_s"]
        times = (
            hold["seconds"],
            hold["cpu_s"],
            queued_s,
            slept_s,
            hold["collection_s"],
            timeline.stolen_s(began, ended),
        )
        parts = " | ".join(f"{each * 1e3:.1f}" for each in times)
        where = " < ".join(reversed(hold["stack"][-3:])) or "its end"
        meanwhile = ", ".join(timeline.during(began, ended))
        rows.append(f"| {name} | {parts} | `{hold['task']}` | {where} | {meanwhile} |")
    return "\n".join(rows)


def watch(node: Node, seconds: float) -> None:
    """Starts the watch of a node's loop."""
    node.page(f"/loop?seconds={seconds:.0f}", "POST")


class Disk(threading.Thread):
    """Once a second, drops older segments from the page cache and has the oldest ones deleted."""

    def __init__(self, nodes: Sequence[tuple[Node, Path]], keep_bytes: int, timeline: Timeline) -> None:
        super().__init__(daemon=True)
        self._nodes = nodes
        self._keep_count = max(3, keep_bytes // SEGMENT_BYTES)
        self._there: dict[Path, set[Path]] = {}
        self._timeline = timeline
        self._over = threading.Event()
        self.deletion_count = 0

    def run(self) -> None:
        """Runs until `end`."""
        while not self._over.wait(1.0):
            for node, store in self._nodes:
                segments = sorted((store / "commitlog").glob("[0-9]*"))
                self.deletion_count += len(self._there.get(store, set()).difference(segments))
                self._there[store] = set(segments)
                for segment in segments[:-2]:
                    forget_pages(segment)
                old = segments[: -self._keep_count]
                if old:
                    self._have_deleted(node, old)

    def _have_deleted(self, node: Node, old: Sequence[Path]) -> None:
        then = time.time() - _OLD_S
        for segment in old:
            os.utime(segment, (then, then))
        with self._timeline.span(f"{node.name} deletes"):
            ask(node.ready["remoting"], _DELETE_EXPIRED_COMMITLOG, timeout_s=60)

    def end(self) -> None:
        """Stops it and waits."""
        self._over.set()
        self.join()


class Stolen(threading.Thread):
    """Records when the host takes processors from this virtual machine."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(daemon=True)
        self._timeline = timeline
        self._over = threading.Event()

    def run(self) -> None:
        """Runs until `end`."""
        before, before_s = time.time(), _stolen_s()
        while not self._over.wait(_LOOK_S):
            now, now_s = time.time(), _stolen_s()
            if now_s > before_s:
                self._timeline.stolen.append((before, now, now_s - before_s))
            before, before_s = now, now_s

    def end(self) -> None:
        """Stops it and waits."""
        self._over.set()
        self.join()


def _stolen_s() -> float:
    with open("/proc/stat", encoding="ascii") as file:
        return int(file.readline().split()[_STOLEN_FIELD]) / _TICKS_PER_S


def forget_pages(path: Path) -> None:
    """Drops the clean, unmapped pages of a file from the page cache, so that they are read from disk next time."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # just deleted
        return
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def set_niceness(pid: int, niceness: int) -> None:
    """Sets the priority of all threads of a process that leads a session: within the session, and among sessions, which
    the kernel otherwise treats equally (autogroup in sched(7)). Values below 0 are ignored without root.
    """
    with suppress(PermissionError, FileNotFoundError):  # FileNotFoundError: a kernel without autogroup
        os.setpriority(os.PRIO_PGRP, pid, niceness)
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def _copies(nodes: Cluster, node: Node, until: float, timeline: Timeline, reports: list[dict[str, Any]]) -> int:
    """Lets a second slave copy the whole log, kills it, deletes its store, and repeats that until the monotonic time
    `until`. Appends the report of each slave's loop to `reports`; returns the number of finished copies."""
    count = 0
    while time.monotonic() < until:
        with timeline.span(f"copy {count + 1}"):
            node.start()
            set_niceness(node.pid, _FIRST)
            watch(node, 3600)
            while time.monotonic() < until and log_range(node)[1] < log_range(nodes.master)[1] - 4 * MIB:
                time.sleep(0.2)
            is_there = time.monotonic() < until
        if is_there:
            count += 1
            time.sleep(2)  # it is following
        reports.append(node.page("/loop"))
        node.kill()
        shutil.rmtree(nodes.directory / node.name)
    return count


def _clients(nodes: Cluster, options: argparse.Namespace, stack: ExitStack, seconds: float) -> subprocess.Popen[str]:
    """Runs the senders, and a consumer that reads the log repeatedly from the start."""
    broker, name_server = nodes.master.ready["remoting"], nodes.name_server_address
    pace = ["--rate", f"{options.spare * _SPARE_SENDS_PER_S:.0f}"] if options.spare else []
    if options.send_cores:
        pace = ["--cores", str(options.send_cores)]
    words = [*pace, "--broker", broker, "--in-flight", str(options.in_flight), "--connections", "16", "--warm", "0"]
    command = [sys.executable, "-m", "bench.load", *words, "--size", str(options.size)]
    command += ["--seconds", str(seconds)]
    load = _start(command, _LAST, stack)
    rate = ["--rate", f"{options.spare * _SPARE_PULLED_PER_S:.0f}"] if options.spare else []
    words = ["consume", *rate, "--name-server", name_server, "--count", str(1 << 60), "--pull", "1024"]
    command = [sys.executable, "-m", "bench.sdk_load", *words]
    _start(command, _LAST, stack)
    return load


def _start(command: list[str], niceness: int, stack: ExitStack) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    stack.callback(_end, process)
    set_niceness(process.pid, niceness)
    return process


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def memory_held() -> Iterator[None]:
    """Keeps freed memory from going back to the host in the block. Raises RunError without root."""
    command = [sys.executable, "-m", "bench.held_memory"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RunError("--hold failed: it requires root")
        try:
            yield
        finally:
            process.stdin.close()  # makes it restore the kernel's setting and end


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, dict[str, Any]], Timeline, dict[str, Any]]:
    """Returns merged reports by node, what happened when, and the clients' figures. Raises RunError if a client
    fails, NodeError if a node does."""
    seconds, warm_s = options.minutes * 60, options.warm * 60
    timeline = Timeline()
    keys: dict[str, object] = {"mappedFileSizeCommitLog": SEGMENT_BYTES, "haStartFrom": "first", "fileReservedTime": 1}
    if options.spare:
        keys |= {
            "haFlowControlEnable": "true",
            "maxHaTransferByteInSecond": round(options.spare * _SPARE_COPY_BYTES_PER_S),
        }
    with cluster(folder, adminToken=_TOKEN, **keys, **_LARGE_PULLS) as nodes, ExitStack() as stack:
        second = nodes.add_slave()
        for node in nodes.all:
            node.start()
        wait_until_attached(nodes)
        words = ["--in-flight", "4", "--batch", "32", "--bytes", str(options.mib * MIB)]
        command = [sys.executable, "-m", "bench.load", "--broker", nodes.master.ready["remoting"], *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for node in reversed(nodes.all):
            node.stop()
        for path in folder.glob("*/commitlog/[0-9]*"):
            forget_pages(path)
        for node in nodes.all:
            node.start()
            set_niceness(node.pid, _FIRST)
        wait_until_attached(nodes)
        if options.hold:
            stack.enter_context(memory_held())
        elif options.ballast:
            hold_memory(folder / "ballast")
        stolen = Stolen(timeline)
        disk = Disk([(nodes.master, nodes.master_store), (nodes.slave, nodes.slave_store)], options.mib * MIB, timeline)
        copies: list[dict[str, Any]] = []
        load = _clients(nodes, options, stack, warm_s + seconds + _STARTING_S)
        disk.start()
        stolen.start()
        try:
            _copies(nodes, second, time.monotonic() + warm_s, timeline, [])
            timeline.forget()
            busy, deleted_count = machine_busy_s(), disk.deletion_count
            for node in (nodes.master, nodes.slave):
                watch(node, seconds + 60)
            command = [sys.executable, "-m", "bench.bystander", "--seconds", str(seconds)]
            bystander = _start(command, _FIRST, stack)
            copy_count = _copies(nodes, second, time.monotonic() + seconds, timeline, copies)
            reports = {"master": merged([nodes.master.page("/loop")]), "slave": merged([nodes.slave.page("/loop")])}
        finally:
            disk.end()
            stolen.end()
        reports["second slave"] = merged(copies)
        reports["bystander"] = merged([json.loads(bystander.communicate(timeout=120)[0])])
        output = load.communicate(timeout=120)[0]
        if load.returncode:
            raise RunError(f"the senders ended with {load.returncode}")
        found = json.loads(output.splitlines()[-1])
        done = {key: found[key] for key in ("rate", "p50_us", "p99_us", "max_us", "codes")}
        done |= {"copies": copy_count, "deleted_segments": disk.deletion_count - deleted_count}
        done["stolen_s"] = sum(stolen_s for _, _, stolen_s in timeline.stolen)
        done["busy_cores"] = (machine_busy_s() - busy) / seconds
        stack.close()  # stop the clients before their master
        for node in reversed(nodes.all):
            node.stop()
    return reports, timeline, done


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/run stalls", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm", type=float, default=2.0, help="minutes of load before the measurement")
    parser.add_argument(
        "--mib", type=int, default=2048, help="size of the log that each of the three nodes keeps; at least 768"
    )
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--size", type=int, default=1024, help="bytes per body")
    parser.add_argument("--directory", type=Path, help="directory for stores (default: a temporary one)")
    parser.add_argument(
        "--spare",
        type=float,
        nargs="?",
        const=1.0,
        metavar="FACTOR",
        help=f"limit the load to {_SPARE_SENDS_PER_S:,} sends and {_SPARE_PULLED_PER_S:,} pulled messages per second, "
        f"and {_SPARE_COPY_BYTES_PER_S // MIB} MiB/s to a slave, or to a multiple of these",
    )
    parser.add_argument(
        "--hold",
        action="store_true",
        help="keep freed memory from going back to the host; requires root (held_memory.py)",
    )
    parser.add_argument(
        "--send-cores",
        type=float,
        metavar="CORES",
        help="limit senders to this share of a processor, such as 0.1, instead of a rate",
    )
    parser.add_argument(
        "--no-ballast", action="store_false", dest="ballast", help="don't fill free memory first (README.md, Memory)"
    )
    options = parser.parse_args()
    try:
        with alone(), empty_folder(options.directory) as folder:
            reports, timeline, done = measure(options, folder)
    except (RunError, NodeError) as error:
        raise SystemExit(str(error)) from None
    for name, report in reports.items():
        print(json.dumps({"node": name, **report}))
    print(json.dumps({"done": done, "machine": machine()}))
    times = Counter(what.rstrip("0123456789 ") for what, _, _ in timeline.spans)
    stolen = f"{done['busy_cores']:.2f} cores busy, {done['stolen_s']:.1f} s of them stolen"
    sends = f"{done['rate']:,.0f} sends/s, p99 {done['p99_us'] / 1e3:.1f} ms, codes {done['codes']}"
    print(f"\n{sends}; {dict(times)}; {stolen}\n")
    print(markdown(reports, timeline))


if __name__ == "__main__":
    main()
