"""Statistics of topics and groups: 202, 208, 300, 303, 308, 317, 321, 343."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker import consume_statistics
from ha.broker.throughput import SLICE_COUNT, SLICE_S, GroupReads
from ha.protocol import java_json
from ha.protocol.group_requests import read_queue_map
from ha.protocol.properties import java_hash
from tests.broker.node import Node, open_node

MAX_VALUE = (1 << 63) - 1


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """TT with four queues: three messages in queue 0 and one in queue 2."""
    async with open_node(tmp_path) as node:
        for number in range(3):
            await node.send(b"%d" % number)
        await node.send(e=2)
        await node.dispatched()
        yield node


async def body(node: Node, code: int, **ext: Any) -> Any:
    answer = await node.ask(code, **ext)
    assert answer.code == 0, answer
    return java_json.loads(answer.body)


async def commit(node: Node, offset: int, *, group: str = "g", topic: str = "TT", queue_id: int = 0) -> None:
    await node.broker.groups.find_or_create(group)
    answer = await node.ask(15, consumerGroup=group, topic=topic, queueId=queue_id, commitOffset=offset)
    assert answer.code == 0


async def store_time(node: Node, queue_id: int, offset: int) -> int:
    [record, *_] = node.records(await node.pull(offset, queueId=queue_id))
    return record.store_timestamp_ms


def heartbeat(*topics: str) -> bytes:
    subscriptions = [{"topic": topic, "subString": "a || b", "subVersion": 7} for topic in topics]
    consumer = {"groupName": "g", "consumeType": "CONSUME_PASSIVELY", "subscriptionDataSet": subscriptions}
    return json.dumps({"clientID": "c1", "consumerDataSet": [consumer]}).encode()


async def test_topic_statistics(node: Node) -> None:
    answer = await node.ask(202, topic="TT")
    assert bytes(answer.body).startswith(
        b'{"offsetTable":{{"brokerName":"b0","queueId":0,"topic":"TT"}:{"lastUpdateTimestamp":17'
    )
    found = java_json.loads(answer.body)
    assert read_queue_map(found["offsetTable"]) == {
        ("TT", "b0", 0): {"lastUpdateTimestamp": await store_time(node, 0, 2), "maxOffset": 3, "minOffset": 0},
        ("TT", "b0", 1): {"lastUpdateTimestamp": 0, "maxOffset": 0, "minOffset": 0},
        ("TT", "b0", 2): {"lastUpdateTimestamp": await store_time(node, 2, 0), "maxOffset": 1, "minOffset": 0},
        ("TT", "b0", 3): {"lastUpdateTimestamp": 0, "maxOffset": 0, "minOffset": 0},
    }
    assert found["topicPutTps"] == pytest.approx(4 / 60)
    await trio.sleep(50)
    await node.send()
    await node.dispatched()
    await trio.sleep(20)
    assert (await body(node, 202, topic="TT"))["topicPutTps"] == pytest.approx(1 / 60)
    assert (await node.ask(202, topic="none")).code == 17


async def test_put_counts_per_minute_hour_and_day(node: Node) -> None:
    await trio.sleep(100)
    await node.send()
    await node.dispatched()
    found = await body(node, 315, statsName="TOPIC_PUT_NUMS", statsKey="TT")
    assert {name: (each["sum"], each["tps"]) for name, each in found.items()} == {
        "statsMinute": (1, pytest.approx(1 / 60)),
        "statsHour": (5, pytest.approx(5 / 3600)),
        "statsDay": (5, pytest.approx(5 / 86400)),
    }
    await node.pull(0)
    await trio.sleep(12)
    got = await body(node, 315, statsName="GROUP_GET_NUMS", statsKey="TT@g")
    assert (got["statsMinute"]["sum"], got["statsDay"]["sum"]) == (4, 0)
    for name, key in (("TOPIC_PUT_NUMS", "none"), ("TOPIC_PUT_SIZE", "TT"), ("x", "y")):
        answer = await node.ask(315, statsName=name, statsKey=key)
        assert (answer.code, answer.remark) == (1, f"The stats <{name}> <{key}> not exist")


async def test_group_progress(node: Node) -> None:
    assert (await node.ask(208, consumerGroup="none")).body == b'{"consumeTps":0.0,"offsetTable":{}}'
    await commit(node, 1)
    await node.pull(1, maxMsgNums=1)
    found = await body(node, 208, consumerGroup="g")
    table = read_queue_map(found["offsetTable"])
    assert [queue_id for _, _, queue_id in table] == [0, 1, 2, 3]
    assert table["TT", "b0", 0] == {
        "brokerOffset": 3,
        "consumerOffset": 1,
        "lastTimestamp": await store_time(node, 0, 0),
        "pullOffset": 2,
    }
    assert table["TT", "b0", 1] == {"brokerOffset": 0, "consumerOffset": 0, "lastTimestamp": 0, "pullOffset": 0}
    assert (await body(node, 208, consumerGroup="g", topic="Other")) == {"consumeTps": 0.0, "offsetTable": {}}
    listed = await body(node, 208, consumerGroup="h", topicList="TT;none;")
    assert len(listed["offsetTable"]) == 4


async def test_unread_messages_count_after_the_topic_gets_fewer_queues(node: Node) -> None:
    """Consumers can't read them any more, so a drained broker would lose them."""
    await commit(node, 3)
    await commit(node, 0, queue_id=2)
    await commit(node, 1, queue_id=2, group="done")
    answer = await node.ask(17, topic="TT", readQueueNums=1, writeQueueNums=1, perm=6, topicFilterType="SINGLE_TAG")
    assert answer.code == 0, answer
    for group, queue_ids in (("g", [0, 2]), ("done", [0])):
        table = read_queue_map((await body(node, 208, consumerGroup=group))["offsetTable"])
        assert [queue_id for _, _, queue_id in table] == queue_ids
    assert (await body(node, 317, isOrder="false"))["totalDiff"] == 1 + 3


