"""HAClient: when it connects, what it reports, what it refuses, and what it does next. Times are virtual and exact."""

import errno
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.errors import DiskFull
from ha.protocol.ha_frame import encode_transfer_header
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.ha_session import BULK_BYTES, REPORT_STEP_BYTES
from ha.replication.log import ReplicatedLog
from ha.replication.options import HAOptions
from ha.replication.progress import SlaveState
from ha.replication.statistics import Condition, HAClientState
from tests.replication.master_side import MasterSide, serve_as_rocketmq
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog, records
from tests.store.disks import MemoryDisk
from tests.store.stores import ROOT, open_small

RESYNC = HAOptions(out_of_range="resync")
FIRST = HAOptions(start_from="first")


@asynccontextmanager
async def following(
    log: ReplicatedLog,
    options: HAOptions | None = None,
    *,
    service: HAService | None = None,
    rocketmq: MemoryLog | None = None,
    second_rocketmq: MemoryLog | None = None,
    master_min_offset: Callable[[], Awaitable[int | None]] | None = None,
) -> AsyncIterator[tuple[HAClient, MasterSide]]:
    """A running client and its master: a scripted one, a halog service, or one that behaves like RocketMQ's, with
    another one at second:10912."""
    options = options or HAOptions()
    if service is None and rocketmq is None:
        # A scripted master sends nothing before the log's end; test_overlap.py tests the comparison.
        options = msgspec.structs.replace(options, overlap_bytes_max=0)
    async with trio.open_nursery() as nursery:
        master = MasterSide(nursery)
        connect = master.connect
        if service is not None:

            async def to_service(address: str) -> trio.abc.Stream:
                ours, theirs = trio.testing.memory_stream_pair()
                master.connected_at.append(master.now)
                nursery.start_soon(service.handle, theirs, f"127.0.0.1:{len(master.connected_at)}")
                return ours

            connect = to_service
        elif rocketmq is not None:
            logs = {"master:10912": rocketmq, "second:10912": second_rocketmq or rocketmq}

            async def to_rocketmq(address: str) -> trio.abc.Stream:
                ours, theirs = trio.testing.memory_stream_pair()
                master.connected_at.append(master.now)
                nursery.start_soon(serve_as_rocketmq, theirs, logs[address])
                return ours

            connect = to_rocketmq
        client = HAClient(log, options, connect, master_min_offset=master_min_offset, jitter=lambda: 0.0)
        nursery.start_soon(client.run)
        client.set_master("master:10912")
        await wait_all_tasks_blocked()
        yield client, master
        nursery.cancel_scope.cancel()


async def test_the_first_report_is_immediate_and_heartbeats_follow() -> None:
    async with following(MemoryLog(bytes(433))) as (_, master):
        await trio.sleep(11)
        assert master.reports == [(0.0, 433, 0), (5.001, 433, 0), (10.002, 433, 0)]


async def test_each_chunk_is_acknowledged_once() -> None:
    log = MemoryLog()
    async with following(log) as (client, master):
        await trio.sleep(1)
        # Half a frame is acknowledged too: the bytes are in the log.
        await master.streams[-1].send_all(encode_transfer_header(0, 10) + b"12345")
        await wait_all_tasks_blocked()
        await master.streams[-1].send_all(b"67890" + encode_transfer_header(10, 3) + b"abc")
        await wait_all_tasks_blocked()
        assert master.reports == [(0.0, 0, 0), (1.0, 5, 0), (1.0, 13, 0)]
        assert log.content == b"1234567890abc"
        assert client.statistics().condition is Condition.CONNECTED
        assert client.statistics().received_bytes == 37


