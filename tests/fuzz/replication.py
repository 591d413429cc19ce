"""HA frames, and both sides of a connection against a peer that says anything."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, NamedTuple

import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from ha.errors import RemoteProtocolError
from ha.protocol.compiled import pure
from ha.protocol.ha_frame import (
    TRANSFER_HEADER_SIZE,
    ReportParser,
    TransferBody,
    TransferHeader,
    TransferParser,
    encode_report,
    encode_transfer_header,
)
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.pump import FRAMES_MAX, pump
from ha.replication.range_question import RANGE_QUESTION, OpeningParser
from tests.fuzz.harness import Harness, pieces_of
from tests.protocol.golden import ha_connections
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog

BODY_SIZE_MAX = 5000
PAUSE = b"--pause--"
"""In the input of a session: the peer waits until everything before this has been processed"""
OWN_END = 5000
PUMP_OFFSET, PUMP_POSITION, PUMP_ROOM = 1000, 7, 100
"""Where the log of the pump ends, where that is in its file, and how many bytes fit"""


class Pumped(NamedTuple):
    """The result of a call of the pump, its buffer, and what it has written to the file and the socket."""

    found: tuple[int, int, int, int]
    buffer: bytes
    written: bytes
    report: bytes


def parsers(data: bytes) -> None:
    """The frames of both directions, whole and in pieces."""
    whole, refused = transfers([data])
    for cut in pieces_of(data):
        assert transfers(cut) == (whole, refused)
    _, refused = reports([data])
    for cut in pieces_of(data):
        last, refused_in_pieces = reports(cut)
        # In one chunk reports must not fall; across chunks that is for the session to judge.
        if not refused:
            assert not refused_in_pieces
            assert last == reports([data])[0]
        parser, asked = OpeningParser(), OpeningParser()
        passed = b"".join(bytes(parser.feed(piece)) for piece in cut)
        whole_passed = bytes(asked.feed(data)) if data else b""
        assert (parser.is_question, passed) == (asked.is_question, whole_passed)


def transfers(chunks: list[bytes]) -> tuple[list[tuple[int, int]], bool]:
    """The headers (offset, size), bodies as (offset, -1 - size) joined, and whether the bytes were refused."""
    parser = TransferParser(body_size_max=BODY_SIZE_MAX)
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        try:
            for event in parser.feed(chunk):
                if isinstance(event, TransferHeader):
                    found.append((event.physical_offset, event.body_size))
                else:
                    assert isinstance(event, TransferBody)
                    size = len(event.chunk)
                    assert size
                    if found[-1][1] < 0:
                        offset, so_far = found[-1]
                        assert event.physical_offset == offset - 1 - so_far
                        found[-1] = (offset, so_far - size)
                    else:
                        assert event.physical_offset == found[-1][0]
                        found.append((event.physical_offset, -1 - size))
        except RemoteProtocolError:
            return found, True
    return found, False


def reports(chunks: list[bytes]) -> tuple[int | None, bool]:
    """The last report, and whether the bytes were refused."""
    parser = ReportParser()
    last = None
    for chunk in chunks:
        try:
            found = parser.feed(chunk)
        except RemoteProtocolError:
            return last, True
        last = last if found is None else found
    return last, False


@cache
def pump_ends() -> tuple[socket.socket, socket.socket, int]:
    """A master's socket, its slave's, and the file of the slave's log."""
    master, slave = socket.socketpair()
    master.setblocking(False)
    return master, slave, os.memfd_create("log")


def pump_once(function: Callable[..., tuple[int, int, int, int]], chunk: bytes, bulk_size_min: int) -> Pumped:
    """What a twin of the pump does with a chunk."""
    master, slave, file = pump_ends()
    master.sendall(chunk)
    buffer = memoryview(bytearray(len(chunk)))
    found = function(slave.fileno(), buffer, PUMP_OFFSET, file, PUMP_POSITION, PUMP_ROOM, bulk_size_min)
    try:
        report = master.recv(100)
    except BlockingIOError:
        report = b""
    written = os.pread(file, 1 << 16, 0)
    os.ftruncate(file, 0)
    return Pumped(found, bytes(buffer), written, report)


