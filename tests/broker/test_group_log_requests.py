"""Requests of clients, operators and slaves to a broker that keeps its tables in the log."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.group_log import GAP_S
from ha.broker.journal import WAITING_COUNT_MAX
from ha.broker.options import BrokerRole
from ha.broker.slave_sync import SlaveSync
from ha.broker.standing import Standing
from ha.protocol import java_json
from ha.protocol.bodies import ConsumerOffsets, GroupTable, TopicConfig, TopicConfigTable
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import TABLES_TOPIC
from ha.remoting import open_remoting_client
from ha.store.commitlog import UNLIMITED
from tests.broker.node import Node, open_node, text
from tests.broker.test_put import Slave, slave_of

IN_LOG: dict[str, Any] = {"keeps_tables_in_log": True}
SYNC: dict[str, Any] = {"role": BrokerRole.SYNC_MASTER, "keeps_tables_in_log": True}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path, **IN_LOG) as node:
        yield node


async def commit(node: Node, offset: int, group: str = "g") -> RemotingCommand:
    return await node.ask(
        RequestCode.UPDATE_CONSUMER_OFFSET, consumerGroup=group, topic="TT", queueId=0, commitOffset=offset
    )


@asynccontextmanager
async def acknowledging(slave: Slave) -> AsyncIterator[None]:
    """During the block the slave acknowledges everything."""

    async def acknowledge() -> None:
        while True:
            await slave.acknowledge()
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(acknowledge)
        yield
        nursery.cancel_scope.cancel()


async def committed(node: Node, group: str = "g") -> int | None:
    answer = await node.ask(RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup=group, topic="TT", queueId=0)
    return int((answer.ext_fields or {})["offset"]) if answer.code == 0 else None


async def written(node: Node) -> int:
    """Number of records once no more are written."""
    await trio.sleep(1)
    await node.dispatched()
    queue = node.store.queues.get(TABLES_TOPIC, 0)
    return 0 if queue is None else queue.max_offset


async def test_without_a_group_nothing_changes(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        assert (await node.send()).code == 0
        await node.broker.groups.find_or_create("g")
        assert (await commit(node, 1)).code == 0
        assert await written(node) == 0
        assert node.broker.topics.get(TABLES_TOPIC) is None
        for code in (21, 43, 201, 45):
            assert b"logPosition" not in (await node.ask(code)).body
    for file in (tmp_path / "config").iterdir():
        assert "logPosition" not in file.read_text()


async def test_answered_changes_survive_the_loss_of_the_files(tmp_path: Path) -> None:
    async with open_node(tmp_path, **IN_LOG) as node:
        assert (await node.send()).code == 0
        await node.broker.groups.find_or_create("g")
        assert (await commit(node, 1)).code == 0
        assert await committed(node) == 1
        await node.dispatched()
        assert [file.name for file in (tmp_path / "config").iterdir()] == ["broker.json"], (
            "others are written periodically"
        )
    for file in (tmp_path / "config").iterdir():
        file.unlink()
    async with open_node(tmp_path, **IN_LOG) as node:
        assert await committed(node) == 1
        assert node.broker.topics.get("TT") is not None
        assert node.broker.groups.get("g") is not None


async def test_commit_waits_for_the_slave(tmp_path: Path) -> None:
    async with open_node(tmp_path, **SYNC) as node, slave_of(node) as slave:
        async with acknowledging(slave):
            assert (await node.send()).code == 0
            await node.broker.groups.find_or_create("g")
            assert (await commit(node, 1)).code == 0
        began = trio.current_time()
        answer = await commit(node, 2)
        assert answer.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        assert trio.current_time() - began >= 3
        assert await committed(node) == 2, "it is stored, and may survive"


async def test_repeated_commit_waits_for_the_slave(tmp_path: Path) -> None:
    """The record of a oneway commit waits for nobody, but who repeats the commit must know that it is safe."""
    async with open_node(tmp_path, **SYNC) as node, slave_of(node) as slave:
        async with acknowledging(slave):
            assert (await node.send()).code == 0
            await node.broker.groups.find_or_create("g")
            assert (await commit(node, 1)).code == 0
        fields = {"consumerGroup": "g", "topic": "TT", "queueId": 0, "commitOffset": 2}
        command = RemotingCommand(15, version=479, ext_fields={name: text(value) for name, value in fields.items()})
        (await node.client.connection(node.address)).send_oneway(command)
        await trio.sleep(1)
        assert await committed(node) == 2
        assert (await commit(node, 2)).code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        async with acknowledging(slave):
            assert (await commit(node, 2)).code == 0


async def test_repeated_change_waits_for_the_slave(tmp_path: Path) -> None:
    """What was answered FLUSH_SLAVE_TIMEOUT is in the tables, so repeating it changes nothing."""
    topic = {"topic": "T1", "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    deletion = {"groupName": "g", "cleanOffset": "false"}
    async with open_node(tmp_path, **SYNC) as node, slave_of(node):
        for code, body, fields in (
            (RequestCode.UPDATE_AND_CREATE_TOPIC, b"", {**topic, "topicFilterType": "SINGLE_TAG"}),
            (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, b'{"groupName":"g"}', {}),
            (RequestCode.DELETE_SUBSCRIPTIONGROUP, b"", deletion),
        ):
            for _ in range(2):
                answer = await node.ask(code, body, **fields)
                assert "FLUSH_SLAVE_TIMEOUT" in (answer.remark or "")


async def test_commits_of_one_chunk_become_one_record(node: Node) -> None:
    assert (await node.send()).code == 0
    for number in range(50):
        await node.broker.groups.find_or_create(f"g{number}")
    before = await written(node)
    answers: list[int] = []

    async def one(number: int) -> None:
        answers.append((await commit(node, 1, f"g{number}")).code)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(one, number)
    assert answers == [0] * 50
    assert trio.current_time() - began <= 2 * GAP_S
    assert await written(node) - before <= 2


async def test_only_the_master_answers_commits(tmp_path: Path) -> None:
    """A slave keeps oneway commits, and passes them on."""
    standing = Standing("b0", 2, is_slave=True, is_elected=True)
    async with open_node(tmp_path / "1", **IN_LOG) as master:
        assert (await master.send()).code == 0
        await master.broker.groups.find_or_create("g")
        async with open_node(tmp_path / "2", standing=standing, **IN_LOG) as slave:
            sync = SlaveSync(master.client, lambda: "master", slave.broker.tables, slave.broker.options)
            assert await sync.sync_once()
            assert slave.broker.groups.get("g") is not None, "before the first snapshot it copies"
            answer = await commit(slave, 1)
            assert answer.code == ResponseCode.SYSTEM_BUSY
            assert await committed(slave) in (None, 0)
            assert slave.broker.offsets.commit("source", "TT", 0, 1)
            answer = await slave.ask(RequestCode.CLONE_GROUP_OFFSET, srcGroup="source", destGroup="g", topic="TT")
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert await committed(slave) in (None, 0)
            fields = {"consumerGroup": "g", "topic": "TT", "queueId": 0, "commitOffset": 1}
            command = RemotingCommand(15, version=479, ext_fields={name: text(value) for name, value in fields.items()})
            (await slave.client.connection("broker")).send_oneway(command)
            await wait_all_tasks_blocked()
            assert await committed(slave) == 1
            assert await sync.sync_once()
            assert await committed(master) == 1


async def test_member_without_tables_refuses_offset_queries(tmp_path: Path) -> None:
    """A member that starts has not dispatched what its master has not confirmed yet, its group's commits among it.

    If it answered that nothing is committed, a consumer would begin at the queue's end, and its group miss messages.
    """
    begins: list[tuple[int, dict[str, Any]]] = [
        (RequestCode.QUERY_CONSUMER_OFFSET, {"consumerGroup": "g"}),
        (RequestCode.GET_MAX_OFFSET, {}),
        (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {"timestamp": 0}),
    ]

    async def codes(node: Node) -> set[int]:
        return {(await node.ask(code, topic="TT", queueId=0, **more)).code for code, more in begins}

    standing = Standing("b0", 2, is_slave=True, is_elected=True)
    async with open_node(tmp_path / "1", **IN_LOG) as master:
        assert (await master.send()).code == 0
        async with open_node(tmp_path / "2", standing=standing, **IN_LOG) as slave:
            slave.broker.topics.follow({"TT": TopicConfig(topic_name="TT")}, None)
            assert await codes(slave) == {ResponseCode.SYSTEM_BUSY}
            await slave.broker.groups.find_or_create("g")
            assert slave.broker.offsets.commit("g", "TT", 0, 1)
            assert await committed(slave) == 1, "its tables are at worst out of date"
            sync = SlaveSync(master.client, lambda: "master", slave.broker.tables, slave.broker.options)
            assert await sync.sync_once()
            assert await codes(slave) == {ResponseCode.SUCCESS}
        assert await codes(master) == {ResponseCode.SUCCESS}


async def test_copy_never_replaces_tables_from_the_log(tmp_path: Path) -> None:
    async with open_node(tmp_path / "1", **IN_LOG) as master, open_node(tmp_path / "2", **IN_LOG) as slave:
        for node, offset in ((master, 3), (slave, 9)):
            for _ in range(10):
                assert (await node.send()).code == 0
            await node.broker.groups.find_or_create("g")
            assert (await commit(node, offset)).code == 0
            await written(node)
        sync = SlaveSync(master.client, lambda: "master", slave.broker.tables, slave.broker.options)
        assert await sync.sync_once()
        assert await committed(slave) == 9


async def test_copied_tables_state_their_log_position(node: Node, tmp_path: Path) -> None:
    assert (await node.send()).code == 0
    await node.broker.groups.find_or_create("g")
    assert (await commit(node, 1)).code == 0
    count = await written(node)
    topics = java_json.read_as(TopicConfigTable, (await node.ask(21)).body)
    groups = java_json.read_as(GroupTable, (await node.ask(201)).body)
    offsets = java_json.read_as(ConsumerOffsets, (await node.ask(43)).body)
    for table in (topics, groups, offsets):
        assert table.log_position is not None
        assert table.log_position.queue_offset == count - 1
        assert table.log_position.is_whole
    assert "TT" in topics.topic_config_table
    assert "g" in groups.subscription_group_table
    assert offsets.offset_table["TT@g"] == {0: 1}
    await trio.sleep(6)  # the files are written every 5 s
    written_offsets = java_json.read_as(ConsumerOffsets, (tmp_path / "config/consumerOffset.json").read_bytes())
    assert written_offsets == offsets


async def test_clients_can_not_send_to_the_tables_topic(tmp_path: Path) -> None:
    async with open_node(tmp_path, **IN_LOG) as node:
        answer = await node.send(b'{"version":1,"epoch":9}', b=TABLES_TOPIC)
        assert answer.code == ResponseCode.NO_PERMISSION
        for code in (RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.DELETE_TOPIC_IN_BROKER):
            fields: dict[str, Any] = {
                "readQueueNums": 4,
                "writeQueueNums": 4,
                "perm": 6,
                "topicFilterType": "SINGLE_TAG",
            }
            answer = await node.ask(code, topic=TABLES_TOPIC, defaultTopic="TBW102", **fields)
            assert answer.code == ResponseCode.INVALID_PARAMETER
    async with open_node(tmp_path / "2") as node:
        assert (await node.send(b"x", b=TABLES_TOPIC)).code == ResponseCode.NO_PERMISSION


async def test_admin_changes_are_answered_when_they_are_in_the_log(tmp_path: Path) -> None:
    async with open_node(tmp_path, **IN_LOG) as node:
        for _ in range(5):
            assert (await node.send()).code == 0
        await node.broker.groups.find_or_create("g")
        await node.broker.groups.find_or_create("h")
        assert (await commit(node, 5)).code == 0
        before = await written(node)
        answer = await node.ask(
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, topic="TT", group="g", timestamp=-1, queueId=0, offset=2
        )
        assert answer.code == 0
        assert (
            await node.ask(RequestCode.CLONE_GROUP_OFFSET, srcGroup="g", destGroup="h", topic="TT", offline="true")
        ).code == 0
        assert await committed(node, "h") == 2
        assert (await node.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, groupName="g", cleanOffset="true")).code == 0
        assert (await node.ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic="TT")).code == 0
        assert await written(node) > before
    for file in (tmp_path / "config").iterdir():
        file.unlink()
    async with open_node(tmp_path, **IN_LOG) as node:
        assert node.broker.groups.get("g") is None
        assert node.broker.groups.get("h") is not None
        assert node.broker.topics.get("TT") is None
        assert node.broker.offsets.groups_of("TT") == []


async def test_delay_progress_may_be_ahead_of_dispatch(node: Node) -> None:
    """The log of a new master says that a message was delivered, which it has not dispatched yet."""
    delayed: dict[str, Any] = {"i": "DELAY\x011\x02"}
    assert (await node.send(b"first", **delayed)).code == 0
    await trio.sleep(5)
    assert node.broker.delay.statistics().delivered_count == 1
    log = node.store.log
    log.limit_dispatch(log.max_offset.value)
    assert (await node.send(b"delivered by another", **delayed)).code == 0
    node.broker.delay_offsets.set(1, 2)
    node.broker.delay._levels[1].arrived.set()
    await trio.sleep(5)
    assert node.broker.delay_offsets.get(1) == 2
    log.limit_dispatch(UNLIMITED)
    assert (await node.send(b"third", **delayed)).code == 0
    await trio.sleep(5)
    assert node.broker.delay.statistics().delivered_count == 2
    assert node.broker.delay_offsets.get(1) == 3


async def test_waiting_commits_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WAITING_COUNT_MAX == 65_536
    monkeypatch.setattr("ha.broker.journal.WAITING_COUNT_MAX", 3)
    async with open_node(tmp_path, **IN_LOG) as node:
        assert (await node.send()).code == 0
        for number in range(10):
            await node.broker.groups.find_or_create(f"g{number}")
        await written(node)
        codes: list[int] = []

        async def one(number: int) -> None:
            codes.append((await commit(node, 1, f"g{number}")).code)

        async with trio.open_nursery() as nursery, node.store.log.appends_held():
            for number in range(10):
                nursery.start_soon(one, number)
            await wait_all_tasks_blocked()
            assert set(codes) == {ResponseCode.SYSTEM_BUSY}
        assert codes.count(0) >= 3


async def test_message_to_a_topic_created_again_during_its_deletion_stays(tmp_path: Path) -> None:
    async with open_node(tmp_path, **IN_LOG) as node, open_remoting_client(connect=node.connect) as client:
        producer = Node(node.store, node.ha, node.broker, client, node.listener)
        for number in range(8):  # two tasks wake at the same time, in any order
            topic = f"T{number}"
            assert (await node.send(b"old", b=topic)).code == 0
            await node.broker.groups.find_or_create("g")
            node.broker.offsets.commit("g", topic, 0, 1)
            await written(node)
            changed = trio.Event()
            node.broker.topics.subscribe(changed.set)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(node.ask, RequestCode.DELETE_TOPIC_IN_BROKER, topic=topic))
                await changed.wait()
                assert (await producer.send(b"new", b=topic)).code == 0
            await node.dispatched()
            found = node.records(await node.pull(1, topic=topic))
            assert [record.body for record in found] == [b"new"]