async def test_bulk_data_is_acknowledged_in_steps_and_completely() -> None:
    async with following(MemoryLog(segment_size=64 << 20)) as (_, master):
        frames = [encode_transfer_header(at, 1 << 20) + bytes(1 << 20) for at in range(0, 24 << 20, 1 << 20)]
        await master.streams[-1].send_all(b"".join(frames))
        await wait_all_tasks_blocked()
        assert master.reports[-1] == (0.0, 24 << 20, 0)
        assert len(master.reports) < 21  # of 28 chunks
        assert max(after - before for before, after in pairwise(master.values)) <= REPORT_STEP_BYTES + (1 << 20)
        await master.send(24 << 20, bytes(BULK_BYTES))
        await wait_all_tasks_blocked()
        assert master.reports[-1] == (0.0, (24 << 20) + BULK_BYTES, 0)


async def test_a_silent_master_is_disconnected_after_twenty_seconds() -> None:
    async with following(MemoryLog(bytes(9))) as (client, master):
        await trio.sleep(20.0005)
        assert client.state.value is HAClientState.TRANSFER
        await trio.sleep(0.001)
        assert client.statistics().state is HAClientState.READY
        assert client.statistics().condition is Condition.HOUSEKEEPING_TIMEOUT
        assert master.closed == [(20.001, 0)]
        await trio.sleep(5)
        assert master.connected_at == pytest.approx([0.0, 20.101])


async def test_a_heartbeat_keeps_the_connection() -> None:
    async with following(MemoryLog(bytes(9))) as (_, master):
        for _ in range(10):
            await trio.sleep(19)
            await master.send(9)
        assert len(master.connected_at) == 1


async def test_reconnects_at_once_after_a_working_connection() -> None:
    async with following(MemoryLog(bytes(9))) as (client, master):
        await master.send(9)
        await trio.sleep(2)
        await master.close()
        await wait_all_tasks_blocked()
        assert master.connected_at == [0.0, 2.0]
        assert master.reports[-1] == (2.0, 9, 1)
        assert client.statistics().ended_counts == {Condition.MASTER_CLOSED: 1}


async def test_repeated_losses_are_not_reconnected_at_once() -> None:
    """For example two slaves with one identity, each of which makes the master close the other's connection."""
    async with following(MemoryLog(bytes(9))) as (_, master):

        async def work_and_close(stream: trio.abc.Stream) -> None:
            await stream.send_all(encode_transfer_header(9, 0))
            await stream.aclose()

        master.on_connect = work_and_close
        await master.send(9)
        await trio.sleep(10)
        await master.close()
        await trio.sleep(8)
        # At once only after another 5 s; then the waits start again, too.
        expected = [0.0, 10.0, 10.1, 10.3, 10.7, 11.5, 13.1, 16.3, 16.3, 16.4, 16.6, 17.0, 17.8]
        assert master.connected_at == pytest.approx(expected)


async def test_waits_grow_to_five_seconds_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with following(MemoryLog()) as (client, master):
            await master.send(0)
            await wait_all_tasks_blocked()
            master.refuses = True
            await master.close()
            await trio.sleep(21.5)
            expected = [0.0, 0.0, 0.1, 0.3, 0.7, 1.5, 3.1, 6.3, 11.3, 16.3, 21.3]
            assert master.connected_at == pytest.approx(expected)
            assert client.statistics().condition is Condition.CONNECT_FAILED
            assert "ConnectionRefused" not in client.statistics().detail
    assert caplog.text.count("ha.client_connect_failed") == 1


async def test_an_unanswered_connect_times_out() -> None:
    tries: list[float] = []

    async def never(address: str) -> trio.abc.Stream:
        tries.append(trio.current_time())
        await trio.sleep_forever()
        raise AssertionError

    client = HAClient(MemoryLog(), connect=never, jitter=lambda: 0.0)
    client.set_master("10.0.0.1:1")
    began = trio.current_time()
    with trio.move_on_after(21):
        await client.run()
    assert [at - began for at in tries] == pytest.approx([0, 5.1, 10.3, 15.7])
    assert client.statistics().ended_counts == {Condition.CONNECT_FAILED: 4}


