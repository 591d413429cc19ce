"""The checkers that run live: wire, answers, tasks."""

import math
from struct import pack

import pytest
import trio

from tests.checkers import tasks
from tests.checkers.acks import HaTap
from tests.checkers.history import Accepted, Consumed
from tests.checkers.statuses import Statuses
from tests.checkers.written import MASTER, SEGMENT, Cluster

LOG = bytes(range(1, 201)) * 20


class Wire:
    """A tap between a master that holds LOG and a slave that holds `held` of it."""

    def __init__(self, held: int = 0, flushed: int | None = None) -> None:
        self.slave = bytearray(LOG[:held])
        self.flushed = held if flushed is None else flushed
        self.reports: list[tuple[str, int]] = []
        self.tap = HaTap(
            "s1",
            MASTER,
            lambda at, size: bytes(self.slave[at : at + size]),
            lambda at, size: LOG[at : at + size],
            segment_size=1000,
            read_slave_disk=None
            if flushed is None
            else lambda at, size: bytes(self.slave[: self.flushed][at : at + size]),
            on_report=lambda slave, offset: self.reports.append((slave, offset)),
        )

    def report(self, offset: int) -> str:
        return "; ".join(str(v) for v in self.tap.from_slave(pack(">q", offset)))

    def frame(self, at: int, size: int, body: bytes | None = None) -> str:
        body = LOG[at : at + size] if body is None else body
        return "; ".join(str(v) for v in self.tap.from_master(pack(">qi", at, size) + body))


def test_valid_session_passes_in_any_chunking() -> None:
    for step in (1, 5, 10_000):
        wire = Wire(500)
        assert wire.report(-1) == ""
        assert wire.report(500) == ""
        stream = b"".join(pack(">qi", at, 100) + LOG[at : at + 100] for at in range(500, 1500, 100))
        stream += pack(">qi", 1500, 0)
        for at in range(0, len(stream), step):
            assert wire.tap.from_master(stream[at : at + step]) == []
        for end in (555, 600, 601, 1400, 1500, 1500):
            wire.slave[:] = LOG[:end]
            raw = pack(">q", end)
            for at in range(0, 8, min(step, 8)):
                assert wire.tap.from_slave(raw[at : at + step]) == [], end
        assert wire.reports == [("s1", end) for end in (500, 555, 600, 601, 1400, 1500, 1500)]


def test_a_report_of_bytes_that_are_not_written_is_found() -> None:
    wire = Wire(500)
    wire.report(500)
    wire.frame(500, 100)
    wire.slave[:] = LOG[:599]
    assert "acknowledged 600, but at 599 it does not hold what m sent" in wire.report(600)


def test_a_report_of_bytes_written_at_the_wrong_place_is_found() -> None:
    wire = Wire(500)
    wire.report(500)
    wire.frame(500, 100)
    wire.slave[:] = LOG[:500] + b"!" + LOG[500:600]
    assert "at 500 it does not hold" in wire.report(600)


def test_a_report_of_bytes_never_sent_and_one_that_falls_are_found() -> None:
    wire = Wire(800)
    wire.report(500)
    wire.frame(500, 100)
    assert "has sent it bytes only up to 600" in wire.report(700)
    assert "reported 650 after 700" in wire.report(650)


def test_slave_requesting_a_wrong_offset_is_found() -> None:
    assert "holds nothing before that" in Wire(500).report(501)
    assert Wire(0).report(0) == ""


class EmptySlave:
    """A tap between a master with the first `master_end` bytes of LOG and an empty slave that gets a segment from
    `begin`."""

    def __init__(self, master_end: int = 2000) -> None:
        self.begin: int | None = None
        self.held = 1000
        self.tap = HaTap("s1", MASTER, self._read, lambda at, size: LOG[:master_end][at : at + size], segment_size=1000)

    def _read(self, at: int, size: int) -> bytes:
        if self.begin is None or at < self.begin:
            return b""
        return bytes(max(0, min(size, self.begin + self.held - at)))

    def report(self, offset: int) -> str:
        return "; ".join(str(v) for v in self.tap.from_slave(pack(">q", offset)))

    def frame(self, at: int, size: int = 0) -> str:
        return "; ".join(str(v) for v in self.tap.from_master(pack(">qi", at, size) + LOG[at : at + size]))


