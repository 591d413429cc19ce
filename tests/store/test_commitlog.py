"""Putting and reading: order, limits, segment ends, a master's bytes, and views that outlive their segment."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ha.errors import DiskFailed, DiskFull, OffsetGone
from ha.protocol.codes import PutStatus, SysFlag
from ha.protocol.record import Filler, Message, decode_record, encode_host, scan_record
from ha.protocol.record_encoding import encode_record, record_size
from ha.protocol.store_files import Checkpoint, segment_name
from ha.store.checkpoint import load_checkpoint
from ha.store.files import File, OsDisk
from ha.store.message_store import open_message_store
from tests.store.disks import MemoryDisk, MemoryFile, run_inline
from tests.store.stores import (
    ROOT,
    SEGMENT,
    WallClock,
    all_bytes,
    check_derived,
    dispatched,
    message,
    open_small,
    put_batch,
    reached,
    records,
    small_options,
)


async def test_results_contain_the_offsets_of_each_message() -> None:
    clock = WallClock(1000)
    async with open_small(clock=clock) as store:
        assert (store.log.min_offset, store.log.max_offset.value) == (-1, 0)
        batch = [message(0), message(1, queue_id=1), message(2)]
        results = await store.log.put(batch)
        sizes = [record_size(m) for m in batch]
        assert [r.status for r in results] == [PutStatus.PUT_OK] * 3
        assert [r.physical_offset for r in results] == [0, sizes[0], sizes[0] + sizes[1]]
        assert [r.queue_offset for r in results] == [0, 0, 1]
        assert results[-1].next_offset == store.log.max_offset.value == sum(sizes)
        for given, result in zip(batch, results, strict=True):
            record = decode_record(await store.log.read(result.physical_offset, result.size))
            assert record.body == given.body
            assert record.store_timestamp_ms == result.store_timestamp_ms > 1000
            assert record.store_host == ("127.0.0.1", 10911)
        assert store.log.next_queue_offset("T", 0) == 2


async def test_a_filler_ends_each_segment_and_no_record_touches_its_end() -> None:
    async with open_small() as store:
        results = []
        for number in range(40):
            results += await store.log.put([message(number, size=500)])
        assert len(store.log.segments) > 4
        for result in results:
            first, last = result.physical_offset // SEGMENT, (result.next_offset + 7) // SEGMENT
            assert first == last
        for segment in list(store.log.segments)[:-1]:
            end = max(r.next_offset for r in results if r.physical_offset < segment.end)
            raw = await store.log.read(end, SEGMENT)
            assert scan_record(raw, 0, len(raw)) == Filler(segment.end - end)
            assert not any(bytes(raw[8:]))
        await check_derived(store)


async def test_store_times_never_fall_across_segments() -> None:
    """Even if the clock is set back within a chunk: recovery relies on the order of store times."""

    class SetBack(WallClock):
        def __call__(self) -> int:
            self.now_ms = 9000 if self.now_ms == 1000 else 5000
            return self.now_ms

    clock = SetBack(0)
    async with open_small(clock=clock) as store:
        results = await store.log.put([message(number, size=1200) for number in range(3)])
        await dispatched(store)
        clock.now_ms = 1000
        results += await store.log.put([message(number, size=1200) for number in range(2)])
        assert results[3].physical_offset < SEGMENT <= results[4].physical_offset
        assert [result.store_timestamp_ms for result in results] == [5000] * 3 + [9000] * 2


@pytest.mark.parametrize("spare", [7, 8])
async def test_a_record_may_leave_exactly_the_8_bytes_that_a_filler_needs(spare: int) -> None:
    overhead = record_size(Message("T", 0, b""))
    async with open_small(message_size_max=4096) as store:
        body = b"x" * (SEGMENT - spare - overhead)
        [result] = await store.log.put([Message("T", 0, body)])
        assert result.status is (PutStatus.PUT_OK if spare == 8 else PutStatus.MESSAGE_ILLEGAL)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (Message("T", 0, b"x" * 2049), PutStatus.MESSAGE_ILLEGAL),
        (Message("t" * 128, 0, b""), PutStatus.MESSAGE_ILLEGAL),
        (Message("ü" * 64, 0, b""), PutStatus.MESSAGE_ILLEGAL),
        (Message("%RETRY%" + "t" * 249, 0, b""), PutStatus.MESSAGE_ILLEGAL),
        (Message("T", 0, b"", b"x" * 32768), PutStatus.PROPERTIES_SIZE_EXCEEDED),
    ],
)
async def test_a_message_over_a_limit_is_refused_without_using_a_queue_offset(bad: Message, status: PutStatus) -> None:
    async with open_small() as store:
        results = await store.log.put([message(0), bad, message(1)])
        assert [r.status for r in results] == [PutStatus.PUT_OK, status, PutStatus.PUT_OK]
        assert results[1].remark
        assert [r.queue_offset for r in results] == [0, -1, 1]
        assert len(await records(store)) == 2
        in_batch = await put_batch(store.log, [message(2), bad])
        assert [r.status for r in in_batch] == [status, status]
        assert len(await records(store)) == 2


@pytest.mark.parametrize("known_count", [0, 1])
async def test_a_number_that_does_not_fit_uses_no_queue_offset(known_count: int) -> None:
    """Neither in a new queue nor in a known one."""
    async with open_small() as store:
        await store.log.put([message(0, queue_id=2), *[message(1)] * known_count])
        end = store.log.max_offset.value
        with pytest.raises(OverflowError):
            store.log.append([message(1), message(2), message(3, queue_id=1), message(4, flag=1 << 40)])
        assert store.log.max_offset.value == end
        results = await store.log.put([message(5), message(6, queue_id=1)])
        assert [each.queue_offset for each in results] == [known_count, 0]


async def test_a_refused_message_leaves_no_store_time() -> None:
    """The checkpoint's time counts as that of a record: a later one would prove that bytes are missing."""
    async with open_small() as store:
        [stored] = await store.log.put([message(0)])
        await trio.sleep(0.005)
        assert (await store.log.put([Message("T", 0, b"x" * 2049)]))[0].status is PutStatus.MESSAGE_ILLEGAL
        assert store.log.last_store_timestamp_ms == stored.store_timestamp_ms


