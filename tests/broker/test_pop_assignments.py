"""Request modes of groups, and the queues that their clients get: 400, 401, 402."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from ha.broker.groups import REQUEST_MODE_PREFIX
from ha.broker.topic_routes import TopicRoutes
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from tests.broker.node import Node, open_node

QUEUES = {"b1": 2, "b0": 4}


async def find_queues(topic: str) -> Mapping[str, int] | None:
    return QUEUES if topic in ("TT", "%RETRY%g") else None


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path) as node:
        node.broker.pop.assignments.find_queues = find_queues
        yield node


async def join(node: Node, client_id: str) -> None:
    """Makes a client a member of group g."""
    consumer = {
        "groupName": "g",
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "subscriptionDataSet": [{"topic": "TT", "subString": "*"}],
    }
    assert (await node.ask(34, json.dumps({"clientID": client_id, "consumerDataSet": [consumer]}).encode())).code == 0


async def set_mode(node: Node, mode: str, share_count: int = 0, **changes: Any) -> RemotingCommand:
    body = {"topic": "TT", "consumerGroup": "g", "mode": mode, "popShareQueueNum": share_count, **changes}
    return await node.ask(401, json.dumps(body).encode())


async def assigned(node: Node, client_id: str, **changes: Any) -> tuple[set[tuple[str, int]], set[str]] | None:
    body = {"topic": "TT", "consumerGroup": "g", "clientId": client_id, "strategyName": "AVG"}
    answer = await node.ask(400, json.dumps({**body, "messageModel": "CLUSTERING", **changes}).encode())
    assert answer.code == 0
    found = json.loads(bytes(answer.body)).get("messageQueueAssignments")
    if found is None:
        return None
    queues = {(each["messageQueue"]["brokerName"], each["messageQueue"]["queueId"]) for each in found}
    assert {each["messageQueue"]["topic"] for each in found} <= {changes.get("topic", "TT")}
    return queues, {each["mode"] for each in found}


async def test_pull_mode_shares_the_queues_out(node: Node) -> None:
    assert await assigned(node, "c1") is None  # the group has no members
    await join(node, "c1")
    everything = {("b0", 0), ("b0", 1), ("b0", 2), ("b0", 3), ("b1", 0), ("b1", 1)}
    assert await assigned(node, "c1") == (everything, {"PULL"})
    async with (
        open_remoting_client(connect=node.connect) as second,
        open_remoting_client(connect=node.connect) as third,
        open_remoting_client(connect=node.connect) as fourth,
    ):
        for number, client in enumerate((second, third, fourth), 2):
            await join(Node(node.store, node.ha, node.broker, client, node.listener), f"c{number}")
        assert await assigned(node, "c1") == ({("b0", 0), ("b0", 1)}, {"PULL"})
        assert await assigned(node, "c2") == ({("b0", 2), ("b0", 3)}, {"PULL"})
        assert await assigned(node, "c4") == ({("b1", 1)}, {"PULL"})
        assert await assigned(node, "c2", strategyName="AVG_BY_CIRCLE") == ({("b0", 1), ("b1", 1)}, {"PULL"})
        assert await assigned(node, "c2", strategyName="unknown") is None
        assert await assigned(node, "stranger") == (set(), set())
        assert await assigned(node, "c2", messageModel="BROADCASTING") == (everything, {"PULL"})
        assert (await set_mode(node, "POP", 1)).code == 0
        assert await assigned(node, "c3") == ({("b1", 0), ("b1", 1)}, {"POP"})
        assert await assigned(node, "c4") == ({("b1", 1), ("b0", 0), ("b0", 1)}, {"POP"})


async def test_pop_mode_gives_all_queues_of_every_broker_to_each_client(node: Node) -> None:
    assert (await set_mode(node, "POP")).code == 0
    await join(node, "c1")
    assert await assigned(node, "c1") == ({("b0", -1), ("b1", -1)}, {"POP"})
    assert await assigned(node, "c1", topic="unknown") is None
    found = await assigned(node, "c1", topic="%RETRY%g")
    assert found is not None
    assert found[1] == {"PULL"}
    assert (await set_mode(node, "PULL")).code == 0
    found = await assigned(node, "c1")
    assert found is not None
    assert found[1] == {"PULL"}


async def test_what_can_not_be_set(node: Node) -> None:
    assert (await set_mode(node, "POP", topic="%RETRY%g")).code == 16
    assert (await set_mode(node, "PUSH")).code == 29
    assert (await set_mode(node, "POP", consumerGroup="no group")).code == 26
    assert (await node.ask(401, b"{")).code == 1
    assert (await node.ask(400, b"{")).code == 1


async def test_mode_is_kept_with_the_group(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        assert (await set_mode(node, "POP", 3)).code == 0
        config = json.loads(bytes((await node.ask(352, group="g")).body))
        config["retryMaxTimes"], config["attributes"] = 7, {}
        assert (await node.ask(200, json.dumps(config).encode())).code == 0
    async with open_node(tmp_path) as node:
        assert node.broker.groups.table["g"].retry_max_times == 7
        table = json.loads(bytes((await node.ask(402)).body))["messageRequestModeMap"]
        assert table == {"TT": {"g": {"topic": "TT", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 3}}}
        await node.send()
        await join(node, "c1")
        found = await assigned(node, "c1")
        assert found == ({(name, queue_id) for name in ("b0",) for queue_id in range(4)}, {"POP"})


async def test_changes_of_a_group_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """In a failover group, each was based on the group as it was before the others were in the log."""
    async with open_node(tmp_path, keeps_tables_in_log=True) as node:
        assert (await set_mode(node, "POP", topic="known")).code == 0

        modes = [{"topic": topic, "consumerGroup": "g", "mode": "POP"} for topic in ("T1", "T2", "T3")]
        requests = [*((401, json.dumps(mode)) for mode in modes), (200, '{"groupName":"g","retryMaxTimes":3}')]

        async def change(code: int, body: str) -> None:
            assert (await node.ask_alone(code, body.encode())).code == 0

        async with trio.open_nursery() as nursery:
            for code, body in requests:
                nursery.start_soon(change, code, body)
        group = node.broker.groups.get("g")
        assert group is not None
        assert group.attributes.keys() == {REQUEST_MODE_PREFIX + topic for topic in ("known", "T1", "T2", "T3")}
        assert group.retry_max_times == 3


@pytest.mark.parametrize("fault", ["refuses", "closes", "is silent"])
async def test_unreachable_name_servers_change_no_assignment(node: Node, fault: str) -> None:
    kept = []

    async def connect(address: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if fault == "refuses":
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = trio.testing.memory_stream_pair()
        if fault == "closes":
            await theirs.aclose()
        kept.append(theirs)
        return ours

    await join(node, "c1")
    async with open_remoting_client(connect=connect) as client:
        node.broker.pop.assignments.find_queues = TopicRoutes(client, ["n1:9876", "n2:9876"]).read_queues
        assert await assigned(node, "c1") is None
    assert (await node.ask(352, group="g")).code == 0


async def test_a_route_with_too_many_queues_is_no_answer() -> None:
    """A false broker registered 2^31 − 1 queues, and the master ran out of memory when it listed them."""

    class NameServer:
        def __init__(self, *counts: int) -> None:
            self.queues = [{"brokerName": f"b{number}", "readQueueNums": count} for number, count in enumerate(counts)]

        async def invoke(self, address: str, request: RemotingCommand, timeout_s: float) -> RemotingCommand:
            return request.reply(ResponseCode.SUCCESS, body=json.dumps({"queueDatas": self.queues}).encode())

    for counts, expected in (
        ((16_384, 4), {"b0": 16_384, "b1": 4}),
        ((2**31 - 1,), None),
        ((2**31 - 1, 1 - 2**31), None),
        ((16_384, 16_384, 16_384, 16_384, 1), None),
    ):
        routes = TopicRoutes(cast("Any", NameServer(*counts)), ["n1:9876"])
        assert await routes.read_queues("TT") == expected


@pytest.mark.parametrize("value", ["POP:" + "9" * 5000, f"POP:{2**64}", "POP:-1", "POP:3 "], ids=range(4))
async def test_no_attribute_of_a_group_ends_the_broker(node: Node, value: str) -> None:
    """A number of more than 4300 digits did, at each request of a client for its queues."""
    body = {"groupName": "g", "attributes": {REQUEST_MODE_PREFIX + "TT": value}}
    assert (await node.ask(200, json.dumps(body).encode())).code == 0
    await join(node, "c1")
    assert await assigned(node, "c1") is not None
    assert (await node.ask(402)).code == 0
