"""The answer to each put, for every policy. Times are virtual and exact."""

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from ha.broker.options import BrokerRole, ReplicaPolicy
from ha.broker.put_request import PutRequest
from ha.protocol.codes import PutStatus, RequestCode
from ha.protocol.ha_frame import encode_report
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, MessageRecord, decode_record
from ha.protocol.remoting import RemotingCommand
from ha.replication.group_transfer import AckRequest
from ha.store.commitlog import CommitLog
from ha.store.files import File, OsDisk
from ha.store.message_store import MessageStore
from tests.broker.node import SEND_V2, Node, StalledSync, open_node, text
from tests.store.disks import run_inline

SYNC = {"role": BrokerRole.SYNC_MASTER}


def message(body: bytes = b"x", **properties: str) -> Message:
    return Message("TT", 0, body, encode_properties(properties))


class Slave:
    """The slave's side of an HA connection, driven by the test."""

    def __init__(self, stream: trio.StapledStream[Any, Any], log: CommitLog) -> None:
        self.stream = stream
        self._log = log

    async def report(self, offset: int) -> None:
        await self.stream.send_all(encode_report(offset))
        await wait_all_tasks_blocked()

    async def acknowledge(self, after_s: float = 0) -> None:
        """Reports the end of the master's log at that time."""
        await trio.sleep(after_s)
        await self.report(self._log.max_offset.value)


@asynccontextmanager
async def slave_of(node: Node) -> AsyncIterator[Slave]:
    """A slave that has reported the end of the master's log, and reads without acknowledging."""
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.ha.handle, theirs, "10.0.0.2:5555")
        slave = Slave(ours, node.store.log)
        await slave.acknowledge()

        async def swallow() -> None:
            async for _ in ours:
                pass

        nursery.start_soon(swallow)
        await wait_all_tasks_blocked()
        yield slave
        nursery.cancel_scope.cancel()


async def test_only_slaves_that_are_counted_hold_back_the_progress_of_delayed_messages(tmp_path: Path) -> None:
    """One that has never reported, or whose position was deleted, may be connected for days."""
    async with open_node(tmp_path, role=BrokerRole.SYNC_MASTER) as node:
        await node.send()
        await node.store.flusher.flush()
        acknowledgements, end = node.broker.put_service.acknowledgements, node.store.log.max_offset.value
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery, ours:
            nursery.start_soon(node.ha.handle, theirs, "10.0.0.2:5555")
            await wait_all_tasks_blocked()
            assert (node.ha.connection_count, acknowledgements.replicated_offset) == (1, end)
            await ours.send_all(encode_report(1))
            await wait_all_tasks_blocked()
            assert acknowledgements.replicated_offset == 0
            nursery.cancel_scope.cancel()


async def log_records(node: Node) -> list[MessageRecord]:
    """The records of queue 0 of topic TT."""
    log = node.store.log
    await node.dispatched()
    queue = node.store.queues.get("TT", 0)
    assert queue is not None
    return [decode_record(await log.read_all(offset, size, "pull")) for offset, size, _ in queue.read(0, 100)]


def fill(channel: trio.MemorySendChannel[list[AckRequest]]) -> None:
    with suppress(trio.WouldBlock):
        while True:
            channel.send_nowait([])


async def put(node: Node, *messages: Message) -> tuple[list[PutStatus], float, str]:
    """Puts messages; returns the statuses, the time it took, and the last remark."""
    began = trio.current_time()
    with trio.fail_after(600):
        results = await node.broker.put_service.put(messages or [message()])
    return [result.status for result in results], trio.current_time() - began, results[-1].remark


@pytest.fixture
async def seeded(tmp_path: Path) -> Callable[..., Any]:
    """Opens a node with one message in its log, so that a slave's report is not 0."""

    @asynccontextmanager
    async def open_seeded(**changes: Any) -> AsyncIterator[Node]:
        async with open_node(tmp_path, **changes) as node:
            await node.store.log.put([message(b"first")])
            yield node

    return open_seeded


