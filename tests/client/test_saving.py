"""When positions are saved, in which order, and when the last saves give up, on a virtual clock."""

import errno
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from ha.client import MessageQueue
from ha.client.held_queue import HeldQueue
from ha.client.positions import FilePositions, Positions
from ha.client.saving import Saving

INTERVAL_S, SILENCE_S = 5.0, 3.0
NEVER_S = 1e6


class Brokers:
    """They save one position at a time; each takes as long as `delays_s` says."""

    def __init__(self, **delays_s: float) -> None:
        self.delays_s = delays_s
        self.loss_count = 0
        self.saved: list[tuple[float, str, int]] = []
        """When, where, and the queue offset."""

    def place_of(self, queue: MessageQueue) -> str:
        return queue.broker_name

    async def load(self, queue: MessageQueue) -> int | None:
        return None

    async def save(self, offsets: Mapping[MessageQueue, int], on_saved: Callable[[MessageQueue], None]) -> None:
        for queue, offset in offsets.items():
            await anyio.sleep(self.delays_s[queue.broker_name])
            self.saved.append((anyio.current_time(), queue.broker_name, offset))
            on_saved(queue)


def queue_at(broker: str, position: int, queue_id: int = 0) -> HeldQueue:
    held = HeldQueue(MessageQueue("T", broker, queue_id))
    held.restart(position)
    return held


@asynccontextmanager
async def open_saving(positions: Positions, *queues: HeldQueue) -> AsyncIterator[Saving]:
    """Saves the positions of `queues`, at the end of the block for the last time."""
    saving = Saving("g", positions, interval_s=INTERVAL_S, silence_s=SILENCE_S)
    async with anyio.create_task_group() as tasks:
        saving.start(tasks, {held.queue: held for held in queues})
        try:
            yield saving
        finally:
            with anyio.CancelScope(shield=True):
                await saving.finish(queues)
            tasks.cancel_scope.cancel()


async def test_changed_positions_are_saved_periodically(autojump_clock: object) -> None:
    brokers, held = Brokers(a=0.0), queue_at("a", 1)
    began = anyio.current_time()
    async with open_saving(brokers, held):
        await anyio.sleep(2.5 * INTERVAL_S)
        held.restart(2)
        await anyio.sleep(INTERVAL_S)
    assert brokers.saved == [(began + INTERVAL_S, "a", 1), (began + 3 * INTERVAL_S, "a", 2)]


async def test_positions_that_may_be_lost_are_saved_again(autojump_clock: object) -> None:
    brokers, held = Brokers(a=0.0), queue_at("a", 1)
    began = anyio.current_time()
    async with open_saving(brokers, held):
        await anyio.sleep(1.5 * INTERVAL_S)
        brokers.loss_count += 1
        await anyio.sleep(2 * INTERVAL_S)
        brokers.loss_count += 1
    assert brokers.saved == [(began + times * INTERVAL_S, "a", 1) for times in (1, 2, 3.5)]


async def test_revoked_queues_whose_positions_may_be_lost_are_saved_again(autojump_clock: object) -> None:
    brokers, queues = Brokers(a=0.0), [queue_at("a", 1), queue_at("a", 2, 1)]
    async with open_saving(brokers, *queues) as saving:
        await anyio.sleep(1.5 * INTERVAL_S)
        brokers.loss_count += 1
        for held in queues:
            await saving.save(held)
        assert [position for _, _, position in brokers.saved] == [1, 2, 1, 2]
    assert len(brokers.saved) == 4


async def test_position_that_may_be_lost_during_its_save_is_saved_again(autojump_clock: object) -> None:
    brokers, held = Brokers(a=1.0), queue_at("a", 1)
    async with open_saving(brokers, held) as saving:
        saving.want([held])
        await anyio.sleep(0.5)
        brokers.loss_count += 1
        await saving.save(held)
        assert [position for _, _, position in brokers.saved] == [1, 1]


async def test_saves_of_a_busy_broker_follow_each_other(autojump_clock: object) -> None:
    """And those that are wanted meanwhile become one."""
    brokers, held = Brokers(a=2.0), queue_at("a", 1)
    began = anyio.current_time()
    async with open_saving(brokers, held) as saving:
        saving.want([held])
        await anyio.sleep(0.5)
        for position in (2, 3):
            held.restart(position)
            saving.want([held])
        await saving.save(held)
        assert brokers.saved == [(began + 2, "a", 1), (began + 4, "a", 3)]


async def test_a_silent_broker_delays_the_end_by_the_silence(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a save is under way; another broker's positions are saved at once."""
    queues = [queue_at("silent", 7), queue_at("silent", 8, 1), queue_at("healthy", 9)]
    brokers = Brokers(silent=NEVER_S, healthy=0.0)
    async with open_saving(brokers, *queues):
        await anyio.sleep(INTERVAL_S + 1)
        queues[2].restart(10)
        closing = anyio.current_time()
    assert anyio.current_time() == closing + SILENCE_S
    assert brokers.saved[1:] == [(closing, "healthy", 10)]
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == (
        "client.positions_not_saved group=g queues=["
        "(MessageQueue(topic='T', broker_name='silent', queue_id=0), 7), "
        "(MessageQueue(topic='T', broker_name='silent', queue_id=1), 8)]"
    )


async def test_a_slow_broker_gets_the_time_it_needs(autojump_clock: object, caplog: pytest.LogCaptureFixture) -> None:
    brokers = Brokers(slow=SILENCE_S - 0.5)
    queues = [queue_at("slow", 7, queue_id) for queue_id in range(4)]
    async with open_saving(brokers, *queues):
        closing = anyio.current_time()
    assert anyio.current_time() == closing + 4 * (SILENCE_S - 0.5)
    assert [position for _, _, position in brokers.saved] == [7] * 4
    assert not caplog.records


async def test_a_save_under_way_is_not_abandoned_when_the_consumer_is_cancelled(autojump_clock: object) -> None:
    """The broker could execute it after the last one."""
    brokers, held = Brokers(a=1.0), queue_at("a", 1)
    with anyio.move_on_after(INTERVAL_S + 0.5):
        async with open_saving(brokers, held):
            await anyio.sleep(INTERVAL_S + 0.1)
            held.restart(2)
            await anyio.sleep_forever()
    assert [position for _, _, position in brokers.saved] == [1, 2]


async def test_an_offset_that_is_reset_during_a_save_is_saved(autojump_clock: object) -> None:
    """Also if it is the one that was saved: an operator may have moved the broker's meanwhile."""
    brokers, held = Brokers(a=1.0), queue_at("a", 1)
    async with open_saving(brokers, held) as saving:
        saving.want([held])
        await anyio.sleep(0.5)
        held.restart(5)
        held.restart(1)
        saving.want([held])
        await anyio.sleep(10)
    assert [position for _, _, position in brokers.saved] == [1, 1]


async def test_positions_that_a_full_disk_refused_are_written_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those of a queue that was revoked meanwhile, which no later save contains. The file is never torn."""

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "positions"
    positions = FilePositions(file)
    await positions.open()
    revoked, held = queue_at("a", 7), queue_at("a", 9, 1)
    async with open_saving(positions, held) as saving:
        await saving.save(held)
        written = file.read_bytes()
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", refuse)
            await saving.save(revoked)
        assert file.read_bytes() == written
        assert revoked.has_unsaved_position
        assert await positions.load(revoked.queue) == 7
    found = FilePositions(file)
    await found.open()
    assert [await found.load(each.queue) for each in (revoked, held)] == [7, 9]
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage() == f"client.positions_not_saved file={file} reason='No space left on device'"
