"""Transactions: stored messages, checks of open half messages, restarts and faults.

Times are virtual and exact.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.acknowledgement import Acknowledgements
from ha.broker.op_writer import OFFSET_COUNT_MAX
from ha.broker.options import BrokerRole
from ha.broker.transactions import OUTBOX_BYTES_MAX, PROGRESS_GROUP
from ha.protocol import java_json
from ha.protocol.codes import PutStatus, RequestCode
from ha.protocol.message_id import decode_message_id
from ha.protocol.properties import PROPERTIES_SIZE_MAX, encode_properties
from ha.protocol.record import Message, MessageRecord, decode_record
from ha.protocol.remoting import FLAG_ONEWAY, FRAME_SIZE_MAX, RemotingCommand, encode_command
from ha.protocol.remoting_protocol import CloseCause
from ha.protocol.topic_names import GIVEN_UP_TOPIC, HALF_TOPIC, OP_TOPIC
from ha.remoting import RemotingConnection
from ha.store.consume_queue import ConsumeQueue
from ha.store.record_maker import AppendResult
from tests.broker.few_descriptors import FewDescriptors
from tests.broker.node import Node, WallClock, open_node

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0


def half_properties(**more: str) -> str:
    return encode_properties({"TRAN_MSG": "true", "PGROUP": "pg", "TAGS": "TagA", **more}).decode()


async def send_half(node: Node, body: bytes = b"half", more: dict[str, str] | None = None, **changes: Any) -> Any:
    """Sends a half message to queue 1 of TT, born now."""
    born = WallClock()()
    ext = {"i": half_properties(**(more or {})), "f": 4, "e": 1, "g": born, **changes}
    return await node.send(body, **ext)


def place(answer: RemotingCommand) -> dict[str, Any]:
    """The ext fields of a 37 for the half message of `answer`."""
    return {
        "tranStateTableOffset": int(answer.ext_fields["queueOffset"]),
        "commitLogOffset": decode_message_id(answer.ext_fields["msgId"])[2],
    }


async def end(node: Node, half: Any, what: int, **changes: Any) -> RemotingCommand:
    where = half if isinstance(half, dict) else place(half)
    ext = {"producerGroup": "pg", "commitOrRollback": what, "msgId": "X", **where, **changes}
    return await node.ask(RequestCode.END_TRANSACTION, **ext)


async def records(node: Node, topic: str = "TT", queue_id: int = 1) -> list[MessageRecord]:
    """All records of a queue."""
    await node.dispatched()
    queue = node.store.queues.get(topic, queue_id)
    found = []
    for entry in [] if queue is None else queue.read(queue.min_offset, 10_000):
        found.append(decode_record(await node.store.log.read_all(entry.physical_offset, entry.size)))
    return found


async def be_producer(node: Node, group: str = "pg") -> None:
    body = java_json.dumps({"clientID": "c1", "producerDataSet": [{"groupName": group}], "consumerDataSet": []})
    assert (await node.ask(RequestCode.HEART_BEAT, body)).code == 0


def asked(node: Node) -> list[RemotingCommand]:
    return [command for command in node.received if command.code == RequestCode.CHECK_TRANSACTION_STATE]


def asked_place(command: RemotingCommand) -> dict[str, Any]:
    return {name: int(command.ext_fields[name]) for name in ("tranStateTableOffset", "commitLogOffset")}


async def test_commit(node: Node) -> None:
    answer = await send_half(node, h=7)
    assert (await end(node, answer, COMMIT)).code == 0
    [record] = await records(node)
    [half] = await records(node, HALF_TOPIC, 0)
    assert (record.body, record.flag, record.sys_flag) == (b"half", 7, 8)
    assert record.properties == half.properties
    assert record.prepared_transaction_offset == half.physical_offset
    assert (record.born_timestamp_ms, record.born_host) == (half.born_timestamp_ms, half.born_host)
    await trio.sleep(1)
    [op] = await records(node, OP_TOPIC, 0)
    assert (op.body, op.properties, op.born_host) == (b"0,", b"WAIT\x01true\x02TAGS\x01d\x02", op.store_host)
    assert 0 <= op.store_timestamp_ms - op.born_timestamp_ms < 1000
    assert (await node.pull(0, queueId=1, subscription="TagA")).code == 0


async def test_a_commit_after_the_immunity_time_counts(node: Node) -> None:
    """RocketMQ answers 604 to one that is no answer to a check (EndTransactionProcessor.rejectCommitOrRollback)."""
    answer = await send_half(node, more={"CHECK_IMMUNITY_TIME_IN_SECONDS": "1"})
    await trio.sleep(5)
    assert (await end(node, answer, COMMIT)).code == 0
    assert len(await records(node)) == 1


async def test_a_committed_timer_message_waits_from_the_commit_on(node: Node) -> None:
    answer = await send_half(node, more={"TIMER_DELAY_SEC": "60"})
    await trio.sleep(1)
    assert (await end(node, answer, COMMIT)).code == 0
    await trio.sleep(59.9)
    assert await records(node) == []
    await trio.sleep(0.2)
    [record] = await records(node)
    assert (record.body, record.sys_flag) == (b"half", 8)


async def test_a_commit_ends_the_half_message_although_its_connection_closes_meanwhile(node: Node) -> None:
    """It was stored, but not noted: the producer was asked again, and the message committed twice."""
    await be_producer(node)
    half = await send_half(node)
    others = set(node.broker.servers[0].connections)
    stream = node.listener.connect()
    async with node.store.log.appends_held():
        ext = {"producerGroup": "pg", "commitOrRollback": COMMIT, "msgId": "X", **place(half)}
        fields = {name: str(value) for name, value in ext.items()}
        await stream.send_all(encode_command(RemotingCommand(RequestCode.END_TRANSACTION, ext_fields=fields)))
        await wait_all_tasks_blocked()
        [connection] = set(node.broker.servers[0].connections) - others
        connection.close(CloseCause.PEER_DOES_NOT_READ)
        await wait_all_tasks_blocked()
    await stream.aclose()
    await trio.sleep(70)
    assert [record.body for record in await records(node)] == [b"half"]
    assert [op.body for op in await records(node, OP_TOPIC, 0)] == [b"0,"]
    assert asked(node) == []


async def test_rollback(node: Node) -> None:
    await be_producer(node)
    answer = await send_half(node)
    assert (await end(node, answer, ROLLBACK)).code == 0
    [op] = await records(node, OP_TOPIC, 0)  # which the answer has waited for
    assert op.body == b"0,"
    await trio.sleep(1000)
    assert not asked(node)
    assert not await records(node)


async def test_invalid_ends_are_refused(node: Node) -> None:
    answer = await send_half(node)
    other = await node.send(b"no half message", i=half_properties(TRAN_MSG="false"))
    where = place(answer)
    for changes, remark in (
        ({"producerGroup": "other"}, "The producer group wrong"),
        ({"tranStateTableOffset": 1}, "The transaction state table offset wrong"),
        ({"commitLogOffset": where["commitLogOffset"] + 1}, "Find prepared transaction message failed"),
        ({"commitLogOffset": 10**12}, "Find prepared transaction message failed"),
        ({"commitLogOffset": -1}, "Find prepared transaction message failed"),
        (place(other), "Find prepared transaction message failed"),
    ):
        for what in (COMMIT, ROLLBACK):
            refused = await end(node, {**where, **changes}, what)
            assert (refused.code, (refused.remark or "").partition(":")[0]) == (1, remark)
    assert (await end(node, answer, COMMIT, commitLogOffset="x")).code == 1
    with trio.move_on_after(5) as waited:
        await end(node, answer, UNKNOWN)
    assert waited.cancelled_caught
    with trio.move_on_after(5) as waited:
        await end(node, answer, 3)
    assert waited.cancelled_caught
    await trio.sleep(1)
    assert await records(node) == await records(node, OP_TOPIC, 0) == []


async def test_many_ends_share_op_messages(node: Node) -> None:
    halves = [await send_half(node, b"%d" % number) for number in range(OFFSET_COUNT_MAX + 44)]
    for half in halves:
        assert (await end(node, half, COMMIT)).code == 0
    await trio.sleep(1)
    found = await records(node, OP_TOPIC, 0)
    assert len(found) <= 3
    said = [int(part) for op in found for part in op.body.split(b",")[:-1]]
    assert sorted(said) == list(range(len(halves)))
    assert len(await records(node)) == len(halves)


async def test_check_is_sent_to_a_producer_of_the_group(node: Node) -> None:
    await be_producer(node)
    await trio.sleep(20)
    answer = await send_half(node, more={"KEYS": "k"}, h=7)
    await trio.sleep(9.9)
    assert not asked(node)
    await trio.sleep(0.2)
    [first, copy] = await records(node, HALF_TOPIC, 0)
    [command] = asked(node)
    assert command.flag & FLAG_ONEWAY
    assert {name: value for name, value in command.ext_fields.items() if name != "offsetMsgId"} == {
        "topic": HALF_TOPIC,
        "bname": "b0",
        "tranStateTableOffset": "1",
        "commitLogOffset": str(copy.physical_offset),
        "msgId": answer.ext_fields["transactionId"],
        "transactionId": answer.ext_fields["transactionId"],
    }
    assert decode_message_id(command.ext_fields["offsetMsgId"])[2] == copy.physical_offset
    told = decode_record(command.body)
    assert (told.topic, told.queue_id, told.queue_offset, told.physical_offset) == (
        "TT",
        1,
        1,
        copy.physical_offset,
    )
    assert (told.body, told.flag, told.sys_flag, told.properties) == (
        b"half",
        7,
        0,
        copy.properties + b"WAIT\x01false\x02",
    )
    assert copy.property_map() == {**first.property_map(), "TRANSACTION_CHECK_TIMES": "1"}
    assert (copy.flag, copy.born_timestamp_ms) == (7, first.born_timestamp_ms)
    assert (await end(node, asked_place(command), COMMIT, fromTransactionCheck=True)).code == 0
    [record] = await records(node)
    assert record.prepared_transaction_offset == copy.physical_offset
    await trio.sleep(200)
    assert len(asked(node)) == 1
    assert node.broker.offsets.of(PROGRESS_GROUP, HALF_TOPIC) == {0: 2}
    assert node.broker.offsets.of(PROGRESS_GROUP, OP_TOPIC) == {0: 1}
    statistics = node.broker.transactions.statistics()
    assert (statistics.asked_count, statistics.committed_count, statistics.open_count) == (1, 1, 0)


async def test_half_message_is_given_up_after_the_maximum_of_checks(tmp_path: Path) -> None:
    async with open_node(tmp_path, transaction_check_max=3) as node:
        await be_producer(node)
        await send_half(node)
        await trio.sleep(40 + 3 * 30)
        assert [command.ext_fields["tranStateTableOffset"] for command in asked(node)] == ["1", "2", "3"]
        assert [
            record.property_map().get("TRANSACTION_CHECK_TIMES") for record in await records(node, HALF_TOPIC, 0)
        ] == [
            None,
            "1",
            "2",
            "3",
        ]
        [record] = await records(node, GIVEN_UP_TOPIC, 0)
        assert (record.body, record.property_map()["REAL_TOPIC"]) == (b"half", "TT")
        await trio.sleep(1000)
        assert len(asked(node)) == 3
        assert len(await records(node, GIVEN_UP_TOPIC, 0)) == 1
        assert await records(node) == []
        assert node.broker.transactions.statistics().given_up_count == 1
        # It can still be ended.
        assert (await end(node, asked_place(asked(node)[-1]), COMMIT)).code == 0
        assert len(await records(node)) == 1


async def test_no_producer_is_connected(node: Node) -> None:
    await be_producer(node, "another")
    await send_half(node)
    await trio.sleep(70)
    assert asked(node) == []
    await be_producer(node)
    await trio.sleep(30)
    [command] = asked(node)
    assert command.ext_fields["tranStateTableOffset"] == "3"
    assert node.broker.transactions.statistics().unasked_count == 2


async def test_young_half_messages_are_not_checked(tmp_path: Path) -> None:
    async with open_node(tmp_path, transaction_timeout_s=10, transaction_check_interval_s=4) as node:
        await be_producer(node)
        await trio.sleep(1)
        await send_half(node)
        await trio.sleep(10.9)
        assert not asked(node)
        await trio.sleep(0.2)
        assert len(asked(node)) == 1
        assert len(await records(node, HALF_TOPIC, 0)) == 2


@pytest.mark.parametrize(("immunity", "asked_at"), [("60", 90), ("-1", 30), ("x", 30), ("0", 30)])
async def test_immunity_of_one_message(node: Node, immunity: str, asked_at: float) -> None:
    await be_producer(node)
    await trio.sleep(1)
    await send_half(node, more={"CHECK_IMMUNITY_TIME_IN_SECONDS": immunity})
    await send_half(node, b"another")
    await trio.sleep(asked_at - 1.1)
    assert b"half" not in [decode_record(command.body).body for command in asked(node)]
    await trio.sleep(0.2)
    assert b"half" in [decode_record(command.body).body for command in asked(node)]
    last = (await records(node, HALF_TOPIC, 0))[-1]
    if asked_at == 90:
        found = [record for record in await records(node, HALF_TOPIC, 0) if record.body == b"half"]
        assert [record.property_map().get("TRAN_PREPARED_QUEUE_OFFSET") for record in found] == [
            None,
            "0",
            "0",
            "0",
        ]
        assert found[-1].property_map()["TRANSACTION_CHECK_TIMES"] == "1"
    assert last.property_map()["TRANSACTION_CHECK_TIMES"]


async def test_a_half_message_born_in_the_future_is_checked_despite_its_immunity(node: Node) -> None:
    """It was stored again every 30 s, without a check, until the broker's clock had caught up."""
    await be_producer(node)
    ahead = WallClock()() + 86_400_000
    await send_half(node, more={"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"}, g=ahead)
    await trio.sleep(100)
    assert len(asked(node)) == 3
    await trio.sleep(3_600)
    assert len(await records(node, HALF_TOPIC, 0)) == 16
    assert len(await records(node, GIVEN_UP_TOPIC, 0)) == 1


