"""HAConnection: frames and their times, and the ends of a connection.

Times are virtual and exact; RocketMQ compares milliseconds strictly, so the times end in .001.
"""

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.progress import CloseReason, SlaveState
from ha.replication.range_question import RANGE_QUESTION
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog
from tests.replication.slave_side import SlaveSide, connected, until_closed

SMALL = HAOptions(transfer_batch_size_bytes=1000)


def log_of(size: int, **knobs: Any) -> MemoryLog:
    return MemoryLog(random.Random(size).randbytes(size), **knobs)


async def test_a_heartbeat_follows_more_than_five_idle_seconds() -> None:
    log = log_of(100)
    async with connected(HAService(log), 100) as slave:
        await trio.sleep(12)
        log.put(b"x" * 10)
        await slave.report(100)
        await trio.sleep(6)
    assert slave.heads == [(5.001, 100, 0), (10.002, 100, 0), (12.0, 100, 10), (17.001, 110, 0)]


async def test_no_byte_is_sent_before_the_first_report() -> None:
    async with connected(HAService(log_of(100))) as slave:
        await trio.sleep(19)
        assert slave.frames == []
        await slave.report(40)
        await wait_all_tasks_blocked()
        # A due heartbeat comes before the data, as in the capture of 4.9.7.
        assert slave.heads == [(19.0, 40, 0), (19.0, 40, 60)]


async def test_a_slave_that_never_reports_is_disconnected_after_twenty_seconds() -> None:
    service = HAService(log_of(100))
    async with until_closed(service) as slave:
        await trio.sleep(20)
        assert service.connection_count == 1
    assert slave.closed_at == 20.001
    assert slave.close_reason is CloseReason.HOUSEKEEPING_TIMEOUT


async def test_each_report_restarts_housekeeping_but_half_a_report_does_not() -> None:
    async with until_closed(HAService(log_of(100))) as slave:
        await trio.sleep(15)
        await slave.report(100)
        await trio.sleep(15)
        await slave.stream.send_all(b"\0\0\0")
    assert slave.closed_at == 35.001
    assert slave.close_reason is CloseReason.HOUSEKEEPING_TIMEOUT


@pytest.mark.parametrize(
    ("report", "first_offset", "end", "expected_start"),
    [
        (0, 0, 3 * SEGMENT_SIZE + 1264, 3 * SEGMENT_SIZE),
        (0, 0, 100, 0),
        (4096, 0, 3 * SEGMENT_SIZE + 1264, 4096),
        (5000, 4096, 3 * SEGMENT_SIZE, 5000),
        (1, 0, 9000, 1),
    ],
)
async def test_where_the_transfer_starts(report: int, first_offset: int, end: int, expected_start: int) -> None:
    log = log_of(end - first_offset, first_offset=first_offset)
    async with connected(HAService(log), report) as slave:
        assert slave.frames[0][1] == expected_start
        assert b"".join(body for _, _, body in slave.frames) == log.bytes_at(expected_start, end - expected_start)


async def test_of_two_reports_in_one_segment_the_last_is_the_request() -> None:
    async with connected(HAService(log_of(3 * SEGMENT_SIZE))) as slave:
        await slave.stream.send_all(bytes(8) + (4096).to_bytes(8, "big"))
        await wait_all_tasks_blocked()
        assert slave.frames[0][1] == 4096


async def test_an_empty_log_sends_its_first_segment_after_the_first_put() -> None:
    log = MemoryLog()
    async with connected(HAService(log), 0) as slave:
        await trio.sleep(1)
        log.put(b"first")
        await wait_all_tasks_blocked()
        assert slave.frames == [(1.0, 0, b"first")]


async def test_frames_end_at_the_batch_size_and_at_segments() -> None:
    log = log_of(SEGMENT_SIZE + 500)
    async with connected(HAService(log, HAOptions(transfer_batch_size_bytes=3000)), 1) as slave:
        assert slave.heads == [(0.0, 1, 3000), (0.0, 3001, 1095), (0.0, 4096, 500)]


