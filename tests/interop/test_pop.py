"""RocketMQ's Java push consumer in POP mode, on a halog broker that is killed in between."""

import json

import pytest

from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import JavaClient, open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release

pytestmark = pytest.mark.processes

TOPIC, GROUP = "popped", "g-pop"


async def ask(broker: HalogBroker, code: RequestCode, body: bytes = b"", **fields: str) -> RemotingCommand:
    async with open_remoting_client() as client:
        return await client.invoke(broker.address, RemotingCommand(code, ext_fields=fields, body=body), 10)


async def consume(broker: HalogBroker, client: JavaClient, count: int) -> list[int]:
    """Starts a push consumer in POP mode until it has `count` messages; returns their numbers."""
    events = await client.run(
        "push",
        nameServer=broker.name_server,
        topic=TOPIC,
        group=GROUP,
        count=count,
        limitS=60,
        popInvisibleMs=10_000,
    )
    assert events[-1]["missing"] == 0, events
    return sorted(event["sequence"] for event in events if event["event"] == "got")


async def committed(broker: HalogBroker, queue_id: int) -> int:
    answer = await ask(
        broker, RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup=GROUP, topic=TOPIC, queueId=str(queue_id)
    )
    return int(answer.ext_fields.get("offset", "0"))


@pytest.mark.parametrize("release", ["5.5.0"], indirect=True)  # 4.9 has no POP
async def test_push_consumer_pops(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    broker = HalogBroker(children, "ha-master", name_server, "ASYNC_MASTER")
    await broker.start()
    async with open_java_client(children, release, name_server) as client:
        await client.send(TOPIC, 60)
        mode = {"topic": TOPIC, "consumerGroup": GROUP, "mode": "POP", "popShareQueueNum": 0}
        assert (await ask(broker, RequestCode.SET_MESSAGE_REQUEST_MODE, json.dumps(mode).encode())).code == 0
        assert await consume(broker, client, 60) == list(range(60))
        assert sum([await committed(broker, queue_id) for queue_id in range(4)]) == 60
        assert broker.child is not None
        await broker.child.kill()
        await broker.start()
        await client.send(TOPIC, 5, first=100)
        assert await consume(broker, client, 5) == list(range(100, 105))
