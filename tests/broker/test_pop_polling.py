"""POP: requests that wait for messages, notifications, and peeks (spec pop.md)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.pop.state import Limits
from ha.broker.pop.taking import Taker
from ha.broker.queue_read import QueueRead, ReadStatus
from ha.protocol.record import Message
from ha.protocol.remoting import RemotingCommand, encode_command
from ha.protocol.remoting_protocol import CloseCause
from tests.broker.node import Node, open_node, text
from tests.broker.pop_client import POP, ack, bodies, pop, pop_messages, popped_of, send


async def test_poll_ends_exactly(node: Node) -> None:
    await send(node, b"a")
    await pop_messages(node, invisibleTime=100_000)
    for poll_ms in (1500, 20_000):
        began = trio.current_time()
        assert (await pop(node, pollTime=poll_ms)).code == 210
        assert trio.current_time() - began == poll_ms / 1000


async def test_arrival_wakes_one_of_many(node: Node) -> None:
    await send(node, b"a")
    await pop_messages(node, invisibleTime=100_000)
    found: list[tuple[float, list[bytes]]] = []
    began = trio.current_time()

    async def wait() -> None:
        messages = await pop_messages(node, pollTime=9000)
        found.append((trio.current_time() - began, bodies(messages)))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
        await trio.sleep(2)
        assert (await node.ask(200055, consumerGroup="g", topic="TT", queueId=-1)).ext_fields["pollingNum"] == "3"
        await send(node, b"b")
        await trio.sleep(1)
        await send(node, b"c", e=3)
    assert sorted(found) == [(2.0, [b"b"]), (3.0, [b"c"]), (9.0, [])]


async def test_batch_is_handed_out_to_all_who_wait(node: Node) -> None:
    await send(node, b"a")
    await pop_messages(node, invisibleTime=100_000)
    found: list[bytes] = []

    async def wait() -> None:
        found.extend(bodies(await pop_messages(node, pollTime=9000, maxMsgNums=1)))

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as senders:
            for number in range(5):
                senders.start_soon(partial(send, node, b"%d" % number))
    assert sorted(found) == [b"0", b"1", b"2", b"3", b"4"]
    assert trio.current_time() - began < 1


async def test_messages_that_a_pop_of_all_queues_leaves_wake_another_one(node: Node) -> None:
    """A request for a queue without messages was woken instead."""
    await send(node, b"a")
    await pop_messages(node, invisibleTime=100_000)
    found: list[tuple[int, float, list[bytes]]] = []
    began = trio.current_time()

    async def wait(queue_id: int) -> None:
        answer = await node.ask_alone(200050, **{**POP, "queueId": queue_id, "pollTime": 9000, "maxMsgNums": 1})
        found.append((queue_id, trio.current_time() - began, bodies(popped_of(answer))))

    async with trio.open_nursery() as nursery:
        for queue_id in (3, -1, -1):
            nursery.start_soon(wait, queue_id)
            await wait_all_tasks_blocked()
        await node.broker.put_service.put([Message("TT", 0, b"b"), Message("TT", 0, b"c")])
    assert sorted(found) == [(-1, 0.0, [b"b"]), (-1, 0.0, [b"c"]), (3, 9.0, [])]


async def test_pop_of_no_messages_is_not_woken_instead_of_another(node: Node) -> None:
    await send(node, b"a")
    await pop_messages(node, invisibleTime=100_000)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for count_max in (0, 1):
            fields = {**POP, "pollTime": 9000, "maxMsgNums": count_max}
            nursery.start_soon(partial(node.ask_alone, 200050, **fields))
            await wait_all_tasks_blocked()
        await send(node, b"b")
    assert trio.current_time() == began


async def test_reset_of_a_retry_topic_wakes_a_request_for_another_queue(node: Node) -> None:
    await send(node, b"a")
    await pop_messages(node, invisibleTime=1000)
    await trio.sleep(2)
    await ack(node, *await pop_messages(node))
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait() -> None:
            assert bodies(await pop_messages(node, queueId=3, pollTime=9000)) == [b"a"]
            assert trio.current_time() == began

        await wait_all_tasks_blocked()
        assert node.broker.offsets.reset("g", "%RETRY%g_TT", 0, 0)


async def test_messages_that_a_pop_leaves_in_a_retry_topic_wake_a_request_for_another_queue(node: Node) -> None:
    await send(node, b"a", b"b")
    await pop_messages(node, invisibleTime=1000)
    await trio.sleep(2)
    for message in await pop_messages(node):
        await ack(node, message)
    began = trio.current_time()
    found: list[bytes] = []

    async def wait(queue_id: int) -> None:
        fields = {**POP, "queueId": queue_id, "maxMsgNums": 1, "pollTime": 9000}
        found.extend(bodies(popped_of(await node.ask_alone(200050, **fields))))
        assert trio.current_time() == began

    async with trio.open_nursery() as nursery:
        for queue_id in (2, 3):
            nursery.start_soon(wait, queue_id)
            await wait_all_tasks_blocked()
        assert node.broker.offsets.reset("g", "%RETRY%g_TT", 0, 0)
    assert sorted(found) == [b"a", b"b"]


async def test_copy_in_a_retry_topic_wakes_no_request_in_order_mode(node: Node) -> None:
    """Such requests don't read retry topics."""
    await send(node, b"a")
    await pop_messages(node, invisibleTime=2000)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for order in (True, False):
            fields = {**POP, "pollTime": 9000, "order": order, "queueId": 3}
            nursery.start_soon(partial(node.ask_alone, 200050, **fields))
            await wait_all_tasks_blocked()
        await trio.sleep(3)
        assert len(node.broker.pop.holds) == 1
        assert node.broker.pop.statistics().in_flight_count == 1
    assert trio.current_time() - began == 9.0


