"""The push consumer with a scripted broker: failures, and requests of operators."""

import asyncio
import logging
import os
import re
import zlib
from collections import Counter
from functools import partial, wraps
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from ha.client import (
    Client,
    ClientOptions,
    ConsumeMode,
    Message,
    MessageModel,
    Producer,
    PushConsumer,
    PushOptions,
    ReceivedMessage,
    RetryLater,
    SendStatus,
)
from ha.client.allocation import allocate_averagely
from ha.client.messages import MessageQueue
from ha.errors import RemoteProtocolError
from ha.protocol.codes import RequestCode, SysFlag
from ha.protocol.compression import BODY_SIZE_MAX
from ha.protocol.group_requests import decode_queue_offsets, decode_running_info, encode_queue_offsets
from ha.protocol.java_json import loads
from ha.protocol.properties import decode_properties
from ha.protocol.remoting import RemotingCommand, encode_command
from tests.client.backends import on_both_backends
from tests.client.fake_broker import name_server, route_body, serving
from tests.client.group_broker import Answer
from tests.client.push_world import PUSH, World, clean_up_fails, open_world, tell, until


@on_both_backends(open_world)
async def test_fields_of_pull_and_heartbeat(world: World) -> None:
    world.master.put(0, b"x", TAGS="a")
    async with world.consumer(subscriptions={"T": "a || b"}):
        await until(lambda: world.bodies == [b"x"])
    server = world.master.server
    assert server is not None
    pull = next(c for c in server.commands if c.code == RequestCode.PULL_MESSAGE and c.ext_fields["topic"] == "T")
    assert {name: pull.ext_fields[name] for name in ("sysFlag", "subscription", "expressionType")} == {
        "sysFlag": "6",
        "subscription": "a || b",
        "expressionType": "TAG",
    }
    heartbeat = loads(server.memberships[0].body)
    (data,) = heartbeat["consumerDataSet"]
    subscriptions = {each["topic"]: each for each in data["subscriptionDataSet"]}
    assert subscriptions["T"]["tagsSet"] == ["a", "b"]
    assert subscriptions["T"]["codeSet"] == [97, 98]
    assert subscriptions["%RETRY%g"]["subString"] == "*"
    assert data["consumeFromWhere"] == "CONSUME_FROM_FIRST_OFFSET"
    assert server.memberships[-1].ext_fields["consumerGroup"] == "g"


@on_both_backends()
async def test_consumer_reads_from_a_slave_while_the_master_is_down() -> None:
    world = World()
    for broker in world.brokers.values():
        broker.put(0, b"first")
    with anyio.fail_after(20):
        async with (
            serving(world.brokers[1].handle) as slave,
            serving(name_server(world.routes)) as names,
            anyio.create_task_group() as tasks,
        ):
            world.names, world.brokers[1].server = names.address, slave
            started, gone = anyio.Event(), anyio.Event()

            async def serve_master() -> None:
                async with serving(world.master.handle) as server:
                    world.master.server = server
                    started.set()
                    await gone.wait()

            tasks.start_soon(serve_master)
            await started.wait()
            world.route(0, 1)
            async with world.consumer() as push:
                await until(lambda: world.bodies == [b"first"])
                await until(lambda: world.master.committed.get(0) == 1)
                world.route(1)
                gone.set()
                world.brokers[1].put(0, b"second")
                await until(lambda: world.bodies == [b"first", b"second"])
                assert len(push.assigned) == 3
            assert world.brokers[1].committed[0] == 2


@on_both_backends(open_world)
async def test_consumer_follows_the_suggested_broker(world: World) -> None:
    world.route(0, 1)
    world.master.suggest = world.brokers[1].suggest = 1
    for broker in world.brokers.values():
        for number in range(12):
            broker.put(0, b"%d" % number)
    async with world.consumer():
        await until(lambda: len(world.inbox) == 12)
    assert world.master.pulls.count((0, 0)) == 1
    assert (0, 4) not in world.master.pulls
    assert (0, 4) in world.brokers[1].pulls
    assert sorted(world.bodies) == sorted(b"%d" % number for number in range(12))
    assert world.brokers[1].committed == {}


