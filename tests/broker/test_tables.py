"""The broker's tables: RocketMQ's files on disk, restarts, and a slave's copies. Store-format §9 and §12."""

import json
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ha.broker.config_file import ConfigFile
from ha.broker.config_table import ConfigTable
from ha.broker.groups import SubscriptionGroups
from ha.broker.offsets import ConsumerOffsetTable
from ha.broker.options import BrokerOptions, BrokerRole
from ha.broker.slave_sync import SlaveSync
from ha.broker.topics import Topics
from ha.errors import CorruptLog
from ha.protocol.access_bodies import UserConfig
from ha.protocol.bodies import ConsumerOffsets, DataVersion, GroupConfig, TopicConfig
from ha.protocol.codes import ResponseCode
from tests.broker.full_disk import FullDisk
from tests.broker.group_member import copy_log
from tests.broker.node import Node, open_node
from tests.store.disks import run_inline

TOPICS_JSON = """{
	"dataVersion":{
		"counter":2,
		"stateVersion":0,
		"timestamp":1
	},
	"topicConfigTable":{
		"Old":{
			"attributes":{},
			"order":false,
			"perm":6,
			"readQueueNums":2,
			"topicFilterType":"SINGLE_TAG",
			"topicName":"Old",
			"topicSysFlag":0,
			"writeQueueNums":2
		}
	}
}"""
OFFSETS_JSON = """{
	"offsetTable":{
		"Old@g":{0:5,1:6
		}
	}
}"""
GROUPS_JSON = """{
	"dataVersion":{"counter":1,"timestamp":1},
	"subscriptionGroupTable":{"g":{"brokerId":0,"consumeBroadcastEnable":true,"consumeEnable":true,
	"consumeFromMinEnable":true,"groupName":"g","notifyConsumerIdsChangedEnable":true,"retryMaxTimes":3,"retryQueueNums":1,
	"whichBrokerWhenConsumeSlowly":1}}
}"""


def write_config(folder: Path) -> Path:
    config = folder / "config"
    config.mkdir(parents=True)
    (config / "topics.json").write_text(TOPICS_JSON)
    (config / "consumerOffset.json").write_text(OFFSETS_JSON)
    (config / "subscriptionGroup.json").write_text(GROUPS_JSON)
    return config


async def test_rocketmq_files_are_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:  # a master has no offset beyond its empty queues
        config = node.broker.topics.get("Old")
        assert config is not None
        assert (config.write_queue_nums, node.broker.topics.data_version.counter) == (2, 2)
        assert node.broker.offsets.get("g", "Old", 1) == 6
        group = node.broker.groups.get("g")
        assert group is not None
        assert (group.retry_max_times, group.consume_timeout_minute) == (3, 15)


async def test_store_has_its_broker_s_name(tmp_path: Path) -> None:
    async with open_node(tmp_path):
        assert json.loads((tmp_path / "config" / "broker.json").read_text()) == {"brokerName": "b0"}


async def test_new_topic_is_on_disk_before_its_first_message(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with open_node(tmp_path) as node:
        told = 0

        def on_change() -> None:
            nonlocal told
            told += 1

        node.broker.topics.subscribe(on_change)
        await node.send()
        assert told == 1
        written = json.loads((config / "topics.json").read_text())
        assert written["dataVersion"]["counter"] == 3
        assert written["topicConfigTable"]["TT"] == {
            "attributes": {},
            "order": False,
            "perm": 6,
            "readQueueNums": 4,
            "topicFilterType": "SINGLE_TAG",
            "topicName": "TT",
            "topicSysFlag": 0,
            "writeQueueNums": 4,
        }
        assert "TT" not in (config / "topics.json.bak").read_text()
        await node.send()
        assert told == 1
    async with open_node(tmp_path) as node:
        assert node.broker.topics.get("TT") is not None
        assert node.broker.topics.data_version.counter == 3, "a restart is no change"


async def test_offsets_are_saved_every_5_s_and_at_shutdown(tmp_path: Path) -> None:
    path = tmp_path / "config" / "consumerOffset.json"
    async with open_node(tmp_path) as node:
        for _ in range(6):
            await node.send()
        began = trio.current_time()
        await node.pull(0, sysFlag=5, commitOffset=5)
        assert not path.exists()
        await trio.sleep_until(began + 5.001)
        assert path.read_text() == '{\n\t"offsetTable":{\n\t\t"TT@g":{0:5\n\t\t}\n\t}\n}'
        await node.pull(0, sysFlag=5, commitOffset=6)
    assert "{0:6" in path.read_text()
    async with open_node(tmp_path) as node:
        assert node.broker.offsets.get("g", "TT", 0) == 6


async def test_offsets_are_written_once_the_log_that_they_follow_is_flushed(tmp_path: Path) -> None:
    """Offsets of POP follow its records; after a power loss, a group would skip messages if the file were ahead."""
    path, is_flushed = tmp_path / "consumerOffset.json", trio.Event()
    offsets = ConsumerOffsetTable(ConfigFile(path), BrokerOptions(), flush_log=is_flushed.wait)
    offsets.commit("g", "T", 0, 5)
    with trio.move_on_after(1):
        await offsets.save()
    assert not path.exists()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offsets.save)
        await trio.testing.wait_all_tasks_blocked()
        offsets.commit("g", "T", 0, 6)
        is_flushed.set()
    assert "{0:5" in path.read_text()
    await offsets.save()
    assert "{0:6" in path.read_text()


