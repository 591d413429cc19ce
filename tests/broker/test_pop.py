"""POP: the contract of each request of a consumer, as shared by RocketMQ's clients and its proxy (spec pop.md)."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.pop import taking
from ha.broker.pop.service import GroupInFlight
from ha.broker.queue_read import QueueRead
from ha.protocol.admin_requests import decode_consume_stats
from ha.protocol.bodies import TopicConfig
from ha.protocol.popped import read_popped
from ha.protocol.properties import PROPERTIES_SIZE_MAX
from ha.protocol.record import Message, decode_records
from ha.remoting import open_remoting_client
from ha.store.consume_queue import ConsumeQueue
from tests.broker.node import Node, WallClock, open_node
from tests.broker.pop_client import Popped, ack, ack_fields, bodies, change, pop, pop_messages, popped_of, send

# ---- pop


async def test_pop_returns_messages_and_what_their_handles_need(node: Node) -> None:
    await send(node, b"a", b"b")
    await send(node, b"c", e=2)
    began = trio.current_time()
    answer = await pop(node, invisibleTime=15_000)
    assert (answer.code, answer.remark, trio.current_time()) == (0, "FOUND", began)
    assert answer.ext_fields["invisibleTime"] == "15000"
    assert answer.ext_fields["reviveQid"] != "999"
    assert answer.ext_fields["restNum"] == "0"
    assert set(answer.ext_fields["startOffsetInfo"].split(";")) == {"0 0 0", "0 2 0"}
    assert set(answer.ext_fields["msgOffsetInfo"].split(";")) == {"0 0 0,1", "0 2 0"}
    assert "orderCountInfo" not in answer.ext_fields
    assert sorted(bodies(popped_of(answer))) == [b"a", b"b", b"c"]


async def test_messages_in_flight_are_not_popped_again(node: Node) -> None:
    await send(node, b"a", b"b")
    assert bodies(await pop_messages(node, maxMsgNums=1)) == [b"a"]
    assert bodies(await pop_messages(node)) == [b"b"]
    assert bodies(await pop_messages(node)) == []
    assert bodies(await pop_messages(node, consumerGroup="another")) == [b"a", b"b"]


async def test_rest_num_counts_what_is_left_in_all_queues(node: Node) -> None:
    await send(node, b"a", b"b")
    await send(node, b"c", b"d", e=1)
    assert (await pop(node, maxMsgNums=1)).ext_fields["restNum"] == "3"
    assert (await pop(node, maxMsgNums=1)).ext_fields["restNum"] == "2"


async def test_one_queue(node: Node) -> None:
    await send(node, b"a")
    await send(node, b"b", e=1)
    assert bodies(await pop_messages(node, queueId=1)) == [b"b"]


async def test_queue_from_which_another_pop_reads_is_skipped(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await send(node, b"0")
    reader = node.broker.pop.requests._taker._reader
    read, is_reading, goes_on = reader.read, trio.Event(), trio.Event()

    async def read_slowly(*arguments: Any, **options: Any) -> QueueRead:
        is_reading.set()
        await goes_on.wait()
        return await read(*arguments, **options)

    monkeypatch.setattr(reader, "read", read_slowly)
    monkeypatch.setattr(reader, "read_nowait", lambda *_, **__: None)
    found: list[Popped] = []

    async def pop_first() -> None:
        found.extend(await pop_messages(node, queueId=0))

    async with (
        open_remoting_client(connect=node.connect) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(pop_first)
        await is_reading.wait()
        other = Node(node.store, node.ha, node.broker, client, node.listener)
        with trio.fail_after(1):
            assert await pop_messages(other, queueId=0) == []
        goes_on.set()
    assert bodies(found) == [b"0"]


async def test_nothing_there(node: Node) -> None:
    await send(node, b"a")
    assert bodies(await pop_messages(node)) == [b"a"]
    answer = await pop(node)
    assert (answer.code, answer.remark) == (210, "NO_MESSAGE_IN_QUEUE")


async def test_checks_in_order(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await send(node, b"a")
        now_ms = WallClock()()

        async def refused(**changes: Any) -> tuple[int, str]:
            answer = await pop(node, **changes)
            return answer.code, str(answer.remark)

        late: dict[str, Any] = {"bornTime": now_ms - 10_000, "pollTime": 5000}
        assert await refused(maxMsgNums=33, **late) == (210, "the broker[10.0.0.1] pop message is timeout too much")
        assert await refused(maxMsgNums=33, topic="X") == (
            29,
            "the broker[10.0.0.1] pop message's num is greater than 32",
        )
        assert await refused(topic="X", queueId=9) == (17, "topic[X] not exist, apply first please!")
        assert (await refused(queueId=4, exp="||"))[0] == 29
        assert (await refused(exp="||"))[0] == 23
        assert (await refused(invisibleTime=-1))[0] == 29
        assert (await refused(consumerGroup="no group"))[0] == 26
        await node.broker.topics.update(TopicConfig(topic_name="TT", read_queue_nums=4, write_queue_nums=4, perm=2))
        assert await refused(queueId=9) == (16, "the topic[TT] peeking message is forbidden")
    async with open_node(tmp_path / "2", permission=2) as node:
        assert await refused(topic="X") == (16, "the broker[10.0.0.1] pop message is forbidden")


async def test_missing_fields_are_named(node: Node) -> None:
    answer = await pop(node, invisibleTime=None)
    assert answer.code == 1
    assert "invisibleTime" in str(answer.remark)


async def test_tags(node: Node) -> None:
    for number, tag in enumerate("ABABC"):
        await send(node, b"%d" % number, i=f"TAGS\x01{tag}\x02")
    assert bodies(await pop_messages(node, exp="A||C", expType="TAG", maxMsgNums=2)) == [b"0", b"2"]
    assert bodies(await pop_messages(node, exp="A||C", expType="TAG")) == [b"4"]
    assert node.broker.offsets.get("g", "TT", 0) == 5


async def test_messages_that_are_not_selected_are_passed(node: Node) -> None:
    messages = [Message("TT", 0, b"%d" % number, b"TAGS\x01%c\x02" % b"AB"[number == 2900]) for number in range(3000)]
    await send(node, b"first", e=1)
    await node.broker.put_service.put(messages)
    await node.dispatched()
    [message] = await pop_messages(node, exp="B", expType="TAG")
    assert (message.body, message.handle.offset) == (b"2900", 2900)
    assert (await pop(node, exp="B", expType="TAG")).code == 210
    assert node.broker.offsets.get("g", "TT", 0) == 3000


async def test_pop_that_waits_goes_on_after_many_messages_that_are_not_selected(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "SCAN_COUNT_MAX", 100)
    messages = [Message("TT", 0, b"%d" % number, b"TAGS\x01%c\x02" % b"AB"[number == 990]) for number in range(1000)]
    await send(node, b"first", e=1)
    await node.broker.put_service.put(messages)
    await node.dispatched()
    began = trio.current_time()
    [message] = await pop_messages(node, exp="B", expType="TAG", pollTime=20_000)
    assert (message.body, trio.current_time()) == (b"990", began)
    assert (await ack(node, message)).code == 0
    assert (await pop(node, exp="B", expType="TAG", pollTime=20_000)).code == 210
    assert trio.current_time() - began == 20


async def test_sql(tmp_path: Path) -> None:
    async with open_node(tmp_path, enable_property_filter=True) as node:
        for number in range(6):
            await send(node, b"%d" % number, i=f"n\x01{number}\x02")
        assert bodies(await pop_messages(node, exp="n > 2 AND n < 5", expType="SQL92")) == [b"3", b"4"]
        assert (await pop(node, exp="n >", expType="SQL92")).code == 23


async def test_priorities_begin_with_the_highest_queue(node: Node) -> None:
    config = TopicConfig(topic_name="P", read_queue_nums=4, write_queue_nums=4, attributes={"message.type": "PRIORITY"})
    assert await node.broker.topics.update(config) == ""
    for priority in (0, 9, 1, 2):
        await send(node, b"%d" % min(priority, 3), b="P", e=-1, i=f"_SYS_MSG_PRIORITY_\x01{priority}\x02")
    assert bodies(await pop_messages(node, topic="P", maxMsgNums=2)) == [b"3", b"2"]
    assert bodies(await pop_messages(node, topic="P")) == [b"1", b"0"]
    await send(node, b"none", b="P", e=1)
    [message] = await pop_messages(node, topic="P")
    assert message.handle.queue_id == 1


@pytest.mark.parametrize(("init_mode", "found"), [(0, [b"a", b"b"]), (1, [b"a", b"b"])])
async def test_first_pop_of_a_small_topic(node: Node, init_mode: int, found: list[bytes]) -> None:
    await send(node, b"a", b"b")
    assert bodies(await pop_messages(node, initMode=init_mode)) == found


async def test_first_pop_of_a_large_topic(tmp_path: Path) -> None:
    """Its first message is assumed to be on disk only: init mode MAX begins with the last message."""
    async with open_node(tmp_path, access_in_memory_bytes_max=100) as node:
        await send(node, b"a", b"b", b"c")
        assert bodies(await pop_messages(node, initMode=1)) == [b"c"]
        assert bodies(await pop_messages(node, initMode=0, consumerGroup="h")) == [b"a", b"b", b"c"]


async def test_first_pop_returns_what_it_took_before_a_queue_that_can_not_be_opened(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was an error, and the message of the first queue was not delivered until it was due again."""
    await send(node, b"a")
    await send(node, b"b", e=1)
    read = ConsumeQueue.read

    def read_first(queue: ConsumeQueue, *place: int) -> object:
        if queue is node.store.queues.get("TT", 1):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(queue, *place)

    monkeypatch.setattr("ha.broker.pop.taking.random.randrange", lambda _: 0)
    with monkeypatch.context() as patch:
        patch.setattr(ConsumeQueue, "read", read_first)
        assert bodies(await pop_messages(node, initMode=1)) == [b"a"]
        assert (await pop(node, initMode=1)).code == 2
    assert bodies(await pop_messages(node, initMode=1)) == [b"b"]


