"""Consumers with SQL92 conditions, request and reply, and locks of queues: a real broker and halog's, at once."""

import base64
from typing import Any

import pytest
import trio

from ha.protocol import java_json
from ha.protocol.properties import decode_properties
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from tests.broker.node import PULL, SEND_V2, text
from tests.interop.broker import Broker
from tests.interop.java_client import JavaClient
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.side_by_side import run_side_by_side
from tests.interop.stored_files import records

SETTINGS: dict[str, object] = {"enablePropertyFilter": "true"}
#: Of 20 messages with properties (java/Asking.java): number, ratio = number / 4, name (one in five has none).
CONDITIONS: dict[str, set[int]] = {
    "number BETWEEN 3 AND 5 OR number = 19": {3, 4, 5, 19},
    "ratio > 4.0 AND name IS NOT NULL": {17, 18, 19},
    "name IN ('it''s', '\u4e2d\u6587') AND TAGS = 'Tag1'": {4, 7, 19},
    "number > 7 AND NOT (number > 9) OR name = 'nobody'": {8, 9},
    "missing IS NULL AND ratio <= 0.25": {0, 1},
}


async def select(client: JavaClient, broker: Broker, seen: dict[str, Any]) -> None:
    """One push consumer per condition."""

    async def one(number: int, condition: str, wanted: set[int]) -> None:
        events = await client.run(
            "select",
            nameServer=broker.name_server,
            topic=f"select{number}",
            group=f"g-select{number}",
            condition=base64.b64encode(condition.encode()).decode(),
            wanted=len(wanted),
        )
        seen[condition] = [event.get("sequence", event.get("code")) for event in events if event["event"] != "done"]

    async with trio.open_nursery() as nursery:
        for number, (condition, wanted) in enumerate([*CONDITIONS.items(), ("number >", set[int]())]):
            nursery.start_soon(one, number, condition, wanted)


async def request(client: JavaClient, broker: Broker, seen: dict[str, Any]) -> None:
    events = await client.run("request", nameServer=broker.name_server, topic="questions")
    told = [tuple((key, value) for key, value in event.items() if key != "id") for event in events if "asked" in event]
    seen["request"] = sorted(told, key=str)
    seen["late"] = [event["error"] for event in events if event["event"] == "late"]
    seen["kept"] = [
        (record.queue_id, record.body_size) for record in records(broker.commitlog) if "REPLY_TOPIC" in record.topic
    ]


class Raw:
    """Sends frames that no client library sends. `pushed` has the broker's own requests."""

    def __init__(self, client: RemotingClient, broker: Broker) -> None:
        self._client = client
        self._broker = broker

    async def ask(self, code: int, body: bytes = b"", **ext: Any) -> RemotingCommand:
        fields = {name: text(value) for name, value in ext.items() if value is not None}
        command = RemotingCommand(code, version=479, ext_fields=fields, body=body)
        return await self._client.invoke(self._broker.address, command, 20)


async def wait_dispatched(asker: Raw, topic: str, count: int) -> None:
    """Waits until the first queue of `topic` has `count` entries."""
    with trio.fail_after(60):
        while int((await asker.ask(30, topic=topic, queueId=0)).ext_fields["offset"]) < count:  # noqa: ASYNC110 - another process's state
            await trio.sleep(0.05)


