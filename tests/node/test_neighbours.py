"""What a node learns of the other brokers of its cluster, over real sockets."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

import ha
from ha.admin.dashboard.source import Neighbour
from ha.node import Node
from ha.node.neighbours import REFRESH_S, Neighbours, own_addresses
from ha.remoting import open_remoting_client
from tests.node.test_library import attached, config, slave_config


async def known(neighbours: Neighbours, count: int) -> Sequence[Neighbour]:
    """Asks until `count` brokers are known and connected."""
    with trio.fail_after(30):
        while len(found := neighbours.known()) < count or not all(each.ha_address for each in found):
            neighbours._asked_at = -REFRESH_S
            await trio.sleep(0.05)
    return found


async def test_master_and_slaves_know_each_other(tmp_path: Path) -> None:
    async with (
        ha.open_master(config(tmp_path / "m")) as master,
        ha.open_slave(slave_config(tmp_path / "s1", master, broker_id=1)) as one,
        ha.open_slave(slave_config(tmp_path / "s2", master, broker_id=2)) as two,
        open_remoting_client() as client,
        trio.open_nursery() as nursery,
    ):
        await attached(master)
        seen: dict[Node, Neighbours] = {node: Neighbours(node, client) for node in (master, one)}
        for neighbours in seen.values():
            nursery.start_soon(neighbours.serve)
        with trio.fail_after(30):
            while len(master.ha_service.statistics().slaves) < 2:  # noqa: ASYNC110
                await trio.sleep(0.05)
        slaves = await known(seen[master], 2)
        assert [each.name for each in slaves] == ["a:1", "a:2"]
        assert [each.url for each in slaves] == [f"http://{node.admin_address}" for node in (one, two)]
        assert {each.ha_client_address for each in slaves} == {s.peer for s in master.ha_service.statistics().slaves}
        others = await known(seen[one], 2)
        assert [each.name for each in others] == ["a:0", "a:2"]
        link = one.ha_client
        assert link is not None
        assert others[0].ha_address == link.statistics().master_address
        nursery.cancel_scope.cancel()


async def test_brokers_that_are_asked_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.node.neighbours.BROKER_COUNT_MAX", 1)
    async with (
        ha.open_master(config(tmp_path / "m")) as master,
        ha.open_slave(slave_config(tmp_path / "s1", master, broker_id=1)),
        ha.open_slave(slave_config(tmp_path / "s2", master, broker_id=2)),
        open_remoting_client() as client,
    ):
        neighbours = Neighbours(master, client)
        assert len(await neighbours._brokers()) == 2
        assert [each.name for each in await neighbours._ask()] == ["a:1"]


async def test_an_admin_port_on_all_addresses_is_reported_by_the_broker_s_own(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path, admin_bind_address="0.0.0.0", broker_ip1="127.0.0.9")) as node:
        port = node.admin_address.rpartition(":")[2]
        assert own_addresses(node)["adminUrl"] == f"http://127.0.0.9:{port}"
        assert own_addresses(node)["haClientAddress"] == ""


@pytest.mark.parametrize(
    ("admin_host", "host", "url", "is_linked"),
    [
        ("127.0.0.1", "127.0.0.1", "http://127.0.0.1:1", True),
        ("127.0.0.1", "10.0.0.9", "http://127.0.0.1:1", False),  # the other machine's loopback
        ("0.0.0.0", "127.0.0.1", "http://127.0.0.2:1", False),  # who sees this node's may be elsewhere
        ("127.0.0.1", "10.0.0.9", "https://10.0.0.9:1", True),
        ("127.0.0.1", "10.0.0.9", "http://[2001:db8::1]:1", True),
        ("127.0.0.1", "127.0.0.1", "javascript:alert(1)", False),
        ("127.0.0.1", "127.0.0.1", "http://x:1/?", False),
        ("127.0.0.1", "127.0.0.1", "http://u@x:1", False),
        ("127.0.0.1", "127.0.0.1", "", False),
    ],
)
async def test_links_lead_only_to_admin_ports_in_reach(
    tmp_path: Path, admin_host: str, host: str, url: str, is_linked: bool
) -> None:
    async with (
        ha.open_master(config(tmp_path, admin_bind_address=admin_host, broker_ip1="127.0.0.1")) as node,
        open_remoting_client() as client,
    ):
        found = Neighbours(node, client)._neighbour("a", 1, f"{host}:10911", {"adminUrl": url})
        assert found.url == (url if is_linked else "")
