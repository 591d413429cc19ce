"""RocketMQ's own integration tests, run against an existing cluster of halog or of real brokers.

`python -m tests.interop.own_tests VERSION MAKE [CLASS...]` runs classes of rocketmq-test VERSION, or all, against MAKE,
which is "halog" or a version of RocketMQ, and prints a JSON line per test. docs/compatibility.md has the results.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import trio

from tests.interop.broker import Broker
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.processes import Child, Children, open_children
from tests.interop.releases import Release, fetch, resolve
from tests.interop.rocketmq import OPENED, RocketMqBroker, start_name_server
from tests.interop.sdk_cluster import HALOG, halog_settings

CLUSTER = "DefaultCluster"
# Number of brokers that the tests of a release expect.
BROKER_COUNTS = {"4.9.7": 2, "5.5.0": 3}
_JVM = ("-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_ROOM = "org.apache.rocketmq.test."
_MORE = """
<dependency><groupId>org.apache.rocketmq</groupId><artifactId>rocketmq-test</artifactId><version>{0}</version>
<classifier>tests</classifier></dependency>
<dependency><groupId>net.bytebuddy</groupId><artifactId>byte-buddy</artifactId><version>1.14.19</version></dependency>
<dependency><groupId>org.assertj</groupId><artifactId>assertj-core</artifactId><version>3.22.0</version></dependency>
"""


class Outcome(NamedTuple):
    """The result of one test; `text` is a failure's stack trace."""

    name: str
    outcome: str
    seconds: float
    text: str


@dataclass
class OwnTests:
    """One JVM with the tests of one release, and its cluster."""

    version: str
    child: Child
    send: trio.MemorySendChannel[dict[str, Any]]
    receive: trio.MemoryReceiveChannel[dict[str, Any]]
    home: Path
    outcomes: list[Outcome] = field(default_factory=list)

    async def run(self, class_name: str, within_s: float = 900.0) -> list[Outcome]:
        """The tests of a class, named below org.apache.rocketmq.test."""
        found = []
        await self.child.stdin.send_all(f"{_ROOM}{class_name}\n".encode())
        with trio.fail_after(within_s):
            while True:
                event = await self.receive.receive()
                if event["event"] == "class":
                    if event["text"]:
                        found.append(Outcome(class_name, "failed", event["seconds"], event["text"]))
                    return found
                found.append(Outcome(event["name"], event["outcome"], event["seconds"], event["text"]))


@asynccontextmanager
async def open_own_tests(children: Children, version: str, make: str) -> AsyncIterator[OwnTests]:
    """Starts the cluster and the JVM; both end with the children."""
    tests = resolve_tests(version)
    brokers = await _start_cluster(children, make, BROKER_COUNTS[version])
    home = children.folder / "own-tests-home"
    home.mkdir()
    command = ["java", *_JVM, *OPENED, "--add-opens=java.base/java.lang=ALL-UNNAMED", f"-Duser.home={home}"]
    command += [f"-Dlogback.configurationFile={tests.classes}/logback.xml", "-Drocketmq.client.logUseSlf4j=true"]
    command += [
        "-cp",
        f"{tests.classes}:{tests.jars}/*",
        "RocketMqTests",
        brokers[0].name_server.rpartition(":")[2],
        CLUSTER,
    ]
    command.append(",".join(f"{broker.extra['brokerName']}:{broker.port}" for broker in brokers))
    send, receive = trio.open_memory_channel[dict[str, Any]](1000)

    def take(line: str) -> None:
        if line.startswith('{"event"'):
            send.send_nowait(json.loads(line))

    child = children.start_soon(f"own-tests-{version}", command, on_line=take)
    yield OwnTests(version, child, send, receive, home)


async def _start_cluster(children: Children, make: str, count: int) -> list[Broker]:
    brokers: list[Broker] = []
    release = None if make == HALOG else resolve(make)
    if release is None:
        name_server = await start_halog_name_server(children)
    else:
        name_server = await start_name_server(children, release)
    for number in range(1, count + 1):
        name = f"TestBrokerName_{number}"
        extra: dict[str, object] = {"brokerClusterName": CLUSTER, "brokerName": name}
        broker: Broker
        if release is None:
            extra |= halog_settings()
            broker = HalogBroker(children, name, name_server, "ASYNC_MASTER", extra=extra)
        else:
            extra["enablePropertyFilter"] = "true"
            broker = RocketMqBroker(children, release, name, name_server, "ASYNC_MASTER", extra=extra)
        await broker.start()
        brokers.append(broker)
    return brokers


def resolve_tests(version: str) -> Release:
    """The jars of the tests, with our runner. Raises RuntimeError."""
    return fetch(f"tests-{version}", version, ["rocketmq-test"], "java_own", _MORE.format(version))


def class_names(version: str) -> list[str]:
    """Every class of integration tests in the release's test jar that uses the common cluster."""
    jar = resolve_tests(version).jars / f"rocketmq-test-{version}-tests.jar"
    listing = subprocess.run(["jar", "tf", str(jar)], capture_output=True, text=True, check=True).stdout.split()
    names = (
        line.removesuffix(".class").replace("/", ".").removeprefix(_ROOM)
        for line in listing
        if line.endswith("IT.class")
    )
    return sorted(names)


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("version", choices=sorted(BROKER_COUNTS))
    parser.add_argument("make")
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--within", type=float, default=2000.0, help="longest time for one class, in seconds")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        async with (
            open_children(Path(folder)) as children,
            open_own_tests(children, arguments.version, arguments.make) as tests,
        ):
            for name in arguments.classes or class_names(arguments.version):
                for outcome in await tests.run(name, arguments.within):
                    print(json.dumps({"class": name, **outcome._asdict()}), flush=True)


if __name__ == "__main__":
    sys.exit(trio.run(_main))
