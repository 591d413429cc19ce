"""One Docker daemon for all container tests of a process, with the image built from this repository."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.containers import daemon, parts
from tests.containers.daemon import DaemonNotStartedError, Docker, open_docker

ROOT = Path(__file__).parents[2]


def _why_not() -> str:
    """Returns what keeps a Docker daemon from being started here, or ""."""
    missing = [*daemon.missing_programs(), *parts.missing_programs()]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: docker.io, debootstrap, iptables)"
    namespaces = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "true"]
    done = subprocess.run(namespaces, capture_output=True, text=True, timeout=10, check=False)
    return f"no namespaces of its own for a Docker daemon: {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture(scope="package")  # not until the test run ends: the files are removed beside other tests
def docker() -> Iterator[Docker]:
    """A daemon with the image `halog`, and no container; a skip where none can be started."""
    if reason := _why_not():
        pytest.skip(reason)
    found = parts.fetch_parts()
    # Not below pytest's folder, which is kept when a test fails: images and volumes are some gigabytes.
    folder = Path(tempfile.mkdtemp(prefix="halog-docker-"))
    try:
        try:
            with open_docker(folder, found.compose, network="host") as builder:
                _build(builder, found, folder)
            with open_docker(folder, found.compose, network="own") as docker:
                yield docker
        except DaemonNotStartedError as error:
            pytest.skip(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build(builder: Docker, found: parts.Parts, folder: Path) -> None:
    """Builds the image as a user does, and imports what a user's Docker would pull."""
    [base] = {line.split()[1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("FROM ")}
    assert base.endswith(parts.RELEASE), f"the container tests have a base image of {parts.RELEASE}, not {base}"
    builder.run("import", str(found.base), base)
    builder.run("build", "--quiet", "--network", "host", "--tag", "halog", str(ROOT), timeout_s=900)
    members = yaml.safe_load((ROOT / "docker-compose.members.yml").read_text())
    context = folder / "etcd"
    shutil.copytree(found.etcd, context / "bin")
    (context / "Dockerfile").write_text(f"FROM {base}\nCOPY bin /usr/local/bin\n")
    builder.run("build", "--quiet", "--tag", members["services"]["etcd"]["image"], str(context))
    shutil.rmtree(context)
