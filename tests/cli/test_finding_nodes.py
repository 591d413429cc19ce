"""How `ha status`, `ha top` and `ha doctor` find nodes, and what they show of those without an admin port."""

import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio.from_thread
import pytest

from ha.cli import admin_pages, node_pages, run
from ha.cli.flags import ClusterFlags
from ha.cli.nodes import BrokerFacts, Outcome, Reach, token_for
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from tests.cli.cluster import cluster
from tests.cli.doctoring import closed_port, diagnose, named
from tests.cli.test_status import MASTER, admin_port
from tests.client.fake_broker import serving

FIGURES = {
    "brokerVersionDesc": "V4_9_7",
    "commitLogMinOffset": "1073741824",
    "commitLogMaxOffset": "5368709120",
    "dispatchBehindBytes": "1024",
    "runtime": "[ 1 days, 2 hours, 3 minutes, 4 seconds ]",
}
"""Of the answer to 28 of RocketMQ 4.9.7."""


@pytest.fixture(autouse=True)
def no_local_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that happen to run on this machine don't belong to the cluster."""
    monkeypatch.setattr(admin_pages, "DEFAULT_ADMINS", ())


@contextmanager
def registered(
    *,
    config: str = "brokerRole=ASYNC_MASTER\n",
    admin_url: str | None = None,
    broker_id: int = 0,
    other: str | None = None,
    replication: bytes = b"",
    duplicates: bytes = b"",
) -> Iterator[tuple[str, str]]:
    """A name server that knows a broker, by default a master, and `other` as its slave or master.

    Yields the addresses of the name server and of the broker.

    The broker answers 28, with `admin_url` as halog does, and 26 with `config`, if access control does not reject it.
    """
    address = ""

    def handle(command: RemotingCommand) -> RemotingCommand:
        match command.code:
            case RequestCode.GET_BROKER_CLUSTER_INFO:
                addresses = {str(broker_id): address} | ({} if other is None else {str(1 - broker_id): other})
                group = {"brokerAddrs": addresses, "brokerName": "broker-a", "cluster": "C"}
                body = {"brokerAddrTable": {"broker-a": group}, "clusterAddrTable": {"C": ["broker-a"]}}
                return command.reply(0, body=json.dumps(body).encode())
            case RequestCode.GET_BROKER_RUNTIME_INFO:
                table = FIGURES if admin_url is None else FIGURES | {"adminUrl": admin_url}
                return command.reply(0, body=json.dumps({"table": table}).encode())
            case RequestCode.GET_BROKER_CONFIG if config:
                return command.reply(0, body=config.encode())
            case RequestCode.GET_KVLIST_BY_NAMESPACE if duplicates:
                return command.reply(0, body=duplicates)
            case RequestCode.GET_BROKER_HA_STATUS if replication:
                return command.reply(0, body=replication)
        return command.reply(3, f" request type {command.code} not supported")

    with (
        anyio.from_thread.start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(serving(handle)) as server,
        portal.wrap_async_context_manager(serving(handle)) as names,
    ):
        address = server.address
        yield names.address, server.address


