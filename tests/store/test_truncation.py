"""Truncation of an open store's log: what is removed, what continues, and crashes at any moment."""

import errno
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing
from trio._core import _run as _trio_run
from trio.testing import MockClock

from ha.errors import DiskFailed, DiskFull, HalogError, OffsetGone
from ha.protocol.codes import PutStatus
from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_record
from ha.store.commitlog import UNLIMITED
from ha.store.message_store import MessageStore, open_message_store
from ha.store.record_maker import AppendResult
from ha.store.truncation import INTENT_FILE, load_intent, save_intent
from tests.store.disks import Inode, MemoryDisk, MemoryFile, Worker, run_inline
from tests.store.recording import PowerLoss, Recorder, RecordingDisk
from tests.store.stores import (
    ROOT,
    SEGMENT,
    WallClock,
    all_bytes,
    check_derived,
    dispatched,
    message,
    open_small,
    records,
    small_options,
)

INTENT = ROOT / INTENT_FILE


async def filled(store: MessageStore, count: int = 30, size: int = 300) -> list[AppendResult]:
    results = []
    for number in range(count):
        results += await store.log.put([message(number, size=size, queue_id=number % 3)])
    await dispatched(store)
    return results


async def keys_found(store: MessageStore, numbers: range) -> list[int]:
    """Returns which of some messages the index finds."""
    return [number for number in numbers if await store.query("T", f"k{number}", 9, 0, 1 << 62)]


# ---- what it does


