"""Processor time of a send in each stage of the master, in one process without sockets or peers.

    decode    RequestParser: a chunk of frames to requests
    prepare   SendProcessor: requests to checked puts
    append    PutService and CommitLog: puts to records in the file
    answer    SendProcessor: finished puts to response bytes
    whole     everything, through Processor, as the connection calls it

A chunk of `--chunk` requests, each of `--batch` messages, passes through all stages repeatedly. A stage's time is the
processor time of this thread per message; the table shows the minimum of all chunks, because interference only adds
time, and the median. Flushing and dispatch run between chunks and do not count.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import thread_time_ns
from typing import Any, cast

import trio

from bench.load import FIRST_OPAQUE, QUEUE_COUNT, templates
from bench.measure import empty_folder, report
from ha.broker.core import BrokerCore
from ha.broker.options import BrokerOptions
from ha.broker.processor import Processor
from ha.broker.put import PutService
from ha.broker.queue_locks import QueueLocks
from ha.broker.send import SendProcessor
from ha.broker.tables import Tables
from ha.broker.world import World
from ha.protocol.message_id import UniqueIdGenerator
from ha.protocol.record import Message
from ha.protocol.remoting import RemotingCommand, RemotingParser
from ha.protocol.request_parser import RequestParser
from ha.remoting import RemotingConnection
from ha.store.message_store import MessageStore, open_message_store, wall_clock_ms
from ha.store.options import StoreOptions

STAGES = ("decode", "prepare", "append", "answer", "whole")
TOPIC = "bench"


class Sink:
    """Replaces the connection: receives the responses."""

    peer = ("127.0.0.1", 50_000)
    is_closed = False
    in_flight = 0
    received_at = 0.0
    sent = b""

    def send_soon(self, frame: bytes) -> None:
        """Stores the last response, so that it can be checked."""
        self.sent = frame

    send_now = send_soon


class Kept:
    """Replaces the put service: keeps the puts, so that the stages before and after it can be timed."""

    puts: Sequence[Any] = ()
    is_blocked = False

    def enqueue(self, requests: Sequence[Any]) -> None:
        """Stores the puts."""
        self.puts = requests

    def drain(self) -> None:
        """Does nothing."""


class Master:
    """The parts of a master that process a send, without sockets; no put waits for a flush or a slave."""

    def __init__(self, store: MessageStore, options: BrokerOptions, unique_id: Callable[[], str]) -> None:
        world = World(unique_id=unique_id)
        self.tables = Tables(store, options, world)
        self.puts = PutService(store, None, options)
        self.kept = Kept()
        self.sender, whole = (
            SendProcessor(core, QueueLocks(core))
            for core in (
                BrokerCore(
                    options=options, store=store, tables=self.tables, puts=cast(PutService, service), world=world
                )
                for service in (self.kept, self.puts)
            )
        )
        self.processor = Processor(whole, {})

    def time_chunk(self, chunk: bytes, times: dict[str, list[int]]) -> None:
        """Passes `chunk` through all stages and records the nanoseconds of each."""
        sink, parser, kept = Sink(), RequestParser(), self.kept
        connection = cast(RemotingConnection, sink)
        clock = thread_time_ns
        begun = clock()
        commands = parser.feed(chunk)
        decoded = clock()
        self.sender.take(connection, commands)
        prepared = clock()
        on_done = kept.puts[0].on_done
        for put in kept.puts:
            put.on_done = None
        append_begun = clock()
        self.puts.submit(kept.puts)
        appended = clock()
        on_done(kept.puts)
        answered = clock()
        self.processor.take(connection, parser.feed(chunk))
        ended = clock()
        spans = decoded - begun, prepared - decoded, appended - append_begun, answered - appended, ended - answered
        for stage, span in zip(STAGES, spans, strict=True):
            times[stage].append(span)
        _check_answers(sink.sent, len(commands))


def _check_answers(sent: bytes, count: int) -> None:
    answers: list[RemotingCommand] = RemotingParser().feed(sent)
    if [answer.code for answer in answers] != [0] * count:
        raise SystemExit(f"not all messages were stored: {answers[:1]}")


async def measure(folder: Path, *, chunk_count: int, repeats: int, size: int, batch: int) -> dict[str, list[int]]:
    """Returns the nanoseconds of each chunk, by stage."""
    frames = templates(TOPIC, size, "bench", batch=batch)
    requests = (
        frames[number % QUEUE_COUNT][0] + b"%d" % (FIRST_OPAQUE + number) + frames[number % QUEUE_COUNT][1]
        for number in range(chunk_count)
    )
    chunk = b"".join(requests)
    unique = UniqueIdGenerator(
        address=b"\x7f\x00\x00\x01",
        process_id=1,
        process_hash=1,
        wall_clock_ms=wall_clock_ms,
        month_ms=lambda now_ms: (now_ms, now_ms + 10**9),
    )
    times: dict[str, list[int]] = {stage: [] for stage in STAGES}
    async with open_message_store(StoreOptions(root=folder)) as store:
        master = Master(store, BrokerOptions(config_dir=folder / "config"), unique.next)
        await master.tables.load()
        await master.tables.topics.ensure(TOPIC, QUEUE_COUNT)
        async with master.puts.serve():
            await master.puts.put([Message(TOPIC, 0, b"the first, for which a segment is made")])
            for _ in range(repeats):
                master.time_chunk(chunk, times)
                while store.log.dispatched_offset.value < store.log.max_offset.value:
                    await store.log.dispatched_offset.wait_beyond(store.log.dispatched_offset.value)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunk", type=int, nargs="+", default=[1, 64], help="requests per chunk")
    parser.add_argument(
        "--batch", type=int, default=1, help="messages per request; more than 1 uses SEND_BATCH_MESSAGE"
    )
    parser.add_argument("--size", type=int, default=1024, help="bytes per body")
    parser.add_argument("--messages", type=int, default=50_000, help="number of rounds per chunk size")
    parser.add_argument("--directory", type=Path, help="directory for the store (default: a temporary one)")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    rows = []
    for count in options.chunk:
        with empty_folder(options.directory) as folder:
            repeats = min(max(1, options.messages // (count * options.batch)), 5000)
            run = partial(measure, folder, chunk_count=count, repeats=repeats, size=options.size, batch=options.batch)
            times = trio.run(run)
        row = [str(count)]
        for stage in STAGES:
            least, median = (
                found / count / options.batch / 1e3 for found in (min(times[stage]), statistics.median(times[stage]))
            )
            runs.append({"chunk": count, "stage": stage, "least_us": least, "median_us": median})
            row.append(f"{least:.2f} ({median:.2f})")
        rows.append(row)
    question = f"CPU µs a message of {options.size} bytes in each stage of the master, least (median) of many chunks"
    if options.batch > 1:
        question += f", requests of {options.batch} messages"
    report(question, runs, ["chunk", *STAGES], rows)


if __name__ == "__main__":
    main()
