"""`ha doctor`: what it asks, and what it makes of facts. Broken set-ups of real processes: test_doctor_setups.py."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ha.cli import run
from ha.cli.admin_pages import NodeStatus, Page, difference
from ha.cli.doctor import machine
from ha.cli.doctor.checks import examine
from ha.cli.doctor.findings import Finding, Weight
from ha.cli.doctor.topics import examine_topics
from ha.cli.nodes import BrokerFacts, Facts, Outcome, Reach, clock_ahead_s, properties, reach
from ha.protocol.bodies import HAConnectionRuntimeInfo, HARuntimeInfo
from tests.cli.cluster import cluster
from tests.cli.doctoring import closed_port, diagnose, named, silent_port
from tests.cli.test_status import admin_port


def checks(found: list[Finding], weight: Weight = Weight.ERROR) -> set[str]:
    return {finding.check for finding in found if finding.weight is weight}


@pytest.mark.processes
def test_a_node_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel takes its connections; it is waited for no longer than --timeout says."""
    with cluster(tmp_path) as nodes:
        nodes.master()
        nodes.slave()
        nodes.processes[1].signal(signal.SIGSTOP)
        result = diagnose(capsys, *nodes.flags, "--timeout", "0.5", code=1)
    assert named(result) == {"remoting-answer", "admin-port"}


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with closed_port() as nowhere:
        result = diagnose(capsys, "--servers", nowhere, "--admin", nowhere, code=69)
    assert named(result) == {"name-server-port", "admin-port"}


