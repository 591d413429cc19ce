"""The broker transcript of vectors §5, row by row: 5.3.3's answers, in both header encodings.

Where halog differs on purpose: a response comes in its request's encoding (4.9's rule, which every client can read).
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.batch import encode_batch
from ha.protocol.message_id import decode_message_id
from tests.broker.node import HOST, PORT, Node, open_node


@pytest.fixture(params=[0, 1], ids=["json", "binary"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path) as node:
        node.serialize_type = request.param
        yield node


BROKER_FIELDS = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}


async def test_send(node: Node) -> None:
    answer = await node.send(b"hello", i="TAGS\x01TagA\x02UNIQ_KEY\x01ABC\x02")
    assert answer.code == 0
    assert answer.serialize_type == node.serialize_type
    assert answer.remark is None
    fields = dict(answer.ext_fields)
    message_id = fields.pop("msgId")
    assert fields == {"queueId": "0", "queueOffset": "0", "transactionId": "ABC", **BROKER_FIELDS}
    assert decode_message_id(message_id) == (HOST, PORT, 0)
    again = await node.send(b"hello")
    assert again.ext_fields["queueOffset"] == "1"
    assert again.ext_fields["transactionId"] == "UNIQUE" + "1".zfill(26)


async def test_stored_record(node: Node) -> None:
    await node.send(b"hello", i="TAGS\x01TagA\x02CLUSTER\x01other\x02", h=7, j=2)
    await node.dispatched()
    (record,) = node.records(await node.pull(0))
    assert (record.body, record.topic, record.queue_id, record.flag) == (b"hello", "TT", 0, 7)
    assert record.reconsume_times == 2
    assert record.born_timestamp_ms == 1_700_000_000_000
    assert record.store_host == (HOST, PORT)
    assert record.property_map() == {
        "TAGS": "TagA",
        "UNIQ_KEY": "UNIQUE" + "1".zfill(26),
        "CLUSTER": "C",
        **BROKER_FIELDS,
    }
    assert record.properties.count(b"CLUSTER") == 1


@pytest.mark.parametrize("more", ["", "DELAY\x011\x02"])
async def test_a_receipt_handle_is_not_stored(node: Node, more: str) -> None:
    """Java's POP consumers acknowledge with a stored one instead of that of the message."""
    handle = "7 1700000000000 60000 0 0 b0 3 9"
    await node.send(i=f"TAGS\x01TagA\x02POP_CK\x01{handle}\x02XPOP_CK\x01x\x02{more}")
    (record,) = node.records(await node.pull(0, sysFlag=6))
    found = record.property_map()
    assert "POP_CK" not in found
    assert (found["TAGS"], found["XPOP_CK"]) == ("TagA", "x")


async def test_full_names_and_any_queue(node: Node) -> None:
    for turn in range(4):
        answer = await node.ask(
            10,
            b"x",
            producerGroup="pg",
            topic="TT",
            defaultTopic="TBW102",
            defaultTopicQueueNums=4,
            queueId=-1,
            sysFlag=0,
            bornTimestamp=1,
            flag=0,
        )
        assert (answer.code, answer.ext_fields["queueId"]) == (0, str(turn))


async def test_illegal_queue_and_topics(node: Node) -> None:
    await node.send()
    for changes in ({"e": 99}, {"e": 4}, {"b": "T T"}, {"b": "t" * 128}, {"b": ""}):
        answer = await node.send(**changes)
        assert answer.code == 29, changes
        assert answer.ext_fields == BROKER_FIELDS
        assert answer.remark
    assert (await node.send(b="t" * 127)).code == 0


async def test_system_topics(node: Node) -> None:
    answer = await node.send(b="SCHEDULE_TOPIC_XXXX")
    assert (answer.code, answer.remark) == (16, "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden.")
    assert (await node.send(b="TBW102")).code == 0


async def test_unknown_topic_without_a_template(node: Node) -> None:
    answer = await node.send(b="New", c="NOPE")
    assert answer.code == 17
    assert answer.remark is not None
    assert answer.remark.startswith("topic[New] not exist, apply first please!")
    assert (await node.send(b="New", c="BenchmarkTest")).code == 17, "no inherit permission"


