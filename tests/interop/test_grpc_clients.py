"""Apache's Python and Java clients against a broker's own gRPC port, `python -m ha.proxy` and RocketMQ's proxy: the
table in docs/compatibility.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.protocol import java_json
from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from tests.interop.grpc_cases import RETRY_POLICY, SETUPS, slug
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.processes import Children, free_ports
from tests.interop.releases import Release, resolve_grpc_client, resolve_proxy
from tests.interop.rocketmq import RocketMqBroker, start_proxy
from tests.node.processes import Process

ROOT = Path(__file__).parents[2]
CASES_TIMEOUT_S = 150.0
CLIENTS = ("Python", "Java")
PLACES = ("own port", "`ha.proxy`")
BEFORE_ROCKETMQ = "`ha.proxy` before RocketMQ"
ROCKETMQ_PROXY = "RocketMQ's proxy"
CASES = {"Java": SETUPS.keys(), "Python": SETUPS.keys() - {"priority"}}
BROKER_SETTINGS = {
    "enablePropertyFilter": "true",
    "transactionCheckInterval": 2000,
    "transactionTimeOut": 2000,
}

pytestmark = pytest.mark.processes


async def set_up(broker: str, prefix: str) -> None:
    """Creates the topics and groups of all cases."""
    groups: dict[str, dict[str, Any]] = {}
    async with open_remoting_client() as client:
        for case, (message_type, group) in SETUPS.items():
            name = f"{prefix}-{slug(case)}"
            fields = {
                "topic": name,
                "defaultTopic": "TBW102",
                "readQueueNums": "4",
                "writeQueueNums": "4",
                "perm": "6",
                "topicFilterType": "SINGLE_TAG",
                "topicSysFlag": "0",
                "order": "false",
                "attributes": f"+message.type={message_type}",
            }
            command = RemotingCommand(RequestCode.UPDATE_AND_CREATE_TOPIC, ext_fields=fields)
            assert (await client.invoke(broker, command, 10)).code == 0
            groups |= {f"{name}-g": group, f"{name}-reader": {}}
        for name, group in groups.items():
            config = GroupConfig(group_name=name, group_retry_policy=RETRY_POLICY, **group)
            command = RemotingCommand(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=java_json.dumps(config))
            assert (await client.invoke(broker, command, 10)).code == 0


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The gRPC addresses of a broker and of a front before it, with everything that the cases need."""
    folder = tmp_path_factory.mktemp("grpc")
    ports = {name: free_ports() for name in ("name server", *PLACES)}
    name_server = f"namesrvAddr=127.0.0.1:{ports['name server']}"
    broker = ["listenPort=0", f"grpcListenPort={ports['own port']}", name_server, "mappedFileSizeCommitLog=67108864"]
    broker += [f"{key}={value}" for key, value in BROKER_SETTINGS.items()]
    with ExitStack() as stack:

        def start(module: str, *keys: str) -> dict[str, str]:
            process = stack.enter_context(Process(module, *settings_of(*keys), directory=folder))
            return process.wait_ready()

        start("ha.namesrv", f"listenPort={ports['name server']}")
        master = start("ha.master", *broker)
        start("ha.proxy", f"grpcListenPort={ports['`ha.proxy`']}", name_server)
        for place in PLACES:
            for client in CLIENTS:
                trio.run(set_up, master["remoting"], prefix_of(client, place))
        yield {place: f"127.0.0.1:{ports[place]}" for place in PLACES}


def prefix_of(client: str, place: str) -> str:
    """The start of the names of topics and groups."""
    return slug(f"{client} {place}").replace("`", "").replace("'", "").replace(".", "-")


