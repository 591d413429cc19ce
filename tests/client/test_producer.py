"""The producer with scripted servers: routes, round robin, retries, and handling of each answer."""

import math
import re
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from ha.client import (
    Client,
    ClientOptions,
    LocalProtocolError,
    Message,
    MessageQueue,
    Producer,
    SendResult,
    SendStatus,
)
from ha.errors import BrokerError, ConnectionFailed, NameServersUnreachable, NoMaster, RequestTimedOut, RouteNotFound
from ha.protocol.batch import decode_batch
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.properties import decode_properties
from ha.protocol.remoting import RemotingCommand
from tests.client.backends import on_both_backends
from tests.client.fake_broker import FakeServer, Handler, name_server, route_body, serving, serving_all, stored


class Cluster:
    """A name server and masters named a, b, …; `routes` is what the name server knows."""

    def __init__(self, name_server: FakeServer, brokers: list[FakeServer], routes: dict[str, bytes]) -> None:
        self.name_server = name_server
        self.brokers = brokers
        self.routes = routes

    def sends(self) -> list[RemotingCommand]:
        return [command for broker in self.brokers for command in broker.commands]


@asynccontextmanager
async def open_producer(
    handlers: list[Handler], options: ClientOptions | None = None, topic: str = "T"
) -> AsyncIterator[tuple[Producer, Cluster]]:
    """A producer whose name server routes `topic` to one broker per handler."""
    async with serving_all(handlers) as brokers:
        routes = {topic: route_body({chr(97 + i): {0: broker.address} for i, broker in enumerate(brokers)})}
        async with (
            serving(name_server(routes)) as names,
            Producer(names.address, group="g", options=options) as producer,
        ):
            yield producer, Cluster(names, brokers, routes)


@on_both_backends(open_producer, [lambda c: stored(c, queue_offset=41)])
async def test_fields_of_a_send_and_its_result(producer: Producer, cluster: Cluster) -> None:
    message = Message("T", b"hello", tags="TagA", keys=("k0", "k1"), properties={"own": "é"}, flag=3)
    queue = MessageQueue("T", "a", 2)
    result = await producer.send(message, queue=queue)
    (command,) = cluster.sends()
    assert command.code == RequestCode.SEND_MESSAGE_V2
    assert command.body == b"hello"
    fields = command.ext_fields
    assert {key: fields[key] for key in "abcdefhjkmn"} == {
        "a": "g",
        "b": "T",
        "c": "TBW102",
        "d": "4",
        "e": "2",
        "f": "0",
        "h": "3",
        "j": "0",
        "k": "false",
        "m": "false",
        "n": "a",
    }
    assert int(fields["g"]) > 1_700_000_000_000
    properties = decode_properties(fields["i"].encode())
    assert properties.pop("UNIQ_KEY") == result.message_id
    assert properties == {"TAGS": "TagA", "KEYS": "k0 k1", "own": "é"}
    assert (result.status, result.queue, result.queue_offset) == (SendStatus.SEND_OK, queue, 41)
    assert result.offset_message_id == "7F00000100002A9F0000000000000000"
    assert result.remark == ""