async def test_another_master_ends_the_wait_and_the_connection() -> None:
    async with following(MemoryLog(bytes(9))) as (client, master):
        await master.send(123)  # which is not where the log ends
        await trio.sleep(2)
        client.set_master("master:10912")
        await trio.sleep(1)
        assert master.connected_at == [0.0]
        client.set_master("other:10912")
        await wait_all_tasks_blocked()
        assert master.connected_at == [0.0, 3.0]
        client.set_master("third:10912")
        await wait_all_tasks_blocked()
        assert master.connected_at == [0.0, 3.0, 3.0]
        assert master.closed[-1] == (3.0, 1)
        client.set_master(None)
        await trio.sleep(60)
        assert len(master.connected_at) == 3
        assert client.statistics().condition is Condition.NO_MASTER
        client.set_master("master:10912")
        await wait_all_tasks_blocked()
        assert master.connected_at[-1] == 63.0


async def test_a_new_connection_has_no_condition_of_the_last_one() -> None:
    async with following(MemoryLog(bytes(9))) as (client, master):
        await master.send(9)
        await wait_all_tasks_blocked()
        client.set_master(None)
        await wait_all_tasks_blocked()
        assert client.statistics().condition is Condition.NO_MASTER
        client.set_master("master:10912")
        await wait_all_tasks_blocked()
        assert client.statistics().state is HAClientState.TRANSFER
        assert client.statistics().condition is Condition.NO_DATA_YET
        await master.send(9)
        await wait_all_tasks_blocked()
        assert client.statistics().condition is Condition.CONNECTED


async def test_a_new_connection_says_what_the_obstacle_was() -> None:
    async with following(MemoryLog(bytes(9))) as (client, master):
        await master.send(123)  # which is not where the log ends
        await trio.sleep(5.1)
        statistics = client.statistics()
        assert (statistics.state, statistics.condition) == (HAClientState.TRANSFER, Condition.NO_DATA_YET)
        assert "before that offset_mismatch: the master sends from 123" in statistics.detail


async def test_an_obstacle_that_stays_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ha.replication")
    async with following(MemoryLog(bytes(9))) as (_, master):
        for _ in range(3):
            await master.send(123)  # which is not where the log ends
            await trio.sleep(6)
        await master.send(9)
        await wait_all_tasks_blocked()
    assert [text.split()[0] for text in caplog.messages] == [
        "ha.client_offset_mismatch",
        "ha.client_connected",
        "ha.client_stopped",
    ]


async def test_another_master_ends_an_attempt_to_connect() -> None:
    """As after a failover: the former master's machine is off, and answers no packet."""
    tries: list[tuple[float, str]] = []

    async def connect(address: str) -> trio.abc.Stream:
        tries.append((round(trio.current_time() - began, 6), address))
        await trio.sleep_forever()
        raise AssertionError

    client = HAClient(MemoryLog(), HAOptions(), connect)
    client.set_master("gone:10912")
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        await trio.sleep(1)
        client.set_master("gone:10912")
        await trio.sleep(1)
        client.set_master("new:10912")
        await wait_all_tasks_blocked()
        assert tries == [(0, "gone:10912"), (2, "new:10912")]
        client.set_master(None)
        client.set_master("new:10912")
        await wait_all_tasks_blocked()
        assert tries[2:] == [(2, "new:10912")]
        client.set_master(None)
        await wait_all_tasks_blocked()
        assert client.statistics().condition is Condition.NO_MASTER
        assert client.statistics().ended_counts == {Condition.MASTER_CHANGED: 3}
        client.set_master("gone:10912")
        client.set_master("new:10912")
        await wait_all_tasks_blocked()
        assert tries[3:] == [(2, "new:10912")]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("own", "offset", "size", "condition"),
    [
        (100, 101, 5, Condition.OFFSET_MISMATCH),
        (100, 99, 5, Condition.OFFSET_MISMATCH),
        (100, 200, 0, Condition.OFFSET_MISMATCH),
        (0, 100, 5, Condition.OFFSET_MISMATCH),
        (100, 100, SEGMENT_SIZE - 99, Condition.MALFORMED_FRAME),
        (0, SEGMENT_SIZE, SEGMENT_SIZE + 1, Condition.MALFORMED_FRAME),
    ],
)
async def test_unfitting_frames_are_refused_before_any_append(
    own: int, offset: int, size: int, condition: Condition
) -> None:
    log = MemoryLog(b"." * own)
    async with following(log) as (client, master):
        # The header alone: RocketMQ checks the offset before the body arrives.
        await master.streams[-1].send_all(encode_transfer_header(offset, size))
        await wait_all_tasks_blocked()
        assert client.statistics().condition is condition
        assert client.statistics().state is HAClientState.READY
        assert log.content == b"." * own
        await trio.sleep(5.1)
        assert master.connected_at == [0.0, 5.0]


