"""A real slave of a master that keeps its tables in the log: RocketMQ treats their records like other messages."""

import json
from typing import Any

import pytest
import trio

from ha.protocol import java_json
from ha.protocol.bodies import ConsumerOffsets, GroupTable, TopicConfigTable
from ha.protocol.group_records import SNAPSHOT_TAGS_CODE, decode_tables_record
from ha.protocol.record import decode_records
from ha.protocol.topic_names import TABLES_TOPIC
from ha.remoting import open_remoting_client
from tests.broker.node import PULL, SEND_V2
from tests.interop.broker import Broker
from tests.interop.clusters import wait_equal
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.processes import Children, eventually
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker
from tests.interop.stored_files import queue_entries
from tests.interop.test_slave_duties import COUNT, GROUP, SETTINGS, Asker


@pytest.mark.usual_release("5.5.0")
async def test_a_real_slave_follows_and_its_log_tells_the_tables(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    master = HalogBroker(
        children, "master", name_server, "ASYNC_MASTER", extra=SETTINGS, entry_point="tests.interop.group_master"
    )
    slave = RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1)
    await master.start()
    await slave.start()
    async with open_remoting_client() as client:
        asker = Asker(client)
        await asker.heartbeat(master)
        for number in range(COUNT):
            assert (await asker.ask(master, 310, b"%d" % number, **{**SEND_V2, "b": "duties"})).code == 0
        for offset in range(1, 6):
            await asker.commit(master, 0, offset)
        common = await wait_equal(master, slave)
        assert common.size > 0

        # Its queues equal the master's.
        def entries(broker: Broker) -> list[Any]:
            return queue_entries(broker.store).get((TABLES_TOPIC, 0), [])

        await eventually("the slave has queued the records", lambda: entries(slave) == entries(master), 30)
        assert len(entries(slave)) >= 6
        assert entries(slave)[0][2] == SNAPSHOT_TAGS_CODE

        # It serves them as messages to any client.
        pull = {**PULL, "topic": TABLES_TOPIC, "consumerGroup": GROUP}
        with trio.fail_after(60):
            while True:
                answer = await asker.ask(slave, 11, **pull)
                if answer.code == 0:
                    break
                await trio.sleep(1)
        found = [decode_tables_record(record.body) for record in decode_records(answer.body)]
        assert found[0].snapshot is not None
        assert {f"duties@{GROUP}": {0: 5}} in [record.offsets for record in found]

        # It copies the tables as from any master.
        await asker.wait_committed(slave, 0, 5)
        for broker in (master, slave):
            topics = java_json.read_as(TopicConfigTable, (await asker.ask(broker, 21)).body)
            assert topics.topic_config_table["duties"].read_queue_nums == SEND_V2["d"]
            assert TABLES_TOPIC in topics.topic_config_table
            groups = java_json.read_as(GroupTable, (await asker.ask(broker, 201)).body)
            assert GROUP in groups.subscription_group_table
            offsets = java_json.read_as(ConsumerOffsets, (await asker.ask(broker, 43)).body)
            assert offsets.offset_table[f"duties@{GROUP}"][0] == 5
        await master.stop()
        await slave.stop()
        # RocketMQ's tools read the master's files.
        offsets_file = json.loads((master.store / "config" / "consumerOffset.json").read_text().replace("{0:", '{"0":'))
        assert offsets_file["logPosition"]["queueOffset"] >= 0

        # The slave's log gives a halog master the complete tables, whatever the slave's files contain.
        for name in ("topics.json", "subscriptionGroup.json", "consumerOffset.json"):
            for file in (slave.store / "config").glob(f"{name}*"):
                file.unlink()
        heir = HalogBroker(
            children,
            "heir",
            name_server,
            "ASYNC_MASTER",
            store=slave.store,
            entry_point="tests.interop.group_master",
        )
        await heir.start()
        assert await asker.committed(heir) == 5
        topics = java_json.read_as(TopicConfigTable, (await asker.ask(heir, 21)).body)
        assert topics.topic_config_table["duties"].read_queue_nums == SEND_V2["d"]
        await heir.stop()
