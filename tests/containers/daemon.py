"""A Docker daemon of the tests' own: its files, processes, mounts and networks are gone with it.

It runs as the second process of new mount, PID and network namespaces, whose first process is a shell: when that ends,
in order or by SIGKILL, the kernel ends every process in there, container shims included, and with them go the mounts,
bridges, addresses and firewall rules. Only cgroups and the data folder are left to be removed. This machine's own
network is not changed, and published ports can't collide with any here: a veth pair leads to them.

Images are built by a daemon in this machine's network without any bridge (`network="host"`), to which package indexes
are reachable; then the same data folder is served in a new network namespace (`network="own"`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import trio

PROGRAMS = ("dockerd", "docker", "containerd", "runc", "iptables", "ip", "unshare", "nsenter", "setpriv")
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_CLIENT_TIMEOUT_S = 300.0
_CONTAINER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# The shell reaps what the daemon leaves and passes SIGTERM on. It has no `exec`: PID 1 of a namespace has to do both.
_FIRST_PROCESS = 'ip link set lo up; trap "kill -TERM \\$!" TERM; "$@" & wait $!; wait $!'


class DaemonNotStartedError(Exception):
    """dockerd can't run here; the message says why."""


class DockerError(Exception):
    """A command of the client failed; the message has its output."""


def missing_programs() -> list[str]:
    """Returns which of the programs needed are not installed."""
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


