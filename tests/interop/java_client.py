"""The real RocketMQ client in its own JVM: commands in, events out (see java/InteropClient.java)."""

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import trio

from tests.interop.processes import Child, Children
from tests.interop.releases import Release

Event = dict[str, Any]
# Small enough for a machine shared with brokers; optimized for a quick start.
_JVM = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


class ClientError(Exception):
    """A command ended with an exception in the JVM, or the JVM ended."""


@dataclass
class Call:
    """One running command. `events` has all events so far."""

    name: str
    events: list[Event] = field(default_factory=list)
    grown: trio.Event = field(default_factory=trio.Event)

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.grown.set()
        self.grown = trio.Event()

    async def wait(self, event_name: str, within_s: float = 60.0, **at_least: int) -> Event:
        """Waits for the first event of that name whose given numbers are at least those given. Raises ClientError."""
        position = 0
        with trio.fail_after(within_s):
            while True:
                while position == len(self.events):
                    await self.grown.wait()
                event = self.events[position]
                position += 1
                if event["event"] == "failed":
                    raise ClientError(f"{self.name}: {event['error']}")
                if event["event"] == event_name and all(event[key] >= least for key, least in at_least.items()):
                    return event
                if event["event"] == "done":
                    raise ClientError(f"{self.name} ended without {event_name} {at_least}: {event}")

    async def result(self, within_s: float = 120.0) -> list[Event]:
        """Waits for the end of the command; returns all events, of which the last one is "done"."""
        await self.wait("done", within_s)
        return self.events


class Consumed(NamedTuple):
    """A received message. `crc` is that of the received body."""

    queue_id: int
    queue_offset: int
    physical_offset: int
    sequence: int
    size: int
    crc: int
    message_id: str
    tags: str
    keys: str


class Acked(NamedTuple):
    """A message that a broker reported as stored, and its offset (from the offset message id of the response)."""

    status: str
    sequence: int
    physical_offset: int
    queue_id: int
    queue_offset: int
    size: int
    crc: int
    store_host: str
    message_id: str


class JavaClient:
    """One JVM with the client of one release, talking to one name server."""

    def __init__(self, release: Release, name_server: str) -> None:
        self.release = release
        self.name_server = name_server
        self.child: Child | None = None
        self._calls: dict[str, Call] = {}
        self._sending = trio.Lock()

    async def start(self, name: str, **options: Any) -> Call:
        assert self.child is not None
        number = str(len(self._calls))
        call = self._calls[number] = Call(name)
        options = {"nameServer": self.name_server, **options}
        words = [number, name, *(f"{key}={value}" for key, value in options.items())]
        async with self._sending:
            await self.child.stdin.send_all((" ".join(words) + "\n").encode())
        return call

    async def run(self, name: str, *, within_s: float = 120.0, **options: Any) -> list[Event]:
        return await (await self.start(name, **options)).result(within_s)

    async def send(self, topic: str, count: int = 1, **options: Any) -> list[Event]:
        """Returns the "sent" events of `count` single sends, ordered by sequence."""
        events = await self.run("send", topic=topic, count=count, **options)
        sent = [event for event in events if event["event"] == "sent"]
        return sorted(sent, key=lambda event: int(event["sequence"]))

    async def send_until(self, topic: str, status: str, within_s: float = 60.0, **options: Any) -> Event:
        """Sends messages until one gets `status`, which shows that a slave attached or left."""
        deadline = trio.current_time() + within_s
        while True:
            event = (await self.send(topic, **options))[0]
            if event["status"] == status:
                return event
            if trio.current_time() > deadline:
                raise AssertionError(f"no send had {status} within {within_s} s; the last: {event}")
            await trio.sleep(0.2)

    async def offsets(self, topic: str, group: str, **options: Any) -> list[Event]:
        """Returns the "queue" events of a topic: min, max and the group's committed offset of each queue, in order."""
        return (await self.run("offsets", topic=topic, group=group, **options))[:-1]

    async def wait_route(self, topic: str, within_s: float = 40.0, **options: Any) -> None:
        """Waits until the name server has a route to the topic: 5.5.0 first registers ten seconds after its start."""
        deadline = trio.current_time() + within_s
        while True:
            try:
                await self.offsets(topic, "nobody", **options)
                return
            except ClientError:
                if trio.current_time() > deadline:
                    raise
            await trio.sleep(0.2)

    async def consume(self, topic: str, out: Path, **options: Any) -> list[Consumed]:
        """Returns all messages of a topic, queue by queue, in the order of the server."""
        await self.run("consume", topic=topic, out=out, **options)
        return _read_consumed(out)

    def _take(self, line: str) -> None:
        if line.startswith("{"):
            event = json.loads(line)
            self._calls[event["id"]].add(event)

    async def _fail_calls_at_end(self) -> None:
        assert self.child is not None
        await self.child.ended.wait()
        reason = f"the client's JVM ended with {self.child.exit_code}\n{self.child.tail()}"
        for call in self._calls.values():
            call.add({"event": "failed", "error": reason})


def _read_consumed(path: Path) -> list[Consumed]:
    consumed = []
    for line in path.read_text().splitlines():
        *numbers, message_id, tags, keys = line.split(" ")
        queue, queue_offset, offset, sequence, size, crc = map(int, numbers)
        consumed.append(Consumed(queue, queue_offset, offset, sequence, size, crc, message_id, tags, keys))
    return consumed


def read_acks(path: Path) -> list[Acked]:
    """Reads the output of "produce"."""
    acks = []
    for line in path.read_text().splitlines():
        status, *numbers, store_host, message_id = line.split(" ")
        sequence, offset, queue, queue_offset, size, crc = map(int, numbers)
        acks.append(Acked(status, sequence, offset, queue, queue_offset, size, crc, store_host, message_id))
    return acks


@asynccontextmanager
async def open_java_client(
    children: Children, release: Release, name_server: str, *jvm: str
) -> AsyncIterator[JavaClient]:
    """Runs a JVM while the block runs; commands still running at its end are aborted. `jvm`: further JVM options."""
    client = JavaClient(release, name_server)
    command = [
        "java",
        *_JVM,
        *jvm,
        f"-Duser.home={children.folder / 'client-home'}",
        "-Drocketmq.client.logUseSlf4j=true",
    ]
    command += [f"-XX:SharedArchiveFile={release.shared_classes}", "-cp", release.client_class_path, "InteropClient"]
    client.child = children.start_soon(f"client-{release.version}{len(jvm) or ''}", command, on_line=client._take)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client._fail_calls_at_end)
        try:
            yield client
        finally:
            client.child.send_signal(signal.SIGKILL)
