"""Twelve set-ups that are broken as people break them, of real processes: `ha doctor` names the cause of each.

blocked HA port                     test_a_firewall_before_the_ha_port
wrong brokerIP2                     test_an_ha_address_that_nobody_listens_on
wrong cluster name                  test_settings_that_contradict_one_another
two masters                         test_two_masters_of_one_name
full disk                           test_a_full_disk
clock ten minutes off               test_a_clock_that_is_ten_minutes_behind
other mappedFileSizeCommitLog       test_settings_that_contradict_one_another
slave from another cluster          test_a_slave_of_another_cluster
TLS on one side only                test_tls_on_one_side_of_the_ha_port
expired certificate                 test_a_certificate_that_has_ended
fall-behind limit below one batch   test_settings_that_contradict_one_another
old store format                    test_a_log_in_another_format
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ha.cli import run
from ha.cli.doctor import machine
from tests.cli.cluster import cluster, settings, status_of, wait_until
from tests.cli.doctoring import closed_port, diagnose, named, silent_port
from tests.scenarios.test_full_disk import Ballast, small_disk
from tests.tls.nodes import server
from tests.tls.pki import Pki

pytestmark = pytest.mark.processes


def the(result: Any, check: str) -> dict[str, str]:
    """The one finding of that name."""
    [found] = [finding for finding in result["findings"] if finding["check"] == check]
    assert found["weight"] == "error"
    assert isinstance(found, dict)
    return found


def test_a_sound_cluster_has_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(tmp_path) as nodes:
        nodes.master("brokerRole=SYNC_MASTER")
        nodes.slave()
        result = diagnose(capsys, *nodes.flags, "--store", str(tmp_path), "--write-test", code=0)
        assert named(result) == set()
        assert [broker["broker_id"] for broker in result["brokers"]] == [0, 1]
        assert all(broker["reach"]["outcome"] == "open" for broker in result["brokers"])
        assert all(broker["knows_config"] and broker["clock_ahead_s"] == 0 for broker in result["brokers"])
        assert result["brokers"][0]["ha_reach"]["outcome"] == "open"
        assert 0 < result["disk"]["written_bytes"] <= machine.WRITTEN_MAX
        assert not list(tmp_path.glob(".ha-doctor-*"))
        assert named(result, "warning") <= {"disk-space"}  # the machine that runs the tests may have little room
        assert run(["doctor", *nodes.flags]) == 0
        assert "Checked 1 name servers, 2 brokers, 2 admin ports." in capsys.readouterr().out
        # As it looks to who sees no admin port, as with RocketMQ's brokers.
        assert named(diagnose(capsys, "--servers", nodes.name_server, code=0)) == set()


def test_settings_that_contradict_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(tmp_path) as nodes:
        nodes.master(
            "brokerRole=SYNC_MASTER",
            "inSyncReplicas=4",
            "haMaxGapNotInSync=4096",
            "haSendHeartbeatInterval=30000",
            "haHousekeepingInterval=60000",
        )
        nodes.slave(
            "mappedFileSizeCommitLog=2097152",
            "brokerClusterName=Other",
            "messageDelayLevel=1s 2s",
        )
        result = diagnose(capsys, "--servers", nodes.name_server, code=1)
    assert named(result) >= {
        "setting-mappedFileSizeCommitLog",
        "setting-messageDelayLevel",
        "cluster-name",
        "ack-count",
        "fall-behind",
        "heartbeat",
    }
    assert all(finding["cure"] for finding in result["findings"])


def test_two_masters_of_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(tmp_path) as nodes:
        nodes.master()
        nodes.master(folder="other")
        results = [diagnose(capsys, *flags, code=1) for flags in (nodes.flags, ["--servers", nodes.name_server])]
    for result in results:
        [found] = [finding for finding in result["findings"] if finding["check"] == "two-masters"]
        assert all(address in found["what"] for address in nodes.remotings)


def test_an_ha_address_that_nobody_listens_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """brokerIP2 of another machine; and a master that waits for a slave which it hasn't got."""
    with cluster(tmp_path) as nodes:
        nodes.master("brokerIP2=127.0.0.77", "bindAddress=127.0.0.1", "brokerRole=SYNC_MASTER")
        result = diagnose(capsys, "--servers", nodes.name_server, code=1)
    assert named(result) == {"ha-port", "degraded"}
    [found] = [finding for finding in result["findings"] if finding["check"] == "ha-port"]
    assert "127.0.0.77" in found["what"]
    assert "brokerIP2" in found["cure"]


