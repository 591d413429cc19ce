"""The simple consumer: with scripted brokers on both event loops, and with a whole halog broker on a virtual clock."""

import math
import pickle
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskStatus

from ha.client import (
    BrokerError,
    Client,
    ClientError,
    ClientOptions,
    ConnectionFailed,
    ConsumeMode,
    Message,
    MessageQueue,
    Messages,
    PoppedMessage,
    Producer,
    PullConsumer,
    ReceiptExpired,
    ReceivedMessage,
    RequestTimedOut,
    RouteNotFound,
    SimpleConsumer,
    Sql92,
    StartFrom,
)
from ha.protocol.bodies import TopicConfig
from ha.protocol.codes import RequestCode, SysFlag
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import Node
from tests.client.backends import on_both_backends
from tests.client.our_broker import NAMES, run_with_our_broker
from tests.client.pop_broker import POP_TIME_MS, QUICK, PopWorld, open_world
from tests.client.push_world import until

ACK, CHANGE, POP = RequestCode.ACK_MESSAGE, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, RequestCode.POP_MESSAGE
NOTIFICATION = RequestCode.NOTIFICATION


def bodies(messages: list[PoppedMessage]) -> list[bytes]:
    return [message.body for message in messages]


# ---- requests


@on_both_backends(open_world)
async def test_fields_of_a_pop(world: PopWorld) -> None:
    world.broker.put(b"x", TAGS="a", KEYS="k")
    async with world.consumer(subscriptions={"T": "a || b"}, start_from=StartFrom.FIRST) as consumer:
        [message] = await consumer.receive(7, invisible_s=12.5)
    assert (message.body, message.tags, message.keys, message.topic) == (b"x", "a", ("k",), "T")
    [fields] = world.broker.of(POP)
    assert fields == {
        "pollTime": "0",
        "consumerGroup": "g",
        "topic": "T",
        "queueId": "-1",
        "maxMsgNums": "7",
        "invisibleTime": "12500",
        "bornTime": "0",
        "initMode": "0",
        "expType": "TAG",
        "exp": "a || b",
        "order": "false",
    }


async def cancelled_receives(world: PopWorld, consumer: SimpleConsumer, count: int) -> None:
    """Receives in as many tasks, which are cancelled once the broker has all requests."""
    before = len(world.broker.of(POP))
    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(consumer.receive)
        while len(world.broker.of(POP)) < before + count:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


@on_both_backends(open_world)
async def test_ordered_pops_state_an_attempt_each(world: PopWorld) -> None:
    world.broker.put(b"a")
    async with world.consumer(mode=ConsumeMode.ORDERLY) as consumer:
        await consumer.receive()
        await consumer.receive(wait_s=0)
    first, second = world.broker.of(POP)
    assert (first["order"], second["order"]) == ("true", "true")
    assert first["attemptId"] != second["attemptId"]


@on_both_backends(open_world)
async def test_attempt_is_repeated_until_its_response_arrives(world: PopWorld) -> None:
    """So that a broker gives out the messages of a lost response again."""

    async def hang_up() -> None:
        await world.servers[0].disconnect()

    async with world.consumer(mode=ConsumeMode.ORDERLY) as consumer:
        lost = iter([anyio.sleep_forever(), hang_up()])
        world.broker.overrides[POP] = lambda command: next(lost, None)
        await cancelled_receives(world, consumer, 1)
        world.broker.put(b"x")
        assert bodies(await consumer.receive(wait_s=60)) == [b"x"]
        world.broker.put(b"y")
        assert bodies(await consumer.receive(wait_s=60)) == [b"y"]
    cancelled, disconnected, answered, following = (fields["attemptId"] for fields in world.broker.of(POP))
    assert cancelled == disconnected == answered != following


@on_both_backends(open_world)
async def test_attempt_is_repeated_if_its_messages_were_not_returned(world: PopWorld) -> None:
    """The receive is cancelled while it acknowledges a message that it leaves out."""
    world.broker.put(b"no", TAGS="BBBB")
    world.broker.put(b"yes", TAGS="AaAa")
    world.broker.overrides[ACK] = lambda command: anyio.sleep_forever()
    async with world.consumer(mode=ConsumeMode.ORDERLY, subscriptions={"T": "AaAa"}) as consumer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumer.receive)
            while not world.broker.of(ACK):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await consumer.receive(wait_s=0)
    first, second = world.broker.of(POP)
    assert first["attemptId"] == second["attemptId"]


@on_both_backends(open_world)
async def test_attempts_at_the_same_time_differ(world: PopWorld) -> None:
    async with world.consumer(mode=ConsumeMode.ORDERLY) as consumer:
        for _ in range(2):
            await cancelled_receives(world, consumer, 2)
    attempts = [fields["attemptId"] for fields in world.broker.of(POP)]
    assert len(attempts) == 4
    assert len(set(attempts[:2])) == 2
    assert set(attempts[2:]) == set(attempts[:2])