async def test_auto_creation(node: Node) -> None:
    assert (await node.send(b="New", d=16, e=7)).code == 0
    config = node.broker.topics.get("New")
    assert config is not None
    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (8, 8, 6)
    assert (await node.send(b="Small", d=2, e=1)).code == 0
    assert (await node.send(b="Small", d=2, e=2)).code == 29


async def test_retry_topic_of_an_unknown_group(node: Node) -> None:
    assert (await node.send(b="%RETRY%GX")).code == 0
    config = node.broker.topics.get("%RETRY%GX")
    assert config is not None
    assert config.write_queue_nums == 1
    assert node.broker.groups.get("GX") is not None


async def test_message_retried_too_often_becomes_a_dead_letter(node: Node) -> None:
    assert (await node.send(b="%RETRY%GX", j=16)).code == 0
    assert node.broker.topics.get("%DLQ%GX") is None
    assert (await node.send(b="%RETRY%GX", j=17, i="DELAY\x013\x02")).code == 0
    assert (await node.send(b="%RETRY%GX", j=3, l=2)).code == 0
    assert node.store.queues.next_queue_offset("%DLQ%GX", 0) == 2


async def test_missing_fields(node: Node) -> None:
    answer = await node.send(b=None)
    assert answer.code == 1
    assert answer.remark is not None
    assert "topic" in answer.remark


async def test_no_body(node: Node) -> None:
    assert (await node.send(b"")).code == 1


async def test_batch(node: Node) -> None:
    body = encode_batch([(0, b"hi", b"TAGS\x01TagA\x02KEYS\x01k0"), (7, b"yo", b"")])
    await node.send()
    answer = await node.ask(320, body, a="pg", b="TT", c="TBW102", d=4, e=0, f=0, g=5, h=0, i="", j=0, k=False, m=True)
    assert answer.code == 0
    first, second = answer.ext_fields["msgId"].split(",")
    assert decode_message_id(first)[2] < decode_message_id(second)[2]
    assert answer.ext_fields["queueOffset"] == "1"
    await node.dispatched()
    records = node.records(await node.pull(1))
    assert [(r.body, r.flag, r.queue_offset, r.born_timestamp_ms) for r in records] == [
        (b"hi", 0, 1, 5),
        (b"yo", 7, 2, 5),
    ]
    assert records[0].property_map() == {"TAGS": "TagA", "KEYS": "k0", "CLUSTER": "C", **BROKER_FIELDS}
    assert records[1].property_map() == {"CLUSTER": "C", **BROKER_FIELDS}
    for bad in ({"b": "%RETRY%GX"}, {"b": "%RETRY%" + "x" * 140}):
        assert (await node.send(body, code=320, m=True, **bad)).code == 13
    assert (await node.send(b"\0\0\0\x10garbage", code=320, m=True)).code == 1


async def test_unknown_code(node: Node) -> None:
    answer = await node.ask(9999)
    assert (answer.code, answer.remark) == (3, " request type 9999 not supported")


async def test_queue_bounds(node: Node) -> None:
    for _ in range(2):
        await node.send()
    await node.dispatched()
    assert (await node.ask(30, topic="TT", queueId=0)).ext_fields == {"offset": "2"}
    assert (await node.ask(31, topic="TT", queueId=0)).ext_fields == {"offset": "0"}
    (first, _) = node.records(await node.pull(0))
    assert (await node.ask(32, topic="TT", queueId=0)).ext_fields == {"timestamp": str(first.store_timestamp_ms)}
    assert (await node.ask(30, topic="Unknown", queueId=0)).ext_fields == {"offset": "0"}
    assert (await node.ask(32, topic="TT", queueId=3)).ext_fields == {"timestamp": "-1"}


async def test_search_by_time(node: Node) -> None:
    for _ in range(2):
        await node.send()
    await node.dispatched()
    for timestamp, queue_id, offset in ((0, 0, 0), (1 << 61, 0, 2), (0, 3, 0), (1 << 61, 3, 0)):
        answer = await node.ask(29, topic="TT", queueId=queue_id, timestamp=timestamp)
        assert answer.ext_fields == {"offset": str(offset)}


