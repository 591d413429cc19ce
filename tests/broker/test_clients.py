"""Members of groups: joining, changing, leaving, and notifications."""

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.protocol import java_json
from ha.protocol.bodies import GroupConfig
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from ha.remoting.local import LocalConnection
from tests.broker.node import Node, open_node


class Client:
    """A consumer with its own connection."""

    def __init__(self, stream: trio.abc.Stream, client_id: str) -> None:
        self.stream = stream
        self.client_id = client_id
        self.parser = RemotingParser()

    async def heartbeat(
        self, *topics: str, version: int = 1, model: object = "CLUSTERING", **changes: Any
    ) -> list[RemotingCommand]:
        body = {
            "clientID": self.client_id,
            "consumerDataSet": [
                {
                    "groupName": "g",
                    "messageModel": model,
                    "subscriptionDataSet": [
                        {"topic": topic, "subString": "*", "subVersion": version} for topic in topics
                    ],
                }
            ],
            "producerDataSet": [{"groupName": "pg"}],
            **changes,
        }
        await self.stream.send_all(encode_command(RemotingCommand(34, opaque=1, body=java_json.dumps(body))))
        return await self.received()

    async def received(self) -> list[RemotingCommand]:
        """Answers and notifications since the last call."""
        await wait_all_tasks_blocked()
        with trio.move_on_after(0.001):
            return self.parser.feed(await self.stream.receive_some())
        return []


async def client(node: Node, client_id: str) -> Client:
    return Client(node.listener.connect(), client_id)


def codes(commands: list[RemotingCommand]) -> list[int]:
    return [command.code if not command.is_response else -command.code for command in commands]


async def test_all_members_are_notified_of_a_new_one(node: Node) -> None:
    one, two = await client(node, "one"), await client(node, "two")
    assert codes(await one.heartbeat("TT")) == [40, 0]
    assert codes(await two.heartbeat("TT")) == [40, 0]
    assert codes(await one.received()) == [40]
    assert node.broker.clients.consumer_ids("g") == ["one", "two"]
    assert codes(await two.heartbeat("TT")) == [0]
    assert codes(await one.received()) == []


async def test_members_are_notified_of_changed_topics(node: Node) -> None:
    one = await client(node, "one")
    await one.heartbeat("TT")
    assert codes(await one.heartbeat("TT", "Other")) == [40, 0]
    assert codes(await one.heartbeat("Other")) == [40, 0]
    group = node.broker.clients.consumer_group("g")
    assert group is not None
    assert list(group.subscriptions) == ["Other"]
    assert codes(await one.heartbeat("Other", version=9)) == [0]
    assert group.subscriptions["Other"].version == 9
    await one.heartbeat("Other", version=3)
    assert group.subscriptions["Other"].version == 9, "an older subscription changes nothing"


async def test_broadcasting_groups_do_not_rebalance(node: Node) -> None:
    one = await client(node, "one")
    assert codes(await one.heartbeat("TT", model="BROADCASTING")) == [0]
    assert codes(await one.heartbeat("TT", model=0)) == [0], "the C++ client sends the ordinal"


@pytest.mark.parametrize("notifies", [True, False])
async def test_group_says_whether_members_learn_who_leaves(node: Node, notifies: bool) -> None:
    one, two = await client(node, "one"), await client(node, "two")
    await one.heartbeat("TT")
    await two.heartbeat("TT")
    await one.received()
    group = GroupConfig(group_name="g", notify_consumer_ids_changed_enable=notifies)
    assert await node.broker.groups.update([group]) == ""
    leave = RemotingCommand(35, opaque=2, ext_fields={"clientID": "two", "consumerGroup": "g"})
    await two.stream.send_all(encode_command(leave))
    assert codes(await two.received()) == [0]
    assert codes(await one.received()) == ([40] if notifies else [])
    assert node.broker.clients.consumer_ids("g") == ["one"]


async def test_closed_connection_leaves_its_groups(node: Node) -> None:
    one, two = await client(node, "one"), await client(node, "two")
    await one.heartbeat("TT")
    await two.heartbeat("TT")
    await one.received()
    await two.stream.aclose()
    assert codes(await one.received()) == [40]
    assert node.broker.clients.consumer_ids("g") == ["one"]
    await one.stream.aclose()
    await wait_all_tasks_blocked()
    assert node.broker.clients.statistics() == {"producers": 0, "consumers": 0}


