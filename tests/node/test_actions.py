"""The dashboard's actions on a real node: each has the effect of a request from a client or a tool."""

import errno
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

import ha
from ha.admin.dashboard.source import DeadLetters, Missing, NewMessage, OffsetMove, SourceBusyError
from ha.broker.batch_reader import BatchReader
from ha.broker.queue_read import QueueRead
from ha.broker.refused import RefusedError
from ha.node.actions import NodeActions
from ha.protocol.codes import Permission, ResponseCode
from ha.protocol.properties import CRC32, decode_properties, encode_properties
from ha.protocol.record import Message
from ha.store.consume_queue import ConsumeQueue
from tests.node.test_library import attached, config, slave_config
from tests.store.stores import dispatched


async def test_a_topic_is_created_and_changed(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as node:
        actions, topics = NodeActions(node), node.broker.topics
        outcome = await actions.change_topic("t", 4, is_readable=True, is_writable=True)
        assert (outcome.is_done, outcome.text) == (True, "Topic t has 4 queues now.")
        made = topics.get("t")
        assert made is not None
        assert (made.read_queue_nums, made.write_queue_nums, made.perm) == (4, 4, Permission.READ | Permission.WRITE)
        await topics.update(ha.protocol.bodies.TopicConfig(topic_name="o", order=True, topic_sys_flag=1, perm=7))
        await actions.change_topic("o", 2, is_readable=True, is_writable=False)
        kept = topics.get("o")
        assert kept is not None
        assert (kept.order, kept.topic_sys_flag, kept.perm) == (True, 1, Permission.READ | Permission.INHERIT)
        for wrong in ("TBW102", "no space", "x" * 200):
            outcome = await actions.change_topic(wrong, 1, is_readable=True, is_writable=True)
            assert not outcome.is_done
            assert outcome.text


async def test_a_message_is_sent(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as node:
        actions = NodeActions(node)
        await actions.change_topic("t", 2, is_readable=True, is_writable=True)
        sent = NewMessage(topic="t", body="ü".encode(), keys="k l", tags="x", queue_id=1)
        outcome = await actions.send(sent)
        assert (outcome.is_done, outcome.text) == (True, "Stored in t, queue 1, offset 0.")
        await dispatched(node.store)
        [record] = (await node.read("t", 1, 0)).messages
        properties = decode_properties(record.properties)
        assert bytes(record.body) == "ü".encode()
        assert (properties["KEYS"], properties["TAGS"], len(properties["UNIQ_KEY"])) == ("k l", "x", 32)
        outcome = await actions.send(NewMessage(topic="t", body=b"x"))
        assert outcome.text.startswith("Stored in t, queue ")
        assert not (await actions.send(NewMessage(topic="bad name", body=b""))).is_done


async def test_a_message_that_is_on_one_node_only_is_told_so(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path, broker_role="SYNC_MASTER")) as node:
        actions = NodeActions(node)
        await actions.change_topic("t", 1, is_readable=True, is_writable=True)
        outcome = await actions.send(NewMessage(topic="t", body=b"x"))
        assert outcome.is_done
        assert outcome.text == "Stored in t, queue 0, offset 0, but SLAVE_NOT_AVAILABLE: no slave is connected"


async def test_offsets_are_reset_as_planned(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as node:
        actions, offsets = NodeActions(node), node.broker.offsets
        await actions.change_topic("t", 2, is_readable=True, is_writable=True)
        for _ in range(5):
            await node.put(Message(topic="t", queue_id=0, body=b"x"))
        await dispatched(node.store)
        assert await node.broker.groups.find_or_create("g") is not None
        offsets.commit("g", "t", 0, 3)
        assert await actions.planned_reset("g", "t", 0) == [OffsetMove(0, 3, 0, 5), OffsetMove(1, None, 0, 0)]
        assert await actions.planned_reset("g", "t", None) == [OffsetMove(0, 3, 5, 5), OffsetMove(1, None, 0, 0)]
        assert offsets.get("g", "t", 0) == 3  # a plan changes nothing
        outcome = await actions.reset("g", "t", 0, {0: 0, 1: 0})
        assert (outcome.is_done, outcome.text) == (True, "g continues at the new offsets in 2 queues of t.")
        assert offsets.get("g", "t", 0) == 0
        await actions.reset("g", "t", None, {0: 4, 1: 7})
        assert (offsets.get("g", "t", 0), offsets.get("g", "t", 1)) == (4, 0)  # as planned, within the queue
        assert isinstance(await actions.planned_reset("g", "nothing", 0), Missing)
        assert isinstance(await actions.planned_reset("nobody", "t", 0), Missing)
        assert (await actions.reset("nobody", "t", 0, {0: 0})).text == "Group nobody does not exist"


async def test_members_are_asked_to_reset_if_the_broker_does_not(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path, server_side_reset_offset=False)) as node:
        actions = NodeActions(node)
        await actions.change_topic("t", 1, is_readable=True, is_writable=True)
        assert await node.broker.groups.find_or_create("g") is not None
        node.broker.offsets.commit("g", "t", 0, 0)
        outcome = await actions.reset("g", "t", None, {0: 0})
        assert not outcome.is_done
        assert "Consumer not online" in outcome.text


async def test_dead_letters_are_sent_back_to_their_group(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as node:
        actions = NodeActions(node)
        assert isinstance(actions.dead_letters("g"), Missing)
        for number in range(40):
            properties = {"KEYS": f"k{number}", "RETRY_TOPIC": "orders", "DELAY": "0", "WAIT": "false", CRC32: "1"}
            dead = Message(
                topic="%DLQ%g", queue_id=0, body=b"%d" % number, properties=encode_properties(properties),
                reconsume_times=16,
            )  # fmt: skip
            await node.put(dead)
        await dispatched(node.store)
        assert actions.dead_letters("g") == DeadLetters(0, 40)
        outcome = await actions.send_back("g", 3, 35)
        assert (outcome.is_done, outcome.text) == (True, "Sent back 35 messages to g.")
        await dispatched(node.store)
        back = (await node.read("%RETRY%g", 0, 0, count_max=64)).messages
        assert [bytes(record.body) for record in back] == [b"%d" % number for number in range(3, 38)]
        assert {record.reconsume_times for record in back} == {0}
        properties = decode_properties(back[0].properties)
        assert (properties["KEYS"], properties["RETRY_TOPIC"]) == ("k3", "orders")
        assert not properties.keys() & {"DELAY", "WAIT", CRC32}  # those of the dead letter
        assert actions.dead_letters("g") == DeadLetters(0, 40)
        queue = node.store.queues.get("%DLQ%g", 0)
        assert queue is not None
        queue.min_offset = 38  # all others have expired
        outcome = await actions.send_back("g", 30, 10)
        assert (outcome.is_done, outcome.text) == (
            False,
            "Sent back 2 of 10 messages to g; the others can't be read.",
        )
        queue.min_offset = queue.max_offset  # all have expired
        assert actions.dead_letters("g") == Missing("Consumer group g has no dead letters on this node.")


async def test_without_descriptors_the_dashboard_says_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ha.open_master(config(tmp_path)) as node:
        actions = NodeActions(node)
        await actions.change_topic("t", 1, is_readable=True, is_writable=True)
        for topic in ["t", *["%DLQ%g"] * 40]:
            await node.put(Message(topic=topic, queue_id=0, body=b"x"))
        await dispatched(node.store)
        assert await node.broker.groups.find_or_create("g") is not None
        read = BatchReader.read

        async def read_once(reader: BatchReader, queue: ConsumeQueue, offset: int, count: int) -> QueueRead:
            if offset:
                raise OSError(errno.EMFILE, "too many open files")
            return await read(reader, queue, offset, count)

        monkeypatch.setattr(BatchReader, "read", read_once)
        outcome = await actions.send_back("g", 0, 40)
        assert (outcome.is_done, outcome.text) == (
            False, "Sent back 32 of 40 messages to g; the others can't be read."
        )  # fmt: skip
        refused = RefusedError(ResponseCode.SYSTEM_ERROR, "too many open files")
        monkeypatch.setattr("ha.node.actions.offset_at", AsyncMock(side_effect=refused))
        with pytest.raises(SourceBusyError, match="too many open files"):
            await actions.planned_reset("g", "t", 1)


async def test_a_slave_changes_nothing(tmp_path: Path) -> None:
    async with (
        ha.open_master(config(tmp_path / "m")) as master,
        ha.open_slave(slave_config(tmp_path / "s", master)) as slave,
    ):
        await attached(master)
        actions = NodeActions(slave)
        assert not (await actions.change_topic("t", 1, is_readable=True, is_writable=True)).is_done
        assert not (await actions.send(NewMessage(topic="t", body=b"x"))).is_done


@pytest.mark.parametrize("is_guarded", [False, True])
async def test_the_operator_needs_no_account(tmp_path: Path, is_guarded: bool) -> None:
    acl_file = tmp_path / "acl.yml"
    acl_file.write_text('accounts: [{accessKey: operator, secretKey: "12345678", admin: true}]\n')
    acl_file.chmod(0o600)
    keys = {"acl_enable": True, "acl_file": str(acl_file)} if is_guarded else {}
    async with ha.open_master(config(tmp_path / "store", **keys)) as node:
        actions = NodeActions(node)
        assert (await actions.change_topic("t", 1, is_readable=True, is_writable=True)).is_done
        assert (await actions.send(NewMessage(topic="t", body=b"x"))).is_done