async def test_long_retry_topics_are_written_as_version_2() -> None:
    async with open_small() as store:
        topic = "%RETRY%" + "t" * 248
        [result] = await store.log.put([message(0, topic=topic)])
        assert decode_record(await store.log.read(0, result.size)).version == 2
        await check_derived(store)


async def test_a_batch_is_contiguous_in_one_segment() -> None:
    async with open_small() as store:
        await store.log.put([message(n, size=500) for n in range(5)])
        batches = [
            await put_batch(store.log, [message(first + n, size=400) for n in range(4)])
            for first in range(100, 200, 10)
        ]
        for results in batches:
            assert {r.status for r in results} == {PutStatus.PUT_OK}
            assert results[0].physical_offset // SEGMENT == results[-1].next_offset // SEGMENT
            offsets = [r.queue_offset for r in results]
            assert offsets == list(range(offsets[0], offsets[0] + 4))
        await check_derived(store)
        too_big = await put_batch(store.log, [message(n, size=3000) for n in range(3)])
        assert {r.status for r in too_big} == {PutStatus.MESSAGE_ILLEGAL}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"topic": "%RETRY%" + "t" * 130}, {}),
        ({"sys_flag": SysFlag.TRANSACTION_PREPARED}, {}),
        ({}, {"append_property_crc": True}),
        ({}, {"store_host": encode_host("fd00::9", 10911)}),
    ],
    ids=["plain", "V2", "no queue offset", "property CRC", "IPv6"],
)
@pytest.mark.parametrize("queues", [1, 2])
async def test_a_batch_is_stored_like_single_messages(
    changes: dict[str, Any], options: dict[str, Any], queues: int
) -> None:
    given = [message(number, queue_id=number % queues, flag=number, **changes) for number in range(5)]
    stored = []
    for whole in (False, True):
        async with open_small(clock=WallClock(1000), **options) as store:
            await store.log.put([message(7)])
            for _ in range(2):
                results = await (put_batch(store.log, given) if whole else store.log.put(given))
                assert {result.status for result in results} == {PutStatus.PUT_OK}
            following = [store.log.next_queue_offset(given[0].topic, queue_id) for queue_id in range(queues)]
            end = store.log.max_offset.value
            stored.append((results, following, end, await all_bytes(store)))
    assert stored[0] == stored[1]


async def test_prepared_and_rolled_back_records_take_no_queue_offset() -> None:
    async with open_small() as store:
        flags = [0, 0, SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_ROLLBACK, SysFlag.TRANSACTION_COMMIT]
        results = await store.log.put([message(n, sys_flag=flag) for n, flag in enumerate(flags)])
        assert [r.queue_offset for r in results] == [0, 1, 0, 0, 2]
        await dispatched(store)
        queue = store.queues.get("T", 0)
        assert queue is not None
        assert [e.physical_offset for e in queue.read(0, 9)] == [results[n].physical_offset for n in (0, 1, 4)]


async def test_ipv6_hosts_and_property_crc() -> None:
    async with open_small(store_host=encode_host("::1", 10911), append_property_crc=True) as store:
        [result] = await store.log.put([message(0, born_host=encode_host("fe80::1", 5))])
        record = decode_record(await store.log.read(0, result.size))
        assert (record.born_host, record.store_host) == (("fe80::1", 5), ("::1", 10911))
        assert b"__CRC32#" in record.properties
        await check_derived(store)


