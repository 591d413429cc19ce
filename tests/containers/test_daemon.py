"""The tests' own Docker daemon leaves nothing behind when a run is interrupted."""

import os
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.containers.daemon import Docker, open_docker

pytestmark = pytest.mark.docker

PROGRAMS = ("/usr", "/bin", "/lib", "/lib64")


def cgroups() -> list[Path]:
    name = f"halog-{os.getpid()}-host"
    return [*Path("/sys/fs/cgroup").glob(name), *Path("/sys/fs/cgroup").glob(f"*/{name}")]


def interrupted_run(folder: Path) -> None:
    """Ends while a container runs."""
    empty = folder / "empty.tar"
    tarfile.open(empty, "w").close()
    volumes = [f"--volume={folder}:{folder}:ro" for folder in PROGRAMS if Path(folder).exists()]
    with open_docker(folder, network="host") as other:
        other.run("import", str(empty), "empty")
        other.run("run", "--detach", "--network=none", *volumes, "empty", "sleep", "infinity")
        assert cgroups() != []
        raise KeyboardInterrupt


def test_an_interrupted_run_leaves_no_cgroups(docker: Docker) -> None:
    # Not below pytest's folder: containerd's sockets have names of at most 107 characters.
    with TemporaryDirectory(prefix="halog-docker-") as folder, pytest.raises(KeyboardInterrupt):
        interrupted_run(Path(folder))
    assert cgroups() == []