def test_something_else_on_the_name_server_s_port(capsys: pytest.CaptureFixture[str]) -> None:
    with closed_port() as nowhere, admin_port(b"{}") as http:
        result = diagnose(capsys, "--servers", http, "--admin", nowhere, "--timeout", "1", code=1)
    assert named(result) == {"name-server-answer", "admin-port"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--write-test"], "--write-test requires --store"),
        (["--timeout", "0"], "--timeout must be greater than 0"),
        (["--servers", "here"], "host:port"),
        (["--admin", "here"], "host:port"),
    ],
)
def test_usage_errors(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


# ---- ports


async def test_refusal_and_silence_are_told_apart() -> None:
    with closed_port() as closed, silent_port() as silent, socket.create_server(("127.0.0.1", 0)) as server:
        assert (await reach(closed, 5)).outcome is Outcome.REFUSED
        assert (await reach(silent, 0.2)).outcome is Outcome.SILENT
        assert (await reach(f"127.0.0.1:{server.getsockname()[1]}", 5)).outcome is Outcome.OPEN
    assert (await reach("no.such.host.invalid:1", 5)).outcome is Outcome.UNREACHABLE
    assert (await reach("nonsense", 5)).outcome is Outcome.UNREACHABLE


@pytest.mark.parametrize("address", ["broker-a", f"{'ü' * 80}:10911", "10.0.0..1:10911", "a\0b:10911"])
async def test_an_address_that_is_none_is_a_finding(address: str) -> None:
    assert (await reach(address, 1.0)).outcome is Outcome.UNREACHABLE


def test_an_admin_port_that_says_nothing_does_not_hold_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with closed_port() as nowhere, socket.create_server(("127.0.0.1", 0)) as server:
        mute = f"127.0.0.1:{server.getsockname()[1]}"
        result = diagnose(capsys, "--servers", nowhere, "--admin", mute, "--timeout", "0.3", code=69)
    [found] = [finding for finding in result["findings"] if finding["check"] == "admin-port"]
    assert found["what"] == "no response within 0.3 s"


# ---- facts


def broker(broker_id: int = 0, **changes: Any) -> BrokerFacts:
    host = f"10.0.0.{broker_id + 1}"
    role = "SLAVE" if broker_id else "SYNC_MASTER"
    given: dict[str, Any] = {
        "cluster": "C",
        "name": "b",
        "broker_id": broker_id,
        "address": f"{host}:10911",
        "reach": Reach(f"{host}:10911", Outcome.OPEN),
        "figures": {"brokerVersionDesc": "V5_3_3", "commitLogDiskRatio": "0.5"},
        "config": {"brokerRole": role, "brokerClusterName": "C"},
        "clock_ahead_s": 0.0,
        "replication": HARuntimeInfo(master=not broker_id, ha_connection_info=[HAConnectionRuntimeInfo()]),
        **changes,
    }
    if not broker_id:
        given.setdefault("ha_address", f"{host}:10912")
        given.setdefault("ha_reach", Reach(f"{host}:10912", Outcome.OPEN))
    else:
        given["replication"].ha_client_runtime_info.master_addr = "10.0.0.1:10912"
    return BrokerFacts(**given)


SYNC_MASTER = {"brokerRole": "SYNC_MASTER"}
ALL_IN_SYNC = {"inSyncReplicas": "1", "allAckInSyncStateSet": "true"}
CONTROLLER_OFF = {"enableControllerMode": "false"}
"""RocketMQ 5.x follows allAckInSyncStateSet in controller mode only."""


def facts(*brokers: BrokerFacts, **changes: Any) -> Facts:
    return Facts(name_servers=[Reach("10.0.0.9:9876", Outcome.OPEN)], brokers=list(brokers), **changes)


def test_sound_facts_have_nothing_wrong() -> None:
    assert examine(facts(broker(), broker(1))) == []


def group(name: str, *topics: str, **changes: Any) -> BrokerFacts:
    return broker(name=name, topics=frozenset(topics), **changes)


def test_a_group_without_topics_is_not_used() -> None:
    groups = group("a", "orders", "news"), group("b", "orders"), group("c"), group("d", cluster="D")
    [only] = examine_topics(facts(*groups))
    assert only.check == "no-topics"
    assert (only.weight, only.where, only.cure) == (Weight.WARNING, "c:0 (10.0.0.1:10911)", "ha broker join c")
    assert "none of the 2 topics" in only.what


def test_a_drained_group_is_a_note() -> None:
    [only] = examine_topics(facts(group("a", "orders"), group("b", is_drained=True)))
    assert (only.check, only.weight, only.where) == ("drained", Weight.NOTE, "b:0 (10.0.0.1:10911)")


def test_a_firewall_is_told_from_a_wrong_port() -> None:
    silent = broker(ha_reach=Reach("10.0.0.1:10912", Outcome.SILENT, "no answer within 3 s"))
    [found] = examine(facts(silent, broker(1)))
    assert found.check == "ha-port"
    assert "a firewall drops packets" in found.what
    refused = broker(ha_reach=Reach("10.0.0.1:10912", Outcome.REFUSED))
    [found] = examine(facts(refused, broker(1)))
    assert "nothing listens" in found.what


@pytest.mark.parametrize(
    ("brokers", "check", "weight"),
    [
        ([broker(address="127.0.0.1:10911"), broker(1)], "advertised-loopback", Weight.ERROR),
        ([broker(address="0.0.0.0:10911"), broker(1)], "advertised-wildcard", Weight.ERROR),
        ([broker(ha_address="127.0.0.1:10912"), broker(1)], "ha-loopback", Weight.ERROR),
        ([broker(), broker(1, reach=Reach("10.0.0.2:10911", Outcome.REFUSED))], "remoting-port", Weight.ERROR),
        ([broker(error="no answer in 3 s"), broker(1)], "remoting-answer", Weight.ERROR),
        ([broker(ha_reach=None, config=None), broker(1)], "ha-port-unknown", Weight.NOTE),
        ([broker(1)], "no-master", Weight.ERROR),
        ([broker(replication=HARuntimeInfo(master=True)), broker(1)], "no-slave-connected", Weight.ERROR),
        ([broker(config={"brokerRole": "SLAVE"}), broker(1)], "role", Weight.ERROR),
        ([broker(), broker(1), broker(1, address="10.0.0.3:10911")], "same-id", Weight.ERROR),
        ([broker(config=SYNC_MASTER | {"minInSyncReplicas": "3"}), broker(1)], "ack-minimum", Weight.ERROR),
        ([broker(config={"inSyncReplicas": "1", "minInSyncReplicas": "2"}), broker(1)], "ack-order", Weight.ERROR),
        ([broker(config={"brokerRole": "ASYNC_MASTER"}), broker(1)], "async", Weight.NOTE),
        ([broker(config={"brokerRole": "SYNC_MASTER", "inSyncReplicas": "1"}), broker(1)], "async", Weight.NOTE),
        ([broker(config=SYNC_MASTER | {"minInSyncReplicas": "1"}), broker(1)], "async", Weight.NOTE),
        ([broker(config=SYNC_MASTER | ALL_IN_SYNC | CONTROLLER_OFF), broker(1)], "async", Weight.NOTE),
        ([broker()], "sync-alone", Weight.ERROR),
        ([broker(), broker(1, clock_ahead_s=600.0)], "clock", Weight.ERROR),
        ([broker(), broker(1, clock_ahead_s=-10.0)], "clock", Weight.WARNING),
        ([broker(figures={"commitLogDiskRatio": "0.97"}), broker(1)], "disk-space", Weight.ERROR),
        ([broker(figures={"commitLogDiskRatio": "0.8"}), broker(1)], "disk-space", Weight.WARNING),
        ([broker(figures={"dispatchBehindBytes": str(1 << 30)}), broker(1)], "dispatch", Weight.WARNING),
        ([broker(), broker(1, figures={"brokerVersionDesc": "V4_9_7"})], "versions", Weight.WARNING),
        ([], "no-broker", Weight.ERROR),
    ],
)  # fmt: skip
def test_each_has_its_name_and_a_cure(brokers: list[BrokerFacts], check: str, weight: Weight) -> None:
    found = examine(facts(*brokers))
    assert checks(found, weight) == {check}
    assert all(finding.cure and finding.where and finding.what for finding in found)


@pytest.mark.parametrize(
    "brokers",
    [
        [broker(config=SYNC_MASTER | ALL_IN_SYNC)],  # a master alone answers PUT_OK
        [broker(config=SYNC_MASTER | ALL_IN_SYNC), broker(1)],  # sends wait for the slave while it is in sync
        [broker(config=SYNC_MASTER | ALL_IN_SYNC | {"inSyncReplicas": "3"}), broker(1)],
        [broker(config=SYNC_MASTER | {"minInSyncReplicas": "1"})],
        [broker(config=SYNC_MASTER | {"etcdEndpoints": "http://10.0.0.9:2379"})],
    ],
)
def test_rules_that_are_met_are_no_findings_about_acknowledgements(brokers: list[BrokerFacts]) -> None:
    found = examine(facts(*brokers))
    assert checks(found).isdisjoint({"sync-alone", "async", "ack-count", "ack-minimum", "ack-order"})


def test_the_clock_that_is_wrong_is_this_machine_s() -> None:
    found = examine(facts(broker(clock_ahead_s=600.0), broker(1, clock_ahead_s=601.0)))
    assert [(finding.check, finding.where) for finding in found] == [("clock", "this machine")]


def page(**changes: Any) -> Page:
    told = {"role": "SLAVE", "broker_name": "b", "broker_id": 1, "is_ready": True, "cluster_name": "C", **changes}
    told.setdefault("addresses", {"remoting": "10.0.0.2:10911"})
    return Page(b"", msgspec.convert(told, NodeStatus), 0.0)


@pytest.mark.parametrize(
    ("told", "check", "cure"),
    [
        (
            {"degraded_reason": "messages are stored on one node only: no slave is connected"},
            "degraded",
            "start a slave",
        ),
        (
            {"ha_client": {"state": "ready", "condition": "malformed_frame", "master_address": "10.0.0.1:10912"}},
            "slave-link",
            "mappedFileSizeCommitLog",
        ),
        (
            {"ha_client": {"state": "ready", "condition": "connect_failed", "master_address": "10.0.0.1:10912"}},
            "slave-link",
            "a firewall between the two nodes",
        ),
        (
            {"ha_client": {"state": "ready", "condition": "connection_lost", "detail": "TLS handshake failed: x"}},
            "slave-link",
            "haTls",
        ),
        ({"ha_client": {"state": "ready", "condition": "diverged"}}, "slave-link", "a different history"),
        ({"ha_client": {"state": "ready", "condition": "diverged"}}, "slave-link", "compare the logs and keep one"),
        (
            {"ha_client": {"state": "ready", "condition": "master_behind"}},
            "slave-link",
            "compare the logs and keep one",
        ),
        ({"ha_client": {"state": "ready", "condition": "out_of_range"}}, "slave-link", "is damaged or shorter, keep"),
        ({"ha": {"slaves": [{"identity": "x", "state": "out_of_range"}]}}, "slave-out-of-range", "haMasterAddress"),
        ({"is_ready": False, "not_ready_reason": "y"}, "not-ready", "findings"),
        ({"name_servers": [{"address": "h:1", "error": "z"}]}, "registration", "namesrvAddr"),
        ({"damage": {"log": {"open_count": 1, "open_bytes": 9}}}, "damage", "healFrom"),
        ({"tls": {"credentials": {"server": {"expires_at_ms": 1, "certificate": "c"}}}}, "certificate", "renew"),
        ({"tls": {"credentials": {"server": {"error": "no such file"}}}}, "certificate", "PEM"),
        ({"cluster_name": "Other"}, "cluster-name", "brokerClusterName"),
        ({"broker_id": 0}, "two-masters", "ha log diff"),
        (
            {"name_servers": [{"is_registered": True, "other_address": "10.0.0.9:10911"}]},
            "same-id",
            "a different brokerId",
        ),
        ({"member": {"state": "following", "id_taken_by": "10.0.0.9:10911"}}, "same-id", "a different brokerId"),
    ],
)
def test_what_admin_ports_tell(told: dict[str, Any], check: str, cure: str) -> None:
    found = examine(facts(broker(), broker(1), admins={"a": page(**told)}))
    assert checks(found) == {check}
    assert cure in found[0].cure


def test_an_admin_port_that_could_not_be_read_is_a_note() -> None:
    """What only it shows was not checked."""
    why = "requires an adminToken: use --token-file or HALOG_ADMIN_TOKEN"
    silent = broker(figures={"adminUrl": "http://10.0.0.1:10913"})
    [found] = examine(facts(silent, broker(1), admins={"10.0.0.1:10913": why}))
    assert (found.check, found.weight, found.where) == ("admin-port", Weight.NOTE, "b:0 (10.0.0.1:10911)")
    assert found.what.endswith(why)
    assert "--token-file" in found.cure


@pytest.mark.parametrize(("id_", "check"), [(0, "two-masters"), (1, "same-id")])
def test_what_name_servers_tell_of_brokers_that_replace_each_other(id_: int, check: str) -> None:
    """Only one of them is in their tables at a time."""
    known = facts(broker(), broker(1), duplicates={("b", id_): {"10.0.0.8:10911", "10.0.0.9:10911"}})
    [found] = examine(known)
    assert found.check == check
    assert "10.0.0.8:10911, 10.0.0.9:10911" in found.what


def test_clocks_by_what_brokers_and_http_say() -> None:
    figures = {"bootTimestamp": "1000000", "runtime": "[ 0 days, 1 hours, 2 minutes, 3 seconds ]"}
    now_s = 1000 + 3723
    assert clock_ahead_s(figures, now_s, now_s + 0.1) == 0
    assert clock_ahead_s(figures, now_s - 600, now_s - 599.9) == pytest.approx(599.9)
    assert clock_ahead_s(figures, now_s + 600, now_s + 600.1) == pytest.approx(-599)
    assert clock_ahead_s({}, 0, 1) is None
    for digits in (400, 5000):  # more than a float and than int() take
        assert clock_ahead_s(figures | {"bootTimestamp": "9" * digits}, 0, 1) is None
        assert (
            clock_ahead_s(figures | {"runtime": f"[ {'9' * digits} days, 0 hours, 0 minutes, 1 seconds ]"}, 0, 1)
            is None
        )
        told = broker(figures={"dispatchBehindBytes": "9" * digits, "commitLogDiskRatio": "x"})
        assert not [found for found in examine(facts(told)) if found.check == "dispatch"]
    assert difference(10, 11, 10.5, 12) == 0


def test_configurations_are_read_as_java_writes_them() -> None:
    assert properties(b"#x\nbrokerIP1=10.0.0.1\nnamesrvAddr=a\\:1;b\\:2\nempty=\n") == {
        "brokerIP1": "10.0.0.1",
        "namesrvAddr": "a:1;b:2",
        "empty": "",
    }


# ---- this machine


def test_limits_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    (folder / "fd").mkdir(parents=True)
    limits = folder / "limits"
    limits.write_text("Limit  Soft Limit  Hard Limit  Units\nMax open files            1024    4096    files\n")
    [found] = machine.examine_process(7, "b:0", tmp_path)
    assert (found.check, found.weight) == ("file-limit", Weight.WARNING)
    for number in range(900):
        (folder / "fd" / str(number)).touch()
    [found] = machine.examine_process(7, "b:0", tmp_path)
    assert found.weight is Weight.ERROR
    limits.write_text("Max open files            655350    655350    files\n")
    assert list(machine.examine_process(7, "b:0", tmp_path)) == []
    assert list(machine.examine_process(8, "b:0", tmp_path)) == []


def test_the_limit_of_files_of_this_shell() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        [found] = machine.examine_own_limit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (found.check, found.weight) == ("file-limit-here", Weight.NOTE)
    assert "1,000 file descriptors" in found.what


def test_a_disk_without_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = type("Files", (), {"f_files": 1000, "f_favail": 49})
    monkeypatch.setattr("os.statvfs", lambda path: files)
    usage = type("Usage", (), {"total": 100, "used": 4, "free": 96})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert [found.check for found in machine.examine_directory(tmp_path)] == ["store-inodes"]


def test_a_full_and_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"total": 100, "used": 96, "free": 4})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert [(found.check, found.weight) for found in machine.examine_directory(tmp_path)] == [
        ("store-space", Weight.ERROR)
    ]
    clock = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    figures, found = machine.examine_speed(tmp_path)
    assert figures is not None
    assert {finding.check for finding in found} == {"store-speed", "store-sync"}
    assert figures["written_bytes"] <= 3 << 20  # the time was up
    assert os.listdir(tmp_path) == []


