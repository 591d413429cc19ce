"""docker-compose.yml and Dockerfile without Docker: are they consistent, and does what they start form a cluster?

`docker compose config` is the judge of the file's form; it was run by hand.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from ha.config import Config, NameServerConfig, load_config
from tests.interop.processes import free_ports
from tests.node.processes import Process
from tests.node.test_processes import send, status, wait_until

ROOT = Path(__file__).parents[2]
STRUCTS: dict[str, Any] = {"ha.namesrv": NameServerConfig, "ha.master": Config, "ha.slave": Config}
ROLES = {"ha.master": "ASYNC_MASTER", "ha.slave": "SLAVE"}
SERVICES = ("namesrv", "master", "slave")


def interpolate(value: Any) -> Any:
    """${NAME:-default} as with nothing set."""
    if isinstance(value, dict):
        return {key: interpolate(each) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolate(each) for each in value]
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) if isinstance(value, str) else value


def compose() -> dict[str, Any]:
    file: dict[str, Any] = interpolate(yaml.safe_load((ROOT / "docker-compose.yml").read_text()))
    return file


def module_of(service: dict[str, Any]) -> str:
    python, dash_m, module = service["command"]
    assert (python, dash_m) == ("python", "-m")
    return str(module)


def config_of(service: dict[str, Any]) -> Any:
    """What the process will read out of the service's environment. ConfigError if that is wrong."""
    module = module_of(service)
    defaults = {"brokerRole": ROLES[module]} if module in ROLES else {}
    loaded = load_config(STRUCTS[module], defaults=defaults, environment=service["environment"])
    assert loaded.ignored == ()
    return loaded.config


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return [
        (line.split(None, 1)[0], line.split(None, 1)[1])
        for line in text.splitlines()
        if line.strip() and line[0] != "#"
    ]


@pytest.mark.parametrize("name", SERVICES)
def test_the_environment_is_a_configuration(name: str) -> None:
    config_of(compose()["services"][name])


def test_the_parts_find_each_other() -> None:
    services = compose()["services"]
    names, master, slave = (config_of(services[name]) for name in SERVICES)
    assert master.name_servers == slave.name_servers == [f"namesrv:{names.listen_port}"]
    assert master.broker_name == slave.broker_name
    assert (master.broker_role, slave.broker_role) == ("SYNC_MASTER", "SLAVE")
    assert slave.ha_master_address == ""  # learnt from the name server, which has brokerIP2 from the master
    assert (master.broker_ip2, slave.broker_ip2) == ("master", "slave")
    assert master.mapped_file_size_commit_log_bytes == slave.mapped_file_size_commit_log_bytes
    for config in (names, master, slave):
        assert config.bind_address == "0.0.0.0"  # loopback inside a container is nobody else's


@pytest.mark.parametrize("name", SERVICES)
def test_published_ports_are_those_that_are_told_to_clients(name: str) -> None:
    service = compose()["services"][name]
    config = config_of(service)
    expected = [config.listen_port]
    if isinstance(config, Config):
        expected.append(config.admin_listen_port)
        assert config.admin_bind_address == "0.0.0.0"
        assert config.broker_ip1 == "127.0.0.1"
    assert service["ports"] == [f"127.0.0.1:{port}:{port}" for port in expected]


@pytest.mark.parametrize("name", SERVICES)
def test_the_health_check_asks_the_right_port(name: str) -> None:
    service = compose()["services"][name]
    config = config_of(service)
    kind, *command = service["healthcheck"]["test"]
    assert (kind, command[0]) == ("CMD", "python")
    port = config.listen_port if name == "namesrv" else config.admin_listen_port
    assert re.findall(r"\b\d{4,5}\b", command[-1]) == [str(port)]


@pytest.mark.parametrize("name", ["master", "slave"])
def test_the_store_is_on_a_named_volume(name: str) -> None:
    file = compose()
    service = file["services"][name]
    [volume] = service["volumes"]
    volume_name, target = volume.split(":")
    assert volume_name == name
    assert name in file["volumes"]
    assert config_of(service).root.is_relative_to(target)
    workdir = [text for word, text in instructions() if word == "WORKDIR"][-1]
    assert target == workdir  # made in the image, owned by its user: a named volume takes that over


@pytest.mark.parametrize("name", SERVICES)
def test_stopping_and_restarting(name: str) -> None:
    service = compose()["services"][name]
    assert service["restart"] == "unless-stopped"
    assert int(service["stop_grace_period"].removesuffix("s")) * 1000 > config_of(service).shutdown_timeout_ms
    assert ("STOPSIGNAL", "SIGTERM") in instructions()


def test_start_order() -> None:
    services = compose()["services"]
    assert "depends_on" not in services["namesrv"]
    assert services["master"]["depends_on"] == {"namesrv": {"condition": "service_healthy"}}
    assert set(services["slave"]["depends_on"]) == {"namesrv", "master"}


def test_one_image_for_all() -> None:
    services = compose()["services"]
    assert {service["image"] for service in services.values()} == {"halog"}
    assert {service["build"] for service in services.values()} == {"."}


