"""What the container tests need besides Docker, made from Debian's packages once and kept below ~/.cache/halog.

No image registry is asked: the base image named in the Dockerfile is replaced by a Debian of the same release with the
same Python version, and etcd's image by Debian's etcd. Docker Compose is Debian's, too. `fetch_debian` replaces the
images that have Debian and nothing else.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.interop.releases import locked

RELEASE = "trixie"
PROGRAMS = ("debootstrap", "unshare", "chroot", "dpkg-deb", "tar")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_BASE_PACKAGES = ("ca-certificates", "python-is-python3", "python3-dev", "python3-pip", "python3-venv")
"""Those of the official Python image: the interpreter, its headers, pip and venv; no compiler"""
_TOOLS = {
    "docker-compose": "usr/libexec/docker/cli-plugins/docker-compose",
    "etcd-server": "usr/bin/etcd",
    "etcd-client": "usr/bin/etcdctl",
}
"""Debian packages, and the one file that is taken from each"""
_UNUSED = ("dev/*", "proc/*", "sys/*", "tmp/*", "var/cache/apt/*", "var/lib/apt/lists/*", "usr/share/doc/*",
           "usr/share/man/*", "usr/share/locale/*")  # fmt: skip
_TIMEOUT_S = 900


def missing_programs() -> list[str]:
    """Returns which of the programs needed are not installed."""
    return [
        program for program in PROGRAMS if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]


@dataclass(frozen=True)
class Parts:
    """Files in the cache."""

    base: Path
    """A tar archive of the base image's root file system"""
    compose: Path
    """Docker's plugin `compose`"""
    etcd: Path
    """A folder with the programs `etcd` and `etcdctl`"""


def fetch_parts() -> Parts:
    """Returns the parts, made first if the cache lacks them. RuntimeError with the output of what failed."""
    trusted = CERTIFICATES.read_bytes() if CERTIFICATES.exists() else b""
    folder = _cached(RELEASE, repr((_BASE_PACKAGES, _TOOLS, _UNUSED)).encode() + trusted, lambda it: _make(it, trusted))
    return Parts(folder / "base.tar", folder / "docker-compose", folder / "etcd")


def fetch_debian(release: str) -> Path:
    """Returns a tar archive of the root file system of a Debian with apt, but without Python. Errors: `fetch_parts`."""

    def make(folder: Path) -> None:
        _run("debootstrap", "--variant=minbase", release, str(folder / "root"))
        _archive(folder / "root", folder / "base.tar")

    return _cached(f"bare-{release}", repr(_UNUSED).encode(), make) / "base.tar"


def _cached(name: str, recipe: bytes, make: Callable[[Path], None]) -> Path:
    """Returns the folder that `make` fills, from the cache if it was filled by the same recipe."""
    cache = Path.home() / ".cache" / "halog" / "containers"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    with locked(cache / "lock"):
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)  # the final name is given only to a complete folder
    return folder


def _make(folder: Path, trusted: bytes) -> None:
    root = folder / "root"
    packages = ",".join(_BASE_PACKAGES)
    _run("debootstrap", "--variant=minbase", f"--include={packages}", RELEASE, str(root))
    if trusted:
        # Builds reach the same package indexes as this machine, possibly through a proxy with another certificate.
        (root / CERTIFICATES.relative_to("/")).write_bytes(trusted)
    for name in ("etc/resolv.conf", "etc/hosts"):
        shutil.copy(f"/{name}", root / name)
    _run("chroot", str(root), "sh", "-c", f"cd /tmp && apt-get -qq download {' '.join(_TOOLS)}")
    (folder / "etcd").mkdir()
    for package, path in _TOOLS.items():
        [archive] = (root / "tmp").glob(f"{package}_*.deb")
        unpacked = folder / package.replace("docker-compose", "compose-package")
        _run("dpkg-deb", "--extract", str(archive), str(unpacked))
        program = Path(path).name
        (unpacked / path).rename(folder / ("etcd" if program.startswith("etcd") else ".") / program)
        shutil.rmtree(unpacked)
    _archive(root, folder / "base.tar")


def _archive(root: Path, target: Path) -> None:
    """Moves a root file system into a tar archive, without the files that no image needs."""
    excluded = [f"--exclude=./{pattern}" for pattern in _UNUSED]
    _run("tar", "--create", f"--file={target}", f"--directory={root}", *excluded, ".")
    shutil.rmtree(root)


def _run(*command: str) -> None:
    """Runs a command in new namespaces: no mount and no process is left behind, even if the tests are killed."""
    guard = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    done = subprocess.run(
        [*guard, *command], env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
