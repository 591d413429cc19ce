"""Apache's Python client against a broker's own gRPC port and against `python -m ha.proxy`: the table in
docs/compatibility.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from ha.protocol import java_json
from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from tests.interop.grpc_cases import RETRY_POLICY, SETUPS, slug
from tests.interop.halog import start_halog_name_server
from tests.interop.processes import Children, free_ports
from tests.interop.releases import resolve
from tests.interop.rocketmq import RocketMqBroker
from tests.node.processes import Process

ROOT = Path(__file__).parents[2]
CASES_TIMEOUT_S = 150.0
PLACES = ("own", "proxy")
COLUMNS = {
    "own": "a broker's own port",
    "proxy": "`python -m ha.proxy`",
    "real": "the same before a broker of RocketMQ 5.5.0",
}

pytestmark = pytest.mark.processes


async def set_up(broker: str, prefix: str) -> None:
    """Creates the topics and groups of all cases."""
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
            config = GroupConfig(group_name=f"{name}-g", group_retry_policy=RETRY_POLICY, **group)
            command = RemotingCommand(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=java_json.dumps(config))
            assert (await client.invoke(broker, command, 10)).code == 0


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The gRPC addresses of a broker and of a front before it, with everything that the cases need."""
    folder = tmp_path_factory.mktemp("grpc")
    ports = {name: free_ports() for name in ("name server", "own", "proxy")}
    name_server = f"namesrvAddr=127.0.0.1:{ports['name server']}"
    broker = ["listenPort=0", f"grpcListenPort={ports['own']}", name_server, "enablePropertyFilter=true"]
    broker += ["transactionCheckInterval=2000", "transactionTimeOut=2000", "mappedFileSizeCommitLog=67108864"]
    with ExitStack() as stack:

        def start(module: str, *keys: str) -> dict[str, str]:
            process = stack.enter_context(Process(module, *settings_of(*keys), directory=folder))
            return process.wait_ready()

        start("ha.namesrv", f"listenPort={ports['name server']}")
        master = start("ha.master", *broker)
        start("ha.proxy", f"grpcListenPort={ports['proxy']}", name_server)
        for place in PLACES:
            trio.run(set_up, master["remoting"], place)
        yield {place: f"127.0.0.1:{ports[place]}" for place in PLACES}


def run_cases(endpoint: str, prefix: str, home: Path) -> dict[str, str]:
    """Runs the cases in a process of their own; returns "ok" or the reason by case."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.interop.grpc_cases", endpoint, prefix],
        cwd=ROOT,
        env={**os.environ, "HOME": str(home)},  # the client writes its log there
        capture_output=True,
        text=True,
        timeout=CASES_TIMEOUT_S,
        check=False,
    )
    found = {}
    for line in finished.stdout.splitlines():
        result, _, rest = line.partition(" ")
        for case in SETUPS:
            if result in ("ok", "FAIL") and rest.startswith(case):
                found[case] = "ok" if result == "ok" else rest
    assert found.keys() == SETUPS.keys(), finished.stdout + finished.stderr
    return found


@pytest.mark.parametrize("place", PLACES)
def test_cases(place: str, endpoints: dict[str, str], tmp_path: Path) -> None:
    found = run_cases(endpoints[place], place, tmp_path)
    assert found == documented(place)


@pytest.mark.interop
async def test_cases_before_a_real_broker(children: Children, tmp_path: Path) -> None:
    """With halog's name server and front, and RocketMQ's broker."""
    release = resolve("5.5.0")
    name_server = await start_halog_name_server(children)
    extra = {
        "timerWheelEnable": "true",
        "mappedFileSizeTimerLog": 1 << 20,
        "enablePropertyFilter": "true",
        "recallMessageEnable": "true",
        "transactionCheckInterval": 2000,
        "transactionTimeOut": 2000,
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
        await set_up(broker.address, "real")
        found = await trio.to_thread.run_sync(run_cases, f"127.0.0.1:{port}", "real", tmp_path)
    assert found == documented("real")


def settings_of(*keys: str) -> list[str]:
    """Command-line arguments that set keys."""
    return [word for key in keys for word in ("--set", key)]


def documented(place: str) -> dict[str, str]:
    """The column of docs/compatibility.md by case."""
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    [start] = [number for number, line in enumerate(lines) if line.startswith("| case of a gRPC client |")]
    column = [cell.strip() for cell in lines[start].split("|")].index(COLUMNS[place])
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[start + 2 :]]
    table = {}
    for row in rows:
        if len(row) <= column:
            break
        table[row[1]] = row[column]
    return table
