"""`ha cluster`: several groups on this machine, as processes, which end with the process that runs them."""

import fcntl
import json
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from ha.cli import run
from ha.cli.cluster.layout import LocalNode, add_nodes, read_nodes
from ha.cli.cluster.processes import NodeError, NodeProcess, reserved_exactly
from ha.cli.cluster.running import LocalCluster, locked, runner_of, start_missing, stop_nodes, wait_settled
from ha.cli.exits import UsageError
from tests.cli.cluster import wait_until
from tests.cli.doctoring import closed_port
from tests.cli.test_status import MASTER, admin_port
from tests.failover.etcd_servers import require_etcd

TIMEOUT_S = 300


def ha(*words: str) -> list[str]:
    return [sys.executable, "-m", "ha.cli", *words]


@contextmanager
def up(directory: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """`ha cluster up`, and what it prints when it is ready."""
    command = ha("cluster", "up", "--dir", str(directory), "--json", "--timeout", str(TIMEOUT_S), *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            lines = []
            for line in iter(process.stdout.readline, ""):
                lines.append(line)
                if line == "}\n":
                    break
            yield process, json.loads("".join(lines))
        finally:
            watchdog.cancel()
            process.kill()


def nodes_of(directory: Path) -> set[int]:
    """Processes that run nodes in `directory`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_here = (entry / "cwd").readlink() == directory
            except OSError:
                continue
            if is_here:
                found.add(int(entry.name))
    return found


def described(topic: str, capsys: pytest.CaptureFixture[str], names: str) -> dict[str, int]:
    """Messages of a topic by broker name."""
    assert run(["topic", "describe", topic, "--json", "--servers", names]) == 0
    counts: dict[str, int] = {}
    for queue in json.loads(capsys.readouterr().out)["queues"]:
        counts[queue["broker"]] = counts.get(queue["broker"], 0) + queue["max_offset"] - queue["min_offset"]
    return counts


def checks_of_doctor(capsys: pytest.CaptureFixture[str], names: str) -> set[str]:
    """What `ha doctor` finds about groups."""
    capsys.readouterr()
    assert run(["doctor", "--json", "--servers", names, "--timeout", "10"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    return {finding["check"] for finding in found if finding["check"] in ("no-topics", "drained")}


@pytest.mark.processes
def test_a_cluster_runs_grows_and_keeps_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "cluster"
    with up(directory, "--groups", "1", "--replicas", "2") as (runner, told):
        names = told["name_server"]
        assert list(told["brokers"]) == ["broker-a-0", "broker-a-1"]
        assert len(nodes_of(directory)) == 3
        assert run(["cluster", "status", "--dir", str(directory), "--json", "--timeout", "10"]) == 0
        pages = json.loads(capsys.readouterr().out)
        assert [page["role"] for page in pages.values()] == ["SYNC_MASTER", "SLAVE"]
        assert pages[told["brokers"]["broker-a-0"]["admin"]]["ha"]["in_sync"] == 1

        assert run(["cluster", "up", "--dir", str(directory), "--groups", "2", "--replicas", "1"]) == 2
        assert "has 1 groups of 2 replicas" in capsys.readouterr().err
        grown = ["cluster", "up", "--dir", str(directory), "--groups", "2", "--json", "--timeout", str(TIMEOUT_S)]
        assert run(grown) == 0
        assert list(json.loads(capsys.readouterr().out)["brokers"])[2:] == ["broker-b-0", "broker-b-1"]
        assert run(["topic", "create", "orders", "--queues", "4", "--broker", "broker-a", "-n", names]) == 0
        assert checks_of_doctor(capsys, names) == {"no-topics"}
        assert run(["broker", "join", "broker-b", "-n", names]) == 0
        assert checks_of_doctor(capsys, names) == set()
        assert run(["broker", "drain", "broker-b", "--wait", "0", "-n", names]) == 1
        assert checks_of_doctor(capsys, names) == {"drained"}
        assert run(["broker", "undrain", "broker-b", "-n", names]) == 0
        lines = tmp_path / "lines"
        lines.write_text("message\n" * 16)
        assert run(["produce", "orders", "--file", str(lines), "--servers", names]) == 0
        capsys.readouterr()
        assert described("orders", capsys, names) == {"broker-a": 8, "broker-b": 8}

        runner.send_signal(signal.SIGKILL)  # it can't stop its nodes
        assert runner.wait() == -signal.SIGKILL
        wait_until(lambda: not nodes_of(directory))
    with up(directory) as (runner, again):
        assert (again["name_server"], list(again["brokers"])) == (
            names,
            [f"broker-{at}" for at in ("a-0", "a-1", "b-0", "b-1")],
        )
        assert described("orders", capsys, names) == {"broker-a": 8, "broker-b": 8}
        *others, ended = sorted(nodes_of(directory))
        os.kill(ended, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{ended}").exists())  # the runner has noticed
        assert run(["cluster", "up", "--dir", str(directory), "--timeout", str(TIMEOUT_S)]) == 0
        assert set(others) < nodes_of(directory)  # they went on
        assert len(nodes_of(directory)) == 5
        capsys.readouterr()
        assert run(["cluster", "down", "--dir", str(directory), "--group", "broker-a", "--json"]) == 0
        assert len(nodes_of(directory)) == 3
        assert run(["cluster", "down", "--dir", str(directory), "--group", "broker-a"]) == 0
        assert "no node of broker-a runs" in capsys.readouterr().err
        assert run(["cluster", "down", "--dir", str(directory), "--group", "broker-c"]) == 2
        assert "no group broker-c" in capsys.readouterr().err
        assert run(["cluster", "down", "--dir", str(directory), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"was_running": True, "is_stopped": True}
        assert runner.wait(TIMEOUT_S) == 0
        assert not nodes_of(directory)
    assert run(["cluster", "down", "--dir", str(directory)]) == 0
    assert "does not run" in capsys.readouterr().err


@pytest.mark.processes
def test_a_cluster_goes_on_in_the_background(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--detach", "--groups", "1", "--replicas", "1", "--json", "--timeout", str(TIMEOUT_S))
    with fixed_ports() as first:
        pass
    command = ha("cluster", "up", "--dir", str(tmp_path), "--port", str(first), *words)
    # subprocess.run waits until no process has the pipes open, so nothing in the background holds them.
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    try:
        assert (done.returncode, done.stderr) == (0, "")
        told = json.loads(done.stdout)
        assert told["name_server"] == f"127.0.0.1:{first}"
        assert told["brokers"]["broker-a-0"]["remoting"] == f"127.0.0.1:{first + 11}"
        running = nodes_of(tmp_path)
        assert len(running) == 2
        os.kill(max(running), signal.SIGKILL)
        log = tmp_path / "cluster.log"
        wait_until(lambda: "ended: SIGKILL" in log.read_text())
        assert run(["cluster", "up", "--dir", str(tmp_path), "--timeout", str(TIMEOUT_S)]) == 0
        assert len(nodes_of(tmp_path)) == 2
    finally:
        assert run(["cluster", "down", "--dir", str(tmp_path)]) == 0
    assert not nodes_of(tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.processes
def test_nodes_go_on_if_the_end_of_one_can_t_be_reported(tmp_path: Path) -> None:
    """Because the disk is full, or the terminal is gone."""
    add_nodes(tmp_path, 1, 1, failover=False)
    (tmp_path / "cluster.log").symlink_to("/dev/full")
    start = ha("cluster", "up", "--detach", "--dir", str(tmp_path), "--timeout", str(TIMEOUT_S))
    try:
        subprocess.run(start, check=True, timeout=TIMEOUT_S)
        name_server, broker = sorted(nodes_of(tmp_path))
        os.kill(broker, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{broker}").exists())  # the runner has noticed
        subprocess.run(start, check=True, timeout=TIMEOUT_S)
        assert name_server in nodes_of(tmp_path)
        assert len(nodes_of(tmp_path)) == 2
    finally:
        assert run(["cluster", "down", "--dir", str(tmp_path)]) == 0


@pytest.mark.processes
def test_a_second_down_waits_for_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with up(tmp_path, "--groups", "1", "--replicas", "1") as (runner, _):
        broker = max(nodes_of(tmp_path))
        os.kill(broker, signal.SIGSTOP)
        try:
            for _ in range(2):
                assert run(["cluster", "down", "--dir", str(tmp_path), "--timeout", "0.5"]) == 69
                assert "is still stopping after 0.5 s" in capsys.readouterr().err
        finally:
            os.kill(broker, signal.SIGCONT)
        assert run(["cluster", "down", "--dir", str(tmp_path)]) == 0
        assert runner.wait(TIMEOUT_S) == 0
    assert "process.stopped" in (tmp_path / "broker-a-0.log").read_text()


def test_a_start_does_not_wait_for_a_cluster_that_was_stopped(tmp_path: Path) -> None:
    """As with `ha cluster up` while `ha cluster down` runs."""
    with subprocess.Popen([sys.executable, "-c", ""]) as runner:
        descriptor = os.pidfd_open(runner.pid)
    with closed_port() as gone:
        node = LocalNode("broker-a-0", {"brokerName": "broker-a", "adminListenPort": gone.rpartition(":")[2]})
        start_missing(descriptor)
        with pytest.raises(NodeError, match="was stopped meanwhile"):
            wait_settled(tmp_path, [node], 600, descriptor)
    os.close(descriptor)


_COUNT_SIGNALS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: print("SIGTERM", flush=True))
print("READY", flush=True)
while not pathlib.Path("may-end").exists():
    time.sleep(0.01)
"""


def test_a_group_that_stops_gets_no_second_signal(tmp_path: Path) -> None:
    """Which would end its nodes at once."""
    node = LocalNode("x", {})
    command = [sys.executable, "-c", _COUNT_SIGNALS, "--config", "x.conf"]
    with (
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process,
        ThreadPoolExecutor() as threads,
    ):
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"READY\n"
            first = threads.submit(stop_nodes, tmp_path, [node], 60)
            assert process.stdout.readline() == b"SIGTERM\n"
            with pytest.raises(NodeError, match="another ha cluster down is still stopping nodes"):
                stop_nodes(tmp_path, [node], 0.1)
        finally:
            (tmp_path / "may-end").touch()
        assert (first.result(), process.stdout.read()) == (1, b"")


@pytest.mark.processes
def test_a_cluster_that_does_not_start_does_not_go_to_the_background(tmp_path: Path) -> None:
    nodes = add_nodes(tmp_path, 1, 1, failover=False)
    host, port = next(node for node in nodes if node.is_broker).address("haListenPort").split(":")
    with socket.create_server((host, int(port))):
        command = ha("cluster", "up", "--detach", "--dir", str(tmp_path), "--timeout", str(TIMEOUT_S))
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout) == (69, "")
    assert "broker-a-0 did not start (exit code 69)" in done.stderr
    assert not nodes_of(tmp_path)


@pytest.mark.processes
def test_a_failover_group_elects_its_master(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    require_etcd()
    with up(tmp_path, "--failover") as (runner, told):
        assert list(told["brokers"]) == ["broker-a-1", "broker-a-2", "broker-a-3"]
        assert run(["cluster", "status", "--dir", str(tmp_path), "--json", "--timeout", "10"]) == 0
        pages = json.loads(capfd.readouterr().out).values()
        assert sorted(page["role"] for page in pages) == ["SLAVE", "SLAVE", "SYNC_MASTER"]
        assert run(["cluster", "down", "--dir", str(tmp_path)]) == 0
        assert runner.wait(TIMEOUT_S) == 0
    assert capfd.readouterr().err == ""
    assert not nodes_of(tmp_path)


@pytest.mark.processes
def test_a_port_that_is_taken_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = add_nodes(tmp_path, 1, 1, failover=False)
    taken = next(node for node in nodes if node.is_broker).address("haListenPort")
    host, port = taken.split(":")
    with socket.create_server((host, int(port))):
        assert run(["cluster", "up", "--dir", str(tmp_path), "--timeout", str(TIMEOUT_S)]) == 69
    said = capfd.readouterr()
    log = tmp_path / "broker-a-0.log"
    assert said.out == ""
    assert said.err == (
        f"ha: broker-a-0 did not start (exit code 69): haListenPort: can't listen on {taken}: "
        f"Address already in use (log: {log})\n"
    )
    assert not nodes_of(tmp_path)


def test_a_node_whose_log_can_t_be_opened_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_nodes(tmp_path, 1, 1, failover=False)
    log = tmp_path / "namesrv.log"
    log.mkdir()
    assert run(["cluster", "up", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"ha: namesrv can't be started: [Errno 21] Is a directory: '{log}'\n"


def test_nodes_go_on_if_a_missing_one_can_t_be_started(tmp_path: Path) -> None:
    (tmp_path / "namesrv.conf").touch()
    (tmp_path / "namesrv.log").mkdir()
    cluster = LocalCluster(tmp_path, print)
    with pytest.raises(NodeError, match="namesrv can't be started"):  # which `ha cluster up` prints
        cluster.start(60)
    cluster.close()


# ---- the directory


def test_nodes_are_added_and_what_is_there_stays(tmp_path: Path) -> None:
    first = add_nodes(tmp_path, 2, 2, failover=False)
    assert [node.name for node in first] == ["namesrv", "broker-a-0", "broker-a-1", "broker-b-0", "broker-b-1"]
    assert [node.module for node in first] == ["ha.namesrv", "ha.master", "ha.slave", "ha.master", "ha.slave"]
    changed = tmp_path / "broker-a-0.conf"
    changed.write_text(changed.read_text() + "flushDiskType=SYNC_FLUSH\n")
    more = add_nodes(tmp_path, 3, None, failover=False)
    assert [node for node in more if node in first] == [node for node in first if node.name != "broker-a-0"]
    assert [node.name for node in more if node not in first] == ["broker-a-0", "broker-c-0", "broker-c-1"]
    assert more[1].keys == {**first[1].keys, "flushDiskType": "SYNC_FLUSH"}
    assert add_nodes(tmp_path, None, None, failover=False) == more == read_nodes(tmp_path)
    ports = [node.keys[key] for node in more for key in node.keys if key.endswith("istenPort")]
    assert len(set(ports)) == len(ports) == 1 + 3 * 6


def test_two_processes_do_not_add_nodes_at_once(tmp_path: Path) -> None:
    """They would choose different ports for one node, and one would wait for the ports that the other replaced."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as another process does while it writes configurations
    with pytest.raises(UsageError, match="another ha cluster up adds nodes"):
        add_nodes(tmp_path, 2, 2, failover=False)
    assert read_nodes(tmp_path) == []
    os.close(descriptor)
    assert len(add_nodes(tmp_path, 2, 2, failover=False)) == 5


@contextmanager
def fixed_ports() -> Iterator[int]:
    """A port for the name server; the ports of the brokers that follow are free, too."""
    for first in random.sample(range(25_000, 30_000, 100), 50):
        with suppress(NodeError), reserved_exactly(range(first, first + 60)):
            yield first
            return
    raise AssertionError("no 60 free ports in a row")


def ports_of(nodes: list[LocalNode]) -> dict[str, list[int]]:
    return {node.name: [int(value) for key, value in node.keys.items() if key.endswith("istenPort")] for node in nodes}


def test_ports_follow_the_one_that_was_named(tmp_path: Path) -> None:
    with fixed_ports() as first:
        pass
    add_nodes(tmp_path, 1, 2, failover=False, first_port=first)
    nodes = add_nodes(tmp_path, 2, 2, failover=False, first_port=first)
    assert ports_of(nodes) == {
        "namesrv": [first],
        "broker-a-0": [first + 11, first + 12, first + 13],
        "broker-a-1": [first + 21, first + 22, first + 23],
        "broker-b-0": [first + 31, first + 32, first + 33],
        "broker-b-1": [first + 41, first + 42, first + 43],
    }


def test_etcd_has_ports_behind_the_name_server(tmp_path: Path) -> None:
    with fixed_ports() as first:
        pass
    nodes = add_nodes(tmp_path, 1, 1, failover=True, first_port=first)
    assert ports_of(nodes)["broker-a-1"] == [first + 11, first + 12, first + 13]
    assert f"http://127.0.0.1:{first + 1}" in (tmp_path / "etcd.yml").read_text()
    assert f"http://127.0.0.1:{first + 2}" in (tmp_path / "etcd.yml").read_text()


def test_a_named_port_that_is_in_use_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fixed_ports() as first:
        pass
    with socket.create_server(("127.0.0.1", first + 12)):
        assert run(["cluster", "up", "--dir", str(tmp_path), "--port", str(first)]) == 69
    said = capsys.readouterr().err
    assert said == f"ha: can't use port {first + 12}: Address already in use; choose another --port\n"
    assert not list(tmp_path.glob("*.conf"))


def test_a_configuration_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """As on a full disk: the next start would take a part of it for the user's own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            add_nodes(tmp_path, 1, 2, failover=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [node.name for node in read_nodes(tmp_path)] == ["namesrv"]
    nodes = add_nodes(tmp_path, 1, 2, failover=False)
    assert [node.name for node in nodes] == ["namesrv", "broker-a-0", "broker-a-1"]


def test_one_replica_is_an_async_master(tmp_path: Path) -> None:
    [_, only] = add_nodes(tmp_path, 1, 1, failover=False)
    assert only.keys["brokerRole"] == "ASYNC_MASTER"


def test_members_of_a_failover_group_know_etcd(tmp_path: Path) -> None:
    nodes = add_nodes(tmp_path, 1, None, failover=True)
    assert [node.name for node in nodes] == ["etcd", "namesrv", "broker-a-1", "broker-a-2", "broker-a-3"]
    assert {node.module for node in nodes[2:]} == {"ha.member"}
    [url] = {node.keys["etcdEndpoints"] for node in nodes[2:]}
    assert f"listen-client-urls: {url}\n" in (tmp_path / "etcd.yml").read_text()
    later = add_nodes(tmp_path, 2, None, failover=False)  # the directory knows that it is one of failover groups
    assert [node.keys["etcdEndpoints"] for node in later[5:]] == [url] * 3


def test_a_name_server_that_does_not_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(MASTER | {"degraded_reason": ""}).encode()) as admin:
        keys = f"brokerName={MASTER['broker_name']}\nadminListenPort={admin.rpartition(':')[2]}\n"
        (tmp_path / "broker-a-0.conf").write_text(keys)
        with closed_port() as nowhere:
            (tmp_path / "namesrv.conf").write_text(f"listenPort={nowhere.rpartition(':')[2]}\n")
            assert run(["cluster", "status", "--dir", str(tmp_path)]) == 69
        assert f"ha: namesrv does not respond at {nowhere}" in capsys.readouterr().err
        (tmp_path / "namesrv.conf").write_text(f"listenPort={admin.rpartition(':')[2]}\n")  # any open port
        assert run(["cluster", "status", "--dir", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["up", "--groups", "0"], "--groups must be from 1 to 26"),
        (["up", "--replicas", "10"], "--replicas must be from 1 to 9"),
        (["up", "--timeout", "0"], "--timeout must be greater than 0"),
        (["up", "--port", "0"], "--port must be from 1 to 65535"),
        (["up"], "contains other files"),
        (["status"], "namesrv.conf is missing"),
    ],
)
def test_usage_errors(words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis").write_text("years of work")
    assert run(["cluster", *words, "--dir", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir() if file.name != "cluster.lock"] == ["thesis"]


def test_without_etcd_there_is_no_failover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["cluster", "up", "--failover", "--dir", str(tmp_path / "cluster")]) == 2
    assert "etcd is not on the PATH" in capsys.readouterr().err
    assert not (tmp_path / "cluster").exists()


def certified(file: Path) -> ssl.SSLContext:
    """TLS with a certificate that may be any, such as one without the name of this machine; writes it to a file."""
    certificate = trustme.CA().issue_cert("broker.example")
    file.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(tls)
    return tls


def test_a_node_with_an_admin_token_is_asked_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HA_ADMIN_TOKEN", "HA_ADMIN_TOKEN_FILE", "HALOG_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "token").write_text("from-the-nodes-file\n")
    tokens: list[str | None] = []
    with admin_port(json.dumps(MASTER | {"degraded_reason": ""}).encode(), tokens=tokens) as address:
        keys = {"brokerName": str(MASTER["broker_name"]), "adminListenPort": address.rpartition(":")[2]}
        wait_settled(tmp_path, [LocalNode("broker-a-0", keys)], 60)
        wait_settled(tmp_path, [LocalNode("broker-a-0", {**keys, "adminToken": "let-me-switch-it"})], 60)
        wait_settled(tmp_path, [LocalNode("broker-a-0", {**keys, "adminTokenFile": "token"})], 60)
        monkeypatch.setenv("HALOG_ADMIN_TOKEN", "in-a-file-of-the-node")
        wait_settled(tmp_path, [LocalNode("broker-a-0", keys)], 60)
        with pytest.raises(NodeError, match=r"adminTokenFile of broker-a-0: .*No such file"):
            wait_settled(tmp_path, [LocalNode("broker-a-0", {**keys, "adminTokenFile": "missing"})], 60)
    words = ("let-me-switch-it", "from-the-nodes-file", "in-a-file-of-the-node")
    assert tokens == [None, *(f"Bearer {word}" for word in words)]


def test_status_reads_a_node_with_its_own_token_and_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HA_ADMIN_TOKEN", "HA_ADMIN_TOKEN_FILE", "HALOG_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    tls = certified(tmp_path / "node.pem")
    tokens: list[str | None] = []
    page = json.dumps(MASTER | {"degraded_reason": ""}).encode()
    with admin_port(page, tokens=tokens) as plain, admin_port(page, tokens=tokens, tls=tls) as encrypted:
        (tmp_path / "namesrv.conf").write_text(f"listenPort={plain.rpartition(':')[2]}\n")  # any open port
        for number, (address, keys) in enumerate(
            (
                (plain, "adminToken=first"),
                (encrypted, "adminTokenFile=token\nadminTls=enforcing\ntls.server.certPath=node.pem"),
            )
        ):
            (tmp_path / f"broker-a-{number}.conf").write_text(f"adminListenPort={address.rpartition(':')[2]}\n{keys}\n")
        status = ["cluster", "status", "--dir", str(tmp_path), "--json"]
        assert run(status) == 69
        assert "adminTokenFile of broker-a-1: " in capsys.readouterr().err
        (tmp_path / "token").write_text("second\n")
        assert run(status) == 0
        assert set(json.loads(capsys.readouterr().out)) == {plain, encrypted}
    assert tokens == ["Bearer first", "Bearer second"]


def test_a_node_with_admin_tls_is_asked_with_it(tmp_path: Path) -> None:
    tls = certified(tmp_path / "node.pem")
    with admin_port(json.dumps(MASTER | {"degraded_reason": ""}).encode(), tls=tls) as address:
        keys = {"brokerName": str(MASTER["broker_name"]), "adminListenPort": address.rpartition(":")[2]}
        encrypted = {**keys, "adminTls": "enforcing", "tls.server.certPath": "node.pem"}
        wait_settled(tmp_path, [LocalNode("broker-a-0", encrypted)], 60)
        with pytest.raises(NodeError, match=r"tls\.server\.certPath .*/missing: "):
            wait_settled(tmp_path, [LocalNode("broker-a-0", {**encrypted, "tls.server.certPath": "missing"})], 60)


# ---- processes


_HOLD_LOCK = """
import sys
from pathlib import Path
from ha.cli.cluster.running import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_the_process_that_runs_a_cluster_is_the_one_that_holds_the_lock(tmp_path: Path) -> None:
    """What an earlier one left in the file does not count, nor does a process that has its ID now."""
    assert runner_of(tmp_path) is None
    (tmp_path / "cluster.lock").write_text(str(os.getpid()))
    assert runner_of(tmp_path) is None
    command = [sys.executable, "-c", _HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        (tmp_path / "cluster.lock").write_text(str(os.getpid()))
        found = runner_of(tmp_path)
        assert found is not None
        fields = Path(f"/proc/self/fdinfo/{found}").read_text().split()
        assert int(fields[fields.index("Pid:") + 1]) == holder.pid
        os.close(found)
        with pytest.raises(UsageError, match="already runs"), locked(tmp_path):
            pass
    assert runner_of(tmp_path) is None


_DETACH = """
import os, sys, time
from pathlib import Path
from ha.cli.cluster.background import fork_to_background
if not isinstance(fork_to_background(Path(sys.argv[1])), int):
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_start_in_the_background_ends_with_its_command(tmp_path: Path) -> None:
    """As with `timeout 60 ha cluster up --detach`, until it is ready."""
    with subprocess.Popen([sys.executable, "-c", _DETACH, str(tmp_path / "log")], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        background = int(command.stdout.readline())
        try:
            command.terminate()
            command.wait(60)
            assert not Path(f"/proc/{background}").exists()
        finally:
            with suppress(ProcessLookupError):
                os.kill(background, signal.SIGKILL)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    started = []

    def start(script: str) -> NodeProcess:
        process = NodeProcess("node", [sys.executable, "-S", "-c", script], tmp_path / "node.log")
        started.append(process)
        process.spawn()
        return process

    yield start
    for each in started:
        each.kill()


def test_what_a_process_says_of_its_start(process: Callable[..., NodeProcess]) -> None:
    ready = process("print('READY role=SLAVE remoting=h:1', flush=True); import time; time.sleep(600)")
    ready.wait_ready(60)
    assert ready.ready == {"role": "SLAVE", "remoting": "h:1"}
    ready.send_signal(signal.SIGTERM)
    with pytest.raises(NodeError, match="node stopped with exit code -15 instead of 0"):
        ready.wait_exit(60)
    failed = process("import sys; print('ha.slave: listenPort: taken', file=sys.stderr); sys.exit(69)")
    with pytest.raises(
        NodeError, match=r"did not start \(exit code 69\)\n    node: ha.slave: listenPort: taken"
    ) as caught:
        failed.wait_ready(60)
    assert (caught.value.exit_code, failed.last_error()) == (69, "listenPort: taken")
    silent = process("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    with pytest.raises(NodeError, match=r"not READY within 0.1 s"):
        silent.wait_ready(0.1)
