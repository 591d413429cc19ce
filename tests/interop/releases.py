"""The releases of Apache RocketMQ that the tests run against: their jars, and the programs compiled for each.

Jars come from Maven Central through ``mvn dependency:copy-dependencies``, once, into ``$HALOG_INTEROP_CACHE`` (default
``~/.cache/halog-interop``), under a lock so that several test runs may start at the same time.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

# The newest 5.x whose broker, name server, client and tools are all on Maven Central, and the newest such 4.9.x.
VERSIONS = ("5.5.0", "4.9.7")
GRPC_CLIENT_VERSION = "5.2.0"
# Programs required on the PATH.
PROGRAMS = ("java", "javac", "mvn")
_MAVEN_TIMEOUT_S = 900
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Release:
    """One resolved release: `jars` is a folder of jars, `classes` holds the programs compiled with them."""

    version: str
    jars: Path
    classes: Path

    @property
    def is_4(self) -> bool:
        return self.version.startswith("4.")

    @property
    def client_class_path(self) -> str:
        return f"{self.jars}/*:{self.classes}"

    @property
    def shared_classes(self) -> Path:
        """The JVM's archive of the classes that a broker loads, which halves the start time of each process."""
        return self.jars.parent / "broker.jsa"


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


def require_java() -> None:
    """Without the programs: a failure where CI=true, a skip elsewhere."""
    if missing := missing_programs():
        reason = f"RocketMQ's programs need {' and '.join(missing)} on the PATH (a JDK 17 or newer, and Maven)"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def resolve(version: str) -> Release:
    """Brokers, name server, tools and the remoting client of `version`, with InteropClient. Raises RuntimeError."""
    artefacts = ["rocketmq-broker", "rocketmq-namesrv", "rocketmq-client", "rocketmq-tools"]
    if not version.startswith("4."):
        artefacts.append("rocketmq-controller")
    return fetch(version, version, artefacts, "java")


def resolve_proxy(version: str) -> Release:
    """RocketMQ's gRPC proxy. Raises RuntimeError."""
    return fetch(f"proxy-{version}", version, ["rocketmq-proxy"])


def resolve_grpc_client() -> Release:
    """The gRPC client for Java, with GrpcCases and GrpcLoad. Raises RuntimeError."""
    return fetch(f"client-java-{GRPC_CLIENT_VERSION}", GRPC_CLIENT_VERSION, ["rocketmq-client-java"], "java5")


def fetch(folder: str, version: str, artefacts: Sequence[str], sources: str = "", more: str = "") -> Release:
    """Fetches RocketMQ's `artefacts` of `version`, and compiles the programs in the folder `sources` with them, unless
    `folder` of the cache has them. `more` has further dependencies as Maven's XML. Raises RuntimeError with the output
    of Maven or javac."""
    cache = Path(os.environ.get("HALOG_INTEROP_CACHE") or Path.home() / ".cache" / "halog-interop")
    programs = sorted((_FOLDER / sources).glob("*.java")) if sources else []
    digest = hashlib.sha256(b"".join(program.read_bytes() for program in programs)).hexdigest()[:12]
    jars, classes = cache / folder / "jars", cache / folder / f"classes-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{folder}.lock"):
        if not jars.exists():
            dependencies = "".join(
                f"<dependency><groupId>org.apache.rocketmq</groupId><artifactId>{artefact}</artifactId>"
                f"<version>{version}</version></dependency>"
                for artefact in artefacts
            )
            _copy_jars(dependencies + more, jars)
        if programs and not classes.exists():
            _compile(programs, jars, classes)
    return Release(version, jars, classes)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock file against other processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy_jars(dependencies: str, jars: Path) -> None:
    project, partial = jars.with_name("project"), jars.with_name("jars.partial")
    shutil.rmtree(partial, ignore_errors=True)
    project.mkdir(parents=True, exist_ok=True)
    (project / "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>halog.interop</groupId><artifactId>peers</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    goal = "dependency:copy-dependencies"
    command = ["mvn", "-q", "-B", goal, "-DincludeScope=runtime", f"-DoutputDirectory={partial}"]
    _run(command, project, f"Maven could not fetch {jars.parent.name} of RocketMQ")
    partial.rename(jars)  # only a complete folder ever has the final name


def _compile(sources: list[Path], jars: Path, classes: Path) -> None:
    partial = classes.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Clients log nothing: 5.x has its own renamed logback and looks for rmq.logback.xml, 4.9 for logback.xml.
    for name, package in (("rmq.logback.xml", "org.apache.rocketmq.logging.ch.qos"), ("logback.xml", "ch.qos")):
        (partial / name).write_text(
            f'<configuration><statusListener class="{package}.logback.core.status.NopStatusListener"/>'
            '<root level="OFF"/></configuration>'
        )
    command = ["javac", "-nowarn", "-Xlint:none", "-proc:none", "-cp", f"{jars}/*", "-d", str(partial)]
    _run(command + [str(source) for source in sources], partial, "javac failed")
    partial.rename(classes)


def _run(command: list[str], folder: Path, complaint: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_MAVEN_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{complaint}, exit code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