async def test_an_empty_slave_adopts_the_position_of_a_heartbeat() -> None:
    async with following(MemoryLog()) as (_, master):
        await master.send(2 * SEGMENT_SIZE)
        await wait_all_tasks_blocked()
        assert master.values == [0, 2 * SEGMENT_SIZE]


async def test_an_empty_slave_starts_at_any_segment() -> None:
    log = MemoryLog()
    async with following(log) as (_, master):
        await master.send(3 * SEGMENT_SIZE, b"tail")
        await wait_all_tasks_blocked()
        assert (log.min_offset, bytes(log.content)) == (3 * SEGMENT_SIZE, b"tail")
        assert master.values == [0, 3 * SEGMENT_SIZE + 4]


async def test_a_full_disk_is_a_condition_and_is_retried() -> None:
    log = MemoryLog(bytes(10))

    async def full() -> None:
        raise DiskFull(Path("00000000000000004096"), 4096)

    log.before_append = full
    async with following(log) as (client, master):
        await master.send(10, b"x")
        await wait_all_tasks_blocked()
        assert client.statistics().condition is Condition.APPEND_FAILED
        assert "no space left" in client.statistics().detail
        log.before_append = None
        await trio.sleep(5.1)
        await master.send(10, b"x")
        await wait_all_tasks_blocked()
        assert log.max_offset.value == 11


async def test_ack_flushed_acknowledges_only_flushed_bytes() -> None:
    log = MemoryLog(bytes(10), flushes=False)
    async with following(log, HAOptions(ack_flushed=True)) as (_, master):
        await master.send(10, b"12345")
        await wait_all_tasks_blocked()
        assert log.max_offset.value == 15
        assert master.values == [10]
        log.flush()
        await wait_all_tasks_blocked()
        assert master.values == [10, 15]


async def test_the_request_waits_for_the_flush_too() -> None:
    log = MemoryLog(flushes=False)
    log.put(bytes(10))
    async with following(log, HAOptions(ack_flushed=True)) as (_, master):
        await trio.sleep(1)
        assert master.values == []
        log.flush()
        await wait_all_tasks_blocked()
        assert master.reports == [(1.0, 10, 0)]


async def test_cancelling_within_a_frame_keeps_the_received_bytes() -> None:
    log = MemoryLog()
    async with following(log) as (client, master):
        await master.streams[-1].send_all(encode_transfer_header(0, 100) + b"half")
        await wait_all_tasks_blocked()
    assert log.content == b"half"
    assert client.statistics().state is HAClientState.SHUTDOWN
    assert client.statistics().condition is Condition.STOPPED


# A master that ends before the slave


async def test_a_master_with_a_shorter_log_is_retried_slowly_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    master_log, log = MemoryLog(bytes(50)), MemoryLog(bytes(100))
    service = HAService(master_log)
    with caplog.at_level(logging.INFO):
        async with following(log, service=service) as (client, master):
            await trio.sleep(21)
            # The first time it learns that from the master's heartbeat; later it asks.
            assert master.connected_at == [0.0, 10.001, 15.001, 20.001]
            statistics = client.statistics()
            assert statistics.condition is Condition.MASTER_BEHIND
            assert statistics.detail.startswith("the log here ends at 100, the master's at 50: it lost its tail")
    assert service.push2_slave_max_offset == 0
    assert caplog.text.count("ha.client_master_behind") == 1