async def test_reading_stops_at_the_segment_and_at_the_end() -> None:
    async with open_small() as store:
        await store.log.put([message(n, size=500) for n in range(12)])
        end = store.log.max_offset.value
        assert bytes(await store.log.read(end, 10)) == b""
        assert bytes(store.log.read_hot(end, 10) or b"") == b""
        assert len(await store.log.read(100, 1 << 20)) == SEGMENT - 100
        assert len(await store.log.read(SEGMENT + 5, 7)) == 7
        for bad in (end + 1, -1):
            assert store.log.read_hot(bad, 10) is None
            with pytest.raises(OffsetGone) as caught:
                await store.log.read(bad, 10)
            assert caught.value.asked == bad


async def test_cold_bytes_are_read_correctly() -> None:
    async with open_small(hot_window_bytes=SEGMENT) as store:
        await store.log.put([message(n, size=500) for n in range(40)])
        hot_from = next(n for n in range(0, 1 << 20, 64) if store.log.read_hot(n, 1) is not None)
        assert store.log.max_offset.value - hot_from <= SEGMENT
        assert store.log.segments[0].view is None
        assert len(await records(store)) == 40


async def test_a_view_outlives_its_segment_and_the_store() -> None:
    disk = MemoryDisk()
    clock = WallClock()
    async with open_small(disk, clock) as store:
        await store.log.put([message(n, size=500) for n in range(20)])
        view = store.log.read_hot(0, 300)
        assert view is not None
        before = bytes(view)
        await check_derived(store)
        clock.now_ms += 100 * 3_600_000
        assert await store.retention.clean(at_any_hour=True) > 0
        assert store.log.read_hot(0, 300) is None
        with pytest.raises(OffsetGone):
            await store.log.read(0, 300)
    assert bytes(view) == before


# ---- a master's bytes


async def test_a_slave_copies_the_log_byte_for_byte_and_derives_the_rest() -> None:
    async with open_small() as master, open_small(is_slave=True) as slave:
        await master.log.put([message(n, size=n * 7 % 600, queue_id=n % 3) for n in range(60)])
        position = 0
        while position < master.log.max_offset.value:
            chunk = await master.log.read(position, 333)
            await slave.log.append_raw(position, memoryview(chunk))
            position += len(chunk)
        assert await all_bytes(slave) == await all_bytes(master)
        await check_derived(slave)


async def three_records() -> bytes:
    """Bytes of a master's log; 700 bytes are two records and a part of the third."""
    async with open_small() as master:
        await master.log.put([message(n, size=300) for n in range(3)])
        return await all_bytes(master)


async def test_an_incomplete_record_is_completed_or_truncated_by_a_restart() -> None:
    disk = MemoryDisk()
    raw = await three_records()
    async with open_small(disk, is_slave=True) as slave:
        await slave.log.append_raw(0, raw[:700])
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert slave.log.dispatched_offset.value == slave.queues.max_physical_offset == len(raw) // 3 * 2
        assert slave.statistics().dispatch_paused_reason == ""
    async with open_small(disk, is_slave=True) as slave:
        assert slave.log.max_offset.value == len(raw) // 3 * 2
        assert slave.statistics().recovered_clean
        await slave.log.append_raw(len(raw) // 3 * 2, raw[len(raw) // 3 * 2 :])
        await check_derived(slave)
        assert await all_bytes(slave) == raw


async def test_a_kill_leaves_no_holes_in_a_slaves_log() -> None:
    """A copy into the map has no order: a kill once left 19 zeros in a header, which no CRC covers."""
    disk = MemoryDisk()
    raw = await three_records()
    async with open_small(disk, is_slave=True) as slave:
        await slave.log.append_raw(0, raw[:700])
        disk.refuse = lambda operation, path: (
            errno.EIO if operation == "pwrite" and path.parent.name == "commitlog" else None
        )
        with pytest.raises(OSError, match="EIO"):
            await slave.log.append_raw(700, raw[700:])
        assert slave.log.max_offset.value == 700
        disk.refuse = lambda operation, path: None
        await slave.log.append_raw(700, raw[700:])
        await check_derived(slave)
        assert await all_bytes(slave) == raw


async def test_a_kill_leaves_no_holes_in_messages_put_together() -> None:
    disk = MemoryDisk()
    writes = 0

    def refuse(operation: str, path: Path) -> int | None:
        nonlocal writes
        writes += operation == "pwrite" and path.parent.name == "commitlog"
        return None

    disk.refuse = refuse
    async with open_small(disk) as store:
        await store.log.put([message(number, size=50) for number in range(5)])
        assert writes == 1
        await store.log.put([message(5, size=50)])
        assert writes == 2
        await check_derived(store)
        assert len(await records(store)) == 6


async def test_nothing_of_a_refused_write_is_visible() -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        (first,) = await store.log.put([message(0)])
        before = await all_bytes(store)
        disk.refuse = lambda operation, path: (
            errno.EIO if operation == "pwrite" and path.parent.name == "commitlog" else None
        )
        with pytest.raises(DiskFailed, match=r"write of .*commitlog.* failed: .*EIO"):
            await store.log.put([message(1), message(2)])
        assert store.log.max_offset.value == first.next_offset
        assert await all_bytes(store) == before
        disk.refuse = lambda operation, path: None
        with pytest.raises(DiskFailed):  # or the queue would have a gap where those two were
            await store.log.put([message(3)])


@pytest.mark.parametrize("is_slave", [False, True])
async def test_remains_of_a_refused_write_are_no_record_after_a_stop(
    is_slave: bool,
) -> None:
    """A record's CRC covers its body: with its properties missing it would count as sound after a clean stop."""
    async with open_small() as master:
        await master.log.put([message(0)])
        first = await all_bytes(master)
        await master.log.put([message(1)])
        both = await all_bytes(master)
    disk = MemoryDisk()
    async with open_small(disk, is_slave=is_slave) as store:
        await (store.log.append_raw(0, first) if is_slave else store.log.put([message(0)]))
        disk.taken_bytes = len(both) - len(first) - 4
        disk.refuse = lambda operation, path: errno.EIO if operation == "pwrite" else None
        with pytest.raises((DiskFailed, OSError), match="EIO"):
            await (store.log.append_raw(len(first), both[len(first) :]) if is_slave else store.log.put([message(1)]))
        disk.refuse = lambda operation, path: None
        raw = disk.inodes[ROOT / "commitlog" / f"{0:020d}"].content
        assert raw[len(first) : len(both)] == both[len(first) : -4] + bytes(4)
    async with open_small(disk, is_slave=is_slave) as store:
        assert not store.statistics().recovered_clean
        assert store.log.max_offset.value == len(first)
        assert len(await records(store)) == 1


async def test_a_stop_is_clean_after_a_refused_write_was_repeated() -> None:
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True) as store:
        disk.refuse = lambda operation, path: errno.EIO if operation == "pwrite" else None
        with pytest.raises(OSError, match="EIO"):
            await store.log.append_raw(0, b"ab")
        assert store.log.is_torn
        disk.refuse = lambda operation, path: None
        await store.log.append_raw(0, b"a")
        assert not store.log.is_torn


