"""RocketMQ's own integration tests, run against an existing cluster of halog or of real brokers.

`python -m tests.interop.own_tests VERSION MAKE [CLASS...]` runs classes of rocketmq-test VERSION, or all, against MAKE,
which is "halog" or a version of RocketMQ, and prints a JSON line per test. docs/compatibility.md has the results.
"""

import argparse
import json
import os
import shutil
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
from tests.interop.releases import locked, resolve
from tests.interop.rocketmq import OPENED, RocketMqBroker, start_name_server
from tests.interop.sdk_cluster import HALOG, halog_settings

CLUSTER = "DefaultCluster"
# Number of brokers that the tests of a release expect.
BROKER_COUNTS = {"4.9.7": 2, "5.5.0": 3}
_JAVA_SOURCE = Path(__file__).parent / "java_own" / "RocketMqTests.java"
_JVM = ("-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_MAVEN_TIMEOUT_S = 900
_ROOM = "org.apache.rocketmq.test."
_DEPENDENCIES = """
<dependency><groupId>org.apache.rocketmq</groupId><artifactId>rocketmq-test</artifactId><version>{0}</version></dependency>
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
    class_path = resolve_tests(version)
    brokers = await _start_cluster(children, make, BROKER_COUNTS[version])
    home = children.folder / "own-tests-home"
    home.mkdir()
    command = ["java", *_JVM, *OPENED, "--add-opens=java.base/java.lang=ALL-UNNAMED", f"-Duser.home={home}"]
    command += [f"-Dlogback.configurationFile={class_path[0]}/logback.xml", "-Drocketmq.client.logUseSlf4j=true"]
    command += [
        "-cp",
        ":".join(map(str, class_path)),
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


def resolve_tests(version: str) -> list[Path]:
    """The class path: our runner's classes, then the jars. Raises RuntimeError with the output of Maven or javac."""
    cache = Path(os.environ.get("HALOG_INTEROP_CACHE") or Path.home() / ".cache" / "halog-interop")
    room = cache / f"tests-{version}"
    jars, classes = room / "jars", room / "classes"
    room.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"tests-{version}.lock"):
        if not jars.exists():
            partial = room / "jars.partial"
            shutil.rmtree(partial, ignore_errors=True)
            (room / "pom.xml").write_text(
                '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
                "<groupId>halog.interop</groupId><artifactId>tests</artifactId><version>1</version>"
                f"<packaging>pom</packaging><dependencies>{_DEPENDENCIES.format(version)}</dependencies></project>"
            )
            goal = "dependency:copy-dependencies"
            _run(["mvn", "-q", "-B", goal, "-DincludeScope=runtime", f"-DoutputDirectory={partial}"], room)
            partial.rename(jars)
        shutil.rmtree(classes, ignore_errors=True)
        classes.mkdir()
        _run(["javac", "-nowarn", "-proc:none", "-cp", f"{jars}/*", "-d", str(classes), str(_JAVA_SOURCE)], room)
        for name in ("logback.xml", "rmq.logback.xml"):
            (classes / name).write_text('<configuration><root level="OFF"/></configuration>')
    return [classes, *sorted(jars.glob("*.jar"))]


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_MAVEN_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]}, exit code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")


def class_names(version: str) -> list[str]:
    """Every class of integration tests in the release's test jar that uses the common cluster."""
    [jar] = (path for path in resolve_tests(version) if path.name == f"rocketmq-test-{version}-tests.jar")
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
