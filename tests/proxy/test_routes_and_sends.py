"""QueryRoute, QueryAssignment, SendMessage and RecallMessage, with Apache's stubs. Codes: grpc.md of the protocol."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from rocketmq.grpc_protocol import definition_pb2 as definition
from rocketmq.grpc_protocol import service_pb2 as service

from ha.protocol.properties import decode_properties
from ha.proxy.names import group_name, topic_name
from ha.proxy.options import FrontOptions
from ha.proxy.refusal import CallRefused
from ha.proxy.sending import MESSAGE_COUNT_MAX, consistent_hash
from tests.proxy.site import Client, Site, message, open_site

Code = definition.Code


async def stored(site: Site, topic: str, queue_count: int = 4) -> list[Any]:
    """All messages of a topic."""
    found = []
    for queue_id in range(queue_count):
        answer = await site.node.pull(topic=topic, queueId=queue_id)
        found += site.node.records(answer) if answer.body else []
    return found


async def test_route(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("fifo", "FIFO", read=3, write=2)

        async def ask(topic: str) -> Any:
            request = service.QueryRouteRequest(topic=definition.Resource(name=topic), endpoints=client.endpoints)
            return await client.call("QueryRoute", request)

        route = await ask("fifo")
        assert route.status.code == Code.OK
        assert [queue.id for queue in route.message_queues] == [0, 1, 2]
        permissions = [definition.READ_WRITE, definition.READ_WRITE, definition.READ]
        assert [queue.permission for queue in route.message_queues] == permissions
        assert {tuple(queue.accept_message_types) for queue in route.message_queues} == {(definition.FIFO,)}
        assert {queue.broker.name for queue in route.message_queues} == {"b0"}
        assert all(queue.broker.endpoints == client.endpoints for queue in route.message_queues)
        for topic, code in (
            ("nope", Code.TOPIC_NOT_FOUND),
            ("", Code.ILLEGAL_TOPIC),
            ("a b", Code.ILLEGAL_TOPIC),
            ("x" * 128, Code.ILLEGAL_TOPIC),
            ("SCHEDULE_TOPIC_XXXX", Code.ILLEGAL_TOPIC),
            ("rmq_sys_wheel_timer", Code.ILLEGAL_TOPIC),
            ("%DLQ%group", Code.TOPIC_NOT_FOUND),
        ):
            assert (await ask(topic)).status.code == code, topic


@pytest.mark.parametrize(("prefix", "length_max"), [("", 127), ("%RETRY%", 255), ("%DLQ%", 255)])
def test_topic_names_are_limited(prefix: str, length_max: int) -> None:
    name = prefix.ljust(length_max, "x")
    assert topic_name(definition.Resource(name=name)) == name
    with pytest.raises(CallRefused, match=f"{length_max + 1} characters; at most {length_max}"):
        topic_name(definition.Resource(name=name + "x"))


async def test_assignment(tmp_path: Path) -> None:
    """Consumers of a group without order get one queue that stands for all."""
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t", read=3)
        await site.group("ordered", consume_message_orderly=True)
        for group, queues in (("plain", [-1]), ("ordered", [0, 1, 2])):
            request = service.QueryAssignmentRequest(
                topic=definition.Resource(name="t"), group=definition.Resource(name=group), endpoints=client.endpoints
            )
            answer = await client.call("QueryAssignment", request)
            assert [assignment.message_queue.id for assignment in answer.assignments] == queues


async def test_endpoints_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t")
        address = definition.Address(host="proxy.example", port=8081)
        for count, code in ((100, Code.OK), (1000, Code.ILLEGAL_ACCESS_POINT)):
            many = definition.Endpoints(scheme=definition.DOMAIN_NAME, addresses=[address] * count)
            topic, group = definition.Resource(name="t"), definition.Resource(name="g")
            route = await client.call("QueryRoute", service.QueryRouteRequest(topic=topic, endpoints=many))
            request = service.QueryAssignmentRequest(topic=topic, group=group, endpoints=many)
            assigned = await client.call("QueryAssignment", request)
            assert (route.status.code, assigned.status.code) == (code, code)


async def test_send(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t")
        sent = message("t", b"body", tag="T", keys=["k1", "k2"], trace_context="trace")
        answer = await client.send(sent)
        assert answer.status.code == Code.OK
        [entry] = answer.entries
        message_id = sent.system_properties.message_id
        assert (entry.status.code, entry.message_id, entry.transaction_id, entry.offset) == (
            Code.OK,
            message_id,
            message_id,
            0,
        )
        [record] = await stored(site, "t")
        properties = decode_properties(record.properties)
        born_ms = sent.system_properties.born_timestamp.ToMilliseconds()
        assert (record.body, record.born_timestamp_ms, record.sys_flag) == (b"body", born_ms, 0)
        assert (
            properties.items()
            >= {
                "UNIQ_KEY": message_id,
                "TAGS": "T",
                "KEYS": "k1 k2",
                "own": "ü",
                "PGROUP": "t",
                "__BORNHOST": "vm",
                "BORN_TIMESTAMP": str(born_ms),
                "TRACE_CONTEXT": "trace",
                "CLUSTER": "C",
            }.items()
        )


async def test_many_sends_at_once(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t")
        futures = [
            client.stub.SendMessage.future(
                service.SendMessageRequest(messages=[message("t", b"%d" % number)]),
                metadata=client.metadata,
                timeout=20,
            )
            for number in range(300)
        ]
        answers = await trio.to_thread.run_sync(lambda: [future.result() for future in futures])
        assert {answer.status.code for answer in answers} == {Code.OK}
        assert {record.body for record in await stored(site, "t")} <= {b"%d" % number for number in range(300)}


async def test_batch_and_mixed_calls(tmp_path: Path) -> None:
    """Each message of a call gets an entry with its own id."""
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t", "MIXED")
        batch = [message("t", b"%d" % number) for number in range(5)]
        answer = await client.send(*batch)
        assert [entry.message_id for entry in answer.entries] == [m.system_properties.message_id for m in batch]
        assert [entry.offset for entry in answer.entries] == [0, 1, 2, 3, 4]
        mixed = [message("t", b"plain"), message("t", b"grouped", message_group="g")]
        answer = await client.send(*mixed)
        assert answer.status.code == Code.OK
        assert [entry.message_id for entry in answer.entries] == [m.system_properties.message_id for m in mixed]
        records = await stored(site, "t")
        assert {decode_properties(record.properties)["UNIQ_KEY"] for record in records} == {
            m.system_properties.message_id for m in (*batch, *mixed)
        }
        assert (await client.send(message("t"), message("other"))).status.code == Code.MESSAGE_CORRUPTED
        assert (await client.send()).status.code == Code.MESSAGE_CORRUPTED


async def test_gzip_bodies_are_stored_plain(tmp_path: Path) -> None:
    """So consumers over remoting, which know zlib, can read them."""
    async with open_site(tmp_path, FrontOptions(message_size_max=1000)) as site:
        client = Client(site.address)
        await site.topic("t")
        answer = await client.send(message("t", gzip.compress(b"x" * 1000), body_encoding=2))
        assert answer.status.code == Code.OK
        assert [record.body for record in await stored(site, "t")] == [b"x" * 1000]
        for body, code in (
            (gzip.compress(b"x" * 1001), Code.MESSAGE_BODY_TOO_LARGE),
            (gzip.compress(b"x" * 10)[:-9], Code.MESSAGE_CORRUPTED),
            (gzip.compress(b"x" * 10) + gzip.compress(b"y" * 10), Code.MESSAGE_CORRUPTED),
            (b"no gzip", Code.MESSAGE_CORRUPTED),
        ):
            assert (await client.send(message("t", body, body_encoding=2))).status.code == code


async def test_message_groups(tmp_path: Path) -> None:
    """A group's messages go to the queue that RocketMQ's proxy chooses for it."""
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t", "FIFO")
        for group in ("g0", "g1", "g2"):
            for _ in range(3):
                assert (await client.send(message("t", message_group=group))).status.code == Code.OK
        queues: dict[str, set[int]] = {}
        for record in await stored(site, "t"):
            queues.setdefault(decode_properties(record.properties)["__SHARDINGKEY"], set()).add(record.queue_id)
        assert queues == {f"g{n}": {consistent_hash(ord("g") * 31 + ord("0") + n, 4)} for n in range(3)}


def test_consistent_hash() -> None:
    """As Guava's test of golden values of its consistent hash."""
    golden = {100: [0, 55, 62, 8, 45, 59, 86, 97, 82, 59, 73, 37, 17, 56, 86, 21, 90, 37, 38, 83]}
    for bucket_count, expected in golden.items():
        assert [consistent_hash(value, bucket_count) for value in range(len(expected))] == expected
    assert [consistent_hash(10863919174838991, n) for n in (11, 12)] == [6, 6]
    assert consistent_hash(2016238256797177309, 11) == 3
    assert consistent_hash(1673758223894951030, 11) == 5


