"""One Kafka broker on loopback (KRaft, broker and controller in one JVM), and the jars of spark-sql-kafka.

Jars come from Maven Central through mvn, once, into `$HALOG_BENCH_CACHE` (default ~/.cache/halog-bench).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bench.spark.messages import QUEUE_COUNT, TOPIC

BROKER_VERSION = "4.3.1"
"""The newest version whose broker and tools are both on Maven Central."""
SPARK_VERSION = "4.2.0"
CLIENT_VERSION = "3.9.2"
_BROKER = (
    ("org.apache.kafka", "kafka_2.13", BROKER_VERSION),
    ("org.apache.kafka", "kafka-tools", BROKER_VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
)
# The token provider of 4.2.0 is not published, so this lists the connector's dependencies individually.
_CONNECTOR = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", SPARK_VERSION),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", CLIENT_VERSION),
    ("org.apache.commons", "commons-pool2", "2.13.1"),
)
_MAVEN_TIMEOUT_S = 900
_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 60
# The flags of Kafka's own start script.
_JVM_FLAGS = ["-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35"]
_LOGGING = """Configuration:
  Appenders:
    Console: {name: STDOUT, PatternLayout: {pattern: "[%d] %p %m (%c)%n"}}
  Loggers:
    Root: {level: WARN, AppenderRef: {ref: STDOUT}}
"""


def connector_jars() -> list[Path]:
    """Returns the jars for spark.jars. SystemExit with Maven's output."""
    return sorted(_jars(f"spark-sql-kafka-{SPARK_VERSION}", _CONNECTOR, transitive=False).glob("*.jar"))


def _jars(name: str, artefacts: Sequence[tuple[str, str, str]], *, transitive: bool) -> Path:
    cache = Path(os.environ.get("HALOG_BENCH_CACHE") or Path.home() / ".cache" / "halog-bench")
    jars, project, partial = cache / name / "jars", cache / name / "project", cache / name / "jars.partial"
    project.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if jars.exists():
            return jars
        missing = [program for program in ("java", "mvn") if shutil.which(program) is None]
        if missing:
            raise SystemExit(f"Kafka needs {' and '.join(missing)} on the PATH (or use --no-kafka)")
        exclusion = "<exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>"
        alone = "" if transitive else f"<exclusions>{exclusion}</exclusions>"
        dependencies = "".join(
            f"<dependency><groupId>{group}</groupId><artifactId>{artefact}</artifactId><version>{version}</version>"
            f"{alone}</dependency>"
            for group, artefact, version in artefacts
        )
        (project / "pom.xml").write_text(
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
            f"<groupId>halog.bench</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>"
            f"<dependencies>{dependencies}</dependencies></project>"
        )
        shutil.rmtree(partial, ignore_errors=True)
        goal = "dependency:copy-dependencies"
        command = ["mvn", "-q", "-B", goal, "-DincludeScope=runtime", f"-DoutputDirectory={partial}"]
        done = subprocess.run(
            command, cwd=project, capture_output=True, text=True, timeout=_MAVEN_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"Maven could not fetch {name}:\n{(done.stdout + done.stderr)[-3000:]}")
        partial.rename(jars)  # only a complete directory has the final name
    return jars


class Kafka:
    """The running broker. `bootstrap` is its address; `pid` its process."""

    def __init__(self, folder: Path, jars: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.bootstrap = f"127.0.0.1:{port}"
        self.data = folder / "data"
        self._folder = folder
        self._jars = jars
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def create_topic(self) -> None:
        """Creates the topic of `messages` with its partitions, unless it exists."""
        arguments = ["--create", "--if-not-exists", "--topic", TOPIC, "--partitions", str(QUEUE_COUNT)]
        self._topics([*arguments, "--replication-factor", "1"])

    def delete_topic(self) -> None:
        """Deletes the topic of an interrupted load."""
        self._topics(["--delete", "--if-exists", "--topic", TOPIC])

    def _topics(self, arguments: list[str]) -> None:
        command = [*_java(self._folder, self._jars), "org.apache.kafka.tools.TopicCommand"]
        command += ["--bootstrap-server", self.bootstrap, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as question:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while question.poll() is None:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    question.kill()
                    break
                time.sleep(0.1)
            assert question.stdout is not None
            said = question.stdout.read()
        if question.returncode or self._process.poll() is not None:
            raise SystemExit(f"Kafka's broker does not answer, see {self._folder / 'broker.log'}: {said[-2000:]}")


def _java(folder: Path, jars: Path) -> list[str]:
    return ["java", f"-Dlog4j2.configurationFile={folder / 'log4j2.yaml'}", "-cp", f"{jars}/*"]


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@contextmanager
def kafka_broker(folder: Path, *, heap: str = "1g") -> Iterator[Kafka]:
    """A broker with its data in `folder`, which may contain that of an earlier run; stopped at the end, data kept."""
    folder.mkdir(parents=True, exist_ok=True)
    jars = _jars(f"kafka-{BROKER_VERSION}", _BROKER, transitive=True)
    port, controller_port = _free_ports()
    settings = folder / "server.properties"
    settings.write_text(
        "node.id=1\nprocess.roles=broker,controller\n"
        f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}\n"
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}\ncontroller.listener.names=CONTROLLER\n"
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n"
        f"controller.quorum.voters=1@127.0.0.1:{controller_port}\nlog.dirs={folder / 'data'}\n"
        "offsets.topic.replication.factor=1\ntransaction.state.log.replication.factor=1\n"
        "transaction.state.log.min.isr=1\nshare.coordinator.state.topic.replication.factor=1\n"
        "auto.create.topics.enable=false\nlog.retention.ms=-1\n"
    )
    (folder / "log4j2.yaml").write_text(_LOGGING)
    java = _java(folder, jars)
    if not (folder / "data" / "meta.properties").exists():
        done = subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", "aGFsb2ctYmVuY2gtMDAwMA", "-c", str(settings)],
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"Kafka could not format {folder}: {done.stdout}{done.stderr}")
    with (folder / "broker.log").open("ab") as log:
        process = _start([java[0], f"-Xmx{heap}", f"-Xms{heap}", *_JVM_FLAGS, *java[1:], "kafka.Kafka"], settings, log)
        try:
            kafka = Kafka(folder, jars, port, process)
            kafka.create_topic()  # only a running broker responds
            yield kafka
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(command: list[str], settings: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    # In its own session, Ctrl-C reaches it only through `terminate`, after Spark has disconnected.
    return subprocess.Popen([*command, str(settings)], stdout=log, stderr=log, start_new_session=True)
