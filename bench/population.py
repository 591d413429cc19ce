"""Thousands of simulated clients in one process: a connection each, with at most one request in flight.

No more than MAX_PER_ADDRESS connections come from one loopback address. Latencies are measured from just before the
write to just after the read that completes the response.
"""

from __future__ import annotations

import heapq
import json
import random
import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Self

MAX_PER_ADDRESS = 2_000
IN_FLIGHT_MAX = 64
SPARE_FILES = 512
READ_BYTES = 1 << 18
ANSWER_S_MAX = 120.0
FLAG_RESPONSE = 1


def raise_file_limit(connection_count: int) -> None:
    """Raises the limit of open files of this process, and of those that it starts, for this many connections.

    Raises OSError if the process may not do that.
    """
    needed = connection_count + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), max(hard, needed)))
    except (ValueError, OSError):
        raise OSError(f"{needed} open files are needed, and the limit is {hard}: run it as root") from None


def frame(code: int, fields: dict[str, str], body: bytes = b"") -> bytes:
    """Encodes a request."""
    header = {"code": code, "extFields": fields, "flag": 0, "language": "JAVA", "opaque": 1, "version": 399}
    text = json.dumps({**header, "serializeTypeCurrentRPC": "JSON"}, separators=(",", ":")).encode()
    return struct.pack(">ii", 4 + len(text) + len(body), len(text)) + text + body


class Connection:
    """A connection with at most one request in flight."""

    def __init__(self, target: tuple[str, int], source: str, request: bytes) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24), 1)
        self.socket.bind((source, 0))
        self.socket.connect(target)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.request = request
        self._unsent = memoryview(b"")
        self._received = b""
        self.sent_at = 0.0

    def ask(self) -> bool:
        """Sends its request; returns whether the system accepted all of it."""
        self.sent_at = time.perf_counter()
        self._unsent = memoryview(self.request)
        return self.send_rest()

    def send_rest(self) -> bool:
        """Sends what the system accepts; returns whether nothing is left."""
        while self._unsent:
            try:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except BlockingIOError:
                return False
        return True

    def receive(self) -> int | None:
        """Returns the code of the response, or None if it is not complete. Ignores requests of the server. Raises
        SystemExit if the server closes the connection."""
        chunk = self.socket.recv(READ_BYTES)
        if not chunk:
            raise SystemExit("the server closed a connection")
        data = self._received + chunk
        found = None
        while len(data) >= 8 and len(data) >= (end := 4 + int.from_bytes(data[:4], "big")):
            header = json.loads(data[8 : 8 + (int.from_bytes(data[4:8], "big") & 0xFFFFFF)])
            if header["flag"] & FLAG_RESPONSE:
                found = int(header["code"])
            data = data[end:]
        self._received = data
        return found


class Population:
    """All connections, and the requests in flight. A context manager that closes the connections."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._poller = select.epoll()
        self._by_descriptor: dict[int, Connection] = {}
        self._in_flight: set[Connection] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in list(self._by_descriptor.values()):
            self.close(each)
        self._poller.close()

    def connect(self, request: bytes) -> Connection:
        """Opens another connection, which `ask` sends `request` on."""
        source = f"127.0.1.{1 + len(self._by_descriptor) // MAX_PER_ADDRESS}"
        made = Connection(self._target, source, request)
        self._by_descriptor[made.socket.fileno()] = made
        self._poller.register(made.socket, select.EPOLLIN)
        return made

    def close(self, connection: Connection) -> None:
        """Closes a connection."""
        self._in_flight.discard(connection)
        del self._by_descriptor[connection.socket.fileno()]
        connection.socket.close()

    @property
    def in_flight_count(self) -> int:
        """Number of requests without a response."""
        return len(self._in_flight)

    def ask(self, connection: Connection) -> None:
        """Sends a connection's request, unless its last one is not answered."""
        if connection in self._in_flight:
            return
        self._in_flight.add(connection)
        if not connection.ask():
            self._poller.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT)

    def answered(self, timeout_s: float) -> Iterator[tuple[Connection, int, float]]:
        """Waits up to `timeout_s`, and yields each connection whose response has arrived, its code, and its latency in
        seconds."""
        for descriptor, events in self._poller.poll(max(0.0, timeout_s), 512):
            connection = self._by_descriptor.get(descriptor)
            if connection is None:
                continue
            if events & select.EPOLLOUT and connection.send_rest():
                self._poller.modify(descriptor, select.EPOLLIN)
            if events & ~select.EPOLLOUT:
                code = connection.receive()
                if code is not None:
                    self._in_flight.discard(connection)
                    yield connection, code, time.perf_counter() - connection.sent_at


def ask_all(population: Population, connections: Sequence[Connection]) -> list[float]:
    """Sends each connection's request once; returns the latencies in seconds. Raises SystemExit if a request is
    rejected, or if a response is missing after ANSWER_S_MAX."""
    waiting = deque(connections)
    latencies: list[float] = []
    latest = time.monotonic() + ANSWER_S_MAX
    while len(latencies) < len(connections):
        while waiting and population.in_flight_count < IN_FLIGHT_MAX:
            population.ask(waiting.popleft())
        for _, code, latency_s in population.answered(1.0):
            if code:
                raise SystemExit(f"a request was answered with code {code}")
            latencies.append(latency_s)
        if time.monotonic() > latest:
            raise SystemExit(f"{len(latencies)} of {len(connections)} answers within {ANSWER_S_MAX:g} s")
    return latencies


def keep_asking(
    population: Population, connections: Sequence[Connection], period_s: float, seconds: float
) -> dict[Connection, list[float]]:
    """Sends each connection's request every `period_s` for `seconds`, at times that are spread randomly; returns its
    latencies in seconds. Raises SystemExit if a request is rejected."""
    began = time.monotonic()
    due = [(began + random.random() * period_s, number) for number in range(len(connections))]
    heapq.heapify(due)
    found: dict[Connection, list[float]] = {each: [] for each in connections}
    while (now := time.monotonic()) < began + seconds:
        while due[0][0] <= now:
            at, number = due[0]
            heapq.heapreplace(due, (at + period_s, number))
            population.ask(connections[number])
        for connection, code, latency_s in population.answered(min(due[0][0], began + seconds) - now):
            if code:
                raise SystemExit(f"a request was answered with code {code}")
            found[connection].append(latency_s)
    while population.in_flight_count:
        for connection, _, latency_s in population.answered(ANSWER_S_MAX):
            found[connection].append(latency_s)
    return found


def quantiles(name: str, latencies_s: list[float]) -> dict[str, float]:
    """Returns p50, p99 and maximum in milliseconds."""
    latencies_s.sort()
    points = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        f"{name}_{point}_ms": latencies_s[min(len(latencies_s) - 1, int(share * len(latencies_s)))] * 1e3
        for point, share in points.items()
    }


def watched_from_outside(is_watched: bool, steady: Callable[[], None]) -> None:
    """Runs `steady`. If `is_watched`, prints STEADY before and DONE after it, and waits for a line of input each
    time."""
    if is_watched:
        print("STEADY", flush=True)
        input()
    steady()
    if is_watched:
        print("DONE", flush=True)
        input()
