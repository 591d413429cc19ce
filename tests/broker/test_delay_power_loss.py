"""Power loss at random moments while delayed messages are delivered: each is delivered or still waits."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from random import Random
from typing import Any

import pytest
import trio

from ha.broker.config_file import ConfigFile
from ha.broker.core import BrokerCore
from ha.broker.delay import DelayService
from ha.broker.delay_offsets import DelayOffsetTable
from ha.broker.detour import store_delayed
from ha.broker.options import BrokerOptions
from ha.broker.put import PutService
from ha.broker.put_request import PutRequest
from ha.broker.tables import Tables
from ha.broker.world import World
from ha.protocol.codes import PutStatus
from ha.protocol.record import Message, decode_record
from ha.protocol.topic_names import SCHEDULE_TOPIC
from ha.store.consume_queue import ConsumeQueue
from ha.store.message_store import MessageStore
from tests.store.disks import run_inline
from tests.store.power_loss import _open, _run, wall_clock_ms
from tests.store.recording import Mark, PowerLoss, Recorder, RecordingDisk, runner_with_slow_syncs
from tests.store.stores import ROOT

LEVELS_MS = (300, 700, 1500)
FILE = ROOT / "config" / "delayOffset.json"
LIFE_S = 6.0
MOMENT_COUNT = 30
KEEPS = (0.0, 0.3, 1.0)


class Acknowledged(PutRequest, kw_only=True):
    """A put of the delayed message `number`."""

    number: int


def delay_offsets(disk: RecordingDisk, run_blocking: Any) -> DelayOffsetTable:
    return DelayOffsetTable(ConfigFile(FILE, disk=disk, run_blocking=run_blocking), wall_clock_ms=wall_clock_ms)


async def live(disk: RecordingDisk, recorder: Recorder, chance: Random) -> None:
    """A SYNC_FLUSH master with a slow disk that accepts and delivers delayed messages."""
    run_blocking = runner_with_slow_syncs(chance, 0.3)
    options = BrokerOptions(flush_sync=True, flush_delay_offset_interval_s=0.4, config_dir=FILE.parent)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(_open(disk, run_blocking, delay_levels_ms=LEVELS_MS))
        service = PutService(store, None, options)
        await stack.enter_async_context(service.serve())
        nursery = await stack.enter_async_context(trio.open_nursery())
        world = World(unique_id=str, wall_clock_ms=wall_clock_ms, disk=disk, run_blocking=run_blocking)
        tables = Tables(store, options, world)
        await tables.delay_offsets.load(store.log.max_offset.value)
        delay = DelayService(BrokerCore(options=options, store=store, tables=tables, puts=service, world=world))
        store.subscribe(delay.on_arrivals)
        await nursery.start(delay.serve)

        def on_done(requests: Sequence[Acknowledged]) -> None:
            for request in requests:
                assert request.status is PutStatus.PUT_OK
                recorder.mark(request.number)

        until_s, number = trio.current_time() + LIFE_S, 0
        while trio.current_time() < until_s:
            message = Message("flights", 0, b"%d" % number + bytes(chance.choice([20, 300, 900])))
            level = chance.choice([1, 2, 3])
            store_delayed(message, {"DELAY": str(level)}, level, len(LEVELS_MS))
            service.submit([Acknowledged(messages=(message,), on_done=on_done, number=number)])
            number += 1
            await trio.sleep(chance.choice([0.0, 0.02, 0.1]))
        await service.acknowledgements.wait_all_answered()
        nursery.cancel_scope.cancel()


async def numbers(store: MessageStore, queue: ConsumeQueue | None, queue_offset: int) -> list[int]:
    """Numbers of the messages in a queue from an offset on."""
    found = []
    for entry in queue.read(max(queue_offset, queue.min_offset), 10_000) if queue is not None else ():
        record = decode_record(await store.log.read_all(entry.physical_offset, entry.size))
        found.append(int(record.body.rstrip(b"\x00")))
    return found


async def look(disk: RecordingDisk) -> tuple[list[int], list[int]]:
    """The numbers of delivered and of waiting messages after a start on `disk`."""
    async with _open(disk, delay_levels_ms=LEVELS_MS, outages=1) as store:
        offsets = delay_offsets(disk, run_inline)
        await offsets.load(store.log.max_offset.value)
        wait: list[int] = []
        for level in range(1, 1 + len(LEVELS_MS)):
            queue = store.queues.get(SCHEDULE_TOPIC, level - 1)
            assert offsets.get(level) <= (queue.max_offset if queue is not None else 0)
            wait += await numbers(store, queue, offsets.get(level))
        return await numbers(store, store.queues.get("flights", 0), 0), wait


@pytest.mark.parametrize("seed", [1, 2])
def test_power_loss_at_random_moments(seed: int) -> None:
    recorder, chance = Recorder(), Random(seed)
    disk = RecordingDisk(recorder)
    _run(live, disk, recorder, chance)
    loss, delivered_count, moments = PowerLoss(recorder, disk), 0, len(recorder.operations)
    for position in sorted(chance.sample(range(moments), MOMENT_COUNT)):
        loss.advance(position)
        acknowledged = {mark.what for mark in recorder.operations[:position] if isinstance(mark, Mark)}
        for keep in KEEPS:
            files = loss.draw(chance, keep)
            delivered, wait = _run(partial(look, RecordingDisk(Recorder(), files)))
            assert acknowledged <= {*delivered, *wait}, f"seed {seed}, moment {position}, keep {keep}"
            delivered_count = max(delivered_count, len(set(delivered) - set(wait)))
    assert delivered_count > 20