@pytest.mark.parametrize(
    ("topic", "changes", "code"),
    [
        ("t", {"body": b""}, Code.MESSAGE_BODY_EMPTY),
        ("t", {"body": b"x" * 1001}, Code.MESSAGE_BODY_TOO_LARGE),
        ("t", {"message_group": "g"}, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ("fifo", {}, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ("fifo", {"message_group": " "}, Code.ILLEGAL_MESSAGE_GROUP),
        ("fifo", {"message_group": "x" * 64}, Code.ILLEGAL_MESSAGE_GROUP),
        ("t", {"tag": "a|b"}, Code.ILLEGAL_MESSAGE_TAG),
        ("t", {"tag": " "}, Code.ILLEGAL_MESSAGE_TAG),
        ("t", {"tag": "a\x01b"}, Code.ILLEGAL_MESSAGE_TAG),
        ("t", {"keys": ["a", " "]}, Code.ILLEGAL_MESSAGE_KEY),
        ("t", {"keys": ["a\x02"]}, Code.ILLEGAL_MESSAGE_KEY),
        ("t", {"trace_context": "a\x02TAGS\x01b"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ("t", {"trace_context": "a\x01b"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ("t", {"trace_context": "a\x02b"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ("t", {"tag": "x" * 16_384}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
        ("t", {"message_id": " "}, Code.ILLEGAL_MESSAGE_ID),
        ("nope", {}, Code.TOPIC_NOT_FOUND),
        ("readonly", {}, Code.FORBIDDEN),
    ],
    ids=str,
)
async def test_refused_messages(tmp_path: Path, topic: str, changes: dict[str, Any], code: int) -> None:
    async with open_site(tmp_path, FrontOptions(message_size_max=1000)) as site:
        client = Client(site.address)
        await site.topic("t")
        await site.topic("fifo", "FIFO")
        await site.topic("readonly", write=0)
        answer = await client.send(message(topic, **changes))
        assert answer.status.code == code
        assert answer.status.message


async def test_empty_tags_keys_and_groups_count_as_absent(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t")
        for empty in ({"tag": "", "message_group": ""}, {"keys": ["", ""]}):
            answer = await client.send(message("t", **empty))
            assert answer.status.code == Code.OK, answer.status.message
        for record in await stored(site, "t"):
            assert not {"TAGS", "KEYS", "__SHARDINGKEY"} & record.property_map().keys()
        await site.topic("keys")
        await client.send(message("keys", keys=["", "k", ""]))
        [record] = await stored(site, "keys")
        assert record.property_map()["KEYS"] == "k"


async def test_refused_properties(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t")
        for own, code in (
            ({"TAGS": "x"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
            ({"a\x01": "x"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
            ({"a": "x\x02PGROUP\x01other"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
            ({str(number): "x" for number in range(128)}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
        ):
            sent = message("t")
            sent.user_properties.update(own)
            assert (await client.send(sent)).status.code == code, own


async def test_delayed_messages_and_recall(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t", "DELAY")
        await site.topic("normal")
        sent = message("t")
        sent.system_properties.delivery_timestamp.FromMilliseconds(int(time.time() * 1000) + 60_000)
        [entry] = (await client.send(sent)).entries
        assert entry.status.code == Code.OK
        assert entry.recall_handle
        assert await stored(site, "t") == []

        async def recall(topic: str, handle: str) -> Any:
            request = service.RecallMessageRequest(topic=definition.Resource(name=topic), recall_handle=handle)
            return await client.call("RecallMessage", request)

        recalled = await recall("t", entry.recall_handle)
        assert (recalled.status.code, recalled.message_id) == (Code.OK, sent.system_properties.message_id)
        assert (await recall("t", "bad")).status.code == Code.INTERNAL_SERVER_ERROR
        refused = await recall("normal", entry.recall_handle)
        assert refused.status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        sent.system_properties.delivery_timestamp.FromMilliseconds(int(time.time() * 1000) + 50 * 86_400_000)
        assert (await client.send(sent)).status.code == Code.ILLEGAL_DELIVERY_TIME


async def test_calls_without_a_client_id(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.topic("t")
        client = Client(site.address, "")
        assert (await client.send(message("t"))).status.code == Code.CLIENT_ID_REQUIRED


@pytest.mark.parametrize("seconds", [-(1 << 63), (1 << 63) // 1000, (1 << 63) - 1])
async def test_born_timestamp_that_no_record_can_store(tmp_path: Path, seconds: int) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t")
        late = message("t")
        late.system_properties.born_timestamp.seconds = seconds
        assert (await client.send(late)).status.code == Code.BAD_REQUEST
        assert (await client.send(message("t"), late)).status.code == Code.BAD_REQUEST
        assert (await client.send(message("t"))).status.code == Code.OK


async def test_gzip_bodies_of_a_batch_are_stored_plain(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.topic("t")
        bodies = [b"x" * 1000, b"y" * 1000]
        answer = await Client(site.address).send(
            *(message("t", gzip.compress(body), body_encoding=2) for body in bodies)
        )
        assert answer.status.code == Code.OK
        assert sorted(record.body for record in await stored(site, "t")) == bodies


@pytest.mark.parametrize("check", [topic_name, group_name])
def test_refusals_do_not_repeat_long_names(check: Callable[[Any], str]) -> None:
    """An answer is not several times as long as its call."""
    with pytest.raises(CallRefused) as refused:
        check(definition.Resource(name="\x00" * 1_000_000))
    assert len(refused.value.message) < 1000


async def test_a_client_with_a_namespace(tmp_path: Path) -> None:
    """It acknowledges by the name that a message has and its own namespace, and sees no other name."""
    async with open_site(tmp_path) as site:
        await site.topic("ns%t")
        await site.group("ns%g")
        client = Client(site.address)
        topic = definition.Resource(resource_namespace="ns", name="t")
        group = definition.Resource(resource_namespace="ns", name="g")
        sent = message("t")
        sent.topic.resource_namespace = "ns"
        assert (await client.send(sent)).status.code == Code.OK
        queue = definition.MessageQueue(topic=topic, broker=definition.Broker(name="b0"))
        request = service.ReceiveMessageRequest(group=group, message_queue=queue, batch_size=1)
        request.invisible_duration.FromSeconds(30)
        request.long_polling_timeout.FromSeconds(5)
        [received] = [
            each.message for each in await client.receive("ReceiveMessage", request) if each.HasField("message")
        ]
        assert received.topic == topic
        for name in ("t", "ns%t"):  # RocketMQ's front accepts a name that contains the namespace already, too
            named = definition.Resource(resource_namespace="ns", name=name)
            entry = service.AckMessageEntry(receipt_handle=received.system_properties.receipt_handle)
            acknowledge = service.AckMessageRequest(group=group, topic=named, entries=[entry])
            assert (await client.call("AckMessage", acknowledge)).status.code == Code.OK


async def test_messages_of_a_call_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.topic("t")
        answer = await Client(site.address).send(*[message("t")] * (MESSAGE_COUNT_MAX + 1))
        assert answer.status.code == Code.BAD_REQUEST
        assert await stored(site, "t") == []
