"""Requests about clients, answered or relayed: 203, 204, 328, 345; 223, 307, 309."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from ha.broker import admin_clients
from ha.protocol import java_json
from ha.protocol.codes import LanguageCode
from ha.protocol.group_requests import encode_consumer_status, read_queue_map
from ha.protocol.message_id import encode_message_id
from ha.protocol.record import Message, decode_record, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import FRAME_SIZE_MAX, SERIALIZE_ROCKETMQ, RemotingCommand
from ha.remoting import RemotingClient, RemotingConnection, open_remoting_client
from tests.broker.node import HOST, PORT, Node, open_node

Answer = Callable[[RemotingCommand], Awaitable[RemotingCommand | None]]


def heartbeat(client_id: str, *, model: str = "CLUSTERING") -> bytes:
    return json.dumps(
        {
            "clientID": client_id,
            "consumerDataSet": [
                {
                    "groupName": "g",
                    "consumeType": "CONSUME_ACTIVELY",
                    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                    "messageModel": model,
                    "subscriptionDataSet": [
                        {"topic": "TT", "subString": "a || b", "subVersion": 5, "expressionType": "TAG"},
                        {"topic": "T2", "subString": "*", "subVersion": 6},
                    ],
                }
            ],
            "producerDataSet": [{"groupName": "pg"}],
        }
    ).encode()


@asynccontextmanager
async def member(node: Node, client_id: str, answer: Answer | None = None) -> AsyncIterator[RemotingClient]:
    """Another client, of consumer group g and producer group pg; `answer` answers the broker's requests."""

    async def on_requests(connection: RemotingConnection, commands: list[RemotingCommand]) -> None:
        for command in commands:
            response = await answer(command) if answer is not None else None
            if response is not None:
                connection.reply(command, response)

    async def connect(address: str) -> trio.abc.Stream:
        return node.listener.connect()

    async with open_remoting_client(connect=connect, handler=on_requests) as client:
        command = RemotingCommand(34, language=LanguageCode.GO, version=317, body=heartbeat(client_id))
        assert (await client.invoke("broker", command, 10)).code == 0
        yield client


async def body(node: Node, code: int, **ext: Any) -> Any:
    answer = await node.ask(code, **ext)
    assert answer.code == 0, answer
    return java_json.loads(answer.body)


async def test_consumer_connections(node: Node) -> None:
    offline = await node.ask(203, consumerGroup="g")
    assert (offline.code, offline.remark) == (206, "the consumer group[g] not online")
    async with member(node, "c1"), member(node, "c2"):
        found = await body(node, 203, consumerGroup="g")
    connections = found.pop("connectionSet")
    assert [each["clientId"] for each in connections] == ["c1", "c2"]
    assert (connections[0]["language"], connections[0]["version"]) == ("GO", 317)
    assert connections[0]["clientAddr"].count(":") == 1
    tags = {"classFilterMode": False, "expressionType": "TAG"}
    assert found == {
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "consumeType": "CONSUME_ACTIVELY",
        "messageModel": "CLUSTERING",
        "subscriptionTable": {
            "TT": {
                **tags,
                "codeSet": [97, 98],
                "subString": "a || b",
                "subVersion": 5,
                "tagsSet": ["a", "b"],
                "topic": "TT",
            },
            "T2": {**tags, "codeSet": [], "subString": "*", "subVersion": 6, "tagsSet": [], "topic": "T2"},
        },
    }
    await node.ask(34, heartbeat("c3", model="BROADCASTING"))
    assert (await body(node, 203, consumerGroup="g"))["messageModel"] == "BROADCASTING"


async def test_producer_connections(node: Node) -> None:
    offline = await node.ask(204, producerGroup="pg")
    assert (offline.code, offline.remark) == (1, "the producer group[pg] not exist")
    assert await body(node, 328) == {"data": {}}
    async with member(node, "p1"):
        [connection] = (await body(node, 204, producerGroup="pg"))["connectionSet"]
        assert (connection["clientId"], connection["language"], connection["version"]) == ("p1", "GO", 317)
        await trio.sleep(10)
        [listed] = (await body(node, 328))["data"]["pg"]
        assert (listed["clientId"], listed["language"], listed["version"]) == ("p1", "GO", 317)
        assert listed["remoteIP"] == "/" + connection["clientAddr"]
        await node.send()
        [record] = node.records(await node.pull())
        assert 9_000 < record.store_timestamp_ms - listed["lastUpdateTimestamp"] < 11_000
    assert (await node.ask(204, producerGroup="pg")).code == 1


