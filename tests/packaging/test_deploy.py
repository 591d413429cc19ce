"""The files of deploy/ start existing entry points, with valid keys, and probe ports and paths that nodes serve."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml

import ha.cli.spark
from ha.cli.spark.archives import _interval_s
from ha.config import Config, NameServerConfig, ProxyConfig, load_config
from ha.node import open_node
from tests.tls.nodes import settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ARCHIVE_UNIT = DEPLOY / "systemd" / "halog-archive.service"
NODE_UNITS = [path for path in UNITS if path != ARCHIVE_UNIT]
ENTRY_POINTS: dict[str, Any] = {
    "ha.namesrv": (NameServerConfig, {}),
    "ha.proxy": (ProxyConfig, {}),
    "ha.master": (Config, {"brokerRole": "ASYNC_MASTER"}),
    "ha.slave": (Config, {"brokerRole": "SLAVE"}),
    "ha.member": (Config, {"brokerRole": "SYNC_MASTER"}),
}

# ---- systemd


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser


def test_each_entry_point_has_a_unit() -> None:
    assert {path.stem for path in NODE_UNITS} == {module.replace("ha.", "halog-") for module in ENTRY_POINTS}


@pytest.mark.parametrize("path", NODE_UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_its_entry_point_and_leaves_it_time_to_stop(path: Path) -> None:
    service = unit(path)["Service"]
    module = path.stem.replace("halog-", "ha.")
    name = path.stem.removeprefix("halog-")
    assert shlex.split(service["ExecStart"]) == [
        *("/opt/halog/bin/python", "-m", module, "--config", f"/etc/halog/{name}.conf")
    ]
    assert int(service["TimeoutStopSec"]) * 1000 > Config().shutdown_timeout_ms
    has_store = ENTRY_POINTS[module][0] is Config
    assert service["RestartPreventExitStatus"].split() == (["2", "65", "78"] if has_store else ["2", "78"])
    assert int(service["LimitNOFILE"]) >= 65536
    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"


def test_the_archive_s_unit_runs_a_command_in_the_store_s_directory() -> None:
    service = unit(ARCHIVE_UNIT)["Service"]
    program, group, *words = shlex.split(service["ExecStart"])
    assert (program, group) == ("/opt/halog/bin/ha", "spark")
    _, bound, _ = ha.cli.spark.app.parse_args(words, print_error=False, exit_on_error=False)
    given = bound.arguments
    slave = load_config(Config, defaults={"brokerRole": "SLAVE"}).config
    assert given["path"] == slave.store_path_root_dir
    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"
    assert _interval_s(given["every"]) == 5
    # Restarts are bounded, and Spark has the time to finish a commit.
    limits = unit(ARCHIVE_UNIT)["Unit"]
    assert int(limits["StartLimitBurst"]) * int(service["RestartSec"]) < int(limits["StartLimitIntervalSec"])
    assert service["MemoryDenyWriteExecute"] == "no"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """With this Python in place of the one that an installation has."""
    for path in UNITS:
        text = re.sub(r"/opt/halog/bin/\w+", sys.executable, path.read_text())
        (tmp_path / path.name).write_text(text)
    found = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(["systemd-analyze", "verify", *found], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---- Kubernetes


def objects(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for each in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()):
        found += each["items"] if each["kind"] == "List" else [each]
    return found


PODS = [
    pytest.param(each, id=f"{name}:{each['metadata']['name']}")
    for name in ("master-slave.yaml", "members.yaml")
    for each in objects(name)
    if each["kind"] in {"StatefulSet", "Deployment"}
]


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    [container] = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def config_of(workload: dict[str, Any], pod: int = 0) -> Any:
    """What the process of a pod, by default the first, reads out of its environment. ConfigError if that is wrong."""
    container = container_of(workload)
    ordinal = workload["spec"].get("ordinals", {}).get("start", 0) + pod
    told = {"metadata.name": f"{workload['metadata']['name']}-{ordinal}"}
    told["metadata.labels['apps.kubernetes.io/pod-index']"] = str(ordinal)
    environment: dict[str, str] = {}
    for entry in container["env"]:
        value = entry["value"] if "value" in entry else told[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        environment[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], value)
    python, dash_m, module = container["command"]
    assert (python, dash_m) == ("python", "-m")
    struct, defaults = ENTRY_POINTS[module]
    loaded = load_config(struct, defaults=defaults, environment=environment)
    assert loaded.ignored == ()
    return loaded.config


@pytest.mark.parametrize("workload", PODS)
def test_ports_are_those_that_a_node_opens(workload: dict[str, Any]) -> None:
    config = config_of(workload)
    opened = {"remoting": config.listen_port}
    if isinstance(config, Config):
        opened |= {"ha": config.ha_listen_port, "admin": config.admin_listen_port}
        assert config.admin_bind_address == "0.0.0.0"  # who probes comes from outside the pod
    assert {port["name"]: port["containerPort"] for port in container_of(workload)["ports"]} == opened
    assert config.bind_address == "0.0.0.0"


@pytest.mark.parametrize("workload", PODS)
def test_probes_ask_what_the_admin_port_answers(workload: dict[str, Any]) -> None:
    container = container_of(workload)
    if workload["kind"] == "Deployment":
        assert (
            container["readinessProbe"]["tcpSocket"] == container["livenessProbe"]["tcpSocket"] == {"port": "remoting"}
        )
        return
    paths = {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "admin"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


@pytest.mark.parametrize("workload", [pod for pod in PODS if "namesrv" not in str(pod.id)])
def test_a_broker_keeps_its_store_and_its_time(workload: dict[str, Any]) -> None:
    spec = workload["spec"]
    pod, container, config = spec["template"]["spec"], container_of(workload), config_of(workload)
    [claim] = spec["volumeClaimTemplates"]
    [mount] = [each for each in container["volumeMounts"] if each["name"] == claim["metadata"]["name"]]
    assert config.root.is_relative_to(mount["mountPath"])
    assert pod["terminationGracePeriodSeconds"] * 1000 > config.shutdown_timeout_ms
    assert f" --uid {pod['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text()
    assert config.broker_ip1.startswith(workload["metadata"]["name"])
    assert config.broker_ip1.endswith(f".{spec['serviceName']}")


@pytest.mark.parametrize("name", ["master-slave.yaml", "members.yaml"])
def test_services_lead_to_pods(name: str) -> None:
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in objects(name) if "template" in each["spec"]]
    services = {each["metadata"]["name"]: each["spec"] for each in objects(name) if each["kind"] == "Service"}
    for service in services.values():
        assert any(service["selector"].items() <= labels.items() for labels in pods)
    for each in objects(name):
        if each["kind"] == "StatefulSet":
            assert services[each["spec"]["serviceName"]]["clusterIP"] == "None"
            assert (
                each["spec"]["selector"]["matchLabels"].items()
                <= each["spec"]["template"]["metadata"]["labels"].items()
            )


@pytest.mark.parametrize("group", [0, 3])
def test_a_master_and_its_slave_are_of_one_group(group: int) -> None:
    masters, slaves = (each for each in objects("master-slave.yaml") if each["kind"] == "StatefulSet")
    assert masters["spec"]["replicas"] == slaves["spec"]["replicas"]
    master, slave = config_of(masters, group), config_of(slaves, group)
    assert (master.broker_role, slave.broker_role) == ("SYNC_MASTER", "SLAVE")
    assert master.broker_name == slave.broker_name == f"broker-{group}"
    assert master.broker_ip1 == f"halog-master-{group}.halog"
    assert master.name_servers == slave.name_servers == ["halog-namesrv:9876"]


def test_members_have_numbers_from_1_on() -> None:
    [members] = [each for each in objects("members.yaml") if each["kind"] == "StatefulSet"]
    config = config_of(members)
    assert (config.broker_id, config.is_member, members["spec"]["replicas"]) == (1, True, 3)


# ---- compose files, which tests/containers runs where a Docker daemon can be started

COMPOSED = [
    pytest.param(service, id=f"{path.name}:{name}")
    for path in sorted(ROOT.glob("docker-compose*.yml"))
    for name, service in yaml.safe_load(path.read_text())["services"].items()
    if service["image"] == "halog"
]


def composed_config(service: dict[str, Any]) -> Any:
    """What its process reads out of its environment, with the defaults of variables. ConfigError if that is wrong."""
    python, dash_m, module = service["command"]
    assert (python, dash_m) == ("python", "-m")
    struct, defaults = ENTRY_POINTS[module]
    environment = {key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for key, value in service["environment"].items()}
    loaded = load_config(struct, defaults=defaults, environment=environment)
    assert loaded.ignored == ()
    return loaded.config


@pytest.mark.parametrize("service", COMPOSED)
def test_a_compose_service_is_configured_and_has_time_to_stop(service: dict[str, Any]) -> None:
    config = composed_config(service)
    assert int(service["stop_grace_period"].removesuffix("s")) * 1000 > config.shutdown_timeout_ms


@pytest.mark.parametrize("token", ["", "let-me-see-it-all"])
async def test_health_check_of_the_image(token: str, tmp_path: Path) -> None:
    """With the token that the node has by its environment."""
    [code] = re.findall(r'^    CMD \["python", "-c", "(.*)"\]$', (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    keys = [f"adminToken={token}"] if token else []
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *keys)) as node:
        command = [sys.executable, "-c", code.replace("127.0.0.1:10913", node.admin_address)]
        for given, exit_code in ((token, 0), ("another", 1 if token else 0)):
            environment = os.environ | {"HA_ADMIN_TOKEN": given}
            done = await trio.run_process(command, env=environment, check=False, capture_stderr=True)
            assert done.returncode == exit_code, done.stderr.decode()


def test_composed_groups_have_a_master_and_a_slave_each() -> None:
    """And ports of their own on the machine, with the numbers that brokers announce."""
    services = yaml.safe_load((ROOT / "docker-compose.groups.yml").read_text())["services"]
    groups: dict[str, list[str]] = {}
    published = [port.rpartition("}:")[2].split(":") for service in services.values() for port in service["ports"]]
    for name, service in services.items():
        config = composed_config(service)
        if name != "namesrv":
            groups.setdefault(config.broker_name, []).append(config.broker_role)
            assert config.broker_ip2 == name
            assert config.name_servers == ["namesrv:9876"]
            assert service["ports"][0].endswith(f":{config.listen_port}:{config.listen_port}")
            assert service["ports"][1].endswith(f":{config.admin_listen_port}")
            assert service["volumes"] == [f"{name}:/data"]
    assert groups == {"broker-a": ["SYNC_MASTER", "SLAVE"], "broker-b": ["SYNC_MASTER", "SLAVE"]}
    outside = [port for port, _ in published]
    assert len(set(outside)) == len(outside)
