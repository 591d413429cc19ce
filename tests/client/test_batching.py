"""Automatic batching with servers that answer on demand: which messages are sent when, and their results."""

import math
import zlib
from collections import Counter

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketStream

from ha.client import ClientOptions, Message, MessageQueue, SendResult, SendStatus, batching
from ha.client.shared_requests import BATCH_BYTES_MAX, BATCH_COUNT_MAX
from ha.errors import BrokerError, ConnectionFailed, RequestTimedOut, RouteNotFound
from ha.protocol.batch import decode_batch
from ha.protocol.codes import ResponseCode
from ha.protocol.properties import decode_properties
from ha.protocol.remoting import RemotingCommand, encode_command
from tests.client.backends import on_both_backends
from tests.client.batching_world import (
    BATCH,
    QUEUE,
    SINGLE,
    Broker,
    World,
    bodies,
    open_world,
    open_world_of_one,
    settled,
)


@on_both_backends(open_world_of_one)
async def test_messages_waiting_for_a_response_are_sent_as_one_batch(world: World, broker: Broker) -> None:
    broker.hold()
    await world.send(b"first")
    for number in range(10):
        properties = {"own": "é"}
        await world.send(Message("T", b"%d" % number, tags=f"t{number}", keys=f"k{number}", properties=properties))
    await world.came(1)
    assert broker.sent == [[b"first"]]
    broker.release()
    await world.until_all(11)
    first, batch = broker.commands
    assert (first.code, batch.code) == (SINGLE, BATCH)
    assert batch.ext_fields["m"] == "true"
    assert batch.ext_fields["i"] == ""
    entries = decode_batch(batch.body)
    assert [body for _, body, _ in entries] == [b"%d" % number for number in range(10)]
    base = world.result(b"0").queue_offset
    for number, (_, sent, raw) in enumerate(entries):
        known = decode_properties(raw)
        result = world.result(sent)
        assert (known["TAGS"], known["KEYS"], known["own"]) == (f"t{number}", f"k{number}", "é")
        assert result.message_id == known["UNIQ_KEY"]
        assert result.offset_message_id == f"place {number + 2}"
        assert result.queue == MessageQueue("T", "a", int(batch.ext_fields["e"]))
        assert result.queue_offset == base + number
        assert result.status is SendStatus.SEND_OK
    assert len({result.message_id for result in world.outcomes.values() if isinstance(result, SendResult)}) == 11


@on_both_backends(open_world_of_one)
async def test_lone_messages_are_sent_singly_and_round_robin(world: World, broker: Broker) -> None:
    for number in range(8):
        await world.producer.send(Message("T", b"%d" % number))
    assert {command.code for command in broker.commands} == {SINGLE}
    assert Counter(command.ext_fields["e"] for command in broker.commands) == {str(i): 2 for i in range(4)}
    # Two at a time: one in flight, the other waits, and is sent alone as well.
    broker.hold()
    await world.send(b"x")
    await world.send(b"y")
    broker.release()
    await world.until_all(2)
    assert broker.sent[8:] == [[b"x"], [b"y"]]
    assert broker.commands[-1].code == SINGLE


@on_both_backends(open_world_of_one)
async def test_many_tasks_sending_in_a_loop(world: World, broker: Broker) -> None:
    got: dict[str, tuple[bytes, MessageQueue, int]] = {}

    async def send(task: int) -> None:
        for number in range(40):
            sent = b"%d %d" % (task, number)
            result = await world.producer.send(Message("T", sent))
            got[result.message_id] = (sent, result.queue, result.queue_offset)

    async with anyio.create_task_group() as tasks:
        for task in range(50):
            tasks.start_soon(send, task)
    assert len(got) == 2000
    ends: Counter[str] = Counter()
    stored = {}
    for command in broker.commands:
        queue_id = command.ext_fields["e"]
        for sent in bodies(command):
            stored[sent] = (MessageQueue("T", "a", int(queue_id)), ends[queue_id])
            ends[queue_id] += 1
    assert {sent: (queue, queue_offset) for sent, queue, queue_offset in got.values()} == stored
    for task in range(50):
        mine = [sent for request in broker.sent for sent in request if sent.startswith(b"%d " % task)]
        assert mine == [b"%d %d" % (task, number) for number in range(40)]
    assert len(broker.commands) < 200
    assert len(ends) == 4