def slow_read(node: Node, monkeypatch: pytest.MonkeyPatch, *bodies: bytes) -> None:
    """Makes the next read with an SQL filter take 1 s: `bodies`, with the tag x, arrive behind what it has read."""
    real = Taker._read
    left = [bodies]

    async def read(taker: Taker, wanted: Any) -> Any:
        found = await real(taker, wanted)
        if left:
            await node.broker.put_service.put([Message("TT", 0, body, b"TAGS\x01x\x02") for body in left.pop()])
            await node.dispatched()
            await trio.sleep(1)
        return found

    monkeypatch.setattr(Taker, "_read", read)


async def test_arrival_while_a_pop_reads_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_node(tmp_path, enable_property_filter=True) as node:
        await send(node, b"a")
        await pop_messages(node, invisibleTime=100_000)
        slow_read(node, monkeypatch, b"b")
        began = trio.current_time()
        fields = {"queueId": 0, "exp": "TRUE", "expType": "SQL92", "pollTime": 9000}
        assert bodies(await pop_messages(node, **fields)) == [b"b"]
        assert trio.current_time() - began < 2


async def test_arrival_in_a_queue_that_another_pop_reads_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that it wakes finds the queue busy, and waits again."""
    async with open_node(tmp_path, enable_property_filter=True) as node:
        await send(node, b"a")
        await ack(node, *await pop_messages(node))
        found: list[tuple[float, list[bytes]]] = []
        began = trio.current_time()

        async def wait(**changes: Any) -> None:
            messages = await pop_messages(node, **changes, queueId=0, maxMsgNums=1, pollTime=9000)
            found.append((trio.current_time() - began, bodies(messages)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(wait, exp="x", expType="TAG"))
            await wait_all_tasks_blocked()
            await send(node, b"b")
            slow_read(node, monkeypatch, b"c")
            nursery.start_soon(partial(wait, exp="TRUE", expType="SQL92"))
        assert sorted(found) == [(1.0, [b"b"]), (1.0, [b"c"])]


async def test_arrival_in_a_queue_that_a_pop_reads_is_not_missed_if_it_finds_messages_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that it wakes finds the queue busy; the pop has selected no message there."""
    async with open_node(tmp_path, enable_property_filter=True) as node:
        await send(node, b"a")
        await ack(node, *await pop_messages(node))
        found: dict[str, tuple[float, list[bytes]]] = {}
        began = trio.current_time()

        async def wait(queue_id: int, filter_type: str, filter_: str) -> None:
            fields = {"queueId": queue_id, "exp": filter_, "expType": filter_type, "pollTime": 9000}
            messages = await pop_messages(node, **fields)
            found[filter_type] = trio.current_time() - began, bodies(messages)

        monkeypatch.setattr("ha.broker.pop.taking.random.randrange", lambda _: 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, 0, "TAG", "x")
            await wait_all_tasks_blocked()
            await send(node, b"not selected")
            await send(node, b"c", e=1, i="TAGS\x01x\x02")
            slow_read(node, monkeypatch, b"b")
            nursery.start_soon(wait, -1, "SQL92", "TAGS = 'x'")
        assert found["SQL92"] == (1.0, [b"b", b"c"])


