"""Processor time of a pulled message in each stage of the master, in one process without sockets or peers.

    parse     RemotingParser: a pull's frame to a request
    read      QueueReader: a queue offset to encoded records
    encode    the response's header and frame
    whole     everything, through PullProcessor, as the connection's reader calls it

Records belong to one queue and are adjacent in the log, or belong to `--queues` queues alternately. They are *hot* if
the store has them in memory, and *cold* if it reads and verifies them from the file in the page cache. A stage's time
is the processor time of this thread per message; the table shows the minimum of all pulls and the median.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from time import thread_time_ns
from typing import Any, cast

import trio

from bench.measure import empty_folder, report
from ha.broker.core import BrokerCore
from ha.broker.options import BrokerOptions
from ha.broker.pull import PullProcessor
from ha.broker.put import PutService
from ha.broker.queue_read import QueueReader
from ha.broker.tables import Tables
from ha.broker.world import World
from ha.protocol.codes import PullSysFlag, RequestCode
from ha.protocol.headers import PullMessageRequest
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, encode_host
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from ha.remoting import RemotingConnection
from ha.store.message_store import MessageStore, open_message_store
from ha.store.options import StoreOptions

STAGES = ("parse", "read", "encode", "whole")
TOPIC = "bench"
_PUT_COUNT = 512


class Sink:
    """Replaces the connection; sends nothing."""

    peer = ("127.0.0.1", 50_000)
    is_closed = False


async def fill(store: MessageStore, queue_count: int, messages: int, size: int) -> None:
    """Stores messages of an SDK client in each queue alternately."""
    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    properties = encode_properties({"UNIQ_KEY": "7F" * 16, "TAGS": "bench", "WAIT": "true"})
    host = encode_host("127.0.0.1", 40_000)
    for begin in range(0, messages, _PUT_COUNT):
        await store.log.put(
            [
                Message(TOPIC, number % queue_count, body, properties, born_timestamp_ms=1, born_host=host)
                for number in range(begin, min(messages, begin + _PUT_COUNT))
            ]
        )
    while store.log.dispatched_offset.value < store.log.max_offset.value:
        await store.log.dispatched_offset.wait_beyond(store.log.dispatched_offset.value)


async def measure(
    folder: Path, *, count: int, queue_count: int, messages: int, size: int, repeats: int, is_cold: bool
) -> dict[str, list[int]]:
    """Returns the nanoseconds of each pull, by stage."""
    options = BrokerOptions(config_dir=folder / "config", transfer_hot_count_max=count, transfer_hot_bytes_max=16 << 20)
    times: dict[str, list[int]] = {stage: [] for stage in STAGES}
    clock = thread_time_ns
    store_options = StoreOptions(root=folder, hot_window_bytes=0 if is_cold else 1 << 40)
    async with open_message_store(store_options) as store:
        world = World(unique_id=str)
        tables = Tables(store, options, world)
        await tables.load()
        await tables.topics.ensure(TOPIC, queue_count)
        await fill(store, queue_count, messages, size)
        reader = QueueReader(store.log, options, run_blocking=store.run_blocking)
        puller = PullProcessor(
            BrokerCore(options=options, store=store, tables=tables, puts=PutService(store, None, options), world=world)
        )
        connection, parser = cast(RemotingConnection, Sink()), RemotingParser()
        end = messages // queue_count
        offset = queue_id = 0
        for _ in range(repeats):
            if offset + count > end:
                offset, queue_id = 0, (queue_id + 1) % queue_count
            frame = encode_command(_pull(queue_id, offset, count))
            queue = store.queues.get(TOPIC, queue_id)
            marks = [clock()]
            (command,) = parser.feed(frame)
            marks.append(clock())
            await reader.read(queue, offset, message_count_max=count, message_bytes_max=16 << 20, tags_codes=None)
            marks.append(clock())
            answer = await puller.handle(connection, command)
            assert answer is not None
            before = clock()
            encoded = encode_command(answer)
            marks.append(clock())
            times["parse"].append(marks[1] - marks[0])
            times["read"].append(marks[2] - marks[1])
            times["encode"].append(marks[3] - before)
            times["whole"].append(marks[3] - marks[2] + marks[1] - marks[0])
            if len(encoded) < count * size:
                raise SystemExit(f"not all messages were read: {answer.remark}")
            offset += count
    return times


def _pull(queue_id: int, offset: int, count: int) -> RemotingCommand:
    header = PullMessageRequest(
        consumer_group="bench-reader",
        topic=TOPIC,
        queue_id=queue_id,
        queue_offset=offset,
        max_msg_nums=count,
        sys_flag=PullSysFlag.SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
        subscription="*",
        expression_type="TAG",
    )
    return RemotingCommand(RequestCode.PULL_MESSAGE, ext_fields=header.to_ext_fields())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pull", type=int, nargs="+", default=[1, 32, 1024], help="messages per pull")
    parser.add_argument(
        "--queues", type=int, nargs="+", default=[1, 16], help="number of queues whose records alternate"
    )
    parser.add_argument("--size", type=int, default=1024, help="bytes per body")
    parser.add_argument("--messages", type=int, default=32_768, help="messages in the log")
    parser.add_argument(
        "--pulled", type=int, default=60_000, help="messages to pull of each kind, in at most 1,000 pulls"
    )
    parser.add_argument("--directory", type=Path, help="directory for the store (default: a temporary one)")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    rows = []
    for is_cold in (False, True):
        for queue_count in options.queues:
            for count in options.pull:
                with empty_folder(options.directory) as folder:
                    run = partial(
                        measure,
                        folder,
                        count=count,
                        queue_count=queue_count,
                        messages=options.messages,
                        size=options.size,
                        repeats=max(1, min(1000, options.pulled // count)),
                        is_cold=is_cold,
                    )
                    times = trio.run(run)
                kind = f"{'cold' if is_cold else 'hot'}, {queue_count} queue{'s' if queue_count > 1 else ''}"
                row = [f"{count:,}", kind]
                for stage in STAGES:
                    least, median = (f(times[stage]) / count / 1e3 for f in (min, statistics.median))
                    runs.append({"pull": count, "kind": kind, "stage": stage, "least_us": least, "median_us": median})
                    row.append(f"{least:.2f} ({median:.2f})")
                rows.append(row)
    question = f"CPU µs a message of {options.size} bytes in each stage of a pull, least (median) of many pulls"
    report(question, runs, ["a pull", "records", *STAGES], rows)


if __name__ == "__main__":
    main()
