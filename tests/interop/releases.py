"""The releases of Apache RocketMQ that the tests run against: their jars, and the Java client compiled for each.

Jars come from Maven Central through ``mvn dependency:copy-dependencies``, once, into ``$HALOG_INTEROP_CACHE`` (default
``~/.cache/halog-interop``), under a lock so that several test runs may start at the same time.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The newest 5.x whose broker, name server, client and tools are all on Maven Central, and the newest such 4.9.x.
VERSIONS = ("5.5.0", "4.9.7")
# Programs required on the PATH.
PROGRAMS = ("java", "javac", "mvn")
_MAVEN_TIMEOUT_S = 900
_JAVA_SOURCES = Path(__file__).parent / "java"


@dataclass(frozen=True)
class Release:
    """One resolved release: `jars` is a folder of jars, `classes` holds the compiled InteropClient."""

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


def resolve(version: str) -> Release:
    """Fetches and compiles `version` unless the cache has it. Raises RuntimeError with the output of Maven or javac."""
    cache = Path(os.environ.get("HALOG_INTEROP_CACHE") or Path.home() / ".cache" / "halog-interop")
    sources = sorted(_JAVA_SOURCES.glob("*.java"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    jars, classes = cache / version / "jars", cache / version / f"classes-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{version}.lock"):
        if not jars.exists():
            _copy_jars(version, cache, jars)
        if not classes.exists():
            _compile(sources, jars, classes)
    return Release(version, jars, classes)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock file against other processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy_jars(version: str, cache: Path, jars: Path) -> None:
    artefacts = ["rocketmq-broker", "rocketmq-namesrv", "rocketmq-client", "rocketmq-tools"]
    if not version.startswith("4."):
        artefacts.append("rocketmq-controller")
    dependencies = "".join(
        f"<dependency><groupId>org.apache.rocketmq</groupId><artifactId>{artefact}</artifactId>"
        f"<version>{version}</version></dependency>"
        for artefact in artefacts
    )
    project = cache / version / "project"
    partial = cache / version / "jars.partial"
    shutil.rmtree(partial, ignore_errors=True)
    project.mkdir(parents=True, exist_ok=True)
    (project / "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>halog.interop</groupId><artifactId>peers</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    goal = "dependency:copy-dependencies"
    command = ["mvn", "-q", "-B", goal, "-DincludeScope=runtime", f"-DoutputDirectory={partial}"]
    _run(command, project, f"Maven could not fetch RocketMQ {version}")
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