# haOutOfRange


async def test_a_slave_that_waits_stays_connected_and_unharmed() -> None:
    master_log = MemoryLog(bytes(SEGMENT_SIZE), first_offset=2 * SEGMENT_SIZE)
    log = MemoryLog(b"old")
    service = HAService(master_log)
    async with following(log, service=service) as (client, master):
        await trio.sleep(60)
        assert len(master.connected_at) == 2, "on the second one it has asked"
        assert client.statistics().detail == f"the next byte here is 3, the master's log begins at {2 * SEGMENT_SIZE}"
        assert service.statistics().slaves[0].state is SlaveState.OUT_OF_RANGE
        assert log.content == b"old"


async def test_resync_moves_the_log_aside_and_starts_at_the_masters_first_offset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = random.Random(5).randbytes(2 * SEGMENT_SIZE + 99)
    master_log = MemoryLog(content, first_offset=2 * SEGMENT_SIZE)
    log = MemoryLog(b"old")
    service = HAService(master_log)
    async with following(log, RESYNC, service=service) as (client, master):
        await trio.sleep(0.5)
        assert log.aside == [(0, b"old")]
        assert (log.min_offset, bytes(log.content)) == (2 * SEGMENT_SIZE, content)
        assert master.connected_at == [0.0, 0.0]
        assert client.statistics().resync_count == 1
        assert client.statistics().skipped_bytes == 2 * SEGMENT_SIZE - 3
        assert service.acknowledged() == [master_log.max_offset.value]
    assert caplog.text.count("ha.slave_out_of_range") == 1
    assert f"ha.resync_started own_end=3 master_first_offset=8192 skipped_bytes={2 * SEGMENT_SIZE - 3}" in caplog.text


async def test_a_resync_waits_for_space_and_then_starts_at_the_masters_first_offset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = records(6 * SEGMENT_SIZE - 50)
    master_log = MemoryLog(content[2 * SEGMENT_SIZE :], first_offset=2 * SEGMENT_SIZE)
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True) as slave:
        await slave.log.append_raw(0, content[:1000])
        disk.refuse = lambda operation, path: errno.ENOSPC if operation == "create" and path.parent == ROOT else None
        async with following(slave.log, RESYNC, service=HAService(master_log)) as (client, _):
            await trio.sleep(2)
            assert "ha.client_append_failed" in caplog.text
            assert (slave.log.min_offset, slave.log.max_offset.value) == (0, 1000)
            disk.refuse = lambda operation, path: None
            await trio.sleep(60)
            assert client.statistics().resync_count == 1
            assert slave.log.min_offset == 2 * SEGMENT_SIZE
            assert slave.log.max_offset.value == master_log.max_offset.value


async def test_resync_happens_when_retention_overtakes_a_connected_slave() -> None:
    master_log = MemoryLog(bytes(3 * SEGMENT_SIZE))
    service = HAService(master_log, HAOptions(transfer_bytes_per_s_max=1024))
    log = MemoryLog(bytes(1))
    async with following(log, RESYNC, service=service) as (client, _):
        await wait_all_tasks_blocked()
        master_log.delete_before(2 * SEGMENT_SIZE)
        await trio.sleep(10)
        assert client.statistics().resync_count == 1
        assert log.aside == [(0, bytes(1013 - 28))] or len(log.aside) == 1
        assert log.min_offset == 2 * SEGMENT_SIZE
        assert log.max_offset.value == 3 * SEGMENT_SIZE


class SlowToClose(trio.abc.ReceiveStream):
    """The receiving half of a stream, whose close blocks until `may_close` is set."""

    def __init__(self, receive_stream: trio.abc.ReceiveStream, may_close: trio.Event) -> None:
        self._receive_stream = receive_stream
        self._may_close = may_close

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._receive_stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            await self._may_close.wait()
        await self._receive_stream.aclose()


