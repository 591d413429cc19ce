"""ReceiveMessage, AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue, with Apache's stubs."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
from google.protobuf.duration_pb2 import Duration
from rocketmq.grpc_protocol import definition_pb2 as definition
from rocketmq.grpc_protocol import service_pb2 as service
from rocketmq.grpc_protocol import service_pb2_grpc as stubs

from ha.protocol.compression import Compression, compressed, flags_of
from ha.proxy.messages import Code as RefusedCode
from ha.proxy.options import FrontOptions
from ha.proxy.refusal import CallRefused
from tests.proxy.site import Client, Site, message, open_site

Code = definition.Code
QUICK = FrontOptions(polling_ms_min=200, invisible_ms_min=10)


def receiving(
    topic: str, group: str = "g", *, tags: str = "*", count: int = 32, invisible_ms: int = 60_000, **more: Any
) -> service.ReceiveMessageRequest:
    """A receive that polls for 200 ms."""
    request = service.ReceiveMessageRequest(
        group=definition.Resource(name=group),
        filter_expression=definition.FilterExpression(type=definition.TAG, expression=tags),
        batch_size=count,
        **more,
    )
    request.message_queue.topic.name = topic
    request.message_queue.broker.name = "b0"
    request.long_polling_timeout.FromMilliseconds(200)
    if not request.auto_renew:
        request.invisible_duration.FromMilliseconds(invisible_ms)
    return request


async def receive(client: Client, request: service.ReceiveMessageRequest) -> tuple[int, list[definition.Message]]:
    """The code and the messages of an answer, whose order is checked."""
    parts = await client.receive("ReceiveMessage", request)
    kinds = [part.WhichOneof("content") for part in parts]
    assert kinds == ["status", *["message"] * (len(parts) - 2), "delivery_timestamp"]
    return parts[0].status.code, [part.message for part in parts[1:-1]]


async def begin(site: Site, client: Client, topic: str = "t", group: str = "g", **attributes: Any) -> None:
    """Makes the topic and the group, and the group's offsets."""
    await site.topic(topic, **attributes)
    await site.group(group)
    assert await receive(client, receiving(topic, group)) == (Code.MESSAGE_NOT_FOUND, [])


async def ack(client: Client, *messages: definition.Message, group: str = "g", topic: str = "t") -> Any:
    """Acknowledges messages in one call."""
    request = service.AckMessageRequest(group=definition.Resource(name=group), topic=definition.Resource(name=topic))
    for each in messages:
        system = each.system_properties
        request.entries.add(message_id=system.message_id, receipt_handle=system.receipt_handle)
    return await client.call("AckMessage", request)


async def change(client: Client, received: definition.Message, milliseconds: int) -> Any:
    """Changes the invisible time."""
    request = service.ChangeInvisibleDurationRequest(
        group=definition.Resource(name="g"),
        topic=definition.Resource(name="t"),
        receipt_handle=received.system_properties.receipt_handle,
        message_id=received.system_properties.message_id,
        invisible_duration=Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000),
    )
    return await client.call("ChangeInvisibleDuration", request)


async def again(client: Client, request: service.ReceiveMessageRequest, within_s: float = 15.0) -> Any:
    """Receives until a message comes; returns it and how long that took."""
    started = time.monotonic()
    while time.monotonic() - started < within_s:
        _, messages = await receive(client, request)
        if messages:
            return messages[0], time.monotonic() - started
    raise AssertionError("no message")


async def test_messages_as_clients_see_them(tmp_path: Path) -> None:
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await begin(site, client)
        sent = message("t", b"body", tag="T", keys=["k1", "k2"], trace_context="trace")
        [entry] = (await client.send(sent)).entries
        code, [received] = await receive(client, receiving("t"))
        assert code == Code.OK
        assert (received.topic.name, received.body, dict(received.user_properties)) == ("t", b"body", {"own": "ü"})
        system, given = received.system_properties, sent.system_properties
        assert (system.tag, list(system.keys), system.message_id) == ("T", ["k1", "k2"], given.message_id)
        assert (system.born_host, system.message_type, system.trace_context) == ("vm", definition.NORMAL, "trace")
        assert (system.queue_offset, system.delivery_attempt) == (entry.offset, 1)
        assert system.born_timestamp.ToMilliseconds() == given.born_timestamp.ToMilliseconds()
        assert (system.body_digest.type, system.body_encoding) == (definition.MD5, definition.IDENTITY)
        assert system.body_digest.checksum == hashlib.md5(b"body").hexdigest().upper()
        words = system.receipt_handle.split(" ")
        assert (len(words), words[2], words[5], words[6], words[7]) == (
            9,
            "60000",
            "b0",
            str(system.queue_id),
            str(system.queue_offset),
        )
        answer = await ack(client, received)
        assert (answer.status.code, answer.entries[0].status.code) == (Code.OK, Code.OK)
        assert (await ack(client, received)).status.code == Code.OK  # twice is no error
        assert await receive(client, receiving("t")) == (Code.MESSAGE_NOT_FOUND, [])


