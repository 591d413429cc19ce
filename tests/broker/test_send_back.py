"""36 CONSUMER_SEND_MSG_BACK: the stored copies, and each refusal. Times are virtual."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker.options import BrokerRole
from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import PutStatus
from ha.protocol.message_id import decode_message_id
from ha.protocol.record import Message, MessageRecord, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import SCHEDULE_TOPIC
from ha.store.record_maker import AppendResult
from tests.broker.node import HOST, PORT, SEND_V2, Node, open_node
from tests.security.brokers import admin, alice, guarded_broker

RECORD_BODY_PLACE = 88
"""Where the body of a record begins, with addresses of IPv4"""

LEVELS: dict[str, Any] = {"store_changes": {"delay_levels_ms": (1_000, 2_000, 3_000, 4_000, 5_000)}}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path, **LEVELS) as node:
        yield node


def offset_of(answer: RemotingCommand) -> int:
    return decode_message_id(answer.ext_fields["msgId"])[2]


async def send_back(node: Node, offset: int, **changes: Any) -> RemotingCommand:
    fields = {"offset": offset, "group": "g", "delayLevel": 0, "originTopic": "TT", "unitMode": False, **changes}
    return await node.ask(36, **fields)


async def receive(node: Node, topic: str, offset: int = 0, queue_id: int = 0) -> MessageRecord:
    answer = await node.pull(offset, topic=topic, queueId=queue_id, sysFlag=6, suspendTimeoutMillis=100_000)
    return node.records(answer)[0]


async def test_message_is_retried_and_becomes_a_dead_letter(node: Node) -> None:
    sent = await node.send(b"body", i="TAGS\x01TagA\x02KEYS\x01k\x02", h=7, e=2)
    first = offset_of(sent)
    record = node.records(await node.pull(0, queueId=2))[0]
    for times in range(3):
        began = trio.current_time()
        answer = await send_back(node, record.physical_offset, maxReconsumeTimes=3)
        assert (answer.code, answer.remark, answer.ext_fields) == (0, None, {})
        record = await receive(node, "%RETRY%g", times)
        assert trio.current_time() - began == pytest.approx(min(3 + times, 5), abs=0.01)
        assert (record.body, record.flag, record.reconsume_times) == (b"body", 7, times + 1)
        assert record.born_timestamp_ms == 1_700_000_000_000
        found = record.property_map()
        assert found.pop("CLUSTER") == "C"
        assert found == {
            "TAGS": "TagA",
            "KEYS": "k",
            "UNIQ_KEY": sent.ext_fields["transactionId"],
            "MSG_REGION": "DefaultRegion",
            "TRACE_ON": "true",
            "RETRY_TOPIC": "TT",
            "ORIGIN_MESSAGE_ID": sent.ext_fields["msgId"],
            "WAIT": "false",
            "DELAY": str(3 + times),
            "REAL_TOPIC": "%RETRY%g",
            "REAL_QID": "0",
        } | ({"DELAY": "5"} if times == 2 else {})
        assert decode_message_id(found["ORIGIN_MESSAGE_ID"]) == (HOST, PORT, first)
    answer = await send_back(node, record.physical_offset, maxReconsumeTimes=3)
    assert answer.code == 0
    record = await receive(node, "%DLQ%g")
    assert (record.reconsume_times, record.property_map()["DELAY"]) == (4, "0")
    config = node.broker.topics.get("%DLQ%g")
    assert config is not None
    assert (config.write_queue_nums, config.read_queue_nums, config.perm) == (1, 1, 6)


@pytest.mark.parametrize(
    ("reconsume_times", "changes", "version", "is_dead"),
    [
        (15, {}, 479, False),
        (16, {}, 479, True),
        (0, {"delayLevel": -1}, 479, True),
        (2, {"maxReconsumeTimes": 2}, 479, True),
        (2, {"maxReconsumeTimes": 2}, 100, False),
        (16, {"maxReconsumeTimes": 100}, 479, False),
        (0, {"maxReconsumeTimes": 0}, 479, True),
    ],
)
async def test_retry_limits(
    node: Node, reconsume_times: int, changes: dict[str, int], version: int, is_dead: bool
) -> None:
    offset = offset_of(await node.send(j=reconsume_times))
    answer = await send_back(node, offset, version=version, **changes)
    assert answer.code == 0
    await node.dispatched()
    assert (node.store.queues.get("%DLQ%g", 0) is not None) is is_dead
    assert (SCHEDULE_TOPIC in node.store.queues.topics()) is not is_dead


async def test_a_message_with_the_largest_number_of_retries_becomes_a_dead_letter(node: Node) -> None:
    assert (await node.send(b"x", j=2**31 - 1)).code == 0
    assert (await send_back(node, 0, maxReconsumeTimes=16)).code == 0
    assert (await receive(node, "%DLQ%g")).reconsume_times == 2**31 - 1


async def test_consumer_can_set_the_delay_level(node: Node) -> None:
    offset = offset_of(await node.send())
    assert (await send_back(node, offset, delayLevel=1)).code == 0
    began = trio.current_time()
    assert (await receive(node, "%RETRY%g")).property_map()["DELAY"] == "1"
    assert trio.current_time() - began == pytest.approx(1, abs=0.01)


async def test_group_with_several_retry_queues(node: Node) -> None:
    assert not await node.broker.groups.update([GroupConfig(group_name="g", retry_queue_nums=3)])
    offset = offset_of(await node.send())
    for _ in range(6):
        assert (await send_back(node, offset, delayLevel=1)).code == 0
    await trio.sleep(2)
    assert [node.store.queues.next_queue_offset("%RETRY%g", queue) for queue in range(4)] == [2, 2, 2, 0]


async def test_group_without_retries(node: Node) -> None:
    assert not await node.broker.groups.update([GroupConfig(group_name="g", retry_queue_nums=0)])
    offset = offset_of(await node.send())
    end = node.store.log.max_offset.value
    assert (await send_back(node, offset)).code == 0
    assert node.store.log.max_offset.value == end


async def test_refusals(node: Node) -> None:
    offset = offset_of(await node.send())
    end = node.store.log.max_offset.value
    refusals: list[tuple[dict[str, Any], int, str]] = [
        ({"group": None}, 1, "group"),
        ({"delayLevel": "x"}, 1, "delayLevel"),
        ({"offset": offset + 1}, 1, f"look message by offset failed, {offset + 1}"),
        ({"offset": -5}, 1, "look message by offset failed, -5"),
        ({"offset": end}, 1, "look message by offset failed"),
        ({"offset": 1 << 62}, 1, "look message by offset failed"),
        ({"group": "bad/group"}, 26, "subscription group not exist, bad/group"),
    ]
    for changes, code, remark in refusals:
        answer = await send_back(node, **{"offset": offset, **changes})
        assert answer.code == code, changes
        assert remark in str(answer.remark)
    assert node.store.log.max_offset.value == end


async def test_messages_in_system_topics_can_not_be_sent_back(node: Node) -> None:
    offset = offset_of(await node.send(i="DELAY\x013\x02"))
    assert (await send_back(node, offset)).code == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"role": BrokerRole.SLAVE}, 2), ({"permission": 4}, 16), ({"auto_create_group": False}, 26)],
)
async def test_slaves_and_read_only_brokers_refuse(tmp_path: Path, changes: dict[str, Any], code: int) -> None:
    async with open_node(tmp_path, **changes) as node:
        answer = await send_back(node, 0)
        assert answer.code == code
        assert answer.remark


async def test_broker_without_room_for_topics(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        offset = offset_of(await node.send())
        assert (await send_back(node, offset)).code == 0
    async with open_node(tmp_path, topic_count_max=1) as node:
        answer = await send_back(node, offset, group="h")
        assert (answer.code, str(answer.remark)[:26]) == (1, "topic[%RETRY%h] not exist:")
        answer = await send_back(node, offset, delayLevel=-1)
        assert (answer.code, str(answer.remark)[:24]) == (1, "topic[%DLQ%g] not exist:")


async def test_put_status_other_than_ok_is_an_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    offset = offset_of(await node.send())

    def refuse(messages: list[Message], _: float | None = None) -> list[AppendResult]:
        return [AppendResult(PutStatus.CREATE_MAPPED_FILE_FAILED)]

    monkeypatch.setattr(node.store.log, "append", refuse)
    answer = await send_back(node, offset)
    assert answer.code == 1
    assert str(answer.remark).startswith("CREATE_MAPPED_FILE_FAILED")


async def test_with_access_control_the_group_must_be_allowed_to_read_the_message(tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:

        async def sent(topic: str) -> int:
            fields: dict[str, Any] = {
                "a": "p",
                "b": topic,
                "c": "TBW102",
                "d": 1,
                "e": 0,
                "f": 0,
                "g": 0,
                "h": 0,
                "i": "",
                "j": 0,
            }
            return offset_of(await admin(node).ask(310, b"x", **fields))

        async def back(offset: int, **changes: Any) -> RemotingCommand:
            return await alice(node).ask(36, **{"offset": offset, "group": "g", "delayLevel": -1, **changes})

        secret, readable = await sent("secret"), await sent("readable")
        assert (await back(secret)).code == 16
        assert (await back(secret, originTopic="readable")).code == 16
        assert "topic:secret" in str((await back(secret, originTopic="secret")).remark)
        assert "group:h" in str((await back(readable, group="h")).remark)
        assert (await back(readable)).code == 16
        assert (await back(readable, originTopic="readable")).code == 0
        consumer = {"groupName": "g", "subscriptionDataSet": [{"topic": "readable", "subString": "*"}]}
        body = json.dumps({"clientID": "c", "consumerDataSet": [consumer]}).encode()
        assert (await alice(node).ask(34, body)).code == 0
        assert (await back(readable)).code == 0
        assert (await back(secret)).code == 16
        await node.dispatched()
        retried = await sent("%RETRY%g")
        assert (await back(retried)).code == 0


@pytest.mark.parametrize("times", [-3, -4, -10])
async def test_negative_number_of_deliveries_does_not_lose_a_message(tmp_path: Path, times: int) -> None:
    """A producer may set it. The retry was put into a queue with a negative id, which nothing reads."""
    async with open_node(tmp_path) as node:
        assert (await node.send(b"hello", j=times)).code == 0
        await node.dispatched()
        [(_, record)] = await node.arrivals()
        assert (await node.ask(36, group="g", offset=record.physical_offset, delayLevel=0)).code == 0
        with trio.fail_after(100):
            [(_, again)] = await node.arrivals(topic="%RETRY%g", consumerGroup="g")
        assert again.body == b"hello"


async def test_record_that_a_body_contains_does_not_end_the_broker(tmp_path: Path) -> None:
    """Its topic, which a client wrote into the body, can't be a property."""
    async with open_node(tmp_path) as node:
        await node.send()
        await node.dispatched()
        at = node.store.log.max_offset.value + RECORD_BODY_PLACE
        forged = Message("a\x02b", 0, b"x", b"", born_host=encode_host(HOST, PORT))
        host = encode_host(HOST, PORT)
        body = encode_record(forged, queue_offset=0, physical_offset=at, store_timestamp_ms=1, store_host=host)
        assert (await node.send(body)).code == 0
        answer = await node.ask(36, group="g", offset=at, delayLevel=0)
        assert answer.code == 1
        assert "contains a separator" in str(answer.remark)
        assert (await node.send()).code == 0


async def test_forged_record_in_a_body_brings_nothing_of_other_topics(tmp_path: Path) -> None:
    """A body that ends like the start of a record brought the records after it, as the properties of the retry."""
    async with guarded_broker(tmp_path) as node:
        inside = node.store.log.max_offset.value + RECORD_BODY_PLACE
        properties = bytes(1000)
        host = encode_host(HOST, PORT)
        forged = encode_record(
            Message("TT", 0, b"", properties),
            queue_offset=0,
            physical_offset=inside,
            store_timestamp_ms=1,
            store_host=host,
        ).removesuffix(properties)
        sent = await alice(node).ask(310, forged, **{**SEND_V2, "i": ""})
        await admin(node).ask(310, b"secret" * 200, **{**SEND_V2, "b": "Other", "i": ""})
        assert bytes(await node.store.log.read_all(inside, len(forged))) == forged, "it is where it says"
        asked: Any = {"group": "g", "delayLevel": -1, "originTopic": "TT"}
        answer = await alice(node).ask(36, offset=inside, **asked)
        assert (answer.code, answer.remark) == (1, f"look message by offset failed, {inside}")
        assert (await alice(node).ask(36, offset=offset_of(sent), **asked)).code == 0