def pumped(data: bytes) -> None:
    """The compiled pump and its twin, which take what the parser finds in the frames that continue the log and fit."""
    bulk_size_min, chunk = (20 if data[:1] == b"\1" else 1 << 20), data[1:]
    if not chunk:
        return
    compiled, python = (pump_once(function, chunk, bulk_size_min) for function in (pump, pure(pump)))
    assert compiled == python
    body, taken = b"", 0
    for _ in range(FRAMES_MAX):
        offset = int.from_bytes(chunk[taken : taken + 8], "big", signed=True)
        size = int.from_bytes(chunk[taken + 8 : taken + 12], "big", signed=True)
        end = taken + TRANSFER_HEADER_SIZE + size
        if offset != PUMP_OFFSET + len(body) or not 0 < size <= PUMP_ROOM - len(body) or end > len(chunk):
            break
        events = TransferParser().feed(chunk[taken:end])
        body += b"".join(bytes(event.chunk) for event in events if isinstance(event, TransferBody))
        taken = end
    report = encode_report(PUMP_OFFSET + len(body)) if 0 < taken < bulk_size_min else b""
    assert compiled.found == (len(chunk), taken, len(body), len(report))
    assert compiled.buffer == chunk
    assert compiled.written == (bytes(PUMP_POSITION) + body if body else b"")
    assert compiled.report == report


def run_virtually(scenario: Callable[[], Awaitable[Any]]) -> None:
    """Runs with a separate clock."""
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


async def speak(stream: trio.abc.Stream, data: bytes) -> None:
    """Send `data` in pieces until the peer closes the connection."""
    try:
        for piece in data.split(PAUSE):
            if piece:
                await stream.send_all(piece)
            await wait_all_tasks_blocked()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


def master_side(data: bytes) -> None:
    """A master and a slave that says `data`: the connection ends; only reports of offsets that the log has count."""
    said = data.replace(PAUSE, b"")
    places = range(0, len(said) - 7, 8)

    async def scenario() -> None:
        service = HAService(MemoryLog(bytes(OWN_END)), HAOptions(transfer_batch_size_bytes=1500))
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.handle, theirs, "10.6.6.6:666")
            await speak(ours, data)
            await wait_all_tasks_blocked()
            assert service.push2_slave_max_offset <= OWN_END
            assert all(0 <= acknowledged <= OWN_END for acknowledged in service.acknowledged())
            if not any(0 <= int.from_bytes(said[at : at + 8], "big", signed=True) <= OWN_END for at in places):
                assert service.acknowledged() == []
                assert service.push2_slave_max_offset == 0
            service.statistics()
            service.explain(OWN_END)
            service.lowest_needed_offset()
            await trio.sleep(60)
            assert service.connection_count == 0

    run_virtually(scenario)


def slave_side(data: bytes) -> None:
    """A slave, and a master that sends `data`: the log keeps its content, and reports never exceed what is written."""
    if not data:
        return
    options = HAOptions(
        out_of_range="resync" if data[0] & 1 else "wait",
        start_from="first" if data[0] & 2 else "last",
        overlap_bytes_max=0 if data[0] & 4 else 64,
        ack_flushed=bool(data[0] & 8),
    )
    own = (0, 100, SEGMENT_SIZE, SEGMENT_SIZE + 77)[data[0] >> 4 & 3]
    content = bytes(range(256)) * 32

    async def scenario() -> None:
        log = MemoryLog(content[:own])
        written: list[bytes] = []

        async def connect(address: str) -> trio.abc.Stream:
            ours, theirs = memory_stream_pair()
            nursery.start_soon(answer, ours)
            return theirs

        async def answer(stream: trio.StapledStream[Any, Any]) -> None:
            async with trio.open_nursery() as inner:
                inner.start_soon(listen, stream)
                await speak(stream, data[1:])
                await trio.sleep(10)
                inner.cancel_scope.cancel()
            await stream.aclose()

        async def listen(stream: trio.abc.Stream) -> None:
            said = b""
            try:
                while chunk := await stream.receive_some(4096):
                    said += bytes(chunk)
                    written.append(bytes(chunk))
                    end = log.max_offset.value
                    for at in range(0, len(said) - 7, 8):
                        report = int.from_bytes(said[at : at + 8], "big", signed=True)
                        assert report <= max(end, 1), (report, end)  # 1 asks for the first byte
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

        async with trio.open_nursery() as nursery:
            client = HAClient(log, options, connect)
            client.set_master("10.0.0.1:10912")
            nursery.start_soon(client.run)
            await trio.sleep(40)
            client.statistics()
            nursery.cancel_scope.cancel()
        if log.min_offset == 0:
            assert log.content[:own] == content[:own]

    run_virtually(scenario)


