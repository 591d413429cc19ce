"""370 RECALL_MESSAGE: handles, checks with their codes and remarks, and that a recalled message is not delivered.

Codes, remarks and properties are those of RocketMQ 5.5.0 (spec: timer.md §4).
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker.put_request import PutRequest
from ha.broker.timers import TimerService
from ha.protocol.codes import PutStatus
from ha.protocol.properties import decode_properties
from ha.protocol.recall_handle import RecallHandle, encode_recall_handle
from ha.protocol.record import decode_record
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import TIMER_TOPIC
from tests.broker.node import Node, WallClock, open_node
from tests.broker.test_terms import member
from tests.broker.test_timers import properties

RECALL = 370
DAY_MS = 86_400_000


async def recall(node: Node, handle: str | None, **changes: Any) -> RemotingCommand:
    return await node.ask(RECALL, **{"producerGroup": "pg", "topic": "TT", "recallHandle": handle, **changes})


def handle_of(due_ms: int, **changes: Any) -> str:
    named: dict[str, Any] = {"topic": "TT", "broker_name": "b0", "timestamp_ms": due_ms + 1, "unique_key": "k"}
    return encode_recall_handle(RecallHandle(**{**named, **changes}))


@asynccontextmanager
async def pending_message(folder: Path, delay_s: int) -> AsyncIterator[tuple[Node, str]]:
    """A broker whose timer index has one message, sent a second ago, and the message's handle."""
    async with open_node(folder) as node:
        sent = await node.send(b"later", i=properties(TIMER_DELAY_SEC=delay_s), e=0)
        await node.dispatched()
        await trio.sleep(1)
        yield node, sent.ext_fields["recallHandle"]


async def test_an_answer_to_a_timer_message_has_its_handle(node: Node) -> None:
    due_ms = WallClock()() + 60_000
    answer = await node.send(b"later", i=properties(UNIQ_KEY="K1", TIMER_DELIVER_MS=due_ms), e=0)
    words = base64.urlsafe_b64decode(answer.ext_fields["recallHandle"]).decode()
    assert words == f"v1 TT b0 {due_ms + 1} K1"
    assert answer.ext_fields["transactionId"] == "K1"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"TIMER_DELIVER_MS": 1_000},
        {"TIMER_DELAY_SEC": 60, "DELAY": 1},
        {"TIMER_DELAY_SEC": 60, "TRAN_MSG": "true", "PGROUP": "pg"},
        {"TIMER_DELAY_SEC": 60, "TIMER_OUT_MS": 1_000, "REAL_TOPIC": "TT"},
    ],
)
async def test_other_messages_have_no_handle(node: Node, asked: dict[str, object]) -> None:
    """The last one was delivered as a timer message and is sent on: it is an ordinary message."""
    answer = await node.send(i=properties(**asked))
    assert answer.code == 0
    assert "recallHandle" not in answer.ext_fields
    assert node.store.queues.get(TIMER_TOPIC, 0) is None


async def test_a_retry_has_no_handle(node: Node) -> None:
    answer = await node.send(b="%RETRY%g", i=properties(TIMER_DELAY_SEC=60), e=0)
    assert (answer.code, "recallHandle" in answer.ext_fields) == (0, False)


async def test_a_recalled_message_is_not_delivered(node: Node) -> None:
    due_ms = WallClock()() + 60_000
    first = await node.send(b"no", i=properties(UNIQ_KEY="K1", TIMER_DELIVER_MS=due_ms), e=0)
    await node.send(b"yes", i=properties(UNIQ_KEY="K2", TIMER_DELIVER_MS=due_ms), e=0)
    answer = await recall(node, first.ext_fields["recallHandle"])
    assert (answer.code, answer.ext_fields["msgId"]) == (0, "K1")
    again = await recall(node, first.ext_fields["recallHandle"])
    assert again.code == 0
    [(_, record)] = await node.arrivals()
    assert record.body == b"yes"
    statistics = node.broker.timers.statistics()
    assert (statistics.delivered_count, statistics.recalled_count, statistics.pending_count) == (1, 1, 0)