@on_both_backends(open_world_of_one)
async def test_chosen_queue_keeps_the_order_of_mixed_sends(world: World, broker: Broker) -> None:
    long = b"long " * 2_000
    broker.hold()
    await world.send(b"first", QUEUE)
    await world.send(b"a", QUEUE)
    await world.send(b"b", QUEUE)
    await world.send(Message("T", b"not waited for 1", wait_stored=False), QUEUE)
    await world.send(Message("T", b"not waited for 2", wait_stored=False), QUEUE)
    await world.send(long + b"1", QUEUE)
    await world.send(long + b"2", QUEUE)
    await world.send(b"c", QUEUE)
    broker.release()
    await world.until_all(8)
    assert [len(request) for request in broker.sent] == [1, 2, 2, 2, 1]
    sent = [bytes(each) for request in broker.sent for each in request]
    inflated = [*sent[:5], zlib.decompress(sent[5]), zlib.decompress(sent[6]), sent[7]]
    assert inflated[:5] == [b"first", b"a", b"b", b"not waited for 1", b"not waited for 2"]
    assert inflated[5:] == [long + b"1", long + b"2", b"c"]
    assert [world.result(each).queue_offset for each in inflated] == list(range(8))
    assert {command.ext_fields["e"] for command in broker.commands} == {"1"}
    assert [decode_properties(c.ext_fields["i"].encode()).get("WAIT") for c in broker.commands[1:4]] == [
        None,
        "false",
        None,
    ]
    assert [int(command.ext_fields["f"]) & 1 for command in broker.commands] == [0, 0, 0, 1, 0]


@on_both_backends(open_world_of_one)
async def test_incompatible_messages_are_not_batched(world: World, broker: Broker) -> None:
    """Different topics or queues, or a different `wait_stored`. Messages that a broker stores elsewhere never wait."""
    broker.hold()
    for topic, queue in (("T", None), ("Other", None), ("T", QUEUE), ("T", MessageQueue("T", "a", 2))):
        await world.send(Message(topic, f"first of {topic} {queue}".encode()), queue)
    await world.send(Message("T", b"first unwaited", wait_stored=False))
    await world.came(5)
    for number in range(2):
        await world.send(Message("T", b"T %d" % number))
        await world.send(Message("Other", b"Other %d" % number))
        await world.send(Message("T", b"queue 1 %d" % number), QUEUE)
        await world.send(Message("T", b"queue 2 %d" % number), MessageQueue("T", "a", 2))
        await world.send(Message("T", b"unwaited %d" % number, wait_stored=False))
    alone = [
        Message("T", b"delayed", delay_level=3),
        Message("T", b"a second later", delay_s=1.0),
        Message("T", b"at a time", deliver_at_ms=1),
        Message("T", b"of a priority", priority=1),
        Message("T", b"delayed by hand", properties={"DELAY": "3"}),
        Message("T", b"half", properties={"TRAN_MSG": "true"}),
        Message("T", b"inner", properties={"INNER_NUM": "2"}),
        Message("T", b"strange wish", properties={"WAIT": "no"}),
        Message("T", b"far too many properties", properties={"long": "x" * 40_000}),
        Message("T", b"a flag too large", flag=1 << 31),
    ]
    for message in alone:
        await world.send(message)
    await world.came(15)
    assert broker.sent[5:] == [[message.body] for message in alone]
    broker.release()
    await world.until_all(25)
    assert sorted(broker.sent[15:]) == [
        [b"Other 0", b"Other 1"],
        [b"T 0", b"T 1"],
        [b"queue 1 0", b"queue 1 1"],
        [b"queue 2 0", b"queue 2 1"],
        [b"unwaited 0", b"unwaited 1"],
    ]