@on_both_backends()
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, SendStatus.SEND_OK),
        (10, SendStatus.FLUSH_DISK_TIMEOUT),
        (11, SendStatus.SLAVE_NOT_AVAILABLE),
        (12, SendStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
async def test_stored_statuses_are_results_without_retry(code: int, status: SendStatus) -> None:
    async with open_producer([lambda c: stored(c, code=code, remark="because")]) as (producer, cluster):
        result = await producer.send(Message("T", b"x"))
        assert (result.status, result.remark) == (status, "because")
        assert len(cluster.sends()) == 1


@on_both_backends(open_producer, [stored, stored])
async def test_queues_are_chosen_round_robin(producer: Producer, cluster: Cluster) -> None:
    assert len(await producer.queues("T")) == 8
    results = [await producer.send(Message("T", b"x")) for _ in range(16)]
    assert set(Counter(result.queue for result in results).values()) == {2}


@on_both_backends(open_producer, [stored])
async def test_concurrent_first_sends_share_one_route_lookup(producer: Producer, cluster: Cluster) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(producer.send, Message("T", b"x"))
    assert len(cluster.sends()) == 100
    assert len(cluster.name_server.commands) == 1
    assert cluster.brokers[0].connection_count == 1


@on_both_backends()
@pytest.mark.parametrize("code", [1, 2, 14, 16, 17, 204, 205, 1500])
async def test_broker_side_rejection_is_retried_on_another_broker(code: int) -> None:
    async with open_producer([lambda c: c.reply(code, "no"), stored]) as (producer, cluster):
        results = [await producer.send(Message("T", b"x")) for _ in range(8)]
        assert {result.queue.broker_name for result in results} == {"b"}
        assert len(cluster.brokers[0].commands) >= 1
        assert len(cluster.brokers[1].commands) == 8


@on_both_backends(open_producer, [lambda c: c.reply(ResponseCode.MESSAGE_ILLEGAL, "too long")])
async def test_rejection_of_the_message_is_final(producer: Producer, cluster: Cluster) -> None:
    with pytest.raises(BrokerError) as caught:
        await producer.send(Message("T", b"x"))
    assert (caught.value.code, caught.value.remark) == (13, "too long")
    assert caught.value.address == cluster.brokers[0].address
    assert len(cluster.sends()) == 1


@on_both_backends(open_producer, [lambda c: c.reply(2, "busy")])
async def test_retries_are_limited(producer: Producer, cluster: Cluster) -> None:
    with pytest.raises(BrokerError, match="busy"):
        await producer.send(Message("T", b"x"))
    assert len(cluster.sends()) == 3


@on_both_backends(open_producer, [stored, stored])
async def test_send_survives_a_master_change(producer: Producer, cluster: Cluster) -> None:
    """14: the broker can't store, and the next master is not known yet."""
    old, new = cluster.brokers
    cluster.routes["T"] = route_body({"a": {0: old.address}})

    def deposed(command: RemotingCommand) -> RemotingCommand:
        if len(old.commands) == 4:
            cluster.routes["T"] = route_body({"a": {0: new.address, 1: old.address}})
        return command.reply(ResponseCode.SERVICE_NOT_AVAILABLE, "this is a SLAVE")

    old.handler = deposed
    result = await producer.send(Message("T", b"x"))
    assert (result.status, result.queue.broker_name) == (SendStatus.SEND_OK, "a")
    assert (len(old.commands), len(new.commands)) == (4, 1)


@on_both_backends(open_producer, [stored])
async def test_send_waits_for_a_new_master(producer: Producer, cluster: Cluster) -> None:
    """The name servers have noticed that the master is gone, and there are slaves."""
    new = cluster.brokers[0]
    cluster.routes["T"] = route_body({"a": {1: new.address}})
    async with anyio.create_task_group() as tasks:
        results = []

        async def send() -> None:
            results.append(await producer.send(Message("T", b"x")))

        tasks.start_soon(send)
        await cluster.name_server.received(4)
        assert results == []
        cluster.routes["T"] = route_body({"a": {0: new.address}})
    assert [result.status for result in results] == [SendStatus.SEND_OK]


@on_both_backends(open_producer, [lambda c: c.reply(ResponseCode.SERVICE_NOT_AVAILABLE, "no master")])
async def test_waiting_for_a_master_is_limited(producer: Producer, cluster: Cluster) -> None:
    with pytest.raises(BrokerError, match="14"):
        await producer.send(Message("T", b"x"), timeout_s=1.0)
    assert len(cluster.sends()) >= 3
    queue = MessageQueue("T", "a", 2)
    before = len(cluster.sends())
    with pytest.raises(BrokerError, match="14"):  # later messages might overtake it
        await producer.send(Message("T", b"x"), queue=queue)
    assert len(cluster.sends()) == before + 1


@on_both_backends(open_producer, [stored])
async def test_send_reconnects_after_a_lost_connection(producer: Producer, cluster: Cluster) -> None:
    (broker,) = cluster.brokers
    await producer.send(Message("T", b"x"))
    broken = False

    def breaking_once(command: RemotingCommand) -> RemotingCommand | bytes:
        nonlocal broken
        if not broken:
            broken = True
            return b"\xff" * 8
        return stored(command)

    broker.handler = breaking_once
    assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
    assert broker.connection_count == 2


@on_both_backends(open_producer, [stored])
async def test_errors_of_later_attempts_say_that_the_message_may_be_stored(
    producer: Producer, cluster: Cluster
) -> None:
    """The connection is lost after the request was sent, and the next attempt finds no master."""
    (broker,) = cluster.brokers

    def vanish(command: RemotingCommand) -> bytes:
        cluster.routes["T"] = route_body({"a": {1: broker.address}})
        return b"\xff" * 8

    broker.handler = vanish
    messages = [Message("T", b"x"), Message("T", b"y")]
    with pytest.raises(NoMaster) as single:
        await producer.send(messages[0], timeout_s=0.5)
    cluster.routes["T"] = route_body({"a": {0: broker.address}})
    with pytest.raises(NoMaster) as batch:
        await producer.send_batch(messages, timeout_s=0.5)
    cluster.routes["T"] = route_body({"a": {0: broker.address}})
    many = await producer.send_many(messages, timeout_s=0.5)
    assert len(broker.commands) == 3
    for error in (single.value, batch.value, *many):
        assert isinstance(error, NoMaster)
        assert error.was_sent
    with pytest.raises(NoMaster) as later:
        await producer.send(messages[0], timeout_s=0.5)
    assert not later.value.was_sent


@on_both_backends(open_producer, [stored])
@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_ERROR, ResponseCode.MESSAGE_ILLEGAL])
async def test_rejection_of_a_later_attempt_says_that_the_messages_may_be_stored(
    producer: Producer, cluster: Cluster, *, code: int
) -> None:
    """They are not sent once more, each on its own, either."""
    (broker,) = cluster.brokers

    def lose_then_reject(command: RemotingCommand) -> RemotingCommand | bytes:
        return command.reply(code, "no") if len(broker.commands) > 1 else b"\xff" * 8

    broker.handler = lose_then_reject
    outcomes = await producer.send_many([Message("T", b"x"), Message("T", b"y")])
    for error in outcomes:
        assert isinstance(error, BrokerError)
        assert (error.code, error.was_sent) == (code, True)
    assert {command.code for command in broker.commands} == {RequestCode.SEND_BATCH_MESSAGE}


