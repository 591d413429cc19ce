"""Master and slave with real stores on disk, over real loopback sockets."""

import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio

from ha.protocol.codes import PutStatus
from ha.protocol.epoch_file import EpochEntry
from ha.protocol.record import Message
from ha.replication.group_transfer import SYNC_STATE_SET, AckRequest
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.leadership import Leadership
from ha.replication.options import HAOptions
from ha.replication.progress import SlaveState
from ha.replication.statistics import HAClientState
from ha.replication.sync_state import SyncStateSet
from ha.store.commitlog import CommitLog
from ha.store.message_store import MessageStore, open_message_store
from ha.store.options import StoreOptions
from tests.store.stores import reached

pytestmark = pytest.mark.real_time

SEGMENT_SIZE = 1 << 16


def options_for(root: Path, **settings: bool) -> StoreOptions:
    return StoreOptions(
        root=root,
        segment_size=SEGMENT_SIZE,
        queue_entry_count=1000,
        index_slot_count=1000,
        index_entry_count=4000,
        **settings,  # type: ignore[arg-type]
    )


async def put(log: CommitLog, count: int, seed: int) -> int:
    """Put `count` messages of mixed sizes; return the end of the last."""
    chance = random.Random(seed)
    results = await log.put(
        [Message(topic="t", queue_id=n % 4, body=chance.randbytes(chance.choice((1, 100, 5000))), properties=b"")
         for n in range(count)]
    )  # fmt: skip
    assert all(result.status is PutStatus.PUT_OK for result in results)
    return results[-1].next_offset


def bytes_of(log: CommitLog, start: int, end: int) -> bytes:
    found = b""
    for segment in log.segments:
        first, last = max(start, segment.start), min(end, segment.end)
        if first < last:
            found += segment.file.pread(last - first, first - segment.start)
    return found


@asynccontextmanager
async def serving(service: HAService) -> AsyncIterator[str]:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(service.serve, listeners)
        yield f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def following(store: MessageStore, address: str, options: HAOptions | None = None) -> AsyncIterator[HAClient]:
    client = HAClient(store.log, options)
    client.set_master(address)
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run)
        yield client
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("batch_size", [32768, 1 << 20])
async def test_a_slave_copies_follows_and_comes_back(batch_size: int, tmp_path: Path) -> None:
    options = HAOptions(transfer_batch_size_bytes=batch_size, reconnect_interval_s=0.05)
    async with (
        open_message_store(options_for(tmp_path / "master")) as master,
        open_message_store(options_for(tmp_path / "slave", is_slave=True)) as slave,
    ):
        service = HAService(master.log, options)
        async with serving(service) as address:
            first = await put(master.log, 100, seed=1)
            whole = HAOptions(start_from="first", reconnect_interval_s=0.05)
            async with following(slave, address, whole):
                await reached(slave.log.max_offset, first)
                second = await put(master.log, 100, seed=2)
                await reached(slave.log.max_offset, second)
            with trio.fail_after(5):
                await service.wait_state(SlaveState.SHUTDOWN)
            third = await put(master.log, 100, seed=3)
            async with following(slave, address, whole):
                await reached(slave.log.max_offset, third)
            assert len(master.log.segments) > 5
        assert bytes_of(slave.log, 0, third) == bytes_of(master.log, 0, third)
    for file in sorted((tmp_path / "slave" / "commitlog").iterdir()):
        if int(file.name) + SEGMENT_SIZE <= third:
            assert file.read_bytes() == (tmp_path / "master" / "commitlog" / file.name).read_bytes()


async def begin_term(store: MessageStore, epoch: int, own_id: int, *others: int) -> SyncStateSet:
    """Start a store's term."""
    await store.become_master()
    end = store.log.max_offset.value
    await store.epochs.truncate_from(end)
    await store.epochs.append(epoch, end)
    confirmed = min(store.log.dispatch_limit.value, end)
    return SyncStateSet(
        own_id,
        {own_id, *others},
        epoch=epoch,
        epoch_start=end,
        confirm_offset=confirmed,
        now=trio.current_time(),
    )


def follow(store: MessageStore, address: str, broker_id: int) -> HAClient:
    whole = HAOptions(start_from="first", reconnect_interval_s=0.05)
    client = HAClient(store.log, whole, member=store, broker_id=broker_id)
    client.set_master(address)
    return client


def lead(service: HAService, term: SyncStateSet) -> Leadership:
    assert service.leadership is not None
    service.leadership.lead(term)
    return service.leadership


async def answer_of_the_set(service: HAService, end: int) -> PutStatus:
    """Return the status of a put that ends at `end`."""
    answers: list[PutStatus] = []
    answered = trio.Event()

    def take(status: PutStatus) -> None:
        answers.append(status)
        answered.set()

    service.group_transfer.submit_nowait([AckRequest(end, SYNC_STATE_SET, trio.current_time() + 20, take)])
    await answered.wait()
    return answers[0]


async def test_a_former_master_truncates_what_was_not_acknowledged(tmp_path: Path) -> None:
    def opened(name: str) -> AbstractAsyncContextManager[MessageStore]:
        return open_message_store(options_for(tmp_path / name, is_slave=True, dispatch_confirmed=True))

    async with opened("first") as first, opened("second") as second:
        service = HAService(first.log, member=first)
        async with serving(service) as address, trio.open_nursery() as nursery:
            leadership = lead(service, await begin_term(first, 1, 1))
            await put(first.log, 50, seed=1)
            follower = follow(second, address, 2)
            nursery.start_soon(follower.run)
            with trio.fail_after(20):
                await leadership.proposed_set.wait_value(lambda proposed: proposed == frozenset({1, 2}))
            leadership.confirm_set({1, 2})
            acknowledged = await put(first.log, 50, seed=2)
            await reached(second.log.max_offset, acknowledged)
            assert await answer_of_the_set(service, acknowledged) is PutStatus.PUT_OK
            follower.set_master(None)
            with trio.fail_after(20):
                await follower.state.wait_value(lambda state: state is not HAClientState.TRANSFER)
            lost = await put(first.log, 30, seed=3)
            assert service.acknowledged_by_set() in (
                acknowledged,
                -1,
            )  # it may not have noticed yet that nobody is connected
            assert first.log.dispatch_limit.value == acknowledged
            leadership.step_down()
            first.become_slave()
            nursery.cancel_scope.cancel()
        assert second.log.max_offset.value == acknowledged < lost

        service = HAService(second.log, member=second)
        async with serving(service) as address, trio.open_nursery() as nursery:
            leadership = lead(service, await begin_term(second, 2, 2))
            end = await put(second.log, 40, seed=4)
            follower = follow(first, address, 1)
            nursery.start_soon(follower.run)
            with trio.fail_after(20):
                await leadership.proposed_set.wait_value(lambda proposed: proposed == frozenset({1, 2}))
            nursery.cancel_scope.cancel()
        assert list(first.epochs.entries) == [EpochEntry(1, 0), EpochEntry(2, acknowledged)]
        assert first.log.max_offset.value == end
        assert bytes_of(first.log, 0, end) == bytes_of(second.log, 0, end)
        assert first.log.dispatch_limit.value >= acknowledged
