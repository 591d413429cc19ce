"""A load generator that needs less processor time than the servers: prepared frames, blocking sockets, no event loop.

Keeps `--in-flight` SEND_MESSAGE_V2 requests (JSON headers) in flight, spread evenly over `--connections`, and these
over the brokers; it opens no more connections than requests, and at least one per broker. It works with any broker that
speaks RocketMQ's protocol. A frame is a template in which only the ten digits of the opaque change, so a message costs
a join and a search; the code of every response is still checked. For k responses it writes k new requests at once.
Prints one line of JSON. Latencies are measured from just before the write to just after the read; the gap is the
longest time without a response. With `--batch` each request is a SEND_BATCH_MESSAGE, and all figures are still per
request.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import ExitStack

FIRST_OPAQUE = 1_000_000_000  # always ten digits
QUEUE_COUNT = 4
READ_BYTES = 1 << 16  # malloc would map and unmap a larger buffer for each read
SILENCE_S = 30


def templates(
    topic: str, size: int, group: str, queue_count: int = QUEUE_COUNT, batch: int = 1
) -> list[tuple[bytes, bytes]]:
    """Returns for each queue the frame of a send in two parts: before and after the digits of its opaque."""
    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    if batch > 1:
        body = _message(body) * batch
    found = []
    for queue_id in range(queue_count):
        fields = {
            "a": group,
            "b": topic,
            "c": "TBW102",
            "d": str(queue_count),
            "e": str(queue_id),
            "f": "0",
            "g": str(time.time_ns() // 1_000_000),
            "h": "0",
            "i": "TAGS\x01bench\x02",
            "j": "0",
            "k": "false",
            "m": "true" if batch > 1 else "false",
        }
        header = json.dumps(
            {
                "code": 310 if batch == 1 else 320,
                "extFields": fields,
                "flag": 0,
                "language": "PYTHON",
                "opaque": FIRST_OPAQUE,
                "serializeTypeCurrentRPC": "JSON",
                "version": 479,
            },
            separators=(",", ":"),
        ).encode()
        before, after = header.split(str(FIRST_OPAQUE).encode())
        frame = struct.pack(">ii", 4 + len(header) + len(body), len(header))
        found.append((frame + before, after + body))
    return found


def _message(body: bytes) -> bytes:
    """Encodes a message of a batch like MessageDecoder.encodeMessage; magic, CRC and flag are not checked."""
    properties = b"TAGS\x01bench\x02"
    size = 4 + 4 + 4 + 4 + 4 + len(body) + 2 + len(properties)
    return struct.pack(">iiiii", size, 0, 0, 0, len(body)) + body + struct.pack(">h", len(properties)) + properties


def connected(host: str, port: int) -> socket.socket:
    """Connects a socket that times out after SILENCE_S through SO_RCVTIMEO, since Python's own timeout would call
    poll() before each operation.
    """
    connection = socket.create_connection((host, port), timeout=SILENCE_S)
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", SILENCE_S, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Load:
    """One connection under constant load."""

    def __init__(self, connection: socket.socket, frames: list[tuple[bytes, bytes]]) -> None:
        self._connection = connection
        self._frames = frames
        self._sent_ns: dict[int, int] = {}
        self._next = FIRST_OPAQUE
        self._buffer = b""
        self.codes: Counter[int] = Counter()
        self.done = 0

    def fileno(self) -> int:
        """Returns the descriptor of its connection."""
        return self._connection.fileno()

    @property
    def is_waiting(self) -> bool:
        """Whether a request is unanswered."""
        return bool(self._sent_ns)

    def send(self, count: int) -> None:
        """Writes `count` requests with one call."""
        parts: list[bytes] = []
        opaque = self._next
        frames = self._frames
        queue_count = len(frames)
        for opaque in range(self._next, self._next + count):
            before, after = frames[opaque % queue_count]
            parts += (before, b"%d" % opaque, after)
        self._next += count
        data = b"".join(parts)
        now = time.perf_counter_ns()
        for opaque in range(self._next - count, self._next):
            self._sent_ns[opaque] = now
        self._connection.sendall(data)

    def receive(self, latencies_ns: list[int] | None) -> int:
        """Reads what is available, at least one response, and returns the number of responses."""
        count = 0
        while count == 0:
            try:
                chunk = self._connection.recv(READ_BYTES)
            except BlockingIOError:  # SO_RCVTIMEO
                raise SystemExit(f"no response within {SILENCE_S} s") from None
            if not chunk:
                raise SystemExit("the broker closed the connection")
            now = time.perf_counter_ns()
            data = self._buffer + chunk if self._buffer else chunk
            at, end = 0, len(data)
            while end - at >= 8:
                length = int.from_bytes(data[at : at + 4], "big")
                if end - at < 4 + length:
                    break
                header = data[at + 8 : at + 4 + length]
                mark = header.index(b'"opaque":') + 9
                digits_end = mark + 10
                sent = self._sent_ns.pop(int(header[mark:digits_end]))
                if latencies_ns is not None:
                    latencies_ns.append(now - sent)
                if header.find(b'"code":0,') < 0:
                    self._failed(header)
                else:
                    self.codes[0] += 1
                count += 1
                at += 4 + length
            self._buffer = data[at:]
        self.done += count
        return count

    def _failed(self, header: bytes) -> None:
        answer = json.loads(header.decode())
        self.codes[answer["code"]] += 1
        if answer["code"] not in (10, 11, 12):  # FLUSH_DISK_TIMEOUT, SLAVE_NOT_AVAILABLE, FLUSH_SLAVE_TIMEOUT
            raise SystemExit(f"the broker rejected a send: {answer}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--broker", required=True, metavar="HOST:PORT", action="append", help="can be repeated")
    parser.add_argument("--topic", default="bench")
    parser.add_argument("--in-flight", type=int, default=64, help="requests in flight, over all connections")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--queues", type=int, default=QUEUE_COUNT, help="number of queues of the topic, used in turn")
    parser.add_argument("--topics", type=int, help="send to so many topics, TOPIC-0, TOPIC-1 …, in turn")
    parser.add_argument("--batch", type=int, default=1, help="messages per request")
    parser.add_argument("--size", type=int, default=1024, help="bytes per body")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm", type=float, default=2.0, help="warm-up time in seconds")
    parser.add_argument("--rate", type=float, help="maximum requests per second (default: no limit)")
    parser.add_argument(
        "--evenly",
        action="store_true",
        help="with --rate: send requests one by one, each at its time, instead of one for each response at once",
    )
    parser.add_argument(
        "--cores",
        type=float,
        help="maximum number of processors to use, such as 0.1, to simulate a client on another machine",
    )
    parser.add_argument("--bytes", type=int, help="stop after this many bytes of bodies instead; no warm-up")
    options = parser.parse_args()
    if options.in_flight < len(options.broker):
        parser.error("--in-flight must be at least the number of brokers")
    if options.evenly and not options.rate:
        parser.error("--evenly requires --rate")
    return options


def send_evenly(loads: Iterable[Load], poller: select.epoll, rate: float, seconds: float) -> list[int]:
    """Sends one request every 1 / `rate` seconds, each on the connection that has been idle for longest; while each
    connection has a request in flight, requests are delayed. Returns the latencies in nanoseconds.
    """
    latencies_ns: list[int] = []
    by_descriptor = {load.fileno(): load for load in loads}
    for load in by_descriptor.values():
        while load.is_waiting:
            load.receive(None)
    idle = deque(by_descriptor.values())
    clock = time.perf_counter
    due_s = clock()
    end_s = due_s + seconds
    while (now_s := clock()) < end_s:
        while idle and due_s <= now_s:
            idle.popleft().send(1)
            due_s += 1 / rate
        # The kernel rounds this up to a millisecond, after which the requests that are due are sent together.
        for descriptor, _ in poller.poll(max(0.0, due_s - now_s) if idle else SILENCE_S):
            load = by_descriptor[descriptor]
            load.receive(latencies_ns)
            if not load.is_waiting:
                idle.append(load)
    return latencies_ns


def main() -> None:
    options = _options()
    brokers = [(host, int(port)) for host, _, port in (broker.rpartition(":") for broker in options.broker)]
    count = max(min(options.connections, options.in_flight), len(brokers))
    shares = [options.in_flight // count + (number < options.in_flight % count) for number in range(count)]
    with ExitStack() as stack, select.epoll() as poller:
        topics = [f"{options.topic}-{number}" for number in range(options.topics or 0)] or [options.topic]
        frames = [
            each for topic in topics for each in templates(topic, options.size, "bench", options.queues, options.batch)
        ]
        loads = []
        by_descriptor = {}
        for number in range(count):
            connection = stack.enter_context(connected(*brokers[number % len(brokers)]))
            loads.append(Load(connection, frames))
            by_descriptor[loads[-1].fileno()] = loads[-1]
            poller.register(connection, select.EPOLLIN)

        def answered() -> Iterable[Load]:
            """Yields the connections to read from; if there is only one, reading it blocks."""
            return loads if count == 1 else [by_descriptor[each] for each, _ in poller.poll(SILENCE_S)]

        for load in loads[: len(brokers)]:  # one message first, so that the topic exists
            load.send(1)
            load.receive(None)
        for load, share in zip(loads, shares, strict=True):
            load.send(share)
        clock = time.perf_counter
        warm_end = clock() + (0 if options.bytes else options.warm)
        while clock() < warm_end:
            for load in answered():
                load.send(load.receive(None))
        latencies_ns: list[int] = []
        started, cpu_started = clock(), time.process_time()
        last = started
        gap_s: float | None = None if options.evenly else 0.0
        wanted = -(-options.bytes // (options.size * options.batch)) if options.bytes else sys.maxsize
        end = started + (1e9 if options.bytes else options.seconds)
        if options.evenly:
            latencies_ns = send_evenly(loads, poller, options.rate, options.seconds)
        while clock() < end and len(latencies_ns) < wanted:
            for load in answered():
                load.send(load.receive(latencies_ns))
            now = clock()
            last, gap_s = now, max(gap_s or 0.0, now - last)
            if options.rate:
                time.sleep(max(0.0, started + len(latencies_ns) / options.rate - clock()))
            if options.cores:
                time.sleep(max(0.0, started + (time.process_time() - cpu_started) / options.cores - clock()))
        seconds, cpu = clock() - started, time.process_time() - cpu_started
        for load in loads:
            while load.is_waiting:
                load.receive(None)
    print(json.dumps(_figures(options, loads, latencies_ns, seconds, cpu, gap_s)))


def _figures(
    options: argparse.Namespace,
    loads: list[Load],
    latencies_ns: list[int],
    seconds: float,
    cpu_s: float,
    gap_s: float | None,
) -> dict[str, object]:
    """Returns the figures of a run; without the gap if it was not measured."""
    measured = len(latencies_ns)
    latencies_ns.sort()

    def at_us(quantile: float) -> float:
        return latencies_ns[min(measured - 1, int(quantile * measured))] / 1e3

    gap = {} if gap_s is None else {"gap_us": gap_s * 1e6}
    return {
        "n": measured,
        "secs": seconds,
        "n_all": sum(load.done for load in loads),
        "rate": measured / seconds,
        "p50_us": at_us(0.5),
        "p99_us": at_us(0.99),
        "p999_us": at_us(0.999),
        "max_us": at_us(1.0),
        **gap,
        "client_us": cpu_s / measured * 1e6,
        "codes": dict(sum((load.codes for load in loads), Counter[int]())),
        "connections": len(loads),
        "in_flight": options.in_flight,
        "size": options.size,
    }


if __name__ == "__main__":
    main()