@on_both_backends(open_producer, [lambda c: None])
async def test_missing_response_times_out_without_retry(producer: Producer, cluster: Cluster) -> None:
    with pytest.raises(RequestTimedOut):
        await producer.send(Message("T", b"x"), timeout_s=0.2)
    assert len(cluster.sends()) == 1


@on_both_backends(open_producer, [stored], topic="TBW102")
async def test_new_topic_is_sent_to_brokers_that_create_topics(producer: Producer, cluster: Cluster) -> None:
    cluster.routes["TBW102"] = route_body({"a": {0: cluster.brokers[0].address}}, queue_nums=8, perm=7)
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(producer.send, Message("Fresh", b"x"))
    assert Counter(command.ext_fields["e"] for command in cluster.sends()) == {str(i): 5 for i in range(4)}
    assert {command.ext_fields["b"] for command in cluster.sends()} == {"Fresh"}
    assert Counter(c.ext_fields["topic"] for c in cluster.name_server.commands) == {"Fresh": 1, "TBW102": 1}


@on_both_backends(open_producer, [stored, stored], topic="TBW102")
async def test_new_topic_is_sent_to_the_new_master_of_its_creating_broker(producer: Producer, cluster: Cluster) -> None:
    """The master changes after the route was looked up, and before the first message creates the topic."""
    old, new = cluster.brokers
    cluster.routes["TBW102"] = route_body({"a": {0: old.address}}, perm=7)
    assert len(await producer.queues("Fresh")) == 4

    def deposed(command: RemotingCommand) -> RemotingCommand:
        cluster.routes["TBW102"] = route_body({"a": {0: new.address}}, perm=7)
        return command.reply(ResponseCode.SERVICE_NOT_AVAILABLE, "this is a SLAVE")

    old.handler = deposed
    assert (await producer.send(Message("Fresh", b"x"), timeout_s=5)).status is SendStatus.SEND_OK
    assert len(new.commands) == 1