def test_empty_slave_may_start_at_the_first_heartbeat() -> None:
    wire = EmptySlave()
    assert wire.report(0) == ""
    assert wire.report(0) == "", "a heartbeat before the start offset is known"
    assert wire.frame(2000) == ""
    wire.begin = 2000
    assert wire.report(2000) == ""
    assert wire.report(2000) == ""
    assert "has sent it bytes only up to 2000" in wire.report(2001)


@pytest.mark.parametrize(
    ("asked", "frames", "begin", "held", "reported"),
    [
        (0, [], 2000, 1000, 2000),  # no start offset was announced
        (0, [(2000, 0)], 2000, 1000, 2001),  # beyond the start offset
        (0, [(2000, 0)], 2000, 1000, 1999),  # before it
        (0, [(2000, 0)], 2000, 0, 2000),  # the segment was not created
        (0, [(2000, 0)], 3000, 1000, 2000),  # another segment was
        (0, [(2000, 0)], 1000, 2000, 2000),  # the slave was not empty
        (0, [(1500, 0)], 1500, 1000, 1500),  # not a segment boundary
        (0, [(3000, 0)], 3000, 1000, 3000),  # the master's log is not there
        (0, [(1000, 0), (2000, 0)], 2000, 1000, 2000),  # not the first frame
        (0, [(1000, 10), (2000, 0)], 2000, 1000, 2000),  # bytes were sent
        (1, [(2000, 0)], 2000, 1000, 2000),  # another offset was requested
    ],
)
def test_a_report_beyond_what_was_sent_is_found_wherever_else_an_empty_slave_makes_it(
    asked: int, frames: list[tuple[int, int]], begin: int, held: int, reported: int
) -> None:
    wire = EmptySlave()
    assert wire.report(asked) == ""
    for at, size in frames:
        wire.frame(at, size)
    wire.begin, wire.held = begin, held
    assert "has sent it bytes only up to" in wire.report(reported)


def test_start_offset_is_adopted_once_and_not_before_the_request() -> None:
    wire = EmptySlave(3000)
    assert wire.report(-1) == ""
    wire.frame(0)
    wire.frame(2000)  # the answer to the range request, not a heartbeat
    assert wire.report(0) == ""
    wire.begin = 2000
    assert "has sent it bytes only up to 0" in wire.report(2000)
    wire = EmptySlave(3000)
    wire.report(0)
    wire.frame(2000)
    wire.begin = 2000
    assert wire.report(2000) == ""
    wire.frame(3000)
    wire.begin = 3000
    assert "has sent it bytes only up to 2000" in wire.report(3000)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ((601, 10, None), "sent s1 bytes for 601 after those up to 600"),
        ((600, 401, None), "400 before the segment's end"),
        ((600, 4, b"abcd"), "bytes for 600 that its own log does not hold there"),
        ((600, -1, b""), "a frame of -1 bytes"),
    ],
)
def test_a_masters_wrong_frame_is_found(frame: tuple[int, int, bytes | None], text: str) -> None:
    wire = Wire(500)
    wire.report(500)
    assert wire.frame(500, 100) == ""
    assert text in wire.frame(*frame)


# ---- statuses