async def test_async_master_waits_for_nothing(seeded: Callable[..., Any]) -> None:
    async with seeded() as node:
        assert await put(node) == ([PutStatus.PUT_OK], 0.0, "")


async def test_no_slave(seeded: Callable[..., Any]) -> None:
    async with seeded(**SYNC) as node:
        before = node.store.log.max_offset.value
        statuses, took_s, remark = await put(node)
        assert (statuses, took_s) == ([PutStatus.SLAVE_NOT_AVAILABLE], 0.0)
        assert remark
        assert node.store.log.max_offset.value > before, "stored all the same"


async def test_silent_slave(seeded: Callable[..., Any]) -> None:
    async with seeded(**SYNC) as node, slave_of(node):
        statuses, took_s, remark = await put(node)
        assert (statuses, took_s) == ([PutStatus.FLUSH_SLAVE_TIMEOUT], 3.0)
        assert "after 3.000 s" in remark


async def test_slave_acknowledges(seeded: Callable[..., Any]) -> None:
    async with seeded(**SYNC) as node, slave_of(node) as slave, trio.open_nursery() as nursery:
        nursery.start_soon(slave.acknowledge, 1.5)
        assert await put(node) == ([PutStatus.PUT_OK], 1.5, "")


async def test_each_message_of_a_chunk_has_its_own_status(seeded: Callable[..., Any]) -> None:
    async with seeded(**SYNC) as node, slave_of(node) as slave, trio.open_nursery() as nursery:
        before = node.store.log.max_offset.value
        (sample,) = await node.store.log.put([message(b"aa")])
        await slave.report(before + sample.size)

        async def acknowledge_the_first() -> None:
            await trio.sleep(1)
            await slave.report(before + 2 * sample.size)

        nursery.start_soon(acknowledge_the_first)
        statuses, took_s, _ = await put(node, message(b"aa"), message(b"bb"))
        assert (statuses, took_s) == ([PutStatus.PUT_OK, PutStatus.FLUSH_SLAVE_TIMEOUT], 3.0)


async def test_last_slave_disconnects(seeded: Callable[..., Any]) -> None:
    async with seeded(**SYNC) as node, slave_of(node) as slave, trio.open_nursery() as nursery:

        async def leave() -> None:
            await trio.sleep(1)
            await slave.stream.send_eof()

        nursery.start_soon(leave)
        statuses, took_s, remark = await put(node)
        assert (statuses, took_s) == ([PutStatus.SLAVE_NOT_AVAILABLE], 1.0)
        assert remark


async def test_wait_false(seeded: Callable[..., Any]) -> None:
    async with seeded(**SYNC, flush_sync=True) as node, slave_of(node):
        assert await put(node, message(WAIT="false")) == ([PutStatus.PUT_OK], 0.0, "")
        began = trio.current_time()
        results = await node.broker.put_service.put([message(), message(WAIT="false")])
        assert [result.status for result in results] == [PutStatus.FLUSH_SLAVE_TIMEOUT, PutStatus.PUT_OK]
        assert trio.current_time() - began == 3.0


async def test_slave_too_far_behind(seeded: Callable[..., Any]) -> None:
    from ha.replication.options import HAOptions

    async with seeded(**SYNC, ha_options=HAOptions(fall_behind_max_bytes=4096)) as node, slave_of(node):
        statuses, took_s, remark = await put(node, message(bytes(5000)))
        assert (statuses, took_s) == ([PutStatus.SLAVE_NOT_AVAILABLE], 0.0)
        assert remark


async def test_slave_refuses(seeded: Callable[..., Any]) -> None:
    async with seeded() as node:
        pass
    async with open_node(node.broker.options.config_dir.parent, role=BrokerRole.SLAVE) as node:
        before = node.store.log.max_offset.value
        statuses, took_s, remark = await put(node)
        assert (statuses, took_s) == ([PutStatus.SERVICE_NOT_AVAILABLE], 0.0)
        assert "SLAVE" in remark
        assert node.store.log.max_offset.value == before
        answer = await node.send()
        assert answer.code == 2
        assert answer.remark is not None
        assert answer.remark.startswith("[REJECTREQUEST]system busy, start flow control for a while")