async def test_subscription_of_a_group(node: Node) -> None:
    assert await body(node, 345, group="g", topic="TT") == {"group": "g", "topic": "TT"}
    async with member(node, "c1"):
        found = await body(node, 345, group="g", topic="TT")
        assert found["subscriptionData"]["subString"] == "a || b"
        assert "subscriptionData" not in await body(node, 345, group="g", topic="T3")


async def test_running_info_is_relayed_to_the_consumer(node: Node) -> None:
    asked: list[RemotingCommand] = []

    async def answer(command: RemotingCommand) -> RemotingCommand | None:
        if command.code != 307:
            return None
        asked.append(command)
        await trio.sleep(3)
        return command.reply(0, "fine", {"x": "1"}, b'{"mqTable":{}}')

    fields: dict[str, Any] = {"consumerGroup": "g", "clientId": "c1", "jstackEnable": False}
    assert (await node.ask(307, **fields)).remark == "The Consumer <g> <c1> not online"
    async with member(node, "c1", answer):
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def meanwhile() -> None:
                await trio.sleep(1)
                assert (await node.ask(30, topic="TT", queueId=0)).code == 0
                assert trio.current_time() - began < 2, "the asker's connection goes on"

            nursery.start_soon(meanwhile)
            found = await node.ask(307, b"x" * 1000, **fields, AccessKey="ak", Signature="s", SecurityToken="t")
        assert (found.code, found.remark, bytes(found.body)) == (0, "fine", b'{"mqTable":{}}')
        assert found.ext_fields["x"] == "1"
        [command] = asked
        assert command.ext_fields == {"consumerGroup": "g", "clientId": "c1", "jstackEnable": "false"}
        assert bytes(command.body) == b""
        assert (await node.ask(307, **{**fields, "clientId": "c9"})).code == 1


async def test_consumer_that_does_not_answer_keeps_its_connection(node: Node) -> None:
    async with member(node, "c1") as client:
        began = trio.current_time()
        answer = await node.ask(307, consumerGroup="g", clientId="c1")
        assert answer.code == 207
        assert trio.current_time() - began == pytest.approx(admin_clients.CLIENT_TIMEOUT_S, abs=0.5)
        assert (await body(node, 203, consumerGroup="g"))["connectionSet"]
        assert (await client.invoke("broker", RemotingCommand(38, ext_fields={"consumerGroup": "g"}), 5)).code == 0


async def test_consumer_disconnects_during_a_relayed_request(node: Node) -> None:
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            answer = await node.ask(307, consumerGroup="g", clientId="c1")
            assert answer.code == 1
            assert "invoke consumer <g> <c1> Exception" in (answer.remark or "")

        async with member(node, "c1"):
            nursery.start_soon(ask)
            await trio.sleep(1)


async def test_relayed_request_that_fits_no_frame_fails_alone(tmp_path: Path) -> None:
    """JSON takes six characters for what is one byte in the header of the request."""
    store = {"segment_size": 2 * FRAME_SIZE_MAX, "message_size_max": FRAME_SIZE_MAX}
    async with open_node(tmp_path, message_size_max=FRAME_SIZE_MAX, store_changes=store) as node, member(node, "c1"):
        sent = await node.send(bytes(FRAME_SIZE_MAX - 1_000_000))
        node.serialize_type = SERIALIZE_ROCKETMQ
        fields: dict[str, Any] = {"consumerGroup": "g", "clientId": "c1", "msgId": sent.ext_fields["msgId"]}
        answer = await node.ask(309, **fields, other="\x01" * 200_000)
        assert answer.code == 1
        assert "the maximum is 16777216" in (answer.remark or "")
        assert (await body(node, 203, consumerGroup="g"))["connectionSet"]


async def test_relayed_requests_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_clients, "RELAY_COUNT_MAX", 3)
    codes: list[int] = []
    async with member(node, "c1"):
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                codes.append((await node.ask(307, consumerGroup="g", clientId="c1")).code)

            for _ in range(5):
                nursery.start_soon(ask)
        assert sorted(codes) == [2, 2, 207, 207, 207]
        codes.clear()
        await ask()
        assert codes == [207]