async def test_pop_goes_on_where_a_pull_consumer_was(node: Node) -> None:
    await send(node, b"a", b"b", b"c")
    await node.pull()
    assert (await node.ask(15, consumerGroup="g", topic="TT", queueId=0, commitOffset=1)).code == 0
    assert bodies(await pop_messages(node, maxMsgNums=1)) == [b"b"]
    assert node.broker.offsets.get("g", "TT", 0) == 2
    await send(node, b"d", b"e")
    await node.ask(15, consumerGroup="g", topic="TT", queueId=0, commitOffset=4)
    assert bodies(await pop_messages(node)) == [b"e"]


async def test_reset_of_the_consumer_offset(node: Node) -> None:
    await send(node, b"a", b"b", b"c")
    old = await pop_messages(node)
    assert (await ack(node, old[0])).code == 0
    assert node.broker.offsets.reset("g", "TT", 0, 1)
    assert bodies(await pop_messages(node)) == [b"b", b"c"]
    assert (await ack(node, old[1])).code == 0  # has no effect if it was popped again later
    await trio.sleep(11)
    assert len(await pop_messages(node)) <= 2


async def test_fast_port_and_unknown_group(tmp_path: Path) -> None:
    async with open_node(tmp_path, auto_create_group=False) as node:
        await send(node, b"a")
        assert (await pop(node)).code == 26
        node.address = "fast"
        assert (await pop(node)).code == 3


