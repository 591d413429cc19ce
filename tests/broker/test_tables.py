"""The broker's tables: RocketMQ's files on disk, restarts, and a slave's copies. Store-format §9 and §12."""

import json
from pathlib import Path

import pytest
import trio

from ha.broker.config_file import ConfigFile
from ha.broker.groups import SubscriptionGroups
from ha.broker.options import BrokerOptions, BrokerRole
from ha.broker.slave_sync import SlaveSync
from ha.broker.topics import Topics
from ha.errors import CorruptLog
from ha.protocol.bodies import DataVersion, GroupConfig, TopicConfig
from tests.broker.full_disk import FullDisk
from tests.broker.node import open_node

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


async def test_rocketmq_files_are_read(tmp_path: Path, autojump_clock: object) -> None:
    write_config(tmp_path)
    async with open_node(tmp_path) as node:
        config = node.broker.topics.get("Old")
        assert config is not None
        assert (config.write_queue_nums, node.broker.topics.data_version.counter) == (2, 2)
        assert node.broker.offsets.get("g", "Old", 1) == 6
        group = node.broker.groups.get("g")
        assert group is not None
        assert (group.retry_max_times, group.consume_timeout_minute) == (3, 15)


async def test_new_topic_is_on_disk_before_its_first_message(tmp_path: Path, autojump_clock: object) -> None:
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


async def test_offsets_are_saved_every_5_s_and_at_shutdown(tmp_path: Path, autojump_clock: object) -> None:
    path = tmp_path / "config" / "consumerOffset.json"
    async with open_node(tmp_path) as node:
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


@pytest.mark.parametrize("name", ["topics.json", "consumerOffset.json", "subscriptionGroup.json"])
async def test_damaged_table_prevents_the_start(tmp_path: Path, autojump_clock: object, name: str) -> None:
    config = write_config(tmp_path)
    (config / name).write_text("{damaged")
    with pytest.RaisesGroup(pytest.RaisesExc(CorruptLog, match=name), flatten_subgroups=True, allow_unwrapped=True):
        async with open_node(tmp_path):
            pytest.fail("started with a damaged table")
    assert (config / name).read_text() == "{damaged"


async def test_slave_copies_its_masters_tables(tmp_path: Path, autojump_clock: object) -> None:
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


async def test_slave_syncs_every_10_s_and_on_demand(tmp_path: Path, autojump_clock: object) -> None:
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


async def test_slave_continues_without_its_master(tmp_path: Path, autojump_clock: object) -> None:
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