@on_both_backends(open_world)
async def test_ack_and_change_use_the_current_handle(world: PopWorld) -> None:
    world.broker.put(b"x")
    async with world.consumer() as consumer:
        [message] = await consumer.receive()
        await consumer.change_invisible_time(message, 30)
        await message.ack()
        await message.ack()
    [changed], [acked] = world.broker.of(CHANGE), world.broker.of(ACK)
    assert changed["extraInfo"] == f"0 {POP_TIME_MS} 60000 3 0 a 0 0"
    assert (changed["invisibleTime"], changed["suspend"]) == ("30000", "false")
    assert acked["extraInfo"] == f"0 {POP_TIME_MS + 1} 30000 5 0 a 0 0"
    assert (acked["topic"], acked["queueId"], acked["offset"], acked["consumerGroup"]) == ("T", "0", "0", "g")


@on_both_backends(open_world)
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_ack_during_a_renewal_uses_the_next_handle(world: PopWorld, *, is_cancelled: bool) -> None:
    """Brokers ignore the handle that the renewal replaces."""
    renewing, may_answer = anyio.Event(), anyio.Event()

    async def answer_later(command: RemotingCommand) -> RemotingCommand:
        renewing.set()
        await may_answer.wait()
        fields = {"popTime": str(POP_TIME_MS + 1), "invisibleTime": "30000", "reviveQid": "5"}
        return command.reply(0, ext_fields=fields)

    world.broker.put(b"x")
    world.broker.overrides[CHANGE] = answer_later
    async with world.consumer() as consumer, anyio.create_task_group() as tasks:
        [message] = await consumer.receive()
        async with anyio.create_task_group() as renewals:
            renewals.start_soon(consumer.change_invisible_time, message, 30)
            await renewing.wait()
            if is_cancelled:
                renewals.cancel_scope.cancel()
            tasks.start_soon(message.ack)
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
            assert not world.broker.of(ACK)
            may_answer.set()
    [acked] = world.broker.of(ACK)
    assert acked["extraInfo"] == f"0 {POP_TIME_MS + 1} 30000 5 0 a 0 0"


@on_both_backends(open_world)
async def test_a_renewal_ends_with_the_consumer(world: PopWorld) -> None:
    async def keep_silent() -> None:
        stack.cancel_scope.cancel()
        await anyio.sleep_forever()

    failures: list[ConnectionFailed] = []

    async def renew(message: PoppedMessage) -> None:
        try:
            await consumer.change_invisible_time(message, 30)
        except ConnectionFailed as error:
            failures.append(error)

    world.broker.put(b"x")
    world.broker.overrides[CHANGE] = lambda command: keep_silent()
    async with anyio.create_task_group() as tasks:
        async with world.consumer() as consumer, anyio.create_task_group() as stack:
            [message] = await consumer.receive()
            tasks.start_soon(renew, message)
            await anyio.sleep_forever()
        with pytest.raises(RuntimeError, match="not open"):
            await consumer.change_invisible_time(message, 30)
    assert [failure.was_sent for failure in failures] == [True]


@on_both_backends(open_world)
async def test_messages_of_a_retry_topic_are_acknowledged_there(world: PopWorld) -> None:
    world.broker.put(b"again", POP_CK=f"7 {POP_TIME_MS} 60000 2 1 a 0 0")
    async with world.consumer() as consumer:
        [message] = await consumer.receive()
        assert message.topic == "T"
        await message.ack()
    [acked] = world.broker.of(ACK)
    assert (acked["topic"], acked["offset"]) == ("%RETRY%g_T", "0")


@on_both_backends(open_world)
async def test_a_message_with_another_tag_of_the_same_hash_is_left_out(world: PopWorld) -> None:
    world.broker.put(b"no", TAGS="BBBB")
    world.broker.put(b"yes", TAGS="AaAa")
    async with world.consumer(subscriptions={"T": "AaAa"}) as consumer:
        assert bodies(await consumer.receive()) == [b"yes"]
    assert [fields["offset"] for fields in world.broker.of(ACK)] == ["0"]


@on_both_backends(open_world)
async def test_a_message_delivered_too_often_becomes_a_dead_letter(world: PopWorld) -> None:
    world.broker.put(b"hopeless", reconsume_times=4)
    world.broker.put(b"not yet", reconsume_times=3)
    async with world.consumer(reconsume_times_max=3) as consumer:
        assert bodies(await consumer.receive()) == [b"not yet"]
    [sent_back] = world.broker.of(RequestCode.CONSUMER_SEND_MSG_BACK)
    assert (sent_back["delayLevel"], sent_back["offset"], sent_back["originTopic"]) == ("-1", "1000", "T")
    assert [fields["offset"] for fields in world.broker.of(ACK)] == ["0"]


@on_both_backends(open_world)
async def test_messages_beyond_the_size_limit_are_given_back(world: PopWorld) -> None:
    for _ in range(3):
        world.broker.put(zlib.compress(bytes(1000)), sys_flag=SysFlag.COMPRESSED)
    async with world.consumer(options=ClientOptions(frame_size_max=1500)) as consumer:
        assert bodies(await consumer.receive()) == [bytes(1000)] * 2
    [returned] = world.broker.of(CHANGE)
    assert (returned["offset"], returned["invisibleTime"], returned["suspend"]) == ("2", "0", "true")