class Docker:
    """A running daemon, and the client that talks to it. Made by `open_docker`."""

    def __init__(self, folder: Path, first_process: int, address: str) -> None:
        self.data = folder / "data"
        self.address = address
        """IP address at which this machine reaches published ports; "" with network="host\""""
        self._folder = folder
        self._first_process = first_process

    def run(self, *arguments: str, environment: Mapping[str, str] = {}, timeout_s: float = _CLIENT_TIMEOUT_S) -> str:
        """Runs `docker ARGUMENTS` and returns its standard output. DockerError with all of its output."""
        return _run(["docker", *arguments], {**self._environment, **environment}, timeout_s)

    async def ask(self, *arguments: str, environment: Mapping[str, str] = {}) -> str:
        """`run` in a worker thread."""
        return await trio.to_thread.run_sync(lambda: self.run(*arguments, environment=environment))

    def inspect(self, name: str) -> dict[str, Any]:
        """Returns the output of `docker inspect` for a container or image."""
        [found] = json.loads(self.run("inspect", name))
        assert isinstance(found, dict)
        return found

    def run_inside(self, command: Sequence[str]) -> str:
        """Runs a command in the daemon's network namespace, where 127.0.0.1 is the Docker host's, and returns its
        standard output. DockerError with all of its output."""
        return _run(["nsenter", f"--target={self._first_process}", "--net", "--", *command], os.environ, 60)

    def kill_process(self, name: str) -> None:
        """Kills the first process of a container behind Docker's back, as a crash does: the restart policy applies."""
        _run([*self._enter, "kill", "-KILL", str(self._process(name))], os.environ, 10)

    def run_outside_network(self, name: str, command: Sequence[str], timeout_s: float = _CLIENT_TIMEOUT_S) -> str:
        """Runs a command in the container, except for its network, which is this machine's: package indexes are
        reachable from a container without a network. Returns its standard output. DockerError with all of its output.
        """
        into_container = ["nsenter", f"--target={self._process(name)}", "--mount", "--pid", "--ipc", "--uts", "--"]
        environment = [f"PATH={_CONTAINER_PATH}", *self.inspect(name)["Config"]["Env"]]
        return _run([*self._enter, *into_container, "env", "-i", *environment, *command], os.environ, timeout_s)

    def _process(self, name: str) -> int:
        """The first process of a container, as numbered in the daemon's PID namespace."""
        pid: int = self.inspect(name)["State"]["Pid"]
        return pid

    @property
    def _enter(self) -> list[str]:
        """Prefix that runs a command among the daemon's processes and mounts, but in this machine's network."""
        return ["nsenter", f"--target={self._first_process}", "--pid", "--mount", "--"]

    @property
    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HA_", "HALOG_"))}
        return {
            **inherited,
            "DOCKER_HOST": f"unix://{self._folder}/docker.sock",
            "DOCKER_CONFIG": str(self._folder / "client"),
            "DOCKER_BUILDKIT": "0",  # BuildKit is a plugin that Debian does not install with Docker
            "COMPOSE_ANSI": "never",
        }


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
    done = subprocess.run(
        command, env={**environment, "PATH": _PATH}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        output = (done.stdout + done.stderr)[-6000:]
        raise DockerError(f"{' '.join(command)}: exit code {done.returncode}\n{output}")
    return done.stdout


@contextmanager
def open_docker(folder: Path, compose: Path | None = None, *, network: Literal["host", "own"]) -> Iterator[Docker]:
    """Starts a daemon whose files are below `folder` and stops it, with all its containers, in the end.

    `compose` is the client's plugin of that name. DaemonNotStartedError with the end of the daemon's log.
    """
    plugin = folder / "client" / "cli-plugins" / "docker-compose"
    plugin.parent.mkdir(parents=True, exist_ok=True)
    if compose and not plugin.exists():
        plugin.symlink_to(compose)
    cgroup = f"halog-{os.getpid()}-{network}"
    daemon = [
        *("dockerd", f"--data-root={folder / 'data'}", f"--exec-root={folder / 'exec'}"),
        *(f"--pidfile={folder / 'docker.pid'}", f"--host=unix://{folder / 'docker.sock'}"),
        *("--bridge=none", "--exec-opt=native.cgroupdriver=cgroupfs", f"--cgroup-parent=/{cgroup}"),
        *("--default-address-pool", "base=10.213.0.0/16,size=24", "--shutdown-timeout=20"),
    ]
    guard = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if network == "host":
        daemon += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    else:
        guard.append("--net")
    (folder / "docker.pid").unlink(missing_ok=True)
    (folder / "docker.sock").unlink(missing_ok=True)
    log = folder / f"dockerd-{network}.log"
    with log.open("wb") as output:
        unshare = subprocess.Popen(
            [*guard, "sh", "-c", _FIRST_PROCESS, "sh", *daemon],
            env={**os.environ, "PATH": _PATH},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    first_process = 0
    try:
        first_process = _wait_serving(unshare, folder, log)
        address = _connect(first_process) if network == "own" else ""
        yield Docker(folder, first_process, address)
        os.kill(first_process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            unshare.wait(_STOP_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if first_process and unshare.poll() is None:
                os.kill(first_process, signal.SIGKILL)
                unshare.wait(_STOP_TIMEOUT_S)  # ends after all processes in there, so the cgroups are empty
        unshare.kill()  # and by --kill-child everything in its namespaces
        unshare.wait()
        _remove_cgroups(cgroup)


def _wait_serving(unshare: subprocess.Popen[bytes], folder: Path, log: Path) -> int:
    """Waits until the daemon answers; returns the first process of its namespaces."""
    give_up = time.monotonic() + _START_TIMEOUT_S
    while True:
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
        with suppress(DockerError, subprocess.TimeoutExpired):
            if children and (folder / "docker.sock").exists():
                docker = Docker(folder, int(children[0]), "")
                docker.run("version", timeout_s=10)
                return int(children[0])
        if unshare.poll() is not None or time.monotonic() > give_up:
            lines = log.read_text(errors="replace").splitlines()
            raise DaemonNotStartedError("dockerd does not start here:\n" + "\n".join(lines[-15:]))
        time.sleep(0.1)


def _connect(first_process: int) -> str:
    """Connects this machine with the daemon's network namespace; returns the address in there.

    The link ends with the namespace. Its addresses are of the range that is set aside for tests of networks (RFC 2544).
    """
    subnet = f"198.18.{random.randrange(256)}"
    last = 4 * random.randrange(64)
    here, inside = f"{subnet}.{last + 1}", f"{subnet}.{last + 2}"
    name = f"halog{first_process}"[:15]
    enter = ["nsenter", f"--target={first_process}", "--net", "--"]
    for command in (
        ["ip", "link", "add", name, "type", "veth", "peer", "name", "outside", "netns", str(first_process)],
        ["ip", "address", "add", f"{here}/30", "dev", name],
        ["ip", "link", "set", name, "up"],
        [*enter, "ip", "address", "add", f"{inside}/30", "dev", "outside"],
        [*enter, "ip", "link", "set", "outside", "up"],
    ):
        _run(command, os.environ, 10)
    return inside


def _remove_cgroups(name: str) -> None:
    """Removes the daemon's cgroups, which are empty when its processes have ended."""
    roots = [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/")]
    for root in roots:
        for folder, _, _ in os.walk(root / name, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)