# --- SYNC_FLUSH


async def test_put_waits_for_the_flush(seeded: Callable[..., Any]) -> None:
    stalled = StalledSync()
    async with seeded(flush_sync=True, run_blocking=stalled) as node:
        await trio.sleep(1)
        stalled.stall_s = 2
        assert await put(node) == ([PutStatus.PUT_OK], 2.0, "")
        assert node.store.log.flushed_offset.value == node.store.log.max_offset.value


async def test_flush_too_slow(seeded: Callable[..., Any]) -> None:
    stalled = StalledSync()
    async with seeded(flush_sync=True, run_blocking=stalled) as node:
        await trio.sleep(1)
        stalled.stall_s = 6
        flushed_offset = node.store.log.flushed_offset.value
        statuses, took_s, remark = await put(node)
        assert (statuses, took_s) == ([PutStatus.FLUSH_DISK_TIMEOUT], 5.0)
        assert remark == f"stored, but flushed only to physical offset {flushed_offset}: within 5 s"
        stalled.stall_s = 0


async def test_replica_status_wins_if_both_fail(seeded: Callable[..., Any]) -> None:
    stalled = StalledSync()
    async with seeded(**SYNC, flush_sync=True, run_blocking=stalled) as node:
        await trio.sleep(1)
        stalled.stall_s = 6
        async with slave_of(node):
            statuses, took_s, remark = await put(node)
            assert (statuses, took_s) == ([PutStatus.FLUSH_SLAVE_TIMEOUT], 5.0), "both are waited for"
            assert "after 3.000 s" in remark
        await trio.sleep(20)
        statuses, took_s, _ = await put(node)
        assert (statuses, took_s) == ([PutStatus.SLAVE_NOT_AVAILABLE], 5.0)
        stalled.stall_s = 0


async def test_one_part_of_two_fails(seeded: Callable[..., Any]) -> None:
    stalled = StalledSync()
    async with (
        seeded(**SYNC, flush_sync=True, run_blocking=stalled) as node,
        slave_of(node) as slave,
        trio.open_nursery() as nursery,
    ):
        await trio.sleep(1)
        stalled.stall_s = 2
        nursery.start_soon(slave.acknowledge, 1)
        assert await put(node) == ([PutStatus.PUT_OK], 2.0, "")
        statuses, took_s, _ = await put(node)
        assert (statuses, took_s) == ([PutStatus.FLUSH_SLAVE_TIMEOUT], 3.0)
        stalled.stall_s = 7
        await trio.sleep(10)
        nursery.start_soon(slave.acknowledge, 1)
        statuses, took_s, _ = await put(node)
        assert (statuses, took_s) == ([PutStatus.FLUSH_DISK_TIMEOUT], 5.0)
        stalled.stall_s = 0


# --- nothing is stored


class FullDisk(OsDisk):
    """A disk without room for new segments while `is_full`."""

    is_full = False

    def create(self, path: Path, size: int, *, allocate: bool) -> File:
        if self.is_full and allocate:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path, size, allocate=allocate)


@pytest.mark.parametrize("flush_sync", [False, True])
async def test_full_group_transfer(seeded: Callable[..., Any], flush_sync: bool) -> None:
    async with seeded(**SYNC, flush_sync=flush_sync) as node, slave_of(node):
        service = node.broker.put_service
        fill(node.ha.group_transfer.submit_channel)
        request = PutRequest(messages=(message(),))
        service.submit([request])
        with trio.fail_after(600):
            await service.acknowledgements.wait_all_answered()
        assert request.status is PutStatus.FLUSH_SLAVE_TIMEOUT
        assert "more than that are not let in" in request.remark