# ---- waiting


@on_both_backends(open_world)
async def test_none_after_the_wait(world: PopWorld) -> None:
    async with world.consumer() as consumer:
        assert await consumer.receive(wait_s=0) == []
        assert await consumer.receive(wait_s=0.2) == []
    assert {fields["pollTime"] for fields in world.broker.of(POP)} == {"0"}


@on_both_backends(open_world)
async def test_a_drained_broker_is_asked_once_it_has_messages(world: PopWorld) -> None:
    """Unless there is no time to wait."""

    async def put_when_waiting() -> None:
        while not world.broker.of(NOTIFICATION):
            await anyio.lowlevel.checkpoint()
        world.broker.put(b"2")

    for number in range(2):
        world.broker.put(b"%d" % number)
    async with world.consumer() as consumer, anyio.create_task_group() as tasks:
        assert bodies(await consumer.receive(1)) == [b"0"]
        assert bodies(await consumer.receive(1)) == [b"1"]
        tasks.start_soon(put_when_waiting)
        assert bodies(await consumer.receive(1)) == [b"2"]
        assert await consumer.receive(1, wait_s=0) == []
    assert len(world.broker.of(POP)) == 4


@on_both_backends(open_world, 2)
async def test_a_drained_broker_is_not_forgotten_beside_a_busy_one(world: PopWorld) -> None:
    drained, busy = world.brokers
    async with world.consumer() as consumer:

        async def receive() -> list[bytes]:
            for _ in range(2):
                busy.put(b"more")
            return bodies(await consumer.receive(1))

        while not drained.of(POP):
            await receive()
        drained.put(b"here")
        while await receive() != [b"here"]:
            pass


@on_both_backends(open_world)
async def test_none_after_the_wait_in_order(world: PopWorld) -> None:
    async with world.consumer(mode=ConsumeMode.ORDERLY) as consumer:
        assert await consumer.receive(wait_s=0) == []
        assert await consumer.receive(wait_s=0.2) == []
    assert [int(fields["pollTime"]) > 0 for fields in world.broker.of(POP)][:2] == [False, True]
    assert not world.broker.of(NOTIFICATION)


@on_both_backends(open_world)
async def test_one_task_is_woken_for_one_message(world: PopWorld) -> None:
    async with world.consumer() as consumer, anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(consumer.receive)
        for number in range(8):
            while len(world.broker.of(NOTIFICATION)) <= number or len(world.broker.of(POP)) < 8:
                await anyio.lowlevel.checkpoint()
            world.broker.put(b"%d" % number)
            while world.broker.waiting:
                await anyio.lowlevel.checkpoint()
    assert len(world.broker.of(POP)) - 8 <= 2 * 8  # the next task may ask before the message is taken


@on_both_backends(open_world, 3)
async def test_several_brokers_are_waited_for_at_once(world: PopWorld) -> None:
    async with world.consumer() as consumer, anyio.create_task_group() as tasks:

        async def send_when_waiting(*counts: int) -> None:
            while counts != tuple(len(broker.of(NOTIFICATION)) for broker in world.brokers):
                await anyio.lowlevel.checkpoint()
            world.brokers[1].put(b"at b")

        tasks.start_soon(send_when_waiting, 1, 1, 1)
        [message] = await consumer.receive(wait_s=60)
        assert (message.body, message.queue.broker_name) == (b"at b", "b")
        assert all(fields["pollTime"] == "0" for broker in world.brokers for fields in broker.of(POP))
        tasks.start_soon(send_when_waiting, 1, 2, 1)  # those at the others are still waiting
        assert bodies(await consumer.receive(wait_s=60)) == [b"at b"]


@on_both_backends(open_world, 2)
async def test_a_dead_broker_does_not_hide_the_other(world: PopWorld) -> None:
    world.brokers[0].overrides[POP] = lambda command: command.reply(14, "not the master")
    async with world.consumer(options=ClientOptions(retry_unreachable=False)) as consumer:
        for number in range(4):
            world.brokers[1].put(b"%d" % number)
            assert bodies(await consumer.receive()) == [b"%d" % number]


@on_both_backends(open_world, 2)
async def test_a_silent_broker_does_not_delay_the_messages_of_the_other(world: PopWorld) -> None:
    """It is waited for, and asked again once its connection is lost, say."""

    async def never() -> None:
        await anyio.sleep_forever()

    silent, healthy = world.brokers
    for code in (POP, NOTIFICATION):
        silent.overrides[code] = lambda command: never()
    for number in range(6):
        healthy.put(b"%d" % number)
    async with world.consumer(options=QUICK) as consumer:
        for number in range(6):
            assert bodies(await consumer.receive(1)) == [b"%d" % number]
        assert len(silent.of(POP)) == 1
        assert await consumer.receive(wait_s=0.1) == []
        silent.overrides.clear()
        silent.put(b"back")
        await world.servers[0].disconnect()
        assert bodies(await consumer.receive()) == [b"back"]