def test_a_slave_that_does_not_reach_its_master(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(tmp_path) as nodes, closed_port() as nowhere:
        nodes.master()
        nodes.ha = nowhere
        nodes.slave()
        wait_until(lambda: status_of(nodes.admins[1])["ha_client"]["condition"] == "connect_failed")
        result = diagnose(capsys, *nodes.flags, code=1)
    [found] = [finding for finding in result["findings"] if finding["check"] == "slave-link"]
    assert nowhere in found["what"]
    assert "haMasterAddress" in found["cure"]


def test_a_firewall_before_the_ha_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the master tells slaves takes no connection, and refuses none."""
    with cluster(tmp_path) as nodes, silent_port() as silent:
        port = silent.rpartition(":")[2]
        nodes.master("bindAddress=127.0.0.2", "brokerIP2=127.0.0.1", f"haListenPort={port}")
        nodes.start("ha.slave", *settings(f"namesrvAddr={nodes.name_server}"))
        result = diagnose(capsys, *nodes.flags, "--timeout", "1", code=1)
    found = the(result, "ha-port")
    assert silent in found["what"]
    assert "a firewall drops packets" in found["what"]
    assert "open this port in firewalls" in found["cure"]


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk") as disk, cluster(tmp_path) as nodes:
        nodes.master(f"storePathRootDir={disk / 'store'}")
        Ballast(disk).leave(200_000)
        result = diagnose(capsys, *nodes.flags, "--store", str(disk / "store"), code=1)
    assert "it stores no more messages" in the(result, "disk-space")["what"]
    assert "free space" in the(result, "store-space")["cure"]


def test_a_clock_that_is_ten_minutes_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shifted = tmp_path / "shifted"
    shifted.mkdir()
    (shifted / "sitecustomize.py").write_text(
        "import time\n"
        "seconds, nanoseconds = time.time, time.time_ns\n"
        "time.time = lambda: seconds() - 600\n"
        "time.time_ns = lambda: nanoseconds() - 600_000_000_000\n"
    )
    with cluster(tmp_path) as nodes:
        nodes.master(environment={"PYTHONPATH": str(shifted)})
        nodes.slave()
        for flags in (nodes.flags, ["--servers", nodes.name_server]):
            result = diagnose(capsys, *flags, code=1)
            assert named(result) == {"clock"}
            assert the(result, "clock")["what"] == "its clock is 10 min behind the others'"
            assert nodes.remotings[0] in the(result, "clock")["where"]


def test_a_slave_of_another_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its haMasterAddress was copied from elsewhere; the logs are not the same."""
    with cluster(tmp_path) as nodes:
        nodes.master("brokerClusterName=West", folder="west")
        nodes.slave("brokerClusterName=West", folder="west")
        assert run(["produce", "t", "--body", "of the west", "--servers", nodes.name_server]) == 0
        ends = [lambda admin=admin: status_of(admin)["commitlog"]["max_offset"] for admin in nodes.admins]
        wait_until(lambda: ends[0]() == ends[1]())
        assert nodes.processes[1].stop() == 0
        with cluster(tmp_path) as other:
            other.master("brokerClusterName=East", folder="east")
            assert run(["produce", "t", "--body", "of the east", "--servers", other.name_server]) == 0
            other.slave("brokerClusterName=West", folder="west")
            wait_until(lambda: status_of(other.admins[1])["ha_client"]["condition"] == "diverged")
            capsys.readouterr()
            result = diagnose(capsys, *other.flags, code=1)
    assert "East, West" in the(result, "cluster-name")["what"]
    assert "the logs differ" in the(result, "slave-link")["what"]
    assert "its log has a different history: correct haMasterAddress" in the(result, "slave-link")["cure"]


def test_tls_on_one_side_of_the_ha_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(tmp_path) as nodes:
        nodes.master(*server(Pki(tmp_path)), "haTls=enforcing")
        nodes.slave()
        for flags in (nodes.flags, ["--servers", nodes.name_server]):
            found = the(diagnose(capsys, *flags, code=1), "ha-tls")
            assert nodes.remotings[1] in found["where"]
            assert "its haTls is disabled, but its master's is enforcing" in found["what"]


def test_a_certificate_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = Pki(tmp_path).issue("server", valid_for=timedelta(days=-1))
    with cluster(tmp_path) as nodes:
        nodes.master(f"tls.server.certPath={certificate}", f"tls.server.keyPath={key}")
        result = diagnose(capsys, *nodes.flags, code=1)
    assert named(result) == {"certificate"}
    assert f"{certificate} expired" in the(result, "certificate")["what"]


def test_a_log_in_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The node does not start on it, and says why (tests/store/test_recovery.py)."""
    with cluster(tmp_path) as nodes:
        nodes.master()
        ours = tmp_path / "data" / "master"
        assert list(machine.examine_format(ours)) == list(machine.examine_format(tmp_path)) == []
        log = tmp_path / "old" / "commitlog"
        log.mkdir(parents=True)
        (log / f"{0:020d}").write_bytes(b"\0\0\1\0\xaa\xbb\xcc\xdd" + b"a record of long ago" * 12)
        result = diagnose(capsys, *nodes.flags, "--store", str(tmp_path / "old"), code=1)
    assert "magic aabbccdd, which is not a record of RocketMQ 4 or 5" in the(result, "store-format")["what"]