async def test_puts_between_two_wakeups_are_one_frame() -> None:
    log = log_of(10)
    async with connected(HAService(log), 10) as slave:
        for _ in range(50):
            log.put(b"message")
        await wait_all_tasks_blocked()
        assert slave.heads == [(0.0, 10, 350)]


async def test_cold_bytes_are_read_through_the_log() -> None:
    log = log_of(3 * SEGMENT_SIZE, hot_bytes=5000)
    async with connected(HAService(log), 1) as slave:
        assert b"".join(body for _, _, body in slave.frames) == log.content[1:]
        assert log.cold_reads == 2


class MappedLog(MemoryLog):
    """Hands out views of its content, which can't grow or shrink while one of them exists."""

    def bytes_at(self, offset: int, size: int) -> Any:
        start = offset - self.min_offset
        with memoryview(self.content) as whole:
            return whole[start : start + size]


@pytest.mark.parametrize("hot_bytes", [1 << 40, 0])
async def test_a_connection_keeps_no_view_of_what_it_sent(hot_bytes: int) -> None:
    """Such a view keeps a deleted segment's memory and disk space."""
    log = MappedLog(bytes(5000), hot_bytes=hot_bytes)
    async with connected(HAService(log), 0) as slave:
        assert slave.heads == [(0.0, 4096, 904)]
        log.delete_before(4096)
        log.hot_bytes = 1 << 40
        log.put(b"more")
        await wait_all_tasks_blocked()
        assert slave.received.endswith(b"more")


async def test_a_log_that_cannot_be_read_is_why_a_connection_ends(caplog: pytest.LogCaptureFixture) -> None:
    log = log_of(100, hot_bytes=0)

    async def read(*_: object) -> bytes:
        await trio.lowlevel.checkpoint()
        raise OSError(5, "Input/output error")

    log.read = read  # type: ignore[method-assign,assignment]
    service = HAService(log)
    async with until_closed(service, 40) as slave:
        pass
    assert slave.close_reason is CloseReason.DAMAGED_HERE
    assert "the log here can't be read at 40: [Errno 5] Input/output error" in service.explain(100)
    assert "can't be read" in caplog.text


async def test_a_log_truncated_to_a_slaves_position_while_it_is_read() -> None:
    log = log_of(100, hot_bytes=0)
    read = log.read

    async def cut_and_read(position: int, *rest: Any) -> memoryview | bytes:
        await trio.lowlevel.checkpoint()
        del log.content[40:]
        log.max_offset.reset(40)
        return await read(position, *rest)

    log.read = cut_and_read  # type: ignore[method-assign,assignment]
    async with connected(HAService(log), 40) as slave:
        log.read = read  # type: ignore[method-assign]
        await slave.report(40)
        log.put(b"new")
        await wait_all_tasks_blocked()
        assert slave.heads == [(0.0, 40, 3)]


async def test_large_bodies_arrive_whole() -> None:
    log = log_of(1 << 20, segment_size=1 << 20)
    async with connected(HAService(log), 3) as slave:
        assert slave.frames == [(0.0, 3, bytes(log.content[3:]))]


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([101], CloseReason.REPORT_BEYOND_END),
        ([100, 1_000_000_000], CloseReason.REPORT_BEYOND_END),
        ([100, 99], CloseReason.OFFSET_MISMATCH),
        ([-2], CloseReason.MALFORMED_REPORT),
        ([50, -1], CloseReason.MALFORMED_REPORT),
        ([-1, -1, -1], CloseReason.MALFORMED_REPORT),
    ],
)
async def test_reports_that_end_the_connection(
    reports: list[int], reason: CloseReason, caplog: pytest.LogCaptureFixture
) -> None:
    service = HAService(log_of(100))
    slave = SlaveSide(service)
    with caplog.at_level(logging.INFO):
        async with trio.open_nursery() as nursery:
            slave.start(nursery)
            for report in reports:
                await slave.stream.send_all(report.to_bytes(8, "big", signed=True))
                await wait_all_tasks_blocked()
    assert slave.close_reason is reason
    assert slave.closed_at == 0
    assert service.statistics().closed_counts == {reason: 1}
    assert service.push2_slave_max_offset == (100 if 100 in reports else 0)
    assert f"reason={reason.value}" in caplog.text


