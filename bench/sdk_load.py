"""Puts constant load on a broker through the SDK, in a separate process, as an application would.

`produce`: tasks that each send a message, await its result, and send the next one; with `--together`, a task sends
several messages per call of send_many. `consume`: reads every queue of a topic from start to end, with
PullConsumer.reading or one pull after the other, and accesses each message's body. Prints one line of JSON; processor
time is that of this process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from ha.client import ClientOptions, Message, Producer, PullConsumer, ReceivedMessage, SendStatus
from ha.errors import HalogError

TAG = "bench"
IsEnough = Callable[[list[ReceivedMessage]], Awaitable[bool]]


async def produce(options: argparse.Namespace) -> dict[str, Any]:
    """Sends for `--seconds` after `--warm` seconds."""
    body = (b"0123456789abcdef" * (options.size // 16 + 1))[: options.size]
    acknowledged = 0
    others: Counter[SendStatus] = Counter()
    latencies_ns: list[int] = []
    clock = time.perf_counter_ns
    compressing = ClientOptions(compress_from_bytes=options.size + 1, batching=not options.without_batching)
    async with Producer(options.name_server, group="bench", options=compressing) as producer:
        await producer.send(Message(options.topic, body, tags=TAG))
        warm_end = clock() + int(options.warm * 1e9)
        end = warm_end + int(options.seconds * 1e9)

        async def send_on() -> None:
            nonlocal acknowledged
            started = clock()
            while started < end:
                result = await producer.send(Message(options.topic, body, tags=TAG))
                now = clock()
                if started >= warm_end:
                    latencies_ns.append(now - started)
                if result.status is SendStatus.SEND_OK:
                    acknowledged += 1
                else:
                    others[result.status] += 1
                started = now

        async def send_together() -> None:
            nonlocal acknowledged
            started = clock()
            while started < end:
                outcomes = await producer.send_many(
                    [Message(options.topic, body, tags=TAG) for _ in range(options.together)]
                )
                now = clock()
                if started >= warm_end:
                    latencies_ns.extend([now - started] * len(outcomes))
                for outcome in outcomes:
                    if isinstance(outcome, HalogError):
                        raise outcome
                    if outcome.status is SendStatus.SEND_OK:
                        acknowledged += 1
                    else:
                        others[outcome.status] += 1
                started = now

        async with anyio.create_task_group() as tasks:
            for _ in range(options.in_flight // options.together):
                tasks.start_soon(send_on if options.together == 1 else send_together)
            await anyio.sleep(options.warm)
            cpu_started, started = time.process_time(), clock()
            await anyio.sleep(options.seconds)
            cpu, seconds = time.process_time() - cpu_started, (clock() - started) / 1e9
            count = len(latencies_ns)
    latencies_ns.sort()
    return {
        "rate": count / seconds,
        "client_us": cpu / count * 1e6,
        "p50_us": latencies_ns[count // 2] / 1e3,
        "p99_us": latencies_ns[int(count * 0.99)] / 1e3,
        "n_all": acknowledged + others.total() + 1,
        "statuses": {"SEND_OK": acknowledged} | {status.value: number for status, number in others.items()},
    }


async def consume(options: argparse.Namespace) -> dict[str, Any]:
    """Consumes `--count` messages, starting again when the queues end."""
    count = byte_count = pull_count = 0

    async def is_enough(messages: list[ReceivedMessage]) -> bool:
        nonlocal count, byte_count, pull_count
        for message in messages:
            byte_count += len(message.body)
        count += len(messages)
        pull_count += 1
        if options.rate:
            await anyio.sleep(max(0.0, started + count / options.rate - time.perf_counter()))
        return bool(count >= options.count)

    take_all = _pull_all if options.one_by_one else _read_all
    async with PullConsumer(options.name_server, group="bench-reader") as consumer:
        await consumer.queues(options.topic)
        cpu_started, started = time.process_time(), time.perf_counter()
        while count < options.count:
            await take_all(consumer, options.topic, options.pull, is_enough)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    return {
        "rate": count / seconds,
        "client_us": cpu / count * 1e6,
        "mb_per_s": byte_count / seconds / 1e6,
        "per_pull": count / pull_count,
        "n_all": count,
    }


async def _pull_all(consumer: PullConsumer, topic: str, most: int, is_enough: IsEnough) -> None:
    for queue in await consumer.queues(topic):
        offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
        while offset < end:
            result = await consumer.pull(queue, offset, max_messages=most)
            if await is_enough(result.messages):
                return
            offset = result.next_offset


async def _read_all(consumer: PullConsumer, topic: str, most: int, is_enough: IsEnough) -> None:
    async with consumer.reading(topic, max_messages=most) as reading:
        async for stretch in reading:
            if await is_enough(stretch.messages):
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["produce", "consume"])
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="trio")
    parser.add_argument("--name-server", required=True, metavar="HOST:PORT")
    parser.add_argument("--topic", default="bench")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--without-batching", action="store_true")
    parser.add_argument(
        "--together",
        type=int,
        choices=range(1, 1025),
        metavar="N",
        default=1,
        help="messages per call of send_many (default: use send)",
    )
    parser.add_argument("--size", type=int, default=1024, help="bytes per body")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm", type=float, default=2.0, help="warm-up time in seconds")
    parser.add_argument("--count", type=int, default=500_000, help="messages to consume")
    parser.add_argument("--rate", type=float, help="maximum messages to consume per second (default: no limit)")
    parser.add_argument("--pull", type=int, default=1024, help="messages per pull")
    parser.add_argument(
        "--one-by-one", action="store_true", help="one pull after the other instead of PullConsumer.reading"
    )
    options = parser.parse_args()
    if options.in_flight % options.together:
        parser.error("--in-flight must be a multiple of --together")
    run = anyio.run({"produce": produce, "consume": consume}[options.what], options, backend=options.backend)
    print(json.dumps(run | {"backend": options.backend, "in_flight": options.in_flight, "size": options.size}))


if __name__ == "__main__":
    main()