def test_what_the_image_is_built_from_is_there_and_not_ignored() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().split() if not line.startswith("#")]
    copied = [text.split()[:-1] for word, text in instructions() if word == "COPY" and "--from" not in text]
    sources = [name for names in copied for name in names]
    assert "pyproject.toml" in sources
    for source in sources:
        assert (ROOT / source).exists()
        ignored = False
        for pattern in patterns:
            if fnmatch(source.removeprefix("./"), pattern.lstrip("!")):
                ignored = not pattern.startswith("!")
        assert not ignored, source


def test_the_image_runs_without_privileges_and_serves_by_default() -> None:
    words = dict(instructions())
    assert words["USER"] == "halog"
    assert json.loads(words["CMD"]) == ["python", "-m", "ha.master"]
    assert f":{Config().admin_listen_port}/ready" in words["HEALTHCHECK"]
    bases = [text for word, text in instructions() if word == "FROM"]
    assert {base.split()[0] for base in bases} == {"python:3.12-slim"}


# ---- the same, running


PORTS = {"namesrv": [9876], "master": [10911, 10912, 10913], "slave": [10921, 10922, 10923]}
PORT_KEYS = ("HA_LISTEN_PORT", "HA_HA_LISTEN_PORT", "HA_ADMIN_LISTEN_PORT")
SMALL_FILES = {
    "HA_MAPPED_FILE_SIZE_COMMIT_LOG": "16777216",
    "HA_MAX_INDEX_NUM": "40000",
    "HA_MAX_HASH_SLOT_NUM": "10000",
}


class Containers:
    """The services as processes here: host names become 127.0.0.1, ports free ones, /data a folder, files small."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.services = compose()["services"]
        self.ports: dict[int, int] = {}
        for ports in PORTS.values():
            first = free_ports()
            self.ports |= {port: first + number for number, port in enumerate(ports)}
        self.processes: dict[str, Process] = {}

    def here(self, text: str, name: str) -> str:
        """The text of a service's file as it has to be on this machine."""
        text = re.sub(r"\b(\d{4,5})\b", lambda match: str(self.ports.get(int(match[1]), match[1])), text)
        text = re.sub(rf"\b({'|'.join(SERVICES)})(?=:|$)", "127.0.0.1", text) if not text.startswith("/") else text
        return text.replace("/data", str(self._directory / f"volume-{name}"))

    def start(self, name: str) -> dict[str, str]:
        service = self.services[name]
        (self._directory / f"volume-{name}").mkdir(exist_ok=True)
        environment = {key: self.here(value, name) for key, value in service["environment"].items()}
        environment |= dict(zip(PORT_KEYS, (str(self.ports[port]) for port in PORTS[name]), strict=False))
        if name != "namesrv":
            environment |= SMALL_FILES
        _, *arguments = service["command"]
        assert arguments[0] == "-m"
        process = Process(*arguments[1:], directory=self._directory, environment=environment)
        self.processes[name] = self._stack.enter_context(process)
        return process.wait_ready()

    def is_healthy(self, name: str) -> bool:
        """The health check of the file, as Docker runs it."""
        _, *command = self.services[name]["healthcheck"]["test"]
        arguments = [self.here(argument, name) for argument in command[1:]]
        return subprocess.run([sys.executable, *arguments], capture_output=True, timeout=20).returncode == 0

    def admin(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[PORTS[name][2]]}"


@pytest.mark.processes
def test_what_compose_starts_is_a_cluster(tmp_path: Path) -> None:
    with ExitStack() as stack:
        containers = Containers(tmp_path, stack)
        for name in SERVICES:
            assert not containers.is_healthy(name)
            containers.start(name)
            wait_until(lambda name=name: containers.is_healthy(name))
        wait_until(lambda: status(containers.admin("master"))["ha"]["in_sync"] == 1)

        master = status(containers.admin("master"))
        assert master["addresses"]["remoting"] == f"127.0.0.1:{containers.ports[10911]}"
        for number in range(200):
            answer = send(master["addresses"]["remoting"], b"%d" % number * 100)
            assert (answer.code, answer.remark) == (0, None)
        end = status(containers.admin("master"))["commitlog"]["max_offset"]
        assert end > 200 * 100
        assert status(containers.admin("slave"))["commitlog"]["max_offset"] == end

        # The slave's container dies: the master says so, and `restart: unless-stopped` brings it back.
        containers.processes["slave"].popen.kill()
        containers.processes["slave"].wait_exit()
        assert not containers.is_healthy("slave")
        wait_until(lambda: status(containers.admin("master"))["ha"]["in_sync"] == 0)
        assert send(master["addresses"]["remoting"]).code == 11  # SLAVE_NOT_AVAILABLE
        containers.start("slave")
        wait_until(lambda: status(containers.admin("slave"))["commitlog"]["max_offset"] > end)
        wait_until(lambda: containers.is_healthy("slave"))

        for name in reversed(SERVICES):
            assert containers.processes[name].stop() == 0
    logs = [next((tmp_path / f"volume-{name}/{name}/commitlog").iterdir()) for name in ("master", "slave")]
    assert same_bytes(*logs)


def same_bytes(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        while True:
            pieces = left.read(1 << 24), right.read(1 << 24)
            if pieces[0] != pieces[1]:
                return False
            if not pieces[0]:
                return True