async def test_consumer_offsets(node: Node) -> None:
    await node.send()
    await node.dispatched()

    def place(queue_id: int) -> dict[str, Any]:
        return {"consumerGroup": "g", "topic": "TT", "queueId": queue_id}

    answer = await node.ask(14, **place(0))
    assert (answer.code, answer.ext_fields) == (0, {"offset": "0"})
    # An existing but empty queue: starting at its end, a consumer would miss messages that arrive before it asks.
    assert (await node.ask(14, **place(3))).ext_fields == {"offset": "0"}
    for nowhere in (place(99), {**place(0), "topic": "Unknown"}):
        answer = await node.ask(14, **nowhere)
        assert answer.code == 22
        assert answer.remark == "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
    assert (await node.ask(14, **place(0), setZeroIfNotFound=False)).code == 22
    assert (await node.ask(15, **place(0), commitOffset=1)).code == 26
    await node.pull(0)  # creates the group
    assert (await node.ask(15, **place(0), commitOffset=1)).code == 0
    assert (await node.ask(14, **place(0))).ext_fields == {"offset": "1"}
    assert (await node.ask(15, consumerGroup="g", topic="Unknown", queueId=0, commitOffset=1)).code == 17
    assert (await node.ask(15, **place(99), commitOffset=1)).code == 29


async def test_consumers_of_an_unknown_group(node: Node) -> None:
    answer = await node.ask(38, consumerGroup="nobody")
    assert (answer.code, answer.remark) == (1, "no consumer for this group, nobody")


@pytest.mark.parametrize(
    ("offset", "queue_id", "code", "next_offset", "remark"),
    [
        (0, 0, 0, 2, "FOUND"),
        (2, 0, 19, 2, "OFFSET_OVERFLOW_ONE"),
        (50, 0, 21, 2, "OFFSET_OVERFLOW_BADLY"),
        (-1, 0, 21, 0, "OFFSET_TOO_SMALL"),
        (0, 3, 19, 0, "NO_MESSAGE_IN_QUEUE"),
        (5, 3, 21, 0, "NO_MESSAGE_IN_QUEUE"),
    ],
)
@pytest.mark.parametrize("request_code", [11, 361])
async def test_pull(
    node: Node, request_code: int, offset: int, queue_id: int, code: int, next_offset: int, remark: str
) -> None:
    for _ in range(2):
        await node.send()
    await node.dispatched()
    answer = await node.pull(offset, code=request_code, queueId=queue_id)
    assert (answer.code, answer.remark) == (code, remark)
    assert answer.ext_fields["nextBeginOffset"] == str(next_offset)
    assert answer.ext_fields["minOffset"] == "0"
    assert answer.ext_fields["maxOffset"] == ("2" if queue_id == 0 else "0")
    assert answer.ext_fields["suggestWhichBrokerId"] == "0"
    assert len(node.records(answer)) == (2 if code == 0 else 0)


async def test_pull_by_tag(node: Node) -> None:
    for tag in ("TagA", "TagB"):
        await node.send(i=f"TAGS\x01{tag}\x02")
    await node.dispatched()
    answer = await node.pull(0, subscription="Nothing")
    assert (answer.code, answer.ext_fields["nextBeginOffset"], answer.remark) == (20, "2", "NO_MATCHED_MESSAGE")
    answer = await node.pull(0, subscription=" TagB || TagZ")
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (0, "2")
    assert [record.property_map()["TAGS"] for record in node.records(answer)] == ["TagB"]


async def test_pull_refused(node: Node) -> None:
    await node.send()
    for changes, code in (
        ({"queueId": 50}, 29),
        ({"queueId": -1}, 29),
        ({"topic": "Unknown"}, 17),
        ({"expressionType": "SQL92", "subscription": "a > 1"}, 1),
        ({"subscription": "||"}, 23),
        ({"sysFlag": 0}, 24),
        ({"queueOffset": None}, 1),
        ({"queueOffset": "x"}, 1),
        ({"consumerGroup": "no group"}, 26),
    ):
        answer = await node.pull(**changes)
        assert answer.code == code, changes
        assert answer.remark