def frame_seeds() -> list[bytes]:
    """What real slaves and masters said, the first bytes of it."""
    found = [RANGE_QUESTION + encode_report(100), encode_report(0) + encode_report(7)]
    found.append(encode_transfer_header(0, 5) + b"hello" + encode_transfer_header(5, 0))
    for capture in ("4.9.7-default", "5.5.0-default"):
        for connection in ha_connections(capture):
            found += [connection["m2s"][:3000], connection["s2m"][:200]]
    return found


def pump_seeds() -> list[bytes]:
    """Frames that continue the log, and almost do."""
    first, second = (encode_transfer_header(PUMP_OFFSET + at, 3) + b"abc" for at in (0, 3))
    small = b"".join(encode_transfer_header(PUMP_OFFSET + number, 1) + b"x" for number in range(FRAMES_MAX + 2))
    beat = encode_transfer_header(PUMP_OFFSET + 3, 0)
    chunks = [first, first + second, first + second[:-1], second, first + beat, small, first[:8] + b"\xff" * 8]
    sizes = (8, PUMP_ROOM, PUMP_ROOM + 1)
    chunks += [encode_transfer_header(PUMP_OFFSET, size) + bytes(size) for size in sizes]
    chunks.append(first + encode_transfer_header(PUMP_OFFSET + 3, PUMP_ROOM) + bytes(PUMP_ROOM))
    return [mark + chunk for mark in (b"\0", b"\1") for chunk in chunks]


def master_seeds() -> list[bytes]:
    """Good slaves, and some that lie a little."""
    return [
        PAUSE.join([RANGE_QUESTION, encode_report(4000), encode_report(4500), encode_report(5000)]),
        PAUSE.join([encode_report(0), encode_report(5000)]),
        PAUSE.join([encode_report(100), encode_report(99)]),
        PAUSE.join([encode_report(1), encode_report(5001)]),
        encode_report(10)[:3],
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        *(PAUSE.join([b"\xff" * size, end]) for size, end in ((8, b"\xff" * 8), (7, b"\xfe"))),
        b"\x80" + bytes(7),
    ]


def slave_seeds() -> list[bytes]:
    """Masters that go on where the slave is, for each of its settings and lengths."""
    content = bytes(range(256)) * 32
    found = []
    for setting in (0x00, 0x02, 0x10, 0x14, 0x11, 0x19, 0x24, 0x34, 0x35):
        own = (0, 100, SEGMENT_SIZE, SEGMENT_SIZE + 77)[setting >> 4 & 3]
        start = own if setting & 4 else max(0, own - 64)
        room = min(300, SEGMENT_SIZE - start % SEGMENT_SIZE)
        frame = encode_transfer_header(start, room) + content[start : start + room]
        beat = encode_transfer_header(own, 0)
        answer = encode_transfer_header(0, 0) + encode_transfer_header(8000, 0)
        gone = encode_transfer_header(SEGMENT_SIZE * 2, 0) + encode_transfer_header(8000, 0)
        found += [bytes([setting]) + text for text in (frame + beat, answer + PAUSE + frame, beat, gone + PAUSE + gone)]
    return found


WORDS = (
    PAUSE,
    RANGE_QUESTION,
    *(encode_report(offset) for offset in (0, 1, 99, 100, 4999, 5000, 5001, SEGMENT_SIZE, (1 << 63) - 1)),
    *(encode_transfer_header(offset, 0) for offset in (0, 1, 36, 100, 64, SEGMENT_SIZE, SEGMENT_SIZE * 2)),
    encode_transfer_header(100, 1),
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
)

PUMP_WORDS = tuple(
    encode_transfer_header(PUMP_OFFSET + at, size)
    for at in (0, 1, 3, -1)
    for size in (0, 1, 3, PUMP_ROOM, PUMP_ROOM + 1)
)

HARNESSES = {
    "ha_frames": Harness(run=parsers, seeds=frame_seeds, words=WORDS),
    "ha_pump": Harness(run=pumped, seeds=pump_seeds, words=PUMP_WORDS),
    "ha_master": Harness(run=master_side, seeds=master_seeds, words=WORDS, size_max=400),
    "ha_slave": Harness(run=slave_side, seeds=slave_seeds, words=WORDS, size_max=2000),
}
