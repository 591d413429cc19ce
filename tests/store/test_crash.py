"""Power loss and kill at every operation of the file seam, and random histories against a list model.

Must hold after each of them: every acknowledged byte is there; the log is a prefix of the
messages that were put; queues and index match the log; and the store accepts puts.
"""

from collections.abc import Sequence
from random import Random

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from ha.errors import HalogError
from ha.protocol.codes import PutStatus
from tests.store.disks import MemoryDisk
from tests.store.stores import (
    ROOT,
    WallClock,
    all_bytes,
    check_derived,
    dispatched,
    message,
    open_small,
    put_batch,
    records,
)


def run(scenario: object, *arguments: object) -> object:
    return trio.run(scenario, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[arg-type]


class History:
    """What a test put, and what was acknowledged."""

    def __init__(self) -> None:
        self.written = bytearray()
        """The log as it was in memory before the crash"""
        self.flushed = 0
        """Acknowledged: end of the last record with PUT_OK from the flusher"""
        self.put_count = 0


async def put_and_flush(history: History, disk: MemoryDisk, clock: WallClock, *, flush_mode: str) -> None:
    """A short life of a store: three rounds of puts, each waiting for its flush, over several segments."""
    try:
        async with open_small(disk, clock, flush_mode=flush_mode, derived_flush_interval_s=0.4) as store:
            for _ in range(3):
                batch = [message(history.put_count + n, size=300, queue_id=n % 2) for n in range(6)]
                results = await store.log.put(batch)
                stored = [result for result in results if result.status.is_stored]
                history.put_count += len(stored)
                answers: list[PutStatus] = []
                if stored:
                    end = stored[-1].next_offset
                    store.flusher.request(end, trio.current_time() + 30, answers.append)
                    await trio.sleep(40)
                    if answers == [PutStatus.PUT_OK]:
                        history.flushed = end
                await trio.sleep(0.7)
                clock.now_ms += 4000  # more than the checkpoint's margin, so that recovery may start in the middle
    except* (HalogError, OSError):
        pass


def in_memory(disk: MemoryDisk) -> bytes:
    directory = ROOT / "commitlog"
    return b"".join(bytes(disk.inodes[directory / name].content) for name in disk.list_dir(directory))


async def check_after(disk: MemoryDisk, history: History, written: bytes, clock: WallClock) -> None:
    async with open_small(disk, clock) as store:
        end = store.log.max_offset.value
        assert end >= history.flushed
        assert await all_bytes(store) == written[:end]
        await check_derived(store)
        before = len(await records(store))
        results = await store.log.put([message(10_000 + n, size=300, queue_id=n % 2) for n in range(4)])
        assert [result.status for result in results] == [PutStatus.PUT_OK] * 4
        await check_derived(store)
        assert len(await records(store)) == before + 4
    async with open_small(disk, clock) as store:
        assert store.statistics().recovered_clean
        assert store.statistics().truncated_bytes == 0
        await check_derived(store)
        assert len(await records(store)) == before + 4


@pytest.mark.parametrize("flush_mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_a_crash_at_every_step_loses_nothing_flushed_and_invents_nothing(flush_mode: str) -> None:
    whole = MemoryDisk()
    run_history = History()

    async def life(disk: MemoryDisk, history: History, clock: WallClock) -> None:
        await put_and_flush(history, disk, clock, flush_mode=flush_mode)

    run(life, whole, run_history, WallClock())
    assert run_history.put_count == 18
    assert len(whole.list_dir(ROOT / "commitlog")) > 1
    steps = {name for name, _ in whole.steps}
    assert {"create", "pwrite", "sync", "write_bytes", "unlink"} <= steps
    for die_at in range(len(whole.steps)):
        disk, history, clock = MemoryDisk(), History(), WallClock()
        disk.die_at = die_at
        disk.taken_bytes = (0, 200, 1 << 20)[die_at % 3]
        run(life, disk, history, clock)
        written = in_memory(disk)
        for after in (disk.power_loss(Random(die_at)), disk.kill()):
            run(check_after, after, history, written, clock)


def test_power_loss_during_recovery_is_recovered_from() -> None:
    """Recovery itself zeroes and deletes, and must survive a crash at every step."""
    clock = WallClock()
    disk, history = MemoryDisk(), History()

    async def life() -> None:
        async with open_small(disk, clock, flush_interval_s=1000.0, flush_mode="ASYNC_FLUSH") as store:
            await store.log.put([message(n, size=300) for n in range(14)])
            await dispatched(store)
            disk.die_at = len(disk.steps)

    try:
        run(life)
    except* (HalogError, OSError):
        pass
    written = in_memory(disk)
    for seed in range(20):
        torn = disk.power_loss(Random(seed))
        for die_at in range(12):
            again = torn.kill()
            again.die_at = die_at

            async def reopen(again: MemoryDisk = again) -> None:
                try:
                    async with open_small(again, clock):
                        pass
                except* (HalogError, OSError):
                    pass

            run(reopen)
            run(check_after, again.power_loss(Random(seed)), history, written, clock)


STEPS = st.one_of(
    st.tuples(st.just("put"), st.lists(st.integers(0, 900), min_size=1, max_size=8)),
    st.tuples(st.just("batch"), st.lists(st.integers(0, 300), min_size=1, max_size=5)),
    st.tuples(st.just("flush"), st.just([0])),
    st.tuples(st.just("wait"), st.lists(st.integers(1, 20), min_size=1, max_size=1)),
    st.tuples(st.just("reopen"), st.just([0])),
    st.tuples(st.just("kill"), st.just([0])),
    st.tuples(st.just("power"), st.lists(st.integers(0, 1000), min_size=1, max_size=1)),
    st.tuples(st.just("expire"), st.just([0])),
)


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=25), st.sampled_from(["SYNC_FLUSH", "ASYNC_FLUSH"]))
def test_any_history_agrees_with_a_list_model(steps: Sequence[tuple[str, list[int]]], flush_mode: str) -> None:
    run(_follow_history, steps, flush_mode)


