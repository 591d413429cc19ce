"""Admin requests about topics."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.admin_topics import changed_attributes
from ha.broker.config_file import ConfigFile
from ha.broker.options import BrokerOptions, BrokerRole
from ha.broker.topics import ANNOUNCE_TIMEOUT_S, Topics, system_topics
from ha.errors import RemoteProtocolError
from ha.protocol.bodies import TopicConfig
from ha.protocol.pop import retry_topic
from ha.protocol.record import Message
from ha.protocol.remoting import RemotingCommand
from ha.protocol.store_files import ENTRY
from tests.broker.full_disk import FullDisk
from tests.broker.node import Node, open_node

CREATE: dict[str, Any] = {
    "topic": "T1",
    "defaultTopic": "TBW102",
    "readQueueNums": 3,
    "writeQueueNums": 2,
    "perm": 6,
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": 0,
    "order": False,
}


async def update(node: Node, **changes: Any) -> RemotingCommand:
    return await node.ask(17, **{**CREATE, **changes})


def on_disk(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config" / "topics.json").read_text())["topicConfigTable"])


async def test_topic_is_created_and_changed(node: Node, tmp_path: Path) -> None:
    told = []
    node.broker.topics.subscribe(lambda: told.append(node.broker.topics.data_version.counter))
    answer = await update(node)
    assert (answer.code, answer.remark) == (0, "not set any response code")
    before = node.broker.topics.data_version.counter
    assert on_disk(tmp_path)["T1"] == {
        "attributes": {},
        "order": False,
        "perm": 6,
        "readQueueNums": 3,
        "topicFilterType": "SINGLE_TAG",
        "topicName": "T1",
        "topicSysFlag": 0,
        "writeQueueNums": 2,
    }
    assert json.loads(bytes((await node.ask(351, topic="T1")).body)) == on_disk(tmp_path)["T1"]
    assert (await update(node)).code == 0
    assert node.broker.topics.data_version.counter == before, "nothing changed"
    assert (await update(node, perm=4, order=True, readQueueNums=8, attributes="+message.type=NORMAL")).code == 0
    changed = on_disk(tmp_path)["T1"]
    assert (changed["perm"], changed["order"], changed["readQueueNums"]) == (4, True, 8)
    assert changed["attributes"] == {"message.type": "NORMAL"}
    assert told == [before, before + 1]
    assert (await node.send(b="T1")).code == 0, "a broker does not look at the topic's own permission to write"


async def test_priority_needs_queues_to_write_to(node: Node) -> None:
    created = await update(node, topic="TT", readQueueNums=4, writeQueueNums=0, attributes="+message.type=PRIORITY")
    assert created.code == 0
    assert (await node.send(b"urgent", e=3, i="_SYS_MSG_PRIORITY_\x012\x02")).code == 0
    await node.dispatched()
    assert [record.body for record in node.records(await node.pull(queueId=3))] == [b"urgent"]


async def test_invalid_topics_are_refused(node: Node) -> None:
    for changes in (
        {"topic": ""},
        {"topic": "a b"},
        {"topic": "x" * 128},
        {"topic": "TBW102"},
        {"topic": "SCHEDULE_TOPIC_XXXX"},
        {"topic": "b0"},
        {"topic": "rmq_sys_x"},
        {"readQueueNums": -1},
        {"writeQueueNums": 16_385},
        {"perm": 16},
        {"perm": -1},
        {"topicFilterType": "NONE"},
    ):
        answer = await update(node, **changes)
        assert (changes, answer.code) == (changes, 29)
        assert answer.remark
    assert (await update(node, attributes="+no.such=1")).code == 1
    assert (await update(node, readQueueNums=None)).code == 1
    assert (await update(node, perm="x")).code == 1
    assert node.broker.topics.get("T1") is None
    assert (await node.ask(351, topic="T1")).code == 17


def test_attributes() -> None:
    assert changed_attributes(None, "") == {}
    assert changed_attributes(None, "+message.type=FIFO,+queue.type=SimpleCQ") == {
        "message.type": "FIFO",
        "queue.type": "SimpleCQ",
    }
    assert changed_attributes({"message.type": "FIFO"}, "-message.type,+reserve.time=5") == {"reserve.time": "5"}
    assert changed_attributes({"message.type": "FIFO"}, "+message.type=NORMAL") == {"message.type": "NORMAL"}
    for current, changes, why in (
        (None, "message.type=x", "add/alter attribute format is wrong"),
        (None, "-message.type", "only add attribute is supported"),
        ({}, "-message.type", "nonexistent"),
        ({}, "message.type", "delete attribute format is wrong"),
        ({}, "+message.type=a,+message.type=b", "duplication"),
        ({}, "+x=1", "unsupported key: x"),
        ({}, "+queue.type=BatchCQ", "not served"),
        ({}, "+cleanup.policy=COMPACTION", "not served"),
        ({}, "+message.type=" + "x" * 5000, "at most 4096"),
    ):
        with pytest.raises(RemoteProtocolError, match=why):
            changed_attributes(current, changes)


@pytest.mark.parametrize("keeps_tables_in_log", [False, True])
async def test_attributes_changed_at_the_same_time_are_all_kept(tmp_path: Path, keeps_tables_in_log: bool) -> None:
    """Each change was based on the topic as it was before the others were written."""
    changes = {"message.type": "NORMAL", "reserve.time": "1", "queue.type": "SimpleCQ"}

    async def run_blocking(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.sleep(0.1)
        return call(*arguments)

    async with open_node(tmp_path, run_blocking=run_blocking, keeps_tables_in_log=keeps_tables_in_log) as node:
        assert (await update(node)).code == 0
        async with trio.open_nursery() as nursery:
            for name, value in changes.items():
                changed = {**CREATE, "attributes": f"+{name}={value}"}
                nursery.start_soon(partial(node.ask_alone, 17, **changed))
        config = node.broker.topics.get("T1")
        assert config is not None
        assert config.attributes == changes


async def test_topic_is_deleted(node: Node, tmp_path: Path) -> None:
    await update(node)
    for number in range(3):
        await node.send(b"%d" % number, b="T1")
    await node.pull()  # which makes group g
    assert (await node.ask(15, consumerGroup="g", topic="T1", queueId=0, commitOffset=2)).code == 0
    answer = await node.ask(215, topic="T1")
    assert (answer.code, answer.remark) == (0, None)
    assert "T1" not in on_disk(tmp_path)
    assert node.broker.offsets.get("g", "T1", 0) is None
    assert (await node.ask(202, topic="T1")).code == 17
    assert (await node.ask(215, topic="T1")).code == 0, "again"
    # A new topic with this name is empty.
    assert (await node.send(b"new", b="T1")).ext_fields["queueOffset"] == "3"
    await node.dispatched()
    for offset in range(3):
        gone = await node.pull(offset, topic="T1")
        assert (gone.code, gone.ext_fields["nextBeginOffset"]) == (21, "3")
    assert [record.body for record in node.records(await node.pull(3, topic="T1"))] == [b"new"]
    assert (await node.ask(31, topic="T1", queueId=0)).ext_fields == {"offset": "3"}


async def test_deleted_topic_stays_deleted_after_a_restart(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.send(b"old", b="T1")
        await node.send(b"kept", b="T2")
        assert (await node.ask(215, topic="T1")).code == 0
    async with open_node(tmp_path) as node:
        assert node.broker.topics.get("T1") is None
        await update(node)
        assert (await node.ask(31, topic="T1", queueId=0)).ext_fields == {"offset": "1"}
        assert (await node.pull(0, topic="T1")).code == 21
        assert [record.body for record in node.records(await node.pull(0, topic="T2"))] == [b"kept"]


async def test_messages_of_a_topic_created_again_during_its_deletion_stay(tmp_path: Path) -> None:
    """While the retry topics were deleted, new messages of the topic counted as those of the deleted one."""

    async def run_blocking(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.sleep(0.1)
        return call(*arguments)

    async with open_node(tmp_path, run_blocking=run_blocking) as node:
        topics, deleted = node.broker.topics, trio.Event()
        assert (await node.send(b"old", b="T1")).code == 0
        for group in ("g1", "g2", "g3"):
            node.broker.offsets.commit(group, "T1", 0, 1)
            await topics.ensure(retry_topic(group, "T1", is_v2=True), 1)
        topics.subscribe(lambda: deleted.set() if topics.get("T1") is None else None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(node.ask_alone, 215, topic="T1"))
            await deleted.wait()
            assert (await node.send(b"new", b="T1")).ext_fields["queueOffset"] == "1"
        assert [record.body for record in node.records(await node.pull(1, topic="T1"))] == [b"new"]
        assert (await node.pull(0, topic="T1")).code == 21
        assert topics.get(retry_topic("g3", "T1", is_v2=True)) is None


@pytest.mark.parametrize("has_offsets", [False, True])
async def test_repeated_deletion_of_a_topic_includes_its_retry_topics(
    node: Node, monkeypatch: pytest.MonkeyPatch, has_offsets: bool
) -> None:
    """If the record of the first deletion was stored, but not acknowledged, what was in the retry topic stayed."""
    topics, offsets, name = node.broker.topics, node.broker.offsets, retry_topic("g", "T1", is_v2=True)
    assert (await node.send(b="T1")).code == 0
    offsets.commit("g", "T1", 0, 1)
    await topics.ensure(name, 1)
    if has_offsets:
        offsets.commit("g", name, 0, 1)
    else:
        await node.broker.put_service.put([Message(name, 0, b"retried")])
    await node.dispatched()
    delete = topics.delete

    async def delete_without_acknowledgement(topic: str) -> str:
        return await delete(topic) or "not acknowledged"

    with monkeypatch.context() as patch:
        patch.setattr(topics, "delete", delete_without_acknowledgement)
        assert (await node.ask(215, topic="T1")).code != 0
    assert topics.get(name) is None
    assert (await node.ask(215, topic="T1")).code == 0
    assert offsets.topics_of("g") == []
    assert not node.store.queues.not_empty((name,))


async def test_deletion_that_fails_after_the_offsets_were_removed_is_completed_by_another(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request found no retry topic of a group without offsets, whose messages stayed."""
    offsets, name = node.broker.offsets, retry_topic("g", "T1", is_v2=True)
    assert (await node.send(b="T1")).code == 0
    offsets.commit("g", "T1", 0, 1)
    await node.broker.topics.ensure(name, 1)
    await node.broker.put_service.put([Message(name, 0, b"retried")])
    await node.dispatched()

    async def not_logged() -> str:
        return "not acknowledged"

    with monkeypatch.context() as patch:
        patch.setattr(offsets, "logged", not_logged)
        assert (await node.ask(215, topic="T1")).code != 0
    assert offsets.topics_of("g") == []
    assert (await node.ask(215, topic="T1")).code == 0
    assert not node.store.queues.not_empty(("T1", name))