def run_cases(client: str, endpoint: str, place: str, home: Path) -> dict[str, str]:
    """Runs the cases in a process of their own; returns "ok" or the reason by case."""
    arguments = [endpoint, prefix_of(client, place)]
    if client == "Java":
        classes = resolve_grpc_client()
        jvm = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", f"-Duser.home={home}"]
        command = ["java", *jvm, "-cp", classes.client_class_path, "GrpcCases", *arguments]
    else:
        command = [sys.executable, "-m", "tests.interop.grpc_cases", *arguments]
        command += ["retry"] if place == ROCKETMQ_PROXY else []
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "HOME": str(home)},  # the client writes its log there
        capture_output=True,
        text=True,
        timeout=CASES_TIMEOUT_S,
        check=False,
    )
    print(finished.stderr)
    found = {}
    for line in finished.stdout.splitlines():
        result, _, rest = line.partition(" ")
        for case in SETUPS:
            if result in ("ok", "FAIL") and rest.startswith(case):
                found[case] = "ok" if result == "ok" else rest
    assert found.keys() == CASES[client], finished.stdout
    return found


@pytest.mark.parametrize(
    ("client", "place"),
    [
        ("Python", "own port"),
        ("Java", "own port"),
        ("Python", "`ha.proxy`"),
        pytest.param("Java", "`ha.proxy`", marks=pytest.mark.long),
    ],
)
def test_cases(
    client: str, place: str, endpoints: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if client == "Java":
        request.getfixturevalue("java")
    assert run_cases(client, endpoints[place], place, tmp_path) == documented(client, place)


async def check(client: str, broker: str, endpoint: str, place: str, folder: Path) -> None:
    """Compares the results of a client with the table."""
    await set_up(broker, prefix_of(client, place))
    found = await trio.to_thread.run_sync(run_cases, client, endpoint, place, folder)
    assert found == documented(client, place)


@pytest.mark.interop
@pytest.mark.parametrize("release", ["5.5.0"], indirect=True)
async def test_cases_before_a_real_broker(children: Children, release: Release, tmp_path: Path) -> None:
    """With halog's name server and front, and RocketMQ's broker."""
    name_server = await start_halog_name_server(children)
    extra = {
        **BROKER_SETTINGS,
        "timerWheelEnable": "true",
        "mappedFileSizeTimerLog": 1 << 20,
        "recallMessageEnable": "true",
        "autoCreateSubscriptionGroup": "true",
    }
    broker = RocketMqBroker(children, release, "broker", name_server, "ASYNC_MASTER", extra=extra)
    await broker.start()
    port = free_ports()
    proxy = Process(
        "ha.proxy", *settings_of(f"grpcListenPort={port}", f"namesrvAddr={name_server}"), directory=tmp_path
    )
    with proxy:
        await trio.to_thread.run_sync(proxy.wait_ready)
        async with trio.open_nursery() as nursery:
            for client in CLIENTS:
                nursery.start_soon(check, client, broker.address, f"127.0.0.1:{port}", BEFORE_ROCKETMQ, tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("java")
async def test_cases_through_the_proxy_of_rocketmq(children: Children, tmp_path: Path) -> None:
    """With RocketMQ's proxy in cluster mode, and halog's name server and broker."""
    release = await trio.to_thread.run_sync(resolve_proxy, "5.5.0")
    name_server = await start_halog_name_server(children)
    broker = HalogBroker(children, "broker", name_server, "ASYNC_MASTER", extra=BROKER_SETTINGS)
    await broker.start()
    endpoint = await start_proxy(children, release, name_server, "InteropCluster")
    # The Java client first: just started, this proxy can take longer than the ten seconds that the Python client waits.
    for client in ("Java", "Python"):
        await check(client, broker.address, endpoint, ROCKETMQ_PROXY, tmp_path)


def settings_of(*keys: str) -> list[str]:
    """Command-line arguments that set keys."""
    return [word for key in keys for word in ("--set", key)]


def documented(client: str, place: str) -> dict[str, str]:
    """The column of docs/compatibility.md, without "–" for what the client can't do, by case."""
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    [start] = [number for number, line in enumerate(lines) if line.startswith("| case of a gRPC client |")]
    column = [cell.strip() for cell in lines[start].split("|")].index(f"{client}: {place}")
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[start + 2 :]]
    table = {}
    for row in rows:
        if len(row) <= column:
            break
        if row[column] != "–":
            table[row[1]] = row[column]
    return table