async def frames(broker: Broker, seen: dict[str, Any]) -> None:
    """Answers to requests that no client sends on its own, without broker-specific values."""
    pushed: list[RemotingCommand] = []

    async def take(connection: Any, commands: list[RemotingCommand]) -> None:
        for command in commands:
            if command.code == 326:
                pushed.append(command)
                connection.reply(command, command.reply(0))

    async with open_remoting_client(handler=take) as asking, open_remoting_client() as other:
        asker, replier = Raw(asking, broker), Raw(other, broker)
        heartbeat = {"clientID": "asker", "producerDataSet": [{"groupName": "pg"}], "consumerDataSet": []}
        assert (await asker.ask(34, java_json.dumps(heartbeat))).code == 0
        marks = "CORRELATION_ID\x01c1\x02REPLY_TO_CLIENT\x01asker\x02MSG_TYPE\x01reply\x02"
        reply = {**SEND_V2, "b": "InteropCluster_REPLY_TOPIC", "i": marks}
        answers = [await replier.ask(325, b"pong", **reply)]
        for changes in ({"i": "A\x01b\x02"}, {"i": marks.replace("asker", "nobody")}, {"e": 99}, {"b": "T T"}):
            answers.append(await replier.ask(325, b"pong", **{**reply, **changes}))
        seen["replies"] = [(answer.code, str(answer.remark)[:30]) for answer in answers[:3]]
        assert {answer.code for answer in answers[3:]} <= {1, 29}  # 4.9.7 has no 29
        [question] = pushed
        fields = dict(question.ext_fields)
        properties = decode_properties(fields.pop("properties").encode())
        seen["pushed properties"] = sorted(properties.keys() - {"MSG_REGION", "TRACE_ON"})  # 4.9.7 leaves them out
        seen["pushed"] = {
            name: value if name not in ("bornHost", "storeHost", "storeTimestamp") else value.lstrip("/")[:4]
            for name, value in fields.items()
        } | {"body": bytes(question.body)}

        locks = []
        for code, client_id, *queue_ids in (
            (41, "c1", 0, 1),
            (41, "c2", 1, 2),
            (41, "c1", 0, 1, 2),
            (42, "c2", 0, 1),
            (41, "c2", 0, 2),
            (42, "c1", 0),
            (41, "c2", 0, 1),
        ):
            queues = [{"brokerName": "broker-a", "queueId": queue_id, "topic": "any"} for queue_id in queue_ids]
            body = {"clientId": client_id, "consumerGroup": "g-lock", "mqSet": queues, "onlyThisBroker": False}
            answer = await replier.ask(code, java_json.dumps(body))
            held = java_json.loads(answer.body)["lockOKMQSet"] if answer.body else []
            locks.append((answer.code, sorted(queue["queueId"] for queue in held)))
        seen["locks"] = locks

        checks = []
        for expression, kind in (("a > 1", "SQL92"), ("a >", "SQL92"), ("a || b", "TAG"), ("a > 1", "SQL93")):
            subscription = {"topic": "TT", "subString": expression, "expressionType": kind, "subVersion": 1}
            body = {"clientId": "c", "group": "g", "subscriptionData": subscription}
            checks.append((await replier.ask(46, java_json.dumps(body))).code)
        seen["checks"] = checks

        for number in range(6):
            await replier.ask(310, b"x", **{**SEND_V2, "b": "pulled", "i": f"a\x01{number}\x02"})
        await wait_dispatched(replier, "pulled", 6)
        pulls = []
        asked: tuple[tuple[int, str | None], ...] = (
            (0, "a > 2"),
            (0, "a < 3"),
            (4, "a > 9"),
            (2, "a = 2"),
            (6, "a = 2"),
            (0, None),
        )
        for offset, condition in asked:
            pull: dict[str, Any] = {**PULL, "topic": "pulled", "queueOffset": offset, "subscription": condition}
            answer = await replier.ask(11, **{**pull, "expressionType": "SQL92"})
            pulls.append((answer.code, answer.ext_fields.get("nextBeginOffset"), len(answer.body) > 0))
        seen["pulls"] = pulls


@pytest.mark.usual_release("5.5.0")
async def test_client_requests_are_answered_as_by_rocketmq(children: Children, release: Release) -> None:
    seen: dict[str, dict[str, Any]] = {"real": {}, "ours": {}}

    async def use(client: JavaClient, broker: Broker) -> None:
        async with trio.open_nursery() as families:
            families.start_soon(select, client, broker, seen[broker.name])
            families.start_soon(request, client, broker, seen[broker.name])
        await frames(broker, seen[broker.name])

    await run_side_by_side(children, release, use, SETTINGS)
    for condition, wanted in CONDITIONS.items():
        for name in ("real", "ours"):
            assert set(seen[name].pop(condition)) - {None} == wanted, (name, condition)
    assert seen["ours"].keys() == seen["real"].keys()
    differing = {
        what: (seen["ours"][what], found) for what, found in seen["real"].items() if seen["ours"][what] != found
    }
    assert not differing, str(differing)