async def test_messages_that_wait_for_the_log_are_deleted_with_their_topic(node: Node) -> None:
    """They were stored after the end of the deleted messages, and stayed in the queue."""
    assert (await node.send(b="T1")).code == 0
    async with trio.open_nursery() as nursery, node.store.log.appends_held():
        nursery.start_soon(partial(node.send, b"queued", b="T1"))
        await wait_all_tasks_blocked()
        nursery.start_soon(partial(node.ask_alone, 215, topic="T1"))
        await wait_all_tasks_blocked()
    await node.dispatched()
    assert not node.store.queues.not_empty(("T1",))


async def test_messages_that_wait_for_several_segments_are_deleted_with_their_topic(node: Node) -> None:
    """Those that waited for a second segment stayed. While they wait, sends belong to the topic that is deleted."""
    assert (await node.send(b="T1")).code == 0
    async with trio.open_nursery() as nursery, node.store.log.appends_held():
        for _ in range(6):
            nursery.start_soon(node.broker.put_service.put, [Message("T1", 0, bytes(400_000))])
        await wait_all_tasks_blocked()
        nursery.start_soon(partial(node.ask_alone, 215, topic="T1"))
        await wait_all_tasks_blocked()
        assert node.broker.topics.get("T1") is not None
    await node.dispatched()
    assert node.broker.topics.get("T1") is None
    assert not node.store.queues.not_empty(("T1",))


