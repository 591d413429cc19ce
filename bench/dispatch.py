"""How fast records get from the log into consume queues and index, without peers or requests.

A log is created in memory and appended one frame at a time, as a slave does, in frames of 1 MiB as during catch-up. The
time that dispatch needs to follow is measured after each frame. `--frame-kib 16` simulates a load with few records at a
time. Records are of three kinds: without properties, with a tag, and with the properties of a Java producer (KEYS,
UNIQ_KEY, WAIT, TAGS). On a shared host, the minimum of many rounds is the most meaningful figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import trio

from bench.measure import MIB, empty_folder, machine_busy_s, report, spread
from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_record
from ha.store.files import OsDisk
from ha.store.mapped_file import run_in_thread
from ha.store.message_store import MessageStore, wall_clock_ms
from ha.store.options import StoreOptions

KINDS = ("bare", "tag", "keys")
QUEUE_COUNT = 4
_STORE_HOST = bytes(8)


def properties_of(kind: str, number: int) -> bytes:
    """Returns the properties that the producer of record `number` writes."""
    if kind == "bare":
        return b""
    if kind == "tag":
        return b"TAGS\x01bench\x02"
    unique_key = f"7F00000100002A9F18B4AAC2{number >> 6:08X}"[-28:] + f"{number & 0xFFFF:04X}"
    return f"KEYS\x01order-{number:08d}\x02UNIQ_KEY\x01{unique_key}\x02WAIT\x01true\x02TAGS\x01bench\x02".encode()


def frames(kind: str, mib: int, body_size: int, frame_size: int) -> list[bytes]:
    """Returns a log of approximately this size, in one segment, as frames that end at arbitrary places."""
    log = bytearray()
    body = (b"0123456789abcdef" * (body_size // 16 + 1))[:body_size]
    number = 0
    while len(log) < mib * MIB:
        message = Message("bench", number % QUEUE_COUNT, body, properties_of(kind, number))
        log += encode_record(
            message,
            queue_offset=number // QUEUE_COUNT,
            physical_offset=len(log),
            store_timestamp_ms=1_700_000_000_000 + number // 20,
            store_host=_STORE_HOST,
        )
        number += 1
    return [bytes(log[at : at + frame_size]) for at in range(0, len(log), frame_size)]


class _LongestStep(trio.abc.Instrument):
    """Measures the longest processor time of a step of a task, during which no other task runs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.seconds = max(self.seconds, time.thread_time() - self._began)


async def _dispatch(root: Path, log: list[bytes]) -> tuple[int, float, float, float]:
    """Returns the number of records, the seconds, the processor seconds of the loop's thread, and those of the longest
    step."""
    options = StoreOptions(root=root, is_slave=True)
    store = MessageStore(options, OsDisk(), run_in_thread, wall_clock_ms)
    for name in ("commitlog", "consumequeue", "index", "checksums"):
        (root / name).mkdir()
    longest = _LongestStep()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.log.allocator.run)
        wall_s = cpu_s = 0.0
        position = 0
        for frame in log:
            await store.log.append_raw(position, frame)
            position += len(frame)
            await trio.lowlevel.checkpoint()
            longest.before_task_step(trio.lowlevel.current_task())
            trio.lowlevel.add_instrument(longest)
            began, began_cpu = time.perf_counter(), time.thread_time()
            await store.dispatcher.catch_up()
            wall_s += time.perf_counter() - began
            cpu_s += time.thread_time() - began_cpu
            trio.lowlevel.remove_instrument(longest)
        nursery.cancel_scope.cancel()
    if store.log.dispatched_offset.value != position:
        raise SystemExit(f"dispatched to {store.log.dispatched_offset.value} of {position}")
    return sum(queue.max_offset for queue in store.queues), wall_s, cpu_s, longest.seconds


def one_run(kind: str, log: list[bytes], directory: Path | None) -> dict[str, Any]:
    """Dispatches a whole log into a new store."""
    size = sum(map(len, log))
    with empty_folder(directory) as root:
        busy, began, began_cpu = machine_busy_s(), time.monotonic(), time.process_time()
        count, wall_s, cpu_s, step_s = trio.run(_dispatch, root, log)
        foreign = (machine_busy_s() - busy - time.process_time() + began_cpu) / (time.monotonic() - began)
    return {
        "kind": kind,
        "records": count,
        "bytes": size,
        "seconds": wall_s,
        "us_per_record": cpu_s / count * 1e6,
        "mb_per_s": size / 1e6 / wall_s,
        "longest_step_ms": step_s * 1e3,
        "foreign_cores": foreign,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=128, help="size of the log, less than 1,024")
    parser.add_argument("--size", type=int, default=1024, help="bytes per message body")
    parser.add_argument("--frame-kib", type=int, default=1024, help="KiB per frame")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--directory", type=Path, help="directory for stores (default: a temporary one)")
    options = parser.parse_args()
    runs = []
    for kind in options.kinds:
        log = frames(kind, options.mib, options.size, options.frame_kib * 1024)
        runs += [one_run(kind, log, options.directory) for _ in range(options.rounds)]
    rows = []
    for kind in options.kinds:
        mine = [run for run in runs if run["kind"] == kind]
        rows.append(
            [
                kind,
                spread([run["us_per_record"] for run in mine], 2),
                spread([run["mb_per_s"] for run in mine]),
                f"{statistics.median(run['longest_step_ms'] for run in mine):.1f}",
                spread([run["foreign_cores"] for run in mine], 2),
            ]
        )
    head = ["records", "CPU µs each", "MB/s", "longest step ms", "others' cores"]
    question = f"Dispatch of messages of {options.size} bytes, {options.frame_kib} KiB at once, {options.rounds} rounds"
    report(question, runs, head, rows)


if __name__ == "__main__":
    main()