async def test_sends_are_answered_if_the_group_transfer_is_full(seeded: Callable[..., Any]) -> None:
    async with seeded(**SYNC, flush_sync=True) as node, slave_of(node):
        sender = node.broker.sender
        await node.broker.topics.ensure("TT", 4)
        await node.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        before = node.store.log.max_offset.value
        [connection] = node.broker.servers[0].connections
        fill(node.ha.group_transfer.submit_channel)
        fields = {name: text(value) for name, value in SEND_V2.items()}
        command = RemotingCommand(RequestCode.SEND_MESSAGE_V2, 1, ext_fields=fields, body=b"x")
        assert not sender.take(connection, [command])
        assert node.store.log.max_offset.value > before
        with trio.fail_after(600):
            await node.broker.put_service.acknowledgements.wait_all_answered()
        assert sender.in_flight_count == connection.in_flight == 0


async def test_order_is_kept_while_the_log_waits_for_a_segment(tmp_path: Path, seeded: Callable[..., Any]) -> None:
    begun = trio.Event()

    async def make_slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "_make" and arguments != (0,):
            begun.set()
            await trio.sleep(1)
        return await run_inline(call, *arguments)

    async with seeded(run_blocking=make_slowly, store_changes={"segment_size": 65536}) as node:
        service = node.broker.put_service
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.put, [message(b"x" * 20_000)] * 5)
            await begun.wait()
            nursery.cancel_scope.cancel()
        assert [record.body for record in await log_records(node)] == [b"first"] + [b"x" * 20_000] * 3
        assert service.is_blocked
        assert (await put(node, message(b"y" * 20_000)))[:2] == ([PutStatus.PUT_OK], 1.0)
        assert not service.is_blocked
        stored = await log_records(node)
        assert b"".join(record.body[:1] for record in stored) == b"fxxxxxy"
        assert [record.queue_offset for record in stored] == list(range(7))
        assert service.stored_count == 6


async def test_put_from_a_callback_queues_behind_waiting_puts(seeded: Callable[..., Any]) -> None:
    async with seeded(store_changes={"segment_size": 65536}) as node:
        service = node.broker.put_service
        later = PutRequest(messages=(message(b"z" * 100),))
        requests = [PutRequest(messages=(message(letter * 20_000),)) for letter in (b"a", b"b", b"c", b"d", b"e")]
        requests[0].on_done = lambda done: service.submit([later])
        service.submit(requests)
        assert service.is_blocked
        with trio.fail_after(60):
            await service.wait_appended()
        assert b"".join(record.body[:1] for record in await log_records(node)) == b"fabcdez"