async def test_fast_port_takes_no_acknowledgements(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node)
    node.address = "fast"
    assert (await ack(node, message)).code == 3
    assert (await node.ask(200151, b'{"brokerName":"b0","acks":[]}')).code == 3
    assert (await change(node, message, 5_000))[0].code == 3


# ---- redelivery


async def test_redelivery_comes_exactly_when_the_invisible_time_is_over(node: Node) -> None:
    await send(node, b"a", b"b")
    began = trio.current_time()
    [first, second] = await pop_messages(node, invisibleTime=3000)
    assert (await ack(node, second)).code == 0
    answer = await pop(node, pollTime=10_000)
    assert trio.current_time() - began == pytest.approx(3.0, abs=0.002)
    [again] = popped_of(answer)
    assert (again.body, again.handle.flag, again.topic) == (b"a", 1, "%RETRY%g_TT")
    assert again.record.reconsume_times == 1
    assert again.record.property_map()["TAGS"] == "TagA"
    assert again.record.property_map()["ORIGIN_GROUP"] == "g"
    assert again.record.property_map()["1ST_POP_TIME"] == str(first.handle.pop_time_ms)
    assert again.record.born_timestamp_ms == first.record.born_timestamp_ms


async def test_retries_return_to_the_same_topic_until_acknowledged(node: Node) -> None:
    await send(node, b"a")
    for times in range(4):
        [message] = await pop_messages(node, invisibleTime=1000, pollTime=5000)
        assert (message.record.reconsume_times, message.topic) == (times, "%RETRY%g_TT" if times else "TT")
    assert (await ack(node, message)).code == 0
    await trio.sleep(5)
    assert await pop_messages(node) == []
    assert not [topic for topic in node.broker.topics.table if topic.startswith("%RETRY%%RETRY%")]