@pytest.mark.parametrize("is_promoted", [False, True])
async def test_records_of_a_refused_write_do_not_follow_what_is_written_instead(*, is_promoted: bool) -> None:
    """A slave's disk is full after some records of its master. It follows another master, with records of that size."""
    logs = []
    for numbers in ((0, 1, 2, 4), (0, 3)):
        async with open_small() as store:
            await store.log.put([message(number, size=50) for number in numbers])
            logs.append(await all_bytes(store))
    [old, new], disk = logs, MemoryDisk()
    first_size = len(new) // 2
    async with open_small(disk, is_slave=True) as store:
        await store.log.append_raw(0, old[:first_size])
        disk.taken_bytes = len(old) - first_size - 1
        disk.refuse = lambda operation, path: errno.ENOSPC if operation == "pwrite" else None
        with pytest.raises(OSError, match="ENOSPC"):
            await store.log.append_raw(first_size, old[first_size:])
        disk.refuse = lambda operation, path: None
        disk.refusal = None
        if is_promoted:
            await store.become_master()
            await store.log.put([message(3, size=50)])
        else:
            await store.log.append_raw(first_size, new[first_size:])
        killed = disk.kill()
    async with open_small(killed, is_slave=True) as store:
        assert [record.body for record in await records(store)] == [message(n, size=50).body for n in (0, 3)]


async def test_a_refused_filler_fails_the_put() -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        await store.log.put([message(number, size=1500) for number in range(2)])
        end = store.log.max_offset.value
        assert end < SEGMENT < end + 2000
        disk.refuse = lambda operation, path: (
            errno.EIO if operation == "pwrite" and path.parent.name == "commitlog" else None
        )
        with pytest.raises(DiskFailed, match="write of"):
            await store.log.put([message(2, size=3000)])
        assert store.log.max_offset.value == end
        disk.refuse = lambda operation, path: None


async def test_an_empty_slave_takes_the_segment_of_any_offset() -> None:
    async with open_small(is_slave=True) as slave:
        await slave.log.append_raw(3 * SEGMENT + 100, b"")
        assert (slave.log.min_offset, slave.log.max_offset.value) == (3 * SEGMENT, 3 * SEGMENT)
        with pytest.raises(ValueError, match="ends at"):
            await slave.log.append_raw(0, b"x")
        with pytest.raises(ValueError, match="cross the end"):
            await slave.log.append_raw(3 * SEGMENT, bytes(SEGMENT + 1))
        await slave.log.append_raw(3 * SEGMENT, bytes(SEGMENT))
        await slave.log.append_raw(4 * SEGMENT, b"y")
        assert slave.log.max_offset.value == 4 * SEGMENT + 1


