"""222: resetting a consumer group, by the broker itself as in 5.x, or by its members as in 4.9."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker.options import BrokerRole
from ha.broker.standing import Standing
from ha.protocol import java_json
from ha.protocol.codes import LanguageCode
from ha.protocol.group_requests import decode_queue_offsets
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import Node, open_node


async def fill(node: Node) -> list[int]:
    """Three messages in queue 0 of TT, a second apart, all consumed by g; their store times."""
    times = []
    for number in range(3):
        await node.send(b"%d" % number)
        await node.dispatched()
        times.append(node.records(await node.pull(number))[0].store_timestamp_ms)
        await trio.sleep(1)
    assert (await commit(node, 3)).code == 0
    return times


async def commit(node: Node, offset: int) -> RemotingCommand:
    return await node.ask(15, consumerGroup="g", topic="TT", queueId=0, commitOffset=offset)


async def reset(node: Node, timestamp: int, **changes: Any) -> RemotingCommand:
    return await node.ask(222, **{"topic": "TT", "group": "g", "timestamp": timestamp, "isForce": True, **changes})


def spoil(root: Path) -> None:
    """Flips a bit in the body "spoilt", and deletes the queues."""
    [segment] = (root / "commitlog").iterdir()
    content = bytearray(segment.read_bytes())
    content[content.index(b"spoilt")] ^= 1
    segment.write_bytes(content)
    shutil.rmtree(root / "consumequeue")


async def committed(node: Node) -> str:
    return (await node.ask(14, consumerGroup="g", topic="TT", queueId=0)).ext_fields["offset"]


@pytest.mark.parametrize("is_running", [False, True])
async def test_no_message_is_skipped_after_the_log_lost_its_end(tmp_path: Path, is_running: bool) -> None:
    """The next messages got offsets below that of the group, which continued at its offset, or at the queue's end when
    it pulled."""
    async with open_node(tmp_path) as node:
        await fill(node)
        assert (await commit(node, 5)).code == 0
    async with open_node(tmp_path) as node:
        assert await committed(node) == "3"
        for _ in range(4):
            await node.send(b"new")
        await node.dispatched()
        if is_running:
            assert (await commit(node, 5)).code == 0  # it has not noticed yet
            assert await committed(node) == "3"
        told = await node.pull(5 if is_running else 3)
        assert (told.code, told.ext_fields["nextBeginOffset"]) == (21, "3")
    async with open_node(tmp_path) as node:
        assert await committed(node) == "3", "also after another restart"
        assert len(node.records(await node.pull(3))) == 4


async def test_offsets_stay_while_damage_keeps_a_queue_from_its_end(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await fill(node)
        await node.send(b"spoilt")
        assert (await commit(node, 4)).code == 0
    spoil(tmp_path)
    async with open_node(tmp_path) as node:
        assert node.store.log.dispatched_offset.value < node.store.log.max_offset.value
        assert node.broker.offsets.get("g", "TT", 0) == 4


async def test_broker_resets_the_group_itself(node: Node) -> None:
    times = await fill(node)
    answer = await reset(node, times[1])
    assert answer.code == 0
    assert decode_queue_offsets(answer.body) == {("TT", "b0", 0): 1, **{("TT", "b0", n): 0 for n in (1, 2, 3)}}
    assert await committed(node) == "1"
    # Commits of a consumer that has not noticed yet are ignored.
    assert (await commit(node, 3)).code == 0
    assert await committed(node) == "1"
    told = await node.pull(3, sysFlag=5, commitOffset=3)
    assert (told.code, told.remark, told.ext_fields["nextBeginOffset"]) == (21, "OFFSET_RESET", "1")
    assert (told.ext_fields["minOffset"], told.ext_fields["maxOffset"]) == ("0", "3")
    assert await committed(node) == "1"
    assert [record.body for record in node.records(await node.pull(1))] == [b"1", b"2"], "told once"
    assert (await commit(node, 2)).code == 0
    assert await committed(node) == "2"


async def test_held_pulls_get_the_reset(node: Node) -> None:
    await fill(node)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            answer = await node.pull(3, sysFlag=6)
            assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (21, "0")
            assert trio.current_time() - began < 5

        nursery.start_soon(wait)
        await trio.sleep(1)
        await reset(node, 0)


async def test_reset_targets(node: Node) -> None:
    times = await fill(node)

    async def place(timestamp: int, **changes: Any) -> int:
        answer = await reset(node, timestamp, queueId=0, **changes)
        assert answer.code == 0, answer
        [(queue, offset)] = decode_queue_offsets(answer.body).items()
        assert queue == ("TT", "b0", 0)
        return offset

    assert await place(-1) == 3
    assert await place(0) == 0
    assert await place(times[2] + 1) == 3
    assert await place(times[1] + 1) == 2
    assert await place(0, offset=2) == 2
    assert await place(0, offset=4) == 4
    assert await place(times[1], offset=-1) == 1
    for offset in (5, -2, 1 << 60):
        answer = await reset(node, 0, queueId=0, offset=offset)
        assert (answer.code, answer.remark) == (1, f"Target offset {offset} not in consume queue range [0-3]")
    assert (await reset(node, 0, queueId=4)).code == 1
    assert (await reset(node, 0, topic="none")).code == 17
    assert (await reset(node, 0, group="none")).code == 26


async def test_search_by_time_across_a_gap(node: Node) -> None:
    times = await fill(node)
    await node.send(b"3", e=1)
    await node.dispatched()
    queue, other = node.store.queues.get("TT", 0), node.store.queues.get("TT", 1)
    assert queue is not None
    assert other is not None
    queue.append(6, [other.read_raw(0, 1)])  # messages 3 to 5 were damaged, and the gap was accepted
    for number, timestamp in enumerate([*times, times[2] + 1]):
        answer = await node.ask(29, topic="TT", queueId=0, timestamp=timestamp)
        assert int(answer.ext_fields["offset"]) == number


async def test_slave_refuses_resets(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        assert (await reset(node, 0)).code == 1


@pytest.fixture
async def old_way(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path, server_side_reset_offset=False) as node:
        yield node


def heartbeat() -> bytes:
    subscription = {"topic": "TT", "subString": "*", "subVersion": 1}
    consumer = {"groupName": "g", "consumeType": "CONSUME_PASSIVELY", "subscriptionDataSet": [subscription]}
    return json.dumps({"clientID": "c1", "consumerDataSet": [consumer]}).encode()


async def test_members_are_asked_to_reset(old_way: Node) -> None:
    node = old_way
    times = await fill(node)
    answer = await reset(node, times[1])
    assert (answer.code, answer.remark) == (1, "THe consumer group <g> not exist"), "of queues 1 to 3 there is nothing"
    for queue_id in (1, 2, 3):
        await node.ask(15, consumerGroup="g", topic="TT", queueId=queue_id, commitOffset=0)
    assert (await reset(node, times[1])).code == 206
    assert (await node.ask(34, heartbeat())).code == 0
    for is_force, timestamp, offset in ((True, times[1], 1), (False, -1, 3), (False, times[2], 2), (True, -1, 3)):
        node.received.clear()
        answer = await reset(node, timestamp, isForce=is_force)
        assert answer.code == 0
        assert decode_queue_offsets(answer.body)["TT", "b0", 0] == offset
        [told] = node.received
        assert (told.code, told.flag) == (220, 2)
        assert told.ext_fields == {
            "topic": "TT",
            "group": "g",
            "timestamp": str(timestamp),
            "isForce": "true" if is_force else "false",
        }
        assert bytes(told.body) == bytes(answer.body)
    await commit(node, 1)
    await reset(node, -1, isForce=False)
    assert decode_queue_offsets(node.received[-1].body)["TT", "b0", 0] == 1, "nobody is sent forward unless forced"
    assert await committed(node) == "1", "the members commit, not the broker"


async def test_cpp_members_get_a_list(old_way: Node) -> None:
    node = old_way
    await fill(node)
    for queue_id in (1, 2, 3):
        await node.ask(15, consumerGroup="g", topic="TT", queueId=queue_id, commitOffset=0)
    await node.ask(34, heartbeat())
    node.received.clear()
    fields = {"topic": "TT", "group": "g", "timestamp": "0", "isForce": "true"}
    command = RemotingCommand(222, language=LanguageCode.CPP, version=333, ext_fields=fields)
    answer = await node.client.invoke(node.address, command, 10)
    assert answer.code == 0
    [told] = node.received
    table = java_json.loads(told.body)["offsetTable"]
    assert table[0] == {"brokerName": "b0", "offset": 0, "queueId": 0, "topic": "TT"}
    assert decode_queue_offsets(told.body) == decode_queue_offsets(answer.body)


async def test_reset_whose_broker_becomes_a_slave_meanwhile_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed, but the slave kept the new offsets and sent them to the new master."""
    standing = Standing("b0", 2, is_slave=True, is_elected=True)

    async def offset_at(*arguments: Any) -> int:
        standing.become_slave(2)
        await trio.lowlevel.checkpoint()
        return 1

    async with open_node(tmp_path, standing=standing, keeps_tables_in_log=True) as node:
        assert await node.broker.become_master(1)
        times = await fill(node)
        monkeypatch.setattr("ha.broker.offset_resets.offset_at", offset_at)
        assert (await reset(node, times[1])).code == 1
        assert node.broker.offsets.local_commits() == []