def shown_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert run(["status", "--json", "--sample", "0", "--timeout", "10", *words]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.processes
def test_every_node_is_found_through_the_name_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(tmp_path) as nodes:
        nodes.master("brokerRole=SYNC_MASTER", "brokerName=broker-a")
        nodes.slave("brokerName=broker-a")
        found = shown_json(capsys, "--servers", nodes.name_server)
        assert list(found) == nodes.admins
        assert [page["broker_id"] for page in found.values()] == [0, 1]
        assert run(["top", "--once", "--json", "--interval", "0.1", "-n", nodes.name_server]) == 0
        assert [node["name"] for node in json.loads(capsys.readouterr().out)["nodes"]] == ["broker-a:0", "broker-a:1"]
        assert run(["doctor", "--json", "--servers", nodes.name_server]) == 0
        assert list(json.loads(capsys.readouterr().out)["admin_ports"]) == nodes.admins


def test_a_rocketmq_broker_has_what_its_remoting_port_tells(capsys: pytest.CaptureFixture[str]) -> None:
    with registered(config="brokerRole=SYNC_MASTER\nhaListenPort=10912\n") as (names, broker):
        assert run(["status", "--servers", names]) == 0
        out = capsys.readouterr().out
        [row] = [line.split() for line in out.splitlines() if line.startswith(" broker-a:0 ")]
        log = ["1,073,741,824", "5,368,709,120"]
        rest = ["–", "–", "?", "1,024", "1", "d", "2", "h"]
        assert row == ["broker-a:0", "SYNC_MASTER", broker, "unknown", "–", *log, *rest]
        assert "can't tell whether broker-a:0 is ready: only its remoting port (V4_9_7) was read\n" in out
        assert "broker-a:0: this release does not report its slaves" in out
        page = shown_json(capsys, "--servers", names)[broker]
        assert run(["status", "--check", "--servers", names]) == 1
        said = "ha: can't tell whether sends to broker-a:0 are degraded: only its remoting port (V4_9_7) was read\n"
        assert capsys.readouterr().err == said
        assert run(["top", "--once", "--interval", "0.1", "--servers", names]) == 0
        assert "can't tell whether broker-a:0 is ready: only its" in capsys.readouterr().out
    assert (page["read_from"], page["version"], page["uptime_s"]) == ("remoting", "V4_9_7", 93_784)
    assert (page["is_ready"], page["not_ready_reason"]) == (None, "only its remoting port (V4_9_7) was read")


def test_a_slave_whose_admin_port_can_t_be_read_does_not_pass_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The master's page is read. The slave, which is the same server here, names an admin port that is closed."""
    with (
        closed_port() as gone,
        closed_port() as master_at,
        registered(config="brokerRole=SLAVE\n", admin_url=f"http://{gone}", broker_id=1, other=master_at) as (names, _),
    ):
        master = MASTER | {"degraded_reason": "", "addresses": {"remoting": master_at}}
        with admin_port(json.dumps(master).encode()) as admin:
            monkeypatch.setattr(admin_pages, "DEFAULT_ADMINS", (admin,))
            assert run(["status", "--servers", names]) == 0
            assert " broker-a:1 " in (out := capsys.readouterr().out)
            why = f"only its remoting port (V4_9_7) was read; admin port {gone}: not reachable: Connection refused\n"
            assert f"can't tell whether broker-a:1 is ready: {why}" in out
            assert run(["status", "--check", "--servers", names]) == 1
    assert capsys.readouterr().err == f"ha: can't tell whether broker-a:1 is ready: {why}"


def test_absurd_numbers_of_servers_end_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    behind = {"haConnectionInfo": [{"addr": "10.0.0.9:1", "diff": 10**30}]}
    other = {"table": {"broker-a:" + "9" * 5000: "10.0.0.8:10911"}}
    told = [json.dumps(each).encode() for each in (behind, other)]
    with registered(replication=told[0], duplicates=told[1]) as (names, _):
        assert run(["status", "--servers", names]) == 0
    assert "broker-a:0: this release does not report its slaves" in capsys.readouterr().out


def test_a_broker_that_does_not_tell_its_configuration_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with registered(config="") as (names, _):
        assert run(["status", "--servers", names]) == 0
    assert " MASTER " in capsys.readouterr().out


def test_another_node_s_admin_port_is_not_taken_for_the_broker_s(capsys: pytest.CaptureFixture[str]) -> None:
    """As with a port of the loopback address on which another machine's broker listens there."""
    with (
        admin_port(json.dumps(MASTER).encode()) as admin,
        registered(admin_url=f"http://{admin}") as (names, broker),
    ):
        found = shown_json(capsys, "--servers", names)
        assert run(["status", "--servers", names]) == 0
    assert list(found) == [broker, admin]
    assert (found[broker]["role"], found[admin]) == ("ASYNC_MASTER", MASTER)
    assert f"admin port {admin}: belongs to another node" in capsys.readouterr().out


def test_a_registered_broker_that_is_gone_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with closed_port() as gone, registered(other=gone) as (names, broker):
        assert run(["status", "--servers", names]) == 69
        captured = capsys.readouterr()
        assert broker in captured.out
        assert captured.err == f"ha: {gone}: broker-a:1: connection refused\n"


def test_a_slave_without_a_registered_master_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with registered(config="brokerRole=SLAVE\n", broker_id=1) as (names, _):
        for words in (["status"], ["status", "--check"], ["top", "--once", "--interval", "0.1"]):
            assert run([*words, "--servers", names]) == 69
            captured = capsys.readouterr()
            assert " broker-a:1 " in captured.out
            assert captured.err == "ha: broker-a: no master is registered\n"


def test_a_name_server_that_is_gone_is_an_error_unless_it_is_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who runs a node with a name server elsewhere need not name it to see the node on this machine."""
    with closed_port() as gone, admin_port(json.dumps(MASTER).encode()) as admin:
        monkeypatch.setattr(admin_pages, "DEFAULT_ADMINS", (admin,))
        assert run(["status", "--servers", gone, "--sample", "0"]) == 69
        captured = capsys.readouterr()
        assert "broker-a:0" in captured.out
        assert captured.err == f"ha: {gone}: name server: connection refused\n"
        monkeypatch.setattr(node_pages, "LOCAL", ClusterFlags(servers=gone))
        assert run(["status", "--servers", gone, "--sample", "0"]) == 0
        assert capsys.readouterr().err == ""


def test_a_name_server_is_not_waited_for_before_the_next_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    asked: set[int] = set()

    with anyio.from_thread.start_blocking_portal("trio") as portal:
        all_asked = portal.call(anyio.Event)

        async def answer(number: int, command: RemotingCommand) -> RemotingCommand:
            asked.add(number)
            if len(asked) == 3:
                all_asked.set()
            await all_asked.wait()
            return command.reply(0, body=b"{}")

        with ExitStack() as stack:
            servers = [
                stack.enter_context(portal.wrap_async_context_manager(serving(partial(answer, number))))
                for number in range(3)
            ]
            addresses = ";".join(server.address for server in servers)
            result = diagnose(capsys, "--servers", addresses, "--timeout", "5", code=1)
    assert named(result) == {"no-broker"}
    assert ";".join(each["address"] for each in result["name_servers"]) == addresses


def test_nobody_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with closed_port() as gone:
        assert run(["status", "--servers", gone]) == 69
    said = f"ha: no node can be reached ({gone}: name server: connection refused); start a node (ha master), or use "
    assert capsys.readouterr().err == said + "--servers or --admin HOST:PORT\n"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:10913", "127.0.0.1:10913"),
        ("https://[fe80::7]:10913", "[fe80::7]:10913"),
        ("http://127.0.0.1", None),
        ("http://127.0.0.1:70000", None),
        ("127.0.0.1:10913", None),
        ("", None),
    ],
)
def test_the_broker_says_where_its_admin_port_is(url: str, address: str | None) -> None:
    reach = Reach("10.0.0.1:10911", Outcome.OPEN)
    told = BrokerFacts(
        cluster="C", name="b", broker_id=0, address=reach.address, reach=reach, figures={"adminUrl": url}
    )
    assert told.admin_address == address


def test_a_token_is_not_sent_where_a_broker_says() -> None:
    plain, verified = ssl.create_default_context(), ssl.create_default_context()
    plain.check_hostname = False
    for address in ("10.0.0.1:10913", "127.example.com:10913", "127.0.0.1@example.com:10913"):
        assert token_for(address, "secret", None) == token_for(address, "secret", plain) == ""
        assert token_for(address, "secret", verified) == "secret"
    for address in ("127.0.0.1:10913", "localhost:10913", "[::1]:10913"):
        assert token_for(address, "secret", None) == "secret"