@on_both_backends(open_world, 2)
async def test_it_gives_up_if_all_brokers_fail(world: PopWorld) -> None:
    """One after the other."""
    for broker in world.brokers:
        broker.overrides[POP] = lambda command: command.reply(14, "not the master")
        async with world.consumer(options=QUICK) as consumer:
            if broker is world.broker:
                assert await consumer.receive(wait_s=1) == []
            else:
                with pytest.raises(BrokerError, match="not the master"):
                    await consumer.receive(wait_s=60)


@on_both_backends(open_world)
async def test_a_long_wait_is_several_polls(world: PopWorld) -> None:
    """So that a broker that is cut off is noticed."""
    async with world.consumer(mode=ConsumeMode.ORDERLY) as consumer:
        with anyio.move_on_after(60):
            world.broker.put(b"x")
            assert bodies(await consumer.receive(wait_s=math.inf)) == [b"x"]
    assert [fields["pollTime"] for fields in world.broker.of(POP)] == ["15000"]


@on_both_backends(open_world)
async def test_an_unavailable_broker_is_asked_again(world: PopWorld) -> None:
    world.broker.put(b"x")
    refused = iter([True, True])
    world.broker.overrides[POP] = lambda command: command.reply(14, "not yet") if next(refused, False) else None
    async with world.consumer() as consumer:
        assert bodies(await consumer.receive()) == [b"x"]
    assert len(world.broker.of(POP)) == 3


@on_both_backends(open_world)
async def test_it_gives_up_after_the_request_timeout(world: PopWorld) -> None:
    world.broker.overrides[POP] = lambda command: command.reply(14, "never")
    async with world.consumer(options=QUICK) as consumer:
        with pytest.raises(BrokerError, match="never"):
            await consumer.receive(wait_s=60)
    assert len(world.broker.of(POP)) > 1


# ---- errors


@on_both_backends(open_world)
@pytest.mark.parametrize(("is_shared", "code"), [(False, POP), (False, NOTIFICATION), (True, NOTIFICATION)])
async def test_a_receive_under_way_fails_when_the_consumer_is_closed(
    world: PopWorld, *, is_shared: bool, code: RequestCode
) -> None:
    """Without a further pop, whose messages nobody expects, if the shared client stays open."""

    async def never() -> None:
        await anyio.sleep_forever()

    async def receive(consumer: SimpleConsumer, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        with pytest.raises(ConnectionFailed, match="closed"):
            await consumer.receive(wait_s=60)

    if code == POP:
        world.broker.overrides[POP] = lambda command: never()
    async with Client(world.names.address) as client, anyio.create_task_group() as tasks:
        names = client if is_shared else world.names.address
        async with SimpleConsumer(names, group="g", subscriptions={"T": "*"}) as consumer:
            await tasks.start(receive, consumer)
            while not world.broker.of(code):
                await anyio.lowlevel.checkpoint()
        with pytest.raises(RuntimeError, match="not open"):
            await consumer.receive()
    assert len(world.broker.of(POP)) == 1


@on_both_backends(open_world)
async def test_a_lost_connection_is_an_error_at_last(world: PopWorld) -> None:
    async def hang_up() -> None:
        await world.servers[0].disconnect()

    world.broker.overrides[POP] = lambda command: hang_up()
    async with world.consumer(options=QUICK) as consumer:
        with pytest.raises(ConnectionFailed):
            await consumer.receive(wait_s=60)
    assert len(world.broker.of(POP)) > 1


@on_both_backends(open_world)
@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (3, "use PushConsumer or PullConsumer"),
        (17, "create topic T"),
        (26, "create group g, or set autoCreateSubscriptionGroup=true"),
        (23, "check the subscription to topic T"),
    ],
)
async def test_a_rejection_says_what_to_do(world: PopWorld, *, code: int, hint: str) -> None:
    world.broker.overrides[POP] = lambda command: command.reply(code, "the remark")
    async with world.consumer() as consumer:
        with pytest.raises(BrokerError, match="the remark") as caught:
            await consumer.receive()
    assert caught.value.code == code
    assert hint in str(caught.value)


@on_both_backends(open_world)
async def test_an_unknown_topic_says_what_to_do(world: PopWorld) -> None:
    async with world.consumer(subscriptions={"nope": "*"}) as consumer:
        with pytest.raises(RouteNotFound, match="create topic nope"):
            await consumer.receive()


@on_both_backends(open_world)
async def test_a_message_can_not_be_settled_after_its_time(world: PopWorld) -> None:
    world.broker.put(b"x")
    async with world.consumer() as consumer:
        [message] = await consumer.receive(invisible_s=0.01)
        await anyio.sleep(0.02)
        with pytest.raises(ReceiptExpired, match="longer invisible_s"):
            await message.ack()
    assert not world.broker.of(ACK)


