"""Admin requests about consumer groups, and copying offsets."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker.options import BrokerRole
from ha.protocol import java_json
from ha.protocol.bodies import GroupConfig, GroupTable
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import Node, open_node

GROUP: dict[str, Any] = {
    "groupName": "g1",
    "consumeEnable": True,
    "consumeBroadcastEnable": False,
    "retryQueueNums": 2,
    "retryMaxTimes": 3,
    "brokerId": 0,
    "whichBrokerWhenConsumeSlowly": 1,
    "notifyConsumerIdsChangedEnable": True,
}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path, group_count_max=3) as node:
        yield node


async def update(node: Node, **changes: Any) -> RemotingCommand:
    return await node.ask(200, json.dumps({**GROUP, **changes}).encode())


def on_disk(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config" / "subscriptionGroup.json").read_text())["subscriptionGroupTable"])


async def test_group_is_created_and_changed(node: Node, tmp_path: Path) -> None:
    assert (await update(node)).code == 0
    counter = node.broker.groups.snapshot().data_version.counter
    made = on_disk(tmp_path)["g1"]
    assert (made["retryMaxTimes"], made["consumeBroadcastEnable"], made["consumeFromMinEnable"]) == (3, False, True)
    assert json.loads(bytes((await node.ask(352, group="g1")).body)) == made
    assert (await update(node)).code == 0
    assert node.broker.groups.snapshot().data_version.counter == counter, "nothing changed"
    assert (await update(node, consumeEnable=False)).code == 0
    await node.send()
    assert (await node.pull(consumerGroup="g1")).code == 16
    assert (await node.ask(200)).code == 0, "nothing at all"


async def test_invalid_groups_are_refused(node: Node) -> None:
    for changes in (
        {"groupName": ""},
        {"groupName": "a b"},
        {"groupName": "x" * 121},
        {"retryQueueNums": -1},
        {"retryQueueNums": 1025},
    ):
        answer = await update(node, **changes)
        assert (changes, answer.code) == (changes, 29)
        assert "topic max" not in (answer.remark or "")
    assert (await node.ask(200, b"[")).code == 1
    assert (await node.ask(200, b"{}")).code == 1
    assert (await node.ask(200, b" " * (1 << 20) + b"{}")).code == 29
    assert (await node.ask(352, group="none")).code == 26
    assert node.broker.groups.get("none") is None, "asking makes none"


@pytest.mark.parametrize("in_log", [False, True], ids=["file", "group log"])
async def test_objects_as_keys_of_a_retry_policy_are_refused(tmp_path: Path, in_log: bool) -> None:
    """They ended a member, and made the file of a broker unreadable."""
    async with open_node(tmp_path, keeps_tables_in_log=in_log) as node:
        answer = await node.ask(200, b'{"groupName":"g1","groupRetryPolicy":{"a":{{"b":1}:2}}}')
        assert (answer.code, answer.remark) == (29, "groupRetryPolicy: keys must be strings")
        assert (await node.send()).code == 0


@pytest.mark.parametrize("in_log", [False, True], ids=["file", "group log"])
async def test_a_retry_policy_that_could_not_be_read_again_is_refused(tmp_path: Path, in_log: bool) -> None:
    """It is nested deeper in the file, and in the answer to 201, than in the request. No later start could read it."""
    codes = []
    async with open_node(tmp_path, keeps_tables_in_log=in_log) as node:
        for depth in range(1, 65):
            policy = b'{"a":' * depth + b"1" + b"}" * depth
            codes.append((await node.ask(200, b'{"groupName":"g%d","groupRetryPolicy":%b}' % (depth, policy))).code)
            java_json.read_as(GroupTable, (await node.ask(201)).body)
    assert codes[0] == 0
    assert codes[61] == 29  # the request itself is not too deep
    async with open_node(tmp_path, keeps_tables_in_log=in_log) as node:
        assert (await node.send()).code == 0


@pytest.mark.parametrize(
    "config",
    [
        rb'"attributes":{"\u0024ref":"$.dataVersion"}',
        rb'"groupRetryPolicy":{"\u0024ref":"$.dataVersion"}',
        b'"groupRetryPolicy":{"a":{"$ref":"$.dataVersion","b":null}}',
    ],
    ids=["attribute", "policy", "with a null, which is not written"],
)
async def test_a_value_that_would_become_a_reference_is_refused(tmp_path: Path, config: bytes) -> None:
    """A request can state it so that it is no reference, but in the broker's file it would be one."""
    async with open_node(tmp_path) as node:
        answer = await node.ask(200, b'{"groupName":"g1",%b}' % config)
        assert (answer.code, "$ref" in (answer.remark or "")) == (29, True)
    async with open_node(tmp_path) as node:
        assert (await node.send()).code == 0