@pytest.mark.parametrize("filler", [b"x", b"\xff"])
async def test_message_without_room_for_further_properties_is_delivered_again(node: Node, filler: bytes) -> None:
    """Bytes that are not UTF-8 stay as they are, in place of three bytes each."""
    raw = b"filler\x01%b\x02" % (filler * (PROPERTIES_SIZE_MAX - 8))
    await send(node, b"first", e=1)
    await node.broker.put_service.put([Message("TT", 0, b"full", raw)])
    await node.dispatched()
    for _ in range(3):
        answer = await pop(node, invisibleTime=1000, maxMsgNums=1, queueId=0)
        assert [record.body for record in decode_records(answer.body)] == [b"full"]
        await trio.sleep(2)


@pytest.mark.parametrize("room", range(0, 200, 20))
async def test_retry_with_little_room_for_its_handle_is_acknowledged(node: Node, room: int) -> None:
    raw = b"filler\x01%b\x02" % (b"x" * (PROPERTIES_SIZE_MAX - 8 - room))
    await send(node, b"first", e=1)
    await node.broker.put_service.put([Message("TT", 0, b"full", raw)])
    await node.dispatched()
    await pop(node, invisibleTime=1000, queueId=0)
    await trio.sleep(2)
    [popped] = read_popped(await pop(node, invisibleTime=1000, queueId=0), "b0")
    fields: dict[str, Any] = popped.receipt.ack_request("g", "TT").to_ext_fields()
    acknowledged = await node.ask(200051, **fields)
    assert (popped.record.body, acknowledged.code) == (b"full", 0)
    await trio.sleep(20)
    assert (await pop(node, queueId=0)).code == 210


async def test_number_of_retries_has_a_largest_value(node: Node) -> None:
    await send(node, b"a", j=2**31 - 1)
    for _ in range(2):
        [message] = await pop_messages(node, invisibleTime=1000)
        assert message.record.reconsume_times == 2**31 - 1
        await trio.sleep(2)


