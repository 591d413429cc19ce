"""What the pump takes from a master's bytes: as its twins say, as the parser says, and as a whole session does it."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from ha.poller import open_poller
from ha.protocol.compiled import pure
from ha.protocol.ha_frame import (
    REPORT_SIZE,
    TRANSFER_HEADER_SIZE,
    encode_report,
    encode_transfer_header,
)
from ha.replication import ha_session
from ha.replication.options import HAOptions
from ha.replication.pump import FRAMES_MAX, pump
from ha.store.segmented_log import LogTail
from tests.fuzz.replication import pumped
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog
from tests.replication.test_sockets import Peer, following

TWINS = (pump, pure(pump))
OFFSET = 1000
POSITION = 7
ROOM = 100
PIECE_SIZE_MAX = 2000


class Outcome:
    """What one call of a twin did with a chunk."""

    def __init__(self, twin: int, chunk: bytes, *, bulk_size_min: int = 1 << 20, is_disk_full: bool = False) -> None:
        master, slave = socket.socketpair()
        file = os.memfd_create("log", os.MFD_ALLOW_SEALING)
        if is_disk_full:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        try:
            with master, slave:
                master.sendall(chunk)
                buffer = memoryview(bytearray(1 << 16))
                self.found = TWINS[twin](slave.fileno(), buffer, OFFSET, file, POSITION, ROOM, bulk_size_min)
                self.buffer = bytes(buffer[: self.found[0]])
                master.setblocking(False)
                try:
                    self.report = master.recv(100)
                except BlockingIOError:
                    self.report = b""
            self.file = os.pread(file, 1 << 16, 0)
        finally:
            os.close(file)


def frame(offset: int, body: bytes) -> bytes:
    return encode_transfer_header(offset, len(body)) + body


@pytest.mark.parametrize("twin", range(2))
class TestEach:
    def test_complete_frames_are_appended_and_reported(self, twin: int) -> None:
        first, second = frame(OFFSET, b"abc"), frame(OFFSET + 3, b"de")
        outcome = Outcome(twin, first + second + b"\0\0")
        assert outcome.found == (len(first + second) + 2, len(first + second), 5, REPORT_SIZE)
        assert outcome.file == bytes(POSITION) + b"abcde"
        assert outcome.report == encode_report(OFFSET + 5)
        assert outcome.buffer == first + second + b"\0\0"

    @pytest.mark.parametrize(
        "chunk",
        [
            frame(OFFSET, b""),
            frame(OFFSET + 1, b"abc"),
            frame(OFFSET - 1, b"abc"),
            frame(OFFSET, bytes(ROOM + 1)),
            frame(OFFSET, b"abc")[:-1],
            b"\xff" * 40,
            frame(OFFSET, b"")[:8] + b"\x80\0\0\0abc",
        ],
    )
    def test_anything_else_is_left(self, twin: int, chunk: bytes) -> None:
        outcome = Outcome(twin, chunk)
        assert outcome.found == (len(chunk), 0, 0, 0)
        assert (outcome.file, outcome.report, outcome.buffer) == (b"", b"", chunk)

    def test_a_call_takes_a_limited_number_of_frames(self, twin: int) -> None:
        chunk = b"".join(frame(OFFSET + number, b"x") for number in range(FRAMES_MAX + 3))
        assert Outcome(twin, chunk).found[1:3] == (FRAMES_MAX * (TRANSFER_HEADER_SIZE + 1), FRAMES_MAX)

    def test_much_is_not_reported(self, twin: int) -> None:
        size = len(frame(OFFSET, b"abc"))
        assert Outcome(twin, frame(OFFSET, b"abc"), bulk_size_min=size).found == (size, size, 3, 0)
        assert Outcome(twin, frame(OFFSET, b"abc"), bulk_size_min=size + 1).found == (size, size, 3, REPORT_SIZE)

    def test_nothing_is_taken_if_the_disk_refuses(self, twin: int) -> None:
        chunk = frame(OFFSET, b"abc")
        outcome = Outcome(twin, chunk, is_disk_full=True)
        assert outcome.found == (len(chunk), 0, 0, 0)
        assert outcome.report == b""

    def test_end_of_stream_and_errors_of_the_socket(self, twin: int) -> None:
        ours, theirs = socket.socketpair()
        buffer = memoryview(bytearray(100))
        with theirs:
            theirs.setblocking(False)
            with ours, pytest.raises(BlockingIOError):
                TWINS[twin](theirs.fileno(), buffer, OFFSET, -1, 0, ROOM, 100)
            assert TWINS[twin](theirs.fileno(), buffer, OFFSET, -1, 0, ROOM, 100) == (0, 0, 0, 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            TWINS[twin](-1, buffer, OFFSET, -1, 0, ROOM, 100)

    def test_a_report_that_can_not_be_sent_is_left_to_the_session(self, twin: int) -> None:
        ours, theirs = socket.socketpair()
        file = os.memfd_create("log")
        chunk = frame(OFFSET, b"abc")
        with theirs:
            ours.sendall(chunk)
            ours.close()
            found = TWINS[twin](theirs.fileno(), memoryview(bytearray(100)), OFFSET, file, 0, ROOM, 100)
        os.close(file)
        assert found == (len(chunk), len(chunk), 3, 0)


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """Frames that continue the log, with odd ones among them, cut anywhere; or any bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(min_size=1, max_size=60))
    raw, offset = b"", OFFSET
    for _ in range(draw(st.integers(1, 5))):
        body = draw(st.binary(max_size=40))
        raw += frame(offset + draw(st.sampled_from([0, 0, 0, 0, 1, -1])), body)
        offset += len(body)
    return raw[: draw(st.integers(1, len(raw)))]