async def test_a_slave_waits_at_invalid_bytes_and_a_master_skips_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for is_slave in (True, False):
        caplog.clear()
        async with open_small(is_slave=is_slave) as store:
            await store.log.append_raw(0, b"no record at all, is it?" * 9)
            for _ in range(5):
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert (store.log.dispatched_offset.value == 0) == is_slave
            assert bool(store.statistics().dispatch_paused_reason) == is_slave
        assert ("dispatch.paused" if is_slave else "dispatch.skipped") in caplog.text


async def test_a_record_for_a_topic_that_is_a_path_makes_no_files(tmp_path: Path) -> None:
    disk = MemoryDisk()
    async with open_small() as master, open_small(disk, is_slave=True) as slave:
        await master.log.put([message(0, topic="../../evil"), message(1, queue_id=-1), message(2)])
        await slave.log.append_raw(0, await all_bytes(master))
        await dispatched(slave)
        assert slave.queues.topics() == {"T": [0]}
        assert slave.statistics().dispatch_skipped_count == 2
        assert all(ROOT in path.parents and ".." not in path.parts for path in disk.inodes)


async def test_a_record_whose_topic_is_too_long_for_a_directory_makes_no_files(tmp_path: Path) -> None:
    """From a faulty master: RocketMQ's topics have at most 255 bytes, like names of files."""
    longest, too_long = "t" * 255, "飛" * 172 + "t" * 83
    assert (len(too_long), len(too_long.encode())) == (255, 599)
    async with open_message_store(small_options(root=tmp_path, is_slave=True)) as slave:
        log = b""
        for topic in (longest, too_long, "T"):
            given = message(0, topic=topic)
            log += encode_record(
                given, queue_offset=0, physical_offset=len(log), store_timestamp_ms=1, store_host=b"\x7f" * 8
            )
        await slave.log.append_raw(0, log)
        await dispatched(slave)
        assert slave.queues.topics() == {longest: [0], "T": [0]}
        assert slave.statistics().dispatch_skipped_count == 1


async def test_reset_sets_the_old_log_aside_and_starts_at_the_new_offset() -> None:
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True) as slave:
        async with open_small() as master:
            await master.log.put([message(n, size=300) for n in range(20)])
            raw = await all_bytes(master)
        for start in range(0, len(raw), SEGMENT):
            await slave.log.append_raw(start, raw[start : start + SEGMENT])
        await check_derived(slave)
        before = {path.name: bytes(i.content) for path, i in disk.inodes.items() if path.parent.name == "commitlog"}
        await slave.log.reset(50 * SEGMENT + 10)
        assert slave.log.max_offset.value == slave.log.min_offset == 50 * SEGMENT
        assert slave.queues.topics() == {}
        aside = ROOT / "commitlog.aside-1"
        assert {name: bytes(disk.inodes[aside / name].content) for name in disk.list_dir(aside)} | before == before
        await slave.log.append_raw(50 * SEGMENT, raw[:SEGMENT])
        await slave.log.reset(0)
        assert disk.list_dir(ROOT / "commitlog.aside-2")
    async with open_small(disk, is_slave=True) as slave:
        assert (slave.log.min_offset, slave.log.max_offset.value) == (0, 0)


async def test_reset_waits_for_the_segment_that_is_being_made(autojump_clock: object) -> None:
    disk = MemoryDisk()

    async def run_slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        result = await run_inline(call, *arguments)
        if call.__name__ == "_make":
            await trio.sleep(1)
        return result

    async with open_message_store(
        small_options(is_slave=True), disk=disk, run_blocking=run_slowly, wall_clock_ms=WallClock()
    ) as slave:
        async with open_small() as master:
            await master.log.put([message(0)])
            await slave.log.append_raw(0, await all_bytes(master))
        slave.log.allocator.want(SEGMENT)
        await trio.sleep(0.5)
        await slave.log.reset(50 * SEGMENT)
        assert disk.list_dir(ROOT / "commitlog.aside-1") == [f"{0:020d}"]
        assert disk.list_dir(ROOT / "commitlog") == [f"{50 * SEGMENT:020d}"]


REFUSED_STEPS = [
    ("create", f"commitlog.new-{50 * SEGMENT:020d}", errno.ENOSPC),
    ("create", f"commitlog.new-{50 * SEGMENT:020d}", errno.EACCES),
    ("rename", "consumequeue", errno.EBUSY),
    ("rename", "checksums", errno.EACCES),
    ("rename", "commitlog", errno.EBUSY),
    ("rename", "checkpoint", errno.EIO),
    ("rename", f"commitlog.new-{50 * SEGMENT:020d}", errno.ENOSPC),
]


