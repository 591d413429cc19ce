"""60 GET_TIMER_CHECK_POINT, 61 GET_TIMER_METRICS, and the figures of timer messages in 28.

Layouts are those of RocketMQ 5.5.0 (spec: timer.md §2).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import trio

from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.topic_names import TIMER_TOPIC
from tests.broker.few_descriptors import FewDescriptors
from tests.broker.node import Node, WallClock, open_node
from tests.broker.test_timers import HOUR_MS, properties


async def check_point(node: Node) -> tuple[int, ...]:
    answer = await node.ask(RequestCode.GET_TIMER_CHECK_POINT)
    assert answer.code == 0
    assert len(answer.body) == 56
    return struct.unpack(">7q", answer.body)


async def test_the_check_point_is_the_replicated_progress(node: Node) -> None:
    assert (await check_point(node))[:4] == (0, 0, 0, 0)
    due_ms = WallClock()() + 5_500
    await node.send(b"due", i=properties(TIMER_DELIVER_MS=due_ms), e=0)
    await node.send(b"later", i=properties(TIMER_DELIVER_MS=due_ms + HOUR_MS), e=0)
    await node.arrivals()
    await trio.sleep(1)
    assert (await check_point(node))[:4] == (0, 0, 0, 0), "the delivered message is not flushed"
    await node.store.flusher.flush()
    read_ms, flushed, own_offset, master_offset, *_ = await check_point(node)
    assert read_ms == due_ms // 1000 * 1000, "what is due in this second may be delivered again by a slave"
    assert (flushed, own_offset, master_offset) == (0, 2, 2)


async def test_the_check_point_is_not_ahead_of_slaves(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledgements = type(node.broker.put_service.acknowledgements)
    monkeypatch.setattr(acknowledgements, "replicated_offset", property(lambda self: 0))
    await node.send(b"due", i=properties(TIMER_DELAY_SEC=5), e=0)
    await node.arrivals()
    assert (await check_point(node))[:4] == (0, 0, 0, 0)


async def metrics(node: Node) -> dict[str, int]:
    answer = await node.ask(RequestCode.GET_TIMER_METRICS)
    assert answer.code == 0
    found = json.loads(bytes(answer.body))
    assert set(found) == {"dataVersion", "timingCount"}
    assert all(set(timing) == {"count", "timeStamp"} for timing in found["timingCount"].values())
    return {topic: timing["count"] for topic, timing in found["timingCount"].items()}


async def test_pending_messages_are_counted_by_topic(node: Node) -> None:
    assert await metrics(node) == {}
    for topic, delay_s in (("TT", 5), ("TT", 500), ("other", 600), ("TT", 700)):
        await node.send(b"x", b=topic, i=properties(TIMER_DELAY_SEC=delay_s), e=0)
    await node.dispatched()
    await trio.sleep(1)
    assert await metrics(node) == {}, "the last answer is remembered for 10 s"
    await trio.sleep(10)
    assert await metrics(node) == {"TT": 2, "other": 1}


async def test_messages_are_not_counted_while_the_queue_can_not_be_opened(tmp_path: Path) -> None:
    disk = FewDescriptors()
    async with open_node(tmp_path, disk=disk) as node:
        await node.send(b"later", i=properties(TIMER_DELAY_SEC=500), e=0)
        await trio.sleep(1)
        disk.exhaust(node, TIMER_TOPIC)
        assert (await node.ask(RequestCode.GET_TIMER_METRICS)).code == ResponseCode.SYSTEM_BUSY
        disk.is_exhausted = False
        assert await metrics(node) == {"TT": 1}


async def test_counts_are_estimates_if_more_are_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.broker.timers.BATCH_COUNT_MAX", 10)
    async with open_node(tmp_path) as node:
        for number in range(200):
            topic = "other" if number % 4 == 0 else "TT"
            await node.send(b"x", b=topic, i=properties(TIMER_DELAY_SEC=500), e=0)
        await node.dispatched()
        await trio.sleep(1)
        read: list[int] = []
        real_read = node.broker.timers._read

        async def counted(queue: object, queue_offsets: list[int]) -> object:
            read.extend(queue_offsets)
            return await real_read(queue, queue_offsets)  # type: ignore[arg-type]

        monkeypatch.setattr(node.broker.timers, "_read", counted)
        counts = await node.broker.timers.count_topics(50)
        assert len(read) == 50
        assert sum(counts.values()) == 200
        assert counts["TT"] == pytest.approx(150, abs=20)


async def test_the_broker_status_has_the_figures_of_timers(node: Node) -> None:
    for delay_s in (5, 500):
        await node.send(b"x", i=properties(TIMER_DELAY_SEC=delay_s), e=0)
    await node.arrivals()
    table = json.loads(bytes((await node.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).body))["table"]
    assert (table["timerCongestNum"], table["timerOffsetBehind"], table["timerReadBehind"]) == ("1", "0", "0")
    statistics = node.broker.timers.statistics()
    assert statistics.due_counts == {"1h": 1, "24h": 0, "7d": 0, "later": 0}
