"""A halog slave and its real master: offsets that consumers commit while the master is down count when it is back."""

from typing import Any

import pytest
import trio

from ha.protocol import java_json
from ha.protocol.record import decode_records
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from tests.broker.node import PULL, SEND_V2, text
from tests.interop.broker import Broker
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker

COUNT = 10
# A slave learns its master's address from the name server: as often as possible.
SETTINGS = {"registerNameServerPeriod": 10_000}
GROUP = "duty"


class Asker:
    """Sends requests as a consumer of the group does."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client

    async def ask(self, broker: Broker, code: int, body: bytes = b"", **ext: Any) -> Any:
        fields = {name: text(value) for name, value in ext.items() if value is not None}
        command = RemotingCommand(code, version=479, ext_fields=fields, body=body)
        return await self._client.invoke(broker.address, command, 20)

    async def heartbeat(self, broker: Broker) -> None:
        body = {"clientID": "c", "consumerDataSet": [{"groupName": GROUP, "subscriptionDataSet": []}]}
        assert (await self.ask(broker, 34, java_json.dumps(body))).code == 0

    async def commit(self, broker: Broker, queue_id: int, offset: int) -> None:
        fields: dict[str, Any] = {
            "consumerGroup": GROUP,
            "topic": "duties",
            "queueId": queue_id,
            "commitOffset": offset,
        }
        assert (await self.ask(broker, 15, **fields)).code == 0

    async def committed(self, broker: Broker, queue_id: int = 0) -> int:
        """Returns -1 for none, or while no broker answers."""
        fields: dict[str, Any] = {"consumerGroup": GROUP, "topic": "duties", "queueId": queue_id}
        answer = await self.ask(broker, 14, **fields)
        return int(answer.ext_fields.get("offset", -1)) if answer.code == 0 else -1

    async def wait_dispatched(self, broker: Broker, count: int) -> None:
        """Waits until the first queue of the topic has `count` entries there."""
        with trio.fail_after(60):
            while True:
                answer = await self.ask(broker, 30, topic="duties", queueId=0)
                if answer.code == 0 and int(answer.ext_fields["offset"]) >= count:
                    return
                await trio.sleep(0.2)

    async def wait_committed(self, broker: Broker, queue_id: int, offset: int) -> None:
        with trio.fail_after(60):
            while await self.committed(broker, queue_id) != offset:  # noqa: ASYNC110 - another process's state
                await trio.sleep(0.2)


@pytest.mark.usual_release("4.9.7")
async def test_a_returning_master_does_not_move_groups_back(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    master = RocketMqBroker(children, release, "master", name_server, "ASYNC_MASTER", extra=SETTINGS)
    slave = HalogBroker(children, "slave", name_server, "SLAVE", broker_id=1, extra=SETTINGS)
    await master.start()
    await slave.start()
    async with open_remoting_client() as client:
        asker = Asker(client)
        await asker.heartbeat(master)
        for number in range(COUNT):
            answer = await asker.ask(master, 310, b"%d" % number, **{**SEND_V2, "b": "duties"})
            assert answer.code == 0
        await asker.wait_dispatched(slave, COUNT)
        await asker.commit(master, 0, 5)
        await asker.wait_committed(slave, 0, 5)
        # The slave suggests the broker to read from: the master, unless that is too far ahead of the reader.
        pull = {**PULL, "topic": "duties", "consumerGroup": GROUP}
        answer = await asker.ask(slave, 11, **pull)
        assert (answer.code, answer.ext_fields["suggestWhichBrokerId"]) == (0, "0")

        await master.stop()
        answer = await asker.ask(slave, 11, **{**pull, "queueOffset": 5})
        assert [record.body for record in decode_records(answer.body)] == [b"%d" % n for n in range(5, COUNT)]
        await asker.heartbeat(slave)
        await asker.commit(slave, 0, 9)
        await asker.commit(slave, 1, 0)
        await slave.stop()
        await slave.start()
        assert await asker.committed(slave) == 9, "a restart in between forgets nothing"

        await master.start()
        await asker.wait_committed(master, 0, 9)
        assert await asker.committed(slave) == 9
        # From then on the master's offsets are authoritative, also when it resets a group.
        await asker.commit(master, 0, 2)
        await asker.wait_committed(slave, 0, 2)
        assert await asker.committed(master) == 2
    await slave.stop()
    await master.stop()
