"""A halog slave whose real master has topics and groups with attributes."""

from collections.abc import Awaitable, Callable

import pytest
import trio

from ha.protocol import java_json
from ha.protocol.bodies import GroupTable, TopicConfigTable
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from tests.interop.broker import Broker
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.mqadmin import open_mqadmin
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker

SETTINGS = {"registerNameServerPeriod": 10_000}
TYPES = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Polls another process's state."""
    with trio.fail_after(90):
        while not await is_so():  # noqa: ASYNC110
            await trio.sleep(0.5)


async def topics_of(client: RemotingClient, broker: Broker) -> TopicConfigTable:
    answer = await client.invoke(broker.address, RemotingCommand(21), 20)
    assert answer.code == 0, answer
    return java_json.read_as(TopicConfigTable, bytes(answer.body))


async def groups_of(client: RemotingClient, broker: Broker) -> GroupTable:
    answer = await client.invoke(broker.address, RemotingCommand(201), 20)
    assert answer.code == 0, answer
    return java_json.read_as(GroupTable, bytes(answer.body))


@pytest.mark.usual_release("5.5.0")
async def test_attributes_of_a_real_masters_topics_are_copied(children: Children, release: Release) -> None:
    """apache/rocketmq#9403: once a topic had attributes, a slave of 5.3.3 copied no table any more."""
    typed = {} if release.is_4 else {f"typed-{kind}": {"message.type": kind} for kind in TYPES}  # 4.9 has none
    name_server = await start_halog_name_server(children)
    master = RocketMqBroker(children, release, "master", name_server, "ASYNC_MASTER", extra=SETTINGS)
    slave = HalogBroker(children, "slave", name_server, "SLAVE", broker_id=1, extra=SETTINGS)
    await master.start()
    await slave.start()
    async with open_mqadmin(children, release, name_server) as tool, open_remoting_client() as client:
        for name, attributes in typed.items():
            pairs = ",".join(f"+{key}={value}" for key, value in attributes.items())
            await tool.run("updateTopic", "-b", master.address, "-t", name, "-a", pairs)
        # A failing copy would lack the later ones.
        await tool.run("updateTopic", "-b", master.address, "-t", "plain")
        await tool.run("updateSubGroup", "-b", master.address, "-g", "readers")
        wanted = {**typed, "plain": {}}

        async def is_copied() -> bool:
            topics, groups = await topics_of(client, slave), await groups_of(client, slave)
            return wanted.keys() <= topics.topic_config_table.keys() and "readers" in groups.subscription_group_table

        await until(is_copied)
        copy = (await topics_of(client, slave)).topic_config_table
        assert {name: copy[name].attributes or {} for name in wanted} == wanted
        # The whole table of the master, with its version: the next copy has nothing to do.
        theirs, ours = await topics_of(client, master), await topics_of(client, slave)
        assert ours.topic_config_table == theirs.topic_config_table
        assert ours.data_version == theirs.data_version
        assert (await groups_of(client, slave)).data_version == (await groups_of(client, master)).data_version
        if typed:
            # Attributes that are removed again.
            await tool.run("updateTopic", "-b", master.address, "-t", "typed-DELAY", "-a", "-message.type")

            async def is_plain() -> bool:
                return not (await topics_of(client, slave)).topic_config_table["typed-DELAY"].attributes

            await until(is_plain)
    await slave.stop()
    await master.stop()