async def test_client_that_leaves_during_its_heartbeat_is_no_member(tmp_path: Path) -> None:
    """A client of the gRPC port: its group's creation waits for the log, while another call ends the client."""
    body = {
        "clientID": "one",
        "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "TT", "subString": "*"}]}],
        "producerDataSet": [{"groupName": "pg"}],
    }
    heartbeat = RemotingCommand(34, body=java_json.dumps(body))
    async with open_node(tmp_path, keeps_tables_in_log=True) as node, trio.open_nursery() as nursery:
        connection = LocalConnection(("10.0.0.9", 5))
        nursery.start_soon(node.broker.processor.handle, connection, [heartbeat])
        await wait_all_tasks_blocked()
        assert node.broker.groups.get("g") is None
        connection.end()
        await trio.sleep(1)
        assert node.broker.groups.get("g") is not None
        assert node.broker.clients.statistics() == {"producers": 0, "consumers": 0}


async def test_silent_member_expires(node: Node) -> None:
    one = await client(node, "one")
    began = trio.current_time()
    await one.heartbeat("TT")
    for _ in range(3):  # the connection is in use, but sends no heartbeat
        await trio.sleep(40)
        await one.stream.send_all(encode_command(RemotingCommand(9999, opaque=1)))
        await one.received()
    assert trio.current_time() - began < 121
    assert node.broker.clients.consumer_ids("g") == ["one"]
    await trio.sleep(10.5)
    assert node.broker.clients.consumer_ids("g") == []


async def test_fingerprints(node: Node) -> None:
    """Heartbeats V2: subscriptions need to be sent again only when the broker doesn't know the fingerprint."""
    one = await client(node, "one")

    async def is_change_wanted(**changes: Any) -> str:
        return (await one.heartbeat("TT", **changes))[-1].ext_fields["IS_SUB_CHANGE"]

    assert await is_change_wanted(heartbeatFingerprint=7) == "true"
    assert await is_change_wanted(heartbeatFingerprint=7) == "false"
    assert await is_change_wanted(heartbeatFingerprint=8) == "true"
    answer = (await one.heartbeat(heartbeatFingerprint=8, withoutSub=True))[-1]
    assert answer.ext_fields["IS_SUB_CHANGE"] == "false"
    group = node.broker.clients.consumer_group("g")
    assert group is not None
    assert list(group.subscriptions) == ["TT"]


async def test_memberships_are_bounded(tmp_path: Path) -> None:
    async with open_node(tmp_path, client_count_max=3, group_count_max=2) as node:
        clients = [await client(node, str(number)) for number in range(3)]
        for each in clients:
            assert codes(await each.heartbeat("TT"))[-1] == 0
        assert node.broker.clients.statistics() == {"producers": 2, "consumers": 1}
        await clients[0].stream.aclose()
        await clients[2].heartbeat("TT")
        assert node.broker.clients.statistics() == {"producers": 2, "consumers": 1}
        for number in range(5):
            await node.pull(0, topic="BenchmarkTest", consumerGroup=f"g{number}")
        assert len(node.broker.groups) == 2


async def test_refused_member_changes_nothing(tmp_path: Path) -> None:
    async with open_node(tmp_path, client_count_max=2) as node:
        for number, topic in enumerate(("TT", "OTHER")):
            await (await client(node, str(number))).heartbeat(topic)
        group = node.broker.clients.consumer_group("g")
        assert group is not None
        assert [each.client_id for each in group.members.values()] == ["0"]
        assert list(group.subscriptions) == ["TT"]


async def test_topics_are_bounded(tmp_path: Path) -> None:
    async with open_node(tmp_path, topic_count_max=13) as node:
        assert len(node.broker.topics) == 12
        assert (await node.send(b="One")).code == 0
        answer = await node.send(b="Two")
        assert answer.code == 17
        assert answer.remark is not None
        assert "maximum of 13 topics" in answer.remark


async def test_producer_has_the_client_id_of_its_last_heartbeat(node: Node) -> None:
    """Earlier client ids leave no trace."""
    for number in range(5):
        await node.ask(34, java_json.dumps({"clientID": f"c{number}", "producerDataSet": [{"groupName": "pg"}]}))
    found = [number for number in range(5) if node.broker.clients.find_producer(f"c{number}") is not None]
    assert found == [4]