class Answers:
    """A cluster whose answers are checked; `flushed_to` is the end of the log on its master's disk."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.flushed_to = 1 << 40
        self.statuses = Statuses(cluster.history, self.read, self.read_disk, cluster.names[1:], segment_size=SEGMENT)

    def read(self, node: str, at: int, size: int) -> bytes:
        return self.cluster.image(node).read(at, size)

    def read_disk(self, node: str, at: int, size: int) -> bytes:
        return self.read(node, at, min(size, max(0, self.flushed_to - at)))

    def acknowledge(self, *slaves: str) -> None:
        for slave in slaves:
            self.statuses.on_report(MASTER, slave, self.cluster.ends[slave])

    def judge(self) -> str:
        accepted: Accepted = self.cluster.history.answers[-1]
        return "; ".join(str(violation) for violation in self.statuses.on_answer(accepted))


def test_true_answers_pass() -> None:
    answers = Answers(Cluster("s1", "s2", is_sync_flush=True, copies=3))
    answers.cluster.put()
    answers.acknowledge("s1", "s2")
    assert answers.judge() == ""
    for status in ("FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE"):
        answers.cluster.put(status, on=(MASTER,))
        assert answers.judge() == ""


def test_put_ok_with_too_few_slaves_is_found() -> None:
    answers = Answers(Cluster("s1", "s2", copies=3))
    answers.cluster.put(on=(MASTER, "s1"))
    answers.acknowledge("s1", "s2")
    assert "1 slaves hold the record (s1) where 2 must" in answers.judge()


def test_put_ok_without_acknowledgement_is_found_even_if_the_slaves_have_it() -> None:
    answers = Answers(Cluster("s1", "s2", copies=3))
    answers.cluster.put()
    answers.acknowledge("s1")
    assert "1 slaves have acknowledged" in answers.judge()


def test_acknowledgements_to_an_earlier_master_process_do_not_count() -> None:
    answers = Answers(Cluster("s1", copies=2))
    answers.cluster.put()
    answers.statuses.on_report(MASTER, "s1", 1 << 30)
    assert answers.judge() == ""
    answers.cluster.crash(MASTER, "kill")
    answers.statuses.on_start(MASTER)
    answers.cluster.put()
    assert "0 slaves have acknowledged" in answers.judge()


def test_status_impossible_in_this_mode_is_found() -> None:
    for status in ("FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE"):
        answers = Answers(Cluster("s1"))
        answers.cluster.put(status)
        assert "does not wait for" in answers.judge()


def test_answer_with_a_wrong_offset_is_found() -> None:
    cluster = Cluster()
    cluster.put()
    cluster.put()
    first, last = cluster.history.answers
    last.answered = type(last.answered)(**{**last.answered.__dict__, "physical_offset": first.answered.physical_offset})
    answers = Answers(cluster)
    assert "m has b'p-0' there" in answers.judge()
    last.answered = type(last.answered)(**{**last.answered.__dict__, "physical_offset": 7})
    assert "m has no record there" in answers.judge()


def test_in_a_calm_cluster_everything_succeeds() -> None:
    answers = Answers(Cluster("s1", copies=2))
    answers.statuses.calm(0.0)
    answers.cluster.put("FLUSH_SLAVE_TIMEOUT")
    assert "nothing disturbs the cluster" in answers.judge()
    answers.statuses.calm(math.inf)
    assert answers.judge() == ""


def test_message_consumed_before_the_flush_is_found() -> None:
    for is_sync_flush in (True, False):
        answers = Answers(Cluster(is_sync_flush=is_sync_flush))
        answers.cluster.put()
        record = answers.cluster.image().records()[0]
        event = Consumed(2.0, "c", "T", 0, 0, b"p-0", MASTER)
        assert answers.statuses.on_consumed(event, 0) == []
        answers.flushed_to = record.size - 1
        found = answers.statuses.on_consumed(event, 0)
        assert bool(found) is is_sync_flush
        if found:
            assert "after a power cut nobody would know it" in found[0].text
            answers.cluster.crash(MASTER, "wipe")
            assert answers.statuses.on_consumed(event, 0) == []


# ---- tasks


async def test_a_system_task_of_a_package_is_found() -> None:
    stop = trio.Event()

    async def stray() -> None:
        await stop.wait()

    trio.lowlevel.spawn_system_task(stray)
    await trio.testing.wait_all_tasks_blocked()
    found = tasks.check_system_tasks(__name__)
    assert "stray" in str(found)
    stop.set()
    await trio.testing.wait_all_tasks_blocked()
    assert "stray" not in str(tasks.check_system_tasks(__name__))