def test_a_disk_that_takes_no_more_data_is_one_finding_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closed_port() as nowhere, admin_port(b"{}") as address:
        words = ["--servers", nowhere, "--admin", address, "--store", str(tmp_path), "--write-test"]
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            result = diagnose(capsys, *words, code=69)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert named(result) == {"name-server-port", "admin-port", "store-write"}
    [found] = [finding for finding in result["findings"] if finding["check"] == "store-write"]
    assert found["what"] == "it can't be written to: File too large"
    assert result["disk"] is None


def test_a_store_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "commitlog").symlink_to("commitlog")
    with closed_port() as nowhere:
        result = diagnose(capsys, "--servers", nowhere, "--admin", nowhere, "--store", str(tmp_path), code=69)
    [found] = [finding for finding in result["findings"] if finding["check"] == "store-read"]
    assert found["what"] == "its log can't be read: Too many levels of symbolic links"


def test_ctrl_c_ends_it_while_an_admin_port_is_silent() -> None:
    with closed_port() as nowhere, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = ["doctor", "--servers", nowhere, "--admin", address, "--timeout", "600"]
        with subprocess.Popen([sys.executable, "-m", "ha.cli", *words]) as process:
            try:
                connection, _ = silent.accept()
                with connection:
                    connection.recv(1)
                    process.send_signal(signal.SIGINT)
                    assert process.wait(60) == 130
            finally:
                process.kill()


def test_the_whole_command_against_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    body = {"role": "SYNC_MASTER", "broker_name": "b\x1b[2J", "broker_id": 0, "is_ready": False}
    body["not_ready_reason"] = "\x1b]0;x\x07"
    with closed_port() as nowhere, admin_port(json.dumps(body).encode()) as address:
        assert run(["doctor", "--servers", nowhere, "--admin", address]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "it is not ready" in out
    assert "[not-ready]" in out