@on_both_backends(open_world_of_one)
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (10, SendStatus.FLUSH_DISK_TIMEOUT),
        (11, SendStatus.SLAVE_NOT_AVAILABLE),
        (12, SendStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
async def test_each_message_gets_the_batch_status(
    world: World, broker: Broker, *, code: int, status: SendStatus
) -> None:
    broker.hold()
    await world.send(b"first")
    for number in range(3):
        await world.send(b"%d" % number)
    broker.status = code
    broker.release()
    await world.until_all(4)
    assert world.result(b"first").status is SendStatus.SEND_OK
    assert [world.result(b"%d" % number).status for number in range(3)] == [status] * 3


@on_both_backends()
async def test_failed_batch_fails_all_its_messages() -> None:
    broker = Broker(lambda command: ResponseCode.SYSTEM_BUSY if command.code == BATCH else None)
    async with open_world([broker]) as world:
        broker.hold()
        await world.send(b"first")
        for number in range(3):
            await world.send(b"%d" % number)
        broker.release()
        await world.until_all(4)
        errors = [world.outcomes[b"%d" % number] for number in range(3)]
        for error in errors:
            assert isinstance(error, BrokerError)
            assert (error.code, error.remark) == (ResponseCode.SYSTEM_BUSY, "no")
            assert str(error) == f"{world.servers[0].address} answered 2: no"
        assert len({id(error) for error in errors}) == 3  # otherwise one would collect the tracebacks of all
        # Like a single send: retried, and then failed.
        assert [len(request) for request in broker.sent] == [1, 3, 3, 3]
        await world.send(b"next")
        await world.until_all(5)
        assert world.result(b"next").status is SendStatus.SEND_OK


@on_both_backends(open_world_of_one)
async def test_batch_is_retried_after_a_lost_connection(world: World, broker: Broker) -> None:
    broker.hold()
    await world.send(b"first", QUEUE)
    await world.send(b"a", QUEUE)
    await world.send(b"b", QUEUE)
    await world.send(b"c")
    await world.send(b"d")
    await world.came(2)
    await world.servers[0].disconnect()
    broker.release()
    await world.until_all(5)
    # A send to a chosen queue is not retried; the request in flight is lost, the waiting ones continue.
    assert isinstance(world.outcomes[b"first"], ConnectionFailed)
    assert world.result(b"a").queue_offset + 1 == world.result(b"b").queue_offset
    assert world.result(b"c").status is SendStatus.SEND_OK
    assert world.result(b"d").status is SendStatus.SEND_OK


@on_both_backends(open_world_of_one)
async def test_missing_response_times_out_all_messages_without_retry(world: World, broker: Broker) -> None:
    broker.hold()
    await world.send(b"first", timeout_s=0.5)
    await world.send(b"a", timeout_s=1.0)
    await world.send(b"b", timeout_s=1.0)
    await world.send(b"with more time", timeout_s=1.5)
    await world.until_all(4)
    assert {type(outcome) for outcome in world.outcomes.values()} == {RequestTimedOut}
    assert broker.sent == [[b"first"], [b"a", b"b"], [b"with more time"]]


@on_both_backends(open_world, [Broker()])
async def test_unknown_topic_fails_each_send(world: World) -> None:
    async def send() -> None:
        with pytest.raises(RouteNotFound) as caught:
            await world.producer.send(Message("Nowhere", b"x"))
        assert caught.value.topic == "Nowhere"

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(send)


@on_both_backends()
@pytest.mark.parametrize("queue", [None, QUEUE])
async def test_rejected_batch_is_sent_message_by_message(queue: MessageQueue | None) -> None:
    broker = Broker(lambda command: ResponseCode.MESSAGE_ILLEGAL if command.code == BATCH else None)
    async with open_world([broker]) as world:
        broker.hold()
        await world.send(b"first", queue)
        for number in range(3):
            await world.send(b"%d" % number, queue)
        broker.release()
        await world.until_all(4)
        assert [len(request) for request in broker.sent] == [1, 3, 1, 1, 1]
        if queue is not None:
            assert broker.sent[2:] == [[b"0"], [b"1"], [b"2"]]
            assert [world.result(b"%d" % number).queue_offset for number in range(3)] == [1, 2, 3]
        # Later messages are sent singly too, without waiting, except for earlier ones to a chosen queue.
        broker.hold()
        for number in range(10, 13):
            await world.send(b"%d" % number, queue)
        await world.came(8 if queue is None else 6)
        assert broker.sent[5:] == [[b"10"], [b"11"], [b"12"]][: 3 if queue is None else 1]
        broker.release()
        await world.until_all(7)
        assert broker.sent[5:] == [[b"10"], [b"11"], [b"12"]]


@on_both_backends()
async def test_order_of_a_chosen_queue_is_kept_while_a_broker_rejects_batches() -> None:
    """Messages that can't be batched any more wait for those that were waiting before."""

    def refuse(command: RemotingCommand) -> int | None:
        if command.code != BATCH:
            return None
        if b"3" in bodies(command):
            broker.hold()
        return ResponseCode.MESSAGE_ILLEGAL

    broker = Broker(refuse)
    async with open_world([broker]) as world:
        broker.hold()
        for sent in (b"0", b"1", b"2"):
            await world.send(sent, QUEUE)
        await world.came(1)
        broker.release()
        broker.hold()
        await world.came(2)  # the first batch
        for sent in (b"3", b"4"):
            await world.send(sent, QUEUE)
        broker.release()
        await world.came(5)  # its messages, and the second batch
        for sent in (b"5", b"6"):
            await world.send(sent, QUEUE)
        broker.release()
        await world.until_all(7)
        assert [command.body for command in broker.commands if command.code == SINGLE] == [
            b"%d" % number for number in range(7)
        ]
        assert [world.result(b"%d" % number).queue_offset for number in range(7)] == list(range(7))


@on_both_backends(open_world_of_one)
async def test_messages_sent_alone_keep_the_order_of_a_chosen_queue(world: World, broker: Broker) -> None:
    batching._TIMEOUT_MIN_S = 10.0
    broker.hold()
    sends: list[tuple[Message, float]] = [
        (Message("T", b"first"), 20.0),
        (Message("T", b"a"), 20.0),
        (Message("T", b"too short a timeout"), 9.0),
        (Message("T", b"too short again"), 9.0),
        (Message("T", b"b"), 20.0),
        (Message("T", b"c"), 20.0),
        (Message("T", b"strange wish", properties={"WAIT": "no"}), 20.0),
        (Message("T", b"delayed", delay_level=3), 20.0),
        (Message("T", b"d"), 20.0),
    ]
    for message, timeout_s in sends:
        await world.send(message, QUEUE, timeout_s)
    await world.came(1)
    await settled()
    assert len(broker.sent) == 1
    broker.release()
    await world.until_all(len(sends))
    assert [each for request in broker.sent for each in request] == [message.body for message, _ in sends]
    assert [len(request) for request in broker.sent] == [1, 1, 1, 1, 2, 1, 1, 1]


@on_both_backends(open_world_of_one, delay_max_s=0.05)
async def test_a_timeout_that_passes_while_a_message_waits_for_its_turn_fails_it(world: World, broker: Broker) -> None:
    broker.hold()
    await world.send(b"first", QUEUE)
    await world.send(Message("T", b"strange wish", properties={"WAIT": "no"}), QUEUE, timeout_s=0.01)
    await world.until_all(1)
    assert isinstance(world.outcomes[b"strange wish"], RequestTimedOut)
    broker.release()
    await world.until_all(2)
    assert broker.sent == [[b"first"]]


@on_both_backends()
async def test_rejected_message_does_not_fail_its_batch() -> None:
    broker = Broker(lambda command: ResponseCode.MESSAGE_ILLEGAL if b"bad" in bodies(command) else None)
    async with open_world([broker]) as world:
        broker.hold()
        await world.send(b"first")
        for sent in (b"0", b"bad", b"1"):
            await world.send(sent)
        broker.release()
        await world.until_all(4)
        bad = world.outcomes[b"bad"]
        assert isinstance(bad, BrokerError)
        assert bad.code == ResponseCode.MESSAGE_ILLEGAL
        assert world.result(b"0").message_id != world.result(b"1").message_id
        # The broker still gets batches.
        broker.hold()
        for sent in (b"2", b"3", b"4"):
            await world.send(sent)
        broker.release()
        await world.until_all(7)
        assert broker.sent[-1] == [b"3", b"4"]


@on_both_backends(open_world_of_one)
async def test_cancelled_waiting_send_is_withdrawn(world: World, broker: Broker) -> None:
    broker.hold()
    scopes = [anyio.CancelScope() for _ in range(5)]
    await world.send(b"first")
    for number, scope in enumerate(scopes):
        await world.send(b"%d" % number, scope=scope)
    for number in (0, 3):
        scopes[number].cancel()
    await settled()
    broker.release()
    await world.until_all(4)
    assert broker.sent == [[b"first"], [b"1", b"2", b"4"]]
    assert [world.result(each).offset_message_id for each in (b"1", b"2", b"4")] == [
        "place 2",
        "place 3",
        "place 4",
    ]
    base = world.result(b"1").queue_offset
    assert [world.result(each).queue_offset - base for each in (b"1", b"2", b"4")] == [0, 1, 2]

    # With one message left it is not sent as a batch; with none, nothing is sent.
    broker.hold()
    await world.send(b"second")
    scopes = [anyio.CancelScope(), anyio.CancelScope()]
    await world.send(b"withdrawn", scope=scopes[0])
    await world.send(b"left", scope=scopes[1])
    scopes[0].cancel()
    broker.release()
    await world.until_all(6)
    assert (broker.sent[-1], broker.commands[-1].code) == ([b"left"], SINGLE)
    broker.hold()
    await world.send(b"third")
    scope = anyio.CancelScope()
    await world.send(b"withdrawn", scope=scope)
    scope.cancel()
    broker.release()
    await world.until_all(7)
    await world.send(b"fourth")
    assert broker.sent[-2:] == [[b"third"], [b"fourth"]]


@on_both_backends(open_world_of_one)
async def test_cancelled_send_in_flight_does_not_affect_its_batch(world: World, broker: Broker) -> None:
    scopes = [anyio.CancelScope() for _ in range(4)]
    broker.hold()
    await world.send(b"first", scope=scopes[3])
    for number in range(3):
        await world.send(b"%d" % number, scope=scopes[number])
    await world.came(1)
    # The lone request in flight: the others continue without its answer.
    scopes[3].cancel()
    await world.came(2)
    assert broker.sent == [[b"first"], [b"0", b"1", b"2"]]
    scopes[0].cancel()
    await settled()
    broker.release()
    await world.until_all(2)
    assert world.result(b"1").offset_message_id == "place 3"
    assert world.result(b"2").offset_message_id == "place 4"
    assert set(world.outcomes) == {b"1", b"2"}


@on_both_backends(open_world_of_one, ClientOptions(batching=True, compress_from_bytes=10_000_000))
async def test_batch_size_is_limited(world: World, broker: Broker) -> None:
    broker.hold()
    await world.send(b"first")
    async with anyio.create_task_group() as tasks:
        for number in range(2 * BATCH_COUNT_MAX + 10):
            tasks.start_soon(world.send, b"%d" % number)
    broker.release()
    await world.until_all(2 * BATCH_COUNT_MAX + 11)
    assert [len(request) for request in broker.sent[1:]] == [BATCH_COUNT_MAX, BATCH_COUNT_MAX, 10]

    part = BATCH_BYTES_MAX // 3
    broker.hold()
    await world.send(b"second")
    for number in range(4):
        await world.send(b"%d" % number + b"-" * part)
    await world.send(b"!" * (2 * BATCH_BYTES_MAX))
    broker.release()
    await world.until_all(2 * BATCH_COUNT_MAX + 17)
    # Two of a third each, with their properties, leave no room for a third one.
    assert [len(request) for request in broker.sent[-4:]] == [1, 2, 2, 1]


@on_both_backends(open_world_of_one, delay_max_s=0.05)
async def test_batch_is_sent_after_the_maximum_delay(world: World, broker: Broker) -> None:
    broker.hold()
    await world.send(b"first", QUEUE)
    await world.came(1)
    await world.send(b"a", QUEUE)
    await world.send(b"b", QUEUE)
    await world.came(2)
    await world.send(b"c", QUEUE)
    while len(sent := [each for request in broker.sent for each in request]) < 4:
        await settled()
    assert sent == [b"first", b"a", b"b", b"c"]
    assert not world.outcomes
    broker.release()
    await world.until_all(4)
    assert [world.result(each).queue_offset for each in (b"first", b"a", b"b", b"c")] == [0, 1, 2, 3]


@on_both_backends(open_world_of_one)
async def test_messages_without_a_timeout_wait_for_a_response(world: World, broker: Broker) -> None:
    broker.hold()
    for body in (b"first", b"a", b"b"):
        await world.send(body, QUEUE, timeout_s=math.inf)
    await world.came(1)
    await settled()
    broker.release()
    await world.until_all(3)
    assert broker.sent == [[b"first"], [b"a", b"b"]]


@on_both_backends()
async def test_concurrency_returns_to_one_once_the_broker_is_fast() -> None:
    in_flight: list[int] = []
    current = 0
    broker = Broker()

    async def answer(command: RemotingCommand) -> RemotingCommand:
        nonlocal current
        current += 1
        in_flight.append(current)
        answer = broker(command)
        found = answer if isinstance(answer, RemotingCommand) else await answer
        await settled()
        current -= 1
        return found

    async with open_world([answer], delay_max_s=0.05) as world:

        async def send(task: int) -> None:
            for number in range(30):
                await world.producer.send(Message("T", b"%d %d" % (task, number)), queue=QUEUE)

        broker.hold()
        async with anyio.create_task_group() as tasks:
            for task in range(8):
                tasks.start_soon(send, task)
                await world.came(min(task + 1, 4))  # each after the maximum delay, until four are in flight
            batching._BATCH_DELAY_MAX_S = 60
            broker.release()
        assert max(in_flight) >= 4
        assert in_flight[-1] == 1
        assert in_flight[20:] == [1] * len(in_flight[20:])


@on_both_backends()
async def test_each_broker_has_a_request_in_flight() -> None:
    brokers = [Broker(), Broker()]
    async with open_world(list(brokers)) as world:
        for broker in brokers:
            broker.hold()
        await world.producer.queues("T")
        for number in range(6):
            await world.send(b"%d" % number)
        while sum(map(len, (broker.sent for broker in brokers))) < 2:
            await settled()
        sent = [request for broker in brokers for request in broker.sent]
        assert sorted(sent) == [[b"0"], [b"1"]]
        for broker in brokers:
            broker.release()
        await world.until_all(6)
        sent = [request for broker in brokers for request in broker.sent]
        assert sorted(sent) == [[b"0"], [b"1"], [b"2", b"3", b"4", b"5"]]


@on_both_backends()
async def test_closing_fails_waiting_sends_and_batches_in_flight() -> None:
    broker = Broker()
    async with open_world([broker], outcome_count=7) as world:
        broker.hold()
        await world.send(b"first")
        await world.send(b"a")
        await world.send(b"b")
        await world.came(1)
        broker.release()
        broker.hold()
        await world.came(2)  # the batch is in flight
        await world.send(b"waits")
        await world.send(b"first of queue 1", QUEUE)
        broker.hold()
        await world.send(b"waits for queue 1", QUEUE)
        await world.send(b"waits for queue 1, too", QUEUE)
    assert isinstance(world.outcomes.pop(b"first"), SendResult)
    assert str(world.outcomes[b"waits"]) == "T: the producer was closed"
    may_be_stored = set()
    for body, outcome in world.outcomes.items():
        assert isinstance(outcome, ConnectionFailed)
        if outcome.was_sent:
            may_be_stored.add(body)
    assert may_be_stored == {b"a", b"b", b"first of queue 1"}


@on_both_backends()
async def test_closing_fails_sends_in_flight_at_several_brokers() -> None:
    """They fail after the waiting batch of their lane has."""
    brokers = [Broker(), Broker()]
    async with open_world(list(brokers), outcome_count=3) as world:
        for broker in brokers:
            broker.hold()
        await world.producer.queues("T")
        for body in (b"1", b"2", b"waits"):
            await world.send(body)
        while sum(map(len, (broker.sent for broker in brokers))) < 2:
            await settled()
    failed = [outcome for outcome in world.outcomes.values() if isinstance(outcome, ConnectionFailed)]
    assert [failure.was_sent for failure in failed].count(True) == 2
    assert len(failed) == 3


@on_both_backends(open_world_of_one, ClientOptions())
async def test_without_batching_each_message_is_a_request(world: World, broker: Broker) -> None:
    broker.hold()
    for number in range(5):
        await world.send(b"%d" % number)
    await world.came(5)
    broker.release()
    await world.until_all(5)
    assert broker.sent == [[b"%d" % number] for number in range(5)]


@on_both_backends()
async def test_batch_stored_as_one_record() -> None:
    """RocketMQ 5's queues of type BatchCQ: one offset message id, consecutive queue offsets."""

    def answer(command: RemotingCommand) -> RemotingCommand:
        fields = {"msgId": "place", "queueId": command.ext_fields["e"], "queueOffset": "7"}
        return command.reply(0, None, fields)

    async with open_world([answer]) as world:
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(world.send, b"%d" % number)
        await world.until_all(4)
        results = [world.result(b"%d" % number) for number in range(4)]
        assert {result.offset_message_id for result in results} == {"place"}
        assert sorted(result.queue_offset for result in results) == [7, 7, 8, 9]


@on_both_backends()
async def test_full_batches_are_sent_concurrently_up_to_a_limit() -> None:
    broker = Broker()
    count = 6 * BATCH_COUNT_MAX + 5
    async with open_world([broker]) as world:
        broker.hold()
        await world.send(b"first")
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(world.send, b"%d" % number)
        await world.came(4)
        assert [len(request) for request in broker.sent] == [1, *[BATCH_COUNT_MAX] * 3]
        broker.release()
        await world.until_all(count + 1)
        assert [len(request) for request in broker.sent] == [1, *[BATCH_COUNT_MAX] * 6, 5]
        sent = [each for request in broker.sent for each in request]
        assert sorted(sent) == sorted({b"first", *(b"%d" % number for number in range(count))})


@on_both_backends(open_world_of_one)
async def test_full_batches_to_a_chosen_queue_are_sent_one_by_one(world: World, broker: Broker) -> None:
    broker.hold()
    await world.send(b"first", QUEUE)
    async with anyio.create_task_group() as tasks:
        for number in range(2 * BATCH_COUNT_MAX):
            tasks.start_soon(world.send, b"%d" % number, QUEUE)
    await settled()
    assert broker.sent == [[b"first"]]
    broker.release()
    await world.until_all(2 * BATCH_COUNT_MAX + 1)
    assert [len(request) for request in broker.sent] == [1, BATCH_COUNT_MAX, BATCH_COUNT_MAX]


@on_both_backends()
async def test_results_of_simultaneous_batches_are_delivered_in_turn() -> None:
    broker = Broker()
    held: list[RemotingCommand] = []
    events: list[str] = []

    def answer(command: RemotingCommand) -> RemotingCommand | bytes | None:
        if len(broker.commands) >= 4:
            return broker.answer(command)
        broker.commands.append(command)
        held.append(command)
        return b"".join(encode_command(broker.answer(each)) for each in held) if len(held) == 4 else None

    async def connect(host: str, port: int) -> SocketStream:
        stream = await anyio.connect_tcp(host, port)
        send = stream.send

        async def watched(item: bytes) -> None:
            events.append("left")
            await send(item)

        stream.send = watched  # type: ignore[method-assign]
        return stream

    async with open_world([answer], ClientOptions(batching=True, connect=connect)) as world:

        async def send_twice(number: int) -> None:
            await world.producer.send(Message("T", b"%d" % number))
            events.append("told")
            await world.producer.send(Message("T", b"again %d" % number))

        async with anyio.create_task_group() as tasks:
            for number in range(1 + 3 * BATCH_COUNT_MAX):
                tasks.start_soon(send_twice, number)
        assert [len(bodies(command)) for command in held] == [1, *[BATCH_COUNT_MAX] * 3]
        told = [place for place, event in enumerate(events) if event == "told"]
        assert len(told) == 1 + 3 * BATCH_COUNT_MAX
        assert "left" in events[told[0] : told[-1]]