@on_both_backends(open_world)
async def test_consumer_reads_from_the_master_until_the_suggested_slave_has_caught_up(
    world: World, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's brokerId is the slave's, which is new: it has no messages yet."""
    monkeypatch.setattr("ha.client.queue_requests._LACKING_S", 2.0)
    monkeypatch.setattr("ha.client.feeding._PAUSE_S", 0.1)
    world.route(0, 1, queue_nums=1)
    slave = world.brokers[1]
    world.master.suggest = slave.suggest = 1
    for _ in range(16):
        world.master.put(0, b"before")
    async with world.consumer():
        await until(lambda: len(world.inbox) == 16)
        assert slave.pulls == [(0, 4)]
        assert world.master.pulls[:4] == [(0, 0), (0, 4), (0, 8), (0, 12)]
        slave.records[0][:] = world.master.records[0]
        await until(lambda: (0, 16) in slave.pulls)
        slave.put(0, b"after")
        await until(lambda: world.bodies[16:] == [b"after"])


@on_both_backends(open_world)
async def test_consumer_returns_to_the_master_from_a_frozen_slave(
    world: World, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def freeze() -> RemotingCommand:
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr("ha.client.queue_requests._LONG_POLL_GRACE_S", 0.1)
    world.route(0, 1, queue_nums=1)
    world.brokers[1].overrides[RequestCode.PULL_MESSAGE] = lambda command: freeze()
    world.master.suggest = 1
    world.master.put(0, b"before")
    push = msgspec.structs.replace(PUSH, long_poll_s=0.1)
    async with world.consumer(push=push, options=ClientOptions(request_timeout_s=0.3)):
        await until(lambda: world.bodies == [b"before"])
        world.master.put(0, b"after")
        with anyio.fail_after(20):
            await until(lambda: world.bodies == [b"before", b"after"])


@on_both_backends(open_world)
async def test_failed_message_is_sent_back(world: World) -> None:

    def refuse(message: ReceivedMessage) -> None:
        raise RetryLater(5)

    world.refuse = refuse
    world.master.put(1, b"x", UNIQ_KEY="U1")
    async with world.consumer(push=msgspec.structs.replace(PUSH, reconsume_times_max=7)):
        await until(lambda: world.master.committed.get(1) == 1)
    (fields,) = world.master.given_back
    assert fields == {
        "offset": "1000",
        "group": "g",
        "delayLevel": "5",
        "originMsgId": "U1",
        "originTopic": "T",
        "unitMode": "false",
        "maxReconsumeTimes": "7",
        "bname": "a",
    }


@on_both_backends(open_world)
async def test_message_is_sent_to_the_retry_topic_if_sending_back_fails(world: World) -> None:

    def refuse(message: ReceivedMessage) -> None:
        raise LookupError

    world.refuse = refuse
    world.master.overrides[RequestCode.CONSUMER_SEND_MSG_BACK] = lambda command: command.reply(1, "no")
    world.master.put(0, b"x", UNIQ_KEY="U1", TAGS="t", own="y", TRAN_MSG="true")
    async with world.consumer():
        await until(lambda: world.master.committed.get(0) == 1)
    (send,) = world.master.sends
    assert (send.ext_fields["b"], send.ext_fields["j"], send.ext_fields["l"]) == ("%RETRY%g", "1", "16")
    assert (send.body, send.ext_fields["a"]) == (b"x", "CLIENT_INNER_PRODUCER")
    assert decode_properties(send.ext_fields["i"].encode()) == {
        "UNIQ_KEY": "U1",
        "TAGS": "t",
        "own": "y",
        "ORIGIN_MESSAGE_ID": "U1",
        "RETRY_TOPIC": "T",
        "DELAY": "3",
    }


@on_both_backends(open_world)
async def test_message_is_retried_locally_if_it_can_not_be_sent_back(
    world: World, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ha.client.handling._SEND_BACK_PAUSE_S", 0.05)

    def refuse(message: ReceivedMessage) -> None:
        if message.body == b"bad" and message.reconsume_times < 2:
            raise LookupError

    world.refuse = refuse
    for code in (RequestCode.CONSUMER_SEND_MSG_BACK, RequestCode.SEND_MESSAGE_V2):
        world.master.overrides[code] = lambda command: command.reply(13, "no")
    world.master.put(0, b"bad")
    world.master.put(0, b"good")
    async with world.consumer():
        await until(lambda: world.master.committed.get(0) == 2)
    assert world.bodies.count(b"bad") == 3
    assert world.bodies.count(b"good") == 1


@on_both_backends(open_world)
async def test_handler_timeout_is_a_failure(world: World) -> None:
    async def handle(message: ReceivedMessage) -> None:
        await anyio.sleep_forever()

    world.master.put(0, b"x")
    async with world.consumer(handle, push=msgspec.structs.replace(PUSH, consume_timeout_s=0.1)):
        await until(lambda: len(world.master.given_back) == 1)


@on_both_backends(open_world)
async def test_close_waits_for_handlers_up_to_the_grace_period(world: World) -> None:
    begun, ended = Counter[bytes](), []

    async def handle(message: ReceivedMessage) -> None:
        begun[message.body] += 1
        await anyio.sleep(0.2 if message.body == b"soon" else 60)
        ended.append(message.body)

    world.master.put(0, b"soon")
    world.master.put(1, b"never")
    async with world.consumer(handle, push=msgspec.structs.replace(PUSH, close_grace_s=0.5)):
        await until(lambda: len(begun) == 2)
    assert ended == [b"soon"]
    assert world.master.committed[0] == 1
    assert world.master.committed.get(1, 0) == 0


@on_both_backends(open_world)
async def test_cancelled_consumer_saves_positions_and_unregisters(world: World) -> None:
    for number in range(4):
        world.master.put(0, b"%d" % number)
    with anyio.CancelScope() as scope:
        async with world.consumer(push=msgspec.structs.replace(PUSH, commit_interval_s=60)) as push:
            await until(lambda: push.statistics().handling.handled == {"T": 4})
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert world.master.committed[0] == 4
    assert world.master.members() == []


@on_both_backends(open_world)
async def test_error_raised_in_the_block_propagates_unwrapped(world: World) -> None:
    async def failing() -> None:
        async with world.consumer():
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await failing()


@on_both_backends(open_world)
async def test_member_change_triggers_a_rebalance(world: World) -> None:
    async with world.consumer(push=msgspec.structs.replace(PUSH, rebalance_interval_s=60)) as push:
        await until(lambda: len(push.assigned) == 3)
        world.master.others = ["~ last of all"]
        await tell(world, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, consumerGroup="g")
        queues = [MessageQueue("T", "a", 0), MessageQueue("T", "a", 1)]
        mine = allocate_averagely(queues, [push.client_id, "~ last of all"], push.client_id)
        await until(lambda: [queue for queue in push.assigned if queue.topic == "T"] == mine)
        assert len(mine) == 1


@on_both_backends(open_world)
async def test_queue_is_revoked_as_its_pull_is_answered(world: World) -> None:
    """One chunk has the group's members, and before and after them responses to pulls of queues that are revoked."""
    world.route(0, queue_nums=4)
    pulls: dict[int, RemotingCommand] = {}

    def hold(command: RemotingCommand) -> Answer:
        if command.ext_fields["topic"] != "T":
            return None
        pulls[int(command.ext_fields["queueId"])] = command
        return never()

    async def never() -> RemotingCommand:
        await anyio.sleep_forever()
        raise AssertionError

    def answer_all(command: RemotingCommand) -> bytes:
        del world.master.overrides[RequestCode.GET_CONSUMER_LIST_BY_GROUP]
        members = command.reply(0, body=msgspec.json.encode({"consumerIdList": world.master.members()}))
        before, after = (world.master.pulled(pulls[queue_id], 19, 0) for queue_id in (2, 3))
        return b"".join(map(encode_command, (before, members, after)))

    world.master.overrides[RequestCode.PULL_MESSAGE] = hold
    async with world.consumer(push=msgspec.structs.replace(PUSH, rebalance_interval_s=60)) as push:
        await until(lambda: len(pulls) == 4)
        world.master.others = ["~ last of all"]
        world.master.overrides[RequestCode.GET_CONSUMER_LIST_BY_GROUP] = answer_all  # type: ignore[assignment]
        await tell(world, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, consumerGroup="g")
        await until(lambda: {queue.queue_id for queue in push.assigned if queue.topic == "T"} == {0, 1})
        pulls.clear()
        world.master.others.clear()
        await tell(world, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, consumerGroup="g")
        await until(lambda: pulls.keys() == {2, 3})


@on_both_backends(open_world)
async def test_expired_consumer_sends_a_heartbeat_again(world: World) -> None:
    async with world.consumer() as push:
        await until(lambda: len(push.assigned) == 3)
        assert world.master.server is not None
        world.master.server.memberships.clear()
        await until(lambda: world.master.members() == [push.client_id])
        assert len(push.assigned) == 3


@on_both_backends(open_world)
async def test_offset_outside_the_queue_moves_inside(world: World) -> None:
    for number in range(9):
        world.master.put(0, b"%d" % number)

    def moved(command: RemotingCommand) -> RemotingCommand | None:
        is_low = command.ext_fields["topic"] == "T" and int(command.ext_fields["queueOffset"]) < 6
        return world.master.pulled(command, 21, 6) if is_low and command.ext_fields["queueId"] == "0" else None

    world.master.overrides[RequestCode.PULL_MESSAGE] = moved
    async with world.consumer():
        await until(lambda: sorted(world.bodies) == [b"6", b"7", b"8"])
        await until(lambda: world.master.committed.get(0) == 9)


@on_both_backends(open_world)
@pytest.mark.parametrize("mode", ConsumeMode)
@pytest.mark.parametrize(
    ("first", "end", "moved_to", "handled"),
    [
        pytest.param(6, 9, 6, "0123678", id="retention"),
        pytest.param(0, 2, 2, "012345678", id="end lost"),
        pytest.param(0, 9, 7, "078", id="reset"),
    ],
)
async def test_held_messages_are_handled_after_the_queue_range_moves(
    world: World, *, mode: ConsumeMode, first: int, end: int, moved_to: int, handled: str
) -> None:
    """Retention may delete the next messages, and a broker may lose the queue's end: pulled messages are still handled.

    Unless an operator reset the offset."""
    moves: list[int] = []
    has_moved = anyio.Event()

    async def handle(message: ReceivedMessage) -> None:
        await has_moved.wait()
        world.inbox.append(message)

    for number in range(9):
        world.master.put(0, b"%d" % number)

    def move(command: RemotingCommand) -> RemotingCommand | None:
        fields = command.ext_fields
        if (fields["topic"], fields["queueId"], fields["queueOffset"]) != ("T", "0", "4") or moves:
            return None
        moves.append(moved_to)
        return world.master.pulled(command, 21, moved_to, first=first, end=end)

    world.master.overrides[RequestCode.PULL_MESSAGE] = move
    async with world.consumer(handle, mode=mode, push=msgspec.structs.replace(PUSH, concurrency=1)):
        await until(lambda: (0, 9) in world.master.pulls)
        has_moved.set()
        await until(lambda: world.master.committed.get(0) == 9)
    assert {each.decode() for each in world.bodies} == set(handled)


@on_both_backends(open_world)
@pytest.mark.parametrize("form", ["map", "list"])
async def test_offset_reset_by_an_operator(world: World, *, form: str) -> None:
    for number in range(3):
        world.master.put(0, b"%d" % number)
    async with world.consumer():
        await until(lambda: world.master.committed.get(0) == 3)
        table = encode_queue_offsets({("T", "a", 0): 1, ("T", "a", 77): 1})
        if form == "list":
            table = b'{"offsetTable":[{"brokerName":"a","offset":1,"queueId":0,"topic":"T"}]}'
        world.master.committed[0] = 1
        answer = await tell(world, RequestCode.RESET_CONSUMER_CLIENT_OFFSET, table, topic="T", group="g", timestamp="0")
        assert answer is not None
        assert answer.code == 0
        await until(lambda: sorted(world.bodies) == [b"0", b"1", b"1", b"2", b"2"])
        await until(lambda: world.master.committed.get(0) == 3)


@on_both_backends(open_world)
async def test_offset_reset_during_a_save(world: World) -> None:
    async def saved_after_the_reset(command: RemotingCommand) -> RemotingCommand:
        await until(lambda: (0, 1) in world.master.pulls)
        return command.reply(0)

    def commit(command: RemotingCommand) -> Answer:
        if command.ext_fields["topic"] != "T" or command.ext_fields["commitOffset"] != "3":
            return None
        del world.master.overrides[RequestCode.UPDATE_CONSUMER_OFFSET]
        world.master.committed[0] = 3
        return saved_after_the_reset(command)

    world.master.overrides[RequestCode.UPDATE_CONSUMER_OFFSET] = commit
    for number in range(3):
        world.master.put(0, b"%d" % number)
    async with world.consumer():
        await until(lambda: world.master.committed.get(0) == 3)
        world.master.committed[0] = 1
        await tell(
            world,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
            encode_queue_offsets({("T", "a", 0): 1}),
            topic="T",
            group="g",
            timestamp="0",
        )
        await until(lambda: world.master.committed.get(0) == 3)


@on_both_backends(open_world)
async def test_positions_that_a_killed_broker_has_lost_are_saved_again(world: World) -> None:
    for number in range(3):
        world.master.put(0, b"%d" % number)
    async with world.consumer():
        await until(lambda: world.master.committed.get(0) == 3)
        assert world.master.server is not None
        world.master.committed.clear()
        await world.master.server.disconnect()
        await until(lambda: world.master.committed == {0: 3, 1: 0})
    assert world.bodies == [b"0", b"1", b"2"]


@on_both_backends(open_world)
async def test_save_in_flight_at_close_does_not_overtake_the_last_one(world: World) -> None:
    """A RocketMQ broker executes a client's requests in many threads, in any order."""
    begun, carried_out = anyio.Event(), anyio.Event()

    async def late(command: RemotingCommand) -> RemotingCommand:
        await until(lambda: len(world.inbox) == 3)
        await anyio.sleep(0.3)  # the consumer is closing
        world.master.committed[0] = int(command.ext_fields["commitOffset"])
        carried_out.set()
        return command.reply(0)

    def commit(command: RemotingCommand) -> Answer:
        if (command.ext_fields["topic"], command.ext_fields["queueId"]) != ("T", "0"):
            return None
        if not begun.is_set():
            begun.set()
            return late(command)
        if carried_out.is_set():
            world.master.committed[0] = int(command.ext_fields["commitOffset"])
        return command.reply(0)  # otherwise the first one would be executed after this one

    world.master.overrides[RequestCode.UPDATE_CONSUMER_OFFSET] = commit
    async with world.consumer():
        await begun.wait()
        for number in range(3):
            world.master.put(0, b"%d" % number)
        await until(lambda: len(world.inbox) == 3)
    assert world.master.committed[0] == 3


@on_both_backends(open_world)
async def test_first_offsets_survive_a_broker_race(world: World) -> None:
    """RocketMQ's ConsumerOffsetManager creates the table of a topic and group at the first commit, without a lock: if
    concurrent requests all find none, the last one's table stays, with its own offset only."""
    queue_count = 4
    world.route(0, queue_nums=queue_count)
    tables: list[dict[int, int]] = []

    async def carry_out(command: RemotingCommand) -> RemotingCommand:
        found = tables[-1] if tables else {}
        await anyio.sleep(0.05)  # a request sent now is executed by another thread
        found[int(command.ext_fields["queueId"])] = int(command.ext_fields["commitOffset"])
        tables.append(found)
        return command.reply(0)

    def commit(command: RemotingCommand) -> Answer:
        return carry_out(command) if command.ext_fields["topic"] == "T" else None

    world.master.overrides[RequestCode.UPDATE_CONSUMER_OFFSET] = commit
    for number in range(queue_count):
        world.master.put(number, b"%d" % number)
    async with world.consumer(push=msgspec.structs.replace(PUSH, commit_interval_s=60.0)):
        await until(lambda: len(world.inbox) == queue_count)
    assert tables[-1] == dict.fromkeys(range(queue_count), 1)


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise AttributeError


@on_both_backends(open_world)
async def test_running_info_of_a_member(world: World) -> None:
    world.master.put(0, b"x")
    async with world.consumer() as push:
        await until(lambda: world.master.committed.get(0) == 1)
        answer = await tell(world, RequestCode.GET_CONSUMER_RUNNING_INFO, consumerGroup="g", clientId="c")
        assert answer is not None
        info = decode_running_info(answer.body)
        assert info.queues["T", "a", 0].commit_offset == 1
        assert set(info.queues) == {(q.topic, q.broker_name, q.queue_id) for q in push.assigned}
        assert info.properties["PROP_CONSUME_ORDERLY"] == "false"
        assert {each.topic for each in info.subscriptions} == {"T", "%RETRY%g"}
        answer = await tell(world, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, topic="T", group="g")
        assert answer is not None
        table = loads(answer.body)["messageQueueTable"]
        assert sorted(table.values()) == [0, 1]
        world.refuse = _raise
        answer = await tell(world, RequestCode.CONSUME_MESSAGE_DIRECTLY, world.master.records[0][0], consumerGroup="g")
        assert answer is not None
        result = loads(answer.body)
        assert (result["consumeResult"], result["remark"]) == ("CR_THROW_EXCEPTION", "LookupError: no")
        answer = await tell(world, RequestCode.CONSUME_MESSAGE_DIRECTLY, b"garbage", consumerGroup="g")
        assert answer is not None
        assert answer.code == 1


@on_both_backends(open_world)
@pytest.mark.parametrize(
    ("failure", "remark"),
    [
        (OSError("no file caf\udce9"), "OSError: no file caf\\udce9"),
        (OSError("x" * 17_000_000), "OSError: xxx"),
        (SpeechlessError(), "tests.client.test_push_consumer.SpeechlessError: <exception str() failed>"),
    ],
    ids=["not UTF-8", "longer than a frame", "without text"],
)
async def test_exception_whose_text_no_answer_can_carry_does_not_end_the_consumer(
    world: World, *, failure: Exception, remark: str
) -> None:
    world.master.put(0, b"x")

    def fails(message: ReceivedMessage) -> None:
        raise failure

    async with world.consumer():
        await until(lambda: world.master.committed.get(0) == 1)
        world.refuse = fails
        answer = await tell(world, RequestCode.CONSUME_MESSAGE_DIRECTLY, world.master.records[0][0], consumerGroup="g")
        assert answer is not None
        result = loads(answer.body)
        assert result["consumeResult"] == "CR_THROW_EXCEPTION"
        assert result["remark"].startswith(remark)


def _raise(message: ReceivedMessage) -> None:
    raise LookupError("no")


BOMB = zlib.compress(bytes(BODY_SIZE_MAX + 1))


@on_both_backends(open_world)
@pytest.mark.parametrize("stored", [BOMB, b"no zlib"], ids=["a bomb", "damaged"])
@pytest.mark.parametrize("mode", ConsumeMode)
async def test_a_body_that_does_not_inflate_becomes_a_dead_letter(
    world: World, *, stored: bytes, mode: ConsumeMode
) -> None:
    bodies: list[bytes] = []
    errors: list[str | None] = []

    async def handle(message: ReceivedMessage) -> None:
        errors.append(message.body_error)
        bodies.append(message.body)

    world.route(0, queue_nums=1)
    world.master.put(0, b"before")
    world.master.put(0, stored, sys_flag=SysFlag.COMPRESSED, UNIQ_KEY="U1")
    world.master.put(0, b"behind")
    # ORDERLY retries without limit by default: an unreadable message would block its queue forever.
    push = msgspec.structs.replace(PUSH, reconsume_times_max=None, suspend_s=0.01)
    async with world.consumer(handle, mode=mode, push=push) as consumer:
        await until(lambda: world.master.committed.get(0) == 3)
        assert consumer.statistics().handling.failed == {"T": 1}
    assert bodies == [b"before", b"behind"]
    assert [error is not None and "inflate" in error for error in errors].count(True) == 1
    if mode is ConsumeMode.CONCURRENTLY:
        ((offset, level),) = [(fields["offset"], fields["delayLevel"]) for fields in world.master.given_back]
        assert (offset, level) == ("1", "-1")
    else:
        (dead,) = world.master.sends
        assert dead.body == stored
        assert int(dead.ext_fields["f"]) & SysFlag.COMPRESSED


@on_both_backends(open_world)
async def test_handler_may_ignore_an_unreadable_body(world: World) -> None:
    world.master.put(0, BOMB, sys_flag=SysFlag.COMPRESSED, TAGS="a")
    async with world.consumer():
        await until(lambda: world.master.committed.get(0) == 1)
    assert [message.tags for message in world.inbox] == ["a"]
    assert world.master.given_back == []


@on_both_backends(open_world)
async def test_buffer_limit_counts_inflated_bodies(world: World) -> None:
    """One answer of a few KB has four bodies of 1 MiB, for a buffer of 2.5 MiB."""
    held: list[int] = []
    push = msgspec.structs.replace(PUSH, total_bytes_max=5 << 19, concurrency=1)

    async def handle(message: ReceivedMessage) -> None:
        held.append(consumer.statistics().held.byte_count)
        await anyio.lowlevel.checkpoint()

    for number in range(8):
        world.master.put(number % 2, zlib.compress(bytes(1 << 20)), sys_flag=SysFlag.COMPRESSED)
    async with world.consumer(handle, push=push) as consumer:
        await until(lambda: world.master.committed == {0: 4, 1: 4})
    assert len(held) == 8
    # The last body of an answer may exceed the limit, and so may the first one of another queue's answer.
    assert max(held) < push.total_bytes_max + 2 * (1 << 20) + 8 * 1024


@on_both_backends(open_world)
async def test_pull_failure_is_logged_once_and_retried(world: World, *, caplog: pytest.LogCaptureFixture) -> None:
    world.master.put(0, b"x")
    count = 0

    def broken(command: RemotingCommand) -> RemotingCommand | None:
        nonlocal count
        if command.ext_fields["topic"] != "T" or command.ext_fields["queueId"] != "0" or count == 5:
            return None
        count += 1
        return command.reply(2, "busy") if count % 2 else world.master.pulled(command, 0, 1, b"garbage", 1)

    world.master.overrides[RequestCode.PULL_MESSAGE] = broken
    with caplog.at_level(logging.INFO, logger="ha.client"):
        async with world.consumer():
            await until(lambda: world.bodies == [b"x"])
    said = [record.msg.split(" ")[0] for record in caplog.records]
    assert said.count("client.pull_failed") == said.count("client.pull_recovered") == 1


@on_both_backends(open_world)
async def test_broadcasting_member_stores_its_positions(world: World, *, tmp_path: Path) -> None:
    file = tmp_path / "positions.json"

    def refuse(message: ReceivedMessage) -> None:
        raise LookupError

    world.refuse = refuse
    world.master.put(0, b"x")
    async with world.consumer(model=MessageModel.BROADCASTING, position_file=file) as push:
        await until(lambda: world.bodies == [b"x"])
        assert push.assigned == [MessageQueue("T", "a", 0), MessageQueue("T", "a", 1)]
    assert decode_queue_offsets(file.read_bytes()) == {("T", "a", 0): 1, ("T", "a", 1): 0}
    assert (world.master.committed, world.master.given_back) == ({}, [])
    world.master.put(0, b"y")
    async with world.consumer(model=MessageModel.BROADCASTING, position_file=file):
        await until(lambda: world.bodies == [b"x", b"y"])
    assert os.listdir(tmp_path) == ["positions.json"]
    file.write_bytes(b"{")
    with pytest.raises(RemoteProtocolError, match=f"position file {re.escape(str(file))}: "):
        async with world.consumer(model=MessageModel.BROADCASTING, position_file=file):
            pass


@pytest.mark.parametrize("mode", ConsumeMode)
def test_handler_that_awaits_a_cancelled_task_has_failed(mode: ConsumeMode) -> None:
    """Its CancelledError would end the task that calls the handler, and all others with it, without notice."""

    async def main() -> None:
        async with open_world() as world:
            failed: list[bytes] = []

            async def handle(message: ReceivedMessage) -> None:
                if message.body == b"1" and not failed:
                    failed.append(message.body)
                    task = asyncio.ensure_future(asyncio.sleep(60))
                    task.cancel()
                    await task
                world.inbox.append(message)

            for number in range(6):
                world.master.put(0, b"%d" % number)
            push = msgspec.structs.replace(PUSH, suspend_s=0.01)
            async with world.consumer(handle, mode=mode, push=push):
                with anyio.fail_after(20):
                    await until(lambda: world.master.committed.get(0) == 6)
            is_orderly = mode is ConsumeMode.ORDERLY
            assert sorted(world.bodies) == [b"%d" % number for number in range(6) if is_orderly or number != 1]
            assert len(world.master.given_back) == (not is_orderly)

    anyio.run(main, backend="asyncio")


class Plain:
    """Two handlers that are not async."""

    def __init__(self, world: World) -> None:
        self._world = world

    def handle(self, message: ReceivedMessage) -> None:
        self._world.inbox.append(message)

    __call__ = handle


def test_handler_that_is_not_async_is_refused() -> None:
    world = World()
    world.names = "127.0.0.1:1"
    plain = Plain(world)
    with pytest.raises(TypeError, match=r"the handler is not async: define Plain.handle by `async def`"):
        world.consumer(plain.handle)
    decorated = wraps(world.handle)(lambda message: world.handle(message))
    made_async = wraps(plain.handle)(partial(handle_badly, world))
    for handler in (decorated, made_async, partial(handle_badly, world), lambda message: world.handle(message)):
        world.consumer(handler)


@on_both_backends(open_world)
async def test_a_started_consumer_that_ends_is_logged(world: World, *, caplog: pytest.LogCaptureFixture) -> None:
    """Until `stop` is called, nothing else says that no messages are handled."""
    world.master.put(0, b"x")
    consumer = await world.consumer(Plain(world)).start()
    await until(lambda: "client.ended kind=PushConsumer" in caplog.text)
    assert "TypeError: the handler is not async: it returned None" in caplog.text
    with pytest.raises(ExceptionGroup):
        await consumer.stop()


@on_both_backends(open_world)
@pytest.mark.parametrize("mode", ConsumeMode)
async def test_handler_that_turns_out_not_to_be_async_ends_the_consumer(world: World, *, mode: ConsumeMode) -> None:
    """Otherwise each message would be handled 17 times, and become a dead letter."""
    for number in range(3):
        world.master.put(0, b"%d" % number)
    with pytest.raises(ExceptionGroup) as caught:
        async with world.consumer(Plain(world), mode=mode):
            await anyio.sleep_forever()
    assert caught.group_contains(TypeError, match="the handler is not async: it returned None")
    assert world.bodies == [b"0"]
    assert not world.master.given_back
    assert not world.master.committed.get(0)


@on_both_backends(open_world)
async def test_handler_that_an_operator_finds_not_to_be_async_ends_only_its_consumer(world: World) -> None:
    """The client calls it for request 309, but the client's other users go on."""
    world.master.put(0, b"stored before the group exists")
    answers: list[RemotingCommand | None] = []

    async def ask() -> None:
        await until(world.master.members)
        code, record = RequestCode.CONSUME_MESSAGE_DIRECTLY, world.master.records[0][0]
        answers.append(await tell(world, code, record, consumerGroup="g"))

    async with Client(world.names) as client, Producer(client) as producer, anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        with pytest.raises(ExceptionGroup) as caught:
            async with PushConsumer(client, Plain(world), group="g", subscriptions={"T": "*"}):  # type: ignore[arg-type]
                await anyio.sleep_forever()
        assert caught.group_contains(TypeError, match="the handler is not async: it returned None")
        assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
    [answer] = answers
    assert answer is not None
    result = loads(answer.body)
    assert result["consumeResult"] == "CR_THROW_EXCEPTION"
    assert result["remark"].startswith("TypeError: the handler is not async")


@on_both_backends(open_world)
async def test_handler_that_an_operator_has_called_ends_with_its_consumer(world: World) -> None:
    """Its resources are those of the consumer's block; the shared client, which calls it, goes on."""
    world.master.put(0, b"stored before the group exists")
    is_called = anyio.Event()
    answers: list[RemotingCommand | None] = []

    async def ask() -> None:
        await until(world.master.members)
        code, record = RequestCode.CONSUME_MESSAGE_DIRECTLY, world.master.records[0][0]
        answers.append(await tell(world, code, record, consumerGroup="g"))

    async def handle(message: ReceivedMessage) -> None:
        is_called.set()
        await anyio.sleep_forever()

    async with Client(world.names) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        async with PushConsumer(client, handle, group="g", subscriptions={"T": "*"}, push=PUSH):
            await is_called.wait()
        await until(lambda: answers)
    [answer] = answers
    assert answer is not None
    assert (answer.code, answer.remark) == (3, " request type 309 not supported")


@on_both_backends(open_world)
async def test_handler_that_is_cancelled_at_the_end_has_not_failed(world: World) -> None:
    world.master.put(0, b"x")

    async def handle(message: ReceivedMessage) -> None:
        world.inbox.append(message)
        await anyio.sleep_forever()

    push = msgspec.structs.replace(PUSH, close_grace_s=0.0)
    async with world.consumer(handle, push=push):
        await until(lambda: world.bodies == [b"x"])
    assert world.master.given_back == []
    assert not world.master.committed.get(0)


async def handle_badly(world: World, message: ReceivedMessage) -> None:
    world.inbox.append(message)
    await clean_up_fails()


@on_both_backends(open_world)
async def test_handler_whose_clean_up_fails_at_its_timeout_has_failed(world: World) -> None:
    world.master.put(0, b"x")
    async with world.consumer(partial(handle_badly, world), push=msgspec.structs.replace(PUSH, consume_timeout_s=0.1)):
        await until(lambda: len(world.master.given_back) == 1)
        world.master.put(0, b"y")
        await until(lambda: world.bodies == [b"x", b"y"])


@on_both_backends(open_world)
async def test_handler_whose_clean_up_fails_at_the_end_does_not_fail_the_consumer(world: World) -> None:
    world.master.put(0, b"x")
    async with world.consumer(partial(handle_badly, world), push=msgspec.structs.replace(PUSH, close_grace_s=0.0)):
        await until(lambda: world.bodies == [b"x"])


@on_both_backends(open_world)
async def test_malformed_route_does_not_end_the_sending_back(world: World) -> None:
    well = world.routes["T"]

    def refuse(message: ReceivedMessage) -> None:
        if message.body == b"x" and len(world.inbox) == 1:
            world.routes["T"] = b"{}garbage"
            consumer._client.routes.forget("T")  # as after TOPIC_NOT_EXIST
            raise LookupError

    world.refuse = refuse
    world.master.put(0, b"x")
    consumer = world.consumer()
    async with consumer:
        await until(lambda: len(world.master.sends) == 1)
        assert world.master.sends[0].ext_fields["b"] == "%RETRY%g"
        world.routes["T"] = well
        world.master.put(0, b"y")
        await until(lambda: world.bodies == [b"x", b"y"])


@on_both_backends(open_world)
async def test_handler_may_stop_its_consumer(world: World) -> None:
    async def handle(message: ReceivedMessage) -> None:
        try:
            await consumer.stop()
        finally:
            world.inbox.append(message)

    world.master.put(0, b"x")
    consumer = world.consumer(handle, push=msgspec.structs.replace(PUSH, close_grace_s=0.1))
    await consumer.start()
    await until(lambda: world.bodies == [b"x"] and world.master.members() == [])


@on_both_backends(open_world)
async def test_position_of_a_queue_revoked_during_a_save_is_saved_at_the_end(world: World) -> None:
    held, may_answer = anyio.Event(), anyio.Event()

    async def save_later(command: RemotingCommand) -> RemotingCommand:
        held.set()
        await may_answer.wait()
        world.master.committed[int(command.ext_fields["queueId"])] = int(command.ext_fields["commitOffset"])
        return command.reply(0)

    def save(command: RemotingCommand) -> Answer:
        return save_later(command) if command.ext_fields["topic"] == "T" and not may_answer.is_set() else None

    async def answer_later() -> None:
        await anyio.sleep(0.2)
        may_answer.set()

    world.master.overrides[RequestCode.UPDATE_CONSUMER_OFFSET] = save
    async with anyio.create_task_group() as tasks, world.consumer() as push:
        await until(lambda: len(push.assigned) == 3)
        for queue_id in (0, 1):
            world.master.put(queue_id, b"first")
        await held.wait()
        for queue_id in (0, 1):
            world.master.put(queue_id, b"second")
        await until(lambda: world.bodies.count(b"second") == 2)
        world.master.others = ["~ last of all"]
        await tell(world, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, consumerGroup="g")
        await until(lambda: len([queue for queue in push.assigned if queue.topic == "T"]) == 1)
        tasks.start_soon(answer_later)
    assert world.master.committed == {0: 2, 1: 2}


@on_both_backends(open_world)
async def test_a_queue_is_assigned_while_the_broker_of_a_revoked_one_is_silent(world: World) -> None:
    silent, healthy = world.brokers[0], world.brokers[1]
    assert silent.server is not None
    assert healthy.server is not None
    may_answer = anyio.Event()

    async def save_later(command: RemotingCommand) -> RemotingCommand:
        await may_answer.wait()
        return command.reply(0)

    silent.overrides[RequestCode.UPDATE_CONSUMER_OFFSET] = save_later
    silent.put(1, b"first")
    async with world.consumer(options=ClientOptions(route_refresh_interval_s=0.2, request_timeout_s=60)) as push:
        await until(lambda: world.bodies == [b"first"])
        world.routes["T"] = route_body({"a": {0: silent.server.address}, "b": {0: healthy.server.address}}, 1)
        healthy.put(0, b"second")
        await until(lambda: world.bodies == [b"first", b"second"])
        assert [(queue.broker_name, queue.queue_id) for queue in push.assigned if queue.topic == "T"] == [
            ("a", 0),
            ("b", 0),
        ]
        may_answer.set()


@pytest.mark.parametrize("option", ["concurrency", "commit_interval_s"])
def test_options_that_handle_nothing_or_never_pause_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0; accepted: more than 0"):
        PushOptions(**{option: 0})
    with pytest.raises(ValueError, match="suspend_s=-1; accepted: 0 or more"):
        msgspec.structs.replace(PUSH, suspend_s=-1)
    PushOptions(queue_span_max=0, long_poll_s=0, suspend_s=0, reconsume_times_max=0, close_grace_s=0)