@given(chunks(), st.sampled_from([b"\0", b"\1"]))
def test_twins_take_what_the_parser_finds(chunk: bytes, mark: bytes) -> None:
    pumped(mark + chunk)  # compares them, and asserts what they return


class FileLog(MemoryLog):
    """A log whose tail is a file of the system."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self.file = file
        self.pumped_bytes = 0
        self.pumped_by: set[str] = set()
        """Names of the tasks in which the pump ran"""

    def tail(self) -> LogTail | None:
        position = self.max_offset.value % SEGMENT_SIZE
        return None if self.min_offset < 0 or not position else LogTail(self.file, position, SEGMENT_SIZE - position)

    def note_appended(self, size: int, began: float) -> None:
        self.pumped_bytes += size
        self.pumped_by.add(trio.lowlevel.current_task().name.rpartition(".")[2])
        self.put(os.pread(self.file, size, self.max_offset.value % SEGMENT_SIZE))


@contextmanager
def file_log() -> Iterator[FileLog]:
    file = os.memfd_create("log")
    try:
        yield FileLog(file)
    finally:
        os.close(file)


async def follow(log: MemoryLog, pieces: list[bytes]) -> list[int]:
    """Sends the pieces to a slave of `log`, one per wake-up; returns its reports."""
    reports: list[int] = []

    def receive(master: Peer) -> None:
        raw = master.received()
        assert len(raw) % REPORT_SIZE == 0
        reports.extend(int.from_bytes(raw[at : at + REPORT_SIZE], "big") for at in range(0, len(raw), REPORT_SIZE))

    async with open_poller() as poller, following(log, HAOptions(start_from="last"), poller) as (_, master):
        for piece in pieces:
            for begin in range(0, len(piece), PIECE_SIZE_MAX):  # a socket's buffer is small there
                master.socket.sendall(piece[begin : begin + PIECE_SIZE_MAX])
                await wait_all_tasks_blocked()
                receive(master)
                assert not reports or reports[-1] <= log.max_offset.value
    return reports


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=12),
    st.lists(st.integers(0, 1 << 30), max_size=12),
    st.sampled_from([*TWINS]),
)
def test_sessions_with_and_without_the_pump_do_the_same(sizes: list[int], cuts: list[int], twin: object) -> None:
    """Bodies of these sizes (0: a heartbeat), cut at segments' ends as a master does, and then anywhere."""
    raw, content = b"", b""
    for size in sizes:
        body = os.urandom(min(size, SEGMENT_SIZE - len(content) % SEGMENT_SIZE))
        raw += frame(len(content), body)
        content += body
    marks = sorted({0, len(raw), *(cut % len(raw) for cut in cuts)})
    pieces = [raw[begin:end] for begin, end in pairwise(marks)]
    with file_log() as pumped, mock.patch.object(ha_session, "pump", twin):
        plain = MemoryLog()
        reports, expected = trio.run(follow, pumped, pieces), trio.run(follow, plain, pieces)
    assert reports[-1:] == expected[-1:]
    assert set(expected) <= set(reports)  # the pump may report in between what the parser reports a frame later
    assert reports == sorted(reports)
    assert bytes(pumped.content) == bytes(plain.content) == content


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.real_time
async def test_the_steady_state_is_pumped_without_waking_the_reader(
    monkeypatch: pytest.MonkeyPatch, twin: object
) -> None:
    monkeypatch.setattr(ha_session, "pump", twin)
    frames = [frame(0, b"first"), frame(5, b"second"), frame(11, b"third"), frame(16, b"fourth")]
    with file_log() as log:
        assert await follow(log, frames) == [5, 11, 16, 22]
        assert (log.pumped_bytes, bytes(log.content)) == (17, b"firstsecondthirdfourth")
        # The parser takes the first frame. The reader's task receives the second one, and the poller's all later ones.
        assert log.pumped_by == {"_run_part", "_run"}
