"""Who holds a broker id, and how long: takeovers, silence, closed connections."""

import json
import logging
import socket
import threading
from typing import Any, NoReturn

import pytest
import trio
import trio.testing

from ha.namesrv import NameServerOptions, open_name_server
from ha.protocol.remoting import RemotingCommand
from tests.namesrv.brokers import VERSION, Site, broker_fields, open_site, register, route_of, topic_json, unregister
from tests.remoting.wire import Peer


async def addresses(peer: Peer, topic: str = "T1") -> dict[str, str] | None:
    found = await route_of(peer, topic)
    if found is None:
        return None
    brokers = found["brokerDatas"]
    assert len(brokers) == 1
    result: dict[str, str] = brokers[0]["brokerAddrs"]
    return result


async def perm(peer: Peer, topic: str = "T1") -> int:
    found = await route_of(peer, topic)
    assert found is not None
    return int(found["queueDatas"][0]["perm"])


async def test_a_slave_that_becomes_master_leaves_its_old_id(peer: Peer) -> None:
    await peer.ask(register(broker_id=1))
    await peer.ask(register(broker_id=0))
    assert await addresses(peer) == {"0": "10.0.0.1:10911"}


async def test_a_second_address_takes_an_id_over(peer: Peer) -> None:
    await peer.ask(register(address="a:1"))
    assert (await peer.ask(register(address="b:1"))).code == 0
    assert await addresses(peer) == {"0": "b:1"}
    await peer.ask(unregister(address="a:1"))  # the loser's leaving harms nobody
    assert await addresses(peer) == {"0": "b:1"}


async def test_a_loser_that_held_another_id_leaves_nothing_behind() -> None:
    """Found by fuzzing: it was no longer live, yet stood in its group, which then never went away."""
    newer, older = {**VERSION, "stateVersion": 5}, {**VERSION, "stateVersion": 4}
    async with open_site() as site:
        peer = site.connect()
        await peer.ask(register(address="b:1", broker_id=1, version=older))
        await peer.ask(register(address="a:1", version=newer))
        await peer.ask(register(address="b:1", version=older))
        assert await addresses(peer) == {"0": "a:1"}
        await peer.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        found = site.name_server.statistics()
        assert (found.brokers, found.topics) == (0, 0)


async def test_a_second_address_with_an_older_state_version_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ha.namesrv")
    newer, older = {**VERSION, "stateVersion": 5}, {**VERSION, "stateVersion": 4}
    async with open_site() as site:
        peer = site.connect()
        await peer.ask(register(address="a:1", version=newer))
        answer = await peer.ask(register(address="b:1", version=older))
        assert (answer.code, answer.ext_fields) == (0, {})
        assert await addresses(peer) == {"0": "a:1"}
        assert "address=b:1" not in caplog.text
        await peer.ask(register(address="a:1", version=older))  # its own version may go back
        assert await addresses(peer) == {"0": "a:1"}


async def test_topics_come_from_the_master_and_only_when_its_version_changed(peer: Peer) -> None:
    await peer.ask(register())
    await peer.ask(register(["S1", "S2"], broker_id=1, address="b:1"))
    assert await route_of(peer, "S1") is None
    await peer.ask(register([topic_json("T1", perm=4), "T2"]))
    assert await perm(peer) == 6
    await peer.ask(register([topic_json("T1", perm=4), "T2"], version={**VERSION, "counter": 3}))
    assert await perm(peer) == 4
    await peer.ask(register(["T1", "T2", "T3"], version={**VERSION, "counter": 3}))
    assert await route_of(peer, "T3") is not None  # a topic that the broker did not have is taken in any case


async def test_the_lowest_slave_acts_for_a_master_that_left_and_is_read_only(peer: Peer) -> None:
    acting: dict[str, Any] = {"enableActingMaster": "true"}
    await peer.ask(register(**acting))
    await peer.ask(register(["T1", "T2"], broker_id=2, address="c:1", **acting))
    assert await perm(peer) == 6
    await peer.ask(unregister())
    assert await perm(peer) == 4
    await peer.ask(register(["T1", "T4"], broker_id=1, address="b:1", **acting))
    assert await perm(peer, "T4") == 4
    await peer.ask(register(**acting))
    assert await perm(peer) == 6


async def test_a_slave_that_acts_not_read_only(peer: Peer) -> None:
    await peer.ask(register(broker_id=1, enableActingMaster="false"))
    assert await perm(peer) == 6


async def test_a_renamed_broker_leaves_its_old_name(peer: Peer) -> None:
    await peer.ask(register(["T1", "T2"]))
    await peer.ask(register(["T8", "T9"], name="b9"))
    assert await route_of(peer, "T1") is None
    assert await addresses(peer, "T9") == {"0": "10.0.0.1:10911"}