async def test_online_group_is_limited_to_its_subscriptions(node: Node) -> None:
    await commit(node, 1)
    await node.ask(34, heartbeat("Other"))
    assert (await body(node, 208, consumerGroup="g"))["offsetTable"] == {}
    await node.ask(34, heartbeat("Other", "TT"))
    assert len((await body(node, 208, consumerGroup="g"))["offsetTable"]) == 4


async def test_retry_topics_of_an_online_group_count_without_a_subscription(node: Node) -> None:
    """Its POP consumers get their messages; a drained broker may not be stopped before."""
    await node.ask(34, heartbeat("Other"))
    await node.ask(15, consumerGroup="g", topic="%RETRY%g", queueId=0, commitOffset=0)
    table = read_queue_map((await body(node, 208, consumerGroup="g"))["offsetTable"])
    assert {topic for topic, _, _ in table} == {"%RETRY%g"}


async def test_group_read_rate(node: Node) -> None:
    await commit(node, 0)
    await node.pull(0)
    await trio.sleep(15)
    assert (await body(node, 208, consumerGroup="g"))["consumeTps"] == pytest.approx(3 / 60)
    await trio.sleep(60)
    assert (await body(node, 208, consumerGroup="g"))["consumeTps"] == 0


def test_rate_slices() -> None:
    reads = GroupReads(key_count_max=2)
    now = 0.0
    for _ in range(3 * SLICE_COUNT):
        reads.rotate(now)
        reads.note("g", "T", 0, 5, 10)
        now += SLICE_S
    reads.rotate(now)
    assert reads.per_s("g", "T") == 1
    assert reads.per_s("h", "T") == 0
    reads.note("g", "T2", 1, 7, 1)
    reads.note("g", "T3", 1, 7, 1)
    assert (reads.position("g", "T2", 1), reads.position("g", "T3", 1)) == (7, -1), "two are enough"
    assert reads.message_count == 10 * 3 * SLICE_COUNT + 2
    reads.forget(topic="T2")
    reads.note("h", "T3", 1, 9, 1)
    assert reads.position("h", "T3", 1) == 9


async def test_groups_of_a_topic_and_topics_of_a_group(node: Node) -> None:
    await commit(node, 1)
    await commit(node, 1, group="h")
    await commit(node, 1, group="h", topic="BenchmarkTest")
    await node.ask(34, heartbeat("TT", "Other"))
    assert sorted((await body(node, 300, topic="TT"))["groupList"]) == ["g", "h"]
    assert await body(node, 300, topic="Other") == {"groupList": ["g"]}
    assert await body(node, 300, topic="T") == {"groupList": []}
    topics = await body(node, 343, group="h")
    assert (sorted(topics["topicList"]), topics["brokerAddr"]) == (["BenchmarkTest", "TT"], "10.0.0.1:10911")


async def test_group_time_span(node: Node) -> None:
    await commit(node, 2)
    times = [await store_time(node, 0, offset) for offset in range(3)]
    await trio.sleep(100)
    spans = (await body(node, 303, topic="TT", group="g"))["consumeTimeSpanSet"]
    assert [span["messageQueue"] for span in spans] == [
        {"brokerName": "b0", "queueId": n, "topic": "TT"} for n in range(4)
    ]
    first = spans[0]
    assert [first[key] for key in ("minTimeStamp", "consumeTimeStamp", "maxTimeStamp")] == [
        times[0],
        times[1],
        times[2],
    ]
    assert 100_000 <= first["delayTime"] < 101_000
    assert [spans[1][key] for key in ("minTimeStamp", "consumeTimeStamp", "maxTimeStamp", "delayTime")] == [
        -1,
        -1,
        -1,
        0,
    ]
    assert 100_000 <= spans[2]["delayTime"] < 101_000
    assert (await node.ask(303, topic="none", group="g")).code == 17


