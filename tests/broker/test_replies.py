"""Replies (324, 325): pushed to the requester (326), stored, and answered with the outcome of the push."""

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.options import BrokerRole
from ha.broker.replies import CLIENT_TIMEOUT_S
from ha.protocol import java_json
from ha.protocol.properties import decode_properties
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from tests.broker.node import SEND_V1, SEND_V2, Node, open_node

PROPERTIES = "CORRELATION_ID\x01c1\x02REPLY_TO_CLIENT\x01asker\x02MSG_TYPE\x01reply\x02"
REPLY: dict[str, Any] = {**SEND_V2, "b": "C_REPLY_TOPIC", "i": PROPERTIES}
REPLY_V1: dict[str, Any] = {**SEND_V1, "topic": "C_REPLY_TOPIC", "properties": PROPERTIES}


class Asker:
    """A producer with its own connection that waits for replies."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._parser = RemotingParser()
        self._commands: list[RemotingCommand] = []

    async def heartbeat(self, *groups: str, client_id: str = "asker") -> None:
        body = {"clientID": client_id, "producerDataSet": [{"groupName": group} for group in groups or ("pg",)]}
        await self.stream.send_all(encode_command(RemotingCommand(34, opaque=1, body=java_json.dumps(body))))
        assert (await self.next()).code == 0

    async def next(self) -> RemotingCommand:
        while not self._commands:
            self._commands = self._parser.feed(await self.stream.receive_some())
        return self._commands.pop(0)

    async def take(self, code: int = 0, remark: str | None = None) -> RemotingCommand:
        """Accepts one reply and answers it."""
        pushed = await self.next()
        assert pushed.code == 326
        await self.stream.send_all(encode_command(pushed.reply(code, remark)))
        return pushed


async def asking(node: Node, *groups: str, client_id: str = "asker") -> Asker:
    asker = Asker(node.listener.connect())
    await asker.heartbeat(*groups, client_id=client_id)
    return asker


async def stored(node: Node) -> list[bytes]:
    await node.dispatched()
    return [record.body for record in node.records(await node.pull(0, topic="C_REPLY_TOPIC"))]


@pytest.mark.parametrize(("code", "fields"), [(324, REPLY_V1), (325, REPLY)])
async def test_reply_is_pushed_and_stored(node: Node, code: int, fields: Any) -> None:
    asker = await asking(node)
    answers: list[RemotingCommand] = []

    async def reply() -> None:
        answers.append(await node.ask(code, b"pong", **fields))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reply)
        await wait_all_tasks_blocked()
        assert answers == [], "not before the client has it"
        pushed = await asker.take()
    assert bytes(pushed.body) == b"pong"
    fields = dict(pushed.ext_fields)
    properties = decode_properties(fields.pop("properties").encode())
    assert properties.pop("PUSH_REPLY_TIME") == fields["storeTimestamp"]
    assert properties == {
        **decode_properties(PROPERTIES.encode()),
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }
    assert ":" in fields.pop("bornHost")
    assert fields.pop("storeHost") == "10.0.0.1:10911"
    assert int(fields.pop("storeTimestamp")) >= 1_700_000_000_000
    assert fields == {
        "producerGroup": "pg",
        "topic": "C_REPLY_TOPIC",
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4",
        "queueId": "0",
        "sysFlag": "0",
        "bornTimestamp": "1700000000000",
        "flag": "0",
        "reconsumeTimes": "0",
        "unitMode": "false",
    }
    [answer] = answers
    assert (answer.code, answer.ext_fields["queueOffset"], answer.ext_fields["queueId"]) == (0, "0", "0")
    assert answer.ext_fields["msgId"].startswith("0A000001")
    assert (answer.ext_fields["MSG_REGION"], answer.ext_fields["TRACE_ON"]) == ("DefaultRegion", "true")
    assert await stored(node) == [b"pong"]


async def test_client_refuses_the_reply(node: Node) -> None:
    asker = await asking(node)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asker.take, 1, "nobody waits")
        answer = await node.ask(325, b"pong", **REPLY)
    assert (answer.code, answer.remark) == (1, "push reply message to askerfail. nobody waits")
    assert "msgId" not in answer.ext_fields
    assert await stored(node) == [b"pong"], "kept all the same"


async def test_client_does_not_answer(node: Node) -> None:
    """Other requests are served meanwhile, on the same connection too, which stays open."""
    asker = await asking(node)
    began = trio.current_time()
    ended: list[tuple[int, float]] = []

    async def reply() -> None:
        answer = await node.ask(325, b"pong", **REPLY)
        ended.append((answer.code, trio.current_time() - began))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reply)
        await wait_all_tasks_blocked()
        assert (await node.send()).code == 0
        assert ended == []
    assert ended == [(1, CLIENT_TIMEOUT_S)]
    assert (await asker.next()).code == 326
    await asker.heartbeat()


async def test_client_is_gone(node: Node) -> None:
    answer = await node.ask(325, b"pong", **REPLY)
    assert (answer.code, answer.remark) == (1, "push reply message fail, channel of <asker> not found.")
    answer = await node.ask(325, b"pong", **{**REPLY, "i": "A\x01b\x02"})
    assert (answer.code, answer.remark) == (1, "reply message properties[REPLY_TO_CLIENT] is null")
    asker = await asking(node)

    async def leave() -> None:
        assert (await asker.next()).code == 326
        await asker.stream.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        answer = await node.ask(325, b"pong", **REPLY)
    assert answer.code == 1
    assert "fail" in str(answer.remark)


async def test_client_is_found_while_one_of_its_groups_is_registered(node: Node) -> None:
    asker = await asking(node, "one", "two")
    find = node.broker.clients.find_producer
    connection = find("asker")
    assert connection is not None
    node.broker.clients.leave_producers(connection, "one")
    assert find("asker") is connection
    newer = await asking(node, "one")
    assert find("asker") is not connection, "where its last heartbeat came"
    node.broker.clients.leave_producers(connection, "two")
    assert find("asker") is not None
    await newer.stream.aclose()
    await wait_all_tasks_blocked()
    assert find("asker") is None
    await asker.stream.aclose()


async def test_storing_can_be_disabled(tmp_path: Path) -> None:
    async with open_node(tmp_path, store_reply_message=False) as node:
        asker = await asking(node)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asker.take)
            answer = await node.ask(325, b"pong", **REPLY)
        assert (answer.code, answer.ext_fields["msgId"], answer.ext_fields["queueOffset"]) == (0, "0", "0")
        assert await stored(node) == []


async def test_reply_that_can_not_be_stored_was_pushed_all_the_same(node: Node) -> None:
    asker = await asking(node)
    answers: list[RemotingCommand] = []

    async def reply() -> None:
        answers.append(await node.ask(325, b"pong", **{**REPLY, "i": f"{PROPERTIES}LONG\x01{'x' * 32_768}\x02"}))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reply)
        await asker.take()
    [answer] = answers
    assert (answer.code, answer.ext_fields["msgId"], answer.ext_fields["queueOffset"]) == (0, "0", "0")
    assert await stored(node) == []


async def test_invalid_replies_are_refused(node: Node) -> None:
    await asking(node)
    for changes, code in (
        ({"b": "T T"}, 29),
        ({"b": "SCHEDULE_TOPIC_XXXX"}, 16),
        ({"b": "nowhere", "c": "NOPE"}, 17),
        ({"e": 99}, 29),
        ({"g": None}, 1),
    ):
        assert (await node.ask(325, b"pong", **{**REPLY, **changes})).code == code, changes
    assert (await node.ask(325, b"x" * (4 << 20) + b"x", **REPLY)).code == 13


async def test_slave_refuses_replies(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        assert (await node.ask(325, b"pong", **REPLY)).code == 2


@pytest.mark.parametrize("limit", [{"replies_in_flight_max": 3}, {"reply_bytes_max": 3 * (5 + len(PROPERTIES))}])
async def test_waiting_replies_are_bounded(tmp_path: Path, limit: dict[str, Any]) -> None:
    async with open_node(tmp_path, **limit) as node:
        await asking(node)
        codes: list[int] = []

        async def reply() -> None:
            codes.append((await node.ask(325, b"reply", **REPLY)).code)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(reply)
            await wait_all_tasks_blocked()
            assert codes == [2, 2]
        assert codes == [2, 2, 1, 1, 1]
        codes.clear()
        await reply()
        assert codes == [1], "there is room again"