async def test_message_is_consumed_again(node: Node) -> None:
    message_id = (await node.send(b"again")).ext_fields["msgId"]
    got: list[RemotingCommand] = []

    async def answer(command: RemotingCommand) -> RemotingCommand | None:
        if command.code != 309:
            return None
        got.append(msgspec.structs.replace(command, body=bytes(command.body)))
        return command.reply(0, body=b'{"consumeResult":"CR_SUCCESS"}')

    fields: dict[str, Any] = {"consumerGroup": "g", "clientId": "c1", "topic": "TT"}
    async with member(node, "c1", answer):
        found = await node.ask(309, msgId=message_id, **fields)
        assert bytes(found.body) == b'{"consumeResult":"CR_SUCCESS"}'
        [command] = got
        assert decode_record(command.body).body == b"again"
        assert command.ext_fields == {
            **fields,
            "msgId": message_id,
            "brokerName": "b0",
            "topicSysFlag": "0",
            "groupSysFlag": "0",
        }
        for wrong in (message_id[:-1] + "1", "xyz", ""):
            assert (await node.ask(309, msgId=wrong, **fields)).code == 1
        assert len(got) == 1


async def test_forged_record_in_a_body_is_not_consumed(node: Node) -> None:
    """What looked like a record in a body was sent to the consumer, with the records that follow in the log."""
    await node.send()
    inside = node.store.log.max_offset.value + 88  # behind the fixed fields and the body's length
    forged = encode_record(
        Message("TT", 0, b"forged"),
        queue_offset=1,
        physical_offset=inside,
        store_timestamp_ms=1,
        store_host=encode_host(HOST, PORT),
    )
    await node.send(forged)
    message_id = encode_message_id(encode_host(HOST, PORT), inside)
    async with member(node, "c1"):
        answer = await node.ask(309, msgId=message_id, consumerGroup="g", clientId="c1")
    remark = f"can not find message {message_id}: its topic has no such message"
    assert (answer.code, answer.remark) == (1, remark)


async def test_offsets_reported_by_members(node: Node) -> None:
    assert (await node.ask(223, topic="TT", group="g")).code == 1

    def answers(offset: int) -> Answer:
        async def answer(command: RemotingCommand) -> RemotingCommand | None:
            if command.code != 221:
                return None
            assert command.ext_fields == {"topic": "TT", "group": "g"}
            return command.reply(0, body=encode_consumer_status({("TT", "b0", 0): offset}))

        return answer

    async def nonsense(command: RemotingCommand) -> RemotingCommand | None:
        return command.reply(0, body=b"[") if command.code == 221 else None

    async with member(node, "c1", answers(3)), member(node, "c2", answers(5)), member(node, "c3", nonsense):
        found = await body(node, 223, topic="TT", group="g")
        table = {client_id: read_queue_map(queues) for client_id, queues in found["consumerTable"].items()}
        assert table == {"c1": {("TT", "b0", 0): 3}, "c2": {("TT", "b0", 0): 5}}
        one = await body(node, 223, topic="TT", group="g", clientAddr="c2")
        assert one["consumerTable"].keys() == {"c2"}


async def test_offsets_reported_by_all_members_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of any number of members were decoded, each of up to 16 MiB."""
    monkeypatch.setattr(admin_clients, "STATUS_SIZE_MAX", 250)

    async def answer(command: RemotingCommand) -> RemotingCommand | None:
        if command.code != 221:
            return None
        return command.reply(0, body=encode_consumer_status({("TT", "b0", 0): 1}).ljust(100))

    async with member(node, "c1", answer), member(node, "c2", answer):
        assert (await body(node, 223, topic="TT", group="g"))["consumerTable"].keys() == {"c1", "c2"}
        async with member(node, "c3", answer):
            refused = await node.ask(223, topic="TT", group="g")
            assert (refused.code, refused.remark) == (1, "the members answer with more than 250 bytes; ask each alone")
            one = await body(node, 223, topic="TT", group="g", clientAddr="c3")
            assert one["consumerTable"].keys() == {"c3"}