async def test_puts_waiting_for_a_segment_are_refused_at_shutdown(tmp_path: Path) -> None:
    async def never_again(call: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "_make" and arguments != (0,):
            await trio.sleep_forever()
        return await run_inline(call, *arguments)

    requests = [PutRequest(messages=(message(b"x" * 20_000),)) for _ in range(5)]
    changes = {"segment_size": 65536, "segment_wait_s": 600.0}
    async with open_node(tmp_path, run_blocking=never_again, store_changes=changes) as node:
        node.broker.put_service.submit(requests)
        await wait_all_tasks_blocked()
    assert [request.status for request in requests] == [PutStatus.PUT_OK] * 3 + [PutStatus.SERVICE_NOT_AVAILABLE] * 2
    assert requests[-1].remark == "this broker stops"


async def test_failed_segment_allocation_answers_waiting_puts(seeded: Callable[..., Any]) -> None:
    disk = FullDisk()
    async with seeded(disk=disk, store_changes={"segment_size": 65536}) as node:
        service = node.broker.put_service
        await put(node, *[message(bytes(20_000))] * 2)
        disk.is_full = True
        refused = PutRequest(messages=(message(bytes(60_000)),))
        service.submit([refused])
        with trio.fail_after(60):
            await service.wait_unblocked()
            await service.wait_appended()
        assert refused.status is PutStatus.CREATE_MAPPED_FILE_FAILED
        disk.is_full = False
        await trio.sleep(3600)
        assert (await put(node, message()))[0] == [PutStatus.PUT_OK]
        assert node.store.log.append_times.sum_s < 60, "the hour is no part of the append"


async def test_full_disk(seeded: Callable[..., Any]) -> None:
    disk = FullDisk()
    async with seeded(disk=disk) as node:
        await node.send()
        disk.is_full = True
        for _ in range(4):
            answer = await node.send(bytes(400_000))
        assert answer.code == 1
        assert answer.remark is not None
        assert answer.remark.startswith("create mapped file failed, server is busy or broken.")
        assert "space" in answer.remark
        assert answer.ext_fields == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
        await node.dispatched()
        assert (await node.pull(0)).code == 0, "what is stored can be read"
        disk.is_full = False
        await trio.sleep(30)
        assert (await node.send(bytes(400_000))).code == 0


async def test_log_that_takes_no_records_refuses_every_put(
    seeded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with seeded() as node:
        monkeypatch.setattr(MessageStore, "can_append", (False, "queues are built up to 1 of 2"))
        puts = [PutRequest(messages=(message(),), frees_space=frees_space) for frees_space in (False, True)]
        with trio.fail_after(1):
            await node.broker.put_service.settle(puts)
        assert [each.status for each in puts] == [PutStatus.SERVICE_NOT_AVAILABLE] * 2
        assert puts[0].remark == "the store is not writable: queues are built up to 1 of 2"


async def test_illegal_messages(seeded: Callable[..., Any]) -> None:
    async with seeded(message_size_max=1000, store_changes={"message_size_max": 1000}) as node:
        for changes, code in (
            ({"body": bytes(1001)}, 13),
            ({"i": "k\x01" + "v" * 33000}, 13),
            ({"body": bytes(1000)}, 0),
        ):
            answer = await node.send(**changes)
            assert answer.code == code
            assert code == 0 or answer.remark


# --- RocketMQ 5.x keys


def policy(**changes: Any) -> dict[str, Any]:
    return {**SYNC, "replica_policy": ReplicaPolicy(**changes)}


async def test_5x_default_does_not_wait(seeded: Callable[..., Any]) -> None:
    async with seeded(**policy()) as node:
        assert await put(node) == ([PutStatus.PUT_OK], 0.0, "")


async def test_5x_too_few_in_sync_stores_nothing(seeded: Callable[..., Any]) -> None:
    async with seeded(**policy(in_sync_replicas=2, min_in_sync_replicas=2)) as node:
        before = node.store.log.max_offset.value
        statuses, took_s, remark = await put(node, message(), message(WAIT="false"))
        assert (statuses, took_s) == ([PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH, PutStatus.PUT_OK], 0.0)
        results = await node.broker.put_service.put([message()])
        assert results[0].remark.startswith("in-sync replicas not enough: 1 in sync, minInSyncReplicas=2")
        assert remark == ""
        (stored,) = await node.store.log.put([message()])
        assert stored.physical_offset == before + stored.size + len(b"WAIT\x01false\x02")


@pytest.mark.parametrize("all_in_sync", [False, True])
async def test_5x_waits_for_replicas(seeded: Callable[..., Any], all_in_sync: bool) -> None:
    changes = policy(in_sync_replicas=2, all_in_sync=all_in_sync)
    async with seeded(**changes) as node, slave_of(node) as slave, trio.open_nursery() as nursery:
        assert (await put(node))[:2] == ([PutStatus.FLUSH_SLAVE_TIMEOUT], 3.0)
        nursery.start_soon(slave.acknowledge, 0.5)
        assert await put(node) == ([PutStatus.PUT_OK], 0.5, "")


async def test_5x_two_replicas_wanted_without_slaves(seeded: Callable[..., Any]) -> None:
    """5.x checks nothing before the append and waits 3 s; halog answers at once."""
    async with seeded(**policy(in_sync_replicas=2)) as node:
        statuses, took_s, remark = await put(node)
        assert (statuses, took_s) == ([PutStatus.FLUSH_SLAVE_TIMEOUT], 0.0)
        assert "after 0.000 s" in remark