@on_both_backends(open_world)
async def test_a_message_is_settled_once(world: PopWorld) -> None:
    world.broker.put(b"x")
    world.broker.put(b"y")
    async with world.consumer() as consumer:
        acknowledged, returned = await consumer.receive()
        await acknowledged.ack()
        with pytest.raises(ReceiptExpired, match="it is acknowledged"):
            await acknowledged.nack()
        await returned.nack(1.5)
        with pytest.raises(ReceiptExpired, match="given back"):
            await returned.ack()
        with pytest.raises(ValueError, match="-1 s; accepted"):
            await consumer.change_invisible_time(returned, -1)
    [changed] = world.broker.of(CHANGE)
    assert (changed["invisibleTime"], changed["suspend"]) == ("1500", "false")


@on_both_backends(open_world)
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_message_that_may_be_given_back_is_not_acknowledged(world: PopWorld, *, is_cancelled: bool) -> None:
    """The broker may have replaced the handle: it would ignore the acknowledgement, and deliver the message again."""

    async def keep_silent() -> None:
        if is_cancelled:
            returning.cancel_scope.cancel()

    world.broker.put(b"x")
    world.broker.overrides[CHANGE] = lambda command: keep_silent()
    async with world.consumer(options=QUICK) as consumer:
        [message] = await consumer.receive()
        async with anyio.create_task_group() as returning:
            with pytest.raises(anyio.get_cancelled_exc_class() if is_cancelled else RequestTimedOut):
                await message.nack()
        with pytest.raises(ReceiptExpired, match="given back"):
            await message.ack()
    assert not world.broker.of(ACK)


@on_both_backends(open_world)
async def test_a_refused_return_can_be_repeated(world: PopWorld) -> None:
    world.broker.put(b"x")
    world.broker.overrides[CHANGE] = lambda command: command.reply(1, "disk is full")
    async with world.consumer() as consumer:
        [message] = await consumer.receive()
        with pytest.raises(BrokerError, match="disk is full"):
            await message.nack()
        with pytest.raises(ValueError, match="-1 s; accepted"):
            await message.nack(-1)
        await message.ack()
    assert len(world.broker.of(ACK)) == 1


@on_both_backends(open_world)
async def test_a_failed_ack_can_be_repeated(world: PopWorld) -> None:
    world.broker.put(b"x")
    world.broker.overrides[ACK] = lambda command: command.reply(1, "disk is full")
    async with world.consumer() as consumer:
        [message] = await consumer.receive()
        with pytest.raises(BrokerError, match="disk is full"):
            await message.ack()
        del world.broker.overrides[ACK]
        await message.ack()
    assert len(world.broker.of(ACK)) == 2


@on_both_backends(open_world)
async def test_arguments_are_checked(world: PopWorld) -> None:
    with pytest.raises(ValueError, match="name at least one topic"):
        world.consumer(subscriptions={})
    with pytest.raises(TypeError, match=r"accepted: StartFrom\.FIRST, StartFrom\.LAST"):
        world.consumer(start_from=datetime.now(UTC))
    with pytest.raises(ValueError, match="reconsume_times_max=-1; accepted: 0 or more"):
        world.consumer(reconsume_times_max=-1)
    async with world.consumer() as consumer:
        with pytest.raises(ValueError, match="accepted: 1 … 32"):
            await consumer.receive(33)
        with pytest.raises(ValueError, match="invisible_s=0"):
            await consumer.receive(invisible_s=0)


@on_both_backends(open_world)
async def test_a_copy_is_a_plain_message(world: PopWorld) -> None:
    world.broker.put(b"x", own="1")
    async with world.consumer() as consumer:
        [message] = await consumer.receive()
    copy = pickle.loads(pickle.dumps(message))
    assert type(copy) is ReceivedMessage
    assert copy == message


# ---- iteration


@on_both_backends(open_world)
async def test_iteration_returns_messages_and_gives_back_the_rest(world: PopWorld) -> None:
    for number in range(5):
        world.broker.put(b"%d" % number)
    got = []
    async with world.consumer() as consumer:
        async for message in consumer.messages(max_messages=3):
            got.append(message.body)
            await message.ack()
            if len(got) == 4:
                break
    assert got == [b"0", b"1", b"2", b"3"]
    assert [fields["offset"] for fields in world.broker.of(ACK)] == ["0", "1", "2", "3"]
    [returned] = world.broker.of(CHANGE)
    assert (returned["offset"], returned["invisibleTime"], returned["suspend"]) == ("4", "0", "true")


@on_both_backends(open_world)
async def test_messages_are_given_back_although_one_can_not_be(world: PopWorld) -> None:
    def refuse_one(command: RemotingCommand) -> RemotingCommand | None:
        return command.reply(1, "no") if command.ext_fields["offset"] == "1" else None

    for number in range(4):
        world.broker.put(b"%d" % number)
    world.broker.overrides[CHANGE] = refuse_one
    async with world.consumer() as consumer:
        assert (await anext(consumer.messages())).body == b"0"
    assert sorted(fields["offset"] for fields in world.broker.of(CHANGE)) == ["1", "2", "3"]


@on_both_backends(open_world)
async def test_iteration_does_not_return_what_was_given_back(world: PopWorld) -> None:
    consumer = world.consumer()
    for offset in ("1", "3"):
        world.broker.put(b"settled")
        world.broker.put(b"given back")
        async with consumer:
            message = await anext(consumer.messages())
            assert message.body == b"settled"
            await message.ack()
        assert world.broker.of(CHANGE)[-1]["offset"] == offset