@pytest.fixture
def may_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> tuple[trio.Event, trio.Event]:
    """Events for which pops wait before they read queue 0 and the other queues; pops begin with queue 0."""
    reader = node.broker.pop.requests._taker._reader
    read, may_read = reader.read, (trio.Event(), trio.Event())

    async def read_slowly(queue: Any, *arguments: Any, **options: Any) -> QueueRead:
        await may_read[0 if queue is node.store.queues.get("TT", 0) else 1].wait()
        return await read(queue, *arguments, **options)

    monkeypatch.setattr(reader, "read", read_slowly)
    monkeypatch.setattr(reader, "read_nowait", lambda *_, **__: None)
    monkeypatch.setattr("ha.broker.pop.taking.random.randrange", lambda _: 0)
    return may_read


async def test_messages_that_another_pop_left_in_a_queue_are_not_missed(
    node: Node, may_read: tuple[trio.Event, trio.Event]
) -> None:
    """The second pop skips the queue that the first one reads, which ends while the second one reads the next queue."""
    await send(node, b"0", b"1")
    found: list[bytes] = []

    async def wait(queue_id: int) -> None:
        fields = {**POP, "queueId": queue_id, "maxMsgNums": 1, "pollTime": 9000}
        found.extend(bodies(popped_of(await node.ask_alone(200050, **fields))))

    began = trio.current_time()
    async with trio.open_nursery() as nursery, node.store.log.appends_held():
        for queue_id in (0, -1):
            nursery.start_soon(wait, queue_id)
            await wait_all_tasks_blocked()
        for event in may_read:
            event.set()
            await wait_all_tasks_blocked()
    assert sorted(found) == [b"0", b"1"]
    assert trio.current_time() == began


async def test_room_in_a_queue_that_a_pop_skipped_is_not_missed(
    node: Node, may_read: tuple[trio.Event, trio.Event]
) -> None:
    """A message is acknowledged while the pop, which skipped its queue, reads the next one."""
    await send(node, b"0", b"1")
    may_read[0].set()
    [message] = await pop_messages(node, queueId=0, maxMsgNums=1)
    state = node.broker.pop._pop_log.state
    assert state is not None
    state.limits = Limits(per_queue=1, total=2, queue_count=100)
    began = trio.current_time()
    async with trio.open_nursery() as nursery, node.store.log.appends_held():

        @nursery.start_soon
        async def wait() -> None:
            answer = await node.ask_alone(200050, **{**POP, "pollTime": 9000})
            assert bodies(popped_of(answer)) == [b"1"]
            assert trio.current_time() == began

        await wait_all_tasks_blocked()
        nursery.start_soon(ack, node, message)
        await wait_all_tasks_blocked()
        may_read[1].set()
        await wait_all_tasks_blocked()