@pytest.mark.parametrize("changed", [{"name": "b9"}, {"cluster": "D"}, {"name": "b9", "broker_id": 1}])
async def test_a_renamed_or_moved_broker_keeps_its_route_until_it_registers_all_topics(
    changed: dict[str, Any], site: Site, peer: Peer
) -> None:
    await peer.ask(register(["T1", "T2"]))
    answer = await peer.ask(register(["T3"], **changed))
    assert (answer.code, answer.remark) == (1, "register broker failed")
    assert await route_of(peer, "T3") is None
    assert await addresses(peer, "T1") == await addresses(peer, "T2") == {"0": "10.0.0.1:10911"}
    assert site.name_server.routes.clusters() == {"C": ["b0"]}
    assert (await peer.ask(register(["T2", "T3"], **changed | {"broker_id": 0}))).code == 0
    assert await route_of(peer, "T1") is None
    assert await addresses(peer, "T3") == {"0": "10.0.0.1:10911"}


@pytest.mark.parametrize("ends", ["closed", "silent"])
async def test_a_broker_that_changed_its_cluster_keeps_its_route(
    ends: str, site: Site, autojump_clock: trio.testing.MockClock
) -> None:
    """It restarted at its address before the name server noticed, and its earlier registration ends later."""
    before, after = site.connect(), site.connect()
    await before.ask(register())
    await trio.sleep(100)
    await after.ask(register(cluster="D"))
    if ends == "closed":
        await before.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
    else:
        await trio.sleep(21)
    client = site.connect()
    assert await addresses(client) == {"0": "10.0.0.1:10911"}
    found = json.loads(bytes((await client.ask(RemotingCommand(224, ext_fields={"cluster": "D"}))).body))
    assert found == {"topicList": ["T1", "T2"]}
    assert site.name_server.routes.clusters() == {"D": ["b0"]}


async def test_replicas_that_change_their_cluster_in_turn_leave_the_old_one(site: Site, peer: Peer) -> None:
    await peer.ask(register())
    await peer.ask(register(broker_id=1, address="b:1"))
    await peer.ask(register(cluster="D"))
    assert site.name_server.routes.clusters() == {"C": ["b0"], "D": ["b0"]}, "one of them is still there"
    await peer.ask(register(cluster="D", broker_id=1, address="b:1"))
    assert site.name_server.routes.clusters() == {"D": ["b0"]}
    found = await route_of(peer, "T1")
    assert found is not None
    assert [each["cluster"] for each in found["brokerDatas"]] == ["D"]


async def test_a_broker_that_another_cluster_has_replaced_is_not_taken_for_registered(site: Site) -> None:
    """Names are those of all clusters, so that two brokers of one name and id replace each other."""
    first, second, client = site.connect(), site.connect(), site.connect()
    query = RemotingCommand(322, ext_fields=broker_fields(), body=b'{"counter":2,"stateVersion":0,"timestamp":1}')
    await first.ask(register())
    await second.ask(register(cluster="D", address="h:2"))
    assert (await first.ask(query)).ext_fields == {"changed": "true"}
    await second.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert site.name_server.statistics().brokers == 0
    assert (await first.ask(query)).ext_fields == {"changed": "true"}
    await first.ask(register())
    assert await addresses(client) == {"0": "10.0.0.1:10911"}


async def test_brokers_of_two_clusters_may_have_one_address(peer: Peer) -> None:
    """Private addresses of different networks may be equal."""
    await peer.ask(register(["T1", "T2"]))
    await peer.ask(register(["T8", "T9"], name="b9", cluster="D"))
    assert await addresses(peer) == await addresses(peer, "T9") == {"0": "10.0.0.1:10911"}


async def test_a_silent_broker_is_dropped_after_120_seconds(site: Site, autojump_clock: trio.testing.MockClock) -> None:
    broker, other = site.connect(), site.connect()
    await trio.sleep(3)
    await broker.ask(register())
    await trio.sleep(60)
    await broker.ask(register())
    await other.ask(register(name="b1", address="d:1", topics=["O1", "O2"]))
    await trio.sleep(100)
    assert (await other.ask(RemotingCommand(904, ext_fields=broker_fields("b1", 0, "d:1")))).code == 0
    client = site.connect()
    await trio.sleep(19.9)
    assert await addresses(client) == {"0": "10.0.0.1:10911"}
    assert await broker.receive() is None
    assert trio.current_time() == pytest.approx(3 + 60 + 120)
    assert await addresses(client) is None
    assert await addresses(client, "O1") == {"0": "d:1"}