async def test_lowest_offset_of_all_groups(node: Node) -> None:
    await commit(node, 2)
    await commit(node, 1, group="h")
    await commit(node, 1, group="h", queue_id=2)
    await commit(node, 3, group="i")
    assert await body(node, 308, topic="TT", compareGroup="i") == {"correctionOffsets": {"0": 1, "2": 1}}
    assert await body(node, 308, topic="TT", compareGroup="i", filterGroups="h,x") == {"correctionOffsets": {"0": 2}}
    await commit(node, 0, group="j")
    found = await body(node, 308, topic="TT", compareGroup="j", filterGroups="j")
    assert found == {"correctionOffsets": {"0": MAX_VALUE, "2": 1}}
    assert node.broker.offsets.get("h", "TT", 0) == 1, "a question changes nothing"


async def test_progress_of_every_group(node: Node) -> None:
    await commit(node, 2)
    await commit(node, 1, group="h", queue_id=2)
    found = await body(node, 317, isOrder=False)
    assert (found["brokerAddr"], found["totalDiff"], found["totalInflightDiff"]) == ("10.0.0.1:10911", 5, 0)
    by_group = {group: stats for each in found["consumeStatsList"] for group, stats in each.items()}
    assert by_group.keys() == {"g", "h"}
    [stats] = by_group["g"]
    assert read_queue_map(stats["offsetTable"])["TT", "b0", 0]["consumerOffset"] == 2
    ordered = await body(node, 317, isOrder=True)
    assert (ordered["totalDiff"], ordered["consumeStatsList"]) == (0, [{"g": []}, {"h": []}])


async def test_queue_entries(node: Node) -> None:
    ask: dict[str, Any] = {"topic": "TT", "queueId": 0, "index": 1, "count": 5}
    found = await body(node, 321, **ask)
    assert (found["minQueueIndex"], found["maxQueueIndex"]) == (0, 3)
    entries = found["queueData"]
    [first, _] = node.records(await node.pull(1))
    assert len(entries) == 2
    assert entries[0] == {
        "eval": False,
        "physicOffset": first.physical_offset,
        "physicSize": first.total_size,
        "tagsCode": java_hash("TagA"),
    }
    assert (await body(node, 321, **ask, consumerGroup="g"))["filterData"] == "g@TT is not online!"
    await node.ask(34, heartbeat("TT"))
    subscription = (await body(node, 321, **ask, consumerGroup="g"))["subscriptionData"]
    assert (subscription["subString"], subscription["tagsSet"], subscription["subVersion"]) == ("a || b", ["a", "b"], 7)
    for wrong in ({"index": 3}, {"index": -1}):
        answer = await node.ask(321, **{**ask, **wrong})
        assert (answer.code, bytes(answer.body)) == (0, b"")
        assert "is not exist" in (answer.remark or "")
    assert (await node.ask(321, **{**ask, "queueId": 9})).code == 1
    assert (await body(node, 321, **{**ask, "count": -1}))["queueData"] == []


async def test_long_answers_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume_statistics, "ENTRY_COUNT_MAX", 2)
    found = await body(node, 321, topic="TT", queueId=0, index=0, count=1 << 30)
    assert len(found["queueData"]) == 2
    await commit(node, 1)
    monkeypatch.setattr(consume_statistics, "QUEUE_LIST_MAX", 3)
    answer = await node.ask(317, isOrder=False)
    assert (answer.code, answer.remark) == (1, "more than 3 queues; request each group separately")
    await node.send(b="T2")
    answer = await node.ask(208, consumerGroup="g", topicList="TT;T2")
    assert (answer.code, answer.remark) == (1, "more than 3 queues; request each topic separately")
    assert len((await body(node, 208, consumerGroup="g"))["offsetTable"]) == 4, "a topic is shown whole"


async def test_a_topic_that_is_listed_again_and_again_is_counted_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    bounds = node.broker.offsets.get

    def get(group: str, topic: str, queue_id: int) -> int | None:
        looked_up.append(queue_id)
        return bounds(group, topic, queue_id)

    monkeypatch.setattr(node.broker.offsets, "get", get)
    assert len((await body(node, 208, consumerGroup="g", topicList="TT;" * 1000))["offsetTable"]) == 4
    assert looked_up == [0, 1, 2, 3]


@pytest.mark.parametrize(("code", "fields"), [(207, {"groupName": "g", "cleanOffset": True}), (215, {"topic": "TT"})])
async def test_reads_are_dropped_with_their_group_and_topic(node: Node, code: int, fields: dict[str, Any]) -> None:
    await node.send()
    await node.dispatched()
    assert (await node.pull(0)).code == 0
    assert pulled(await body(node, 208, consumerGroup="g", topicList="TT")) == {0, 4}
    assert (await node.ask(code, **fields)).code == 0
    await node.broker.topics.ensure("TT", 1)
    assert pulled(await body(node, 208, consumerGroup="g", topicList="TT")) == {0}


def pulled(stats: dict[str, Any]) -> set[int]:
    return {queue["pullOffset"] for queue in stats["offsetTable"].values()}