@pytest.mark.parametrize("step", REFUSED_STEPS)
async def test_a_reset_that_the_disk_refuses_changes_nothing(step: tuple[str, str, int]) -> None:
    """For example because a directory is a mount point."""
    *refused, code = step
    disk = MemoryDisk()
    async with open_small() as master:
        await master.log.put([message(number, size=300) for number in range(30)])
        raw = await all_bytes(master)
    async with open_small(disk, is_slave=True) as slave:
        await slave.log.append_raw(0, raw[:SEGMENT])
        await check_derived(slave)
        await slave.flusher.flush()
        await slave.checkpointer.save(with_derived=False)
        before = set(disk.inodes) - {ROOT / "commitlog" / f"{SEGMENT:020d}"}  # made in advance
        disk.refuse = lambda operation, path: code if [operation, path.name] == refused else None
        with pytest.raises(DiskFull if code == errno.ENOSPC and refused[0] == "create" else OSError) as caught:
            await slave.log.reset(50 * SEGMENT)
        assert "/store/commitlog" in str(caught.value) or str(ROOT / refused[1]) in str(caught.value)
        assert set(disk.inodes) == before
        disk.refuse = lambda operation, path: None
        assert (slave.log.min_offset, slave.log.max_offset.value) == (0, SEGMENT)
        await slave.log.append_raw(SEGMENT, raw[SEGMENT : 2 * SEGMENT])
        await check_derived(slave)
    async with open_small(disk, is_slave=True) as slave:
        assert slave.recovery.is_clean
        await check_derived(slave)
        await slave.log.reset(50 * SEGMENT)
        assert slave.log.min_offset == 50 * SEGMENT


async def test_a_reset_whose_new_segment_can_not_be_opened_changes_nothing(tmp_path: Path) -> None:
    """It lies in the place of the log by then, in a directory that is not empty."""
    refused: list[int] = []

    class OpenedLate(OsDisk):
        def open(self, path: Path) -> File:
            if refused and path.name == f"{50 * SEGMENT:020d}":
                raise OSError(refused.pop(), "Too many open files", str(path))
            return super().open(path)

    async with open_small() as master:
        await master.log.put([message(number, size=300) for number in range(10)])
        raw = await all_bytes(master)
    async with open_small(OpenedLate(), root=tmp_path, is_slave=True) as slave:
        await slave.log.append_raw(0, raw[:2000])
        refused.append(errno.EMFILE)
        with pytest.raises(OSError, match="Too many open files"):
            await slave.log.reset(50 * SEGMENT)
        await slave.log.append_raw(2000, raw[2000:SEGMENT])
    async with open_small(OsDisk(), root=tmp_path, is_slave=True) as slave:
        assert slave.recovery.is_clean
        assert await all_bytes(slave) == raw[:SEGMENT]
        await check_derived(slave)


@pytest.mark.parametrize("begins_at", [0, 50 * SEGMENT])
async def test_a_reset_that_can_not_be_undone_is_left_to_the_next_start(begins_at: int) -> None:
    disk = MemoryDisk()
    with pytest.RaisesGroup(DiskFailed):
        async with open_small(disk, is_slave=True) as slave:
            async with open_small() as master:
                await master.log.put([message(0)])
                await slave.log.append_raw(0, await all_bytes(master))
            await dispatched(slave)
            last = f"commitlog.new-{50 * SEGMENT:020d}" if begins_at else "commitlog"
            disk.refuse = lambda operation, path: (
                errno.EIO if operation == "rename" and (path.name == last or "aside" in path.name) else None
            )
            await slave.log.reset(50 * SEGMENT)
    disk.refuse = lambda operation, path: None
    assert disk.exists(ROOT / "abort")
    async with open_small(disk, is_slave=True) as slave:
        assert slave.log.min_offset == begins_at
        assert bool(slave.log.max_offset.value > begins_at) == (begins_at == 0)
        await check_derived(slave)
        assert not [name for name in disk.list_dir(ROOT) if ".new-" in name]


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_reset_follows_symbolic_links(tmp_path: Path, is_killed: bool) -> None:
    """The new log is on the disk of the old one."""

    class DyingDisk(OsDisk):
        is_dead = False

        def rename(self, old: Path, new: Path) -> None:
            self.is_dead |= is_killed and ".new-" in old.name
            if self.is_dead:
                raise OSError(errno.EIO, "the machine is dead", str(old))
            super().rename(old, new)

    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (elsewhere / "log").mkdir()
    (root / "commitlog").symlink_to(elsewhere / "log")
    options = small_options(root=root, is_slave=True)
    with suppress(ExceptionGroup):
        async with open_message_store(options, disk=DyingDisk()) as slave:
            await slave.log.append_raw(0, b"")
            await slave.log.reset(50 * SEGMENT)
            assert not is_killed
    async with open_message_store(options) as slave:
        assert slave.log.min_offset == 50 * SEGMENT
    assert (root / "commitlog").is_symlink()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["log", "log.aside-1"]
    assert [path.name for path in (elsewhere / "log").iterdir()] == [f"{50 * SEGMENT:020d}"]