async def test_what_a_former_master_has_deleted_causes_no_resync(nursery: trio.Nursery) -> None:
    """The other one became master while the connection was being closed."""
    content = random.Random(7).randbytes(3 * SEGMENT_SIZE)
    log = MemoryLog(content[:1000])
    masters = {
        "first:10912": MemoryLog(content[2 * SEGMENT_SIZE :], first_offset=2 * SEGMENT_SIZE),
        "second:10912": MemoryLog(content),
    }
    may_close = trio.Event()

    async def connect(address: str) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(HAService(masters[address]).handle, theirs, "127.0.0.1:1")
        return trio.StapledStream(ours.send_stream, SlowToClose(ours.receive_stream, may_close))

    client = HAClient(log, RESYNC, connect, jitter=lambda: 0.0)
    nursery.start_soon(client.run)
    client.set_master("first:10912")
    await wait_all_tasks_blocked()
    client.set_master("second:10912")
    may_close.set()
    await wait_all_tasks_blocked()
    assert log.aside == []
    assert bytes(log.content) == content


async def test_a_resync_that_waits_for_the_store_ends_when_there_is_another_master(nursery: trio.Nursery) -> None:
    """Retention, for example, has the store's lock."""
    content = records(3 * SEGMENT_SIZE)
    masters = {
        "first:10912": MemoryLog(content[2 * SEGMENT_SIZE :], first_offset=2 * SEGMENT_SIZE),
        "second:10912": MemoryLog(content),
    }

    async def connect(address: str) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(HAService(masters[address]).handle, theirs, "127.0.0.1:1")
        return ours

    async with open_small(MemoryDisk(), is_slave=True) as slave:
        await slave.log.append_raw(0, memoryview(content)[:1000])
        client = HAClient(slave.log, RESYNC, connect, jitter=lambda: 0.0)
        nursery.start_soon(client.run)
        async with slave.log.maintenance_lock:
            client.set_master("first:10912")
            await wait_all_tasks_blocked()
            client.set_master("second:10912")
            await wait_all_tasks_blocked()
        await trio.sleep(1)
        assert client.statistics().resync_count == 0
        assert (slave.log.min_offset, slave.log.max_offset.value) == (0, len(content))


@pytest.mark.parametrize("event", ["closed", "silent", "mismatch", "garbage", "idle"])
async def test_only_the_masters_answer_causes_a_resync(event: str) -> None:
    log = MemoryLog(bytes(100))
    async with following(log, RESYNC) as (client, master):

        async def misbehave(stream: trio.abc.Stream) -> None:
            await trio.sleep(2)
            if event == "mismatch":
                await stream.send_all(encode_transfer_header(SEGMENT_SIZE, 0))
            elif event == "garbage":
                await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            elif event == "idle":
                await stream.send_all(encode_transfer_header(100, 0))
            if event == "closed":
                await stream.aclose()

        master.on_connect = misbehave
        await trio.sleep(100)
        assert log.aside == []
        assert client.statistics().resync_count == 0
        assert master.values[:2] == [-1, 100]


async def test_a_rocketmq_master_is_asked_through_master_min_offset() -> None:
    content = random.Random(6).randbytes(SEGMENT_SIZE)
    master_log = MemoryLog(content, first_offset=SEGMENT_SIZE)
    log = MemoryLog(bytes(100))
    answers = [None, 0, 100, SEGMENT_SIZE]
    asked: list[float] = []
    began = trio.current_time()

    async def ask() -> int | None:
        asked.append(round(trio.current_time() - began, 1))
        return answers[min(len(asked), 4) - 1]

    async with following(log, RESYNC, rocketmq=master_log, master_min_offset=ask) as (client, _):
        await trio.sleep(30)
        # One question per heartbeat, and only the answer that is above our end counts.
        assert all(later - earlier >= 5 for earlier, later in pairwise(asked))
        assert len(asked) == 5
        assert log.aside == [(0, bytes(100))]
        assert (log.min_offset, bytes(log.content)) == (SEGMENT_SIZE, content)
        assert client.statistics().resync_count == 1