async def test_offsets_that_come_and_go_count_towards_the_limit_once(tmp_path: Path) -> None:
    path = tmp_path / "consumerOffset.json"
    path.write_text('{"offsetTable":{"T@g":{0:5,1:5}}}')
    offsets = ConsumerOffsetTable(ConfigFile(path), BrokerOptions(offset_count_max=4))

    def room() -> int:
        """Number of further offsets that are accepted."""
        accepted = sum(offsets.commit("probe", "P", queue_id, 1) for queue_id in range(5))
        offsets.remove(group="probe")
        return accepted

    await offsets.load()
    assert room() == 2
    assert offsets.commit("g", "T", 1, 6)
    assert room() == 2
    offsets.merge(ConsumerOffsets(offset_table={"T@g": {1: 7, 2: 7}}))
    assert room() == 1
    offsets.follow([], {"U@g": {0: 1}})
    assert room() == 0
    offsets.follow(["T@g", "none@g"], {"T@g": {0: 1}})
    assert room() == 2
    offsets.adopt({"T@g": {0: 1, 1: 1, 2: 1}})
    assert room() == 1
    offsets.remove(topic="T")
    assert room() == 4


async def test_marks_of_commits_to_a_slave_are_saved_although_the_save_is_cancelled(tmp_path: Path) -> None:
    """At shutdown they counted as saved."""

    async def slow(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.sleep(2)
        return call(*arguments)

    path = tmp_path / "takenOffsets.json"
    file = ConfigFile(tmp_path / "consumerOffset.json", run_blocking=run_inline)
    options = BrokerOptions(role=BrokerRole.SLAVE)
    offsets = ConsumerOffsetTable(file, options, taken_file=ConfigFile(path, run_blocking=slow))
    offsets.commit("g", "T", 0, 5)
    with trio.move_on_after(1):
        await offsets.save()
    await offsets.save()
    assert "{0:5" in path.read_text()


@pytest.mark.parametrize("name", ["topics.json", "consumerOffset.json", "subscriptionGroup.json"])
async def test_damaged_table_prevents_the_start(tmp_path: Path, name: str) -> None:
    config = write_config(tmp_path)
    (config / name).write_text("{damaged")
    with pytest.RaisesGroup(pytest.RaisesExc(CorruptLog, match=name), flatten_subgroups=True, allow_unwrapped=True):
        async with open_node(tmp_path):
            pytest.fail("started with a damaged table")
    assert (config / name).read_text() == "{damaged"


@pytest.mark.parametrize("damaged", ['"topicName":"Odd"', '"topicN!me":"Old"', '"Odd":{'])
async def test_a_topic_with_two_names_is_damage(tmp_path: Path, damaged: str) -> None:
    """POP read the queues of the one topic for the consumers of the other."""
    config = write_config(tmp_path)
    (config / "topics.json.bak").write_text(TOPICS_JSON)
    intact = '"Old":{' if damaged.endswith("{") else '"topicName":"Old"'
    (config / "topics.json").write_text(TOPICS_JSON.replace(intact, damaged))
    async with open_node(tmp_path) as node:
        found = node.broker.topics.get("Old")
        assert found is not None
        assert (found.topic_name, found.write_queue_nums) == ("Old", 2)
        assert node.broker.topics.get("Odd") is None


async def test_a_group_and_a_user_with_two_names_are_damage(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (config / "subscriptionGroup.json").write_text(GROUPS_JSON.replace('"g":{', '"G":{'))
    (config / "subscriptionGroup.json.bak").write_text(GROUPS_JSON)
    users = '{"userTable":{"who":{"username":"who","password":"secret"}}}'
    (config / "users.json").write_text(users.replace('"who":{', '"whn":{'))
    (config / "users.json.bak").write_text(users)
    async with open_node(tmp_path) as node:
        assert [*node.broker.groups.table] == ["g"]
        assert node.broker.groups.table["g"].retry_max_times == 3
        assert [*node.broker.tables.users.table] == ["who"]


async def test_slave_copies_its_masters_tables(tmp_path: Path) -> None:
    write_config(tmp_path / "master")
    async with open_node(tmp_path / "master") as master, open_node(tmp_path / "slave", role=BrokerRole.SLAVE) as slave:
        await master.send()
        await master.pull(0, consumerGroup="fresh", sysFlag=5, commitOffset=1)
        slave.broker.offsets.commit("own", "Own", 0, 9)
        broker = slave.broker
        sync = SlaveSync(master.client, lambda: "master", broker.tables, broker.options)
        assert await sync.sync_once()
        assert broker.topics.snapshot() == master.broker.topics.snapshot()
        assert broker.groups.get("fresh") is not None
        assert broker.offsets.get("fresh", "TT", 0) == 1
        assert broker.offsets.get("own", "Own", 0) == 9
        assert "TT" in (tmp_path / "slave" / "config" / "topics.json").read_text()


SLAVE: dict[str, Any] = {"role": BrokerRole.SLAVE, "slave_read_enable": True}


async def read(node: Node, topic: str) -> tuple[int, list[bytes]]:
    """The code of a pull of queue 0 from its start, and the bodies of the messages."""
    answer = await node.pull(min_offset(node, topic), topic=topic)
    return answer.code, [record.body for record in node.records(answer)] if answer.code == 0 else []


def min_offset(node: Node, topic: str) -> int:
    queue = node.store.queues.get(topic, 0)
    return 0 if queue is None else queue.min_offset


def entries(node: Node, topic: str) -> int:
    """The number of messages that readers of the store see in queue 0."""
    queue = node.store.queues.get(topic, 0)
    assert queue is not None
    return queue.max_offset - queue.min_offset


async def test_messages_of_a_deleted_topic_leave_the_slave(tmp_path: Path) -> None:
    async with open_node(tmp_path / "master") as master, open_node(tmp_path / "slave", **SLAVE) as slave:
        sync = SlaveSync(master.client, lambda: "master", slave.broker.tables, slave.broker.options)
        await master.send(b"old", b="T1")
        await master.send(b"kept", b="T2")
        await master.pull(0, consumerGroup="g", topic="T1", sysFlag=5, commitOffset=1)
        await copy_log(master.store, slave.store, master.store.log.max_offset.value)
        assert await sync.sync_once()
        assert await read(slave, "T1") == (0, [b"old"])
        assert (await master.ask(215, topic="T1")).code == 0
        assert await sync.sync_once()
        assert (await read(slave, "T1"))[0] == ResponseCode.TOPIC_NOT_EXIST
        assert [entries(slave, topic) for topic in ("T1", "T2")] == [0, 1]
        assert slave.broker.offsets.get("g", "T1", 0) is None
    async with open_node(tmp_path / "slave", **SLAVE) as slave:
        assert (await read(slave, "T1"))[0] == ResponseCode.TOPIC_NOT_EXIST
        assert await read(slave, "T2") == (0, [b"kept"])
        assert [entries(slave, topic) for topic in ("T1", "T2")] == [0, 1]
        assert slave.broker.offsets.get("g", "T1", 0) is None


async def test_slave_that_was_away_keeps_only_what_the_master_has(tmp_path: Path) -> None:
    """It first learns of the topic after it was deleted and created again, and gets the old messages later still."""
    async with open_node(tmp_path / "master") as master, open_node(tmp_path / "slave", **SLAVE) as slave:
        sync = SlaveSync(master.client, lambda: "master", slave.broker.tables, slave.broker.options)
        await master.send(b"old", b="T1")
        between = master.store.log.max_offset.value
        await master.send(b"older", b="T1")
        await copy_log(master.store, slave.store, between)
        assert (await master.ask(215, topic="T1")).code == 0
        await master.send(b"new", b="T1")
        assert await sync.sync_once()
        assert entries(slave, "T1") == 0
        await copy_log(master.store, slave.store, master.store.log.max_offset.value)
        assert await sync.sync_once()
        assert await read(slave, "T1") == (0, [b"new"])
        assert entries(slave, "T1") == entries(master, "T1") == 1


async def test_slave_deletes_nothing_when_its_master_lost_its_tables(tmp_path: Path) -> None:
    async with open_node(tmp_path / "slave", **SLAVE) as slave:
        async with open_node(tmp_path / "master") as master:
            sync = SlaveSync(master.client, lambda: "master", slave.broker.tables, slave.broker.options)
            for topic in ("T1", "T2"):
                await master.send(b"kept", b=topic)
                await master.pull(0, topic=topic, sysFlag=5, commitOffset=1)
            await copy_log(master.store, slave.store, master.store.log.max_offset.value)
            assert await sync.sync_once()
        shutil.rmtree(tmp_path / "master" / "config")
        async with open_node(tmp_path / "master") as master:
            sync = SlaveSync(master.client, lambda: "master", slave.broker.tables, slave.broker.options)
            assert await sync.sync_once()
            assert [entries(slave, topic) for topic in ("T1", "T2")] == [1, 1]
            assert slave.broker.offsets.get("g", "T1", 0) == 1


async def test_offsets_of_a_deleted_group_leave_the_slave(tmp_path: Path) -> None:
    async with open_node(tmp_path / "master") as master, open_node(tmp_path / "slave", **SLAVE) as slave:
        sync = SlaveSync(master.client, lambda: "master", slave.broker.tables, slave.broker.options)
        await master.send()
        for group in ("deleted", "without-offsets", "kept"):
            await master.pull(0, consumerGroup=group, sysFlag=5, commitOffset=1)
        await slave.pull(0, consumerGroup="own")
        slave.broker.offsets.commit("own", "TT", 0, 9)
        assert await sync.sync_once()
        assert (await master.ask(207, groupName="deleted", cleanOffset=True)).code == 0
        assert (await master.ask(207, groupName="without-offsets", cleanOffset=False)).code == 0
        assert await sync.sync_once()
        offsets = slave.broker.offsets
        assert [offsets.get(group, "TT", 0) for group in ("deleted", "without-offsets", "kept")] == [None, 1, 1]
        assert offsets.get("own", "TT", 0) == 9
        assert slave.broker.groups.get("deleted") is None


async def test_deletion_survives_the_rebuild_of_queues(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.send(b"old", b="T1")
        await node.send(b"kept", b="T2")
        assert (await node.ask(215, topic="T1")).code == 0
    shutil.rmtree(tmp_path / "consumequeue")
    async with open_node(tmp_path) as node:
        assert [entries(node, topic) for topic in ("T1", "T2")] == [0, 1]
    for folder in ("consumequeue", "commitlog"):
        shutil.rmtree(tmp_path / folder)
    (tmp_path / "checkpoint").unlink()
    async with open_node(tmp_path) as node:
        await node.send(b"of another log", b="T1")
        await trio.sleep(10)
        assert entries(node, "T1") == 1


async def test_slave_ignores_names_that_are_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The limit is in bytes: these names have fewer characters."""
    long = "飛" * 86
    assert (len(long), len(long.encode())) == (86, 258)
    async with open_node(tmp_path / "master") as master, open_node(tmp_path / "slave", role=BrokerRole.SLAVE) as slave:
        topics = {name: TopicConfig(topic_name=name) for name in ("TT", long)}
        master.broker.topics.adopt(topics, DataVersion(counter=9))
        groups = {name: GroupConfig(group_name=name) for name in ("gg", long)}
        master.broker.groups.adopt(groups, DataVersion(counter=9))
        sync = SlaveSync(master.client, lambda: "master", slave.broker.tables, slave.broker.options)
        assert await sync.sync_once()
        assert slave.broker.topics.get("TT") is not None
        assert slave.broker.topics.get(long) is None
        assert slave.broker.groups.get("gg") is not None
        assert slave.broker.groups.get(long) is None
        assert await sync.sync_once()
        assert caplog.text.count("slave_sync.name_refused") == 2


async def test_slave_syncs_every_10_s_and_on_demand(tmp_path: Path) -> None:
    async with open_node(tmp_path / "master") as master, open_node(tmp_path / "slave", role=BrokerRole.SLAVE) as slave:
        broker = slave.broker
        asked: list[float] = []
        began = trio.current_time()

        def address() -> str:
            asked.append(trio.current_time() - began)
            return "master"

        sync = SlaveSync(master.client, address, broker.tables, broker.options)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync.serve)
            await trio.sleep(25)
            sync.sync_soon()
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert asked == [0.0, 10.0, 20.0, 25.0]


async def test_slave_continues_without_its_master(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as slave:
        broker = slave.broker
        unknown = SlaveSync(slave.client, lambda: None, broker.tables, broker.options)
        assert not await unknown.sync_once()


async def test_full_disk_creates_no_topic_but_keeps_copied_tables(tmp_path: Path) -> None:
    """A topic that can't be written is refused with the cause; a group is known at once and written later."""
    disk = FullDisk()
    options = BrokerOptions()

    def file(name: str) -> ConfigFile:
        return ConfigFile(tmp_path / name, run_blocking=disk.run)

    groups_file = file("subscriptionGroup.json")
    topics = Topics(file("topics.json"), options, wall_clock_ms=lambda: 1)
    groups = SubscriptionGroups(groups_file, options, wall_clock_ms=lambda: 1)
    await topics.load()
    before = (tmp_path / "topics.json").read_bytes()
    disk.is_full = True
    refused = await topics.create_on_send("TT", "TBW102", 4)
    assert isinstance(refused, str)
    assert refused.startswith(f"no space left for {tmp_path / 'topics.json'} (")
    assert topics.get("TT") is None
    assert (tmp_path / "topics.json").read_bytes() == before
    assert await groups.find_or_create("gg") is not None
    disk.is_full = False
    assert isinstance(await topics.create_on_send("TT", "TBW102", 4), TopicConfig)
    assert "TT" in (tmp_path / "topics.json").read_text()
    assert not (tmp_path / "subscriptionGroup.json").exists()
    await groups_file.catch_up()
    assert "gg" in (tmp_path / "subscriptionGroup.json").read_text()
    disk.is_full = True
    assert (await topics.delete("TT")).startswith("no space left")
    assert topics.get("TT") is not None
    assert await topics.delete("never_there") == "", "there is nothing to write"


class SlowDisk(FullDisk):
    """Each write takes 1 s, at the end of which a full disk fails it."""

    write_count = 0

    async def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if any(isinstance(argument, bytes) for argument in arguments):
            self.write_count += 1
            await trio.sleep(1)
        return await super().run(call, *arguments)


async def open_topics(folder: Path, disk: FullDisk) -> Topics:
    topics = Topics(ConfigFile(folder / "topics.json", run_blocking=disk.run), BrokerOptions(), wall_clock_ms=lambda: 1)
    await topics.load()
    return topics


@pytest.mark.parametrize("is_full", [False, True])
async def test_new_topic_is_unknown_until_its_file_is_written(tmp_path: Path, is_full: bool) -> None:
    """Another connection's message was acknowledged before, and unreadable if the write failed."""
    disk = SlowDisk()
    topics = await open_topics(tmp_path, disk)
    disk.is_full, version = is_full, topics.data_version
    made: list[TopicConfig | str] = []

    async def send(queue_count: int) -> None:
        made.append(await topics.create_on_send("TT", "TBW102", queue_count))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, 4)
        await trio.sleep(0.5)
        nursery.start_soon(send, 2)
        await trio.sleep(0.4)
        assert not made
        assert (topics.get("TT"), topics.data_version) == (None, version)
    known = topics.get("TT")
    if is_full:
        assert known is None
        assert [isinstance(fault, str) for fault in made] == [True, True]
        assert topics.data_version == version
    else:
        assert known is not None
        assert known.write_queue_nums == 4, "the first send created it"
        assert made == [known, known]
        assert disk.write_count == 2, "one at the start"
        written = await open_topics(tmp_path, FullDisk())
        assert (written.table, written.data_version) == (topics.table, topics.data_version)


async def test_failed_write_loses_no_other_change(tmp_path: Path) -> None:
    disk = SlowDisk()
    topics = await open_topics(tmp_path, disk)
    made: dict[str, TopicConfig | str] = {}

    async def create(topic: str) -> None:
        made[topic] = await topics.ensure(topic, 1)

    disk.is_full = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(create, "first")
        await trio.sleep(0.5)
        for topic in ("second", "third"):
            nursery.start_soon(create, topic)
        nursery.start_soon(topics.update, TopicConfig(topic_name="BenchmarkTest", write_queue_nums=7))
        await trio.sleep(1)
        disk.is_full = False
    assert isinstance(made.pop("first"), str)
    assert made == {topic: topics.get(topic) for topic in ("second", "third")}
    assert disk.write_count == 3, "the changes behind the failed one share a write"
    written = await open_topics(tmp_path, FullDisk())
    assert (written.table, written.data_version) == (topics.table, topics.data_version)
    assert {"second", "third"} <= written.table.keys()
    assert "first" not in written.table
    assert written.table["BenchmarkTest"].write_queue_nums == 7


async def test_topic_that_was_written_with_another_exists_although_its_own_write_fails(tmp_path: Path) -> None:
    """The first write waits for one of the same file; the disk fills up after it. The node ended."""
    disk = SlowDisk()
    topics = await open_topics(tmp_path, disk)
    made: dict[str, TopicConfig | str] = {}

    async def create(topic: str) -> None:
        made[topic] = await topics.ensure(topic, 1)

    async with trio.open_nursery() as nursery:
        async with topics._file._lock:
            for topic in ("first", "second"):
                nursery.start_soon(create, topic)
                await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(1.5)
        disk.is_full = True
    assert made == {topic: topics.get(topic) for topic in ("first", "second")}
    assert {"first", "second"} <= (await open_topics(tmp_path, FullDisk())).table.keys()


async def test_failed_deletion_of_messages_undoes_no_other(tmp_path: Path) -> None:
    disk = SlowDisk()
    topics = await open_topics(tmp_path, disk)
    faults: dict[str, str] = {}

    async def delete(topic: str) -> None:
        faults[topic] = await topics.delete_messages([topic], 1000)

    disk.is_full = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(delete, "first")
        await trio.sleep(0.5)
        nursery.start_soon(delete, "second")
        await trio.sleep(1)
        disk.is_full = False
    assert faults["first"].startswith("no space left")
    assert faults["second"] == ""
    assert topics.deleted == {"second": 1000}
    assert json.loads((tmp_path / "topics.json").read_text())["deletedTopics"] == {"second": 1000}


async def cancelled_while_another_saves(
    table: ConfigTable[Any], change: Callable[[], Awaitable[object]], scope: trio.CancelScope
) -> None:
    """Cancels a change that waits until the file is written for another one, as for a connection that closes."""

    async def cancellable() -> None:
        with scope:
            await change()

    async with trio.open_nursery() as nursery, table._saving:
        nursery.start_soon(cancellable)
        await trio.sleep(1)
        scope.cancel()
        await trio.sleep(1)


async def test_topic_whose_creation_was_cancelled_is_known_after_a_restart(tmp_path: Path) -> None:
    """Messages were acknowledged in it, and unreadable after the restart."""
    async with open_node(tmp_path) as node:
        topics = node.broker.topics
        await cancelled_while_another_saves(topics, partial(topics.ensure, "TT", 4), trio.CancelScope())
        assert (await node.send(b"one")).code == 0
    async with open_node(tmp_path) as node:
        assert [record.body for record in node.records(await node.pull())] == [b"one"]


async def test_user_whose_deletion_was_cancelled_does_not_come_back(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        users = node.broker.tables.users
        assert await users.put(UserConfig(username="mallory", password="secret")) == ""
        await cancelled_while_another_saves(users, partial(users.delete, "mallory"), trio.CancelScope())
        assert await users.delete("mallory") == "", "the operator repeats it"
    async with open_node(tmp_path) as node:
        assert node.broker.tables.users.get("mallory") is None


async def test_long_names_of_groups_make_no_topic_that_name_servers_refuse(node: Node) -> None:
    for length, is_accepted in ((248, True), (249, False)):
        group = "%RETRY%".ljust(length, "g")
        assert (await node.broker.groups.find_or_create(group) is not None) == is_accepted
    assert "longer than 255 bytes" in str(await node.broker.topics.ensure("%RETRY%".ljust(256, "t"), 1))
    assert await node.broker.topics.ensure("%RETRY%".ljust(255, "t"), 1) != ""
    assert max(map(len, node.broker.topics.table)) == 255