async def _follow_history(steps: Sequence[tuple[str, list[int]]], flush_mode: str) -> None:
    clock = WallClock()
    disk = MemoryDisk()
    model: list[tuple[int, bytes, int]] = []  # physical offset, body, queue offset
    flushed = 0
    number = 0
    pending = list(steps)
    lives = 0
    while pending or lives == 0:
        lives += 1
        ending = "reopen"
        seed = 0
        try:
            async with open_small(disk, clock, flush_mode=flush_mode) as store:
                found = [(r.physical_offset, r.body, r.queue_offset) for r in await records(store)]
                first = found[0][0] if found else store.log.max_offset.value
                assert store.log.max_offset.value >= flushed
                model = [entry for entry in model if entry[0] >= first]
                assert found == model[: len(found)]
                assert all(entry[0] >= flushed for entry in model[len(found) :])
                model = found
                await check_derived(store)
                while pending:
                    kind, values = pending.pop(0)
                    if kind in ("put", "batch"):
                        batch = [message(number + n, size=size) for n, size in enumerate(values)]
                        number += len(batch)
                        results = await (store.log.put(batch) if kind == "put" else put_batch(store.log, batch))
                        for given_message, result in zip(batch, results, strict=True):
                            assert result.status is PutStatus.PUT_OK
                            model.append((result.physical_offset, bytes(given_message.body), result.queue_offset))
                    elif kind == "flush":
                        await store.flusher.flush()
                        flushed = store.log.flushed_offset.value
                    elif kind == "wait":
                        await trio.sleep(values[0])
                        flushed = store.log.flushed_offset.value
                        clock.now_ms += values[0] * 1000
                    elif kind == "expire":
                        await dispatched(store)
                        clock.now_ms += 100 * 3_600_000
                        disk.now_ms = 0
                        await store.retention.clean(at_any_hour=True)
                        model = [entry for entry in model if entry[0] >= max(store.log.min_offset, 0)]
                    else:
                        ending = kind
                        seed = values[0]
                        break
                assert [(r.physical_offset, r.body, r.queue_offset) for r in await records(store)] == model
                await check_derived(store)
                if ending != "reopen":
                    flushed = max(flushed, store.log.flushed_offset.value)
                    disk.die_at = len(disk.steps)
        except* (HalogError, OSError):
            assert ending != "reopen"
        if ending == "reopen":
            flushed = max((entry[0] for entry in model), default=0)
            disk.locked.clear()
        else:
            disk = disk.kill() if ending == "kill" else disk.power_loss(Random(seed))
        lives += not pending
        if lives > 100:
            break