async def test_end_by_an_earlier_offset_ends_the_copy(tmp_path: Path) -> None:
    """Ending it by its first offset ends its second copy; it is never checked again, even after a restart."""
    async with open_node(tmp_path) as node:
        await be_producer(node)
        answer = await send_half(node)
        await trio.sleep(70)
        assert len(asked(node)) == 2
        assert (await end(node, answer, ROLLBACK)).code == 0
        [op] = await records(node, OP_TOPIC, 0)
        assert op.body == b"0,1,2,"
        await trio.sleep(200)
        assert len(asked(node)) == 2
    async with open_node(tmp_path) as node:
        await be_producer(node)
        await trio.sleep(200)
        assert not asked(node)
        assert not await records(node)


async def test_checks_go_to_producers_round_robin(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[object, int] = {}

    def count(connection: RemotingConnection, command: RemotingCommand) -> None:
        counts[connection] = counts.get(connection, 0) + 1

    monkeypatch.setattr(RemotingConnection, "send_oneway", count)
    for number in range(3):
        body = java_json.dumps({"clientID": f"c{number}", "producerDataSet": [{"groupName": "pg"}]})
        command = RemotingCommand(RequestCode.HEART_BEAT, body=body)
        assert (await node.client.invoke(f"broker{number}", command, 60)).code == 0
    for number in range(9):
        await send_half(node, b"%d" % number)
    await trio.sleep(31)
    assert list(counts.values()) == [3, 3, 3]


async def test_checks_continue_after_a_restart(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await be_producer(node)
        halves = [await send_half(node, b"%d" % number) for number in range(10)]
        await end(node, halves[0], COMMIT)
        await end(node, halves[4], ROLLBACK)
        await trio.sleep(31)
        assert len(asked(node)) == 8
        await end(node, asked_place(asked(node)[0]), ROLLBACK)
    async with open_node(tmp_path) as node:
        await be_producer(node)
        await trio.sleep(31)
        assert [decode_record(command.body).body for command in asked(node)] == [b"2", b"3", *b"5 6 7 8 9".split()]
        for command in asked(node):
            assert (await end(node, asked_place(command), COMMIT)).code == 0
        await trio.sleep(100)
        assert len(asked(node)) == 7
        assert [record.body for record in await records(node)] == b"0 2 3 5 6 7 8 9".split()


async def test_open_half_messages_are_checked_after_a_kill(tmp_path: Path) -> None:
    """A copy of the files at some moment is the state after a kill."""
    async with open_node(tmp_path / "a") as node:
        await be_producer(node)
        halves = [await send_half(node, b"%d" % number) for number in range(6)]
        await end(node, halves[1], COMMIT)
        await end(node, halves[2], ROLLBACK)
        await trio.sleep(31)
        assert len(asked(node)) == 4
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    async with open_node(tmp_path / "b") as node:
        await be_producer(node)
        await trio.sleep(31)
        bodies = {decode_record(command.body).body for command in asked(node)}
        assert bodies == {b"0", b"3", b"4", b"5"}


@pytest.mark.parametrize("form", [b"%d", b"%d,"])
async def test_op_messages_of_either_form(tmp_path: Path, form: bytes) -> None:
    async with open_node(tmp_path) as node:
        for number in range(6):
            await send_half(node, b"%d" % number)
        tag = encode_properties({"TAGS": "d"})
        bodies = [form % 1, form % 3, b"nonsense", b"", b"99999,", b"9" * 30]
        if form == b"%d,":
            bodies.append(b"4,5,")
        ops = [Message(OP_TOPIC, 0, body, tag) for body in bodies]
        ops.append(Message(OP_TOPIC, 0, form % 2, encode_properties({"TAGS": "x"})))
        await node.broker.put_service.put(ops)
    async with open_node(tmp_path) as node:
        await be_producer(node)
        await trio.sleep(31)
        bodies = [decode_record(command.body).body for command in asked(node)]
        assert bodies == ([b"0", b"2", b"4", b"5"] if form == b"%d" else [b"0", b"2"])


async def test_progress_is_committed_only_when_safe(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await be_producer(node)
    await send_half(node)
    safe = [0]
    monkeypatch.setattr(Acknowledgements, "replicated_offset", property(lambda self: safe[0]))
    await trio.sleep(31)
    assert len(asked(node)) == 1
    assert node.broker.offsets.of(PROGRESS_GROUP, HALF_TOPIC) == {}
    safe[0] = node.store.log.max_offset.value
    await trio.sleep(30)
    assert node.broker.offsets.of(PROGRESS_GROUP, HALF_TOPIC) == {0: 1}


@pytest.mark.parametrize(("half_offset", "op_offset"), [(5, 1), (0, 9), (5, 9)])
async def test_progress_beyond_a_queue_counts_as_none(tmp_path: Path, half_offset: int, op_offset: int) -> None:
    """It was lowered to the queue's end, so that half messages before it were not checked, or ended ones were."""
    async with open_node(tmp_path) as node:
        assert (await end(node, await send_half(node, b"ended"), COMMIT)).code == 0
        await send_half(node, b"open")
    offsets = {f"{HALF_TOPIC}@{PROGRESS_GROUP}": {0: half_offset}, f"{OP_TOPIC}@{PROGRESS_GROUP}": {0: op_offset}}
    (tmp_path / "config" / "consumerOffset.json").write_bytes(java_json.dumps({"offsetTable": offsets}))
    async with open_node(tmp_path) as node:
        await be_producer(node)
        await trio.sleep(31)
        assert [decode_record(command.body).body for command in asked(node)] == [b"open"]
        assert (await end(node, asked_place(asked(node)[0]), COMMIT)).code == 0
        await trio.sleep(60)
        assert node.broker.offsets.of(PROGRESS_GROUP, HALF_TOPIC) == {0: 3}
        assert node.broker.offsets.of(PROGRESS_GROUP, OP_TOPIC) == {0: 2}


async def test_checks_wait_while_the_store_is_not_writable(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await be_producer(node)
    halves = [await send_half(node, b"%d" % number) for number in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(type(node.store), "is_writable", (False, "the disk is full"))
        assert (await end(node, halves[0], COMMIT)).code == 14
        assert (await end(node, halves[1], ROLLBACK)).code == 14
        await trio.sleep(70)
        assert asked(node) == []
    await trio.sleep(35)
    assert [decode_record(command.body).body for command in asked(node)] == [b"0", b"2"]
    assert [op.body for op in await records(node, OP_TOPIC, 0)] == [b"1,"]
    assert await records(node) == []


async def test_half_message_that_can_not_be_copied_is_given_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await be_producer(node)
    await send_half(node, b"long", more={"p": "x" * (32767 - 260)})
    [half] = await records(node, HALF_TOPIC, 0)
    await send_half(node, b"next")
    append = node.store.log.append

    def refuse_some(messages: Sequence[Message], _: float | None = None) -> list[AppendResult]:
        results = []
        for message in messages:
            if message.body == b"long" and message.topic == HALF_TOPIC:
                results.append(AppendResult(PutStatus.PROPERTIES_SIZE_EXCEEDED, remark="too long"))
            else:
                results += append([message])
        return results

    monkeypatch.setattr(node.store.log, "append", refuse_some)
    await trio.sleep(31)
    [record] = await records(node, GIVEN_UP_TOPIC, 0)
    assert record.properties == half.properties
    assert [decode_record(command.body).body for command in asked(node)] == [b"next"]


async def test_half_messages_with_other_flags(tmp_path: Path) -> None:
    async with open_node(tmp_path, reject_transactions=True) as node:
        answer = await send_half(node)
        assert (answer.code, answer.remark) == (16, "the broker[10.0.0.1] sending transaction message is forbidden")
        assert (await node.send()).code == 0
    async with open_node(tmp_path / "b") as node:
        assert (await send_half(node, f=0)).code == 0  # the property says it
        assert (await send_half(node, more={"DELAY": "1"})).code == 13
        assert (await node.send(f=4)).code == 16
        assert (await node.send(f=8)).code == 16
        assert (await node.send(f=4, i="DELAY\x011\x02")).code == 16
        assert (await send_half(node, f=4 | 0x80)).code == 16
        # A consumer before 4.6.1 sends back a message of a transaction.
        assert (await send_half(node, more={"DELAY": "1"}, j=1)).code == 0
        assert len(await records(node, HALF_TOPIC, 0)) == 1


async def test_slave_refuses_ends(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        where = {"tranStateTableOffset": 0, "commitLogOffset": 0}
        assert (await end(node, where, COMMIT)).code == 11


async def test_a_slave_counts_no_half_messages_as_open(tmp_path: Path) -> None:
    """It counted all of the log, committed or not."""
    async with open_node(tmp_path) as node:
        await end(node, await send_half(node), COMMIT)
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        await node.dispatched()
        assert node.broker.transactions.statistics().open_count == 0


@pytest.mark.parametrize("topic", [HALF_TOPIC, None], ids=["queue", "checksums"])
async def test_nothing_is_dropped_while_too_many_files_are_open(tmp_path: Path, topic: str | None) -> None:
    """After a minute, one half message was dropped at each check."""
    disk = FewDescriptors()
    async with open_node(tmp_path) as node:
        await send_half(node)
    async with open_node(tmp_path, disk=disk) as node:
        disk.exhaust(node, topic)
        await trio.sleep(300)
        disk.is_exhausted = False
        await be_producer(node)
        await trio.sleep(31)
        assert len(asked(node)) == 1
        assert node.broker.transactions.statistics().dropped_count == 0


async def test_delayed_half_message_of_another_broker(node: Node) -> None:
    """The delay starts with the commit, as in RocketMQ."""
    await node.broker.topics.ensure("TT", 2)
    properties = half_properties(DELAY="2", REAL_TOPIC="TT", REAL_QID="1").encode()
    [put] = await node.broker.put_service.put([Message(HALF_TOPIC, 0, b"half", properties)])
    where = {"tranStateTableOffset": put.queue_offset, "commitLogOffset": put.physical_offset}
    assert (await end(node, where, COMMIT)).code == 0
    await trio.sleep(4)
    assert await records(node) == []
    await trio.sleep(2)
    [record] = await records(node)
    assert (record.body, record.sys_flag) == (b"half", 8)


async def test_thousand_open_half_messages(tmp_path: Path) -> None:
    """They are stored again in batches of at most 256 messages, or 1 MiB."""
    async with open_node(tmp_path, store_changes={"segment_size": 1 << 23}) as node:
        await be_producer(node)
        await node.broker.topics.ensure("TT", 2)
        properties = half_properties(REAL_TOPIC="TT", REAL_QID="1").encode()
        sizes = [10] * 1000 + [700_000] * 3
        await node.broker.put_service.put(
            [Message(HALF_TOPIC, 0, bytes(size), properties, born_timestamp_ms=WallClock()()) for size in sizes]
        )
        submit, batches = node.broker.put_service.submit, []

        def note(requests: Sequence[Any]) -> None:
            batches.append(len(requests))
            submit(requests)

        node.broker.put_service.submit = note  # type: ignore[method-assign]
        await trio.sleep(35)
        assert batches == [256, 256, 256, 233, 1, 1]
        assert [len(decode_record(command.body).body) for command in asked(node)] == sizes
        assert node.broker.transactions.statistics().open_count == len(sizes)


async def test_producer_that_does_not_read_is_not_asked(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await be_producer(node)
    await send_half(node)
    with monkeypatch.context() as patch:
        patch.setattr(RemotingConnection, "outbox_bytes", OUTBOX_BYTES_MAX + 1)
        await trio.sleep(35)
        assert asked(node) == []
    await trio.sleep(30)
    assert len(asked(node)) == 1


async def test_check_that_fits_no_frame_is_not_sent(tmp_path: Path) -> None:
    """A half message may fill a frame, and the check has more fields."""
    store: dict[str, Any] = {"message_size_max": FRAME_SIZE_MAX, "segment_size": 1 << 26}
    async with open_node(tmp_path, message_size_max=FRAME_SIZE_MAX, store_changes=store) as node:
        await be_producer(node)
        assert (await send_half(node, bytes(FRAME_SIZE_MAX - 450))).code == 0
        await send_half(node)
        await trio.sleep(60)
        [check] = asked(node)
        assert check.ext_fields["tranStateTableOffset"] == "3"


async def test_check_of_a_message_with_the_longest_properties(node: Node) -> None:
    """The check has one property more than the copy that is stored for it."""
    await be_producer(node)
    await send_half(node, more={"PAD": "x"})
    [short] = await records(node, HALF_TOPIC, 0)
    added = len("TRANSACTION_CHECK_TIMES=1;")  # by the copy
    await send_half(node, more={"PAD": "x" * (1 + PROPERTIES_SIZE_MAX - len(short.properties) - added)})
    await trio.sleep(60)
    assert [len(record.properties) for record in await records(node, HALF_TOPIC, 0)][-1] == PROPERTIES_SIZE_MAX
    topics = [decode_record(command.body).topic for command in asked(node)]
    # On a busy machine there are more rounds: the virtual clock goes on while a worker thread waits for the disk.
    assert topics == ["TT"] * len(topics)
    assert len(topics) >= 2


async def test_op_that_arrives_while_others_are_read_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart its transaction was checked and committed again."""
    async with open_node(tmp_path) as node:
        await be_producer(node)
        await end(node, await send_half(node, b"first"), COMMIT)
        await trio.sleep(27)
        await send_half(node, b"open")
        reader = node.broker.transactions._reader
        read, arriving = reader.read, [b"committed"]

        async def slow_read(queue: ConsumeQueue, *more: Any) -> Any:
            if queue.topic == OP_TOPIC and arriving:
                await end(node, await send_half(node, arriving.pop()), COMMIT)
                await trio.sleep(0.3)  # until the op is dispatched
            return await read(queue, *more)

        monkeypatch.setattr(reader, "read", slow_read)
        await trio.sleep(5)
        assert not arriving
    async with open_node(tmp_path) as node:
        await be_producer(node)
        await trio.sleep(40)
        assert [decode_record(command.body).body for command in asked(node)] == [b"open"]