async def test_numbers_beyond_an_int_of_java_are_refused(node: Node) -> None:
    answer = await node.ask(200, b'{"groupName":"g1","groupSysFlag":2147483648}')
    assert (answer.code, answer.remark) == (29, "groupSysFlag=2147483648: not a 32-bit number")


async def test_several_groups_are_changed_together_or_not_at_all(node: Node) -> None:
    def body(*names: str) -> bytes:
        return json.dumps({"groupConfigList": [{**GROUP, "groupName": name} for name in names]}).encode()

    assert (await node.ask(225, body("a", "b c"))).code == 29
    assert node.broker.groups.get("a") is None
    assert (await node.ask(225, body("a", "b"))).code == 0
    answer = await node.ask(225, body("c", "d"))
    assert (answer.code, answer.remark) == (1, "this broker holds its maximum of 3 consumer groups")
    assert list(node.broker.groups.table) == ["a", "b"]
    assert (await node.ask(225, body("a", "b", "c"))).code == 0


async def commit(node: Node, group: str, offset: int, topic: str = "TT", queue_id: int = 0) -> None:
    answer = await node.ask(15, consumerGroup=group, topic=topic, queueId=queue_id, commitOffset=offset)
    assert answer.code == 0


async def test_group_is_deleted(node: Node, tmp_path: Path) -> None:
    await node.send()
    for name in ("g1", "xg1"):
        await update(node, groupName=name)
        await commit(node, name, 1)
    assert (await node.ask(207, groupName="g1", cleanOffset=False)).code == 0
    assert "g1" not in on_disk(tmp_path)
    assert node.broker.offsets.get("g1", "TT", 0) == 1
    assert (await node.ask(207, groupName="g1", cleanOffset=True)).code == 0, "again"
    assert node.broker.offsets.get("g1", "TT", 0) is None
    assert node.broker.offsets.get("xg1", "TT", 0) == 1


async def test_groups_created_at_the_same_time_are_limited(tmp_path: Path) -> None:
    """Those that were being written to the group's log did not count."""
    async with open_node(tmp_path, group_count_max=3, keeps_tables_in_log=True) as node:
        groups = node.broker.groups
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(groups.find_or_create, f"g{number}")
                nursery.start_soon(groups.find_or_create, f"g{number}")
            nursery.start_soon(groups.update, [GroupConfig(group_name="g9")])
        assert len(groups.table) == 3


async def test_offsets_are_cloned(node: Node) -> None:
    await node.send()
    await node.send(b="T2")
    for name in ("g1", "g2"):
        await update(node, groupName=name)
    await commit(node, "g1", 1)
    await commit(node, "g1", 5, "T2", 1)
    clone: dict[str, Any] = {"srcGroup": "g1", "destGroup": "g2", "offline": False}
    assert (await node.ask(314, topic="TT", **clone)).code == 0
    assert (node.broker.offsets.of("g2", "TT"), node.broker.offsets.of("g2", "T2")) == ({0: 1}, {})
    assert (await node.ask(314, **clone)).code == 0
    assert node.broker.offsets.of("g2", "T2") == {1: 5}
    for wrong in ("no space", "", "x" * 121):
        answer = await node.ask(314, **{**clone, "destGroup": wrong})
        assert (answer.code, node.broker.offsets.of(wrong, "TT")) == (29, {}), answer


async def test_slave_refuses_changes_of_groups(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        for answer in (await update(node), await node.ask(207, groupName="g1")):
            assert answer.code == 1
            assert "slave" in (answer.remark or "")