async def test_retry_topic_v2_and_v1_beside_it(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await send(node, b"a")
        await pop_messages(node, invisibleTime=1000)
        await trio.sleep(2)
    async with open_node(tmp_path, enable_retry_topic_v2=True) as node:
        await send(node, b"b")
        messages = await pop_messages(node, invisibleTime=1000)
        assert {(message.body, message.handle.flag) for message in messages} == {(b"a", 1), (b"b", 0)}
        messages = await pop_messages(node, pollTime=5000)
        await trio.sleep(1)
        messages += await pop_messages(node)
        assert {(message.body, message.handle.flag) for message in messages} == {(b"a", 1), (b"b", 2)}
        for message in messages:
            assert (await ack(node, message)).code == 0
        await trio.sleep(20)
        assert await pop_messages(node) == []


async def test_a_retry_topic_is_popped_by_its_own_name_beside_its_topic(node: Node) -> None:
    """Both wait, and the topic's request waits for the retry topic, too."""
    await send(node, b"0")
    await pop_messages(node, invisibleTime=1000)
    await trio.sleep(2)
    [again] = await pop_messages(node)
    await ack(node, again)
    codes = []

    async def wait(**changes: Any) -> None:
        codes.append((await pop(node, **changes)).code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(wait, pollTime=1000))
        await wait_all_tasks_blocked()
        nursery.start_soon(partial(wait, pollTime=2000, topic="%RETRY%g_TT"))
    assert codes == [210, 210]
    assert (await node.send(b"1")).code == 0


async def test_retry_topic_comes_first_now_and_then(node: Node) -> None:
    """A topic that is never empty does not keep retries waiting."""
    await send(node, b"failed")
    await pop_messages(node, invisibleTime=1000)
    await trio.sleep(2)
    await send(node, *(b"new" for _ in range(100)))
    found = [(await pop_messages(node, maxMsgNums=1))[0].body for _ in range(100)]
    assert found.count(b"failed") == 1, "the chance that all 100 pops read the topic first is 2e-10"


async def test_each_group_pops_from_each_queue_first(node: Node) -> None:
    """Of two groups that pop in turn, each began with the same queue every time."""
    for queue_id in range(2):
        for _ in range(40):
            assert (await node.send(b"m", e=queue_id, d=2)).code == 0
    found: dict[str, set[int]] = {"g": set(), "h": set()}
    for _ in range(40):
        for group, queues in found.items():
            [message] = await pop_messages(node, consumerGroup=group, maxMsgNums=1)
            queues.add(message.record.queue_id)
    assert found == {"g": {0, 1}, "h": {0, 1}}


# ---- change of the invisible time


async def test_change_delays_and_gives_a_new_handle(node: Node) -> None:
    await send(node, b"a")
    began = trio.current_time()
    [message] = await pop_messages(node, invisibleTime=2000)
    await trio.sleep(1)
    answer, renewed = await change(node, message, 5000)
    assert (answer.code, answer.ext_fields["invisibleTime"]) == (0, "5000")
    assert int(answer.ext_fields["popTime"]) - message.handle.pop_time_ms == 1000
    assert (await ack(node, message)).code == 0  # the old handle
    [again] = await pop_messages(node, pollTime=20_000)
    assert trio.current_time() - began == pytest.approx(6.0, abs=0.002)
    assert again.record.reconsume_times == 1
    assert (await ack(node, renewed)).code == 0


async def test_change_replaces_a_handle_of_the_same_millisecond(node: Node) -> None:
    await send(node, b"a")
    [old] = await pop_messages(node)
    _, new = await change(node, old, 5_000)
    assert new.handle.pop_time_ms == old.handle.pop_time_ms + 1
    assert (await ack(node, old)).code == 0
    await trio.sleep(5.1)
    assert bodies(await pop_messages(node)) == [b"a"]


async def test_change_to_zero_and_suspend(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node)
    began = trio.current_time()
    answer, _ = await change(node, message, 0, suspend=True)
    assert answer.code == 0
    [again] = await pop_messages(node, pollTime=5000)
    assert trio.current_time() - began < 0.2
    assert again.record.reconsume_times == 0


async def test_renewed_handle_acknowledges(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node)
    for _ in range(5):
        await trio.sleep(8)
        _, message = await change(node, message, 10_000)
    assert (await ack(node, message)).code == 0
    await trio.sleep(30)
    assert await pop_messages(node) == []


async def test_change_checks(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node)
    assert (await change(node, message, 1000, topic="X"))[0].code == 17
    assert (await change(node, message, 1000, queueId=5))[0].code == 13
    assert (await change(node, message, 1000, offset=1))[0].code == 208
    assert (await change(node, message, -1))[0].code == 29
    assert (await change(node, message, 1000, extraInfo="x"))[0].code == 1


async def test_change_after_an_ack_does_not_deliver_again(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node)
    assert (await ack(node, message)).code == 0
    assert (await change(node, message, 1000))[0].code == 0
    await trio.sleep(20)
    assert await pop_messages(node) == []


# ---- limits and figures


async def test_messages_in_flight_are_limited(tmp_path: Path) -> None:
    async with open_node(tmp_path, pop_in_flight_per_queue_max=3) as node:
        await send(node, *(b"%d" % number for number in range(5)))
        messages = await pop_messages(node)
        assert bodies(messages) == [b"0", b"1", b"2"]
        assert (await pop(node)).code == 210
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def wait() -> None:
                assert bodies(await pop_messages(node, pollTime=5000)) == [b"3"]
                assert trio.current_time() == acknowledged_at

            await trio.sleep(1)
            acknowledged_at = trio.current_time()
            assert (await ack(node, messages[0])).code == 0


@pytest.mark.parametrize("is_acknowledged", [True, False])
async def test_messages_in_flight_of_all_groups_are_limited(tmp_path: Path, is_acknowledged: bool) -> None:
    """A pop that waits takes a message as soon as one of another group is acknowledged, or due again."""
    async with open_node(tmp_path, pop_in_flight_max=2) as node:
        await send(node, b"a", b"b", b"c")
        messages = await pop_messages(node, consumerGroup="h", invisibleTime=3000)
        assert bodies(messages) == [b"a", b"b"]
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def wait() -> None:
                assert bodies(await pop_messages(node, pollTime=9000, maxMsgNums=1)) == [b"a"]
                assert trio.current_time() == (0 if is_acknowledged else 3)

            await wait_all_tasks_blocked()
            if is_acknowledged:
                await ack(node, messages[0], consumerGroup="h")


async def in_flight_of(node: Node) -> tuple[int, GroupInFlight | None]:
    """The figures of request 208, and those of the dashboard."""
    found = decode_consume_stats((await node.ask(208, consumerGroup="g", topic="TT")).body)[0]
    return sum(each.pull_offset - each.consumer_offset for each in found.values()), node.broker.pop.group("g")


async def test_statistics(node: Node) -> None:
    await send(node, b"a", b"b")
    [first, _] = await pop_messages(node, invisibleTime=1000)
    assert node.broker.pop.statistics().in_flight_count == 2
    shown = node.broker.pop.group("g")
    assert shown is not None
    popped_ms = shown.oldest_pop_ms
    assert await in_flight_of(node) == (2, GroupInFlight(in_flight_count=2, oldest_pop_ms=popped_ms, revived_count=0))
    await ack(node, first)
    assert node.broker.pop.statistics().in_flight_count == 1
    assert await in_flight_of(node) == (1, GroupInFlight(in_flight_count=1, oldest_pop_ms=popped_ms, revived_count=0))
    await trio.sleep(2)
    assert await in_flight_of(node) == (0, GroupInFlight(in_flight_count=0, oldest_pop_ms=None, revived_count=1))
    assert node.broker.pop.group("other") is None
    found = node.broker.pop.statistics()
    assert (found.in_flight_count, found.revived_count, found.lost_count, found.next_due_ms) == (0, 1, 0, None)


async def test_oneway_ack_counts(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node, invisibleTime=1000)
    await node.ask(200051, **ack_fields(message))
    await trio.sleep(5)
    assert await pop_messages(node) == []


async def test_queues_of_all_groups_are_limited(tmp_path: Path) -> None:
    async with open_node(tmp_path, offset_key_count_max=2) as node:
        for queue_id in range(4):
            await send(node, b"%d" % queue_id, e=queue_id)
        assert len(await pop_messages(node)) == 2
        assert await pop_messages(node) == []


async def test_names_that_leave_no_room_for_a_retry_topic_are_refused(node: Node) -> None:
    """The message was dropped when it was due."""
    group, topic = "g" * 120, "t" * 127
    await send(node, b"one", b=topic)
    assert (await pop(node, consumerGroup=group + "g", topic=topic)).code == 29
    assert bodies(await pop_messages(node, consumerGroup=group, topic=topic)) == [b"one"]
    await trio.sleep(20)
    assert bodies(await pop_messages(node, consumerGroup=group, topic=topic)) == [b"one"]


async def test_retries_of_a_deleted_topic_are_deleted_with_it(node: Node) -> None:
    """RocketMQ: clearRetryTopicWhenDeleteTopic. A topic of the same name got them."""
    await send(node, b"old")
    assert bodies(await pop_messages(node)) == [b"old"]
    await trio.sleep(20)
    assert node.broker.topics.get("%RETRY%g_TT") is not None
    assert (await node.ask(200, b'{"groupName":"h_TT"}')).code == 0
    await node.broker.topics.ensure("%RETRY%h_TT", 1)
    assert bodies(await pop_messages(node, consumerGroup="h")) == [b"old"]
    assert (await node.ask(215, topic="TT")).code == 0
    assert node.broker.topics.get("%RETRY%g_TT") is None
    assert node.broker.topics.get("%RETRY%h_TT") is not None, "of the group h_TT"
    await send(node, b"new")
    assert bodies(await pop_messages(node)) == [b"new"]