async def test_tags(tmp_path: Path) -> None:
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await begin(site, client)
        for tag in "ABCABC":
            await client.send(message("t", tag.encode(), tag=tag))
        found = []
        for _ in range(8):
            found += (await receive(client, receiving("t", tags="A || C")))[1]
        assert sorted(received.body for received in found) == [b"A", b"A", b"C", b"C"]


async def test_compressed_bodies_of_remoting_clients(tmp_path: Path) -> None:
    """gRPC clients know gzip only."""
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await begin(site, client)
        body, _ = compressed(b"x" * 1000, Compression.ZLIB)
        await site.node.send(body, b="t", f=flags_of(Compression.ZLIB))
        _, [received] = await receive(client, receiving("t"))
        assert (received.body, received.system_properties.body_encoding) == (b"x" * 1000, definition.IDENTITY)


async def test_redelivery(tmp_path: Path) -> None:
    """After its invisible time a message comes again, with the id and the topic that it had."""
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await begin(site, client)
        await client.send(message("t", message_id="01AA"))
        _, [first] = await receive(client, receiving("t", invisible_ms=500))
        second, after_s = await again(client, receiving("t"))
        assert 0.2 < after_s < 10
        system = second.system_properties
        assert (second.topic.name, system.message_id, system.delivery_attempt) == ("t", "01AA", 2)
        assert (await ack(client, first)).status.code == Code.INVALID_RECEIPT_HANDLE
        assert (await ack(client, first, second)).status.code == Code.MULTIPLE_RESULTS


async def test_changed_invisible_time(tmp_path: Path) -> None:
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await begin(site, client)
        await client.send(message("t"))
        _, [first] = await receive(client, receiving("t"))
        changed = await change(client, first, 300)
        assert changed.status.code == Code.OK
        assert changed.receipt_handle.split(" ")[2] == "300"
        second, _ = await again(client, receiving("t"))
        changed = await change(client, second, 60_000)
        second.system_properties.receipt_handle = changed.receipt_handle
        assert (await ack(client, second)).status.code == Code.OK
        refused = await change(client, second, 13 * 3_600_000)
        assert refused.status.code == Code.ILLEGAL_INVISIBLE_TIME
        assert refused.receipt_handle == second.system_properties.receipt_handle, "the Python client goes on with it"


async def test_dead_letters(tmp_path: Path) -> None:
    """By the client, and by the front for a message that was delivered too often."""
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await begin(site, client)
        await site.group("g", retry_max_times=0)
        await site.group("letters")
        await client.send(message("t", b"by the client"))
        _, [received] = await receive(client, receiving("t"))
        request = service.ForwardMessageToDeadLetterQueueRequest(
            group=definition.Resource(name="g"),
            topic=definition.Resource(name="t"),
            receipt_handle=received.system_properties.receipt_handle,
            message_id=received.system_properties.message_id,
        )
        assert (await client.call("ForwardMessageToDeadLetterQueue", request)).status.code == Code.OK
        await client.send(message("t", b"by the front"))
        assert len((await receive(client, receiving("t", invisible_ms=300)))[1]) == 1
        with trio.fail_after(20):
            while site.node.broker.topics.get("%DLQ%g") is None or len(await dead(site)) < 2:
                assert (await receive(client, receiving("t", invisible_ms=300)))[1] == []
        assert sorted(await dead(site)) == [b"by the client", b"by the front"]


