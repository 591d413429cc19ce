"""The push consumer in ORDERLY mode: missing, lost, regained and released locks."""

import anyio
import msgspec
import pytest

from ha.client import ClientOptions, ConsumeMode
from ha.client.messages import MessageQueue
from ha.protocol import java_json
from ha.protocol.codes import RequestCode
from ha.protocol.group_requests import LockedQueuesBody
from ha.protocol.remoting import RemotingCommand
from tests.client.backends import on_both_backends
from tests.client.fake_broker import route_body
from tests.client.push_world import PUSH, World, open_world, tell, until


@on_both_backends(open_world)
async def test_nothing_is_handled_without_the_lock(world: World) -> None:
    world.master.put(0, b"x")
    world.master.locked_by["T", 0] = "somebody else"
    async with world.consumer(mode=ConsumeMode.ORDERLY) as push:
        await until(lambda: ("T", 1) in world.master.locked_by)
        await anyio.sleep(0.2)
        assert (0, 0) not in world.master.pulls
        assert MessageQueue("T", "a", 0) in push.assigned
        del world.master.locked_by["T", 0]
        await until(lambda: world.bodies == [b"x"])
    assert world.master.locked_by == {}
    assert world.master.committed[0] == 1


@on_both_backends(open_world)
async def test_regained_lock_continues_at_the_same_offset(world: World) -> None:
    for number in range(6):
        world.master.put(0, b"%d" % number)
    push_options = msgspec.structs.replace(PUSH, lock_interval_s=0.05, commit_interval_s=60)
    async with world.consumer(mode=ConsumeMode.ORDERLY, push=push_options):
        await until(lambda: len(world.inbox) == 6)
        world.master.locked_by["T", 0] = "somebody else"
        await anyio.sleep(0.3)
        world.master.put(0, b"6")
        del world.master.locked_by["T", 0]
        await until(lambda: len(world.inbox) == 7)
        await anyio.sleep(0.2)
    # Messages that this member handled but never saved are not repeated.
    assert world.bodies == [b"%d" % number for number in range(7)]


@on_both_backends(open_world)
async def test_released_lock_is_not_renewed(world: World) -> None:
    """However often locks are renewed: otherwise the next member would wait a minute for the lock."""
    push_options = msgspec.structs.replace(PUSH, lock_interval_s=0.001, rebalance_interval_s=60)
    async with world.consumer(mode=ConsumeMode.ORDERLY, push=push_options) as push:
        await until(lambda: len(push.assigned) == 3 and len(world.master.locked_by) == 3)
        world.master.others = ["~ last of all"]
        await tell(world, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, consumerGroup="g")
        await until(lambda: len(push.assigned) == 2)
        await until(lambda: ("T", 1) not in world.master.locked_by)
        await anyio.sleep(0.2)
        assert ("T", 1) not in world.master.locked_by


@on_both_backends(open_world)
async def test_regained_lock_respects_another_members_progress(world: World) -> None:
    for number in range(2):
        world.master.put(0, b"%d" % number)
    push_options = msgspec.structs.replace(PUSH, lock_interval_s=0.05, commit_interval_s=60)
    async with world.consumer(mode=ConsumeMode.ORDERLY, push=push_options):
        await until(lambda: len(world.inbox) == 2)
        world.master.locked_by["T", 0] = "somebody else"
        await anyio.sleep(0.2)
        for number in range(2, 5):
            world.master.put(0, b"%d" % number)
        world.master.committed[0] = 4
        del world.master.locked_by["T", 0]
        await until(lambda: len(world.inbox) == 3)
    assert world.bodies == [b"0", b"1", b"4"]


@on_both_backends(open_world)
async def test_locks_are_requested_from_the_new_master(world: World) -> None:
    """The old master grants no lock, which makes the consumer look for the new one at once."""
    old, new = world.brokers[0], world.brokers[1]
    push_options = msgspec.structs.replace(PUSH, lock_interval_s=0.05)
    options = ClientOptions(route_refresh_interval_s=600)
    async with world.consumer(mode=ConsumeMode.ORDERLY, push=push_options, options=options):
        await until(lambda: len(old.locked_by) == 3)
        nothing = java_json.dumps(LockedQueuesBody(queues=[]))
        old.overrides[RequestCode.LOCK_BATCH_MQ] = lambda c: c.reply(0, body=nothing)
        old.overrides[RequestCode.PULL_MESSAGE] = lambda c: c.reply(14, "this is a SLAVE")
        assert old.server is not None
        assert new.server is not None
        world.routes["T"] = route_body({"a": {0: new.server.address, 1: old.server.address}}, 2)
        world.routes["%RETRY%g"] = route_body({"a": {0: new.server.address, 1: old.server.address}}, 1)
        new.put(0, b"x")
        await until(lambda: world.bodies == [b"x"])


@on_both_backends(open_world)
async def test_a_silent_broker_does_not_keep_the_locks_of_others(
    world: World, *, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor their positions."""

    async def never() -> RemotingCommand:
        await anyio.sleep_forever()
        raise AssertionError

    healthy, silent = world.brokers[0], world.brokers[1]
    assert healthy.server is not None
    assert silent.server is not None
    world.routes["T"] = route_body({"b": {0: healthy.server.address}, "a": {0: silent.server.address}}, 1)
    world.routes["%RETRY%g"] = route_body({"b": {0: healthy.server.address}}, 1)
    healthy.put(0, b"x")
    silent.put(0, b"x")
    push, options = msgspec.structs.replace(PUSH, commit_interval_s=60), ClientOptions(request_timeout_s=0.3)
    async with world.consumer(mode=ConsumeMode.ORDERLY, push=push, options=options):
        await until(lambda: len(world.inbox) == 2)
        assert set(healthy.locked_by) == {("T", 0), ("%RETRY%g", 0)}
        for code in (RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.UNLOCK_BATCH_MQ):
            silent.overrides[code] = lambda command: never()
    assert healthy.committed == {0: 1}
    [line] = [record.getMessage() for record in caplog.records if "_not_saved" in record.msg]
    assert line.endswith("queues=[(MessageQueue(topic='T', broker_name='a', queue_id=0), 1)]")
    assert healthy.locked_by == {}
