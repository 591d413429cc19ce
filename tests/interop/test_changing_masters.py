"""Two members of a group swap roles: routes that real name servers, of 4.9 and 5.x, give to clients meanwhile.

The members are only halog's registrations, over sockets; how a member changes its role is tested elsewhere.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from ha.broker.registration import BrokerIdentity, NameServerRegistration
from ha.broker.standing import Standing
from ha.protocol import java_json
from ha.protocol.bodies import DataVersion, TopicConfig, TopicConfigTable, TopicRouteData
from ha.protocol.codes import RequestCode
from ha.protocol.headers import GetRouteInfoRequest
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import start_name_server

pytestmark = pytest.mark.usual_release("5.5.0")

PATIENCE_S = 30.0
"""More than a new master takes for its second and third registration."""


class Member:
    """One broker as seen by a name server: an address, a connection, and its registration."""

    def __init__(self, member_id: int, name_server: str) -> None:
        self.standing = Standing("broker-a", member_id, is_slave=True, is_elected=True)
        self.address = f"127.0.0.{member_id}:10911"
        self.topics = ["first", "second"]
        self.name_server = name_server

    def table(self) -> TopicConfigTable:
        configs = {
            name: TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4, perm=6) for name in self.topics
        }
        return TopicConfigTable(
            topic_config_table=configs, data_version=DataVersion(counter=len(self.topics), timestamp=1)
        )

    @asynccontextmanager
    async def registered(self) -> AsyncIterator[NameServerRegistration]:
        identity = BrokerIdentity(
            cluster_name="InteropCluster",
            broker_name="broker-a",
            broker_address=self.address,
            ha_address=self.address.replace("10911", "10912"),
        )
        async with open_remoting_client() as client:
            made = NameServerRegistration(identity, [self.name_server], client, self.table, self.standing)
            async with trio.open_nursery() as nursery:
                await nursery.start(made.serve)
                yield made
                nursery.cancel_scope.cancel()


class Route:
    """The route given to clients (105)."""

    def __init__(self, client: RemotingClient, name_server: str) -> None:
        self._client = client
        self._name_server = name_server

    async def data(self, topic: str) -> TopicRouteData | None:
        header = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True)
        command = RemotingCommand(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields=header.to_ext_fields())
        answer = await self._client.invoke(self._name_server, command, 5)
        return java_json.read_as(TopicRouteData, answer.body) if answer.code == 0 else None

    async def addresses(self) -> dict[int, str]:
        found = await self.data("first")
        return {} if found is None else dict(found.broker_datas[0].broker_addrs)

    async def becomes(self, expected: dict[int, str]) -> None:
        """Waits until clients get this route."""
        found: dict[int, str] = {}
        with trio.move_on_after(PATIENCE_S):
            while True:
                found = await self.addresses()
                if found == expected:
                    return
                await trio.sleep(0.05)
        assert found == expected


@pytest.fixture
async def name_server(children: Children, release: Release) -> str:
    return await start_name_server(children, release)


@pytest.fixture
async def route(name_server: str) -> AsyncIterator[Route]:
    async with open_remoting_client() as client:
        yield Route(client, name_server)


async def test_two_members_change_places(name_server: str, route: Route) -> None:
    one, two = Member(1, name_server), Member(2, name_server)
    one.standing.become_master(1)
    async with one.registered() as first, two.registered() as second:
        await route.becomes({0: one.address, 2: two.address})
        for epoch, old, new in ((2, one, two), (3, two, one), (4, one, two)):
            old.standing.become_slave(epoch)
            new.standing.become_master(epoch)
            for each in (first, second):
                await each.wait_told()
            assert await route.addresses() == {0: new.address, old.standing.member_id: old.address}, "at once"


async def test_a_topic_that_only_the_new_master_had_told_of_as_a_slave(name_server: str, route: Route) -> None:
    """The old master created it and died; the new one had registered it only as a slave, from which no name server
    takes topics."""
    one, two = Member(1, name_server), Member(2, name_server)
    one.standing.become_master(1)
    async with one.registered(), two.registered() as second:
        two.topics.append("third")
        second.topics_changed()
        await second.wait_told()
        assert await route.data("third") is None
        two.standing.become_master(2)
        await second.wait_told()
        found = await route.data("third")
        assert found is not None
        assert found.broker_datas[0].broker_addrs[0] == two.address


async def test_late_registration_of_a_former_master(name_server: str, route: Route, release: Release) -> None:
    """It was cut off or frozen, and does not know its successor. Its own lease would prevent this."""
    one, two = Member(1, name_server), Member(2, name_server)
    one.standing.become_master(1)
    async with one.registered() as first, two.registered() as second:
        two.standing.become_master(2)
        await second.wait_told()
        assert (await route.addresses())[0] == two.address
        first.topics_changed()
        await first.wait_told()
        if release.is_4:
            assert (await route.addresses())[0] == one.address, "who speaks last is right: so the master says it again"
        else:
            assert (await route.addresses())[0] == two.address
        await route.becomes({0: two.address})
        one.standing.become_slave(2)
        await route.becomes({0: two.address, 1: one.address})


async def test_former_master_that_stops_unregisters_only_itself(name_server: str, route: Route) -> None:
    one, two = Member(1, name_server), Member(2, name_server)
    one.standing.become_master(1, trio.current_time() + 60)
    async with two.registered() as second:
        async with one.registered():
            two.standing.become_master(2)
            await second.wait_told()
            one.standing.extend(trio.current_time())
        await route.becomes({0: two.address})
        await trio.sleep(0.2)
        assert await route.addresses() == {0: two.address}


async def test_a_master_that_ends_leaves_the_slaves(name_server: str, route: Route) -> None:
    one, two = Member(1, name_server), Member(2, name_server)
    one.standing.become_master(1)
    async with two.registered():
        async with one.registered():
            await route.becomes({0: one.address, 2: two.address})
        await route.becomes({2: two.address})
        two.standing.become_master(2)
        await route.becomes({0: two.address})