async def test_a_report_of_bytes_that_were_never_sent_ends_the_connection() -> None:
    log = log_of(SEGMENT_SIZE)
    service = HAService(log, HAOptions(transfer_bytes_per_s_max=1024))
    async with until_closed(service, 1) as slave:
        await slave.report(4000)
    assert slave.close_reason is CloseReason.OFFSET_MISMATCH
    assert service.push2_slave_max_offset == 0


async def test_a_closed_connection_stops_counting_at_once() -> None:
    service = HAService(log_of(100))
    slave = SlaveSide(service)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slave.serve)
        await slave.report(100)
        await wait_all_tasks_blocked()
        assert service.acknowledged() == [100]
        await slave.stream.aclose()
        await service.wait_state(SlaveState.SHUTDOWN)
        assert service.acknowledged() == []
    assert slave.close_reason is CloseReason.SLAVE_CLOSED


async def test_a_broken_connection_has_a_close_reason() -> None:
    log = log_of(100)
    service = HAService(log)
    slave = SlaveSide(service)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slave.serve)
        await slave.report(100)
        await wait_all_tasks_blocked()
        receive = slave.stream.receive_stream
        assert isinstance(receive, trio.testing.MemoryReceiveStream)
        receive.close()
        log.put(b"x")
    assert slave.close_reason is CloseReason.CONNECTION_LOST


async def test_a_slave_out_of_range_gets_heartbeats_as_from_rocketmq_and_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = log_of(SEGMENT_SIZE, first_offset=2 * SEGMENT_SIZE)
    service = HAService(log)
    async with connected(service, 5000) as slave:
        await trio.sleep(11)
        assert slave.heads == [(5.001, 5000, 0), (10.002, 5000, 0)]
        assert service.statistics().slaves[0].state is SlaveState.OUT_OF_RANGE
        assert service.acknowledged() == []
        assert not service.is_slave_ok(log.max_offset.value)
        assert service.push2_slave_max_offset == 0
        assert "asks for offset 5000, the log begins at 8192" in service.explain(log.max_offset.value)
        assert service.lowest_needed_offset() is None
    assert caplog.text.count("ha.slave_out_of_range") == 1


async def test_a_connected_slave_goes_out_of_range() -> None:
    log = log_of(3 * SEGMENT_SIZE)
    service = HAService(log, HAOptions(transfer_bytes_per_s_max=1024))
    async with connected(service, 1) as slave:
        assert len(service.acknowledged()) == 1
        log.delete_before(SEGMENT_SIZE)
        await service.wait_state(SlaveState.OUT_OF_RANGE)
        assert trio.current_time() - slave.began == 0.1
        assert service.acknowledged() == []


async def test_the_range_question_is_answered_and_changes_what_0_means() -> None:
    log = log_of(2 * SEGMENT_SIZE + 10, first_offset=SEGMENT_SIZE)
    service = HAService(log)
    async with connected(service) as slave:
        await slave.stream.send_all(RANGE_QUESTION)
        await wait_all_tasks_blocked()
        assert slave.heads == [(0.0, SEGMENT_SIZE, 0), (0.0, 3 * SEGMENT_SIZE + 10, 0)]
        assert service.acknowledged() == []
        await slave.report(0)
        await wait_all_tasks_blocked()
        assert slave.frames[2][1] == SEGMENT_SIZE
        assert b"".join(body for _, _, body in slave.frames) == log.content


