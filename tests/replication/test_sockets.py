"""Over sockets: sends without a turn of the event loop, and partial writes.

The test holds the peer's end as a plain socket: what is in it after a call was sent during that call.
"""

import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.poller import Poller
from ha.protocol.ha_frame import TransferBody, TransferHeader, TransferParser, encode_report, encode_transfer_header
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.progress import CloseReason
from ha.replication.statistics import Condition
from tests.replication.memory_log import MemoryLog

pytestmark = pytest.mark.real_time

SEGMENT = 1 << 20


class Peer:
    """The other end of a connection."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.socket = ours
        self.theirs = theirs
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        self._parser = TransferParser()

    def received(self) -> bytes:
        """Return what was received so far."""
        found = b""
        with suppress(BlockingIOError):
            while chunk := self.socket.recv(1 << 16):
                found += chunk
        return found

    def frames(self) -> list[tuple[int, bytes]]:
        """Position and body of each frame received so far; a frame without its header has position -1."""
        found: list[tuple[int, bytes]] = []
        for event in self._parser.feed(self.received()):
            if isinstance(event, TransferHeader):
                found.append((event.physical_offset, b""))
            elif isinstance(event, TransferBody):
                position, body = found.pop() if found else (-1, b"")
                found.append((position, body + bytes(event.chunk)))
        return found

    def report(self, offset: int) -> None:
        self.socket.sendall(encode_report(offset))


@asynccontextmanager
async def serving(log: MemoryLog, options: HAOptions | None = None) -> AsyncIterator[tuple[HAService, Peer]]:
    """A master, and a slave controlled by the test that has all of its log."""
    service, slave = HAService(log, options), Peer()
    with slave.socket:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.handle, slave.stream, "10.0.0.2:1")
            slave.report(log.max_offset.value)
            await wait_all_tasks_blocked()
            assert slave.received() == b""
            yield service, slave
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def following(
    log: MemoryLog, options: HAOptions | None = None, poller: Poller | None = None
) -> AsyncIterator[tuple[HAClient, Peer]]:
    """A slave that has reported where it is, and a master controlled by the test."""
    master = Peer()
    streams = [master.stream]

    async def connect(address: str) -> trio.abc.Stream:
        if not streams:
            raise OSError("there is one connection only")
        return streams.pop()

    client = HAClient(log, options or HAOptions(overlap_bytes_max=0), connect, poller=poller)
    client.set_master("10.0.0.1:10912")
    with master.socket:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            await wait_all_tasks_blocked()
            assert master.received() == encode_report(log.max_offset.value)
            yield client, master
            nursery.cancel_scope.cancel()


def log_of(size: int) -> MemoryLog:
    return MemoryLog(bytes(size), segment_size=SEGMENT)


async def test_a_single_put_is_sent_at_once() -> None:
    log = log_of(100)
    async with serving(log) as (_, slave):
        log.put(b"alone")
        assert slave.frames() == [(100, b"alone")]
        await wait_all_tasks_blocked()
        assert slave.frames() == []


async def test_puts_behind_one_in_flight_are_sent_together() -> None:
    log = log_of(100)
    async with serving(log) as (_, slave):
        for body in (b"first", b"second", b"third"):
            log.put(body)
        assert slave.frames() == [(100, b"first")]
        await wait_all_tasks_blocked()
        assert slave.frames() == [(105, b"secondthird")]
        slave.report(105)
        await wait_all_tasks_blocked()
        log.put(b"fourth")
        assert slave.frames() == []
        slave.report(116)
        await wait_all_tasks_blocked()
        assert slave.frames() == [(116, b"fourth")]


async def test_bytes_of_two_segments_are_two_frames() -> None:
    log = log_of(SEGMENT - 3)
    async with serving(log) as (_, slave):
        log.put(b"abcdef")
        await wait_all_tasks_blocked()
        assert slave.frames() == [(SEGMENT - 3, b"abc"), (SEGMENT, b"def")]


async def test_a_slave_under_flow_control_gets_no_more_than_its_share(mock_clock: trio.testing.MockClock) -> None:
    log = log_of(100)  # the clock stands still: the budget grows every tenth of a second
    async with serving(log, HAOptions(transfer_bytes_per_s_max=2000)) as (_, slave):
        log.put(bytes(5000))
        assert slave.frames() == []
        await wait_all_tasks_blocked()
        assert [len(body) for _, body in slave.frames()] == [200 - 12]


async def test_partial_writes_are_completed_in_order() -> None:
    log = log_of(100)
    content = random.Random(5).randbytes(90_000)
    async with serving(log) as (service, slave):
        log.put(content[:60_000])
        log.put(content[60_000:])
        received = b""
        while len(received) < 90_000:
            await wait_all_tasks_blocked()
            frames = slave.frames()
            assert frames
            received += b"".join(body for _, body in frames)
        assert received == content
        assert service.connection_count == 1


async def test_a_lost_slave_does_not_disturb_puts() -> None:
    log = log_of(100)
    async with serving(log) as (service, slave):
        slave.socket.close()
        log.put(b"to nobody")
        log.put(b"either")
        await wait_all_tasks_blocked()
        assert service.statistics().closed_counts == {CloseReason.CONNECTION_LOST: 1}
        assert service.connection_count == 0


async def test_frames_that_come_together_are_reported_once() -> None:
    log = log_of(100)
    async with following(log) as (_, master):
        frames = encode_transfer_header(100, 3) + b"one" + encode_transfer_header(103, 3) + b"two"
        master.socket.sendall(frames)
        await wait_all_tasks_blocked()
        assert master.received() == encode_report(106)


async def test_with_ack_flushed_the_flush_is_reported_at_once() -> None:
    log = log_of(100)
    log.flushes = False
    async with following(log, HAOptions(overlap_bytes_max=0, ack_flushed=True)) as (_, master):
        master.socket.sendall(encode_transfer_header(100, 5) + b"bytes")
        await wait_all_tasks_blocked()
        assert log.max_offset.value == 105
        assert master.received() == b""
        log.flush()
        assert master.received() == encode_report(105)


async def test_a_partially_sent_report_is_completed_once() -> None:
    log = log_of(100)
    async with following(log) as (client, master):
        filling = 0
        with suppress(BlockingIOError):
            while True:
                filling += master.theirs.send(bytes(512))
        for body in (b"one", b"two"):
            master.socket.sendall(encode_transfer_header(log.max_offset.value, 3) + body)
            await wait_all_tasks_blocked()
        assert log.max_offset.value == 106
        received = b""
        while len(received) < filling + 16:
            received += master.received()
            await wait_all_tasks_blocked()
        assert received[filling:] == encode_report(103) + encode_report(106)
        assert client.statistics().reported_offset == 106


async def test_a_lost_master_at_a_flush_report_ends_only_the_session() -> None:
    log = log_of(100)
    log.flushes = False
    async with following(log, HAOptions(overlap_bytes_max=0, ack_flushed=True)) as (client, master):
        master.socket.sendall(encode_transfer_header(100, 5) + b"bytes")
        await wait_all_tasks_blocked()
        master.socket.close()
        log.flush()
        await wait_all_tasks_blocked()
        ended = Counter(client.statistics().ended_counts)
        assert ended.total() - ended[Condition.CONNECT_FAILED] == 1