@on_both_backends(open_world)
async def test_iteration_leaves_out_expired_messages(world: PopWorld) -> None:
    world.broker.put(b"0")
    world.broker.put(b"1")
    async with world.consumer() as consumer:
        messages = consumer.messages(invisible_s=0.05)
        assert (await anext(messages)).body == b"0"
        await anyio.sleep(0.06)
        world.broker.put(b"2")
        assert (await anext(messages)).body == b"2"


@on_both_backends(open_world)
async def test_iteration_gives_back_what_it_has_not_returned_by_half_the_time(world: PopWorld) -> None:
    for number in range(3):
        world.broker.put(b"%d" % number)
    async with world.consumer() as consumer:
        message = await anext(consumer.messages(invisible_s=2))
        await until(lambda: len(world.broker.of(CHANGE)) == 2)
        await message.ack()
    given_back = sorted((fields["offset"], fields["suspend"]) for fields in world.broker.of(CHANGE))
    assert given_back == [("1", "true"), ("2", "true")]


@on_both_backends(open_world)
async def test_iteration_survives_unreachable_brokers(world: PopWorld) -> None:
    world.broker.put(b"x")
    refused = iter(range(8))
    world.broker.overrides[POP] = lambda command: command.reply(2, "busy") if next(refused, None) is not None else None
    async with world.consumer(options=ClientOptions(request_timeout_s=0.2)) as consumer:
        async for message in consumer.messages():
            assert message.body == b"x"
            break
    assert len(world.broker.of(POP)) == 9


@on_both_backends(open_world)
async def test_tasks_share_the_iteration(world: PopWorld) -> None:
    got: list[bytes] = []
    async with world.consumer() as consumer, anyio.create_task_group() as tasks:
        messages = consumer.messages(max_messages=2)

        async def work() -> None:
            async for message in messages:
                got.append(message.body)
                if len(got) == 9:
                    tasks.cancel_scope.cancel()

        for _ in range(3):
            tasks.start_soon(work)
        for number in range(9):
            world.broker.put(b"%d" % number)
    assert sorted(got) == [b"%d" % number for number in range(9)]


@on_both_backends(open_world)
async def test_iterations_fail_when_the_consumer_is_closed(world: PopWorld) -> None:
    """One handles a message, one tries again after failures, and one waits for its turn."""
    handling, is_closed = anyio.Event(), anyio.Event()

    async def iterate(messages: Messages) -> None:
        try:
            async for _ in messages:
                handling.set()
                await is_closed.wait()
        except ClientError as error:
            failures.append(str(error))

    failures: list[str] = []
    async with anyio.create_task_group() as tasks:
        async with world.consumer() as consumer:
            world.broker.put(b"x")
            tasks.start_soon(iterate, consumer.messages())
            await handling.wait()
            world.broker.overrides[POP] = lambda command: command.reply(2, "busy")
            world.broker.put(b"y")  # ends the notification request, which would delay the next pop by 15 s
            for _ in range(2):
                tasks.start_soon(iterate, consumer.messages())
            while len(world.broker.of(POP)) < 3:
                await anyio.lowlevel.checkpoint()
        is_closed.set()
    assert len(failures) == 3
    assert all("T: the consumer was closed" in failure or "busy" in failure for failure in failures)


@on_both_backends(open_world)
async def test_messages_that_arrive_after_the_consumer_was_closed_are_given_back(world: PopWorld) -> None:
    """The shared client is still open, so the pop gets its response."""
    is_asked, is_closed = anyio.Event(), anyio.Event()

    async def answer_later(command: RemotingCommand) -> RemotingCommand:
        is_asked.set()
        await is_closed.wait()
        return await world.broker._pop(command)

    async def iterate(messages: Messages) -> None:
        with pytest.raises(ConnectionFailed, match="closed"):
            await anext(messages)

    world.broker.put(b"x")
    world.broker.put(b"y")
    world.broker.overrides[POP] = answer_later
    async with Client(world.names.address) as client, anyio.create_task_group() as tasks:
        async with SimpleConsumer(client, group="g", subscriptions={"T": "*"}) as consumer:
            tasks.start_soon(iterate, consumer.messages())
            await is_asked.wait()
        is_closed.set()
    assert [fields["invisibleTime"] for fields in world.broker.of(CHANGE)] == ["0", "0"]


@on_both_backends(open_world)
async def test_iteration_gets_nothing_that_is_being_given_back(world: PopWorld) -> None:
    giving_back, may_answer = anyio.Event(), anyio.Event()

    async def answer_later(command: RemotingCommand) -> RemotingCommand:
        giving_back.set()
        await may_answer.wait()
        fields = {"popTime": str(POP_TIME_MS + 1), "invisibleTime": "0", "reviveQid": "5"}
        return command.reply(0, ext_fields=fields)

    async def iterate_on() -> None:
        await giving_back.wait()
        with pytest.raises(ConnectionFailed, match="closed"):
            await anext(messages)
        may_answer.set()

    for number in range(4):
        world.broker.put(b"%d" % number)
    world.broker.overrides[CHANGE] = answer_later
    async with anyio.create_task_group() as tasks, world.consumer() as consumer:
        messages = consumer.messages()
        assert (await anext(messages)).body == b"0"
        tasks.start_soon(iterate_on)
    assert sorted(fields["offset"] for fields in world.broker.of(CHANGE)) == ["1", "2", "3"]