@pytest.mark.parametrize("kept", [0, 1, 9, 10, 11, 17, 29])
@pytest.mark.parametrize("is_slave", [True, False])
@pytest.mark.parametrize("flush_mode", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_truncation_removes_everything_behind_it(
    kept: int, is_slave: bool, flush_mode: str, autojump_clock: MockClock
) -> None:
    disk = MemoryDisk()
    async with open_small(disk, is_slave=is_slave, flush_mode=flush_mode, derived_flush_interval_s=1.0) as store:
        results = await filled(store)
        assert len(store.log.segments) > 2
        await trio.sleep(30)  # all is saved: checksums, checkpoint, index, ends of the queues
        before = await all_bytes(store)
        cut = results[kept].physical_offset
        await store.truncate(cut)
        log = store.log
        assert log.max_offset.value == log.flushed_offset.value == log.dispatched_offset.value == cut
        assert await all_bytes(store) == before[:cut]
        assert len(await records(store)) == kept
        await check_derived(store)
        assert await keys_found(store, range(30)) == list(range(kept))
        assert not disk.exists(INTENT)
        on_disk = b"".join(bytes(disk.inodes[p].durable) for p in sorted(disk.inodes) if p.parent.name == "commitlog")
        assert on_disk.rstrip(b"\0") == before[:cut].rstrip(b"\0")
        assert not any(on_disk[cut:])
        with pytest.raises(OffsetGone):
            await log.read(cut + 1, 1)
        # What comes next begins where each queue ends now.
        more = await log.put([message(100 + n, size=200, queue_id=n % 3) for n in range(9)])
        assert [each.queue_offset for each in more] == [len(range(n % 3, kept, 3)) + n // 3 for n in range(9)]
        await check_derived(store)
        await trio.sleep(30)
        await store.scrub.wait_round()
        assert not store.damage.open
        assert store.scrub.statistics().queue_entries_mended_count == 0
        assert store.scrub.statistics().index_rebuilt_count == 0
        end = await all_bytes(store)
        killed = disk.kill()
    disk.locked.clear()
    for again in (disk, killed):
        async with open_small(again, is_slave=is_slave, flush_mode=flush_mode) as store:
            assert store.statistics().recovered_clean is (again is disk)
            assert await all_bytes(store) == end
            assert not store.damage.open
            await check_derived(store)
            await store.scrub.wait_round()
            assert store.scrub.statistics().index_rebuilt_count == 0


@pytest.mark.parametrize("limit", ["none", "before", "after"])
async def test_a_record_is_removed_with_everything_behind_it(limit: str) -> None:
    """Given by any of its bytes, and although it is confirmed."""
    async with open_small(MemoryDisk(), is_slave=True) as store:
        results = await filled(store)
        begin = results[17].physical_offset
        limits = {"none": UNLIMITED, "before": results[5].physical_offset, "after": results[20].physical_offset}
        if limit != "none":
            store.log.limit_dispatch(limits[limit])
        await store.truncate_record(begin + 27)
        assert store.log.max_offset.value == begin
        assert len(await records(store)) == 17
        expected = {"none": UNLIMITED, "before": limits["before"], "after": begin}
        assert store.log.dispatch_limit.value == expected[limit]


async def test_truncation_at_the_end_changes_nothing() -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        await store.truncate(0)
        await filled(store, 3)
        steps, generation = len(disk.steps), store.log.generation
        await store.truncate(store.log.max_offset.value)
        assert (len(disk.steps), store.log.generation) == (steps, generation)


async def test_truncation_is_refused_except_at_record_boundaries() -> None:
    async with open_small(delete_files_max=2) as store:
        results = await filled(store, 60)
        store.retention.disk_used_ratio = 0.86  # by force, as on a full disk
        await store.retention.clean()
        begin, end = store.log.min_offset, store.log.max_offset.value
        assert begin > 0
        inside = [results[-3].physical_offset + 1, results[-1].next_offset - 1, results[-5].physical_offset + 150]
        filler = next(r.next_offset for r in results[-20:] if r.next_offset % SEGMENT > SEGMENT - 500)
        assert filler not in [r.physical_offset for r in results]
        for wrong in (-1, 0, begin - 1, end + 1, *inside, filler + 4):
            with pytest.raises(ValueError, match="truncate"):
                await store.truncate(wrong)
        assert store.log.max_offset.value == end
        await check_derived(store)
        await store.truncate(filler)
        assert store.log.max_offset.value == filler
        await check_derived(store)
        await store.truncate(begin)
        assert store.log.min_offset == store.log.max_offset.value == begin
        await store.log.put([message(1)])
        await check_derived(store)


async def test_where_a_record_ends() -> None:
    async with open_small() as store:
        assert await store.record_end(0) is None, "the log is empty"
        results = await filled(store, 60)
        for result in (results[0], results[-1]):
            assert await store.record_end(result.physical_offset) == result.next_offset
            assert await store.record_end(result.physical_offset + 1) is None
        starts = [result.physical_offset for result in results]
        filler = next(result.next_offset for result in results if result.next_offset not in starts)
        assert await store.record_end(filler) == filler - filler % SEGMENT + SEGMENT
        assert await store.record_end(results[-1].next_offset) is None
        assert await store.record_end(results[-1].next_offset + 9 * SEGMENT) is None
        segment = store.log.segments[0]
        segment.file.pwrite(b"?", 200)
        assert await store.record_end(0) is None, "its body is damaged"


async def test_truncation_wakes_offset_waiters_and_fails_flush_waiters(autojump_clock: MockClock) -> None:
    async with open_small(flush_interval_s=1e6) as store:
        first, second = await store.log.put([message(0), message(1)])
        await dispatched(store)
        woken: list[tuple[str, int]] = []

        async def wait(name: str) -> None:
            woken.append((name, await getattr(store.log, name).wait_beyond(second.next_offset)))

        answers: list[PutStatus] = []
        async with trio.open_nursery() as nursery:
            for name in ("max_offset", "flushed_offset", "dispatched_offset"):
                nursery.start_soon(wait, name)
            await trio.testing.wait_all_tasks_blocked()
            await store.truncate(first.next_offset)
        assert sorted(woken) == [
            (name, first.next_offset) for name in ("dispatched_offset", "flushed_offset", "max_offset")
        ]
        [third] = await store.log.put([message(2, size=500)])
        assert third.next_offset > second.next_offset
        store.flusher.request(third.next_offset, trio.current_time() + 100, answers.append)
        await store.truncate(first.next_offset)
        # Flushed first, as all before the cut has to be.
        assert answers == [PutStatus.PUT_OK]
        await store.log.put([message(3)])


async def test_a_flush_request_of_truncated_bytes_fails() -> None:
    async with open_small(flush_interval_s=1e6) as store:
        first, second = await store.log.put([message(0), message(1)])
        answers: list[PutStatus] = []
        await store.flusher.flush()
        store.flusher.request(second.next_offset + 1, trio.current_time() + 100, answers.append)
        await store.truncate(first.next_offset)
        assert answers == [PutStatus.FLUSH_DISK_TIMEOUT]
        assert store.flusher.waiting_count == 0


async def test_the_dispatch_limit_falls_with_the_log(autojump_clock: MockClock) -> None:
    """The bytes that replace confirmed ones are not confirmed."""
    async with open_small() as store:
        results = await store.log.put([message(n) for n in range(5)])
        store.log.limit_dispatch(results[3].next_offset)
        await trio.sleep(1)
        await store.truncate(results[1].next_offset)
        assert store.log.dispatch_limit.value == results[1].next_offset
        more = await store.log.put([message(10, size=40)])
        assert more[0].queue_offset == 2
        await trio.sleep(1)
        assert store.log.dispatched_offset.value == results[1].next_offset
        store.log.limit_dispatch(UNLIMITED)
        await check_derived(store)


async def test_undispatched_records_count_for_the_next_queue_offsets(autojump_clock: MockClock) -> None:
    async with open_small() as store:
        store.log.limit_dispatch(0)
        results = await store.log.put([message(n, queue_id=n % 2) for n in range(6)])
        await store.truncate(results[4].physical_offset)
        again = await store.log.put([message(n, queue_id=n % 2) for n in range(2)])
        assert [each.queue_offset for each in again] == [2, 2]
        store.log.limit_dispatch(UNLIMITED)
        await check_derived(store)


async def test_keys_in_several_index_files_are_truncated(autojump_clock: MockClock) -> None:
    """Three keys per record, ten per file: truncation removes whole files, and part of one."""
    for kept in range(12):
        disk = MemoryDisk()
        async with open_small(disk, index_entry_count=11, derived_flush_interval_s=1.0) as store:
            results = await filled(store, 12, 100)
            await trio.sleep(10)
            await store.truncate(results[kept].physical_offset)
            assert await keys_found(store, range(12)) == list(range(kept))
            await store.log.put([message(50 + n, size=60) for n in range(5)])
            await check_derived(store)
            await store.scrub.wait_round()
            assert store.scrub.statistics().index_rebuilt_count == 0
        async with open_small(disk, index_entry_count=11) as store:
            assert await keys_found(store, range(12)) == list(range(kept))
            await check_derived(store)
            await store.scrub.wait_round()
            assert store.scrub.statistics().index_rebuilt_count == 0


async def test_bytes_before_the_truncation_are_not_taken_for_resident(autojump_clock: MockClock) -> None:
    """A page fault would stop the event loop; bytes put from now on are resident again."""
    async with open_small(hot_window_bytes=1000) as store:
        results = await filled(store)
        cut = results[5].physical_offset
        await store.truncate(cut)
        assert store.log.read_hot(results[4].physical_offset, 10) is None
        [again] = await store.log.put([message(99, size=500)])
        found = store.log.read_hot(cut, again.size)
        assert found is not None
        assert bytes(found) == bytes(await store.log.read(cut, again.size))
        for number in range(30):
            await store.log.put([message(number, size=500)])
            await trio.sleep(0.1)
        await check_derived(store)


async def test_store_times_do_not_fall_after_a_truncation_behind_unqueued_records() -> None:
    """Of a deleted topic, here; the next master may have an earlier clock than the one that stored them."""
    clock = WallClock()
    async with open_small(clock=clock) as store:
        await store.log.put([message(0)])
        clock.now_ms += 3_600_000
        await store.log.put([message(1, topic="deleted")])
        await store.log.put([message(2)])
        [cut] = await store.log.put([message(3)])
        await dispatched(store)
        await store.clear_topics(dict.fromkeys(("T", "deleted"), store.log.max_offset.value))
        clock.now_ms -= 3_600_000
        await store.truncate(cut.physical_offset)
        await store.log.put([message(4)])
        times = [record.store_timestamp_ms for record in await records(store)]
        assert times == sorted(times)
        assert times[-1] == times[-2] < cut.store_timestamp_ms


async def test_truncation_drops_the_terms_behind_it() -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        results = await filled(store, 10)
        for epoch, number in ((3, 2), (4, 5), (7, 8)):
            await store.epochs.append(epoch, results[number].physical_offset)
        await store.truncate(results[5].physical_offset)
        assert [entry.epoch for entry in store.epochs.entries] == [3]
        await store.epochs.append(9, store.log.max_offset.value)
    async with open_small(disk) as store:
        assert [entry.epoch for entry in store.epochs.entries] == [3, 9]
        await store.log.reset(SEGMENT)
        assert not store.epochs.entries
    async with open_small(disk) as store:
        assert not store.epochs.entries


async def test_a_start_drops_terms_behind_the_end_of_the_log(autojump_clock: MockClock) -> None:
    disk = MemoryDisk()
    async with open_small(disk, flush_interval_s=1e6) as store:
        first, second = await store.log.put([message(0), message(1)])
        await store.epochs.append(1, first.next_offset)
        await store.epochs.append(2, second.next_offset)
        disk = disk.kill()
    disk.inodes[ROOT / "commitlog" / f"{0:020d}"].content[first.next_offset :] = bytes(SEGMENT - first.next_offset)
    async with open_small(disk) as store:
        assert [entry.epoch for entry in store.epochs.entries] == [1]


async def test_terms_are_dropped_with_deleted_segments(autojump_clock: MockClock) -> None:
    async with open_small(delete_files_max=2) as store:
        results = await filled(store, 60)
        for epoch, number in ((3, 1), (4, 2), (7, 40)):
            await store.epochs.append(epoch, results[number].physical_offset)
        store.retention.disk_used_ratio = 0.86
        await store.retention.clean()
        assert store.log.min_offset > results[2].next_offset
        assert [entry.epoch for entry in store.epochs.entries] == [4, 7]


# ---- beside everything else


async def test_a_read_during_a_truncation_finds_no_damage(autojump_clock: MockClock) -> None:
    """It has the checksum from before the truncation and the bytes from after it."""
    disk = MemoryDisk()
    gates: list[trio.Event] = []

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if gates and getattr(call, "__name__", "") == "pread" and "commitlog" in call.__self__.path.parts:  # type: ignore[attr-defined]
            await gates.pop().wait()
        return await run_inline(call, *arguments)

    given = {"hot_window_bytes": 0, "checkpoint_interval_s": 0.2, "scrub_bytes_per_s": 0}
    async with open_message_store(
        small_options(**given), disk=disk, run_blocking=slowly, wall_clock_ms=WallClock()
    ) as store:
        results = await filled(store)
        await trio.sleep(5)
        store.verified.trusted_from = 0  # as after a restart
        gate = trio.Event()
        found: list[bytes | str] = []

        async def read() -> None:
            try:
                found.append(bytes(await store.log.read(results[10].physical_offset, 50)))
            except OffsetGone:
                found.append("gone")

        async with trio.open_nursery() as nursery:
            gates.append(gate)
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert not gates
            await store.truncate(results[5].physical_offset)
            gate.set()
        assert found == ["gone"]
        assert not store.damage.open
        assert store.damage.found_count == 0


def test_truncation_beside_all_other_services_keeps_earlier_bytes() -> None:
    """Puts, saves, scrub, cold reads and truncations at once, with slow calls; finally the power fails."""
    for seed in range(40):
        run(_cut_amid_everything, seed)


async def _cut_amid_everything(seed: int) -> None:
    chance = Random(seed)
    recorder = Recorder()
    disk = RecordingDisk(recorder)

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):  # as a thread's, its end is waited for in any case
            await trio.sleep(chance.choice([0, 0, 0.001, 0.05]))
            try:
                return call(*arguments)
            finally:
                await trio.sleep(chance.choice([0, 0, 0.001, 0.05]))

    options = small_options(
        hot_window_bytes=512,
        checkpoint_interval_s=0.05,
        derived_flush_interval_s=0.1,
        flush_interval_s=0.05,
        scrub_first_s=0.01,
        scrub_pause_s=0.01,
        scrub_bytes_per_s=1 << 20,
        checksum_block_size=700,
        index_entry_count=chance.choice([15, 40, 400]),
        flush_mode=chance.choice(["SYNC_FLUSH", "ASYNC_FLUSH"]),
    )
    model: list[tuple[int, bytes, int]] = []
    number = 0
    async with trio.open_nursery() as nursery:  # noqa: SIM117
        async with open_message_store(options, disk=disk, run_blocking=slowly, wall_clock_ms=WallClock()) as store:

            async def read_at_random() -> None:
                while True:
                    await trio.sleep(chance.uniform(0, 0.02))
                    end = store.log.max_offset.value
                    if end:
                        try:
                            at = chance.randrange(max(store.log.min_offset, 0), end)
                            store.verified.trusted_from = min(store.verified.trusted_from, chance.randrange(end))
                            await store.log.read(at, 300)
                        except OffsetGone:
                            pass
                        await store.query("T", f"k{chance.randrange(number + 1)}", 9, 0, 1 << 62)

            nursery.start_soon(read_at_random)
            for _ in range(12):
                for _ in range(chance.randrange(1, 15)):
                    given = message(number, size=chance.choice([30, 300, 900]), queue_id=number % 2)
                    number += 1
                    [result] = await store.log.put([given])
                    assert result.status is PutStatus.PUT_OK
                    model.append((result.physical_offset, bytes(given.body), result.queue_offset))
                    await trio.sleep(chance.choice([0, 0.01, 0.1]))
                keep = chance.randrange(len(model) + 1)
                if keep < len(model):
                    await store.truncate(model[keep][0])
                    del model[keep:]
                found = [(r.physical_offset, r.body, r.queue_offset) for r in await records(store)]
                assert found == model
            await store.scrub.wait_round()
            await store.scrub.wait_round()
            assert store.damage.found_count == 0
            assert store.scrub.statistics().queue_entries_mended_count == 0
            assert store.scrub.statistics().index_rebuilt_count == 0
            await check_derived(store)
            await store.flusher.flush()
            position = len(recorder.operations)
            nursery.cancel_scope.cancel()
    loss = PowerLoss(recorder, disk)
    loss.advance(position)
    for share in (0.0, 0.5, 1.0):
        found_disk = MemoryDisk({path: Inode(bytearray(content)) for path, content in loss.draw(chance, share).items()})
        async with open_message_store(
            options, disk=found_disk, run_blocking=run_inline, wall_clock_ms=WallClock()
        ) as store:
            assert [(r.physical_offset, r.body, r.queue_offset) for r in await records(store)] == model
            assert not store.damage.open
            await check_derived(store)


async def test_truncation_forgets_only_damage_behind_it(autojump_clock: MockClock) -> None:
    disk = MemoryDisk()
    async with open_small(disk, checksum_block_size=1024) as store:
        results = await filled(store)
        await trio.sleep(5)
    for number in (3, 20):
        at = results[number].physical_offset + 150
        disk.inodes[ROOT / "commitlog" / f"{at - at % SEGMENT:020d}"].content[at % SEGMENT] ^= 1
    async with open_small(disk, checksum_block_size=1024, is_slave=True, recovery_scan_bytes=100) as store:
        await store.scrub.wait_round()
        first, _ = store.damage.open
        assert first.begin <= results[3].physical_offset + 150 < first.end
        cut = results[4].physical_offset
        assert first.begin < cut
        await store.truncate(cut)
        [left] = store.damage.open
        assert left is first
        assert left.begin <= results[3].physical_offset + 150 < left.end <= cut
        assert left.by_checksum is (left.end < cut)
        # It can be healed by the bytes that were written, which begin with a record.
        good = [each.physical_offset for each in results]
        assert left.by_checksum or left.begin in good
        await store.log.append_raw(cut, b"")


async def test_the_event_loop_reads_no_file_for_damage_that_a_truncation_divides(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker()
    options = small_options(checksum_block_size=1024)
    async with open_message_store(
        options, disk=MemoryDisk(), run_blocking=worker.run, wall_clock_ms=WallClock()
    ) as store:
        results = await filled(store)
        await trio.sleep(5)
        cut = next(each.next_offset for each in results if each.physical_offset > 1024 and each.next_offset % 1024)
        block = cut - cut % 1024
        damage = store.damage.add(block, block + 1024, file="f", reason="r", found_by="scrub", by_checksum=True)
        pread = MemoryFile.pread

        def checked(file: MemoryFile, size: int, position: int) -> bytes:
            assert worker.is_working
            return pread(file, size, position)

        monkeypatch.setattr(MemoryFile, "pread", checked)
        await store.truncate(cut)
        assert damage.end == cut
        assert damage.begin in [each.physical_offset for each in results]


# ---- crashes


def run(scenario: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    # Trio's only randomness is the order in which it wakes tasks; every run has to take the same steps.
    _trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _trio_run._r.seed(0)
    return trio.run(scenario, *arguments, clock=MockClock(autojump_threshold=0))


OPTIONS: dict[str, Any] = {"derived_flush_interval_s": 0.5, "checkpoint_interval_s": 0.2, "index_entry_count": 20}


class Life:
    """Progress of a run of `cut_once`."""

    def __init__(self) -> None:
        self.before = b""
        self.cut = -1
        self.is_cut = False
        """`truncate` has returned"""
        self.began_at = 0
        """Number of operations before it"""
        self.ended_at = 0


async def cut_once(
    disk: MemoryDisk | RecordingDisk, life: Life, count_operations: Callable[[], int], **changes: Any
) -> None:
    """Fills a store, truncates it, and stops like a crash, earlier if the disk fails."""
    try:
        async with open_small(disk, WallClock(), **{**OPTIONS, **changes}) as store:
            results = await filled(store, 30)
            for epoch, number in ((2, 4), (3, 14), (5, 25)):
                await store.epochs.append(epoch, results[number].physical_offset)
            await trio.sleep(1.5)
            await store.log.put([message(200, size=700, queue_id=1)])  # not saved yet
            await dispatched(store)
            life.before, life.cut = await all_bytes(store), results[14].physical_offset
            life.began_at = count_operations()
            await store.truncate(life.cut)
            life.is_cut, life.ended_at = True, count_operations()
            if isinstance(disk, RecordingDisk):
                disk.is_dead = True
            else:
                disk.die_at = 0
    except* (HalogError, OSError):
        pass


def other_bytes(begin: int, end: int, queue_offset: int) -> bytes:
    """Returns a new record from `begin` to exactly `end`."""

    def record(size: int) -> bytes:
        return encode_record(
            Message(topic="T", queue_id=2, body=b"o" * size, properties=b"UNIQ_KEY\x01Uother\x02KEYS\x01kother\x02"),
            queue_offset=queue_offset,
            physical_offset=begin,
            store_timestamp_ms=1_700_000_900_000,
            store_host=b"\x7f\x00\x00\x01\x00\x00\x2a\x9f",
        )

    return record(end - begin - len(record(0)))


async def check_after(disk: MemoryDisk, life: Life, random: Random, **changes: Any) -> None:
    """Start on what a crash left: all of it, or the cut log as soon as it was said on the disk that it is to be cut,
    sound in every part. Then other bytes come, up to where an old record began; and another crash: nothing old is
    behind them."""
    is_decided = life.is_cut or load_intent(disk.kill(), INTENT) is not None
    async with open_small(disk, WallClock(1_700_001_000_000), **{**OPTIONS, **changes}) as store:
        end = store.log.max_offset.value
        written = await all_bytes(store)
        assert end == life.cut if is_decided else end >= life.cut
        assert written == life.before[:end]
        assert not store.damage.open
        assert not disk.exists(INTENT)
        assert all(
            entry.start_offset < max(end, life.cut) or entry.start_offset <= end for entry in store.epochs.entries
        )
        if end == life.cut:
            assert [entry.epoch for entry in store.epochs.entries] == [2]
        await check_derived(store)
        if end != life.cut:
            return
        assert await keys_found(store, range(300)) == list(range(14))
        old = [each for each in old_begins(life.before) if life.cut + 200 < each][:4]
        target = random.choice(old)
        target = min(target, life.cut - life.cut % SEGMENT + SEGMENT)
        raw = other_bytes(life.cut, target, store.log.next_queue_offset("T", 2))
        await store.log.append_raw(life.cut, raw)
        await dispatched(store)
        if random.random() < 0.5:
            await store.flusher.flush()
        flushed = store.log.flushed_offset.value
        crashed = disk.power_loss(random) if random.random() < 0.7 else disk.kill()
    async with open_small(crashed, WallClock(1_700_002_000_000), **{**OPTIONS, **changes}) as store:
        end = store.log.max_offset.value
        assert flushed <= end <= target
        assert await all_bytes(store) == (life.before[: life.cut] + raw)[:end]
        assert not store.damage.open
        await check_derived(store)


def old_begins(log: bytes) -> list[int]:
    """Returns where the records of a log begin."""
    found, at = [], 0
    while at < len(log):
        size = int.from_bytes(log[at : at + 4], "big")
        found.append(at)
        at += size
    return found


@pytest.mark.parametrize(
    ("is_slave", "flush_mode", "how"),
    [
        (True, "ASYNC_FLUSH", "kill"),
        (False, "SYNC_FLUSH", "kill"),
        (True, "SYNC_FLUSH", "power loss"),
        (False, "ASYNC_FLUSH", "power loss"),
    ],
)
def test_truncation_is_atomic_at_a_crash_at_any_step(is_slave: bool, flush_mode: str, how: str) -> None:
    changes = {"is_slave": is_slave, "flush_mode": flush_mode}
    whole, life = MemoryDisk(), Life()
    run(cut_once_with, whole, life, changes)
    assert life.is_cut
    steps = whole.steps[life.began_at : life.ended_at]
    assert {name for name, _ in steps} >= {"write_bytes", "unlink", "zero", "sync", "rename", "pwrite"}
    outcomes = set()
    for die_at in range(life.began_at, life.ended_at + 1):
        disk, life = MemoryDisk(), Life()
        disk.die_at = die_at
        run(cut_once_with, disk, life, changes)
        random = Random(die_at)
        after = disk.kill() if how == "kill" else disk.power_loss(random)
        outcomes.add(load_intent(after, INTENT) is not None)
        run(check_with, after, life, random, changes)
    assert outcomes == {True, False}


async def cut_once_with(disk: MemoryDisk, life: Life, changes: dict[str, Any]) -> None:
    await cut_once(disk, life, lambda: len(disk.steps), **changes)


async def check_with(disk: MemoryDisk, life: Life, random: Random, changes: dict[str, Any]) -> None:
    await check_after(disk, life, random, **changes)


@pytest.mark.parametrize("is_slave", [True, False])
def test_truncation_is_atomic_at_a_power_loss(is_slave: bool) -> None:
    """At every write, in every state that the disk may have then (recording.py)."""
    recorder = Recorder()
    disk, life = RecordingDisk(recorder), Life()

    async def cut() -> None:
        await cut_once(disk, life, lambda: len(recorder.operations), is_slave=is_slave, flush_mode="SYNC_FLUSH")

    run(cut)
    assert life.is_cut
    chance = Random(1)
    loss = PowerLoss(recorder, disk)
    for position in range(life.began_at, life.ended_at + 1):
        loss.advance(position)
        life.is_cut = position == life.ended_at
        for keep in chance.sample((0.0, 0.5, 1.0), 2):
            files = loss.draw(chance, keep)
            if chance.random() < 0.3:
                files = half_recovered(files, chance, is_slave=is_slave)
            after = MemoryDisk({path: Inode(bytearray(content)) for path, content in files.items()})
            run(check_with, after, life, chance, {"is_slave": is_slave})


def half_recovered(files: dict[Path, bytes], chance: Random, *, is_slave: bool) -> dict[Path, bytes]:
    """Checks a second power loss during the recovery."""
    recorder = Recorder()
    disk = RecordingDisk(recorder, files)

    async def recover() -> None:
        async with open_small(disk, WallClock(1_700_001_000_000), **{**OPTIONS, "is_slave": is_slave}):
            disk.is_dead = True

    try:
        run(recover)
    except* (HalogError, OSError):
        pass
    loss = PowerLoss(recorder, disk)
    loss.advance(chance.randrange(len(recorder.operations) + 1))
    return loss.draw(chance, chance.choice((0.0, 0.5, 1.0)))


async def test_the_next_start_completes_a_truncation_that_the_disk_failed(
    autojump_clock: MockClock,
) -> None:
    for refused in ("zero", "unlink", "rename"):
        disk = MemoryDisk()
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with open_small(disk) as store:
                results = await filled(store)
                await store.epochs.append(1, results[20].physical_offset)
                disk.refuse = partial(refuse_in_the_middle, disk, refused)
                await store.truncate(results[5].physical_offset)
        assert caught.group_contains(DiskFailed)
        disk.refuse = lambda operation, path: None
        assert load_intent(disk, INTENT) == results[5].physical_offset
        assert disk.exists(ROOT / "abort")
        disk.locked.clear()
        async with open_small(disk) as store:
            assert store.log.max_offset.value == results[5].physical_offset
            assert not disk.exists(INTENT)
            assert not store.epochs.entries
            await check_derived(store)


def refuse_in_the_middle(disk: MemoryDisk, refused: str, operation: str, path: Path) -> int | None:
    return errno.EIO if operation == refused and INTENT in disk.inodes else None


async def test_truncation_on_a_full_disk_does_not_begin(autojump_clock: MockClock) -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        results = await filled(store)
        disk.refuse = lambda operation, path: errno.ENOSPC if path == INTENT and operation == "write_bytes" else None
        with pytest.raises(DiskFull):
            await store.truncate(results[5].physical_offset)
        assert len(await records(store)) == 30
        await store.log.put([message(77)])
        await check_derived(store)
        disk.refuse = lambda operation, path: None
        await store.truncate(results[5].physical_offset)
        await check_derived(store)
    async with open_small(disk) as store:
        assert store.log.max_offset.value == results[5].physical_offset


@pytest.mark.parametrize("content", [b"", b"0", b"1234", b"00000000\n100", b"deadbeef\n"])
async def test_an_incomplete_intent_is_ignored(content: bytes) -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        await filled(store)
    disk.write_bytes(INTENT, content)
    assert load_intent(disk, INTENT) is None
    async with open_small(disk) as store:
        assert len(await records(store)) == 30
        assert store.statistics().recovered_clean
        results = await filled(store, 3)
        await store.truncate(results[1].physical_offset)
        assert not disk.exists(INTENT)
    save_intent(disk, INTENT, 12345)
    assert load_intent(disk, INTENT) == 12345


async def test_a_cancelled_truncation_is_complete_or_has_not_begun(autojump_clock: MockClock) -> None:
    for checkpoints in range(12):
        disk = MemoryDisk()
        async with open_small(disk) as store:
            results = await filled(store)
            cut = results[12].physical_offset
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.truncate, cut)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            assert store.log.max_offset.value in (cut, results[-1].next_offset)
            assert not disk.exists(INTENT)
            await store.log.put([message(99)])
            await check_derived(store)


@pytest.mark.parametrize(("code", "raised"), [(errno.EIO, DiskFailed), (errno.EMFILE, DiskFull)])
async def test_a_new_segment_that_the_disk_does_not_delete_fails_the_truncation(
    code: int, raised: type[Exception], autojump_clock: MockClock
) -> None:
    """It was being made when the truncation began. The whole store ended, and not with DiskFailed."""
    disk = MemoryDisk()

    async def make_slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        result = await run_inline(call, *arguments)
        if call.__name__ == "_make":
            await trio.sleep(1)
        return result

    async with open_message_store(small_options(), disk=disk, run_blocking=make_slowly) as store:
        results = await store.log.put([message(number) for number in range(5)])
        store.log.allocator.want(SEGMENT)
        await trio.sleep(0.5)
        disk.refuse = lambda operation, path: code if operation == "unlink" else None
        with pytest.raises(raised, match="commitlog"):
            await store.truncate(results[3].physical_offset)
        disk.refuse = lambda operation, path: None
        await store.truncate(results[3].physical_offset)
        assert disk.list_dir(ROOT / "commitlog") == [f"{0:020d}"]
        await check_derived(store)
