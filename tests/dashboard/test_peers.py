"""Which broker is at the other end of a replication connection, and where its dashboard is."""

from typing import Any

from ha.admin.dashboard.peers import name_peers
from ha.admin.dashboard.source import Neighbour
from tests.dashboard.source import Source, neighbour, slave
from tests.dashboard.test_access import dashboard_of
from tests.dashboard.test_overview import Told, link

URL = "http://127.0.0.1:10923"


def named(slaves: list[dict[str, object]], *neighbours: Neighbour, **differs: object) -> dict[str, Any]:
    source = Source()
    source.slaves = slaves
    status = {**source.status(), **differs}
    name_peers(status, neighbours)
    return status


def names(slaves: list[dict[str, object]], *neighbours: Neighbour) -> list[str]:
    return [each["name"] for each in named(slaves, *neighbours)["ha"]["slaves"]]


def test_a_slave_is_the_broker_that_reports_its_end_of_the_connection() -> None:
    one, other = neighbour(1, ha_client_address="127.0.0.1:5001"), neighbour(2, ha_client_address="127.0.0.1:5002")
    assert names([slave("127.0.0.1:5002", 0, 1), slave("127.0.0.1:5001", 0, 1)], one, other) == ["b:2", "b:1"]


def test_a_member_is_the_broker_of_its_id() -> None:
    member = {**slave("127.0.0.1:5002", 0, 1), "broker_id": 3}
    assert names([member], neighbour(3), neighbour(1)) == ["b:3"]
    assert names([member]) == ["b:3"]  # also while name servers don't list it


def test_a_broker_that_reports_nothing_is_known_by_its_host() -> None:
    peer = slave("10.0.0.2:5001", 0, 1)
    assert names([peer], neighbour(1, host="10.0.0.2"), neighbour(2, host="10.0.0.3")) == ["b:1"]


def test_what_is_ambiguous_keeps_its_address() -> None:
    peers = [slave("10.0.0.2:5001", 0, 1), slave("10.0.0.2:5002", 0, 1)]
    here = neighbour(1, host="10.0.0.2")
    assert names(peers, here) == ["10.0.0.2:5001", "10.0.0.2:5002"]
    assert names(peers[:1], here, neighbour(2, host="10.0.0.2")) == ["10.0.0.2:5001"]
    # The connection of a reader, beside a slave that is connected elsewhere.
    assert names(peers[:1], neighbour(1, host="10.0.0.2", ha_client_address="10.0.0.2:9")) == ["10.0.0.2:5001"]
    assert names(peers[:1], neighbour(0, host="10.0.0.2")) == ["10.0.0.2:5001"]


def test_sentences_use_the_names() -> None:
    reason = "slave 127.0.0.1:5001 is 9 bytes behind"
    status = named([slave("127.0.0.1:5001", 0, 1)], neighbour(1, ha_client_address="127.0.0.1:5001"),
                   degraded_reason=reason, single_copy_reason=reason)  # fmt: skip
    assert status["degraded_reason"] == status["single_copy_reason"] == "slave b:1 is 9 bytes behind"


async def test_nodes_link_to_each_other() -> None:
    source = Source()
    source.slaves = [slave("127.0.0.1:5001", 0, 1)]
    source.other_brokers = [neighbour(1, ha_client_address="127.0.0.1:5001", url=URL), neighbour(2)]
    async with dashboard_of(source) as client:
        text = (await client.get("/dashboard")).text
        assert text.count(f'<a href="{URL}/dashboard">b:1</a>') == 2  # the list, and the slave's card
        assert "b:2 <span" in text
    follower = Told(role="SLAVE", ha_client=link())
    follower.other_brokers = [neighbour(0, ha_address="m:10912", url=URL)]
    async with dashboard_of(follower) as client:
        assert f'<a href="{URL}/dashboard">b:0</a></h3>' in (await client.get("/dashboard")).text