async def test_a_wrong_first_offset_does_not_fill_the_disk() -> None:
    log = MemoryLog(bytes(100))
    offset = 0

    async def lie(stream: trio.abc.Stream) -> None:
        nonlocal offset
        offset += SEGMENT_SIZE
        await stream.send_all(encode_transfer_header(offset, 0) * 2)
        await trio.sleep(0.1)
        await stream.send_all(encode_transfer_header(offset, 0))

    async with following(log, RESYNC) as (client, master):
        await master.close()
        master.on_connect = lie
        await trio.sleep(119)
        assert client.statistics().resync_count <= 2


# haStartFrom


@pytest.mark.parametrize("first_offset", [0, 2 * SEGMENT_SIZE])
async def test_first_gets_the_whole_log_of_a_halog_master(first_offset: int) -> None:
    content = random.Random(7).randbytes(3 * SEGMENT_SIZE + 5)
    master_log, log = MemoryLog(content, first_offset=first_offset), MemoryLog()
    async with following(log, FIRST, service=HAService(master_log)):
        await wait_all_tasks_blocked()
        assert (log.min_offset, bytes(log.content)) == (first_offset, content)


async def test_last_gets_the_last_segment() -> None:
    content = random.Random(7).randbytes(3 * SEGMENT_SIZE + 5)
    log = MemoryLog()
    async with following(log, service=HAService(MemoryLog(content))):
        await wait_all_tasks_blocked()
        assert (log.min_offset, bytes(log.content)) == (3 * SEGMENT_SIZE, content[-5:])


async def test_first_against_an_empty_halog_master() -> None:
    master_log, log = MemoryLog(), MemoryLog()
    async with following(log, FIRST, service=HAService(master_log)):
        await trio.sleep(30)
        master_log.put(bytes(100))
        await wait_all_tasks_blocked()
        assert log.content == bytes(100)


def log_with_a_record(size: int) -> bytes:
    return bytes.fromhex("00000120daa320a7") + random.Random(8).randbytes(size - 8)


async def test_first_gets_the_whole_log_of_a_rocketmq_master() -> None:
    content = log_with_a_record(3 * SEGMENT_SIZE + 5)
    log = MemoryLog()
    async with following(log, FIRST, rocketmq=MemoryLog(content)) as (client, master):
        await trio.sleep(2)
        assert (log.min_offset, bytes(log.content)) == (0, content)
        assert len(master.connected_at) == 1
        assert client.statistics().reported_offset == len(content)


async def test_the_first_heartbeat_at_offset_1_is_ignored() -> None:
    """As from a real master with haSendHeartbeatInterval=1000: silent while asked, then heartbeat first, data next."""
    log = MemoryLog()
    async with following(log, FIRST) as (client, master):
        await trio.sleep(1.1)
        assert master.values == [-1, 1]
        await master.send(1)
        await master.send(1, log_with_a_record(100)[1:])
        await wait_all_tasks_blocked()
        assert log.content == log_with_a_record(100)
        assert client.statistics().connection_count == 1


async def test_heartbeats_start_once_byte_0_is_restored() -> None:
    """Before that there is nothing to acknowledge."""
    async with following(MemoryLog(), FIRST) as (_, master):
        await trio.sleep(7)
        assert master.reports == [(0.0, -1, 0), (1.0, 1, 0)]
        await master.send(1, log_with_a_record(100)[1:])
        await trio.sleep(11)
        assert master.reports[2:] == [(7.0, 100, 0), (12.001, 100, 0), (17.002, 100, 0)]


async def test_first_against_a_rocketmq_master_that_has_deleted_and_can_be_asked() -> None:
    content = random.Random(9).randbytes(2 * SEGMENT_SIZE)

    async def ask() -> int | None:
        return SEGMENT_SIZE

    log = MemoryLog()
    master_log = MemoryLog(content, first_offset=SEGMENT_SIZE)
    async with following(log, FIRST, rocketmq=master_log, master_min_offset=ask):
        await trio.sleep(2)
        assert (log.min_offset, bytes(log.content)) == (SEGMENT_SIZE, content)