async def test_the_recall_in_the_log_is_that_of_rocketmq(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        due_ms = WallClock()() + 60_000
        await node.send()
        assert (await recall(node, handle_of(due_ms))).code == 0
        queue = node.store.queues.get(TIMER_TOPIC, 0)
        assert queue is not None
        [entry] = queue.read(0, 1)
        raw = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()
        record = decode_record(raw[entry.physical_offset : entry.physical_offset + entry.size])
        assert (record.body, record.queue_id) == (b"0", 0)
        found = record.property_map()
        assert found.pop("BORN_TIMESTAMP") == str(record.born_timestamp_ms)
        assert found == decode_properties(
            b"TAGS\x01_RECALL_TAG_\x02TIMER_DEL_UNIQKEY\x01k\x02UNIQ_KEY\x01k\x02PGROUP\x01pg\x02"
            b"REAL_TOPIC\x01TT\x02REAL_QID\x010\x02TIMER_DELIVER_MS\x01%d\x02TIMER_OUT_MS\x01%d\x02" % (due_ms, due_ms)
        )


@pytest.mark.parametrize(
    ("handle", "changes", "code", "remark"),
    [
        (None, {"topic": "none"}, 17, "recall failed, the topic[none] not exist"),
        ("not base64!", {}, 604, "recall handle is invalid"),
        ("x" * 3000, {}, 604, "recall handle is invalid"),
        (base64.urlsafe_b64encode(b"v2 TT b0 1 k").decode(), {}, 604, "recall handle is invalid"),
        (base64.urlsafe_b64encode(b"v1 TT b0 1").decode(), {}, 604, "recall handle is invalid"),
        ({"unique_key": ""}, {}, 604, "recall handle is invalid"),
        (None, {"topic": "other"}, 604, "recall failed, topic not match"),
        ({"broker_name": "b1"}, {}, 604, "recall failed, broker service not available"),
        ({"timestamp_ms": 1000}, {}, 604, "recall failed, timestamp invalid"),
        ({"timestamp_ms": 1_700_000_000_000 + 41 * DAY_MS}, {}, 604, "recall failed, timestamp invalid"),
        (base64.urlsafe_b64encode(b"v1 TT b0 soon k").decode(), {}, 604, "recall failed, timestamp invalid"),
    ],
)
async def test_what_can_not_be_recalled_is_refused(
    node: Node, handle: Any, changes: dict[str, Any], code: int, remark: str
) -> None:
    await node.send()
    await node.send(b="other")
    text = handle if isinstance(handle, str) else handle_of(WallClock()() + 60_000, **(handle or {}))
    answer = await recall(node, text, **changes)
    assert (answer.code, answer.remark) == (code, remark)
    assert node.store.queues.get(TIMER_TOPIC, 0) is None


@pytest.mark.parametrize(
    ("options", "code", "remark"),
    [
        ({"recall_enable": False}, 16, "recall failed, operation is forbidden"),
        ({"permission": 4}, 14, "recall failed, broker service not available"),
        ({"timer_enable": False}, 1, "accurate timer message is not enabled, timerWheelEnable is false"),
    ],
)
async def test_it_is_refused_as_configured(tmp_path: Path, options: dict[str, Any], code: int, remark: str) -> None:
    async with open_node(tmp_path) as node:
        await node.send()
    async with open_node(tmp_path, **options) as node:
        answer = await recall(node, handle_of(WallClock()() + 60_000))
        assert answer.code == code
        assert (answer.remark or "").startswith(remark)


async def test_a_slave_refuses_it(tmp_path: Path) -> None:
    async with member(tmp_path) as node:
        answer = await recall(node, handle_of(WallClock()() + 60_000))
        assert answer.code == 11
        assert (answer.remark or "").startswith("recall failed, broker service not available")


async def test_a_recall_that_comes_too_late_is_not_answered_with_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recall is stored in time, but not dispatched before its message is taken for delivery."""
    async with pending_message(tmp_path, 60) as (node, handle):
        index = TimerService._index_new

        async def index_later(self: TimerService) -> None:
            if self.statistics().delivered_count:
                await index(self)

        monkeypatch.setattr(TimerService, "_index_new", index_later)
        await trio.sleep(57.5)
        found: list[RemotingCommand] = []

        async def ask() -> None:
            found.append(await recall(node, handle))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            [(_, record)] = await node.arrivals()
        assert record.body == b"later"
        [answer] = found
        assert answer.code == 604
        assert (answer.remark or "").startswith("recall failed, timestamp invalid")


async def test_a_delivered_message_is_not_recalled_after_a_restart_with_an_earlier_clock(tmp_path: Path) -> None:
    async with pending_message(tmp_path, 60) as (node, handle):
        await node.arrivals()
        await trio.sleep(1)
    async with open_node(tmp_path, wall_clock_ms=WallClock(1_700_000_000_000 - 600_000)) as node:
        answer = await recall(node, handle)
        assert answer.code == 604
        assert (answer.remark or "").startswith("recall failed, timestamp invalid")


async def test_a_recall_that_is_not_dispatched_is_not_answered_with_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pending_message(tmp_path, 600) as (node, handle):

        async def index_nothing(self: TimerService) -> None:
            await trio.lowlevel.checkpoint()

        monkeypatch.setattr(TimerService, "_index_new", index_nothing)
        began = trio.current_time()
        answer = await recall(node, handle)
        assert answer.code == 14
        assert trio.current_time() - began == pytest.approx(3.0, abs=0.1)


async def test_a_recall_that_a_slave_does_not_have_is_not_answered_with_success(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.send()
    settle = node.broker.put_service.settle

    async def without_slave(puts: list[PutRequest]) -> None:
        await settle(puts)
        puts[0].status = PutStatus.FLUSH_SLAVE_TIMEOUT

    monkeypatch.setattr(node.broker.put_service, "settle", without_slave)
    assert (await recall(node, handle_of(WallClock()() + 60_000))).code == 12


async def test_a_recall_holds_while_it_is_rolled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message, rolled before, becomes due before the copy of the recall is dispatched."""
    async with pending_message(tmp_path, 60) as (node, handle):
        timers, queue = node.broker.timers, node.store.queues.get(TIMER_TOPIC, 0)
        assert queue is not None
        assert (await recall(node, handle)).code == 0
        for at in (1, 2):  # first the message, then the recall
            await trio.sleep(1)
            assert await timers.release(queue.read(at, 1)[0].physical_offset)
            await node.dispatched()
            if at == 1:
                await trio.sleep(1)

                async def index_nothing(self: TimerService) -> None:
                    await trio.lowlevel.checkpoint()

                index = TimerService._index_new
                monkeypatch.setattr(TimerService, "_index_new", index_nothing)
        await trio.sleep(100)
        assert (timers.statistics().delivered_count, timers.statistics().recalled_count) == (0, 1)
        monkeypatch.setattr(TimerService, "_index_new", index)
        await node.send(b"other", i=properties(TIMER_DELAY_SEC=1), e=0)
        await trio.sleep(3)
        assert (timers.statistics().delivered_count, timers.statistics().pending_count) == (1, 0)
        assert not timers._rolled_recalls


async def test_a_restart_keeps_recalls(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        sent = await node.send(b"no", i=properties(TIMER_DELAY_SEC=600), e=0)
        await node.send(b"yes", i=properties(TIMER_DELAY_SEC=601), e=0)
        assert (await recall(node, sent.ext_fields["recallHandle"])).code == 0
    async with open_node(tmp_path) as node:
        [(_, record)] = await node.arrivals()
        assert record.body == b"yes"
        assert node.broker.timers.statistics().recalled_count == 1


async def test_a_committed_half_message_can_be_recalled(node: Node) -> None:
    """Its producer gets no handle, as with RocketMQ, and can make one from the delivery time that it asked for."""
    due_ms = WallClock()() + 60_000
    half = properties(UNIQ_KEY="K1", TRAN_MSG="true", PGROUP="pg", TIMER_DELIVER_MS=due_ms)
    sent = await node.send(b"no", i=half, f=4, e=0)
    assert sent.code == 0, sent.remark
    offset = int(sent.ext_fields["msgId"][16:], 16)
    ended = await node.ask(
        37,
        producerGroup="pg",
        tranStateTableOffset=sent.ext_fields["queueOffset"],
        commitLogOffset=offset,
        commitOrRollback=8,
        fromTransactionCheck=False,
        msgId="K1",
        transactionId="K1",
    )
    assert ended.code == 0, ended.remark
    assert (await recall(node, handle_of(due_ms, unique_key="K1"))).code == 0
    await trio.sleep(100)
    statistics = node.broker.timers.statistics()
    assert (statistics.delivered_count, statistics.recalled_count) == (0, 1)


@pytest.mark.parametrize(("key", "group"), [("k", "a\x02b"), ("a\x02b", "pg")])
async def test_names_that_no_record_can_hold_are_refused(node: Node, key: str, group: str) -> None:
    """They ended the broker."""
    await node.send()
    handle = handle_of(WallClock()() + 60_000, unique_key=key)
    assert (await recall(node, handle, producerGroup=group)).code == 1
    assert (await node.send()).code == 0