# ---- no room for the next segment


async def test_without_room_for_a_segment_puts_fail_and_reads_continue(autojump_clock: object) -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        await store.log.put([message(n, size=500) for n in range(5)])
        disk.refuse = lambda operation, path: errno.ENOSPC if operation == "create" else None
        end = store.log.max_offset.value
        results = await store.log.put([message(10, size=1500), message(11, size=1500), message(12, size=10)])
        assert [r.status for r in results] == [
            PutStatus.PUT_OK,
            PutStatus.CREATE_MAPPED_FILE_FAILED,
            PutStatus.PUT_OK,
        ]
        assert "no space left" in results[1].remark
        assert results[1].physical_offset == -1
        assert results[2].queue_offset == results[0].queue_offset + 1
        assert store.log.max_offset.value > end
        assert len(await records(store)) == 7
        disk.refuse = lambda operation, path: None
        [still] = await store.log.put([message(13, size=1500)])
        assert still.status is PutStatus.CREATE_MAPPED_FILE_FAILED  # known to have failed less than a second ago
        await trio.sleep(1)
        [again] = await store.log.put([message(14, size=1500)])
        assert again.status is PutStatus.PUT_OK
        await check_derived(store)


async def test_a_slave_without_room_raises_disk_full(autojump_clock: object) -> None:
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True) as store:
        disk.refuse = lambda operation, path: errno.ENOSPC if operation == "create" else None
        with pytest.raises(DiskFull) as caught:
            await store.log.append_raw(0, b"x")
        assert caught.value.size_bytes == SEGMENT


async def test_a_segment_whose_deletion_failed_late_is_not_used() -> None:
    """Its name is removed before the directory is synced: what is written to it would be lost at the next start."""

    class UnsyncedName(MemoryDisk):
        def unlink(self, path: Path) -> None:
            super().unlink(path)
            if path.name == f"{SEGMENT:020d}":
                raise OSError(errno.EIO, "sync of the directory failed", str(path))

    async with open_small() as master:
        await master.log.put([message(number, size=300) for number in range(30)])
        raw = await all_bytes(master)
    disk = UnsyncedName()
    async with open_small(disk, is_slave=True) as slave:
        await slave.log.append_raw(0, raw[:SEGMENT])
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(OSError, match="sync of the directory"):
            await slave.log.reset(50 * SEGMENT)
        await slave.log.append_raw(SEGMENT, raw[SEGMENT : 2 * SEGMENT])
    async with open_small(disk, is_slave=True) as slave:
        assert await all_bytes(slave) == raw[: 2 * SEGMENT]


async def test_a_segment_that_can_not_be_mapped_is_made_again(autojump_clock: object) -> None:
    """Its file existed already then, so that no put succeeded until the next start."""
    refused = [errno.ENOMEM]

    class Unmapped(MemoryFile):
        def map(self, size: int) -> memoryview:
            if refused:
                raise OSError(refused.pop(), "Cannot allocate memory")
            return super().map(size)

    class UnmappedOnce(MemoryDisk):
        def create(self, path: Path, size: int, *, allocate: bool) -> MemoryFile:
            super().create(path, size, allocate=allocate)
            return Unmapped(self, path, self.inode(path))

    async with open_small(UnmappedOnce()) as store:
        [result] = await store.log.put([message(0)])
        assert "allocate memory" in result.remark
        await trio.sleep(1)
        [result] = await store.log.put([message(0)])
        assert result.status is PutStatus.PUT_OK
        await check_derived(store)


async def test_a_segment_that_was_ready_too_late_is_deleted_if_the_log_begins_elsewhere(
    autojump_clock: object,
) -> None:
    """Otherwise the next start takes it for the beginning of the log: zeros, which no record follows."""
    disk = MemoryDisk()

    async def make_the_first_slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == "_make" and arguments == (0,):
            await trio.sleep(7)
        return await run_inline(call, *arguments)

    options = small_options(is_slave=True)
    async with open_message_store(options, disk=disk, run_blocking=make_the_first_slowly) as slave:
        with pytest.raises(trio.TooSlowError):
            await slave.log.append_raw(0, b"")
        await slave.log.append_raw(SEGMENT, b"")  # the master has deleted its first segment meanwhile
        assert disk.list_dir(ROOT / "commitlog") == [f"{SEGMENT:020d}"]