async def test_first_falls_back_to_the_last_segment_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    content = random.Random(9).randbytes(2 * SEGMENT_SIZE + 7)
    log = MemoryLog()
    async with following(log, FIRST, rocketmq=MemoryLog(content, first_offset=SEGMENT_SIZE)) as (_, master):
        await trio.sleep(12)
        assert (log.min_offset, bytes(log.content)) == (3 * SEGMENT_SIZE, content[-7:])
        assert len(master.connected_at) == 2
    assert "ha.start_offset_unknown fallback=last_segment" in caplog.text


async def test_first_against_an_empty_rocketmq_master_gets_everything_later() -> None:
    master_log, log = MemoryLog(), MemoryLog()
    async with following(log, FIRST, rocketmq=master_log):
        await trio.sleep(20)
        master_log.put(log_with_a_record(100))
        await trio.sleep(1)
        assert log.content == master_log.content


async def test_another_rocketmq_master_is_asked_for_its_first_byte_again() -> None:
    """The first master had none, so the slave began at the second one's last segment."""
    second = MemoryLog(log_with_a_record(2 * SEGMENT_SIZE + 5))
    log = MemoryLog()
    async with following(log, FIRST, rocketmq=MemoryLog(), second_rocketmq=second) as (client, _):
        await trio.sleep(20)
        client.set_master("second:10912")
        await trio.sleep(2)
        assert (log.min_offset, log.content) == (0, second.content)


async def test_the_end_of_the_log_is_compared_with_another_rocketmq_master() -> None:
    """The first one had deleted everything before the end, so the second one's bytes were appended uncompared."""
    first, second = MemoryLog(records(SEGMENT_SIZE)), MemoryLog(records(3 * SEGMENT_SIZE, seed=1))
    first.delete_before(SEGMENT_SIZE)
    log = MemoryLog(records(SEGMENT_SIZE))
    async with following(log, rocketmq=first, second_rocketmq=second) as (client, _):
        await trio.sleep(20)
        assert client.statistics().condition is Condition.CONNECTED
        client.set_master("second:10912")
        await trio.sleep(2)
        assert client.statistics().condition is Condition.DIVERGED
        assert log.content == records(SEGMENT_SIZE)


async def test_a_distant_halog_master_has_time_to_answer() -> None:
    """Connecting takes a round trip of 1.5 s, and so does the answer, which came after the request each time."""
    log = MemoryLog()

    async def answer(stream: trio.abc.Stream) -> None:
        await trio.sleep(1.5)
        await stream.send_all(encode_transfer_header(SEGMENT_SIZE, 0) + encode_transfer_header(9000, 0))

    async with following(log, FIRST) as (client, master):
        await master.close()
        master.connect_s, master.on_connect = 1.5, answer
        await trio.sleep(4)
        assert master.values[-2:] == [-1, 0]
        await master.send(SEGMENT_SIZE, b"begin")
        await wait_all_tasks_blocked()
        assert client.statistics().condition is Condition.CONNECTED
        assert (log.min_offset, bytes(log.content)) == (SEGMENT_SIZE, b"begin")


async def test_a_late_range_answer_changes_nothing() -> None:
    """A halog master under load answers after the slave has continued as with RocketMQ: it asks again."""
    log = MemoryLog()

    async def answer_late(stream: trio.abc.Stream) -> None:
        await trio.sleep(1.5)
        await stream.send_all(encode_transfer_header(0, 0) + encode_transfer_header(9000, 0))

    async with following(log, FIRST) as (client, master):
        await master.close()
        master.on_connect = answer_late
        await trio.sleep(1.3)
        assert master.values[-2:] == [-1, 1]
        await trio.sleep(1)
        assert client.statistics().condition is Condition.OFFSET_MISMATCH
        await trio.sleep(5)
        assert master.values[-1] == -1
        assert log.min_offset == -1
