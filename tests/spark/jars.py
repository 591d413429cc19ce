"""Jars that Spark tests add to PySpark's own, from Maven Central through ``mvn dependency:copy-dependencies``, once.

They go into ``$HALOG_INTEROP_CACHE`` (default ``~/.cache/halog-interop``), under a lock so that several test runs may
start at the same time.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pyspark

from tests.interop.releases import locked

SPARK = "4.2"
DELTA = f"io.delta:delta-spark_{SPARK}_2.13:4.4.0"
_MAVEN_TIMEOUT_S = 600
_TAIL_CHARACTERS = 4000


def delta_jars() -> list[Path]:
    """Delta Lake for Spark 4.2. Raises RuntimeError with Maven's output, or if there is no Maven."""
    return resolve_jars("delta-4.4.0", [DELTA], groups=["io.delta", "io.unitycatalog"])


def delta_settings() -> dict[str, str]:
    """Spark's settings for Delta. Empty, so that tests of Delta skip, for another Spark and without the jars.

    Where CI=true, it is a RuntimeError if the jars can't be had.
    """
    if not pyspark.__version__.startswith(f"{SPARK}."):
        return {}
    try:
        jars = delta_jars()
    except RuntimeError:
        if os.environ.get("CI", "").lower() == "true":
            raise
        return {}
    return {
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    }


def resolve_jars(name: str, coordinates: list[str], *, groups: list[str] | None = None) -> list[Path]:
    """The jars of `coordinates` (group:artefact:version) and of what they need, kept in the cache as `name`.

    With `groups` only jars of these groups: for what PySpark has already. Raises RuntimeError.
    """
    if shutil.which("mvn") is None:
        raise RuntimeError("mvn is not on the PATH")
    cache = Path(os.environ.get("HALOG_INTEROP_CACHE") or Path.home() / ".cache" / "halog-interop")
    cache.mkdir(parents=True, exist_ok=True)
    jars = cache / name / "jars"
    with locked(cache / f"{name}.lock"):
        if not jars.exists():
            _copy_jars(coordinates, groups, jars)
    return sorted(jars.glob("*.jar"))


def _copy_jars(coordinates: list[str], groups: list[str] | None, jars: Path) -> None:
    dependencies = ""
    for coordinate in coordinates:
        group, artefact, version = coordinate.split(":")
        dependencies += (
            f"<dependency><groupId>{group}</groupId><artifactId>{artefact}</artifactId>"
            f"<version>{version}</version></dependency>"
        )
    project, partial = jars.parent / "project", jars.parent / "jars.partial"
    shutil.rmtree(partial, ignore_errors=True)
    project.mkdir(parents=True, exist_ok=True)
    (project / "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>halog.tests</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
    command.append(f"-DoutputDirectory={partial}")
    if groups is not None:
        command.append(f"-DincludeGroupIds={','.join(groups)}")
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=_MAVEN_TIMEOUT_S, check=False)
    if done.returncode:
        words = (done.stdout + done.stderr)[-_TAIL_CHARACTERS:]
        raise RuntimeError(f"Maven could not fetch {', '.join(coordinates)}, exit code {done.returncode}:\n{words}")
    partial.rename(jars)  # only a complete folder ever has the final name