async def test_pull_commits(node: Node) -> None:
    await node.send()
    await node.pull(0, sysFlag=5, commitOffset=1)
    assert node.broker.offsets.get("g", "TT", 0) == 1


HEARTBEAT = (
    b'{"clientID":"c1","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","consumeType":'
    b'"CONSUME_PASSIVELY","groupName":"cg","messageModel":"CLUSTERING","subscriptionDataSet":[{"classFilterMode":false,'
    b'"codeSet":[97],"expressionType":"TAG","subString":"a||b","subVersion":5,"tagsSet":["a"],"topic":"TT"}],"unitMode":'
    b'false}],"heartbeatFingerprint":0,"producerDataSet":[{"groupName":"pg"}],"withoutSub":false}'
)


async def test_heartbeat_and_consumer_list(node: Node) -> None:
    await node.send(i="TAGS\x01b\x02")
    await node.dispatched()
    answer = await node.ask(34, HEARTBEAT)
    assert answer.code == 0
    assert answer.ext_fields == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}
    (notice,) = node.received
    assert (notice.code, notice.flag, notice.ext_fields) == (40, 2, {"consumerGroup": "cg"})
    await node.ask(34, HEARTBEAT)
    assert len(node.received) == 1, "nothing changed"
    answer = await node.ask(38, consumerGroup="cg")
    assert (answer.code, bytes(answer.body)) == (0, b'{"consumerIdList":["c1"]}')
    assert node.broker.topics.get("%RETRY%cg") is not None

    answer = await node.pull(0, consumerGroup="cg", sysFlag=0, subVersion=5, subscription=None)
    assert (answer.code, len(node.records(answer))) == (0, 1)
    answer = await node.pull(0, consumerGroup="cg", sysFlag=0, subVersion=9, subscription=None)
    assert answer.code == 25
    answer = await node.pull(0, consumerGroup="cg", topic="BenchmarkTest", sysFlag=0, subscription=None)
    assert answer.code == 24

    assert (await node.ask(35, clientID="c1", producerGroup="pg", consumerGroup="")).code == 0
    assert (await node.ask(38, consumerGroup="cg")).code == 0
    assert (await node.ask(35, clientID="c1", consumerGroup="cg")).code == 0
    assert (await node.ask(38, consumerGroup="cg")).code == 1


async def test_the_fast_port_serves_no_pulls(node: Node) -> None:
    node.address = "fast"
    assert (await node.pull(0)).code == 3
    assert (await node.send()).code == 0


async def test_tables(node: Node) -> None:
    await node.send()
    await node.pull(0, sysFlag=5, commitOffset=1)
    answer = await node.ask(21)
    assert answer.code == 0
    assert b'"topicName":"TT"' in bytes(answer.body)
    answer = await node.ask(43)
    assert b'"offsetTable":{"TT@g":{0:1}}' in bytes(answer.body)
    answer = await node.ask(201)
    assert b'"groupName":"g"' in bytes(answer.body)


async def test_ha_status(node: Node) -> None:
    answer = await node.ask(907)
    assert answer.code == 0
    assert bytes(answer.body) == (
        b'{"haClientRuntimeInfo":{"lastReadTimestamp":0,"lastWriteTimestamp":0,"masterFlushOffset":0,"maxOffset":0,'
        b'"transferredByteInSecond":0},"haConnectionInfo":[],"inSyncSlaveNums":0,"master":true,'
        b'"masterCommitLogMaxOffset":0}'
    )


async def test_transaction_bits_of_ordinary_messages_are_refused(node: Node) -> None:
    for sys_flag, code in ((4, 16), (0x80, 13)):
        answer = await node.send(f=sys_flag)
        assert answer.code == code, sys_flag
        assert answer.remark
    assert node.store.log.max_offset.value == 0
    assert (await node.send(i="DELAY\x010\x02")).code == 0