async def test_messages_dispatched_after_their_topic_was_deleted_are_deleted(node: Node) -> None:
    """They were in a topic of this name that was created later."""
    log = node.store.log
    log.limit_dispatch(log.max_offset.value)
    await node.send(b"old", b="T1")
    assert (await node.ask(215, topic="T1")).code == 0
    log.limit_dispatch(log.max_offset.value)
    await node.dispatched()
    await update(node)
    await node.broker.tables.clear_deleted_topics()  # as it is called periodically
    assert (await node.ask(31, topic="T1", queueId=0)).ext_fields == {"offset": "1"}
    assert (await node.pull(0, topic="T1")).code == 21


async def test_topics_created_and_changed_at_the_same_time_are_limited(tmp_path: Path) -> None:
    """A topic that was being changed counted twice, and the last one that fits was refused while it was created."""
    count = len(system_topics(BrokerOptions(keeps_tables_in_log=True)))
    async with open_node(tmp_path, topic_count_max=count + 2, keeps_tables_in_log=True) as node:
        topics = node.broker.topics
        created: list[TopicConfig | str] = []

        async def create() -> None:
            created.append(await topics.ensure("T2", 1))

        assert await topics.update(TopicConfig(topic_name="T1")) == ""
        async with trio.open_nursery() as nursery, node.store.log.appends_held():
            nursery.start_soon(topics.update, TopicConfig(topic_name="T1", perm=4))
            await wait_all_tasks_blocked()
            nursery.start_soon(create)
            nursery.start_soon(create)
            await wait_all_tasks_blocked()
        assert created == [topics.get("T2")] * 2
        assert isinstance(await topics.ensure("T3", 1), str)


