"""A halog store as slave and as master of a real broker in controller mode, under RocketMQ's own controller."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from ha.protocol.codes import PutStatus
from ha.protocol.epoch_file import EpochEntry, decode_epoch_file
from ha.protocol.record import Message
from ha.remoting import open_remoting_client
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.statistics import HAClientState
from ha.replication.sync_state import SyncStateRules, SyncStateSet
from ha.store.message_store import MessageStore, open_message_store
from ha.store.options import StoreOptions
from tests.interop.broker import SEGMENT_SIZE
from tests.interop.controller import ControllerMember, start_controller, switching_broker
from tests.interop.java_client import open_java_client
from tests.interop.processes import Children, eventually
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker
from tests.interop.stored_files import compare_commitlogs

WHOLE = HAOptions(start_from="first", heartbeat_interval_s=1.0, reconnect_interval_s=1.0)
# A JVM that starts on a busy machine takes long to reconnect.
RULES = SyncStateRules(connect_s_max=60.0, not_catch_up_s_max=60.0)


#: 4.9 has no controller.
with_controller = pytest.mark.parametrize("release", ["5.5.0"], indirect=True)


@asynccontextmanager
async def member_store(root: Path) -> AsyncIterator[MessageStore]:
    options = StoreOptions(root=root, segment_size=SEGMENT_SIZE, is_slave=True, dispatch_confirmed=True)
    async with open_message_store(options) as store:
        yield store


@asynccontextmanager
async def member_of(controller: str, store: MessageStore) -> AsyncIterator[ControllerMember]:
    """Registers the store at the controller, and keeps it alive."""
    async with open_remoting_client() as remoting, trio.open_nursery() as nursery:
        member = ControllerMember(remoting, controller)
        await member.join()
        nursery.start_soon(member.keep_alive, store)
        yield member
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def following(store: MessageStore, address: str, broker_id: int) -> AsyncIterator[HAClient]:
    client = HAClient(store.log, WHOLE, member=store, broker_id=broker_id)
    client.set_master(address)
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run)
        yield client
        nursery.cancel_scope.cancel()


def same_to_the_end(store: MessageStore, broker: RocketMqBroker) -> bool:
    """Whether the logs are equal, and end where the store's does."""
    common = compare_commitlogs(broker.commitlog, store.log.segments[0].file.path.parent)
    return common.end == store.log.max_offset.value


def epochs_of(broker: RocketMqBroker) -> list[EpochEntry]:
    return decode_epoch_file((broker.store / "epochFileCheckpoint").read_bytes())


@with_controller
async def test_a_real_master_and_a_halog_slave_through_two_terms(children: Children, release: Release) -> None:
    name_server, controller = await start_controller(children, release)
    master = switching_broker(children, release, "master", name_server, controller, {})
    await master.start()
    async with (
        open_java_client(children, release, name_server) as client,
        member_store(children.folder / "halog-store") as store,
        following(store, master.ha_address, 2) as ha_client,
    ):
        async with member_of(controller, store) as member:
            assert member.broker_id == 2
            await client.send_until("switched", "SEND_OK", 60.0, first=0)
            await member.wait_set(1, 2)
            # allAckInSyncStateSet: each of these waits for the slave here.
            sent = await client.send("switched", 200)
            assert {event["status"] for event in sent} == {"SEND_OK"}
        # From here on the controller takes it for dead, and doesn't elect it.
        await eventually("all of the log is here", lambda: same_to_the_end(store, master), 60.0)
        await master.kill()
        with trio.fail_after(60):
            await ha_client.state.wait_value(lambda state: state is not HAClientState.TRANSFER)
        # The store continues as a cut-off master of that term would, and later has to truncate that.
        await store.become_master()
        await put(store, 50)
        store.become_slave()
        await master.start()
        await client.send_until("switched", "SEND_OK", 60.0, first=1000)
        await client.send("switched", 200)
        await eventually("it has cut that off, and follows the new term", lambda: len(store.epochs.entries) > 1, 60.0)
        await eventually("all of the log is here", lambda: same_to_the_end(store, master), 60.0)
        assert len(epochs_of(master)) > 1
        assert list(store.epochs.entries) == epochs_of(master)
        await eventually(
            "the confirmed end is reported", lambda: store.log.dispatch_limit.value == store.log.max_offset.value, 60.0
        )


@with_controller
async def test_a_halog_master_and_a_real_slave_through_two_terms(children: Children, release: Release) -> None:
    name_server, controller = await start_controller(children, release)
    async with (
        member_store(children.folder / "halog-store") as store,
        member_of(controller, store) as member,
        trio.open_nursery() as nursery,
    ):
        service = HAService(store.log, WHOLE, member=store)
        assert service.leadership is not None
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(service.serve, listeners)
        epoch = await member.become_master()
        await member.register_as_master(name_server, f"127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        service.leadership.lead(await begin_term(store, epoch, member.broker_id))
        await put(store, 300)
        slave = switching_broker(children, release, "slave", name_server, controller, {})
        await slave.start()
        with trio.fail_after(90):
            await service.leadership.proposed_set.wait_value(lambda proposed: proposed == frozenset({1, 2}))
        set_epoch = await member.wait_set(1)
        await member.alter_set(frozenset({1, 2}), epoch=epoch, set_epoch=set_epoch)
        service.leadership.confirm_set({1, 2})
        await put(store, 300)
        await eventually("the set has all", lambda: service.acknowledged_by_set() == store.log.max_offset.value, 60.0)
        # A term in which it is master again: the controller need not know.
        service.leadership.lead(await begin_term(store, epoch + 1, member.broker_id, 2))
        offsets = await put(store, 300)
        await eventually("the set has all", lambda: service.acknowledged_by_set() == store.log.max_offset.value, 90.0)
        assert same_to_the_end(store, slave)
        assert epochs_of(slave) == list(store.epochs.entries)
        # A term of which the master has less than the slave: the slave truncates the rest. (It would keep a term that
        # starts exactly at the cut, and reject the next one that starts there: RocketMQ 5.5.0.)
        service.leadership.step_down()
        await store.truncate(offsets[100])
        service.leadership.lead(await begin_term(store, epoch + 2, member.broker_id, 2))
        await put(store, 100)
        await eventually("the set has all", lambda: service.acknowledged_by_set() == store.log.max_offset.value, 90.0)
        assert same_to_the_end(store, slave)
        assert epochs_of(slave) == list(store.epochs.entries)
        assert store.log.dispatch_limit.value == store.log.max_offset.value
        nursery.cancel_scope.cancel()


async def begin_term(store: MessageStore, epoch: int, own_id: int, *others: int) -> SyncStateSet:
    await store.become_master()
    end = store.log.max_offset.value
    await store.epochs.append(epoch, end)
    confirmed = min(store.log.dispatch_limit.value, end)
    members = {own_id, *others}
    now = trio.current_time()
    return SyncStateSet(own_id, members, epoch=epoch, epoch_start=end, confirm_offset=confirmed, now=now, rules=RULES)


async def put(store: MessageStore, count: int) -> list[int]:
    """Puts messages; returns their physical offsets."""
    messages = [Message(topic="t", queue_id=n % 4, body=b"%d" % n * 100, properties=b"") for n in range(count)]
    results = await store.log.put(messages)
    assert all(result.status is PutStatus.PUT_OK for result in results)
    return [result.physical_offset for result in results]