async def test_pop_that_can_not_read_waits_although_other_topics_get_messages(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the damaged message again and again while the broker was busy."""
    await send(node, b"damaged")
    await send(node, b"other", b="Other")
    reader = node.broker.pop.requests._taker._reader
    read_at: list[float] = []

    async def read(queue: Any, offset: int, **limits: Any) -> QueueRead:
        read_at.append(trio.current_time() - began)
        assert len(read_at) < 10
        await node.broker.put_service.put([Message("Other", 0, b"other")])
        await node.dispatched()
        return QueueRead(ReadStatus.OFFSET_FOUND_NULL, offset, 0, 1)

    monkeypatch.setattr(reader, "read", read)
    monkeypatch.setattr(reader, "read_nowait", lambda *_, **__: None)
    began = trio.current_time()
    assert (await pop(node, queueId=0, pollTime=9000)).code == 210
    assert read_at == [0.0, 9.0]


async def test_request_that_can_not_be_held_again_ends_nothing(node: Node) -> None:
    """Its first deadline was kept behind an earlier one, and ended it although it was not held: so did the broker."""
    await send(node, b"a")
    await pop_messages(node, invisibleTime=100_000)
    holds = node.broker.pop.holds
    began = trio.current_time()
    found: list[tuple[float, int]] = []

    async def wait(group: str, poll_ms: int) -> None:
        answer = await node.ask_alone(200050, **{**POP, "consumerGroup": group, "pollTime": poll_ms, "queueId": 3})
        found.append((trio.current_time() - began, answer.code))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "h", 2000)
        nursery.start_soon(wait, "g", 5000)
        await wait_all_tasks_blocked()
        holds._hold_count_max = 1
        holds.wake_one("TT", "g")
    await trio.sleep(5)
    assert found == [(0.0, 209), (2.0, 210)]
    assert len(holds) == 0


@pytest.mark.parametrize("is_reading", [False, True])
async def test_reset_of_the_offset_while_a_pop_waits_or_reads_is_not_missed(
    node: Node, may_read: tuple[trio.Event, trio.Event], is_reading: bool
) -> None:
    may_read[1].set()
    await send(node, b"0", b"1")
    if not is_reading:
        may_read[0].set()
        assert (await pop(node)).code == 0
    began = trio.current_time()
    async with trio.open_nursery() as nursery, node.store.log.appends_held():

        @nursery.start_soon
        async def wait() -> None:
            assert bodies(await pop_messages(node, pollTime=9000)) == [b"1"]
            assert trio.current_time() == began

        await wait_all_tasks_blocked()
        assert len(node.broker.pop.holds) == (not is_reading)
        assert node.broker.offsets.reset("g", "TT", 0, 1)
        may_read[0].set()
        await wait_all_tasks_blocked()


async def test_reset_to_the_offset_that_a_pop_is_reading_repeats_nothing(
    node: Node, may_read: tuple[trio.Event, trio.Event]
) -> None:
    """The messages, which were read after the reset, were delivered again to the next pop."""
    may_read[1].set()
    await send(node, b"0", b"1")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait() -> None:
            assert bodies(await pop_messages(node)) == [b"0", b"1"]

        await wait_all_tasks_blocked()
        assert node.broker.offsets.reset("g", "TT", 0, 0)
        may_read[0].set()
    assert node.broker.offsets.get("g", "TT", 0) == 2
    assert await pop_messages(node) == []


async def test_only_a_selected_tag_wakes(node: Node) -> None:
    await send(node, b"a")
    await pop_messages(node, invisibleTime=100_000)
    began = trio.current_time()

    async def send_later() -> None:
        for tag in "AB":
            await trio.sleep(1)
            await send(node, tag.encode(), i=f"TAGS\x01{tag}\x02")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_later)
        assert bodies(await pop_messages(node, pollTime=9000, exp="B", expType="TAG")) == [b"B"]
        assert trio.current_time() - began == 2.0


async def test_polling_is_limited(tmp_path: Path) -> None:
    async with open_node(tmp_path, hold_count_max=2) as node:
        await send(node, b"a")
        await pop_messages(node, invisibleTime=100_000)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(partial(pop, node, pollTime=5000))
            await wait_all_tasks_blocked()
            answer = await pop(node, pollTime=5000)
            assert (answer.code, answer.remark) == (209, "NO_MESSAGE_IN_QUEUE")
            fields: dict[str, Any] = {
                "consumerGroup": "g",
                "topic": "TT",
                "queueId": -1,
                "pollTime": 5000,
                "bornTime": 0,
            }
            answer = await node.ask(200054, **fields)
            assert (answer.code, answer.ext_fields) == (0, {"hasMsg": "false", "pollingFull": "true"})


async def test_closed_connection_passes_its_turn_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A woken request whose connection has closed meanwhile wakes the next one."""
    await send(node, b"a")
    await pop_messages(node, invisibleTime=100_000)
    stream = node.listener.connect()
    fields = {name: text(value) for name, value in {**POP, "pollTime": 50_000}.items()}
    await stream.send_all(encode_command(RemotingCommand(200050, opaque=1, ext_fields=fields)))
    await wait_all_tasks_blocked()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait() -> None:
            assert bodies(await pop_messages(node, pollTime=50_000)) == [b"b"]
            assert trio.current_time() == began

        await wait_all_tasks_blocked()
        holds = node.broker.pop.holds
        assert len(holds) == 2
        first = next(iter(holds._by_topic["TT"]["g", "TT"].by_queue[-1])).connection
        monkeypatch.setattr(type(first), "is_closed", property(lambda connection: connection is first))
        await send(node, b"b")
    await stream.aclose()


async def test_closed_connection_passes_its_turn_on_to_a_request_for_the_same_queue(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one of the group waits for longer, but for another queue."""
    await send(node, b"a")
    await pop_messages(node, invisibleTime=100_000)
    began = trio.current_time()
    found: dict[int, tuple[float, list[bytes]]] = {}

    async def wait(queue_id: int) -> None:
        answer = await node.ask_alone(200050, **{**POP, "queueId": queue_id, "pollTime": 9000})
        found[queue_id] = trio.current_time() - began, bodies(popped_of(answer))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, 3)
        await wait_all_tasks_blocked()
        stream = node.listener.connect()
        fields = {name: text(value) for name, value in {**POP, "queueId": 0, "pollTime": 9000}.items()}
        await stream.send_all(encode_command(RemotingCommand(200050, opaque=1, ext_fields=fields)))
        await wait_all_tasks_blocked()
        nursery.start_soon(wait, 0)
        await wait_all_tasks_blocked()
        closed = next(iter(node.broker.pop.holds._by_topic["TT"]["g", "TT"].by_queue[0])).connection
        with monkeypatch.context() as patch:
            patch.setattr(type(closed), "is_closed", property(lambda connection: connection is closed))
            await send(node, b"b")
            await wait_all_tasks_blocked()
    assert found == {0: (0.0, [b"b"]), 3: (9.0, [])}
    await stream.aclose()


async def test_messages_of_a_queue_are_not_missed_if_the_connection_whose_pop_reads_it_closes(
    node: Node, may_read: tuple[trio.Event, trio.Event]
) -> None:
    """Another request has skipped the queue, and waits."""
    await send(node, b"0")
    others = set(node.broker.servers[0].connections)
    stream = node.listener.connect()
    fields = {name: text(value) for name, value in {**POP, "queueId": 0}.items()}
    await stream.send_all(encode_command(RemotingCommand(200050, opaque=1, ext_fields=fields)))
    await wait_all_tasks_blocked()
    began = trio.current_time()
    may_read[1].set()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait() -> None:
            assert bodies(await pop_messages(node, pollTime=9000)) == [b"0"]
            assert trio.current_time() == began

        await wait_all_tasks_blocked()
        assert len(node.broker.pop.holds) == 1
        [connection] = set(node.broker.servers[0].connections) - others
        connection.close(CloseCause.PEER_DOES_NOT_READ)
        await wait_all_tasks_blocked()
        may_read[0].set()
    await stream.aclose()


# ---- notification, peek


async def test_notification(node: Node) -> None:
    fields: dict[str, Any] = {"consumerGroup": "g", "topic": "TT", "queueId": -1, "pollTime": 5000, "bornTime": 0}
    await send(node, b"a")
    assert (await node.ask(200054, **fields)).ext_fields["hasMsg"] == "true"
    assert bodies(await pop_messages(node)) == [b"a"]
    began = trio.current_time()
    answer = await node.ask(200054, **fields)
    assert (answer.code, answer.ext_fields["hasMsg"], trio.current_time() - began) == (0, "false", 5.0)
    answer = await node.ask(200054, **{**fields, "pollTime": 9000})
    assert answer.ext_fields["hasMsg"] == "true"
    assert trio.current_time() - began == pytest.approx(10.0, abs=0.01)
    assert (await node.ask(200054, **{**fields, "topic": "X"})).code == 17


async def test_notification_takes_no_turn_from_a_pop(node: Node) -> None:
    """Its client may only want to know that there are messages. One message wakes only one notification."""
    fields: dict[str, Any] = {"consumerGroup": "g", "topic": "TT", "queueId": -1, "pollTime": 9000, "bornTime": 0}
    await send(node, b"a")
    await ack(node, *await pop_messages(node))
    began = trio.current_time()
    found: dict[str, tuple[object, float]] = {}

    async def notify(name: str) -> None:
        answer = await node.ask_alone(200054, **fields)
        found[name] = answer.ext_fields["hasMsg"], trio.current_time() - began

    async def wait(name: str) -> None:
        answer = await node.ask_alone(200050, **{**POP, "pollTime": 9000})
        found[name] = bodies(popped_of(answer)), trio.current_time() - began

    async with trio.open_nursery() as nursery:
        for task, name in ((notify, "first"), (notify, "second"), (wait, "pop")):
            nursery.start_soon(task, name)
            await wait_all_tasks_blocked()
        await send(node, b"b")
    assert found == {"first": ("true", 0.0), "second": ("false", 9.0), "pop": ([b"b"], 0.0)}


async def test_peek_after_deleted_messages(node: Node) -> None:
    fields: dict[str, Any] = {"consumerGroup": "g", "topic": "TT", "queueId": 0, "maxMsgNums": 2}
    await send(node, b"a", b"b", b"c", b"d", b"e")
    await pop_messages(node, maxMsgNums=1)
    queue = node.store.queues.get("TT", 0)
    assert queue is not None
    queue.correct_min(queue.read(2, 1)[0].physical_offset)  # as retention does
    answer = await node.ask(200052, **fields)
    assert (answer.code, answer.ext_fields["restNum"]) == (0, "1")
    assert [record.body for record in node.records(answer)] == [b"c", b"d"]


async def test_peek_takes_nothing(node: Node) -> None:
    fields: dict[str, Any] = {"consumerGroup": "g", "topic": "TT", "queueId": -1, "maxMsgNums": 2}
    await send(node, b"a", b"b", b"c")
    for _ in range(2):
        answer = await node.ask(200052, **fields)
        assert (answer.code, answer.ext_fields["restNum"]) == (0, "1")
        assert [record.body for record in node.records(answer)] == [b"a", b"b"]
    assert bodies(await pop_messages(node)) == [b"a", b"b", b"c"]
    assert (await node.ask(200052, **fields)).code == 19