async def test_system_topics_can_not_be_deleted(node: Node) -> None:
    for topic in ("", "TBW102", "C", "b0", "SELF_TEST_TOPIC", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_x"):
        assert (topic, (await node.ask(215, topic=topic)).code) == (topic, 29)
    assert node.broker.topics.get("SELF_TEST_TOPIC") is not None


async def test_system_topics(node: Node) -> None:
    names = json.loads(bytes((await node.ask(305)).body))["topicList"]
    assert {"TBW102", "SCHEDULE_TOPIC_XXXX", "C", "b0", "BenchmarkTest", "OFFSET_MOVED_EVENT"} <= set(names)
    assert "T1" not in names


async def test_slave_refuses_changes_of_topics(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        for code, ext in ((17, CREATE), (215, {"topic": "T1"})):
            answer = await node.ask(code, **ext)
            assert answer.code == 1
            assert "slave" in (answer.remark or "")


async def test_slave_does_not_serve_topics_deleted_by_its_master(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        topics = node.broker.topics

        async def learn(*names: str) -> None:
            table = topics.snapshot()
            table.topic_config_table = {name: TopicConfig(topic_name=name) for name in names}
            table.data_version = table.data_version.next(1)
            assert await topics.replace(table)

        for name in ("T1", "New"):
            node.store.queues.get_or_create(name, 0).append(0, [ENTRY.pack(100, 100, 0)])
        await learn("T1")
        assert topics.get_readable("New") is not None, "messages come before their topic"
        await learn("T2")
        await learn("T2", "T3")
        assert topics.get_readable("T1") is None
        assert topics.get_readable("New") is not None
        await learn("T1")
        assert topics.get_readable("T1") is not None


async def test_full_disk_changes_nothing(tmp_path: Path) -> None:
    disk = FullDisk()
    topics = Topics(ConfigFile(tmp_path / "t.json", run_blocking=disk.run), BrokerOptions(), wall_clock_ms=lambda: 1)
    await topics.load()
    assert await topics.update(TopicConfig(topic_name="T1", perm=4)) == ""
    disk.is_full = True
    assert (await topics.update(TopicConfig(topic_name="T1", perm=6))).startswith("no space left")
    assert (await topics.update(TopicConfig(topic_name="T2"))).startswith("no space left")
    assert (await topics.delete("T1")).startswith("no space left")
    assert topics.get("T1") == TopicConfig(topic_name="T1", perm=4)
    assert topics.get("T2") is None
    disk.is_full = False
    assert await topics.delete("T1") == ""
    assert topics.get("T1") is None


async def test_answer_waits_for_name_servers(node: Node) -> None:
    waited = 0.0

    async def announce() -> None:
        nonlocal waited
        await trio.sleep(1)
        waited += 1

    node.broker.topics.wait_told = announce
    began = trio.current_time()
    await update(node)
    await node.ask(215, topic="T1")
    assert waited == 2
    assert 2 <= trio.current_time() - began < 2.5

    async def never() -> None:
        await trio.sleep_forever()

    node.broker.topics.wait_told = never
    began = trio.current_time()
    assert (await update(node)).code == 0
    assert trio.current_time() - began == pytest.approx(ANNOUNCE_TIMEOUT_S, abs=0.1)


async def test_topic_created_by_a_send_is_announced_before_the_answer(node: Node) -> None:
    """Other clients look up its route next."""

    async def announce() -> None:
        await trio.sleep(1)

    node.broker.topics.wait_told = announce
    began = trio.current_time()
    for seconds in (1, 1):  # the second one finds it there
        created = await node.broker.topics.create_on_send("made", "TBW102", 4)
        assert isinstance(created, TopicConfig)
        assert trio.current_time() - began == pytest.approx(seconds, abs=0.1)