# ---- with a whole broker


def reading(options: ClientOptions, **arguments: Any) -> SimpleConsumer:
    """A consumer of T from its first message on."""
    usual = {"group": "g", "subscriptions": {"T": "*"}, "start_from": StartFrom.FIRST}
    return SimpleConsumer(NAMES, options=options, **{**usual, **arguments})


def test_life_of_a_message_on_a_broker(tmp_path: Path) -> None:
    async def body(node: Node, options: ClientOptions) -> None:
        async with (
            Producer(NAMES, options=options) as producer,
            reading(options, reconsume_times_max=2) as consumer,
        ):
            await producer.send(Message("T", b"x"))
            [message] = await consumer.receive(invisible_s=10)
            assert await consumer.receive(wait_s=8) == []
            await consumer.change_invisible_time(message, 30)
            assert await consumer.receive(wait_s=29) == []
            [message] = await consumer.receive(wait_s=2, invisible_s=10)
            assert (message.reconsume_times, message.topic) == (1, "T")
            await message.nack(5)
            started = anyio.current_time()
            [message] = await consumer.receive(wait_s=60, invisible_s=10)
            assert 5 <= anyio.current_time() - started < 5.3
            assert message.reconsume_times == 2
            await message.nack()
            assert await consumer.receive(wait_s=60) == []
            async with PullConsumer(NAMES, options=options) as reader:
                [queue] = await reader.queues("%DLQ%g")
                assert [each.body for each in (await reader.pull(queue, 0)).messages] == [b"x"]
            await producer.send(Message("T", b"y"))
            [message] = await consumer.receive(invisible_s=10)
            await message.ack()
            assert await consumer.receive(wait_s=60) == []

    run_with_our_broker(tmp_path, body)


def test_slow_handlers_on_a_broker(tmp_path: Path) -> None:
    """Messages that wait in the consumer for a slow handler are neither late nor count as redelivered."""

    async def body(node: Node, options: ClientOptions) -> None:
        async with Producer(NAMES, options=options) as producer:
            await producer.send_many([Message("T", b"%d" % number) for number in range(6)])
        handled: list[tuple[bytes, int]] = []
        async with reading(options) as consumer:
            async for message in consumer.messages(invisible_s=10):
                await anyio.sleep(4)
                await message.ack()
                handled.append((message.body, message.reconsume_times))
                if len(handled) == 6:
                    break
        assert sorted(handled) == [(b"%d" % number, 0) for number in range(6)]

    run_with_our_broker(tmp_path, body)


def test_order_on_a_broker(tmp_path: Path) -> None:
    """Of each queue the next message comes when the one before is acknowledged, also if that has failed or was lost."""

    async def body(node: Node, options: ClientOptions) -> None:
        await node.broker.topics.update(TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2))
        async with Producer(NAMES, options=options) as producer:
            for number in range(3):
                for queue_id in range(2):
                    queue = MessageQueue("T", "b0", queue_id)
                    await producer.send(Message("T", b"%d %d" % (queue_id, number)), queue=queue)
        got: list[bytes] = []
        in_hand: set[int] = set()
        async with (
            reading(options, mode=ConsumeMode.ORDERLY) as consumer,
            anyio.create_task_group() as tasks,
        ):
            messages = consumer.messages(invisible_s=30)

            async def work() -> None:
                async for message in messages:
                    queue_id = message.queue.queue_id
                    assert queue_id not in in_hand
                    in_hand.add(queue_id)
                    await anyio.sleep(1)
                    in_hand.remove(queue_id)
                    got.append(message.body)
                    if message.body == b"0 1" and message.reconsume_times < 2:
                        await message.nack(5)
                    else:
                        await message.ack()
                    if len(got) == 8:
                        tasks.cancel_scope.cancel()

            for _ in range(3):
                tasks.start_soon(work)
        by_queue = [[each for each in got if each.startswith(b"%d" % queue_id)] for queue_id in range(2)]
        assert by_queue == [[b"0 0", b"0 1", b"0 1", b"0 1", b"0 2"], [b"1 0", b"1 1", b"1 2"]]

    run_with_our_broker(tmp_path, body)


