"""The image: what is in it, and a container that has no more rights than it needs."""

import re

import pytest

from tests.containers.clusters import ROOT, until
from tests.containers.daemon import Docker

pytestmark = pytest.mark.docker

SIZE_ABOVE_BASE_MAX = 100_000_000
"""Bytes; docs/deploying.md says how many there are"""
UNWANTED = """
command -v gcc cc cython
find /opt/halog -name tests -o -name pip -o -name 'Cython*' -o -name '*.whl'
find / -xdev -maxdepth 1 -name src -o -maxdepth 1 -name wheels
find / -xdev -path '*/.cache/pip' 2> /dev/null
true
"""


def test_what_the_image_holds(docker: Docker) -> None:
    image = docker.inspect("halog")
    base = next(line.split()[1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("FROM "))
    assert 0 < image["Size"] - docker.inspect(base)["Size"] < SIZE_ABOVE_BASE_MAX
    run = ["run", "--rm", "--network", "none", "halog"]
    assert docker.run(*run, "sh", "-c", UNWANTED) == ""
    assert docker.run(*run, "id", "-u") == "10911\n"
    version = docker.run(*run, "ha", "--version")
    assert re.fullmatch(r"\S+ \((\d+) of \1 modules run compiled(; needs pyarrow: [\w.,\s]+)?\)\n", version), version
    labels = image["Config"]["Labels"]
    assert {f"org.opencontainers.image.{name}" for name in ("title", "description", "version", "licenses")} <= set(
        labels
    )


async def test_a_container_without_rights_serves_and_stops(docker: Docker) -> None:
    """Read-only root file system, no capabilities, no network, a low soft limit of open files."""
    options = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none",
               "--ulimit", "nofile=1024:4096", "--volume", "alone:/data"]  # fmt: skip
    await docker.ask("run", "--detach", "--name", "alone", *options, "halog")
    try:
        assert docker.inspect("alone")["State"]["Health"]["Status"] == "starting"
        await until("healthy", lambda: docker.inspect("alone")["State"]["Health"]["Status"] == "healthy")
        limits = docker.run("exec", "alone", "grep", "open files", "/proc/1/limits")
        assert limits.split()[3:5] == ["4096", "4096"]
        docker.run("exec", "alone", "ha", "produce", "greetings", "--body", "hello")
        await docker.ask("stop", "--time", "15", "alone")
        assert docker.inspect("alone")["State"]["ExitCode"] == 0
        await docker.ask("start", "alone")
        await until("healthy", lambda: docker.inspect("alone")["State"]["Health"]["Status"] == "healthy")
        read = docker.run("exec", "alone", "ha", "consume", "greetings", "--from", "first", "--limit", "1")
        assert "hello" in read
    finally:
        print(docker.run("logs", "alone"))
        docker.run("rm", "--force", "alone")
        docker.run("volume", "rm", "alone")