@on_both_backends(open_producer, [stored], topic="TBW102")
async def test_new_topic_is_writable_once_its_creating_broker_is(producer: Producer, cluster: Cluster) -> None:
    """A slave that registers before its master makes the template topic read-only."""
    brokers = {"a": {0: cluster.brokers[0].address}}
    cluster.routes["TBW102"] = route_body(brokers, perm=5)
    with pytest.raises(ConnectionFailed, match=r"^topic Fresh: no master that may be written to is registered$"):
        await producer.send(Message("Fresh", b"x"))
    cluster.routes["TBW102"] = route_body(brokers, perm=7)
    assert (await producer.send(Message("Fresh", b"x"))).status is SendStatus.SEND_OK


@on_both_backends(open_producer, [stored], topic="TBW102")
async def test_topic_that_was_created_meanwhile_keeps_its_route(producer: Producer, cluster: Cluster) -> None:
    """The template's route arrives last."""
    asked, answered = anyio.Event(), anyio.Event()
    address = cluster.brokers[0].address
    answer = cluster.name_server.handler

    async def template(command: RemotingCommand) -> RemotingCommand:
        asked.set()
        await answered.wait()
        return command.reply(0, body=route_body({"a": {0: address}}, perm=7))

    cluster.name_server.handler = lambda command: (
        template(command) if command.ext_fields["topic"] == "TBW102" else answer(command)
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(producer.queues, "Fresh")
        await asked.wait()
        cluster.routes["Fresh"] = route_body({"a": {0: address}}, queue_nums=8)
        assert len(await producer.queues("Fresh")) == 8
        answered.set()
    assert len(await producer.queues("Fresh")) == 8


@on_both_backends(open_producer, [stored])
async def test_unknown_topic_without_auto_creation(producer: Producer, cluster: Cluster) -> None:
    with pytest.raises(RouteNotFound) as caught:
        await producer.send(Message("Other", b"x"))
    assert (caught.value.topic, caught.value.code) == ("Other", 17)


@on_both_backends(open_producer, [stored], ClientOptions(route_refresh_interval_s=0.05))
async def test_routes_are_refreshed_and_outlive_the_name_server(producer: Producer, cluster: Cluster) -> None:
    assert len(await producer.queues("T")) == 4
    cluster.routes["T"] = route_body({"a": {0: cluster.brokers[0].address}}, queue_nums=6)
    await cluster.name_server.received(len(cluster.name_server.commands) + 2)
    assert len(await producer.queues("T")) == 6
    cluster.name_server.handler = lambda command: b"\xff" * 8
    await cluster.name_server.received(len(cluster.name_server.commands) + 2)
    assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
    assert len(await producer.queues("T")) == 6


@on_both_backends(open_producer, [stored])
async def test_route_outlives_a_name_server_that_is_not_ready(producer: Producer, cluster: Cluster) -> None:
    await producer.send(Message("T", b"x"))
    cluster.name_server.handler = lambda command: command.reply(ResponseCode.SYSTEM_BUSY, "start flow control")
    answers = iter([b"\xff" * 8])  # breaks the protocol, so that the client hangs up and looks the route up again
    cluster.brokers[0].handler = lambda command: next(answers, None) or stored(command)
    assert (await producer.send(Message("T", b"y"))).status is SendStatus.SEND_OK
    with pytest.raises(BrokerError, match="2: start flow control"):
        await producer.send(Message("Other", b"x"))


@on_both_backends(open_producer, [stored], ClientOptions(route_refresh_interval_s=0.05))
async def test_route_outlives_an_empty_name_server_but_not_a_deleted_topic(
    producer: Producer, cluster: Cluster, *, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def refreshed(cluster: Cluster) -> None:
        await cluster.name_server.received(len(cluster.name_server.commands) + 3)

    async def forgotten(producer: Producer) -> None:
        while True:
            await producer.queues("T")
            await anyio.sleep(0.01)

    cluster.routes["Deleted"] = cluster.routes["T"]
    for topic in ("T", "Deleted"):
        await producer.send(Message(topic, b"x"))
    cluster.routes.clear()
    await refreshed(cluster)
    assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
    await cluster.brokers[0].disconnect()
    await refreshed(cluster)
    assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
    cluster.brokers[0].handler = lambda command: command.reply(ResponseCode.TOPIC_NOT_EXIST, "no topic")
    with pytest.raises(RouteNotFound):
        await producer.send(Message("Deleted", b"x"))
    cluster.brokers[0].handler = stored
    monkeypatch.setattr("ha.client.routes._UNKNOWN_ROUTE_KEPT_S", 0.1)
    with pytest.raises(RouteNotFound):
        await forgotten(producer)


@on_both_backends(open_producer, [stored])
async def test_masterless_set_and_read_only_topic(producer: Producer, cluster: Cluster) -> None:
    address = cluster.brokers[0].address
    for route in (route_body({"a": {1: address}}), route_body({"a": {0: address}}, perm=4)):
        cluster.routes["U"] = route
        with pytest.raises(ConnectionFailed, match="no master"):
            await producer.send(Message("U", b"x"))
    cluster.routes["U"] = route_body({"a": {0: address}})
    assert (await producer.send(Message("U", b"x"))).status is SendStatus.SEND_OK


@on_both_backends()
async def test_second_name_server_is_used_if_the_first_is_down() -> None:
    routes: dict[str, bytes] = {}
    async with serving(stored) as broker, serving(name_server(routes)) as names:
        routes["T"] = route_body({"a": {0: broker.address}})
        async with serving(stored) as gone:
            pass
        async with Producer([gone.address, names.address]) as producer:
            assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
        async with Producer(f"{gone.address};{gone.address}") as producer:
            with pytest.raises(NameServersUnreachable, match="refused"):
                await producer.send(Message("T", b"x"), timeout_s=2)


@on_both_backends()
async def test_timeout_during_a_lookup_says_why_the_last_one_failed() -> None:
    async with serving(stored) as gone:
        pass
    async with (
        serving(lambda command: None) as frozen,
        Producer([frozen.address, gone.address], options=ClientOptions(request_timeout_s=0.2)) as producer,
    ):
        with pytest.raises(NameServersUnreachable, match="refused"):
            await producer.queues("T")
        with pytest.raises(NameServersUnreachable, match=r"the last lookup failed: .*refused"):
            await producer.send(Message("T", b"x"), timeout_s=0.05)


@on_both_backends()
async def test_every_name_server_is_asked_although_another_lookup_ends_meanwhile() -> None:
    body = route_body({"a": {0: "127.0.0.1:1"}})
    async with serving(lambda command: None) as frozen:

        async def answer(command: RemotingCommand) -> RemotingCommand:
            await frozen.received(2)  # the first lookup, which was tried here in vain, and the second one
            return command.reply(ResponseCode.SUCCESS, body=body)

        options = ClientOptions(request_timeout_s=0.2)
        async with (
            serving(answer) as names,
            Producer([frozen.address, names.address], options=options) as producer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(producer.queues, "T")
            await names.received(1)
            assert len(await producer.queues("U")) == 4


@on_both_backends()
async def test_name_server_that_answered_last_is_asked_first() -> None:
    async with serving(lambda command: b"\xff" * 8) as broken, serving(name_server({})) as names:
        async with Producer([broken.address, names.address]) as producer:
            for _ in range(2):
                with pytest.raises(RouteNotFound):
                    await producer.queues("T")
        assert len(broken.commands) == 1


@on_both_backends(open_producer, [stored])
async def test_a_batch_is_one_request(producer: Producer, cluster: Cluster) -> None:
    result = await producer.send_batch(
        [Message("T", b"hi", tags="TagA", flag=1), Message("T", b"yo", flag=2)], queue=MessageQueue("T", "a", 1)
    )
    (command,) = cluster.sends()
    assert command.code == RequestCode.SEND_BATCH_MESSAGE
    assert command.ext_fields["m"] == "true"
    parts = [(flag, bytes(body), decode_properties(raw)) for flag, body, raw in decode_batch(command.body)]
    ids = [properties.pop("UNIQ_KEY") for _, _, properties in parts]
    assert parts == [(1, b"hi", {"TAGS": "TagA"}), (2, b"yo", {})]
    assert result.message_id == ",".join(ids)
    assert len(set(ids)) == 2


@on_both_backends(open_producer, [stored])
async def test_priority_is_a_property(producer: Producer, cluster: Cluster) -> None:
    await producer.send(Message("T", b"x", priority=0))
    [command] = cluster.sends()
    assert decode_properties(command.ext_fields["i"].encode())["_SYS_MSG_PRIORITY_"] == "0"


@on_both_backends(open_producer, [stored])
async def test_invalid_messages_are_rejected_by_the_client(producer: Producer, cluster: Cluster) -> None:
    for bad in (b"", b"x" * (4 * 1024 * 1024 + 1)):
        with pytest.raises(ValueError, match="bytes"):
            await producer.send(Message("T", bad))
    for priority in (-1, 1 << 31):
        with pytest.raises(ValueError, match="accepted: 0 … 2147483647"):
            await producer.send(Message("T", b"x", priority=priority))
    for delay_s in (math.inf, -math.inf, math.nan, 1e306):
        with pytest.raises(ValueError, match=re.escape(f"delay_s={delay_s}; accepted: a finite number of ms")):
            await producer.send(Message("T", b"x", delay_s=delay_s))
    for batch in (
        [],
        [Message("T", b"x"), Message("U", b"x")],
        [Message("T", b"x", delay_level=1)],
        [Message("T", b"x", priority=1)],
        [Message("T", b"x", properties={"DELAY": "3"})],
        [Message("T", b"x"), Message("T", b"x", wait_stored=False)],
    ):
        with pytest.raises(ValueError, match="batch"):
            await producer.send_batch(batch)
    assert cluster.sends() == []


@on_both_backends(open_producer, [stored])
async def test_bodies_are_any_bytes(producer: Producer, cluster: Cluster) -> None:
    """Also views of items longer than a byte, whose number is not the number of bytes."""
    text = b"sixteen bytes..."
    for body in (text, bytearray(text), memoryview(text), memoryview(array("I", text)), memoryview(text * 2)[::2]):
        message = Message("T", body)  # type: ignore[arg-type]
        await producer.send(message)
        await producer.send_batch([message])
        await producer.send_many([message, message])
        single, batch, many = (command.body for command in cluster.sends()[-3:])
        assert bytes(single) == bytes(body)
        assert [body for _, body, _ in decode_batch(batch) + decode_batch(many)] == [single] * 3


@on_both_backends(open_producer, [stored])
async def test_properties_that_are_not_text_are_rejected_by_the_client(producer: Producer, cluster: Cluster) -> None:
    for name, value in (("amount", 5), ("attempt", 0), ("items", ["a"]), ("raw", b"x"), (7, "x")):
        properties = {name: value}
        with pytest.raises(TypeError, match=re.escape(f"property {name!r} has the value {value!r}; ")):
            await producer.send(Message("T", b"x", properties=properties))  # type: ignore[arg-type]
    for tags in (("a", "b"), ["a"], 5):
        with pytest.raises(TypeError, match="property 'TAGS'"):
            await producer.send(Message("T", b"x", tags=tags))  # type: ignore[arg-type]
    assert cluster.sends() == []


@on_both_backends()
@pytest.mark.parametrize("batching", [False, True])
async def test_messages_that_no_request_can_carry_are_rejected_by_the_client(*, batching: bool) -> None:
    """They fail alone, also among messages that wait for the same response."""
    options = ClientOptions(batching=batching, message_size_max=1 << 25, compress_from_bytes=1 << 25)
    bad = [
        Message("T", bytes(1 << 24)),
        Message("T\ud800", b"x"),
        Message("T", b"x", tags="\ud800"),
        Message("T", b"x", properties={"a\x01": "b"}),
    ]
    results: list[SendResult] = []
    async with open_producer([stored], options) as (producer, _), anyio.create_task_group() as tasks:

        async def send() -> None:
            results.append(await producer.send(Message("T", b"good")))

        async def send_bad(message: Message) -> None:
            with pytest.raises(LocalProtocolError):
                await producer.send(message)

        for message in bad:
            tasks.start_soon(send)
            tasks.start_soon(send_bad, message)
    assert [result.status for result in results] == [SendStatus.SEND_OK] * 4


@on_both_backends(open_producer, [stored])
async def test_queue_of_another_topic_is_rejected_by_the_client(producer: Producer, cluster: Cluster) -> None:
    message, queue = Message("T", b"x"), MessageQueue("Other", "a", 0)
    sends: list[Callable[[], Awaitable[object]]] = [
        lambda: producer.send(message, queue=queue),
        lambda: producer.send_many([message], queue=queue),
        lambda: producer.send_batch([message], queue=queue),
        lambda: producer.send_oneway(message, queue=queue),
    ]
    for send in sends:
        with pytest.raises(ValueError, match="topic T can't be sent to a queue of topic Other"):
            await send()
    assert not cluster.sends()


@on_both_backends(open_producer, [lambda c: None if c.is_oneway else stored(c)])
async def test_oneway_sends_set_the_flag_and_do_not_wait(producer: Producer, cluster: Cluster) -> None:
    await producer.send_oneway(Message("T", b"first", wait_stored=False))
    await producer.send(Message("T", b"second"))
    first, second = cluster.sends()
    assert (first.is_oneway, first.body) == (True, b"first")
    assert decode_properties(first.ext_fields["i"].encode())["WAIT"] == "false"
    assert second.is_oneway is False


@on_both_backends(open_producer, [lambda c: None if c.is_oneway else stored(c)])
async def test_oneway_sends_follow_a_master_change(producer: Producer, cluster: Cluster) -> None:
    """The master is killed, and none is sent in the ordinary way that would look the route up again."""
    message = Message("T", b"x")
    async with serving(lambda command: None) as old:
        cluster.routes["T"] = route_body({"a": {0: old.address}})
        await producer.send_oneway(message)
        await old.received(1)
    cluster.routes["T"] = route_body({"a": {0: cluster.brokers[0].address}})

    async def send_on() -> None:
        while True:
            await producer.send_oneway(message)
            await anyio.sleep(0.01)

    with pytest.raises(ConnectionFailed, match="can't connect"):
        await send_on()
    await producer.send_oneway(message)
    await cluster.brokers[0].received(1)


@on_both_backends(open_producer, [lambda c: None])
async def test_oneway_sends_to_a_chosen_queue_follow_a_master_change(producer: Producer, cluster: Cluster) -> None:
    known = cluster.routes["T"]
    cluster.routes["T"] = route_body({"a": {1: cluster.brokers[0].address}})
    message, queue = Message("T", b"x"), MessageQueue("T", "a", 0)
    with pytest.raises(ConnectionFailed, match="no broker with ID 0"):
        await producer.send_oneway(message, queue=queue)
    cluster.routes["T"] = known
    await producer.send_oneway(message, queue=queue)
    await cluster.brokers[0].received(1)


@on_both_backends(open_producer, [stored])
async def test_error_raised_in_the_block_propagates_unwrapped(producer: Producer, cluster: Cluster) -> None:
    async def failing() -> None:
        async with Producer(cluster.name_server.address) as inner:
            await inner.send(Message("T", b"x"))
            raise LookupError

    with pytest.raises(LookupError):
        await failing()


@on_both_backends(open_producer, [lambda c: None])
async def test_outer_deadline_cancels_a_send_and_the_producer(producer: Producer, cluster: Cluster) -> None:
    with anyio.move_on_after(0.2) as scope:
        async with Producer(cluster.name_server.address) as inner:
            await inner.send(Message("T", b"x"))
    assert scope.cancelled_caught


@pytest.mark.parametrize("servers", ["", "nowhere", "host:", ":9876", "host:0", "host:70000", []])
def test_name_server_addresses_are_validated(servers: str | list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with pytest.raises(ValueError, match="host:port"):
        Producer(servers)


def test_name_servers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "a:1;b:2")
    assert Client().name_servers == ("a:1", "b:2")