async def test_a_slave_that_asked_gets_the_first_offset_at_once() -> None:
    service = HAService(log_of(SEGMENT_SIZE, first_offset=SEGMENT_SIZE))
    async with connected(service) as slave:
        await slave.stream.send_all(RANGE_QUESTION)
        await wait_all_tasks_blocked()
        await slave.report(77)
        await trio.sleep(6)
        assert slave.heads[2:] == [(0.0, SEGMENT_SIZE, 0), (5.001, SEGMENT_SIZE, 0)]


async def test_flow_control_counts_headers_and_bodies() -> None:
    log = log_of(SEGMENT_SIZE)
    async with connected(HAService(log, HAOptions(transfer_bytes_per_s_max=1024)), 1) as slave:
        await trio.sleep(10)
    assert slave.heads[:2] == [(0.0, 1, 102 - 12), (0.1, 91, 102 - 12)]
    by_second: dict[int, int] = {}
    for at, _, size in slave.heads:
        second, part = divmod(round(10 * at), 10)
        by_second[second] = by_second.get(second, 0) + 12 + size
        assert by_second[second] <= 1024 * (part + 1) // 10
    assert [by_second[second] for second in range(4)] == 4 * [1024]
    assert sum(size for _, _, size in slave.heads) == SEGMENT_SIZE - 1


async def test_truncation_below_a_slaves_position_closes_its_connection() -> None:
    log = log_of(100)
    async with until_closed(HAService(log), 100) as slave:
        log.max_offset.reset(50)
    assert slave.close_reason is CloseReason.LOG_TRUNCATED
    assert slave.closed_at == 0


@asynccontextmanager
async def slow_slave(
    service: HAService, request: int
) -> AsyncIterator[tuple[trio.StapledStream[Any, Any], list[CloseReason]]]:
    """A slave that has requested the log from there on: its stream, which passes a frame on only to a reader, and why
    it was closed, at the end of the block."""
    ours, theirs = trio.testing.lockstep_stream_pair()
    reasons: list[CloseReason] = []

    async def serve() -> None:
        reasons.append(await service.handle(theirs, "10.0.0.9:5"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await ours.send_all(request.to_bytes(8, "big"))
        yield ours, reasons


async def test_a_log_that_grew_again_after_a_truncation_is_not_sent_behind_the_old_bytes() -> None:
    """As of a member that has lost its term, and has slaves that are no members; the slave is slow to receive."""
    log = MemoryLog(b"a" * 100)
    service = HAService(log)
    async with slow_slave(service, 10) as (ours, reasons):
        await wait_all_tasks_blocked()  # the frame up to 100 is being sent
        del log.content[50:]
        log.max_offset.reset(50)
        log.put(b"b" * 100)
        with suppress(trio.BrokenResourceError):
            received = b"".join([chunk async for chunk in ours])
            assert b"b" not in received
    assert reasons == [CloseReason.LOG_TRUNCATED]


async def test_a_slave_that_does_not_read_costs_one_frame_and_is_disconnected() -> None:
    log = log_of(40_000, segment_size=1 << 20)
    service = HAService(log, SMALL)
    async with slow_slave(service, 1) as (_, reasons):
        await trio.sleep(20)
        assert service.statistics().slaves[0].transfer_offset == 1001
        assert service.statistics().slaves[0].transferred_bytes == 0
    assert reasons == [CloseReason.HOUSEKEEPING_TIMEOUT]


async def test_cancelling_in_the_middle_of_a_frame_closes_the_stream() -> None:
    service = HAService(log_of(40_000, segment_size=1 << 20), SMALL)
    ours, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.handle, theirs, "10.0.0.9:5")
        await ours.send_all((1).to_bytes(8, "big"))
        assert await ours.receive_some(100)
        nursery.cancel_scope.cancel()
    assert service.connection_count == 0
    assert service.statistics().closed_counts == {CloseReason.SERVICE_STOPPED: 1}
    rest = 100
    while chunk := await ours.receive_some(4096):
        rest += len(chunk)
    assert rest <= 12 + 1000