def test_order_survives_a_cancelled_receive(tmp_path: Path) -> None:
    """Its messages come again at once, and not only after their invisible time."""

    async def body(node: Node, options: ClientOptions) -> None:
        async with (
            Producer(NAMES, options=options) as producer,
            reading(options, mode=ConsumeMode.ORDERLY, reconsume_times_max=2) as consumer,
        ):
            await producer.send(Message("T", b"x"))
            reply = node.broker.pop.requests._send_taken
            node.broker.pop.requests._send_taken = lambda *_: None  # type: ignore[method-assign]
            with anyio.move_on_after(5):
                await consumer.receive(wait_s=60)
            node.broker.pop.requests._send_taken = reply  # type: ignore[method-assign]
            started = anyio.current_time()
            for times in range(3):
                [message] = await consumer.receive(wait_s=60)
                assert message.reconsume_times == times
                await message.nack()
            assert anyio.current_time() - started < 1
            assert await consumer.receive(wait_s=60) == []
            async with PullConsumer(NAMES, options=options) as reader:
                [queue] = await reader.queues("%DLQ%g")
                assert [each.body for each in (await reader.pull(queue, 0)).messages] == [b"x"]

    run_with_our_broker(tmp_path, body)


def test_a_cancelled_receive_takes_nothing_afterwards(tmp_path: Path) -> None:
    """Nor does a consumer that was left while its client, and so its connection, stayed open."""

    async def body(node: Node, options: ClientOptions) -> None:
        async with (
            Client(NAMES, options=options) as client,
            Producer(client) as producer,
            reading(options) as other,
        ):
            await producer.send(Message("T", b"first"))
            [message] = await other.receive()
            await message.ack()
            async with SimpleConsumer(client, group="g", subscriptions={"T": "*"}) as consumer:
                with anyio.move_on_after(1):
                    await consumer.receive()
                await producer.send(Message("T", b"second"))
                assert bodies(await consumer.receive(wait_s=0)) == [b"second"]
                with anyio.move_on_after(1):
                    await consumer.receive()
            await producer.send(Message("T", b"third"))
            started = anyio.current_time()
            assert bodies(await other.receive(wait_s=60)) == [b"third"]
            assert anyio.current_time() - started < 1

    run_with_our_broker(tmp_path, body)


def test_a_message_is_received_as_it_arrives(tmp_path: Path) -> None:
    """Also if the wait for it was short."""

    async def body(node: Node, options: ClientOptions) -> None:
        async with Producer(NAMES, options=options) as producer, anyio.create_task_group() as tasks:
            await producer.send(Message("T", b"first"))
            async with reading(options) as consumer:
                await consumer.receive()
                for _ in range(5):
                    tasks.start_soon(_after, 0.03, producer)
                    started = anyio.current_time()
                    assert bodies(await consumer.receive()) == [b"later"]
                    assert anyio.current_time() - started < 0.04

    async def _after(delay_s: float, producer: Producer) -> None:
        await anyio.sleep(delay_s)
        await producer.send(Message("T", b"later"))

    run_with_our_broker(tmp_path, body)


def test_filters_on_a_broker(tmp_path: Path) -> None:
    async def body(node: Node, options: ClientOptions) -> None:
        async with Producer(NAMES, options=options) as producer:
            for number in range(6):
                tag = "even" if number % 2 == 0 else "odd"
                await producer.send(Message("T", b"%d" % number, tags=tag, properties={"n": str(number)}))
        for group, wanted, expected in (
            ("tags", "odd", [b"1", b"3", b"5"]),
            ("sql", Sql92("n > 3"), [b"4", b"5"]),
        ):
            subscriptions: dict[str, str | Sql92] = {"T": wanted}
            async with reading(options, group=group, subscriptions=subscriptions) as consumer:
                got: list[bytes] = []
                while len(got) < len(expected):
                    got += bodies(await consumer.receive(wait_s=5))
                assert sorted(got) == expected
                assert await consumer.receive(wait_s=5) == []
        bad: dict[str, str | Sql92] = {"T": Sql92("n >")}
        async with SimpleConsumer(NAMES, group="bad", subscriptions=bad, options=options) as consumer:
            with pytest.raises(BrokerError, match="check the subscription to topic T"):
                await consumer.receive()

    run_with_our_broker(tmp_path, body, enable_property_filter=True)


def test_priority_on_a_broker(tmp_path: Path) -> None:
    async def body(node: Node, options: ClientOptions) -> None:
        attributes = {"message.type": "PRIORITY"}
        await node.broker.topics.update(
            TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4, attributes=attributes)
        )
        async with Producer(NAMES, options=options) as producer:
            for priority in (1, 3, 0, 9, None):
                await producer.send(Message("T", b"%a" % priority, priority=priority))
        async with reading(options) as consumer:
            assert bodies(await consumer.receive(4))[:2] == [b"3", b"9"]

    run_with_our_broker(tmp_path, body)


def test_sql_says_which_setting_it_needs(tmp_path: Path) -> None:
    async def body(node: Node, options: ClientOptions) -> None:
        async with Producer(NAMES, options=options) as producer:
            await producer.send(Message("T", b"x"))
        wanted: dict[str, str | Sql92] = {"T": Sql92("n > 1")}
        async with SimpleConsumer(NAMES, group="g", subscriptions=wanted, options=options) as consumer:
            with pytest.raises(BrokerError, match="set enablePropertyFilter=true"):
                await consumer.receive()

    run_with_our_broker(tmp_path, body)