async def test_a_broker_may_ask_for_a_shorter_time(site: Site, autojump_clock: trio.testing.MockClock) -> None:
    client, broker, other = site.connect(), site.connect(), site.connect()
    await other.ask(register(["O1", "O2"], name="b1", address="d:1"))
    await trio.sleep(1)
    await broker.ask(register(heartbeatTimeoutMillis="10000"))
    assert await broker.receive() is None
    assert trio.current_time() == pytest.approx(11)
    assert await addresses(client) is None
    assert await addresses(client, "O1") == {"0": "d:1"}


@pytest.mark.parametrize("asked_ms", ["0", "-5", "-9223372036854775808", "9223372036854775807"])
async def test_absurd_times_harm_nobody(site: Site, asked_ms: str, autojump_clock: trio.testing.MockClock) -> None:
    broker = site.connect()
    assert (await broker.ask(register(heartbeatTimeoutMillis=asked_ms))).code == 0
    await trio.sleep(1.1)
    client = site.connect()
    assert (await addresses(client) is None) == (not asked_ms.startswith("9"))


async def test_an_unchanged_version_is_a_sign_of_life(site: Site, autojump_clock: trio.testing.MockClock) -> None:
    broker = site.connect()
    await broker.ask(register())
    query = RemotingCommand(322, ext_fields=broker_fields(), body=b'{"counter":2,"stateVersion":0,"timestamp":1}')
    for _ in range(5):
        await trio.sleep(100)
        assert (await broker.ask(query)).ext_fields == {"changed": "false"}
    assert await addresses(broker) == {"0": "10.0.0.1:10911"}


async def test_a_closed_connection_drops_what_it_registered_last(site: Site) -> None:
    client, first, second = site.connect(), site.connect(), site.connect()
    await first.ask(register())
    await second.ask(register())  # the broker came back before the old connection was seen to close
    await first.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert await addresses(client) == {"0": "10.0.0.1:10911"}
    await second.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert await addresses(client) is None


@pytest.mark.parametrize("code", [322, 904])
async def test_a_heartbeat_on_another_connection_keeps_the_broker(code: int, site: Site) -> None:
    """A broker with forceRegister=false does not register again after it has lost its connection: it asks whether its
    version is still known."""
    client, first, second = site.connect(), site.connect(), site.connect()
    await first.ask(register())
    fields = broker_fields("b0", 0, "10.0.0.1:10911")
    heartbeat = RemotingCommand(code, ext_fields=fields, body=json.dumps(VERSION).encode())
    assert (await second.ask(heartbeat)).code == 0
    await first.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert await addresses(client) == {"0": "10.0.0.1:10911"}
    await second.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert await addresses(client) is None


async def test_statistics() -> None:
    async with open_site(NameServerOptions()) as site:
        await site.connect().ask(register())
        statistics = site.name_server.statistics()
        assert (statistics.brokers, statistics.topics, statistics.remoting.requests) == (1, 2, 1)


async def test_a_broker_that_comes_or_goes_costs_its_own_topics_only(site: Site) -> None:
    """Whatever others have registered: a thousand brokers that start together, or are lost together, would otherwise
    take a thousand passes over all topics.
    """
    others, peer = site.connect(), site.connect()
    assert (await others.ask(register([f"O{number}" for number in range(20)], name="b0", address="h:0"))).code == 0
    routes = site.name_server.routes
    routes._queues = NotWalked(routes._queues)
    assert (await peer.ask(register(["O1", "T1", "T2"], name="b1", address="h:1"))).code == 0
    assert (await peer.ask(RemotingCommand(205, ext_fields={"brokerName": "b1"}))).ext_fields == {"wipeTopicCount": "3"}
    assert await route_of(peer, "T2") is not None
    await peer.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert await route_of(others, "T2") is None
    [queues] = (await route_of(others, "O1") or {})["queueDatas"]
    assert queues["brokerName"] == "b0"


class NotWalked(dict[str, Any]):
    """A table that is only looked up in."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("a pass over all topics")

    def items(self) -> NoReturn:
        raise AssertionError("a pass over all topics")

    def values(self) -> NoReturn:
        raise AssertionError("a pass over all topics")


async def test_a_name_server_listens_on_those_addresses_of_its_host_that_are_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    async with open_name_server(NameServerOptions(host="names.invalid", port=0)) as server:
        assert server.address[0] == "127.0.0.1"
    assert "node.address_unavailable key=listenPort address=192.0.2.1 " in caplog.text


async def test_a_host_name_that_takes_long_to_look_up_does_not_block_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others_ran, lookup = threading.Event(), socket.getaddrinfo

    def slow(*arguments: Any, **options: Any) -> Any:
        assert others_ran.wait(2)
        return lookup(*arguments, **options)

    async def run_others() -> None:
        others_ran.set()

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_others)
        async with open_name_server(NameServerOptions(port=0)):
            pass