async def test_message_that_can_not_become_a_dead_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were popped with it are delivered."""

    async def refused(*_: object) -> None:
        raise CallRefused(RefusedCode.INTERNAL_SERVER_ERROR, "look message by offset failed")

    monkeypatch.setattr("ha.proxy.acknowledging.Acknowledging.bury", refused)
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await begin(site, client, read=1, write=1)
        await site.group("g", retry_max_times=3)
        await site.node.send(b"tried too often", b="t", j=5)
        await client.send(message("t", b"good"))
        code, found = await receive(client, receiving("t"))
        assert (code, [each.body for each in found]) == (Code.OK, [b"good"])


async def dead(site: Site) -> list[bytes]:
    """The bodies of the dead letters."""
    answer = await site.node.pull(topic="%DLQ%g")
    return [record.body for record in site.node.records(answer)] if answer.body else []


async def test_ordered_groups(tmp_path: Path) -> None:
    """Nothing more comes from a queue until what was received of it is acknowledged."""
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await site.topic("t", "FIFO")
        await site.group("g", consume_message_orderly=True)
        await receive(client, receiving("t"))
        for number in range(4):
            await client.send(message("t", b"%d" % number, message_group="one"))
        _, first = await receive(client, receiving("t", count=2))
        assert [received.body for received in first] == [b"0", b"1"]
        assert await receive(client, receiving("t", count=2)) == (Code.MESSAGE_NOT_FOUND, [])
        assert (await ack(client, *first)).status.code == Code.OK
        _, rest = await receive(client, receiving("t", count=2))
        assert [received.body for received in rest] == [b"2", b"3"]


async def test_long_poll(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client, sender = Client(site.address), Client(site.address, "vm@2")
        await site.topic("t")
        await site.group("g")
        request = receiving("t")
        request.long_polling_timeout.FromSeconds(15)
        found: list[Any] = []

        async def poll() -> None:
            found.append(await receive(client, request))

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(poll)
                while not site.server.statistics().calls_in_flight:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                await sender.send(message("t"))
        assert found[0][0] == Code.OK


async def test_client_that_waits_no_longer_than_its_poll(tmp_path: Path) -> None:
    """It gets an empty answer in time, not an error."""
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t")
        await site.group("g")
        parts = await client.receive("ReceiveMessage", receiving("t"), timeout_s=1.5)
        assert parts[0].status.code == Code.MESSAGE_NOT_FOUND


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (receiving("nope"), Code.TOPIC_NOT_FOUND),
        (receiving("t", "a b"), Code.ILLEGAL_CONSUMER_GROUP),
        (receiving("t", tags="|| ||"), Code.ILLEGAL_FILTER_EXPRESSION),
        (receiving("t", invisible_ms=9_999), Code.ILLEGAL_INVISIBLE_TIME),
        (receiving("t", invisible_ms=13 * 3_600_000), Code.ILLEGAL_INVISIBLE_TIME),
    ],
    ids=["topic", "group", "tags", "short", "long"],
)
async def test_refused_receives(tmp_path: Path, request_: service.ReceiveMessageRequest, code: int) -> None:
    async with open_site(tmp_path) as site:
        await site.topic("t")
        assert await receive(Client(site.address), request_) == (code, [])


async def test_invalid_handles(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.topic("t")
        for handle, code in (
            ("", Code.INTERNAL_SERVER_ERROR),
            ("1 2 3", Code.INTERNAL_SERVER_ERROR),
            ("0 1000 1000 0 0 b0 0 0 0", Code.INVALID_RECEIPT_HANDLE),
            ("0 1000 1000 0 0 b0 0 0 \u00b2", Code.INVALID_RECEIPT_HANDLE),
            (f"0 {int(time.time() * 1000)} 60000 0 0 other 0 0 0", Code.INTERNAL_SERVER_ERROR),
        ):
            received = definition.Message(system_properties=definition.SystemProperties(receipt_handle=handle))
            assert (await ack(Client(site.address), received)).entries[0].status.code == code, handle


@pytest.mark.parametrize("front_ahead_ms", [-30_000, 30_000], ids=["behind", "ahead"])
async def test_front_whose_clock_differs_from_the_brokers(tmp_path: Path, front_ahead_ms: int) -> None:
    """Its clients receive and acknowledge. A handle expires by the broker's clock."""
    async with open_site(tmp_path, QUICK, front_ahead_ms=front_ahead_ms) as site:
        client = Client(site.address)
        await begin(site, client)
        await client.send(message("t", b"first"))
        _, [first] = await receive(client, receiving("t", invisible_ms=20_000))
        changed = await change(client, first, 20_000)
        assert changed.status.code == Code.OK
        first.system_properties.receipt_handle = changed.receipt_handle
        assert (await ack(client, first)).status.code == Code.OK
        await client.send(message("t", b"second"))
        _, [second] = await receive(client, receiving("t", invisible_ms=10))
        await trio.sleep(2)
        assert (await ack(client, second)).status.code == Code.INVALID_RECEIPT_HANDLE