@pytest.mark.parametrize("taken_bytes", [0, 5, 30, 1 << 20])
async def test_a_full_disk_pauses_dispatch_until_there_is_room(
    taken_bytes: int, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    disk = MemoryDisk()
    disk.taken_bytes = taken_bytes
    async with open_small(disk) as store:
        disk.refuse = lambda operation, path: (
            errno.ENOSPC if operation in ("create", "pwrite") and "commitlog" not in path.parts else None
        )
        await store.log.put([message(n) for n in range(50)])
        await trio.sleep(10)
        assert "disk full" in store.statistics().dispatch_paused_reason
        assert caplog.text.count("dispatch.paused") == 1
        failures = [0]

        def sometimes(operation: str, path: Path) -> int | None:
            failures[0] += 1
            return errno.ENOSPC if operation in ("create", "pwrite") and failures[0] % 3 == 0 else None

        disk.refuse = sometimes
        await check_derived(store)
        assert store.statistics().dispatch_paused_reason == ""
        disk.refuse = lambda operation, path: None


async def test_messages_that_arrived_before_the_disk_was_full_are_announced(autojump_clock: object) -> None:
    """Consumers that wait for one of their tags were not woken."""
    disk = MemoryDisk()
    announced: list[tuple[int, list[int]]] = []
    refused = [errno.ENOSPC]

    def refuse_once(operation: str, path: Path) -> int | None:
        is_second_file = "consumequeue" in path.parts and path.name == f"{8 * 20:020d}"
        return refused.pop() if refused and operation == "pwrite" and is_second_file else None

    async with open_small(disk) as store:
        store.subscribe(
            lambda arrivals: announced.extend((each.max_queue_offset, each.tags_codes) for each in arrivals)
        )
        disk.refuse = refuse_once
        await store.log.put([message(3 * number + (number >= 8)) for number in range(12)])  # another tag from 8 on
        await check_derived(store)
        queue = store.queues.get("T", 0)
        assert not refused
        assert queue is not None
        codes = {entry.tags_code for entry in queue.read(0, 8)}
        assert codes <= {code for _, found in announced for code in found}
        assert announced[-1][0] == 12


async def test_dispatch_waits_until_the_checksums_of_old_bytes_can_be_opened(autojump_clock: object) -> None:
    """As after a truncation that the index did not survive, while too many files are open."""
    refused = [errno.EMFILE, errno.EMFILE]

    class OpenedLate(MemoryDisk):
        def read_bytes(self, path: Path) -> bytes:
            if refused and path.parent.name == "checksums":
                raise OSError(refused.pop(), "Too many open files", str(path))
            return super().read_bytes(path)

    made = MemoryDisk()
    async with open_small(made) as store:
        await store.log.put([message(number, size=300) for number in range(50)])
        await dispatched(store)
    disk = OpenedLate(made.inodes)
    codes, refused[:] = list(refused), []
    async with open_small(disk, recovery_scan_bytes=500) as store:
        refused += codes
        store.dispatcher.dispatch_again(0)
        await check_derived(store)
        assert not refused
        assert store.statistics().dispatch_paused_reason == ""


async def test_dispatch_waits_until_the_queues_of_damaged_bytes_can_be_opened(autojump_clock: object) -> None:
    """It ended the node, although the queues have the records."""
    refused: list[int] = []

    class OpenedLate(MemoryDisk):
        def open(self, path: Path) -> MemoryFile:
            if refused and path.is_relative_to(ROOT / "consumequeue"):
                raise OSError(refused.pop(), "Too many open files", str(path))
            return super().open(path)

    disk = OpenedLate()
    async with open_small(disk, hot_window_bytes=0, checksum_block_size=1024, scrub_bytes_per_s=0) as store:
        results = await store.log.put([message(number, size=300, queue_id=number % 2) for number in range(8)])
        await dispatched(store)
        await store.flusher.flush()
        await store.verified.cover_flushed()
        disk.inodes[ROOT / "commitlog" / segment_name(0)].content[500] ^= 1
        store.queues.limit_open_files(1)
        refused += [errno.EMFILE, errno.EMFILE]
        store.dispatcher.dispatch_again(0)
        await reached(store.log.dispatched_offset, results[-1].next_offset)
        assert not refused
        assert store.statistics().dispatch_paused_reason == ""


async def test_the_checkpoint_is_reset_when_a_log_is_set_aside(autojump_clock: object) -> None:
    """The store times of the old records would apply to the new log, whose master may be another one."""
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True, derived_flush_interval_s=1.0) as store:
        newest = encode_record(
            message(1), queue_offset=0, physical_offset=0, store_timestamp_ms=1_700_000_000_000, store_host=b"\x7f" * 8
        )
        await store.log.append_raw(0, newest)
        await dispatched(store)
        await trio.sleep(15.5)
        assert load_checkpoint(disk, ROOT / "checkpoint").physic_msg_timestamp_ms == 1_700_000_000_000
        assert store.index is not None
        being_written = store.index.take_unwritten()
        await store.log.reset(SEGMENT)
        store.index.write(being_written)
        await store.log.append_raw(SEGMENT, newest[:50])
        await trio.sleep(15.5)
        assert store.log.flushed_offset.value == SEGMENT + 50
        assert load_checkpoint(disk, ROOT / "checkpoint") == Checkpoint()