async def test_receives_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await site.topic("t", read=1, write=1)
        await site.group("g")
        await receive(client, receiving("t"))
        await client.send(*(message("t") for _ in range(40)))
        _, found = await receive(client, receiving("t", count=1000))
        assert len(found) <= 32
        tags = " || ".join(map(str, range(1025)))
        assert await receive(client, receiving("t", tags=tags)) == (Code.ILLEGAL_FILTER_EXPRESSION, [])


async def test_acknowledgements_of_a_call_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.topic("t")
        client, none = Client(site.address), definition.Message()
        assert (await ack(client)).status.code == Code.BAD_REQUEST
        assert (await ack(client, *[none] * 1025)).status.code == Code.BAD_REQUEST
        assert len((await ack(client, *[none] * 1024)).entries) == 1024


async def test_handles_of_push_consumers_outlive_the_front(tmp_path: Path) -> None:
    """What a push consumer has received through one front it acknowledges through another."""
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await begin(site, client)
        await client.send(message("t"))
        _, [received] = await receive(client, receiving("t", auto_renew=True))
        assert received.system_properties.receipt_handle.split(" ")[2] == str(15 * 60_000)
        site.front._in_flight._clients.clear()
        assert (await ack(client, received)).status.code == Code.OK


async def test_messages_of_a_client_that_has_ended(tmp_path: Path) -> None:
    """They come to others at once, not after the consume timeout."""
    async with open_site(tmp_path, QUICK) as site:
        client, other = Client(site.address), Client(site.address, "vm@2")
        await begin(site, client)
        await client.send(message("t"))
        _, [_] = await receive(client, receiving("t", auto_renew=True))
        [connection] = [each for each in site.server.connections if "vm@1@0@a" in each.sessions]
        session: Any = connection.sessions["vm@1@0@a"]
        session.settings = definition.Settings(client_type=definition.PUSH_CONSUMER)
        ending = service.NotifyClientTerminationRequest(group=definition.Resource(name="g"))
        assert (await client.call("NotifyClientTermination", ending)).status.code == Code.OK
        received, _ = await again(other, receiving("t"))
        assert received.system_properties.delivery_attempt == 2


@pytest.mark.parametrize("auto_renew", [True, False], ids=["push consumer", "simple consumer"])
async def test_receive_that_is_cancelled_while_its_messages_are_sent(tmp_path: Path, auto_renew: bool) -> None:
    """They are delivered again soon, although the consumer that has not received them goes on."""
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        client.stub = stubs.MessagingServiceStub(grpc.insecure_channel(site.address, [("grpc.http2.bdp_probe", 0)]))
        await begin(site, client, read=1, write=1)
        for _ in range(4):  # more than the window of the stream
            assert (await client.send(message("t", bytes(60_000)))).status.code == Code.OK

        def cancelled() -> None:
            answer = client.stub.ReceiveMessage(receiving("t", auto_renew=auto_renew), metadata=client.metadata)
            assert next(answer).status.code == Code.OK
            time.sleep(0.5)
            answer.cancel()

        await trio.to_thread.run_sync(cancelled)
        received, _ = await again(client, receiving("t", count=1))
        assert received.system_properties.delivery_attempt == 2


@pytest.mark.parametrize("poll_count", [1, 20])
async def test_receives_that_are_cancelled_before_there_is_a_message(
    tmp_path: Path, poll_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker still takes the message for each of them, but that is no delivery."""
    monkeypatch.setattr("ha.proxy.in_flight.CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr("ha.proxy.in_flight.RELEASED_MS", 50)
    async with open_site(tmp_path, QUICK) as site:
        client = Client(site.address)
        await begin(site, client)
        request = receiving("t")
        request.long_polling_timeout.FromSeconds(15)
        polls = [client.stub.ReceiveMessage(request, metadata=client.metadata) for _ in range(poll_count)]
        holds = site.node.broker.pop.holds
        while len(holds) < poll_count:  # noqa: ASYNC110
            await trio.sleep(0.01)
        for poll in polls:
            poll.cancel()
        while site.server.statistics().calls_in_flight:  # noqa: ASYNC110
            await trio.sleep(0.01)
        await client.send(message("t"))
        while len(holds) or site.front._in_flight.count:  # noqa: ASYNC110
            await trio.sleep(0.01)
        received, _ = await again(client, receiving("t"))
        assert received.system_properties.delivery_attempt == 1
        assert site.node.broker.topics.get("%DLQ%g") is None
